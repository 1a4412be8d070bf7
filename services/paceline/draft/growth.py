"""Order in which the nodes of a speculation tree are expanded: the ways in which a draft can spend its time. Pure.

``Growth`` gives every unexpanded node a sort key; a ``Frontier`` keeps the nodes of one tree in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Self

from paceline.core.statistics import DecayingMax
from paceline.core.tree import SpeculationTree, TreeNode

ROUND_WEIGHT = 0.2
"""Weight of the last round in the average duration of a session's rounds."""
HOLD_ROUNDS = 0.2
"""Share of a round between two messages: each costs its peers a fraction of a millisecond, so a target that verifies
gets about five."""
MIN_PROB = 0.01
"""Lowest probability of a predicted token that becomes a node. Never applied to a first choice."""


Key = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """Order of expansion: best first, or a chain of first choices (``sequential``)."""

    k: int
    """Length of the longest proposal."""
    fan_out: int = 4
    """Children to publish below each expanded node."""
    min_path_prob: float = 0.02
    in_turn: bool = False
    """Nothing is expanded while a proposal is being verified."""
    chain: bool = False
    """First choices only, K of them in a row."""
    min_log: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_log", math.log(self.min_path_prob))

    @classmethod
    def sequential(cls, k: int) -> Self:
        """Grows only the chain of first choices, K long, and nothing while a proposal is being verified."""
        return cls(k, 1, in_turn=True, chain=True)

    def key(self, node: TreeNode, anchor: TreeNode, ahead: int, num_in_flight: int) -> Key | None:
        """Sort key of an unexpanded node, the least first: the probability that the text goes through it, or its depth
        in a chain. None: it is not expanded before the next commit.

        ``ahead``: number of tokens of the node's path after the proposal in flight. 0 is a place where the proposal may
        be cut, 1 a next token of that outcome, and the continuations of an outcome have ahead 2 to K + 1. So nodes with
        ahead <= K may be expanded.
        """
        if self.in_turn and num_in_flight:
            return None
        if self.chain:
            return (float(ahead), 0.0) if ahead < self.k and (ahead == 0 or node.rank == 0) else None
        if ahead > self.k or node.log_path - anchor.log_path < self.min_log:
            return None
        return 0.0, -node.log_path


_KEEP_REACH = 0.9
_SLACK = 2


@dataclass(slots=True)
class Reach:
    """Depth limit of a session's tree: two tokens beyond the longest of the last few proposals.

    The target verifies the draft tokens with positive expected gain at its load. Deeper nodes take time from other
    sessions and, on a shared machine, from the target. The two in excess let proposals grow again, by two in every
    round. A miss has no proposal: it only lets the longest one fade.
    """

    k: int
    longest: DecayingMax = field(init=False)
    """Length of the proposals; K before the first."""

    def __post_init__(self) -> None:
        self.longest = DecayingMax(_KEEP_REACH, float(self.k))

    def observe(self, num_in_flight: int) -> None:
        """Records the length of a proposal that is being verified."""
        self.longest.add(float(num_in_flight))

    @property
    def tokens(self) -> int:
        """Maximum tokens ahead of a node that may be expanded."""
        return min(self.k, math.ceil(self.longest.value) + _SLACK)


class Frontier:
    """The unexpanded nodes of one tree in order. O(log n) per node, O(n) for the first use after commits."""

    __slots__ = (
        "_ahead",
        "_committed",
        "_growth",
        "_heap",
        "_most_ahead",
        "_num_in_flight",
        "_tree",
        "_unwanted",
        "reach",
    )

    def __init__(self, tree: SpeculationTree, growth: Growth) -> None:
        self.reach: Reach | None = None if growth.chain else Reach(growth.k)
        """None: ``Growth`` alone limits the depth."""
        self._most_ahead = math.inf  # of a node that may be expanded, since the last commit
        self._tree = tree
        self._growth = growth
        self._num_in_flight = 0  # length of the longest path in flight
        self._ahead: dict[int, int] = {}
        """``_ahead_of`` nodes that were asked for since the last commit; always of the anchor and the nodes in flight.
        """
        self._heap: list[tuple[Key, int, TreeNode]] = []
        self._unwanted: list[TreeNode] = [tree.anchor]
        self._committed: Iterable[int] | None = ()  # the nodes in flight of a commit that is not sorted in yet

    def push_anchor(self) -> None:
        """Adds the tree's anchor, a new node. ``commit`` comes first."""
        assert self._committed is not None, "nodes are sorted by an anchor"
        self._unwanted.append(self._tree.anchor)  # until the others are sorted in, too

    def push_below(self, parent: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Adds new unexpanded children of a node of the tree, none of which is in flight."""
        if not nodes:
            return
        if self._committed is not None:
            self._sort()
        ahead = self._ahead_of(parent) + 1
        if ahead > self._most_ahead:
            self._unwanted.extend(nodes)
            return
        for node in nodes:
            if (key := self._growth.key(node, self._tree.anchor, ahead, self._num_in_flight)) is None:
                self._unwanted.append(node)
            else:
                heappush(self._heap, (key, node.node_id, node))

    def wants(self, node: TreeNode) -> bool:
        """True if a node, of the frontier or not, may be expanded before the next commit."""
        self._sort()
        if (ahead := self._ahead_of(node)) > self._most_ahead:
            return False
        return self._growth.key(node, self._tree.anchor, ahead, self._num_in_flight) is not None

    def peek(self) -> TreeNode | None:
        """The node to expand next; None if none may be expanded before the next commit."""
        if self._committed is not None:
            self._sort()
        heap = self._heap
        return heap[0][2] if heap else None

    def pop(self) -> TreeNode:
        """Removes and returns the node to expand next. IndexError if there is none."""
        if self._committed is not None:
            self._sort()
        return heappop(self._heap)[2]

    def commit(self, in_flight: Iterable[int]) -> None:
        """Drops pruned nodes and sorts the others again; to be called after every walk with the nodes in flight.

        They are sorted when they are needed next: of commits that follow each other only the last one counts.
        """
        self._committed = in_flight

    def _ahead_of(self, node: TreeNode) -> int:
        """Tokens of a node's path after the proposal in flight, or the anchor. O(1) if its parent's are known."""
        if (ahead := self._ahead.get(node.node_id)) is None:
            assert node.parent is not None, "the anchor's are known"
            ahead = self._ahead[node.node_id] = self._ahead_of(node.parent) + 1
        return ahead

    def _sort(self) -> None:
        """Follows the latest commit, unless that is done."""
        if self._committed is None:
            return
        tree, num_in_flight = self._tree, 0
        anchor = tree.anchor
        self._ahead = known = {anchor.node_id: 0}
        for node_id in self._committed:
            found = tree.get(node_id)
            if found is not None and found is not anchor:
                known[found.node_id] = 0
                num_in_flight = max(num_in_flight, found.position - anchor.position)
        self._committed, self._num_in_flight = None, num_in_flight
        heap: list[tuple[Key, int, TreeNode]] = []
        unwanted: list[TreeNode] = []
        self._most_ahead = most_ahead = math.inf if self.reach is None else self.reach.tokens
        key_of = self._growth.key
        for node in chain([node for _, _, node in self._heap], self._unwanted):
            if not node.alive:
                continue
            if (ahead := known.get(node.node_id)) is None:
                assert node.parent is not None, "the anchor's are known"
                ahead = self._ahead_of(node.parent) + 1
            key = key_of(node, anchor, ahead, num_in_flight) if ahead <= most_ahead else None
            if key is None:
                unwanted.append(node)
            else:
                heap.append((key, node.node_id, node))
        heapify(heap)
        self._heap, self._unwanted = heap, unwanted

    def split(self) -> tuple[Sequence[TreeNode], Sequence[TreeNode]]:
        """The nodes that may be expanded before the next commit, in order, and the others."""
        self._sort()
        return [node for _, _, node in sorted(self._heap)], self._unwanted


def check_integrity(frontier: Frontier, tree: SpeculationTree) -> None:
    """Asserts that exactly the unexpanded nodes of the tree are in its frontier, once each."""
    here = [node.node_id for nodes in frontier.split() for node in nodes]
    assert sorted(here) == sorted(node.node_id for node in tree.nodes() if not node.expanded)
