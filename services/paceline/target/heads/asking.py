"""Asking heads for tokens: depth by depth while that pays, as a proposal for the coming round of each session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.processors import Row
from paceline.core.tree import Producer, Proposal, TreeNode
from paceline.drafters.protocol import FATAL, Candidates, DrafterSessionError, Leaf
from paceline.drafters.ranking import RankingRow, Rule, rank
from paceline.target.control.allocation import expected_tokens
from paceline.target.control.compared import compare
from paceline.target.heads.followed import Followed, HeadSubtree, without_nodes
from paceline.target.heads.mounted import MountedHead
from paceline.target.session import FAN_OUT, TargetSession

_LEAST_PATH = 0.02
_NONCES = 1 << 31
"""Draws of heads under the rejection rule use nonces from here, which a draft's own do not share at one length of the
context."""


@dataclass(slots=True)
class _Offer:
    """The proposal of a head for the coming round of a session."""

    mounted: MountedHead
    followed: Followed
    proposal: Proposal
    node_ids: tuple[int, ...]


class Asking:
    """The proposals of one target's heads, from asking for them to the verdict on them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offers: dict[str, _Offer] = {}

    def forget(self, session: TargetSession) -> None:
        """Takes back what a session was offered."""
        session.headed, session.head_subtree = Proposal(), None
        self.close(session.session_id)

    def close(self, session_id: str) -> None:
        """Ends a session."""
        self._offers.pop(session_id, None)

    def observe(self, session: TargetSession, proposal: Proposal, accepted: Sequence[int], row_s: float) -> None:
        """Takes the verdict on a proposal (``Heads.observe``)."""
        offer = self._offers.pop(session.session_id, None)
        session.headed, session.head_subtree = Proposal(), None
        if offer is None or proposal.producer is not Producer.HEAD or not len(proposal):
            return
        mounted, followed = offer.mounted, offer.followed
        result, num_accepted = compare(proposal, proposal.along(accepted), Producer.HEAD), len(accepted)
        followed.hits.add(result.places, result.predicted, result.first, result.any)
        followed.in_flight = frozenset(offer.node_ids[: len(proposal)])  # of a chain, under the rejection rule
        mounted.stats.rounds += 1
        mounted.stats.rows += len(proposal)
        mounted.stats.rows_used += num_accepted
        mounted.accepted += num_accepted
        mounted.spent_s += row_s

    def ask(self, mounted: MountedHead, sessions: list[Followed], tokens_per_s: float) -> None:
        """Expands the anchors of some sessions and the best path below each, depth by depth while that pays."""
        gate, now = mounted.gate, self._clock()
        gains = [self._gain(mounted, f) for f in sessions]
        if gate.adaptive:
            if gate.pays(sum(max(0.0, gain) for gain in gains), len(sessions), tokens_per_s, first=True):
                gate.paid()
            elif not gate.try_anyway(now):
                for followed in sessions:
                    followed.hits.fade()
                return
            sessions = [f for f, gain in zip(sessions, gains, strict=True) if gain > 0.0 or f.rule is Rule.REJECTION]
        at = [(f, f.deepest()) for f in sessions]
        at = [(f, node) for f, node in at if not node.expanded and self._wants_more(mounted, f, node)]
        first = True
        while at and (
            first or gate.pays(sum(f.probability(node) for f, node in at), len(at), tokens_per_s, first=False)
        ):
            started, num_leaves = self._clock(), len(at)
            below: list[tuple[Followed, TreeNode]] = []
            while at:
                batch, at = at[: mounted.head.max_leaves], at[mounted.head.max_leaves :]
                below += [item for item in self._expand(mounted, batch) if self._wants_more(mounted, *item)]
                if mounted.failure:
                    return
            gate.observe_depth(num_leaves, self._clock() - started, first=first)
            mounted.stats.depths += 1
            at, first = below, False
        for followed in sessions:
            if mounted.sessions.get(followed.session.session_id) is followed:
                self._offer(mounted, followed)

    def _wants_more(self, mounted: MountedHead, followed: Followed, node: TreeNode) -> bool:
        """True if tokens below a node may be proposed, and are not too unlikely to be. Rejection rule: whatever they
        are."""
        depth = node.position - followed.tree.anchor.position
        if depth >= min(mounted.num_tokens, followed.session.max_draft()):
            return False
        blind = followed.rule is Rule.REJECTION or not mounted.gate.adaptive
        return blind or followed.probability(node) >= _LEAST_PATH

    def _gain(self, mounted: MountedHead, followed: Followed) -> float:
        """Tokens that a proposal of the head is expected to bring beyond the one that is there without it."""
        session = followed.session
        depth = min(mounted.num_tokens, session.max_draft())
        return expected_tokens([followed.hits.rate()] * depth) - expected_tokens(session.looked_up(session.k).probs)

    def _offer(self, mounted: MountedHead, followed: Followed) -> None:
        session = followed.session
        path = followed.tree.proposal(min(mounted.num_tokens, session.max_draft()))
        if len(path):
            proposal = without_nodes(path)
            session.headed, session.head_hits = proposal, followed.hits
            session.head_depth = mounted.num_tokens
            session.head_subtree = None
            if followed.rule is not Rule.REJECTION:
                most = min(mounted.num_tokens, session.max_draft())
                factors = (followed.hits.correction(),) * len(Producer)
                session.head_subtree = HeadSubtree(followed.tree.anchor, most, factors)
            self._offers[session.session_id] = _Offer(mounted, followed, proposal, path.node_ids)

    def _expand(
        self, mounted: MountedHead, batch: Sequence[tuple[Followed, TreeNode]]
    ) -> list[tuple[Followed, TreeNode]]:
        """Expands one node of each session: the likeliest new node of each that has one."""
        leaves = []
        for followed, node in batch:
            path = followed.path(node)
            ids, token_ids = tuple(n.node_id for n in path), tuple(n.token_id for n in path)
            leaves.append(Leaf(followed.session.session_id, node.node_id, ids, token_ids))
        try:
            candidates = mounted.head.expand(leaves)
        except FATAL:
            raise
        except DrafterSessionError as error:
            mounted.lose(error)
            rest = [item for item in batch if item[0].session.session_id != error.session_id]
            return self._expand(mounted, rest) if rest and len(rest) < len(batch) else []
        except Exception as error:
            mounted.switch_off(error)
            return []
        tokens, log_q = candidates.token_ids, candidates.log_q
        if mounted.head.tokens_per_leaf == 1:
            tokens, log_q = tokens[:, None], log_q[:, None]
        for _, node in batch:
            node.expanded = True
        at = list(enumerate(batch))  # with the leaf of each
        for i in range(min(mounted.head.tokens_per_leaf, mounted.num_tokens)):
            if not at:
                break
            rows = [self._ranking_row(followed, node) for _, (followed, node) in at]
            index = torch.tensor([leaf for leaf, _ in at], device=log_q.device)
            rankings = rank(Candidates(tokens[index, i], log_q[index, i]), rows)
            further = []
            for (leaf, (followed, node)), ranking in zip(at, rankings, strict=True):
                best = followed.add(node, ranking) if ranking.token_ids else None
                if best is not None:
                    further.append((leaf, (followed, best)))
            at = further
        return [item for _, item in at]

    def _ranking_row(self, followed: Followed, node: TreeNode) -> RankingRow:
        path = tuple(n.token_id for n in followed.path(node))
        fan_out = 1 if followed.rule is Rule.REJECTION else FAN_OUT
        nonce = _NONCES | followed.session.num_tokens
        return RankingRow(Row(followed.session.sampler, path), followed.rule, fan_out, nonce=nonce)
