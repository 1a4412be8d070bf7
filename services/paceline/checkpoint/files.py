"""A checkpoint, opened once: everything known of a model without loading its weights. Free of torch.

Reads the JSON files where they are sufficient, so that a process without a model starts without transformers.
Otherwise asks transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from paceline.checkpoint.folder import (
    folder_of,
    local_folder,
    read_json,
    read_optional_json,
    require_known,
    require_no_code,
    require_path,
    text_config,
)
from paceline.checkpoint.generation import not_honored, sampling_defaults
from paceline.checkpoint.gguf.described import gguf_weights
from paceline.checkpoint.gguf.weights import GgufWeights
from paceline.checkpoint.hub import fetch_gguf, require_fetchable
from paceline.checkpoint.packing import packing_of
from paceline.checkpoint.size import ModelSize, WeightCounts, count_weights, has_weights, model_size
from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from paceline.checkpoint.translated import LAYOUTS
from paceline.config.loading import place_of
from paceline.errors import ConfigError, reason_of
from paceline.types import SamplingParams

log = logging.getLogger(__name__)

_DEFAULT_MAX_MODEL_LEN = 2048
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True)
class Checkpoint:
    """A causal language model that exists. Open it once, and hand it on: it is a value, and picklable."""

    path: str
    """Directory of the checkpoint, or the id that transformers resolves."""
    max_model_len: int
    """Longest context that it was trained for, in tokens."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the output layer: token ids are below it."""
    quantization: Mapping[str, Any] | None = None
    """The ``quantization_config`` of weights that are quantized in the files."""
    folder: Path | None = None
    """Directory on this machine; None: the checkpoint must be fetched."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Content of config.json."""
    trust_remote_code: bool = False
    """True if Python code that comes with it may run."""
    generation_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Content of generation_config.json; {} if there is none."""
    counted: WeightCounts | None = None
    """Weights by the configuration, for a checkpoint without weight files; None: the headers of its files count."""

    @classmethod
    def open(cls, source: str, trust_remote_code: bool = False) -> Self:
        """Opens the checkpoint in a directory or GGUF file, or of an id, whose configuration is fetched if it is not
        here.

        The architecture is judged by its name; whether transformers knows it shows when the model is loaded.

        Raises:
            ConfigError: there is none, it is not a causal language model, or it needs code that is not trusted.
        """
        require_path(source)
        fetch_gguf(source)
        folder = folder_of(source)
        found = None if folder is None else cls._read(folder, source, trust_remote_code)
        return replace(found or cls.ask_transformers(source, trust_remote_code), trust_remote_code=trust_remote_code)

    @classmethod
    def find(cls, source: str, trust_remote_code: bool = False) -> Self | None:
        """Opens a checkpoint that is on this machine; None for an id that would have to be fetched.

        Raises:
            ConfigError: ``source`` is neither a directory nor an id, or is not a causal language model.
        """
        folder = local_folder(source)
        if folder is None:
            return None
        return cls.open(source if place_of(source).exists() else str(folder), trust_remote_code)

    @classmethod
    def _read(cls, folder: Path, path: str, trust_remote_code: bool) -> Self | None:
        """Opens it from the JSON files alone; None unless they say everything. Raises ConfigError as ``open``."""
        config = read_json(folder, "config.json")
        if not trust_remote_code:
            require_known(path, config)
        architectures = config.get("architectures")
        max_model_len, vocab_size = context_length(SimpleNamespace(**config)), config.get("vocab_size")
        generation_config = read_optional_json(folder, "generation_config.json")
        eos = generation_config.get("eos_token_id")
        if (
            isinstance(architectures, list)
            and any(str(name).endswith(_CAUSAL_SUFFIXES) for name in architectures)
            and isinstance(max_model_len, int)
            and isinstance(vocab_size, int)
            and (eos is not None or "eos_token_id" in config)
            and "text_config" not in config
        ):
            ids = _as_ids(config["eos_token_id"] if eos is None else eos)
            return cls(
                path,
                max_model_len,
                ids,
                vocab_size,
                _quantization(config, folder),
                folder,
                config,
                generation_config=generation_config,
            )
        return None

    @classmethod
    def ask_transformers(cls, source: str, trust_remote_code: bool = False) -> Self:
        """Opens a checkpoint as transformers reads it. Raises as ``open``."""
        require_fetchable(source)
        from transformers import AutoConfig, GenerationConfig, PretrainedConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        location = str(folder_of(source) or source)
        try:
            config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises whatever its parsers raise
            found = local_folder(source)
            is_id = found is not None and not place_of(source).exists()
            if found is not None and is_id and read_json(found, "config.json").get("model_type") in LAYOUTS:
                what = f"{source!r} must be here as a whole, since transformers does not know it by its name"
                raise ConfigError(f"{what}: fetch it by `hf download {source}`") from error
            require_no_code(source, error)
            raise ConfigError(f"model {source!r} could not be resolved: {reason_of(error)}") from error
        known: set[str] = set()
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            known.update([names] if isinstance(names, str) else names)
        architectures = list(getattr(config, "architectures", None) or [])
        causal = (
            any(name in known or _text_part(config, name) in known for name in architectures)
            if architectures and not trust_remote_code
            else bool(architectures) or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        )
        if not causal:
            raise ConfigError(
                f"model {source!r} is not a causal language model: its architecture is "
                f"{', '.join(architectures) or config.model_type}"
            )
        text = config.get_text_config()
        if not isinstance(text, PretrainedConfig):
            raise ConfigError(
                f"model {source!r} has a text_config, {text!r}, which {config.model_type} models have not"
            )
        try:
            eos = GenerationConfig.from_pretrained(location).eos_token_id
        except Exception:  # optional file
            eos = None
        if eos is None:
            eos = getattr(text, "eos_token_id", None)
        content, local = config.to_dict(), local_folder(source)
        return cls(
            path=source,
            max_model_len=context_length(text) or _DEFAULT_MAX_MODEL_LEN,
            eos_token_ids=_as_ids(eos),
            vocab_size=int(text.vocab_size),
            quantization=_quantization(content, local),
            folder=local,
            config=content if local is None else read_json(local, "config.json"),
            generation_config={} if local is None else read_json(local, "generation_config.json"),
        )

    @property
    def location(self) -> str:
        """The directory or id under which transformers finds it."""
        return str(folder_of(self.path) or self.path)

    @property
    def gguf(self) -> GgufWeights | None:
        """Returns the weights, if they are in GGUF files. Raises ConfigError if the files are gone."""
        folder = folder_of(self.path)
        return None if folder is None else gguf_weights(folder)

    def sampling_defaults(self) -> SamplingParams:
        """Sampling parameters that its generation_config.json names. Raises ConfigError for a value not allowed."""
        return sampling_defaults(self.generation_config, self.path, self.vocab_size)

    def warn_of_settings(self) -> None:
        """Logs one line for the settings of its generation_config.json that are not honored, if there are any."""
        if found := not_honored(self.generation_config):
            log.warning("generation_config.json of %s: %s, which is not honored", self.path, ", ".join(found))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at first use. Raises ConfigError if there is none."""
        return load_tokenizer(self.path, self.trust_remote_code)

    @property
    def has_weights(self) -> bool:
        """True unless its directory is here and holds no file of weights."""
        return self.folder is None or has_weights(self.folder)

    @cached_property
    def _counts(self) -> WeightCounts | None:
        if self.counted is not None:
            return self.counted
        text = text_config(self.config)
        kind = str(text.get("model_type", ""))
        return None if self.folder is None else count_weights(self.folder, packing_of(self.quantization), kind)

    def size(
        self,
        dtype: str = "auto",
        quantization: str | None = None,
        *,
        on_gpu: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> ModelSize | None:
        """Returns the model's size as it will run; None if the weights are not on this machine. Reads headers once.

        Raises:
            ConfigError: a weight file is missing, cut short or cannot be read.
        """
        if (counts := self._counts) is None:
            return None
        size = model_size(self.config, counts, dtype, quantization, on_gpu=on_gpu)
        return replace(size, is_kv_fp8=kv_cache_dtype != "auto")


def _text_part(config: Any, architecture: str) -> str:
    """The class of the text model of one with images, which transformers loads by itself; else the architecture.

    Encoders with a decoder have such names, too, but no configuration of a text model.
    """
    if getattr(config, "text_config", None) is None:
        return architecture
    return architecture.replace("ForConditionalGeneration", "ForCausalLM")


def context_length(config: Any) -> int | None:
    """The longest context in tokens that a configuration names.

    YaRN stretches the trained context, ``original_max_position_embeddings``, by its ``factor``. Model cards that have
    users add it leave ``max_position_embeddings`` unchanged.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (rope, *(one for one in rope.values() if isinstance(one, Mapping))):  # of all layers, or by their types
        original, factor = part.get("original_max_position_embeddings"), part.get("factor")
        if "yarn" in (part.get("rope_type"), part.get("type")) and original and factor:
            length = max(length, int(original * factor))
    return length


def _quantization(config: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model, else of the text model within it, else what Model Optimizer says of it in
    a file of its own."""
    for part in (config, text_config(config)):
        if isinstance(part.get("quantization_config"), Mapping):
            found: Mapping[str, Any] = part["quantization_config"]
            return found
    own = {} if folder is None else read_optional_json(folder, "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt", **own} if isinstance(own, Mapping) and own.get("quant_algo") else None


def _as_ids(value: Any) -> tuple[int, ...]:
    """Token ids of ``eos_token_id``, which is none, one, or a list. Raises ConfigError."""
    values = value if isinstance(value, list | tuple) else () if value is None else (value,)
    try:
        return tuple(int(i) for i in values)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"eos_token_id is {value!r}: a token id, or a list of them, is allowed") from None


def embedded_paths() -> tuple[Path, Path]:
    """Directories of the embedded target and draft."""
    from paceline.embedded import DRAFT_DIR, TARGET_DIR

    return TARGET_DIR, DRAFT_DIR
