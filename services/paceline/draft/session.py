"""State of one session on the draft: its tree, the nodes it still has to send, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.native_tree import columns_of, native_frontier, new_tree
from paceline.core.processors import SamplerState
from paceline.core.statistics import Ewma
from paceline.core.tree import SpeculationTree, TreeNode
from paceline.draft.growth import HOLD_ROUNDS, ROUND_WEIGHT, Frontier, Growth
from paceline.drafters.calibration import Calibration, bonus_probs
from paceline.drafters.growing.session import GrowingSession
from paceline.drafters.protocol import Leaf
from paceline.drafters.ranking import Rule
from paceline.messages import NodeColumns, OpenSession

LEAST_PROB = 1e-9
"""The least probability that an outcome is taken to have."""


class DraftSession(GrowingSession):
    """A session's tree, its growth policy and its outbox."""

    __slots__ = (
        "_passed",
        "ahead",
        "announced_at",
        "changed",
        "committed_at",
        "epoch",
        "frontier",
        "growth",
        "hint_weight",
        "hinted",
        "hold_until",
        "idle",
        "num_proposed",
        "outbox",
        "round_s",
        "states_until",
    )

    def __init__(
        self,
        message: OpenSession,
        sampler: SamplerState,
        growth: Growth,
        calibrations: dict[Rule, Calibration],
        bonus: Calibration,
    ) -> None:
        rule = Rule.GREEDY if sampler.greedy else Rule(message.speculation.acceptance)
        super().__init__(
            message.session_id,
            sampler,
            rule,
            new_tree(sampler.vocab_size, len(message.token_ids), rejection=rule is Rule.REJECTION),
            fan_out=growth.fan_out,
            calibration=calibrations[rule],
            bonus=bonus,
            saguaro=message.speculation.saguaro if growth.fan_out > 1 else 1.0,
        )
        self.epoch = message.epoch
        self.growth = growth
        self.frontier = new_frontier(self.tree, growth)
        self.num_proposed = 0
        """Length of the proposal that is being verified, 0 until it is known."""
        self.outbox: list[TreeNode] = []
        """Nodes that the target does not know yet, parents before children."""
        self._passed: set[int] = set()
        """Nodes committed since the outbox was last sent: the target needs them to follow."""
        self.changed = True
        """True if it may have something to send or may have become idle since the last ``_flush`` of the engine."""
        self.idle = False
        """Idleness has been announced since the last commit."""
        self.committed_at: float | None = None
        self.round_s = Ewma(ROUND_WEIGHT)
        """Seconds between two commits."""
        self.announced_at: float | None = None
        """Time at which the proposal in flight was announced; None: there is none."""
        self.states_until = 0.0
        """Time until which a new anchor waits for the target's states, where the drafter reads any."""
        self.ahead = True
        """False: nothing is drafted while a proposal is being verified."""
        self.hinted: dict[int, dict[int, float]] = {}
        """Node of the step in progress -> probabilities of next tokens, by a target's hint (``draft/hints.py``)."""
        self.hint_weight = 0.0
        self.hold_until = 0.0
        """Time until which nodes are held back, to be sent together; inf: each is sent immediately, for the target may
        wait for it."""

    def begin_round(self, now: float, passed: Sequence[int], *, hit: bool) -> None:
        """Follows a commit at ``now`` along the nodes ``passed``, after the tree was walked; drops unsent pruned nodes.

        ``hit``: all committed tokens were in the tree, so the target does not wait.
        """
        if self.committed_at is not None:
            self.round_s.add(now - self.committed_at)
        self.committed_at = now
        self.hold_until = now if hit else math.inf
        self._passed.update(passed)
        if self.outbox:
            self.outbox = [node for node in self.outbox if node.alive or node.node_id in self._passed]

    def may_send(self, now: float) -> bool:
        """True if the outbox is sent at ``now``; then later nodes are held back for a while."""
        if self.hold_until < math.inf:
            if now < self.hold_until:
                return False
            self.hold_until = now + HOLD_ROUNDS * self.round_s.get(0.0)
        return True

    def take_outbox(self) -> NodeColumns:
        """Empties the outbox and returns its nodes."""
        nodes, self.outbox = self.outbox, []
        self._passed.clear()
        return columns_of(nodes)

    def next_leaf(self, tree_budget: int, planned: int = 0) -> TreeNode | None:
        """The node to expand next, if any. The anchor is exempt from the budget: the target waits for its children.

        ``planned``: children expected from nodes that were chosen for the same step.
        """
        node, tree = self.frontier.peek(), self.tree
        if node is None or len(tree) + planned < tree_budget or node is tree.anchor:
            return node
        return None

    def nonce(self, leaf: Leaf) -> int:
        """Returns a nonce for the rejection rule: another one for each node and each opening of the session."""
        return (self.epoch << 20) ^ leaf.node_id

    def outcomes(self, parent: TreeNode) -> dict[int, float]:
        """Probabilities of the tokens below an expanded node: of being accepted, or drawn for one that was not, and at
        the end of the proposal in flight of being the bonus token."""
        if parent is not self.end:
            return {token_id: child.prob for token_id, child in parent.children.items()}
        probs = bonus_probs(self.bonus, parent.bonus)
        return {t: probs[child.rank] for t, child in parent.children.items() if child.rank < len(probs)}

    def aim(self, end: TreeNode | None) -> None:
        """Rejection rule: sets the last node of the proposal in flight; None: nothing is in flight.

        Children of the last node are reached by a bonus token, and no longer by an accepted token.
        """
        ends, self.end = (self.end, end), end
        for node in ends:
            if node is not None and node.alive and node.bonus:
                self.place(node)

    def place(self, parent: TreeNode) -> None:
        """Updates the path probabilities of an expanded node's children to its current outcomes."""
        for token_id, prob in self.outcomes(parent).items():
            child = parent.children[token_id]
            child.shift(parent.log_path + math.log(max(prob, LEAST_PROB)) - child.log_path)

    def placed(self, nodes: list[TreeNode]) -> None:
        """Queues new nodes for sending."""
        self.outbox += nodes
        self.changed = self.changed or bool(nodes)


def new_frontier(tree: SpeculationTree, growth: Growth) -> Frontier:
    """Makes a ``Frontier``, a native one where ``native_tree.new_tree`` makes native trees."""
    made = Frontier(tree, growth)
    native: Frontier | None = native_frontier(
        tree, growth.k, growth.min_log, made.reach, in_turn=growth.in_turn, chain=growth.chain
    )
    return native or made
