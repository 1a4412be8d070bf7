"""Native trees equal their Python twins, whatever arrives."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.native import agree

from paceline.core import native_tree
from paceline.core.native_tree import new_tree, rows_of
from paceline.core.processors import Row, SamplerState
from paceline.core.tree import (
    FIRST,
    GREW,
    LOST,
    OFFERS,
    Added,
    Producer,
    Proposal,
    Refusal,
    SpeculationTree,
    TreeNode,
    add_each,
)
from paceline.messages import Node, NodeColumns, Nodes, SparseDistribution
from paceline.rpc.streams import decode_to_target, pack_nodes, read_tree
from paceline.types import SamplingParams
from paceline.v1 import target_pb2, types_pb2

VOCAB = 4


def state(tree: SpeculationTree) -> object:
    """All that a tree holds, in its order, with nodes by their ids."""

    def value(slot: str, found: Any) -> object:
        if slot in ("parent", "best"):
            return found and f"node {found.node_id}"
        if slot == "children":
            return [(token_id, child.node_id) for token_id, child in found.items()]
        return type(found), found

    nodes = [[(slot, value(slot, getattr(node, slot))) for slot in TreeNode.__slots__] for node in tree.nodes()]
    return nodes, tree.suffix, tree.anchor.node_id, tree.context_len, len(tree)


EVEN = SparseDistribution.of((0, 1, 2, 3), (0.25, 0.25, 0.25, 0.25))
QS = st.sampled_from(
    [
        None,
        EVEN,
        SparseDistribution.of((1, 2), (0.5, 0.5)),
        SparseDistribution.of((1, 1), (0.5, 0.5)),
        SparseDistribution.of((1, 2), (0.5, 0.6)),
        SparseDistribution.of((1, 2), (math.nan, 0.5)),
        SparseDistribution.of((1, 9), (0.5, 0.5)),
        SparseDistribution(b"", b""),
        SparseDistribution(b"\1", struct.pack("<d", 1.0)),
    ]
)
NUMBERS = st.integers(0, 9) | st.sampled_from([-1, 2**28, 2**28 + 1, 2**31, 2**32 - 1, 2**64])
NODES = st.tuples(
    NUMBERS,
    st.integers(0, 9) | NUMBERS,
    st.integers(0, VOCAB - 1) | st.sampled_from([-1, VOCAB, 2**32 - 1, 2**64]),
    st.floats(0.0, 1.0) | st.sampled_from([0.5, 0.5, 0.0, 1.0, 1e-12, math.nan, math.inf, -0.1, 1.1]),
    st.booleans(),
    QS,
)


def columns(rows: list[tuple[int, int, int, float, bool, SparseDistribution | None]], plain: bool) -> NodeColumns:
    if not rows:
        return NodeColumns((), (), (), ())
    node_ids, parent_ids, token_ids, probs, sampled, qs = map(list, zip(*rows, strict=True))
    return NodeColumns(node_ids, parent_ids, token_ids, probs, *(() if plain else (sampled, qs)))


ADDED = st.builds(columns, st.lists(NODES, max_size=6), st.booleans())
WALKED = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple)
FOLLOWED = st.lists(st.integers(0, VOCAB - 1), max_size=3)
FITTING = st.tuples(
    st.integers(10, 90), st.just(0), st.integers(0, VOCAB - 1), st.floats(0.0, 1.0), st.booleans(), st.just(EVEN)
)
BELOW = st.fixed_dictionaries(
    {"parent": st.integers(0, 9), "nodes": st.lists(FITTING, max_size=3) | st.lists(FITTING | NODES, max_size=4)}
)


def below(tree: SpeculationTree, parent: int, nodes: list[tuple[object, ...]]) -> list[int]:
    """Ids of the nodes that are attached below one of the tree's."""
    nodes_there = [*tree.nodes()]
    at = nodes_there[parent % len(nodes_there)]
    made = [Node(node_id, at.node_id, *rest) for node_id, _, *rest in nodes]  # type: ignore[arg-type]
    grown = [tree.grow(at, [each.token_id], [each.prob], each.sampled, each.q) for each in made[::2]]
    placed = [node for each in made if not isinstance(node := tree.attach(each), Refusal)]
    placed += chain.from_iterable(grown)
    placed += tree.grow(at, [each.token_id for each in made], [each.prob for each in made], True, EVEN)
    assert all(tree.get(node.node_id) is node for node in placed)
    return [tree.next_id, *(node.node_id for node in placed)]


@pytest.mark.compiler
@given(
    st.lists(ADDED | BELOW | WALKED | FOLLOWED | st.integers(1, 4), max_size=30),
    st.booleans(),
    st.integers(1, 16),
    st.sampled_from([Producer.DRAFT, Producer.DRAFT, Producer.HEAD]),
)
@settings(max_examples=200, deadline=None)
def test_native_trees_equal_their_twins(
    operations: list[object], rejection: bool, max_nodes: int, producer: Producer
) -> None:
    twin = SpeculationTree(VOCAB, 5, rejection=rejection, max_nodes=max_nodes, producer=producer)
    tree = new_tree(VOCAB, 5, rejection=rejection, max_nodes=max_nodes, producer=producer)
    for operation in operations:
        if isinstance(operation, int):
            assert repr(tree.proposal(operation)) == repr(twin.proposal(operation))
        elif isinstance(operation, dict):
            assert below(tree, **operation) == below(twin, **operation)
        elif isinstance(operation, list):
            assert tree.follow(operation) is twin.follow(operation)
        elif isinstance(operation, NodeColumns):
            assert tree.add(operation) == twin.add(operation)
        else:
            assert tree.walk(operation) == twin.walk(operation)  # type: ignore[arg-type]
        assert repr(state(tree)) == repr(state(twin))
        tree.check_integrity()


@pytest.mark.compiler
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), ADDED), max_size=6) | WALKED, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_messages_for_several_trees_are_taken_as_by_their_twins(batches: list[object], rejection: bool) -> None:
    twins = [SpeculationTree(VOCAB, 5, rejection=rejection, max_nodes=8) for _ in range(3)]
    trees: list[SpeculationTree] = [new_tree(VOCAB, 5, rejection=rejection, max_nodes=8) for _ in range(3)]
    for batch in batches:
        if isinstance(batch, tuple):
            for tree, twin in zip(trees, twins, strict=True):
                assert tree.walk(batch) == twin.walk(batch)
            continue
        assert isinstance(batch, list)
        at, nodes = (
            [which for which, _ in batch],
            [message if which else tuple(message) for which, message in batch],
        )
        added = native_tree.add_each([trees[which] for which in at], nodes)
        assert added == add_each([twins[which] for which in at], nodes)
        assert [repr(state(tree)) for tree in trees] == [repr(state(twin)) for twin in twins]


@pytest.mark.compiler
def test_what_a_message_changes_is_told() -> None:
    tree = new_tree(VOCAB, 5)
    first, other, stale = (NodeColumns([i], [p], [i], [0.5]) for i, p in ((1, 0), (2, 0), (3, 9)))
    added, effects = native_tree.add_each([tree] * 3, [first, other, stale])
    assert (added, [*effects]) == (Added(2, 1), [GREW + OFFERS + FIRST, GREW + OFFERS, OFFERS])
    tree.walk((3, 1))
    missing = NodeColumns([4], [0], [3], [0.5])
    assert [*native_tree.add_each([tree] * 2, [stale, missing])[1]] == [LOST, GREW + LOST]


@pytest.mark.compiler
def test_what_is_no_native_tree_takes_no_messages() -> None:
    with pytest.raises(TypeError, match="no native tree"):
        native_tree.add_each([SpeculationTree(VOCAB, 5)], [NodeColumns((), (), (), ())])


@st.composite
def growths(draw: st.DrawFn) -> Iterator[tuple[NodeColumns, tuple[int, ...]]]:
    """Messages of a draft that makes no mistake, each with the tokens that are committed behind it."""
    messages, next_id = [], 1
    for _ in range(draw(st.integers(1, 8))):
        rows = []
        for _ in range(draw(st.integers(0, 5))):
            parent = draw(st.integers(max(0, next_id - 6), next_id - 1))
            rows.append((next_id, parent, draw(st.integers(0, VOCAB - 1)), draw(st.floats(0.0, 1.0)), True, None))
            next_id += 1
        messages.append((columns(rows, True), draw(st.lists(st.integers(0, 1), max_size=3).map(tuple))))
    return iter(messages)


@pytest.mark.compiler
@given(growths())
@settings(max_examples=100, deadline=None)
def test_a_growing_tree_is_followed_as_its_twin_is(messages: Iterator[tuple[NodeColumns, tuple[int, ...]]]) -> None:
    twin, tree, follower = SpeculationTree(VOCAB, 5), new_tree(VOCAB, 5), new_tree(VOCAB, 5)
    for nodes, token_ids in messages:
        assert tree.add(nodes) == twin.add(nodes) == follower.add(nodes)
        assert repr(tree.proposal(3)) == repr(twin.proposal(3))
        walk = twin.walk(token_ids)
        assert tree.walk(token_ids) == walk
        assert follower.follow(token_ids) is walk.cause
        assert repr(tree.proposal(4)) == repr(twin.proposal(4))
        assert repr(state(tree)) == repr(state(twin)) == repr(state(follower))
        tree.check_integrity()


WIRE = st.builds(
    types_pb2.Nodes,
    node_ids=st.lists(st.integers(0, 300) | st.just(2**32 - 1), max_size=3),
    parent_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3),
    probs=st.lists(st.floats(), max_size=3),
    sampled=st.lists(st.booleans(), max_size=3),
    qs=st.lists(
        st.builds(types_pb2.SparseDistribution, token_ids=st.binary(max_size=8), probs=st.binary(max_size=16)),
        max_size=3,
    ),
    idle=st.booleans(),
    step_s=st.floats(),
)


@st.composite
def fitting(draw: st.DrawFn) -> types_pb2.Nodes:
    """Nodes as a draft sends them."""
    rows = draw(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3, st.floats(0, 1), st.booleans()), max_size=4))
    q = types_pb2.SparseDistribution(token_ids=bytes(4), probs=struct.pack("<d", 1.0))
    ids, parents, tokens, probs, flags = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [])
    return types_pb2.Nodes(
        node_ids=ids,
        parent_ids=parents,
        token_ids=tokens,
        probs=probs,
        sampled=flags if draw(st.booleans()) else [],
        qs=[q if flag else types_pb2.SparseDistribution() for flag in flags] if draw(st.booleans()) else [],
        idle=draw(st.booleans()),
        step_s=draw(st.floats(0, 1)),
    )


def read_as_protobuf(packed: bytes) -> bool:
    """True if the native reader takes the message; then it has found what protobuf finds."""
    (found,) = native_tree.native_module().read_each([packed])
    if found is None:
        return False
    expected = read_tree("s", 2**64 - 1, 7, packed)
    assert expected is not None
    assert repr(found) == repr((expected.nodes.columns, expected.idle, expected.step_s))
    return True


@pytest.mark.compiler
@given(fitting())
@settings(max_examples=100, deadline=None)
def test_nodes_in_wire_form_are_read_natively(proto: types_pb2.Nodes) -> None:
    assert read_as_protobuf(proto.SerializeToString())


@pytest.mark.compiler
@given(WIRE | fitting(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255), st.integers(0, 2)), max_size=3))
@settings(max_examples=300, deadline=None)
def test_whatever_is_read_natively_is_what_protobuf_reads(
    proto: types_pb2.Nodes, harm: list[tuple[int, int, int]]
) -> None:
    packed = bytearray(proto.SerializeToString())
    for at, byte, kind in harm:
        at %= len(packed) + 1
        packed[at : at + (kind > 0)] = bytes([byte] * (kind < 2))
    read_as_protobuf(bytes(packed))
    read_as_protobuf(bytes(packed) * 2)


@pytest.mark.compiler
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["s", "t", ""]),
            (WIRE | fitting()).map(lambda proto: proto.SerializeToString()) | st.binary(max_size=5),
        ),
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_batches_are_read_as_without_a_native_reader(rows: list[tuple[str, bytes]]) -> None:
    ids, packed = [name for name, _ in rows], [nodes for _, nodes in rows]
    size = range(len(rows))
    updates = types_pb2.TreeUpdates(session_ids=ids, epochs=size, context_lens=size, nodes=packed)
    batch = target_pb2.ToTarget(commands=[target_pb2.TargetCommand(tree_updates=updates)])
    expected = repr(decode_to_target(batch))
    with mock.patch.object(Nodes, "read_plain", native_tree.native_module().read_each):
        assert repr(decode_to_target(batch)) == expected


WRITTEN = st.tuples(*[st.integers(0, 2**32 - 1) | st.integers(0, 300)] * 3, st.floats(), st.booleans(), QS)


@pytest.mark.compiler
@given(st.lists(WRITTEN, max_size=4), st.booleans(), st.booleans(), st.floats() | st.sampled_from([0.0, -0.0]))
@settings(max_examples=150, deadline=None)
def test_nodes_are_written_as_protobuf_writes_them(
    rows: list[tuple[int, int, int, float, bool, SparseDistribution | None]], plain: bool, idle: bool, step_s: float
) -> None:
    message = Nodes("s", 1, 7, columns(rows, plain), idle, step_s)
    unlike = Nodes("s", 1, 7, tuple(message.nodes), idle, step_s)
    packed, nothing = native_tree.native_module().write_each([(message.nodes.columns, idle, step_s), None])
    assert packed == pack_nodes(message) == pack_nodes(unlike)
    assert nothing is None
    if not math.isnan(step_s):
        assert repr(types_pb2.Nodes.FromString(packed).step_s) == repr(step_s)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("place", "value"), [(0, -1), (1, 2**32), (2, 2**70), (2, "2"), (3, 1), (3, None), (4, 1), (5, b"q")]
)
def test_what_protobuf_would_not_take_is_not_written_natively(place: int, value: object) -> None:
    cells: list[object] = [1, 0, 2, 0.5, False, EVEN]
    cells[place] = value
    made = NodeColumns(*[[cell] for cell in cells])  # type: ignore[arg-type]
    if place == 5:
        with pytest.raises(AttributeError):
            native_tree.native_module().write_each([(made.columns, False, 0.0)])
    else:
        assert native_tree.native_module().write_each([(made.columns, False, 0.0)]) == [None]


@pytest.mark.compiler
@given(st.lists(BELOW, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_columns_of_nodes_are_those_of_their_twin(
    operations: list[dict[str, object]], rejection: bool, draws_all: bool
) -> None:
    tree = new_tree(VOCAB, 5, rejection=rejection)
    for operation in operations:
        below(tree, **operation)  # type: ignore[arg-type]
    nodes = [node for node in tree.nodes() if node.sampled or not draws_all]
    made = agree(lambda: native_tree.columns_of(nodes), native_tree)
    assert list(made) == [Node(n.node_id, n.parent_id, n.token_id, n.prob, n.sampled, n.q) for n in nodes]
    assert all(node.parent_id == (node.parent.node_id if node.parent else -1) for node in nodes)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.compiler)])
@pytest.mark.parametrize(
    "proposal", [Proposal(), Proposal((3,)), Proposal((3, 1, 2)), Proposal((3, 1, 2), parents=(-1, 0, -1))]
)
def test_rows_are_those_of_the_suffixes(native: bool, proposal: Proposal, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(native_tree, "native_module", lambda: None)
    state = SamplerState(SamplingParams(), 0, (0, 1), vocab_size=VOCAB)
    rows = rows_of(state, proposal)
    assert rows == [Row(state, suffix) for suffix in proposal.suffixes()]
    assert [type(row) for row in rows] == [Row] * (len(proposal) + 1)
    assert [row.position for row in rows] == [2 + len(suffix) for suffix in proposal.suffixes()]


@pytest.mark.compiler
def test_nodes_are_freed_with_their_tree() -> None:
    q = SparseDistribution.of((0,), (1.0,))
    before = sys.getrefcount(q)
    tree = new_tree(VOCAB, 5)
    tree.add(NodeColumns([1, 2, 3, 4], [0, 1, 0, 3], [0, 1, 1, 2], [0.5, 0.5, 0.4, 0.4], (), (q,) * 4))
    tree.walk((0,))
    assert len(tree) == 1
    assert sys.getrefcount(q) == before + 2
    held = tree.anchor
    del tree
    assert sys.getrefcount(q) == before + 1
    assert (held.alive, held.parent, held.best, held.children, held.token_id) == (False, None, None, {}, 0)
    del held
    assert sys.getrefcount(q) == before


@pytest.mark.compiler
def test_a_node_that_was_pruned_stays_what_it_was() -> None:
    tree = new_tree(VOCAB, 5)
    tree.add(NodeColumns([1, 2, 3], [0, 1, 0], [0, 1, 1], [0.5, 0.5, 0.4]))
    nodes = [*tree.nodes()]
    tree.walk((1,))
    assert [(node.node_id, node.parent_id, node.token_id, node.position, node.alive) for node in nodes] == [
        (0, -1, 0, 4, False),
        (1, 0, 0, 5, False),
        (2, 1, 1, 6, False),
        (3, 0, 1, 5, True),
    ]
    assert [(node.parent, node.best, node.children) for node in nodes] == [(None, None, {})] * 4
    assert tree.anchor is nodes[3]


@pytest.mark.compiler
def test_columns_of_unequal_length_are_no_nodes() -> None:
    with pytest.raises(ValueError, match="a column has 1 entries: 2 nodes"):
        native_tree.add_each([new_tree(VOCAB, 5)], [NodeColumns([1, 2], [0], [1, 2], [0.5, 0.5])])


def test_columns_are_the_tuple_of_their_nodes() -> None:
    q = SparseDistribution.of((1,), (1.0,))
    nodes = (Node(1, 0, 2, 0.5), Node(2, 1, 1, 0.25, False, q))
    made = NodeColumns([1, 2], [0, 1], [2, 1], [0.5, 0.25], [True, False], [None, q])
    assert made == nodes
    assert nodes == made
    assert tuple(made) == nodes
    assert (made[1], made[:1], len(made), hash(made), repr(made)) == (nodes[1], nodes[:1], 2, hash(nodes), repr(nodes))
    assert NodeColumns([1], [0], [2], [0.5]) == (nodes[0],)
    assert made != nodes[:1]
    assert not NodeColumns((), (), (), ())
