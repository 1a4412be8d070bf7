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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from paceline.errors import EngineError
from paceline.model.runner import StepFunction

_log = logging.getLogger(__name__)

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_NEEDS_EXECUTOR = b"aoti_torch_proxy_executor_call_function("


def load_package(path: Path) -> StepFunction:
    """The step in a package. Raises EngineError if it cannot be loaded here."""
    with zipfile.ZipFile(path) as package:
        sources = [package.read(name) for name in package.namelist() if name.endswith(".cpp")]
    if any(_NEEDS_EXECUTOR in source for source in sources):
        _log.warning("%s calls operators that only torch's loader can: its steps hold up other threads", path.name)
        loaded: StepFunction = torch._inductor.aoti_load_package(str(path))
        return loaded
    return CompiledPackage(path)


class CompiledPackage:
    """The one model of a CPU package, with one output. ``inputs`` are flattened as they were for the export."""

    def __init__(self, path: Path) -> None:
        """Raises EngineError if the package cannot be loaded here."""
        with zipfile.ZipFile(path) as package, tempfile.TemporaryDirectory(prefix="paceline-package-") as folder:
            package.extractall(folder)
            (library,) = Path(folder).rglob("*.so")
            self._library = ctypes.CDLL(str(library))
            self._container = ctypes.c_void_p()
            self._call("AOTInductorModelContainerCreateWithDevice", ctypes.byref(self._container),
                       ctypes.c_size_t(1), b"cpu", None)  # fmt: skip
        weakref.finalize(self, self._library.AOTInductorModelContainerDelete, self._container)

    def __call__(self, *inputs: Any) -> Tensor:
        tensors: list[Tensor] = _pytree.tree_leaves(inputs)
        # One handle for each, which the call takes over.
        handles = [_pointer_of(c, None) for c in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]
        given, output = (ctypes.c_void_p * len(handles))(*handles), ctypes.c_void_p()
        self._call("AOTInductorModelContainerRun", self._container, given, ctypes.c_size_t(len(handles)),
                   ctypes.byref(output), ctypes.c_size_t(1), None, None)  # fmt: skip
        (result,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule_of(output, None, None)])
        return result

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._library, name)(*arguments) != 0:  # it has said why on standard error
            raise EngineError(f"{name} of a compiled model failed")
