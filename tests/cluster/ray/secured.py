"""A whole service with TLS outside and inside and API keys, as ``test_command.py`` starts it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import socket
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from tests.security.conftest import Mounted, digest, write_keys

from paceline.client import Client, Tls
from paceline.errors import EngineError, UnauthenticatedError
from paceline.security.haproxy_config import TLS_HEADER
from paceline.types import FinishReason

INNER = (
    "GenerationService/GetModelInfo",
    "GenerationService/Generate",
    "TargetService/Rounds",
    "DraftService/Rounds",
)
HOST = "127.0.0.2"
"""Of the public ports, and of nothing else: the loopback, where all others are, is 127.0.0.1."""


class Secured:
    """Files of a service, the flags that name them, and what must hold of it while it runs."""

    def __init__(self, folder: Path) -> None:
        for name in ("public", "internal"):
            (folder / name).mkdir()
        self.public = Mounted(folder / "public", (HOST,))
        self.internal = Mounted(folder / "internal", ("internal.paceline",))
        entries = [{"name": name, "sha256": digest(f"key-of-{name}")} for name in ("alice", "bob")]
        entries[0]["metrics"] = True
        self.keys = write_keys(folder / "keys.yaml", *entries)

    @property
    def flags(self) -> list[str]:
        files = {"certificate": self.internal.certificate, "key": self.internal.key, "ca": self.internal.ca}
        internal = [part for key, file in files.items() for part in ("--set", f"internal_tls.{key}={file}")]
        public = ["--tls-certificate", str(self.public.certificate), "--tls-key", str(self.public.key)]
        return [*public, "--api-keys", str(self.keys), *internal, "--routers", "2"]

    def client(self, port: int, name: str = "") -> Client:
        return Client(f"{HOST}:{port}", tls=Tls(ca_file=self.public.ca), api_key=name and f"key-of-{name}")

    def check(self, grpc_port: int, http_port: int) -> None:
        """Who gets in, whose requests are whose, and what a renewal changes."""
        with self.client(grpc_port, "alice") as alice, self.client(grpc_port, "bob") as bob:
            for stranger in (self.client(grpc_port), self.client(grpc_port, "nobody")):
                with stranger:
                    for call in (
                        lambda client: client.generate("hello", max_tokens=5).result,
                        lambda client: client.model_info(),
                        lambda client: client.server_info(),
                        lambda client: client.cancel("x"),
                    ):
                        with pytest.raises(UnauthenticatedError, match="the API key is missing or wrong"):
                            call(stranger)
            with Client(f"{HOST}:{grpc_port}") as plain, pytest.raises(EngineError, match="cannot be reached"):
                plain.model_info()
            stream = alice.generate("hello", max_tokens=1500, ignore_eos=True)
            next(stream)
            answers = [bob.cancel(stream.request_id), bob.cancel("unknown"), alice.cancel("unknown")]
            assert answers == [False, False, False]
            before = shown(grpc_port)
            self.public.renew()
            end = time.monotonic() + 60
            while shown(grpc_port) == before:
                assert time.monotonic() < end
                time.sleep(0.1)
            next(stream)
            assert alice.cancel(stream.request_id)
            assert stream.result.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            with self.client(grpc_port, "bob") as new:
                assert new.generate("hello", max_tokens=5, ignore_eos=True).result.usage.completion_tokens == 5
        self.check_http(http_port)
        for line in ('use="internal"', 'use="server"', 'paceline_key_tokens_total{key="bob",kind="completion"} 5.0'):
            page = self.metrics(http_port, line)
        assert "key-of" not in page

    def check_http(self, port: int) -> None:
        """The same keys at the HTTP port, and no answer in clear text."""
        context = ssl.create_default_context(cafile=str(self.public.ca))
        body = json.dumps({"prompt": "hello", "max_tokens": 5, "seed": 1}).encode()
        for key, status in (("key-of-alice", 200), ("nobody", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(f"https://{HOST}:{port}/v1/completions", body, headers)
            with contextlib.closing(_reply(request, context)) as reply:
                assert reply.status == status
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=60)

    def check_inside(self, ports: set[int]) -> None:
        """Past the public ports nobody without a key or the internal certificate is served, encrypted or not.

        The header by which the proxy says that a connection is encrypted helps nobody who writes it himself.
        """
        authorities = [None, self.public.ca.read_bytes(), self.internal.ca.read_bytes()]
        names = [("grpc.ssl_target_name_override", "internal.paceline")]
        for port, authority in itertools.product(sorted(ports), authorities):
            address = f"127.0.0.1:{port}"
            if authority is None:
                channel = grpc.insecure_channel(address)
            else:
                channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), names)
            with channel:
                for method in INNER:
                    call = channel.stream_stream(f"/paceline.v1.{method}")
                    with pytest.raises(grpc.RpcError):
                        list(call(iter([b""]), timeout=2, metadata=((TLS_HEADER, "1"),)))
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                head = f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n{TLS_HEADER}: 1\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode())
                assert b"HTTP/1.1 200" not in connection.recv(100)

    def completion(self, port: int, sampling: dict) -> dict:
        """The body of a completion over HTTP."""
        context = ssl.create_default_context(cafile=str(self.public.ca))
        body = json.dumps({"prompt": "hello", **sampling}).encode()
        request = urllib.request.Request(
            f"https://{HOST}:{port}/v1/completions", body, {"Authorization": "Bearer key-of-alice"}
        )
        with urllib.request.urlopen(request, context=context, timeout=60) as reply:
            return json.loads(reply.read())

    def metrics(self, port: int, line: str, at_least: float = -math.inf) -> str:
        """Alice's metrics page, once lines like one show at least a value together: replicas report it later."""
        asked = urllib.request.Request(
            f"https://{HOST}:{port}/metrics", headers={"Authorization": "Bearer key-of-alice"}
        )
        context = ssl.create_default_context(cafile=str(self.public.ca))
        end = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(asked, context=context) as page:
                text = page.read().decode()
            values = [float(shown.split()[-1]) for shown in text.splitlines() if line in shown and shown[0] != "#"]
            if values and sum(values) >= at_least:
                return text
            assert time.monotonic() < end, text
            time.sleep(0.2)


def _reply(request: urllib.request.Request, context: ssl.SSLContext):
    try:
        return urllib.request.urlopen(request, context=context, timeout=60)
    except urllib.error.HTTPError as error:
        return error


def shown(port: int) -> bytes | None:
    """The certificate that a port shows now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HOST, port)) as plain, context.wrap_socket(plain) as tls:
        return tls.getpeercert(True)
