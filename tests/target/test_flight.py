"""Steps that are launched ahead: the device never waits for the host, and texts are those of plain decoding.

Mutants: the step ahead computes tokens of other sessions, a step is committed with the tokens of the one before it, the
row of a session that has ended is committed, pages are freed while a step writes to them, a step ahead is kept although
the device could not decide the one in front, sessions are launched ahead whose tokens need earlier ones.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.late import LateDevice
from tests.support.models import VOCAB, pair, prompt
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.target.test_engine import Direct, plain
from torch import Tensor

from paceline.core.tree import Proposal
from paceline.core.verification import Drawn, Verdict
from paceline.messages import Outcome
from paceline.model.loading import LoadedModel
from paceline.model.runner import ModelRunner
from paceline.target import engine as engine_module
from paceline.target.control.step_meter import TargetStats
from paceline.target.engine import TargetEngine
from paceline.target.flight import Flight
from paceline.target.scheduler import Scheduler
from paceline.target.session import TargetSession
from paceline.types import Mode, Result, SamplingParams, SpeculationParams

OPTIONS: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"min_tokens": 4}]
"""Of sessions that may be launched ahead."""
HOST_OPTIONS: list[dict[str, Any]] = [{"repetition_penalty": 1.3}, {"bad_words": ((5,), (7, 9))}, {"top_logprobs": 2}]
"""Of sessions that may not."""


def requests(seed: int, count: int = 12, options: list[dict[str, Any]] = OPTIONS) -> dict[str, Request]:
    """Prompts with and without a common beginning, with stop tokens that some of the texts meet."""
    rng = random.Random(seed)
    made = {}
    for i in range(count):
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 1.0, 0.7)),
            seed=i,
            max_tokens=rng.randint(4, 40),
            stop_token_ids=tuple(rng.sample(range(300), 12)),
            **rng.choice(options),
        )
        text = [*prompt(999, rng.choice((0, 64, 80))), *prompt(i, rng.randint(1, 90))]
        made[f"s{i}"] = Request(text, sampling, SpeculationParams(mode=Mode.PLAIN))
    return made


def late(pump: Pump, patch: pytest.MonkeyPatch, step_s: Callable[[int], float] = lambda n: 1e-3) -> LateDevice:
    """Has the target of a pump run on an accelerator."""
    device = LateDevice(pump.clock, step_s)
    device.install(patch)
    device.adopt(pump.target.runner, pair("llama")[0])
    return device


def run(asked: dict[str, Request], patch: pytest.MonkeyPatch, **options: Any) -> tuple[Pump, dict[str, Result]]:
    """The results of sessions on an accelerator."""
    pump = Pump(pair("llama")[0], None, **({"pages": 24, "max_step_tokens": 100, "late": 0.1} | options))
    late(pump, patch)
    return pump, pump.run(asked)


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_those_of_plain_decoding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts that come in the middle, shared prefixes, too few pages and too few places."""
    pages, sessions = ((24, 16), (9, 16), (24, 3), (14, 6))[seed]
    asked = requests(seed)
    reference = plain_reference(pair("llama")[0], asked)
    pump, results = run(asked, monkeypatch, seed=seed, pages=pages, max_sessions=sessions)
    assert_same(results, reference)
    stats = pump.target.stats
    assert stats.steps_ahead > stats.steps / 2
    assert (stats.preemptions > 0) is (pages == 9)
    assert {r.finish_reason for r in results.values()} == {"stop", "length"}


def cancelled(
    asked: dict[str, Request], patch: pytest.MonkeyPatch, seed: int, draft: LoadedModel | None = None, **options: Any
) -> tuple[dict[str, Result], TargetStats]:
    """The results of an accelerator's sessions, half of which are cancelled at some time and opened again."""
    rng = random.Random(seed)
    pump = Pump(pair("llama")[0], draft, **({"pages": 12, "max_step_tokens": 100, "late": 0.1, "seed": seed} | options))
    late(pump, patch)
    tick = pump.tick

    def tick_and_cancel() -> bool:
        moved = tick()
        for name, session in list(pump.sessions.items()):
            if name.startswith("gone") and name not in pump.failures and not session.finished and rng.random() < 0.2:
                pump.failures[name] = "cancelled"
                pump.send(session.cancel())
        return moved

    patch.setattr(pump, "tick", tick_and_cancel)
    gone = {f"gone{name}": request for name, request in requests(seed + 100).items()}
    if draft is not None:
        gone = in_mode(gone, Mode.OVERLAPPED)
    both = [*asked.items(), *gone.items()]
    rng.shuffle(both)
    results = pump.run(dict(both))
    return {name: result for name, result in results.items() if name in asked}, pump.target.stats


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_are_cancelled_change_no_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they are: their pages go to others, while a step with their rows may be in flight."""
    asked = requests(seed)
    results, stats = cancelled(asked, monkeypatch, seed)
    assert_same(results, plain_reference(pair("llama")[0], asked))
    assert stats.steps_ahead > 0


def drafted(seed: int, patch: pytest.MonkeyPatch) -> tuple[dict[str, Result], TargetStats]:
    """Results of sessions with drafts, of which others are cancelled while their steps are in flight."""
    return cancelled(
        in_mode(requests(seed, 6), Mode.OVERLAPPED), patch, seed, pair("llama")[1], draft_steps=(2, 6), pages=30
    )


@pytest.mark.parametrize("seed", range(2))
def test_messages_come_while_a_step_with_drafts_is_in_flight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of drafts, new sessions, and ends of sessions whose step has not been awaited."""
    num_received = 0

    @mutant(TargetEngine, "receive")
    def counted(receive: Any, engine: TargetEngine, messages: Any) -> None:
        nonlocal num_received
        flight = engine.flight
        num_received += flight is not None and any(part.num_drafted for part in flight.parts)
        receive(engine, messages)

    any_subtrees(monkeypatch)
    counted(monkeypatch)
    results, stats = drafted(seed, monkeypatch)
    assert_same(results, plain_reference(pair("llama")[0], in_mode(requests(seed, 6), Mode.OVERLAPPED)))
    assert num_received > 10
    assert stats.nodes_used > 0


@mutant(TargetEngine, "is_open")
def _open_if_another_is(is_open: Any, engine: TargetEngine, session: TargetSession) -> bool:
    return True


def test_the_row_of_a_session_that_left_a_step_with_drafts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant commits it."""
    _open_if_another_is(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        drafted(0, monkeypatch)


@pytest.mark.parametrize("seed", range(2))
def test_drafts_and_other_sessions_come_and_go(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts, penalties or log probabilities are serial; around them plain ones are ahead."""
    target, draft = pair("llama")
    asked = requests(seed)
    for name, mode in (("drafted", Mode.OVERLAPPED), ("asked", Mode.SEQUENTIAL)):
        asked |= in_mode({f"{name}{key}": r for key, r in requests(seed + 7, 3).items()}, mode)
    asked |= {f"host{key}": r for key, r in requests(seed + 9, 3, HOST_OPTIONS).items()}
    reference = plain_reference(target, asked)
    pump = Pump(target, draft, seed=seed, pages=40, max_step_tokens=100, draft_steps=(2, 6))
    late(pump, monkeypatch)
    assert_same(pump.run(asked, arrivals=0.05), reference)
    stats = pump.target.stats
    assert 0 < stats.steps_ahead < stats.steps
    assert stats.nodes_used > 0


def unsure(seed: int) -> type[Drawn]:
    """Tokens drawn by a device that cannot decide some steps, and has other tokens in these."""
    rng = random.Random(seed)

    class Unsure(Drawn):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.fails = rng.random() < 0.3

        @property
        def token_ids(self) -> Tensor:
            token_ids = super().token_ids
            return (token_ids + 1) % VOCAB if self.fails else token_ids

        def verdicts(self, proposals: Sequence[Proposal]) -> list[Verdict] | None:
            found = super().verdicts(proposals)
            return None if self.fails else found

    return Unsure


def undecided(patch: pytest.MonkeyPatch, seed: int = 0) -> tuple[Pump, dict[str, Result]]:
    """Results where the device cannot decide some steps."""
    patch.setattr(engine_module, "Drawn", unsure(seed))
    return run(requests(seed), patch, seed=seed, pages=12)


def test_a_step_ahead_of_one_that_the_device_cannot_decide_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pump, results = undecided(monkeypatch)
    assert_same(results, plain_reference(pair("llama")[0], requests(0)))
    assert 0 < pump.target.stats.steps_ahead < pump.target.stats.steps


@pytest.mark.parametrize("always", [True, False])
def test_a_step_ahead_without_memory_is_taken_later(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its forward nor its draws need memory that is there only once the step in front is done."""
    rng, forward, draw = random.Random(1), ModelRunner.forward_drawn, Drawn.__init__

    def without(function: Callable[..., Any], rate: float) -> Callable[..., Any]:
        def limited(*args: Any) -> Any:
            if rng.random() < rate:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(*args)

        return limited

    monkeypatch.setattr(ModelRunner, "forward_drawn", without(forward, 1.0 if always else 0.3))
    monkeypatch.setattr(Drawn, "__init__", without(draw, 0.3))
    pump, results = run(requests(1), monkeypatch, seed=1)
    assert_same(results, plain_reference(pair("llama")[0], requests(1)))
    assert (pump.target.stats.steps_ahead == 0) is always


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_leaves_and_comes_back_in_the_middle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions go on in steps ahead; the new draft begins while one of these is in flight."""
    target, draft = pair("llama")
    sampling = [SamplingParams(temperature=i % 2, seed=i, max_tokens=90, ignore_eos=True) for i in range(4)]
    asked = {f"s{i}": Request(prompt(i, 30 + seed), each) for i, each in enumerate(sampling)}
    reference = plain_reference(target, asked)
    pump = Pump(target, draft, seed=seed, draft_steps=(2, 6), late=0.1, adaptive=False)
    late(pump, monkeypatch)
    for name, request in asked.items():
        pump.submit(name, request)
    stats, accepted = pump.target.stats, []
    for change, num_ticks in (("on_draft_down", 8), ("on_draft_up", 70)):
        for _ in range(num_ticks):
            pump.tick()
        accepted.append(stats.nodes_used)
        pump.draft_dead = change == "on_draft_down"
        for session in pump.sessions.values():
            pump.send(getattr(session, change)())
    assert stats.steps_ahead > 10
    assert_same(pump.run({}), reference)
    assert stats.nodes_used > accepted[1]


@pytest.mark.parametrize("count", [1, 12])
def test_lookups_without_result_pause_for_steps_ahead(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sessions that may have a draft and have none."""
    asked = in_mode(requests(3, count), Mode.OVERLAPPED)
    reference = plain_reference(pair("llama")[0], asked)
    pump, results = run(asked, monkeypatch, seed=3)
    assert_same(results, reference)
    stats = pump.target.stats
    assert 0 < stats.steps_ahead < stats.steps


def test_all_sessions_of_a_step_ahead_end_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ahead is of no session then; those that it is followed by may have a draft."""
    asked = in_mode(requests(3), Mode.OVERLAPPED)
    reference = plain_reference(pair("llama")[0], asked)
    pump, results = run(asked, monkeypatch, seed=3, max_sessions=1)
    assert_same(results, reference)
    assert pump.target.stats.steps_ahead > 0


@mutant(ModelRunner, "forward_drawn")
def _tokens_of_others(forward: Any, runner: ModelRunner, steps: Any, token_ids: Tensor) -> Tensor:
    return forward(runner, steps, token_ids.roll(1))


_last: list[Any] = [None]


@mutant(Drawn, "verdicts")
def _tokens_of_the_step_before(verdicts: Any, drawn: Drawn, proposals: Sequence[Proposal]) -> Any:
    found, before = verdicts(drawn, proposals), _last[0]
    _last[0] = found
    return before if before is not None and len(before) == len(found) else found


@mutant(TargetSession, "__init__")
def _all_sessions_may_be_ahead(init: Any, session: TargetSession, *args: Any, **options: Any) -> None:
    init(session, *args, **options)
    session.samples_ahead = True


@mutant(TargetEngine, "on_launched")
def _a_prompt_that_ends_is_a_chunk(launched: Any, engine: TargetEngine, parts: Any, *args: Any, **options: Any) -> Any:
    flight = launched(engine, parts, *args, **options)
    for part in parts:
        if part.stop - part.start > 1:
            part.session.num_computed = min(part.session.num_tokens - 1, part.stop + 1)
    return flight


@pytest.mark.parametrize(
    "mistake",
    [
        _tokens_of_others,
        _tokens_of_the_step_before,
        _all_sessions_may_be_ahead,
        _a_prompt_that_ends_is_a_chunk,
    ],
)
def test_a_step_ahead_that_is_wrong_is_caught(mistake: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(0, options=HOST_OPTIONS[:2] if mistake is _all_sessions_may_be_ahead else OPTIONS)
    reference = plain_reference(pair("llama")[0], asked)
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(run(asked, monkeypatch, seed=0)[1], reference)


@mutant(TargetEngine, "drop_ahead")
def _kept(drop: Any, engine: TargetEngine) -> None:
    pass


def test_a_step_ahead_that_is_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = plain_reference(pair("llama")[0], requests(0))
    _kept(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(undecided(monkeypatch)[1], reference)


@mutant(TargetEngine, "close_session")
def _committed_although_it_ended(close: Any, engine: TargetEngine, session: TargetSession) -> None:
    """Its row in the step ahead is an outcome like others."""
    flight = engine.flight
    if flight is None or all(part.session is not session for part in flight.parts):
        close(engine, session)


def test_the_row_of_a_session_that_has_ended_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token, the limit and a cancellation, each of one of the sessions of the step ahead."""
    for wrong in (False, True):
        with monkeypatch.context() as patch:
            ended = outcomes_after_the_end(patch, _committed_although_it_ended if wrong else None)
        assert (ended > 0) is wrong


def outcomes_after_the_end(patch: pytest.MonkeyPatch, mistake: Mutant | None) -> int:
    """Outcomes of sessions that have ended or were closed."""
    if mistake is not None:
        mistake(patch)
    pump = Pump(pair("llama")[0], None, pages=24, late=0.0)
    late(pump, patch)
    ended: set[str] = set()
    num_late = 0
    emit = pump.from_target.extend

    def counted(messages: Sequence[Any]) -> None:
        nonlocal num_late
        for each in messages:
            if isinstance(each, Outcome):
                num_late += each.session_id in ended
                if each.finish_reason is not None:
                    ended.add(each.session_id)
        emit(messages)

    pump.target.emit = counted
    pump.run(requests(0))
    return num_late


@mutant(Flight, "keep_pages")
def _pages_are_freed_at_once(keep: Any, flight: Flight, session: TargetSession) -> None:
    pass


def test_pages_that_are_freed_in_flight_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a session are given to the next one, in which a step in flight writes the row of the first."""
    asked = {
        f"s{i}": Request(prompt(i, 50 if i % 3 else 5), SamplingParams(max_tokens=12, stop_token_ids=range(0, 300, 5)))
        for i in range(40)
    }
    asked = in_mode(asked, Mode.PLAIN)
    reference = plain_reference(pair("llama")[0], asked)
    with monkeypatch.context() as patch:
        assert_same(crowded(asked, patch), reference)
    _pages_are_freed_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(crowded(asked, monkeypatch), reference)


def crowded(asked: dict[str, Request], patch: pytest.MonkeyPatch) -> dict[str, Result]:
    """Results of sessions of which each gets the pages of one that has just ended."""
    pump = Pump(pair("llama")[0], None, pages=4, max_sessions=4, late=0.0)
    late(pump, patch)
    return pump.run(asked, arrivals=1.0)


# -- time ------------------------------------------------------------------------------------------------------------

NUM_STEPS = 40
HOST_US = {
    (Scheduler, "schedule"): lambda n: 60 + 3 * n,
    (Scheduler, "schedule_ahead"): lambda n: 60 + 3 * n,
    (ModelRunner, "plan"): lambda n: 60 + n,
    (TargetEngine, "commit_verdicts"): lambda n: 20 + 8 * n,
    (TargetEngine, "adapt_drafting"): lambda n: 10 + n,
    (TargetEngine, "send_held"): lambda n: 10 + n,
}
"""Microseconds of the parts of the host's work, in steps of n sessions: about those of ``results/host-time.txt``."""


def served(num_sessions: int, step_s: float, patch: pytest.MonkeyPatch, *, is_asynchronous: bool) -> Direct:
    """An engine that has served as many sessions in virtual time."""
    direct = Direct(pages=2 * num_sessions, max_sessions=num_sessions, budget=1024)
    device = LateDevice(direct.clock, lambda num_tokens: step_s)
    device.install(patch)
    device.adopt(direct.engine.runner, pair("llama")[0])
    direct.engine.runner.backend.is_asynchronous = is_asynchronous
    for (owner, name), cost in HOST_US.items():

        def slow(function: Any, *args: Any, cost: Any = cost, **options: Any) -> Any:
            direct.clock.now += 1e-6 * cost(num_sessions)
            return function(*args, **options)

        mutant(owner, name)(slow)(patch)
    for i in range(num_sessions):
        direct.open(f"s{i}", plain(Request(prompt(i, 8), SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True))))
    while direct.engine.step():
        pass
    assert len(direct.outcomes()) == num_sessions
    assert direct.engine.stats.steps == NUM_STEPS
    return direct


@pytest.mark.parametrize("num_sessions", [1, 16, 64])
def test_the_host_works_beside_the_device(num_sessions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 80 % of the host's time in serial steps is hidden, where steps take the device longer than the host;
    and the engine knows what a plain step takes either way."""
    step_s, took = 8e-3, []
    for is_asynchronous in (False, True):
        with monkeypatch.context() as patch:
            direct = served(num_sessions, step_s, patch, is_asynchronous=is_asynchronous)
        took.append(direct.clock.now)
        allocation = direct.engine.allocation
        assert allocation.plain_s(num_sessions) == pytest.approx(took[-1] / NUM_STEPS, rel=0.1)
        assert allocation.hidden.get(0.0) == pytest.approx(float(is_asynchronous), abs=0.1)
    host_s = took[0] - NUM_STEPS * step_s
    assert host_s > NUM_STEPS * 1.5e-4
    assert took[0] - took[1] >= 0.8 * host_s


def test_a_step_is_as_long_as_the_host_where_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    took, step_s = [], 5e-4
    for is_asynchronous in (False, True):
        with monkeypatch.context() as patch:
            direct = served(64, step_s, patch, is_asynchronous=is_asynchronous)
        took.append(direct.clock.now)
        assert direct.engine.allocation.plain_s(64) == pytest.approx(took[-1] / NUM_STEPS, rel=0.1)
    assert took[0] - NUM_STEPS * step_s <= took[1] < took[0]
