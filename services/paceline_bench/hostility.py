"""Calls that mean harm or know no better: requests to be refused, noise, and strangers.

Each is told by its kind and by the status that it got; a status that blames the service is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc import aio

from paceline.client import AsyncClient, Tls
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import types_pb2

GENERATE = "/paceline.v1.GenerationService/Generate"
BLAMING = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "500"}
"""Statuses that no request of a client may get, whatever is in it."""
_CALL_S = 20.0
_MANY = 10**9


class Hostility:
    """Hostile calls to one service, one after the other."""

    def __init__(self, address: str, http_url: str, tls: Tls | None, api_key: str | None, rng: random.Random) -> None:
        """``http_url`` is any URL of the HTTP port."""
        self._address, self._http, self._tls, self._rng = address, urlsplit(http_url), tls, rng
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.statuses: Counter[tuple[str, str]] = Counter()
        """Counts of calls by kind and final status."""

    @property
    def faults(self) -> list[str]:
        """Findings that blame the service."""
        return [
            f"{count} calls of {kind} got {status}"
            for (kind, status), count in self.statuses.items()
            if status in BLAMING
        ]

    async def run(self, per_s: float) -> None:
        """Calls indefinitely, on average ``per_s`` times a second."""
        kinds: dict[str, Callable[[], Awaitable[str]]] = {
            "long prompt": lambda: self._generate(pb.GenerateRequest(text="x" * (3 << 20))),
            "long answer": lambda: self._generate(self._asking(max_tokens=_MANY)),
            "senseless sampling": lambda: self._generate(self._asking(temperature=-1.0, top_k=_MANY)),
            "many stop strings": lambda: self._generate(self._asking(stop=["a"] * 5000)),
            "left at once": self._left,
            "noise as a message": lambda: self._raw(self._rng.randbytes(self._rng.randrange(300))),
            "noise at the gRPC port": lambda: self._noise(*self._address.rsplit(":", 1)),
            "noise at the HTTP port": lambda: self._noise(self._http.hostname or "", str(self._http.port)),
            "odd HTTP": self._odd_http,
        }
        if self._metadata:
            kinds["a stranger"] = self._stranger
        while True:
            await asyncio.sleep(self._rng.expovariate(per_s))
            kind = self._rng.choice(list(kinds))
            try:
                async with asyncio.timeout(_CALL_S):
                    status = await kinds[kind]()
            except TimeoutError:
                status = f"no answer in {_CALL_S:g} s"
            except OSError as error:
                status = type(error).__name__
            self.statuses[kind, status] += 1

    def _asking(self, **sampling: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(text="abc", sampling_params=types_pb2.SamplingParams(**sampling))

    def _channel(self) -> aio.Channel:
        options = [("grpc.max_send_message_length", -1)]
        if self._tls is None:
            return aio.insecure_channel(self._address, options=options)
        return aio.secure_channel(self._address, self._tls.credentials(), options=options)

    async def _generate(self, request: pb.GenerateRequest) -> str:
        return await self._raw(request.SerializeToString())

    async def _raw(self, data: bytes, leave: bool = False) -> str:
        async with self._channel() as channel:
            method: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
            call = method(data, metadata=self._metadata, timeout=_CALL_S)
            if leave:
                await asyncio.sleep(self._rng.uniform(0, 0.2))
                call.cancel()
            else:
                with contextlib.suppress(grpc.RpcError):
                    async for _ in call:
                        pass
            return (await call.code()).name

    async def _left(self) -> str:
        return await self._raw(self._asking(max_tokens=500).SerializeToString(), leave=True)

    async def _stranger(self) -> str:
        async with AsyncClient(self._address, tls=self._tls, api_key="nobody") as client:
            stream = client.generate("abc", max_tokens=3)
            try:
                await stream.result
            except Exception as error:
                return type(error).__name__
        raise AssertionError("a key that nobody has was taken")

    async def _noise(self, host: str, port: str) -> str:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(self._rng.randbytes(self._rng.randrange(1, 2000)))
        with contextlib.suppress(OSError):
            await writer.drain()
            await asyncio.wait_for(reader.read(100), 1.0)
        writer.transport.abort()
        return "closed"

    async def _odd_http(self) -> str:
        secure = (
            ssl.create_default_context(cafile=self._tls.ca_file) if self._http.scheme == "https" and self._tls else None
        )
        reader, writer = await asyncio.open_connection(self._http.hostname, self._http.port, ssl=secure)
        body = self._rng.choice((b"{", b"[]", b'{"prompt": 7, "n": -1}', b'{"messages": "x"}', b"\xff\xfe", b"null"))
        path = self._rng.choice(("completions", "chat/completions", "responses", "nothing"))
        key = "".join(f"{name}: {value}\r\n" for name, value in self._metadata)
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\n{key}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        line = await reader.readline()
        writer.transport.abort()
        return line.decode("latin-1")[9:12] or "closed"
