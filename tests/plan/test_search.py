"""What the search answers keeps the limit where it is simulated, and one target fewer does not."""

import math
from dataclasses import replace

import pytest

from paceline.plan import search
from paceline.plan.closed_form import Load, Requests, System, lookahead
from paceline.plan.outcomes import Outcomes
from paceline.plan.search import (
    Fleet,
    Objective,
    Prices,
    Wish,
    cheapest,
    cheapest_plain,
    concurrency,
    least_tree_budget,
    measure,
    run,
)
from paceline.plan.times import StepTable

SYSTEM = System(StepTable.affine(0.0115, 1e-4), StepTable.affine(0.0025, 1e-5), Outcomes.derived(0.8), link_s=2e-4)
PRICES = Prices(10.0, 2.5)


def simulated(wish: Wish, fleet: Fleet, targets: int) -> float:
    load = replace(fleet.load, targets=targets)
    return measure(run(SYSTEM, wish, load, fleet.predicted.mode, fleet.predicted.k), wish.objective)


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(Wish(100, 0.008), id="mean"),
        pytest.param(Wish(100, 0.018, Objective.P99), id="p99", marks=pytest.mark.slow),
        pytest.param(Wish(160, 0.009), id="more sessions", marks=pytest.mark.slow),
    ],
)
def test_the_answer_keeps_the_limit_and_one_target_fewer_does_not(wish: Wish) -> None:
    fleet = cheapest(SYSTEM, wish, PRICES)
    assert fleet is not None
    assert fleet.load.targets > 1
    assert simulated(wish, fleet, fleet.load.targets) <= wish.limit_s
    assert simulated(wish, fleet, fleet.load.targets - 1) > wish.limit_s


def test_plain_decoding_is_held_to_the_same_limit() -> None:
    wish = Wish(100, 0.013)
    fleet = cheapest_plain(SYSTEM, wish, PRICES)
    assert fleet is not None
    assert fleet.load.targets == 7  # 0.0115 + 15 * 0.0001 is the most: 16 sessions a target
    assert simulated(wish, fleet, 6) > wish.limit_s
    assert cheapest_plain(SYSTEM, Wish(100, 0.011), PRICES) is None


def test_no_target_holds_more_sessions_than_it_may() -> None:
    fleet = cheapest(SYSTEM, Wish(100, 1.0, max_sessions=25), PRICES)
    assert fleet is not None
    assert fleet.load.targets >= 4


@pytest.mark.parametrize("prices", [PRICES, Prices(1.0, 1.0), Prices(10.0, 1.0)], ids=["usual", "alike", "cheap"])
def test_fleets_that_are_not_looked_at_cost_more(prices: Prices, monkeypatch: pytest.MonkeyPatch) -> None:
    wish = Wish(64, 0.012)
    fewer = list(search.candidates_of(SYSTEM, wish, prices))
    monkeypatch.setattr(search, "TOO_EXPENSIVE", math.inf)
    every = list(search.candidates_of(SYSTEM, wish, prices))
    assert len(fewer) < len(every)
    assert min(fewer, key=lambda c: c[0]) == min(every, key=lambda c: c[0])


def test_there_is_no_fleet_for_a_limit_that_nothing_keeps() -> None:
    assert cheapest(SYSTEM, Wish(20, 0.001), PRICES) is None


def test_dear_drafts_do_not_pay() -> None:
    wish = Wish(64, 0.025)
    plain, overlapped = (find(SYSTEM, wish, Prices(1.0, 50.0)) for find in (cheapest_plain, cheapest))
    assert plain is not None
    assert overlapped is not None
    assert overlapped.per_million > plain.per_million


def test_traffic_is_priced_by_what_is_asked_for() -> None:
    wish = Wish(concurrency(Requests(100, per_s=5.0), 0.012), 0.012, requests=Requests(100, per_s=5.0))
    fleet = cheapest(SYSTEM, wish, PRICES)
    assert fleet is not None
    assert fleet.per_million == pytest.approx(fleet.per_hour / 3600 / 500 * 1e6)


def test_where_tokens_of_a_step_cost_much_none_are_verified() -> None:
    """The engine's own rule decides: ``budget.allot``."""
    dear = replace(SYSTEM, target=StepTable.affine(0.0115, 0.0115))
    assert lookahead(dear, 64, 8) == 0
    assert lookahead(SYSTEM, 1, 8) == 8


def test_the_tree_budget_loses_next_to_nothing() -> None:
    fleet = cheapest(SYSTEM, Wish(32, 0.02), PRICES)
    assert fleet is not None
    assert 16 <= least_tree_budget(SYSTEM, fleet) <= 1024


def test_the_cost_of_a_million_tokens() -> None:
    assert Prices(9.0, 1.0).per_million(Load(1, 1, 0), 2500.0) == pytest.approx(1.0)


def test_on_hosts_of_targets_there_is_at_most_one_draft_for_each() -> None:
    """Slow drafts, of which the limit would take many; the mutant is a search without the bound."""
    system = replace(SYSTEM, draft=StepTable.affine(0.006, 2e-4))
    fleets = [cheapest(system, Wish(64, 0.009, on_target_nodes=near), Prices(20.0, 0.1)) for near in (False, True)]
    apart, near = (fleet.load for fleet in fleets if fleet is not None)
    assert apart.drafts > 4 * apart.targets
    assert near.targets > apart.targets
    assert near.drafts <= near.targets
