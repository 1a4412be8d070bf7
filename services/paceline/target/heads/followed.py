"""One session at one head: the head's own tree below the session's last token, and what it may bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.tree import Producer, SpeculationTree, TreeNode
from paceline.drafters.calibration import Calibration
from paceline.drafters.ranking import Ranking, Rule, ranking_of
from paceline.messages import Node
from paceline.model.chain import Stop
from paceline.target.control.allocation import AcceptanceHistory
from paceline.target.session import FAN_OUT, TargetSession

_MOST_HOLES = 4
"""Holes of a session that are known apart; the first two become one, with what is between them."""


def rule_of(session: TargetSession) -> Rule:
    """The rule by which a head's candidates for a session are ranked or drawn."""
    return Rule.GREEDY if session.sampler.greedy else Rule.REJECTION if session.rejection else Rule.COUPLED


class Followed:
    """One session at one head: the head's tree below the session's last token."""

    __slots__ = (
        "attachment",
        "calibration",
        "hits",
        "holes",
        "in_flight",
        "next_node_id",
        "num_fed",
        "rule",
        "session",
        "tree",
        "vocab_size",
    )

    def __init__(
        self,
        session: TargetSession,
        vocab_size: int,
        calibration: Calibration,
        acceptance: AcceptanceHistory,
    ) -> None:
        """``calibration``, ``acceptance``: those of all sessions of the head under this one's rule."""
        self.session = session
        self.rule = rule_of(session)
        self.vocab_size = vocab_size
        self.tree = self._new_tree()
        self.calibration = Calibration(FAN_OUT, calibration)
        self.hits = AcceptanceHistory(acceptance)
        self.next_node_id: int = Producer.HEAD.first_id
        self.in_flight: frozenset[int] = frozenset()
        """Nodes of the proposal that is being verified."""
        self.num_fed = 0
        """Positions [0, num_fed) have been fed since ``attachment``, or the last of them to a head that wants no
        more."""
        self.attachment = 0
        """The session's pages that it was fed for (``TargetSession.attachment``)."""
        self.holes: tuple[range, ...] = ()
        """Rows on these pages that the head has missed, in ascending order (``Fed.holes``)."""

    def _new_tree(self) -> SpeculationTree:
        session = self.session
        return SpeculationTree(self.vocab_size, session.num_tokens, rejection=session.rejection, producer=Producer.HEAD)

    def add(self, parent: TreeNode, ranking: Ranking) -> TreeNode | None:
        """Attaches the children of an expanded node; returns the one that a proposal takes."""
        parent.gaps = ranking.evidence.gaps
        probs = self.calibration.probabilities(ranking.evidence)
        for r, (token_id, prob) in enumerate(zip(ranking.token_ids, probs, strict=True)):
            first = r == 0
            node = Node(self.next_node_id, parent.node_id, token_id, prob, True, ranking.q if first else None)
            self.next_node_id += 1
            self.tree.add((node,))
        return parent.best

    def add_chain(self, parent: TreeNode, ranked: Sequence[tuple[Sequence[int], Sequence[float]]]) -> list[int]:
        """Attaches the children of a node, of the first of these, .. (``ModelRunner.run_chain``), and returns the nodes
        that were expanded below ``parent``."""
        expanded: list[int] = []
        node: TreeNode | None = parent
        for token_ids, scores in ranked:
            if node is None:
                break
            if node is not parent:
                expanded.append(node.node_id)
            node.expanded = True
            node = self.add(node, ranking_of(token_ids, scores))
        return expanded

    def stop(self, node: TreeNode, least: float) -> Stop:
        """When a chain below ``node`` ends: after a token whose path is less likely than ``least``."""
        edges, constants, slopes, mass = self.calibration.first()
        return Stop(edges, constants, slopes, mass, self.hits.correction(), self.probability(node), least)

    def walk(self, token_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Follows committed tokens: their nodes, and the expanded nodes that are still below the anchor."""
        self._observe(token_ids)
        walk = self.tree.walk(token_ids)
        node_ids = list(walk.node_ids)
        for token_id in walk.unresolved:
            node = Node(self.next_node_id, self.tree.anchor.node_id, token_id, 1.0, False)
            self.next_node_id += 1
            self.tree.add((node,))
            node_ids.append(node.node_id)
        self.in_flight = frozenset()
        return node_ids, [n.node_id for n in self.tree.nodes() if n.expanded and n is not self.tree.anchor]

    def _observe(self, token_ids: Sequence[int]) -> None:
        node = self.tree.anchor
        for token_id in token_ids:
            child = node.children.get(token_id)
            if node.gaps:
                tried = self.rule is not Rule.REJECTION or (
                    node.best is not None and node.best.node_id in self.in_flight
                )
                self.calibration.observe(node.gaps, child.rank if child else None, 0 if tried else 1)
            if child is None:
                return
            node = child

    def miss(self, rows: range) -> None:
        """Takes that the head has missed some rows, those right before what it is fed with next."""
        self.holes = (*self.holes, rows)
        if len(self.holes) > _MOST_HOLES:
            first, second, *others = self.holes
            self.holes = (range(first.start, second.stop), *others)

    def restart(self) -> None:
        """Drops everything below the anchor: it was predicted from the head's own states, and better ones have come."""
        self.tree = self._new_tree()

    def deepest(self) -> TreeNode:
        """The end of the best path below the anchor: the node to expand next, unless nothing came of it before.

        Below an anchor that was predicted there may be a path already: its tokens were not all verified.
        """
        node = self.tree.anchor
        while node.expanded and node.best is not None:
            node = node.best
        return node

    def probability(self, node: TreeNode) -> float:
        """Probability that the tokens down to ``node`` are all accepted; under the rejection rule by averages alone."""
        path = self.path(node)
        if self.rule is Rule.REJECTION:
            return self.hits.rate() ** len(path)
        correction = self.hits.correction()
        return math.prod(min(1.0, correction * each.prob) for each in path)

    def path(self, node: TreeNode) -> list[TreeNode]:
        """The nodes from the anchor (exclusive) to ``node`` (inclusive)."""
        path = []
        at: TreeNode | None = node
        while at is not None and at is not self.tree.anchor:
            path.append(at)
            at = at.parent
        return path[::-1]
