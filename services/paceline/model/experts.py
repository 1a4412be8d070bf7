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
    """Lets the experts of a model on the CPU run padded; False if nothing was changed.

    In bfloat16 it is products of a single row that round differently, at some widths, and one result in 20,000 that
    shows it. Quantized experts keep the products of their own library. Classes that do not let one choose how their
    experts run are padded if they have an expert that returns what it gets, as LongCat's have, and stay as they are
    otherwise: the self-test tells what they do.
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
    """Before the experts of a class whose first expert behind the routed ones returns what it gets."""
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
    """Number of tokens that fill up the chosen experts, and the experts ``[tokens, k]`` that they go to.

    As many as could ever be needed, and one more: what is not needed is routed to ``num_experts``, beyond the last,
    and comes last among the rows, where the tail of elementwise kernels is.
    """
    num_chosen = chosen.shape[1]
    expert = torch.arange(num_experts, device=chosen.device)
    counts = (chosen.reshape(-1, 1) == expert).sum(0)
    missing = torch.where(counts > 0, MIN_TOKENS - counts, 0)
    place = torch.arange(MIN_TOKENS - 1, device=chosen.device)
    routes = torch.where(place < missing[:, None], expert[:, None], num_experts).reshape(-1)
    rows = _num_rows(num_experts, num_chosen)
    return rows, nn.functional.pad(routes, (0, rows * num_chosen - routes.numel()), value=num_experts).view(rows, -1)
