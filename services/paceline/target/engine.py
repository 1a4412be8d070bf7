"""The target engine: continuous batching at step granularity, every step verifying proposals of any length.

One thread owns it. ``receive`` takes messages between steps, ``step`` does one forward; outcomes leave before the
next forward begins, and what is in flight is announced before the forward that verifies it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.processors import Row, SamplerState
from paceline.core.verification import Proposal, Verdict, decide, verify_picked
from paceline.errors import InvalidRequestError, PacelineError
from paceline.messages import (
    CloseSession,
    DraftState,
    InFlight,
    Nodes,
    OpenSession,
    Outcome,
    SessionFailed,
    SpeculationWanted,
    TreeLost,
)
from paceline.model.parallel.runner import LeadingRunner
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.target.control.allocation import RowBudget
from paceline.target.control.session_gate import Steering
from paceline.target.control.waiting import WaitPolicy
from paceline.target.lookup import shares
from paceline.target.scheduler import Scheduled, Scheduler
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Acceptance, Cause, Mode, Round, SamplingParams, pages_for

ToTarget = OpenSession | Nodes | CloseSession | DraftState
FromTarget = Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed

_CALIBRATED_SIZES = (1, 4, 8, 16, 32, 64)
_TIMED_FORWARDS = 3


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
    """Seconds inside steps, from the choice of sessions to their outcomes."""
    bubble_s: float = 0.0
    """Seconds between the end of a step and the start of the next forward although a session could step at once."""
    bubble_steps: int = 0
    hit_bubble_s: float = 0.0
    """Of these, before forwards that did nothing but verify proposals that were there when the last step ended."""
    hit_bubble_steps: int = 0
    wait_s: float = 0.0
    """Seconds between two steps in which every session waited for its draft."""
    waits: int = 0
    ahead_depth_total: int = 0
    """Lengths of the proposals that were there when a step ended, up to K each."""
    ahead_rounds: int = 0
    draft_rows: int = 0
    """Draft tokens verified."""
    draft_rows_trimmed: int = 0
    """Draft tokens that were there and were not verified, because the step was shorter without them."""
    nodes_used: int = 0
    """Draft tokens accepted."""
    lookup_rounds: int = 0
    """Rounds of sessions whose draft had nothing, with a proposal from their own text instead."""
    lookup_rows: int = 0
    """Tokens of these proposals."""
    lookup_rows_used: int = 0
    """Of these, accepted."""
    drafts_paused: int = 0
    """How often a session was told to do without a draft."""
    drafts_resumed: int = 0


@dataclass(frozen=True, slots=True)
class _Costs:
    """What drafting costs in one step, in seconds."""

    row_s: float
    """By how much one draft token delays the sessions of the step, all delays added up."""
    plain_s: float
    """A plain step of the same sessions, start to start."""
    decoding: float
    """Share of the step's time, 0 to 1, that it would have taken without its prefill chunks."""


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
        adaptive: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``max_model_len`` bounds a session's context in tokens, prompt and output together.

        ``adaptive``: as many draft tokens per step as pay, and no draft where none do; False: K for every session.
        """
        self.runner = runner
        self.stats = TargetStats()
        self.policy = WaitPolicy()
        self.rows = RowBudget(adaptive)
        self._lookups = shares() if adaptive else None
        self.steering = Steering(self.rows)
        self._emit = emit
        self._clock = clock
        self._max_model_len = max_model_len
        self._scheduler = Scheduler(
            runner.cache,
            self.policy,
            max_sessions=max_sessions,
            max_step_tokens=max_step_tokens,
            rows=self.rows,
            trial_rows=self.steering.trial_rows,
        )
        self._sessions: dict[str, TargetSession] = {}
        self._max_step_tokens = max_step_tokens
        self._ended_at: float | None = None  # of the last step; None: there was nothing to do since
        self._decided_at = 0.0  # of the last step: its outcomes were known
        self._all_waited = False  # since the last step

    @property
    def num_sessions(self) -> int:
        """Sessions that are open here."""
        return len(self._sessions)

    @property
    def num_running(self) -> int:
        """Those of them that are served."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for room."""
        return len(self._scheduler.waiting)

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
                if session.draft_available:
                    self.stats.ahead_rounds += 1
                    self.stats.ahead_depth_total += session.num_ahead()
        started = self._clock()
        parts = self._scheduler.schedule(started)
        if not parts:
            self._all_waited = bool(self._scheduler.running)
            if not self._all_waited:
                self._ended_at = None
            return False
        self._announce(parts)
        forward_at = self._clock()
        self._count_gap(parts, forward_at)
        num_emitted = self.stats.tokens_emitted
        verifying = [p for p in parts if p.verifies]
        verdicts, failed = self._forward(parts, verifying)
        now = self._clock()
        num_tokens = sum(p.num_tokens for p in parts)
        only_decodes = all(p.stop - p.start == 1 for p in parts)
        costs = self._costs(parts, verifying, num_tokens)
        if only_decodes:
            self.policy.step_s.add(now - started)
            self.rows.observe_step(num_tokens, now - forward_at)
        outcomes: list[FromTarget] = list(failed)
        for part in parts:
            if not part.verifies:
                part.session.commit_rows(self.runner.cache, part.stop)
        for part, verdict in zip(verifying, verdicts, strict=True):
            if verdict is not None:
                outcomes.append(self._commit(part, verdict, started, now, costs))
        self.stats.steps += 1
        self.stats.step_s += now - started
        self.stats.tokens_computed += num_tokens
        self.stats.preemptions = self._scheduler.num_preemptions
        if outcomes:
            self._emit(outcomes)
        if self.rows.adaptive:
            if self._ended_at is not None:
                num_emitted = self.stats.tokens_emitted - num_emitted
                self._measure(len(parts), num_emitted, now - self._decided_at, costs.decoding)
            self._steer(verifying, now)
        self._ended_at, self._decided_at = self._clock(), now
        self._all_waited = False
        return True

    def calibrate(self) -> None:
        """Times steps of 1 to 64 tokens, so that the first sessions meet measured costs. Without sessions only."""
        assert not self._sessions
        cache = self.runner.cache
        pages = cache.allocate(1)
        device = str(cache.keys[0].device)
        state = SamplerState(SamplingParams(), 0, (0,), vocab_size=self.runner.vocab_size, device=device)
        try:
            for size in _CALIBRATED_SIZES:
                if size > self._max_step_tokens:
                    break
                lengths = [min(4, size - at) for at in range(0, size, 4)]
                steps = [SequenceStep([0] * n, range(n), range(n), pages, num_logits=n) for n in lengths]
                rows = [Row(state)] * size
                times = []
                for _ in range(_TIMED_FORWARDS + 1):
                    started = self._clock()
                    decide(self.runner.forward(steps), rows, [Proposal()] * size, [Acceptance.COUPLED] * size)
                    times.append(self._clock() - started)
                for _ in range(_TIMED_FORWARDS):
                    self.rows.observe_step(size, min(times))
        finally:
            cache.release(pages)

    def _count_gap(self, parts: Sequence[Scheduled], forward_at: float) -> None:
        """Accounts for the time since the last step."""
        ended_at = self._ended_at
        if ended_at is None:
            return
        gap_s, stats = forward_at - ended_at, self.stats
        if self._all_waited:
            stats.wait_s += gap_s
            stats.waits += 1
            return
        stats.bubble_s += gap_s
        stats.bubble_steps += 1
        self.rows.overhead_s.add(gap_s)
        if all(p.verifies and p.session.cause is Cause.HIT for p in parts):
            stats.hit_bubble_s += gap_s
            stats.hit_bubble_steps += 1

    def _costs(self, parts: Sequence[Scheduled], verifying: Sequence[Scheduled], num_tokens: int) -> _Costs:
        num_rows, num_verifying = sum(len(p.chain) for p in parts), len(verifying)
        cost = self.rows.cost
        added_s = cost.seconds(num_tokens) - cost.seconds(num_tokens - num_rows)
        row_s = added_s * num_verifying / num_rows if num_rows else 0.0
        num_prefill = num_tokens - num_rows - num_verifying
        decoding = cost.seconds(num_tokens - num_prefill) / cost.seconds(num_tokens) if cost.known else 1.0
        return _Costs(row_s, self.rows.plain_s(num_verifying), decoding)

    def _measure(self, num_sessions: int, num_tokens: int, seconds: float, decoding: float) -> None:
        """Tells the governor what a step has brought, unless no session of it may have a draft, or prefill chunks
        took more than half of its time."""
        may = [s for s in self._scheduler.running if s.k > 0]
        if may and decoding >= 0.5:
            heard = sum(s.draft_available and s.draft_heard for s in may)
            self.steering.governor.measure(num_sessions, num_tokens, decoding * seconds, drafting=2 * heard >= len(may))

    def _steer(self, verified: Sequence[Scheduled], now: float) -> None:
        """Ends drafting where it does not pay, asks for it where it may."""
        steering, num_sessions = self.steering, len(self._scheduler.running)
        for part in verified:
            session = part.session
            if session.draft_available and session.session_id in self._sessions:
                steering.review(session, now, num_sessions)
        steering.tick(now, num_sessions, self._sessions.values())
        self._emit_steering()

    def _emit_steering(self) -> None:
        steering = self.steering
        if steering.messages:
            self.stats.drafts_paused, self.stats.drafts_resumed = steering.num_pauses, steering.num_resumptions
            self._emit(steering.messages)
            steering.messages = []

    def wait_s(self) -> float | None:
        """How long the engine may sleep after ``step`` returned False; None: until a message comes."""
        until = self._scheduler.wait_until
        return None if until is None else max(0.0, until - self._clock())

    def close(self) -> None:
        """Leaves the other ranks of the model, if there are any. Idempotent."""
        self.runner.close()

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
                coupled=self.rows.coupled,
                rejection=self.rows.rejection,
                lookups=self._lookups,
            )
            self._check_fits(session)
        except PacelineError as error:
            self._emit([SessionFailed(message.session_id, message.epoch, str(error))])
            return
        self._sessions[message.session_id] = session
        self._scheduler.add(session)
        if self.rows.adaptive:
            self.steering.begin(session, self._clock(), len(self._sessions))
            self._emit_steering()

    def _check_fits(self, session: TargetSession) -> None:
        if not session.tokens:
            raise InvalidRequestError("the prompt is empty: at least one token is needed")
        if session.num_tokens >= self._max_model_len:
            raise InvalidRequestError(
                f"the context has {session.num_tokens} tokens: fewer than {self._max_model_len} are allowed"
            )
        if session.num_tokens >= session.max_tokens:
            raise InvalidRequestError(
                f"the context has {session.num_tokens} tokens and ends at {session.max_tokens}: nothing is left to do"
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
        self.steering.forget(session, self._clock(), len(self._sessions))

    def _set_draft(self, session: TargetSession, message: DraftState) -> None:
        if message.available:
            if not session.draft_epoch < message.draft_epoch or not 0 < message.context_len <= session.num_tokens:
                self.stats.messages_stale += 1
                return
            session.follow_draft(message.draft_epoch, message.context_len)
        session.draft_available = message.available and session.k > 0 and not session.paused

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
        if added.added:  # nodes that are of no use are no reason to wait for more
            session.last_nodes_at = now
            session.draft_silent = session.draft_silent and session.tree.anchor.best is None
        session.draft_heard = True
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
            if session.mode is Mode.PLAIN or session.paused or session.max_draft() == 0:
                session.cause = Cause.DISABLED
            elif session.mode is Mode.SEQUENTIAL and session.draft_available:
                session.cause = Cause.SEQUENTIAL
            elif not session.draft_available and not part.chain.node_ids:
                session.cause = Cause.DRAFT_DOWN
        for part in parts:
            if part.verifies and part.session.draft_available:
                session = part.session
                node_ids = part.chain.node_ids
                in_flight.append(InFlight(session.session_id, session.epoch, session.num_tokens, node_ids))
        if in_flight:
            self._emit(in_flight)

    def _forward(
        self, parts: Sequence[Scheduled], verifying: Sequence[Scheduled]
    ) -> tuple[list[Verdict | None], list[SessionFailed]]:
        """Runs the model and decides what is ``verifying``, in order."""
        steps = [_sequence(p) for p in parts]
        runner = self.runner
        picked = [p.session.picks for p in verifying] if isinstance(runner, LeadingRunner) else []
        if not isinstance(runner, LeadingRunner) or not any(picked):
            return self._verify(runner.forward(steps), verifying)
        rows = [row if there else None for p, there in zip(verifying, picked, strict=True) for row in _rows(p)]
        logits, token_ids, logprobs = runner.forward_and_pick(steps, rows)
        others, failed = self._verify(logits, [p for p, there in zip(verifying, picked, strict=True) if not there])
        remaining = iter(others)
        verdicts: list[Verdict | None] = []
        at = 0
        for part, there in zip(verifying, picked, strict=True):
            if not there:
                verdicts.append(next(remaining))
                continue
            end = at + len(part.chain) + 1
            try:
                verdicts.append(verify_picked(_proposal(part), token_ids[at:end], logprobs[at:end]))
            except PacelineError as error:
                verdicts.append(None)
                failed.append(self._failed(part.session, error))
            at = end
        return verdicts, failed

    def _failed(self, session: TargetSession, error: PacelineError) -> SessionFailed:
        self._close(session)
        return SessionFailed(session.session_id, session.epoch, str(error))

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
                failed.append(self._failed(part.session, error))
            row += num_rows
        return verdicts, failed

    def _commit(self, part: Scheduled, verdict: Verdict, started: float, now: float, costs: _Costs) -> Outcome:
        session = part.session
        count, finish_reason = session.cut(verdict.token_ids)
        token_ids = verdict.token_ids[:count]
        num_accepted = min(verdict.num_accepted, count)
        self.stats.proposals_invalid += verdict.num_invalid
        self.stats.rounds += 1
        self.stats.tokens_emitted += count
        chain, num_nodes, num_used = part.chain, len(part.chain.node_ids), 0
        if session.k:
            self.rows.lengths.add(len(chain))
        if num_nodes:
            self.stats.draft_rows += num_nodes
            self.stats.nodes_used += (num_used := num_accepted)
        elif len(chain):
            self.stats.lookup_rounds += 1
            self.stats.lookup_rows += len(chain)
            self.stats.lookup_rows_used += num_accepted
        num_trimmed = part.num_trimmed if num_nodes or session.tree.anchor.best is not None else 0
        self.stats.draft_rows_trimmed += num_trimmed
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
            self.policy.observe_round(num_nodes, num_used, count, now - session.outcome_at)
            if session.draft_available:
                waited_s = 0.0 if session.waiting_since is None else started - session.waiting_since
                lost_s = waited_s + costs.row_s * num_nodes
                lost = lost_s / costs.plain_s if costs.plain_s > 0 else 0.0
                self.steering.observe(session, num_nodes, num_trimmed, num_used, lost)
        session.waiting_since = None
        if num_nodes:
            num_tried = min(num_nodes, verdict.num_accepted + 1)
            session.hits.add(num_tried, sum(chain.probs[:num_tried]), verdict.num_accepted)
        elif session.draft_available:
            session.hits.fade()
        session.commit_outcome(token_ids, now)
        session.commit_rows(self.runner.cache, part.stop + num_accepted)  # to its end: others may share the prefix
        if finish_reason is not None:
            self._close(session)
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


def _rows(part: Scheduled) -> list[Row]:
    return [Row(part.session.sampler, part.chain.token_ids[:i]) for i in range(len(part.chain) + 1)]


def _verdicts(logits: Tensor, parts: Sequence[Scheduled]) -> list[Verdict]:
    rows = [row for p in parts for row in _rows(p)]
    proposals = [_proposal(p) for p in parts]
    return decide(logits, rows, proposals, [p.session.acceptance for p in parts])


def _proposal(part: Scheduled) -> Proposal:
    if part.session.acceptance is Acceptance.COUPLED:
        return Proposal(part.chain.token_ids)
    return Proposal(part.chain.token_ids, tuple(q for q in part.chain.qs if q is not None))
