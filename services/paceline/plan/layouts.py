"""Layouts of the same CPU cores for one pair of models, in closed form (``closed_form.py``).

    plain         targets alone
    co-located    every target drafts for itself, by a head of method ``draft_model``, and verifies, in turn
    overlapped    each draft has a core of its own, the targets have the others

A target has one core, or several that share its products (``cpu_threads``). What several bring is never assumed: a
layout whose number of threads was not measured is listed without a forecast. Where a run has decoded in every layout
that is forecast, at the same load, its rates decide, and not the forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, Prediction, System, best_k
from paceline.plan.search import MOST_DRAFT_SESSIONS, Wish, keeps
from paceline.plan.times import StepTable
from paceline.types import Mode

MOST_TOKENS = 8
"""The longest proposals that are looked at."""
_MOST_THREADS = 64
_MOST_SPLITS = 12
"""Numbers of drafts that are looked at."""


class Drafting(StrEnum):
    """Where drafts run, in the layouts that are compared."""

    PLAIN = "plain"
    COLOCATED = "co-located"
    OVERLAPPED = "overlapped"


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Times of a target with its products shared among cores, from ``paceline bench local --cpu-threads``."""

    target: StepTable
    """Seconds of its step by tokens."""
    draft: StepTable
    """Seconds of a depth of a draft model in its process, whose products the same cores share, by leaves."""
    gap_s: float
    """Between two steps."""
    path: StepTable | None = None
    """Seconds of a path by one call, by its tokens. None: ``draft`` is what tokens took, however they were drafted."""

    @property
    def period(self) -> StepTable:
        """Seconds from one step to the next, by tokens."""
        return StepTable(tuple((tokens, seconds + self.gap_s) for tokens, seconds in self.target.points))


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements on one machine with one target; by default nothing."""

    cores: Mapping[int, CoreTimes] = field(default_factory=dict)
    """Keyed by threads of the target."""
    sessions: int = 0
    """Number of concurrent sessions."""
    tokens_per_s: Mapping[tuple[Drafting, int], float] = field(default_factory=dict)
    """Rate of all sessions, without prefill, keyed by threads of the target."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to use the cores, at its best K."""

    drafting: Drafting
    threads: int
    """Cores of a target."""
    load: Load
    predicted: Prediction | None
    """None: no step with this number of threads was measured."""
    measured: float | None = None
    """Tokens per second that a run at this load had in this layout, at K of its own; None: there was none."""

    @property
    def name(self) -> str:
        """Such as ``co-located, 1 target of 2 cores``."""
        targets, drafts = self.load.targets, self.load.drafts
        name = f"{self.drafting}, {targets} {'target' if targets == 1 else 'targets'} of {self.threads} "
        name += "core" if self.threads == 1 else "cores"
        return name + (f" and {drafts} {'draft' if drafts == 1 else 'drafts'}" if drafts else "")


def divisions(devices: int, target_devices: int, draft_devices: int) -> Iterator[tuple[int, int]]:
    """Yields ways (targets, drafts) to divide the devices, at least one of each.

    Tries about a dozen numbers of drafts if many are possible.
    """
    most = (devices - target_devices) // draft_devices
    growth = max(1.0, most ** (1 / _MOST_SPLITS)) if most > 0 else 1.0
    numbers = {math.ceil(growth**i) for i in range(_MOST_SPLITS + 1)} | set(range(1, min(most, _MOST_SPLITS) + 1))
    for drafts in sorted(n for n in numbers if n <= most):
        yield (devices - drafts * draft_devices) // target_devices, drafts


def layouts(system: System, wish: Wish, cores: int, run: Run) -> list[Layout]:
    """All layouts that hold the sessions: with a forecast by falling tokens per second, then without one.

    Args:
        system: of the target on one core and the draft on another.
        wish: the load; its limits are for ``best``.
        cores: of all replicas together.
        run: measured times; ``system`` replaces missing times of one thread.
    """
    found = list(_all(system, wish, cores, run))
    decides = all(layout.measured for layout in found if layout.predicted)

    def tokens_per_s(layout: Layout) -> float:
        if layout.predicted is None:
            return 0.0
        return layout.measured if decides and layout.measured else layout.predicted.tokens_per_s

    return sorted(found, key=tokens_per_s, reverse=True)


def best(wish: Wish, ranked: list[Layout]) -> Layout | None:
    """The first that keeps the limits; None if there is none."""
    return next((one for one in ranked if one.predicted and keeps(wish, one.load, one.predicted)), None)


def _all(system: System, wish: Wish, cores: int, run: Run) -> Iterator[Layout]:
    for threads in range(1, min(cores, _MOST_THREADS) + 1):
        times = run.cores.get(threads)
        if times is None and threads == 1:
            times = CoreTimes(system.target, system.draft, system.gap_s, system.path)
        for drafting in Drafting:
            loads = list(_loads(wish, drafting, cores, threads))
            if times is None:  # loads that leave no core idle
                whole = (load for load in loads if load.targets * threads + load.drafts == cores and load.drafts <= 1)
                yield from (Layout(drafting, threads, load, None) for load in whole)
            elif loads:
                predicted = [(predict_load(system, times, drafting, load), load) for load in loads]
                most, load = max(predicted, key=lambda each: each[0].tokens_per_s)
                same = load == Load(run.sessions, 1, int(drafting is Drafting.OVERLAPPED))
                measured = run.tokens_per_s.get((drafting, threads)) if same else None
                yield Layout(drafting, threads, load, most, measured)


def _loads(wish: Wish, drafting: Drafting, cores: int, threads: int) -> Iterator[Load]:
    """Targets that no session needs are left out."""
    divided = divisions(cores, threads, 1) if drafting is Drafting.OVERLAPPED else [(cores // threads, 0)]
    for targets, drafts in divided:
        load = wish.load(wish.sessions, min(targets, wish.sessions), min(drafts, wish.sessions))
        if load.batch <= wish.max_sessions:
            yield load


def predict_load(system: System, times: CoreTimes, drafting: Drafting, load: Load) -> Prediction:
    """Predicts a layout's figures under a load, at its best number of draft tokens."""
    system, mode = system_on(system, times, drafting)
    return best_k(system, load, mode, MOST_TOKENS)


def system_on(system: System, times: CoreTimes, drafting: Drafting) -> tuple[System, Mode]:
    """The system of a layout with such targets, and the mode in which it decodes."""
    system = replace(system, target=times.target, gap_s=times.gap_s)
    if drafting is Drafting.COLOCATED:
        inside = replace(system, draft=times.draft, path=times.path, colocated=True)
        return replace(inside, ranked=RANKED, most_leaves=MOST_LEAVES), Mode.SEQUENTIAL
    return system, Mode.OVERLAPPED if drafting is Drafting.OVERLAPPED else Mode.PLAIN


def configuration(system: System, layout: Layout, target: str, draft: str) -> dict[str, Any]:
    """The service's configuration for a layout with a forecast, as ``ServiceConfig.parse`` takes it. Models are names
    or paths."""
    assert layout.predicted is not None
    load, k = layout.load, layout.predicted.k
    sessions = math.ceil(load.batch)
    engine: dict[str, Any] = {"max_sessions": sessions}
    engine["max_step_tokens"] = max(system.max_step_tokens, sessions * (1 + k))
    if layout.threads > 1:
        engine["cpu_threads"] = layout.threads
    if layout.drafting is Drafting.COLOCATED:
        engine["heads"] = [{"method": "draft_model", "model": draft, "num_speculative_tokens": k}]
    tree: dict[str, Any] = {
        "target_config": {
            "model_loading_config": {"model_id": target},
            "engine_kwargs": engine,
            "deployment_config": {"num_replicas": load.targets},
        },
        "draft_config": None,
    }
    if load.drafts:
        of_draft = min(math.ceil(load.sessions / load.drafts), MOST_DRAFT_SESSIONS)
        growing = {"max_sessions": of_draft, "tree_budget": system.tree_budget, "fan_out": system.fan_out}
        tree["draft_config"] = {
            "model_loading_config": {"model_id": draft},
            "engine_kwargs": growing,
            "deployment_config": {"num_replicas": load.drafts},
        }
    return tree
