"""When drafting is worth its cost: the decision by table, and both engines on a virtual time line."""

import itertools

import pytest
from tests.support.rings import nightly, slow
from tests.target.simulation import Simulation, cpu_cost, gpu_cost

from paceline.core.experiment import Budget, Experiment, pause_s
from paceline.target.control.session_gate import Judgement, judge
from paceline.target.session import Account


def rounds(*gains: float) -> Experiment:
    """Rounds of a session, by the tokens that each gained."""
    experiment = Experiment()
    for gain in gains:
        experiment.sample.add(gain, 1.0)
    return experiment


@pytest.mark.parametrize(
    ("drafting", "scheduled", "available", "trial", "expected"),
    [
        (rounds(), 0, 0, False, Judgement.OPEN),
        (rounds(*31 * [-0.13]), 31, 60, False, Judgement.OPEN),
        (rounds(*7 * [-1.0]), 7, 60, False, Judgement.OPEN),
        (rounds(*8 * [-1.0]), 8, 60, False, Judgement.NO_GAIN),
        (rounds(*8 * [-0.3]), 8, 60, False, Judgement.OPEN),
        (rounds(*4 * [2.0, -1.0]), 8, 60, False, Judgement.OPEN),
        (rounds(*8 * [2.0]), 8, 60, False, Judgement.PAYS),
        (rounds(*16 * [1.2, -0.2]), 32, 90, False, Judgement.PAYS),
        (rounds(*32 * [0.02]), 32, 90, False, Judgement.PAYS),
        (rounds(*32 * [0.02]), 32, 90, True, Judgement.NO_GAIN),
        (rounds(*32 * [0.05]), 32, 90, True, Judgement.PAYS),
        (rounds(*32 * [0.0]), 3, 103, False, Judgement.PAYS),
        (rounds(*32 * [0.0]), 3, 15, False, Judgement.NOT_SENT),
        (rounds(*8 * [0.0]), 0, 30, False, Judgement.OPEN),
    ],
)
def test_judgement(drafting: Experiment, scheduled: int, available: int, trial: bool, expected: Judgement) -> None:
    """See ``judge`` for the rule."""
    assert judge(Account(available=available, scheduled=scheduled), drafting, trial=trial) is expected


def test_what_a_draft_has_cost_before_its_first_tokens_counts() -> None:
    assert judge(Account(8, 8, lost=8.0), rounds(*8 * [0.2])) is Judgement.NO_GAIN


def test_pauses_double_up_to_a_minute() -> None:
    """1, 2, 4, .. 64 seconds; each success takes one failure back."""
    assert [pause_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 64, 64]
    experiment, budget = Experiment(), Budget(now=10.0)
    for won, until in ((False, 11), (False, 12), (False, 14), (True, 14), (False, 14)):
        experiment.end(budget, won=won)
        assert experiment.until == until


def test_all_trials_together_repay_what_they_have_lost() -> None:
    """A hundredth of the time, in a few minutes at most, by the seconds of steps."""
    one, other, budget = Experiment(), Experiment(), Budget()
    one.end(budget, won=False, loss_s=0.02)
    other.end(budget, won=False, loss_s=0.3)
    assert (one.until, other.until) == (3.0, 33.0)
    one.end(budget, won=False, loss_s=60.0)
    assert (one.until, budget.free_at) == (257.0, 256.0), "others have a second before it"
    budget.step(0.5)
    budget.step(3600.0)
    assert budget.now == 1.5, "nobody knows whether there was anything to do"


# -- throughput -----------------------------------------------------------------------------------------------------


def _throughputs(num_sessions: int, acceptance: float, until: float, **options) -> tuple[float, dict[int, float]]:
    def run(k: int | None) -> float:
        simulation = Simulation(k=k, load=lambda now: num_sessions, acceptance=acceptance, calibrate=True, **options)
        start = simulation.now
        return simulation.run(start + until).tokens_per_s(start + 0.1 * until, start + until)

    return run(None), {k: run(k) for k in (0, 1, 2, 4, 8)}


@pytest.mark.parametrize(
    ("num_sessions", "acceptance", "until"), [(16, 0.3, 2.0), *slow([(1, 0.6, 10.0), (4, 0.3, 4.0)])]
)
def test_adaptive_is_as_fast_as_the_best_fixed_k(num_sessions: int, acceptance: float, until: float) -> None:
    """At least 94 % in short runs, whose text differs by luck."""
    adaptive, fixed = _throughputs(num_sessions, acceptance, until)
    assert adaptive >= 0.94 * max(fixed.values()), (adaptive, fixed)


@pytest.mark.nightly
@pytest.mark.parametrize("cost", [cpu_cost, gpu_cost])
@pytest.mark.parametrize("acceptance", [0.3, 0.9])
@pytest.mark.parametrize(("num_sessions", "until"), [(1, 20.0), (4, 12.0), (16, 8.0), (64, 6.0)])
def test_adaptive_is_as_fast_as_the_best_fixed_k_everywhere(num_sessions, acceptance, until, cost) -> None:
    """At least 85 %: a run is short, its text differs by luck, and the best of five fixed settings is the luckiest."""
    adaptive, fixed = _throughputs(num_sessions, acceptance, until, cost=cost)
    assert adaptive >= 0.85 * max(fixed.values()), (adaptive, fixed)


_BAD = {"useless": {"acceptance": 0.0}, "slow": {"draft_step_s": 0.05}, "hanging": {"draft_step_s": 0.5}}
_BAD_FAST = [("useless", 1, 0.0), ("slow", 1, 0.2)]
_BAD_SLOW = [("useless", 4, 0.2), ("hanging", 4, 0.0)]


@pytest.mark.parametrize(
    ("draft", "num_sessions", "noise"),
    [
        *_BAD_FAST,
        *slow(_BAD_SLOW),
        *nightly(c for c in itertools.product(_BAD, (1, 4, 16), (0.0, 0.2)) if c not in (*_BAD_FAST, *_BAD_SLOW)),
    ],
)
def test_a_draft_that_does_not_pay_costs_at_most_two_percent(draft: str, num_sessions: int, noise: float) -> None:
    """Never accepted, ten times too slow, or a hundred times: off for its sessions; start and trials included."""

    def run(k: int | None) -> Simulation:
        return Simulation(k=k, load=lambda now: num_sessions, noise=noise, max_tokens=2000, **_BAD[draft]).run(24.0)

    adaptive, plain = run(None), run(0)
    assert adaptive.tokens_per_s(0.0, 24.0) >= 0.98 * plain.tokens_per_s(0.0, 24.0)
    paused = adaptive.target.stats.drafts_paused
    assert num_sessions <= paused <= 6 * num_sessions
    assert all(s.paused or s.on_trial for s in adaptive.target.scheduler.running if s.num_tokens > 300)


_USELESS, _SLOW = (1, {"acceptance": 0.0}), (4, {"draft_step_s": 0.05})
_WEAK, _CROWDED = (16, {"acceptance": 0.5}), (16, {"acceptance": 0.9, "contention": 0.3})


@pytest.mark.parametrize(
    ("num_sessions", "options", "noise"),
    [
        (*_USELESS, 0.2),
        *slow([(*_SLOW, 0.0), (*_CROWDED, 0.2)]),
        *nightly([(*_USELESS, 0.0), (*_SLOW, 0.2), (*_CROWDED, 0.0), (*_WEAK, 0.0), (*_WEAK, 0.2)]),
    ],
)
def test_short_sessions_do_not_each_pay_for_what_others_have_found_out(num_sessions, options, noise) -> None:
    """Of 50 to 100 tokens, with a draft that is useless, too slow, or not worth what it takes from the target.

    At most three percent are lost, trials of the first minute and the luck of half a minute included.
    """

    def run(k: int | None) -> Simulation:
        load = lambda now: num_sessions  # noqa: E731
        return Simulation(k=k, load=load, noise=noise, max_tokens=100, calibrate=True, **options).run(40.0)

    adaptive, plain = run(None), run(0)
    assert adaptive.tokens_per_s(10.0, 40.0) >= 0.97 * plain.tokens_per_s(10.0, 40.0)


@pytest.mark.slow
def test_a_draft_that_has_become_good_is_noticed_by_short_sessions() -> None:
    """It was useless for twenty seconds."""
    simulation = Simulation(acceptance=0.0, max_tokens=100).run(20.0)
    simulation.drafter.acceptance = 0.8
    simulation.run(100.0)
    plain = Simulation(k=0, max_tokens=100).run(20.0)
    assert simulation.tokens_per_s(90.0, 100.0) > 1.5 * plain.tokens_per_s(0.0, 20.0)


@pytest.mark.parametrize("noise", [*slow([0.2]), *nightly([0.0])])
def test_load_steps_switch_drafting_off_and_on_without_flapping(noise: float) -> None:
    """1, 16, 1 sessions of long texts at an acceptance that pays for one only."""

    def load(now: float) -> int:
        return 16 if 6.0 <= now < 20.0 else 1

    simulation = Simulation(load=load, acceptance=0.5, noise=noise, max_tokens=4000).run(27.0)
    before, during, after = ([w for w in simulation.wanted if a <= w[0] < b] for a, b in ((0, 6), (6, 20), (20, 30)))
    assert len(before) <= 2, "at most one trial of plain decoding"
    assert len({name for _, name, wanted in during if not wanted}) >= 15
    assert len(during) <= 16 + 2 * 16 * 3, "a trial after two, four and eight seconds"
    assert [wanted for _, _, wanted in after] in ([True], []), "unless it is on trial when the others leave"
    assert all(at < 20.6 for at, _, _ in after), "as soon as it is certain that they do not come back"
    plain = Simulation(k=0, load=load, noise=noise, max_tokens=4000).run(27.0)
    assert simulation.tokens_per_s(8.0, 20.0) > 0.97 * plain.tokens_per_s(8.0, 20.0)
    for start, end in ((1.0, 6.0), (21.0, 27.0)):
        assert simulation.tokens_per_s(start, end) > 1.3 * plain.tokens_per_s(start, end)


def test_sessions_that_are_paused_say_so() -> None:
    """Their rounds have the cause ``disabled``, none is sent in flight, and no row is spent."""
    simulation = Simulation(load=lambda now: 1, acceptance=0.0, max_tokens=2000).run(10.0)
    causes = next(iter(simulation.sessions.values())).stats.causes
    assert causes["disabled"] > 0.7 * sum(causes.values())


# -- what is counted ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stats_of_a_run() -> None:
    """Bubbles are the engine's own overhead, waits the draft's; every second is in one of the sums."""
    simulation = Simulation(load=lambda now: 1, acceptance=0.9, overhead_s=1e-3).run(10.0)
    stats = simulation.target.stats
    assert stats.bubble_steps + stats.waits >= stats.steps - 10
    assert stats.bubble_s / stats.bubble_steps == pytest.approx(1e-3, rel=0.3)
    assert 0 < stats.hit_bubble_steps <= stats.bubble_steps
    assert stats.hit_bubble_s <= stats.bubble_s
    assert stats.waits > 0
    assert stats.wait_s / stats.waits < 0.05
    assert stats.step_s + stats.bubble_s + stats.wait_s == pytest.approx(10.0, rel=0.03)
    assert stats.nodes_used < stats.draft_rows
    assert 1 < stats.ahead_depth_total / stats.ahead_rounds <= 8
