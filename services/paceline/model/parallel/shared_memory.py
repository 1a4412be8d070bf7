"""Collectives over shared memory on one host: microseconds where sockets take a hundred.

The memory has no name in any file system: rank 0 creates it, the others open it through rank 0's process. It is gone
when the last rank is, however it ends. The exchange itself is in ``shared_memory.cpp``, compiled once for each version
of torch. Its operators can be exported, and compiled models call it without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.core.native import COMPILE_LIMIT_S, Library
from paceline.errors import EngineError, reason_of
from paceline.model.parallel.collectives import Collectives, DeviceCollectives, TorchCollectives
from paceline.model.parallel.peers import open_peers

LIBRARY = Library(Path(__file__).with_suffix(".cpp"), "the operators of tensor parallelism")
_TOKEN_BYTES = 16
_SUMMED = (torch.bfloat16, torch.float32, torch.float16)
log = logging.getLogger(__name__)


def connect(
    store: Store,
    rank: int,
    degree: int,
    *,
    device: torch.device,
    timeout_s: float,
    start_timeout_s: float | None = None,
) -> Collectives:
    """Returns the fastest exchange that all ranks have: shared memory between CPUs of one host, else gloo; between GPUs
    NCCL in addition, and on one host kernels of our own over the memory of all.

    Raises:
        EngineError: not all ranks have come within ``start_timeout_s`` (None: ``timeout_s``); compiling the operators
            is allowed to take longer.
    """
    mine = {"reason": unavailable(), "host": _host()}
    store.set(f"rank{rank}", json.dumps(mine))
    limit = (timeout_s if start_timeout_s is None else start_timeout_s) + COMPILE_LIMIT_S
    try:
        store.wait([f"rank{i}" for i in range(degree)], timedelta(seconds=limit))
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank} of {degree} could not meet the other ranks (limit {limit:g} s): {reason_of(error)}"
        ) from error
    all_ranks = [json.loads(store.get(f"rank{i}")) for i in range(degree)]
    reasons = [facts["reason"] for facts in all_ranks if facts["reason"]]
    if any(facts["host"] != all_ranks[0]["host"] for facts in all_ranks):
        reasons.append("the ranks are on several hosts")
    host: Collectives
    if not reasons:
        host = SharedMemoryCollectives(PrefixStore("memory", store), rank, degree, timeout_s=timeout_s)
    else:
        if rank == 0:
            log.warning("%d ranks exchange over gloo, which is slower than shared memory: %s", degree, reasons[0])
        host = TorchCollectives(PrefixStore("group", store), rank, degree, timeout_s=timeout_s)
    if device.type == "cpu":
        return host
    try:
        group = DeviceCollectives(host, PrefixStore("device", store), device=device)
        group.use(open_peers(host, PrefixStore("peers", store), device))
        return group
    except BaseException:
        host.close()
        raise


def unavailable() -> str | None:
    """Says why this process cannot exchange over shared memory; None if it can. May compile the operators."""
    if not hasattr(os, "memfd_create"):
        return "shared memory without a name needs Linux"
    try:
        load_library()
    except EngineError as error:
        return str(error)
    return None


class SharedMemoryCollectives(Collectives):
    """All ranks on this host, and each in a process of its own."""

    on_one_host = True

    def __init__(self, store: Store, rank: int, degree: int, *, timeout_s: float) -> None:
        """Raises EngineError if not all ranks map the memory within ``timeout_s``."""
        super().__init__(rank, degree, device=torch.device("cpu"), timeout_s=timeout_s)
        self._number = -1
        library = load_library()
        limit = timedelta(seconds=timeout_s)
        fd = created = -1
        try:
            if rank == 0:
                token = secrets.token_hex(_TOKEN_BYTES)
                created = os.memfd_create(f"paceline-{token}", os.MFD_CLOEXEC)
                os.posix_fallocate(created, 0, library.paceline_ranks_bytes(degree))
                store.set("memory", json.dumps({"path": f"/proc/{os.getpid()}/fd/{created}", "token": token}))
            store.wait(["memory"], limit)
            memory = json.loads(store.get("memory"))
            if memory["token"] not in os.readlink(memory["path"]):
                raise OSError("the process of rank 0 is not to be seen here")
            fd = os.open(memory["path"], os.O_RDWR | os.O_CLOEXEC)
            self._number = library.paceline_ranks_attach(fd, rank, degree, timeout_s)
            if self._number < 0:
                raise OSError(ctypes.get_errno(), "it could not be mapped")
            fd = -1  # the library owns it
            store.set(f"mapped{rank}", "")
            store.wait([f"mapped{i}" for i in range(degree)], limit)
        except (OSError, RuntimeError) as error:
            self.close()
            raise EngineError(
                f"rank {rank} of {degree} could not map the shared memory (limit {timeout_s:g} s): {reason_of(error)}"
            ) from error
        finally:
            for left in (fd, created):
                if left >= 0:
                    os.close(left)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _SUMMED:
            return super().all_reduce(tensor)
        try:
            reduced: Tensor = torch.ops.paceline.ranks_sum(tensor, self._number)
        except RuntimeError as error:
            raise EngineError(reason_of(error)) from error
        return reduced

    def all_gather(self, tensor: Tensor, *, timeout_s: float | None = None) -> Tensor:
        operators, number = torch.ops.paceline, self._number
        gathered: Tensor
        try:
            if timeout_s is None:
                gathered = operators.ranks_gather(tensor, self.degree, number)
            else:
                gathered = operators.ranks_gather_within(tensor, self.degree, number, timeout_s)
        except RuntimeError as error:
            raise EngineError(reason_of(error)) from error
        return gathered

    def compiled_shims(self) -> dict[Any, list[str]] | None:
        operators = torch.ops.paceline
        tensor, result = "AtenTensorHandle x", "AtenTensorHandle* out"
        return {
            operators.ranks_sum.default: [
                f"AOTITorchError aoti_torch_cpu_ranks_sum({tensor}, int64_t group, {result})"
            ],
            operators.ranks_gather.default: [
                f"AOTITorchError aoti_torch_cpu_ranks_gather({tensor}, int64_t degree, int64_t group, {result})"
            ],
        }

    def compiled_key(self) -> str:
        return f"{self.degree} {self._number} {LIBRARY.digest}"

    def failure(self) -> str | None:
        text = ctypes.create_string_buffer(1024)
        length = load_library().paceline_ranks_failure(text, ctypes.c_size_t(len(text)))
        return text.raw[:length].decode() or None

    def close(self) -> None:
        if self._number >= 0:
            load_library().paceline_ranks_close(self._number)
            self._number = -1


@functools.cache
def load_library() -> ctypes.CDLL:
    """The operators. Raises EngineError as ``Library.load``."""
    library = LIBRARY.load(ctypes.RTLD_GLOBAL)
    library.paceline_ranks_bytes.restype = ctypes.c_size_t
    library.paceline_ranks_attach.restype = ctypes.c_int64
    library.paceline_ranks_attach.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_double]
    library.paceline_ranks_close.argtypes = [ctypes.c_int64]
    library.paceline_ranks_close.restype = None
    library.paceline_ranks_failure.restype = ctypes.c_size_t
    return library


def _host() -> str:
    """Equal for processes that can open each other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"
