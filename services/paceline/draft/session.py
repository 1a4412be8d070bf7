"""One session on the draft's side: its tree, what it still has to send, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.processors import Row, SamplerState
from paceline.core.tree import SpeculationTree, TreeNode
from paceline.draft.calibration import Calibration
from paceline.draft.growth import Frontier, Growth
from paceline.draft.ranking import RankingRow, Rule
from paceline.drafters.protocol import Leaf
from paceline.messages import Node, OpenSession, SparseDistribution

_ROUND_WEIGHT = 0.2
_HOLD_ROUNDS = 0.2
"""Every message costs its peers a fraction of a millisecond, so a target that verifies gets about five."""


class DraftSession:
    """A session's tree and what grows it."""

    __slots__ = (
        "_passed", "calibration", "committed_at", "epoch", "frontier", "growth", "hold_until", "idle", "in_flight",
        "next_node_id", "num_proposed", "outbox", "ready", "round_s", "rule", "saguaro", "sampler", "session_id",
        "tree",
    )  # fmt: skip

    def __init__(
        self,
        message: OpenSession,
        sampler: SamplerState,
        growth: Growth,
        calibrations: dict[Rule, Calibration],
    ) -> None:
        self.session_id, self.epoch = message.session_id, message.epoch
        self.sampler = sampler
        self.rule = Rule.GREEDY if sampler.greedy else Rule(message.speculation.acceptance)
        self.growth = growth
        self.saguaro = message.speculation.saguaro if growth.fan_out > 1 else 1.0
        self.calibration = Calibration(growth.fan_out, calibrations[self.rule])
        self.tree = SpeculationTree(sampler.vocab_size, len(message.token_ids), rejection=self.rule is Rule.REJECTION)
        self.frontier = Frontier(self.tree, growth)
        self.in_flight: frozenset[int] = frozenset()
        self.num_proposed = 0
        """Length of the proposal that is being verified, 0 until it is known."""
        self.next_node_id = 1
        self.outbox: list[Node] = []
        self._passed: set[int] = set()
        """Nodes that were committed since it was last sent: the target needs them to follow."""
        self.ready = False
        self.idle = False
        """Idleness was announced since the last commit."""
        self.committed_at: float | None = None
        self.round_s = 0.0
        """Time between two commits: a moving average."""
        self.hold_until = 0.0
        """Nodes found before are sent together then; inf: each at once, since the target may wait for it."""

    def begin_round(self, now: float, passed: Sequence[int], *, hit: bool) -> None:
        """The target has stepped at ``now``, along the nodes ``passed``; others have left the tree with their branches.

        ``hit``: all that it decided was in the tree, so it does not wait.
        """
        if self.committed_at is not None:
            seconds = now - self.committed_at
            self.round_s += (_ROUND_WEIGHT if self.round_s else 1.0) * (seconds - self.round_s)
        self.committed_at = now
        self.hold_until = now if hit else math.inf
        self._passed.update(passed)
        self.outbox = [node for node in self.outbox if node.node_id in self._passed or self.tree.get(node.node_id)]

    def may_send(self, now: float) -> bool:
        """Whether what is queued goes out at ``now``; if so, more is held back for a while."""
        if self.hold_until < math.inf:
            if now < self.hold_until:
                return False
            self.hold_until = now + _HOLD_ROUNDS * self.round_s
        return True

    def take_outbox(self) -> tuple[Node, ...]:
        """What is queued."""
        nodes, self.outbox = tuple(self.outbox), []
        self._passed.clear()
        return nodes

    def next_leaf(self, tree_budget: int, planned: int = 0) -> TreeNode | None:
        """The node to expand next. The anchor is exempt from the budget: it is being waited for."""
        node = self.frontier.peek()
        if node is None or (node is not self.tree.anchor and len(self.tree) + planned >= tree_budget):
            return None
        return node

    def leaf(self, node: TreeNode) -> Leaf:
        """The node as the drafter is asked to expand it."""
        path = []
        at: TreeNode | None = node
        while at is not None and at is not self.tree.anchor:
            path.append(at)
            at = at.parent
        path.reverse()
        ids, token_ids = tuple(n.node_id for n in path), tuple(n.token_id for n in path)
        return Leaf(self.session_id, node.node_id, ids, token_ids)

    def ranking_row(self, leaf: Leaf) -> RankingRow:
        """How the leaf's candidates are to be ranked."""
        nonce = (self.epoch << 20) ^ leaf.node_id
        return RankingRow(
            Row(self.sampler, leaf.path), self.rule, self.growth.fan_out, self.saguaro, nonce & 0xFFFFFFFF
        )

    def in_flight_below(self, node: TreeNode) -> bool:
        """Whether a proposed child of the node is being verified."""
        return node.best is not None and node.best.node_id in self.in_flight

    def publish(
        self,
        token_id: int,
        parent: TreeNode,
        prob: float,
        *,
        sampled: bool,
        q: SparseDistribution | None = None,
    ) -> TreeNode | None:
        """Hangs up a new node on the engine's side and queues it for sending; None if the tree refused it."""
        node = Node(self.next_node_id, parent.node_id, token_id, prob, sampled, q)
        self.next_node_id += 1
        if not self.tree.add((node,)).added:
            return None
        self.outbox.append(node)
        return self.tree.get(node.node_id)
