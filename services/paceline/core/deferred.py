"""How host and accelerator talk within a step: uploads that wait for nothing, one download that waits.

A copy from pageable memory waits for everything that was queued before it, and so does every question whose answer
the host needs (``bool(tensor)``, ``nonzero``). A step has one such wait: where its outcomes are read. On the CPU all
of this is what it would be without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Ask = Callable[[Tensor], bool]
"""Puts a yes-or-no question, one bool on the device, whose rare answer is yes."""


def ask_now(question: Tensor) -> bool:
    """The answer, waited for."""
    return bool(question)


class Later:
    """Takes every answer for no. ``doubt`` tells with the results whether one was yes: then they are worthless."""

    def __init__(self) -> None:
        self._questions: list[Tensor] = []

    def __call__(self, question: Tensor) -> bool:
        self._questions.append(question.reshape(()))
        return False

    def doubt(self, device: torch.device) -> Tensor:
        """One bool on ``device``."""
        none = torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([none, *self._questions]).any()


def upload(values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """``values`` as a tensor on ``device``. From page-locked memory, which torch keeps until the copy is done."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def download(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on the host, with a single wait for all of them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return tuple(tensor.cpu() for tensor in tensors)
    host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return host
