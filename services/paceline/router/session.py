"""The relay of one session: a state machine that consumes engine events and produces messages and text.

It does no input or output and reads no clock but the one it is given, so the one-process pipeline and the
distributed router use it unchanged. It refuses to know where engines live.

Two phases, so that text work never delays an engine: ``on_*`` return the messages that are urgent;
``digest`` turns what has arrived into text, stop strings and the result.

Epochs: one number per session, which grows whenever either engine is re-opened. The target's epoch is the one
of its last open, the draft's is the same or newer; re-opening the target re-opens the draft too, because the
target's tree died with it. An engine's message of another epoch than its own last open is stale: dropped and
counted.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import InvalidRequestError
from paceline.tokenization import Decode, Detokenizer
from paceline.types import (
    CloseSession,
    Commit,
    DraftState,
    FinishReason,
    InFlight,
    Mode,
    Nodes,
    OpenSession,
    Outcome,
    Round,
    SamplingParams,
    SessionFailed,
    SpeculationParams,
    SpeculationStats,
)

ToTarget = OpenSession | CloseSession | DraftState | Nodes
ToDraft = OpenSession | CloseSession | Commit


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round adds for the client."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    drafted: tuple[bool, ...]
    """Of each token: whether it was an accepted draft token."""
    segments: tuple[tuple[str, bool], ...]
    """Decided text with the flag of the token that decided it; may lag behind the tokens."""
    round: Round | None
    """None: text that was withheld and is released by the end of the session."""

    @property
    def text(self) -> str:
        """All segments in order."""
        return "".join(text for text, _ in self.segments)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a session."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one session, by the session's clock."""

    prefill_s: float
    """From open to the first token."""
    decode_s: float
    """From the first to the last outcome."""
    tokens_per_s: float
    """Tokens after the first outcome per second of decode_s; 0.0 if there were none."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished session."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    timing: Timing
    seed: int


@dataclass(slots=True)
class Actions:
    """What the owner of a session must do now, in this order."""

    to_target: list[ToTarget] = field(default_factory=list)
    to_draft: list[ToDraft] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    result: Result | None = None
    target_lost: str | None = None
    """The target cannot go on with the session, and why: call ``reopen_target`` or give up."""


class Session:
    """One request from admission to finish. Not thread-safe: the owner serialises the calls."""

    def __init__(
        self,
        session_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationParams,
        *,
        decode: Decode,
        stop: Sequence[str] = (),
        eos_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt holds no token: at least one is needed")
        if not all(stop):
            raise InvalidRequestError("a stop string is empty: each needs at least one character")
        self.session_id = session_id
        self.seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self.sampling = sampling.model_copy(update={"seed": self.seed})
        self.speculation = speculation
        self.stats = SpeculationStats()
        self.num_stale = 0
        """Messages dropped because their epoch was not the engine's, or because the session had ended."""
        self.draft_available = False
        self.result: Result | None = None

        self._prompt = tuple(prompt_token_ids)
        self._history = list(prompt_token_ids)  # all that the target has decided
        self._eos_token_ids = tuple(eos_token_ids)
        self._epoch = self._target_epoch = self._draft_epoch = 0
        self._target_done = False  # the target has ended the session, or was told to

        self._undigested: deque[Outcome] = deque()
        self._detokenizer = Detokenizer(decode, self._prompt)
        self._stops = tuple(stop)
        self._withheld = ""  # decided text that may be the beginning of a stop string
        self._emitted: list[int] = []
        self._logprobs: list[float] = []
        self._text: list[str] = []
        self._cached_tokens = 0

        self._clock = clock
        self._opened_s = self._first_s = self._last_s = 0.0
        self._num_first = 0  # tokens of the first outcome

    # -- the relay: urgent messages ------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once there is a result."""
        return self.result is not None

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return self._epoch

    def open(self, draft_available: bool = True) -> Actions:
        """Starts the session on the target, and on the draft unless it is plain or has none."""
        self._opened_s = self._clock()
        actions = Actions(to_target=[self._open_message()])
        if self.speculation.mode is not Mode.PLAIN:
            self.draft_available = draft_available
            if draft_available:
                actions.to_draft.append(self._open_message())
            else:
                actions.to_target.append(DraftState(self.session_id, self._target_epoch, available=False))
        return actions

    def on_target(self, event: Outcome | InFlight | SessionFailed) -> Actions:
        """An event of the target: outcomes are committed to the draft at once."""
        actions = Actions()
        if event.epoch != self._target_epoch or self._target_done:
            self.num_stale += 1
        elif isinstance(event, Outcome):
            self._history.extend(event.token_ids)
            self._undigested.append(event)
            self._target_done = event.finish_reason is not None
            if self._target_done:
                self._close_draft(actions)
            elif self.draft_available:
                actions.to_draft.append(Commit(self.session_id, self._draft_epoch, event.token_ids))
        elif isinstance(event, InFlight):
            if self.draft_available:
                actions.to_draft.append(Commit(self.session_id, self._draft_epoch, (), event.node_ids))
        else:
            actions.target_lost = event.message
        return actions

    def on_draft(self, event: Nodes | SessionFailed) -> Actions:
        """An event of the draft: nodes go to the target as they are."""
        if event.epoch != self._draft_epoch or self._target_done or not self.draft_available:
            self.num_stale += 1
            return Actions()
        if isinstance(event, SessionFailed):
            return self.on_draft_down()
        return Actions(to_target=[event])

    def on_draft_down(self) -> Actions:
        """The draft is lost: the session goes on by plain decoding at once."""
        actions = Actions()
        if self.draft_available and not self._target_done:
            actions.to_target.append(DraftState(self.session_id, self._target_epoch, available=False))
        self.draft_available = False
        return actions

    def on_draft_up(self) -> Actions:
        """A draft is there again: the session is re-opened on it from the token history."""
        actions = Actions()
        if self._target_done or self.draft_available or self.speculation.mode is Mode.PLAIN:
            return actions
        self._epoch += 1
        self._draft_epoch = self._epoch
        self.draft_available = True
        actions.to_draft.append(self._open_message())
        actions.to_target.append(
            DraftState(self.session_id, self._target_epoch, True, self._draft_epoch, len(self._history))
        )
        return actions

    def reopen_target(self) -> Actions:
        """Continues on another (or restarted) target, from the token history, under a new epoch.

        Outcomes that the old target still sends are stale from here on, so nothing is lost or emitted twice.
        """
        actions = Actions()
        if self._target_done:
            return actions
        had_draft = self.draft_available
        if had_draft:
            actions.to_draft.append(CloseSession(self.session_id, self._draft_epoch))
        self._epoch += 1
        self._target_epoch = self._draft_epoch = self._epoch
        actions.to_target.append(self._open_message())
        if had_draft:
            actions.to_draft.append(self._open_message())
        elif self.speculation.mode is not Mode.PLAIN:
            actions.to_target.append(DraftState(self.session_id, self._target_epoch, available=False))
        return actions

    def cancel(self) -> Actions:
        """Ends the session now with what has arrived; frees it on both engines."""
        actions = self.digest()
        if not self.finished:
            self._end(actions, FinishReason.ABORT, actions.chunks)
        return actions

    # -- text and result -----------------------------------------------------------------------------------

    def digest(self) -> Actions:
        """Turns the outcomes that have arrived into chunks, and the last one into the result."""
        actions = Actions()
        while self._undigested and not self.finished:
            self._digest(self._undigested.popleft(), actions)
        return actions

    def _digest(self, outcome: Outcome, actions: Actions) -> None:
        self._last_s = self._clock()
        if self.stats.rounds == 0:
            self._first_s, self._num_first = self._last_s, len(outcome.token_ids)
            self._cached_tokens = outcome.cached_tokens
        self.stats.add(outcome.round)
        segments: list[tuple[str, bool]] = []
        num_tokens, stopped = 0, False
        for token_id in outcome.token_ids:
            drafted = num_tokens < outcome.round.num_accepted
            num_tokens += 1
            text, stopped = self._release(self._detokenizer.add(token_id))
            if text:
                segments.append((text, drafted))
            if stopped:
                break
        finish_reason = FinishReason.STOP if stopped else outcome.finish_reason
        token_ids, logprobs = outcome.token_ids[:num_tokens], outcome.logprobs[:num_tokens]
        drafted_flags = tuple(i < outcome.round.num_accepted for i in range(num_tokens))
        self._emitted += token_ids
        self._logprobs += logprobs
        tail = ""
        if finish_reason is not None and not stopped:
            tail, stopped = self._release(self._detokenizer.flush())
            if stopped:
                finish_reason = FinishReason.STOP
            else:
                tail += self._withheld
            if tail:
                segments.append((tail, bool(drafted_flags and drafted_flags[-1])))
        self._withheld = "" if finish_reason is not None else self._withheld
        chunk = Chunk(token_ids, logprobs, drafted_flags, tuple(segments), outcome.round)
        self._text.append(chunk.text)
        actions.chunks.append(chunk)
        if finish_reason is not None:
            self._end(actions, finish_reason, [])

    def _release(self, text: str) -> tuple[str, bool]:
        """Adds decided text; returns what no stop string can take back, and whether one is complete."""
        if not self._stops:
            return text, False
        text = self._withheld + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._withheld = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _end(self, actions: Actions, finish_reason: FinishReason, flush_to: list[Chunk]) -> None:
        if finish_reason is FinishReason.ABORT and self._withheld:
            flush_to.append(Chunk((), (), (), ((self._withheld, False),), None))
            self._text.append(self._withheld)
            self._withheld = ""
        if not self._target_done:
            actions.to_target.append(CloseSession(self.session_id, self._target_epoch))
            self._target_done = True
        self._close_draft(actions)
        self._undigested.clear()
        decode_s = self._last_s - self._first_s
        num_later = len(self._emitted) - self._num_first
        rate = num_later / decode_s if decode_s > 0 and num_later > 0 else 0.0
        prefill_s = self._first_s - self._opened_s if self.stats.rounds else self._clock() - self._opened_s
        actions.result = self.result = Result(
            text="".join(self._text),
            token_ids=tuple(self._emitted),
            logprobs=tuple(self._logprobs),
            finish_reason=finish_reason,
            usage=Usage(len(self._prompt), len(self._emitted), self._cached_tokens),
            speculation=self.stats,
            timing=Timing(prefill_s, decode_s, rate),
            seed=self.seed,
        )

    def _close_draft(self, actions: Actions) -> None:
        if self.draft_available:
            actions.to_draft.append(CloseSession(self.session_id, self._draft_epoch))
            self.draft_available = False

    def _open_message(self) -> OpenSession:
        return OpenSession(
            session_id=self.session_id,
            epoch=self._epoch,
            token_ids=tuple(self._history),
            num_prompt_tokens=len(self._prompt),
            seed=self.seed,
            sampling=self.sampling,
            speculation=self.speculation,
            eos_token_ids=self._eos_token_ids,
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
