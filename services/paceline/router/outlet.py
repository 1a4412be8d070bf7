"""Chunks on their way to one client: rounds that follow one another fast leave together.

    put ─▶ at once, or until the chunk that left last is a window old ─▶ take

Every chunk costs the router about the same: its protobuf or JSON, and a write to a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.types import Chunk

_MOST_TOKENS = 64
"""A chunk with as many takes no further round: messages stay far below what clients accept, with log probabilities."""


class Timers(Protocol):
    """The part of an event loop that is needed."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> asyncio.TimerHandle: ...


class Sink(Protocol):
    """Takes the output of one request, on the router's event loop."""

    def put(self, chunk: Chunk, /) -> None:
        """Takes a chunk, in the order of the output."""

    def close(self) -> None:
        """Takes the end: there is a result or an error now, and no further chunk."""


class Outlet:
    """What waits for one client. Owned by the event loop.

    A round waits only where it pays: if the one before came less than half a window ago, so that another one is due
    before the window ends. The first round, the last one and errors never wait. What comes while the client's
    connection takes the last chunk leaves with the next.
    """

    def __init__(self, window_s: float, timers: Timers | None = None) -> None:
        """``window_s``: longest wait of a round; 0: each round is a chunk of its own, and none waits."""
        self._window_s, self._timers = window_s, timers or asyncio.get_running_loop()
        self._waiting: list[Chunk] = []
        self._due = asyncio.Event()
        self._came_s = self._left_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        """True once no further chunk comes."""

    def __len__(self) -> int:
        """Number of rounds that wait."""
        return len(self._waiting)

    def put(self, chunk: Chunk) -> None:
        """Adds a chunk, in the order of the output."""
        now = self._timers.time()
        waits, self._came_s = self.waits(chunk, now), now
        self._waiting.append(chunk)
        if not waits:
            self.flush()
        elif self._timer is None:
            self._timer = self._timers.call_at(self._left_s + self._window_s, self.flush)

    def waits(self, chunk: Chunk, now: float) -> bool:
        """True if a chunk that comes now waits for the end of the window."""
        is_fast = now - self._came_s < self._window_s / 2
        return is_fast and now < self._left_s + self._window_s and not chunk.last

    def close(self) -> None:
        """Takes the end, for which nothing waits."""
        self.closed = True
        self.flush()

    def flush(self) -> None:
        """Ends the wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due.set()

    async def due(self) -> None:
        """Waits until something is to leave."""
        await self._due.wait()
        self._due.clear()

    def take(self) -> list[Chunk]:
        """Everything that waits, in as few chunks as can hold it."""
        chunks, self._waiting, self._left_s = self._waiting, [], self._timers.time()
        return joined(chunks) if self._window_s else chunks


class FarOutlet(Outlet):
    """An outlet on another event loop than its router's: on the one that made it."""

    def __init__(self, window_s: float) -> None:
        super().__init__(window_s)
        self._loop = asyncio.get_running_loop()

    def put(self, chunk: Chunk) -> None:
        self._pass(super().put, chunk)

    def close(self) -> None:
        self._pass(super().close)

    def _pass(self, function: Callable[..., None], *args: Chunk) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(function, *args)


def joined(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Joins chunks of rounds that follow one another. Traces, parts of the prompt and released text stay alone."""
    groups: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        joins = chunk.round is not None and chunk.trace is None
        if not joins or room <= 0:
            groups.append([])
            room = _MOST_TOKENS
        groups[-1].append(chunk)
        room = room - len(chunk.token_ids) if joins else 0
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def _one(group: Sequence[Chunk]) -> Chunk:
    return replace(
        group[-1],
        token_ids=tuple(each for chunk in group for each in chunk.token_ids),
        logprobs=tuple(each for chunk in group for each in chunk.logprobs),
        drafted=tuple(each for chunk in group for each in chunk.drafted),
        segments=tuple(each for chunk in group for each in chunk.segments),
        top_logprobs=tuple(each for chunk in group for each in chunk.top_logprobs),
        earlier_rounds=tuple(each for chunk in group[:-1] for each in chunk.rounds),
    )
