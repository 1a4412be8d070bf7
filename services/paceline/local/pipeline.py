"""The one-process pipeline: checkpoints, two workers, and a synchronous face of the router between them.

    client ── submit ──▶ Router, in a thread of its own ── WorkerLink ──▶ target worker
           ◀─ chunks ──                                 ── WorkerLink ──▶ draft worker

The draft is expendable: without it sessions continue by plain decoding, and it is restarted. Without the target they
fail. A step that takes too long counts as a failure, too; of the target until the step ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast, overload

from paceline import __version__, logs
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import require_path
from paceline.checkpoint.linear import require_draft_model, require_runnable
from paceline.checkpoint.tokenizer import Tokenizer, encode_prompt
from paceline.checkpoint.vocabulary import require_tokens
from paceline.config import DraftModel, LocalConfig, RouterConfig
from paceline.errors import EngineError, InvalidRequestError, PacelineError
from paceline.local.link import DraftWorkerLink, TargetWorkerLink
from paceline.messages import FromDraft, FromTarget, ToDraft, ToTarget
from paceline.metrics.rates import Rates, speculation_rates
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.replica import OnChange, OnMessages, ReplicaLink
from paceline.router.session import Session
from paceline.router.thread import RouterThread
from paceline.runtime.ranks import local_worker
from paceline.runtime.workers import EngineFactory
from paceline.types import (
    Chunk,
    Request,
    Result,
    SamplingFields,
    SamplingParams,
    ServerInfo,
    SpeculationParams,
    as_prompt,
    as_sampling,
    as_stop_strings,
)

log = logging.getLogger(__name__)

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
        router: RouterConfig | None = None,
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The factories, ``tokenizer`` and ``checkpoint`` default to what ``config`` names.

        ``router``: limits of requests and of the queue. ``metrics`` counts the requests.
        """
        self.config = config
        self.metrics = metrics or RouterMetrics(Registry(), Path(config.target.path).name)
        """Counts the requests."""
        self._limits = (router or RouterConfig()).model_copy(
            update={"target_timeout_s": config.target_timeout_s, "draft_timeout_s": config.draft_timeout_s}
        )
        self._clock, self._started_s = clock, clock()
        self._given = (tokenizer, checkpoint)
        self._loaded = self._begun = False
        self._numbers = itertools.count()
        self._hung: PacelineError | None = None
        self.target = TargetWorkerLink(
            partial(local_worker, config, "target", target_factory),
            timeout_s=config.target_timeout_s,
            max_sessions=config.target.max_sessions,
            model=Path(config.target.path).name,
        )
        """The link to the target's worker."""
        self.target.on_trouble = self._on_trouble
        self.draft: DraftWorkerLink | None = None
        """The link to the draft's worker."""
        if config.draft is not None or draft_factory is not None:
            self.draft = DraftWorkerLink(
                partial(local_worker, config, "draft", draft_factory),
                timeout_s=config.draft_timeout_s,
                max_sessions=config.target.max_sessions,
                model=Path(getattr(config.draft, "path", "")).name or getattr(config.draft, "kind", ""),
            )

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
            most_sequences=target.max_sessions + self._limits.max_queued_requests,
        )
        """The target model."""
        self.router = RouterThread(
            self.info,
            StaticPool("target", [self.target.member]),
            None if self.draft is None else StaticPool("draft", [self.draft.member]),
            self._limits,
            metrics=self.metrics,
            connect=self._connect,
            clock=self._clock,
        )
        """Serves the requests."""
        self._loaded = True

    def _connect(self, kind: str, member: Member, on_messages: OnMessages, on_change: OnChange) -> ReplicaLink[Any]:
        link = self.target if kind == "target" else self.draft
        assert link is not None, "no pool of drafts without one"
        return link.attach(self.router.post, on_messages, on_change)

    def start(self) -> None:
        """Starts the workers and the router. Raises ConfigError or EngineError."""
        self.load()
        if self.router.closed is not None:
            raise self.router.closed
        if self._begun:
            raise RuntimeError("the pipeline has been started already")
        self._begun = True
        workers = [link.worker for link in (self.target, self.draft) if link is not None]
        try:
            for worker in workers:
                worker.spawn()
            for worker in workers:
                worker.wait_ready()
            self.router.start_thread()
            if self.router.closed is not None:  # it has been stopped meanwhile
                raise self.router.closed
        except BaseException:
            self.stop(timeout_s=0.2)
            raise

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancels what is in progress and ends the workers. Idempotent."""
        if self._loaded:
            self.router.call(self._cancel_all)
        for link in (self.draft, self.target):
            if link is not None:
                link.end(timeout_s)
        if self._loaded:
            self.router.admission.close()
            self.router.stop_thread(timeout_s)

    def _cancel_all(self) -> None:
        router = self.router
        router.closed = router.closed or EngineError("the pipeline has been stopped")
        router.entering.update(dict.fromkeys(router.entering, True))
        for active in list(router.active.values()):
            router.cancel(active.request.request_id, active.request.owner)

    def _on_trouble(self, reason: str) -> None:
        """Refuses requests while the target hangs, or from its death on, and fails those in progress."""
        if not reason:
            if self.router.closed is self._hung:
                self.router.closed = None
        elif self.router.closed is None or self.router.closed is self._hung:
            self._hung = EngineError(reason)
            self.router.close(self._hung)

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
        token_ids = encode_prompt(self.tokenizer, as_prompt(prompt), self.max_model_len, self.info.num_token_ids)
        sampling.with_defaults(self.default_sampling).fitted(len(token_ids), self.max_model_len)
        return token_ids

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
        An error of either is logged, and the request goes on.

        Raises InvalidRequestError for a prompt that is empty or too long, or for parameters that cannot be served,
        EngineError if the target is gone.
        """
        sampling, speculation = sampling or SamplingParams(), speculation or SpeculationParams()
        stops, token_ids = as_stop_strings(stop), self.encode(prompt, sampling)
        if self.router.is_current:
            raise RuntimeError("a callback of the pipeline submits a request, for which it would wait: use a thread")
        request = Request(
            f"local-{next(self._numbers)}",
            token_ids,
            sampling,
            speculation,
            stops,
            cache_salt=cache_salt,
            trace=trace,
            share=share,
        )
        return LocalGeneration(self.router, request, on_change, on_open)

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
    def ready(self) -> bool:
        """True if a request would be served now."""
        return self._loaded and self.router.ready

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""
        return self.router.trouble if self._loaded else "the models are not loaded yet"

    @property
    def num_draft_restarts(self) -> int:
        """Times that a dead draft was started again."""
        return 0 if self.draft is None else self.draft.num_restarts

    def server_info(self) -> ServerInfo:
        """The state of target and draft, and of the requests in progress."""
        rates = speculation_rates(self.metrics.registry.samples())
        return self.router.call(partial(self._server_info, rates))

    def _server_info(self, rates: Rates) -> ServerInfo:
        for link in (self.target, self.draft):
            if link is not None:
                link.refresh()
        view = self.router.view()
        return ServerInfo(
            version=__version__,
            uptime_s=self._clock() - self._started_s,
            pools={kind: tuple(statuses) for kind, statuses in self.router.statuses().items()},
            sessions_running=self.router.num_running,
            sessions_queued=self.router.num_queued,
            **rates,
            sessions_speculating=view.speculating,
            sessions_drafting=view.drafting,
            starting=() if self.draft is None else self.draft.starting,
        )

    def cancel_request(self, request_id: str, owner: str = "") -> bool:
        """Ends a request by its id, with the tokens so far; False: ``owner`` has none of this id in progress."""
        return self.router.cancel(request_id, owner)

    def cancel(self, generation: LocalGeneration) -> None:
        """Ends a request now and frees it on both engines. A finished one is left as it is."""
        generation.cancel()

    def end(self, error: PacelineError) -> None:
        """Ends all requests by an error, and all that may still come."""
        self.router.call(lambda: self.router.close(error))


class LocalGeneration:
    """A request in progress: iterate over its chunks, then read ``result``. One consumer."""

    def __init__(
        self,
        router: RouterThread,
        request: Request,
        on_change: Callable[[], None] = lambda: None,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins the request. Raises the error that refuses it."""
        self._router, self._request = router, request
        self._on_change = partial(_call_back, on_change)
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._held = router.hold(request, self, on_open=partial(_call_back, on_open), may_wait=True)
        self._held.left.add_done_callback(self._finish)
        try:
            self._active = self._held.begun.result()
        except BaseException:  # also of a caller who does not wait for it
            router.release(self._held)
            raise

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk, waiting for it. Raises EngineError if the target is lost."""
        self._may_wait(not self._chunks.empty())
        chunk = self._chunks.get()
        if chunk is not None:
            return chunk
        self._chunks.put(None)  # every later call ends, too
        if self._active.error is not None:
            raise self._active.error
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
    def session(self) -> Session:
        """Its session."""
        return self._active.session

    @property
    def result(self) -> Result:
        """The finished session, waiting for it. Raises EngineError if the target was lost."""
        self._may_wait(self.done)
        self._held.left.result()
        if self._active.error is not None:
            raise self._active.error
        assert self._active.result is not None
        return self._active.result

    @property
    def done(self) -> bool:
        """True if ``result`` returns at once."""
        return self._held.left.done()

    def cancel(self) -> None:
        """Ends the request now; what has arrived is its result, finish_reason ``abort``."""
        if not self.done:
            self._router.cancel(self._request.request_id)
        if not self._router.is_current:  # which lets go of it
            self._held.left.result()

    def put(self, chunk: Chunk) -> None:
        """Takes a chunk. Called by the router (``router.outlet.Sink``)."""
        self._chunks.put(chunk)
        self._on_change()

    def close(self) -> None:
        """Takes the end, which is told when the router has let go of the request."""

    def _finish(self, _: Future[None]) -> None:
        self._chunks.put(None)
        self._on_change()

    def _may_wait(self, is_there: bool) -> None:
        """Raises RuntimeError for a callback that would wait for what its own thread brings."""
        if not is_there and self._router.is_current:
            raise RuntimeError("a callback of the pipeline waits for a request, which waits for it: use a thread")


def _call_back(function: Callable[[], None]) -> None:
    """Calls a function of the client, whose errors end nothing but the call."""
    try:
        function()
    except BaseException as error:  # also SystemExit, which would end the router's thread
        logs.unexpected(log, error)
