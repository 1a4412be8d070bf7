"""Experts whose products have at least ``MIN_TOKENS`` rows, whatever tokens choose them.

A mixture of experts multiplies each expert by the tokens that chose it: one, two or three rows in one step, many in
another, and products of so few rows round differently (``shapes.py``). Here tokens of zeros, whose results nobody
reads, fill every chosen expert up. The multiplying is left to transformers' ``grouped_mm``, which leaves out what is
routed beyond the last expert, so that experts that nobody chose are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from paceline.model.shapes import MIN_TOKENS

_NAME = "paceline_padded"


def pad_experts(model: PreTrainedModel) -> bool:
    """Pads the inputs of the experts of a model on the CPU; returns False if nothing was changed.

    In bfloat16, only products of a single row round differently. This happens at some widths, in one result of 20,000.
    Quantized experts keep the products of their own library. Some classes do not let the caller choose how their
    experts run. They are padded if they have an expert that returns its input, as LongCat's have. Otherwise they stay
    as they are, and the self-test compares their bits.
    """
    if model.device.type != "cpu" or getattr(model, "is_quantized", False):
        return False
    with_identity = [module for module in model.modules() if getattr(module, "zero_expert_num", 0)]
    for module in with_identity:
        module.register_forward_pre_hook(_padded)
        module.register_forward_hook(_cut)
    if with_identity:
        return True
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    if not experts or not model._can_set_experts_implementation():
        return False
    ExpertsInterface.register(_NAME, padded_experts)
    model.set_experts_implementation(_NAME)
    for module in experts:
        module._is_expert_parallel = True  # what is routed beyond the last expert is left out
    return True


def padded_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """``[T, hidden] -> [T, hidden]`` by the experts ``chosen`` ``[T, k]`` of each token and their ``weights``."""
    out: Tensor = grouped_mm_experts_forward(module, *_with_padding(module.num_experts, hidden, chosen, weights))
    return out[: hidden.shape[0]]  # len() would make a constant of a compiled step's tokens


def _padded(module: Any, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pads the inputs of experts of a class whose first expert after the routed ones returns its input."""
    return _with_padding(module.num_routed_experts, *args)


def _cut(module: Any, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> Tensor:
    return out[: -_num_rows(module.num_routed_experts, args[1].shape[1])]


def _with_padding(num_experts: int, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, routes = padding_routes(chosen, num_experts)
    hidden = torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[1])])
    return hidden, torch.cat([chosen, routes]), torch.cat([weights, weights.new_zeros(rows, weights.shape[1])])


def _num_rows(num_experts: int, num_chosen: int) -> int:
    return -(-num_experts * (MIN_TOKENS - 1) // num_chosen) + 1


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
    rows = _num_rows(num_experts, num_chosen)
    return rows, nn.functional.pad(routes, (0, rows * num_chosen - routes.numel()), value=num_experts).view(rows, -1)
