"""The nodes below an anchor in the order in which steps take them (``target/control/subtree.py``)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

Ranked = tuple[float, float, bool]
"""Worth of a draft token; the probability that the text reaches it; True if it begins a branch."""
Columns = tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...], tuple[int, ...]]
"""Tokens of nodes, their probabilities and ids, and the index of each one's parent, -1 for the anchor."""


class Ranking:
    """The nodes below an anchor by falling worth, parents first: an iterator, which finds them as far as it is asked.
    The reference of the native one (``tree.cpp``)."""

    def __init__(self, anchor: Any, depth: int, factor: float, branch_tokens: float, most: int) -> None:
        """``factor``: of the nodes' probabilities; ``branch_tokens``: the price of a branch; ``most``: nodes."""
        self._anchor, self._depth, self._most = anchor, depth, most
        self._factor, self._branch_tokens = factor, branch_tokens
        self.nodes: list[Any] = []
        """The nodes found so far, in falling order of expected gain."""
        self._serial = 0
        # -worth, serial, path probability, begins a branch, siblings from this one on, path and worth of the parent
        self._heap: list[tuple[float, int, float, bool, list[tuple[float, Any]], float, float]] = []
        self._push(self.children_of(anchor), 1.0, math.inf, begins=False)

    def __len__(self) -> int:
        """Number of nodes found so far."""
        return len(self.nodes)

    def __iter__(self) -> Iterator[Ranked]:
        return self

    def __next__(self) -> Ranked:
        if not self._heap or len(self.nodes) >= self._most:
            raise StopIteration
        value, _, own, begins, siblings, path, worth = heapq.heappop(self._heap)
        _, node = siblings[0]
        self.nodes.append(node)
        self._push(siblings[1:], path, worth, begins=True)
        if node.position - self._anchor.position < self._depth:
            self._push(self.children_of(node), own, -value, begins=False)
        return -value, own, begins

    def columns(self, num_nodes: int) -> Columns:
        """The first nodes that were found, branch by branch."""
        children: dict[int, list[int]] = {}
        place, above = {self._anchor.node_id: -1}, []
        for i, node in enumerate(self.nodes[:num_nodes]):
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
        nodes = [self.nodes[i] for i in order]
        token_ids, probs = tuple([node.token_id for node in nodes]), tuple([node.prob for node in nodes])
        return token_ids, probs, tuple([node.node_id for node in nodes]), tuple([at[above[i]] for i in order])

    def _push(self, siblings: list[tuple[float, Any]], path: float, worth: float, *, begins: bool) -> None:
        if not siblings:
            return
        own = path * siblings[0][0]
        value = min(worth, own - self._branch_tokens if begins else own)
        if value > 0:
            self._serial += 1
            heapq.heappush(self._heap, (-value, self._serial, own, begins, siblings, path, worth))

    def children_of(self, node: Any) -> list[tuple[float, Any]]:
        """Children that may be proposed with their probabilities, likeliest first."""
        factor = self._factor
        found = [(min(1.0, factor * child.prob), child) for child in node.children.values() if child.sampled]
        found.sort(key=itemgetter(0), reverse=True)
        return found
