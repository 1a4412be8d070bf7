"""One session's tree at one drafter: what is expanded, how likely the children are, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.processors import Row, SamplerState
from paceline.core.tree import SpeculationTree, TreeNode
from paceline.drafters.calibration import Calibration, Expansion, by_guess, guessed
from paceline.drafters.protocol import Leaf
from paceline.drafters.ranking import Ranking, RankingRow, Rule
from paceline.messages import SparseDistribution

END_SHARE = 0.2
"""Rejection rule: the share of nodes that are the last one of a proposal, so that a bonus token follows."""


class GrowingSession:
    """A session's tree and the calibration of its nodes."""

    __slots__ = (
        "_leaves",
        "_leaves_anchor",
        "bonus",
        "calibration",
        "end",
        "fan_out",
        "in_flight",
        "ready",
        "rule",
        "saguaro",
        "sampler",
        "session_id",
        "tree",
    )

    def __init__(
        self,
        session_id: str,
        sampler: SamplerState,
        rule: Rule,
        tree: SpeculationTree,
        *,
        fan_out: int,
        calibration: Calibration,
        bonus: Calibration | None = None,
        saguaro: float = 1.0,
    ) -> None:
        """``sampler``: the target's, or one that follows the same tokens. ``tree``: empty. ``calibration``,
        ``bonus``: of all sessions under this rule, ``bonus`` of guesses of a bonus token.
        ``saguaro``: ``RankingRow``'s."""
        self.session_id, self.sampler, self.rule, self.tree = session_id, sampler, rule, tree
        self.fan_out, self.saguaro = fan_out, saguaro
        self.calibration = Calibration(fan_out, calibration)
        self.bonus = Calibration(fan_out, bonus)
        self.ready = False
        """True once the drafter is known to be ready for it."""
        self.in_flight: frozenset[int] = frozenset()
        """Nodes of the proposal that is being verified."""
        self.end: TreeNode | None = None
        """Rejection rule: the last node of the proposal in flight, which a bonus token follows."""
        self._leaves: dict[int, Leaf] = {}
        """Leaves by their nodes, as long as the anchor is ``_leaves_anchor``."""
        self._leaves_anchor: TreeNode | None = None

    def leaf(self, node: TreeNode) -> Leaf:
        """The node as the drafter's ``expand`` takes it. O(1) where its parent was one below the same anchor."""
        anchor, node_id = self.tree.anchor, node.node_id
        if anchor is not self._leaves_anchor:
            self._leaves_anchor = anchor
            self._leaves = {anchor.node_id: Leaf(self.session_id, anchor.node_id, (), ())}
        if (leaf := self._leaves.get(node_id)) is None:
            assert node.parent is not None, "the anchor's is known"
            above = self._leaves.get(node.parent.node_id) or self.leaf(node.parent)
            leaf = Leaf(self.session_id, node_id, (*above.path_ids, node_id), (*above.path, node.token_id))
            self._leaves[node_id] = leaf
        return leaf

    def nonce(self, leaf: Leaf) -> int:
        """Rejection rule: differs for every node that is ever expanded at its position."""
        raise NotImplementedError

    def ranking_row(self, leaf: Leaf) -> RankingRow:
        """Parameters for ranking the leaf's candidates."""
        nonce = self.nonce(leaf) & 0xFFFFFFFF
        return RankingRow(Row(self.sampler, leaf.path), self.rule, self.fan_out, self.saguaro, nonce)

    def expansion(self, node: TreeNode, ranking: Ranking) -> Expansion:
        """Parameters for the probabilities of a node's children."""
        if not ranking.bonus:
            return Expansion(ranking.gaps, self.calibration)
        share = 1.0 if node is self.end else END_SHARE
        return Expansion(ranking.gaps, self.calibration, ranking.bonus, self.bonus, share)

    def publish(
        self,
        parent: TreeNode,
        token_ids: Sequence[int],
        probs: Sequence[float],
        *,
        sampled: bool = True,
        q: SparseDistribution | None = None,
    ) -> list[TreeNode]:
        """Attaches new nodes to the tree as ``SpeculationTree.grow`` does; returns the accepted ones."""
        placed = self.tree.grow(parent, token_ids, probs, sampled, q)
        self.placed(placed)
        return placed

    def placed(self, nodes: list[TreeNode]) -> None:
        """Learns of new nodes of the tree."""

    def publish_children(self, parent: TreeNode, ranking: Ranking, probs: Sequence[float]) -> list[TreeNode]:
        """Attaches the children of an expanded node, one per entry of ``probs``; returns the accepted ones."""
        parent.expanded, parent.gaps, parent.bonus = True, ranking.gaps, ranking.bonus
        return self.publish(parent, ranking.token_ids[: len(probs)], probs, q=ranking.q)

    def follow(self, token_ids: Sequence[int]) -> tuple[list[int], int, list[int]]:
        """Moves the anchor along committed tokens; a token without a node gets one, of probability 1.

        Returns:
            The nodes of the tokens, how many of them the tree had, and the expanded nodes below the anchor.
        """
        self.observe(token_ids)
        walk = self.tree.walk(token_ids)
        missed = [self.publish(self.tree.anchor, (token_id,), (1.0,), sampled=False) for token_id in walk.unresolved]
        node_ids = [*walk.node_ids, *(node.node_id for (node,) in missed)]
        anchor = self.tree.anchor
        kept = [n.node_id for n in self.tree.nodes() if n.expanded and n is not anchor]
        return node_ids, len(walk.node_ids), kept

    def observe(self, token_ids: Sequence[int]) -> None:
        """Records which candidates of each node the committed tokens took, before the tree is walked."""
        node = self.tree.anchor
        for token_id in token_ids:
            child = node.children.get(token_id)
            if node.gaps:
                rank = child.rank if child else None
                if node.bonus and not (node.best and node.best.node_id in self.in_flight):
                    order = by_guess(node.bonus)
                    at = order.index(rank) if rank is not None and rank < len(order) else None
                    self.bonus.observe(guessed([node.bonus[r] for r in order]).gaps, at)
                else:
                    self.calibration.observe(node.gaps, rank)
            if child is None:
                return
            node = child
