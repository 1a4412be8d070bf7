"""The client for asyncio: ``blocking.py`` with ``await``.

async with AsyncClient("localhost:9000") as client:
    stream = client.generate("def main():", max_tokens=64, temperature=0.7)
    async for chunk in stream:
        print(chunk.text, end="")
    print((await stream.result).usage)
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self, TypeVar

import grpc

from paceline.client.connection import (
    HEALTH,
    INFO_TIMEOUT_S,
    MODEL_INFO,
    SERVER_INFO,
    Call,
    ClientBase,
    Patience,
    StreamBase,
    cancel_call,
    checked_timeout,
)
from paceline.client.transcript import Transcript
from paceline.errors import PacelineError
from paceline.types import Chunk, ModelInfo, Result, ServerInfo

T = TypeVar("T")


class _Closes:
    """An async context manager whose block ends with ``aclose``."""

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncStream(StreamBase, _Closes):
    """A request in progress: ``async for`` over its chunks, then await ``result``. One consumer.

    Leaving it cancels the request on the server: ``aclose``, the end of an ``async with`` block, a cancelled
    task, or dropping the last reference, as an ``async for`` loop does that is left early.
    """

    def __init__(self, client: AsyncClient, transcript: Transcript) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        super().__init__(client, transcript)

    def _begin(self) -> None:
        super()._begin()
        self._messages = aiter(self._call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises the PacelineError that the stream fails with."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        while not self._transcript.over:
            try:
                chunk = await self._next()
            except StopAsyncIteration:
                self._transcript.end()
            except asyncio.CancelledError:  # grpc.aio raises it for a call that was cancelled here, too
                self.cancel()
                self._transcript.end()
                if task is not None and task.cancelling() > before:
                    raise
            else:
                if chunk is not None:
                    return chunk
        self._transcript.check()
        raise StopAsyncIteration

    async def _next(self) -> Chunk | None:
        """The chunk of the next message, if it has one; None also if the request was sent again, or has failed."""
        try:
            return self._take(await anext(self._messages))
        except grpc.RpcError as error:
            pause_s = self._failed(error)
        if pause_s is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause_s)
            if self._transcript.cancelled or self._client.closed:
                self._transcript.end(closed=self._client.closed)
            else:
                self._begin()
        return None

    @property
    async def result(self) -> Result:
        """The finished request; chunks that were not iterated over are part of it.

        Raises the PacelineError that the stream fails with.
        """
        async for _ in self:
            pass
        return self._transcript.result

    async def aclose(self) -> None:
        """Cancels the request if it is still in progress."""
        self.cancel()

    def cancel(self) -> None:
        """Ends the request now; its result holds the tokens so far, finish_reason ``abort``. Any thread may call it."""
        if self._transcript.over:
            return
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._cancel_here()
        else:  # a garbage collector runs in any thread
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
                self._loop.call_soon_threadsafe(self._cancel_here)

    def _cancel_here(self) -> None:
        super().cancel()
        self.wake()

    def wake(self) -> None:
        """Ends the wait of a stream that is about to be resumed. Called when the client is closed."""
        self._woken.set()

    def __del__(self) -> None:
        self.cancel()


class AsyncClient(ClientBase[AsyncStream], _Closes):
    """A client for asyncio. An async context manager; belongs to the event loop that first uses it."""

    def _make_channel(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, self._options)
        return grpc.aio.secure_channel(self.address, self._credentials, self._options)

    def _open(self, transcript: Transcript) -> AsyncStream:
        return AsyncStream(self, transcript)

    async def _ask(self, call: Call[T], timeout_s: float) -> T:
        connection, timeout = self.connection(), checked_timeout(timeout_s)
        try:
            answer = await call.on(connection.channel)(call.request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise self._failure(error, connection, timeout_s) from error
        return call.read(answer)

    async def cancel(self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S) -> bool:
        """Ends a request by its id, also another client's; its stream completes with finish_reason ``abort``.

        False: no such request is in progress.
        """
        return await self._ask(cancel_call(request_id), timeout_s)

    async def model_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ModelInfo:
        """Returns the served model and the limits of requests."""
        return await self._ask(MODEL_INFO, timeout_s)

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        """Returns the state of the service now."""
        return await self._ask(SERVER_INFO, timeout_s)

    async def wait_ready(self, timeout_s: float = 300.0) -> ModelInfo:
        """Returns when a request would be served. Raises DeadlineExceededError that names the last error."""
        patience = Patience(self.address, timeout_s)
        while True:
            try:
                await self._ask(HEALTH, patience.attempt_s)
                return await self._ask(MODEL_INFO, patience.attempt_s)
            except PacelineError as error:
                await asyncio.sleep(patience.pause_s(error))

    async def aclose(self) -> None:
        """Closes the connection; streams in progress end. Idempotent."""
        for channel in self._close():
            await channel.close()
