"""How many draft tokens a step verifies: by hand, against exhaustive search, and blind under the rejection rule."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from tests.support.rings import nightly
from tests.target.simulation import cpu_cost

from paceline.core.tree import Producer, Proposal
from paceline.messages import Node, OpenSession, SparseDistribution
from paceline.target.control.allocation import (
    AcceptanceHistory,
    Allocation,
    allocate_draft_tokens,
    blind_offer,
    ideal_gain,
    least_gain,
    offer,
)
from paceline.target.control.step_cost import StepCost, size_class
from paceline.target.scheduler import offer_of
from paceline.target.session import HeadOffer, TargetSession
from paceline.types import Acceptance, SamplingParams, SpeculationParams


def learned(cost, sizes=range(1, 200)) -> StepCost:
    made = StepCost()
    for size in sizes:
        for _ in range(3):
            made.observe(size, cost(size))
    return made


def proposal_of(*probs: float) -> Proposal:
    ids = tuple(range(1, len(probs) + 1))
    return Proposal(ids, (None,) * len(probs), probs, ids)


# -- cost -----------------------------------------------------------------------------------------------------------


def test_costs_that_were_seen_are_reproduced_and_others_interpolated() -> None:
    """Exact where seen; between, on a line from the end of the padded size; never decreasing, never above unseen."""
    cost = learned(lambda n: 1.0 if n <= 5 else 1.3 if n <= 9 else 1.8, (1, 5, 9, 16, 32))
    for size, seconds in ((1, 1.0), (4, 1.0), (5, 1.0), (9, 1.3), (16, 1.8), (32, 1.8)):
        assert cost.seconds(size) == pytest.approx(seconds)
    assert cost.seconds(8) == pytest.approx(1.0)  # padded like 5, and not seen to differ
    assert 1.3 <= cost.seconds(13) <= 1.8
    values = [cost.seconds(n) for n in range(3000)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    assert all(cost.floor(n) <= cost.seconds(n) + 1e-12 for n in range(3000))
    slopes = [cost.floor(n + 1) - cost.floor(n) for n in range(100)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(slopes))


def test_nothing_is_known_before_the_first_step() -> None:
    """And a step without duration says nothing."""
    cost = StepCost()
    cost.observe(4, 0.0)
    assert not cost.known
    assert cost.seconds(4) == 0.0
    assert allocate_draft_tokens([[0.1] * 3, [0.9] * 4], cost, num_sessions=2, num_context=2, limit=5) == [3, 2]


def test_a_noisy_outlier_is_corrected_or_forgotten() -> None:
    """One step of 12 tokens took ten times as long, by chance."""
    cost = learned(cpu_cost, (4, 8, 16))
    cost.observe(12, 10 * cpu_cost(12))
    for _ in range(100):
        cost.observe(4, cpu_cost(4))
    assert cost.seconds(12) == pytest.approx((cpu_cost(8) + cpu_cost(16)) / 2, rel=0.1)


def test_the_least_cost_is_that_of_the_machine_at_its_fastest() -> None:
    """A draft that slows every step down raises what is expected of the next one, not what plain steps may take."""
    cost = learned(cpu_cost, range(1, 33))
    before = cost.seconds(8)
    for _ in range(40):
        cost.observe(8, 1.5 * before)
    assert cost.seconds(8) == pytest.approx(1.5 * before, rel=0.05)
    for _ in range(400):
        cost.observe(16, 1.5 * cpu_cost(16))
    assert cost.seconds(4) == pytest.approx(1.5 * cpu_cost(4), rel=0.1), "all sizes together"
    assert cost.least(4) == pytest.approx(cpu_cost(4), rel=0.1)


def test_costs_follow_growing_contexts() -> None:
    """Steps of one size become twice as slow: sizes that are not seen meanwhile are carried most of the way."""
    cost = learned(cpu_cost, (4, 8, 16, 32))
    for i in range(400):
        cost.observe(8, cpu_cost(8) * (1 + i / 400))
    assert cost.seconds(8) == pytest.approx(2 * cpu_cost(8), rel=0.05)
    assert 1.4 * cpu_cost(32) < cost.seconds(32) < 2 * cpu_cost(32)


def test_draft_tokens_could_pay_where_steps_cost_little_more_with_them() -> None:
    """Steps that cost by their tokens: never; steps that wait for weights up to 64 tokens: as soon as enough are right;
    and where nothing is known, or nothing is chosen, always."""
    by_tokens, flat = Allocation(), Allocation()
    by_tokens.cost = learned(lambda n: float(max(4, n)))
    flat.cost = learned(lambda n: 1.0 if n <= 64 else n / 64)
    assert not by_tokens.could_pay(16, 0.95, 3)
    assert flat.could_pay(16, 0.1, 4)
    assert not flat.could_pay(16, 0.03, 4)
    assert flat.could_pay(1, 0.03, 4)
    assert Allocation().could_pay(16, 0.0, 4)
    assert by_tokens.none_pays(16, 3)
    assert not flat.none_pays(16, 3)
    assert not Allocation().none_pays(16, 3)
    by_tokens.cost = flat.cost
    judged = [by_tokens.none_pays(16, 3) for _ in range(16)]
    assert judged[0], "by the costs of before"
    assert not judged[-1], "by those of now"
    by_tokens.adaptive = False
    assert by_tokens.could_pay(16, 0.95, 3)


def test_a_slow_spell_belongs_to_no_size() -> None:
    """The machine is slow while steps have 16 tokens, and fast again while they have 28: what 12 tokens more cost is
    known as before."""
    cost = learned(cpu_cost, (4, 16, 28, 32))
    for size, slowness in ((16, 1.6), (28, 1.0)) * 3:
        for _ in range(20):
            cost.observe(size, slowness * cpu_cost(size))
    assert cost.seconds(28) == pytest.approx(cpu_cost(28), rel=0.05)
    assert cost.seconds(28) / cost.seconds(16) == pytest.approx(cpu_cost(28) / cpu_cost(16), rel=0.2)


@pytest.mark.parametrize(("before", "then"), [(1.6, 1.0), (1.0, 1.6)])
def test_a_size_that_is_met_as_the_machine_changes_its_speed_is_neither_cheap_nor_dear(before, then) -> None:
    """Steps of 16 tokens, and the first one of 20 when they begin to take less, or more."""
    cost = learned(cpu_cost, (4, 8, 16, 32))
    for _ in range(30):
        cost.observe(16, before * cpu_cost(16))
    cost.observe(20, then * cpu_cost(20))
    assert cost.seconds(20) / cost.seconds(16) == pytest.approx(cpu_cost(20) / cpu_cost(16), rel=0.1)


def test_noise_averages_out() -> None:
    """30 % of noise in every step: within 10 % of the mean at every size."""
    rng, cost = random.Random(0), StepCost()
    for _ in range(4000):
        n = rng.choice((4, 8, 9, 12, 16, 20, 40))
        cost.observe(n, cpu_cost(n) * rng.uniform(0.7, 1.3))
    for n in (4, 8, 12, 16, 20, 40):
        assert cost.seconds(n) == pytest.approx(cpu_cost(n), rel=0.12)


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (4, 4), (5, 5), (64, 64), (65, 68), (256, 256), (257, 320)])
def test_size_classes(size: int, expected: int) -> None:
    """One by one up to 64, by padded size up to 256, by 64 beyond."""
    assert size_class(size) == expected


# -- the choice -----------------------------------------------------------------------------------------------------


def exhaustive(offers, cost, n, t, limit, overhead_s) -> float:
    """The best tokens per second over all prefixes of all chains."""
    best = 0.0
    for counts in itertools.product(*(range(len(o) + 1) for o in offers)):
        m = sum(counts)
        if m <= limit:
            tokens = n + sum(math.prod(o[: i + 1]) for o, c in zip(offers, counts, strict=True) for i in range(c))
            best = max(best, tokens / (overhead_s + cost.seconds(n) + cost.seconds(t + m) - cost.seconds(t)))
    return best


@pytest.mark.parametrize("seed", [*range(12), *nightly(range(12, 60))])  # brute force is the oracle at every seed
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Random chains, lumpy costs, limits, prefill beside: no other choice has more tokens per second."""
    rng = random.Random(seed)
    lumps = sorted(rng.uniform(1, 8) for _ in range(20))
    cost = learned(lambda n: lumps[min(19, -(-n // 4))], range(1, 60))
    n = rng.randint(1, 4)
    t = n + rng.choice((0, 0, 7, 30))
    offers = [[rng.random() ** rng.choice((0.2, 1)) for _ in range(rng.randint(0, 5))] for _ in range(n)]
    limit, overhead_s = rng.choice((0, 3, 100)), rng.choice((0.0, 0.5))
    counts = allocate_draft_tokens(offers, cost, num_sessions=n, num_context=t, limit=limit, overhead_s=overhead_s)
    assert sum(counts) <= limit
    tokens = n + sum(math.prod(o[: i + 1]) for o, c in zip(offers, counts, strict=True) for i in range(c))
    seconds = overhead_s + cost.seconds(n) + cost.seconds(t + sum(counts)) - cost.seconds(t)
    assert tokens / seconds == pytest.approx(exhaustive(offers, cost, n, t, limit, overhead_s))


@pytest.mark.parametrize(
    ("num_sessions", "acceptance", "expected"),
    [
        (1, 0.9, 7),  # 8 tokens for 1.2: 5.70 / 1.2 beats 3.44 / 1 and 6.13 / 1.5
        (1, 0.3, 3),  # 1.42 in a step that is padded to 4 tokens anyway
        (16, 0.9, 2),  # 16 * 2.71 / 4.2 = 10.3 against 16 / 1.8 = 8.9
        (16, 0.6, 0),  # 4 more tokens: 2.4 / 16 = 15 % more text in 16.7 % more time
        (64, 0.6, 0),
    ],
)
def test_choices_worked_out_by_hand(num_sessions: int, acceptance: float, expected: int) -> None:
    """Costs of a 150M model on two cores, all sessions alike."""
    cost = learned(cpu_cost, range(1, 200))
    counts = allocate_draft_tokens(
        [[acceptance] * 8] * num_sessions, cost, num_sessions=num_sessions, num_context=num_sessions, limit=999
    )
    assert set(counts) == {expected}


@pytest.mark.parametrize(
    ("num_sessions", "prob", "fixed_s", "wanted"),
    [(1, 0.52, 1.0, 1), (16, 1.0, 1.0, 0), (16, 1.0, 4.0, 1)],
    ids=["1.3 % of one", "3 % of sixteen", "11 % of sixteen"],
)
def test_what_many_sessions_hardly_gain_is_left_out(num_sessions, prob, fixed_s, wanted) -> None:
    assert [least_gain(n) for n in (0, 1, 2, 5, 50)] == pytest.approx([1.0, 1.0, 1.02, 1.032, 1.0392])
    allocation = Allocation(cost=learned(lambda n: fixed_s + n))
    offers, at = [[prob]] * num_sessions, {"num_sessions": num_sessions, "num_context": num_sessions, "limit": 99}
    assert allocate_draft_tokens(offers, allocation.cost, **at) == [1] * num_sessions, "whatever it brings"
    assert allocation.allocate_draft_tokens(offers, **at) == [wanted] * num_sessions


def test_draft_tokens_have_to_earn_what_plain_steps_hide() -> None:
    """On an asynchronous device a plain step takes no time between steps, and one with draft tokens does."""
    allocation = Allocation()
    for num_tokens in (1, 2, 3, 4, 5):
        allocation.cost.observe(num_tokens, 0.008)
    allocation.overhead_s.add(0.002)
    at = {"num_sessions": 1, "num_context": 1, "limit": 4}
    assert allocation.plain_s(1) == pytest.approx(0.01)
    assert allocation.allocate_draft_tokens([[0.2]], **at) == [1]
    allocation.hidden.add(1.0)
    assert allocation.plain_s(1) == pytest.approx(0.008)
    assert allocation.allocate_draft_tokens([[0.2]], **at) == [0], "1.2 tokens in 10 ms, not 1 in 8"
    assert allocation.allocate_draft_tokens([[0.3]], **at) == [1]
    assert allocation.gain(1, 0.2, 1) == 1.0
    assert allocation.gain(1, 0.3, 1) == pytest.approx(1.3 * 8 / 10)


def test_ideal_gain() -> None:
    """The same optimum as ``allot`` finds, as a ratio to plain decoding; 1 where nothing is to be won."""
    cost = learned(cpu_cost, range(1, 200))
    assert ideal_gain(cost, 1, 0.9, 8) == pytest.approx(sum(0.9**i for i in range(8)) / 1.2)
    assert ideal_gain(cost, 16, 0.9, 8) == pytest.approx(2.71 / 4.2 * 1.8)
    assert ideal_gain(cost, 16, 0.6, 8) == 1.0
    assert ideal_gain(cost, 64, 0.3, 8) == 1.0
    assert ideal_gain(cost, 1, 0.0, 8) == 1.0
    assert ideal_gain(StepCost(), 1, 0.9, 8) == 1.0
    for n, a, k in itertools.product((1, 3, 16), (0.2, 0.7, 0.95), (1, 4, 8)):
        counts = allocate_draft_tokens([[a] * k] * n, cost, num_sessions=n, num_context=n, limit=999)
        tokens = n + sum(a ** (i + 1) for c in counts for i in range(c))
        expected = tokens / n * cost.seconds(n) / cost.seconds(n + sum(counts))
        assert ideal_gain(cost, n, a, k) == pytest.approx(expected)


# -- probabilities --------------------------------------------------------------------------------------------------


def test_probabilities_are_corrected_by_what_was_accepted() -> None:
    """Nodes that claim 0.8 and are accepted half as often are taken for 0.4, once there is evidence."""
    engine = AcceptanceHistory()
    session = AcceptanceHistory(engine)
    proposal = proposal_of(0.8, 0.8)
    assert offer(proposal, 2, session) == [0.8, 0.8]
    for i in range(400):
        session.add(1, 0.8, (i * 2) % 5 < 2)
    assert offer(proposal, 2, session) == pytest.approx([0.4, 0.4], rel=0.1)
    assert session.rate() == pytest.approx(0.4, rel=0.1)
    assert offer(proposal, 1, AcceptanceHistory(engine)) == pytest.approx([0.4], rel=0.1)
    assert offer(proposal_of(0.5), 3, session, extend=True) == pytest.approx([0.25, 0.4, 0.4], rel=0.1)
    session.fade()
    session.forget()
    assert session.rate() == pytest.approx(engine.rate())


def rejecting_session(*probs: float, token_id: int = 10) -> TargetSession:
    """Its draft has sent a chain with these probabilities."""
    speculation = SpeculationParams(acceptance=Acceptance.REJECTION, max_draft_tokens=4)
    message = OpenSession("s", 1, (1, 2), 2, 0, SamplingParams(temperature=1.0, max_tokens=100), speculation)
    session = TargetSession(message, vocab_size=100, max_len=1000, device="cpu", now=0.0)
    for i, prob in enumerate(probs):
        q = SparseDistribution.of((token_id + i, 5), (0.5, 0.5))
        session.tree.add([Node(i + 1, i, token_id + i, prob, q=q)])
    return session


@pytest.mark.parametrize(
    ("decide", "lawful"),
    [
        (lambda session: offer_of(session, session.proposal(4)), True),
        (lambda session: offer(session.proposal(4), 4, session.hits), False),
    ],
    ids=["blind", "mutant"],
)
def test_under_the_rejection_rule_the_choice_keeps_the_law_exactly(decide, lawful: bool) -> None:
    """p = (0.5, 0.5), q = (0.7, 0.3), a draft that tells with each node how likely it was drawn, and a step whose
    fifth token pays from a probability of 0.4 on: a choice by node probabilities emits the first token too often."""
    p, q = (0.5, 0.5), (0.7, 0.3)
    cost = learned(lambda n: {4: 1.0, 5: 1.1}.get(n, 9.0), (4, 5, 6))
    emitted = [0.0, 0.0]
    for x in (0, 1):
        session = rejecting_session(q[x], token_id=10 + x)
        used = allocate_draft_tokens([decide(session)], cost, num_sessions=4, num_context=4, limit=9)[0] > 0
        accepted = min(1.0, p[x] / q[x]) if used else 0.0
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)] if used else list(p)
        for v in (0, 1):
            recovered = rest[v] / sum(rest)
            emitted[v] += q[x] * (accepted * (v == x) + (1 - accepted) * recovered)
    assert sum(emitted) == pytest.approx(1)
    assert (emitted == pytest.approx(p)) == lawful


@pytest.mark.parametrize("probs", [(0.9,), (0.1,), (0.9, 0.9, 0.9, 0.9), (0.1, 0.9, 0.2)])
def test_under_the_rejection_rule_the_choice_sees_nothing_that_was_drawn(probs: tuple[float, ...]) -> None:
    """Whatever the nodes, their probabilities and their number: one and the same offer, from earlier rounds.

    So what is proposed at a position is decided by earlier rounds and by sessions whose noise is independent.
    """
    session = rejecting_session()
    assert offer_of(session, session.proposal(4)) == ()
    session = rejecting_session(*probs)
    session.hits.add(10, 7.0, 9)
    assert len(session.proposal(4)) == len(probs)
    assert offer_of(session, session.proposal(4)) == blind_offer(4, session.hits) == (session.hits.rate(),) * 4


def test_a_head_that_withdraws_its_offer_is_allocated_nothing() -> None:
    """Under the rejection rule the offer counts by its intended length, so it must not outlast its tokens."""
    session, hits = rejecting_session(), AcceptanceHistory()
    hits.add(10, 7.0, 9)
    session.head_offer = HeadOffer(replace(proposal_of(0.5), producer=Producer.HEAD), hits, depth=3, anchor=None)
    assert offer_of(session, session.proposal(4)) == blind_offer(3, hits)
    session.head_offer = None
    assert offer_of(session, session.proposal(4)) == ()
