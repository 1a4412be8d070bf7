"""The draft engine: grows the speculation trees of all its sessions, one batched forward at a time.

    receive: open, commit, close          step: a prefill chunk, or one tree step of all sessions
      commit: walk ─▶ advance the drafter     choose leaves ─▶ expand ─▶ rank ─▶ publish

One thread calls ``receive`` and ``step``, and ``emit`` is called from there. Nothing here waits or sleeps. A hit needs
no answer; a miss is answered by a node for the missing token and everything below it. The engine's own trees are never
lost.

A peer's message harms at most the session that it names. A message that is late, repeated or for an unknown session is
counted and dropped. One that cannot be followed ends its session with SessionFailed, so that it can be opened again
under a newer epoch. A session id is never used for another session. The memory of ended sessions is bounded.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from paceline.checkpoint.grammar import Grammars
from paceline.core.processors import Grammar, SamplerState
from paceline.draft import hints
from paceline.draft.grower import DraftGrower
from paceline.draft.growth import Growth, check_integrity
from paceline.draft.overlap import Overlap
from paceline.draft.session import DraftSession
from paceline.draft.stats import DraftStats
from paceline.drafters.calibration import Calibration
from paceline.drafters.protocol import Drafter
from paceline.drafters.ranking import Rule
from paceline.errors import EngineError, InvalidRequestError, PacelineError, ResourceExhaustedError
from paceline.messages import CloseSession, Commit, Hint, Nodes, OpenSession, SessionFailed, States, ToDraft
from paceline.model.runner import ModelRunner
from paceline.types import Acceptance, Execution, Mode, SamplingParams, SpeculationParams

log = logging.getLogger(__name__)

Emit = Callable[[Sequence[Nodes | SessionFailed]], None]

LATE_S = 0.25
"""Longest time that a new anchor waits for the states of its context: they follow the commit, unless they are lost."""
_POSITION = attrgetter("position")
NUM_REMEMBERED = 4096
"""Ended sessions whose late messages are recognized as such."""


class DraftEngine:
    """Serves the draft side of many sessions with one drafter.

    Args:
        vocab_size: token ids of both models are below it.
        tree_budget: nodes per session beyond the context.
        fan_out: children published below an expanded node.
        min_path_prob: of a node that best-first growth expands.
        max_sessions: open sessions; more are refused.
        max_context_len: tokens; a session whose context is longer, or grows longer, is ended.
        device: of the candidates and sampler states.
        grammars: compiles structured outputs; None: drafts are not bound by them, which costs acceptance only.
        description: of the drafter, for the status.
        describe: returns what its replica's status says of it.
        ahead: of a drafter that reads hidden states: draft while a proposal is being verified; None: where it gains.
        runner: of the drafter's model, if it has one, for the status.
        clock: seconds.
    """

    def __init__(
        self,
        drafter: Drafter,
        emit: Emit,
        *,
        vocab_size: int,
        tree_budget: int = 64,
        fan_out: int = 3,
        min_path_prob: float = 0.02,
        max_sessions: int = 4096,
        max_context_len: int = 1 << 20,
        device: str = "cpu",
        grammars: Grammars | None = None,
        description: str = "",
        describe: Callable[[DraftEngine], Mapping[str, Any]] = lambda engine: {},
        ahead: bool | None = None,
        runner: ModelRunner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._grammars = grammars
        self.description, self._describe = description, describe
        self._runner = runner
        self.stats = DraftStats()
        self.drafter = drafter
        self._grower = DraftGrower(drafter, self.stats, tree_budget, self._fail_all)
        self.overlap = None if self._grower.reads is None else Overlap(ahead)
        """Measures if drafting ahead has gain; None: the drafter reads no hidden states."""
        self.emit = emit
        self._vocab_size = vocab_size
        self._tree_budget = tree_budget
        self._fan_out = fan_out
        self._min_path_prob = min_path_prob
        self._max_sessions = max_sessions
        self._max_context_len = max_context_len
        self._device = device
        self.clock = clock
        self._step_s = 0.0
        self.sessions = self._grower.sessions
        self._calibrations = {rule: Calibration(16) for rule in Rule}
        self._bonus = Calibration(16)
        self._failures: list[SessionFailed] = []
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Epochs in which the most recently ended sessions ended here."""
        self._denied: OrderedDict[str, int] = OrderedDict()
        """Epochs in which unknown sessions were reported as not open: once each."""
        self._prefill_next = True

    @property
    def num_sessions(self) -> int:
        """Number of open sessions."""
        return len(self.sessions)

    @property
    def execution(self) -> Execution:
        """Execution of the drafter's model (``types.Execution``). Any thread may ask."""
        return "" if self._runner is None else self._runner.execution

    @property
    def num_unrecorded(self) -> int:
        """Steps of the drafter's model that no CUDA graph covered although there are some. Any thread may ask."""
        return 0 if self._runner is None else self._runner.backend.num_unrecorded

    def facts(self) -> Mapping[str, Any]:
        """Returns what its replica's status says of it. Any thread may ask."""
        return self._describe(self)

    def receive(self, messages: Iterable[ToDraft]) -> None:
        """Applies messages in order. Never raises: a message that cannot be followed ends its own session."""
        for message in messages:
            session = self.sessions.get(message.session_id)
            if isinstance(message, OpenSession):
                self._open(session, message)
            elif session is not None and message.epoch < session.epoch:
                self.stats.stale_messages += 1
            elif isinstance(message, CloseSession):
                if session is None:
                    self.stats.unknown_messages += 1
                    self._has_ended(message.session_id, message.epoch)
                else:
                    self._close(session, message.epoch)
            elif session is None or message.epoch > session.epoch:
                self._unknown(message)
            else:
                try:
                    if isinstance(message, Commit):
                        self.commit(session, message)
                    elif isinstance(message, Hint):
                        self.take_hint(session, message)
                    else:
                        self._feed(session, message)
                except Exception as error:
                    self._fail(session, error)

    def step(self) -> bool:
        """Does a prefill chunk or one tree step, in turn while there is both. False: nothing to do, nothing sent."""
        grower = self._grower
        first, second = (grower.prefill, self._grow) if self._prefill_next else (self._grow, grower.prefill)
        self._prefill_next = not self._prefill_next
        self._step_s = 0.0
        if self._grammars is not None:
            self._grammars.begin_step()
        worked = first() or second()
        self.stats.prefill_chunks, self.stats.forwards = grower.num_chunks, grower.num_calls
        return self._flush() or worked

    def wait_s(self) -> float | None:
        """Seconds that the engine may sleep after ``step`` returned False; None: until a message comes."""
        if self.overlap is None:
            return None
        now = self.clock()
        return min((s.states_until - now for s in self.sessions.values() if self._grower.waits(s, now)), default=None)

    def close(self) -> None:
        """Releases resources that the drafter holds outside this process. Idempotent."""
        self.drafter.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def check_integrity(self) -> None:
        """Asserts the invariants of every session and of the drafter; O(nodes)."""
        for session in self.sessions.values():
            session.tree.check_integrity()
            check_integrity(session.frontier, session.tree)
            assert not session.tree.lost
            assert session.tree.context_len == session.sampler.num_tokens
            assert session.tree.next_id > max(node.node_id for node in session.tree.nodes())
            anchor = session.tree.anchor
            assert all(n.expanded or n is anchor or not n.children for n in session.tree.nodes())
        self.drafter.check_integrity()

    def _open(self, old: DraftSession | None, message: OpenSession) -> None:
        ended = self._ended.get(message.session_id, -1) if old is None else old.epoch
        if message.epoch <= ended:
            self.stats.stale_messages += 1
            return
        if old is not None:
            self._close(old, old.epoch)
        try:
            self._check_open(message)
            num_prompt_tokens = message.num_prompt_tokens
            sampling, grammar = self._constrained(message)
            growth = self._growth(message.speculation)
            coupled = sampling.temperature == 0 or message.speculation.acceptance is Acceptance.COUPLED
            guessed = 0 if coupled or growth.fan_out == 1 else growth.fan_out
            sampler = SamplerState(
                sampling,
                message.seed,
                message.token_ids[:num_prompt_tokens],
                message.token_ids[num_prompt_tokens:],
                eos_token_ids=message.eos_token_ids,
                vocab_size=self._vocab_size,
                device=self._device,
                grammar=grammar,
                num_ranked=growth.fan_out if coupled else 0,
                num_guessed=guessed,
            )
            session = DraftSession(message, sampler, growth, self._calibrations, self._bonus)
            session.ahead = not growth.in_turn
            self.drafter.open(message.session_id, message.token_ids, sampler, message.cache_salt)
        except Exception as error:
            self.drafter.close(message.session_id)
            self._has_ended(message.session_id, message.epoch)
            self._report(message.session_id, message.epoch, error)
        else:
            self.sessions[message.session_id] = session

    def _constrained(self, message: OpenSession) -> tuple[SamplingParams, Grammar | None]:
        """The sampling parameters that are followed here, and the grammar of their structured output."""
        sampling, form = message.sampling, message.sampling.structured_output
        if form is None or self._grammars is None:
            return sampling.model_copy(update={"structured_output": None}), None
        output = message.token_ids[message.num_prompt_tokens :]
        return sampling, self._grammars.paced(form, output, salt=message.cache_salt, lenient=True)

    def _check_open(self, message: OpenSession) -> None:
        """Raises if the session cannot be served; its sampler checks the sampling options."""
        if len(self.sessions) >= self._max_sessions:
            raise ResourceExhaustedError(f"{len(self.sessions)} sessions are open: no more are allowed")
        self._check_length(len(message.token_ids))
        if not 0 < message.num_prompt_tokens <= len(message.token_ids):
            raise InvalidRequestError(
                f"num_prompt_tokens is {message.num_prompt_tokens}: "
                f"1 to the context's length ({len(message.token_ids)}) are allowed"
            )
        self._check_tokens("the context", message.token_ids)

    def _check_length(self, context_len: int) -> None:
        if context_len > self._max_context_len:
            raise ResourceExhaustedError(
                f"the context has {context_len} tokens: the draft holds at most {self._max_context_len}"
            )

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        if not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            return
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(f"{what} holds token id {token_id}: 0 to {self._vocab_size - 1} are allowed")

    def _unknown(self, message: Commit | States | Hint) -> None:
        """Tells the sender of a commit, of states or of a hint once that the session is not open here."""
        self.stats.unknown_messages += 1
        session_id, epoch = message.session_id, message.epoch
        if epoch > self._ended.get(session_id, -1) and epoch != self._denied.get(session_id):
            _remember(self._denied, session_id, epoch)
            self._report(session_id, epoch, EngineError("it is not open on this draft"))

    def _growth(self, params: SpeculationParams) -> Growth:
        k = 0 if params.mode is Mode.PLAIN else params.max_draft_tokens
        if params.mode is not Mode.OVERLAPPED or k == 0:
            return Growth.sequential(k)
        in_turn = self.overlap is not None and not self.overlap.begin()
        return Growth(k, self._fan_out, self._min_path_prob, in_turn)

    def _close(self, session: DraftSession, epoch: int) -> None:
        del self.sessions[session.session_id]
        self._has_ended(session.session_id, epoch)
        self.drafter.close(session.session_id)

    def _has_ended(self, session_id: str, epoch: int) -> None:
        _remember(self._ended, session_id, max(epoch, self._ended.get(session_id, -1)))

    def _fail(self, session: DraftSession, error: Exception) -> None:
        self._close(session, session.epoch)
        self._report(session.session_id, session.epoch, error)

    def _fail_all(self, error: Exception, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._fail(self.sessions[session_id], error)

    def _report(self, session_id: str, epoch: int, error: Exception) -> None:
        unexpected = not isinstance(error, PacelineError)
        log.warning("session %s failed on the draft: %s", session_id, error, exc_info=error if unexpected else None)
        self.stats.failed_sessions += 1
        self.stats.invalid_messages += isinstance(error, InvalidRequestError)
        self.stats.refused_sessions += isinstance(error, ResourceExhaustedError)
        self._failures.append(SessionFailed(session_id, epoch, f"{type(error).__name__}: {error}"))

    def _feed(self, session: DraftSession, message: States) -> None:
        if (drafter := self._grower.reads) is None:
            raise InvalidRequestError("hidden states came to a drafter that reads none")
        states = torch.frombuffer(bytearray(message.packed), dtype=torch.bfloat16).view(-1, message.width)
        missing = drafter.feed(session.session_id, message.position, states)
        if missing < 0:
            self.stats.states_dropped += 1
            return
        self.stats.states += len(states)
        self.stats.states_bytes += len(message.packed)
        self.stats.states_missing += missing

    def take_hint(self, session: DraftSession, message: Hint) -> None:
        """Ranks the outcomes of the step in progress again."""
        if message.context_len != session.tree.context_len:
            self.stats.hints_late += 1
            return
        try:
            session.hinted, session.hint_weight = hints.read_hint(session, message), message.weight
        except InvalidRequestError as error:
            log.warning("session %s: a hint was dropped: %s", session.session_id, error)
            self.stats.hints_invalid += 1
            return
        self.stats.hints += 1
        self.stats.hints_bytes += len(message.packed)
        for node_id in session.hinted:
            if (node := session.tree.get(node_id)) is not None and node.expanded:
                self._grower.follow_hint(session, node)

    def _observe_round(self, session: DraftSession, node_ids: Sequence[int], now: float) -> None:
        """Records the outcome of the proposal in flight, for a drafter that reads states."""
        if self.overlap is None or session.announced_at is None or not session.in_flight:
            return
        self.overlap.observe(
            ahead=session.ahead,
            num_proposed=session.num_proposed,
            num_accepted=sum(node in session.in_flight for node in node_ids),
            verify_s=now - session.announced_at,
        )

    def commit(self, session: DraftSession, message: Commit) -> None:
        """Moves the anchor along the committed tokens; a token without a node gets one, of probability 1."""
        tree, token_ids, now = session.tree, message.token_ids, self.clock()
        context_len = tree.context_len
        if message.context_len < context_len:
            self.stats.stale_messages += 1
            return
        if message.context_len > context_len:
            self.stats.lost_commits += 1
            raise EngineError(f"commits were lost: this one is at {message.context_len}, not {context_len}")
        if token_ids:
            self._check_length(context_len + len(token_ids))
            self._check_tokens("a commit", token_ids)
            session.hinted = {}
            session.sampler.append(token_ids)
            node_ids, num_hits, kept = session.follow(token_ids)
            num_missed = len(token_ids) - num_hits
            self.stats.nodes_used += num_hits
            self.stats.nodes_missed += num_missed
            self._observe_round(session, node_ids, now)
            self.drafter.advance(session.session_id, token_ids, node_ids, kept)
        in_flight = [node for i in message.in_flight if (node := tree.get(i))]
        session.in_flight = frozenset([node.node_id for node in in_flight])
        if token_ids:
            if session.frontier.reach is not None:
                session.frontier.reach.observe(session.num_proposed)
            session.num_proposed = 0
        session.announced_at = now if in_flight else None
        deepest = max(in_flight, key=_POSITION, default=None)
        if deepest is not None:
            session.num_proposed = max(session.num_proposed, deepest.position - tree.anchor.position)
        if session.rule is Rule.REJECTION:
            session.aim(deepest)
        session.frontier.commit(session.in_flight)
        if token_ids:
            session.begin_round(now, node_ids, hit=not num_missed)
            session.states_until = now + LATE_S
            if num_missed:
                session.frontier.push_anchor()
        session.idle, session.changed = False, True

    def _grow(self) -> bool:
        """Does one tree step of all sessions: choose -> expand -> rank -> publish. False: no node is to be expanded."""
        started = self.clock()
        chosen = self._grower.choose(started)
        if not chosen:
            return False
        num_leaves, is_path = self.stats.leaves, self._grower.grow(chosen)
        self.stats.tree_steps += 1
        self._step_s = self.clock() - started
        if is_path:
            self.stats.paths += 1
            self.stats.path_tokens += self.stats.leaves - num_leaves
            self.stats.path_s += self._step_s
        if self.overlap is not None:
            self.overlap.depth_s.add(self._step_s)
        self.stats.step_s += self._step_s
        return True

    def _flush(self) -> bool:
        """Sends queued nodes and failures, and announces once per commit that a session is idle."""
        messages: list[Nodes | SessionFailed] = list(self._failures)
        self._failures.clear()
        now = self.clock()
        for session in self.sessions.values():
            if not session.changed:
                continue
            idle = session.ready and session.next_leaf(self._tree_budget) is None
            if (idle and not session.idle) or (session.outbox and session.may_send(now)):
                nodes = Nodes(
                    session.session_id,
                    session.epoch,
                    session.tree.context_len,
                    session.take_outbox(),
                    idle,
                    self._step_s,
                )
                messages.append(nodes)
                session.idle = idle
            # What is held back is sent by a later step; a session may be idle once it is ready.
            session.changed = bool(session.outbox) or not session.ready
        if messages:
            self.stats.messages += len(messages)
            self.emit(messages)
        return bool(messages)


def _remember(epochs: OrderedDict[str, int], session_id: str, epoch: int) -> None:
    """Records the epoch of a session and forgets the sessions recorded longest ago."""
    epochs[session_id] = epoch
    epochs.move_to_end(session_id)
    while len(epochs) > NUM_REMEMBERED:
        epochs.popitem(last=False)
