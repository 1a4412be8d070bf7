"""The target engine: continuous batching at step granularity, every step verifying proposals of any length.

One thread owns it. ``receive`` takes messages between steps, ``step`` does one forward; outcomes leave before the
next forward begins, and what is in flight is announced before the forward that verifies it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import InvalidRequestError, PacelineError
from paceline.model.kv_cache import PAGE_SIZE, pages_for
from paceline.model.runner import ModelRunner, SequenceStep
from paceline.sampling import Row, process
from paceline.target.policy import WaitPolicy
from paceline.target.scheduler import Scheduled, Scheduler
from paceline.target.session import TargetSession
from paceline.types import (
    Acceptance,
    Cause,
    CloseSession,
    DraftState,
    InFlight,
    Mode,
    Nodes,
    OpenSession,
    Outcome,
    Round,
    SessionFailed,
    TreeLost,
)
from paceline.verification import Proposal, Verdict, verify

ToTarget = OpenSession | Nodes | CloseSession | DraftState
FromTarget = Outcome | InFlight | TreeLost | SessionFailed


@dataclass(slots=True)
class TargetStats:
    """Counted events since the engine started."""

    steps: int = 0
    tokens_computed: int = 0
    rounds: int = 0
    tokens_emitted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    nodes_added: int = 0
    nodes_stale: int = 0
    nodes_invalid: int = 0
    nodes_dropped: int = 0
    trees_lost: int = 0
    proposals_invalid: int = 0
    messages_stale: int = 0
    step_s: float = 0.0
    """Seconds inside forwards, sampling included."""


class TargetEngine:
    """``schedule -> forward -> verify -> commit`` over all sessions of one target replica."""

    def __init__(
        self,
        runner: ModelRunner,
        emit: Callable[[Sequence[FromTarget]], None],
        *,
        max_sessions: int,
        max_step_tokens: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``max_model_len`` bounds a session's context in tokens, prompt and output together."""
        self.runner = runner
        self.stats = TargetStats()
        self.policy = WaitPolicy()
        self._emit = emit
        self._clock = clock
        self._max_model_len = max_model_len
        self._scheduler = Scheduler(
            runner.cache, self.policy, max_sessions=max_sessions, max_step_tokens=max_step_tokens
        )
        self._sessions: dict[str, TargetSession] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that are open here."""
        return len(self._sessions)

    def receive(self, messages: Sequence[ToTarget]) -> None:
        """Takes messages; those of unknown sessions or other epochs are dropped and counted."""
        for message in messages:
            session = self._sessions.get(message.session_id)
            if isinstance(message, OpenSession):
                if session is None or message.epoch > session.epoch:
                    self._open(message)
                else:
                    self.stats.messages_stale += 1
            elif session is None or message.epoch != (
                session.draft_epoch if isinstance(message, Nodes) else session.epoch
            ):
                self.stats.messages_stale += 1
            elif isinstance(message, Nodes):
                self._add_nodes(session, message)
            elif isinstance(message, DraftState):
                self._set_draft(session, message)
            else:
                self._close(session)

    def step(self) -> bool:
        """Does one step. False: no session is ready until a message comes or ``wait_s`` has passed."""
        for session in self._sessions.values():
            if not session.settled:
                session.settle()
                self._check_tree(session)
        started = self._clock()
        parts = self._scheduler.schedule(started)
        if not parts:
            return False
        self._announce(parts)
        logits = self.runner.forward([_sequence(p) for p in parts])
        verifying = [p for p in parts if p.verifies]
        verdicts, failed = self._verify(logits, verifying)
        now = self._clock()
        outcomes: list[FromTarget] = list(failed)
        for part in parts:
            if not part.verifies:
                part.session.commit_rows(self.runner.cache, part.stop)
        for part, verdict in zip(verifying, verdicts, strict=True):
            if verdict is not None:
                outcomes.append(self._commit(part, verdict, now))
        if all(p.stop - p.start == 1 for p in parts):
            self.policy.step_s.add(now - started)
        self.stats.steps += 1
        self.stats.step_s += now - started
        self.stats.tokens_computed += sum(p.stop - p.start + len(p.chain) for p in parts)
        self.stats.preemptions = self._scheduler.num_preemptions
        if outcomes:
            self._emit(outcomes)
        return True

    def wait_s(self) -> float | None:
        """How long the engine may sleep after ``step`` returned False; None: until a message comes."""
        until = self._scheduler.wait_until
        return None if until is None else max(0.0, until - self._clock())

    def check_integrity(self) -> None:
        """Asserts the invariants of sessions, scheduler and pages."""
        self._scheduler.check_integrity(list(self._sessions.values()))
        for session in self._sessions.values():
            session.check_integrity()

    def _open(self, message: OpenSession) -> None:
        old = self._sessions.get(message.session_id)
        if old is not None:
            self._close(old)
        try:
            session = TargetSession(
                message,
                vocab_size=self.runner.vocab_size,
                max_len=self._max_model_len,
                device=str(self.runner.cache.keys[0].device),
                now=self._clock(),
            )
            self._check_fits(session)
        except PacelineError as error:
            self._emit([SessionFailed(message.session_id, message.epoch, str(error))])
            return
        self._sessions[message.session_id] = session
        self._scheduler.add(session)

    def _check_fits(self, session: TargetSession) -> None:
        if not session.tokens:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        if session.num_tokens >= self._max_model_len:
            raise InvalidRequestError(
                f"the context has {session.num_tokens} tokens: fewer than {self._max_model_len} are allowed"
            )
        most = session.max_tokens + 1
        if pages_for(most) > self.runner.cache.num_pages:
            raise InvalidRequestError(
                f"prompt and max_tokens need {most} tokens of KV, the cache holds "
                f"{self.runner.cache.num_pages * PAGE_SIZE}: shorten the prompt or lower max_tokens"
            )

    def _close(self, session: TargetSession) -> None:
        del self._sessions[session.session_id]
        self._scheduler.remove(session)

    def _set_draft(self, session: TargetSession, message: DraftState) -> None:
        if message.available:
            if not session.draft_epoch < message.draft_epoch or not 0 < message.context_len <= session.num_tokens:
                self.stats.messages_stale += 1
                return
            session.follow_draft(message.draft_epoch, message.context_len)
        session.draft_available = message.available and session.k > 0

    def _add_nodes(self, session: TargetSession, message: Nodes) -> None:
        had_proposal = session.tree.anchor.best is not None
        added = session.tree.add(message.nodes)
        self.stats.nodes_added += added.added
        self.stats.nodes_stale += added.stale
        self.stats.nodes_invalid += added.invalid
        self.stats.nodes_dropped += added.dropped
        now = self._clock()
        resolved = session.settled and not had_proposal and session.tree.anchor.best is not None
        self.policy.observe_nodes(session, message, now, resolved=resolved)
        session.last_nodes_at = now
        session.draft_silent = False
        if message.idle:
            session.idle_context_len = message.context_len
        session.nodes_context_len = message.context_len
        self._check_tree(session)

    def _check_tree(self, session: TargetSession) -> None:
        """A tree that is lost although the draft has seen the whole context misses nodes for good."""
        if (
            session.draft_available
            and session.settled
            and session.tree.lost
            and session.nodes_context_len == session.num_tokens
        ):
            self.stats.trees_lost += 1
            session.draft_available = False  # until it is re-opened
            self._emit([TreeLost(session.session_id, session.epoch)])

    def _announce(self, parts: Sequence[Scheduled]) -> None:
        in_flight = []
        for part in parts:
            session = part.session
            if not part.verifies or session.cause is Cause.START:
                continue
            if session.mode is Mode.PLAIN or session.max_draft() == 0:
                session.cause = Cause.DISABLED
            elif session.mode is Mode.SEQUENTIAL and session.draft_available:
                session.cause = Cause.SEQUENTIAL
            elif not session.draft_available and not len(part.chain):
                session.cause = Cause.DRAFT_DOWN
        for part in parts:
            if part.verifies and part.session.draft_available:
                session = part.session
                node_ids = part.chain.node_ids
                in_flight.append(InFlight(session.session_id, session.epoch, session.num_tokens, node_ids))
        if in_flight:
            self._emit(in_flight)

    def _verify(self, logits: Tensor, parts: Sequence[Scheduled]) -> tuple[list[Verdict | None], list[SessionFailed]]:
        """Verdicts of the batch; where that fails, of each session alone, so that one cannot harm the others."""
        if not parts:
            return [], []
        try:
            return list(_verdicts(logits, parts)), []
        except PacelineError:
            pass
        verdicts: list[Verdict | None] = []
        failed = []
        row = 0
        for part in parts:
            num_rows = len(part.chain) + 1
            try:
                verdicts.extend(_verdicts(logits[row : row + num_rows], [part]))
            except PacelineError as error:
                verdicts.append(None)
                failed.append(SessionFailed(part.session.session_id, part.session.epoch, str(error)))
                self._close(part.session)
            row += num_rows
        return verdicts, failed

    def _commit(self, part: Scheduled, verdict: Verdict, now: float) -> Outcome:
        session = part.session
        count, finish_reason = session.cut(verdict.token_ids)
        token_ids = verdict.token_ids[:count]
        num_accepted = min(verdict.num_accepted, count)
        self.stats.proposals_invalid += verdict.num_invalid
        self.stats.rounds += 1
        self.stats.tokens_emitted += count
        round_ = Round(len(part.chain), num_accepted, session.cause)
        first = session.cause is Cause.START
        outcome = Outcome(
            session.session_id,
            session.epoch,
            session.num_tokens,
            token_ids,
            verdict.logprobs[:count],
            round_,
            finish_reason,
            cached_tokens=session.cached_tokens if first else 0,
        )
        if first:
            self.stats.cached_tokens += session.cached_tokens
        else:
            self.policy.observe_round(round_.num_drafted, num_accepted, count, now - session.outcome_at)
        if finish_reason is not None:
            self._close(session)
            return outcome
        session.commit_outcome(token_ids, now)
        session.commit_rows(self.runner.cache, part.stop + num_accepted)
        return outcome


def _sequence(part: Scheduled) -> SequenceStep:
    session = part.session
    rows = range(part.start, part.stop + len(part.chain))
    return SequenceStep(
        [*session.tokens[part.start : part.stop], *part.chain.token_ids],
        rows,
        rows,
        session.pages,
        num_logits=len(part.chain) + 1 if part.verifies else 0,
    )


def _verdicts(logits: Tensor, parts: Sequence[Scheduled]) -> list[Verdict]:
    rows = [Row(p.session.sampler, p.chain.token_ids[:i]) for p in parts for i in range(len(p.chain) + 1)]
    proposals = [_proposal(p) for p in parts]
    return verify(process(logits, rows), proposals, [p.session.acceptance for p in parts])


def _proposal(part: Scheduled) -> Proposal:
    if part.session.acceptance is Acceptance.COUPLED:
        return Proposal(part.chain.token_ids)
    return Proposal(part.chain.token_ids, tuple(q for q in part.chain.qs if q is not None))
