"""What our forward of a linear layer takes from its module in transformers: sizes, weights, projections, its output.

A family is a class of such modules. The sums between projections and output depend on its kind (``operator.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.linear import Kind, LinearSpec


class Projected(NamedTuple):
    """The projections of a step's T tokens."""

    inputs: Tensor  # [T, conv_dim], of the convolution
    gate: Tensor
    """Of the output, as ``finish`` takes it."""
    a: Tensor  # as in Gates
    b: Tensor


class Family(NamedTuple):
    """How a class of linear layers is run. All functions take the layer first."""

    sizes: Callable[[Any], LinearSpec]
    weights: Callable[[Any], Mapping[str, Any]]
    """The fields of ``Gates`` that are the layer's own."""
    project: Callable[[Any, Tensor], Projected]
    """From hidden states ``[1, T, hidden]``."""
    finish: Callable[[Any, Tensor, Tensor], Any]
    """From outputs ``[T, value heads, value_dim]`` and the gate to what the class returns: ``[1, T, hidden]``, or that
    and None."""
    select: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None
    """``Gates.select``; None: the projections give all."""


def _taps(conv: Any) -> Tensor:
    """A convolution's weights, ``[width, conv_dim]``."""
    return conv.weight.squeeze(1).t().float().contiguous()  # type: ignore[no-any-return]


def _shift(conv: Any) -> Tensor | None:
    return None if conv.bias is None else conv.bias.float()


# Gated delta nets.


def _delta_sizes(layer: Any) -> LinearSpec:
    return LinearSpec(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, layer.conv_kernel_size)


def _delta_weights(layer: Any) -> Mapping[str, Any]:
    scale = 2 if getattr(layer, "allow_neg_eigval", False) else 1
    return _decays(layer) | {"weight": _taps(layer.conv1d), "scale": scale}


def _decays(layer: Any) -> dict[str, Any]:
    return {"decay": -layer.A_log.float().exp(), "bias": layer.dt_bias.float()}


def _delta_finish(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    norm = layer.o_norm if hasattr(layer, "o_norm") else layer.norm
    out_proj = layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj
    num_tokens = out.shape[0]  # len() would make it a constant of an exported graph
    out = norm(out.flatten(0, 1), gate.flatten(0, 1))
    return out_proj(out.view(1, num_tokens, -1))  # type: ignore[no-any-return]


def _of_qwen3_next(layer: Any, x: Tensor) -> Projected:
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return Projected(torch.cat([part.flatten(2) for part in (q, k, v)], -1)[0], z[0], a[0], b[0])


def _of_qwen3_5(layer: Any, x: Tensor) -> Projected:
    z = layer.in_proj_z(x)[0].unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    b, a = layer.in_proj_b(x)[0], layer.in_proj_a(x)[0]
    return Projected(layer.in_proj_qkv(x)[0], z, a, b)


def _mixed(layer: Any, x: Tensor) -> Tensor:
    return torch.cat([project(x)[0] for project in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)


def _of_olmo_hybrid(layer: Any, x: Tensor) -> Projected:
    gate = layer.g_proj(x)[0].unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    b, a = layer.b_proj(x)[0], layer.a_proj(x)[0]
    return Projected(_mixed(layer, x), gate, a, b)


def _delta(project: Callable[[Any, Tensor], Projected]) -> Family:
    return Family(_delta_sizes, _delta_weights, project, _delta_finish)


# Kimi delta attention: a decay of each channel of the keys.


def _kimi_sizes(layer: Any) -> LinearSpec:
    heads, size = layer.num_heads, layer.head_dim
    return LinearSpec(heads, heads, size, size, layer.conv_kernel_size, Kind.KIMI_DELTA)


def _kimi_weights(layer: Any) -> dict[str, Any]:
    decays = _decays(layer.forget_gate)
    return decays | {"decay": decays["decay"].flatten(), "weight": _taps(layer.conv1d)}


def _bailing_weights(layer: Any) -> Mapping[str, Any]:
    gate = layer.forget_gate
    own = {"lowest": gate.lower_bound if gate.safe_gate else None, "rounds_rates": True}
    return _kimi_weights(layer) | own | {"rounds_convolution": layer.conv1d.weight.dtype != torch.float32}


def _of_kimi(layer: Any, x: Tensor) -> Projected:
    gate, a = layer.g_b_proj(layer.g_a_proj(x)), layer.forget_gate.f_b_proj(layer.forget_gate.f_a_proj(x))
    return _kimi_projected(layer, x, gate, a)


def _of_bailing(layer: Any, x: Tensor) -> Projected:
    return _kimi_projected(layer, x, layer.g_proj(x), layer.forget_gate.f_proj(x))


def _kimi_projected(layer: Any, x: Tensor, gate: Tensor, a: Tensor) -> Projected:
    by_heads = gate[0].view(-1, layer.num_heads, layer.head_dim)
    return Projected(_mixed(layer, x), by_heads, a[0], layer.b_proj(x)[0])


# Lightning attention: one rate for all tokens, and no convolution.


def _lightning_sizes(layer: Any) -> LinearSpec:
    heads, size = layer.num_attention_heads, layer.head_dim
    return LinearSpec(heads, heads, size, size, 1, Kind.LIGHTNING)


def _lightning_weights(layer: Any) -> Mapping[str, Any]:
    nothing = layer.slope_rate.new_empty(0)
    return {"weight": nothing, "decay": -layer.slope_rate.float().flatten(), "bias": nothing}


def _lightning_project(layer: Any, x: Tensor) -> Projected:
    of_heads = layer.act_fn(layer.qkv_proj(x))[0].unflatten(-1, (layer.num_attention_heads, 3, layer.head_dim))
    return Projected(of_heads.transpose(1, 2).flatten(1), layer.output_gate(x)[0], x[0, :, :0], x[0, :, :0])


def _lightning_finish(layer: Any, out: Tensor, gate: Tensor) -> tuple[Tensor, None]:
    return layer.out_proj((gate.sigmoid() * layer.norm(out.flatten(1)))[None]), None


_LIGHTNING = Family(_lightning_sizes, _lightning_weights, _lightning_project, _lightning_finish)


# Short convolutions, between two gates.


def _conv_sizes(layer: Any) -> LinearSpec:
    channels, _, width = layer.conv.weight.shape
    return LinearSpec(0, channels, 0, 1, width, Kind.CONVOLUTION)


def _conv_weights(layer: Any) -> Mapping[str, Any]:
    nothing = layer.conv.weight.new_empty(0)
    return {"weight": _taps(layer.conv), "shift": _shift(layer.conv), "decay": nothing, "bias": nothing}


def _conv_project(layer: Any, x: Tensor) -> Projected:
    gate, gate_after, x = layer.in_proj(x)[0].chunk(3, -1)
    return Projected(gate * x, gate_after, x[:, :0], x[:, :0])


def _conv_finish(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    return layer.out_proj((gate * out.flatten(1))[None])  # type: ignore[no-any-return]


_CONVOLUTION = Family(_conv_sizes, _conv_weights, _conv_project, _conv_finish)


# Mamba: state-space layers of one head a channel, whose step, keys and queries are projections of the convolution.


def _mamba_sizes(layer: Any) -> LinearSpec:
    channels, size = layer.A_log.shape
    return LinearSpec(1, channels, size, 1, layer.conv_kernel_size, Kind.MAMBA)


def _mamba_weights(layer: Any) -> Mapping[str, Any]:
    own = {"shift": _shift(layer.conv1d), "skip": layer.D.float(), "weight": _taps(layer.conv1d)}
    return own | {"decay": -layer.A_log.float().exp(), "bias": layer.dt_proj.bias.float()}


def _mamba_project(layer: Any, x: Tensor) -> Projected:
    inputs, gate = layer.in_proj(x)[0].chunk(2, -1)
    return Projected(inputs, gate, x[0, :, :0], x[0, :, :0])


def _of_jamba(layer: Any, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each of the parts has a norm."""
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    step, keys, queries = layer.x_proj(values[None])[0].split(sizes, -1)
    steps = F.linear(layer.dt_layernorm(step), layer.dt_proj.weight)  # its bias is added in float32
    return steps, torch.cat((layer.b_layernorm(keys), layer.c_layernorm(queries)), -1)


def _mamba_finish(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    gated = out.flatten(1).float() * F.silu(gate)
    return layer.out_proj(gated.to(gate.dtype)[None])  # type: ignore[no-any-return]


_JAMBA = Family(_mamba_sizes, _mamba_weights, _mamba_project, _mamba_finish, _of_jamba)


# Mamba2: state-space layers whose decay is one number a head. A group of heads shares B and C, its keys and queries.


def _mamba2_sizes(layer: Any) -> LinearSpec:
    heads, (channels, _, width) = layer.A_log.shape[0], layer.conv1d.weight.shape
    groups = (channels - heads * layer.head_dim) // (2 * layer.ssm_state_size)
    return LinearSpec(groups, heads, layer.ssm_state_size, layer.head_dim, width, Kind.MAMBA2)


def _mamba2_weights(layer: Any) -> Mapping[str, Any]:
    own = {"shift": _shift(layer.conv1d), "skip": layer.D.float(), "limits": layer.time_step_limit}
    return _decays(layer) | own | {"weight": _taps(layer.conv1d)}


def _mamba2_project(layer: Any, x: Tensor) -> Projected:
    return _mamba2_parts(layer, layer.in_proj(x)[0])


def _mamba2_parts(layer: Any, projected: Tensor) -> Projected:
    heads, channels = layer.A_log.shape[0], layer.conv1d.weight.shape[0]
    gate, inputs, step = torch.split(projected, [heads * layer.head_dim, channels, heads], -1)
    return Projected(inputs, gate, step, step[:, :0])


def _mamba2_finish(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    normed = layer.norm(out.flatten(1)[None], gate[None])
    return layer.out_proj(normed.to(gate.dtype))  # type: ignore[no-any-return]


def _of_falcon(layer: Any, x: Tensor) -> Projected:
    """Each part of the projection has a factor. Sizes in the module are of all ranks, sizes of weights of one rank."""
    inner, size = layer.intermediate_size, layer.groups_time_state_size
    first = layer.mup_vector[0, 0, [0, inner, 2 * inner, 2 * inner + size, 2 * inner + 2 * size]]
    spec = _mamba2_sizes(layer)
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    sizes = values, values, keys, keys, spec.value_heads
    factors = torch.cat([factor.expand(size) for factor, size in zip(first, sizes, strict=True)])
    return _mamba2_parts(layer, layer.in_proj(x * layer.ssm_in_multiplier)[0] * factors)


def _falcon_finish(layer: Any, out: Tensor, gate: Tensor) -> Tensor:
    return (_mamba2_finish if layer.mamba_rms_norm else _mamba_finish)(layer, out, gate)


_MAMBA2 = Family(_mamba2_sizes, _mamba2_weights, _mamba2_project, _mamba2_finish)

FAMILIES = {
    "Qwen3NextGatedDeltaNet": _delta(_of_qwen3_next),
    "Qwen3_5GatedDeltaNet": _delta(_of_qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": _delta(_of_qwen3_5),
    "OlmoHybridGatedDeltaNet": _delta(_of_olmo_hybrid),
    "KimiLinearDeltaAttention": Family(_kimi_sizes, _kimi_weights, _of_kimi, _delta_finish),
    "BailingHybridDeltaAttention": Family(_kimi_sizes, _bailing_weights, _of_bailing, _delta_finish),
    "MiniMaxLightningAttention": _LIGHTNING,
    "Lfm2ShortConv": _CONVOLUTION,
    "Lfm2MoeShortConv": _CONVOLUTION,
    "JambaMambaMixer": _JAMBA,
    "NemotronHMamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "FalconH1Mixer": Family(_mamba2_sizes, _mamba2_weights, _of_falcon, _falcon_finish),
}
"""By the name of a module's class."""


def spec_of(layer: Any) -> LinearSpec:
    """The sizes of a layer of transformers, or of the part of it that a rank holds."""
    return FAMILIES[type(layer).__name__].sizes(layer)
