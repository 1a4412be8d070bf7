"""The size of a model, from its configuration and the headers of its weight files, without reading a weight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint import indexed
from paceline.checkpoint.compressed import compressed_values, num_shared, num_streams
from paceline.checkpoint.folder import read_json, text_config
from paceline.checkpoint.gguf.described import gguf_weights
from paceline.checkpoint.latent import latent_values, num_attentions, num_plain_weights
from paceline.checkpoint.linear import LinearLayers, Slots, layer_types, linear_layers
from paceline.checkpoint.packing import Packing, count_packed, count_scaled
from paceline.checkpoint.quantization import weight_bytes_per_parameter
from paceline.checkpoint.translated import INDEX, Names, renamed
from paceline.errors import ConfigError
from paceline.types import PAGE_SIZE

_PLAIN = ("F64", "F32", "F16", "BF16")
"""Number formats of safetensors that are cast to the dtype that a model runs with."""

_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_MIMO = "mimo_v2_flash"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parts of a model that decide how much memory it takes."""

    num_parameters: int
    kv_values: int | None
    """Numbers that all layers keep per token, keys and values. None: the configuration does not tell."""
    item_bytes: int
    """Bytes per number as it will run; dtype auto counts as bfloat16, the smallest."""
    num_layers: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    """Neurons of one MLP that a token passes, its experts together. 0: unknown."""
    vocab_size: int = 0
    """Rows of the output layer."""
    num_whole: int = 0
    """Parameters that every rank holds: norms and everything else that is not a matrix."""
    num_kv_heads: int = 1
    """Attention heads that keep keys and values, in one layer; 1: also of latents, which all heads share."""
    num_heads: int = 0
    """Query heads of one attention layer; 0: unknown."""
    value_dim: int = 0
    """Numbers of the values of one head, or of the latent that all heads share; 0: unknown."""
    saved_bytes: int = 0
    """Bytes that quantized weights take less than ``item_bytes`` for each number."""
    saved_alone: int = 0
    """Of ``saved_bytes`` those that a rank among several does not save."""
    dequantized_bytes: int = 0
    """Bytes of the weights that are quantized in the files and run as plain ones."""
    num_tables: int = 2
    """Matrices of the vocabulary: an embedding and an output layer, or one for both."""
    linear: LinearLayers | None = None
    """Linear layers of the model; None: it has none."""
    num_streams: int = 1
    """States of a token between two layers (``hc_mult`` of DeepSeek V4)."""
    index_values: int = 0
    """Of ``kv_values``, the numbers of index keys, or of what compressors keep, which every rank has
    (``checkpoint/indexed.py``, ``compressed.py``)."""
    num_experts: int = 0
    """Experts of one MLP among which a router chooses; 0: it has none."""
    experts_per_token: int = 0
    expert_share: float = 0.0
    """Share of the weights' bytes that is theirs."""
    is_kv_fp8: bool = False
    """True: keys and values of heads, and latents, are kept in one byte a number; index keys are not."""

    def of_rank(self, tensor_parallel_size: int) -> ModelSize:
        """The size of one of ``tensor_parallel_size`` ranks: its share of every matrix, and at least one KV head.
        Logits are put together on each rank."""
        size = tensor_parallel_size
        kv_heads = max(1, -(-self.num_kv_heads // size))
        return replace(
            self,
            num_parameters=self.num_whole + -(-(self.num_parameters - self.num_whole) // size),
            kv_values=self.kv_values and self._of_heads // self.num_kv_heads * kv_heads + self.index_values,
            saved_bytes=self.saved_bytes if size == 1 else (self.saved_bytes - self.saved_alone) // size,
            saved_alone=self.saved_alone if size == 1 else 0,
            num_kv_heads=kv_heads,
            num_heads=-(-self.num_heads // size),
            intermediate_size=-(-self.intermediate_size // size),
            linear=self.linear and replace(self.linear, spec=self.linear.spec.of_rank(size)),
        )

    @property
    def mtp_values(self) -> int | None:
        """Numbers that an MTP module keeps per token; None: its layer has an indexer, and does not run."""
        if self.num_streams > 1:  # a window over keys that are values
            return self.value_dim
        return None if self.index_values else (self.kv_values or 0) // max(1, self.num_layers)

    @property
    def _of_heads(self) -> int:
        """Numbers that heads keep per token."""
        return (self.kv_values or 0) - self.index_values

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they will run."""
        return self.num_parameters * self.item_bytes - self.saved_bytes

    def bytes_read(self, num_tokens: float) -> float:
        """Expected bytes of the weights that a step of ``num_tokens`` tokens reads, which choose experts evenly and
        independently of each other. Real tokens agree more often, and read less."""
        if not self.num_experts:
            return float(self.weights_bytes)
        chosen: float = 1.0 - (1.0 - min(1.0, self.experts_per_token / self.num_experts)) ** num_tokens
        return self.weights_bytes * (1.0 - self.expert_share * (1.0 - chosen))

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page; 0 if unknown."""
        of_heads = self._of_heads * (1 if self.is_kv_fp8 else self.item_bytes)
        return PAGE_SIZE * (of_heads + self.index_values * self.item_bytes) if self.kv_values else 0

    def kv_bytes(self, num_pages: int) -> int:
        """Bytes of ``num_pages`` KV pages and the scratch page; 0 if unknown."""
        return (num_pages + 1) * self.page_bytes

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values."""
        return max(1, self.num_layers - (0 if self.linear is None else self.linear.num_without_kv))

    def slots_bytes(self, slots: Slots) -> int:
        """Bytes of the states and rows that linear layers keep; 0 without such layers."""
        return 0 if self.linear is None else self.linear.slots_bytes(slots, self.item_bytes)


class Entry(NamedTuple):
    """A tensor by the header of its safetensors file."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    num_bytes: int
    first_byte: int
    """Offset of the tensor's first byte in the file."""


class WeightCounts(NamedTuple):
    """Sums over the headers of the weight files."""

    numbers: int
    """Numbers in all tensors."""
    whole: int
    """Numbers that are in no matrix, which every rank holds."""
    stored: int
    """Numbers that are stored in other ways than as plain floats; they run as they are stored."""
    stored_bytes: int
    """Bytes of the stored numbers."""
    scaled: int = 0
    """Numbers that are dequantized, but that a GPU multiplies as they are stored."""
    scaled_bytes: int = 0
    """Bytes of the scaled numbers there."""
    scaled_alone: int = 0
    """Bytes that these save there where no other GPU has a part of the model."""
    quantized: int = 0
    """Numbers that are scaled there, or dequantized there as well."""
    expert_share: float = 0.0
    """Share of all bytes that is in experts among which a router chooses."""


def model_size(
    config: Mapping[str, Any],
    counts: WeightCounts,
    dtype: str = "auto",
    quantization: str | None = None,
    *,
    on_gpu: bool = False,
) -> ModelSize:
    """The size of a model as it will run, from its configuration and the headers of its weight files."""
    item_bytes = 4 if dtype == "float32" else 2
    size = size_of(config, counts.numbers, item_bytes, counts.whole)
    plain = num_plain_weights(text_config(config), size.num_kv_layers)
    saved = counts.stored * item_bytes - counts.stored_bytes
    saved -= saved * min(plain, counts.stored) // max(1, counts.stored)
    kept = counts.scaled if on_gpu and item_bytes == 2 else 0
    if kept:
        saved += kept * item_bytes - counts.scaled_bytes
    if quantization is not None:  # linear layers only
        tables = size.vocab_size * size.hidden_size * size.num_tables
        rounded = max(0, counts.numbers - counts.whole - tables - plain)
        saved += int(rounded * (item_bytes - weight_bytes_per_parameter(quantization, dtype)))
    return replace(
        size,
        saved_bytes=saved,
        saved_alone=counts.scaled_alone if kept else 0,
        dequantized_bytes=(counts.quantized - kept) * item_bytes,
        expert_share=counts.expert_share if size.num_experts else 0.0,
    )


def size_of(config: Mapping[str, Any], num_parameters: int, item_bytes: int, num_whole: int = 0) -> ModelSize:
    """Returns the size of a model with ``num_parameters`` parameters, of which ``num_whole`` are in no matrix."""
    text = text_config(config)
    layers, hidden = _first(text, "num_hidden_layers", "n_layer"), _first(text, "hidden_size", "n_embd")
    linear = linear_layers(config)
    layers = layers or (num_attentions(text) if linear is None else len(layer_types(text)))
    num_kv_layers = layers - (0 if linear is None else linear.num_without_kv)
    latents, index_values = latent_values(text, num_kv_layers), indexed.index_values(config)
    if (compressed := compressed_values(config)) is not None:  # keys are values, of one head
        latents, index_values = num_kv_layers * _head_dim(text, hidden), compressed
        num_whole = max(num_whole, num_parameters - num_shared(config))
    return ModelSize(
        num_parameters=num_parameters,
        kv_values=_kv_values(text, num_kv_layers, hidden) if latents is None else latents + index_values,
        item_bytes=item_bytes,
        num_layers=layers or 1,
        hidden_size=hidden,
        intermediate_size=_intermediate_size(text, hidden),
        vocab_size=_first(text, "vocab_size"),
        num_whole=num_whole,
        num_kv_heads=_kv_heads(text) or 1 if latents is None else 1,
        num_heads=_first(text, "num_attention_heads", "n_head"),
        value_dim=_head_dim(text, hidden)
        if latents is None or compressed is not None
        else _first(text, "kv_lora_rank"),
        num_tables=1 if config.get("tie_word_embeddings") else 2,
        linear=linear,
        index_values=index_values,
        num_experts=_first(text, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        experts_per_token=_first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 1,
        num_streams=num_streams(config),
    )


def count_weights(folder: Path, packing: Packing | None = None, model_type: str = "") -> WeightCounts:
    """Adds up the headers of the weight files.

    Args:
        folder: the checkpoint.
        packing: how weights are quantized that are dequantized while they are read; None: there are none.
        model_type: as for ``count_scaled``.

    Raises:
        ConfigError: a file is missing, cut short or cannot be read.
    """
    if (gguf := gguf_weights(folder)) is not None:  # dequantized while they are loaded
        shapes = gguf.shapes.values()
        whole = sum(math.prod(shape) for shape in shapes if len(shape) < 2)
        return WeightCounts(sum(map(math.prod, shapes)), whole, 0, 0)
    try:
        if files := headers(folder):
            return _count([*files.values()], packing, model_type)
        pickled = sorted(folder.glob("pytorch_model*.bin"))
        num_bytes = sum(path.stat().st_size for path in pickled)
    except OSError as error:
        raise ConfigError(f"{error.filename or str(folder)!r} cannot be read: {error.strerror or error}") from error
    if not pickled:
        raise ConfigError(f"{str(folder)!r} holds no weights: model.safetensors or its index is needed")
    return WeightCounts(num_bytes // 4, 0, 0, 0)  # at most four bytes each


def has_weights(folder: Path) -> bool:
    """True if there is any file of weights, sound or not, or an index of them."""
    names = (INDEX, "model.safetensors", "pytorch_model*.bin")
    return gguf_weights(folder) is not None or any(next(folder.glob(name), None) is not None for name in names)


def headers(folder: Path) -> dict[Path, dict[str, Entry]]:
    """The tensors of each safetensors file of a checkpoint; {} if it has none. Raises ConfigError or OSError."""
    content = read_json(folder, INDEX)
    if isinstance(index := content.get("weight_map"), dict):
        files = {folder / name: header(folder / name) for name in sorted(set(map(str, index.values())))}
        return {file: _known(entries, names_of(content)) for file, entries in files.items()}
    single = folder / "model.safetensors"
    return {single: header(single)} if single.exists() else {}


def names_of(index: Mapping[str, Any]) -> Names:
    """How the tensors of an index are named in its files, and in it; (): by the same names."""
    metadata = index.get("metadata")
    return metadata.get("names", ()) if isinstance(metadata, dict) else ()


def _known(entries: dict[str, Entry], names: Names) -> dict[str, Entry]:
    """The tensors of a file that are in the index, by their names there."""
    if not names:
        return entries
    return {known: entry for name, entry in entries.items() if (known := renamed(name, names)) is not None}


def header(path: Path) -> dict[str, Entry]:
    """The tensors by one safetensors header. The file is eight bytes of header length, the header in JSON, the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    try:
        found = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end: int = max((entry["data_offsets"][1] for entry in found.values()), default=0)
        entries = {}
        for name, one in found.items():
            first, stop = one["data_offsets"]
            entries[name] = Entry(str(one["dtype"]), tuple(one["shape"]), stop - first, 8 + length + first)
        for entry in entries.values():
            math.prod(entry.shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is not a safetensors file, or cut short") from error
    if 8 + length + end > size:
        raise ConfigError(f"{str(path)!r} is cut short: it has {size} bytes of {8 + length + end}")
    return entries


def _count(files: Sequence[Mapping[str, Entry]], packing: Packing | None, model_type: str) -> WeightCounts:
    """Adds up the tensors of all files; a weight and its scales may be in two of them."""
    entries = {name: entry for file in files for name, entry in file.items()}
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    numbers, whole = count_packed(tensors, packing)
    stored = [] if packing is not None else [entry for entry in entries.values() if entry.dtype not in _PLAIN]
    return WeightCounts(
        numbers,
        whole,
        sum(math.prod(entry.shape) for entry in stored),
        sum(entry.num_bytes for entry in stored),
        *count_scaled(tensors, packing, model_type),
        expert_share=share_of_experts({name: entry.num_bytes for name, entry in entries.items()}),
    )


def share_of_experts(weights: Mapping[str, int]) -> float:
    """The share of experts among which a router chooses. ``weights``: size of each by its name."""
    return sum(size for name, size in weights.items() if ".experts." in name) / max(1, sum(weights.values()))


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The number under the first of the names that has one; 0 if none has."""
    return next((value for name in names if isinstance(value := config.get(name), int) and value), 0)


def _kv_values(config: Mapping[str, Any], layers: int, hidden: int) -> int | None:
    """Numbers that all attention layers keep per token, keys and values of heads; None for another attention."""
    heads = _first(config, "num_attention_heads", "n_head")
    if not (layers and heads and hidden) or "kv_lora_rank" in config:
        return None
    if config.get("model_type") in (*_GEMMA4, _MIMO):
        return sum(_values_of_layer(config, index, layers) for index in range(layers))
    return 2 * layers * _kv_heads(config) * _head_dim(config, hidden)


def _head_dim(config: Mapping[str, Any], hidden: int) -> int:
    """Numbers of one head; 0: unknown."""
    heads = _first(config, "num_attention_heads", "n_head")
    return _first(config, "head_dim", "attention_head_dim") or (hidden // heads if heads else 0)


def _values_of_layer(config: Mapping[str, Any], index: int, layers: int) -> int:
    """Numbers that a layer of Gemma 4 or MiMo keeps per token: those with a window have another size than the others.

    Published configurations of Gemma 4 name the sizes of layers without one ``global``, saved ones list what differs by
    layer.
    """
    is_gemma, kinds = config["model_type"] in _GEMMA4, config.get("layer_types")
    every_sixth = not (index + 1) % 6 or index == (layers - 1 if is_gemma else 0)
    is_full = kinds[index] == "full_attention" if kinds else every_sixth
    if not is_gemma:
        dims = _first(config, "head_dim") + _first(config, "v_head_dim")
        return _kv_heads(config) * (1 if is_full else 2) * (dims or 192 + 128)
    if (saved := config.get("per_layer_config")) is not None:
        config = {**config, **saved.get(str(index), saved.get(index, {}))}
    elif is_full:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v", True) else None
        return 2 * (heads or _kv_heads(config)) * int(config.get("global_head_dim", 512))
    return 2 * _kv_heads(config) * int(config.get("head_dim", 256))


def _kv_heads(config: Mapping[str, Any]) -> int:
    return _first(config, "num_key_value_heads") or _first(config, "num_attention_heads", "n_head")


def _intermediate_size(config: Mapping[str, Any], hidden: int) -> int:
    """Neurons of the MLP that a token passes, experts together."""
    dense = _first(config, "intermediate_size", "n_inner") or (4 * hidden if "n_embd" in config else 0)
    return max(dense, _first(config, "moe_intermediate_size") * _first(config, "num_experts_per_tok"))


def gib(num_bytes: float) -> str:
    """Bytes as a text in GiB."""
    return f"{num_bytes / (1 << 30):.2f} GiB"
