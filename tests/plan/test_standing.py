"""Layouts of the devices of a running service, from what its replicas have measured."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, System, best_k
from paceline.plan.outcomes import Outcomes
from paceline.plan.standing import APART, COLOCATED, PLAIN, layouts_now
from paceline.plan.times import StepTable
from paceline.types import Mode, ReplicaStatus, ServerInfo

TARGET_STEPS = {"step_seconds:1": 0.015, "step_seconds:4": 0.015, "step_seconds:16": 0.03}


def replica(
    kind: str, counters: Mapping[str, float], measures: Mapping[str, float], *, draining: bool = False
) -> ReplicaStatus:
    return ReplicaStatus("r", kind, 1, 1, 0, 16, draining=draining, counters=counters, measures=measures)


def service(draft_step_s: float, *more: ReplicaStatus, acceptance: float = 0.7) -> ServerInfo:
    """A target of 15 ms a step and a draft, with one session."""
    counted = {"steps": 500.0, "bubble_s": 0.5, "bubble_steps": 500.0}
    target = replica("target", counted, TARGET_STEPS | {"acceptance": acceptance})
    draft = replica("draft", {"tree_steps": 200.0, "step_s": 200.0 * draft_step_s}, {})
    pools = {"target": (target,), "draft": (draft, *more)}
    return ServerInfo("1", 1.0, pools, 1, 0, acceptance, 2.0, 0.8)


def test_the_times_that_were_measured_are_those_of_the_prediction() -> None:
    predicted = layouts_now(service(0.004))
    steps = StepTable(((1, 0.015), (4, 0.015), (16, 0.03)))
    system = System(steps, StepTable.affine(0.004, 0.0), Outcomes.derived(0.7), gap_s=0.001)
    assert predicted[APART] == best_k(system, Load(1, 1, 1), Mode.OVERLAPPED, 8).tokens_per_s
    beside = replace(system, colocated=True, ranked=RANKED, most_leaves=MOST_LEAVES)
    assert predicted[COLOCATED] == best_k(beside, Load(1, 2), Mode.SEQUENTIAL, 8).tokens_per_s
    assert predicted[PLAIN] == pytest.approx(1 / 0.016)


@pytest.mark.parametrize(("draft_step_s", "best"), [(0.0005, COLOCATED), (0.005, APART)])
def test_a_heavy_draft_is_better_apart_and_a_light_one_beside(draft_step_s: float, best: str) -> None:
    predicted = layouts_now(service(draft_step_s))
    assert max(predicted, key=lambda name: predicted[name]) == best


def test_paths_by_one_call_have_their_own_time() -> None:
    """Half of 240 steps were paths of 4 tokens: beside its target a light draft makes all of its paths so."""
    whole = service(0.004)
    (draft,) = whole.pools["draft"]
    counted = {"tree_steps": 240.0, "step_s": 0.48, "paths": 120.0, "path_tokens": 480.0, "path_s": 0.24}
    predicted = layouts_now(replace(whole, pools=whole.pools | {"draft": (replace(draft, counters=counted),)}))
    steps = StepTable(((1, 0.015), (4, 0.015), (16, 0.03)))
    system = System(steps, StepTable.affine(0.002, 0.0), Outcomes.derived(0.7), gap_s=0.001)
    system = replace(system, path=StepTable.affine(0.0005, 0.0005))
    beside = replace(system, colocated=True, ranked=RANKED, most_leaves=MOST_LEAVES)
    assert predicted[COLOCATED] == best_k(beside, Load(1, 2), Mode.SEQUENTIAL, 8).tokens_per_s
    assert predicted[APART] == best_k(system, Load(1, 1, 1), Mode.OVERLAPPED, 8).tokens_per_s
    few = replace(draft, counters=counted | {"paths": 99.0})
    assert layouts_now(replace(whole, pools=whole.pools | {"draft": (few,)})) == layouts_now(service(0.002))
    slower = replace(beside, path=None)
    assert predicted[COLOCATED] > best_k(slower, Load(1, 2), Mode.SEQUENTIAL, 8).tokens_per_s


def test_a_draft_that_guesses_wrong_is_better_left_out() -> None:
    """Two plain replicas for sixteen sessions beat a draft that is right once in twenty times."""
    predicted = layouts_now(replace(service(0.005, acceptance=0.05), sessions_running=16))
    assert max(predicted, key=lambda name: predicted[name]) == PLAIN


def test_nothing_is_said_without_measurements() -> None:
    whole = service(0.004)
    assert layouts_now(whole)
    assert not layouts_now(replace(whole, sessions_running=0))
    (target,), (draft,) = whole.pools["target"], whole.pools["draft"]
    new = replace(target, counters={"steps": 3.0})
    without = replace(target, measures={"acceptance": 0.7})
    few = replace(draft, counters={"tree_steps": 3.0, "step_s": 1.0})
    for pools in (
        {"target": (target,), "draft": ()},
        {"target": (target,), "draft": (few,)},
        {"target": (target,), "draft": (replace(draft, draining=True),)},
        {"target": (new,), "draft": (draft,)},
        {"target": (without,), "draft": (draft,)},
    ):
        assert not layouts_now(replace(whole, pools=pools))
