"""Linear layers of unchanged transformers models: the recognition of them, and a forward over slots in place of theirs.

transformers' own forward has another form for one token than for many, whose chunks begin where a call begins; so its
bits depend on how a text is cut. Where its optional kernel packages or kernels from a hub are installed it has further
ones. None of these runs: the module's projections, norm and weights are used. Between them runs the native operator,
or ``gated_delta`` where that is unavailable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.linear import LinearSpec
from paceline.errors import ConfigError
from paceline.model.linear import native
from paceline.model.linear.gated_delta import Gates, LinearInputs, LinearPools, gated_delta
from paceline.model.linear.plan import LinearStep

_Projected = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs of the convolution ``[T, conv_dim]``, gate ``[T, value heads, value_dim]``, b and a ``[T, value heads]``."""


def _of_qwen3_next(layer: Any, x: Tensor) -> _Projected:
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return torch.cat([part.flatten(2) for part in (q, k, v)], -1)[0], z[0], b[0], a[0]


def _of_qwen3_5(layer: Any, x: Tensor) -> _Projected:
    z = layer.in_proj_z(x)[0].unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return layer.in_proj_qkv(x)[0], z, layer.in_proj_b(x)[0], layer.in_proj_a(x)[0]


def _of_olmo_hybrid(layer: Any, x: Tensor) -> _Projected:
    mixed = torch.cat([project(x)[0] for project in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    gate = layer.g_proj(x)[0].unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return mixed, gate, layer.b_proj(x)[0], layer.a_proj(x)[0]


_PROJECTIONS: dict[str, Callable[[Any, Tensor], _Projected]] = {
    "Qwen3NextGatedDeltaNet": _of_qwen3_next,
    "Qwen3_5GatedDeltaNet": _of_qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _of_qwen3_5,
    "OlmoHybridGatedDeltaNet": _of_olmo_hybrid,
}
"""How each class of transformers projects hidden states."""


def replace_linear_layers(model: PreTrainedModel, name: str) -> dict[int, LinearSpec]:
    """Replaces the forward of each gated delta layer by one over slots. Returns the layers' sizes by layer index.

    Layers of other kinds stay as they are; ``probe_layers`` refuses those that it does not support.

    Raises:
        ConfigError: a layer does not compute what ``gated_delta`` does.
    """
    specs: dict[int, LinearSpec] = {}
    for _, module in linear_modules(model):
        project = _PROJECTIONS[type(module).__name__]
        if getattr(module, "activation", "silu") != "silu":
            raise ConfigError(f"{name} has linear layers with hidden_act {module.activation!r}: 'silu' is allowed")
        specs[int(module.layer_idx)] = spec = LinearSpec.of(module)
        module.forward = partial(_forward, module, project, spec, _Weights.of(module))
    return specs


def linear_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """The layers that ``replace_linear_layers`` replaces, in its order, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in _PROJECTIONS]


def linear_indices(model: PreTrainedModel) -> list[int]:
    """Indices of these layers."""
    return [int(module.layer_idx) for _, module in linear_modules(model)]


class _Weights(NamedTuple):
    """A layer's own numbers, as ``Gates`` has them."""

    weight: Tensor
    decay: Tensor
    bias: Tensor
    scale: int

    @classmethod
    def of(cls, layer: Any) -> Self:
        with torch.no_grad():
            weight = layer.conv1d.weight.squeeze(1).t().float().contiguous()
            scale = 2 if getattr(layer, "allow_neg_eigval", False) else 1
            return cls(weight, -layer.A_log.float().exp(), layer.dt_bias.float(), scale)


def run(inputs: LinearInputs, index: int, spec: LinearSpec, gates: Gates) -> Tensor:
    """The step of the linear layer ``index``, by the native operator where there is one."""
    pools = inputs.pools[index]
    if gates.inputs.dtype in native.DTYPES and native.unavailable() is None:
        return native.gated_delta(inputs.numbers, pools, gates, spec.key_heads)
    return by_torch(inputs.numbers, pools, spec, gates)


def by_torch(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """The step of a linear layer by the reference implementation."""
    return gated_delta(LinearStep.decode(numbers.tolist()), pools, spec, gates)


def _forward(
    layer: Any,
    project: Callable[[Any, Tensor], _Projected],
    spec: LinearSpec,
    weights: _Weights,
    hidden_states: Tensor,
    *,
    linear: LinearInputs | None,
    **unused: Any,
) -> Tensor:
    """``[1, T, hidden] -> [1, T, hidden]``. ``linear`` None: a probe, whose result is not read."""
    mixed, z, b, a = project(layer, hidden_states)
    out = z.new_zeros(z.shape) if linear is None else run(linear, layer.layer_idx, spec, Gates(mixed, a, b, *weights))
    norm = layer.o_norm if hasattr(layer, "o_norm") else layer.norm
    out_proj = layer.o_proj if hasattr(layer, "o_proj") else layer.out_proj
    out = norm(out.flatten(0, 1), z.flatten(0, 1))
    result: Tensor = out_proj(out.view(1, hidden_states.shape[1], -1))
    return result
