"""The speculation trees of both engines by native functions, ``tree.cpp``, for messages, outcomes and leaves.

The nodes are the same Python objects, so all other methods of ``SpeculationTree`` are inherited. Its own methods are
the reference implementation: they serve uncommon cases, and all cases if the functions cannot be compiled, which needs
a C++ compiler and Python's headers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core import rows, tree
from paceline.core.native import extension
from paceline.core.processors import Row, SamplerState
from paceline.core.sparse import TOLERANCE
from paceline.core.tree import NO_PROPOSAL, Added, Proposal, Refusal, SpeculationTree, TreeNode, Walk
from paceline.errors import EngineError
from paceline.messages import MAX_STEP_S, Node, NodeColumns, Nodes, SparseDistribution
from paceline.types import Cause

_SOURCE = Path(__file__).with_name("tree.cpp")
_MOST_NODES = 64
"""Results of messages of fewer nodes, all of them added, are made once."""
_COLUMNS = ("node_id", "parent_id", "token_id", "prob", "sampled", "q")
log = logging.getLogger(__name__)


def new_tree(vocab_size: int, context_len: int, *, rejection: bool) -> SpeculationTree:
    """Makes a ``SpeculationTree``, with native functions if there are any."""
    kind = SpeculationTree if _passes() is None else NativeTree
    return kind(vocab_size, context_len, rejection=rejection)


def prepare() -> None:
    """Compiles or loads the passes now, so that no session has to wait for them; nodes are read and written by them."""
    if _passes() is not None:
        Nodes.read_plain, Nodes.write_plain = _passes().read_each, _passes().write_each


def columns_of(nodes: list[TreeNode]) -> NodeColumns:
    """Nodes of a tree of ``new_tree`` as a message has them."""
    passes = _passes()
    if passes is not None:
        columns: NodeColumns = passes.columns_of(nodes)
        return columns
    node_ids, parent_ids, token_ids, probs, sampled, qs = (tuple(map(attrgetter(name), nodes)) for name in _COLUMNS)
    return NodeColumns(node_ids, parent_ids, token_ids, probs, () if all(sampled) else sampled, qs if any(qs) else ())


def add_each(trees: Sequence[SpeculationTree], nodes: Sequence[Sequence[Node]]) -> tuple[Added, bytes]:
    """Attaches the nodes of several messages as ``tree.add_each`` does, to trees of ``new_tree``."""
    passes = _passes()
    if passes is None:
        return tree.add_each(trees, nodes)
    added: tuple[Added, bytes] = passes.add_each(trees, nodes)
    return added


def rows_of(state: SamplerState, proposal: Proposal) -> list[Row]:
    """The positions of one session to decide: after its context, and after each token of its proposal."""
    passes = _passes()
    if passes is None or proposal.parents:
        return [Row(state, suffix) for suffix in proposal.suffixes()]
    made: list[Row] = passes.rows(Row, state, proposal.token_ids)
    return made


class NativeTree(SpeculationTree):
    """A ``SpeculationTree`` that takes columns of nodes, follows tokens and finds its best path natively."""

    __slots__ = ()

    def add(self, nodes: Iterable[Node]) -> Added:
        """Attaches nodes as ``SpeculationTree.add`` does; ``NodeColumns`` without making ``Node`` objects."""
        if isinstance(nodes, NodeColumns):
            added: Added = _passes().add(self, nodes)
            return added
        return super().add(nodes)

    def attach_below(self, parent: TreeNode, nodes: Sequence[Node]) -> list[TreeNode]:
        """Attaches nodes below one of the tree as ``SpeculationTree.attach_below`` does."""
        placed: list[TreeNode] | None = _passes().attach_below(self, parent, nodes)
        return super().attach_below(parent, nodes) if placed is None else placed

    def walk(self, token_ids: Sequence[int]) -> Walk:
        """Follows committed tokens as ``SpeculationTree.walk`` does."""
        node_ids = _passes().descend(self, token_ids)
        if not node_ids:
            return super().walk(token_ids)
        if len(node_ids) == len(token_ids):
            return Walk(node_ids, (), Cause.HIT if self._anchor.best else Cause.LATE)
        rest = super().walk(token_ids[len(node_ids) :])
        return Walk(node_ids + rest.node_ids, rest.unresolved, rest.cause)

    def follow(self, token_ids: Sequence[int]) -> Cause:
        """Follows committed tokens as ``SpeculationTree.follow`` does."""
        cause: Cause | None = _passes().follow(self, token_ids)
        return super().follow(token_ids) if cause is None else cause

    def _proposal(self, k: int) -> Proposal:
        found: Proposal = _passes().best_path(self, k)
        return found


@functools.cache
def _passes() -> Any:
    """The compiled passes; None if they cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        passes = extension(_SOURCE, "paceline_tree", "the passes over speculation trees")
        probability = (rows.addresses("paceline_probability") or [0])[0]
        prototype = TreeNode(Node(0, -1, 0, 1.0), None, 0)
        refusals = Refusal.STALE, Refusal.INVALID, Refusal.DROPPED
        all_added = tuple(map(Added, range(_MOST_NODES)))
        types = NativeTree, Nodes, NodeColumns
        limits = TOLERANCE, MAX_STEP_S
        counted = SparseDistribution, Added, all_added
        passes.prepare(prototype, *types, *refusals, probability, *limits, *counted, Node)
        passes.prepare_walks(NO_PROPOSAL, Cause.HIT, Cause.LATE, Cause.TOKEN, Cause.K)
    except (EngineError, ImportError, TypeError) as error:
        log.warning("trees are followed by Python, which is slower: %s", error)
        return None
    return passes
