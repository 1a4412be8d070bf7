"""A target that begins eagerly and is compiled while it serves: no session has tokens of two models.

Eager and compiled steps differ in the last bits, which a test could miss. Here the compiled model has other weights:
whatever of one kind reaches a session of the other changes its text.
"""

from dataclasses import dataclass

import pytest
from tests.support.heads import Oracle, signatures
from tests.support.models import noisy_copy, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import slow

from paceline.drafters.lookahead import LookaheadHead
from paceline.messages import OpenSession
from paceline.model.compiled.backend import StepFunction
from paceline.model.features import Features
from paceline.model.loading import LoadedModel, prepare
from paceline.target import runners, session
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.mount import bind_heads
from paceline.target.origin import Origin
from paceline.types import PAGE_SIZE, Mode, Result, SamplingParams

PREFIX = prompt(999, PAGE_SIZE + 6)
"""Longer than a page, so that sessions find it in the cache."""
NUM, MAX_TOKENS = 4, 40


@dataclass
class Compiling:
    """A compilation that ends when the test says so."""

    step: StepFunction
    execution: str = "compiling"
    closed: bool = False

    def take(self) -> StepFunction | None:
        if self.execution != "compiled" or self.step is None:
            return None
        step, self.step = self.step, None
        return step

    def close(self) -> None:
        self.closed = True


def models(features: Features | None = None) -> tuple[LoadedModel, LoadedModel, LoadedModel]:
    """The eager target, the "compiled" one, and a draft of the former."""
    weights = random_model("llama")
    made = (weights, noisy_copy(weights, 0.5), noisy_copy(weights, 0.05))
    return tuple(prepare(model, compile=False, features=features) for model in made)


def requests(name: str, first: int, mode: Mode) -> dict[str, Request]:
    """Greedy and sampling ones, with the same prefix. ``first``: of the seeds, which are the ends of the prompts."""
    return in_mode(
        {
            f"{name}{i}": Request(
                [*PREFIX, *prompt(first + i, 3)],
                SamplingParams(temperature=float(i % 2), seed=first + i, max_tokens=MAX_TOKENS, ignore_eos=True),
            )
            for i in range(NUM)
        },
        mode,
    )


def swapped(
    pump: Pump, compilation: Compiling, early: dict[str, Request], late: dict[str, Request]
) -> tuple[dict[str, Result], int]:
    """Results of both, where the compiled model comes in the middle of the early ones; and how many steps were two
    forwards."""
    for name, request in early.items():
        pump.submit(name, request)
    engine = pump.target
    while not engine.sessions or any(one.num_tokens < len(PREFIX) + 8 for one in engine.sessions.values()):
        pump.tick()
    assert len(engine.sessions) == len(early), "one has ended already"
    compilation.execution = "compiled"
    for name, request in late.items():
        pump.submit(name, request)
    mixed, forward = 0, runners.Runners.forward

    def counted(self, parts, **options):
        nonlocal mixed
        mixed += len({part.session.generation for part in parts}) == 2
        return forward(self, parts, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners.Runners, "forward", counted)
        return pump.run({}), mixed


def tokens_of_both(mode: Mode, **options) -> None:
    """Runs early and late sessions, and compares each with plain decoding by its own model."""
    eager, compiled, draft = models()
    early, late = requests("early", 0, mode), requests("late", 100, mode)
    compilation = Compiling(compiled.step)
    pump = Pump(eager, draft, compilation=compilation, **options)
    results, mixed = swapped(pump, compilation, early, late)
    assert mixed > 5
    assert pump.target.execution == "compiled"
    expected = plain_reference(eager, early) | plain_reference(compiled, late)
    wrong = plain_reference(compiled, early)
    assert all(wrong[name].token_ids != expected[name].token_ids for name in early), "the models are told apart"
    assert_same(results, expected)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (Mode.OVERLAPPED, {"adaptive": False}),
        (Mode.OVERLAPPED, {"pages": 16}),  # sessions are preempted, and computed again
        *slow([(Mode.OVERLAPPED, {}), (Mode.SEQUENTIAL, {}), (Mode.PLAIN, {"pages": 14})]),
    ],
)
def test_a_session_ends_as_it_began(mode: Mode, options: dict) -> None:
    """Tokens of early sessions are the eager model's to the end, those of late ones the compiled one's from the first
    on, although all share a prefix of more than a page and steps hold sessions of both."""
    tokens_of_both(mode, **options)


@mutant(runners.Runners, "advance")
def _swaps_in_the_middle(advance, self) -> None:
    """The compiled model steps whatever session there is."""
    advance(self)
    self._by_generation = dict.fromkeys(self._by_generation, self.current)


def _shares_pages(patch: pytest.MonkeyPatch) -> None:
    """KV pages of one model are found by sessions of the other."""
    patch.setattr(session, "root_hash", lambda salt, generation: b"")


@pytest.mark.parametrize("mistake", [_swaps_in_the_middle, _shares_pages])
def test_a_swap_in_the_middle_of_a_session_is_caught(mistake, monkeypatch) -> None:
    """Mutants of the comparison above."""
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"^(early|late)\d"):
        tokens_of_both(Mode.OVERLAPPED, adaptive=False)


@pytest.mark.parametrize("every_position", [True, *slow([False])])
def test_heads_are_fed_with_the_states_of_the_model_that_computed_them(every_position: bool) -> None:
    """An oracle that checks every row finds them in the order of its sessions, also in steps of two forwards."""
    features = Features((1,), every_position)
    eager, compiled, _ = models(features)
    early, late = requests("early", 0, Mode.OVERLAPPED), requests("late", 100, Mode.OVERLAPPED)
    expected = plain_reference(eager, early) | plain_reference(compiled, late)
    texts = {name: [*request.prompt, *expected[name].token_ids] for name, request in (early | late).items()}
    known = [(text, signatures(eager if name in early else compiled, text)) for name, text in texts.items()]
    oracle, compilation = Oracle(known, features, paged=every_position), Compiling(compiled.step)
    head = MountedHead("oracle", oracle, num_tokens=3)
    pump = Pump(eager, None, heads=[head], compilation=compilation, adaptive=False)
    bind_heads([head], pump.target.runner.cache)
    results, mixed = swapped(pump, compilation, early, late)
    assert mixed > 2
    assert_same(results, expected)
    assert not oracle.wrong
    assert head.stats.rows_used == head.stats.rows > 100


@pytest.mark.slow
def test_guesses_that_ride_in_a_step_of_two_forwards_stay_with_their_sessions() -> None:
    """Lookahead's rows come behind those of each forward; no text changes, and n-grams are found."""
    eager, compiled, _ = models()
    early, late = requests("early", 0, Mode.OVERLAPPED), requests("late", 100, Mode.OVERLAPPED)
    head, compilation = MountedHead("lookahead", LookaheadHead(4, 3, 4), num_tokens=3), Compiling(compiled.step)
    pump = Pump(eager, None, heads=[head], compilation=compilation, adaptive=False, max_step_tokens=256)
    bind_heads([head], pump.target.runner.cache)
    results, mixed = swapped(pump, compilation, early, late)
    assert mixed > 2
    assert_same(results, plain_reference(eager, early) | plain_reference(compiled, late))


def test_the_eager_model_is_forgotten_with_its_last_session() -> None:
    """It is not held a moment longer than it is needed, and the engine ends its compilation."""
    eager, compiled, _ = models()
    compilation = Compiling(compiled.step)
    pump = Pump(eager, None, compilation=compilation)
    first = pump.target.runner
    swapped(pump, compilation, requests("early", 0, Mode.PLAIN), requests("late", 100, Mode.PLAIN))
    assert pump.target.runner is not first
    assert pump.target.runners._by_generation == {1: pump.target.runner}
    assert pump.target.runner.cache is first.cache
    pump.target.close()
    assert compilation.closed


def test_a_session_that_is_opened_again_goes_on_as_it_began() -> None:
    """With the tokens that it has, under a new epoch, when messages were lost."""
    eager, compiled, _ = models()
    compilation, sent = Compiling(compiled.step), []
    engine = TargetEngine(
        eager.runner(16),
        sent.extend,
        max_sessions=2,
        max_step_tokens=64,
        max_model_len=512,
        compilation=compilation,
        origin=Origin(b"facts", []),
    )
    numerics = engine.numerics
    request = requests("early", 0, Mode.PLAIN)["early0"]
    whole = plain_reference(eager, {"early0": request})["early0"].token_ids

    def opening(epoch: int, num_tokens: int) -> OpenSession:
        tokens = (*request.prompt, *whole[:num_tokens])
        return OpenSession("early0", epoch, tokens, len(request.prompt), 0, request.sampling, request.speculation)

    engine.receive([opening(0, 0)])
    while not sent:
        engine.step()
    compilation.execution = "compiled"
    assert engine.numerics != numerics, "routers tell them apart"
    engine.receive([opening(1, 5)])
    sent.clear()
    while engine.num_sessions:
        engine.step()
    assert tuple(token for outcome in sent for token in outcome.token_ids) == whole[5:]
