"""The common parts of the blocking and the asyncio client: addresses, TLS, requests, unary RPCs, the age of connections
and the back-off of ``wait_ready``. Nothing here waits.

Retries: gRPC itself repeats a unary call that failed with UNAVAILABLE, twice at most; ``retries.py`` decides about
streams. New calls leave a connection when the server of a call was lost, and when it is MAX_CONNECTION_AGE_S old. The
next one is opened to an address that is looked up again, so no client stays with machines that are being replaced.
Streams in progress keep their connection. Load balancers balance connections, so a client with many streams opens
several.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack
from weakref import WeakSet

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # no stubs
from pydantic import BaseModel, ConfigDict

from paceline.client.retries import Retries
from paceline.client.tracing import trace_metadata
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
from paceline.errors.files import read_bytes
from paceline.rpc import generation as api
from paceline.rpc.status import is_lost
from paceline.types import (
    Chunk,
    Request,
    SamplingFields,
    SamplingParams,
    SpeculationParams,
    as_prompt,
    as_sampling,
    as_stop_strings,
)
from paceline.v1 import generation_pb2 as pb
from paceline.v1.generation_pb2_grpc import GenerationServiceStub

log = logging.getLogger(__name__)

_SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
INFO_TIMEOUT_S = 10.0
MAX_CONNECTION_AGE_S = 300.0
"""New calls of a client leave a connection that is about so old."""
STREAMS_PER_CONNECTION, MAX_CONNECTIONS = 16, 8
"""A client whose connections have this many streams in progress each opens another one, up to this many."""
_LONGEST_TIMEOUT_S = 1e9
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": _SERVICE, "method": name} for name in ("Cancel", "GetModelInfo", "GetServerInfo")],
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
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 3_000),  # gRPC's two minutes would outlast a restart of the service
    ("grpc.service_config", json.dumps(_RETRIES)),
)

T = TypeVar("T")
StreamT = TypeVar("StreamT", bound="StreamBase")


class Tls(BaseModel):
    """TLS settings. Without any, the certificate authorities that gRPC knows are trusted."""

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
        ca, key, chain = (
            None if path is None else read_bytes(path, f"{name} is {str(path)!r}")
            for name, path in (
                ("ca_file", self.ca_file),
                ("key_file", self.key_file),
                ("certificate_file", self.certificate_file),
            )
        )
        if (key is None) != (chain is None):
            raise ConfigError("certificate_file and key_file go together: one of them is missing")
        return grpc.ssl_channel_credentials(ca, key, chain)


def _request(
    prompt: str | Sequence[int],
    sampling: SamplingParams | None,
    speculation: SpeculationParams | None,
    stop: str | Sequence[str],
    request_id: str | None,
    cache_salt: str,
    fields: SamplingFields,
) -> Request:
    """The request with an id and a seed. Raises InvalidRequestError."""
    sampling = as_sampling(sampling, fields)
    if sampling.seed is None:
        sampling = sampling.model_copy(update={"seed": secrets.randbits(64)})
    return Request(
        request_id=request_id or uuid.uuid4().hex,
        prompt=as_prompt(prompt),
        sampling=sampling,
        speculation=speculation or SpeculationParams(),
        stop=as_stop_strings(stop),
        cache_salt=cache_salt,
    )


def checked_timeout(timeout_s: float | None) -> float | None:
    """A time limit as gRPC takes it; None: no limit, or one beyond what gRPC can count. Raises InvalidRequestError."""
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidRequestError(f"timeout_s is {timeout_s}: more than 0 is allowed")
    return None if timeout_s is None or timeout_s > _LONGEST_TIMEOUT_S else timeout_s


def _checked_address(address: str) -> str:
    """``HOST:PORT``, or a gRPC target that says its scheme. Raises ConfigError."""
    address = str(address)  # a number alone is a port without a host
    scheme = address.partition(":")[0]
    if scheme in ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "xds") and scheme != address:
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16 or "/" in host:
        raise ConfigError(f"the address is {address!r}: it must be HOST:PORT of gRPC, such as localhost:9000")
    return address


def _authorization(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a key. Raises ConfigError, which does not quote it."""
    if not api_key:
        return ()
    if not all("!" <= char <= "~" for char in api_key):
        raise ConfigError("the API key holds characters that no header can carry: printable ASCII is allowed")
    return (("authorization", f"Bearer {api_key}"),)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One unary RPC: its path, its request, the type of the answer, and the function that reads the answer."""

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


def cancel_call(request_id: str) -> Call[bool]:
    request = pb.CancelRequest(request_id=request_id)
    return Call(f"/{_SERVICE}/Cancel", request, pb.CancelResponse, lambda answer: bool(answer.cancelled))


def _check_serving(answer: Any) -> None:
    """Raises EngineError unless the health check reports that a request would be served."""
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise EngineError(f"it is up, and reports {state}")


MODEL_INFO = Call(
    f"/{_SERVICE}/GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse, api.model_info_from_proto
)
SERVER_INFO = Call(
    f"/{_SERVICE}/GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse, api.server_info_from_proto
)
HEALTH = Call(
    "/grpc.health.v1.Health/Check",
    health_pb2.HealthCheckRequest(service=_SERVICE),
    health_pb2.HealthCheckResponse,
    _check_serving,
)


class Patience:
    """The back-off of ``wait_ready``: how long one attempt may take, and the pause before the next one."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._reason: PacelineError | None = None

    @property
    def attempt_s(self) -> float:
        """Seconds for the next attempt."""
        return min(max(self._end_s - time.monotonic(), 0.001), INFO_TIMEOUT_S)

    def pause_s(self, error: PacelineError) -> float:
        """Seconds to pause after ``error``. Raises it if waiting cannot help, DeadlineExceededError if time is up."""
        if not isinstance(error, EngineError | DeadlineExceededError | NotFoundError | ResourceExhaustedError):
            raise error
        if self._reason is None or not isinstance(error, DeadlineExceededError):  # that one says nothing new
            self._reason = error
        pause_s = max(self._pause_s, error.retry_after_s)
        if time.monotonic() + pause_s >= self._end_s:
            message = f"the service at {self._address} was not ready within {self._timeout_s:g} s: {self._reason}"
            raise DeadlineExceededError(message) from error
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


class Connection:
    """A channel, its stub, and when new calls should leave it. Its streams keep it alive."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.stub = GenerationServiceStub(channel)
        self.until_s = time.monotonic() + random.uniform(0.9, 1.1) * MAX_CONNECTION_AGE_S
        self._streams: WeakSet[StreamBase] = WeakSet()

    def carry(self, stream: StreamBase) -> None:
        """Counts a stream until it is over, or goes on by another connection."""
        stream._connection = self
        self._streams.add(stream)

    def num_streams(self) -> int:
        """Streams in progress."""
        for stream in [one for one in self._streams if one._transcript.over or one._connection is not self]:
            self._streams.discard(stream)
        return len(self._streams)


class ClientBase(Generic[StreamT]):
    """Base of both clients: address, credentials, connections and the making of requests."""

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
    ) -> None:
        """``address``: HOST:PORT. Without ``tls`` or ``credentials`` the connection is not encrypted.

        ``api_key``: sent with every call; None: the environment variable PACELINE_API_KEY, if it is set.

        Nothing is sent before the first request. Raises ConfigError.
        """
        if tls is not None and credentials is not None:
            raise ConfigError("tls is given, and so are credentials: give one or the other")
        self.address = _checked_address(address)
        self.metadata = _authorization(os.environ.get("PACELINE_API_KEY") if api_key is None else api_key)
        self._credentials = credentials if tls is None else tls.credentials()
        self._options = list(_OPTIONS)
        self._closed = False
        self.answered = False
        """The service has sent something of a stream."""
        if tls is not None and tls.server_name is not None:
            self._options.append(("grpc.ssl_target_name_override", tls.server_name))
        self._lock = threading.Lock()
        self._current: list[Connection] = []  # connections for new calls
        self._connections: WeakSet[Connection] = WeakSet()  # these, and others that streams still use
        self._streams: WeakSet[StreamBase] = WeakSet()

    def _make_channel(self) -> Any:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """True once the client was closed."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the client is closed")

    def connection(self, stream: StreamBase | None = None) -> Connection:
        """The connection for a call, or a stream, that begins now. Raises ValueError if the client is closed."""
        with self._lock:
            self._require_open()
            now = time.monotonic()
            self._current = [one for one in self._current if now <= one.until_s]
            best = min(self._current, key=Connection.num_streams, default=None)
            full = best is not None and stream is not None and best.num_streams() >= STREAMS_PER_CONNECTION
            if best is None or (full and len(self._current) < MAX_CONNECTIONS):
                best = Connection(self._make_channel())
                self._current.append(best)
                self._connections.add(best)
            if stream is not None:
                best.carry(stream)
            return best

    def leave(self, connection: Connection) -> None:
        """Makes later calls use another connection than this one."""
        with self._lock:
            self._current = [one for one in self._current if one is not connection]

    def _failure(self, error: grpc.RpcError, connection: Connection, timeout_s: float) -> PacelineError:
        """The error to raise for a unary call that failed."""
        if is_lost(error):
            self.leave(connection)
        return explained(error, self.address, timeout_s, 0, closed=self._closed)

    def _close(self) -> list[Any]:
        """Wakes the streams that wait to be resumed, which end; returns the channels to close."""
        with self._lock:
            self._closed, self._current = True, []
        for stream in list(self._streams):
            stream.wake()
        return [connection.channel for connection in list(self._connections)]

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
        resume: bool = True,
        cache_salt: str = "",
        **sampling_fields: Unpack[SamplingFields],
    ) -> StreamT:
        """Starts a request and returns its stream of chunks.

        ``prompt``: text, or token ids of the target's tokenizer. ``sampling_fields``: fields of SamplingParams,
        instead of ``sampling``. ``stop``: the text ends before the first of these. ``timeout_s``: for the whole
        stream; None: no limit. ``request_id``: unique among the requests in progress; drawn if absent, as is the
        seed. ``logprobs``: asks for the log probability of every token; without it, ``logprobs`` is empty.
        ``resume``: a stream whose router or connection is lost continues by itself, no token lost or twice; False:
        it raises EngineError. A new request of a client that has been answered before is also sent again, for a while,
        if nothing can be reached. ``cache_salt``: cached prompts and texts that drafts learn from are shared with
        requests of the same salt only.

        Raises InvalidRequestError for a request that cannot be sent; errors of the service are raised by the stream.
        """
        self._require_open()
        request = _request(prompt, sampling, speculation, stop, request_id, cache_salt, sampling_fields)
        message = api.request_to_proto(request, logprobs)
        timeout_s = checked_timeout(timeout_s)
        retries = Retries(resume, answered=self.answered)
        stream = self._open(Transcript(request, message, self.address, timeout_s, retries))
        self._streams.add(stream)
        return stream

    def _open(self, transcript: Transcript) -> StreamT:
        raise NotImplementedError


class StreamBase:
    """The operations of a stream that do not wait."""

    def __init__(self, client: ClientBase[Any], transcript: Transcript) -> None:
        self._client = client  # its channels live as long as the stream
        self._transcript = transcript
        self._call: Any = None
        self._connection: Connection
        self._metadata = (*client.metadata, *trace_metadata())  # the caller's trace goes on when the stream is resumed
        self._begin()

    def _begin(self) -> None:
        """Sends the request, with the tokens received so far."""
        connection = self._client.connection(self)
        message, timeout_s = self._transcript.next_call()
        self._call = connection.stub.Generate(message, timeout=timeout_s, metadata=self._metadata)

    @property
    def request_id(self) -> str:
        """The name of the request, for ``client.cancel``."""
        return self._transcript.request.request_id

    @property
    def num_resumes(self) -> int:
        """Number of times that the stream broke, after its first token, and was continued."""
        return self._transcript.num_resumes

    def cancel(self) -> None:
        """Ends the request now; its result holds the tokens so far, finish_reason ``abort``. Any thread may call it."""
        if not self._transcript.over:
            self._transcript.cancelled = True
            if self._call is not None:
                self._call.cancel()

    def wake(self) -> None:
        """Ends the wait of a stream that is about to be resumed. Called when the client is closed."""
        raise NotImplementedError

    def _take(self, message: pb.GenerateResponse) -> Chunk | None:
        self._client.answered = True
        chunk = self._transcript.feed(message)
        if self._transcript.over:  # the message could not be read
            self._call.cancel()
        return chunk

    def _failed(self, error: grpc.RpcError) -> float | None:
        """Records the end of a call; returns seconds until the request is sent again; None: the stream is over."""
        closed = self._client.closed
        pause_s = None if closed else self._transcript.pause_s(error)
        if pause_s is None:
            self._transcript.end(error, closed=closed)
            return None
        if is_lost(error):
            self._client.leave(self._connection)
        code, name = error.code().name, self._client.address
        log.info(
            "the stream %s from %s broke (%s: %s); again in %.2f s",
            self.request_id,
            name,
            code,
            error.details(),
            pause_s,
        )
        return pause_s
