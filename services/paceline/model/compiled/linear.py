"""Products by bfloat16 weights on the CPU, in compiled steps: as fast as the memory gives the weights.

oneDNN reads the weights of a step with few tokens at two thirds of a core's bandwidth. ``linear.cpp`` packs them
into the order in which its loop reads them, once, when a model is compiled: the package holds them only so. Every
output is one sum in float32 over the inputs in their order, whatever else is computed beside it, so that a token's
bits cannot depend on its neighbours. Needs AVX512-BF16. With AMX, whose products of many tokens are several times
faster, oneDNN stays, but for small models, drafts above all, in which it takes several times as long to begin a product
as the product itself takes; so it does without a C++ compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from paceline.core.native import compiled, library_path, torch_options
from paceline.errors import EngineError

BLOCK = 32
"""Outputs whose weights lie together."""
_SOURCE = Path(__file__).with_suffix(".cpp")
_HEADERS = (_SOURCE.with_name("threads.h"), _SOURCE.parents[1] / "exponential.h")
_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-pthread")
_SMALL_BYTES = 8 << 20
"""Weights up to which a model's products are native beside AMX, too. On one core of a Xeon with AMX a draft of 3 MiB
takes 0.3 ms a step of one token with them and 1.6 with oneDNN's, and 1.8 and 2.0 of 32 tokens; a model of 26 MiB takes
9 ms a step of one token, and 6 with oneDNN's. What lies between was not measured."""
_LOADING = threading.Lock()
"""Models in threads load side by side; operators are registered once."""
log = logging.getLogger(__name__)


def usable(num_bytes: int | None = None) -> bool:
    """True if products are native on this machine; compiles the library if needed. Logs once why not.

    ``num_bytes``: of the weights of the model whose products they are; None: a model of any size.
    """
    return _has_use(num_bytes) and _library() is not None


def at_hand(num_bytes: int) -> bool:
    """True if ``usable`` would compile nothing: the library is in the cache, or this machine has no use for it."""
    return not _has_use(num_bytes) or library_path(_SOURCE, _digest(_SOURCE)).exists()


def weights_of(model: nn.Module) -> int:
    """Bytes of a model's weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def key(num_bytes: int) -> str:
    """Part of a compiled step's cache key that names the operator."""
    return _digest(_SOURCE) if usable(num_bytes) else "none"


def shims() -> dict[Any, list[str]]:
    """The operators with the C functions that a compiled model calls. ``usable`` comes first."""
    product = (
        "AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, "
        "AtenTensorHandle* bias, int64_t outputs, AtenTensorHandle* out)"
    )
    gate = "AOTITorchError aoti_torch_cpu_gated_silu(AtenTensorHandle x, AtenTensorHandle* out)"
    ours = torch.ops.paceline
    return {ours.packed_linear.default: [product], ours.gated_silu.default: [gate]}


def replace_linears(exported: ExportedProgram) -> int:
    """Turns every bfloat16 product by a parameter into the operator, those of one input into one; how many there were.
    What then is the SiLU of one half of a product times the other half is an operator, too, as helpers share it.

    The packing is left to the compiler, which folds what it does to constants and drops what nothing else reads.
    ``usable`` comes first.
    """
    signature, graph = exported.graph_signature, exported.graph
    constants = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    groups: dict[tuple[Node, bool], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        given, weight, bias = (*node.args, None)[:3]
        if all(part is None or _is_constant(part, constants) for part in (weight, bias)) and _is_bfloat16(given):
            groups.setdefault((given, bias is not None), []).append(node)
    for nodes in groups.values():
        _join(graph, nodes)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # what was whole may be a slice now
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default):
        _gate(graph, node)
    exported.graph_module.recompile()
    return sum(map(len, groups.values()))


def pack(weight: Tensor) -> Tensor:
    """``[N, K] -> [ceil(N / 32), ceil(K / 2), 32, 2]``, filled up with zeros."""
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, inputs % 2, 0, -outputs % BLOCK))
    return whole.view(-1, BLOCK, whole.shape[1] // 2, 2).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """An ``nn.Linear`` in bfloat16 on the CPU, by packed weights: for layers that run outside of compiled steps."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        """Packs the weights of ``layer``. ``usable()`` comes first."""
        super().__init__()
        self._outputs = len(layer.weight)
        self.register_buffer("packed", pack(layer.weight.detach()), persistent=False)
        bias = None if layer.bias is None else layer.bias.detach().float()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K] -> [..., N]``."""
        return linear(x, self.packed, self.bias, self._outputs)


def pack_layers(module: nn.Module) -> nn.Module:
    """A module with each linear layer of it in bfloat16 on the CPU packed, itself if it is one; as it is where the
    products are not usable. A layer with several places stays one."""
    if not usable():
        return module
    made: dict[nn.Module, PackedLinear] = {}
    places = list(module.named_modules(remove_duplicate=False))
    for path, layer in places:
        if type(layer) is not nn.Linear or layer.weight.dtype != torch.bfloat16 or layer.weight.device.type != "cpu":
            continue
        packed = made[layer] = made.get(layer) or PackedLinear(layer)
        if not path:
            return packed
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, packed)
    return module


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``[..., K] -> [..., outputs]`` in bfloat16, by packed weights; ``bias`` ``[outputs]`` is added in float32."""
    library = _library()
    assert library is not None, "usable() comes first"
    return multiply(library, x, packed, bias, outputs)


def multiply(library: ctypes.CDLL, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """``linear`` by a library that was loaded."""
    x, packed = x.contiguous(), packed.contiguous()
    inputs = x.shape[-1]
    assert x.dtype == packed.dtype == torch.bfloat16, "of bfloat16"
    assert packed.shape == (-(-outputs // BLOCK), (inputs + 1) // 2, BLOCK, 2), "packed for these outputs and inputs"
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (outputs,)), "a bias in float32"
    bias = None if bias is None else bias.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    at = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (x, packed, bias, y)]
    size = ctypes.c_int64
    library.paceline_linear(at[0], size(inputs), *at[1:], size(y.numel() // outputs), size(outputs), size(inputs))
    return y


def gated_silu(x: Tensor) -> Tensor:
    """``silu(x[.., :n]) * x[.., n:]`` of ``[.., 2 n]`` in bfloat16: in float32, rounded once."""
    library = _library()
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
    """Why the products of a model cannot be shared by so many threads of this process; None: they can be."""
    if device.type != "cpu":
        return f"the model is on device {device.type!r}, and products are shared on the CPU alone"
    if dtype != torch.bfloat16:
        return f"the model is in {str(dtype).removeprefix('torch.')}, and products are shared in bfloat16 alone"
    if not usable():
        return "the native products, which are shared, need AVX512-BF16 without AMX, and a C++ compiler"
    num_cores = len(os.sched_getaffinity(0))  # the instructions are those of Linux's machines
    if num_threads > num_cores:
        return f"this process may run on {num_cores} {'core' if num_cores == 1 else 'cores'}"
    return None


def share_products(num_threads: int) -> None:
    """Splits the products of this thread, and what ``sharer`` is given, among ``num_threads`` threads from now on,
    itself among them.

    Each output stays one sum in one order, so that no bit depends on their number. Each thread has a core of its own
    among those on which this one may run. The others end with it, and sleep while there is nothing to do. ``usable``
    comes first.
    """
    library = _library()
    assert library is not None, "usable() comes first"
    library.paceline_helpers(ctypes.c_int64(num_threads - 1))


def sharer() -> ctypes.c_void_p:
    """The C function by which other operators share their work as products are: among the threads that help the one
    that calls it, if any do. ``usable`` comes first."""
    library = _library()
    assert library is not None, "usable() comes first"
    return ctypes.cast(library.paceline_share, ctypes.c_void_p)


def load(source: Path) -> ctypes.CDLL:
    """The library of ``source``, compiled if it never was. Raises EngineError or OSError if it cannot be had."""
    options = (*_OPTIONS, f"-I{_SOURCE.parent}", *torch_options())
    path = compiled(source, _digest(source), options, "the products of linear layers")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled models look for its symbols
    for function in (library.paceline_linear, library.paceline_helpers, library.paceline_gated_silu):
        function.restype = None
    return library


def _is_constant(value: Any, constants: set[str]) -> bool:
    return isinstance(value, Node) and value.name in constants and _is_bfloat16(value)


def _is_bfloat16(value: Any) -> bool:
    tensor = value.meta.get("val")
    return isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _join(graph: Graph, nodes: list[Node]) -> None:
    """One product in the place of several of the same input."""
    aten, ours = torch.ops.aten, torch.ops.paceline
    x, sizes = nodes[0].args[0], [node.args[1].meta["val"].shape[0] for node in nodes]  # type: ignore[union-attr]
    with graph.inserting_before(nodes[0]):
        weight, bias = ([node.args[i] if len(node.args) > i else None for node in nodes] for i in (1, 2))
        whole = weight[0] if len(nodes) == 1 else graph.call_function(aten.cat.default, (weight,))
        added: Any = None
        if bias[0] is not None:
            joined = bias[0] if len(nodes) == 1 else graph.call_function(aten.cat.default, (bias,))
            added = graph.call_function(aten._to_copy.default, (joined,), {"dtype": torch.float32})
        packed = graph.call_function(ours.pack_linear.default, (whole,))
        y = graph.call_function(ours.packed_linear.default, (x, packed, added, sum(sizes)))
        stops = list(itertools.accumulate(sizes))
        parts = (
            [y]
            if len(nodes) == 1
            else [
                graph.call_function(aten.slice.Tensor, (y, -1, stop - size, stop))
                for size, stop in zip(sizes, stops, strict=True)
            ]
        )
    for node, part in zip(nodes, parts, strict=True):
        part.meta.update(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _gate(graph: Graph, silu: Node) -> None:
    """One operator in the place of silu(x[.., :n]) * x[.., n:] of a product x of 2 n outputs; anything else stays."""
    aten, ours = torch.ops.aten, torch.ops.paceline
    (gate,), users = silu.args, list(silu.users)
    if len(users) != 1 or users[0].target is not aten.mul.Tensor or not isinstance(gate, Node):
        return
    others = [other for other in users[0].args if other is not silu]
    if len(others) != 1 or not isinstance(others[0], Node):
        return
    halves = gate, others[0]
    if any(half.target is not aten.slice.Tensor or len(half.users) != 1 for half in halves):
        return
    x, size = halves[0].args[0], silu.meta["val"].shape[-1]
    if not isinstance(x, Node) or x.target is not ours.packed_linear.default or x.args[3] != 2 * size:
        return
    if [half.args for half in halves] != [(x, -1, 0, size), (x, -1, size, 2 * size)]:
        return
    with graph.inserting_before(users[0]):
        gated = graph.call_function(ours.gated_silu.default, (x,))
    gated.meta.update(users[0].meta)
    users[0].replace_all_uses_with(gated)
    for node in (users[0], silu, *halves):
        graph.erase_node(node)


def _library() -> ctypes.CDLL | None:
    with _LOADING:
        return _loaded()


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    """None: it cannot be compiled or loaded here, for a reason that is logged once. Registers the operators."""
    try:
        library = load(_SOURCE)
    except (EngineError, OSError) as error:
        log.warning("linear layers are compiled to oneDNN's products, which are slower: %s", error)
        return None
    if not hasattr(torch.ops.paceline, "packed_linear"):
        _register()
    return library


def _has_use(num_bytes: int | None) -> bool:
    """True if native products are faster than oneDNN's in a model of so many bytes."""
    if not torch.cpu._is_avx512_bf16_supported():
        _say("the CPU has no AVX512-BF16")
        return False
    if torch.cpu._is_amx_tile_supported() and (num_bytes is None or num_bytes > _SMALL_BYTES):
        _say("the CPU has AMX")
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
    torch.library.define("paceline::gated_silu", "(Tensor x) -> Tensor")
    torch.library.impl("paceline::gated_silu", "CPU", gated_silu)
    torch.library.register_fake("paceline::gated_silu", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
    torch.library.register_fake("paceline::pack_linear", pack)
    torch.library.register_fake(
        "paceline::packed_linear", lambda x, packed, bias, outputs: x.new_empty(*x.shape[:-1], outputs)
    )


@functools.cache
def _digest(source: Path) -> str:
    """Digest of an operator's source, its compiler options and torch's version."""
    facts = f"{torch.__version__} {_OPTIONS} torch_cpu"
    sources = b"".join([path.read_bytes() for path in (source, *_HEADERS)])
    return hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()
