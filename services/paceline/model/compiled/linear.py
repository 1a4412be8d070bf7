"""Products by bfloat16 and by quantized weights on the CPU: as fast as the memory gives the weights.

oneDNN reads the weights of a step with few tokens at two thirds of a core's bandwidth. ``linear.cpp`` packs them
into the order in which its loop reads them, once, when a model is compiled: the package holds them only so. Every
output is one sum in float32 over the inputs in their order, so a token's bits cannot depend on its neighbours. Needs
AVX512-BF16, and takes AMX where the processor has it: a tile of AMX multiplies each of its rows alone. On other
machines, and without a C++ compiler, oneDNN is used.

Weights of 4 and 8 bits (``blocks.py``) are another format of the same product, for every x86 processor, and for eager
steps, too. They are fast with AVX512-VNNI.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoint.gguf.blocks import BLOCK as BLOCK_INPUTS
from paceline.checkpoint.gguf.blocks import Blocks
from paceline.core.native import compiled, has_amx, library_path, machine, torch_options
from paceline.errors import EngineError
from paceline.model.compiled.blocks import OUTPUTS, bits_of, pack_blocks

BLOCK = 32
"""Outputs whose weights lie together."""
_INPUTS = 32
"""Inputs come in multiples of this number, the inputs of a tile."""
SOURCE = Path(__file__).with_suffix(".cpp")
_HEADERS = ("product.h", "bfloat16.h", "blocks.h", "threads.h", "../exponential.h")
_AVX512 = tuple(f"-mavx512{name}" for name in ("f", "bw", "dq", "vl", "bf16", "vnni"))
_AMX = ("-mamx-tile", "-mamx-bf16")
_COMMON = ("-ffp-contract=off", "-fvisibility=hidden", "-pthread")
HEAD_BY_HEAD = "kv_b_proj"
"""The name of layers whose weights are read by others (``attention/latent.py``), and never packed as one product."""
_LOADING = threading.Lock()
"""Models load in several threads at a time; operators may be registered only once."""
log = logging.getLogger(__name__)


def blocks_usable() -> bool:
    """True if products by quantized weights are native on this machine; compiles the library if needed. Logs once why
    not."""
    return load_library() is not None


def usable() -> bool:
    """True if products by bfloat16 weights are native on this machine; compiles the library if needed. Logs once why
    not."""
    return has_use() and load_library() is not None


def is_built() -> bool:
    """True if ``usable`` would compile nothing: the library is in the cache, or this machine has no use for it."""
    return not has_use() or library_path(SOURCE, _digest(SOURCE)).exists()


def key() -> str:
    """Part of a compiled step's cache key that names the operator of bfloat16 weights."""
    return _digest(SOURCE) if usable() else "none"


def blocks_key(model: nn.Module) -> str | None:
    """Part of a compiled step's cache key that names the operator of quantized weights; None: the model has none."""
    return _digest(SOURCE) if quantized_layers(model) else None


def shims() -> dict[Any, list[str]]:
    """The operators with the C functions that a compiled model calls. ``usable`` comes first."""
    product = (
        "AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, "
        "AtenTensorHandle* bias, int64_t outputs, AtenTensorHandle* out)"
    )
    gate = "AOTITorchError aoti_torch_cpu_gated_silu(AtenTensorHandle x, AtenTensorHandle* out)"
    heads = (
        "AOTITorchError aoti_torch_cpu_packed_heads(AtenTensorHandle x, AtenTensorHandle packed, int64_t outputs, "
        "AtenTensorHandle* out)"
    )
    ours = torch.ops.paceline
    return {
        ours.packed_linear.default: [product],
        ours.packed_heads.default: [heads],
        ours.gated_silu.default: [gate],
    }


def pack(weight: Tensor) -> Tensor:
    """``[.., N, K] -> [.., ceil(N / 32), 16 * ceil(K / 32), 32, 2]``, filled up with zeros."""
    outputs, inputs = weight.shape[-2:]
    whole = F.pad(weight, (0, -inputs % _INPUTS, 0, -outputs % BLOCK))
    blocks = whole.view(*weight.shape[:-2], -1, BLOCK, whole.shape[-1] // 2, 2)
    return blocks.transpose(-3, -2).contiguous()


class PackedLinear(nn.Module):
    """An ``nn.Linear`` on the CPU by packed weights, bfloat16 or quantized, in compiled steps and outside of them."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, blocks: Blocks | None = None) -> None:
        """Packs the weights of ``layer``, or ``blocks`` in their place. ``usable`` comes first, of blocks
        ``blocks_usable``."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.num_held: int = layer.weight.shape[0]  # outputs: of a rank's output layer fewer than all of the layer's
        packed = pack(layer.weight.detach()) if blocks is None else pack_blocks(blocks)
        self.register_buffer("packed", packed, persistent=blocks is not None)
        bias = None if layer.bias is None else layer.bias.detach().float()
        self.register_buffer("bias", bias, persistent=blocks is not None)

    @property
    def bits(self) -> int | None:
        """Bits of quantized weights; None: they are in bfloat16."""
        return bits_of(self.packed) if self.packed.dtype == torch.uint8 else None

    @property
    def num_weights(self) -> int:
        """Weights of the layer that was packed."""
        return self.in_features * self.num_held

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``."""
        product = torch.ops.paceline.packed_linear if torch.compiler.is_compiling() else linear
        result: Tensor = product(x, self.packed, self.bias, self.num_held)
        return result


def quantized_layers(model: nn.Module) -> list[PackedLinear]:
    """The layers of a model whose weights are of 4 or 8 bits."""
    return [layer for layer in model.modules() if isinstance(layer, PackedLinear) and layer.bits is not None]


def pack_layers(module: nn.Module) -> nn.Module:
    """A module whose bfloat16 linear layers on the CPU are packed, including the module itself if it is one. It is
    returned unchanged where the products are not usable. A layer with several places stays one."""
    if not usable():
        return module

    def pack_layer(path: str, layer: nn.Linear) -> PackedLinear | None:
        is_packed = layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu"
        return PackedLinear(layer) if is_packed else None

    return replace_layers(module, pack_layer)


def replace_layers(module: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]) -> nn.Module:
    """A module with each linear layer replaced by what ``make`` returns for its path, itself if it is one.

    Layers for which that is None stay, and those whose weights are multiplied ``HEAD_BY_HEAD``. A layer with several
    places stays one.
    """
    made: dict[nn.Module, nn.Module] = {}
    places = list(module.named_modules(remove_duplicate=False))
    for path, layer in places:
        if (
            type(layer) is not nn.Linear
            or path.endswith(HEAD_BY_HEAD)
            or (packed := made.get(layer) or make(path, layer)) is None
        ):
            continue
        made[layer] = packed
        if not path:
            return packed
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, packed)
    return module


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``[..., K] -> [..., outputs]`` by packed weights; ``bias`` ``[outputs]`` is added in float32.

    By weights in bfloat16 (``pack``), or by blocks (``pack_blocks``) of inputs in bfloat16 or float32.
    """
    library = load_library()
    assert library is not None, "usable() comes first"
    return multiply(library, x, packed, bias, outputs)


def multiply(library: ctypes.CDLL, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``linear`` by a library that was loaded."""
    x, packed = x.contiguous(), packed.contiguous()
    inputs = x.shape[-1]
    assert outputs > 0, "at least one output"
    if packed.dtype == torch.uint8:
        assert packed.dim() == 3, "packed as tiles"
        assert x.dtype in (torch.bfloat16, torch.float32), "of bfloat16 or float32"
        assert packed.shape[:2] == (-(-outputs // OUTPUTS), -(-inputs // BLOCK_INPUTS)), "packed for these sizes"
    else:
        assert x.dtype == packed.dtype == torch.bfloat16, "of bfloat16"
        pairs = -(-inputs // _INPUTS) * _INPUTS // 2
        assert packed.shape == (-(-outputs // BLOCK), pairs, BLOCK, 2), "packed for these outputs and inputs"
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (outputs,)), "a bias in float32"
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    x_at, packed_at, y_at = (ctypes.c_void_p(t.data_ptr()) for t in (x, packed, y))
    bias_at = None if bias is None else ctypes.c_void_p(bias.data_ptr())
    step_bytes = packed[0, 0].nbytes
    size = ctypes.c_int64
    sizes = size(y.numel() // outputs), size(outputs), size(inputs)
    known = library.paceline_linear(
        x_at, size(x.itemsize), size(inputs), packed_at, size(step_bytes), bias_at, y_at, *sizes
    )
    assert known, "a format that the library has"
    return y


def heads(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """``[heads, T, K] -> [heads, T, outputs]`` in bfloat16, each head by its own of the packed weights."""
    return torch.stack([linear(own, weights, None, outputs) for own, weights in zip(x, packed, strict=True)])


def gated_silu(x: Tensor) -> Tensor:
    """``silu(x[.., :n]) * x[.., n:]`` of ``[.., 2 n]`` in bfloat16: in float32, rounded once."""
    library = load_library()
    assert library is not None, "usable() comes first"
    return gate(library, x)


def gate(library: ctypes.CDLL, x: Tensor) -> Tensor:
    """``gated_silu`` by a library that was loaded."""
    x, size = x.contiguous(), x.shape[-1] // 2
    assert x.dtype == torch.bfloat16, "of bfloat16"
    assert x.shape[-1] == 2 * size, "two halves"
    y = x.new_empty(*x.shape[:-1], size)
    at = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
    if size:
        library.paceline_gated_silu(*at, ctypes.c_int64(y.numel() // size), ctypes.c_int64(size))
    return y


def why_not_shared(num_threads: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Says why ``num_threads`` threads of this process cannot share the products of a model, and how many can; None:
    they can."""
    if device.type != "cpu":
        return f"the model is on device {device.type!r}, and products are shared on the CPU alone; 1 is allowed"
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"the model is in {name}, and products are shared in bfloat16 alone; 1 is allowed"
    if not usable():
        return "the native products, which are shared, need AVX512-BF16 and a C++ compiler; 1 is allowed"
    num_cores = len(os.sched_getaffinity(0))  # only Linux machines have the instructions
    if num_threads > num_cores:
        cores, allowed = ("1 core", "1 is") if num_cores == 1 else (f"{num_cores} cores", f"1 to {num_cores} are")
        return f"this process may run on {cores}; {allowed} allowed"
    return None


def share_products(num_threads: int) -> None:
    """Splits the products of this thread, and what ``sharer`` is given, among ``num_threads`` threads from now on,
    itself among them.

    Each output stays one sum in one order, so that no bit depends on their number. Each thread has a core of its own
    among those on which this one may run. The others end with it, and sleep while there is nothing to do. ``usable``
    comes first.
    """
    library = load_library()
    assert library is not None, "usable() comes first"
    library.paceline_helpers(ctypes.c_int64(num_threads - 1))


def sharer() -> ctypes.c_void_p:
    """The C function by which other operators share their work as products do: among the calling thread and its
    helpers, if it has any. ``usable`` comes first."""
    library = load_library()
    assert library is not None, "usable() comes first"
    return ctypes.cast(library.paceline_share, ctypes.c_void_p)


def load(source: Path, *, portable: bool = False) -> ctypes.CDLL:
    """The library of ``source``, compiled if it never was. Raises EngineError or OSError if it cannot be had.

    ``portable``: for any x86 processor, with products by quantized weights alone, which have the same bits.
    """
    options = (*_instructions(portable=portable), *torch_options())
    path = compiled(source, _digest(source, portable=portable), options, "the products of linear layers")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL if portable else ctypes.RTLD_GLOBAL)
    library.paceline_linear.restype = ctypes.c_bool
    library.paceline_helpers.restype = None
    if hasattr(library, "paceline_gated_silu"):
        library.paceline_gated_silu.restype = None
    return library


def _instructions(*, portable: bool = False) -> tuple[str, ...]:
    if portable:
        return _COMMON
    tiles = _AMX if has_amx() else ()
    return (*((*_AVX512, *tiles) if has_bfloat16() else ("-march=native",)), *_COMMON)


@functools.cache
def has_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16 by AVX512-BF16."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def load_library() -> ctypes.CDLL | None:
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    """None: it cannot be compiled or loaded here, for a reason that is logged once. Registers the operators."""
    try:
        library = load(SOURCE)
    except (EngineError, OSError) as error:
        log.warning("linear layers are compiled to oneDNN's products, which are slower: %s", error)
        return None
    if not hasattr(torch.ops.paceline, "packed_linear"):
        _register()
    return library


def has_use() -> bool:
    """True if this machine has the instructions of native products."""
    if not has_bfloat16():
        _say("the CPU has no AVX512-BF16")
        return False
    return True


@functools.cache
def _say(reason: str) -> None:
    log.info("linear layers are compiled to oneDNN's products: %s", reason)


def _register() -> None:
    torch.library.define("paceline::pack_linear", "(Tensor weight) -> Tensor")
    torch.library.define("paceline::packed_linear", "(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
    torch.library.impl("paceline::pack_linear", "CPU", pack)
    torch.library.impl("paceline::packed_linear", "CPU", linear)
    torch.library.define("paceline::packed_heads", "(Tensor x, Tensor packed, int outputs) -> Tensor")
    torch.library.impl("paceline::packed_heads", "CPU", heads)
    torch.library.register_fake(
        "paceline::packed_heads", lambda x, packed, outputs: x.new_empty(*x.shape[:-1], outputs)
    )
    torch.library.define("paceline::gated_silu", "(Tensor x) -> Tensor")
    torch.library.impl("paceline::gated_silu", "CPU", gated_silu)
    torch.library.register_fake("paceline::gated_silu", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
    torch.library.register_fake("paceline::pack_linear", pack)
    torch.library.register_fake(
        "paceline::packed_linear", lambda x, packed, bias, outputs: x.new_empty(*x.shape[:-1], outputs)
    )


@functools.cache
def _digest(source: Path, *, portable: bool = False) -> str:
    """Digest of an operator's source, its compiler options and torch's version; of a native build's processor, too."""
    options = _instructions(portable=portable)
    facts = f"{torch.__version__} {options} torch_cpu" + (machine() if "-march=native" in options else "")
    sources = b"".join((source.parent / name).read_bytes() for name in (source.name, *_HEADERS))
    return hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()
