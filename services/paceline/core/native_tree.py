"""Speculation trees, native ones (``tree.cpp``) where there is a C++ compiler with Python's headers.

A native tree has the methods of ``SpeculationTree``, the reference implementation, and its nodes have the attributes of
``TreeNode``. So callers use both in the same way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
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

SOURCE = Path(__file__).with_name("tree.cpp")
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
    if (passes := native_module()) is None:
        return SpeculationTree(vocab_size, context_len, rejection=rejection, max_nodes=max_nodes, producer=producer)
    made: SpeculationTree = passes.SpeculationTree(vocab_size, context_len, rejection, max_nodes, producer)
    return made


def prepare() -> None:
    """Compiles or loads the passes now, so that no session has to wait for them; nodes are read and written by them."""
    if (passes := native_module()) is not None:
        Nodes.read_plain, Nodes.write_plain = passes.read_each, passes.write_each


def columns_of(nodes: list[TreeNode]) -> NodeColumns:
    """Nodes of trees of ``new_tree`` as a message has them."""
    passes = native_module()
    return NodeColumns.of(nodes) if passes is None else NodeColumns(*passes.columns_of(nodes))


def add_each(trees: Sequence[SpeculationTree], nodes: Sequence[Sequence[Node]]) -> tuple[Added, bytes]:
    """Attaches the nodes of several messages as ``tree.add_each`` does, to trees of ``new_tree``."""
    passes = native_module()
    if passes is None:
        return tree.add_each(trees, nodes)
    columns = [(each if isinstance(each, NodeColumns) else NodeColumns.of(each)).columns for each in nodes]
    added: tuple[Added, bytes] = passes.add_each(trees, columns)
    return added


def native_frontier(
    tree: SpeculationTree, k: int, min_log: float, reach: object, *, in_turn: bool, chain: bool
) -> Any | None:
    """Makes a native ``Frontier`` (``draft/growth.py``) of a tree of ``new_tree``; None: there are none here.

    ``k``, ``min_log``, ``in_turn``, ``chain``: of ``Growth``.
    """
    passes = native_module()
    return None if passes is None else passes.Frontier(tree, k, min_log, in_turn, chain, reach)


Place = tuple[object, TreeNode, int, int, int, float]
"""Where children are to grow: the frontier of a tree of ``new_tree`` and a node in it, the most children, the addresses
of the calibration of its candidates and of that of bonus tokens, and the share of these."""
Scored = tuple[list[int], list[float]]
"""Candidates and their scores, best first."""
Weighed = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], SparseDistribution | None]
"""Candidates, their gaps, those as guesses of a bonus token or none, and the distribution that the first was drawn
from."""


def grow_each(
    places: list[Place], candidates: Sequence[Scored | Weighed], least: float, expect: int
) -> list[list[TreeNode]] | None:
    """Attaches the candidates of nodes as their children, without those less likely than ``least``, and adds these to
    the frontiers.

    ``expect``: address of the function that weighs them (``drafters/calibration.py``); 0: there is none.

    Returns:
        The new children of each node; None: nothing is done, since there are no native functions here.
    """
    passes = native_module()
    if passes is None or not expect:
        return None
    grown: list[list[TreeNode]] = passes.grow_each(places, list(candidates), least, expect)
    return grown


def rows_of(state: SamplerState, proposal: Proposal) -> list[Row]:
    """The positions of one session to decide: after its context, and after each token of its proposal."""
    passes = native_module()
    if passes is None or proposal.parents:
        return [Row(state, suffix) for suffix in proposal.suffixes()]
    made: list[Row] = passes.rows(Row, state, proposal.token_ids)
    return made


@functools.cache
def native_module() -> Any:
    """The compiled module; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        passes = extension(SOURCE, "paceline_tree", "speculation trees")
        if (found := rows.addresses("paceline_probability")) is None:
            return None
        refusals = Refusal.STALE, Refusal.INVALID, Refusal.DROPPED
        causes = Cause.HIT, Cause.LATE, Cause.TOKEN, Cause.K
        types = Added, Walk, Proposal, SparseDistribution
        passes.prepare(refusals, causes, types, NO_PROPOSAL, tree.check_integrity, found[0], TOLERANCE, MAX_STEP_S)
    except (EngineError, ImportError, TypeError) as error:
        log.warning("trees are followed by Python, which is slower: %s", error)
        return None
    return passes
