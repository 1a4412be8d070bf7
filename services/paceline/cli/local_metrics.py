"""Metrics and traces of ``paceline serve --local``, as a router and its replicas would have them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from prometheus_client import generate_latest

from paceline.errors import PacelineError, ResourceExhaustedError
from paceline.local import LocalPipeline
from paceline.metrics.catalogue import REQUEST_SUCCESS
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.metrics.tracing import RequestSpans
from paceline.types import Chunk, FinishReason, Request, RequestLimits, Result
from paceline.web.service import TargetInfo


class Measured:
    """A pipeline whose requests are counted and traced, as a router's are, and its engines, as replicas are."""

    def __init__(
        self,
        pipeline: LocalPipeline,
        registry: Registry,
        model_id: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipeline, self._registry, self._model_id, self._clock = pipeline, registry, model_id, clock
        self._metrics = RouterMetrics(registry, model_id)
        self._replicas = {kind: ReplicaMetrics(registry) for kind in ("target", "draft")}
        self._left = registry.counter(REQUEST_SUCCESS, model_id, FinishReason.ABORT.value)

    @property
    def info(self) -> TargetInfo:
        """The target model."""
        return self._pipeline.info

    @property
    def limits(self) -> RequestLimits:
        """Bounds of the lists of a request."""
        return self._pipeline.limits

    @property
    def ready(self) -> bool:
        """True if a request would be served now."""
        return self._pipeline.ready

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""
        return self._pipeline.trouble

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Ends a request of ``owner`` with the tokens so far; False: it is not here."""
        return self._pipeline.cancel_request(request_id, owner)

    def end(self, error: PacelineError) -> None:
        """Ends all requests by an error."""
        self._pipeline.end(error)

    async def generate(
        self, request: Request, spans: RequestSpans | None = None
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields the pipeline's items and raises its errors. Reports events to ``spans``."""
        arrived, last, result = self._clock(), None, None
        on_open = _nothing if spans is None else spans.opened

        def note(chunk: Chunk) -> None:
            nonlocal last
            if chunk.round is None:
                return
            now = self._clock()
            if last is None:
                self._metrics.first_token(now - arrived)
            self._metrics.round(chunk.round, len(chunk.token_ids), None if last is None else now - last)
            last = now
            if spans is not None:
                spans.round(chunk.round, len(chunk.token_ids))

        try:
            async with contextlib.aclosing(self._pipeline.run(request, on_chunk=note, on_open=on_open)) as items:
                async for item in items:
                    if isinstance(item, Result):
                        result = item
                        self._metrics.admitted(item.timing.queue_s)
                        self._metrics.finished(item, self._max_tokens(request, item.usage.prompt_tokens))
                        if spans is not None:
                            spans.finished(item)
                    yield item
        except BaseException as error:
            if isinstance(error, ResourceExhaustedError):
                self._metrics.rejected("queue_full")
            elif isinstance(error, PacelineError):
                self._metrics.failed(type(error).__name__)
            elif result is None:  # the client has left, which closes the generator
                self._left.inc()
            raise

    def _max_tokens(self, request: Request, num_prompt_tokens: int) -> int:
        info = self._pipeline.info
        sampling = request.sampling.with_defaults(info.defaults)
        return sampling.fitted(num_prompt_tokens, info.max_model_len).max_tokens

    async def page(self) -> str:
        """The page for Prometheus."""
        info = self._pipeline.server_info()
        self._metrics.sessions(info.sessions_queued, info.sessions_running, 0)
        self._metrics.draft_replicas(len(info.pools.get("draft", ())))
        for status in itertools.chain(*info.pools.values()):
            self._replicas[status.kind].update(replace(status, model=self._model_id))
        return generate_latest(self._registry).decode()


def _nothing() -> None:
    """Replaces spans that are not recorded."""
