"""The best use of some devices: what is compared, and that nothing better was overlooked."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.methods.entry import TEXTS
from paceline.drafters.catalogue import METHODS
from paceline.plan import advice
from paceline.plan.advice import Candidate, Forecast, Site, all_options, divisions, forecasts
from paceline.plan.closed_form import Load, Prediction, System, colocated, overlapped, plain, sequential
from paceline.plan.measured import CoreTimes, Measurements, read
from paceline.plan.outcomes import Outcomes
from paceline.plan.times import StepTable

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TARGET = StepTable.affine(0.010, 0.010 / 295)


def site(devices: int, target_devices: int = 1, sessions: int = 8) -> Site:
    return Site(TARGET, devices, target_devices, sessions)


def draft(acceptance: float = 0.8, *, share: float = 0.1, in_pool: bool = False, **options: object) -> Candidate:
    """A drafter whose forward takes a share of the target's."""
    step = TARGET.times(share)
    return Candidate("in_pool" if in_pool else "inside", acceptance, step, in_pool, int(in_pool), **options)  # type: ignore[arg-type]


def best(where: Site, candidate: Candidate) -> Forecast:
    return next(f for f in forecasts(where, [candidate]) if f.name != "plain")


def test_plain_decoding_is_the_measure_and_the_best_comes_first() -> None:
    found = forecasts(site(4), [draft(0.02, share=0.5), draft(0.9, share=0.02, in_pool=True)])
    assert [f.predicted.tokens_per_s for f in found] == sorted((f.predicted.tokens_per_s for f in found), reverse=True)
    by_name = {f.name: f for f in found}
    assert by_name["plain"].times_plain == 1.0
    assert by_name["inside"].times_plain < 1.0 < by_name["in_pool"].times_plain
    assert by_name["plain"].predicted == plain(
        System(TARGET, TARGET, Outcomes.derived(0.0)), Load(sessions=8, targets=4)
    )


@pytest.mark.parametrize("target_devices", [1, 2])
@pytest.mark.parametrize("devices", [2, 5, 8])
def test_no_division_of_the_devices_and_no_k_is_better(devices: int, target_devices: int) -> None:
    """Against every number of drafts and every K, by the closed form itself."""
    where, options = site(devices, target_devices), {"max_step_tokens": 256}
    inside, in_pool = draft(0.7), draft(0.7, in_pool=True)
    system = System(TARGET, inside.step, Outcomes.derived(0.7), colocated=True, **options)
    load = Load(8, devices // target_devices)
    most = max(colocated(system, load, k).tokens_per_s for k in range(1, 9))
    assert best(where, inside).predicted.tokens_per_s >= 0.999 * most
    if devices == target_devices:
        return
    system = System(TARGET, in_pool.step, Outcomes.derived(0.7), link_s=where.link_s, **options)
    loads = [Load(8, (devices - n) // target_devices, n) for n in range(1, devices - target_devices + 1)]
    most = max(overlapped(system, each, k).tokens_per_s for each in loads for k in range(1, 9))
    found = best(where, in_pool)
    assert found.predicted.tokens_per_s >= 0.999 * most
    assert found.targets * target_devices + found.drafts <= devices


def test_a_heavy_draft_belongs_on_a_device_of_its_own_and_a_light_one_beside_its_target() -> None:
    where = site(17, 4, sessions=4)
    for share, apart_wins in ((0.25, True), (0.01, False)):
        ratio = (
            best(where, draft(share=share, in_pool=True)).predicted.tokens_per_s
            / best(where, draft(share=share)).predicted.tokens_per_s
        )
        assert (ratio > 1.05) == apart_wins


@pytest.mark.parametrize(("gain", "cores"), [(1.001, 1), (1.4, 2)])
def test_cores_share_a_target_where_that_was_measured_to_bring_more(gain: float, cores: int) -> None:
    """Two sessions: two targets of a core each, or one target of two cores that steps for both."""
    where = replace(site(2, sessions=2), shared={2: TARGET.times(1 / gain), 4: TARGET.times(0.01)})
    found = {f.name: f for f in forecasts(where, [draft(0.8), draft(0.8, in_pool=True)])}
    for name in ("plain", "inside"):
        assert found[name].target_devices == cores
        assert found[name].targets * cores == 2
    assert (found["in_pool"].target_devices, found["in_pool"].targets, found["in_pool"].drafts) == (1, 1, 1)


def test_the_forward_of_a_drafter_inside_is_that_of_the_cores_that_share_it() -> None:
    """One session, so that a second target would have nothing to do."""
    where = replace(site(2, sessions=1), shared={2: TARGET.times(0.8)})
    alone, shared = (draft(0.8, share=0.2, **more) for more in ({}, {"shared": {2: TARGET.times(0.1)}}))
    found = {name: best(where, each) for name, each in (("alone", alone), ("shared", shared))}
    assert {f.target_devices for f in found.values()} == {2}
    for name, share in (("alone", 0.2), ("shared", 0.1)):
        p = found[name].predicted
        assert p.round_s == pytest.approx(p.k * share * TARGET.seconds(1) + 0.8 * TARGET.seconds(1 + p.k))


def test_a_path_by_one_call_is_shorter_but_for_cores_whose_own_times_are_known() -> None:
    path = TARGET.times(0.1)
    where, calls = site(2, 2, sessions=1), draft(0.8, share=0.2, path=path)
    p = best(where, calls).predicted
    assert p.round_s == pytest.approx(path.seconds(p.k) + TARGET.seconds(1 + p.k))
    shared = replace(calls, shared={2: TARGET.times(0.2)})
    assert best(where, shared).predicted == best(where, draft(0.8, share=0.2)).predicted


def test_a_target_that_no_session_needs_is_left_out() -> None:
    found = best(site(8, sessions=3), draft(0.8))
    assert found.targets == 3
    assert found.predicted.round_s == pytest.approx(
        found.predicted.k * 0.1 * TARGET.seconds(1) + TARGET.seconds(1 + found.predicted.k)
    )


def test_a_drafter_that_needs_a_device_is_left_out_where_there_is_none() -> None:
    assert [f.name for f in forecasts(site(4, 4), [draft(in_pool=True)])] == ["plain"]
    lookup = Candidate("n-grams", 0.5, StepTable.affine(1e-4, 1e-5), in_pool=True)
    assert best(site(4, 4), lookup).targets == 1


def test_one_pass_costs_one_forward_however_many_tokens() -> None:
    one, many = best(site(1), draft(0.8, share=0.2, one_pass=True)), best(site(1), draft(0.8, share=0.2))
    assert one.predicted.k > many.predicted.k
    assert one.predicted.round_s == pytest.approx(
        0.2 * TARGET.seconds(8) + TARGET.seconds(8 * (1 + one.predicted.k)), rel=1e-6
    )
    assert best(site(1), draft(0.8, share=0.2, one_pass=True, most_tokens=2)).predicted.k <= 2


def test_a_forecast_that_forgets_what_drafting_costs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: drafting is free, so that a draft as slow as its target seems to pay."""
    heavy = draft(0.8, share=1.0)
    assert best(site(1), heavy).times_plain < 1.1
    monkeypatch.setattr(advice, "colocated", lambda system, load, k: overlapped(system, Load(8, 1, 1000), k))
    assert best(site(1), heavy).times_plain > 1.1


def test_guesses_that_are_right_save_forwards_and_wrong_ones_cost_rows() -> None:
    """Vertical: with g = 0.5 and 2 guesses a forward drafts 1.75 tokens."""
    where, model = site(1), draft(0.8, share=0.2)
    system = advice.system_of(where, replace(model, guesses=(2, 0.5)), 7)
    assert 7 * system.draft.seconds(8) == pytest.approx(7 / 1.75 * model.step.seconds(24))
    found = [best(where, replace(model, guesses=(4, g))).predicted.tokens_per_s for g in (0.01, 0.5, 0.9)]
    assert found[0] < best(where, model).predicted.tokens_per_s < found[1] < found[2]


def test_rows_that_ride_make_the_steps_of_the_target_longer() -> None:
    rider = Candidate("lookahead", 0.3, StepTable.affine(1e-4, 1e-5), in_pool=False, riding_rows=14)
    system = advice.system_of(site(1), rider, 3)
    assert system.target.seconds(8 * 4) == pytest.approx(TARGET.seconds(8 * 18))
    measured = StepTable(((1, 1.0), (10, 1.5), (40, 9.0)))
    for size in (1, 3, 20, 50):
        assert measured.of_rows(2).seconds(size) == pytest.approx(measured.seconds(2 * size))


def test_every_method_has_an_assumption_with_its_source() -> None:
    entries = {method.drafting.kind: method.drafting for method in METHODS if method.kind not in ("", "plugin")}
    for entry in entries.values():
        for text in TEXTS:
            value, source = entry.assumed(text)
            assert 0 < value < 1
            assert source.startswith("assumed, ")
    figures = {text: entries["peagle"].assumed(text)[0] for text in TEXTS}
    assert figures["code"] > figures["edits"] == figures["chat"]


def test_a_head_apart_is_drafted_with_in_turn_and_its_states_take_their_time() -> None:
    head = draft(0.7, in_pool=True, state_bytes=1 << 20)
    where = site(2, sessions=4)
    system, load = advice.system_of(where, head, 3), Load(4, 1, 1)
    found, without = advice.predict_load(where, head, load, 3), sequential(system, load, 3)
    bytes_of_round = 4 * found.tokens_per_round * head.state_bytes
    assert found.tokens_per_round == pytest.approx(without.tokens_per_round)
    assert found.round_s > without.round_s
    slow = replace(system, link_s=system.link_s + bytes_of_round / 1.25e9 / 2)
    assert found.round_s == pytest.approx(sequential(slow, load, 3).round_s)
    assert advice.predict_load(replace(where, link_bytes_per_s=1e15), head, load, 3).round_s == pytest.approx(
        without.round_s
    )


@pytest.mark.parametrize(("share", "limit"), [(0.1, 1 / 1.3), (0.5, 1 / 2.5)])
def test_a_head_apart_drafts_ahead_only_where_enough_of_it_is_left(share: float, limit: float) -> None:
    """With three tokens, R must exceed 1 / (1 + 3 t_d / T_v); the step of the target has rows of four tokens, too."""
    load, where = Load(1, 1, 1), site(2, sessions=1)

    def predicted(kept: float) -> str:
        head = draft(0.7, share=share, in_pool=True, state_bytes=8192, kept=kept)
        return advice.predict_load(where, head, load, 3).mode

    assert predicted(limit - 0.02) == "sequential"
    assert predicted(limit + 0.02) == "overlapped"


def test_what_is_left_of_a_head_ahead_is_its_acceptance_there() -> None:
    load, where = Load(1, 1, 1), site(2, sessions=1)
    whole = draft(0.7, in_pool=True, state_bytes=1, kept=1.0)
    most, less = (advice.predict_load(where, replace(whole, kept=kept), load, 3) for kept in (1.0, 0.9))
    assert most.tokens_per_round > less.tokens_per_round
    other = advice.predict_load(where, replace(whole, state_bytes=0), load, 3)
    assert most.tokens_per_round == pytest.approx(other.tokens_per_round, rel=1e-3)


def test_threads_that_bring_nothing_are_not_recommended() -> None:
    for gain, devices in ((1.001, 1), (2.0, 2)):
        where = replace(site(2, sessions=2), shared={2: TARGET.times(1 / gain)})
        assert next(f for f in forecasts(where, []) if f.name == "plain").target_devices == devices


@pytest.mark.parametrize(("devices", "target", "draft"), [(9, 2, 1), (200, 3, 2), (3, 3, 1), (1, 2, 1)])
def test_devices_are_divided_without_remainder_that_holds_a_target(devices: int, target: int, draft: int) -> None:
    found = list(divisions(devices, target, draft))
    for targets, drafts in found:
        assert targets >= 1
        assert 0 <= devices - targets * target - drafts * draft < target
    assert bool(found) == (devices >= target + draft)


def recorded() -> dict[float, dict[str, float]]:
    """Tokens per second of ``results/cpu-threads.txt`` by temperature and layout."""
    found: dict[float, dict[str, float]] = {}
    for line in (RESULTS / "cpu-threads.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("learned"):
            break
        if line.startswith("temperature "):
            of_it = found.setdefault(float(line.split()[1]), {})
        elif ", " in line and not line.startswith("taken by "):
            of_it[line[:23].strip()] = float(line[23:].split()[0])
    return found


def learned() -> CoreTimes:
    """The times of one core that ``results/cpu-threads.txt`` ends with."""
    *_, names, values = (RESULTS / "cpu-threads.txt").read_text(encoding="utf-8").splitlines()
    assert names.startswith("learned, ms")
    assert values.startswith("co-located, 1 core ")
    sizes = re.findall(r"(step|depth) of (\d+)", names)
    times = [(kind, int(size), float(ms) / 1e3) for (kind, size), ms in zip(sizes, values[23:].split(), strict=True)]
    steps, depths = ([(size, s) for kind, size, s in times if kind == which] for which in ("step", "depth"))
    return CoreTimes(StepTable(tuple(steps)), StepTable(tuple(depths)), 0.0)


def as_recorded(run: Measurements, rates: Mapping[str, float]) -> dict[str, Prediction]:
    """Forecasts for two cores at the plain rates of the table, by its rows.

    The times of one core are those that the table ends with, in the proportion of a plain step. Acceptance, a separate
    draft, its link and the gap are those of another run of the same pair, in that proportion there. The target's steps
    of two threads are those of one by the ratio of the two plain rows, whatever their tokens; those of the draft are as
    on one core.
    """
    system, one = run.system, learned()
    slower = plain(system, Load(1, 1)).tokens_per_s / rates["plain, 1 core"]
    assert system.path is not None
    gap_s = system.gap_s * slower
    faster = (1.0 / rates["plain, 1 core"] - gap_s) / one.target.seconds(1)
    target, inside = one.target.times(faster), one.draft.times(faster)
    shared = target.times(rates["plain, 1 core"] / rates["plain, 2 threads"])
    periods = [CoreTimes(steps, inside, gap_s).period for steps in (target, shared)]
    where = Site(periods[0], 2, 1, 1, link_s=system.link_s * slower, shared={2: periods[1]})
    draft, path, a = system.draft.times(slower), system.path.times(slower), system.outcomes.acceptance
    both = [
        Candidate("co-located", a, inside, in_pool=False, has_siblings=True),
        Candidate("overlapped", a, draft, in_pool=True, devices=1, path=path),
    ]
    of = {(name, n): p for width in where.widths() for name, n, _, p in all_options(width, both)}
    return {row: of[option] for row, option in ROWS.items()}


ROWS = {
    "plain, 1 core": ("plain", 1),
    "plain, 2 threads": ("plain", 2),
    "co-located, 1 core": ("co-located", 1),
    "co-located, 2 threads": ("co-located", 2),
    "overlapped, 2 cores": ("overlapped", 1),
}


def test_the_recorded_layouts_of_cores_are_forecast() -> None:
    """Errors as docs/plan.md states them."""
    for run in read(RESULTS / "sweep" / "light-1.json"):
        rates = recorded()[run.temperature]
        assert set(rates) == set(ROWS)
        found = {row: predicted.tokens_per_s for row, predicted in as_recorded(run, rates).items()}
        errors = {row: found[row] / rates[row] - 1 for row in ROWS}
        assert all(abs(error) < 0.1 for error in errors.values()), (run.temperature, errors)
        assert sorted(ROWS, key=lambda row: -found[row]) == sorted(rates, key=lambda row: -rates[row])
