"""One tree step of a draft: choose the likeliest leaves of all its sessions, expand, rank and publish them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain

from paceline.core.native_tree import Place, Scored, Weighed, grow_each
from paceline.core.tree import TreeNode
from paceline.draft import hints
from paceline.draft.growth import MIN_PROB
from paceline.draft.session import DraftSession
from paceline.draft.stats import DraftStats
from paceline.drafters.calibration import expect_address
from paceline.drafters.growing.blame import OnFailure
from paceline.drafters.growing.grower import Grower
from paceline.drafters.growing.session import END_SHARE
from paceline.drafters.protocol import Candidates, Drafter
from paceline.drafters.ranking import Ranking, rank, rankings_of
from paceline.model.chain import Stop

_LEAST_CHAINED = 0.2
"""A path of one call ends where it is less likely than this: siblings further up may be the better nodes."""


class DraftGrower(Grower[DraftSession]):
    """Grows the trees of a draft's sessions within their budgets."""

    least_prob = MIN_PROB

    def __init__(self, drafter: Drafter, stats: DraftStats, tree_budget: int, on_failure: OnFailure) -> None:
        """``tree_budget``: nodes of a session beyond the context. ``on_failure``: ends sessions."""
        super().__init__(drafter, drafter.tokens_per_leaf, on_failure)
        self.reads = drafter.states
        """The drafter, if it reads hidden states."""
        self._stats = stats
        self._tree_budget = tree_budget

    def waits(self, session: DraftSession, now: float) -> bool:
        """True if a session's anchor is not to be expanded yet: states of its context are expected."""
        return (
            self.reads is not None
            and session.ready
            and now < session.states_until
            and session.frontier.peek() is session.tree.anchor
            and self.reads.awaits(session.session_id)
        )

    def choose(self, now: float) -> list[tuple[DraftSession, TreeNode]]:
        """Returns the likeliest leaves of all sessions, grouped by session, each session's in the order of its own
        policy."""
        # A heap of (-log path probability of a session's next leaf, order of the session, session).
        heap: list[tuple[float, int, DraftSession]] = []
        budget, tokens_per_leaf = self._tree_budget, self.drafter.tokens_per_leaf
        for order, session in enumerate(self.sessions.values()):
            if not (session.ready or self.ready(session)):
                continue
            if (node := session.next_leaf(budget)) is not None and not (self.reads and self.waits(session, now)):
                heap.append((session.tree.anchor.log_path - node.log_path, order, session))
        heapq.heapify(heap)
        chosen: dict[int, list[tuple[DraftSession, TreeNode]]] = {}
        for _ in range(self.drafter.max_leaves):
            if not heap:
                break
            _, order, session = heap[0]
            node = session.frontier.pop()
            if (of_session := chosen.get(order)) is None:
                chosen[order] = of_session = []
            of_session.append((session, node))
            if self.reads is not None and node is session.tree.anchor:
                self._stats.states_late += self.reads.awaits(session.session_id)
            planned = len(of_session) * session.fan_out * tokens_per_leaf
            if (following := session.next_leaf(budget, planned)) is not None:
                heapq.heapreplace(heap, (session.tree.anchor.log_path - following.log_path, order, session))
            else:
                heapq.heappop(heap)
        return list(chain.from_iterable(chosen.values()))

    def grow(self, chosen: list[tuple[DraftSession, TreeNode]]) -> bool:
        """Expands the chosen nodes. True: it was an anchor alone and the best path below it, by one call: the target
        may wait for it."""
        session, anchor = chosen[0]
        most = min(session.growth.k, self._tree_budget - len(session.tree))
        if len(chosen) == 1 and anchor is session.tree.anchor and self.may_draft_path(session, most):
            least = _LEAST_CHAINED if session.ahead else 0.0
            stop = Stop(*session.calibration.first(), correction=1.0, path=1.0, least=least)
            if (num_leaves := self.draft_path(session, anchor, most, stop)) != 0:
                self._stats.leaves += num_leaves or 0
                return True
        self._stats.leaves += len(self.expand(chosen))
        return False

    def publish_all(self, nodes: Sequence[tuple[DraftSession, TreeNode]], candidates: Candidates) -> None:
        """Publishes the candidates of nodes: by the native function as far as it takes them."""
        if self.drafter.tokens_per_leaf > 1:
            super().publish_all(nodes, candidates)
            return
        ranked: Sequence[Scored | Weighed] | None = candidates.ranked
        rankings: list[Ranking] = []
        if ranked is None:
            rankings = rank(candidates, [session.ranking_row(session.leaf(node)) for session, node in nodes])
            ranked = [(it.token_ids, it.gaps, it.bonus, it.q) for it in rankings]
        num_done = self._publish_natively(nodes, ranked)
        if num_done == len(nodes):
            return
        if candidates.ranked is not None:
            rankings = rankings_of(candidates.ranked, [session.fan_out for session, _ in nodes])
        nodes, rankings = nodes[num_done:], rankings[num_done:]
        for (session, node), ranking, probs in zip(nodes, rankings, self.expected(nodes, rankings), strict=True):
            self.publish(session, node, ranking, probs)

    def _publish_natively(
        self, nodes: Sequence[tuple[DraftSession, TreeNode]], candidates: Sequence[Scored | Weighed]
    ) -> int:
        """Publishes the candidates of the first nodes by one native function: up to a session with a hint, which puts
        further nodes in between. Returns the number of these nodes."""
        places: list[Place] = []
        for session, node in nodes:
            if session.hinted:
                break
            weights, bonus = session.calibration.address, session.bonus.address
            share = 1.0 if node is session.end else END_SHARE
            places.append((session.frontier, node, session.fan_out, weights, bonus, share))
        grown = grow_each(places, candidates[: len(places)], MIN_PROB, expect_address())
        if grown is None:
            return 0
        num_published = 0
        for (session, node), new in zip(nodes, grown, strict=False):
            session.changed = True
            session.outbox += new
            num_published += len(new)
            if node is session.end:
                session.place(node)
                session.frontier.commit(session.in_flight)  # the children have other keys now
        self._stats.nodes_published += num_published
        return len(places)

    def publish(
        self,
        session: DraftSession,
        parent: TreeNode,
        ranking: Ranking,
        probs: Sequence[float],
        follow: int | None = None,
    ) -> TreeNode | None:
        """Attaches and queues the children of an expanded node (``Grower.publish``)."""
        session.changed = True
        before, followed = len(session.tree), None
        new = session.publish_children(parent, ranking, probs)
        self._stats.nodes_published += len(new)
        if parent is session.end:
            session.place(parent)
        if follow is not None:
            at = next((i for i, node in enumerate(new) if node.token_id == follow), None)
            if at is not None and before + at + 1 < self._tree_budget and session.frontier.wants(new[at]):
                followed = new.pop(at)
        session.frontier.push_below(parent, new)
        if parent.node_id in session.hinted:
            self.follow_hint(session, parent)
        return followed

    def follow_hint(self, session: DraftSession, parent: TreeNode) -> None:
        """Ranks the children of an expanded node by the draft and the hint together, and adds tokens that only the hint
        has.
        """
        new = hints.follow(session, parent, least_prob=MIN_PROB, most=self._tree_budget - len(session.tree))
        self._stats.hints_nodes += len(new)
        self._stats.nodes_published += len(new)
        session.frontier.push_below(parent, new)
        session.frontier.commit(session.in_flight)
        session.changed = True
