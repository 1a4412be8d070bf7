"""Messages between processes: pickled frames over a stream socket. Knows nothing of engines."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import threading
from typing import Any

_READ_BYTES = 1 << 18
_HEADER = struct.Struct("<Q")


class Channel:
    """Pickled frames over a stream socket. One reading thread; ``send``, by any thread, blocks until the peer takes
    it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @staticmethod
    def frame(value: Any) -> bytes:
        """Length and pickle of ``value``."""
        payload = pickle.dumps(value, protocol=5)
        return _HEADER.pack(len(payload)) + payload

    def send(self, value: Any) -> None:
        """Sends one frame. Raises OSError if the peer is gone."""
        frame = self.frame(value)
        with self._sending:
            self._sock.sendall(frame)

    def receive(self, timeout_s: float | None) -> list[Any]:
        """All complete frames; waits for one at most ``timeout_s`` (None: for ever). EOFError at the end."""
        frames = self._parse()
        while not frames:
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                break
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise EOFError
            self._buffer += data
            frames = self._parse()
        return frames

    def _parse(self) -> list[Any]:
        frames, at = [], 0
        while len(self._buffer) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, at)
            if len(self._buffer) - at - _HEADER.size < length:
                break
            start = at + _HEADER.size
            frames.append(pickle.loads(memoryview(self._buffer)[start : start + length].tobytes()))
            at = start + length
        del self._buffer[:at]
        return frames
