"""One part of a run again, without the others: calls to it are recorded, and played to a new one.

A part is whatever takes batches and gives batches back: an engine's side, or the router between them. It depends on
the calls made to it and on its clock alone, so with both as they were it must do the same work; ``play`` fails if not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class Clock:
    """Seconds, as an engine asks for them; each answer is kept."""

    def __init__(self) -> None:
        self._source: Callable[[], float] = time.perf_counter
        self._readings: list[float] = []

    def __call__(self) -> float:
        now = self._source()
        self._readings.append(now)
        return now

    def take(self) -> list[float]:
        """The readings since the last call."""
        readings, self._readings = self._readings, []
        return readings

    def replay(self, readings: Sequence[float]) -> None:
        """Shows ``readings`` from now on, one after the other."""
        self._source = iter(readings).__next__


@dataclass(frozen=True, slots=True)
class Call:
    """A call to a part, its result, and what the part's clock showed meanwhile."""

    method: str
    arguments: tuple[Any, ...]
    result: Any
    readings: list[float]


def record(part: object, methods: Sequence[str], clock: Clock) -> list[Call]:
    """The calls to ``methods`` of a part, which are added as they are made."""
    calls: list[Call] = []

    def recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            clock.take()  # what it showed between two calls
            result = method(*arguments)
            calls.append(Call(name, arguments, result, clock.take()))
            return result

        return call

    for name in methods:
        setattr(part, name, recorded(name, getattr(part, name)))
    return calls


def play(part: object, calls: Sequence[Call], clock: Clock) -> list[float]:
    """Makes recorded calls to a new part of the same kind; returns the CPU seconds of each.

    Raises:
        RuntimeError: the part's result is another one than what was recorded.
    """
    spent = []
    for number, call in enumerate(calls):
        clock.replay(call.readings)
        method = getattr(part, call.method)
        started = time.thread_time()
        result = method(*call.arguments)
        spent.append(time.thread_time() - started)
        if result != call.result:
            name = type(part).__name__
            raise RuntimeError(
                f"{name}.{call.method}, call {number} of {len(calls)}: {_shown(result)} where {_shown(call.result)} "
                "was recorded, so this run has not done the same work"
            )
    return spent


def _shown(result: Any) -> str:
    text = repr(result)
    return text if len(text) <= 80 else f"{text[:80]}.. ({len(text)} characters)"
