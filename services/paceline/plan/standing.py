"""Layouts of the devices of a running service compared by the times that it has measured itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, System, best_k, plain
from paceline.plan.outcomes import Outcomes
from paceline.plan.times import StepTable
from paceline.types import Mode, ReplicaStatus, ServerInfo

APART, COLOCATED, PLAIN = "separate draft", "draft co-located with its target", "plain"
_STEP = "step_seconds:"
_LEAST_STEPS = 100
"""Steps of drafts, and of targets, from which on their times mean something."""
_LONGEST = 8


def layouts_now(info: ServerInfo) -> Mapping[str, float]:
    """Predicted tokens/s of ``APART``, ``COLOCATED`` and ``PLAIN`` for the sessions that run now, on the same devices.

    ``APART`` is the service as it is. The two others count each draft replica as a target replica, so they are
    overestimated if a target needs more devices than a draft. Without prompts; {} without running sessions, drafts, or
    measurements of both kinds.
    """
    targets, drafts = (_up(info.pools.get(kind, ())) for kind in ("target", "draft"))
    sizes = sorted({int(name[len(_STEP) :]) for each in targets for name in each.measures if name.startswith(_STEP)})
    num_steps, num_tree_steps = _sum(targets, "steps"), _sum(drafts, "tree_steps")
    if not info.sessions_running or not sizes or min(num_steps, num_tree_steps) < _LEAST_STEPS:
        return {}
    points = [(size, fmean(_values(targets, f"{_STEP}{size}"))) for size in sizes]
    draft_s, path = _draft_times(drafts, num_tree_steps)
    acceptance = fmean(_values(targets, "acceptance"))
    apart = System(
        StepTable(tuple(points)),
        StepTable.affine(draft_s, 0.0),
        Outcomes.derived(min(acceptance, 0.99)),
        path=path,
        gap_s=_sum(targets, "bubble_s") / max(1.0, _sum(targets, "bubble_steps")),
    )
    load = Load(info.sessions_running, len(targets), len(drafts))
    alone = Load(info.sessions_running, len(targets) + len(drafts))
    shared = replace(apart, colocated=True, ranked=RANKED, most_leaves=MOST_LEAVES)
    return {
        APART: best_k(apart, load, Mode.OVERLAPPED, _LONGEST).tokens_per_s,
        COLOCATED: best_k(shared, alone, Mode.SEQUENTIAL, _LONGEST).tokens_per_s,
        PLAIN: plain(apart, alone).tokens_per_s,
    }


def _draft_times(drafts: Sequence[ReplicaStatus], num_tree_steps: float) -> tuple[float, StepTable | None]:
    """Seconds of a tree step, and of paths by one call, by their tokens; None: there were too few of these."""
    num_paths, path_s, step_s = _sum(drafts, "paths"), _sum(drafts, "path_s"), _sum(drafts, "step_s")
    if num_paths < _LEAST_STEPS:
        return step_s / num_tree_steps, None
    token_s = path_s / max(1.0, _sum(drafts, "path_tokens"))
    others = num_tree_steps - num_paths
    return (step_s - path_s) / others if others >= _LEAST_STEPS else token_s, StepTable.affine(token_s, token_s)


def _up(statuses: Iterable[ReplicaStatus]) -> list[ReplicaStatus]:
    return [status for status in statuses if not status.draining]


def _sum(statuses: Iterable[ReplicaStatus], counter: str) -> float:
    return sum(status.counters.get(counter, 0.0) for status in statuses)


def _values(statuses: Iterable[ReplicaStatus], measure: str) -> list[float]:
    return [status.measures[measure] for status in statuses if measure in status.measures]
