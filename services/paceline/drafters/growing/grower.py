"""Sessions are prefilled, and their nodes become parents: expand -> rank -> publish, with one drafter.

A path may be drafted by one call (``Chainer``), and a drafter may answer for several tokens after a node
(``tokens_per_leaf``). An error ends the sessions at fault (``blame.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from paceline.core.tree import TreeNode
from paceline.drafters.calibration import expect
from paceline.drafters.growing.blame import OnFailure, call_for_each
from paceline.drafters.growing.session import GrowingSession
from paceline.drafters.protocol import Candidates, Drafter
from paceline.drafters.ranking import Ranking, Rule, rank, ranking_of
from paceline.model.chain import Stop

Session = TypeVar("Session", bound=GrowingSession)


class Grower(Generic[Session]):
    """Grows the trees of sessions with one drafter."""

    least_prob = 0.0
    """Children less likely are left out, but the first."""

    def __init__(self, drafter: Drafter, num_tokens: int, on_failure: OnFailure, *, alone: bool = True) -> None:
        """``num_tokens``: maximum depth that one call of the drafter adds. ``on_failure``, ``alone``: as in
        ``call_for_each``."""
        self.drafter = drafter
        self.sessions: dict[str, Session] = {}
        """Open sessions by id; the owner adds and removes them."""
        self.num_chunks = 0
        """Chunks of contexts that the drafter has computed so far."""
        self.num_calls = 0
        """Calls of the drafter for candidates so far."""
        self._on_failure = on_failure
        self.num_tokens = num_tokens
        self._alone = alone
        self._chainer = drafter.chainer
        self._ranker = drafter.ranker

    def ready(self, session: Session) -> bool:
        """True once the drafter has computed the context that a session began with."""
        session.ready = session.ready or self.drafter.ready(session.session_id)
        return session.ready

    def prefill(self) -> bool:
        """Computes a chunk of the contexts of sessions that are not ready. False: nothing could be done.

        An error ends all of them, or the session that it names.
        """
        unready = [session for session in self.sessions.values() if not (session.ready or self.ready(session))]
        if not unready:
            return False
        done = call_for_each(lambda _: self.drafter.prefill(), unready, on_failure=self._on_failure, alone=False)
        worked = not done or done[-1][1]
        self.num_chunks += worked
        return worked

    def publish(
        self, session: Session, parent: TreeNode, ranking: Ranking, probs: Sequence[float], follow: int | None = None
    ) -> TreeNode | None:
        """Attaches the children of an expanded node, one per entry of ``probs``, all of an expansion together.

        Returns the child of the token ``follow``, if likely enough: its own children are published next.
        """
        session.publish_children(parent, ranking, probs)
        return None if follow is None else parent.children.get(follow)

    def candidates(self, nodes: Sequence[tuple[Session, TreeNode]]) -> Candidates:
        """The drafter's candidates after nodes, ranked by the same pass if it can."""
        self.num_calls += 1
        leaves = [session.leaf(node) for session, node in nodes]
        return self.drafter.expand(leaves) if self._ranker is None else self._ranker.expand_best(leaves)

    def expand(self, nodes: list[tuple[Session, TreeNode]]) -> list[tuple[Session, TreeNode]]:
        """Expands nodes, at most ``max_leaves``, and publishes their children; returns the expanded ones."""
        done = call_for_each(
            self.candidates,
            nodes,
            session_of=lambda place: place[0].session_id,
            on_failure=self._on_failure,
            alone=self._alone,
        )
        for at, candidates in done:
            self.publish_all(at, candidates)
        return [place for at, _ in done for place in at]

    def may_draft_path(self, session: Session, most: int) -> bool:
        """True if a path of up to ``most`` tokens may be drafted by one call."""
        if self._chainer is None or most < 2 or session.rule is Rule.REJECTION:
            return False
        return self._chainer.chains(session.session_id)

    def draft_path(self, session: Session, top: TreeNode, most: int, stop: Stop) -> int | None:
        """Expands a node, its best child, that one's, .. by one call, at most ``most`` nodes.

        Returns:
            The number of expanded nodes; 0: the drafter has no room. None: the session has failed.
        """
        done = call_for_each(
            lambda _: self._draft_path(session, top, most, stop),
            [session],
            on_failure=self._on_failure,
            alone=self._alone,
        )
        num_expanded = done[0][1] if done else None
        self.num_calls += num_expanded != 0
        return num_expanded

    def _draft_path(self, session: Session, top: TreeNode, most: int, stop: Stop) -> int:
        assert self._chainer is not None, "may_draft_path comes first"
        ranked = self._chainer.chain(session.leaf(top), most, session.fan_out, stop)
        node_ids: list[int] = []
        node: TreeNode | None = top
        for i, (token_ids, scores) in enumerate(ranked):
            if node is None:
                break
            if node is not top:
                node_ids.append(node.node_id)
            ranking = ranking_of(token_ids, scores)
            (probs,) = self.expected([(session, node)], [ranking])
            node = self.publish(session, node, ranking, probs, token_ids[0] if i + 1 < len(ranked) else None)
        self._chainer.keep(session.session_id, node_ids)
        return len(ranked)

    def publish_all(self, nodes: Sequence[tuple[Session, TreeNode]], candidates: Candidates) -> None:
        """Publishes the candidates of nodes; candidates of several tokens each depth by depth.

        The next depth continues the token that the drafter has guessed, or the likeliest one if it guesses none. A
        depth without likely enough tokens is left to a later step.
        """
        is_block = self.drafter.tokens_per_leaf > 1
        known = candidates.log_q.isfinite().any(-1).tolist() if is_block else []  # [leaves][depths]
        at = list(enumerate(nodes))
        for depth in range(min(self.num_tokens, self.drafter.tokens_per_leaf)):
            if not at:
                return
            of_depth, places = candidates, [place for _, place in at]
            if is_block:
                index = torch.tensor([leaf for leaf, _ in at], device=candidates.log_q.device)
                of_depth = Candidates(candidates.token_ids[index, depth], candidates.log_q[index, depth])
            rankings = rank(of_depth, [session.ranking_row(session.leaf(node)) for session, node in places])
            further = []
            for (leaf, (session, node)), ranking, probs in zip(
                at, rankings, self.expected(places, rankings), strict=True
            ):
                follow = None
                if is_block and any(known[leaf][depth + 1 :]) and ranking.token_ids:
                    follow = _continued(session, candidates, leaf, depth, ranking)
                child = self.publish(session, node, ranking, probs, follow)
                if child is not None:
                    further.append((leaf, (session, child)))
            at = further

    def expected(self, nodes: Sequence[tuple[Session, TreeNode]], rankings: Sequence[Ranking]) -> list[list[float]]:
        """Probabilities of the children that are likely enough for a node, by node and ranking."""
        pairs = zip(nodes, rankings, strict=True)
        return expect([session.expansion(node, ranking) for (session, node), ranking in pairs], self.least_prob)


def _continued(session: GrowingSession, candidates: Candidates, leaf: int, depth: int, ranking: Ranking) -> int | None:
    """The token that the candidates of the next depth follow; None if there is none.

    Under the rejection rule nothing may depend on what was drawn, so no guess is compared with it.
    """
    if not candidates.guesses:
        return ranking.token_ids[0]
    guesses = candidates.guesses[leaf]
    return guesses[depth] if depth < len(guesses) and session.rule is not Rule.REJECTION else None
