"""Seconds of an engine's step by its tokens, as given or measured: piecewise linear."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Self

from paceline.target.control.step_cost import lower_hull

_LEAST_SAMPLES = 5
"""A size that was measured less often says too little."""


@dataclass(frozen=True)
class StepTable:
    """Linear between the points, constant before the first, and beyond the last with the slope of the last piece.

    It is what ``allocate_draft_tokens`` asks for its step times, so that the engine's own rule can decide here too.
    """

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), both increasing (the seconds not strictly). At least one."""
    known: bool = True
    _floor: tuple[tuple[int, float], ...] = field(init=False, compare=False, default=())

    def __post_init__(self) -> None:
        assert self.points, "there is at least one point"
        object.__setattr__(self, "_floor", tuple(lower_hull(self.points)))

    @classmethod
    def affine(cls, first_s: float, token_s: float) -> Self:
        """``first_s`` for a step of one token and ``token_s`` for each further one."""
        return cls(((1, first_s), (2, first_s + token_s)))

    @classmethod
    def measured(cls, steps: Iterable[tuple[int, float]], *, further_s: float = 0.0) -> Self | None:
        """Means of (tokens, seconds) by size, made non-decreasing; None if no size was seen five times.

        ``further_s``: slope beyond the largest size if only one was seen.
        """
        by_size: dict[int, list[float]] = {}
        for tokens, seconds in steps:
            by_size.setdefault(tokens, []).append(seconds)
        points: list[tuple[int, float]] = []
        for tokens in sorted(size for size, seen in by_size.items() if len(seen) >= _LEAST_SAMPLES):
            seconds = mean(by_size[tokens])
            points.append((tokens, max(seconds, points[-1][1]) if points else seconds))
        if len(points) == 1:
            points.append((points[0][0] + 1, points[0][1] + further_s))
        return cls(tuple(points)) if points else None

    def times(self, factor: float) -> Self:
        """Every step that many times as long."""
        return type(self)(tuple((tokens, factor * seconds) for tokens, seconds in self.points), self.known)

    def of_rows(self, rows: float) -> Self:
        """Returns the table of steps in which each token has ``rows`` rows (at least 1)."""
        sizes = {1} | {math.ceil(tokens / rows) + further for tokens, _ in self.points for further in (0, 1)}
        return type(self)(tuple((size, self.seconds(size * rows)) for size in sorted(sizes)), self.known)

    def seconds(self, num_tokens: float) -> float:
        """Seconds of a step of ``num_tokens`` tokens, which may be a fractional mean."""
        return _at(self.points, num_tokens)

    def floor(self, num_tokens: float) -> float:
        """The largest convex function below ``seconds``."""
        return _at(self._floor, num_tokens)


def _at(points: tuple[tuple[int, float], ...], at: float) -> float:
    first, value = points[0]
    if at <= first or len(points) == 1:
        return value
    for i in range(1, len(points)):
        if at <= points[i][0] or i == len(points) - 1:
            (left, low), (right, high) = points[i - 1], points[i]
            return low + (high - low) * (at - left) / (right - left)
    raise AssertionError("the last piece is open")
