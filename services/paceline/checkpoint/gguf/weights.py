"""Weights of GGUF files by the names that transformers gives them, dequantized while they are read.

This undoes llama.cpp's names and layouts. Llama's rotary heads are split into halves again, and 1 is subtracted from
Gemma's norms. Experts that lie in one tensor are read one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.gguf.blocks import Blocks, blocks_of, is_kept
from paceline.checkpoint.gguf.header import Header, Stored
from paceline.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, dtype

_NUM_AT_ONCE = 1 << 22
"""Numbers that are dequantized to float32 at once."""
_NUM_NAMED = 3

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.*.{part}_proj" for part in ("gate", "up", "down")},
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "mixtral": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "qwen2_moe": {
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    },
    "qwen3_moe": _EXPERTS,
}
"""transformers' model type -> names within a layer, in addition to the common ones. ``*``: one per expert."""
_PERMUTED = ("llama", "mistral", "mixtral")
"""Model types whose query and key rows llama.cpp interleaves."""
_PLUS_ONE = ("gemma", "gemma2", "gemma3_text")
"""Model types whose norms llama.cpp stores with one added."""
CONFIGURING = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that are read with the configuration."""
_GPT_OSS = re.compile(r"blk\.(\d+)\.(attn_sinks|ffn_(?:gate|up|down)_exps)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of transformers' model, and the stored tensors that it is made of."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names of the tensors in the file. Two: a gate and the gated projection, with their rows interleaved."""
    expert: int | None = None
    """Index along the tensor's first dimension."""
    heads: int = 0
    """Number of heads whose rows are put back into halves; 0: none are."""
    minus_one: bool = False
    transposed: bool = False

    def order(self) -> np.ndarray[Any, Any] | None:
        """The rows in the order of transformers; None: they are in it."""
        import numpy as np

        return np.arange(self.shape[0]).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1) if self.heads else None


def weights_of(tensors: Mapping[str, Stored], config: Mapping[str, Any], what: str) -> dict[str, Weight]:
    """The weights that the tensors of a file are, by the names of a checkpoint with this ``config``.

    Raises:
        ConfigError: tensors of ``what`` have no place in this family.
    """
    found: dict[str, Weight] = {}
    unknown = []
    for name, stored in tensors.items():
        if CONFIGURING.fullmatch(name):
            continue
        own = _gpt_oss(name, tensors) if config["model_type"] == "gpt_oss" else None
        if own is None:
            own = _weights(name, stored, config)
        if own is None:
            unknown.append(name)
        else:
            found.update(own)
    if unknown:
        more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
        named = ", ".join(unknown[:_NUM_NAMED])
        raise ConfigError(f"{what} holds {named}{more}: not known of {config['model_type']!r}, whose weights are read")
    return found


def _weights(name: str, stored: Stored, config: Mapping[str, Any]) -> dict[str, Weight] | None:
    stem, _, ending = name.rpartition(".")
    kind = config["model_type"]
    if ending not in ("weight", "bias"):
        return None
    if stem in _OUTSIDE:
        minus_one = stem == "output_norm" and kind in _PLUS_ONE
        return {f"{_OUTSIDE[stem]}.{ending}": Weight(stored.shape, (name,), minus_one=minus_one)}
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    part = None if layer is None else {**_LAYER, **_NAMES.get(kind, {})}.get(layer[2])
    if layer is None or part is None or int(layer[1]) >= config["num_hidden_layers"]:
        return None
    prefix = f"model.layers.{layer[1]}."
    if "*" in part:
        if len(stored.shape) < 2:
            return None
        return {
            f"{prefix}{part.replace('*', str(expert))}.{ending}": Weight(stored.shape[1:], (name,), expert)
            for expert in range(stored.shape[0])
        }
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    heads = config[keys[layer[2]]] if kind in _PERMUTED and layer[2] in keys else 0
    shape = (1, *stored.shape) if part.endswith("shared_expert_gate") and len(stored.shape) == 1 else stored.shape
    minus_one = kind in _PLUS_ONE and layer[2].endswith("norm")
    return {f"{prefix}{part}.{ending}": Weight(shape, (name,), heads=heads, minus_one=minus_one)}


def _gpt_oss(name: str, tensors: Mapping[str, Stored]) -> dict[str, Weight] | None:
    """Weights of GPT-OSS that are stored otherwise: its experts lie together, gate and gated in turns."""
    match = _GPT_OSS.fullmatch(name)
    if match is None:
        return None
    layer, part, ending = match.groups()
    prefix, shape = f"model.layers.{layer}.", tensors[name].shape
    if part == "attn_sinks":
        return {f"{prefix}self_attn.sinks": Weight(shape, (name,))}
    end = "_bias" if ending == "bias" else ""
    transposed = not end
    if part == "ffn_down_exps":
        shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        return {f"{prefix}mlp.experts.down_proj{end}": Weight(shape, (name,), transposed=transposed)}
    pair = tuple(f"blk.{layer}.ffn_{half}_exps.{ending}" for half in ("gate", "up"))
    if not all(one in tensors and tensors[one].shape == shape for one in pair):
        return None
    shape = (shape[0], shape[2], 2 * shape[1]) if transposed else (shape[0], 2 * shape[1])
    return {f"{prefix}mlp.experts.gate_up_proj{end}": Weight(shape, pair, transposed=transposed)}


class GgufTensors:
    """The tensors of a model's GGUF files by their own names. Files are mapped, not read."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._maps: dict[int, np.ndarray[Any, Any]] = {}

    def rows(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a tensor, a row for each along its last dimension."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        stored = self.header.tensors[name]
        if stored.file not in self._maps:
            self._maps[stored.file] = np.memmap(self.header.files[stored.file], np.uint8, "r")
        block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.kind]]
        num_rows, per_row = math.prod(stored.shape[:-1]), stored.shape[-1] // block * num_bytes
        return self._maps[stored.file][stored.offset :][: num_rows * per_row].reshape(num_rows, per_row)

    def numbers(self, name: str, rows: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """The numbers of some rows of a tensor in float32, of all by default, in memory of their own."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        chosen = np.ascontiguousarray(self.rows(name) if rows is None else rows)
        return np.array(dequantize(chosen, GGMLQuantizationType[self.header.tensors[name].kind]), np.float32)


class GgufWeights:
    """The weights of a model's GGUF files by transformers' names; a name is read when it is asked for."""

    def __init__(self, tensors: GgufTensors, config: Mapping[str, Any]) -> None:
        """Raises ConfigError for tensors that have no place in the family of ``config``."""
        self._tensors = tensors
        self.weights = weights_of(tensors.header.tensors, config, repr(str(tensors.header.files[0])))

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    @property
    def files(self) -> dict[str, Path]:
        """The file of each weight, that of its first tensor."""
        header = self._tensors.header
        return {name: header.files[header.tensors[one.sources[0]].file] for name, one in self.weights.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: weight.shape for name, weight in self.weights.items()}

    def read(self, name: str, dtype: dtype | None = None) -> Tensor:
        """A weight on the CPU, rounded once from float32. Matrices are rounded to ``dtype`` while they are read;
        vectors, and everything if it is None, stay in float32.
        """
        import torch

        weight = self.weights[name]
        chosen = torch.float32 if dtype is None or len(weight.shape) < 2 else dtype
        result = torch.empty(weight.shape, dtype=chosen)
        if len(weight.sources) == 2 or weight.transposed:
            self._join(result, weight)
            return result
        source = weight.sources[0]
        rows = self._tensors.rows(source)
        if weight.expert is not None:
            per_expert = len(rows) // self._tensors.header.tensors[source].shape[0]
            rows = rows[weight.expert * per_expert :][:per_expert]
        order = weight.order()
        if order is not None and len(weight.shape) == 1:
            result.copy_(torch.from_numpy(self._tensors.numbers(source).reshape(-1)[order]))
        else:
            self._fill(result.view(len(rows), -1), source, rows if order is None else rows[order])
        return result.sub_(1) if weight.minus_one else result

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it is stored; None: there is none of this name, or its format has to be dequantized."""
        weight = self.weights.get(name)
        if weight is None or len(weight.sources) > 1 or weight.expert is not None or len(weight.shape) != 2:
            return None
        (source,) = weight.sources
        stored = self._tensors.header.tensors[source]
        if not is_kept(stored.kind) or len(stored.shape) != 2 or weight.transposed or weight.minus_one:
            return None
        rows, order = self._tensors.rows(source), weight.order()
        return blocks_of(stored.kind, rows if order is None else rows[order])

    def _join(self, result: Tensor, weight: Weight) -> None:
        """Expert by expert; of two sources the numbers take turns along the last dimension."""
        turns = len(weight.sources)
        for turn, source in enumerate(weight.sources):
            rows = self._tensors.rows(source)
            per_expert = len(rows) // len(result)
            for expert, one in enumerate(result):
                numbers = result.new_empty(per_expert, self._tensors.header.tensors[source].shape[-1])
                self._fill(numbers, source, rows[expert * per_expert :][:per_expert])
                one[..., turn::turns] = numbers.T if weight.transposed else numbers.view(-1)

    def _fill(self, result: Tensor, source: str, rows: np.ndarray[Any, Any]) -> None:
        """Dequantizes rows of a tensor into ``result``, some at a time."""
        import torch

        step = max(1, _NUM_AT_ONCE // max(1, result.shape[1]))
        for start in range(0, len(rows), step):
            numbers = self._tensors.numbers(source, rows[start : start + step])
            result[start : start + step].copy_(torch.from_numpy(numbers))
