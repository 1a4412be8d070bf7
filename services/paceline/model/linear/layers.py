"""Linear layers of unchanged transformers models: the recognition of them, and a forward over slots in place of theirs.

transformers' own forward has another form for one token than for many, whose chunks begin where a call begins. So its
bits depend on how a text is cut. Where its optional kernel packages or kernels from a hub are installed it has further
ones. None of these runs: the module's projections, norm and weights are used (``families.py``). Between them runs
``operator.py``, or its native implementation where that is available; on a GPU ``triton.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.linear import LinearSpec
from paceline.core.cuda import LEAST_CAPABILITY, triton_unavailable
from paceline.errors import ConfigError
from paceline.model.linear import native
from paceline.model.linear.families import FAMILIES, Family, spec_of
from paceline.model.linear.operator import Gates, LinearInputs, LinearPools, run_step
from paceline.model.linear.plan import LinearStep


def replace_linear_layers(model: PreTrainedModel, name: str) -> dict[int, LinearSpec]:
    """Replaces the forward of each linear layer by one over slots. Returns the layers' sizes by layer index.

    Layers of other classes stay as they are; ``probe_layers`` refuses the unsupported ones.

    Raises:
        ConfigError: a layer does not compute what ``operator.py`` does.
    """
    specs: dict[int, LinearSpec] = {}
    _number_attention(model)
    for _, module in linear_modules(model):
        if getattr(module, "activation", "silu") != "silu":
            raise ConfigError(f"{name} has linear layers with hidden_act {module.activation!r}: 'silu' is allowed")
        family = FAMILIES[type(module).__name__]
        specs[int(module.layer_idx)] = spec = family.sizes(module)
        with torch.no_grad():
            module.forward = partial(_forward, module, family, spec, family.weights(module))
    return specs


def _number_attention(model: PreTrainedModel) -> None:
    """Sets the indices of Zamba2's layers in their attention, whose weights they share."""
    for layer in model.modules():
        if type(layer).__name__ == "Zamba2HybridLayer":
            layer.shared_transformer.self_attn.layer_idx = layer.mamba_decoder.layer_idx


def linear_modules(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """The layers that ``replace_linear_layers`` replaces, in its order, with their names."""
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in FAMILIES]


def linear_indices(model: PreTrainedModel) -> list[int]:
    """Indices of these layers."""
    return [int(module.layer_idx) for _, module in linear_modules(model)]


def why_eager(model: PreTrainedModel) -> str | None:
    """Says why a model's linear layers are not compiled, as a clause; None if they can be, or it has none. On a GPU
    parts of the model are compiled, none of which is a linear layer."""
    kinds = sorted({spec_of(module).kind for _, module in linear_modules(model)})
    if not kinds or model.device.type != "cpu":
        return None
    if (reason := native.unavailable()) is not None:
        return f"it has {kinds[0]} layers, and {reason}"
    if model.dtype not in native.DTYPES:
        return f"it has {kinds[0]} layers in {model.dtype}, which are compiled in bfloat16 and float32 alone"
    return None


def run(inputs: LinearInputs, index: int, spec: LinearSpec, gates: Gates) -> Tensor:
    """The step of the linear layer ``index``, by the operator of its device."""
    pools = inputs.pools[index]
    if inputs.numbers.is_cuda:
        return by_triton(inputs.numbers, pools, spec, gates)
    if gates.inputs.dtype in native.DTYPES and native.unavailable() is None:
        return native.run_step(inputs.numbers, pools, spec, gates)
    return by_torch(inputs.numbers, pools, spec, gates)


def by_triton(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """The step of a linear layer by the kernels for CUDA. ``why_not_on_cuda`` comes first."""
    from paceline.model.linear.triton import run_step as run_on_cuda

    return run_on_cuda(numbers, pools, spec, gates)


def why_not_on_cuda(model: PreTrainedModel) -> str | None:
    """Says why a model's linear layers cannot run on its CUDA device, as a clause about their kernel; None if they can,
    or it has none or is elsewhere."""
    if model.device.type != "cuda" or not linear_modules(model):
        return None
    if (reason := triton_unavailable()) is not None:
        return reason
    if torch.cuda.get_device_capability(model.device) < LEAST_CAPABILITY:
        return f"needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


def by_torch(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """The step of a linear layer by the reference implementation."""
    return run_step(LinearStep.decode(numbers.tolist()), pools, spec, gates)


def _forward(
    layer: Any,
    family: Family,
    spec: LinearSpec,
    weights: Mapping[str, Any],
    hidden_states: Tensor,
    *,
    linear: LinearInputs | None,
    **unused: Any,
) -> Any:
    """``[1, T, hidden]`` to what the class returns. ``linear`` None: a probe, whose result is not read."""
    inputs, gate, a, b = family.project(layer, hidden_states)
    if linear is None:
        out = inputs.new_zeros(inputs.shape[0], spec.value_heads, spec.value_dim)
    else:
        select = None if family.select is None else partial(family.select, layer)
        out = run(linear, layer.layer_idx, spec, Gates(inputs, a, b, **weights, select=select))
    return family.finish(layer, out, gate)
