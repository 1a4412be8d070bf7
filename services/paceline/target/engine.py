"""The target engine: continuous batching at step granularity, every step verifying proposals of any length.

One thread owns it. ``receive`` takes messages between steps. ``step`` finishes one step, and may already have launched
the next one; with drafts it only launches a step or finishes one (``flight.py``). Outcomes leave before the next
forward begins. Proposals are announced before the forward that verifies them, or right after its launch on an
asynchronous device. Where their sender shares the engine's interpreter (``holds_outcomes``), both leave together at
that time, or once no session is ready for a step. A forward runs without the interpreter, while the choice of its
sessions and proposals holds it. Routers and drafts also receive one message instead of two. On an asynchronous device
they leave then in any case.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.grammar import Grammars
from paceline.core.deferred import upload
from paceline.core.logprobs import score
from paceline.core.native_tree import add_each
from paceline.core.processors import Row, SamplerState
from paceline.core.tree import FIRST, GREW, LOST, OFFERS, Producer, Proposal
from paceline.core.verification import Drawn, Verdict, decide, verify_picked
from paceline.errors import EngineError, InvalidRequestError, PacelineError
from paceline.messages import (
    CloseSession,
    DraftState,
    FromTarget,
    InFlight,
    Nodes,
    OpenSession,
    Outcome,
    PromptScores,
    SessionFailed,
    TreeLost,
)
from paceline.model.compiled.background import Compilation
from paceline.model.parallel.runner import Sampled
from paceline.model.runner import ModelRunner
from paceline.model.shapes import most_scored_rows
from paceline.model.step_plan import SequenceStep
from paceline.target.branches import accepted_table, branches_of, page_tables, sequence_steps
from paceline.target.control.allocation import Allocation
from paceline.target.control.session_gate import SessionGate
from paceline.target.control.step_meter import DecidedRound, StepMeter
from paceline.target.control.waiting import WaitPolicy
from paceline.target.cores import TargetCores
from paceline.target.flight import Finished, Flight
from paceline.target.heads.driver import Heads
from paceline.target.heads.feeding import Computed
from paceline.target.heads.mounted import MountedHead
from paceline.target.hints import Hints
from paceline.target.lookup import new_shares
from paceline.target.origin import Origin
from paceline.target.pages import PageStore
from paceline.target.runners import Forwarded, NoMemoryError, Runners, without_memory
from paceline.target.scheduler import Scheduled, Scheduler
from paceline.target.session import TargetSession
from paceline.target.states_link import StatesLink
from paceline.types import (
    MAX_DRAFT_TOKENS,
    PAGE_SIZE,
    Acceptance,
    BatchInvariant,
    Cause,
    Execution,
    Mode,
    PromptLogprobs,
    Round,
    SamplingParams,
    pages_for,
)

_CALIBRATED_SIZES = (1, 4, 8, 16, 32, 64)
_TIMED_FORWARDS = 3
_TIMED_BRANCHES = 5
_RECEIVING = 0.8
"""Share of the expected time of a step with drafts in which messages are received before the step is awaited. It is
below 1 because steps may take less time than expected."""


class TargetEngine:
    """Steps ``follow -> schedule -> announce -> launch -> verify -> commit -> send`` over all sessions of a target."""

    def __init__(
        self,
        runner: ModelRunner,
        emit: Callable[[Sequence[FromTarget]], None],
        *,
        max_sessions: int,
        max_step_tokens: int,
        max_model_len: int,
        adaptive: bool = True,
        trees: bool = True,
        batch_invariant: BatchInvariant = "untested",
        origin: Origin | None = None,
        heads: Sequence[MountedHead] = (),
        link: StatesLink | None = None,
        hints: Hints | None = None,
        grammars: Grammars | None = None,
        compilation: Compilation | None = None,
        cores: TargetCores | None = None,
        holds_outcomes: bool = False,
        drafted: bool = True,
        describe: Callable[[TargetEngine], Mapping[str, Any]] = lambda engine: {},
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Creates an engine without sessions.

        Args:
            emit: called with the messages to send, in the thread that calls ``receive`` and ``step``.
            max_sessions: sessions that are served at the same time; more wait.
            max_step_tokens: tokens computed in one step.
            max_model_len: tokens of a session's context, prompt and output together.
            adaptive: verify draft tokens with positive expected gain, pause drafting without any; False: always K.
            trees: with ``adaptive``, verify siblings with positive expected gain; False: chains.
            batch_invariant: result of the test that bits do not depend on the batch.
            origin: what computes KV pages ; None: the same at all targets.
            heads: propose tokens where a session's draft has none; the first that is ready is asked.
            link: sends hidden states to drafts that read them; None: they read none.
            hints: sends drafts the likely tokens in the middle of a step; None: no hints.
            grammars: compiles structured outputs; None: sessions that ask for one are refused.
            compilation: of an eager ``runner``'s model: sessions that are opened after its end are compiled.
            cores: cores that share its products, some of a draft's among them; None: their number never changes.
            holds_outcomes: outcomes leave when the next forward begins, or there is none to begin; False: at once.
            describe: returns what its replica's status says of it.
            drafted: the configuration names drafts; False: a round without any is not one that misses them.
            clock: seconds.
        """
        self._drafted = drafted
        self.runners = Runners(runner, compilation)
        self._grammars = grammars
        self.batch_invariant = batch_invariant
        self.pages = PageStore(self.runners, batch_invariant, origin)
        self._numerics = "" if origin is None else origin.numerics
        """The KV pages, for targets that take over sessions and for sessions that come."""
        self.wait_policy = WaitPolicy()
        self.allocation = Allocation(adaptive, trees)
        self._lookups = new_shares() if adaptive else None
        self.gate = SessionGate(self.allocation)
        self.heads = Heads(
            heads,
            runner.cache,
            allocation=self.allocation,
            clock=clock,
            states=runner.features,
        )
        self.gate.trials.only_plain = not self.heads and cores is None
        self.gate.trials.begins_without = cores is not None
        self.cores = cores
        self.link = link
        self.hints = hints
        self._meter = StepMeter(clock, self.allocation, self.wait_policy, self.gate)
        self.stats, self.step_sizes = self._meter.stats, self._meter.sizes
        self.ranks = self._meter.ranks
        self.emit = emit
        self._holds_outcomes = holds_outcomes
        self.held: list[FromTarget] = []
        """Messages that are sent together with the next ones."""
        self.flight: Flight | None = None
        """The step that was launched ahead of its turn, or is not awaited yet; between two calls of ``step``, the only
        one in flight."""
        self._unsettled: Finished | None = None
        """The last step, if it was only committed so far."""
        self._clock = clock
        self._max_model_len = max_model_len
        self.scheduler = Scheduler(
            runner.cache,
            self.wait_policy,
            max_sessions=max_sessions,
            max_step_tokens=max_step_tokens,
            max_scored_rows=most_scored_rows(runner.vocab_size),
            allocation=self.allocation,
            trial_rows=self.gate.trial_rows,
            heads=self.heads,
        )
        self.sessions: dict[str, TargetSession] = {}
        self._describe = describe
        self._max_sessions, self._max_step_tokens = max_sessions, max_step_tokens
        if self._overlaps:
            self.allocation.hidden.add(1.0)  # until plain steps tell

    @property
    def runner(self) -> ModelRunner:
        """The runner that new sessions begin on."""
        return self.runners.current

    @property
    def execution(self) -> Execution:
        """Execution of new sessions (``types.Execution``). Any thread may ask."""
        return self.runners.execution

    @property
    def numerics(self) -> str:
        """Digest of what decides the bits of new sessions' logits; empty: not known. Any thread may ask."""
        return self._numerics and f"{self._numerics}-{'compiled' if self.execution == 'compiled' else 'eager'}"

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self.sessions)

    @property
    def num_running(self) -> int:
        """Number of open sessions that are served now."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Number of open sessions that wait for room."""
        return len(self.scheduler.waiting)

    def is_waiting(self, session_id: str) -> bool:
        """True if an open session waits for room, for the first time or again."""
        return any(session.session_id == session_id for session in self.scheduler.waiting)

    def receive(self, messages: Sequence[OpenSession | Nodes | CloseSession | DraftState]) -> None:
        """Applies messages; drops and counts messages for unknown sessions or other epochs."""
        now, sessions = self._clock(), self.sessions
        drafted: list[tuple[TargetSession, Nodes]] = []  # nodes that follow each other
        opened: list[TargetSession] = []
        for message in messages:
            session = sessions.get(message.session_id)
            if isinstance(message, Nodes):
                if session is None or message.epoch != session.draft_epoch:
                    self.stats.messages_stale += 1
                else:
                    drafted.append((session, message))
                continue
            if drafted:
                self._add_nodes(drafted, now)
                drafted = []
            if isinstance(message, OpenSession):
                if session is None or message.epoch > session.epoch:
                    opened += self._open(message)
                else:
                    self.stats.messages_stale += 1
            elif session is None or message.epoch != session.epoch:
                self.stats.messages_stale += 1
            elif isinstance(message, DraftState):
                self._set_draft(session, message)
            else:
                self.close_session(session)
        if drafted:
            self._add_nodes(drafted, now)
        if opened and self.allocation.adaptive:  # all of them count for the first one, too
            for session in opened:
                if sessions.get(session.session_id) is session:
                    self.gate.begin(session, len(sessions))
            self._send_wishes()

    def step(self) -> bool:
        """Does one step. False: no session is ready until a message comes or ``wait_s`` has passed."""
        flight = self.flight
        if flight is None:
            try:
                started, parts = self._schedule()
                flight = self._launch(parts, started) if parts else None
            finally:  # whatever becomes of this step, the last one has succeeded
                self.settle_step()
            if not parts:
                self.send_held()
                self._meter.idle(waiting=bool(self.scheduler.running))
                return self._send_states()
            if flight is None:
                return True
            if self._overlaps and any(part.session.draft_available for part in flight.parts):
                self._receive_during(flight, self._meter.forward_at)
        if flight.awaited_from > self._clock():
            return False
        self.flight = self._launch_ahead(flight)
        if flight.is_ahead:
            self._follow_outcomes()
            self.held += self.in_flight_of([part for part in flight.parts if self.is_open(part.session)])
            self._meter.begin_ahead()
        self.send_held()
        self.finish_step(flight)
        return True

    def _receive_during(self, flight: Flight, began: float) -> None:
        """Has a step with drafts awaited only after most of the time that it is expected to take since it began."""
        seconds = self.allocation.cost.seconds(sum(part.num_tokens for part in flight.parts))
        flight.awaited_from = began + _RECEIVING * seconds
        self.flight = flight
        self.send_held()

    def _schedule(self) -> tuple[float, list[Scheduled]]:
        """Chooses the parts of a step before which none is in flight; returns them after the time before that."""
        self._follow_outcomes()
        if self.heads or self.cores is not None:
            self._follow_drafts()
        self.runners.retain(session.generation for session in self.sessions.values())
        started = self._clock()
        if self._grammars is not None:
            self._grammars.begin_step()
        parts = self.scheduler.schedule(started, overlaps=self._overlaps)
        return started, self.runners.in_order(parts)

    def _launch(self, parts: Sequence[Scheduled], started: float) -> Flight | None:
        """Announces and launches a step; None: it had no memory."""
        announced = self.in_flight_of(parts)
        self._meter.begin(parts, started, self.heads.take_s())
        wants_states = self.link is not None or (bool(self.heads) and self.heads.wants_states())
        on_states = None if self.hints is None else self._send_hints
        if not self.runners.is_asynchronous:  # the forward ends when the step is done
            self.held += announced
            self.send_held()
        try:
            forwarded = self.runners.forward(parts, wants_states=wants_states, on_states=on_states)
        except NoMemoryError as error:
            self.abandon_step(parts, error)
            return None
        if self.runners.is_asynchronous:
            self.settle_step()  # outcomes come before what is verified after them
            self.held += announced
        return self.on_launched(parts, forwarded, is_ahead=False)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Launches the step after ``flight`` from the tokens that the device samples; None: it has to wait."""
        token_ids = flight.token_ids
        if token_ids is None or not self._overlaps:
            return None
        sampled = sorted([part for part in flight.parts if part.verifies], key=flight.is_whole)
        parts = self.scheduler.schedule_ahead([part for part in flight.parts if self.is_open(part.session)])
        if not parts:
            return None
        rows = {id(part.session): row for row, part in enumerate(sampled)}
        index = [rows[id(part.session)] for part in parts if part.is_ahead]
        if index != [*range(len(sampled))]:
            token_ids = token_ids[upload(index, token_ids.device, torch.int64)]
        forwarded = self.runners.forward_ahead(parts, token_ids)
        return None if forwarded is None else self.on_launched(parts, forwarded, is_ahead=True)

    def on_launched(self, parts: Sequence[Scheduled], forwarded: Forwarded, *, is_ahead: bool) -> Flight:
        """Commits the prefill chunks of a launched step, which decide nothing. The device samples the step's tokens if
        sampling needs no others to be known."""
        for part in parts:
            if not part.verifies:
                part.session.commit_rows(self.runner.cache, part.stop)
        verifying = [part for part in parts if part.verifies]
        flight = Flight(parts, forwarded, is_ahead=is_ahead)
        if self._overlaps and verifying and all(not p.num_drafted and p.session.samples_ahead for p in verifying):
            rows = [row for part in verifying if flight.is_whole(part) for row in part.rows()]
            token_ids = [sampled.token_ids for sampled in forwarded.sampled]
            try:
                if rows:
                    flight.drawn = Drawn(forwarded.logits, rows)
                    token_ids.append(flight.drawn.token_ids)
                flight.token_ids = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
            except (RuntimeError, MemoryError) as error:
                without_memory(error)  # it is decided in parts, later
        return flight

    @property
    def _overlaps(self) -> bool:
        """True if steps may be launched ahead, as far as the engine is concerned (``flight.py``)."""
        others = self.heads or self.link is not None or self.hints is not None or self.cores is not None
        return self.runners.is_asynchronous and not others

    def is_open(self, session: TargetSession) -> bool:
        """True if this very session is open; another one may have its name."""
        return self.sessions.get(session.session_id) is session

    def finish_step(self, flight: Flight) -> None:
        """Waits for a step, commits its verdicts and sends the outcomes; if the next step can be launched before that,
        only commits."""
        forwarded, verdicts = flight.forwarded, self._verdicts(flight)
        self.runners.check()
        flight.release_pages(self.runner.cache)
        done = Finished(flight.parts, self._meter.decided())
        if flight.is_ahead or flight.awaited_from:  # sessions may have ended since
            verifying = [part for part in flight.parts if part.verifies]
            verdicts = [v for v, part in zip(verdicts, verifying, strict=True) if self.is_open(part.session)]
            done.open = [part for part in done.parts if self.is_open(part.session)]
        if self._overlaps and self.flight is None and forwarded.scored is None:
            self.commit_verdicts(done, verdicts)
            self._unsettled = done
            self._meter.ended()
            return
        step = done.step = self._meter.measure(done.parts, done.times)
        self.heads.charge_guesses([part.session for part in done.open if part.guess_tables], step.guess_s)
        self.commit_verdicts(done, verdicts)
        self.tell_rounds(done)
        if not self._holds_outcomes or forwarded.scored is not None:  # no outcome waits for what follows
            self.send_held()
        if forwarded.scored is not None:
            self.send(self._score(flight.parts, forwarded.scored))
        if forwarded.guessed is not None:
            self._learn_guesses(done, forwarded.guessed)
        if self.heads or self.link is not None:
            self._use_states(done, forwarded.states)
            self._send_states()
        self.adapt_drafting(done)
        self._meter.ended()

    def settle_step(self) -> None:
        """Tells and accounts for a step that was only committed, if there is one."""
        done, self._unsettled = self._unsettled, None
        if done is not None:
            done.step = self._meter.measure(done.parts, done.times)
            self.tell_rounds(done)
            self.adapt_drafting(done)

    def _verdicts(self, flight: Flight) -> list[Verdict | PacelineError]:
        """Verdicts of the parts that verify, in order. Drops the step ahead where the device could not decide."""
        verifying = [part for part in flight.parts if part.verifies]
        whole = [part for part in verifying if flight.is_whole(part)]
        drawn = None if flight.drawn is None else flight.drawn.verdicts([part.proposal for part in whole])
        if flight.drawn is not None and drawn is None:
            self.drop_ahead()
        others: Sequence[Verdict | PacelineError] = drawn or _decide(flight.forwarded.logits, whole)
        return _with_sampled(verifying, flight.forwarded.sampled, others)

    def drop_ahead(self) -> None:
        """Gives up the step that was launched ahead: its tokens were no verdicts. Its prefill chunks are valid."""
        ahead, self.flight = self.flight, None
        if ahead is not None:
            ahead.wait()

    def abandon_step(self, parts: Sequence[Scheduled], error: NoMemoryError) -> None:
        """Ends the session that a step had no memory for; the others are in the next step."""
        for part in parts:
            part.session.join(self.runner.cache, part.session.pages)
        failed = SessionFailed(error.session.session_id, error.session.epoch, str(error))
        self.close_session(error.session)
        self.send([failed])
        self._meter.idle(waiting=False)

    def calibrate(self) -> None:
        """Prepares moves of pages, and times steps of 1 to 64 tokens, up to the number that all sessions may verify. So
        costs are measured before the first session. Without sessions only."""
        assert not self.sessions
        if self._max_model_len > PAGE_SIZE:
            self.pages.prepare()
        if self.cores is None:
            self._calibrate()
            return
        for shared in (False, True):
            self._use_cores(shared=shared)
            self._calibrate()

    def _follow_drafts(self) -> None:
        """Uses drafts' cores while no session has a draft, and tells heads in which circumstances they are asked."""
        cores, num_running = self.cores, len(self.scheduler.running)
        if cores is not None and cores.shared is any(session.draft_available for session in self.sessions.values()):
            self._use_cores(shared=not cores.shared)
        if self.allocation.adaptive and num_running:
            self.heads.use(0 if cores is None else cores.num, drafting=self.gate.trials.wanted(num_running))

    def _use_cores(self, *, shared: bool) -> None:
        """Chooses the cores of the following steps: the target's own, and with ``shared`` its drafts' cores, too."""
        assert self.cores is not None
        self.cores.use(shared=shared)
        self.allocation.use_cores(self.cores.num)

    def _calibrate(self) -> None:
        cache = self.runner.cache
        pages = cache.allocate(1)
        device = str(cache.keys[0].device)
        state = SamplerState(SamplingParams(), 0, (0,), vocab_size=self.runner.vocab_size, device=device)
        try:
            for size in _CALIBRATED_SIZES:
                if size > self._max_step_tokens:
                    break
                num_sequences = min(-(-size // 4), self._max_sessions)  # a step has no more, so none is recorded
                lengths = [size // num_sequences + (i < size % num_sequences) for i in range(num_sequences)]
                if lengths[0] > MAX_DRAFT_TOKENS:
                    break
                steps = [SequenceStep([0] * n, range(n), range(n), pages, num_logits=n) for n in lengths]
                rows = [Row(state)] * size
                times = []
                for _ in range(_TIMED_FORWARDS + 1):
                    started = self._clock()
                    decide(self.runner.forward(steps), rows, [Proposal()] * size, [Acceptance.COUPLED] * size)
                    times.append(self._clock() - started)
                for _ in range(_TIMED_FORWARDS):
                    self.allocation.observe_step(size, min(times))
            if self.allocation.trees and cache.num_available >= _TIMED_BRANCHES:
                self._time_branches(pages, rows[:1])
        finally:
            cache.release(pages)

    def _time_branches(self, pages: list[int], rows: Sequence[Row]) -> None:
        """Times a step with branches against a step of the same size without."""
        cache = self.runner.cache
        chain = Proposal((0,) * _TIMED_BRANCHES)
        siblings = Proposal(chain.token_ids, parents=(-1,) * _TIMED_BRANCHES)
        first, *others = branches = branches_of(siblings)
        private = [cache.allocate(branch.num_pages(1)) for branch in others]
        try:
            tables = page_tables(pages, private, branches, 1 + first.depth)
            seconds = []
            if cache.linear is not None:  # these layers read the row before them
                self.runner.forward([SequenceStep([0], range(1), range(1), pages, num_logits=1)])
            for proposal, held in ((chain, [pages]), (siblings, tables)):
                times = []
                for _ in range(_TIMED_FORWARDS + 1):
                    started = self._clock()
                    logits = self.runner.forward(sequence_steps([0], 1, proposal, held))
                    decide(
                        logits, [*rows] * len(logits), [Proposal()] * len(logits), [Acceptance.COUPLED] * len(logits)
                    )
                    times.append(self._clock() - started)
                seconds.append(min(times))
            self.allocation.branch_prior_s = max(0.0, seconds[1] - seconds[0]) / len(others)
        finally:
            for taken in private:
                cache.release(taken)

    def wait_s(self) -> float | None:
        """Seconds that the engine may sleep after ``step`` returned False; None: until a message comes."""
        until = self.scheduler.wait_until if self.flight is None else self.flight.awaited_from
        return None if until is None else max(0.0, until - self._clock())

    def facts(self) -> Mapping[str, Any]:
        """Returns what its replica's status says of it. Any thread may ask."""
        return self._describe(self)

    def close(self) -> None:
        """Releases the other ranks of the model, if there are any, and ends its compilation. Idempotent."""
        self.settle_step()
        self.send_held()
        self.heads.shutdown()
        self.runners.close()
        if self._grammars is not None:
            self._grammars.close()

    def check_integrity(self) -> None:
        """Asserts the invariants of sessions, scheduler and pages."""
        kept = [] if self.flight is None else self.flight.pages
        self.scheduler.check_integrity(list(self.sessions.values()), [*kept, *self.pages.lent])
        in_flight = () if self.flight is None else [part.session for part in self.flight.parts]
        for session in self.sessions.values():
            session.check_integrity(in_flight=session in in_flight)
        self.heads.check_integrity(list(self.sessions.values()))

    def _open(self, message: OpenSession) -> list[TargetSession]:
        """Opens a session, and returns it; none if it is refused."""
        old = self.sessions.get(message.session_id)
        self.runners.advance()
        generation = self.runners.generation if old is None else old.generation
        if old is not None:
            self.close_session(old)
        if message.suspected_s > 0 and any(s.suspected_until > self._clock() for s in self.sessions.values()):
            reason = "a session that targets were lost under is served: another one has to wait"
            self.send([SessionFailed(message.session_id, message.epoch, reason, turned_away=True)])
            return []
        form, output = message.sampling.structured_output, message.token_ids[message.num_prompt_tokens :]
        try:
            device = self.runner.cache.keys[0].device
            grammar = None
            if form is not None and self._grammars is not None:
                grammar = self._grammars.paced(form, output, salt=message.cache_salt, ahead=device.type == "cpu")
            session = TargetSession(
                message,
                vocab_size=self.runner.vocab_size,
                max_len=self._max_model_len,
                device=str(device),
                now=self._clock(),
                coupled=self.allocation.coupled,
                rejection=self.allocation.rejection,
                lookups=self._lookups,
                grammar=grammar,
                generation=generation,
                block_len=self.runner.backend.block_len,
            )
            self._check_fits(session)
        except PacelineError as error:
            at_fault = isinstance(error, InvalidRequestError)
            self.send([SessionFailed(message.session_id, message.epoch, str(error), at_fault)])
            return []
        if not self.sessions:
            self._meter.idle(waiting=False)  # until now there was nothing to do, even if no step was asked for
        self.sessions[message.session_id] = session
        self.scheduler.add(session)
        self.heads.open(session)
        return [session]

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

    def close_session(self, session: TargetSession) -> None:
        """Forgets a session, and frees its pages unless a step in flight reads them."""
        if self.flight is not None:
            self.flight.keep_pages(session)
        del self.sessions[session.session_id]
        self.heads.close(session)
        if self.link is not None:
            self.link.close(session)
        self.scheduler.remove(session)
        self.gate.forget(session)

    def _set_draft(self, session: TargetSession, message: DraftState) -> None:
        if message.available:
            if not session.draft_epoch < message.draft_epoch or not 0 < message.context_len <= session.num_tokens:
                self.stats.messages_stale += 1
                return
            session.follow_draft(message.draft_epoch, message.context_len)
        session.draft_available = message.available and session.k > 0 and not session.paused

    def _add_nodes(self, drafted: Sequence[tuple[TargetSession, Nodes]], now: float) -> None:
        """Adds nodes, each message's to its session."""
        stats, policy = self.stats, self.wait_policy
        trees = [session.tree for session, _ in drafted]
        added, effects = add_each(trees, [message.nodes for _, message in drafted])
        stats.nodes_added += added.added
        stats.nodes_stale += added.stale
        stats.nodes_invalid += added.invalid
        stats.nodes_dropped += added.dropped
        for (session, message), effect in zip(drafted, effects, strict=True):
            policy.observe_nodes(session, message, now, resolved=bool(effect & FIRST) and session.tree_is_current)
            session.draft_heard = True
            session.nodes_context_len = message.context_len
            if message.idle:
                session.idle_context_len = message.context_len
            if effect & GREW:  # useless nodes are no reason to wait for more
                session.last_nodes_at = now
                if effect & OFFERS:
                    session.draft_silent = False
            if effect & LOST:
                self._check_tree(session)

    def _check_tree(self, session: TargetSession) -> None:
        """Reports a lost tree whose draft has seen the whole context: it misses nodes permanently."""
        if session.draft_available and session.tree_is_current and session.nodes_context_len == session.num_tokens:
            self.stats.trees_lost += 1
            session.draft_available = False  # until it is re-opened
            self.send([TreeLost(session.session_id, session.epoch)])

    def _follow_outcomes(self) -> None:
        """Walks the trees along the last outcomes, with the nodes that arrived while their step ran."""
        num_rounds = depth_total = 0
        for session in self.sessions.values():
            if session.tree_is_current:
                continue
            session.follow_outcome()
            if session.cause is not Cause.HIT and session.tree.lost:
                self._check_tree(session)
            if session.draft_available:
                num_ahead = session.num_ahead()
                num_rounds += 1
                depth_total += num_ahead
                if session.mode is Mode.OVERLAPPED:
                    self.wait_policy.observe_hit(after_draft=session.verified_draft, hit=num_ahead > 0)
        self.stats.ahead_rounds += num_rounds
        self.stats.ahead_depth_total += depth_total

    def in_flight_of(self, parts: Sequence[Scheduled]) -> list[InFlight]:
        """Returns the proposals in flight for the drafts, which grow below them during verification."""
        in_flight = []
        for part in parts:
            session = part.session
            if not part.verifies:
                continue
            if session.cause is not Cause.START:
                session.cause = _cause(part, drafted=self._drafted)
            if session.draft_available:
                node_ids = part.proposal.draft_ids
                in_flight.append(InFlight(session.session_id, session.epoch, part.stop, node_ids))
        return in_flight

    def commit_verdicts(self, done: Finished, verdicts: Sequence[Verdict | PacelineError]) -> None:
        """Commits the verdicts of a step and the rows that it computed for them. A session whose verdict is an error
        ends."""
        self.stats.preemptions = self.scheduler.num_preemptions
        heads = self.heads if self.heads else None
        verifying = [part for part in done.open if part.verifies]
        row_s = 0.0 if done.step is None else done.step.row_s / max(1, len(verifying))
        for part, verdict in zip(verifying, verdicts, strict=True):
            session = part.session
            if isinstance(verdict, Verdict):
                done.rounds.append(self._commit_round(part, verdict, done.times.decided_at, heads, row_s))
            else:
                self.close_session(session)
                at_fault = isinstance(verdict, InvalidRequestError)
                done.failed.append(SessionFailed(session.session_id, session.epoch, str(verdict), at_fault))
        done.running = [*self.scheduler.running]

    def tell_rounds(self, done: Finished) -> None:
        """Counts the rounds of a step, and makes the messages about them."""
        assert done.step is not None
        done.num_emitted = self._meter.rounds(done.step, done.times, done.rounds)
        self.held += [outcome_of(each) for each in done.rounds]
        self.held += done.failed

    def _score(self, parts: Sequence[Scheduled], logits: Tensor) -> list[PromptScores | SessionFailed]:
        """Returns log probabilities of prompts. ``logits``: all rows of the scored parts, in order."""
        messages: list[PromptScores | SessionFailed] = []
        start = 0
        for part in parts:
            if not part.scores:
                continue
            session, rows = part.session, logits[start : start + part.num_logits]
            start += part.num_logits
            if not self.is_open(session):
                continue
            assert session.scored_top is not None
            try:
                tokens = score(rows, session.tokens[part.start + 1 : part.stop + 1], session.scored_top)
            except (EngineError, RuntimeError, MemoryError) as error:
                failed = error if isinstance(error, EngineError) else without_memory(error)
                self.close_session(session)
                messages.append(SessionFailed(session.session_id, session.epoch, str(failed)))
                continue
            session.num_scored = part.stop
            logprobs = PromptLogprobs(part.start + 1, tokens)
            messages.append(PromptScores(session.session_id, session.epoch, logprobs))
        return messages

    def _commit_round(
        self, part: Scheduled, verdict: Verdict, decided_at: float, heads: Heads | None, row_s: float
    ) -> DecidedRound:
        """Commits one session's verdict. ``heads``: None if there are none; ``row_s``: seconds of a draft token."""
        session, proposal, cache = part.session, part.proposal, self.runner.cache
        num_emitted, finish_reason = session.cut(verdict.token_ids)
        num_accepted, token_ids = verdict.num_accepted, verdict.token_ids
        if finish_reason is not None:
            num_accepted, token_ids = min(num_accepted, num_emitted), token_ids[:num_emitted]
        if part.tables:
            path = proposal.along(token_ids[:num_accepted])
            session.join(cache, accepted_table(proposal, path, part.tables))
        elif part.guess_tables:
            session.join(cache, session.pages)
        heard = session.draft_heard if session.draft_available else None
        cause, waiting_since, outcome_at = session.cause, session.waiting_since, session.outcome_at
        decided = part, verdict, num_accepted, num_emitted, finish_reason, cause, heard, waiting_since, outcome_at
        session.waiting_since = None
        session.verified_draft = len(proposal.node_ids) > 0 and proposal.producer is Producer.DRAFT
        if heads is not None:
            heads.observe(session, proposal, verdict.token_ids[: verdict.num_accepted], row_s * part.num_drafted)
        session.commit_outcome(token_ids, decided_at)
        session.commit_rows(cache, part.stop + num_accepted)  # to its end: others may share the prefix
        if finish_reason is not None:
            self.close_session(session)
        elif heads is not None:
            heads.advance(session)
        return decided

    def _learn_guesses(self, done: Finished, logits: Tensor) -> None:
        """Sends heads the likeliest tokens after their guesses, for sessions that continue."""
        likeliest, start = logits.argmax(-1).tolist(), 0
        for part in done.open:
            stop = start + len(part.guess_tables)
            if stop > start and self.sessions.get(part.session.session_id) is part.session:
                self.heads.learn(part.session, likeliest[start:stop])
            start = stop

    def _send_hints(self, parts: Sequence[Scheduled], states: Tensor) -> None:
        """Sends hints about likely tokens to drafts, while the rest of the forward of ``parts`` still runs."""
        assert self.hints is not None
        self.send(self.hints.of(parts, states))
        self.stats.hints_sent, self.stats.hints_bytes = self.hints.num_sent, self.hints.num_bytes

    def _send_states(self) -> bool:
        """Sends states that drafts lack, within the limit of a step; False: they lack none."""
        if self.link is None:
            return False
        messages = self.link.take(self.sessions.values())
        self.stats.states_sent, self.stats.states_bytes = self.link.num_sent, self.link.num_bytes
        self.send(messages)
        return bool(messages)

    def _use_states(self, done: Finished, states: Tensor | None) -> None:
        """Feeds the step's states of sessions that go on to the heads, and keeps them for drafts."""
        computed, row, logits_row = [], 0, 0
        for part in done.open:
            session, verifies = part.session, part.verifies
            if self.sessions.get(session.session_id) is session:
                num_accepted = session.num_computed - part.stop
                computed.append(Computed(session, part.start, row, logits_row if verifies else -1, num_accepted))
            row += part.num_tokens
            logits_row += part.num_drafted + 1 if verifies else 0
        if states is not None and any(part.tables for part in done.open):
            states = self.accepted_first(done, states)
        if self.link is not None and states is not None:
            self.link.keep(computed, states)
        if self.heads:
            self.heads.feed(computed, states)
            self.heads.book()

    def accepted_first(self, done: Finished, states: Tensor) -> Tensor:
        """Reorders a step's states so that accepted tokens directly follow their context, as in a chain."""
        features = self.runner.features
        assert features is not None
        index: list[int] = []
        for part in done.open:
            num_context = part.stop - part.start if features.every_position else int(part.verifies)
            num_accepted = max(0, part.session.num_computed - part.stop)
            path = part.proposal.along(part.session.tokens[part.stop : part.stop + num_accepted])
            rest = sorted({*range(part.num_drafted)} - {*path})
            base = len(index) + num_context
            index += [*range(len(index), base), *(base + i for i in path), *(base + i for i in rest)]
        return states[upload(index, states.device)]

    def adapt_drafting(self, done: Finished) -> None:
        """Pauses drafting where it has no gain, and resumes it where it may."""
        times, running = done.times, done.running
        if self.allocation.adaptive:
            assert done.step is not None
            self._meter.compare(done.step, times, len(done.open), done.num_emitted, running)
            sessions = self.sessions
            for decided in done.rounds:
                session = decided[0].session
                if session.draft_available and sessions.get(session.session_id) is session:
                    self.gate.review(session, len(running))
            self.gate.tick(times.decided_at, len(running), self.sessions.values())
            self._send_wishes()
        self._meter.book(times)

    def _send_wishes(self) -> None:
        """Tells routers which sessions should have a draft from now on, and which should not."""
        gate = self.gate
        if gate.messages:
            self.stats.drafts_paused, self.stats.drafts_resumed = gate.num_pauses, gate.num_resumptions
            self.send(gate.messages)
            gate.messages = []

    def send_held(self) -> None:
        """Sends the outcomes that were held back."""
        if held := self.held:
            self.held = []
            self.emit(held)

    def send(self, messages: Sequence[FromTarget]) -> None:
        """Sends the messages that are held back, then these."""
        if messages:
            self.settle_step()
            self.held += messages
            self.send_held()


def _cause(part: Scheduled, *, drafted: bool) -> Cause:
    """The reason for the proposal that a part has, or for having none. ``drafted``: the target has drafts at all."""
    session = part.session
    if session.mode is Mode.PLAIN or session.paused or session.max_draft() == 0:
        return Cause.DISABLED
    if session.mode is Mode.SEQUENTIAL and session.draft_available:
        return Cause.SEQUENTIAL
    if not session.draft_available and not part.proposal.draft_ids:
        return Cause.DRAFT_DOWN if drafted else Cause.DISABLED
    return session.cause


def outcome_of(decided: DecidedRound) -> Outcome:
    """The message about a round."""
    part, verdict, num_accepted, num_emitted, finish_reason, cause, _, _, _ = decided
    session, token_ids, logprobs, top_logprobs = part.session, verdict.token_ids, verdict.logprobs, verdict.top_logprobs
    if finish_reason is not None:
        token_ids, logprobs = token_ids[:num_emitted], logprobs[:num_emitted]
        top_logprobs = top_logprobs[:num_emitted]
    return Outcome(
        session.session_id,
        session.epoch,
        part.stop,
        token_ids,
        logprobs,
        round_of(part, cause, num_accepted),
        finish_reason,
        session.cached_tokens if cause is Cause.START else 0,
        top_logprobs,
    )


def round_of(part: Scheduled, cause: Cause, num_accepted: int) -> Round:
    """The effect of a step on one session, which has emitted ``num_accepted`` tokens of its proposal."""
    num_drafted, producer = part.num_drafted, part.proposal.producer
    if producer is Producer.LOOKUP:
        return _made(num_drafted, num_accepted, cause, lookup_drafted=num_drafted, lookup_accepted=num_accepted)
    if producer is Producer.HEAD:
        return _made(num_drafted, num_accepted, cause, head_drafted=num_drafted, head_accepted=num_accepted)
    return _made(num_drafted, num_accepted, cause)


_made = functools.lru_cache(1024)(Round)  # there are few different ones, and one of each session in a step


def _with_sampled(
    verifying: Sequence[Scheduled], sampled: Sequence[Sampled], others: Sequence[Verdict | PacelineError]
) -> list[Verdict | PacelineError]:
    """Verdicts of the parts that verify, in order. ``others``: of those whose tokens no ranks sample."""
    if not sampled:
        return [*others]
    token_ids: list[int] = []
    logprobs: list[float] = []
    for some_ids, some_logprobs in [each.wait() for each in sampled]:
        token_ids += some_ids
        logprobs += some_logprobs
    left, start = iter(others), 0
    verdicts: list[Verdict | PacelineError] = []
    for part in verifying:
        if not part.session.picks:
            verdicts.append(next(left))
            continue
        end = start + part.num_drafted + 1  # the part's rows are [start, end) of the rows that ranks sample
        try:
            verdicts.append(verify_picked(part.proposal, token_ids[start:end], logprobs[start:end]))
        except PacelineError as error:
            verdicts.append(error)
        start = end
    return verdicts


def _decide(logits: Tensor, parts: Sequence[Scheduled]) -> list[Verdict | PacelineError]:
    """Verdicts of a batch; where that fails, of each session alone, so that none can harm the others. Of its halves
    where the device has no memory for all.

    ``logits``: [rows, vocab], where part i owns ``len(parts[i].proposal) + 1`` consecutive rows. Not modified.
    """
    if not parts:
        return []
    rows: list[Row] = []
    for part in parts:
        rows += part.rows()
    try:
        return [*decide(logits, rows, [part.proposal for part in parts], [part.session.acceptance for part in parts])]
    except PacelineError as error:
        failed, size = error, 1
    except (RuntimeError, MemoryError) as error:
        failed, size = without_memory(error), -(-len(parts) // 2)
    if len(parts) == 1:
        return [failed]
    verdicts: list[Verdict | PacelineError] = []
    start = 0
    for first in range(0, len(parts), size):
        some = parts[first : first + size]
        end = start + sum(part.num_drafted + 1 for part in some)
        verdicts += _decide(logits[start:end], some)
        start = end
    return verdicts
