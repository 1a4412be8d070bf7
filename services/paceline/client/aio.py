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
from typing import TYPE_CHECKING, Any, Self, TypeVar

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
from paceline.client.transcript import Transcript, explained
from paceline.errors import PacelineError
from paceline.types import Chunk, ModelInfo, Result, ServerInfo
from paceline.v1 import generation_pb2 as pb
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

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

    def __init__(self, call: Any, transcript: Transcript, client: object) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(call, transcript, client)
        self._messages = aiter(call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Raises the PacelineError that the stream fails with."""
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        while not self._transcript.over:
            try:
                chunk = self._take(await anext(self._messages))
            except StopAsyncIteration:
                self._transcript.end()
            except grpc.RpcError as error:
                self._transcript.end(error)
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
        """Ends the request now; what has arrived is its result, finish_reason ``abort``. Any thread may call it."""
        if self._transcript.over:
            return
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            super().cancel()
        else:  # a garbage collector runs in any thread
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
                self._loop.call_soon_threadsafe(super().cancel)

    def __del__(self) -> None:
        self.cancel()


class AsyncClient(ClientBase[AsyncStream], _Closes):
    """A client for asyncio. An async context manager; belongs to the event loop that first uses it."""

    def _connect(self) -> None:
        self._made: tuple[grpc.aio.Channel, GenerationServiceAsyncStub] | None = None

    def _connection(self) -> tuple[grpc.aio.Channel, GenerationServiceAsyncStub]:
        """Channel and stub, made when they are first needed: in the loop that runs then."""
        if self._made is None:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self.address, self._options)
            else:
                channel = grpc.aio.secure_channel(self.address, self._credentials, self._options)
            self._made = channel, GenerationServiceStub(channel)
        return self._made

    def _open(self, message: pb.GenerateRequest, transcript: Transcript, timeout_s: float | None) -> AsyncStream:
        return AsyncStream(
            self._connection()[1].Generate(message, timeout=timeout_s, metadata=self._metadata), transcript, self
        )

    async def _ask(self, call: Call[T], timeout_s: float) -> T:
        self._require_open()
        try:
            answer = await call.on(self._connection()[0])(
                call.request, timeout=checked_timeout(timeout_s), metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise explained(error, self.address, timeout_s, 0) from error
        return call.read(answer)

    async def cancel(self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S) -> bool:
        """Ends a request by its id, whoever started it; its stream completes with finish_reason ``abort``.

        False: no such request is in progress.
        """
        return await self._ask(cancel_call(request_id), timeout_s)

    async def model_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ModelInfo:
        """Returns what is served, and what a request may ask for."""
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
        self._closed = True
        if self._made is not None:
            await self._made[0].close()
