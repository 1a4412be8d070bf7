"""Seconds of a target step by the number of its tokens, learned while serving.

A step of few tokens waits for the weights, so several tokens cost as much as one until arithmetic takes over. Where
that happens depends on machine, model and context. So it is measured: steps that only decode are averaged by size, and
costs between measured sizes are interpolated. Every step moves one common *level*, which corrects sizes that were not
measured recently when contexts grow or the machine slows down.

An unexpected time moves the level and the size's ratio to it, each by its share of the uncertainty. This is a Kalman
filter of their logarithms without covariances. The level may change freely; a ratio drifts slowly. Otherwise, after
some slow steps, their size would look more expensive than a size measured when the machine is fast again. Plain steps
that look expensive are not taken, so they would keep looking so. A new size starts at the interpolated cost and does
not move the level. Otherwise a size first measured at a lucky moment would be chosen again and again.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable

from paceline.core.experiment import LEAST, WINDOW
from paceline.core.statistics import Ewma
from paceline.model.shapes import MIN_TOKENS, QUERY_MULTIPLE, padded_row_len

_EXACT, _LARGE = 64, 256
"""Sizes are kept one by one up to 64, to show jumps of the cost. They are kept by padded size up to 256, and in steps
of 64 beyond."""

_LEVEL_DRIFT, _NEW, _SIZE_DRIFT = 2.0, 0.5, 1 / WINDOW**2
"""Variances in the filter of a step's seconds, of logarithms, in units of one measurement's about its expected value.

In order: the level's change in a step, the ratio of a new size, the ratio's change in a step.
"""
_MOST_LOG = math.log(2.0)
"""A single step counts as at most twice as slow or as fast as expected."""


def size_class(num_tokens: int) -> int:
    """Largest number of tokens that is averaged together with ``num_tokens``."""
    if num_tokens <= _EXACT:
        return num_tokens
    return padded_row_len(num_tokens) if num_tokens <= _LARGE else -(-num_tokens // _EXACT) * _EXACT


class _Size:
    __slots__ = ("count", "seen_at", "value", "variance")

    def __init__(self, value: float, variance: float, count: int, seen_at: int) -> None:
        self.value = value  # seconds / level
        self.variance = variance  # of its logarithm
        self.count = count
        self.seen_at = seen_at


class StepCost:
    """Expected seconds by number of tokens: non-decreasing, piecewise linear, strictly positive once known.

    Sizes never measured are assumed to be cheap (beyond the largest) or proportional (below the smallest). So they are
    tried, and the estimate corrects itself.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._now = 1.0  # level of the last step
        self._variance = _LEVEL_DRIFT  # of its logarithm
        self._log_level = Ewma()  # average of its logarithm
        self._level = self._least_level = 1.0  # by that average
        self._num_observed = 0
        self._stale = 0
        self._table: list[float] = [0.0, 0.0]
        self._floor: list[float] = [0.0, 0.0]
        self._lower = self._floor  # of both, as far as they reach

    @property
    def known(self) -> bool:
        """True as soon as any step was measured."""
        return bool(self._sizes)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records the seconds of a step that only decoded; ignores values that are not positive."""
        if not seconds > 0.0:
            return
        self._num_observed += 1
        at = size_class(num_tokens)
        size = self._sizes.get(at)
        if size is None:
            if not self._sizes:
                self._now = self._level = self._least_level = seconds
                self._log_level.add(math.log(seconds))
            if not min(self._sizes, default=at) < at < max(self._sizes, default=at):
                self._sizes[at] = _Size(seconds / self._now, _NEW, 1, self._num_observed)
                self._rebuild()
                return
            size = self._sizes[at] = _Size(_at(self._table, at), _NEW, 0, self._num_observed)
        # Averages are of logarithms: a step twice as slow and one twice as fast cancel out.
        off_by = math.log(seconds / (self._now * size.value))
        off_by = min(max(off_by, -_MOST_LOG), _MOST_LOG)
        of_level = self._variance + _LEVEL_DRIFT
        of_size = size.variance + _SIZE_DRIFT * (self._num_observed - size.seen_at)
        level_gain = of_level / (of_level + of_size + 1.0) if size.count else 0.0
        size_gain = of_size / (of_level + of_size + 1.0)
        self._now *= math.exp(level_gain * off_by)
        size.value *= math.exp(size_gain * off_by)
        self._variance, size.variance = of_level * (1.0 - level_gain), of_size * (1.0 - size_gain)
        self._log_level.add(math.log(self._now))
        self._level = math.exp(self._log_level.get(0.0))
        self._least_level = min(self._least_level, self._level)
        size.count += 1
        size.seen_at = self._num_observed
        self._stale += 1
        if self._stale >= 2 * LEAST or size.count <= 2:
            self._rebuild()

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds of a step with ``num_tokens``; 0.0 before anything is known."""
        table = self._table
        return self._level * (table[num_tokens] if num_tokens < len(table) else _at(table, num_tokens))

    def least(self, num_tokens: int) -> float:
        """Expected seconds with the machine at its fastest: a bound on a step that no draft slows down."""
        return self._least_level * _at(self._table, num_tokens)

    def floor(self, num_tokens: int) -> float:
        """Largest convex function below ``seconds``, which bounds the cost of adding tokens from below."""
        if num_tokens < len(self._lower):
            return self._level * self._lower[num_tokens]
        return self._level * min(_at(self._floor, num_tokens), _at(self._table, num_tokens))

    @property
    def tables(self) -> tuple[float, list[float], list[float], list[float]]:
        """What ``seconds`` and ``floor`` are made of, for the native ``allocation.choose``."""
        return self._level, self._table, self._floor, self._lower

    def _rebuild(self) -> None:
        self._stale = 0
        now = self._num_observed
        # An outlier at a size that was measured once must not keep that size from being tried again.
        for at in [a for a, s in self._sizes.items() if s.count < 2 and now - s.seen_at > 2 * WINDOW]:
            if len(self._sizes) > 1:
                del self._sizes[at]
        points = _monotone([(at, s.value, float(min(s.count, WINDOW))) for at, s in sorted(self._sizes.items())])
        points = _with_padding(points)
        first, value = points[0]
        if first > MIN_TOKENS:  # some models compute no fewer than these
            value *= MIN_TOKENS / first
            points = [(MIN_TOKENS, value), *points]
        points = [(0, value), *points]
        last, value = points[-1]
        slope = (value - _interpolate(points, last // 2)) / (last - last // 2) if len(self._sizes) > 1 else 0.0
        end = max(last + 1, min(4 * _LARGE, 2 * last + _EXACT))  # beyond it costs grow as they do last
        points.append((end, value + slope * (end - last)))
        self._table = _fill(points)
        self._floor = _fill(lower_hull(points))
        self._lower = [a if a < b else b for a, b in zip(self._floor, self._table, strict=True)]


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
    """Adds points that follow from padding: sizes of one padded size cost the same unless measured separately."""
    seen = {at for at, _ in points}
    padded: list[tuple[int, float]] = []
    for (at, value), (following, _) in itertools.pairwise([*points, (sys.maxsize, 0.0)]):
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
    """Values of the piecewise linear function at 0, 1, .. up to the last point."""
    table = [points[0][1]]
    for (left, low), (right, high) in itertools.pairwise(points):
        slope = (high - low) / (right - left)
        table += [low + slope * i for i in range(1, right - left + 1)]
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
