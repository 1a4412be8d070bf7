"""The metrics page of ``paceline serve --local``: what a router counts, counted where there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from prometheus_client import generate_latest

from paceline.errors import PacelineError, ResourceExhaustedError
from paceline.local import LocalPipeline
from paceline.metrics.catalogue import REQUEST_SUCCESS
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.types import Chunk, FinishReason, Request, RequestLimits, Result, Usage
from paceline.web.service import TargetInfo


class Measured:
    """A pipeline whose requests are counted: the service that the HTTP edge asks."""

    def __init__(
        self,
        pipeline: LocalPipeline,
        registry: Registry,
        model_id: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pipeline, self._registry, self._clock = pipeline, registry, clock
        self._metrics = RouterMetrics(registry, model_id)
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

    async def run(
        self, request: Request, owner: str = "", on_usage: Callable[[Usage], None] = lambda _: None
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields what the pipeline yields, and raises what it raises."""
        arrived, last, result = self._clock(), None, None
        try:
            async with contextlib.aclosing(self._pipeline.run(request, owner, on_usage)) as items:
                async for item in items:
                    if isinstance(item, Result):
                        result = item
                        self._metrics.admitted(item.timing.queue_s)
                        self._metrics.finished(item)
                    elif item.round is not None:
                        now = self._clock()
                        if last is None:
                            self._metrics.first_token(now - arrived)
                        self._metrics.round(item.round, len(item.token_ids), None if last is None else now - last)
                        last = now
                    yield item
        except ResourceExhaustedError:
            self._metrics.rejected("queue_full")
            raise
        except PacelineError as error:
            self._metrics.failed(type(error).__name__)
            raise
        except BaseException:  # the client has left, which closes the generator
            if result is None:
                self._left.inc()
            raise

    async def page(self) -> str:
        """The page for Prometheus."""
        info = self._pipeline.server_info()
        self._metrics.sessions(info.sessions_queued, info.sessions_running, 0)
        self._metrics.draft_replicas(len(info.pools.get("draft", ())))
        return generate_latest(self._registry).decode()
