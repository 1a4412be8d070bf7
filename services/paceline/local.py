"""One target and one draft on this machine, as an iterator of text: the one-process wiring.

    client ── submit ──▶ Session ◀── messages ──▶ target worker
           ◀─ chunks ──          ◀── messages ──▶ draft worker

The workers' reader threads call the relay; one lock orders every access to a session. The draft is expendable: without
it sessions continue by plain decoding, and it is restarted. Without the target they fail. A step that takes too long
counts as a failure, too; of the target until the step ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack, cast, overload

from paceline import __version__
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import require_path
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_trial import GrammarTrials
from paceline.checkpoint.linear import require_draft_model, require_runnable
from paceline.checkpoint.tokenizer import LONG_TEXT, Tokenizer, encode_prompt
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import DraftModel, LocalConfig, RouterConfig
from paceline.errors import (
    EngineError,
    InvalidRequestError,
    PacelineError,
    RequestInProgressError,
    ResourceExhaustedError,
)
from paceline.messages import FromDraft, FromTarget, ToDraft, ToTarget
from paceline.router.admission import TargetInfo
from paceline.router.losses import Losses, poisonous
from paceline.router.outlet import Outlet
from paceline.router.overview import Overview, drafting
from paceline.router.preparation import Preparation
from paceline.router.queue import FairQueue
from paceline.router.relay import Outbox, Relay
from paceline.router.retry import RetryHints
from paceline.router.session import Actions, Session
from paceline.runtime.pulse import Pulse
from paceline.runtime.ranks import local_worker
from paceline.runtime.workers import EngineFactory, Worker
from paceline.types import (
    Chunk,
    ReplicaStatus,
    Request,
    RequestLimits,
    Result,
    SamplingFields,
    SamplingParams,
    ServerInfo,
    SpeculationParams,
    Startup,
    Usage,
    as_prompt,
    as_sampling,
    as_stop_strings,
    request_key,
)

log = logging.getLogger(__name__)

RESTART_S, _LONGEST_RESTART_S = 0.5, 60.0
"""Pause before a dead draft is started again, doubled each time."""
_ROUTER = RouterConfig()
"""Limits of requests and of the queue: a router's defaults."""


Prompts = list[str] | list[tuple[int, ...]] | list[list[int]]
"""Prompts of one call of ``generate``: each is a text, or token ids of the target's tokenizer."""


class LocalPipeline:
    """Target worker, draft worker and the sessions between them. A context manager; thread-safe."""

    def __init__(
        self,
        config: LocalConfig,
        *,
        target_factory: EngineFactory[FromTarget, ToTarget] | None = None,
        draft_factory: EngineFactory[FromDraft, ToDraft] | None = None,
        tokenizer: Tokenizer | None = None,
        checkpoint: Checkpoint | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The factories, ``tokenizer`` and ``checkpoint`` default to what ``config`` names."""
        self.config = config
        self._clock = clock
        self._given = (tokenizer, checkpoint)
        self._loaded = False
        self._lock = threading.RLock()
        self._relay = Relay()
        self._active: dict[str, LocalGeneration] = {}
        self._waiting: FairQueue[LocalGeneration] = FairQueue()
        self._hints = RetryHints()
        self._num_submitted = 0
        self._running: dict[str, LocalGeneration | None] = {}  # requests of ``run``, by Request.key
        self._failure: PacelineError | None = None
        self._hung: EngineError | None = None  # until the target's step ends
        self.num_draft_restarts = 0
        """Times that a dead draft was started again."""

        def make_draft() -> Worker[ToDraft]:
            return local_worker(config, "draft", draft_factory, self._on_draft, self._on_draft_death)

        self._make_draft = make_draft
        self._target = local_worker(
            config, "target", target_factory, self._on_target, lambda reason: self.end(EngineError(reason))
        )
        self._draft = make_draft() if config.draft is not None or draft_factory is not None else None
        self._draft_up = self._draft is not None
        self._most_with_drafts: int | None = None  # the most sessions for which the target wants drafts
        self._draft_lost_s: float | None = None  # when the draft died, until it is up again
        self._overview = Overview(clock)
        self._preparation = Preparation()
        self._stopping = threading.Event()
        self._restart: threading.Thread | None = None
        self._pulses = Pulse(config.target_timeout_s), Pulse(config.draft_timeout_s)
        self._watch = threading.Thread(target=self._watch_engines, name="paceline-watch", daemon=True)

    # -- life ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Opens the checkpoints, as ``start`` does, so that ``encode`` works. Raises ConfigError for wrong models."""
        if self._loaded:
            return
        tokenizer, checkpoint = self._given
        target, draft = self.config.target, self.config.draft
        if checkpoint is None:
            require_path(target.path)
            if isinstance(draft, DraftModel):
                require_path(draft.path)
        self.checkpoint = checkpoint or Checkpoint.open(target.path, target.trust_remote_code)
        require_runnable(
            self.checkpoint.config,
            self.checkpoint.quantization,
            self.checkpoint.path,
            device=target.device,
            quantization=target.quantization,
            state_slots=target.state_slots,
            kv_cache_dtype=target.kv_cache_dtype,
        )
        self.tokenizer = tokenizer or self.checkpoint.tokenizer
        if tokenizer is None and isinstance(draft, DraftModel):
            proposes = Checkpoint.open(draft.path, draft.trust_remote_code)
            require_draft_model(proposes.config, "the draft model", draft.path)
            require_tokens(self.tokenizer, proposes.tokenizer, draft.vocabulary)
        self.info = TargetInfo.of(
            self.checkpoint,
            self.tokenizer,
            target.max_model_len,
            generation_config=self.config.generation_config,
            most_sequences=target.max_sessions + _ROUTER.max_queued_requests,
        )
        """The target model."""
        self._forms = GrammarTrials(Grammars(self.tokenizer, self.checkpoint.vocab_size, self.checkpoint.eos_token_ids))
        self._loaded = True

    def start(self) -> None:
        """Starts the workers. Raises ConfigError or EngineError."""
        self.load()
        workers = [worker for worker in (self._target, self._draft) if worker is not None]
        try:
            for worker in workers:
                worker.spawn()
            for worker in workers:
                worker.wait_ready()
            self._watch.start()
        except BaseException:
            self.stop(timeout_s=0.2)
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancels what is in progress and ends the workers. Idempotent."""
        self._stopping.set()
        with self._lock:
            self._failure = self._failure or EngineError("the pipeline has been stopped")
            for generation in [*self._active.values(), *self._waiting]:
                self.cancel(generation)
        for worker in (self._draft, self._target):
            if worker is not None:
                worker.stop(timeout_s)
        if self._loaded:
            self._forms.close()
        for thread in (self._restart, self._watch):
            if thread is not None and thread.ident is not None:
                thread.join(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # an interrupted caller does not wait for the step in progress
        self.stop(timeout_s=5.0 if kind is None else 0.5)

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens."""
        return self.info.max_model_len

    @property
    def default_sampling(self) -> SamplingParams:
        """Defaults of the sampling parameters that a request omits; only the ones set here."""
        return self.info.defaults

    def encode(self, prompt: str | Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InvalidRequestError for one that is empty, unknown or too long."""
        return self._encode(prompt, sampling)[0]

    def _encode(self, prompt: str | Sequence[int], sampling: SamplingParams) -> tuple[tuple[int, ...], SamplingParams]:
        token_ids = encode_prompt(self.tokenizer, as_prompt(prompt), self.max_model_len, self.checkpoint.vocab_size)
        sampling = sampling.with_defaults(self.default_sampling)
        return token_ids, sampling.fitted(len(token_ids), self.max_model_len)

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        stop: str | Sequence[str] = (),
        on_change: Callable[[], None] = lambda: None,
        *,
        cache_salt: str = "",
        trace: bool = False,
        share: str = "",
        on_open: Callable[[], None] = lambda: None,
    ) -> LocalGeneration:
        """Starts a request; it waits its turn if ``max_sessions`` are in progress.

        ``prompt``: text, or token ids of the target's tokenizer. ``stop``: the text ends before the first of these;
        one text is one stop string. ``on_change`` is called, by any thread, whenever there is more for the consumer.
        ``cache_salt``: cached prompts and texts that the draft learns from are shared with requests of the same salt
        only. ``trace``: chunks hold the times and the tree of their round. ``share``: places are divided fairly
        among shares; each request has its own by default. ``on_open`` is called, by any thread, when its turn has come.

        Raises InvalidRequestError for a prompt that is empty or too long, or for parameters that cannot be served,
        EngineError if the target is gone.
        """
        sampling, speculation = sampling or SamplingParams(), speculation or SpeculationParams()
        stops = as_stop_strings(stop)
        token_ids, sampling = self._encode(prompt, sampling)
        sampling.check_vocabulary(self.info.num_token_ids)
        sampling.check_choice(self.info.num_token_ids, self.info.eos_token_ids)
        if sampling.structured_output is not None:
            self._forms.check(sampling.structured_output, cache_salt)
        with self._lock:
            if (error := self._failure or self._hung) is not None:
                raise error
            session_id = f"local-{self._num_submitted}"
            request = Request(session_id, token_ids, sampling, speculation, stops, cache_salt=cache_salt, trace=trace)
            session = self.info.session(session_id, request, token_ids, sampling, self._clock)
            self._num_submitted += 1
            share = share or session.session_id
            generation = LocalGeneration(session, self.cancel, on_change, on_open, self._clock(), share)
            self._waiting.add(generation, generation.share)
            self._admit()
        return generation

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        stop: str | Sequence[str] = (),
        *,
        cache_salt: str = "",
        **sampling_fields: Unpack[SamplingFields],
    ) -> LocalGeneration: ...

    @overload
    def generate(
        self,
        prompt: Prompts,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        stop: str | Sequence[str] = (),
        *,
        cache_salt: str = "",
        **sampling_fields: Unpack[SamplingFields],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | Prompts,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        stop: str | Sequence[str] = (),
        *,
        cache_salt: str = "",
        **sampling_fields: Unpack[SamplingFields],
    ) -> LocalGeneration | list[Result]:
        """Continues a prompt, or each prompt of a list.

        For one prompt (text or token ids) it returns the generation at once: iterate over its chunks. For a list of
        texts, or of sequences of token ids, it waits and returns their results in the order of the prompts; up to
        ``max_sessions`` are in progress together. ``sampling_fields``: fields of SamplingParams, instead of
        ``sampling``. Other parameters: as for ``submit``.

        Raises:
            InvalidRequestError: a prompt is empty or too long, or a parameter cannot be served; a list is checked
                before any of its prompts is begun.
            EngineError: the target is gone. All prompts of the list are cancelled then.
        """
        params = as_sampling(sampling, sampling_fields)
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list | tuple):
            return self.submit(cast("str | Sequence[int]", prompt), params, speculation, stop, cache_salt=cache_salt)
        encoded = []
        for i, each in enumerate(cast("list[str | Sequence[int]]", prompt)):
            try:
                encoded.append(self.encode(each, params))
            except InvalidRequestError as error:
                raise type(error)(f"prompt {i} of {len(prompt)}: {error}") from error
        generations: list[LocalGeneration] = []
        try:
            for token_ids in encoded:
                generations.append(self.submit(token_ids, params, speculation, stop, cache_salt=cache_salt))
            return [generation.result for generation in generations]
        finally:
            for generation in generations:
                generation.cancel()

    @property
    def limits(self) -> RequestLimits:
        """Bounds of the lists of a request."""
        return _ROUTER.limits

    @property
    def ready(self) -> bool:
        """True if a request would be served now."""
        return self._loaded and self._failure is None and self._hung is None

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""
        if not self._loaded:
            return "the models are not loaded yet"
        return str(self._failure or self._hung or "")

    def server_info(self) -> ServerInfo:
        """The state of target and draft, and of the requests in progress."""
        with self._lock:
            running = [generation.session for generation in self._active.values()]
            num_waiting, most = len(self._waiting), self.config.target.max_sessions
            held, model = len(running) + num_waiting, Path(self.config.target.path).name
            target = ReplicaStatus("target-0", "target", 0, 0, 0, most, model=model, version=__version__)
            known = {**self._target.facts, "num_sessions": held, "num_waiting": num_waiting}
            target = replace(target, busy_s=self._pulses[0].stuck_s, **known)
            pools = {"target": () if self._failure or self._hung else (target,)}
            starting: tuple[Startup, ...] = ()
            if self._draft is not None:
                options, restarts = self.config.draft, self.num_draft_restarts
                model = Path(options.path).name if isinstance(options, DraftModel) else getattr(options, "kind", "")
                draft = ReplicaStatus("draft-0", "draft", restarts, 0, 0, most, model=model, version=__version__)
                known = {**self._draft.facts, "num_sessions": drafting(running)}
                draft = replace(draft, busy_s=self._pulses[1].stuck_s, **known)
                pools["draft"] = (draft,) if self._draft_up else ()
            if self._draft_lost_s is not None:
                doing, elapsed_s = "it has ended and is started again", self._clock() - self._draft_lost_s
                starting = (Startup("draft-0", "draft", "", doing, elapsed_s),)
            return self._overview.server_info(running, num_waiting, pools, starting)

    async def run(
        self,
        request: Request,
        owner: str = "",
        on_usage: Callable[[Usage], None] = lambda _: None,
        on_open: Callable[[], None] = lambda: None,
        on_chunk: Callable[[Chunk], None] = lambda _: None,
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields the chunks of a request, then its result, as ``router.service.GenerationService.run`` does.

        ``owner``: name of the caller's API key, unless the request has it. ``on_open`` is called, by any thread, when
        its turn has come, and ``on_chunk`` with each round when it comes, before some are joined. Leaving the generator
        cancels the request.

        Raises:
            InvalidRequestError: the request can never be served.
            ResourceExhaustedError: the queue is full.
            EngineError: the target is gone.
        """
        if owner:
            request = request.of(owner)
        if request.generated_token_ids:
            raise InvalidRequestError("generated_token_ids is given: only a service with routers continues a stream")
        if request.key in self._running:
            raise RequestInProgressError(f"request_id {request.request_id!r} is in progress: each needs its own")
        share, limit = request.share or request.request_id, _ROUTER.max_queued_requests
        with self._lock:
            if not self._waiting.may_wait(share, limit):
                num_active = len(self._active)
                raise ResourceExhaustedError(
                    f"{num_active} requests are running and {len(self._waiting)} are queued: at most {limit} may wait",
                    retry_after_s=self._hints.refused(self._clock(), num_active),
                )
        loop, outlet = asyncio.get_running_loop(), Outlet(_ROUTER.chunk_window_s)
        generation: LocalGeneration | None = None
        ended = False

        def pull() -> None:
            nonlocal ended
            if generation is None:
                return
            ended = generation.done
            for chunk in generation.take():
                on_chunk(chunk)
                outlet.put(chunk)
            if ended:
                outlet.flush()

        def on_change() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(pull)

        self._running[request.key] = None  # not submitted yet
        try:
            prompt: str | Sequence[int] = request.prompt
            if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
                prompt = await self._preparation.run(len(prompt), partial(self.encode, prompt, request.sampling))
            if request.sampling.structured_output is not None:
                await self._forms.checked(request.sampling.structured_output, request.cache_salt)
            generation = self.submit(
                prompt,
                request.sampling,
                request.speculation,
                request.stop,
                on_change,
                cache_salt=request.cache_salt,
                trace=request.trace,
                share=share,
                on_open=on_open,
            )
            self._running[request.key] = generation
            while True:
                await outlet.due()
                for chunk in outlet.take():
                    assert chunk.usage is not None, "every chunk of a session has it"
                    on_usage(chunk.usage)
                    yield chunk
                if ended and not len(outlet):
                    result = generation.result
                    on_usage(result.usage)
                    yield result
                    return
        finally:
            del self._running[request.key]
            if generation is not None:
                generation.cancel()

    def cancel_request(self, request_id: str, owner: str = "") -> bool:
        """Ends a request of ``run`` with what has arrived; False: ``owner`` has none of this id in progress."""
        generation = self._running.get(request_key(request_id, owner))
        if generation is None or generation.done:
            return False
        generation.cancel()
        return True

    def cancel(self, generation: LocalGeneration) -> None:
        """Ends a request now and frees it on both engines. A finished one is left as it is."""
        with self._lock:
            if generation.done:
                return
            opened = generation.session.session_id in self._active
            if not opened:
                self._waiting.remove(generation, generation.share)
            actions = generation.session.cancel()
            if opened:
                self._send(actions)
            self._deliver(generation, actions)

    # -- the relay -----------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.config.target.max_sessions:
            generation = self._waiting.pop(Counter(active.share for active in self._active.values()))
            session = generation.session
            self._active[session.session_id] = generation
            self._relay.sessions[session.session_id] = session
            generation.opened_s = self._clock()
            queue_s = generation.opened_s - generation.submitted_s
            generation.on_open()
            self._send(session.open(self._draft_up and not self._crowded, queue_s=queue_s))

    def _on_target(self, messages: Sequence[FromTarget]) -> None:
        with self._lock:
            outbox = self._relay.on_target(messages)
            if outbox.wish is not None:
                self._most_with_drafts = outbox.wish.most_sessions
            self._send(outbox)
            for session_id, reason in outbox.refused.items():
                self._fail(self._active[session_id], InvalidRequestError(reason))
            for session_id, reason in outbox.target_failed.items():
                self._try_again(self._active[session_id], reason)
            self._give_draft(outbox.draft_wanted)
            for session_id in outbox.touched:  # text, after the engines have what they need
                if generation := self._active.get(session_id):
                    actions = generation.session.digest()
                    self._send(actions)
                    self._deliver(generation, actions)

    def _try_again(self, generation: LocalGeneration, reason: str) -> None:
        """Opens a session on the target again that it has failed; ends one that it has failed twice in a row."""
        session = generation.session
        if generation.losses.note_lost(session.context_len):
            self._fail(generation, poisonous(generation.losses, reason))
            return
        log.warning("the target failed a session: %s", reason)
        generation.losses.note_opened(session.context_len, self._clock())
        self._send(session.reopen_target())

    def _on_draft(self, messages: Sequence[FromDraft]) -> None:
        with self._lock:
            outbox = self._relay.on_draft(messages)
            self._send(outbox)
            self._give_draft(outbox.draft_wanted)

    def _on_draft_death(self, reason: str) -> None:
        log.warning("%s; sessions continue by plain decoding until it is back", reason)
        with self._lock:
            self._draft_up, self._draft_lost_s = False, self._clock()
            for session in self._relay.sessions.values():
                self._send(session.on_draft_down())
            if self._failure is None:
                self._restart = threading.Thread(target=self._restart_draft, name="paceline-restart", daemon=True)
                self._restart.start()

    def _restart_draft(self) -> None:
        """Tries until a draft is up again, then re-opens every session on it from its token history."""
        while not self._stopping.wait(min(RESTART_S * 2**self.num_draft_restarts, _LONGEST_RESTART_S)):
            assert self._draft is not None
            self._draft.stop(timeout_s=0.5)
            with self._lock:  # ``stop`` ends every worker that was spawned before it took the lock
                if self._failure is not None:
                    return
                self.num_draft_restarts += 1
                self._draft = draft = self._make_draft()
                draft.spawn()
            try:
                draft.wait_ready()
            except PacelineError as error:
                log.info("the draft could not be started again: %s", error)
                continue
            with self._lock:
                if self._restart is not threading.current_thread():  # it has died again already
                    return
                self._draft_up, self._draft_lost_s = True, None
                self._give_draft(self._relay.sessions.values())
            return

    @property
    def _crowded(self) -> bool:
        """True if more sessions are served than the target wants drafts for."""
        return self._most_with_drafts is not None and len(self._active) > self._most_with_drafts

    def _give_draft(self, sessions: Iterable[Session]) -> None:
        """Opens the sessions that request a draft on it, if it is up."""
        if self._draft_up and not self._crowded:
            for session in sessions:
                self._send(session.on_draft_up())

    def end(self, error: PacelineError) -> None:
        """Ends all requests by an error, and all that may still come."""
        with self._lock:
            self._failure = error
            for generation in [*self._active.values(), *self._waiting]:
                self._fail(generation, error)

    def _watch_engines(self) -> None:
        """Looks for engines that hang until the pipeline is stopped."""
        of_target, of_draft = self._pulses
        while not self._stopping.wait(min(of_target.period_s, of_draft.period_s)):
            if self._failure is None:
                self._on_target_pulse(of_target.hangs(self._target))
            draft = self._draft
            if draft is not None and self._draft_up and of_draft.hangs(draft):
                self._on_draft_death(f"the draft has been in one step for {of_draft.stuck_s:.1f} s")

    def _on_target_pulse(self, hangs: bool) -> None:
        """Refuses requests while the target hangs, and fails the ones in progress: it may never come back."""
        with self._lock:
            if not hangs:
                if self._hung is not None:
                    log.warning("the target has come back: requests are served again")
                self._hung = None
                return
            if self._hung is None:
                limit_s = self.config.target_timeout_s
                self._hung = EngineError(
                    f"the target hangs: its step takes longer than target_timeout_s, {limit_s:g} s"
                )
                log.error("%s; requests fail until it ends", self._hung)
            for generation in [*self._waiting, *self._active.values()]:
                self._fail(generation, self._hung)

    def _fail(self, generation: LocalGeneration, error: PacelineError) -> None:
        """Ends a request by an error. A target that hangs finds that it is closed when it comes back."""
        opened = generation.session.session_id in self._active
        if not opened:
            self._waiting.remove(generation, generation.share)
        actions = generation.session.cancel()
        if opened:
            self._send(Actions(to_draft=actions.to_draft, to_target=actions.to_target if self._hung else []))
        generation.deliver(Actions(chunks=actions.chunks))
        generation.fail(error)
        self._forget(generation)

    def _deliver(self, generation: LocalGeneration, actions: Actions) -> None:
        generation.deliver(actions)
        if generation.done:
            self._forget(generation)

    def _forget(self, generation: LocalGeneration) -> None:
        self._overview.count(generation.session)
        now, opened_s = self._clock(), generation.opened_s
        self._hints.note_freed(now, None if opened_s is None else now - opened_s)
        self._active.pop(generation.session.session_id, None)
        self._relay.sessions.pop(generation.session.session_id, None)
        if self._failure is None and self._hung is None:
            self._admit()

    def _send(self, messages: Actions | Outbox) -> None:
        if messages.to_draft and self._draft is not None and self._draft_up:
            self._draft.send(messages.to_draft)
        if messages.to_target:
            self._target.send(messages.to_target)


class LocalGeneration:
    """A request in progress: iterate over its chunks, then read ``result``. One consumer."""

    def __init__(
        self,
        session: Session,
        cancel: Callable[[LocalGeneration], None],
        on_change: Callable[[], None] = lambda: None,
        on_open: Callable[[], None] = lambda: None,
        submitted_s: float = 0.0,
        share: str = "",
    ) -> None:
        self.session, self.share = session, share
        self.losses = Losses()
        self.on_open = on_open
        """Called when its turn has come."""
        self.submitted_s = submitted_s
        """Time when it was submitted, by the pipeline's clock."""
        self.opened_s: float | None = None
        """Time when its turn came."""
        self._cancel, self._on_change = cancel, on_change
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._error: PacelineError | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk, waiting for it. Raises EngineError if the target is lost."""
        chunk = self._chunks.get()
        if chunk is not None:
            return chunk
        self._chunks.put(None)  # every later call ends, too
        if self._error is not None:
            raise self._error
        raise StopIteration

    def take(self) -> list[Chunk]:
        """The chunks that have come since, without waiting."""
        chunks: list[Chunk] = []
        with contextlib.suppress(queue.Empty):
            while (chunk := self._chunks.get_nowait()) is not None:
                chunks.append(chunk)
            self._chunks.put(None)
        return chunks

    @property
    def result(self) -> Result:
        """The finished session, waiting for it. Raises EngineError if the target was lost."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self.session.result is not None
        return self.session.result

    @property
    def done(self) -> bool:
        """True if ``result`` returns at once."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends the request now; what has arrived is its result, finish_reason ``abort``."""
        self._cancel(self)

    def deliver(self, actions: Actions) -> None:
        """Passes chunks on, and ends the request with the result. Called by the pipeline."""
        for chunk in actions.chunks:
            self._chunks.put(chunk)
        if actions.chunks:
            self._on_change()
        if actions.result is not None:
            self._finish()

    def fail(self, error: PacelineError) -> None:
        """Ends the request with an error. Called by the pipeline."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done.set()
        self._chunks.put(None)
        self._on_change()
