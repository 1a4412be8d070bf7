"""What is counted into: a counter, a gauge and a histogram with their labels bound. They know no name and no help."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Counter:
    """A total with its labels bound. The cells are written by one thread each, and so do without locks."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds ``amount``, at least 0."""
        self.value += amount


class Gauge:
    """A value of this moment with its labels bound."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replaces the value."""
        self.value = float(value)


class Histogram:
    """Counts of observations up to each bound, with the labels bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    @property
    def value(self) -> tuple[float, ...]:
        """As ``Value`` says."""
        return (self._sum, *map(float, accumulate(self._counts)))
