"""Heads that were paused go on with the sessions that run: what they have missed is told to them, to the row."""

from collections.abc import Callable

import pytest
from tests.support.heads import Oracle
from tests.support.models import prompt
from tests.support.pump import Pump, Request, assert_same, plain_reference
from tests.target.test_heads import EVERY, known, oracle, pump_with, target_with

from paceline.target.control.allocation import Allocation
from paceline.target.control.head_gate import HeadGate
from paceline.target.control.report import TargetReport
from paceline.target.heads import feeding
from paceline.target.heads.driver import Heads
from paceline.target.heads.grower import HeadGrower
from paceline.target.heads.mounted import MountedHead
from paceline.target.heads.session import HeadSession
from paceline.types import PAGE_SIZE, SamplingParams, SpeculationParams


def paused(on_off: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses heads in the steps of which ``on_off`` is False."""
    steps = 0
    feed = Heads.feed

    def counted(self, computed, states):
        nonlocal steps
        feed(self, computed, states)
        steps += 1

    monkeypatch.setattr(Heads, "feed", counted)
    monkeypatch.setattr(HeadGate, "wanted", lambda self, num_sessions: on_off(steps))


def _pauses(step: int) -> bool:
    """On for 7 steps, off for 4, and so on: prompts, chunks and ends of sessions fall into pauses."""
    return step % 11 < 7


def run_with_pauses(pages: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Pump, MountedHead, Oracle]:
    """Runs all requests twice, so that later ones find what earlier ones have computed; the texts are plain's."""
    requests, reference, texts = known(1.0)
    mounted, head = oracle(EVERY, texts)
    pump = pump_with(EVERY, mounted, pages=pages)
    paused(_pauses, monkeypatch)
    again = {f"{name} again": request for name, request in requests.items()}
    assert_same(pump.run(requests), reference)
    assert_same(pump.run(again), reference | {f"{name} again": result for name, result in reference.items()})
    return pump, mounted, head


@pytest.mark.parametrize("pages", [9, 60])
def test_after_a_pause_a_head_goes_on_with_the_sessions_that_run(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has missed is told to it to the row, on pages of one session and on those that sessions share, so its
    acceptance is 1 again."""
    pump, mounted, head = run_with_pauses(pages, monkeypatch)
    assert head.wrong == []
    stats = mounted.stats
    assert stats.rows == stats.rows_used > 100
    assert stats.holes > 5
    assert head.rows_missed > 50
    assert stats.sessions_failed == 0
    assert pump.target.stats.preemptions > 0 or pages > 9
    assert pump.target.stats.cached_tokens > 0
    assert f"went on {stats.holes} times after missing a part of a session" in mounted.report(1000)
    pump.target.runner.backend.num_unrecorded = 3
    counters = TargetReport()(pump.target)["counters"]
    assert (counters["head_holes"], counters["steps_unrecorded"]) == (stats.holes, 3)


def test_a_paused_head_is_told_of_tokens_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not step by step: it costs nothing while it is paused."""
    told: list[tuple[bool, int]] = []
    advance = Oracle.advance

    def counted(self, session_id, token_ids, node_ids, kept):
        told.append((mounted.follows, len(token_ids)))
        advance(self, session_id, token_ids, node_ids, kept)

    monkeypatch.setattr(Oracle, "advance", counted)
    requests, reference, texts = known(1.0)
    mounted, _ = oracle(EVERY, texts)
    pump = pump_with(EVERY, mounted, pages=60)
    paused(_pauses, monkeypatch)
    assert_same(pump.run(requests), reference)
    late = [num_tokens for follows, num_tokens in told if not follows]
    assert len(late) > 5
    assert max(late) > 1
    assert len(told) - len(late) > 20
    assert mounted.stats.rows == mounted.stats.rows_used > 50


def test_a_head_is_asked_for_nothing_that_could_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cost of steps with all their sessions, those whose prompts are being computed included."""
    sessions: set[int] = set()

    def could_pay(self, num_sessions, acceptance, k):
        sessions.add(num_sessions)
        return num_sessions < 4

    monkeypatch.setattr(Allocation, "could_pay", could_pay)
    requests, reference, texts = known(1.0)
    mounted, _ = oracle(EVERY, texts)
    pump = pump_with(EVERY, mounted, pages=60)
    widest: set[int] = set()
    ask = HeadGrower.ask

    def asked(self, sessions, *rest, **named):
        widest.add(len(sessions))
        ask(self, sessions, *rest, **named)

    monkeypatch.setattr(HeadGrower, "ask", asked)
    assert_same(pump.run(requests), reference)
    assert max(sessions) > 3 >= max(widest) > 0


def test_a_head_is_judged_by_all_sessions_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose prompts are being computed included: in a burst it would else be tried anew at 1, 2, 4, .. sessions,
    as they begin one after the other."""
    steps: list[tuple[int, int]] = []  # sessions that decode, and all, by step
    judged: list[int] = []
    propose, wanted, observe_step = Heads.propose, HeadGate.wanted, HeadGate.observe_step

    def proposed(self, ready, num_sessions, *, trees):
        steps.append((len(ready), num_sessions))
        propose(self, ready, num_sessions, trees=trees)

    def noted(self, num_sessions):
        assert num_sessions == max(1, steps[-1][1])
        return wanted(self, num_sessions)

    def observed(self, num_sessions, *rest):
        judged.append(num_sessions)
        assert num_sessions == max(1, steps[-1][1])
        return observe_step(self, num_sessions, *rest)

    monkeypatch.setattr(Heads, "propose", proposed)
    monkeypatch.setattr(HeadGate, "wanted", noted)
    monkeypatch.setattr(HeadGate, "observe_step", observed)
    requests, reference, texts = known(1.0)
    mounted, _ = oracle(EVERY, texts)
    assert_same(pump_with(EVERY, mounted, pages=60).run(requests), reference)
    assert any(0 < ready < num_sessions for ready, num_sessions in steps)
    assert len(set(judged)) > 1


def _untold(each) -> None:
    """The rows that were missed are not named."""
    each.setattr(HeadSession, "miss", lambda self, rows: None)


def _told_one_row_late(each) -> None:
    miss = HeadSession.miss
    each.setattr(HeadSession, "miss", lambda self, rows: miss(self, range(rows.start + 1, rows.stop)))


def _pages_with_holes_are_shared(each) -> None:
    each.setattr(feeding, "do_overlap", lambda hole, rows: False)


@pytest.mark.parametrize("mutate", [_untold, _told_one_row_late, _pages_with_holes_are_shared])
def test_the_oracle_notices_a_hole_that_is_not_told(mutate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails with each of these; the text is plain's all the same."""
    mutate(monkeypatch)
    _, _, head = run_with_pauses(60, monkeypatch)
    assert head.wrong


@pytest.mark.parametrize("mutant", [False, True])
def test_a_page_that_a_last_step_has_filled_is_not_taken_for_known(mutant, monkeypatch) -> None:
    """With what a session's last step computes no head is fed: on a page that was another session's before lie rows of
    that one. The mutant goes on with them; the text is plain's all the same."""
    if mutant:
        monkeypatch.setattr(MountedHead, "leave", lambda self, session: None)
    filled = prompt(7, PAGE_SIZE)
    after = [*filled, *prompt(9, 6)]
    order = {"0": (prompt(5, 191), 24), "1": (prompt(6, 191), 24), "last step": (filled, 1), "after": (after, 24)}
    requests = {
        name: Request(tokens, SamplingParams(temperature=0.0, max_tokens=most), SpeculationParams(max_draft_tokens=4))
        for name, (tokens, most) in order.items()
    }
    reference = plain_reference(target_with(EVERY), requests)
    texts = [[*r.prompt, *reference[name].token_ids] for name, r in requests.items() if name != "last step"]
    mounted, head = oracle(EVERY, texts)
    pump = pump_with(EVERY, mounted, pages=4, max_step_tokens=PAGE_SIZE)
    for name, request in requests.items():
        pump.run({name: request})
    assert_same(pump.results, reference)
    assert pump.target.stats.cached_tokens == PAGE_SIZE
    assert bool(head.wrong) is mutant
    assert mounted.stats.holes == (0 if mutant else 1)
