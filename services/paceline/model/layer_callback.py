"""Passes the hidden states at a boundary of a model to a listener, before the layers above the boundary run.

    embeddings ─▶ layer 0 ─▶ .. ─▶ boundary ─▶ layer b ─▶ .. ─▶ logits
                                      └──▶ the listener of this thread, which the step waits for

There is a listener only within ``heard_by``. It changes no result of the step. A compiled step calls back by an
operator of its own (``layer_callback.cpp``): the step runs without the interpreter's lock, which the callback acquires.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.core.native import Library
from paceline.model.states import find_layers

Listener = Callable[[Tensor], None]
"""Receives states ``[R, hidden]``: one for each row of logits of a step, then rows of padding."""
LIBRARY = Library(Path(__file__).with_suffix(".cpp"), "the call from the middle of a step")


class _Here(threading.local):
    """The listener of one thread."""

    listener: Listener | None = None
    error: BaseException | None = None
    """The exception that it has raised, for the step to raise: no exception passes a compiled model."""


_here = _Here()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within the block, passes the states of this thread's steps to ``listener``. Raises what the listener raises."""
    _here.listener = listener
    try:
        yield
    finally:
        _here.listener = None
        error, _here.error = _here.error, None
    if error is not None:
        raise error


class LayerCallback:
    """Calls the listener at one boundary of a model, from a hook that stays on the model."""

    def __init__(self, model: PreTrainedModel, boundary: int, name: str) -> None:
        """Puts the hook before layer ``boundary`` of ``model``. Messages call the model ``name``.

        Raises:
            ConfigError: its layers cannot be found.
        """
        _, layers = find_layers(model, name)
        self.boundary = boundary
        self._index: Tensor | None = None
        layers[boundary].register_forward_pre_hook(self._entering, with_kwargs=True)

    def expect(self, logits_index: Tensor) -> None:
        """Sets the rows [R] whose states the next forward passes on."""
        self._index = logits_index

    def _entering(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        index, self._index = self._index, None  # None: a forward of the model by another step
        states = args[0] if args else kwargs["hidden_states"]
        if index is None:
            return None
        if torch.compiler.is_exporting():
            passed = torch.ops.paceline.layer_callback(states, index)
            return ((passed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": passed})
        _tell(states, index)
        return None


def key() -> str:
    """Part of a compiled step's cache key that names the operator, which is there afterwards.

    Raises:
        EngineError: it cannot be compiled.
    """
    load_library()
    return LIBRARY.digest


def compiled_shims() -> dict[Any, list[str]]:
    """The operator with the C function that a compiled model calls. ``key`` comes first."""
    handles = "AtenTensorHandle states, AtenTensorHandle index, AtenTensorHandle* out"
    return {torch.ops.paceline.layer_callback.default: [f"AOTITorchError aoti_torch_cpu_layer_callback({handles})"]}


def _tell(states: Tensor, index: Tensor) -> None:
    if _here.listener is not None:
        _here.listener(states[0, index])


@functools.cache
def load_library() -> tuple[ctypes.CDLL, Any]:
    """The library, and the function that it calls. Registers the operator."""
    library = LIBRARY.load(ctypes.RTLD_GLOBAL)
    told = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_told)
    library.paceline_layer_callback.argtypes, library.paceline_layer_callback.restype = [type(told)], None
    library.paceline_layer_callback(told)
    torch.library.define("paceline::layer_callback", "(Tensor states, Tensor index) -> Tensor")
    torch.library.register_fake("paceline::layer_callback", lambda states, index: torch.empty_like(states))
    return library, told


def _told(*handles: int) -> None:
    try:
        capsules = [_capsule_of(handle, None, None) for handle in handles]
        _tell(*torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules))
    except BaseException as error:
        _here.error = error


_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
