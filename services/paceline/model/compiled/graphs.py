"""CUDA graphs: the kernels of a step launched as one, which a small model's decoding otherwise waits for.

Recordings of one engine share their working memory, since no two of them run at once.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ConfigError, EngineError
from paceline.model.attention.flashinfer import Library
from paceline.model.attention.kernels import Kernel
from paceline.model.compiled.backend import Backend, DeviceBackend, HostBackend, Replay
from paceline.model.compiled.buckets import Limits
from paceline.model.kv_cache import KVCache
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_replay

CudaGraphs = bool | Literal["auto"]

_WARM_UPS = 2
"""Calls before the first recording, and one before each further: libraries choose and allocate at the first ones."""
_RESERVED = 0.02
"""Share of the device's memory that recordings leave to prefill, which runs between them.

Recordings use the memory that weights and KV pages leave: with a kv_fraction of 0.9, a tenth of the memory without
weights.
"""
aten = torch.ops.aten
_WAITING = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.bincount),
}
"""Operators whose result, or its shape, the host has to know."""
RECORDING = threading.Lock()
"""CUDA allows one recording at a time in a process. During it no thread may wait for the whole device."""
log = logging.getLogger(__name__)


class CudaRecorder:
    """Records on a stream of its own, which other threads of the process may go on around."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._proven = False
        """True once something has been recorded: other shapes launch the same kinds of kernels."""

    def has_room(self) -> bool:
        """True if the device has memory for one more recording (``Recorder.has_room``)."""
        free, total = torch.cuda.mem_get_info(self._device)
        return bool(free > _RESERVED * total)

    def record(self, function: Callable[[], None]) -> Replay:
        """Records what ``function`` launches as a CUDA graph (``Recorder.record``). One engine of a process at a time.

        Raises:
            RuntimeError: ``function`` waits for the device, or does something else that cannot be recorded.
        """
        with RECORDING:
            return self._record(function)

    def _record(self, function: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(1 if self._proven else _WARM_UPS):
                function()
            if not self._proven:
                with WaitingRefused():  # type: ignore[no-untyped-call]
                    function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                function()
        except torch.OutOfMemoryError as error:  # unlike in a warm-up: torch's allocator is in the middle of it
            raise RuntimeError(str(error)) from error
        self._proven = True
        replay: Replay = graph.replay
        return replay


class WaitingRefused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators that wait for the device raise RuntimeError in this thread.

    A recording that fails in the middle leaves torch's allocator recording, so that what cannot be recorded has to be
    found before. (torch's own ``set_sync_debug_mode`` holds for all threads, and other engines may be at work.)
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = func.overloadpacket
        masks = args[1] if packet in (aten.index, aten.index_put, aten.index_put_) else ()
        waits = packet in _WAITING or any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if packet is aten._to_copy:
            device = (kwargs or {}).get("device")
            waits = device is not None and device.type == "cpu" and args[0].device.type != "cpu"
        if waits:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def require_graphs(cuda_graphs: CudaGraphs, device: torch.device, why_not: str | None = None) -> None:
    """Raises ConfigError where graphs are demanded of a device that has none, or of ranks that cannot record.

    ``why_not``: why the ranks cannot (``Collectives.why_not_recorded``); None: they can, or there is one.
    """
    if cuda_graphs is True and device.type != "cuda":
        raise ConfigError(
            f"cuda_graphs is true but the model runs on device {device.type!r}: use 'auto' or false, or device 'cuda'"
        )
    if cuda_graphs is True and why_not is not None:
        raise ConfigError(f"cuda_graphs is true and the ranks run eagerly, as {why_not}: use 'auto' or false")


def make_backend(
    cache: KVCache,
    dtype: torch.dtype,
    window: int | None,
    kernel: Kernel,
    cuda_graphs: CudaGraphs,
    max_cuda_graphs: int,
    least: Callable[[int], int] = int,
    library: Library | None = None,
) -> Backend:
    """Chooses the backend that runs the steps where ``cache`` lies. ``least``, ``library``: see
    ``DeviceBackend``.

    Raises:
        ConfigError: see ``require_graphs``.
    """
    device = cache.keys[0].device
    require_graphs(cuda_graphs, device)
    if device.type != "cuda":
        return HostBackend(cache, dtype, window)
    recorder = CudaRecorder(device) if cuda_graphs else None
    log.info("steps on %s run %s", torch.cuda.get_device_name(device), "as CUDA graphs" if recorder else "eagerly")
    return DeviceBackend(
        cache,
        dtype,
        window,
        kernel=kernel,
        recorder=recorder,
        max_shapes=max_cuda_graphs,
        least=least,
        library=library,
    )


def recordings_bytes(
    new_runner: Callable[[], ModelRunner], record: Callable[[ModelRunner], None], free_bytes: Callable[[], int]
) -> int:
    """Bytes of the device that recordings of an engine's steps take, by a trial; of several ranks all must ask.

    They hold the addresses of KV pages, so that pages which fill what they leave can only be made after a trial.

    Args:
        new_runner: makes a runner over few KV pages, which is given up again.
        record: records the steps (``record_steps``).
        free_bytes: of the device, the fewest of all ranks.
    """
    runner = new_runner()
    release_cached()
    before = free_bytes()
    record(runner)
    release_cached()
    taken = before - free_bytes()
    del runner
    release_cached()
    return max(0, taken)


def is_out_of_memory(error: Exception) -> bool:
    """True if the device or the host had no memory for a tensor."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def release_cached() -> None:
    """Returns memory to a GPU that nothing uses any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def record_steps(runner: ModelRunner, limits: Limits, max_len: int, cuda_graphs: CudaGraphs) -> None:
    """Records an engine's steps and keeps what equals eager steps; with several ranks on all of them.

    Raises:
        ConfigError: the model cannot be recorded although ``cuda_graphs`` is true; ``auto`` runs it eagerly instead.
        RanksLostError: another rank does not come.
    """
    runner.announce(limits, max_len)
    try:
        runner.record(limits)
    except EngineError:  # of another rank
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if cuda_graphs is True:
            raise ConfigError(f"cuda_graphs is true but this model cannot be recorded: {reason}") from error
        log.warning("this model cannot be recorded as CUDA graphs and runs eagerly: %s", reason)
    check_replay(runner, max_len)
