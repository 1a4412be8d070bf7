"""Speculation trees, native ones (``tree.cpp``) where there is a C++ compiler with Python's headers.

A native tree has the methods of ``SpeculationTree``, the reference implementation, and its nodes have the attributes of
``TreeNode``; nobody needs to know which one a tree is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core import rows, tree
from paceline.core.native import extension
from paceline.core.processors import Row, SamplerState
from paceline.core.sparse import TOLERANCE
from paceline.core.tree import (
    MAX_NODES,
    NO_PROPOSAL,
    Added,
    Producer,
    Proposal,
    Refusal,
    SpeculationTree,
    TreeNode,
    Walk,
)
from paceline.errors import EngineError
from paceline.messages import MAX_STEP_S, Node, NodeColumns, Nodes, SparseDistribution
from paceline.types import Cause

_SOURCE = Path(__file__).with_name("tree.cpp")
_COLUMNS = ("node_id", "parent_id", "token_id", "prob", "sampled", "q")
log = logging.getLogger(__name__)


def new_tree(
    vocab_size: int,
    context_len: int,
    *,
    rejection: bool = False,
    max_nodes: int = MAX_NODES,
    producer: Producer = Producer.DRAFT,
) -> SpeculationTree:
    """Makes a ``SpeculationTree``, a native one if there are any."""
    if (passes := _passes()) is None:
        return SpeculationTree(vocab_size, context_len, rejection=rejection, max_nodes=max_nodes, producer=producer)
    made: SpeculationTree = passes.SpeculationTree(vocab_size, context_len, rejection, max_nodes, producer)
    return made


def prepare() -> None:
    """Compiles or loads the passes now, so that no session has to wait for them; nodes are read and written by them."""
    if (passes := _passes()) is not None:
        Nodes.read_plain, Nodes.write_plain = passes.read_each, passes.write_each


def columns_of(nodes: list[TreeNode]) -> NodeColumns:
    """Nodes of trees of ``new_tree`` as a message has them."""
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


@functools.cache
def _passes() -> Any:
    """The compiled module; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        passes = extension(_SOURCE, "paceline_tree", "speculation trees")
        if (found := rows.addresses("paceline_probability")) is None:
            return None
        refusals = Refusal.STALE, Refusal.INVALID, Refusal.DROPPED
        causes = Cause.HIT, Cause.LATE, Cause.TOKEN, Cause.K
        types, limits = (Added, Walk, SparseDistribution), (TOLERANCE, MAX_STEP_S)
        passes.prepare(
            (Nodes, NodeColumns), NO_PROPOSAL, refusals, causes, found[0], limits, types, tree.check_integrity
        )
    except (EngineError, ImportError, TypeError) as error:
        log.warning("trees are followed by Python, which is slower: %s", error)
        return None
    return passes
