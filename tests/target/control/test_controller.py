"""The whole controller on a virtual time line: against every fixed K, and what it says of itself.

Both engines, the relay and all policies are those of production; only models and time are not.
"""

from types import SimpleNamespace

import pytest
from tests.target.simulation import Simulation, cpu_cost, gpu_cost

from paceline.core.experiment import Experiment
from paceline.core.statistics import DecayingHistogram, RateSample
from paceline.draft.growth import Reach
from paceline.target.control.load_trials import LoadTrials
from paceline.target.control.report import TargetReport, explain, measures

_DRAFTS = {
    "light": {"acceptance": 0.8, "draft_step_s": 0.001},
    "heavy": {"acceptance": 0.8, "draft_step_s": 0.004},
    "random": {"acceptance": 0.0},
    "slow": {"acceptance": 0.8, "draft_step_s": 0.04},
    "dead": {"acceptance": 0.8, "draft_step_s": 5.0},
}
_SECONDS = {1: 30.0, 4: 16.0, 16: 30.0}
"""A gain of two percent, which is what an unknown draft promises to sixteen sessions, is tried after 13 seconds."""


def _rate(k: int | None, draft: str, num_sessions: int, seconds: float, skip: float = 0.1) -> float:
    simulation = Simulation(k=k, load=lambda now: num_sessions, calibrate=True, **_DRAFTS[draft])
    start = simulation.now
    return simulation.run(start + seconds).tokens_per_s(start + skip * seconds, start + seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "num_sessions"), [("dead", 4), ("slow", 4)])
def test_next_to_nothing_is_lost_to_a_draft_that_does_not_serve(draft: str, num_sessions: int) -> None:
    """At least 97 % of plain decoding, the first seconds included; 98 % from then on."""
    for skip, least in ((0.0, 0.97), (0.2, 0.98)):
        adaptive, plain = (_rate(k, draft, num_sessions, 8.0, skip) for k in (None, 0))
        assert adaptive >= least * plain


def _first_seconds(k: int | None) -> float:
    """Tokens per second of 16 sessions with short answers, on cores that they share with their draft."""
    simulation = Simulation(
        k=k, load=lambda now: 16, calibrate=True, acceptance=0.8, draft_step_s=0.002, contention=0.4, max_tokens=120
    )
    start = simulation.now
    return simulation.run(start + 2.0).tokens_per_s(start, start + 2.0)


@pytest.mark.parametrize(("step_s", "least"), [(0.0002, 1.04), (0.01, 0.97)], ids=["fast head", "slow head"])
def test_drafts_give_way_to_a_head_that_is_faster_without_them(step_s, least, monkeypatch) -> None:
    """The head backs up drafts on their misses, and drafts alone where they are off: whichever is faster stays."""
    options = {"acceptance": 0.5, "cost": gpu_cost, "branch_s": 0.0002, "calibrate": True, "head": (0.75, step_s)}
    chosen = Simulation(**options).run(12.0).target.stats.tokens_emitted
    monkeypatch.setattr(LoadTrials, "is_open", lambda *_: False)
    assert chosen >= least * Simulation(**options).run(12.0).target.stats.tokens_emitted


@pytest.mark.slow
def test_little_is_lost_before_a_load_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a tenth of plain decoding in the first two seconds, a trial included; more than an eighth if a load
    began with drafts."""
    plain = _first_seconds(0)
    assert _first_seconds(None) > 0.9 * plain
    monkeypatch.setattr(LoadTrials, "begins_with_drafts", lambda self, num_sessions: True)
    assert _first_seconds(None) < 0.875 * plain


def test_steps_with_prefill_chunks_are_measured_less_what_those_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short answers most steps have one: they are measured, as no more than what plain steps yield."""
    heard: list[tuple[int, float]] = []

    def measure(self: LoadTrials, num_sessions: int, tokens: int, seconds: float, *, drafting: bool) -> None:
        heard.append((tokens, seconds))

    monkeypatch.setattr(LoadTrials, "measure", measure)
    monkeypatch.setattr(LoadTrials, "wanted", lambda self, num_sessions: False)
    simulation = Simulation(load=lambda now: 32, calibrate=True, max_tokens=24)
    start = simulation.now
    simulation.run(start + 4.0)
    steps = [tokens > sessions for at, tokens, sessions in simulation.runner.steps if at >= start]
    assert len(heard) > 0.9 * len(steps)
    assert sum(steps) > 0.5 * len(steps), "nothing is drafted: what is more than a token for each is prefill"
    rate = sum(tokens for tokens, _ in heard) / sum(seconds for _, seconds in heard)
    assert rate == pytest.approx(32 / cpu_cost(32), rel=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("num_sessions", list(_SECONDS))
@pytest.mark.parametrize("draft", list(_DRAFTS))
def test_no_fixed_setting_is_three_percent_faster(draft: str, num_sessions: int) -> None:
    """K of 0 to 8, with a draft that is good, expensive, useless, too slow, or silent; trials included."""
    seconds = _SECONDS[num_sessions]
    fixed = {k: _rate(k, draft, num_sessions, seconds) for k in range(9)}
    adaptive = _rate(None, draft, num_sessions, seconds)
    assert adaptive >= 0.97 * max(fixed.values()), (adaptive, fixed)
    assert adaptive >= 0.98 * fixed[0], (adaptive, fixed)


# -- what it says of itself -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_says_why_drafting_is_on() -> None:
    """One session, with a good draft: by how much it is faster, how long proposals are, what a step takes."""
    target = Simulation(acceptance=0.8, calibrate=True).run(6.0).target
    text, numbers = explain(target), measures(target)
    assert text.startswith("drafting is on with 1 session running (")
    assert "tokens/s with drafts" in text
    assert "a step by its tokens 1: 20" in text
    assert numbers["drafting"] == 1.0
    assert 0.6 < numbers["acceptance"] < 0.95
    assert 1.0 < numbers["mean_draft_tokens"] < 8.0
    assert sum(v for name, v in numbers.items() if name.startswith("draft_tokens_share:")) == pytest.approx(1.0)
    assert numbers["tokens_per_second:drafting"] > 80.0
    assert numbers["step_seconds:64"] == pytest.approx(0.108, rel=0.1)


def test_it_says_why_drafting_is_off() -> None:
    """Beside 16 sessions on a target that computes: the last trial, and when the next one is."""
    simulation = Simulation(load=lambda now: 16, acceptance=0.3, calibrate=True).run(8.0)
    text, numbers = explain(simulation.target), measures(simulation.target)
    assert text.startswith("drafting is off with 16 sessions running (")
    assert "tokens/s plain" in text
    assert "; drafting is tried next after" in text
    assert "of 16 sessions without a draft: not worth it at this load" in text
    assert numbers["drafting"] == 0.0
    assert 14.0 <= numbers["sessions_paused"] <= 16.0


def test_it_says_that_there_is_nothing_to_say() -> None:
    """Without sessions, and where nothing adapts."""
    assert explain(Simulation(load=lambda now: 0).target).startswith("no session is running")
    assert explain(Simulation(k=3).run(1.0).target).startswith("fixed: every session has the most draft tokens")


def test_a_status_explains_once_a_second() -> None:
    """However often it is asked for."""
    now = SimpleNamespace(s=0.0)
    simulation = Simulation(acceptance=0.8)
    report = TargetReport(lambda: now.s)
    before = report(simulation.target)
    simulation.run(2.0)
    assert report(simulation.target)["controller"] == before["controller"]
    now.s = 1.0
    assert report(simulation.target)["controller"] != before["controller"]


def test_lengths_fade() -> None:
    """A few thousand rounds later the first are forgotten."""
    lengths = DecayingHistogram()
    assert lengths.shares() == {}
    assert lengths.mean() == 0.0
    for _ in range(600):
        lengths.add(8)
    assert lengths.shares() == {8: 1.0}
    for _ in range(20_000):
        lengths.add(2)
    assert lengths.mean() == pytest.approx(2.0, abs=0.01)


def test_the_error_of_a_rate() -> None:
    """Of steps that are alike it is none; of those that alternate it is that of their mean."""
    alike, mixed = RateSample(), RateSample()
    for i in range(100):
        alike.add(16.0, 0.05)
        mixed.add(10.0 if i % 2 else 30.0, 0.05)
    assert alike.standard_error() == pytest.approx(0.0, abs=1e-3)
    assert mixed.standard_error() == pytest.approx(10.0 / 0.05 / 10.0, rel=0.02)
    assert RateSample().standard_error() == Experiment().margin() == float("inf")
    assert Experiment(0.0, mixed).margin() == pytest.approx(2.5 * (1 + 2 / 99) * mixed.standard_error())


@pytest.mark.slow
def test_drafts_leave_out_what_no_step_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 8 sessions on a target that computes, proposals are short: fewer nodes, as many tokens per second."""

    def run() -> Simulation:
        return Simulation(load=lambda now: 8, acceptance=0.8, calibrate=True, draft_step_s=0.002).run(5.0)

    within = run()
    monkeypatch.setattr(Reach, "tokens", property(lambda reach: reach.k))
    without = run()
    assert within.draft.stats.leaves < 0.9 * without.draft.stats.leaves
    assert within.tokens_per_s(1.0, 5.0) > 0.97 * without.tokens_per_s(1.0, 5.0)
