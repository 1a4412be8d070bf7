"""Grows the trees of a head, depth by depth, while the next depth is expected to be worth its time.

The result is a proposal for the coming round of each session. Where siblings may be verified, one call of a depth
expands several of the likeliest nodes of the previous depth, not only the best one. The likeliest nodes of all depths
are verified. This is the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858), with the step's own budget in
place of a fixed size. A draft model's step may take less time than the host needs between two steps. Then one call
expands the best path of a session instead (``HeadGate.chains``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from paceline.core.tree import TreeNode
from paceline.drafters.growing.blame import OnFailure
from paceline.drafters.growing.grower import Grower
from paceline.drafters.protocol import Head
from paceline.drafters.ranking import Rule
from paceline.target.control.allocation import LEAST_PATH, expected_tokens, least_gain
from paceline.target.control.head_gate import HeadGate
from paceline.target.heads.session import HeadSession
from paceline.target.session import HeadOffer

MOST_LEAVES = 4
"""Nodes of a session that one depth expands."""


@dataclass(slots=True)
class HeadStats:
    """Counted events of one head since the engine started."""

    rounds: int = 0
    """Rounds with tokens of this head."""
    rows: int = 0
    """Tokens of this head that were verified."""
    rows_used: int = 0
    """Tokens of this head that were accepted."""
    depths: int = 0
    """Calls of ``expand``: one for each depth of a step."""
    seconds: float = 0.0
    """Seconds of the head: feeding it, asking it, and its extra rows in steps of the target."""
    guesses: int = 0
    """Tokens that steps computed as extra rows for the head."""
    sessions_failed: int = 0
    """Sessions that it could not follow."""
    holes: int = 0
    """Times that the head went on with a session after a pause in which it had missed some of its rows."""


class HeadGrower(Grower[HeadSession]):
    """Grows the trees of a head's sessions within the time that the head may take."""

    def __init__(self, head: Head, num_tokens: int, on_failure: OnFailure) -> None:
        """``num_tokens``: the most that it proposes at once."""
        super().__init__(head, num_tokens, on_failure, alone=False)
        self.stats = HeadStats()
        self.gate = HeadGate()
        self.failure = ""
        """Reason for which it was switched off; empty: it is on."""
        self.clock: Callable[[], float] = time.perf_counter

    def ask(self, sessions: list[HeadSession], tokens_per_s: float, *, trees: bool) -> None:
        """Expands the anchors of some sessions and the best nodes below each, depth by depth while that has expected
        gain. Offers each session its best path.

        Args:
            sessions: the sessions whose draft has no tokens.
            tokens_per_s: current rate of all sessions of the step together.
            trees: True if siblings may be verified.
        """
        gate = self.gate
        if gate.adaptive:
            sessions = self._worthwhile(sessions, tokens_per_s)
        at = [(f, f.deepest(f.tree.anchor)) for f in sessions]
        at = [(f, node) for f, node in at if not node.expanded and self._wants_more(f, node)]
        first, width = True, MOST_LEAVES if trees and gate.adaptive else 1
        if self._may_chain(at, width):
            self._chain(at, tokens_per_s)
            at = []
        while at:
            started, num_leaves = self.clock(), len(at)
            below: list[tuple[HeadSession, TreeNode]] = []
            while at:
                batch, at = at[: self.drafter.max_leaves], at[self.drafter.max_leaves :]
                below += [place for place in self._below(self.expand(batch)) if self._wants_more(*place)]
                if self.failure:
                    return
            gate.observe_depth(num_leaves, self.clock() - started, first=first)
            self.stats.depths += 1
            at, first = self._next_leaves(below, width, tokens_per_s), False
        for followed in sessions:
            if self.sessions.get(followed.session_id) is followed:
                self.offer(followed)

    def _may_chain(self, at: Sequence[tuple[HeadSession, TreeNode]], width: int) -> bool:
        """True if one call shall draft the best path of each session: the head can do so, and no other way is
        better.
        """
        if not all(self.may_draft_path(f, self._depth_left(f, node)) for f, node in at):
            return False
        return bool(at) and self.gate.chains(len(at), width)

    def _chain(self, at: Sequence[tuple[HeadSession, TreeNode]], tokens_per_s: float) -> None:
        """Drafts one path for each session: expands a node, then its best child, while the next token is worth its
        time.
        """
        gate, started = self.gate, self.clock()
        lengths: list[int] = []
        least = max(LEAST_PATH, tokens_per_s * (gate.chain_s or 0.0)) if gate.adaptive else 0.0
        for followed, node in at:
            if not self.failure:
                most, stop = self._depth_left(followed, node), followed.stop(node, least)
                lengths.append(self.draft_path(followed, node, most, stop) or 0)
        if any(lengths):
            gate.observe_chains(lengths, self.clock() - started)
            self.stats.depths += max(lengths)

    def _worthwhile(self, sessions: list[HeadSession], tokens_per_s: float) -> list[HeadSession]:
        """The sessions that the head is asked for, where that has positive expected gain."""
        gate = self.gate
        gains = [self._gain(f) for f in sessions]
        least = (least_gain(len(sessions)) - 1.0) * len(sessions)
        if gate.pays(sum(max(0.0, gain) for gain in gains) - least, len(sessions), tokens_per_s):
            gate.paid()
        elif not gate.try_anyway():
            for followed in sessions:
                followed.hits.fade()
            return []
        return [f for f, gain in zip(sessions, gains, strict=True) if gain > 0.0 or f.rule is Rule.REJECTION]

    def _depth(self, followed: HeadSession) -> int:
        return min(self.num_tokens, followed.session.max_draft())

    def _depth_left(self, followed: HeadSession, node: TreeNode) -> int:
        """Tokens that may be proposed below a node."""
        return self._depth(followed) - (node.position - followed.tree.anchor.position)

    def _wants_more(self, followed: HeadSession, node: TreeNode) -> bool:
        """True if tokens below a node may be proposed and are likely enough. The rejection rule ignores how likely they
        are.
        """
        if self._depth_left(followed, node) <= 0:
            return False
        blind = followed.rule is Rule.REJECTION or not self.gate.adaptive
        return blind or followed.probability(node) >= LEAST_PATH

    def _gain(self, followed: HeadSession) -> float:
        """Expected number of tokens that a proposal of the head adds to the session's own lookup."""
        session = followed.session
        of_head = expected_tokens([followed.hits.rate()] * self._depth(followed))
        return of_head - expected_tokens(session.looked_up(session.k).probs)

    def offer(self, followed: HeadSession) -> None:
        """Offers a session its head's best path, for the next step to verify."""
        path = followed.tree.proposal(self._depth(followed))
        if len(path):
            anchor = None if followed.rule is Rule.REJECTION else followed.tree.anchor
            followed.session.head_offer = HeadOffer(path, followed.hits, self.num_tokens, anchor)

    def _below(self, expanded: list[tuple[HeadSession, TreeNode]]) -> list[tuple[HeadSession, TreeNode]]:
        """The new nodes that may be expanded next, likeliest of each parent first."""
        if self.drafter.tokens_per_leaf == 1:
            return [(f, child) for f, node in expanded for child in node.children.values()]
        ends = [(f, f.deepest(node)) for f, node in expanded]
        return [(f, node) for f, node in ends if not node.expanded]

    def _next_leaves(
        self, below: list[tuple[HeadSession, TreeNode]], width: int, tokens_per_s: float
    ) -> list[tuple[HeadSession, TreeNode]]:
        """Returns the nodes that the next depth expands, the most likely first.

        At most ``width`` nodes of each session are chosen. A node is left out if plain work would bring more tokens in
        the time that it takes.
        """
        of_session: dict[int, list[tuple[float, HeadSession, TreeNode]]] = {}
        for followed, node in below:
            all_pay = width > 1 and followed.rule is not Rule.REJECTION
            if all_pay or (node.parent is not None and node.parent.best is node):
                of_session.setdefault(id(followed), []).append((followed.probability(node), followed, node))
        likeliest = (sorted(found, key=itemgetter(0), reverse=True)[:width] for found in of_session.values())
        leaves = [leaf for found in likeliest for leaf in found]
        num_best = self.gate.most_leaves([worth for worth, _, _ in leaves], tokens_per_s)
        leaves.sort(key=itemgetter(0), reverse=True)
        return [(followed, node) for _, followed, node in leaves[:num_best]]
