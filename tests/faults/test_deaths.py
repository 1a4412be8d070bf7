"""Whoever dies when, and beside whatever else goes wrong: a session ends with the tokens of plain decoding, each
exactly once.
"""

import functools
import itertools
import random
from collections import Counter

import pytest
from tests.faults.pump import LINKS, LONGEST, RATES, FaultyPump
from tests.faults.runs import _at_outcome, _draft_refuses, accepted, run
from tests.support.rings import nightly, slow

from paceline.types import Result


def _num_outcomes(pump: FaultyPump) -> int:
    return sum(result.speculation.rounds for result in pump.results.values())


@pytest.fixture(scope="module")
def two(reference: dict[str, Result]) -> dict[str, Result]:
    """Of the first two requests."""
    return dict(itertools.islice(reference.items(), 2))


@pytest.mark.parametrize("keeps_talking", [True, *slow([False])])
def test_a_target_that_dies_at_any_round(two: dict[str, Result], keeps_talking: bool) -> None:
    """Between an outcome and its text, once in each run, at each round of the run; with and without its last words."""
    number, reopened = 1, 0
    while True:
        pump = run(two, 7, {}, _at_outcome(number, lambda pump: pump.kill_target(keeps_talking=keeps_talking)))
        reopened += pump.counts["target_reopens"]
        assert pump.counts["target_reopens"] <= 2
        assert pump.counts["stalls"] == pump.counts["targets_lost"] == 0
        if number >= _num_outcomes(pump):
            break
        number += 1
    assert number > 10
    assert reopened > 15


def _die_for(num_ticks: int, keeps_talking: bool, pump: FaultyPump) -> None:
    pump.kill_draft(keeps_talking=keeps_talking)
    back = pump.now + num_ticks

    def each_tick() -> None:
        if pump.now == back:
            pump.restart_draft()

    pump.each_tick = each_tick


@pytest.mark.parametrize("keeps_talking", [True, *slow([False])])
def test_a_draft_that_dies_at_any_round_and_comes_back(two: dict[str, Result], keeps_talking: bool) -> None:
    """Some ticks later. In the end draft tokens were of use again."""
    number = reopened = useful = 0
    while True:
        number += 1

        pump = run(two, 8, {}, _at_outcome(number, functools.partial(_die_for, number, keeps_talking)))
        assert pump.counts["target_reopens"] == pump.counts["stalls"] == 0
        reopened += pump.counts["draft_reopens"]
        useful += accepted(pump)
        if number >= _num_outcomes(pump):
            break
    assert number > 10
    assert reopened > 10
    assert useful > 20


def _deaths(pump: FaultyPump) -> None:
    """Every now and then somebody dies, or comes back."""

    def each_tick() -> None:
        event = pump.chaos.random()
        if pump.now > LONGEST // 2:
            return
        if event < 0.01:
            pump.kill_target(keeps_talking=pump.chaos.random() < 0.5)
        elif event < 0.03 and not pump.draft_dead:
            pump.kill_draft(keeps_talking=pump.chaos.random() < 0.5)
        elif event < 0.13 and pump.draft_dead:
            pump.restart_draft()

    pump.each_tick = each_tick


def _everything(seed: int, corrupt: bool) -> dict[tuple[str, str], float]:
    rng = random.Random(seed)
    kinds = [kind for kind in RATES if corrupt or kind != "corrupt"]
    return {(link, kind): RATES[kind] * rng.choice((0.0, 0.1, 0.3)) for link in LINKS for kind in kinds}


def _chaos(reference: dict[str, Result], seeds: range) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += run(reference, seed, _everything(seed, corrupt=seed % 2 == 1), _deaths).counts
    for name in ("target_reopens", "draft_reopens", "drafts_lost", "stale", "repeated", "nodes_invalid"):
        assert total[name] > 0, name


def test_everything_at_once(reference: dict[str, Result]) -> None:
    """All faults on all links, with and without corruption, and deaths of both engines."""
    _chaos(reference, range(6))


@pytest.mark.parametrize("seeds", [*slow([range(6, 18)]), *nightly([range(18, 80)])], ids=str)
def test_everything_at_once_for_longer(seeds: range, reference: dict[str, Result]) -> None:
    """The same with other seeds."""
    _chaos(reference, seeds)


def test_a_draft_that_refuses_every_session_is_left_in_peace(reference: dict[str, Result]) -> None:
    """Each is tried again twice, then it stays plain."""
    _draft_refuses(reference)
