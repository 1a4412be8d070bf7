"""One session: a state machine that consumes engine events and produces messages and text.

It does no input or output and reads no clock but the one it is given; a ``Relay`` holds many of them. It does not know
where engines are.

Two phases, so that text work never delays an engine: ``on_*`` return the urgent messages; ``digest`` turns outcomes
into text, stop strings and the result.

Epochs: one number per session, which grows whenever either engine is re-opened. The target's epoch is the one
of its last open, the draft's is the same or newer; re-opening the target re-opens the draft too, because the
target's tree died with it. An engine's message of another epoch than its own last open is stale: dropped and
counted.

Within an epoch every outcome states the context length at which it begins, so that each token is taken exactly once.
An outcome that begins too early is a repetition. One that begins too late shows that another is missing; then the
target is re-opened from the history. Nothing that a draft sends or fails to send can change a token.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.checkpoint.token_text import Decode, Detokenizer
from paceline.checkpoint.tokenizer import Detokenizer as text_of
from paceline.errors import InvalidRequestError
from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    FromDraft,
    FromTarget,
    Hint,
    InFlight,
    OpenSession,
    Outcome,
    PromptScores,
    SessionFailed,
    SpeculationWanted,
    States,
    ToDraft,
    ToTarget,
)
from paceline.router.trace import Tracer
from paceline.types import (
    Cause,
    Chunk,
    FinishReason,
    Mode,
    PromptLogprobs,
    Result,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    Timing,
    TokenLogprob,
    TopLogprobs,
    Usage,
    noise_key,
)

MAX_DRAFT_RETRIES = 2
"""Failures of its draft in a row, without an accepted token between them, after which a session re-opens it; after one
more it stays without a draft."""

_DRAFT_CAUSES = (Cause.HIT, Cause.SEQUENTIAL)
"""Causes of rounds whose accepted tokens are certainly the draft's."""


@dataclass(slots=True)
class RelayStats:
    """Counted events of one session's relay: dropped messages, failures, and re-opened replicas."""

    stale: int = 0
    """Messages of an epoch other than the engine's, or of a draft that the session has left."""
    ended: int = 0
    """Messages that came after the session's end."""
    repeated: int = 0
    """Target messages for a context length that the session has passed: repetitions."""
    early: int = 0
    """Target messages for a context length that is yet to come: another message is missing or was overtaken."""
    malformed: int = 0
    """Messages that no engine sends."""
    targets_lost: int = 0
    """Failures of the target, missing outcomes included."""
    target_reopens: int = 0
    """Times that the session was opened on another (or restarted) target."""
    trees_lost: int = 0
    """Times that the target reported nodes missing for good."""
    drafts_lost: int = 0
    """Failures of a draft that served the session, for any reason; lost trees are not counted."""
    draft_reopens: int = 0
    """Times that the session was opened on a draft under a new epoch: after a lost tree, or by its owner."""

    @property
    def dropped(self) -> int:
        """Number of messages that were not used."""
        return self.stale + self.ended + self.repeated + self.early + self.malformed


@dataclass(slots=True)
class Actions:
    """Consequences of one event, or of several of a relay, in the order in which their owner carries them out."""

    to_target: list[ToTarget] = field(default_factory=list)
    to_draft: list[ToDraft] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    result: Result | None = None
    target_failed: str | None = None
    """Reason why the target cannot go on with the session, if so: call ``reopen_target`` or give up."""
    turned_away: bool = False
    """The target serves another suspected session: call ``reopen_target`` with another target, or later."""
    refused: str | None = None
    """Reason why no target can go on with the session, if so: the request is at fault."""
    commits: dict[str, int] = field(default_factory=dict)
    """Index in ``to_draft`` of the last commit of each session. The next announcement is added to that commit."""


class Session:
    """One request from admission to finish. Not thread-safe: the owner serializes the calls."""

    __slots__ = (  # an instance dict of this size is slow to read
        "_cache_salt",
        "_cached_tokens",
        "_clock",
        "_detokenizer",
        "_draft_epoch",
        "_draft_wanted",
        "_eos_token_ids",
        "_epoch",
        "_first_s",
        "_last_s",
        "_logprobs",
        "_matched_stop",
        "_num_decided",
        "_num_first",
        "_num_losses",
        "_num_resumed",
        "_num_scores_wanted",
        "_opened",
        "_opened_s",
        "_queue_s",
        "_relayed",
        "_scores",
        "_stop_prefixes",
        "_stops",
        "_target_done",
        "_target_epoch",
        "_text",
        "_top_logprobs",
        "_tracer",
        "_withheld",
        "draft_available",
        "emitted",
        "history",
        "noise_key",
        "prompt",
        "relay_stats",
        "result",
        "sampling",
        "seed",
        "session_id",
        "speculation",
        "stats",
        "traceparent",
        "undigested",
    )

    def __init__(
        self,
        session_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationParams,
        *,
        decode: Decode,
        detokenizer: Detokenizer | None = None,
        stop: Sequence[str] = (),
        eos_token_ids: Sequence[int] = (),
        generated_token_ids: Sequence[int] = (),
        cache_salt: str = "",
        trace: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Makes a session that is not opened yet.

        A session whose output already ends with ``generated_token_ids`` has its ``result`` at once, and is not opened.

        Args:
            detokenizer: makes the text of the output; None: only ``decode`` can make it.
            generated_token_ids: output of a broken stream of the same request, which this session continues.
            trace: True: chunks hold the times and the tree of their round.

        Raises:
            InvalidRequestError: the prompt is empty, a stop string is empty, or no session can have generated these
                tokens.
        """
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt holds no token: at least one is needed")
        if not all(stop):
            raise InvalidRequestError("a stop string is empty: each needs at least one character")
        sampling.check_seed()
        self.session_id = session_id
        self.seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        self.sampling = sampling.model_copy(update={"seed": self.seed})
        self.noise_key = noise_key(self.seed, sampling.seed_scope, prompt_token_ids)
        """Key of the noise on every engine that serves the session; results name the request's ``seed``."""
        if not sampling.max_tokens:  # no token is requested, so none is drafted
            speculation = speculation.model_copy(update={"mode": Mode.PLAIN})
        self.speculation = speculation
        self.stats = SpeculationStats()
        self.relay_stats = RelayStats()
        self.draft_available = False
        """True while the session is open on a draft."""
        self.result: Result | None = None
        self.traceparent = ""
        """W3C trace context of the request's span, for the engines that serve the session; empty if it has none."""

        self.prompt = tuple(prompt_token_ids)
        self.history = [*prompt_token_ids, *generated_token_ids]  # the prompt and all that the target has decided
        self._eos_token_ids = tuple(eos_token_ids)
        self._cache_salt = cache_salt
        # A resumed session begins at a later epoch: under the rejection rule no draft noise is drawn a second time.
        self._num_resumed = len(generated_token_ids)
        self._epoch = self._target_epoch = self._draft_epoch = self._num_resumed
        self._opened = False
        self._target_done = False  # the target has ended the session, or was told to
        self._draft_wanted = True  # the latest preference of the target's controller
        self._num_losses = 0  # failures of the draft since one of its tokens was accepted
        self._relayed = False  # nodes of the draft's epoch have gone to the target

        # A broken stream that delivered tokens had delivered these before.
        scores = sampling.prompt_logprobs is not None and not generated_token_ids
        self._scores: list[TokenLogprob | None] = [None] if scores else []  # of the prompt's first tokens
        self._num_scores_wanted = len(self.prompt) if scores else 0

        self.undigested: deque[Outcome | PromptLogprobs] = deque()
        self._detokenizer = detokenizer or text_of(decode, self.prompt)
        self._stops = tuple(stop)
        self._stop_prefixes = Prefixes(self._stops)
        self._matched_stop: int | str | None = None
        self._num_decided = 0  # output tokens that have been added to the text
        self._withheld = ""  # decided text that may be the beginning of a stop string
        self.emitted: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._text: list[str] = []
        self._cached_tokens = 0

        self._clock = clock
        self._tracer = Tracer(decode, len(self.prompt), clock) if trace else None
        self._queue_s = self._opened_s = self._first_s = self._last_s = 0.0
        self._num_first = 0  # tokens of the first outcome
        if generated_token_ids:
            self._resume(tuple(generated_token_ids))

    # -- the relay: urgent messages ------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once the session has a result."""
        return self.result is not None

    @property
    def epoch(self) -> int:
        """The session's newest epoch."""
        return self._epoch

    @property
    def context_len(self) -> int:
        """Length of the context: the prompt and all that targets have decided."""
        return len(self.history)

    @property
    def target_epoch(self) -> int:
        """Epoch of the last open on a target. Close the session under it before leaving a target that lives on."""
        return self._target_epoch

    @property
    def draft_epoch(self) -> int:
        """Epoch of the last open on a draft."""
        return self._draft_epoch

    @property
    def speculates(self) -> bool:
        """True if the request asks for speculation; False: the session never needs a draft."""
        return self.speculation.mode is not Mode.PLAIN and self.speculation.max_draft_tokens > 0

    @property
    def wants_draft(self) -> bool:
        """True if ``on_draft_up`` would open the session on a draft now: it has none and can use one.

        False before it is opened, after its end, while the target's controller has paused drafting, and once its
        drafts have failed it more than MAX_DRAFT_RETRIES times in a row.
        """
        return (
            not self.draft_available
            and self.speculates
            and self._opened
            and not self._target_done
            and self._draft_wanted
            and self._num_losses <= MAX_DRAFT_RETRIES
        )

    def open(self, draft_available: bool = True, *, queue_s: float = 0.0) -> Actions:
        """Starts the session on the target, and on the draft unless it is plain or has none.

        ``queue_s`` is the time that the request has waited, in seconds.
        """
        self._opened = True
        self._opened_s, self._queue_s = self._clock(), queue_s
        actions = Actions(to_target=[self.open_message()])
        if self.speculates:
            self.draft_available = draft_available
            if draft_available:
                actions.to_draft.append(self.open_message())
            else:
                self._tell_no_draft(actions)
        return actions

    def on_target(self, event: FromTarget, actions: Actions | None = None) -> Actions:
        """Follows a message of the target: outcomes are committed to the draft at once.

        ``actions``: receives the consequences, and is returned; None: new ones.
        """
        if actions is None:
            actions = Actions()
        if self._target_done:
            self.relay_stats.ended += 1
        elif isinstance(event, (Outcome, InFlight)):
            if event.epoch != self._target_epoch or event.context_len != len(self.history):
                self._on_misplaced(event, actions)
            elif isinstance(event, InFlight):
                self._on_in_flight(event, actions)
            else:
                self._on_outcome(event, actions)
        elif isinstance(event, (States, Hint)):
            self._on_aside(event, actions)
        elif isinstance(event, PromptScores):
            self._on_scores(event, actions)
        elif event.epoch != self._target_epoch:
            self.relay_stats.stale += 1
        elif isinstance(event, SessionFailed) and event.request_at_fault:
            actions.refused = event.message
        elif isinstance(event, SessionFailed) and event.turned_away:
            actions.turned_away = True
        elif isinstance(event, SessionFailed):
            self._lose_target(actions, event.message)
        elif isinstance(event, SpeculationWanted):
            self._draft_wanted = event.wanted
            if not event.wanted:
                self._leave_draft(actions)
        else:
            self.on_tree_lost(actions)
        return actions

    def _on_scores(self, event: PromptScores, actions: Actions) -> None:
        """Records log probabilities of the prompt, of each token once."""
        first, num_taken = event.logprobs.position, len(self._scores)
        if event.epoch != self._target_epoch:
            self.relay_stats.stale += 1
        elif first < 1 or first + len(event.logprobs.tokens) > self._num_scores_wanted:
            self.relay_stats.malformed += 1
        elif first > num_taken:
            self.relay_stats.early += 1
            self._lose_target(actions, f"the log probability of prompt token {num_taken} is missing before {first}")
        elif (logprobs := event.logprobs.after(num_taken)) is None:
            self.relay_stats.repeated += 1
        else:
            self._scores += logprobs.tokens
            self.undigested.append(logprobs)

    def _on_misplaced(self, event: Outcome | InFlight, actions: Actions) -> None:
        """Counts a message of another epoch, or for a context length that was passed or is not reached yet."""
        context_len = len(self.history)
        if event.epoch != self._target_epoch:
            self.relay_stats.stale += 1
        elif event.context_len < context_len:
            self.relay_stats.repeated += 1
        else:
            self.relay_stats.early += 1
            if isinstance(event, Outcome):
                reason = f"the outcome at {context_len} is missing before the one at {event.context_len}"
                self._lose_target(actions, reason)

    def _on_in_flight(self, event: InFlight, actions: Actions) -> None:
        """Tells the draft which nodes are in flight, together with the tokens of the previous commit if there
        is one.
        """
        if self.draft_available:
            epoch, to_draft, in_flight = self._draft_epoch, actions.to_draft, event.node_ids
            at = actions.commits.get(self.session_id)
            before = None if at is None else to_draft[at]
            if at is None or not isinstance(before, Commit) or before.epoch != epoch:
                actions.commits[self.session_id] = len(to_draft)
                to_draft.append(Commit(self.session_id, epoch, event.context_len, (), in_flight))
            elif in_flight:
                to_draft[at] = Commit(self.session_id, epoch, before.context_len, before.token_ids, in_flight)
        if self._tracer is not None:
            self._tracer.on_in_flight(event)

    def _on_outcome(self, outcome: Outcome, actions: Actions) -> None:
        if len(self._scores) < self._num_scores_wanted:
            self._lose_target(actions, "the target sent no log probabilities of the prompt")
            return
        if is_malformed(outcome):
            self.relay_stats.malformed += 1
            self._lose_target(actions, f"a malformed outcome at {outcome.context_len}")
            return
        token_ids = outcome.token_ids
        if outcome.finish_reason is not None:
            self._target_done = True
            self._close_draft(actions)
        elif self.draft_available:
            actions.commits[self.session_id] = len(actions.to_draft)
            actions.to_draft.append(Commit(self.session_id, self._draft_epoch, outcome.context_len, token_ids))
        if self._num_losses and outcome.round.num_accepted and outcome.round.cause in _DRAFT_CAUSES:
            self._num_losses = 0
        self.history.extend(token_ids)
        self.undigested.append(outcome)
        if self._tracer is not None:
            self._tracer.on_outcome()

    def _on_aside(self, event: States | Hint, actions: Actions) -> None:
        """Relays states or a hint to the draft that they were meant for."""
        if event.epoch == self._draft_epoch and self.draft_available:
            actions.to_draft.append(event)
        else:
            self.relay_stats.stale += 1

    def on_tree_lost(self, actions: Actions) -> None:
        """Opens the session on its draft again, a limited number of times."""
        if not (self.draft_available and self._relayed):  # the tree of a draft that the session has left
            self.relay_stats.stale += 1
            return
        self.relay_stats.trees_lost += 1
        self._num_losses += 1
        if self._num_losses <= MAX_DRAFT_RETRIES:
            self._open_draft(actions)
        else:
            self._leave_draft(actions)

    def on_draft(self, event: FromDraft, actions: Actions | None = None) -> Actions:
        """Follows a message of the draft: nodes go to the target unchanged. ``actions``: as for ``on_target``."""
        if actions is None:
            actions = Actions()
        if self._target_done:
            self.relay_stats.ended += 1
        elif event.epoch != self._draft_epoch or not self.draft_available:
            self.relay_stats.stale += 1
        elif isinstance(event, SessionFailed):
            self._lose_draft(actions)
        elif not 0 < event.context_len <= len(self.history):
            self.relay_stats.malformed += 1
        else:
            self._relayed = True
            actions.to_target.append(event)
            if self._tracer is not None:
                self._tracer.on_nodes(event)
        return actions

    def on_draft_down(self) -> Actions:
        """The draft has failed: the session goes on by plain decoding at once."""
        actions = Actions()
        if self.draft_available and not self._target_done:
            self._lose_draft(actions)
        return actions

    def on_draft_up(self) -> Actions:
        """Opens the session on a draft from its token history, if it wants one; its owner has one for it."""
        actions = Actions()
        if self.wants_draft:
            self._open_draft(actions)
        return actions

    def leave_draft(self) -> Actions:
        """Closes the session on a draft that works, for instance one that drains."""
        actions = Actions()
        if not self._target_done:
            self._leave_draft(actions)
        return actions

    def reopen_target(self, *, suspected_s: float = 0.0, pages_from: str = "", pages_timeout_s: float = 0.0) -> Actions:
        """Moves the session to another or restarted target, from the token history, under a new epoch.

        The old target may still send outcomes. They are stale, so nothing is lost or emitted twice. The session stays
        at its draft and is re-opened there. The preference of the old target's controller is forgotten.

        ``suspected_s``: passed on in ``OpenSession``, if targets were lost under the session; 0: none. So are
        ``pages_from`` and ``pages_timeout_s``, if the old target lives.
        """
        actions = Actions()
        if not self._opened or self._target_done:
            return actions
        self.relay_stats.target_reopens += 1
        self._draft_wanted = True
        self._epoch += 1
        if self.draft_available:
            actions.to_draft.append(CloseSession(self.session_id, self._draft_epoch))
            actions.to_draft.append(self.open_message())
        self._target_epoch = self._draft_epoch = self._epoch
        self._relayed = False
        opened = self.open_message()
        opened = replace(opened, suspected_s=suspected_s, pages_from=pages_from, pages_timeout_s=pages_timeout_s)
        actions.to_target.append(opened)
        if self.speculates and not self.draft_available:
            self._tell_no_draft(actions)
        return actions

    def _lose_target(self, actions: Actions, reason: str) -> None:
        self.relay_stats.targets_lost += 1
        actions.target_failed = reason

    def _lose_draft(self, actions: Actions) -> None:
        """The draft has failed the session and forgotten it already."""
        self.relay_stats.drafts_lost += 1
        self._num_losses += 1
        self.draft_available = False
        self._tell_no_draft(actions)

    def _leave_draft(self, actions: Actions) -> None:
        if self.draft_available:
            self._close_draft(actions)
            self._tell_no_draft(actions)

    def _open_draft(self, actions: Actions) -> None:
        self.relay_stats.draft_reopens += 1
        self._epoch += 1
        self._draft_epoch = self._epoch
        self._relayed = False
        self.draft_available = True
        actions.to_draft.append(self.open_message())
        context_len = len(self.history)
        actions.to_target.append(DraftState(self.session_id, self._target_epoch, True, self._draft_epoch, context_len))

    def _tell_no_draft(self, actions: Actions) -> None:
        actions.to_target.append(DraftState(self.session_id, self._target_epoch, available=False))

    def cancel(self) -> Actions:
        """Ends the session now with the tokens that have arrived, and frees it on both engines."""
        actions = self.digest()
        if not self.finished:
            self._end(actions, FinishReason.ABORT, actions.chunks)
        return actions

    def discard(self) -> Actions:
        """Ends the session now without the text that has not been digested, and frees it on both engines."""
        self.undigested.clear()
        return self.cancel()

    # -- text and result -----------------------------------------------------------------------------------

    def digest(self) -> Actions:
        """Turns the outcomes that have arrived into chunks, and the last one into the result, too."""
        actions = Actions()
        while self.undigested and not self.finished:
            event = self.undigested.popleft()
            if isinstance(event, PromptLogprobs):
                actions.chunks.append(Chunk((), (), (), (), None, self._usage(), prompt_logprobs=event))
            elif not self.sampling.max_tokens:
                self._end(actions, FinishReason.LENGTH, [])
            else:
                self._digest(event, actions)
        return actions

    def _digest(self, outcome: Outcome, actions: Actions) -> None:
        self._last_s = self._clock()
        if self.stats.rounds == 0:
            self._first_s, self._num_first = self._last_s, len(outcome.token_ids)
            self._cached_tokens = min(outcome.cached_tokens, len(self.prompt))
        num_drafted = min(outcome.round.num_accepted, len(outcome.token_ids))
        drafted = (True,) * num_drafted + (False,) * (len(outcome.token_ids) - num_drafted)
        num_tokens, segments, finish_reason = self._decide(outcome.token_ids, drafted, outcome.finish_reason)
        token_ids, logprobs = outcome.token_ids[:num_tokens], outcome.logprobs[:num_tokens]
        trace = None if self._tracer is None else self._tracer.take()
        round_ = outcome.round.first(num_tokens)  # a stop string may have cut it
        self.stats.add(round_)
        self.emitted += token_ids
        self._logprobs += logprobs
        top = outcome.top_logprobs[:num_tokens]
        self._top_logprobs += top
        chunk = Chunk(
            token_ids,
            logprobs,
            drafted[:num_tokens],
            tuple(segments),
            round_,
            self._usage(),
            trace,
            top,
            last=finish_reason is not None,
        )
        self._text.append(chunk.text)
        actions.chunks.append(chunk)
        if finish_reason is not None:
            self._end(actions, finish_reason, [])

    def _decide(
        self, token_ids: tuple[int, ...], drafted: tuple[bool, ...], finish_reason: FinishReason | None
    ) -> tuple[int, list[tuple[str, bool]], FinishReason | None]:
        """Adds tokens to the text: how many belong to the output, the text that is decided now, and why it ends, if so.

        ``finish_reason``: why the target ends the session with the last token; a stop string may end it earlier.
        """
        segments: list[tuple[str, bool]] = []
        num_tokens, matched = 0, None
        silent = finish_reason is FinishReason.STOP and not self.sampling.include_stop_str_in_output
        for token_id in token_ids:
            num_tokens += 1
            self._num_decided += 1
            if silent and num_tokens == len(token_ids):
                break  # the token that ends the text is no part of it
            text, matched = self.release_text(self._detokenizer.add(token_id))
            if text:
                segments.append((text, drafted[num_tokens - 1]))
            if matched is not None:
                break
        if finish_reason is not None and matched is None:
            tail, matched = self.release_text(self._detokenizer.flush())
            tail += self._withheld
            if tail:
                segments.append((tail, drafted[num_tokens - 1]))
        if matched is not None:
            finish_reason = FinishReason.STOP
        if finish_reason is FinishReason.STOP:
            self._matched_stop = token_ids[num_tokens - 1] if matched is None else matched
        self._withheld = "" if finish_reason is not None else self._withheld
        return num_tokens, segments, finish_reason

    def _resume(self, token_ids: tuple[int, ...]) -> None:
        """Brings text and end to where a broken stream was that has delivered these tokens."""
        sampling = self.sampling
        if len(token_ids) > sampling.max_tokens:
            raise InvalidRequestError(
                f"generated_token_ids has {len(token_ids)} tokens:"
                f" at most max_tokens ({sampling.max_tokens}) are allowed"
            )
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos_token_ids)}
        finish_reason = FinishReason.LENGTH if len(token_ids) == sampling.max_tokens else None
        until = next((i for i, token_id in enumerate(token_ids, 1) if token_id in stop_ids), None)
        if until is not None:
            finish_reason = FinishReason.STOP
        drafted = (False,) * len(token_ids)
        num_tokens, _, finish_reason = self._decide(token_ids[:until], drafted, finish_reason)
        if num_tokens < len(token_ids):
            raise InvalidRequestError(
                f"generated_token_ids has {len(token_ids)} tokens, and the output ends with the first {num_tokens}:"
                " nothing may follow its end"
            )
        if finish_reason is not None:
            self._end(Actions(), finish_reason, [])

    def release_text(self, text: str) -> tuple[str, str | None]:
        """Adds decided text; returns the part that no stop string can withhold, and the complete stop string.

        A stop string that the first ``min_tokens`` tokens complete has no effect; one that begins in their text and
        ends after it counts.
        """
        if not self._stops:
            return text, None
        num_withheld, text = len(self._withheld), self._withheld + text
        # Withheld text holds no complete stop string, unless ``min_tokens`` hid one; so a match ends after it.
        found = [
            (at, stop)
            for stop in self._stops
            if self._num_decided > self.sampling.min_tokens
            and (at := text.find(stop, max(0, num_withheld + 1 - len(stop)))) >= 0
        ]
        if found:
            self._withheld = ""
            at, stop = min(found, key=lambda match: match[0])
            return text[: at + len(stop) * self.sampling.include_stop_str_in_output], stop
        keep = self._stop_prefixes.num_undecided(text)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _end(self, actions: Actions, finish_reason: FinishReason, flush_to: list[Chunk]) -> None:
        if finish_reason is FinishReason.ABORT and self._withheld:
            flush_to.append(Chunk((), (), (), ((self._withheld, False),), None, self._usage()))
            self._text.append(self._withheld)
            self._withheld = ""
        if self._opened and not self._target_done:
            actions.to_target.append(CloseSession(self.session_id, self._target_epoch))
        self._target_done = True
        self._close_draft(actions)
        self.undigested.clear()
        decode_s = self._last_s - self._first_s
        num_later = len(self.emitted) - self._num_first
        rate = num_later / decode_s if decode_s > 0 and num_later > 0 else 0.0
        first_s = self._first_s if self.stats.rounds else self._clock()
        prefill_s = first_s - self._opened_s if self._opened else 0.0
        actions.result = self.result = Result(
            text="".join(self._text),
            token_ids=tuple(self.emitted),
            logprobs=tuple(self._logprobs),
            finish_reason=finish_reason,
            usage=self._usage(),
            speculation=self.stats,
            timing=Timing(prefill_s, decode_s, rate, self._queue_s),
            seed=self.seed,
            matched_stop=self._matched_stop,
            top_logprobs=tuple(self._top_logprobs),
            prompt_logprobs=tuple(self._scores),
        )

    def _usage(self) -> Usage:
        return Usage(len(self.prompt), self._num_resumed + len(self.emitted), self._cached_tokens)

    def _close_draft(self, actions: Actions) -> None:
        if self.draft_available:
            actions.to_draft.append(CloseSession(self.session_id, self._draft_epoch))
            self.draft_available = False

    def open_message(self) -> OpenSession:
        """Returns the message that opens the session on a target, with all tokens decided so far."""
        if self._tracer is not None:
            self._tracer.on_open(len(self.history))
        sampling = self.sampling
        if len(self._scores) >= self._num_scores_wanted:
            sampling = sampling.model_copy(update={"prompt_logprobs": None})
        if not sampling.max_tokens:  # engines end a session with a token, which is not sent then
            sampling = sampling.model_copy(update={"max_tokens": 1, "min_tokens": 0})
        return OpenSession(
            session_id=self.session_id,
            epoch=self._epoch,
            token_ids=tuple(self.history),
            num_prompt_tokens=len(self.prompt),
            seed=self.noise_key,
            sampling=sampling,
            speculation=self.speculation,
            eos_token_ids=self._eos_token_ids,
            cache_salt=self._cache_salt,
            traceparent=self.traceparent,
        )


def is_malformed(outcome: Outcome) -> bool:
    """True if no target can have meant this outcome."""
    token_ids, round_ = outcome.token_ids, outcome.round
    num_tokens, num_accepted = len(token_ids), round_.num_accepted
    if not (
        num_tokens == len(outcome.logprobs)
        and (not outcome.top_logprobs or len(outcome.top_logprobs) == num_tokens)
        and 0 <= num_accepted <= round_.num_drafted
        and num_accepted <= num_tokens > 0
    ):
        return True
    for token_id in token_ids:  # noqa: SIM110 - they are few, of which any() and min() take three times as long
        if token_id < 0:
            return True
    return False


class Prefixes:
    """The beginnings of stop strings, in order, so that one of them is found by bisection."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops)
        self._longest = max(map(len, stops), default=1) - 1

    def num_undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that one of them begins with, and is longer than.

        The time is proportional to the decided text, and independent of the number and length of the stop strings.
        """
        for length in range(min(len(text), self._longest), 0, -1):
            end = text[len(text) - length :]
            at = bisect_right(self._stops, end)  # the first one above it begins with it, or none but itself does
            if at < len(self._stops) and self._stops[at].startswith(end):
                return length
        return 0
