"""What reports a step and accounts for it is done behind the launch of the next one, and changes nothing.

A script of nodes, a cancellation and a lost draft is served twice: with that, and with every step settled at once. Both
send the same outcomes and count the same. (What the controllers learn is of use one step later.) Then storms. Mutants:
a step is never settled, twice, with what its sessions are by now, by the times of the next step, after what is verified
next, or not where the next step fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.faults.runs import requests
from tests.support.late import LateDevice
from tests.support.models import VOCAB, pair, prompt
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Request, assert_same, plain_reference, requests_for
from tests.target.storm import STEP_S, Storm
from tests.target.test_engine import Direct, message

from paceline.errors import EngineError
from paceline.messages import CloseSession, DraftState, InFlight, Node, Nodes, Outcome, SessionFailed
from paceline.target import engine as engine_module
from paceline.target.control.step_meter import StepMeter, StepTimes
from paceline.target.engine import TargetEngine
from paceline.target.runners import NoMemoryError, Runners
from paceline.types import Result, noise_key

LENGTH = 24


@pytest.fixture(scope="module")
def texts() -> dict[str, Result]:
    """Plain decoding of each request alone."""
    return plain_reference(pair("llama")[0], asked())


def asked() -> dict[str, Request]:
    """Sessions with proposals of two tokens, so that no step waits for more."""
    options = {"temperature": [0, 1], "max_tokens": LENGTH, "ignore_eos": True}
    return requests_for([prompt(i, 9 + 5 * i) for i in range(4)], **options, max_draft_tokens=2)


def nodes_of(text: Sequence[int], every: int) -> tuple[Node, ...]:
    """A draft's nodes for a whole text. At one in ``every`` positions the likeliest is wrong, and has one below."""
    made: list[Node] = []
    parent = 0
    for at, token_id in enumerate(text):
        is_wrong = at % every == every - 1
        if is_wrong:
            made.append(Node(len(made) + 1, parent, (token_id + 1) % VOCAB, 0.6))
            made.append(Node(len(made) + 1, len(made), 7, 0.9))
        made.append(Node(len(made) + 1, parent, token_id, 0.3 if is_wrong else 0.9))
        parent = len(made)
    return tuple(made)


def on_device(direct: Direct, patch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice(direct.clock, lambda num_tokens: STEP_S)
    device.install(patch)
    device.adopt(direct.engine.runner, pair("llama")[0])
    return device


@mutant(TargetEngine, "finish_step")
def at_once(finish: Any, engine: TargetEngine, flight: Any) -> None:
    """Settles each step before the next one is launched."""
    finish(engine, flight)
    engine.settle_step()


def served(texts: dict[str, Result], *changes: Mutant, events: bool = True, telling_s: float = 0.0) -> Direct:
    """An engine that has served all sessions, whose drafts had sent all their tokens in time, or has failed."""
    with pytest.MonkeyPatch.context() as patch:
        direct = Direct(pages=64, budget=200, adaptive=False)
        on_device(direct, patch)
        num_finished = 0

        @mutant(TargetEngine, "finish_step")
        def counted(finish: Any, engine: TargetEngine, flight: Any) -> None:
            nonlocal num_finished
            finish(engine, flight)
            num_finished += 1
            if events and num_finished == 3:
                engine.receive([CloseSession("s1", 1)])
            if events and num_finished == 4:
                engine.receive([DraftState("s2", 1, available=False)])

        @mutant(TargetEngine, "tell_rounds")
        def timed(tell: Any, engine: TargetEngine, done: Any) -> None:
            tell(engine, done)
            direct.clock.now += telling_s

        for change in (*changes, counted, timed):
            change(patch)
        for i, (name, request) in enumerate(asked().items()):
            seed = noise_key(i, request.sampling.seed_scope, request.prompt)
            direct.engine.receive([replace(message(name, request), seed=seed)])
            direct.engine.receive([Nodes(name, 1, len(request.prompt), nodes_of(texts[name].token_ids, 3 + i))])
        with contextlib.suppress(EngineError):
            drain(direct)
            direct.engine.close()
    return direct


def drain(direct: Direct) -> None:
    """Steps until nothing is left to do."""
    for _ in range(2000):
        if not direct.engine.step():
            wait_s = direct.engine.wait_s()
            if wait_s is None:
                return
            direct.clock.now += wait_s
        direct.engine.check_integrity()


def order_is_right(sent: Sequence[Any]) -> bool:
    """True if the context of whatever is announced had been sent before."""
    lengths = {name: len(request.prompt) for name, request in asked().items()}
    for each in sent:
        if isinstance(each, Outcome):
            lengths[each.session_id] = each.context_len + len(each.token_ids)
        if isinstance(each, InFlight) and each.context_len != lengths[each.session_id]:
            return False
    return True


def same(one: Direct, other: Direct) -> bool:
    """True if both have sent the same outcomes and counted the same."""
    return one.outcomes() == other.outcomes() and dataclasses.astuple(one.engine.stats) == pytest.approx(
        dataclasses.astuple(other.engine.stats)
    )


def test_outcomes_and_counts_are_those_of_steps_that_are_settled_at_once(texts: dict[str, Result]) -> None:
    """Although a session was cancelled and a draft was lost before the step was settled."""
    deferred = served(texts)
    assert same(deferred, served(texts, at_once))
    assert order_is_right(deferred.sent)
    stats = deferred.engine.stats
    assert stats.nodes_used > 10
    assert stats.rounds == sum(map(len, deferred.outcomes().values()))
    for name, outcomes in deferred.outcomes().items():
        sent = tuple(token for outcome in outcomes for token in outcome.token_ids)
        assert sent == texts[name].token_ids[: len(sent)]
        assert (len(sent) == LENGTH) is (name != "s1")


@mutant(TargetEngine, "tell_rounds")
def never(tell: Any, engine: TargetEngine, done: Any) -> None:
    """Counts and tells nothing."""


@mutant(TargetEngine, "tell_rounds")
def twice(tell: Any, engine: TargetEngine, done: Any) -> None:
    tell(engine, done)
    tell(engine, done)


@mutant(engine_module, "outcome_of")
def with_the_next_cause(outcome: Any, decided: Any) -> Outcome:
    made: Outcome = outcome((*decided[:5], decided[0].session.cause, *decided[6:]))
    return made


@mutant(StepMeter, "measure")
def by_the_next_times(measure: Any, meter: StepMeter, parts: Any, times: StepTimes) -> Any:
    return measure(meter, parts, meter.decided())


@mutant(TargetEngine, "in_flight_of")
def announced_before(in_flight: Any, engine: TargetEngine, parts: Any) -> list[InFlight]:
    engine.held += in_flight(engine, parts)
    return []


@pytest.mark.parametrize("mistake", [never, twice, with_the_next_cause, by_the_next_times, announced_before])
def test_a_step_that_is_settled_in_another_way_is_caught(texts: dict[str, Result], mistake: Mutant) -> None:
    found = served(texts, mistake)
    assert not same(found, served(texts, at_once)) or not order_is_right(found.sent)


def test_what_is_settled_behind_a_launch_takes_no_time(texts: dict[str, Result]) -> None:
    """A step is awaited after a share of its own time, not of what follows its launch on the host."""
    took = []
    for changes in ((), (at_once,)):
        direct = served(texts, *changes, events=False, telling_s=STEP_S / 2)
        took.append(direct.clock.now / direct.engine.stats.steps / STEP_S)
    assert took[0] < 1.15
    assert took[1] > 1.4


# -- the next step fails -----------------------------------------------------------------------------------------------


def failing(at: int, error: Callable[[Any], Exception]) -> Mutant:
    """The mutant whose forward number ``at`` raises what ``error`` makes of its parts."""
    num_forwards = 0

    @mutant(Runners, "forward")
    def fails(forward: Any, runners: Runners, parts: Any, **options: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == at:
            raise error(parts)
        return forward(runners, parts, **options)

    return fails


def until_it_fails(texts: dict[str, Result], at: int, *changes: Mutant) -> int:
    """Number of outcomes told by an engine whose forward number ``at`` raises, before it is closed."""
    direct = served(texts, *changes, failing(at, lambda parts: EngineError("a rank is lost")), events=False)
    return sum(isinstance(each, Outcome) for each in (*direct.sent, *direct.engine.held))


@mutant(TargetEngine, "settle_step")
def lost_with_the_next(settle: Any, engine: TargetEngine) -> None:
    if sys.exc_info()[0] is None:
        settle(engine)


def test_a_step_is_told_although_the_next_one_fails(texts: dict[str, Result]) -> None:
    """The mutant loses it with that."""
    at = 4
    assert until_it_fails(texts, at) == len(texts) * (at - 1)
    assert until_it_fails(texts, at, lost_with_the_next) == len(texts) * (at - 2)


@mutant(TargetEngine, "send")
def sent_before(send: Any, engine: TargetEngine, messages: Sequence[Any]) -> None:
    engine.held += messages
    engine.send_held()


def test_a_session_without_memory_fails_after_its_last_outcome(texts: dict[str, Result]) -> None:
    """The others go on. The mutant sends what has failed before what has succeeded."""
    for mistake in (None, sent_before):
        changes = [failing(4, lambda parts: NoMemoryError(parts[0].session, "none"))]
        direct = served(texts, *changes, *([mistake] if mistake is not None else []), events=False)
        [failed] = [at for at, each in enumerate(direct.sent) if isinstance(each, SessionFailed)]
        name = direct.sent[failed].session_id
        later = [each for each in direct.sent[failed:] if isinstance(each, Outcome) and each.session_id == name]
        assert bool(later) is (mistake is not None)
        for other, outcomes in direct.outcomes().items():
            sent = tuple(token for outcome in outcomes for token in outcome.token_ids)
            assert (sent == texts[other].token_ids) is (other != name)


# -- storms ------------------------------------------------------------------------------------------------------------


def stormy(seed: int, patch: pytest.MonkeyPatch) -> Storm:
    """The end of a storm in which all sessions but those that left have plain's texts."""
    asked = requests(4)
    pump = Storm(*pair("llama"), patch, seed, targets_die=True)
    results = pump.run(asked | {f"gone{name}": request for name, request in requests(6).items()})
    assert_same({name: results[name] for name in asked}, plain_reference(pair("llama")[0], asked))
    pump.require_totals()
    return pump


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_leaves_texts_pages_and_counts_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pump = stormy(seed, monkeypatch)
    assert pump.counts["nodes_used"] > 0
    assert pump.num_left > 0


def test_a_storm_in_which_a_step_is_told_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    twice(monkeypatch)
    with pytest.raises(AssertionError):
        stormy(0, monkeypatch)
