"""Runs the library of an AOTInductor package without the interpreter's lock.

torch's own loader keeps the lock for the whole call. A replica's event loop lives in the engine's process: it would
stand still while a step runs, and everything that arrives meanwhile, a draft's nodes above all, would come too late
for the next one. ``ctypes`` releases the lock around a foreign function; the functions are the stable C interface of
``torch/csrc/inductor/aoti_runtime/interface.h``.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import EngineError
from paceline.model.compiled.backend import StepFunction

log = logging.getLogger(__name__)

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_HUGE_PAGE, _LARGE = 1 << 21, 1 << 24
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; there are no such files as are read below elsewhere
_NEEDS_EXECUTOR = b"aoti_torch_proxy_executor_call_function("


def load_package(path: Path) -> StepFunction:
    """The step in a package. Raises EngineError if it cannot be loaded here."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name) for name in package.namelist() if name.endswith(".cpp")]
    if any(_NEEDS_EXECUTOR in source for source in sources):
        log.warning("%s calls operators that only torch's loader can: its steps hold up other threads", path.name)
        loaded: StepFunction = torch._inductor.aoti_load_package(str(path))
        return loaded
    return CompiledPackage(path)


class CompiledPackage:
    """The one model of a CPU package. ``inputs``: tensors and lists of tensors, as for the export."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError if the package cannot be loaded here."""
        with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory(prefix="paceline-package-") as folder:
            package.extractall(folder)
            (library,) = Path(folder).rglob("*.so")
            before = set(_large_mappings())
            self._library = ctypes.CDLL(str(library))
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
        for start, stop in set(_large_mappings()) - before:
            _use_huge_pages(start, stop)
        weakref.finalize(self, self._library.AOTInductorModelContainerDelete, self._container)

    def __call__(self, *inputs: Any) -> Any:
        """The output of the exported function: a tensor, or a tuple of tensors."""
        tensors: list[Tensor] = []
        for given in inputs:
            tensors += (given,) if isinstance(given, Tensor) else given
        # One handle for each, which the call takes over.
        handles = [_pointer_of(c, None) for c in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]
        array, outputs = (ctypes.c_void_p * len(handles))(*handles), (ctypes.c_void_p * self._num_outputs)()
        self._call(
            "AOTInductorModelContainerRun",
            self._container,
            array,
            ctypes.c_size_t(len(handles)),
            outputs,
            ctypes.c_size_t(self._num_outputs),
            None,
            None,
        )
        results = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule_of(o, None, None) for o in outputs])
        return results[0] if len(results) == 1 else tuple(results)

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments) != 0:  # it has said why on standard error
            raise EngineError(f"{name} of a compiled model failed")


def _large_mappings() -> Iterator[tuple[int, int]]:
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
    """Packs memory into pages of 2 MiB, where the system has them: weights are read from end to end in every step, and
    a core that translates an address every 4 KiB reads them a tenth more slowly. What it refuses stays as it is."""
    start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
    if start < stop:
        address, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            ctypes.CDLL(None).madvise(address, size, advice)
