"""Which engines of this machine hang: their workers are asked, at intervals, whether they come round."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.runtime.workers import Worker


class Pulse:
    """The time that one worker's engine has been in a step. One thread asks."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``limit_s``: the longest step."""
        self.limit_s = limit_s
        self.stuck_s = 0.0
        """Seconds since the engine last came round, as far as they were watched."""
        self._clock = clock
        self._worker: Worker[Any] | None = None
        self._asked_s = 0.0

    @property
    def period_s(self) -> float:
        """Seconds between two questions."""
        return min(1.0, self.limit_s / 4)

    def hangs(self, worker: Worker[Any]) -> bool:
        """Asks the worker once more. True: its engine has been in one step for longer than the limit.

        Of a longer pause between two questions only twice the period counts: then it was this process that stood
        still, such as after Ctrl-Z.
        """
        now = self._clock()
        if worker is not self._worker:
            self._worker, self.stuck_s = worker, 0.0
        elif worker.came_round():
            self.stuck_s = 0.0
        else:
            self.stuck_s += min(now - self._asked_s, 2 * self.period_s)
        self._asked_s = now
        return self.stuck_s > self.limit_s
