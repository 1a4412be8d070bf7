"""Engines that note how long each of their steps took, without a message more on any wire.

A worker appends one record per step to a file of its own; the parent reads the file when it likes. The clock is
``time.perf_counter``, which all processes of a machine share, so steps can be given to requests by their time.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import DraftSetup, TargetSetup
from paceline.runtime.workers import Emit, Engine
from paceline.types import Rendezvous

_RECORD = struct.Struct("<ddd")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine."""

    started_s: float
    duration_s: float
    width: int
    """Target: tokens computed. Draft: tree nodes expanded."""


class TimedEngine:
    """An engine whose steps are recorded. ``count()``: steps so far, and the sum of their widths."""

    def __init__(
        self,
        engine: Engine,
        count: Callable[[], tuple[int, int]],
        path: Path,
        before_receive: Callable[[], None] | None = None,
    ) -> None:
        self._engine, self._count, self._before_receive = engine, count, before_receive
        self._file = path.open("ab", buffering=0)

    def receive(self, messages: Sequence[Any]) -> None:
        """See Engine."""
        if self._before_receive is not None:
            self._before_receive()
        self._engine.receive(messages)

    def step(self) -> bool:
        """See Engine."""
        steps, width = self._count()
        started = time.perf_counter()
        worked = self._engine.step()
        duration = time.perf_counter() - started
        new_steps, new_width = self._count()
        if new_steps > steps:
            self._file.write(_RECORD.pack(started, duration, new_width - width))
        return worked

    def wait_s(self) -> float | None:
        """See Engine."""
        return self._engine.wait_s()

    def close(self) -> None:
        """See Engine."""
        self._engine.close()


def read_steps(path: Path) -> list[StepRecord]:
    """What has been written to ``path``, oldest first; [] if there is no such file."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % _RECORD.size
    return [StepRecord(at, seconds, int(width)) for at, seconds, width in _RECORD.iter_unpack(data[:whole])]


@dataclass(frozen=True, slots=True)
class TimedTargetFactory:
    """Builds the target engine. Whenever it is without sessions its prefix cache is emptied, so that no request
    profits from an earlier one with the same prompt."""

    setup: TargetSetup
    path: Path
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        from paceline.target.build import build_target_engine

        engine = build_target_engine(self.setup, emit, self.rendezvous)
        cache = engine.runner.cache

        def forget() -> None:
            if engine.num_sessions == 0:
                cache.release(cache.allocate(cache.num_available))

        return TimedEngine(engine, lambda: (engine.stats.steps, engine.stats.tokens_computed), self.path, forget)


@dataclass(frozen=True, slots=True)
class TimedDraftFactory:
    """Builds the draft engine; records its tree steps, not its prefill."""

    setup: DraftSetup
    path: Path
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit) -> Engine:
        """See EngineFactory."""
        from paceline.draft.build import build_draft_engine

        engine = build_draft_engine(self.setup, emit, self.rendezvous)
        return TimedEngine(engine, lambda: (engine.stats.tree_steps, engine.stats.leaves), self.path)
