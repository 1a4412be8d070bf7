"""Layouts of CPU cores: what is compared, what is left without a forecast, and the table that was measured."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config import ServiceConfig
from paceline.plan import layouts as module
from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, Requests, System, colocated, overlapped, plain
from paceline.plan.layouts import CoreTimes, Drafting, Layout, Run, best, configuration, divisions, layouts
from paceline.plan.measured import Measurements, read
from paceline.plan.outcomes import Outcomes
from paceline.plan.search import Wish
from paceline.plan.times import StepTable

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TARGET, DRAFT = StepTable.affine(0.014, 0.0005), StepTable.affine(0.0012, 0.0001)
PAIR = System(TARGET, DRAFT, Outcomes.derived(0.75), link_s=0.0002)
GAINS = {1: 1.0, 2: 1.3, 3: 1.5, 4: 1.6}
"""How many times as fast so many threads are."""


def times(gain: float) -> CoreTimes:
    return CoreTimes(TARGET.times(1 / gain), DRAFT.times(1 / gain), 0.0)


MEASURED = {threads: times(gain) for threads, gain in GAINS.items()}


def named(found: list[Layout]) -> dict[str, Layout]:
    return {layout.name: layout for layout in found}


def tokens_per_s(layout: Layout) -> float:
    assert layout.predicted is not None
    return layout.predicted.tokens_per_s


@pytest.mark.parametrize("measured", [{}, {2: times(1.3)}, MEASURED])
def test_every_layout_fits_the_cores_and_its_configuration_is_taken(measured: Mapping[int, CoreTimes]) -> None:
    for cores, sessions in itertools.product((1, 2, 3, 4, 7, 8), (1, 3, 40)):
        found = layouts(PAIR, Wish(sessions, math.inf), cores, Run(measured))
        assert found
        for layout in found:
            load = layout.load
            assert load.targets * layout.threads + load.drafts <= cores
            assert 1 <= load.targets <= sessions >= load.drafts
            assert (layout.predicted is None) == (layout.threads != 1 and layout.threads not in measured)
            if layout.predicted is None:
                continue
            config = ServiceConfig.parse(configuration(PAIR, layout, "a/b", "a/c"))
            options, draft = config.target_config.engine_kwargs, config.draft_config
            assert options.cpu_threads == layout.threads
            assert options.tensor_parallel_size == 1
            assert config.target_config.deployment_config.num_replicas == load.targets
            assert options.max_sessions * load.targets >= sessions
            assert options.max_step_tokens >= options.max_sessions * (1 + layout.predicted.k)
            assert [head.method for head in options.heads] == (
                ["draft_model"] if layout.drafting is Drafting.COLOCATED else []
            )
            assert (0 if draft is None else draft.deployment_config.num_replicas) == load.drafts


def test_no_layout_that_was_measured_is_better() -> None:
    """Against every number of threads and of drafts and every K, by the closed form itself."""
    for cores, sessions in ((2, 1), (4, 3), (6, 8)):
        tried = []
        for threads, shared in MEASURED.items():
            system = replace(PAIR, target=shared.target)
            inside = replace(system, draft=shared.draft, colocated=True, ranked=RANKED, most_leaves=MOST_LEAVES)
            if targets := min(cores // threads, sessions):
                tried.append(plain(system, Load(sessions, targets)).tokens_per_s)
                tried += [colocated(inside, Load(sessions, targets), k).tokens_per_s for k in range(1, 9)]
            for drafts in range(1, min(cores - threads, sessions) + 1):
                targets = min((cores - drafts) // threads, sessions)
                tried += [overlapped(system, Load(sessions, targets, drafts), k).tokens_per_s for k in range(1, 9)]
        wish = Wish(sessions, math.inf)
        chosen = best(wish, layouts(PAIR, wish, cores, Run(MEASURED)))
        assert chosen is not None
        assert tokens_per_s(chosen) == pytest.approx(max(tried), rel=2e-3)


def test_threads_that_bring_nothing_are_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes one core's steps over their number for theirs, whatever was measured."""
    useless, wish = {2: times(1.001)}, Wish(2, math.inf)

    def threads() -> int:
        chosen = best(wish, layouts(PAIR, wish, 2, Run(useless)))
        assert chosen is not None
        return chosen.threads

    assert threads() == 1
    predict = module.predict_load
    ideal = {useless[2]: times(2.0)}
    monkeypatch.setattr(module, "predict_load", lambda system, at, *rest: predict(system, ideal.get(at, at), *rest))
    assert threads() == 2


def test_what_was_not_measured_is_listed_last_and_never_chosen() -> None:
    found = layouts(PAIR, Wish(1, math.inf), 5, Run({2: times(1.3)}))
    assert [layout.name for layout in found if layout.predicted is None] == [
        "overlapped, 1 target of 4 cores and 1 draft",
        "plain, 1 target of 5 cores",
        "co-located, 1 target of 5 cores",
    ]
    assert all(layout.predicted is None for layout in found[-3:])
    assert best(Wish(1, math.inf), found[-3:]) is None


def test_limits_and_the_sessions_of_a_target_are_kept() -> None:
    wish = Wish(8, math.inf, max_sessions=3, requests=Requests(64, 100))
    found = named(layouts(PAIR, wish, 4, Run(MEASURED)))
    assert all(layout.load.batch <= 3 for layout in found.values())
    assert {layout.threads for layout in found.values()} == {1}
    fastest = best(wish, list(found.values()))
    assert fastest is not None
    assert fastest.predicted is not None
    assert best(replace(wish, limit_s=0.9 * fastest.predicted.itl_s), [fastest]) is None


def test_a_run_in_every_layout_at_this_load_decides() -> None:
    """A layout can be faster than its forecast; a run that lacks one of the layouts is shown and no more."""
    wish, cores = Wish(1, math.inf), {1: times(1.0), 2: times(1.3)}
    forecast = layouts(PAIR, wish, 2, Run(cores))
    slowest_first = {(layout.drafting, layout.threads): 10.0 + at for at, layout in enumerate(forecast)}
    run = Run(cores, 1, slowest_first)
    assert [layout.name for layout in layouts(PAIR, wish, 2, run)] == [layout.name for layout in forecast[::-1]]
    assert [layout.measured for layout in layouts(PAIR, wish, 2, run)] == [14.0, 13.0, 12.0, 11.0, 10.0]
    partly = replace(run, tokens_per_s=dict(list(slowest_first.items())[1:]))
    assert [layout.name for layout in layouts(PAIR, wish, 2, partly)] == [layout.name for layout in forecast]
    assert layouts(PAIR, wish, 2, partly)[1].measured == 11.0
    for other in (Wish(2, math.inf), Wish(1, math.inf, requests=Requests(64, 100))):
        assert all(layout.measured is None for layout in layouts(PAIR, other, 2, run))


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


def as_recorded(run: Measurements, rates: Mapping[str, float]) -> list[Layout]:
    """The layouts of two cores at the plain rates of the table.

    The times of one core are those that the table ends with, in the proportion of a plain step. Acceptance, a draft
    apart, its link and the gap are those of another run of the same pair, in that proportion there. The target's steps
    of two threads are those of one by the ratio of the two plain rows, whatever their tokens; those of the draft are as
    on one core.
    """
    system, one = run.system, learned()
    slower = plain(system, Load(1, 1)).tokens_per_s / rates["plain, 1 core"]
    assert system.path is not None
    gap_s = system.gap_s * slower
    faster = (1.0 / rates["plain, 1 core"] - gap_s) / one.target.seconds(1)
    target, inside = one.target.times(faster), one.draft.times(faster)
    draft, path = system.draft.times(slower), system.path.times(slower)
    pair = replace(system, target=target, draft=draft, path=path, link_s=system.link_s * slower, gap_s=gap_s)
    shared = target.times(rates["plain, 1 core"] / rates["plain, 2 threads"])
    cores = {1: CoreTimes(target, inside, gap_s), 2: CoreTimes(shared, inside, gap_s)}
    return layouts(pair, Wish(1, math.inf), 2, Run(cores))


NAMES = {
    "plain, 1 core": "plain, 1 target of 1 core",
    "plain, 2 threads": "plain, 1 target of 2 cores",
    "co-located, 1 core": "co-located, 1 target of 1 core",
    "co-located, 2 threads": "co-located, 1 target of 2 cores",
    "overlapped, 2 cores": "overlapped, 1 target of 1 core and 1 draft",
}


def test_the_recorded_layouts_are_forecast() -> None:
    """Errors as docs/plan.md states them."""
    for run in read(RESULTS / "sweep" / "light-1.json"):
        rates = recorded()[run.temperature]
        assert set(rates) == set(NAMES)
        found = as_recorded(run, rates)
        errors = {row: tokens_per_s(named(found)[NAMES[row]]) / rates[row] - 1 for row in NAMES}
        for row, error in errors.items():
            assert abs(error) < 0.1, (run.temperature, row, errors)
        assert [layout.name for layout in found] == [NAMES[row] for row in sorted(rates, key=lambda row: -rates[row])]
