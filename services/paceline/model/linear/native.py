"""Linear layers for the CPU, in ``native.cpp``: one call for a layer's step, from projections to outputs.

It takes the sums of ``operator.py`` in the same order, so both give the same bits. Two functions are exempt: e^x in
float64 comes from two libraries, and e^x in float32 is emulated there. Results, rounded to float32, differ about once
in 2^27 numbers.

It needs AVX-512, and is compiled once for each machine's instruction set. Compiled models call it without the
interpreter's lock. Threads that help the calling one compute key heads of their own, or channels of Mamba
(``share_by``).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.linear import CHUNK, Kind, LinearSpec
from paceline.core.native import Library
from paceline.errors import EngineError
from paceline.model.linear.operator import Gates, LinearPools, run_selective

DTYPES = (torch.bfloat16, torch.float32)
SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = Library(
    SOURCE,
    "the operator of linear attention",
    ("-march=native", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    (SOURCE.parents[1] / "exponential.h",),
)
_ROWS_OF_CPP = 16
_NO_MEMORY, _UNFIT = 2, 3
_TENSORS = (
    *("Tensor numbers", "Tensor inputs", "Tensor a", "Tensor b", "Tensor weight", "Tensor decay", "Tensor bias"),
    *("Tensor? shift", "Tensor? skip", "Tensor states", "Tensor tails", "Tensor rows", "Tensor keys"),
    *("Tensor updates", "Tensor decays"),
)
_INTEGERS = ("kind", "key_heads", "value_heads", "rounds_rates", "rounds_convolution", "activates")
_FLOATS = ("scale", "lowest", "shortest", "longest")
_ARGUMENTS = (*_TENSORS, *(f"int {name}" for name in _INTEGERS), *(f"float {name}" for name in _FLOATS))
_SCHEMA = f"({', '.join(_ARGUMENTS)}) -> Tensor"
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
        load_library()
    except EngineError as error:
        log.warning("linear attention is computed by torch, which is slower: %s", error)
        return f"their operator could not be built: {error}"
    return None


def run_step(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    """Runs a step of one layer and writes its pools (``operator.run_step``). ``unavailable`` comes first.

    Returns ``[T, value heads, value_dim]`` in the model's dtype, zeros for padding.

    Raises:
        EngineError: a number of the step is not one of a slot or of a row.
    """
    if spec.kind is Kind.MAMBA:
        return run_selective(functools.partial(_run, numbers), pools, spec, gates)
    return _run(numbers, pools, spec, gates)


def _run(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    given = arguments(numbers, pools, spec, gates)
    if torch.compiler.is_exporting():
        out: Tensor = torch.ops.paceline.linear_attention(*given)
        return out
    return call(load_library(), *given)


def arguments(numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> tuple[Any, ...]:
    """The arguments of the operator, in the order of its schema."""
    of_layer = gates.weight, gates.decay, gates.bias, gates.shift, gates.skip
    activates = spec.kind is not Kind.CONVOLUTION or gates.activates
    integers = [*Kind].index(spec.kind), spec.key_heads, spec.value_heads
    flags = int(gates.rounds_rates), int(gates.rounds_convolution), int(activates)
    floats = float(gates.scale), gates.lowest or 0.0, *map(float, gates.limits)
    return numbers, gates.inputs, gates.a, gates.b, *of_layer, *pools, *integers, *flags, *floats


def call(library: ctypes.CDLL, *given: Any) -> Tensor:
    """``run_step`` by a library that was loaded; arguments as in the operator's schema."""
    packed, out, _ = pack(*given)
    if failed := library.paceline_linear_attention(packed):
        if failed == _NO_MEMORY:
            raise MemoryError
        if failed == _UNFIT:
            raise EngineError("tensors of linear layers have sizes that do not fit each other")
        raise EngineError("a step of linear layers has slots or rows that do not match its sequences")
    return out


def pack(*given: Any) -> tuple[bytes, Tensor, list[Tensor | None]]:
    """``Call`` of ``native.cpp`` for these arguments, its output, and the tensors that it points to."""
    (kind, key_heads, value_heads, *flags), floats = given[15:21], given[21:]
    tensors = [x if x is None or (x.dim() == 2 and x.stride(1) == 1) else x.contiguous() for x in given[:15]]
    numbers, inputs, a, b, *_, states, tails, rows, _, _, _ = tensors
    if reason := _why_unfit(tensors):
        raise EngineError(f"tensors of linear layers: {reason}")
    *_, key_dim, value_dim = states.shape
    out: Tensor = inputs.new_empty(len(inputs), value_heads, value_dim)
    at = [0 if x is None else x.data_ptr() for x in (*tensors, out)]
    sizes = (len(inputs), key_heads, value_heads, key_dim, value_dim, tails.shape[1] + 1, len(states), len(rows))
    strides = inputs.stride(0), a.stride(0), b.stride(0)
    counts = [0 if x is None else x.shape[1] if 1 <= i <= 3 else x.numel() for i, x in enumerate(tensors)]
    integers = at[0], len(numbers), *at[1:], *sizes, inputs.itemsize, *strides, kind, *flags, *counts
    return struct.pack(f"{len(integers)}q{len(floats)}d", *integers, *floats), out, tensors


def _why_unfit(tensors: Sequence[Tensor | None]) -> str | None:
    """Says what of a call's tensors the operator cannot read, by their dtypes and dimensions; None: nothing."""
    numbers, inputs, a, b, *of_layer, states, tails, rows, keys, updates, decays = tensors
    assert inputs is not None, "only parameters of a layer may be missing"
    same, whole = (a, b, tails, rows), (*of_layer, states, keys, updates, decays)

    def are(dtype: torch.dtype, some: Sequence[Tensor | None]) -> bool:
        return all(x is None or not x.numel() or x.dtype == dtype for x in some)

    if inputs.dtype not in DTYPES or not are(inputs.dtype, same):
        return "inputs, pools and gates are of one dtype, bfloat16 or float32"
    if not are(torch.int64, [numbers]) or not are(torch.float32, whole):
        return "numbers are int64, parameters and states float32"
    if any(x is None or x.dim() != 2 or x.shape[0] != inputs.shape[0] for x in (inputs, a, b)):
        return "inputs and gates have a row for each token"
    dims = [0 if x is None else x.dim() for x in (numbers, states, tails, rows)]
    return None if dims == [1, 4, 3, 3] else "numbers have 1 dimension, states 4, the other pools 3"


def share_by(share: ctypes.c_void_p) -> None:
    """Lets steps ask ``share`` for threads that help the one that computes, from now on (``linear.sharer``).
    ``unavailable`` comes first."""
    load_library().paceline_linear_attention_share(share)


def compiled_shims() -> dict[Any, list[str]]:
    """The C function that compiled models call instead of the Python operator. ``unavailable`` comes first."""
    arguments = [f"AtenTensorHandle {name}" for name in _TENSORS]
    arguments = [x.replace("Tensor? ", "* ").replace("Tensor ", "") for x in arguments]
    arguments += [*(f"int64_t {name}" for name in _INTEGERS), *(f"double {name}" for name in _FLOATS)]
    declaration = f"AOTITorchError aoti_torch_cpu_linear_attention({', '.join(arguments)}, AtenTensorHandle* out)"
    return {torch.ops.paceline.linear_attention.default: [declaration]}


def key() -> str:
    """Part of a compiled step's cache key that names the operator."""
    return LIBRARY.digest


def is_built() -> bool:
    """True if ``unavailable`` would compile nothing: the library is in the cache, or this machine cannot run it."""
    return torch.backends.cpu.get_cpu_capability() != "AVX512" or LIBRARY.is_compiled


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, whose operator is registered. Raises EngineError as ``Library.load``."""
    library = LIBRARY.load(ctypes.RTLD_GLOBAL)
    library.paceline_linear_attention_share.restype = None
    torch.library.define("paceline::linear_attention", _SCHEMA)
    torch.library.impl("paceline::linear_attention", "CPU", functools.partial(call, library))
    torch.library.register_fake("paceline::linear_attention", _fake)
    return library


def _fake(numbers: Tensor, inputs: Tensor, *rest: Any) -> Tensor:
    states, value_heads = rest[7], rest[15]
    return inputs.new_empty(inputs.shape[0], value_heads, states.shape[3])
