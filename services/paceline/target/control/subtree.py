"""The nodes of a session's tree that are most worth verifying, likeliest first: what it offers to a step.

A node's worth is its path probability, the product of its own and its ancestors' calibrated ones. A token beside
another one begins a branch, which costs the step a page copy and query rows of its own: its worth is less by the tokens
that the step could make in that time. Where no sibling is worth that, what is offered is the chain.

Several producers' trees are offered as one (``MergedOffer``)::

    draft  ▌─▶ a ─▶ b      head  ▌─▶ a ─▶ c      offered  ▌─▶ a ─▶ b      a: one node with two claims
                                 └──▶ d                   │    └──▶ c
                                                          └──▶ d
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any

from paceline.core.tree import Claims, Proposal, TreeNode

_LEAST_PATH = 0.02
MAX_TREE_TOKENS = 64
"""Draft tokens of one session in a step, all branches together."""

Ranked = tuple[float, float, bool]
"""Worth of a draft token; the probability that the text reaches it; True if it begins a branch."""


class SubtreeOffer:
    """The nodes below an anchor, at most ``depth`` deep, that may be proposed: found one by one, as far as asked."""

    __slots__ = ("_anchor", "_depth", "_factors", "_nodes", "_probs")

    def __init__(self, anchor: TreeNode, depth: int, factors: Sequence[float]) -> None:
        """``factors``: calibration of each producer's claims (``AcceptanceHistory.correction``)."""
        self._anchor: Any = anchor
        self._depth = depth
        self._factors = factors
        self._nodes: list[Any] = []
        self._probs: list[float] = []

    def __len__(self) -> int:
        """Number of nodes that may be proposed; walks them all."""
        return sum(1 for _ in self.ranked(0.0))

    def ranked(self, branch_tokens: float) -> Iterator[Ranked]:
        """The nodes by falling worth, parents first; ``proposal`` takes the first ones of the last order.

        Args:
            branch_tokens: tokens that a step makes in the time that one more branch takes.
        """
        self._nodes, self._probs = [], []
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
            prob, node = siblings[0]
            self._nodes.append(node)
            self._probs.append(prob)
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
            probs=tuple([self._probs[i] for i in order]),
            node_ids=tuple([node.node_id for node in nodes]),
            parents=() if parents == (*range(-1, len(parents) - 1),) else parents,
            claims=tuple([node.claims for node in nodes]),
        )

    def _children(self, node: Any) -> list[tuple[float, Any]]:
        """Children that may be proposed with their probabilities, likeliest first."""
        found = [(child.expected(self._factors), child) for child in node.children.values() if child.sampled]
        found.sort(key=itemgetter(0), reverse=True)
        return found


@dataclass(slots=True, eq=False)
class _Place:
    """The nodes of several trees that stand for the same tokens behind the anchor."""

    nodes: tuple[TreeNode, ...]
    """At most one of each producer, in the order of the producers."""
    parent: _Place | None
    claims: Claims = ()

    @property
    def node_id(self) -> int:
        return self.nodes[0].node_id

    @property
    def token_id(self) -> int:
        return self.nodes[0].token_id

    @property
    def position(self) -> int:
        return self.nodes[0].position


class MergedOffer(SubtreeOffer):
    """The nodes below the anchors of several producers' trees, as those of one tree; the trees stay as they are.

    A token that several of them have in the same place is one node with the claims of all, and the id that the first
    of them gave it. Where the probabilities of siblings add up to more than one, they are scaled: only one of them can
    be right.
    """

    __slots__ = ()

    def __init__(self, anchors: Sequence[TreeNode], depth: int, factors: Sequence[float]) -> None:
        """``anchors``: one of each producer's tree, in the order of the producers, all at one place of the text."""
        super().__init__(anchors[0], depth, factors)
        self._anchor = _Place(tuple(anchors), None)

    def _children(self, node: _Place) -> list[tuple[float, _Place]]:
        by_token: dict[int, list[TreeNode]] = {}
        for each in node.nodes:
            for child in each.children.values():
                if child.sampled:
                    by_token.setdefault(child.token_id, []).append(child)
        factors, found = self._factors, []
        for same in by_token.values():
            claims = tuple([claim for child in same for claim in child.claims])
            found.append((max([child.expected(factors) for child in same]), _Place(tuple(same), node, claims)))
        if len(node.nodes) > 1 and (total := sum([prob for prob, _ in found])) > 1.0:
            found = [(prob / total, place) for prob, place in found]
        found.sort(key=itemgetter(0), reverse=True)
        return found


def missed_below(anchor: TreeNode, depth: int, factors: Sequence[float], brought: Sequence[float]) -> float:
    """Tokens that another producer would bring where the text leaves a tree.

    Args:
        anchor: the root of the tree.
        depth: tokens behind it that the other producer may predict.
        factors: as of ``SubtreeOffer``.
        brought: tokens that the other one is expected to have accepted, of 0, 1, .. ``depth`` in a row.
    """
    total, stack = 0.0, [(anchor, 1.0, depth)]
    while stack:
        node, path, left = stack.pop()
        rest = 1.0
        for child in node.children.values():
            if child.sampled:
                prob = child.expected(factors)
                rest -= prob
                if left > 1 and path * prob > _LEAST_PATH:
                    stack.append((child, path * prob, left - 1))
        total += path * max(0.0, rest) * brought[left]
    return total
