"""The nodes that a session's tree offers to a step, by falling expected gain (*worth*).

A node's worth is its path probability, the product of its own and its ancestors' calibrated ones. A sibling of
another token begins a branch, which costs the step a page copy and query rows of its own: its worth is less by the
tokens that the step could make in that time. If no sibling has positive worth, the offer is the chain.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

from paceline.core.tree import Producer, Proposal, TreeNode

MAX_TREE_TOKENS = 64
"""Draft tokens of one session in a step, all branches together."""

Ranked = tuple[float, float, bool]
"""Worth of a draft token; the probability that the text reaches it; True if it begins a branch."""


class SubtreeOffer:
    """The nodes below an anchor, at most ``depth`` deep, that may be proposed: found one by one, as far as asked."""

    __slots__ = ("_anchor", "_depth", "_factor", "_nodes")

    def __init__(self, anchor: TreeNode, depth: int, factor: float) -> None:
        """``factor``: calibration of the nodes' probabilities (``AcceptanceHistory.correction``)."""
        self._anchor: Any = anchor
        self._depth = depth
        self._factor = factor
        self._nodes: list[Any] = []

    def __len__(self) -> int:
        """Number of nodes that may be proposed; walks them all."""
        return sum(1 for _ in self.ranked(0.0))

    def ranked(self, branch_tokens: float) -> Iterator[Ranked]:
        """The nodes by falling worth, parents first; ``proposal`` takes the first ones of the last order.

        Args:
            branch_tokens: tokens that a step makes in the time that one more branch takes.
        """
        self._nodes = []
        serial = 0
        # -worth, serial, path probability, begins a branch, siblings from this one on, path and worth of the parent
        heap: list[tuple[float, int, float, bool, list[tuple[float, Any]], float, float]] = []

        def push(siblings: list[tuple[float, Any]], path: float, worth: float, begins: bool) -> None:
            nonlocal serial
            own = path * siblings[0][0]
            value = min(worth, own - branch_tokens if begins else own)
            if value > 0:
                serial += 1
                heapq.heappush(heap, (-value, serial, own, begins, siblings, path, worth))

        first = self._children(self._anchor)
        if first:
            push(first, 1.0, math.inf, begins=False)
        while heap and len(self._nodes) < MAX_TREE_TOKENS:
            value, _, own, begins, siblings, path, worth = heapq.heappop(heap)
            _, node = siblings[0]
            self._nodes.append(node)
            yield -value, own, begins
            if len(siblings) > 1:
                push(siblings[1:], path, worth, begins=True)
            if node.position - self._anchor.position < self._depth and (children := self._children(node)):
                push(children, own, -value, begins=False)

    def proposal(self, num_tokens: int) -> Proposal:
        """The first ``num_tokens`` nodes of the last order, branch by branch."""
        missing = num_tokens - len(self._nodes)
        if missing > 0:
            for _ in islice(self.ranked(0.0), num_tokens):
                pass
        children: dict[int, list[int]] = {}
        place, above = {self._anchor.node_id: -1}, []
        for i, node in enumerate(self._nodes[:num_tokens]):
            assert node.parent is not None
            place[node.node_id] = i
            above.append(place[node.parent.node_id])
            children.setdefault(above[i], []).append(i)
        order: list[int] = []
        stack = [*reversed(children.get(-1, ()))]
        while stack:
            order.append(stack.pop())
            stack.extend(reversed(children.get(order[-1], ())))
        at = {-1: -1} | {i: index for index, i in enumerate(order)}
        parents = tuple([at[above[i]] for i in order])
        nodes = [self._nodes[i] for i in order]
        return Proposal(
            token_ids=tuple([node.token_id for node in nodes]),
            qs=(None,) * len(nodes),
            probs=tuple([node.prob for node in nodes]),
            node_ids=tuple([node.node_id for node in nodes]),
            parents=() if parents == (*range(-1, len(parents) - 1),) else parents,
            producer=Producer.of(nodes[0].node_id) if nodes else Producer.DRAFT,
        )

    def _children(self, node: Any) -> list[tuple[float, Any]]:
        """Children that may be proposed with their probabilities, likeliest first."""
        factor = self._factor
        found = [(min(1.0, factor * child.prob), child) for child in node.children.values() if child.sampled]
        found.sort(key=itemgetter(0), reverse=True)
        return found
