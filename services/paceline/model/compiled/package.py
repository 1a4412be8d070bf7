"""Runs the library of an AOTInductor package without the interpreter's lock.

torch's own loader keeps the lock for the whole call. A replica's event loop is in the engine's process. If a step
blocked it, messages that arrive during the step, above all a draft's nodes, would be too late for the next one.
``ctypes`` releases the lock around a foreign function; the functions are the stable C interface of
``torch/csrc/inductor/aoti_runtime/interface.h``.

A step whose plan is in the host's memory is run by one call of ``package.cpp``, which makes its inputs from the plan's
buffer. As tensors of Python they would cost more than a small model's step.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import tempfile
import weakref
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core import rows
from paceline.core.native import Library
from paceline.core.noise import Stream
from paceline.errors import EngineError
from paceline.model import layout
from paceline.model.attention.chunks import code_of
from paceline.model.chain import Chain, Ranked
from paceline.model.compiled.backend import StepFunction

if TYPE_CHECKING:
    from paceline.model.kv_cache import KVCache
    from paceline.model.step_plan import StepPlan

log = logging.getLogger(__name__)

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

LIBRARY = Library(
    Path(__file__).with_suffix(".cpp"), "the call of compiled steps", ("-march=native",), (layout.HEADER,)
)
_HUGE_PAGE, _LARGE = 1 << 21, 1 << 24
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; there are no such files as are read below elsewhere
NEEDS_EXECUTOR = b"aoti_torch_proxy_executor_call_function("
_LIBRARY_CALL = re.compile(rb"\baoti_torch_cpu_(\w+)\(")
_NATIVE = {
    b"packed_linear",
    b"packed_heads",
    b"gated_silu",
    b"attend_pages",
    b"round_to_fp8",
    b"score_pages",
    b"layer_callback",
    b"ranks_sum",
    b"ranks_gather",
    b"linear_attention",
}
"""Operators of ours, which compute every token alike in steps of any size."""


def load_package(path: Path) -> StepFunction:
    """The step in a package. Raises EngineError if it cannot be loaded here."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name) for name in package.namelist() if name.endswith(".cpp")]
    if any(NEEDS_EXECUTOR in source for source in sources):
        log.warning("%s calls operators that only torch's loader can: its steps hold up other threads", path.name)
        loaded: StepFunction = torch._inductor.aoti_load_package(str(path))
        return loaded
    return CompiledPackage(path, is_native=all(_NATIVE.issuperset(_LIBRARY_CALL.findall(each)) for each in sources))


class CompiledPackage:
    """The one model of a CPU package. ``inputs``: tensors and lists of tensors, as for the export."""

    def __init__(self, path: Path, *, is_native: bool = False) -> None:
        """``is_native``: it calls only our operators. So its steps need none of the padding that products and attention
        of other libraries need (``shapes.py``). Raises EngineError if the package cannot be loaded here."""
        self.is_native = is_native
        with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory(prefix="paceline-package-") as folder:
            package.extractall(folder)
            (library,) = Path(folder).rglob("*.so")
            before = set(large_mappings())
            self.load_library = ctypes.CDLL(str(library))
            self._container = ctypes.c_void_p()
            self._call(
                "AOTInductorModelContainerCreateWithDevice",
                ctypes.byref(self._container),
                ctypes.c_size_t(1),
                b"cpu",
                None,
            )
        number = ctypes.c_size_t()
        self._call("AOTInductorModelContainerGetNumOutputs", self._container, ctypes.byref(number))
        self._num_outputs = number.value
        for start, stop in set(large_mappings()) - before:
            _use_huge_pages(start, stop)
        self._run = ctypes.cast(self.load_library.AOTInductorModelContainerRun, ctypes.c_void_p)
        load_library()  # no step waits for it
        self._cache: KVCache | None = None
        self._cached = _Handles(())
        weakref.finalize(self, self.load_library.AOTInductorModelContainerDelete, self._container)

    def __call__(self, *inputs: Any) -> Any:
        """The output of the exported function: a tensor, or a tuple of tensors."""
        tensors: list[Tensor] = []
        for given in inputs:
            tensors += (given,) if isinstance(given, Tensor) else given
        handles, outputs = _handles(tensors), (ctypes.c_void_p * self._num_outputs)()  # the call takes the handles over
        self._call(
            "AOTInductorModelContainerRun",
            self._container,
            handles,
            ctypes.c_size_t(len(handles)),
            outputs,
            ctypes.c_size_t(self._num_outputs),
            None,
            None,
        )
        return _results(outputs)

    def run_plan(self, plan: StepPlan, cache: KVCache, dtype: torch.dtype, window: int | None) -> Any:
        """The output of the exported function for the inputs of ``plan`` (``StepPlan.inputs``), all on the CPU."""
        if (library := self._native(dtype)) is None:
            return self(*plan.inputs(cache, dtype, window))
        outputs = (ctypes.c_void_p * self._num_outputs)()
        linear = array("q") if plan.linear is None else plan.linear.encode()
        model, sizes = self._model(cache, dtype, window), array("q", plan.shape)
        given = (sizes.buffer_info()[0], plan.buffer.data_ptr(), *linear.buffer_info())
        if library.paceline_run_step(ctypes.byref(model), *given, outputs, self._num_outputs):
            raise EngineError("a step of a compiled model failed")  # it has said why on standard error
        return _results(outputs)

    def chains(self, dtype: torch.dtype) -> bool:
        """True if ``run_chain`` may be called here, of a model of this dtype."""
        return self._num_outputs == 1 and self._native(dtype) is not None and rows.addresses() is not None

    def run_chain(self, chain: Chain, cache: KVCache, dtype: torch.dtype, window: int | None) -> Ranked:
        """The tokens that a chain of steps ranks, all on the CPU. ``chains`` comes first."""
        library, passes = self._native(dtype), rows.addresses("paceline_best")
        assert library is not None, "chains comes first"
        assert passes is not None, "chains comes first"
        by, stop, most = chain.draw, chain.stop, len(chain.writes) + 1
        bins = [array("d", values) for values in (stop.edges, stop.constants, stop.slopes)]
        numbers = [array("q", values) for values in (chain.first.shape, chain.then.shape, chain.rows, chain.writes)]
        first_sizes, then_sizes, of_session, of_cache = (x.buffer_info()[0] for x in numbers)
        draw = _Draw(
            *passes, by.seed_bits, by.position, by.top_k, Stream.COUPLED, by.fan_out, by.temperature, by.log_min_p
        )
        until = _Stop(
            *[x.buffer_info()[0] for x in bins], len(stop.edges), stop.mass, stop.correction, stop.path, stop.least
        )
        ids, scores = (ctypes.c_int64 * (most * by.fan_out))(), (ctypes.c_double * (most * by.fan_out))()
        num_ranked = library.paceline_run_chain(
            ctypes.byref(self._model(cache, dtype, window)),
            first_sizes,
            chain.first.buffer.data_ptr(),
            then_sizes,
            chain.then.buffer.data_ptr(),
            most,
            of_session,
            of_cache,
            ctypes.byref(draw),
            ctypes.byref(until),
            ids,
            scores,
        )
        if num_ranked < 0:
            raise EngineError("a step of a compiled model failed")  # it has said why on standard error
        spans = [slice(at * by.fan_out, (at + 1) * by.fan_out) for at in range(num_ranked)]
        return [(ids[span], scores[span]) for span in spans]

    def _native(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        return load_library() if layout.masks_usable(dtype) else None

    def _model(self, cache: KVCache, dtype: torch.dtype, window: int | None) -> _Model:
        if cache is not self._cache:
            pools = chain.from_iterable(cache.linear_pools.values())
            self._cache, self._cached = cache, _Handles((*cache.model_keys, *cache.model_values, *pools))
        kept = self._cached.array
        return _Model(self._run, self._container, code_of(window), dtype.itemsize, ctypes.addressof(kept), len(kept))

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self.load_library, name)(*arguments) != 0:  # it has said why on standard error
            raise EngineError(f"{name} of a compiled model failed")


class _Model(ctypes.Structure):
    """``Model`` of package.cpp."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("container", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("num_cache", ctypes.c_int64),
    )


class _Draw(ctypes.Structure):
    """``Draw`` of package.cpp."""

    _fields_ = (
        ("best", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("seed", "position", "top_k", "stream", "fan_out")),
        ("temperature", ctypes.c_float),
        ("floor", ctypes.c_float),
    )


class _Stop(ctypes.Structure):
    """``Stop`` of package.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("edges", "constant", "slope")),
        ("num_edges", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("mass", "correction", "path", "least")),
    )


class _Handles:
    """Handles of tensors for foreign functions, which keep them alive for as long as this lives."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.array = _handles(tensors)
        weakref.finalize(self, _results, self.array)


def _handles(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """A handle for each tensor, for a function that takes them over."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return (ctypes.c_void_p * len(capsules))(*[_pointer_of(capsule, None) for capsule in capsules])


def _results(handles: ctypes.Array[ctypes.c_void_p]) -> Any:
    """The tensors of some handles, which it takes over: one, or a tuple of them."""
    capsules = [_capsule_of(handle, None, None) for handle in handles]
    results = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled library; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    library = LIBRARY.load_or_warn("the inputs of compiled steps are made one by one")
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.paceline_run_step.argtypes = [pointer, pointer, pointer, pointer, number, pointer, number]
    library.paceline_run_step.restype = ctypes.c_int
    library.paceline_run_chain.argtypes = [*[pointer] * 5, number, *[pointer] * 6]
    library.paceline_run_chain.restype = number
    return library


def large_mappings() -> Iterator[tuple[int, int]]:
    """Addresses [start, stop) of memory that was asked for in large pieces: no stack, no heap, no file."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        span, access, _, _, inode, *name = line.split()
        start, stop = (int(address, 16) for address in span.split("-"))
        if access.startswith("rw") and inode == "0" and not name and stop - start >= _LARGE:
            yield start, stop


def _use_huge_pages(start: int, stop: int) -> None:
    """Moves a range of memory to pages of 2 MiB, where the system has them.

    Every step reads all weights. A core that translates an address every 4 KiB reads them a tenth more slowly. Memory
    that the system refuses to move stays as it is.
    """
    start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
    if start < stop:
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            ctypes.CDLL(None).madvise(address, size, advice)
