"""Parses bodies, renders chats and tokenizes texts in threads, so that the event loop serves streams meanwhile.

Short inputs have one thread and long ones another: only a long prompt waits for a long prompt. Tokenizers release the
interpreter lock. Everything else is Python, which passes the lock on every few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from paceline.config.memory import trim
from paceline.errors import ResourceExhaustedError

LONG_BYTES = 65536
"""Inputs of more bytes are long."""
MAX_SHORT, MAX_LONG = 256, 16
"""Inputs that may wait for each of the threads: some seconds of work."""
_SMOOTHING = 0.2

_TRIM_S = 2.0
"""Time after the last large piece of work until the memory that it took goes back to the system."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Lane:
    """One thread, and the number of callers that wait for it."""

    limit: int
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "paceline-prepare"))
    num_waiting: int = 0
    """Inputs that wait, the one in work included."""
    mean_s: float = 0.05
    """Duration of one."""


class LateTrim:
    """A ``trim`` in a thread, once no large work has ended there for ``_TRIM_S``."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self) -> None:
        """Starts the time anew. Called in the event loop as a piece of work ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_TRIM_S, self._thread.submit, trim)


class Preparation:
    """The two threads. Where too much waits for one, further work is refused."""

    def __init__(self, max_short: int = MAX_SHORT, max_long: int = MAX_LONG, what: str = "prompts") -> None:
        """``max_short`` and ``max_long``: how many may wait. ``what``: the word for them in errors."""
        self._short, self._long, self._what = _Lane(max_short), _Lane(max_long), what
        self._trim = LateTrim(self._long.thread)

    @property
    def is_busy(self) -> bool:
        """True while something is in work or waits."""
        return bool(self._short.num_waiting or self._long.num_waiting)

    async def run(self, size: int, function: Callable[[], _T]) -> _T:
        """Runs a function in a thread; returns or raises its result. ``size``: bytes of its input.

        Raises ResourceExhaustedError if too many calls wait. A cancelled call leaves the queue.
        """
        lane = self._long if size > LONG_BYTES else self._short
        if lane.num_waiting > lane.limit:
            raise ResourceExhaustedError(
                f"{lane.num_waiting} {self._what} are to be tokenized: at most {lane.limit} may wait",
                retry_after_s=max(0.05, lane.num_waiting * lane.mean_s),
            )
        lane.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(lane.thread, _timed, lane, function)
        finally:
            lane.num_waiting -= 1
            if lane is self._long and not lane.num_waiting:
                self._trim.schedule()


def _timed(lane: _Lane, function: Callable[[], _T]) -> _T:
    started = time.monotonic()
    try:
        return function()
    finally:
        lane.mean_s += _SMOOTHING * (time.monotonic() - started - lane.mean_s)
