"""When a head is asked, paused and tried again, by the rules of ``control/head_gate.py``; no engine, a given clock."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.target.control.allocation import Allocation, expected_tokens
from paceline.target.control.head_gate import HeadGate
from paceline.target.heads.driver import Heads
from paceline.target.heads.mounted import MountedHead

PLAIN = 100.0
ORACLE: Any = SimpleNamespace(features=None, rider=None, chainer=None, ranker=None, states=None)
"""Tokens per second of plain decoding."""


def test_expected_tokens_are_the_sum_of_path_probabilities() -> None:
    assert expected_tokens([]) == 0.0
    assert expected_tokens([0.5, 0.5, 1.0]) == pytest.approx(0.5 + 0.25 + 0.25)


def test_a_depth_is_asked_for_where_it_brings_more_than_plain_decoding_in_its_time() -> None:
    gate = HeadGate()
    assert gate.pays(0.01, 1, PLAIN), "nothing was measured: it is found out"
    for _ in range(60):
        gate.observe_depth(1, 0.005, first=True)
    assert gate.pays(0.6, 1, PLAIN)
    assert not gate.pays(0.4, 1, PLAIN)
    assert gate.depth_s(1, first=False) == pytest.approx(0.005), "the other depth, as long as it is not known"
    assert gate.depth_s(16, first=True) == pytest.approx(0.005), "the nearest load"
    assert HeadGate(adaptive=False).pays(0.0, 1, PLAIN)


def test_leaves_are_expanded_while_each_brings_more_than_its_time() -> None:
    gate = HeadGate()
    assert gate.most_leaves([0.1, 0.2], PLAIN) == 2, "nothing was measured: it is found out"
    for _ in range(60):
        gate.observe_depth(1, 0.002, first=False)
        gate.observe_depth(2, 0.002, first=False)
        gate.observe_depth(4, 0.004, first=False)
    assert gate.most_leaves([0.1, 0.5, 0.05], PLAIN) == 2, "a third and fourth would take longer than they bring"
    assert gate.most_leaves([0.1, 0.5, 0.15, 0.15], PLAIN) == 4
    assert gate.most_leaves([0.1], PLAIN) == 0
    assert HeadGate(adaptive=False).most_leaves([0.0], PLAIN) == 1


def test_a_head_that_is_not_expected_to_pay_is_tried_ever_more_rarely() -> None:
    gate, asked = HeadGate(), []
    for step in range(10_000):
        gate.budget.now = now = 0.02 * step
        if gate.try_anyway():
            asked.append(now)
    starts = [a for a, b in zip(asked, [-1.0, *asked], strict=False) if a - b > 1.0]
    pauses = [b - a for a, b in itertools.pairwise(starts)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(64.0, abs=0.2)
    assert len(asked) / 10_000 < 0.005


def run(gate: HeadGate, seconds: float, *, accepted: float, cost_s: float, num_sessions: int = 4, start: float = 0.0):
    """Shares of the time in which the head was on; steps of 40 ms, plus what the head takes."""
    now, on, steps, owed = start, 0, 0, 0.0
    while now < start + seconds:
        steps += 1
        gate.budget.now = now
        if gate.wanted(num_sessions):
            on += 1
            owed += accepted
            tokens, owed = int(owed), owed - int(owed)
            gate.observe_step(num_sessions, tokens, cost_s, PLAIN)
            now += cost_s
        now += 0.04
    return on / steps


@pytest.mark.parametrize(
    ("accepted", "cost_s", "least", "most"),
    [
        (2.0, 0.01, 1.0, 1.0),
        (1.1, 0.01, 1.0, 1.0),
        (0.5, 0.01, 0.0, 0.12),
        (0.0, 0.01, 0.0, 0.05),
        (0.0, 0.002, 0.0, 0.1),
    ],
    ids=["good", "just", "bad", "useless", "useless and cheap"],
)
def test_a_head_is_paused_where_it_costs_more_than_it_brings(accepted, cost_s, least, most) -> None:
    """Its account: accepted tokens of a step against those of plain decoding in the time that the head took."""
    share = run(HeadGate(), 300.0, accepted=accepted, cost_s=cost_s)
    assert least <= share <= most


def test_what_a_useless_head_takes_is_little_and_less_and_less() -> None:
    """Never slower: 2 % of the first minutes at most, half a percent later."""
    gate = HeadGate()
    first = run(gate, 120.0, accepted=0.0, cost_s=0.01)
    later = run(gate, 600.0, accepted=0.0, cost_s=0.01, start=120.0)
    assert first * 0.01 / 0.05 < 0.02
    assert later * 0.01 / 0.05 < 0.005


def test_loads_are_judged_apart_and_a_head_that_pays_again_is_on_again() -> None:
    gate = HeadGate()
    run(gate, 60.0, accepted=0.0, cost_s=0.01, num_sessions=16)
    assert run(gate, 60.0, accepted=2.0, cost_s=0.01, num_sessions=1) == 1.0
    assert run(gate, 400.0, accepted=2.0, cost_s=0.01, num_sessions=16, start=60.0) > 0.5


def test_without_adaptive_it_is_never_paused() -> None:
    assert run(HeadGate(adaptive=False), 60.0, accepted=0.0, cost_s=0.02) == 1.0


def heads_by(allocation: Allocation, clock: Callable[[], float]) -> tuple[Heads, MountedHead]:
    """A target's heads, of which there is one."""
    mounted, cache = MountedHead("oracle", ORACLE, num_tokens=4), cast(Any, SimpleNamespace(num_pages=1))
    return Heads([mounted], cache, allocation=allocation, clock=clock), mounted


@pytest.mark.parametrize(("drafted", "is_paused"), [(0.0, False), (50.0, False), (90.0, False), (200.0, True)])
def test_beside_a_draft_a_head_is_booked_against_what_the_draft_makes(drafted: float, is_paused: bool) -> None:
    """A token of the head in 8 ms: more than plain decoding's 100 tokens/s, and less than 200 tokens/s with a draft. By
    the rate of plain decoding alone it would stay on in all cases, and make a service with a draft slower."""
    allocation, now = Allocation(), 0.0
    for _ in range(20):
        allocation.observe_step(1, 1 / PLAIN)
        allocation.observe_step(2, 1 / PLAIN)
    if drafted:
        allocation.tokens_per_s.add(drafted)
    heads, mounted = heads_by(allocation, lambda: now)
    for _ in range(64):
        now += 0.02
        mounted.accepted, mounted.spent_s = 1, 0.008
        heads.book()
    assert heads.is_on(mounted, 1) is not is_paused
    assert (mounted.gate.num_pauses > 0) is is_paused


def test_a_pause_counts_seconds_of_steps() -> None:
    """An hour without a step ends none: the head is where it was, and so is what it costs."""
    allocation, now = Allocation(), 0.0
    for size in (1, 2):
        allocation.observe_step(size, 1 / PLAIN)
    heads, mounted = heads_by(allocation, lambda: now)
    for _ in range(16):
        now += 0.02
        allocation.budget.step(0.02)
        mounted.spent_s = 0.02
        heads.book()
    assert not heads.is_on(mounted, 1)
    now += 3600.0
    allocation.budget.step(3600.0)
    heads.book()
    assert not heads.is_on(mounted, 1)
    for _ in range(10_000):
        now += 0.02
        allocation.budget.step(0.02)
        heads.book()
    assert heads.is_on(mounted, 1)
