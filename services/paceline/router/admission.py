"""Requests on their way in: tokenized, checked against the limits, then queued until a target has room."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_trial import GrammarTrials
from paceline.checkpoint.tokenizer import LONG_TEXT, Tokenizer, encode_bounded, encode_prompt
from paceline.config import RouterConfig
from paceline.errors import InvalidRequestError, PacelineError, ResourceExhaustedError
from paceline.metrics.router import RouterMetrics
from paceline.metrics.tracing import RequestSpans
from paceline.router.losses import Losses
from paceline.router.outlet import Sink
from paceline.router.pool import Lease
from paceline.router.preparation import Preparation
from paceline.router.queue import FairQueue
from paceline.router.replica import DraftLink, TargetLink
from paceline.router.retry import RetryHints
from paceline.router.session import Session
from paceline.types import PAGE_SIZE, ReplicaStatus, Request, Result, SamplingParams

_MANY_TOKENS = 512
"""A resumed stream of more tokens is brought to where it broke in a worker thread."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Properties of the target model that a router needs."""

    tokenizer: Tokenizer
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """Defaults of the sampling parameters that a request omits; only the ones set here."""
    vocab_size: int | None = None
    """Rows of the model's embedding, padding included: token ids are below it. None: as the tokenizer has them."""

    most_sequences: int | None = None
    """Maximum sequences that run or wait at once. None: no limit."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        max_model_len: int | None,
        *,
        generation_config: str,
        most_sequences: int | None,
    ) -> Self:
        """The properties of a checkpoint. ``max_model_len``: lowers that of the checkpoint.

        Raises ConfigError for a generation_config.json whose values are not allowed.
        """
        defaults = SamplingParams()
        if generation_config == "auto":
            checkpoint.warn_of_settings()
            defaults = checkpoint.sampling_defaults()
        return cls(
            tokenizer,
            min(max_model_len or checkpoint.max_model_len, checkpoint.max_model_len),
            checkpoint.eos_token_ids or tokenizer.eos_token_ids,
            defaults,
            checkpoint.vocab_size,
            most_sequences,
        )

    def check_sequences(self, num_prompts: int, n: int) -> None:
        """Raises InvalidRequestError for a body with more sequences than can ever run and wait at once."""
        if self.most_sequences is not None and num_prompts * n > self.most_sequences:
            what = f"n is {n}" if num_prompts == 1 else f"prompt has {num_prompts} entries and n is {n}"
            raise InvalidRequestError(f"{what}: at most {self.most_sequences} sequences can run or wait here at once")

    def session(
        self,
        session_id: str,
        request: Request,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        clock: Callable[[], float],
    ) -> Session:
        """The session of a request, whose prompt and parameters have been checked."""
        return Session(
            session_id,
            token_ids,
            sampling,
            request.speculation,
            decode=self.tokenizer.decode,
            detokenizer=self.tokenizer.detokenizer(token_ids, special=not sampling.skip_special_tokens),
            stop=request.stop,
            eos_token_ids=self.eos_token_ids,
            generated_token_ids=request.generated_token_ids,
            cache_salt=request.cache_salt,
            trace=request.trace,
            clock=clock,
        )

    @property
    def num_token_ids(self) -> int:
        """Token ids that requests may name are below it."""
        return self.tokenizer.vocab_size if self.vocab_size is None else self.vocab_size

    def tokenize(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text; ``special``: with the special tokens around a prompt.

        Raises PromptTooLongError for a text that is much longer than the context.
        """
        return encode_bounded(self.tokenizer, text, self.max_model_len, special=special)


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request from its arrival to its end, with its places on replicas and what waits for its client."""

    request: Request
    session: Session
    token_ids: tuple[int, ...]
    """The tokens of the prompt."""
    arrived_s: float
    outlet: Sink
    """Takes the chunks; it is closed for a result or an error."""
    opened_s: float | None = None
    """Time when it was opened on its first target."""
    target: TargetLink | None = None
    numerics: str | None = None
    """``numerics`` of its last target when it was opened there; None: it had none."""
    target_lease: Lease | None = None
    pages_lease: Lease | None = None
    """On the target that it has left, while its KV pages may still be needed."""
    losses: Losses = field(default_factory=Losses)
    orphaned_since: float | None = None
    """Time when its target was lost; None while it has one, or waits in the queue for its first."""
    draft: DraftLink | None = None
    draft_lease: Lease | None = None
    result: Result | None = None
    error: PacelineError | None = None
    last_chunk_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the request has a result or an error."""
    on_open: Callable[[], None] = lambda: None
    """Called when it is opened on its first target."""
    spans: RequestSpans | None = None
    """None: the request leaves no trace."""

    @property
    def share(self) -> str:
        """The name under which it has a fair part of the places."""
        return self.request.share or self.request.request_id

    @property
    def opened(self) -> bool:
        """True once it has been opened on a target."""
        return self.opened_s is not None

    @property
    def done(self) -> bool:
        """True once the request has a result or an error."""
        return self.result is not None or self.error is not None


class Admission:
    """Checks requests and queues the ones that wait for a target."""

    def __init__(
        self,
        info: TargetInfo,
        config: RouterConfig,
        router_id: str,
        *,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self.queue: FairQueue[ActiveRequest] = FairQueue()
        self._info, self._config, self._router_id = info, config, router_id
        self._metrics, self._clock = metrics, clock
        self._grammars = Grammars(info.tokenizer, info.num_token_ids, info.eos_token_ids)
        self._forms = GrammarTrials(self._grammars)
        self._num_sessions = 0
        self._hints = RetryHints()
        self.preparation = Preparation(config.max_queued_requests, config.max_queued_requests, "long prompts")

    async def prepare(self, request: Request, targets: Sequence[ReplicaStatus], outlet: Sink) -> ActiveRequest:
        """Tokenizes a request and checks it against the limits of the model and of the ``targets`` that are up.

        ``outlet``: takes its chunks.

        Raises InvalidRequestError if it can never be served.
        """
        info, arrived_s = self._info, self._clock()
        request = replace(request, sampling=request.sampling.with_defaults(info.defaults))
        request.sampling.check_vocabulary(info.num_token_ids)
        request.sampling.check_choice(info.num_token_ids, info.eos_token_ids)
        generated = request.generated_token_ids
        if max(generated, default=0) >= info.num_token_ids:
            allowed = f"ids in [0, {info.num_token_ids}) are allowed"
            raise InvalidRequestError(f"generated_token_ids holds token id {max(generated)}: {allowed}")
        if (form := request.sampling.structured_output) is not None:
            await self._forms.checked(form, request.cache_salt)
            if generated:  # only to see that they begin an output of this form
                await asyncio.to_thread(self._grammars.matcher, form, generated, salt=request.cache_salt)
        token_ids = await self._tokenized(request.prompt)
        rooms = [(info.max_model_len, "fit the model's context")]
        if pages := max((status.kv_pages for status in targets), default=0):
            rooms.append((PAGE_SIZE * pages, "fit the KV cache of a target"))
        sampling = request.sampling.fitted(len(token_ids), *min(rooms))
        self._num_sessions += 1
        session_id = f"{self._router_id}.{self._num_sessions}"
        make_session = functools.partial(info.session, session_id, request, token_ids, sampling, self._clock)
        # the text of what was generated is made again, token by token
        session = await asyncio.to_thread(make_session) if len(generated) > _MANY_TOKENS else make_session()
        return ActiveRequest(request, session, token_ids, arrived_s, outlet)

    async def _tokenized(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Token ids of a prompt. Long texts wait their turn for a thread, which leaves the loop to the streams."""
        tokenizer, max_model_len, num_ids = self._info.tokenizer, self._info.max_model_len, self._info.num_token_ids
        if not isinstance(prompt, str) or len(prompt) <= LONG_TEXT:
            return encode_prompt(tokenizer, prompt, max_model_len, num_ids)
        encode = functools.partial(encode_prompt, tokenizer, prompt, max_model_len, num_ids)
        try:
            return await self.preparation.run(len(prompt), encode)
        except ResourceExhaustedError:
            self._metrics.rejected("queue_full")
            raise

    def close(self) -> None:
        """Ends the process in which structured outputs are tried."""
        self._forms.close()

    def refusal(self, num_running: int) -> ResourceExhaustedError:
        """Returns the error of a request for which neither a target nor the queue has room."""
        self._metrics.rejected("queue_full")
        limit = self._config.max_queued_requests
        return ResourceExhaustedError(
            f"{num_running} requests are running and {len(self.queue)} are queued: at most {limit} may wait",
            retry_after_s=self._hints.refused(self._clock(), num_running),
        )

    @property
    def num_returned(self) -> int:
        """Number of the refused requests that should have come again by now."""
        return self._hints.num_returned(self._clock())

    def opened(self, active: ActiveRequest) -> float:
        """Records that a request is opened on its first target; returns how long it has waited, in seconds."""
        active.opened_s = now = self._clock()
        self._metrics.admitted(now - active.arrived_s)
        active.on_open()
        return now - active.arrived_s

    def enqueue(self, active: ActiveRequest) -> None:
        """Queues a request. A stream that broke and resumes goes before requests that have not begun."""
        self.queue.add(active, active.share, first=bool(active.request.generated_token_ids))

    def leave(self, active: ActiveRequest) -> None:
        """Removes a request from the queue, if it is there."""
        self.queue.remove(active, active.share)

    def note_ended(self, active: ActiveRequest) -> None:
        """Records that a request has ended, or has left the queue, whose place is free now."""
        now = self._clock()
        self._hints.note_freed(now, None if active.opened_s is None else now - active.opened_s)
