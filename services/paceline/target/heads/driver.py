"""Heads of a target: drafters in its own process, fed with every step and asked where a session's draft has nothing.

    forward ─▶ verify ─▶ commit ─▶ send ─▶ advance, feed          the heads of all sessions, in one call each
                                                │
    follow outcomes ─▶ choose who steps ─▶ expand, expand, .. ─▶ allocate ─▶ forward

A session's head has a tree of its own, as a draft's engine has. So ranking by the target's noise, calibration and the
drafter's guarantees are the same. Its best path and its other tokens are offered when the session is about to step and
its draft has sent nothing for this place. This needs no message and no wait. Only the target decides what becomes text.

Every rule is served. Coupled and greedy sessions are offered the path that is likeliest to be the target's own choice.
Under the rejection rule each token is drawn from the head's distribution q, which it states. Calls of the head and
their depth depend on the context and on averages, never on a drawn token, so p is exact (see ``core/verification.py``).
Sequential sessions have proposals of a head only if they have no draft, so that they stay comparable; plain ones have
none.

A head that raises is switched off and named in the status; its sessions go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.tree import NO_PROPOSAL, Producer, Proposal
from paceline.drafters.protocol import Features
from paceline.model.kv_cache import KVCache
from paceline.target.control.allocation import ENOUGH_TRIALS, Allocation
from paceline.target.heads.feeding import Computed, Feeding
from paceline.target.heads.mounted import MountedHead
from paceline.target.heads.session import HeadSession
from paceline.target.session import TargetSession
from paceline.types import Mode

log = logging.getLogger(__name__)


class Heads:
    """The heads of one target engine. Owned by the engine's thread."""

    def __init__(
        self,
        mounted: Sequence[MountedHead],
        cache: KVCache,
        *,
        allocation: Allocation,
        clock: Callable[[], float],
        states: Features | None = None,
    ) -> None:
        """``states``: what the target's runner returns, at least the ``union`` of what the heads read."""
        self.mounted = list(mounted)
        self.took_s = 0.0
        """Seconds that the heads were asked for since ``take_s``."""
        self._num_sessions = 1  # of the coming step, or of the one that runs
        self._feeding = Feeding(states, cache.num_pages)
        self._offering: dict[str, tuple[MountedHead, HeadSession]] = {}
        """The heads that have tokens for the coming rounds of sessions."""
        self._circumstances: tuple[int, bool] | None = None  # of ``use``
        self._allocation = allocation
        self._clock = clock
        for each in self.mounted:
            each.gate.adaptive, each.gate.budget, each.clock = allocation.adaptive, allocation.budget, clock
            if (features := each.head.features) is not None:
                assert states is not None
                assert states.every_position or not features.every_position
                each.columns = tuple(states.boundaries.index(b) for b in features.boundaries)

    def __bool__(self) -> bool:
        return bool(self.mounted)

    def use(self, num_cores: int, *, drafting: bool) -> None:
        """Sets on how many cores heads run from now on, and whether sessions may have drafts."""
        if (num_cores, drafting) != self._circumstances:
            self._circumstances = num_cores, drafting
            for mounted in self.mounted:
                mounted.use(num_cores, drafting=drafting)

    def wants_states(self) -> bool:
        """True if a head will be fed with the step that comes."""
        return any(m.reads_states and self.is_on(m, self._num_sessions) for m in self.mounted)

    def labeled(self) -> dict[str, MountedHead]:
        """The heads by their methods, numbered from the second one of a method on."""
        found: dict[str, MountedHead] = {}
        for mounted in self.mounted:
            method = mounted.name.partition(" ")[0]
            same = sum(label.partition("_#")[0] == method for label in found)
            found[f"{method}_#{same + 1}" if same else method] = mounted
        return found

    def is_on(self, mounted: MountedHead, num_sessions: int) -> bool:
        """True if a head is neither switched off nor paused at this concurrency."""
        return not mounted.failure and mounted.gate.wanted(max(1, num_sessions))

    def take_s(self) -> float:
        """Seconds that the heads were asked for since the last call."""
        took_s, self.took_s = self.took_s, 0.0
        return took_s

    @property
    def reserves(self) -> int:
        """Rows, in addition to a step's, for which a session must hold pages: a head's last row is one further."""
        return int(any(m.head.layers and not m.failure for m in self.mounted))

    def open(self, session: TargetSession) -> None:
        """Begins a session on every head that can serve it."""
        self._forget(session)
        if session.k == 0:
            return
        for mounted in self.mounted:
            if not mounted.failure and not mounted.outgrown(session):
                mounted.open(session)

    def close(self, session: TargetSession) -> None:
        """Ends a session on all heads, before its pages are given back."""
        self._forget(session)
        for mounted in self.mounted:
            mounted.leave(session)
            mounted.drop(session.session_id)

    # -- extra rows of a step ------------------------------------------------------------------------------------------

    def guesses(self, session: TargetSession, limit: int) -> Proposal:
        """Tokens of a head that are computed with a session's own in the coming step and affect none of its results;
        none, if there would be more than ``limit``."""
        if not self._may_propose(session):
            return NO_PROPOSAL
        for mounted in self.mounted:
            rider = mounted.rider
            if rider is None or session.session_id not in mounted.sessions or rider.num_guesses > limit:
                continue
            if self.is_on(mounted, self._num_sessions):
                return mounted.guesses(session)
        return NO_PROPOSAL

    def forget_guesses(self, session: TargetSession, guesses: Proposal) -> None:
        """Leaves out a session's guesses: the step has no room for them."""
        for mounted in self.mounted:
            mounted.forget_guesses(session.session_id, len(guesses))

    def charge_guesses(self, sessions: Sequence[TargetSession], seconds: float) -> None:
        """Books the time of extra rows with the heads whose guesses they were."""
        for mounted in self.mounted:
            riding = sum(session.session_id in mounted.riding for session in sessions)
            if riding:
                mounted.spend(seconds * riding / len(sessions))

    def learn(self, session: TargetSession, token_ids: Sequence[int]) -> None:
        """Records the target's likeliest token after each branch of the extra rows of a session that goes on."""
        for mounted in self.mounted:
            if session.session_id in mounted.riding:
                mounted.learn(session.session_id, token_ids)

    def _may_propose(self, session: TargetSession) -> bool:
        """True if heads may propose for a session now: its draft has nothing."""
        if not session.decoding or session.max_draft() == 0 or len(session.drafted(1)):
            return False
        return not (session.mode is Mode.SEQUENTIAL and session.draft_available)

    # -- what the target has decided -----------------------------------------------------------------------------------

    def observe(self, session: TargetSession, proposal: Proposal, accepted: Sequence[int], row_s: float) -> None:
        """Records the verdict on a session's proposal, before it is committed.

        Args:
            session: it was verified for.
            proposal: what was verified, of whatever producer.
            accepted: the tokens of the proposal that were accepted.
            row_s: seconds of the proposal's rows.
        """
        offering = self._forget(session)
        if offering is not None and proposal.producer is Producer.HEAD:
            mounted, followed = offering
            mounted.observe(followed, proposal, accepted, row_s)

    def _forget(self, session: TargetSession) -> tuple[MountedHead, HeadSession] | None:
        """Withdraws what a session was offered; returns the head that has offered it."""
        session.head_offer = None
        return self._offering.pop(session.session_id, None)

    def advance(self, session: TargetSession) -> None:
        """Advances the active heads to the committed context of a running session."""
        for mounted in self.mounted:
            if mounted.follows:
                mounted.catch_up(session)

    def feed(self, computed: Sequence[Computed], states: Tensor | None) -> None:
        """Feeds the heads with a step, after its outcomes were committed. ``states``: None if none were requested."""
        if states is not None:
            self._feeding.keep_page_states(computed, states)
        for mounted in self.mounted:
            if not mounted.reads_states or mounted.failure:
                continue
            started = self._clock()
            is_on = self.is_on(mounted, self._num_sessions)
            if is_on:
                mounted.follow(on=True)
            if self._feeding.feed(mounted, computed, states if is_on else None):
                mounted.spend(self._clock() - started)

    # -- what is proposed ----------------------------------------------------------------------------------------------

    def expected(self, session: TargetSession, num_sessions: int) -> tuple[list[float], float]:
        """Probabilities of the tokens that a head would propose for a session, and the seconds that asking it takes."""
        for mounted in self.mounted:
            followed = mounted.sessions.get(session.session_id)
            if followed is not None and self._asks(mounted, num_sessions) and mounted.may_ask(followed):
                depth = min(mounted.num_tokens, session.max_draft())
                first_s, next_s = (mounted.gate.depth_s(1, first=first) or 0.0 for first in (True, False))
                return [followed.hits.rate()] * depth, first_s + next_s * max(0, depth - 1)
        return [], 0.0

    def propose(self, ready: Sequence[TargetSession], num_sessions: int, *, trees: bool) -> None:
        """Asks the heads for tokens of the sessions that are about to step.

        Args:
            ready: these sessions. Heads are asked for those whose drafts have nothing.
            num_sessions: those whose prompts are being computed included: by them a head is judged, since they are
                about to decode, too.
            trees: siblings may be verified in this step.
        """
        started, self._num_sessions = self._clock(), max(1, num_sessions)
        asks = [self._asks(mounted, num_sessions) for mounted in self.mounted]
        for mounted, is_asked in zip(self.mounted, asks, strict=True):
            mounted.follow(on=is_asked)
        self._prefill()
        asked: dict[int, list[HeadSession]] = {}
        for session in ready:
            self._forget(session)
            if not self._may_propose(session):
                continue
            for i, mounted in enumerate(self.mounted):
                followed = mounted.sessions.get(session.session_id)
                if followed is not None and asks[i] and mounted.may_ask(followed):
                    asked.setdefault(i, []).append(followed)
                    break
        rate = self._tokens_per_s(num_sessions)
        for i, sessions in asked.items():
            mounted = self.mounted[i]
            before = self._clock()
            mounted.ask(sessions, rate, trees=trees)
            mounted.spend(self._clock() - before)
            self._offering |= {f.session_id: (mounted, f) for f in sessions if f.session.head_offer is not None}
        self.took_s += self._clock() - started

    def book(self) -> None:
        """Books a step in the accounts of the heads, and pauses heads that have cost more than they have brought."""
        num_sessions = self._num_sessions
        rate = self._tokens_per_s(num_sessions)
        for mounted in self.mounted:
            accepted, spent_s = mounted.accepted, mounted.spent_s
            mounted.accepted, mounted.spent_s = 0, 0.0
            if mounted.failure or not (accepted or spent_s):
                continue
            if mounted.gate.observe_step(num_sessions, accepted, spent_s, rate):
                log.debug("head %s is paused at concurrency %d", mounted.name, num_sessions)
                mounted.coupled.forget()  # the record must not be held against the next trial
                mounted.rejection.forget()

    def _tokens_per_s(self, num_sessions: int) -> float:
        """Tokens per second that are made now, by plain decoding at least; 0 before any step was measured."""
        plain_s = self._allocation.plain_s(num_sessions) if self._allocation.cost.known else 0.0
        return max(num_sessions / plain_s if plain_s > 0 else 0.0, self._allocation.tokens_per_s.get(0.0))

    def _asks(self, mounted: MountedHead, num_sessions: int) -> bool:
        """True if a head is on and some of its tokens could be verified; a new head's acceptance may be any."""
        if not self.is_on(mounted, num_sessions):
            return False
        hits = mounted.coupled.or_better_known(mounted.rejection)
        acceptance = hits.rate() if hits.trials >= ENOUGH_TRIALS else 1.0
        return self._allocation.could_pay(num_sessions, acceptance, mounted.num_tokens)

    def _prefill(self) -> None:
        """One chunk of prompts, for heads that compute those themselves."""
        for mounted in self.mounted:
            if not mounted.reads_states and self.is_on(mounted, self._num_sessions):
                started = self._clock()
                if mounted.prefill():
                    mounted.spend(self._clock() - started)

    def check_integrity(self, sessions: Sequence[TargetSession]) -> None:
        """Asserts that heads follow open sessions only, to the end of their context."""
        known = {s.session_id: s for s in sessions}
        for mounted in self.mounted:
            mounted.check_integrity(known)

    def shutdown(self) -> None:
        """Releases what the heads hold outside this process. Idempotent."""
        for mounted in self.mounted:
            mounted.head.shutdown()
