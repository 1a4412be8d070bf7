"""Calls from an engine's thread into an event loop, for which the thread does not give up the interpreter.

``call_soon_threadsafe`` wakes the loop by a write that releases the interpreter lock. The loop takes it at once, and
keeps it until it has routed, encoded and written the messages. At every step that is most of a millisecond without a
forward. Here the write keeps the lock, so the loop begins when the engine gives it up by itself, as a rule with its
forward.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_READ_BYTES = 4096

write_with_lock = ctypes.PyDLL(None).write  # unlike os.write it is called with the interpreter lock held
write_with_lock.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
write_with_lock.restype = ctypes.c_ssize_t


class Handover:
    """Makes calls on an event loop, in their order; any thread may ask for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Must be called on the loop. Raises OSError if this process may open no more files."""
        self._loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._woken = False
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            weakref.finalize(self, os.close, end).atexit = False  # no earlier: a thread may be about to write
        loop.add_reader(self._reading, self._make_calls)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedules a function on the loop; ignored once this is closed."""
        self._calls.append((function, args))
        if not self._woken:
            self._woken = True
            write_with_lock(self._writing, b"\0", 1)  # there is room: the loop reads before another one is written

    def close(self) -> None:
        """Ends this, on the loop. Idempotent."""
        self._loop.remove_reader(self._reading)

    def _make_calls(self) -> None:
        os.read(self._reading, _READ_BYTES)
        self._woken = False  # before the first one is taken: what comes from now on wakes again
        while self._calls:
            function, args = self._calls.popleft()
            try:
                function(*args)
            except Exception as error:
                context = {"message": f"a call by an engine failed: {function!r}", "exception": error}
                self._loop.call_exception_handler(context)
