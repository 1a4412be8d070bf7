"""The blocking client.

with Client("localhost:9000") as client:
    stream = client.generate("def main():", max_tokens=64, temperature=0.7)
    for chunk in stream:
        print(chunk.text, end="")
    print(stream.result.usage)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
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
    """A context manager whose block ends with ``close``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(StreamBase, _Closes, Iterator[Chunk]):
    """A request in progress: iterate over its chunks, then read ``result``. One consumer.

    Leaving it cancels the request on the server: ``close``, the end of a ``with`` block, or dropping the
    last reference, as a ``for`` loop does that is left early.
    """

    def __init__(self, client: Client, transcript: Transcript) -> None:
        self._lock = threading.RLock()  # a garbage collector may cancel it where it holds the lock already
        self._woken = threading.Event()
        super().__init__(client, transcript)

    def __next__(self) -> Chunk:
        """The next chunk, waiting for it. Raises the PacelineError that the stream fails with."""
        while not self._transcript.over:
            try:
                chunk = self._take(next(self._call))
            except StopIteration:
                self._transcript.end()
            except grpc.RpcError as error:
                if (pause_s := self._failed(error)) is not None:
                    self._again(pause_s)
            else:
                if chunk is not None:
                    return chunk
        self._transcript.check()
        raise StopIteration

    def _again(self, pause_s: float) -> None:
        self._woken.wait(pause_s)
        with self._lock:
            if self._transcript.cancelled or self._client.closed:
                self._transcript.end(closed=self._client.closed)
            else:
                self._begin()

    @property
    def result(self) -> Result:
        """The finished request, waiting for it; chunks that were not iterated over are part of it.

        Raises the PacelineError that the stream fails with.
        """
        for _ in self:
            pass
        return self._transcript.result

    def cancel(self) -> None:
        """Ends the request now; its result holds the tokens so far, finish_reason ``abort``. Any thread may call it."""
        with self._lock:
            super().cancel()
        self.wake()

    def wake(self) -> None:
        """Ends the wait of a stream that is about to be resumed. Called when the client is closed."""
        self._woken.set()

    def close(self) -> None:
        """Cancels the request if it is still in progress."""
        self.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client(ClientBase[Stream], _Closes):
    """A blocking client. A context manager; several threads may use it."""

    def _make_channel(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self.address, self._options)
        return grpc.secure_channel(self.address, self._credentials, self._options)

    def _open(self, transcript: Transcript) -> Stream:
        return Stream(self, transcript)

    def _ask(self, call: Call[T], timeout_s: float) -> T:
        connection, timeout = self.connection(), checked_timeout(timeout_s)
        try:
            answer = call.on(connection.channel)(call.request, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            raise self._failure(error, connection, timeout_s) from error
        return call.read(answer)

    def cancel(self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S) -> bool:
        """Ends a request by its id, also another client's; its stream completes with finish_reason ``abort``.

        False: no such request is in progress.
        """
        return self._ask(cancel_call(request_id), timeout_s)

    def model_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ModelInfo:
        """Returns the served model and the limits of requests."""
        return self._ask(MODEL_INFO, timeout_s)

    def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> ServerInfo:
        """Returns the state of the service now."""
        return self._ask(SERVER_INFO, timeout_s)

    def wait_ready(self, timeout_s: float = 300.0) -> ModelInfo:
        """Returns when a request would be served. Raises DeadlineExceededError that names the last error."""
        patience = Patience(self.address, timeout_s)
        while True:
            try:
                self._ask(HEALTH, patience.attempt_s)
                return self._ask(MODEL_INFO, patience.attempt_s)
            except PacelineError as error:
                time.sleep(patience.pause_s(error))

    def close(self) -> None:
        """Closes the connection; streams in progress end. Idempotent."""
        for channel in self._close():
            channel.close()
