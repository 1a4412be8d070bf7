"""Which part of a gated delta layer a tensor-parallel rank holds: a range of key heads, with their value heads.

A rank's states, rows and operator are those of its heads; only the output projection is summed. transformers' own plan
leaves these layers whole, since its forward could not run a part. Projections are packed in three ways:

    Qwen3-Next   in_proj_qkvz, in_proj_ba   key head after key head: one range
    Qwen3.5      in_proj_qkv                queries, keys, values: a range of each; in_proj_z, in_proj_b, in_proj_a one
    OLMo hybrid  q_proj, k_proj, ..         one range each

The convolution's channels are queries, keys and values in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from transformers import PreTrainedModel

from paceline.checkpoint.linear import LinearSpec
from paceline.model.linear.layers import linear_modules

LINEAR_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
"""Configuration values that hold the numbers of heads. The number of value heads is a multiple of the first one."""
_OUTPUTS = {"out_proj", "o_proj"}
_WHOLE = {"norm", "o_norm"}
"""Norms over one head."""
_PACKED = {"conv1d", "in_proj_qkv"}


class Part(NamedTuple):
    """The part of a parameter that a rank holds, as in ``ParameterShard``."""

    dim: int | None
    ranges: tuple[tuple[int, int], ...]


class LinearParts(NamedTuple):
    """The part of all gated delta layers that a rank holds."""

    parameters: dict[str, Part]
    summed: tuple[str, ...]
    """Modules whose outputs are added over the ranks."""

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], rank: int, degree: int) -> LinearParts:
        """The parts of a whole ``model`` whose parameters have these shapes; none if it has no such layers."""
        parts: dict[str, Part] = {}
        summed: list[str] = []
        for name, layer in linear_modules(model):
            spec = LinearSpec.of(layer)
            for parameter, shape in shapes.items():
                if parameter.startswith(f"{name}."):
                    leaf = parameter.removeprefix(f"{name}.").partition(".")[0]
                    parts[parameter] = _part(leaf, shape, spec, rank, degree)
            summed += [f"{name}.{leaf}" for leaf, _ in layer.named_children() if leaf in _OUTPUTS]
        return cls(parts, tuple(summed))


def _part(leaf: str, shape: tuple[int, ...], spec: LinearSpec, rank: int, degree: int) -> Part:
    if leaf in _WHOLE:
        return Part(None, ())
    dim = 1 if leaf in _OUTPUTS else 0
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    ranges, start = [], 0
    for length in (keys, keys, values) if leaf in _PACKED else (shape[dim],):
        size = length // degree
        ranges.append((start + rank * size, start + (rank + 1) * size))
        start += length
    return Part(dim, tuple(ranges))
