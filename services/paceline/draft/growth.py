"""Order in which the nodes of a speculation tree are expanded: the ways in which a draft can spend its time. Pure.

A policy gives every unexpanded node a sort key; a ``Frontier`` keeps the nodes of one tree in that order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from paceline.core.statistics import DecayingMax
from paceline.core.tree import SpeculationTree, TreeNode


class Growth(Protocol):
    """Order of expansion: the least key comes first; None: not before the next commit.

    ``position`` is how many tokens of the proposal in flight lie on the node's path, 0 to num_in_flight. ``ahead`` is
    how many tokens follow those: 0 is a place where the proposal may be cut, 1 a next token of that outcome, and the
    continuations of an outcome have ahead 2 to K + 1. So nodes of ahead <= K are worth expanding.
    """

    @property
    def k(self) -> int:
        """Length of the longest proposal."""
        ...

    @property
    def fan_out(self) -> int:
        """Children to publish below each expanded node."""
        ...

    def key(
        self, node: TreeNode, anchor: TreeNode, position: int, ahead: int, num_in_flight: int
    ) -> tuple[float, float] | None:
        """Sort key of an unexpanded node."""
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The largest probability that the text goes through the node."""

    k: int
    fan_out: int = 4
    min_path_prob: float = 0.02
    _min_log: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_min_log", math.log(self.min_path_prob))

    def key(
        self, node: TreeNode, anchor: TreeNode, position: int, ahead: int, num_in_flight: int
    ) -> tuple[float, float] | None:
        """Path probability, for nodes near enough to serve the next proposal."""
        if ahead > self.k or node.log_path - anchor.log_path < self._min_log:
            return None
        return 0.0, -node.log_path


@dataclass(frozen=True, slots=True)
class InTurn(BestFirst):
    """``BestFirst``, but nothing is grown while a proposal is being verified."""

    def key(
        self, node: TreeNode, anchor: TreeNode, position: int, ahead: int, num_in_flight: int
    ) -> tuple[float, float] | None:
        """As ``BestFirst``, while nothing is in flight."""
        return None if num_in_flight else BestFirst.key(self, node, anchor, position, ahead, num_in_flight)


_KEEP_REACH = 0.9
_SLACK = 2


@dataclass(slots=True)
class Reach:
    """Depth to which a session's tree is worth growing: two tokens beyond the longest of the last few proposals.

    The target verifies as many draft tokens as pay at its load; nodes beyond those take time from other sessions, and
    where draft and target share a machine from the target. The two in excess let proposals grow again, by two in every
    round. A miss has no proposal: it only lets the longest one fade.
    """

    k: int
    longest: DecayingMax = field(init=False)
    """Length of the proposals; K before the first."""

    def __post_init__(self) -> None:
        self.longest = DecayingMax(_KEEP_REACH, float(self.k))

    def observe(self, num_in_flight: int) -> None:
        """Takes the length of a proposal that is being verified."""
        self.longest.add(float(num_in_flight))

    @property
    def tokens(self) -> int:
        """Nodes up to this many tokens ahead are worth expanding, no others."""
        return min(self.k, math.ceil(self.longest.value) + _SLACK)


@dataclass(frozen=True, slots=True)
class FanOut:
    """A fixed number of outcomes at each position, K tokens below each, level by level (2603.03251)."""

    k: int
    fan_outs: tuple[int, ...]
    """Fan-out at positions 0 to K of the proposal in flight."""
    bonus_fan_out: int
    """Fan-out after its last token."""

    @property
    def fan_out(self) -> int:
        """The largest fan-out of any position."""
        return max(*self.fan_outs, self.bonus_fan_out)

    def key(
        self, node: TreeNode, anchor: TreeNode, position: int, ahead: int, num_in_flight: int
    ) -> tuple[float, float] | None:
        """Level, then path probability; below an outcome only the first child continues its chain."""
        limit = 1
        if ahead == 1:
            last = position >= num_in_flight
            limit = self.bonus_fan_out if last else self.fan_outs[min(position, len(self.fan_outs) - 1)]
        if ahead > self.k or (ahead > 0 and node.rank >= limit):
            return None
        return float(ahead), -node.log_path


def uniform(k: int, fan_out: int) -> FanOut:
    """Fan-outs that are equal at all positions."""
    return FanOut(k, (fan_out,) * (k + 1), fan_out)


def geometric(k: int, fan_out: int, acceptance: float = 0.75, power: float = 1.0) -> FanOut:
    """Fan-outs that fall geometrically with the position and rise at the bonus token, ``fan_out`` on average.

    They maximize the hit rate sum_k w_k (1 - F_k^-r) for a given sum of F_k: F_k ~ w_k^(1 / (1 + r)), where
    w_k is the probability of being cut at k: a^k (1 - a), and a^K at the end (2603.03251, geometric fan-out).
    ``acceptance`` is a, ``power`` is r. Rounded, at least 1.
    """
    weights = [acceptance**i * (1 - acceptance) for i in range(k)] + [acceptance**k]
    shares = [w ** (1 / (1 + power)) for w in weights]
    scale = fan_out * (k + 1) / sum(shares)
    fan_outs = tuple(max(1, round(share * scale)) for share in shares)
    return FanOut(k, fan_outs[:-1] or fan_outs, fan_outs[-1])


@dataclass(frozen=True, slots=True)
class Sequential:
    """Only the chain of first choices, K long, and nothing while a proposal is being verified."""

    k: int
    fan_out: int = 1

    def key(
        self, node: TreeNode, anchor: TreeNode, position: int, ahead: int, num_in_flight: int
    ) -> tuple[float, float] | None:
        """Depth, while nothing is in flight."""
        wanted = num_in_flight == 0 and ahead < self.k and (ahead == 0 or node.rank == 0)
        return (float(ahead), 0.0) if wanted else None


class Frontier:
    """The unexpanded nodes of one tree in a policy's order. O(log n) per node, O(n) for the first use after commits."""

    __slots__ = (
        "_committed",
        "_growth",
        "_heap",
        "_most_ahead",
        "_num_in_flight",
        "_places",
        "_tree",
        "_unwanted",
        "reach",
    )

    def __init__(self, tree: SpeculationTree, growth: Growth) -> None:
        self.reach: Reach | None = Reach(growth.k) if isinstance(growth, BestFirst) else None
        """None: the policy alone limits the depth."""
        self._most_ahead = self._reached()  # of a node that is worth expanding, since the last commit
        self._tree = tree
        self._growth = growth
        self._num_in_flight = 0  # length of the longest path in flight
        self._places: dict[int, tuple[int, int]] = {tree.anchor.node_id: (0, 0)}
        """``_place`` of nodes that were asked for since the last commit; always of the anchor and the nodes in flight.
        """
        self._heap: list[tuple[tuple[float, float], int, TreeNode]] = []
        self._unwanted: list[TreeNode] = []
        self._committed: Iterable[int] | None = None  # the nodes in flight of a commit that is not sorted in yet
        self.push(tree.anchor)

    def push(self, node: TreeNode) -> None:
        """Adds a new unexpanded node of the tree."""
        if self._committed is not None:
            self._unwanted.append(node)  # until the others are sorted in, too
        else:
            self._push(node, *self._place(node))

    def push_below(self, parent: TreeNode, nodes: Sequence[TreeNode]) -> None:
        """Adds new unexpanded children of a node of the tree, none of which is in flight."""
        if not nodes:
            return
        if self._committed is not None:
            self._sort()
        position, ahead = self._places.get(parent.node_id) or self._place(parent)
        ahead += 1
        if ahead > self._most_ahead:
            self._unwanted.extend(nodes)
            return
        anchor, num_in_flight, key_of = self._tree.anchor, self._num_in_flight, self._growth.key
        for node in nodes:
            if (key := key_of(node, anchor, position, ahead, num_in_flight)) is None:
                self._unwanted.append(node)
            else:
                heapq.heappush(self._heap, (key, node.node_id, node))

    def wants(self, node: TreeNode) -> bool:
        """True if a node, of the frontier or not, is worth expanding before the next commit."""
        self._sort()
        return self._key(node, *self._place(node)) is not None

    def peek(self) -> TreeNode | None:
        """The node to expand next, None if no node is worth expanding before the next commit."""
        if self._committed is not None:
            self._sort()
        heap = self._heap
        return heap[0][2] if heap else None

    def pop(self) -> TreeNode:
        """Removes and returns the node to expand next. IndexError if there is none."""
        if self._committed is not None:
            self._sort()
        return heapq.heappop(self._heap)[2]

    def commit(self, in_flight: Iterable[int]) -> None:
        """Drops pruned nodes and sorts the others again; to be called after every walk with the nodes in flight.

        They are sorted when they are needed next: of commits that follow each other only the last one counts.
        """
        self._committed = in_flight

    def _push(self, node: TreeNode, position: int, ahead: int) -> None:
        key = self._key(node, position, ahead)
        if key is None:
            self._unwanted.append(node)
        else:
            heapq.heappush(self._heap, (key, node.node_id, node))

    def _place(self, node: TreeNode) -> tuple[int, int]:
        """Position and ahead of a node (``Growth``): its path up to the proposal in flight has ``ahead`` tokens, the
        rest up to the anchor ``position`` ones. O(1) where the place of its parent is known."""
        if (place := self._places.get(node.node_id)) is None:
            assert node.parent is not None, "the anchor's place is known"
            position, ahead = self._places.get(node.parent.node_id) or self._place(node.parent)
            place = self._places[node.node_id] = position, ahead + 1
        return place

    def _key(self, node: TreeNode, position: int, ahead: int) -> tuple[float, float] | None:
        if ahead <= self._most_ahead:
            return self._growth.key(node, self._tree.anchor, position, ahead, self._num_in_flight)
        return None

    def _reached(self) -> float:
        return math.inf if self.reach is None else self.reach.tokens

    def _sort(self) -> None:
        """Follows the latest commit, unless that is done."""
        if self._committed is None:
            return
        tree, num_in_flight = self._tree, 0
        anchor = tree.anchor
        self._places = places = {anchor.node_id: (0, 0)}
        for node_id in self._committed:
            found = tree.get(node_id)
            if found is not None and found is not anchor:
                position = found.position - anchor.position
                places[found.node_id] = position, 0
                num_in_flight = max(num_in_flight, position)
        self._committed, self._num_in_flight = None, num_in_flight
        heap: list[tuple[tuple[float, float], int, TreeNode]] = []
        unwanted: list[TreeNode] = []
        self._most_ahead, key_of = self._reached(), self._growth.key
        most_ahead = self._most_ahead
        for node in chain([node for _, _, node in self._heap], self._unwanted):
            if not node.alive:
                continue
            if (place := places.get(node.node_id)) is not None:
                position, ahead = place
            else:
                assert node.parent is not None, "the anchor's place is known"
                position, ahead = places.get(node.parent.node_id) or self._place(node.parent)
                ahead += 1
            key = key_of(node, anchor, position, ahead, num_in_flight) if ahead <= most_ahead else None
            if key is None:
                unwanted.append(node)
            else:
                heap.append((key, node.node_id, node))
        heapq.heapify(heap)
        self._heap, self._unwanted = heap, unwanted

    def check_integrity(self) -> None:
        """Asserts that exactly the unexpanded nodes of the tree are here, once each."""
        self._sort()
        here = [node.node_id for _, _, node in self._heap] + [node.node_id for node in self._unwanted]
        assert sorted(here) == sorted(node.node_id for node in self._tree.nodes() if not node.expanded)
