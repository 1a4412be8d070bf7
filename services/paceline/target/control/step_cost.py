"""Seconds of a target step by the number of its tokens, learned while serving.

A step of few tokens waits for the weights, so several cost as much as one, until arithmetic takes over; where that
happens depends on machine, model and context. So it is measured: steps that only decode are averaged by size, between
sizes that were seen the cost is interpolated, and one *level*, which every step moves, carries sizes that have not
been seen for a while along when contexts grow or the machine slows down.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.model.shapes import MIN_TOKENS, QUERY_MULTIPLE, padded_row_len

_EXACT, _LARGE = 64, 256
"""Sizes are told apart one by one, so that lumps of the cost show, up to 64; by padded size up to 256, by 64 beyond."""

_LEVEL_WEIGHT = 0.15
_SIZE_WEIGHT = 0.1
_RUSTY_STEPS = 256
"""A size that was not seen for so many steps is learned anew, half of it at once."""
_FEW, _SOON = 3, 64
"""A size that was seen less than ``_FEW`` times, and not in the last ``_SOON`` steps, is forgotten: an outlier there
must not keep that size from being tried again."""
_MOST_RATIO = 3.0
"""A single step moves the averages as if it had been at most so many times slower or faster than expected."""
_REBUILD_STEPS = 8
_LARGEST_TABLE = 1024


@dataclass(slots=True)
class Average:
    """Exponential moving average; the first value counts in full."""

    weight: float = 0.1
    value: float | None = None

    def add(self, value: float) -> None:
        """Takes a measurement."""
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)

    def get(self, default: float) -> float:
        """The average, or ``default`` before the first measurement."""
        return default if self.value is None else self.value


def size_class(num_tokens: int) -> int:
    """The largest number of tokens whose steps are averaged with those of ``num_tokens``."""
    if num_tokens <= _EXACT:
        return max(num_tokens, MIN_TOKENS)
    return padded_row_len(num_tokens) if num_tokens <= _LARGE else -(-num_tokens // 64) * 64


class _Size:
    __slots__ = ("count", "seen_at", "value")

    def __init__(self, value: float, seen_at: int) -> None:
        self.value = value  # seconds / level
        self.count = 1
        self.seen_at = seen_at


class StepCost:
    """Expected seconds by number of tokens: non-decreasing, piecewise linear, strictly positive once known.

    Sizes beyond those that were seen are expected to be cheap rather than dear, smaller ones as if the cost were
    proportional: trying one corrects that, shunning it would not.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._level = self._least_level = 1.0
        self._num_observed = 0
        self._stale = 0
        self._table: list[float] = [0.0, 0.0]
        self._floor: list[float] = [0.0, 0.0]

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._sizes)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Takes the duration of a step that only decoded; one without duration says nothing."""
        if not seconds > 0.0:
            return
        self._num_observed += 1
        at = size_class(num_tokens)
        size = self._sizes.get(at)
        if size is None:
            if not self._sizes:
                self._level = self._least_level = seconds
            self._sizes[at] = _Size(seconds / self._level, self._num_observed)
            self._rebuild()
            return
        weight = max(_SIZE_WEIGHT, 0.5 / size.count)
        if self._num_observed - size.seen_at > _RUSTY_STEPS:
            weight = max(weight, 0.5)
        off_by = math.log(seconds / (self._level * size.value))
        off_by = min(max(off_by, -math.log(_MOST_RATIO)), math.log(_MOST_RATIO))
        size.value *= math.exp(weight * off_by)
        self._level *= math.exp(_LEVEL_WEIGHT * off_by)
        self._least_level = min(self._least_level, self._level)
        size.count += 1
        size.seen_at = self._num_observed
        self._stale += 1
        if self._stale >= _REBUILD_STEPS or size.count <= _FEW:
            self._rebuild()

    def seconds(self, num_tokens: int) -> float:
        """Expected duration of a step with so many tokens; 0.0 before anything is known."""
        return self._level * _at(self._table, num_tokens)

    def least(self, num_tokens: int) -> float:
        """The same when the machine was at its fastest: what a step may take if a draft stops slowing it down."""
        return self._least_level * _at(self._table, num_tokens)

    def floor(self, num_tokens: int) -> float:
        """The largest convex function below ``seconds``: what bounds the cost of adding tokens from below."""
        return self._level * min(_at(self._floor, num_tokens), _at(self._table, num_tokens))

    def _rebuild(self) -> None:
        self._stale = 0
        now = self._num_observed
        largest = max(self._sizes)
        for at in [a for a, s in self._sizes.items() if s.count < _FEW and now - s.seen_at > _SOON]:
            if len(self._sizes) > 1:
                del self._sizes[at]
        points = _monotone([(at, s.value, float(min(s.count, 32))) for at, s in sorted(self._sizes.items())])
        points = _with_padding(points)
        first, value = points[0]
        if first > MIN_TOKENS:  # no fewer than these are ever computed
            value *= MIN_TOKENS / first
            points = [(MIN_TOKENS, value), *points]
        points = [(0, value), *points]
        last, value = points[-1]
        end = min(_LARGEST_TABLE, 2 * max(last, largest) + 64)
        if len(self._sizes) > 1:
            slope = (value - _interpolate(points, last // 2)) / (last - last // 2)
        else:
            slope = 0.25 * value / max(last, 2 * MIN_TOKENS)
        if end > last:
            points.append((end, value + slope * (end - last)))
        self._table = _fill(points)
        self._floor = _fill(lower_hull(points))


def _at(table: list[float], num_tokens: int) -> float:
    if num_tokens < len(table):
        return table[num_tokens]
    return table[-1] + (table[-1] - table[-2]) * (num_tokens - len(table) + 1)


def _monotone(points: list[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """Isotonic regression of (size, value, weight) by pooling adjacent violators."""
    pools: list[tuple[float, float, list[int]]] = []
    for at, value, weight in points:
        members = [at]
        while pools and pools[-1][0] > value:
            other, other_weight, others = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            members = others + members
        pools.append((value, weight, members))
    return [(at, value) for value, _, members in pools for at in members]


def _with_padding(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Adds what padding makes likely: sizes of one padded size cost the same unless they were seen to differ."""
    seen = {at for at, _ in points}
    padded: list[tuple[int, float]] = []
    for (at, value), (following, _) in itertools.pairwise([*points, (1 << 62, 0.0)]):
        if _EXACT < at <= _LARGE:
            padded.append((at - QUERY_MULTIPLE + 1, value))
        padded.append((at, value))
        end = padded_row_len(at)
        if at <= _EXACT and end not in seen and end < following:
            padded.append((end, value))
    return padded


def _interpolate(points: list[tuple[int, float]], at: int) -> float:
    for (left, low), (right, high) in itertools.pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def _fill(points: list[tuple[int, float]]) -> list[float]:
    """Values at 0, 1, .. up to the last point."""
    table = [points[0][1]]
    for (left, low), (right, high) in itertools.pairwise(points):
        slope = (high - low) / (right - left)
        table.extend(low + slope * i for i in range(1, right - left + 1))
    return table


def lower_hull(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The corners of the largest convex function below all points, which are sorted by x."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2], hull[-1]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break
            hull.pop()
        hull.append((x, y))
    return hull
