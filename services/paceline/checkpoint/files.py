"""What can be known of a checkpoint without loading its weights. Raises ConfigError in one clear sentence.

Two readers of the same facts. ``read_checkpoint`` takes them from the JSON files where those say everything, so
that a process which runs no model starts without torch and transformers; ``inspect_checkpoint`` asks transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.quantization import weight_bytes_per_parameter
from paceline.errors import ConfigError
from paceline.types import PAGE_SIZE

_DEFAULT_MAX_MODEL_LEN = 2048
_PLAIN = ("F64", "F32", "F16", "BF16")
"""Number formats of safetensors that are cast to the dtype that a model runs with."""
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model that exists."""

    path: str
    max_model_len: int
    """Longest context that it was trained for, in tokens."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the output layer: token ids are below it."""
    quantization: Mapping[str, Any] | None = None
    """The ``quantization_config`` of weights that are quantized in the files."""


def require_path(path: str) -> None:
    """Raises ConfigError if ``path`` looks like a local directory and is none, or holds no config.json."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{path!r} holds no config.json: a directory with a transformers checkpoint is needed")
    elif directory.exists():
        raise ConfigError(f"{path!r} is a file: the directory of a transformers checkpoint is needed")
    elif path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise ConfigError(f"model path {path!r} does not exist")


def read_json(path: str, name: str) -> dict[str, Any]:
    """A JSON object of a checkpoint directory; {} if ``path`` is none, or the file is missing or malformed."""
    try:
        value = json.loads((Path(path).expanduser() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_checkpoint(path: str) -> Checkpoint:
    """The facts from the files alone, else what ``inspect_checkpoint`` says.

    The architecture is judged by its name; whether transformers knows it shows when the model is loaded.
    """
    require_path(path)
    config = read_json(path, "config.json")
    architectures = config.get("architectures")
    max_model_len, vocab_size = config.get("max_position_embeddings"), config.get("vocab_size")
    eos = read_json(path, "generation_config.json").get("eos_token_id")
    if (
        isinstance(architectures, list)
        and any(str(name).endswith(_CAUSAL_SUFFIXES) for name in architectures)
        and isinstance(max_model_len, int)
        and isinstance(vocab_size, int)
        and (eos is not None or "eos_token_id" in config)
        and "text_config" not in config
    ):
        ids = _as_ids(config["eos_token_id"] if eos is None else eos)
        return Checkpoint(path, max_model_len, ids, vocab_size, _quantization(config))
    return inspect_checkpoint(path)


def inspect_checkpoint(path: str) -> Checkpoint:
    """Reads configuration and generation configuration. Raises ConfigError if it is no causal LM."""
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    require_path(path)
    location = Path(path).expanduser()
    source = str(location) if location.is_dir() else path
    try:
        config = AutoConfig.from_pretrained(source)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {path!r} could not be resolved: {reason}") from error
    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known.update([names] if isinstance(names, str) else names)
    architectures = list(getattr(config, "architectures", None) or [])
    causal = (
        any(name in known for name in architectures)
        if architectures
        else config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if not causal:
        raise ConfigError(
            f"model {path!r} is no causal language model: its architecture is "
            f"{', '.join(architectures) or config.model_type}"
        )
    text_config = config.get_text_config()
    try:
        eos = GenerationConfig.from_pretrained(source).eos_token_id
    except Exception:  # optional file
        eos = None
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    return Checkpoint(
        path=path,
        max_model_len=int(getattr(text_config, "max_position_embeddings", None) or _DEFAULT_MAX_MODEL_LEN),
        eos_token_ids=_as_ids(eos),
        vocab_size=int(text_config.vocab_size),
        quantization=_quantization(config.to_dict()),
    )


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of the model, else of the text model within it."""
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("quantization_config"), Mapping):
            found: Mapping[str, Any] = part["quantization_config"]
            return found
    return None


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(i) for i in value)


# -- sizes -------------------------------------------------------------------------------------------------


def read_facts(folder: Path, dtype: str = "auto", quantization: str | None = None) -> ModelSize:
    """Sizes from the headers of the weight files and the configuration, and of how the weights will run.

    Raises:
        ConfigError: a file is missing, cut short or not to be read.
    """
    try:
        num_parameters, num_whole, num_stored, stored_bytes = _count_parameters(folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or str(folder)!r} cannot be read: {error.strerror or error}") from error
    config = read_json(str(folder), "config.json")
    item_bytes = 4 if dtype == "float32" else 2
    facts = facts_of(config, num_parameters, item_bytes, num_whole)
    saved = num_stored * item_bytes - stored_bytes
    if quantization is not None:  # linear layers only
        tables = facts.vocab_size * facts.hidden_size * (1 if config.get("tie_word_embeddings") else 2)
        rounded = max(0, num_parameters - num_whole - tables)
        saved += rounded * (item_bytes - weight_bytes_per_parameter(quantization, dtype))
    return replace(facts, saved_bytes=saved)


def facts_of(config: dict[str, Any], num_parameters: int, item_bytes: int, num_whole: int = 0) -> ModelSize:
    """Sizes by the configuration of a checkpoint, and by what is known of its weights."""
    text = config.get("text_config") or config
    layers, hidden = _first(text, "num_hidden_layers", "n_layer"), _first(text, "hidden_size", "n_embd")
    return ModelSize(
        num_parameters=num_parameters,
        kv_values=_kv_values(text, layers, hidden),
        item_bytes=item_bytes,
        num_layers=layers or 1,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(text, hidden),
        vocab_size=_first(text, "vocab_size"),
        num_whole=num_whole,
        num_kv_heads=_kv_heads(text) or 1,
    )


def _count_parameters(folder: Path) -> tuple[int, int, int, int]:
    """Numbers in all weight files, those of them that are in no matrix, and numbers and bytes of those that are
    stored in other ways than as plain floats: they run as they are stored."""
    index = read_json(str(folder), "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        counts = [_safetensors_numbers(folder / str(name)) for name in sorted(set(index.values()))]
        every, whole, stored, stored_bytes = map(sum, zip(*counts, strict=True))
        return every, whole, stored, stored_bytes
    if (folder / "model.safetensors").exists():
        return _safetensors_numbers(folder / "model.safetensors")
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if not pickled:
        raise ConfigError(f"{str(folder)!r} holds no weights: model.safetensors or its index is needed")
    return sum(path.stat().st_size for path in pickled) // 4, 0, 0, 0  # at most four bytes each


def _safetensors_numbers(path: Path) -> tuple[int, int, int, int]:
    """The same of a file: eight bytes of header length, the header in JSON, the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end: int = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        shapes = [entry["shape"] for entry in tensors.values()]
        stored = [entry for entry in tensors.values() if entry["dtype"] not in _PLAIN]
        counts = (
            sum(map(math.prod, shapes)),
            sum(math.prod(shape) for shape in shapes if len(shape) < 2),
            sum(math.prod(entry["shape"]) for entry in stored),
            sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in stored),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is no safetensors file, or cut short") from error
    if 8 + length + end > size:
        raise ConfigError(f"{str(path)!r} is cut short: it has {size} bytes of {8 + length + end}")
    return counts


def _first(config: dict[str, Any], *names: str) -> int:
    """The number under the first of the names that has one; 0 if none has."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value), 0)


def _kv_values(config: dict[str, Any], layers: int, hidden: int) -> int | None:
    """Numbers that all attention layers keep per token; None for an attention that keeps something else."""
    heads = _first(config, "num_attention_heads", "n_head")
    if not (layers and heads and hidden) or "kv_lora_rank" in config:
        return None
    return 2 * layers * _kv_heads(config) * (_first(config, "head_dim") or hidden // heads)


def _kv_heads(config: dict[str, Any]) -> int:
    return _first(config, "num_key_value_heads") or _first(config, "num_attention_heads", "n_head")


def _intermediate_size(config: dict[str, Any], hidden: int) -> int:
    """Neurons of the MLP that a token passes, experts together."""
    dense = _first(config, "intermediate_size", "n_inner") or (4 * hidden if "n_embd" in config else 0)
    return max(dense, _first(config, "moe_intermediate_size") * _first(config, "num_experts_per_tok"))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the files of a checkpoint say about the memory that it needs."""

    num_parameters: int
    kv_values: int | None
    """Numbers that all layers keep per token, keys and values. None: not to be told from the configuration."""
    item_bytes: int
    """Bytes per number as it will run; dtype auto counts as bfloat16, the smallest."""
    num_layers: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    """Neurons of one MLP that a token passes; of all its experts together. 0: unknown."""
    vocab_size: int = 0
    """Rows of the output layer."""
    num_whole: int = 0
    """Of the parameters those that every rank holds: norms, and whatever else is no matrix."""
    num_kv_heads: int = 1
    """Attention heads that keep keys and values, in one layer."""
    saved_bytes: int = 0
    """By how much quantized weights are smaller than ``item_bytes`` for each number."""

    def of_rank(self, tensor_parallel_size: int) -> ModelSize:
        """What one of ``tensor_parallel_size`` ranks holds: its share of every matrix, and at least one KV head.
        Logits are put together on each."""
        size = tensor_parallel_size
        kv_heads = max(1, -(-self.num_kv_heads // size))
        return replace(
            self,
            num_parameters=self.num_whole + -(-(self.num_parameters - self.num_whole) // size),
            kv_values=self.kv_values and self.kv_values // self.num_kv_heads * kv_heads,
            num_kv_heads=kv_heads,
            intermediate_size=-(-self.intermediate_size // size),
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they will run."""
        return self.num_parameters * self.item_bytes - self.saved_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page; 0 if unknown."""
        return PAGE_SIZE * (self.kv_values or 0) * self.item_bytes

    def kv_bytes(self, num_pages: int) -> int:
        """Bytes of as many KV pages and the scratch page; 0 if unknown."""
        return (num_pages + 1) * self.page_bytes


def gib(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def embedded_paths() -> tuple[Path, Path]:
    """Directories of the embedded target and draft."""
    from paceline.embedded import DRAFT_DIR, TARGET_DIR

    return TARGET_DIR, DRAFT_DIR
