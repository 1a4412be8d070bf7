"""Statistics of a running service, in which old measurements fade: plain numbers, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ENGINE_KEEP, SESSION_KEEP = 0.998, 0.98
"""Factors by which the sums of an engine and of a session fade in one step: they remember 500 steps and 50."""


@dataclass(slots=True)
class Ewma:
    """Exponentially weighted moving average; the first value counts in full."""

    weight: float = 0.1
    value: float | None = None

    def add(self, value: float) -> None:
        """Adds a measurement."""
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)

    def add_all(self, values: Sequence[float]) -> None:
        """Adds measurements in order."""
        average = self.value
        for value in values:
            average = value if average is None else average + self.weight * (value - average)
        self.value = average

    def get(self, default: float) -> float:
        """The average, or ``default`` before the first measurement."""
        return default if self.value is None else self.value


@dataclass(slots=True)
class DecayingMax:
    """The largest of the last few values: it falls by the factor ``keep`` with every value below it."""

    keep: float
    value: float = 0.0

    def add(self, value: float) -> None:
        """Adds a measurement."""
        self.value = max(value, self.keep * self.value)


@dataclass(slots=True)
class DecayingRatio:
    """A ratio of two fading sums, part / whole, leaning on the parent's ratio as if ``weight`` more had been seen.

    A parent, if there is one, takes every measurement too; the topmost ratio leans on a prior.
    """

    keep: float
    """Factor by which the sums fade in one step."""
    weight: float
    parent: DecayingRatio | None = None
    part: float = 0.0
    whole: float = 0.0

    @classmethod
    def of_engine(cls) -> DecayingRatio:
        """A share of predictions that were right in all sessions of an engine; it leans on a prior."""
        return cls(ENGINE_KEEP, 8.0)

    @classmethod
    def of_session(cls, engine: DecayingRatio) -> DecayingRatio:
        """The share in one session, which leans on its engine's."""
        return cls(SESSION_KEEP, 32.0, engine)

    def add(self, part: float, whole: float, num_steps: float = 1.0) -> None:
        """Adds a measurement after ``num_steps`` steps, here and in the parent."""
        ratio: DecayingRatio | None = self
        while ratio is not None:
            keep = ratio.keep**num_steps
            ratio.part = keep * ratio.part + part
            ratio.whole = keep * ratio.whole + whole
            ratio = ratio.parent

    def fade(self, keep: float) -> None:
        """Makes the measurements so far count less, here alone."""
        self.part *= keep
        self.whole *= keep

    def value(self, prior: float) -> float:
        """The ratio; ``prior`` is what the topmost one leans on."""
        above = self.parent
        if above is not None:
            prior = (
                (above.part + above.weight * prior) / (above.whole + above.weight)
                if above.parent is None
                else above.value(prior)
            )
        return (self.part + self.weight * prior) / (self.whole + self.weight)


@dataclass(slots=True)
class RateEstimate:
    """An amount per second, from amounts and seconds that fade with a half-life."""

    half_life_s: float = 1.0
    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Adds an amount and the seconds in which it came."""
        keep = 0.5 ** (seconds / self.half_life_s)
        self.amount = keep * self.amount + amount
        self.seconds = keep * self.seconds + seconds

    def per_s(self) -> float:
        """The rate; 0 before anything was measured."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class RateSample:
    """Amounts a and seconds s of single steps, and how certain their common rate is. Nothing fades."""

    count: int = 0
    amount: float = 0.0
    seconds: float = 0.0
    _aa: float = 0.0
    _as: float = 0.0
    _ss: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Adds one step."""
        self.count += 1
        self.amount += amount
        self.seconds += seconds
        self._aa += amount * amount
        self._as += amount * seconds
        self._ss += seconds * seconds

    def rate(self) -> float:
        """The rate r; 0 before the first step."""
        return self.amount / self.seconds if self.seconds > 0 else 0.0

    def standard_error(self) -> float:
        """Standard error of the rate r, a ratio of two means: sqrt(sum (a - r s)^2 / (n - 1) / n) / mean(s).

        Infinite for fewer than two steps.
        """
        if self.count < 2 or not self.seconds > 0:
            return math.inf
        rate = self.amount / self.seconds
        squares = max(0.0, self._aa - 2 * rate * self._as + rate * rate * self._ss)
        return math.sqrt(squares / (self.count - 1) / self.count) * self.count / self.seconds


@dataclass(slots=True)
class DecayingHistogram:
    """Shares of small integers among the last ``capacity`` values or so: the counts are halved when they reach it."""

    capacity: float = 1024.0
    _counts: dict[int, float] = field(default_factory=dict)
    _total: float = 0.0

    def add(self, value: int) -> None:
        """Counts a value."""
        self._counts[value] = self._counts.get(value, 0.0) + 1.0
        self._total += 1.0
        if self._total >= self.capacity:
            self._counts = {value: count / 2 for value, count in self._counts.items() if count >= 1.0}
            self._total = sum(self._counts.values())

    def shares(self) -> dict[int, float]:
        """Share of each value; empty before the first. May be called by other threads."""
        counts = dict(self._counts)
        total = sum(counts.values())
        return {value: count / total for value, count in counts.items()}

    def mean(self) -> float:
        """Mean of the values; 0 before the first."""
        return sum(value * share for value, share in self.shares().items())
