"""One session at one head: the head's own tree below the session's last token, and its acceptance."""

from __future__ import annotations

import math

from paceline.core.native_tree import new_tree
from paceline.core.tree import Producer, SpeculationTree, TreeNode
from paceline.drafters.calibration import Calibration
from paceline.drafters.growing.session import GrowingSession
from paceline.drafters.protocol import Leaf, with_hole
from paceline.drafters.ranking import Rule
from paceline.model.chain import Stop
from paceline.target.control.allocation import AcceptanceHistory
from paceline.target.session import FAN_OUT, TargetSession

_NONCES = 1 << 31
"""First nonce of heads under the rejection rule. At one length of the context no draw of a draft has the same nonce."""


def rule_of(session: TargetSession) -> Rule:
    """The rule by which a head's candidates for a session are ranked or drawn."""
    return Rule.GREEDY if session.sampler.greedy else Rule.REJECTION if session.rejection else Rule.COUPLED


class HeadSession(GrowingSession):
    """One session at one head: the head's tree below the session's last token."""

    __slots__ = ("attachment", "hits", "holes", "num_fed", "session")

    def __init__(
        self,
        session: TargetSession,
        calibration: Calibration,
        acceptance: AcceptanceHistory,
    ) -> None:
        """``calibration``, ``acceptance``: shared by all sessions of the head with the same acceptance rule."""
        self.session = session
        rule = rule_of(session)
        super().__init__(
            session.session_id,
            session.sampler,
            rule,
            self._new_tree(),
            fan_out=1 if rule is Rule.REJECTION else FAN_OUT,
            calibration=calibration,
        )
        self.hits = AcceptanceHistory(acceptance)
        self.num_fed = 0
        """The head has been fed with positions [0, num_fed) on these pages, or only with the last ones if it reads no
        more."""
        self.attachment = 0
        """``TargetSession.attachment`` of the pages that the head was fed for."""
        self.holes: tuple[range, ...] = ()
        """Rows on these pages that the head has missed, in ascending order (``Fed.holes``)."""

    def _new_tree(self) -> SpeculationTree:
        session, vocab_size = self.session, self.session.sampler.vocab_size
        return new_tree(vocab_size, session.num_tokens, rejection=session.rejection, producer=Producer.HEAD)

    def nonce(self, leaf: Leaf) -> int:
        """Returns a nonce for the rejection rule that no node of a draft has at this length of the context."""
        return _NONCES | self.session.num_tokens

    def stop(self, node: TreeNode, least: float) -> Stop:
        """Returns the rule that ends a chain below ``node``: after a token whose path is less likely than ``least``."""
        return Stop(*self.calibration.first(), self.hits.correction(), self.probability(node), least)

    def miss(self, rows: range) -> None:
        """Records that the head has missed ``rows``, which directly precede the rows that it is fed with next."""
        self.holes = with_hole(self.holes, rows)

    def restart(self) -> None:
        """Drops all nodes below the anchor. The head predicted them from its own states; now it has the target's."""
        self.tree = self._new_tree()

    def deepest(self, node: TreeNode) -> TreeNode:
        """Returns the end of the best path below ``node``: the node to expand next.

        A predicted anchor may have a path below it already, whose tokens were not all verified.
        """
        while node.expanded and node.best is not None:
            node = node.best
        return node

    def probability(self, node: TreeNode) -> float:
        """Returns the probability that all tokens down to ``node`` are accepted; under the rejection rule from the
        session's acceptance rate alone."""
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
