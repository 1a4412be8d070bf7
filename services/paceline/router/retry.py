"""When refused clients should come again. Pure: the time is given.

Each refused client gets a later time than the one before, at the rate at which places become free: a crowd comes back
as a line. Clients that come without a hint take some of the places. The more returning clients are refused again, the
farther apart the next hints are.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

LEAST_S, MOST_S = 0.1, 300.0
"""Shortest and longest hint."""

_RECENT_S = 60.0
"""Seconds; events longer ago say nothing about the rate at which places become free now."""
_QUIET_S = 5.0
"""A crowd is over when all who were told to come should have come this long ago."""
NUM_REMEMBERED = 4096
_ASSUMED_SERVICE_S = 2.5
"""Assumed duration of a request before any has ended.

If it is too short, a client that comes too early gets a new hint from later measurements. If it is too long, clients
wait for no reason.
"""
_PRIOR_RETURNS = 16.0
"""Clients that come back as told before it counts much how many were refused again."""
_PRIOR_PLACES = 4.0
"""Free places up to which the rate follows from the durations of requests, not from observed ends."""


class RetryHints:
    """Hints of one router, from the places that become free: of requests that ended or left, never of refusals."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._freed: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._refused: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._told: list[float] = []  # when refused clients should come, ascending
        self._service_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._num_told = 0
        self._full_since = 0.0  # when the present crowd began

    def note_freed(self, now: float, service_s: float | None) -> None:
        """A request has ended, ``service_s`` seconds after it was opened; None: it left the queue."""
        self._freed.append(now)
        if service_s is not None:
            self._service_s.append(service_s)

    def refused(self, now: float, num_running: int) -> float:
        """Returns the seconds after which a client that is refused now should come again."""
        if not self._told or now > self._told[-1] + _QUIET_S:
            self._full_since = now
        spacing_s = self._crowding(now) / self._rate(now, num_running)
        self._refused.append(now)
        self._num_told += 1
        slot = max(now, self._told[-1] if self._told else now) + spacing_s
        if slot > now + MOST_S:
            slot, spacing_s = now + self._rng.uniform(MOST_S / 2, MOST_S), 0.0
        insort(self._told, slot)
        del self._told[:-NUM_REMEMBERED]
        return min(max(slot - now + spacing_s * self._rng.uniform(-0.5, 0.5), LEAST_S), MOST_S)

    def num_returned(self, now: float) -> int:
        """Returns how many of the refused clients should have come again by now."""
        return self._num_told - _since(self._told, now)

    def _start(self, now: float) -> float:
        return max(self._full_since, now - _RECENT_S)

    def _rate(self, now: float, num_running: int) -> float:
        """Places that become free per second: counted since there was no room, and expected at the beginning."""
        start = self._start(now)
        service_s = sum(self._service_s) / len(self._service_s) if self._service_s else _ASSUMED_SERVICE_S
        expected = max(1, num_running) / max(service_s, 1e-3)
        return (_PRIOR_PLACES + _since(self._freed, start)) / (_PRIOR_PLACES / expected + now - start)

    def _crowding(self, now: float) -> float:
        """Places that become free per client that should be told to come: 1 unless others take them, 4 at most."""
        start = self._start(now)
        due = _since(self._told, start) - _since(self._told, now)
        in_vain = min(due, _since(self._refused, start))
        return 1.0 + min(3.0, 4.0 * in_vain / (_PRIOR_RETURNS + _since(self._freed, start)))


def _since(times: Sequence[float], start: float) -> int:
    """Number of ascending times from ``start`` on."""
    return len(times) - bisect_left(times, start)
