"""The HTTP port of ``paceline serve --local``: uvicorn's protocol with the bounds that a proxy would hold.

In front of Ray Serve HAProxy enforces them (``cluster/environment.py``). uvicorn bounds neither the head of a request
nor the time of its arrival, and keeps idle connections that have sent nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import resource
import sys
import termios
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.web.bodies import BODY_S
from paceline.web.errors import body_of

HEAD_S = 10.0
"""Longest time from a connection, or the first byte of a later request, to the end of the request's headers."""
MAX_HEAD_BYTES = 32768
"""Maximum bytes of a request line with its headers; also of chunk framing and trailers around the body."""
MAX_HEADERS = 128
"""Headers and trailers of one request."""
MAX_PIPELINED = 8
"""Requests that wait on one connection for the answer to an earlier one."""
MAX_CONNECTIONS = 1024
_OWN_FILES = 256
"""File descriptors that are left for all else."""
UNREAD_S = 60.0
"""Longest time in which a client reads nothing of an answer that waits for it."""
MAX_UNREAD_BYTES = 128 << 20
"""Bytes of answers that wait for their clients; beyond them the one that has waited longest is given up."""
GRACE_S = 5.0
"""The application refuses a late body itself; this is how much later the connection is closed."""


def max_connections() -> int:
    """Connections that may be open at once: fewer where the process may open few files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(MAX_CONNECTIONS, soft - _OWN_FILES))


class _RefusedError(Exception):
    """A request that is not read further, with the status and the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Where there are too many, the one that has waited longest for its client makes room."""

    limit = max_connections()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._in_message = False
        self._num_headers = self._head_bytes = 0
        self._framing = self._body_bytes = 0  # bytes of the message so far: of all but its body, and of its body
        self._idle_since = time.monotonic()
        self._reading: asyncio.TimerHandle | None = None
        self._unread_since = 0.0
        self._answered: RequestResponseCycle | None = None

    # -- connections --

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins a connection; closes an idle one if necessary."""
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.waits]
            oldest = min(waiting, key=lambda one: one._idle_since)  # this one waits, too
            if oldest is self:
                self._refuse(503, f"{self.limit} requests are being answered, which is the limit of open connections")
                return
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._arm(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        self._disarm()
        self._stop_reading_timer()
        self._drop()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """True while the client owes a request, or the rest of one: no answer is being made."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete or self.cycle.more_body)

    # -- time --

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if not self.waits:  # a later request has begun meanwhile; it waits for this answer anyhow
            self._arm(HEAD_S)
        elif self._in_message:
            self._refuse(408, "the request did not come in time")
        else:
            self.transport.close()

    # -- answers that wait for their client --

    @property
    def _num_unread(self) -> int:
        """Bytes that wait for the client here and, on Linux, in the socket, whose buffer may hold megabytes."""
        num_bytes = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(queued, sys.byteorder)
        return num_bytes

    def pause_writing(self) -> None:
        """Waits for the client, which must go on reading; gives up others if too much waits in all."""
        super().pause_writing()
        self._unread_since = time.monotonic()
        self._expect_reading(self._num_unread)
        unread = [one for one in self.connections if isinstance(one, BoundedProtocol) and one._reading is not None]
        total = sum(one._num_unread for one in unread)
        for one in sorted(unread, key=lambda one: one._unread_since):
            if total <= MAX_UNREAD_BYTES:
                break
            total -= one._num_unread
            one._give_up(f"answers of more than {MAX_UNREAD_BYTES} bytes wait for their clients")

    def resume_writing(self) -> None:
        """Goes on: the client has read."""
        self._stop_reading_timer()
        super().resume_writing()

    def _expect_reading(self, num_unread: int) -> None:
        self._reading = self.loop.call_later(UNREAD_S, self._check_reading, num_unread)

    def _check_reading(self, before: int) -> None:
        if (now := self._num_unread) < before:
            self._expect_reading(now)
        else:
            self._give_up(f"its client has read nothing for {UNREAD_S:g} s")

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _give_up(self, reason: str) -> None:
        self._stop_reading_timer()
        _log.warning("a connection is closed: %s", reason)
        self._drop()
        self.transport.abort()

    def _drop(self) -> None:
        """Drops all answers: uvicorn reports only for the last request that its client has left."""
        for cycle in (self._answered, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
        self.pipeline.clear()

    # -- requests --

    def data_received(self, data: bytes) -> None:
        """Reads on, within the bounds."""
        self._unset_keepalive_if_required()
        if self._timer is None and not self._in_message:
            self._arm(HEAD_S)
        self._framing += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "the connection cannot be upgraded: HTTP/1.1 is spoken here")
        except httptools.HttpParserError as error:
            refused = error.__context__
            if isinstance(refused, _RefusedError):
                self._refuse(refused.status, refused.message)
            else:
                self._refuse(400, "this is no valid request of HTTP/1.1")
        else:
            if self._framing > MAX_HEAD_BYTES + self._body_bytes:
                self._refuse(431, _TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begins a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedError(400, f"more than {MAX_PIPELINED} requests wait on this connection")
        self._in_message = True
        self._num_headers = self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the path."""
        self._take_head(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer, which is dropped."""
        self._take_head(len(name) + len(value), 1)
        if self.cycle is None or self.scope is not self.cycle.scope:
            super().on_header(name, value)

    def _take_head(self, num_bytes: int, num_headers: int) -> None:
        self._head_bytes += num_bytes
        self._num_headers += num_headers
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise _RefusedError(431, _TOO_LARGE)

    def on_headers_complete(self) -> None:
        """Begins to answer, or to wait for earlier answers."""
        self._disarm()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)
        if cycle.more_body:
            self._arm(BODY_S + GRACE_S)

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body."""
        self._framing -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request."""
        self._disarm()
        self._in_message = False
        self._framing = self._body_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Ends an answer."""
        self._idle_since = time.monotonic()
        super().on_response_complete()

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, unless another answer is being sent, and closes the connection."""
        self._disarm()
        _log.warning("a connection is closed: %s", message)
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not (begun or self.pipeline):
            kind = "server_error" if status >= 500 else "invalid_request_error"
            body = json.dumps(body_of(message, kind)).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


_TOO_LARGE = f"the headers are too large: at most {MAX_HEADERS}, of {MAX_HEAD_BYTES} bytes with the path, are allowed"


class OncePerMinute(logging.Filter):
    """Passes one record of a logger a minute, which says how many were left out before it."""

    def __init__(self) -> None:
        super().__init__()
        self.last_logged_s, self.num_left_out = -60.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """True for a record that is logged."""
        if record.created - self.last_logged_s < 60:
            self.num_left_out += 1
            return False
        if self.num_left_out:
            record.msg = f"{record.msg} ({self.num_left_out} more like it since the last such line)"
        self.last_logged_s, self.num_left_out = record.created, 0
        return True


_log = logging.getLogger(__name__)
_log.addFilter(OncePerMinute())
