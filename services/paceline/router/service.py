"""Requests over one router: for gRPC from message to messages, for HTTP from values to values."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from typing import Protocol

from paceline.errors import PacelineError, RouterStoppedError
from paceline.metrics.tracing import RequestSpans, Tracing, trace_headers
from paceline.router.admission import TargetInfo
from paceline.rpc.bounds import RequestBounds
from paceline.rpc.generation import chunk_to_proto, complete_to_proto
from paceline.types import Chunk, Request, RequestLimits, Result, Usage, check_request_id
from paceline.v1 import generation_pb2

log = logging.getLogger(__name__)


class Requests(Protocol):
    """Who serves the requests: a ``Router``, here or in a thread of its own."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def ready(self) -> bool: ...

    @property
    def trouble(self) -> str: ...

    def generate(self, request: Request, spans: RequestSpans | None = None) -> AsyncGenerator[Chunk | Result, None]: ...

    def cancel(self, request_id: str, owner: str = "") -> bool: ...

    def end(self, error: PacelineError) -> None: ...


class GenerationService:
    """Requests over one router, for gRPC and HTTP. Its host turns PacelineErrors into statuses."""

    def __init__(self, router: Requests, tracing: Tracing | None = None, *, shares_cache: bool = False) -> None:
        """``tracing``: None: requests leave no traces. ``shares_cache``: API keys share cached prompts and texts."""
        self._router, self._tracing, self._shares_cache = router, tracing, shares_cache
        self.bounds = RequestBounds(
            router.limits, router.info.max_model_len, max_token_bytes=router.info.tokenizer.max_token_bytes
        )
        """Bounds of a request."""
        self._num_running = 0
        self._idle = asyncio.Event()
        self._draining = False
        self._stops_s = 0.0  # when what is still in progress ends by an error

    @property
    def info(self) -> TargetInfo:
        """The target model."""
        return self._router.info

    @property
    def limits(self) -> RequestLimits:
        """Bounds of the lists of a request."""
        return self._router.limits

    @property
    def ready(self) -> bool:
        """True if a request would be served now."""
        return not self.trouble and self._router.ready

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""
        return "the service is being stopped" if self._draining else self._router.trouble

    @property
    def num_running(self) -> int:
        """Requests in progress."""
        return self._num_running

    @property
    def draining(self) -> bool:
        """True once no new request is taken."""
        return self._draining

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on, and returns when all requests in progress have ended.

        After ``timeout_s`` the remaining requests end with a RouterStoppedError.
        """
        self._draining, self._stops_s = True, time.monotonic() + timeout_s
        log.info("draining: %d requests in progress have %g s to end", self._num_running, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until_idle()
        if self._num_running:
            self.end(f"the request did not end within the {timeout_s:g} s that the service has to stop")
            await self._until_idle()

    def end(self, reason: str) -> None:
        """Ends all requests in progress by an error."""
        log.warning("%d requests are ended: %s", self._num_running, reason)
        self._router.end(RouterStoppedError(f"{reason}: send it again"))

    async def _until_idle(self) -> None:
        while self._num_running:
            self._idle.clear()
            await self._idle.wait()

    async def generate(
        self,
        message: bytes | generation_pb2.GenerateRequest,
        owner: str = "",
        on_usage: Callable[[Usage], None] = lambda _: None,
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yields the responses to one request. Raises PacelineError; leaving the generator frees the session.

        ``message``: the bytes of a GenerateRequest, or one that the host has parsed. ``owner``: name of the caller's
        API key; no key shares request ids or cached texts with another. ``on_usage``: called with the tokens so far at
        each response. ``metadata``: of the call, which may hold the trace that the request is part of.
        """
        request, logprobs = self.bounds.read(message)
        if self._tracing is not None:
            request = replace(request, trace_headers=trace_headers(metadata))
        async with contextlib.aclosing(self.run(request, owner, on_usage)) as items:
            async for item in items:
                if isinstance(item, Result):
                    response = generation_pb2.GenerateResponse(complete=complete_to_proto(item))
                else:
                    response = generation_pb2.GenerateResponse(chunk=_chunk(item, logprobs))
                response.request_id = request.request_id
                yield response

    async def run(
        self, request: Request, owner: str = "", on_usage: Callable[[Usage], None] = lambda _: None
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields the chunks of a request, then its result. Arguments and errors: as for ``generate``."""
        if self._draining:
            left_s = max(1.0, self._stops_s - time.monotonic())
            raise RouterStoppedError("the service is being stopped: send the request again, or to another", left_s)
        request = request.of(owner, shares_cache=self._shares_cache)
        extra = {"request_id": request.request_id}
        started, result = time.monotonic(), None
        self._num_running += 1
        spans = None if self._tracing is None else self._tracing.begin(request)
        try:
            async with contextlib.aclosing(self._router.generate(request, spans)) as items:
                async for item in items:
                    if isinstance(item, Result):
                        result = item
                    assert item.usage is not None, "every chunk of a session has it"
                    on_usage(item.usage)
                    yield item
        except Exception as error:
            if spans is not None:
                spans.failed(error)
            if isinstance(error, PacelineError):
                log.info("request failed: %s", type(error).__name__, extra=extra)
            raise
        finally:
            self._num_running -= 1
            self._idle.set()
            if spans is not None:
                spans.end()
            reason = result.finish_reason.value if result is not None else "left"
            log.debug("request ended: %s after %.3f s", reason, time.monotonic() - started, extra=extra)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Ends a request of ``owner``. Returns False if it is not in progress here, or belongs to another owner.

        Raises:
            InvalidRequestError: no request can have this id.
        """
        check_request_id(request_id)
        return self._router.cancel(request_id, owner)


def _chunk(chunk: Chunk, logprobs: bool) -> generation_pb2.GenerateStreamChunk:
    assert chunk.usage is not None, "every chunk of a session has it"
    usage = chunk.usage
    return chunk_to_proto(
        chunk,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        logprobs=logprobs,
    )
