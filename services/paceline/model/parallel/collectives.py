"""Exchanges between the ranks of a sharded model: sums, small tensors and messages.

Every rank sums in the order of the ranks, in float32. So all ranks get the same bits, and a token's result does not
depend on its place in a tensor. Every operation must be called by all ranks in the same order.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.errors import EngineError, reason_of

if TYPE_CHECKING:
    from paceline.model.parallel.one_shot import OneShot

log = logging.getLogger(__name__)


class Collectives(ABC):
    """One rank's end of the exchange. Not thread-safe: the thread that runs the model owns it."""

    on_one_host = False
    """True if all ranks are known to be on this host."""

    def __init__(self, rank: int, degree: int, *, device: torch.device, timeout_s: float) -> None:
        self.rank, self.degree, self.device, self.timeout_s = rank, degree, device, timeout_s

    @abstractmethod
    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        """``[degree, *shape]``: the ranks' tensors of one shape and dtype.

        Raises:
            EngineError: a rank is gone, or has not come within ``timeout_s`` (the group's, if it is None).
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. Exchanges that other ranks are waiting for fail at once."""

    @property
    def host(self) -> Collectives:
        """The exchange of tensors in host memory: plans, barriers and all waiting that may take long.

        It is this one, unless the ranks' tensors are on accelerators.
        """
        return self

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Returns when all ranks have come. Raises as ``all_gather``."""
        self.host.all_gather(torch.zeros(1), timeout_s=timeout_s)

    def least(self, value: int) -> int:
        """The smallest of the ranks' values. Raises as ``all_gather``."""
        return int(self.host.all_gather(torch.tensor([value])).min())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, as a new tensor of the same dtype. Raises as ``all_gather``."""
        return sum_in_order(self.all_gather(tensor))

    def broadcast(self, payload: bytes | None, *, source: int = 0, timeout_s: float | None = None) -> bytes:
        """The bytes of rank ``source``, on every rank; the others pass None. Raises as ``all_gather``.

        Returns when all ranks have come. ``timeout_s`` holds for them to come, the group's for the bytes.
        """
        assert (payload is not None) == (self.rank == source), "one rank has the message"
        host, mine = self.host, torch.tensor([len(payload or b"")])
        length = int(host.all_gather(mine, timeout_s=timeout_s)[source])
        message = torch.zeros(length, dtype=torch.uint8)
        if payload:
            message.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return host.all_gather(message)[source].numpy().tobytes() if length else b""

    def compiled_shims(self) -> dict[Any, list[str]] | None:
        """The operators of this exchange with the C functions that a compiled model calls; None: it cannot."""
        return None

    def compiled_key(self) -> str:
        """Part of a compiled model's cache key that names this exchange."""
        return f"{self.degree}"

    def failure(self) -> str | None:
        """Says why an exchange within a compiled model failed, which cannot say so itself."""
        return None

    def check(self) -> None:  # noqa: B027 - nothing is left to tell where every call says itself what failed
        """Raises EngineError if an exchange on the device has failed since, which had no one to tell."""

    def why_not_recorded(self) -> str | None:
        """Says why steps with this exchange cannot be recorded as CUDA graphs; None if they can."""
        return "their exchange is in the memory of hosts"

    @property
    def recorded_bytes(self) -> int:
        """Bytes of the largest tensor that a recorded step may exchange."""
        return sys.maxsize

    def argmax(self, logits: Tensor, first: int) -> Tensor:
        """``[rows]`` token ids of the largest logits of all ranks, the smallest id among equals.

        ``logits [rows, width]`` are this rank's, of the tokens from ``first``; they may differ in width.
        """
        top, index = logits.float().max(-1)
        pairs = self.all_gather(torch.stack([top.double(), (index + first).double()]))  # ids below 2**53 are exact
        best = pairs[:, 0].argmax(0)  # the first among equals: ranks are in the order of their ids
        return pairs[:, 1].gather(0, best[None])[0].long()


def sum_in_order(gathered: Tensor) -> Tensor:
    """``[degree, *shape] -> [*shape]``: added from the first rank to the last, at least in float32, rounded once."""
    narrow = gathered.is_floating_point() and gathered.dtype.itemsize < 4
    total = gathered[0].float() if narrow else gathered[0].clone()
    for tensor in gathered[1:]:
        total = total + tensor
    return total.to(gathered.dtype)


class TorchCollectives(Collectives):
    """Exchange of tensors in host memory over torch.distributed (gloo). The default process group is left alone."""

    def __init__(self, store: Store, rank: int, degree: int, *, timeout_s: float) -> None:
        """``store`` is where the ranks meet; it is given from outside and shared by all of them.

        Raises:
            EngineError: not all ranks have come within ``timeout_s``.
        """
        super().__init__(rank, degree, device=torch.device("cpu"), timeout_s=timeout_s)
        self._group: Any  # torch's type stubs do not say that its backends gather
        with self._translated("meet the other ranks"):
            self._group = self._meet(store)
            self.all_gather(torch.zeros(1, device=self.device))

    def _meet(self, store: Store) -> Any:
        return dist.ProcessGroupGloo(store, self.rank, self.degree, timedelta(seconds=self.timeout_s))

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        tensor = tensor.contiguous()
        gathered = tensor.new_empty(self.degree, *tensor.shape)
        if tensor.numel() == 0:
            return gathered
        limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        with self._translated("gather from the other ranks", timeout_s):
            outputs = [row.reshape(-1).view(torch.uint8) for row in gathered.unbind()]
            self._group.allgather(outputs, tensor.reshape(-1).view(torch.uint8), limit).wait()
        return gathered

    def close(self) -> None:
        self._group.abort()

    @contextmanager
    def _translated(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, EngineError):
                raise
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            raise EngineError(
                f"rank {self.rank} of {self.degree} could not {what} (limit {limit_s:g} s): {reason_of(error)}"
            ) from error


class DeviceCollectives(TorchCollectives):
    """Exchanges tensors on GPUs, only within steps: by one launch each up to a size (``one_shot.py``), else over NCCL.
    ``host`` serves every exchange that may have to wait.

    NCCL has one limit for a whole group, and none for a single call. Its watchdog ends the *process* if an operation is
    enqueued for longer. So no rank may wait in NCCL for the next step, another rank's weights or the first message.
    Within a step the limit is the ranks' own, ``timeout_s``.
    """

    def __init__(self, host: Collectives, store: Store, *, device: torch.device) -> None:
        """``host``: the ranks' exchange of host memory, which this object owns. Its time limit holds for steps, too.

        Raises:
            EngineError: NCCL cannot connect the ranks.
        """
        self._host = host
        self._one_shot: OneShot | str = "their exchange is over NCCL"
        Collectives.__init__(self, host.rank, host.degree, device=device, timeout_s=host.timeout_s)
        with self._translated("connect its GPU to the other ranks' GPUs"):
            self._group = self._meet(store)
            self.barrier()
            self.all_gather(torch.zeros(1, device=device))

    @property
    def host(self) -> Collectives:
        return self._host

    def _meet(self, store: Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_s)
        return dist.ProcessGroupNCCL(store, self.rank, self.degree, options)

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        assert timeout_s is None, "a device takes no limit for a single call: wait over the hosts"
        one_shot = self._one_shot
        if isinstance(one_shot, str) or not one_shot.takes(tensor):
            return super().all_gather(tensor)
        return one_shot.gather(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        one_shot = self._one_shot
        if isinstance(one_shot, str) or not one_shot.sums(tensor):
            return super().all_reduce(tensor)
        return one_shot.sum(tensor)

    def use(self, one_shot: OneShot | str) -> None:
        """Takes exchanges of one launch from now on; or says why not. All ranks must."""
        self._one_shot = one_shot
        if isinstance(one_shot, str) and self.rank == 0:
            log.warning("%d ranks exchange over NCCL and run eagerly, which is slower: %s", self.degree, one_shot)

    def check(self) -> None:
        if not isinstance(self._one_shot, str) and self._one_shot.failed():
            raise EngineError(
                f"rank {self.rank} of {self.degree} could not exchange with the other GPUs "
                f"(limit {self.timeout_s:g} s): a rank did not come"
            )

    def why_not_recorded(self) -> str | None:
        return self._one_shot if isinstance(self._one_shot, str) else None

    @property
    def recorded_bytes(self) -> int:
        return super().recorded_bytes if isinstance(self._one_shot, str) else self._one_shot.slot_bytes

    def close(self) -> None:
        self._host.close()
        super().close()
