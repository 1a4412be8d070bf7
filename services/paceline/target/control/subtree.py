"""The nodes that a session's tree offers to a step, by falling expected gain (*worth*).

A node's worth is its path probability, the product of its own and its ancestors' calibrated ones. A sibling begins a
branch, which costs the step a page copy and query rows. The tokens that the step could make in that time are subtracted
from the sibling's gain. If no sibling has positive worth, the offer is the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from paceline.core.ranking import Ranked, Ranking
from paceline.core.tree import Producer, Proposal, TreeNode

MAX_TREE_TOKENS = 64
"""Draft tokens of one session in a step, all branches together."""


class SubtreeOffer:
    """The nodes below an anchor, at most ``depth`` deep, that may be proposed."""

    __slots__ = ("_anchor", "_depth", "_factor", "_ranking")

    def __init__(self, anchor: TreeNode, depth: int, factor: float) -> None:
        """``factor``: calibration of the nodes' probabilities (``AcceptanceHistory.correction``)."""
        self._anchor, self._depth, self._factor = anchor, depth, factor
        self._ranking: Ranking | None = None

    def __len__(self) -> int:
        """Number of nodes that may be proposed; walks them all."""
        return sum(1 for _ in self.ranked(0.0))

    def ranked(self, branch_tokens: float) -> Iterator[Ranked]:
        """The nodes by falling worth, parents first; ``proposal`` takes the first ones of the last order.

        Args:
            branch_tokens: tokens that a step makes in the time that one more branch takes.
        """
        self._ranking = self._anchor.ranking(self._depth, self._factor, branch_tokens, MAX_TREE_TOKENS)
        return self._ranking

    def proposal(self, num_tokens: int) -> Proposal:
        """The first ``num_tokens`` nodes of the last order, branch by branch."""
        if self._ranking is None or num_tokens > len(self._ranking):
            for _ in islice(self.ranked(0.0), num_tokens):
                pass
        assert self._ranking is not None
        token_ids, probs, node_ids, parents = self._ranking.columns(num_tokens)
        return Proposal(
            token_ids=token_ids,
            qs=(None,) * len(token_ids),
            probs=probs,
            node_ids=node_ids,
            parents=() if parents == (*range(-1, len(parents) - 1),) else parents,
            producer=Producer.of(node_ids[0]) if node_ids else Producer.DRAFT,
        )
