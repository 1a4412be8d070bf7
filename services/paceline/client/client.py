"""Clients of a running service: ``Client`` blocks, ``AsyncClient`` awaits; otherwise they are the same.

    with Client("localhost:9000") as client:
        stream = client.generate("def main():", max_tokens=64, temperature=0.7)
        for chunk in stream:
            print(chunk.text, end="")
        print(stream.result.usage)

What both share is in ``transcript.py`` (a stream's messages become chunks and a Result), ``_Call`` (the unary RPCs)
and ``_Base``; the pairs of classes below differ in how they wait.

Retries: gRPC itself repeats a call that failed with UNAVAILABLE before the first message came, twice at most. A
request keeps its id and seed then, so what a dead router had begun and what the next one sends are the same
tokens. After the first message nothing is repeated, nor is a request too large for gRPC's buffer (256 KiB).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # no stubs
from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.client.transcript import Transcript, explained
from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PacelineError,
    ResourceExhaustedError,
)
from paceline.refusals import explain_parameter
from paceline.rpc import generation as api
from paceline.types import Chunk, ModelInfo, Request, Result, SamplingParams, ServerInfo, SpeculationParams
from paceline.v1 import generation_pb2 as pb
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from paceline.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
_INFO_TIMEOUT_S = 10.0
_LONGEST_TIMEOUT_S = 1e9
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": _SERVICE}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),  # unlimited
    ("grpc.max_receive_message_length", -1),
    # the ingress closes connections that ping more often than every five minutes
    ("grpc.keepalive_time_ms", 360_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),  # a long silent stream is still pinged
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),  # gRPC's two minutes would outlast a restart of the service
    ("grpc.service_config", json.dumps(_RETRIES)),
)

T = TypeVar("T")
StreamT = TypeVar("StreamT")


class Tls(BaseModel):
    """How to speak TLS; without a field, with the certificate authorities that gRPC knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_file: Path | None = None
    """PEM file of the authorities to trust."""
    certificate_file: Path | None = None
    """PEM file of the client's own certificate chain, with ``key_file``."""
    key_file: Path | None = None
    server_name: str | None = None
    """The name in the server's certificate, if it is not the address's."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files. Raises ConfigError."""
        ca, key, chain = (_read(path) for path in (self.ca_file, self.key_file, self.certificate_file))
        if (key is None) != (chain is None):
            raise ConfigError("certificate_file and key_file go together: one of them is missing")
        return grpc.ssl_channel_credentials(ca, key, chain)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


# -- what both clients share -------------------------------------------------------------------------------------


def _request(
    prompt: str | Sequence[int],
    sampling: SamplingParams | None,
    speculation: SpeculationParams | None,
    stop: str | Sequence[str],
    request_id: str | None,
    fields: dict[str, Any],
) -> Request:
    """The request with an id and a seed. Raises InvalidRequestError."""
    if sampling is not None and fields:
        raise InvalidRequestError(f"sampling is given, and so is {', '.join(fields)}: give one or the other")
    try:
        sampling = sampling or SamplingParams(**fields)
    except ValidationError as error:
        raise InvalidRequestError(explain_parameter(error, SamplingParams)) from error
    if sampling.seed is None:
        sampling = sampling.model_copy(update={"seed": secrets.randbits(64)})
    return Request(
        request_id=request_id or uuid.uuid4().hex,
        prompt=prompt if isinstance(prompt, str) else _token_ids(prompt),
        sampling=sampling,
        speculation=speculation or SpeculationParams(),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequestError("the prompt is bytes: text or a sequence of token ids is allowed")
    try:
        return tuple(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidRequestError(f"the prompt is neither text nor a sequence of token ids: {error}") from error


def _checked_timeout(timeout_s: float | None) -> float | None:
    """None for no limit, or one beyond what gRPC can count. Raises InvalidRequestError."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError(f"timeout_s is {timeout_s}: more than 0 is allowed")
    return None if timeout_s is None or timeout_s > _LONGEST_TIMEOUT_S else timeout_s


def _checked_address(address: str) -> str:
    """``HOST:PORT``, or a gRPC target that says its scheme. Raises ConfigError."""
    scheme = address.partition(":")[0]
    if scheme in ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "xds") and scheme != address:
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or "/" in host:
        raise ConfigError(f"the address is {address!r}: it must be HOST:PORT, such as localhost:9000")
    return address


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """One unary RPC: its path, its request, the message that answers and what that means."""

    path: str
    request: Message
    answer: type[Message]
    read: Callable[[Any], T]

    def on(self, channel: Any) -> Any:
        """The RPC on a blocking or an asyncio channel."""
        return channel.unary_unary(
            self.path,
            request_serializer=type(self.request).SerializeToString,
            response_deserializer=self.answer.FromString,
        )


def _cancel(request_id: str) -> _Call[bool]:
    request = pb.CancelRequest(request_id=request_id)
    return _Call(f"/{_SERVICE}/Cancel", request, pb.CancelResponse, lambda answer: bool(answer.cancelled))


def _check_serving(answer: Any) -> None:
    """Raises EngineError unless the health check says that a request would be served."""
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise EngineError(f"it is up, and says that it is {state}")


_MODEL_INFO = _Call(
    f"/{_SERVICE}/GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse, api.model_info_from_proto
)
_SERVER_INFO = _Call(
    f"/{_SERVICE}/GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse, api.server_info_from_proto
)
_HEALTH = _Call(
    "/grpc.health.v1.Health/Check",
    health_pb2.HealthCheckRequest(service=_SERVICE),
    health_pb2.HealthCheckResponse,
    _check_serving,
)


class _Patience:
    """While a service starts: how long to ask once, and how long to pause before the next time."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._reason: PacelineError | None = None

    @property
    def attempt_s(self) -> float:
        """Seconds for the next attempt."""
        return min(max(self._end_s - time.monotonic(), 0.001), _INFO_TIMEOUT_S)

    def pause_s(self, error: PacelineError) -> float:
        """Seconds to pause after ``error``. Raises it if time cannot help, DeadlineExceededError if it is over."""
        if not isinstance(error, EngineError | DeadlineExceededError | NotFoundError | ResourceExhaustedError):
            raise error
        if self._reason is None or not isinstance(error, DeadlineExceededError):  # that one says nothing new
            self._reason = error
        if time.monotonic() + self._pause_s >= self._end_s:
            message = f"the service at {self._address} was not ready within {self._timeout_s:g} s: {self._reason}"
            raise DeadlineExceededError(message) from error
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class _Base(Generic[StreamT]):
    """Address, credentials and the making of requests."""

    def __init__(
        self, address: str, *, tls: Tls | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """``address``: HOST:PORT. Without ``tls`` or ``credentials`` the connection is not encrypted.

        Nothing is sent before the first request. Raises ConfigError.
        """
        if tls is not None and credentials is not None:
            raise ConfigError("tls is given, and so are credentials: give one or the other")
        self.address = _checked_address(address)
        self._credentials = credentials if tls is None else tls.credentials()
        self._options = list(_OPTIONS)
        self._closed = False
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._connect()

    def _connect(self) -> None:
        raise NotImplementedError

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the client is closed")

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        timeout_s: float | None = None,
        request_id: str | None = None,
        logprobs: bool = False,
        **sampling_fields: Any,
    ) -> StreamT:
        """Starts a request and returns its stream of chunks.

        ``prompt``: text, or token ids of the target's tokenizer. ``sampling_fields``: fields of SamplingParams,
        instead of ``sampling``. ``stop``: the text ends before the first of these. ``timeout_s``: for the whole
        stream; None: no limit. ``request_id``: unique among the requests in progress; drawn if absent, as is the
        seed. ``logprobs``: asks for the log probability of every token; without, ``logprobs`` is empty.

        Raises InvalidRequestError for what cannot be sent; whatever the service says comes from the stream.
        """
        self._require_open()
        request = _request(prompt, sampling, speculation, stop, request_id, sampling_fields)
        timeout_s = _checked_timeout(timeout_s)
        transcript = Transcript(request, self.address, timeout_s)
        return self._open(api.request_to_proto(request, logprobs), transcript, timeout_s)

    def _open(self, message: pb.GenerateRequest, transcript: Transcript, timeout_s: float | None) -> StreamT:
        raise NotImplementedError


class _Stream:
    """What can be done to a stream without waiting."""

    def __init__(self, call: Any, transcript: Transcript, client: object) -> None:
        self._call = call
        self._transcript = transcript
        self._client = client  # its channel lives as long as the stream

    @property
    def request_id(self) -> str:
        """The name of the request, for ``client.cancel``."""
        return self._transcript.request.request_id

    def cancel(self) -> None:
        """Ends the request now. What has come is its result, finish_reason ``abort``. Any thread may call it."""
        if not self._transcript.over:
            self._transcript.cancelled = True
            self._call.cancel()

    def _take(self, message: pb.GenerateResponse) -> Chunk | None:
        chunk = self._transcript.feed(message)
        if self._transcript.over:  # the message made no sense
            self._call.cancel()
        return chunk


# -- blocking ----------------------------------------------------------------------------------------------------


class Stream(_Stream, Iterator[Chunk]):
    """A request in progress: iterate over its chunks, then read ``result``. One consumer.

    Leaving it cancels the request on the server: ``close``, the end of a ``with`` block, or dropping the
    last reference, as a ``for`` loop does that is left early.
    """

    def __next__(self) -> Chunk:
        """The next chunk, waiting for it. Raises the PacelineError that the stream fails with."""
        while not self._transcript.over:
            try:
                chunk = self._take(next(self._call))
            except StopIteration:
                self._transcript.end()
            except grpc.RpcError as error:
                self._transcript.end(error)
            else:
                if chunk is not None:
                    return chunk
        self._transcript.check()
        raise StopIteration

    @property
    def result(self) -> Result:
        """The finished request, waiting for it; chunks that were not iterated over are part of it.

        Raises the PacelineError that the stream fails with.
        """
        for _ in self:
            pass
        return self._transcript.result

    def close(self) -> None:
        """Cancels the request if it is still in progress."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.cancel()


class Client(_Base[Stream]):
    """A blocking client. A context manager; several threads may use it."""

    def _connect(self) -> None:
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self.address, self._options)
        else:
            self._channel = grpc.secure_channel(self.address, self._credentials, self._options)
        self._stub = GenerationServiceStub(self._channel)

    def _open(self, message: pb.GenerateRequest, transcript: Transcript, timeout_s: float | None) -> Stream:
        return Stream(self._stub.Generate(message, timeout=timeout_s), transcript, self)

    def _ask(self, call: _Call[T], timeout_s: float) -> T:
        self._require_open()
        try:
            answer = call.on(self._channel)(call.request, timeout=_checked_timeout(timeout_s))
        except grpc.RpcError as error:
            raise explained(error, self.address, timeout_s, 0) from error
        return call.read(answer)

    def cancel(self, request_id: str, *, timeout_s: float = _INFO_TIMEOUT_S) -> bool:
        """Ends a request by its id, whoever started it; its stream completes with finish_reason ``abort``.

        False: no such request is in progress.
        """
        return self._ask(_cancel(request_id), timeout_s)

    def model_info(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> ModelInfo:
        """What is served, and what a request may ask for."""
        return self._ask(_MODEL_INFO, timeout_s)

    def server_info(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        """The state of the service now."""
        return self._ask(_SERVER_INFO, timeout_s)

    def wait_ready(self, timeout_s: float = 300.0) -> ModelInfo:
        """Returns when a request would be served. Raises DeadlineExceededError, saying what was wrong last."""
        patience = _Patience(self.address, timeout_s)
        while True:
            try:
                self._ask(_HEALTH, patience.attempt_s)
                return self._ask(_MODEL_INFO, patience.attempt_s)
            except PacelineError as error:
                time.sleep(patience.pause_s(error))

    def close(self) -> None:
        """Closes the connection; streams in progress end. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# -- asyncio -----------------------------------------------------------------------------------------------------


class AsyncStream(_Stream):
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """Ends the request now. What has come is its result, finish_reason ``abort``. Any thread may call it."""
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


class AsyncClient(_Base[AsyncStream]):
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
        return AsyncStream(self._connection()[1].Generate(message, timeout=timeout_s), transcript, self)

    async def _ask(self, call: _Call[T], timeout_s: float) -> T:
        self._require_open()
        try:
            answer = await call.on(self._connection()[0])(call.request, timeout=_checked_timeout(timeout_s))
        except grpc.RpcError as error:
            raise explained(error, self.address, timeout_s, 0) from error
        return call.read(answer)

    async def cancel(self, request_id: str, *, timeout_s: float = _INFO_TIMEOUT_S) -> bool:
        """See ``Client.cancel``."""
        return await self._ask(_cancel(request_id), timeout_s)

    async def model_info(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> ModelInfo:
        """See ``Client.model_info``."""
        return await self._ask(_MODEL_INFO, timeout_s)

    async def server_info(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> ServerInfo:
        """See ``Client.server_info``."""
        return await self._ask(_SERVER_INFO, timeout_s)

    async def wait_ready(self, timeout_s: float = 300.0) -> ModelInfo:
        """See ``Client.wait_ready``."""
        patience = _Patience(self.address, timeout_s)
        while True:
            try:
                await self._ask(_HEALTH, patience.attempt_s)
                return await self._ask(_MODEL_INFO, patience.attempt_s)
            except PacelineError as error:
                await asyncio.sleep(patience.pause_s(error))

    async def aclose(self) -> None:
        """Closes the connection; streams in progress end. Idempotent."""
        self._closed = True
        if self._made is not None:
            await self._made[0].close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
