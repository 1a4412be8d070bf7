"""Native products in the graph of an exported step (``linear.py``): in the place of those by parameters, joined."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from paceline.model.compiled.blocks import OUTPUTS
from paceline.model.compiled.linear import has_bfloat16


def replace_linears(exported: ExportedProgram, *, plain: bool = True) -> int:
    """Turns every bfloat16 product by a parameter into the operator, products of one input into one; returns how many.

    What then is the SiLU of one half of a product times the other half is an operator, too, as helpers share it.
    Products by quantized weights, which are the operator already, are joined in the same way.

    The packing is left to the compiler, which folds what it does to constants and drops what nothing else reads.
    ``plain`` False: products by bfloat16 weights stay oneDNN's. ``usable`` comes first, or else ``blocks_usable``.
    """
    signature, graph = exported.graph_signature, exported.graph
    constants = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    groups: dict[tuple[Any, ...], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default) if plain else ():
        given, weight, bias = (*node.args, None)[:3]
        if all(part is None or _is_constant(part, constants) for part in (weight, bias)) and _is_bfloat16(given):
            groups.setdefault((given, bias is not None), []).append(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.paceline.packed_linear.default):
        given, packed, bias, outputs = cast(Any, node.args)
        tiles = packed.meta["val"].shape[1:]
        own = None if outputs % OUTPUTS == 0 else node  # what fills up its last tile would lie between two products
        groups.setdefault((given, bias is not None, tiles, own), []).append(node)
    for nodes in groups.values():
        _join(graph, nodes)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default  # what was whole may be a slice now
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.silu.default) if has_bfloat16() else ():
        _gate(graph, node)
    exported.graph_module.recompile()
    return sum(map(len, groups.values()))


def _is_constant(value: Any, constants: set[str]) -> bool:
    return isinstance(value, Node) and value.name in constants and _is_bfloat16(value)


def _is_bfloat16(value: Any) -> bool:
    tensor = value.meta.get("val")
    return isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def _join(graph: Graph, nodes: list[Node]) -> None:
    """One product in the place of several of the same input."""
    aten, ours = torch.ops.aten, torch.ops.paceline
    is_packed = nodes[0].target is ours.packed_linear.default
    if is_packed and len(nodes) == 1:
        return
    columns: list[tuple[Any, ...]] = [(*node.args, None)[:3] for node in nodes]
    x, bias = columns[0][0], columns[0][2]
    sizes: list[int] = [node.meta["val"].shape[-1] for node in nodes]

    def joined(index: int) -> Node:
        parts = [column[index] for column in columns]
        whole: Node = parts[0] if len(parts) == 1 else graph.call_function(aten.cat.default, (parts,))
        return whole

    with graph.inserting_before(nodes[0]):
        packed, added = joined(1), None if bias is None else joined(2)
        if not is_packed:
            packed = graph.call_function(ours.pack_linear.default, (packed,))
            if added is not None:
                added = graph.call_function(aten._to_copy.default, (added,), {"dtype": torch.float32})
        y = graph.call_function(ours.packed_linear.default, (x, packed, added, sum(sizes)))
        parts = [y]
        if len(nodes) > 1:
            spans = zip(itertools.accumulate(sizes), sizes, strict=True)
            parts = [graph.call_function(aten.slice.Tensor, (y, -1, stop - size, stop)) for stop, size in spans]
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
    if silu.meta["val"].dtype != torch.bfloat16:
        return
    if [half.args for half in halves] != [(x, -1, 0, size), (x, -1, size, 2 * size)]:
        return
    with graph.inserting_before(users[0]):
        gated = graph.call_function(ours.gated_silu.default, (x,))
    gated.meta.update(users[0].meta)
    users[0].replace_all_uses_with(gated)
    for node in (users[0], silu, *halves):
        graph.erase_node(node)
