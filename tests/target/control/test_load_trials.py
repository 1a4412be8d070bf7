"""Drafting against plain decoding, by measured tokens per second: which is chosen, and when the other is tried."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.mutants import mutant
from tests.target.simulation import cpu_cost

from paceline.core.experiment import Budget, Experiment, pause_s
from paceline.core.statistics import RateEstimate
from paceline.target.control.allocation import Allocation
from paceline.target.control.load_trials import LoadTrials
from paceline.target.control.session_gate import Judgement, Pause, SessionGate

if TYPE_CHECKING:
    from paceline.target.session import TargetSession


def load_trials(cost: Callable[[int], float] = cpu_cost) -> LoadTrials:
    """One that knows its target's steps."""
    allocation = Allocation()
    for size in (*range(1, 65), *range(64, 257, 8)):
        for _ in range(8):
            allocation.observe_step(size, cost(size))
    return LoadTrials(allocation)


class Service:
    """Steps whose speed depends on whether there are drafts, which follow what the trials want."""

    def __init__(self, gain: float, *, without: float = 1.0, num_sessions: int = 16, answers: bool = True) -> None:
        """``gain``: tokens per second with drafts over those of plain steps; ``without``: those of what decodes without
        drafts over the same. ``answers``: drafts come when wanted."""
        self.trials = load_trials()
        self.gain, self.num_sessions, self._answers = gain, num_sessions, answers
        self._without = without
        self.now = 0.0
        self.switches: list[tuple[float, bool]] = [(0.0, self.trials.wanted(num_sessions))]

    def run(self, seconds: float) -> float:
        """Returns the share of the time with drafts."""
        end, drafted_s, start = self.now + seconds, 0.0, self.now
        while self.now < end:
            wanted = self.trials.wanted(self.num_sessions)
            if wanted != self.switches[-1][1]:
                self.switches.append((self.now, wanted))
            drafting = wanted and self._answers
            step_s = cpu_cost(self.num_sessions)
            tokens = self.num_sessions * (self.gain if drafting else self._without)
            self.trials.measure(self.num_sessions, tokens, step_s, drafting=drafting)
            self.trials.allocation.budget.step(step_s)
            self.now += step_s
            drafted_s += step_s * drafting
        return drafted_s / (self.now - start)


@pytest.mark.parametrize(
    ("gain", "least", "most"), [(0.7, 0.0, 0.08), (0.9, 0.0, 0.08), (1.2, 0.92, 1.01), (2.0, 0.99, 1.01)]
)
def test_the_faster_one_is_chosen(gain: float, least: float, most: float) -> None:
    """And had for nine tenths of the time, trials included, once the first one may lose a hundredth of it."""
    service = Service(gain)
    service.run(16.0)
    assert least <= service.run(60.0) <= most


def test_what_is_clearly_faster_needs_no_trial() -> None:
    """Nor does what could not pay with the best of drafts."""
    service = Service(1.5)
    service.run(100.0)
    assert service.trials.num_trials == 1, "of drafting: an average draft is not expected to pay beside 16 sessions"
    loaded = Service(0.5, num_sessions=200)
    assert loaded.run(100.0) == 0.0
    assert loaded.trials.num_trials == 0


def test_what_is_faster_without_drafts_than_plain_steps_are_is_tried() -> None:
    """Heads, or the cores of drafts: no bound on their rate follows from the cost of a step."""
    for gain, without in ((1.6, 2.0), (2.0, 1.6)):
        service = Service(gain, without=without, num_sessions=1)
        service.run(8.0)
        assert service.trials.num_trials == 0, "clearly faster than a plain step"
        service.trials.only_plain = False
        service.run(8.0)
        assert service.trials.num_trials > 0
        assert service.run(60.0) == pytest.approx(float(gain > without), abs=0.05)


@pytest.mark.parametrize("gain", [1.6, 2.4])
def test_a_load_that_begins_without_drafts_tries_them(gain: float) -> None:
    service = Service(gain, without=2.0, num_sessions=1)
    service.trials.only_plain, service.trials.begins_without = False, True
    service.trials.loads.clear()  # no load is known
    assert not service.trials.wanted(1)
    service.run(8.0)
    assert service.trials.num_trials > 0
    assert service.run(60.0) == pytest.approx(float(gain > 2.0), abs=0.05)


def test_trials_become_rare() -> None:
    """About 29 (five times), 32, 64, 64 seconds apart: of drafts that are unlikely to pay the first ones are late."""
    service = Service(0.9)
    service.run(400.0)
    begun = [at for at, wanted in service.switches if wanted]
    pauses = [b - a for a, b in itertools.pairwise(begun)]
    assert pauses[:6] == pytest.approx([29.2, 29.2, 29.2, 29.2, 29.2, 32.4], rel=0.05)
    assert all(p == pytest.approx(64.4, rel=0.05) for p in pauses[6:])


@pytest.mark.parametrize("without", [1.0, 1.6])
def test_what_drafts_promise_decides_when_they_are_tried_first(without: float) -> None:
    """At four sessions ideal drafts yield 1.46 times the tokens of plain steps, which heads with 1.6 times beat."""
    service = Service(1.2, without=without, num_sessions=4)
    service.trials.only_plain, service.trials.begins_without = without == 1.0, True
    service.trials.loads.clear()
    assert service.trials._ideal_rate(4) == pytest.approx(1.46 * 4 / cpu_cost(4))
    service.run(2.0)
    assert (service.trials.num_trials > 0) is (without == 1.0)
    service.run(15.0)
    assert service.trials.num_trials > 0, "a hundredth of the time may be lost"


def test_what_drafts_reached_at_one_load_says_when_they_are_tried_at_the_next() -> None:
    """A third of what was promised to two sessions: four do not expect that they pay."""
    for gain, num_trials in ((0.6, 0), (2.0, 1)):
        service = Service(gain, num_sessions=2)
        service.trials.begins_without = True
        service.trials.loads.clear()
        service.run(3.0)
        assert service.trials.num_trials == 1
        service.num_sessions = 4
        service.run(2.0)
        assert service.trials.num_trials == 1 + num_trials


@pytest.mark.parametrize(("before", "after", "within_s"), [(0.8, 1.2, 66.0), (1.2, 0.8, 66.0)])
def test_what_has_changed_is_noticed(before: float, after: float, within_s: float) -> None:
    """Not later than at the next trial."""
    service = Service(before)
    service.run(60.0)
    service.gain = after
    service.run(within_s)
    assert service.run(10.0) == pytest.approx(float(after > 1), abs=0.1)


def give_a_paused_session_its_turn() -> None:
    """A trial of plain decoding, at half the speed of drafts and with steps of 0.24 s, takes the budget of 96 s."""
    trials = load_trials(cost=lambda size: 12 * cpu_cost(size))
    trials.only_plain, gate, budget = False, SessionGate(trials.allocation), trials.allocation.budget
    gate.trials = trials
    session = SimpleNamespace(session_id="s", epoch=1, drafting=Experiment(num_failures=4), max_tokens=9, num_tokens=1)
    session.resume_drafting = lambda now, forget: None
    session.drafting.end(budget, won=False)
    gate.paused["s"] = Pause(cast("TargetSession", session), Judgement.NO_GAIN, 1)
    step_s = 12 * cpu_cost(1)
    while gate.num_resumptions == 0 and trials.num_trials < 3:
        wanted = trials.wanted(1)
        trials.measure(1, 1 + wanted, step_s, drafting=wanted)
        budget.step(step_s)
        gate.tick(budget.now, 1, [])
    assert budget.free_at > 64.0, "the pause of the load ends when the budget is free"
    assert (gate.num_resumptions, trials.num_trials) == (1, 1)


def test_a_load_whose_trials_are_expensive_leaves_a_paused_session_its_turn() -> None:
    give_a_paused_session_its_turn()


@mutant(Experiment, "pause")
def the_load_takes_each_free_moment(original: Any, experiment: Experiment, budget: Budget) -> None:
    original(experiment, budget)
    experiment.until = max(budget.now + pause_s(experiment.num_failures), budget.free_at)


def test_a_load_that_takes_each_free_moment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    the_load_takes_each_free_moment(monkeypatch)
    with pytest.raises(AssertionError):
        give_a_paused_session_its_turn()


def wait_for_the_budget() -> None:
    """Another trial has lost half a second, so for 50 s no load is tried, though their pauses end."""
    service = Service(0.8)
    service.run(8.0)
    trials, budget = service.trials, service.trials.allocation.budget
    budget.book(0.5)
    num_trials = trials.num_trials
    service.run(budget.free_at - budget.now - 1.0)
    assert trials.num_trials == num_trials
    service.run(5.0)
    assert trials.num_trials == num_trials + 1


def test_a_load_is_tried_once_the_budget_of_all_trials_is_free() -> None:
    wait_for_the_budget()


@mutant(Experiment, "left_s")
def each_looks_at_its_own_pause_alone(original: Any, experiment: Experiment, budget: Budget) -> float:
    return experiment.until - budget.now


def test_a_load_that_looks_at_its_own_pause_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    each_looks_at_its_own_pause_alone(monkeypatch)
    with pytest.raises(AssertionError):
        wait_for_the_budget()


def test_two_that_are_equal_do_not_alternate() -> None:
    """Drafting ends, and a gain of less than four percent does not bring it back."""
    for gain in (0.995, 1.0, 1.03):
        service = Service(gain)
        service.run(200.0)
        assert service.trials.num_trials == len(service.switches) // 2 <= 12


def test_a_trial_of_drafts_that_do_not_come_ends() -> None:
    """After four seconds, without effect."""
    service = Service(0.8)
    service.run(8.0)
    service._answers = False
    service.run(30.0)
    trials = [b - a for (a, wanted), (b, _) in itertools.pairwise(service.switches) if wanted][1:]
    assert trials
    assert all(4.0 <= t < 4.2 for t in trials)


def test_what_holds_for_few_sessions_is_no_matter_of_many() -> None:
    """One session keeps its draft while sixteen do without, and so do eight until drafting was tried there."""
    service = Service(0.8)
    service.run(5.0)
    assert [service.trials.wanted(n) for n in (1, 2, 4, 8, 9, 16, 17, 64)] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("choices", "most"),
    [
        ({}, None),
        ({1: True, 16: True}, None),
        ({16: False}, 8),
        ({1: True, 16: False, 64: False}, 8),
        ({2: False, 4: False}, 1),
        ({1: False}, 0),
        ({1: True, 4: False, 16: True}, None),  # there a limit would keep drafts from sixteen
        ({2: False, 16: True, 17: False}, 16),
    ],
)
def test_the_most_sessions_with_drafts(choices: dict[int, bool], most: int | None) -> None:
    """The last before the loads that are all decoded plainly, as far as they are known."""
    trials = LoadTrials(Allocation())
    for num_sessions, drafting in choices.items():
        trials._at(num_sessions).choice = drafting
    assert trials.most_sessions() == most


def test_steps_beside_fewer_sessions_of_a_load_are_comparable() -> None:
    """Plain decoding beside 16 sessions and drafting beside 12 yield as much: the drafts are the reason."""
    trials = load_trials()
    rate = RateEstimate()
    for n in (9, 12, 16):
        rate.add(n * trials.scale(n), cpu_cost(n))
    assert rate.per_s() == pytest.approx(16 / cpu_cost(16), rel=0.02)


def test_a_rate_forgets() -> None:
    """Half of it in a second."""
    rate = RateEstimate()
    assert rate.per_s() == 0.0
    rate.add(100, 1.0)
    rate.add(0, 1.0)
    assert rate.per_s() == pytest.approx(50 / 1.5)
