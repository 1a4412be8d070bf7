"""The HTTP port of ``serve --local`` on raw sockets: what a request may cost before there is one."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.web.chats import Scripted
from tests.web.support import call, edge_over, served

from paceline.cli import local_http
from paceline.cli.local_http import BoundedProtocol, OncePerMinute


class Held(Scripted):
    """Answers once it is let go."""

    held = True

    async def run(self, request: Any, owner: str = "", on_usage: Any = None) -> Any:
        self.requests.append(request)
        while self.held:
            await asyncio.sleep(0.005)
        async for item in super().run(request, owner, on_usage):
            yield item


GET = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(edge_over(Scripted(), allowed_hosts=()), http=BoundedProtocol, ws="none") as url:
        yield urlsplit(url).port or 0


@contextlib.contextmanager
def connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        yield one


def send(one: socket.socket, data: bytes) -> None:
    """Sends; a server that has closed already is no failure."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        one.sendall(data)


def rest(one: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(65536):
            parts.append(part)
    return b"".join(parts)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def message(answer: bytes) -> str:
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return text


ENDLESS = {
    "a header": (b"GET / HTTP/1.1\r\nx: ", b"a" * 4096),
    "headers": (b"GET / HTTP/1.1\r\n", b"x: a\r\n" * 512),
    "a path": (b"GET /", b"a" * 4096),
    "a method's blanks": (b"GET / HTTP/1.1", b" " * 4096),
    "empty lines": (b"", b"\r\n" * 2048),
    "a chunk's extension": (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
    "a trailer": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ", b"a" * 4096),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: a\r\n" * 512),
    "chunks of a byte": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n" * 512),
}
"""What begins a request, and what goes on for ever."""


@pytest.mark.parametrize("what", ENDLESS)
def test_a_request_that_does_not_end_is_closed_within_its_bounds(port: int, what: str) -> None:
    begin, more = ENDLESS[what]
    with connection(port) as one:
        send(one, begin)
        sent = 0
        one.setblocking(False)
        until = time.monotonic() + 20
        while sent < 64 << 20 and time.monotonic() < until:  # socket buffers take some of it
            try:
                sent += one.send(more)
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
        assert sent < 64 << 20
    assert call(f"http://127.0.0.1:{port}/version")[0] == 200


def test_headers_that_are_too_large_are_told(port: int) -> None:
    for head in (b"x: " + b"a" * 40_000, b"x: a\r\n" * 200):
        with connection(port) as one:
            send(one, b"GET / HTTP/1.1\r\n" + head)
            answer = rest(one)
            assert status(answer) == 431
            assert "at most 128, of 32768 bytes" in message(answer)
    with connection(port) as one:  # what is allowed
        send(one, GET[:-2] + b"x: " + b"a" * 30_000 + b"\r\nconnection: close\r\n\r\n")
        assert status(rest(one)) == 200


def test_a_head_that_does_not_come_in_time_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with connection(port) as later:
        send(later, GET)
        answer = b""
        while not answer.endswith(b"}"):  # its body may come later
            answer += later.recv(65536)
        assert status(answer) == 200
        monkeypatch.setattr(local_http, "HEAD_S", 1.0)
        with connection(port) as silent, connection(port) as slow:
            send(slow, GET[:20])
            send(later, b"\r\n")  # blank lines begin no request
            assert rest(silent) == rest(later) == b""
            assert status(rest(slow)) == 408


def test_a_body_that_does_not_come_in_time_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.web.bodies.BODY_S", 0.3)
    with connection(port) as one:
        send(one, POST + b"connection: close\r\ncontent-length: 100\r\n\r\n{")
        answer = rest(one)
        assert (status(answer), message(answer)) == (408, "the body did not come within 0.3 s")
    monkeypatch.setattr(local_http, "BODY_S", 0.0)  # the connection, if the application waits
    monkeypatch.setattr(local_http, "GRACE_S", 0.2)
    monkeypatch.setattr("paceline.web.bodies.BODY_S", 60)
    with connection(port) as one:
        send(one, POST + b"content-length: 100\r\n\r\n{")
        assert status(rest(one)) == 408


def test_idle_connections_make_room_for_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "limit", 8)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connection(port)) for _ in range(30)]
        for one in idle[:20]:
            assert rest(one) == b""
        assert call(f"http://127.0.0.1:{port}/version")[0] == 200


def test_requests_in_progress_are_no_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "limit", 3)
    service = Held()
    with served(edge_over(service), http=BoundedProtocol, ws="none") as url, contextlib.ExitStack() as stack:
        at, body = urlsplit(url).port or 0, b'{"prompt": "abc"}'
        answered = [stack.enter_context(connection(at)) for _ in range(3)]
        for one in answered:
            send(one, POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while len(service.requests) < 3:
            time.sleep(0.005)
        with connection(at) as more:
            assert status(rest(more)) == 503
        service.held = False
        for one in answered:
            assert status(rest(one)) == 200


def test_no_more_requests_wait_on_a_connection_than_a_few(port: int) -> None:
    with connection(port) as one:
        send(one, GET * 5)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 5:
            answers += one.recv(65536)
    with connection(port) as one:
        send(one, GET * 5000)
        assert rest(one).count(b"HTTP/1.1 200") < 20


LARGE = 4 << 20


@pytest.fixture(scope="module")
def large() -> Iterator[int]:
    """A port whose ``/v1/models`` has more bytes than sockets hold."""
    edge = edge_over(Scripted(), allowed_hosts=(), aliases=("m" * LARGE,))
    with served(edge, http=BoundedProtocol, ws="none") as at:
        yield urlsplit(at).port or 0


@contextlib.contextmanager
def unread(port: int) -> Iterator[socket.socket]:
    """A client that asks for a large answer."""
    with connection(port) as one:
        send(one, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        yield one


def calls_of(name: str, patch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Released after each call of this method of a connection."""
    method, calls = getattr(BoundedProtocol, name), threading.Semaphore(0)
    patch.setattr(BoundedProtocol, name, lambda *args: (method(*args), calls.release()))
    return calls


def test_a_client_that_reads_nothing_is_given_up(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "UNREAD_S", 0.3)
    given_up = calls_of("_give_up", monkeypatch)
    with unread(large) as one:
        assert given_up.acquire(timeout=60)
        assert len(rest(one)) < LARGE


def test_a_client_that_reads_slowly_is_served(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "UNREAD_S", 2.0)
    with unread(large) as one:
        size = 0
        for _ in range(20):
            size += len(one.recv(65536))
            time.sleep(0.2)
        assert size + len(rest(one)) > LARGE


def test_of_too_much_that_is_unread_the_oldest_is_given_up(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "MAX_UNREAD_BYTES", LARGE + (1 << 19))
    waits = calls_of("pause_writing", monkeypatch)
    with contextlib.ExitStack() as stack:
        ones = []
        for _ in range(6):
            ones.append(stack.enter_context(unread(large)))
            assert waits.acquire(timeout=60)
        assert len(rest(ones[0])) < LARGE
        assert len(rest(ones[-1])) > LARGE


GARBAGE = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 100, b"{}"]


def test_garbage_is_logged_once_a_minute(port, caplog, monkeypatch) -> None:
    (only,) = local_http._log.filters
    monkeypatch.setattr(only, "last_logged_s", -60.0)  # a minute has passed
    monkeypatch.setattr(only, "num_left_out", 0)
    with caplog.at_level(logging.WARNING):
        for data in GARBAGE * 5:
            with connection(port) as one:
                send(one, data + b"\r\n\r\n")
                assert status(rest(one)) in (400, 505)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "\x16" not in caplog.text


def test_a_minute_later_the_log_says_how_many_were_left_out() -> None:
    only, records = OncePerMinute(), []
    for at in (0.0, 1.0, 59.0, 61.0):
        record = logging.LogRecord("x", logging.WARNING, "", 0, "closed: %s", ("why",), None)
        record.created = 1000 + at
        if only.filter(record):
            records.append(record.getMessage())
    assert records == ["closed: why", "closed: why (2 more like it since the last such line)"]


HOSTS = {
    b"localhost": 200, b"LOCALHOST:80": 200, b"app.localhost": 200, b"127.0.0.1:8000": 200, b"[::1]:8000": 200,
    b"10.1.2.3": 200, b"gateway": 200, b"evil.example": 403, b"evil.example:8000": 403, b"localhost.evil.example": 403,
    b"127.0.0.1.evil.example": 403, b"evil.example#localhost": 403, b"": 403,
}  # fmt: skip


def test_only_hosts_of_this_machine_are_answered_on_the_loopback(port: int) -> None:
    for host, wanted in HOSTS.items():
        with connection(port) as one:
            send(one, b"GET /version HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n")
            assert status(rest(one)) == wanted, host
