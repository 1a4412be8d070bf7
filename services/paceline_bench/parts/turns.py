"""Ways that take turns, so that what else the machine does meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

_Name = TypeVar("_Name")


def in_turn(
    ways: Mapping[_Name, Callable[[], object]],
    *,
    rounds: int = 3,
    seconds: float = 0.0,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_Name, list[float]]:
    """Seconds of each call. There are at least this number of rounds, and more while ``seconds`` last; one that is not
    counted comes first. ``before`` is called before each call."""
    spent: dict[_Name, list[float]] = {name: [] for name in ways}
    turn, end = -1, time.perf_counter() + seconds
    while turn < rounds or time.perf_counter() < end:
        for name, way in ways.items():
            before()
            started = clock()
            way()
            if turn >= 0:
                spent[name].append(clock() - started)
        turn += 1
    return spent
