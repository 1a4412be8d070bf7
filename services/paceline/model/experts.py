"""Experts whose products have at least ``MIN_TOKENS`` rows, whatever tokens choose them.

A mixture of experts multiplies each expert by the tokens that chose it: one, two or three rows in one step, many in
another. Products of one to three rows round differently (``shapes.py``). Here tokens of zeros, whose results nobody
reads, fill every chosen expert up. transformers' ``grouped_mm`` multiplies. It skips tokens routed beyond the last
expert, so experts that no token chose are not read.

On a GPU the experts of a quantized checkpoint stay as they are stored (``stored_weights.py``). ``scaled_triton.py``
multiplies by them, without padding.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from paceline.model.scaled import ScaledWeight
from paceline.model.shapes import MIN_TOKENS

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of experts that may stay as they are stored."""
_NAME = "paceline"


def pad_experts(model: PreTrainedModel) -> bool:
    """Pads the inputs of the experts of a model on the CPU, or without weights; returns False if nothing was changed.

    In bfloat16, only products of a single row round differently. This happens at some widths, in one result of 20,000.
    Quantized experts keep the products of their own library. Some classes do not let the caller choose how their
    experts run. They have another forward if they have experts that return their input, as LongCat's have. Otherwise
    they stay as they are, and the self-test compares their bits.
    """
    if model.device.type not in ("cpu", "meta") or getattr(model, "is_quantized", False):
        return False
    with_identity = [module for module in model.modules() if getattr(module, "zero_expert_num", 0)]
    for module in with_identity:
        forward, of_rank = partial(_with_identity, module), vars(module).get("forward")
        module.forward = forward if of_rank is None else partial(of_rank.func, forward)  # the sum over ranks stays
    if with_identity:
        return True
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not experts or not model._can_set_experts_implementation():
        return False
    run_scaled(model)
    for module in experts:
        module._is_expert_parallel = True  # what is routed beyond the last expert is left out
    return True


def takes_scaled(module: nn.Module) -> bool:
    """True if a module holds weights of experts that ``run_scaled`` can multiply by."""
    return hasattr(module, "_is_expert_parallel") and not getattr(module, "has_post_expert_norm", True)


def run_scaled(model: PreTrainedModel) -> None:
    """Has the experts of a model multiplied here: experts that stay as they are stored, and padded ones."""
    ExpertsInterface.register(_NAME, _forward)
    model.set_experts_implementation(_NAME)


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """Says why a model with such experts as LongCat's is not compiled, as a clause; None if it has none."""
    if any(getattr(module, "zero_expert_num", 0) for module in model.modules()):
        return "it has experts that return their input, and in a compiled step its rows depend on the others"
    return None


def _forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``padded_experts`` of experts that are padded, or as they are stored."""
    if isinstance(module.down_proj, ScaledWeight):
        if hidden.device.type == "cuda":
            return _by_triton(module, hidden, chosen, weights)
        module = _dequantized(module)
    run = padded_experts if module._is_expert_parallel else grouped_mm_experts_forward
    out: Tensor = run(module, hidden, chosen, weights)
    return out


def _by_triton(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    from paceline.model import scaled_triton as kernels

    up = module.gate_up_proj if module.has_gate else module.up_proj
    name = "gate_up_proj_bias" if module.has_gate else "up_proj_bias"
    biases = (getattr(module, name), module.down_proj_bias) if module.has_bias else (None, None)
    routes = kernels.routed(hidden, chosen, up.held)
    projected = kernels.multiply_routed(hidden, up.held, biases[0], routes)
    active = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
    results = kernels.multiply_routed(active, module.down_proj.held, biases[1], routes, back=True)
    return kernels.weighted(results, chosen, weights, module.num_experts)


def _dequantized(module: Any) -> SimpleNamespace:
    """The experts with plain weights, made anew at each call: where there is no kernel."""
    facts = {n: getattr(module, n) for n in ("num_experts", "has_gate", "has_bias", "is_transposed",
                                             "has_post_expert_norm", "_is_expert_parallel", "_apply_gate")}  # fmt: skip
    found = facts | {"act_fn": getattr(module, "act_fn", None)} | dict(module.named_parameters(recurse=False))
    for name in EXPERT_WEIGHTS:
        if isinstance(scaled := getattr(module, name, None), ScaledWeight):
            found[name] = scaled.weight.mT.contiguous() if module.is_transposed else scaled.weight
    return SimpleNamespace(**found)


def padded_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``[T, hidden] -> [T, hidden]`` by the experts ``chosen`` ``[T, k]`` of each token and their ``weights``."""
    rows, routes = padding_routes(chosen, module.num_experts)
    padded = torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[1])])
    chosen, weights = torch.cat([chosen, routes]), torch.cat([weights, weights.new_zeros(rows, weights.shape[1])])
    out: Tensor = grouped_mm_experts_forward(module, padded, chosen, weights)
    return out[: hidden.shape[0]]  # len() would make a constant of a compiled step's tokens


def _with_identity(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``padded_experts`` of a class whose experts after the routed ones return their input. Its own forward loops over
    the experts that were chosen, which a compiled step cannot."""
    num_experts = module.num_routed_experts
    routed = SimpleNamespace(
        num_experts=num_experts,
        gate_up_proj=module.gate_up_proj[:num_experts],
        down_proj=module.down_proj,
        has_gate=True,
        has_bias=False,
        is_transposed=False,
        has_post_expert_norm=False,
        _is_expert_parallel=True,  # what is routed beyond the last expert is left out
        _apply_gate=partial(_gated, module.act_fn),
    )
    share = weights.new_zeros(weights.shape[0])
    for of_expert in torch.where(chosen < num_experts, 0, weights).unbind(1):  # in this order in any step
        share = share + of_expert
    kept = module.identity_expert(hidden) * share[:, None]
    out: Tensor = padded_experts(routed, hidden, chosen, weights) + kept.to(hidden.dtype)
    return out


def _gated(activation: Any, projected: Tensor) -> Tensor:
    gate, up = projected.chunk(2, -1)
    out: Tensor = activation(gate) * up
    return out


def padding_routes(chosen: Tensor, num_experts: int) -> tuple[int, Tensor]:
    """Returns the number of padding tokens, and the experts ``[tokens, k]`` that they are routed to.

    There is one padding token more than could ever be needed. Padding that no expert needs is routed to
    ``num_experts``, beyond the last expert. It comes last among the rows, where elementwise kernels have their tail.
    """
    num_chosen = chosen.shape[1]
    expert = torch.arange(num_experts, device=chosen.device)
    counts = (chosen.reshape(-1, 1) == expert).sum(0)
    missing = torch.where(counts > 0, MIN_TOKENS - counts, 0)
    place = torch.arange(MIN_TOKENS - 1, device=chosen.device)
    routes = torch.where(place < missing[:, None], expert[:, None], num_experts).reshape(-1)
    rows = -(-num_experts * (MIN_TOKENS - 1) // num_chosen) + 1
    return rows, nn.functional.pad(routes, (0, rows * num_chosen - routes.numel()), value=num_experts).view(rows, -1)
