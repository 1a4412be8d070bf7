"""Turns a demand that is measured again and again into a steady number of replicas.

Demand is in replicas, as a real number: at 2.3 two replicas are too few. With n replicas decided, and all evidence from
*after the last change*:

- more, if demand was above n for all of ``up_delay_s``: enough for the least demand of that time;
- fewer, if for all of ``down_delay_s`` the signals were complete and demand was below (n - 1) (1 - hysteresis): enough
  for the largest demand of that time, with the hysteresis on top;
- none, if for all of ``zero_delay_s`` there was no demand at all, or immediately where that is known already
  (``at_once``); from none to some immediately;
- one step multiplies n by at most ``max_step_up`` and at least ``max_step_down``, always within the bounds.

For any demand (``tests/fleet/test_scaler.py``), at least the delay of the second change lies between two changes. Going
up, down and up again takes up_delay_s + down_delay_s. If demand stays within (1 +- e) of a mean with e <= hysteresis /
(2 - hysteresis), the pool changes in one direction only. Going up to n needs demand above n - 1 at some time. Going
down from n needs demand below (n - 1) (1 - hysteresis), and (1 - e) / (1 + e) >= 1 - hysteresis.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Demand:
    """Number of replicas that a pool needs, and why."""

    replicas: float
    reason: str
    complete: bool = True
    """False: some process has not reported lately. The demand may be higher, so nothing is taken away."""
    at_once: bool = False
    """True: there is no demand, and the evidence is complete already: the pool is emptied without another delay."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Bounds of a pool, and the delays and steps with which it moves between them."""

    least: int
    most: int
    up_delay_s: float
    down_delay_s: float
    zero_delay_s: float
    hysteresis: float
    max_step_up: float
    max_step_down: float


@dataclass(frozen=True, slots=True)
class Change:
    """A new number of replicas, and why."""

    before: int
    after: int
    reason: str


@dataclass(slots=True)
class Scaler:
    """Holds the decided number of replicas of one pool. Times are seconds of any monotonic clock."""

    pace: Pace
    wanted: int | None = None
    """None: nothing is decided yet, and the pool keeps its size."""
    _samples: deque[tuple[float, float, str]] = field(default_factory=deque)
    """(time, demand, reason) since the last change, or since signals were missing."""
    _complete_since: float | None = None

    def see(self, demand: Demand | None, actual: int, now: float) -> Change | None:
        """Records one measurement and returns the change that it causes. ``actual``: existing replicas.

        ``demand`` None: nothing is known. Then nothing is decided, and earlier measurements are dropped.
        """
        if (bounded := self._bounded()) is not None:
            return bounded
        if demand is None:
            self._forget()
            return None
        if not demand.complete:
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        self._samples.append((now, demand.replicas, demand.reason))
        longest = max(self.pace.up_delay_s, self.pace.down_delay_s, self.pace.zero_delay_s)
        while len(self._samples) > 1 and self._samples[1][0] <= now - longest:
            self._samples.popleft()
        if self.wanted is None:
            return self._begin(actual, now)
        if demand.at_once and demand.complete and demand.replicas <= 0 and self.wanted > self.pace.least:
            return self._change(self.pace.least, demand.reason)
        return self._up(self.wanted, now) or self._down(self.wanted, now)

    def rebound(self, pace: Pace) -> None:
        """Changes bounds and pace; earlier measurements stay valid."""
        self.pace = pace

    def _bounded(self) -> Change | None:
        if self.wanted is None or self.pace.least <= self.wanted <= self.pace.most:
            return None
        bound = self.pace.least if self.wanted < self.pace.least else self.pace.most
        return self._change(bound, f"bounds {self.pace.least} to {self.pace.most}")

    def _begin(self, actual: int, now: float) -> Change | None:
        """Decides for the first time: a change of the actual size, or that size if nothing asks for a change."""
        size = min(max(actual, self.pace.least), self.pace.most)
        change = self._up(size, now) or self._down(size, now)
        if change is None and self._spans(self.pace.up_delay_s, now) and self._spans(self.pace.down_delay_s, now):
            self.wanted = size
        return change

    def _up(self, wanted: int, now: float) -> Change | None:
        if not self._spans(self.pace.up_delay_s if wanted else 0.0, now):
            return None
        least, reason = min(self._since(now - self.pace.up_delay_s if wanted else now), key=lambda sample: sample[0])
        needed = min(math.ceil(least - _EPSILON), self.pace.most)
        if needed <= wanted:
            return None
        step = max(wanted + 1, math.floor(wanted * self.pace.max_step_up + _EPSILON))
        return self._change(min(needed, step), reason, wanted)

    def _down(self, wanted: int, now: float) -> Change | None:
        pace = self.pace
        if self._complete_since is None or wanted <= pace.least:
            return None
        if self._lasts(pace.zero_delay_s, now):
            most, reason = max(self._since(now - pace.zero_delay_s), key=lambda sample: sample[0])
            if most <= 0 and pace.least == 0 and wanted == 1:
                return self._change(0, reason, wanted)
        if not self._lasts(pace.down_delay_s, now):
            return None
        most, reason = max(self._since(now - pace.down_delay_s), key=lambda sample: sample[0])
        needed = max(math.ceil(most / (1.0 - pace.hysteresis) - _EPSILON), pace.least, 1)
        if needed >= wanted:
            return None
        step = min(wanted - 1, math.ceil(wanted * pace.max_step_down - _EPSILON))
        return self._change(max(needed, step), reason, wanted)

    def _since(self, begin: float) -> list[tuple[float, str]]:
        """Returns the samples since ``begin``; the newest one in any case."""
        samples = [(demand, reason) for at, demand, reason in self._samples if at >= begin]
        return samples or [self._samples[-1][1:]]

    def _spans(self, delay_s: float, now: float) -> bool:
        return now - self._samples[0][0] >= delay_s - _EPSILON

    def _lasts(self, delay_s: float, now: float) -> bool:
        complete = self._complete_since is not None and now - self._complete_since >= delay_s - _EPSILON
        return complete and self._spans(delay_s, now)

    def _change(self, after: int, reason: str, before: int | None = None) -> Change:
        before = self.wanted if before is None else before
        assert before is not None
        self.wanted = after
        self._forget()
        return Change(before, after, reason)

    def _forget(self) -> None:
        self._samples.clear()
        self._complete_since = None
