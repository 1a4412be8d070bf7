"""The closed form and the simulation against each other, and what must hold of any model of time."""

import itertools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.support.rings import pairs_first

from paceline.draft import grower
from paceline.plan.closed_form import (
    LEAST_PATH,
    MOST_LEAVES,
    RANKED,
    Load,
    Requests,
    Subtree,
    System,
    colocated,
    overlapped,
    plain,
    predict,
    sequential,
    subtree,
)
from paceline.plan.outcomes import Outcomes, expected_tokens, prepared
from paceline.plan.times import StepTable
from paceline.plan.trees import simulate
from paceline.target import session
from paceline.target.heads.grower import MOST_LEAVES as MOST_HEAD_LEAVES
from paceline.types import Mode

ONE = Load(1, 1, 1)
MANY = Load(64, 2, 2)
SIBLINGS: dict[str, Any] = {"colocated": True, "ranked": RANKED, "most_leaves": MOST_LEAVES}


def system(
    *, acceptance: float = 0.8, draft_ms: float = 2.5, row_ms: float = 0.04, link_ms: float = 0.2, adaptive: bool = True
) -> System:
    return System(
        StepTable.affine(0.0115, row_ms / 1e3),
        StepTable.affine(draft_ms / 1e3, draft_ms / 1e6),
        Outcomes.derived(acceptance),
        link_s=link_ms / 1e3,
        adaptive=adaptive,
    )


@pytest.mark.parametrize(("mode", "k", "draft_ms"), pairs_first(list(Mode), [1, 2, 4, 8], [0.5, 2.5, 5.0]))
def test_the_closed_form_is_the_simulation_at_one_session(mode: Mode, k: int, draft_ms: float) -> None:
    """Within 6 %: the closed form mixes the numbers of draft steps that a round has room for."""
    some = system(draft_ms=draft_ms)
    simulated = simulate(some, ONE, mode, k, seconds=60.0)
    predicted = predict(some, ONE, mode, k)
    assert simulated.tokens_per_s == pytest.approx(predicted.tokens_per_s, rel=0.06)


@pytest.mark.parametrize("draft_ms", [0.5, 2.5, 5.0])
@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, Mode.OVERLAPPED])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_the_closed_form_is_the_simulation_with_paths_by_one_call(mode: Mode, k: int, draft_ms: float) -> None:
    """Within 6 %; never slower than step by step."""
    steps = system(draft_ms=draft_ms)
    some = replace(steps, path=StepTable.affine(draft_ms / 1e3, draft_ms / 5e3))
    simulated = simulate(some, ONE, mode, k, seconds=60.0)
    predicted = predict(some, ONE, mode, k)
    assert simulated.tokens_per_s == pytest.approx(predicted.tokens_per_s, rel=0.06)
    assert predicted.tokens_per_s >= 0.999 * predict(steps, ONE, mode, k).tokens_per_s


@pytest.mark.parametrize(("load", "gain"), [(Load(4, 4, 2), 1.2), (Load(3, 1, 3), 0.99), (Load(64, 4, 4), 0.99)])
def test_sessions_that_draft_alone_have_paths_by_one_call(load: Load, gain: float) -> None:
    """Within 4 % where messages take various times, so that the sessions of a draft do not stay in step. Where a target
    always has sessions to verify faster drafts gain nothing."""
    steps = system(draft_ms=1.5)
    some = replace(steps, path=StepTable.affine(0.0015, 0.0003))
    rates = []
    for each in (steps, some):
        rates.append(sequential(each, load, 4).tokens_per_s)
        simulated = simulate(each, load, Mode.SEQUENTIAL, 4, seconds=4.0, link_spread=0.3)
        assert simulated.tokens_per_s == pytest.approx(rates[-1], rel=0.04)
    assert rates[1] > gain * rates[0]


def test_a_path_takes_its_time_in_every_mode() -> None:
    path = StepTable.affine(0.0025, 0.0005)
    some = replace(system(), path=path)
    target_s = some.target.seconds(5)
    assert sequential(some, ONE, 4).round_s == pytest.approx(0.004 + 0.0004 + target_s, rel=1e-3)
    together = replace(some, colocated=True)
    assert colocated(together, Load(1, 1), 4).round_s == pytest.approx(0.004 + target_s)
    steps_s = 4 * some.draft.seconds(8)  # less than eight paths
    assert colocated(together, Load(8, 1), 4).round_s == pytest.approx(steps_s + some.target.seconds(40))
    assert replace(some, sharing=2.0).while_both_compute().path == path.times(2.0)


@pytest.mark.parametrize("load", [Load(16, 1, 1), Load(64, 2, 2), Load(64, 2, 8)])
def test_the_closed_form_is_the_simulation_overlapped_at_many_sessions(load: Load) -> None:
    """Within 3 %, hits within 0.05."""
    some = system()
    simulated = simulate(some, load, Mode.OVERLAPPED, 4, seconds=3.0)
    predicted = overlapped(some, load, 4)
    assert simulated.tokens_per_s == pytest.approx(predicted.tokens_per_s, rel=0.03)
    assert simulated.hit_rate == pytest.approx(predicted.hit_rate, abs=0.05)


def test_expected_tokens_are_those_of_the_paper() -> None:
    """2211.17192, equation 1, against the sum that it stands for."""
    assert expected_tokens(0.8, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0


@pytest.mark.parametrize("load", [ONE, MANY])
def test_without_acceptance_nothing_is_faster_than_plain(load: Load) -> None:
    for adaptive in (True, False):
        some = system(acceptance=0.0, adaptive=adaptive)
        limit = 1.001 * plain(some, load).tokens_per_s
        for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED):
            assert predict(some, load, mode, 4).tokens_per_s <= limit
            # A step more or less fits into the time that is counted.
            assert simulate(some, load, mode, 4, seconds=4.0).tokens_per_s <= 1.01 * limit


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, Mode.OVERLAPPED])
def test_free_drafts_that_are_always_right_give_k_and_one_tokens_a_step(k: int, mode: Mode) -> None:
    some = system(acceptance=1.0, draft_ms=1e-3, row_ms=0.0, link_ms=0.0)
    predicted = predict(some, ONE, mode, k)
    assert predicted.tokens_per_round == pytest.approx(k + 1)
    assert predicted.round_s == pytest.approx(0.0115, rel=0.01)
    assert simulate(some, ONE, mode, k, seconds=2.0).tokens_per_round == pytest.approx(k + 1, rel=0.01)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_more_drafts_are_never_slower(k: int) -> None:
    rates = [overlapped(system(), Load(200, 4, drafts), k).tokens_per_s for drafts in (1, 2, 3, 4, 8, 20, 50, 200)]
    assert all(after >= before * 0.999 for before, after in pairwise(rates))


def test_more_drafts_never_hit_less_often() -> None:
    """Of proposals of one length: longer ones, for which drafts have time then, are cut at more places."""
    hits = [overlapped(system(), Load(200, 4, drafts), 1).hit_rate or 0.0 for drafts in (1, 2, 3, 4, 8, 20, 50)]
    assert all(after >= before - 1e-3 for before, after in pairwise(hits))
    assert hits[-1] > hits[0]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("load", [ONE, MANY])
def test_overlapped_is_at_least_as_fast_as_in_turn(k: int, load: Load) -> None:
    predicted = overlapped(system(), load, k)
    assert predicted.hit_rate is not None
    assert predicted.hit_rate > 0
    assert predicted.tokens_per_s >= sequential(system(), load, k).tokens_per_s


@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, Mode.OVERLAPPED])
def test_a_longer_link_is_never_faster(mode: Mode) -> None:
    """Far apart: where nodes just fail to come within one round, a little more makes chains longer."""
    links_ms = (0.0, 1.0, 3.0, 10.0, 30.0)
    for load in (ONE, MANY):
        rates = [predict(system(link_ms=ms), load, mode, 4).tokens_per_s for ms in links_ms]
        assert rates == sorted(rates, reverse=True)


def test_a_fixed_seed_gives_the_same_result_and_another_one_does_not() -> None:
    load = replace(MANY, requests=Requests(64, 32, spread=0.5, per_s=40.0))

    def run(seed: int) -> object:
        return simulate(system(), load, Mode.OVERLAPPED, 4, seconds=0.5, seed=seed, link_spread=0.5)

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_requests_below_capacity_are_served_at_their_rate() -> None:
    load = replace(MANY, requests=Requests(100, per_s=10.0))
    result = simulate(system(), load, Mode.OVERLAPPED, 4, seconds=20.0)
    assert result.tokens_per_s == pytest.approx(1000.0, rel=0.2)
    assert result.target_use < 1.0


def test_every_candidate_of_a_tree_with_time_is_prepared_best_first() -> None:
    outcomes = Outcomes.derived(0.8)
    whole = prepared(outcomes, 2, 4, 6, 4, 256)
    assert sum(whole.distribution) == pytest.approx(1.0)
    assert sum(whole.lengths.values()) == whole.num_candidates
    assert whole.lengths[2, 0] == 4  # full acceptance and the draft's own next token: the likeliest of all
    some = prepared(outcomes, 2, 4, 6, 4, 1)
    assert some.lengths == {(2, 0): 1}
    assert prepared(outcomes, 2, 4, 6, 0, 256).distribution[0] == 1.0


def test_the_flattest_power_law_has_no_end() -> None:
    for power in (0.0, 1e-3, 0.05):
        assert Outcomes(0.5, power).rank(full=False, uniform=2.0**-53) == 1 << 30
        assert Outcomes(0.5, power).rank(full=False, uniform=1.0) in (1, 1 << 30)


def test_a_given_hit_rate_is_that_of_a_draft_with_time() -> None:
    for hit_rate in (0.1, 0.6, 0.95):
        outcomes = Outcomes.of_hit_rate(0.8, hit_rate, 4, 6)
        assert outcomes.ideal_hit_rate(4, 6) == pytest.approx(hit_rate, abs=1e-3)


@pytest.mark.parametrize("coupled", [True, False])
def test_siblings_hold_the_share_that_was_measured(coupled: bool) -> None:
    derived = Outcomes.derived(0.8, coupled=coupled)
    for found, fan_out in ((0.5, 3), (0.9, 3), (0.75, 6)):
        outcomes = derived.with_siblings(found, fan_out)
        assert sum(outcomes.children(fan_out)[1:]) == pytest.approx(0.2 * found)
        assert outcomes.bonus_power == derived.bonus_power
    assert derived.with_siblings(0.5, 1) == derived
    assert derived.with_siblings(-0.2, 3).power == 0.1  # few tokens were counted
    assert sum(derived.with_siblings(1.0, 3).children(3)) == pytest.approx(0.999)


def test_a_least_path_probability_limits_chains() -> None:
    outcomes = Outcomes.derived(0.8)
    lengths = [prepared(outcomes, 0, 8, 3, 8, 256, least).lengths[0, 0] for least in (0.01, 0.2, 0.5)]
    assert lengths == [8, 7, 3]  # 0.8 ^ n is the path of the n-th token
    few, many = (overlapped(replace(system(), min_path_prob=least), ONE, 8) for least in (0.3, 0.01))
    assert few.tokens_per_s < 0.9 * many.tokens_per_s


def test_the_power_law_gives_the_measured_hit_rates() -> None:
    """benchmarks/results/hit-rates.txt: F = 3, coupled; after a rejection, and after full acceptance."""
    for acceptance, after_rejection, after_full in (
        (0.588, 0.665, 0.816),
        (0.703, 0.704, 0.883),
        (0.883, 0.784, 0.968),
    ):
        outcomes = Outcomes.derived(acceptance)
        rejected = sum(outcomes.probability(1, 0, rank) for rank in (1, 2, 3)) / (1 - acceptance)
        full = sum(outcomes.probability(0, 0, rank) for rank in (0, 1, 2))
        assert rejected == pytest.approx(after_rejection, abs=0.03)
        assert full == pytest.approx(after_full, abs=0.03)
    for acceptance, after_rejection, after_full in (
        (0.632, 0.414, 0.769),
        (0.663, 0.545, 0.840),
        (0.722, 0.638, 0.879),
        (0.766, 0.716, 0.919),
    ):
        outcomes = Outcomes.derived(acceptance, coupled=False)
        rejected = sum(outcomes.probability(1, 0, rank) for rank in (1, 2, 3)) / (1 - acceptance)
        full = sum(outcomes.probability(0, 0, rank) for rank in (0, 1, 2))
        assert rejected == pytest.approx(after_rejection, abs=0.03)
        assert full == pytest.approx(after_full, abs=0.03)


def test_steps_between_and_beyond_the_points() -> None:
    steps = StepTable(((1, 1.0), (3, 2.0), (5, 2.0), (6, 3.0)))
    assert [steps.seconds(n) for n in (0, 1, 2, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 3.0, 5.0]
    assert all(steps.floor(n) <= steps.seconds(n) + 1e-12 for n in range(12))
    assert StepTable.measured([(1, 1.0)] * 5 + [(2, 9.0)]) == StepTable(((1, 1.0), (2, 1.0)))
    assert StepTable.measured([(1, 1.0)]) is None


REQUESTS = Requests(128, 512)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("load", [Load(2, 1, 1, REQUESTS), Load(32, 2, 2, REQUESTS)], ids=["few", "many"])
def test_the_closed_form_is_the_simulation_with_prompts_and_context(mode: Mode, load: Load) -> None:
    """Tokens per second within 8 %, in lock step 12 %; time to the first tokens by a factor of 2."""
    some = replace(system(), target_kv_s=2e-7, draft_kv_s=1e-8)
    simulated = simulate(some, load, mode, 3, seconds=8.0)
    predicted = predict(some, load, mode, 3)
    assert simulated.tokens_per_s == pytest.approx(
        predicted.tokens_per_s, rel=0.12 if mode is Mode.SEQUENTIAL else 0.08
    )
    assert 0.5 < predicted.ttft_s / simulated.mean_ttft_s < 2.0


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("requests", [None, REQUESTS], ids=["endless", "requests"])
def test_the_closed_form_is_the_simulation_co_located(k: int, requests: Requests | None) -> None:
    """Within 2 % without prompts, 5 % with."""
    some = replace(system(), **SIBLINGS)
    for load in (Load(1, 1, 0, requests), Load(32, 2, 0, requests)):
        simulated = simulate(some, load, Mode.SEQUENTIAL, k, seconds=20.0 if load.sessions == 1 else 6.0)
        predicted = colocated(some, load, k)
        assert simulated.tokens_per_s == pytest.approx(predicted.tokens_per_s, rel=0.02 if requests is None else 0.05)
        assert simulated.draft_use == 0.0


@pytest.mark.parametrize(("acceptance", "power"), [(0.5, 0.7), (0.8, 1.2), (0.4, 0.4), (1.0, 1.0)])
def test_the_likeliest_nodes_are_those_of_every_connected_tree(acceptance: float, power: float) -> None:
    """Of all trees of three ranks and two depths the one of m nodes that brings the most tokens."""
    outcomes, ranked = Outcomes(acceptance, power), 3
    chance = [acceptance, *((1 - acceptance) * (n**-power - (n + 1) ** -power) for n in range(1, ranked))]
    paths = {(i,): chance[i] for i in range(ranked)}
    paths |= {(i, j): chance[i] * chance[j] for i in range(ranked) for j in range(ranked)}
    found = outcomes.likeliest(2, ranked, ranked)
    assert len(found) == sum(path > 0 for path in paths.values())
    for rows in range(1, len(found) + 1):
        trees = (set(nodes) for nodes in itertools.combinations(paths, rows))
        connected = (tree for tree in trees if all(len(node) == 1 or node[:1] in tree for node in tree))
        best = max(sum(paths[node] for node in tree) for tree in connected)
        assert sum(path for path, _ in found[:rows]) == pytest.approx(best)
        if rows <= 2:
            assert best >= sum(acceptance**depth for depth in range(1, rows + 1)) - 1e-12
    some = replace(system(row_ms=0.2), outcomes=outcomes, ranked=ranked, most_leaves=ranked)
    for width in range(1, ranked + 1):  # only the likeliest nodes of the first depth have children
        narrow = outcomes.likeliest(2, ranked, width)
        assert [path for path, depth in narrow if depth == 2] == sorted(
            (path for node, path in paths.items() if len(node) == 2 and node[0] < width and path > 0), reverse=True
        )
    tree = subtree(some, 1, 2)
    assert tree.tokens == pytest.approx(1 + sum(p for p, _ in outcomes.likeliest(2, 3, tree.leaves)[: int(tree.rows)]))


@pytest.mark.parametrize("sessions", [1, 8])
def test_siblings_are_verified_where_they_pay(sessions: int) -> None:
    """Never fewer tokens per second than by chains; the cheaper the rows, the more of them."""
    load = Load(sessions, 1)
    for acceptance, k in itertools.product((0.3, 0.6, 0.9), (1, 2, 4, 8)):
        rows = []
        for row_ms in (0.001, 0.2, 3.0):
            chains = replace(system(acceptance=acceptance, row_ms=row_ms), colocated=True)
            siblings = replace(chains, **SIBLINGS)
            assert colocated(siblings, load, k).tokens_per_s >= colocated(chains, load, k).tokens_per_s
            rows.append(subtree(siblings, sessions, k).rows)
            chain = Subtree(k, tuple(acceptance**depth for depth in range(1, k + 1)))
            for without in (chains, replace(siblings, adaptive=False)):
                assert subtree(without, sessions, k) == chain
            rejection = replace(siblings, outcomes=Outcomes.derived(acceptance, coupled=False))
            assert subtree(rejection, sessions, k) == chain
        assert k < rows[0] >= rows[1] >= rows[2] <= k


def test_the_ranks_and_leaves_are_the_engines() -> None:
    assert (RANKED, MOST_LEAVES) == (session.FAN_OUT, MOST_HEAD_LEAVES)
    assert LEAST_PATH == grower._LEAST_CHAINED


def test_co_located_is_lock_step_without_a_link() -> None:
    """One session: the same round, as the draft's device is idle while the target's works and the other way around."""
    some = system(link_ms=0.0)
    for k in (1, 3, 6):
        apart, together = sequential(some, ONE, k), colocated(some, Load(1, 1), k)
        assert together.tokens_per_s == pytest.approx(apart.tokens_per_s, rel=1e-6)


def test_prompts_context_and_shared_cores_cost_time() -> None:
    """Each alone, in closed form and simulated."""
    base = Load(32, 2, 2, Requests(128))
    harder = [
        (system(), replace(base, requests=Requests(128, 1024))),
        (replace(system(), target_kv_s=1e-6), base),
        (replace(system(), draft_kv_s=4e-6), base),
        (replace(system(), sharing=1.3), base),
    ]
    easy = predict(system(), base, Mode.OVERLAPPED, 3).tokens_per_s
    easy_simulated = simulate(system(), base, Mode.OVERLAPPED, 3, seconds=3.0).tokens_per_s
    for some, load in harder:
        assert predict(some, load, Mode.OVERLAPPED, 3).tokens_per_s < 0.97 * easy
        assert simulate(some, load, Mode.OVERLAPPED, 3, seconds=3.0).tokens_per_s < 0.97 * easy_simulated


def test_shared_cores_cost_plain_decoding_nothing() -> None:
    shared = replace(system(), sharing=1.5)
    assert plain(shared, ONE) == plain(system(), ONE)
    assert overlapped(shared, ONE, 4).tokens_per_s == pytest.approx(
        overlapped(system(), ONE, 4).tokens_per_s / 1.5, rel=0.1
    )


def test_the_first_tokens_take_the_chunks_of_their_prompt() -> None:
    """An idle target, one request at a time: 1,000 tokens in chunks of 250 are four steps."""
    requests = Requests(8, 1000, per_s=0.5)
    some = replace(system(row_ms=0.02), max_step_tokens=250)
    result = simulate(some, Load(64, 1, 0, requests), Mode.PLAIN, 0, seconds=60.0)
    four_s = 4 * some.target.seconds(250)
    assert result.ttft_s[50] == pytest.approx(four_s)
    assert result.mean_tpot_s == pytest.approx(0.0115, rel=0.05)


def test_more_than_can_be_served_queues() -> None:
    """Time to the first tokens grows with the time that is looked at."""
    load = Load(8, 1, 1, Requests(64, per_s=100.0))
    short, long = (simulate(system(), load, Mode.OVERLAPPED, 3, seconds=s).mean_ttft_s for s in (2.0, 8.0))
    assert short > 0.5
    assert long > 2.5 * short


def test_lengths_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    """99th percentile of the time to the first tokens: with spread prompts above the mean take longer."""
    alike, spread = (
        simulate(system(), Load(64, 4, 0, Requests(64, 600, spread=c, per_s=5.0)), Mode.PLAIN, 0, seconds=60.0, seed=1)
        for c in (0.0, 1.0)
    )
    assert spread.tokens_per_s == pytest.approx(alike.tokens_per_s, rel=0.2)
    assert spread.ttft_s[99] > 1.5 * alike.ttft_s[99]
