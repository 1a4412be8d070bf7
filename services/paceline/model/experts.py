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
    """Lets the experts of a float32 model on the CPU run padded; False if nothing was changed.

    Products in bfloat16 do not need it, and quantized experts keep those of their own library. Classes that do not let
    one choose how their experts run stay as they are: the self-test tells what they do.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or getattr(model, "is_quantized", False):
        return False
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
    tokens, num_chosen = chosen.shape
    rows, routes = padding_routes(chosen, module.num_experts)
    hidden = torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[1])])
    weights = torch.cat([weights, weights.new_zeros(rows, num_chosen)])
    out: Tensor = grouped_mm_experts_forward(module, hidden, torch.cat([chosen, routes]), weights)
    return out[:tokens]


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
    rows = -(-routes.numel() // num_chosen) + 1
    return rows, nn.functional.pad(routes, (0, rows * num_chosen - routes.numel()), value=num_experts).view(rows, -1)
