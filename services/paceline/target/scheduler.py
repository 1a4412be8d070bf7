"""Which sessions take part in the next step, and with how many tokens.

Order of service: sessions that decode, then prefill chunks of admitted sessions, then admission from the queue.
A step never exceeds its token budget; a session that no page is left for is preempted, the youngest first, and
recomputed later from its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache, pages_for
from paceline.speculation import Chain
from paceline.target.policy import WaitPolicy
from paceline.target.session import TargetSession


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One session's part in a step: context tokens [start, stop), then the proposal."""

    session: TargetSession
    start: int
    stop: int
    chain: Chain

    @property
    def verifies(self) -> bool:
        """Whether the step reaches the end of the context, so that it yields tokens."""
        return self.stop == self.session.num_tokens


class Scheduler:
    """Queue and running set of one target engine."""

    def __init__(self, cache: KVCache, policy: WaitPolicy, *, max_sessions: int, max_step_tokens: int) -> None:
        self._cache = cache
        self._policy = policy
        self._max_sessions = max_sessions
        self._max_step_tokens = max_step_tokens
        self.waiting: deque[TargetSession] = deque()
        self.running: list[TargetSession] = []  # oldest first
        self.num_preemptions = 0
        self.wait_until: float | None = None
        """When the sessions that wait for a draft stop doing so; None if none waits."""

    def add(self, session: TargetSession) -> None:
        """Queues a new session."""
        self.waiting.append(session)

    def remove(self, session: TargetSession) -> None:
        """Forgets a session and frees its pages."""
        if session in self.running:
            self.running.remove(session)
        else:
            self.waiting.remove(session)
        session.release(self._cache)

    def schedule(self, now: float) -> list[Scheduled]:
        """Chooses the parts of the next step; empty if every session waits for a draft or there is none."""
        self.wait_until = None
        self._admit()
        budget = self._max_step_tokens
        parts: list[Scheduled] = []
        decoding = [s for s in self.running if s.decoding]
        others_ready = len(decoding) < len(self.running)
        waits = {id(s): self._policy.wait_until(s, now, others_ready=others_ready) for s in decoding}
        others_ready = others_ready or any(until is None for until in waits.values())
        for session in decoding:
            until = waits[id(session)]
            if until is not None and others_ready:  # asked again: now a wait would cost a whole step
                until = self._policy.wait_until(session, now, others_ready=True)
            if until is not None:
                self.wait_until = until if self.wait_until is None else min(self.wait_until, until)
            elif budget > 0 and session in self.running:
                budget -= self._take(parts, session, session.num_tokens, budget)
        for session in [s for s in self.running if not s.decoding]:
            if budget > 0 and session in self.running:
                stop = min(session.num_tokens, session.num_computed + budget)
                budget -= self._take(parts, session, stop, budget)
        return parts

    def _take(self, parts: list[Scheduled], session: TargetSession, stop: int, budget: int) -> int:
        """Adds a part, preempting younger sessions for its pages; returns the tokens it uses."""
        num_context = stop - session.num_computed
        reaches_end = stop == session.num_tokens
        chain = session.proposal(budget - num_context) if reaches_end else Chain()
        while True:
            try:
                session.reserve(self._cache, stop + len(chain))
                break
            except ResourceExhaustedError:
                if len(chain):
                    chain = Chain()
                    continue
                victim = self.running[-1]
                self._preempt(victim, parts)
                if victim is session:
                    return 0
        parts.append(Scheduled(session, session.num_computed, stop, chain))
        return num_context + len(chain)

    def _preempt(self, session: TargetSession, parts: list[Scheduled]) -> None:
        assert len(self.running) > 1 or session.pages, "a lone session always fits: checked when it was opened"
        self.running.remove(session)
        session.release(self._cache)
        self.waiting.appendleft(session)
        self.num_preemptions += 1
        parts[:] = [p for p in parts if p.session is not session]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_sessions:
            session = self.waiting[0]
            session.attach_prefix(self._cache)
            needed = pages_for(session.num_tokens + session.k + 1) - len(session.pages)
            if needed > self._cache.num_available and self.running:
                session.release(self._cache)
                return
            session.cached_tokens = session.num_computed
            self.running.append(self.waiting.popleft())

    def check_integrity(self, sessions: Sequence[TargetSession]) -> None:
        """Asserts that every session is queued or running exactly once, and the pages add up."""
        assert len(self.running) <= self._max_sessions
        known = [*self.waiting, *self.running]
        assert {id(s) for s in known} == {id(s) for s in sessions}
        assert len(known) == len(sessions)
        assert not any(s.pages for s in self.waiting), "a waiting session holds no pages"
        self._cache.check_integrity([s.pages for s in known])
