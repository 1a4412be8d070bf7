"""Calibration learns true hit probabilities, and best-first growth gains from them."""

import heapq
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.native import agree

from paceline.drafters import calibration as module
from paceline.drafters.calibration import (
    Calibration,
    Evidence,
    Expansion,
    evidence_of,
    expect,
    guessed,
    ranked,
    ranked_gaps,
    sampled_gaps,
)

RANKS = 3


def truth(gaps: Sequence[float]) -> list[float]:
    """An over-confident draft: its gaps mean a third of what they say."""
    weights = [math.exp(-gap / 3) for gap in (0.0, *gaps[1:])]
    return [0.9 * weight / sum(weights) for weight in weights]


def evidence(rng: random.Random) -> Evidence:
    first = rng.expovariate(0.5)
    return ranked([0.0, -first, -first - rng.expovariate(0.5)])


def draw(rng: random.Random, probs: Sequence[float]) -> int | None:
    u = rng.random()
    for rank, prob in enumerate(probs):
        u -= prob
        if u < 0:
            return rank
    return None


def trained(seed: int, count: int, parent: Calibration | None = None) -> Calibration:
    rng, calibration = random.Random(seed), Calibration(RANKS, parent, horizon=4000)
    for _ in range(count):
        seen = evidence(rng)
        calibration.observe(seen.gaps, draw(rng, truth(seen.gaps)))
    return calibration


def mean_error(calibration: Calibration) -> float:
    rng = random.Random(99)
    errors = []
    for _ in range(500):
        seen = evidence(rng)
        pairs = zip(calibration.probabilities(seen), truth(seen.gaps), strict=True)
        errors += [abs(a - b) for a, b in pairs]
    return sum(errors) / len(errors)


def test_converges_to_the_truth() -> None:
    errors = [mean_error(trained(1, count)) for count in (0, 200, 20_000)]
    assert errors[0] > 0.12
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.03  # what is left is the width of a bin


@pytest.mark.slow
def test_a_new_session_starts_from_what_the_others_taught() -> None:
    engine_wide = Calibration(RANKS, horizon=4000)
    trained(1, 20_000, engine_wide)
    assert mean_error(Calibration(RANKS, engine_wide)) < 0.03


def captured(estimate: Callable[[Evidence], Sequence[float]], budget: int) -> float:
    """Expected number of true tokens in a best-first tree of `budget` nodes, mean over 200 random trees."""
    total = 0.0
    for seed in range(200):
        heap = [(-1.0, seed, 1.0)]
        for _ in range(budget):
            believed, name, true_prob = heapq.heappop(heap)
            total += true_prob
            seen = evidence(random.Random(name))
            for rank, (p, t) in enumerate(zip(estimate(seen), truth(seen.gaps), strict=True)):
                heapq.heappush(heap, (believed * p, name * 4 + rank + 1, true_prob * t))
    return total / 200


@pytest.mark.slow
def test_best_first_finds_more_with_it() -> None:
    prior = captured(lambda seen: seen.priors, 16)
    learned = captured(trained(1, 20_000).probabilities, 16)
    best = captured(lambda seen: truth(seen.gaps), 16)
    assert prior < learned <= best * 1.001
    assert learned - prior > 0.8 * (best - prior)


@given(st.lists(st.floats(0, 20), min_size=1, max_size=5), st.lists(st.integers(0, 5), max_size=60))
def test_probabilities_are_ordered_and_of_sum_at_most_one(drops: list[float], seen: list[int]) -> None:
    scores = [-sum(drops[:i]) for i in range(len(drops) + 1)]
    engine_wide = Calibration(8, horizon=16)
    calibration = Calibration(8, engine_wide, horizon=16)
    found = ranked(scores)
    for rank in seen:
        calibration.observe(found.gaps, rank if rank < len(scores) else None)
    probs = calibration.probabilities(found)
    assert len(probs) == len(scores)
    assert all(0 <= p <= 1 for p in probs)
    assert probs == sorted(probs, reverse=True)
    assert sum(probs) <= 1 + 1e-9


def test_nothing_to_rank() -> None:
    assert Calibration(4).probabilities(ranked(())) == []
    assert Calibration(4).probabilities(ranked((0.3,))) == pytest.approx([0.95])


def test_the_sampled_token_has_no_part_in_its_own_probability() -> None:
    """Whatever was drawn and so is missing among the siblings, the first probability depends on q alone."""
    calibration = Calibration(RANKS)
    rng = random.Random(3)
    log_q = [-0.2, -1.5, -3.0, -4.0]
    for _ in range(500):
        drawn = rng.randrange(4)
        siblings = [log_q[0] - value for i, value in enumerate(log_q) if i != drawn][: RANKS - 1]
        calibration.observe(sampled_gaps(log_q[:2], siblings), rng.choice([0, 0, 1, 2, None]))
    first = {
        calibration.probabilities(
            evidence_of(
                sampled_gaps(log_q[:2], [log_q[0] - v for i, v in enumerate(log_q) if i != drawn][:2]), sampled=True
            )
        )[0]
        for drawn in range(4)
    }
    assert len(first) == 1


def test_a_guess_of_a_bonus_token_is_as_likely_as_its_score_says() -> None:
    """The sampled token, with which no guess begins here, has no part in it: as little as a gap of 3 nats deserves."""
    evidence = guessed([0.0, 1.0, 3.0])
    assert evidence.gaps == (1.0, 1.0, 3.0)
    scale = evidence.priors[0]
    assert evidence.priors == pytest.approx([scale, scale * math.exp(-1), scale * math.exp(-3)])
    assert sum(evidence.priors) == pytest.approx(0.95)
    assert guessed([2.0]).priors == pytest.approx((0.95 * math.exp(-2),)), "the best is no child: it takes the rest"
    assert guessed([0.0]).gaps == (math.inf,)
    assert guessed([math.inf, math.inf]).gaps == (math.inf, math.inf)
    assert guessed([]) == Evidence((), ())


def random_gap(rng: random.Random) -> float:
    return rng.choice([0.0, 0.03, 1e-12, 15.36, 40.0, 800.0, math.inf, rng.expovariate(0.5), rng.expovariate(3)])


def tables(seed: int, num_ranks: int) -> tuple[Calibration, Calibration]:
    """A calibration of one session that has learned something, and the engine-wide one."""
    rng, engine_wide = random.Random(seed), Calibration(RANKS, horizon=64)
    own = Calibration(num_ranks, engine_wide)
    for i in range(200):
        gaps = [random_gap(rng) for _ in range(rng.randrange(7))]
        (own if i % 3 else engine_wide).observe(gaps, rng.choice([None, 0, 0, 1, 2, 5]))
    return own, engine_wide


def random_expansion(rng: random.Random, own: Calibration, of_bonus: Calibration) -> Expansion:
    num = rng.randrange(7)
    if num and rng.random() < 0.5:
        log_q = sorted((-rng.expovariate(0.5) for _ in range(rng.choice([1, 2]))), reverse=True)
        gaps = sampled_gaps(log_q, [random_gap(rng) for _ in range(num - 1)])
        return Expansion(gaps, own, tuple(random_gap(rng) for _ in range(num)), of_bonus, rng.choice([0.2, 1.0]))
    scores = sorted((-random_gap(rng) for _ in range(num)), reverse=True)
    return Expansion(ranked_gaps(scores) if -math.inf not in scores else (math.nan,) * num, own)


@pytest.mark.compiler
@pytest.mark.parametrize("num_ranks", [1, RANKS, 5])
def test_probabilities_agree_with_their_reference(num_ranks: int) -> None:
    """Bit for bit, with fewer and with more ranks than the engine-wide table has, for gaps on the edges and beyond."""
    rng, (own, engine_wide), (of_bonus, _) = random.Random(5), tables(1, num_ranks), tables(2, num_ranks)
    tried = [random_expansion(rng, rng.choice([own, engine_wide]), of_bonus) for _ in range(2000)]
    native = agree(lambda: [expect(tried[i : i + 7], 0.01) for i in range(0, len(tried), 7)], module)
    assert expect((), 0.01) == []
    found = [probs for part in native for probs in part]
    assert {len(it.gaps) - len(probs) for it, probs in zip(tried, found, strict=True)} >= {0, 1, 2, 3}
    assert all(bool(probs) == bool(it.gaps) for it, probs in zip(tried, found, strict=True))


@pytest.mark.compiler
@pytest.mark.parametrize("num_ranks", [1, RANKS, 5])
def test_what_is_learned_agrees_with_its_reference(num_ranks: int) -> None:
    native = agree(lambda: [list(table.cells) for table in tables(3, num_ranks)], module)
    assert any(native[0])


def test_a_node_is_worth_having_for_what_may_follow_a_proposal() -> None:
    """Rejection rule: the last candidate, that is hardly ever recovered, may be the best guess of a bonus token."""
    own, of_bonus = Calibration(RANKS), Calibration(RANKS)
    gaps, bonus = (1.0, 0.0, 30.0), (5.0, 5.0, 0.0)
    kept = [len(expect([Expansion(gaps, own, bonus, of_bonus, share)], 0.01)[0]) for share in (1.0, 0.0)]
    assert kept == [3, 2]
    assert len(expect([Expansion((0.0, 30.0, 30.0), own)], 0.01)[0]) == 1
