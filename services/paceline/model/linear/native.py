"""The gated delta rule for the CPU, in ``native.cpp``: one call for a layer's step, from projections to outputs.

It takes the sums of ``operator.py`` in the same order, so both give the same bits. Two functions are exempt: e^x in
float64 comes from two libraries, and e^x in float32 is emulated there. Results, rounded to float32, differ about once
in 2^28 numbers.

It needs AVX-512, and is compiled once for each machine's instruction set. Compiled models call it without the
interpreter's lock. Threads that help the calling one compute key heads of their own (``share_by``).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.linear import CHUNK
from paceline.core.native import compiled, library_path, machine, torch_options
from paceline.errors import EngineError
from paceline.model.linear.operator import Gates, LinearPools

DTYPES = (torch.bfloat16, torch.float32)
SOURCE = Path(__file__).with_suffix(".cpp")
_HEADER = SOURCE.parents[1] / "exponential.h"
_OPTIONS = ("-march=native", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
_ROWS_OF_CPP = 16
_NO_MEMORY = 2
_SCHEMA = (
    "(Tensor numbers, Tensor inputs, Tensor a, Tensor b, Tensor weight, Tensor decay, Tensor bias, Tensor states, "
    "Tensor tails, Tensor rows, Tensor keys, Tensor updates, Tensor decays, int key_heads, int scale) -> Tensor"
)
"""Pools are written, which the schema conceals: otherwise each layer of a compiled step would copy them. In a step
nothing but this operator reads a layer's pools, and it is called once."""
log = logging.getLogger(__name__)


@functools.cache
def unavailable() -> str | None:
    """Says why this machine cannot run the operator, also in the log; None if it can. May compile it; loads it."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "they need AVX-512, which this machine does not have"
    assert CHUNK == _ROWS_OF_CPP, "a chunk is a vector of the operator"
    try:
        _library()
    except EngineError as error:
        log.warning("linear attention is computed by torch, which is slower: %s", error)
        return f"their operator could not be built: {error}"
    return None


def gated_delta(numbers: Tensor, pools: LinearPools, gates: Gates, key_heads: int) -> Tensor:
    """Runs a step of one layer and writes its pools (``operator.run_step``). ``unavailable`` comes first.

    Returns ``[T, value heads, value_dim]`` in the model's dtype, zeros for padding.

    Raises:
        EngineError: a number of the step is not one of a slot or of a row.
    """
    given = (numbers, gates.inputs, gates.a, gates.b, gates.weight, gates.decay, gates.bias, *pools)
    if torch.compiler.is_exporting():
        out: Tensor = torch.ops.paceline.gated_delta(*given, key_heads, gates.scale)
        return out
    return call(_library(), *given, key_heads, gates.scale)


def call(library: ctypes.CDLL, *given: Any) -> Tensor:
    """``gated_delta`` by a library that was loaded; arguments as in the operator's schema."""
    *tensors, key_heads, scale = given
    tensors = [x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous() for x in tensors]
    numbers, inputs, a, b, *_, states, tails, rows, _, _, _ = tensors
    _, value_heads, key_dim, value_dim = states.shape
    out: Tensor = inputs.new_empty(len(inputs), value_heads, value_dim)
    at = [x.data_ptr() for x in (*tensors, out)]
    sizes = (len(inputs), key_heads, value_heads, key_dim, value_dim, tails.shape[1] + 1, len(states), len(rows))
    strides = inputs.stride(0), a.stride(0), b.stride(0)
    numbers_of = array("q", (at[0], len(numbers), *at[1:], *sizes, scale, inputs.itemsize, *strides))
    if failed := library.paceline_gated_delta(ctypes.c_void_p(numbers_of.buffer_info()[0])):
        if failed == _NO_MEMORY:
            raise MemoryError
        raise EngineError("a step of linear layers has slots or rows that do not match its sequences")
    return out


def share_by(share: ctypes.c_void_p) -> None:
    """Lets steps ask ``share`` for threads that help the one that computes, from now on (``linear.sharer``).
    ``unavailable`` comes first."""
    _library().paceline_gated_delta_share(share)


def compiled_shims() -> dict[Any, list[str]]:
    """The C function that compiled models call instead of the Python operator. ``unavailable`` comes first."""
    names = _SCHEMA[1:].partition(", int")[0].replace("Tensor ", "").split(", ")
    arguments = [f"AtenTensorHandle {name}" for name in names]
    arguments += ["int64_t key_heads", "int64_t scale", "AtenTensorHandle* out"]
    declaration = f"AOTITorchError aoti_torch_cpu_gated_delta({', '.join(arguments)})"
    return {torch.ops.paceline.gated_delta.default: [declaration]}


def key() -> str:
    """Part of a compiled step's cache key that names the operator."""
    return _digest(SOURCE)


def at_hand() -> bool:
    """True if ``unavailable`` would compile nothing: the library is in the cache, or this machine cannot run it."""
    capable = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return not capable or library_path(SOURCE, _digest(SOURCE)).exists()


def load(source: Path, mode: int = ctypes.RTLD_LOCAL) -> ctypes.CDLL:
    """The library of ``source``, compiled if it never was. Raises EngineError with the reason if it cannot be."""
    options = (*_OPTIONS, f"-I{SOURCE.parent}", *torch_options())
    path = compiled(source, _digest(source), options, "the operator of linear attention")
    try:
        library = ctypes.CDLL(str(path), mode=mode)
    except OSError as error:
        raise EngineError(f"{path.name} could not be loaded: {error}") from error
    library.paceline_gated_delta_share.restype = None
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, whose operator is registered. Compiled models look for its symbols."""
    library = load(SOURCE, ctypes.RTLD_GLOBAL)
    torch.library.define("paceline::gated_delta", _SCHEMA)
    torch.library.impl("paceline::gated_delta", "CPU", functools.partial(call, library))
    torch.library.register_fake("paceline::gated_delta", _fake)
    return library


def _fake(numbers: Tensor, inputs: Tensor, *rest: Any) -> Tensor:
    states: Tensor = rest[5]
    return inputs.new_empty(inputs.shape[0], states.shape[1], states.shape[3])


def _digest(source: Path) -> str:
    """Digest of the sources, their compiler options, torch's version and the machine's instruction set."""
    facts = f"{torch.__version__} {machine()} {_OPTIONS}"
    sources = source.read_bytes() + _HEADER.read_bytes()
    return hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()
