"""Transfers between host and accelerator within a step: uploads that wait for nothing, one download that waits.

A copy from pageable memory waits for all work queued before it. So does every value that the host needs
(``bool(tensor)``, ``nonzero``). A step has one such wait: where its outcomes are read. It waits for that step alone,
whatever has been queued since. On the CPU all of this costs what it would without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Check = Callable[[Tensor], bool]
"""Asks whether a rare condition holds, given as one bool on the device: True if the caller has to handle it."""


def check_now(condition: Tensor) -> bool:
    """Reads the condition from the device, which waits for all work queued before it."""
    return bool(condition)


class DeferredChecks:
    """A ``Check`` that never waits: it assumes that no condition holds and records them all.

    If ``any_failed`` turns out true, everything computed under the assumption has to be discarded.
    """

    def __init__(self) -> None:
        self._conditions: list[Tensor] = []

    def __call__(self, condition: Tensor) -> bool:
        self._conditions.append(condition.reshape(()))
        return False

    def any_failed(self, device: torch.device) -> Tensor:
        """One bool on ``device``, to be downloaded with the results: true if any recorded condition holds."""
        none = torch.zeros((), dtype=torch.bool, device=device)
        return torch.stack([none, *self._conditions]).any()


def upload(values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copies ``values`` to ``device`` without waiting, from page-locked memory, which torch keeps until it is done."""
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, queued when it is made."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors):
            self._host = tuple(tensor.cpu() for tensor in tensors)
            return
        self._host = tuple(
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
        )
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, with a single wait for all of them and for nothing that was queued after them."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def download(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies the tensors to the host, with a single wait for all of them."""
    return Download(*tensors).wait()
