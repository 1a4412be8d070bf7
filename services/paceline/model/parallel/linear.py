"""Which part of a linear layer a tensor-parallel rank holds: a range of heads, or of a convolution's channels.

A rank has the states, rows and operator of its heads; only the output projection is summed. transformers' own plan
leaves these layers whole, since its forward could not run a part. Projections are packed in these ways:

    Qwen3-Next   in_proj_qkvz, in_proj_ba   key head after key head: one range
    Qwen3.5      in_proj_qkv                queries, keys, values: a range of each; in_proj_z, in_proj_b, in_proj_a one
    OLMo hybrid  q_proj, k_proj, ..         one range each
    Kimi Linear  the same                   f_a_proj and g_a_proj, first halves of products, are whole on each rank
    MiniMax      qkv_proj                   head after head: one range; the norm sees the heads of all ranks
    Jamba        in_proj                    values and gate: a range of each; x_proj reads a range, dt_proj writes one
    LFM2         in_proj                    two gates and the input: a range of each
    Mamba2       in_proj                    gate, values, keys, queries, lengths of steps: a range of each

The convolution's channels are queries, keys and values in the first four; values, keys and queries in the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from transformers import PreTrainedModel

from paceline.checkpoint.linear import Kind, LinearSpec
from paceline.model.linear.families import spec_of
from paceline.model.linear.layers import linear_modules

FIXED = {"hidden_size", "mamba_n_groups", "mamba_n_heads", "mamba_ngroups", "n_mamba_heads"}
"""Settings that a rank's configuration keeps whole, although the degree divides them. Channels of convolutions and of
Mamba are a multiple of the model's width, and so are all heads of some Mamba2 layers together. Of fewer groups than
ranks several ranks have the same one."""
_HEADS = {
    Kind.GATED_DELTA: ("linear_num_key_heads", "linear_num_value_heads"),
    Kind.KIMI_DELTA: ("linear_num_heads",),
    Kind.LIGHTNING: ("num_attention_heads",),
    Kind.CONVOLUTION: ("hidden_size",),
    Kind.MAMBA: ("hidden_size",),
    Kind.MAMBA2: (
        *("n_groups", "mamba_num_heads", "mamba_n_groups", "mamba_n_heads"),
        *("mamba_ngroups", "n_mamba_heads"),
    ),
}
"""Configuration values that hold the numbers of heads, as far as a configuration has them. The number of value heads
is a multiple of the first one."""
_OUTPUTS = {"out_proj", "o_proj", "x_proj"}
"""Modules that read what is split."""
_WHOLE = {"norm", "o_norm", "f_a_proj", "g_a_proj", "dt_layernorm", "b_layernorm", "c_layernorm"}
"""Norms over one head, over all, or over a sum of all ranks, and first halves of products. Norms of Mamba2 are over a
group of heads each, and whole where ranks share a group."""


class Part(NamedTuple):
    """The part of a parameter that a rank holds, as in ``ParameterShard``."""

    dim: int | None
    ranges: tuple[tuple[int, int], ...]
    elsewhere: bool = False


class LinearParts(NamedTuple):
    """The part of all linear layers that a rank holds."""

    parameters: dict[str, Part]
    summed: tuple[str, ...]
    """Modules whose outputs are added over the ranks."""
    heads: tuple[str, ...]
    """Configuration values that the degree divides."""
    gathered: tuple[str, ...]
    """Norms over a group that several ranks have."""

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], rank: int, degree: int) -> LinearParts:
        """The parts of a whole ``model`` whose parameters have these shapes; none if it has no such layers."""
        parts: dict[str, Part] = {}
        summed: list[str] = []
        heads: dict[str, None] = {}
        gathered: list[str] = []
        for name, layer in linear_modules(model):
            spec = spec_of(layer)
            text = model.config.get_text_config()
            heads |= dict.fromkeys(key for key in _HEADS[spec.kind] if hasattr(text, key))
            for parameter, shape in shapes.items():
                if parameter.startswith(f"{name}."):
                    leaf = parameter.removeprefix(f"{name}.")
                    parts[parameter] = _part(leaf, shape, spec, rank, degree)
            summed += [f"{name}.{leaf}" for leaf, _ in layer.named_children() if leaf in _OUTPUTS]
            if _shares_groups(spec, degree) and f"{name}.norm.weight" in shapes:
                gathered.append(f"{name}.norm")
        return cls(parts, tuple(summed), tuple(heads), tuple(gathered))


def _shares_groups(spec: LinearSpec, degree: int) -> bool:
    """True if several ranks have one group of Mamba2 heads."""
    return spec.kind is Kind.MAMBA2 and spec.key_heads % degree > 0


def _part(leaf: str, shape: tuple[int, ...], spec: LinearSpec, rank: int, degree: int) -> Part:
    module = leaf.rpartition(".")[0].rpartition(".")[2]
    if module in _WHOLE and (spec.kind is not Kind.MAMBA2 or _shares_groups(spec, degree)):
        return Part(None, ())
    if module in _OUTPUTS and len(shape) == 1:
        return Part(None, (), elsewhere=rank > 0)
    dim = 1 if module in _OUTPUTS else next((d for d, size in enumerate(shape) if size > 1), 0)
    ranges, start = [], 0
    for length, heads in _packed(spec).get(module, ((shape[dim], degree),)):
        pieces = min(heads, degree)
        size = length // pieces
        first = start + rank * pieces // degree * size
        ranges.append((first, first + size))
        start += length
    return Part(dim, tuple(ranges))


def _packed(spec: LinearSpec) -> dict[str, tuple[tuple[int, int], ...]]:
    """The rows of each projection that is packed into one module, and their heads."""
    keys = spec.key_heads * spec.key_dim, spec.key_heads
    values = spec.value_heads * spec.value_dim, spec.value_heads
    if spec.kind is Kind.CONVOLUTION:
        return {"in_proj": (values, values, values)}
    if spec.kind is Kind.MAMBA:
        return {"in_proj": (values, values)}
    if spec.kind is Kind.MAMBA2:
        return {
            "conv1d": (values, keys, keys),
            "in_proj": (values, values, keys, keys, (spec.value_heads, spec.value_heads)),
        }
    return dict.fromkeys(("conv1d", "in_proj_qkv"), (keys, keys, values))
