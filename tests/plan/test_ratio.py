"""The recommended ratio: enough where it is simulated, monotone, quick, and free of what a scaler must not load."""

import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.plan import ratio as ratio_module
from paceline.plan.closed_form import Load, Prediction, System
from paceline.plan.outcomes import Outcomes
from paceline.plan.ratio import drafts_per_target
from paceline.plan.times import StepTable
from paceline.plan.trees import simulate
from paceline.types import Mode

GIVEN = {
    "target_step_s": 0.0115,
    "target_row_s": 4e-5,
    "draft_step_s": 0.0025,
    "draft_row_s": 1e-5,
    "acceptance": 0.8,
    "sessions_per_target": 8.0,
    "link_s": 2e-4,
}


def ratio(**changes: float) -> float:
    return drafts_per_target(**(GIVEN | changes))


@pytest.mark.parametrize(
    ("draft_step_s", "sessions"),
    [(0.0025, 4), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((0.001, 4), (0.001, 16), (0.0025, 16)))],
)
def test_the_recommended_drafts_are_enough_where_they_are_simulated(draft_step_s: float, sessions: int) -> None:
    """At least 93 % of unlimited drafts; half as many are below what was recommended."""
    some = System(
        StepTable.affine(0.0115, 4e-5), StepTable.affine(draft_step_s, 1e-5), Outcomes.derived(0.8), link_s=2e-4
    )
    targets = 16
    found = ratio(sessions_per_target=sessions, draft_step_s=draft_step_s)

    def rate(drafts: int) -> float:
        load = Load(sessions * targets, targets, drafts)
        return max(simulate(some, load, Mode.OVERLAPPED, k, seconds=0.8).tokens_per_s for k in (2, 4, 8))

    enough, unlimited = round(found * targets), rate(sessions * targets)
    assert rate(enough) >= 0.93 * unlimited
    assert rate(enough // 2) < rate(enough)


def test_speculation_that_does_not_pay_needs_no_drafts() -> None:
    assert ratio(acceptance=0.0) == 0.0
    assert ratio(acceptance=0.3, target_row_s=0.01, sessions_per_target=64.0) == 0.0
    assert ratio(acceptance=1.0) > 0.0


def test_slower_drafts_have_to_be_more() -> None:
    steps = (0.0005, 0.001, 0.002, 0.004)
    found = [ratio(draft_step_s=s, draft_row_s=s / 100) for s in steps]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_draft_is_shared_by_several_targets_and_none_has_more_than_its_sessions() -> None:
    assert 0 < ratio(sessions_per_target=1.0) < 0.5
    assert ratio(sessions_per_target=0.0) == ratio(sessions_per_target=1.0)  # one at a time, when there are any
    assert ratio(draft_row_s=0.002, draft_step_s=0.01) <= 8.0


def test_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for a few predictions; each takes a fraction of a millisecond."""
    predict, asked = ratio_module.overlapped, list[int]()

    def counted(system: System, load: Load, k: int) -> Prediction:
        asked.append(k)
        return predict(system, load, k)

    monkeypatch.setattr(ratio_module, "overlapped", counted)
    for sessions in range(1, 200, 20):
        asked.clear()
        ratio(sessions_per_target=float(sessions))
        assert 4 <= len(asked) <= 4 * 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target_step_s", 0.0),
        ("draft_step_s", float("nan")),
        ("link_s", -1.0),
        ("draft_row_s", float("inf")),
        ("acceptance", 1.1),
        ("sessions_per_target", float("nan")),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        ratio(**{name: value})


def test_it_loads_neither_torch_nor_ray() -> None:
    code = "import sys, paceline.plan.ratio; sys.exit(any(m in sys.modules for m in ('torch', 'ray', 'numpy')))"
    source_root = str(Path(paceline.__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", code], check=False, timeout=300, env={"PYTHONPATH": source_root})
    assert ran.returncode == 0


def test_a_draft_much_slower_than_its_target_does_not_pay() -> None:
    assert ratio(draft_step_s=0.2, draft_row_s=0.0) == 0.0
