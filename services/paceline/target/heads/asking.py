"""Asks heads for draft tokens, depth by depth, while the next depth is expected to be worth its time.

The result is a proposal for the coming round of each session. Where siblings may be verified, one call of a depth
expands several of the likeliest nodes of the depth before it, not only the best one. The likeliest nodes of all
depths are verified. This is the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858), with the step's own
budget in place of a fixed size. A draft model may take less time for a step than the host needs between two steps:
then one call expands the best path of a session instead (``HeadGate.chains``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from paceline.core.tree import NO_PROPOSAL, Producer, Proposal, TreeNode
from paceline.drafters.ranking import Rule
from paceline.target.control.allocation import expected_tokens, least_gain
from paceline.target.control.compared import compare
from paceline.target.heads.followed import Followed
from paceline.target.heads.mounted import MountedHead
from paceline.target.session import TargetSession

_LEAST_PATH = 0.02
MOST_LEAVES = 4
"""Nodes of a session that one depth expands."""


@dataclass(slots=True)
class _Offer:
    """A head that has tokens for the coming round of a session."""

    mounted: MountedHead
    followed: Followed


class Asking:
    """Asks one target's heads for proposals and passes the outcome of each on to its head."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._offers: dict[str, _Offer] = {}

    def forget(self, session: TargetSession) -> None:
        """Withdraws the proposal that a session was offered, if it has one."""
        session.headed, session.head_anchor = NO_PROPOSAL, None
        self.close(session.session_id)

    def close(self, session_id: str) -> None:
        """Forgets a session."""
        self._offers.pop(session_id, None)

    def observe(self, session: TargetSession, proposal: Proposal, accepted: Sequence[int], row_s: float) -> None:
        """Records which tokens of a session's proposal were accepted (``Heads.observe``)."""
        offer = self._offers.pop(session.session_id, None)
        session.headed, session.head_anchor = NO_PROPOSAL, None
        if offer is None:
            return
        if proposal.producer is not Producer.HEAD:
            return
        mounted, followed = offer.mounted, offer.followed
        result = compare(proposal, proposal.along(accepted))
        followed.hits.add(result.places, result.predicted, result.first, result.any)
        if followed.rule is Rule.REJECTION:
            followed.in_flight = frozenset(proposal.node_ids)
        mounted.stats.rounds += 1
        mounted.stats.rows += len(proposal)
        mounted.stats.rows_used += len(accepted)
        mounted.accepted += len(accepted)
        mounted.spent_s += row_s

    def ask(
        self,
        mounted: MountedHead,
        sessions: list[Followed],
        tokens_per_s: float,
        now: float,
        *,
        trees: bool,
    ) -> None:
        """Expands the anchors of some sessions and the best nodes below each, depth by depth while that is worth its
        time.

        Args:
            mounted: the head.
            sessions: the sessions whose draft has no tokens.
            tokens_per_s: current rate of all sessions of the step together.
            now: seconds of steps so far.
            trees: True if siblings may be verified.
        """
        gate = mounted.gate
        if gate.adaptive:
            sessions = self._worthwhile(mounted, sessions, tokens_per_s, now)
        at = [(f, f.deepest(f.tree.anchor)) for f in sessions]
        at = [(f, node) for f, node in at if not node.expanded and self._wants_more(mounted, f, node)]
        first, width = True, MOST_LEAVES if trees and gate.adaptive else 1
        if self._may_chain(mounted, at, width):
            self._chain(mounted, at, tokens_per_s)
            at = []
        while at:
            started, num_leaves = self._clock(), len(at)
            below: list[tuple[Followed, TreeNode]] = []
            while at:
                batch, at = at[: mounted.head.max_leaves], at[mounted.head.max_leaves :]
                below += [item for item in self._expand(mounted, batch) if self._wants_more(mounted, *item)]
                if mounted.failure:
                    return
            gate.observe_depth(num_leaves, self._clock() - started, first=first)
            mounted.stats.depths += 1
            at, first = _next_leaves(mounted, below, width, tokens_per_s), False
        for followed in sessions:
            if mounted.sessions.get(followed.session.session_id) is followed:
                self._offer(mounted, followed)

    def _may_chain(self, mounted: MountedHead, at: Sequence[tuple[Followed, TreeNode]], width: int) -> bool:
        """True if one call shall draft the best path of each session: the head can do so, and no other way is
        better.
        """
        if not all(mounted.grower.may_draft_path(f, self._depth_left(mounted, f, node)) for f, node in at):
            return False
        return bool(at) and mounted.gate.chains(len(at), width)

    def _chain(self, mounted: MountedHead, at: Sequence[tuple[Followed, TreeNode]], tokens_per_s: float) -> None:
        """Drafts one path for each session: expands a node, then its best child, while the next token is worth its
        time.
        """
        gate, started = mounted.gate, self._clock()
        lengths: list[int] = []
        least = max(_LEAST_PATH, tokens_per_s * (gate.chain_s or 0.0)) if gate.adaptive else 0.0
        for followed, node in at:
            if not mounted.failure:
                most, stop = self._depth_left(mounted, followed, node), followed.stop(node, least)
                lengths.append(mounted.grower.draft_path(followed, node, most, stop) or 0)
        if any(lengths):
            gate.observe_chains(lengths, self._clock() - started)
            mounted.stats.depths += max(lengths)

    def _worthwhile(
        self, mounted: MountedHead, sessions: list[Followed], tokens_per_s: float, now: float
    ) -> list[Followed]:
        """The sessions that a head is asked for, where that has positive expected gain."""
        gate = mounted.gate
        gains = [self._gain(mounted, f) for f in sessions]
        least = (least_gain(len(sessions)) - 1.0) * len(sessions)
        if gate.pays(sum(max(0.0, gain) for gain in gains) - least, len(sessions), tokens_per_s, first=True):
            gate.trials.paid()
        elif not gate.trials.try_anyway(now):
            for followed in sessions:
                followed.hits.fade()
            return []
        return [f for f, gain in zip(sessions, gains, strict=True) if gain > 0.0 or f.rule is Rule.REJECTION]

    def _depth(self, mounted: MountedHead, followed: Followed) -> int:
        return min(mounted.num_tokens, followed.session.max_draft())

    def _depth_left(self, mounted: MountedHead, followed: Followed, node: TreeNode) -> int:
        """Tokens that may be proposed below a node."""
        return self._depth(mounted, followed) - (node.position - followed.tree.anchor.position)

    def _wants_more(self, mounted: MountedHead, followed: Followed, node: TreeNode) -> bool:
        """True if tokens below a node may be proposed and are likely enough. The rejection rule ignores how likely they
        are.
        """
        if self._depth_left(mounted, followed, node) <= 0:
            return False
        blind = followed.rule is Rule.REJECTION or not mounted.gate.adaptive
        return blind or followed.probability(node) >= _LEAST_PATH

    def _gain(self, mounted: MountedHead, followed: Followed) -> float:
        """Expected number of tokens that a proposal of the head adds to the session's own lookup."""
        session, depth = followed.session, self._depth(mounted, followed)
        return expected_tokens([followed.hits.rate()] * depth) - expected_tokens(session.looked_up(session.k).probs)

    def _offer(self, mounted: MountedHead, followed: Followed) -> None:
        session = followed.session
        path = followed.tree.proposal(self._depth(mounted, followed))
        if len(path):
            session.headed, session.head_hits = path, followed.hits
            session.head_depth = mounted.num_tokens
            session.head_anchor = None if followed.rule is Rule.REJECTION else followed.tree.anchor
            self._offers[session.session_id] = _Offer(mounted, followed)

    def _expand(self, mounted: MountedHead, batch: list[tuple[Followed, TreeNode]]) -> list[tuple[Followed, TreeNode]]:
        """Expands some nodes; returns the new ones that may be expanded next, likeliest of each parent first."""
        expanded = mounted.grower.expand(batch)
        if mounted.head.tokens_per_leaf == 1:
            return [(f, child) for f, node in expanded for child in node.children.values()]
        ends = [(f, f.deepest(node)) for f, node in expanded]
        return [(f, node) for f, node in ends if not node.expanded]


def _next_leaves(
    mounted: MountedHead, below: list[tuple[Followed, TreeNode]], width: int, tokens_per_s: float
) -> list[tuple[Followed, TreeNode]]:
    """Returns the nodes that the next depth expands, the most likely first.

    At most ``width`` nodes of each session are chosen. A node is left out if plain work would bring more tokens in the
    time that it takes.
    """
    of_session: dict[int, list[tuple[float, Followed, TreeNode]]] = {}
    for followed, node in below:
        all_pay = width > 1 and followed.rule is not Rule.REJECTION
        if all_pay or (node.parent is not None and node.parent.best is node):
            of_session.setdefault(id(followed), []).append((followed.probability(node), followed, node))
    leaves = [leaf for found in of_session.values() for leaf in sorted(found, key=itemgetter(0), reverse=True)[:width]]
    num_best = mounted.gate.most_leaves([worth for worth, _, _ in leaves], tokens_per_s)
    leaves.sort(key=itemgetter(0), reverse=True)
    return [(followed, node) for _, followed, node in leaves[:num_best]]
