"""Engines that write down their steps or counters, without any message more.

A worker appends one record per step to a file of its own; the parent reads the file when it likes. The clock is
``time.perf_counter``, which all processes of a machine share, so steps can be given to requests by their time.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import DraftSetup, TargetSetup
from paceline.runtime.build import EngineSpec
from paceline.runtime.workers import Emit, Engine
from paceline.target.control.allocation import load_class
from paceline.target.control.compared import NUM_RANKS
from paceline.types import Rendezvous

if TYPE_CHECKING:
    from paceline.model.kv_cache import KVCache

_NUM_COUNTS = 1 + 2 * NUM_RANKS
_RECORD = struct.Struct(f"<dd{_NUM_COUNTS}q")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine."""

    started_s: float
    duration_s: float
    width: int
    """Tokens computed by the target, or tree nodes expanded by the draft."""
    ranks: tuple[int, ...] = (0,) * 2 * NUM_RANKS
    """``RankCounts`` of the step: verified by rank, then accepted by rank; of the draft zeros."""


class _Watched:
    """An engine around another one, whose steps it watches."""

    def __init__(self, engine: Any, cache: KVCache | None = None) -> None:
        """``cache``: is emptied of prefixes before messages while there are no sessions, so that no request profits
        from an earlier one with the same prompt."""
        self._engine, self._cache = engine, cache

    def receive(self, messages: Sequence[Any]) -> None:
        """Hands messages to the engine."""
        if self._cache is not None and self._engine.num_sessions == 0:
            self._cache.release(self._cache.allocate(self._cache.num_available))
        self._engine.receive(messages)

    def wait_s(self) -> float | None:
        """Seconds that the engine can wait for a message."""
        wait_s: float | None = self._engine.wait_s()
        return wait_s

    def facts(self) -> Mapping[str, Any]:
        """The engine's."""
        facts: Mapping[str, Any] = self._engine.facts()
        return facts

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()


class TimedEngine(_Watched):
    """An engine whose steps are recorded. ``count()``: steps so far, the sum of their widths, and of their ranks."""

    def __init__(
        self, engine: Engine[Any], count: Callable[[], tuple[int, ...]], path: Path, cache: KVCache | None = None
    ) -> None:
        super().__init__(engine, cache)
        self._count = count
        self._file = path.open("ab", buffering=0)

    def step(self) -> bool:
        """Steps the engine and records the step if there was one."""
        before = self._count()
        started = time.perf_counter()
        worked: bool = self._engine.step()
        duration = time.perf_counter() - started
        num_steps, *grown = (after - was for after, was in zip(self._count(), before, strict=True))
        if num_steps:
            self._file.write(_RECORD.pack(started, duration, *grown, *[0] * (_NUM_COUNTS - len(grown))))
        return worked

    def close(self) -> None:
        """Closes the engine and the file."""
        super().close()
        self._file.close()


class CountedEngine(_Watched):
    """A target engine of which something is written to a file when it is idle, so never at the cost of a request."""

    def __init__(
        self,
        engine: Any,
        path: Path,
        describe: Callable[[Any], dict[str, Any]] = lambda engine: asdict(engine.stats),
        cache: KVCache | None = None,
    ) -> None:
        """``describe``: what is written, as plain data; by default its counters."""
        super().__init__(engine, cache)
        self._path, self._describe, self._written = path, describe, -1

    def step(self) -> bool:
        """Steps the engine and writes when it has run out of sessions."""
        worked: bool = self._engine.step()
        if not worked and not self._engine.num_sessions and self._engine.stats.steps != self._written:
            self._written = self._engine.stats.steps
            temporary = self._path.with_suffix(".new")
            temporary.write_text(json.dumps(self._describe(self._engine)), encoding="utf-8")
            temporary.rename(self._path)
        return worked


def read_steps(path: Path) -> list[StepRecord]:
    """Reads the steps that were written to ``path``, oldest first; [] if there is no such file."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % _RECORD.size
    found = _RECORD.iter_unpack(data[:whole])
    return [StepRecord(at, seconds, width, tuple(ranks)) for at, seconds, width, *ranks in found]


@dataclass(frozen=True, slots=True)
class WatchedFactory:
    """Builds an engine in its worker, and what watches it around it."""

    setup: TargetSetup | DraftSetup
    path: Path
    """File that the watch writes to."""
    watch: Callable[[Any, Path], Engine[Any]]
    """One of ``timed_target``, ``timed_draft``, ``learning_target`` and ``CountedEngine``."""
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit[Any]) -> Engine[Any]:
        """Builds the engine."""
        return self.watch(EngineSpec(self.setup, self.rendezvous).build(emit), self.path)


def timed_target(engine: Any, path: Path) -> Engine[Any]:
    """Records the steps of a target engine without a prefix cache."""
    ranks = engine.ranks

    def count() -> tuple[int, ...]:
        return engine.stats.steps, engine.stats.tokens_computed, *ranks.verified, *ranks.accepted

    return TimedEngine(engine, count, path, engine.runner.cache)


def timed_draft(engine: Any, path: Path) -> Engine[Any]:
    """Records the tree steps of a draft engine, not its prefill."""
    return TimedEngine(engine, lambda: (engine.stats.tree_steps, engine.stats.leaves), path)


_SIZES = (*range(1, 17), 24, 32, 48, 64)
_LEAVES = (1, 2, 4, 8, 16, 32, 64)


def learning_target(engine: Any, path: Path) -> Engine[Any]:
    """A target with a head and without a prefix cache. Writes what its controllers have learned: ``target_s``, (tokens,
    seconds) of its steps, and ``draft_s``, (leaves, seconds) of the head's depths, as far as there were any of about as
    many."""

    def describe(engine: Any) -> dict[str, Any]:
        cost, gate = engine.allocation.cost, engine.heads.mounted[0].gate
        seen = {at for at, _ in gate.level_s}
        return {
            "target_s": [(size, cost.seconds(size)) for size in _SIZES],
            "draft_s": [(n, gate.depth_s(n, first=True)) for n in _LEAVES if load_class(n) in seen],
        }

    return CountedEngine(engine, path, describe, engine.runner.cache)
