"""Masks of all sessions have a budget in each step; what is costly is computed beside the steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from tests.support.models import EOS, VOCAB, pair
from tests.support.pump import Pump, Request, assert_same, plain_reference
from tests.support.schemas import json_grammars, json_tokenizer

from paceline.checkpoint import grammar_matcher, grammar_work
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.grammar_work import MaskThread
from paceline.types import SamplingParams, SpeculationParams, StructuredOutput

ALL = 32 * -(-VOCAB // 32)
"""Tokens of a mask that forbids none."""
FORM = StructuredOutput(regex="(ab|a*z)*")


class Later(MaskThread):
    """Work that is done when it is asked for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], object], Future[object]]] = []
        self.num_submitted = 0
        self.is_endless = False

    def submit(self, function: Callable[[], object]) -> Future[object]:
        self.waiting.append((function, future := Future()))
        self.num_submitted += 1
        return future

    def work(self, num: int = 1) -> None:
        for function, future in self.waiting[:num]:
            future.set_result(function())
        del self.waiting[:num]

    def gives_up(self, job: Future[object]) -> bool:
        return self.is_endless

    def close(self) -> None:
        pass


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def grammars(later: Later) -> Grammars:
    return Grammars(json_tokenizer(), VOCAB, (EOS,), later)


def allowed(masks: np.ndarray) -> list[int]:
    return [int(np.unpackbits(row).sum()) for row in masks]


def tokens(text: str) -> list[int]:
    return list(json_tokenizer().encode(text))


def test_a_form_is_compiled_beside_the_steps_and_its_sessions_wait(grammars: Grammars, later: Later) -> None:
    first, second = grammars.paced(FORM), grammars.paced(FORM)
    assert not first.ready()
    assert not second.ready()
    later.work()
    assert first.ready()
    assert not second.ready()
    later.work()
    assert second.ready()
    assert grammars.paced(FORM).ready(), "a form that is known is cheap"
    assert later.num_submitted == 2


def test_masks_and_failures_are_those_of_a_matcher_at_once(grammars: Grammars, later: Later) -> None:
    paced, plain = grammars.paced(FORM, tokens("ab")), json_grammars().matcher(FORM, tokens("ab"))
    later.work()
    (a,), (b,), (z,) = tokens("a"), tokens("b"), tokens("z")
    for committed in ((), (a,), (a, z), (b,)):
        plain.append(committed)
        paced.append(committed)
        assert paced.ready()
        assert allowed(paced.masks([(), (a,), (a, b)])) == allowed(plain.masks([(), (a,), (a, b)]))
        assert paced.failure == plain.failure
    assert paced.failure, "nothing goes on after a z with a b"


@pytest.mark.parametrize("lenient", [False, True])
def test_a_form_that_cannot_be_compiled_fails_its_session(grammars: Grammars, later: Later, lenient: bool) -> None:
    paced = grammars.paced(StructuredOutput(regex="(a"), lenient=lenient)
    later.work()
    assert paced.ready()
    assert allowed(paced.masks([()])) == [ALL if lenient else 0]
    assert "cannot be compiled" in paced.failure


def test_the_sum_of_the_masks_of_one_step_is_bounded(grammars: Grammars, later: Later, tick: list[float]) -> None:
    """However many sessions come to a costly place at once: the others wait for the thread."""
    sessions = [grammars.paced(FORM) for _ in range(16)]
    later.work(16)
    (a,) = tokens("a")
    grammars.begin_step()
    for session in sessions:
        session.append((a,))
    tick[0] = grammar_matcher.STEP_S / 16  # each mask looks at the clock several times
    ready = [session.ready() for session in sessions]
    assert 0 < sum(ready) < 8
    assert len(later.waiting) == 16 - sum(ready)
    grammars.begin_step()
    assert [session.ready() for session in sessions] == ready, "those that wait are not computed a second time"
    later.work(16)
    assert all(session.ready() for session in sessions)


def test_a_session_whose_masks_are_costly_spends_nothing_of_a_step(
    grammars: Grammars, later: Later, tick: list[float]
) -> None:
    session, (a,) = grammars.paced(FORM), tokens("a")
    later.work()
    tick[0] = 2 * grammar_work.CHEAP_S
    for _ in range(3):
        session.append((a,))
        grammars.begin_step()
        session.ready()
        later.work()
    tick[0] = 0.0
    assert grammars._step.spent_s == 0
    assert later.num_submitted == 3, "the first was cheap before"
    session.append((a,))
    assert not session.ready()
    later.work()
    session.append((a,))
    assert session.ready(), "it is cheap again"


def test_masks_behind_drafted_tokens_end_with_the_step_and_come_back(
    grammars: Grammars, later: Later, tick: list[float]
) -> None:
    session, (a,) = grammars.paced(FORM), tokens("a")
    later.work()
    assert session.ready()
    grammars.begin_step()
    suffixes = [(a,) * n for n in range(12)]
    tick[0] = grammar_matcher.STEP_S / 4
    counts = allowed(session.masks(suffixes))
    assert all(counts[:2])
    assert not counts[-1]
    tick[0] = 0.0
    grammars.begin_step()
    assert all(allowed(session.masks(suffixes)))


def test_a_costly_mask_behind_a_drafted_token_does_not_begin(
    grammars: Grammars, later: Later, tick: list[float]
) -> None:
    """Its cost is expected to be that of the session's last one."""
    session, (a,) = grammars.paced(FORM), tokens("a")
    for taken_s in (1.1 * grammar_matcher.STEP_S, 0.0):
        tick[0] = taken_s
        session.append((a,))
        while not session.ready():
            later.work()
        grammars.begin_step()
        assert [n > 0 for n in allowed(session.masks([(), (a,)]))] == [True, not taken_s]


class Spent:
    """A state of a grammar that exceeds a bound as soon as it is used."""

    is_spent = False

    def is_error(self) -> bool:
        return self.is_spent

    def __getattr__(self, name: str) -> Callable[..., int]:
        self.is_spent = True
        return lambda *args: 0


@pytest.mark.usefixtures("tick")
@pytest.mark.parametrize("ahead", [True, False])
def test_a_state_is_never_made_again_within_a_step(ahead: bool) -> None:
    """However long the output is: the thread replays it."""
    grammars = Grammars(json_tokenizer(), VOCAB, (EOS,), MaskThread())
    session: Any = grammars.paced(FORM, ahead=ahead)
    plain, (a,) = json_grammars().matcher(FORM), tokens("a")
    session.masks([()])
    state: Any = session._matcher
    made, anew = list[str](), state._anew
    state._state, state._anew = Spent(), lambda: (made.append(threading.current_thread().name), anew())[1]
    for _ in range(2):
        session.append((a,))
        plain.append((a,))
        while not session.ready():
            time.sleep(0.001)
        assert allowed(session.masks([(), (a,)])) == allowed(plain.masks([(), (a,)]))
    grammars.close()
    assert made == ["paceline-masks"]
    assert not session.failure


def test_a_draft_is_not_waited_for(grammars: Grammars, later: Later) -> None:
    session, (a,) = grammars.paced(FORM, lenient=True), tokens("a")
    assert allowed(session.masks([(), (a,)])) == [ALL] * 2
    session.append((a,))
    later.work()
    assert allowed(session.masks([()])) == allowed(json_grammars().matcher(FORM, (a,)).masks([()]))


def test_a_mask_that_is_asked_for_too_early_is_waited_for() -> None:
    """As by whoever does not ask ``ready``: it is never another mask."""
    grammars = Grammars(json_tokenizer(), VOCAB, (EOS,), MaskThread())
    session = grammars.paced(FORM)
    assert allowed(session.masks([()])) == allowed(json_grammars().matcher(FORM).masks([()]))
    grammars.close()


def test_what_waits_is_dropped_with_its_engine() -> None:
    thread, began, end = MaskThread(), threading.Event(), threading.Event()
    first = thread.submit(lambda: (began.set(), end.wait(60)))
    second = thread.submit(lambda: None)
    assert began.wait(60)
    thread.close()
    end.set()
    assert first.result(60)
    assert second.cancelled()


def test_work_without_end_holds_up_none_that_waits_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_work, "MAX_S", 0.05)
    thread, end = MaskThread(), threading.Event()

    def endless() -> None:
        while not end.is_set():
            pass

    hung, behind = thread.submit(endless), thread.submit(lambda: "done")
    assert not thread.gives_up(behind)
    while not thread.gives_up(hung):
        time.sleep(0.001)
    assert behind.result(60) == "done"
    assert not hung.done()
    assert not thread.gives_up(hung)
    end.set()
    assert hung.result(60) is None
    thread.close()


def test_idle_waits_are_no_work_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a thread has, and not that of the clock: a busy machine fails no session."""
    monkeypatch.setattr(grammar_work, "MAX_S", 0.05)
    thread, began, end = MaskThread(), threading.Event(), threading.Event()
    job = thread.submit(lambda: (began.set(), end.wait(60)))
    assert began.wait(60)
    time.sleep(0.1)
    assert not thread.gives_up(job)
    end.set()
    thread.close()


@pytest.mark.parametrize("lenient", [False, True])
def test_a_mask_without_end_fails_its_session(grammars: Grammars, later: Later, lenient: bool) -> None:
    session = grammars.paced(FORM, lenient=lenient)
    assert not session.ready()
    later.is_endless = True
    assert session.ready()
    assert session.failure == "a mask takes more than 10 s"
    assert allowed(session.masks([(), (1,)])) == [ALL if lenient else 0] * 2
    session.append(tokens("a"))
    assert session.ready()


# -- an engine ---------------------------------------------------------------------------------------------------------


def requests() -> dict[str, Request]:
    """Sessions with and without forms. One form's prompt is longer than a step."""
    found: dict[str, Request] = {}
    for i, regex in enumerate(("(ab|a*z)*", "[a-z]{30}", None, "(a|b){5,40}c")):
        form: dict[str, Any] = {} if regex is None else {"structured_output": StructuredOutput(regex=regex)}
        sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=i, **form)
        found[f"s{i}"] = Request(
            tuple(range(20, 21 + 70 * (i == 1) + i)),
            sampling,
            SpeculationParams(max_draft_tokens=4),
            eos_token_ids=(EOS,),
        )
    return found


class LatePump(Pump):
    """A service whose work on masks comes late: two pieces in every fifth tick."""

    later: Later
    lengths: list[int]
    """Tokens of the session without a form, at the ticks in which masks were missing."""

    def tick(self) -> bool:
        if self.ticks % 5 == 0:
            self.later.work(2)
        if self.later.waiting and "s2" in self.sessions:
            self.lengths.append(len(self.sessions["s2"].history))
        return super().tick()


@pytest.mark.parametrize("seed", range(3))
def test_late_masks_change_no_token_and_hold_up_no_other_session(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mask is late, in drafts and targets."""
    monkeypatch.setattr(grammar_work, "CHEAP_S", -1.0)
    later, (target, draft) = Later(), pair("llama")
    grammars = Grammars(json_tokenizer(), VOCAB, (EOS,), later)
    pump = LatePump(target, draft, seed=seed, grammars=grammars, draft_pages=40)
    pump.later, pump.lengths = later, []
    results = pump.run(requests())
    assert not pump.failures
    assert_same(results, plain_reference(target, requests(), grammars=json_grammars()))
    assert later.num_submitted > 40
    assert len(set(pump.lengths)) > 5
