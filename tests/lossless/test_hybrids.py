"""Models with linear layers, through both engines: every way of serving gives the tokens of plain decoding."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.hybrids import FAMILIES, hybrid, poison
from tests.support.known import Known, known, known_with_prefix, requests_of, with_prefix
from tests.support.mutants import mutant
from tests.support.pump import Pump, assert_same, in_mode
from tests.support.rings import nightly, slow
from tests.target.test_leaks import Storm

from paceline.drafters.cascade import VerticalDrafter
from paceline.drafters.model import ModelDrafter
from paceline.messages import CloseSession, Commit, OpenSession
from paceline.model.kv_cache import KVCache
from paceline.model.linear import layers as linear_layers
from paceline.model.linear.copies import StateCopies
from paceline.model.linear.operator import LinearInputs
from paceline.model.linear.plan import LinearSlots, LinearStep
from paceline.model.loading import LoadedModel
from paceline.model.step_plan import SequenceStep
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Mode, SpeculationParams, noise_key

FAST = ("qwen3_5_text", torch.bfloat16, 6)
"""A dense family, its dtype, and the sessions of tests in the fast ring."""
SLOW = [
    ("qwen3_next", torch.float32, 6),
    *((family, torch.bfloat16, 6) for family in ("lfm2_moe", "jamba", "nemotron_h", "kimi_linear", "minimax")),
    ("falcon_h1", torch.float32, 6),
]
EACH = [(family, dtype, 12) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]


def sessions_of(family: str, dtype: torch.dtype, num: int, max_tokens: int = 20) -> Known:
    """Sessions of a small hybrid model."""
    return known(hybrid, (family, dtype), num, max_tokens)


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow(SLOW)])
def test_prefix_hits_and_the_loss_of_states_give_identical_tokens(family: str, dtype: torch.dtype, num: int) -> None:
    """A second round of the same prompts hits the first one's pages; without their states it hits none."""
    sessions = known_with_prefix(hybrid, (family, dtype), num // 2)
    pump = sessions.pump(pages=40)
    slots, hits = pump.target.runner.cache.linear, []
    assert slots is not None
    for forget in (False, False, True):
        if forget:  # as if other sessions had needed their slots
            for key in [*slots.state_of]:
                slots.drop_state(key)
        hits.append(sessions.served_again(pump))
    assert hits[1] > max(hits[0], hits[2])
    assert hits[1] >= len(sessions.requests) * 128


def test_steps_without_memory_give_identical_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtrees of steps that fail in any linear layer, and are computed again in parts."""
    rng, failed, run = random.Random(1), [], linear_layers.run

    def short_of_memory(inputs: LinearInputs, *rest: Any) -> torch.Tensor:
        step = LinearStep.decode(inputs.numbers.tolist())
        if sum(chunk.count for part in step.sequences for chunk in part.chunks) > 8 and rng.random() < 0.3:
            failed.append(step)
            raise MemoryError
        return run(inputs, *rest)

    sessions = sessions_of(*FAST)
    any_subtrees(monkeypatch, most=6)  # what one session verifies cannot be divided
    monkeypatch.setattr(linear_layers, "run", short_of_memory)
    sessions.served(Mode.OVERLAPPED, pages=14, seed=2)
    assert len(failed) > 10


def _states_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a preempted session all states are dropped, as if those that run had needed their slots."""
    give_way = TargetSession.give_way

    def changed(session: TargetSession, cache: KVCache) -> None:
        give_way(session, cache)
        assert cache.linear is not None
        for key in [key for key in cache.linear.state_of if not cache.linear.held[key]]:
            cache.linear.drop_state(key)

    monkeypatch.setattr(TargetSession, "give_way", changed)


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow(SLOW), *nightly(EACH)])
def test_preempted_sessions_go_on_from_copies_of_their_states(family, dtype, num, monkeypatch) -> None:
    """Of pages that others hold, or that nobody has taken yet."""
    preempt_sessions(family, dtype, num, monkeypatch)


def preempt_sessions(family: str, dtype: torch.dtype, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serves sessions that share two pages and have too few for themselves."""
    _states_are_taken(monkeypatch)
    sessions = Known.of(hybrid(family, dtype), with_prefix(requests_of(num)))
    pump = sessions.pump(pages=2 + num, max_step_tokens=48)
    assert_same(pump.run(sessions.requests), sessions.reference)
    assert pump.target.stats.preemptions > 0
    copies = pump.target.runner.cache.state_copies
    assert copies is not None
    assert copies.num_restored > 0


def drafter_of(model: LoadedModel, kind: Any = ModelDrafter, **options: Any) -> ModelDrafter:
    """A model as a draft."""
    drafter: ModelDrafter = kind(model.runner(64), max_leaves=8, max_prefill_tokens=64, top_m=64, **options)
    return drafter


def drafting_for_itself(family: str, dtype: torch.dtype, num: int, mode: Mode, **options: Any) -> Pump:
    """A pump whose draft is its target, and has served all requests; asserts that their tokens are the reference's."""
    sessions = sessions_of(family, dtype, num)
    options.setdefault("drafter", drafter_of(sessions.target))
    pump = Pump(sessions.target, None, pages=40, max_step_tokens=48, draft_steps=(1, 8), **options)
    for runner in (pump.target.runner, pump.drafter.runner):
        poison(runner)
    assert_same(pump.run(in_mode(sessions.requests, mode)), sessions.reference)
    assert pump.drafter.cache.num_used == 0
    return pump


@pytest.mark.parametrize(
    ("family", "dtype", "num", "mode"),
    [
        (*FAST, Mode.OVERLAPPED),
        *slow([(*FAST, Mode.SEQUENTIAL), *((*case, Mode.OVERLAPPED) for case in SLOW[:3])]),
        *nightly((*case, Mode.OVERLAPPED) for case in EACH),
    ],
)
def test_a_draft_that_is_its_target_is_accepted(family: str, dtype: torch.dtype, num: int, mode: Mode) -> None:
    """Every draft token that was verified, over boundaries, misses by late messages, and greedily or not."""
    found = [result.speculation for result in drafting_for_itself(family, dtype, num, mode).results.values()]
    assert sum(one.drafted for one in found) == sum(one.accepted for one in found) > 10 * num


def test_a_cascade_that_is_its_target_is_accepted() -> None:
    """It drafts several tokens after a leaf, of which rows of guesses are not kept."""
    model = hybrid(*FAST[:2])
    drafter = drafter_of(model, VerticalDrafter, guesser=drafter_of(model), num_guesses=3)
    found = [one.speculation for one in drafting_for_itself(*FAST, Mode.OVERLAPPED, drafter=drafter).results.values()]
    assert sum(one.drafted for one in found) == sum(one.accepted for one in found) > 60


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow(SLOW[:3]), *nightly(EACH)])
def test_drafts_that_lose_their_sessions_give_identical_tokens(family, dtype, num, monkeypatch) -> None:
    """Commits get lost, so sessions are opened again from their tokens; subtrees of any kind are verified."""
    draw = random.Random(5)

    def tamper(message: Any) -> list[Any]:
        return [] if isinstance(message, Commit) and draw.random() < 0.15 else [message]

    any_subtrees(monkeypatch)
    pump = drafting_for_itself(family, dtype, num, Mode.OVERLAPPED, tamper_draft=tamper)
    assert pump.draft.stats.lost_commits > 3
    assert pump.target.stats.branches > 10


class ModelStorm(Storm):
    """A storm over a model, of sessions whose texts are known. Tokens and logits are those of plain decoding."""

    def __init__(self, seed: int, family: str, dtype: torch.dtype) -> None:
        known_ones, self.rows, self.compared = sessions_of(family, dtype, 12, _LONGEST), logits_of(family, dtype), 0
        self.target, self.requests = known_ones.target, [*known_ones.requests.values()]
        self.reference = [result.token_ids for result in known_ones.reference.values()]
        self.request_of: dict[str, int] = {}
        super().__init__(seed)
        forward = self.runner.forward
        self.runner.forward = lambda steps: self.compare(forward(steps))

    def make_runner(self, kind: Any) -> Any:
        return poison(self.target.runner(10, max_sessions=6))

    def open(self) -> None:
        name, number = f"{self.seed}.{self.opened}", self.rng.randrange(len(self.requests))
        self.opened, request = self.opened + 1, self.requests[number]
        self.request_of[name], self.next_id[name], self.texts[name] = number, 1, [*request.prompt]
        most = self.rng.randint(1, _LONGEST)
        self.engine.receive([self._opening(name, 1, most, self.rng.randint(1, 12))])

    def opening(self, name: str, epoch: int, session: TargetSession) -> OpenSession:
        self.request_of[name] = self.elsewhere.request_of[name]
        return self._opening(name, epoch, session.max_tokens - session.num_prompt_tokens, session.k)

    def _opening(self, name: str, epoch: int, max_tokens: int, k: int) -> OpenSession:
        request = self.requests[self.request_of[name]]
        sampling = request.sampling.model_copy(update={"max_tokens": max_tokens})
        seed = noise_key(sampling.seed or 0, sampling.seed_scope, request.prompt)
        speculation = SpeculationParams(max_draft_tokens=k)
        return OpenSession(name, epoch, tuple(self.texts[name]), len(request.prompt), seed, sampling, speculation)

    def right(self, name: str, last: int, position: int) -> int:
        number = self.request_of[name]
        text, at = self.reference[number], position - len(self.requests[number].prompt)
        return text[at] if at < len(text) else last

    def checked(self, now: float, **options: bool) -> list[Scheduled]:
        self.parts = super().checked(now, **options)
        return self.parts

    def compare(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows behind contexts, and behind draft tokens that are right."""
        first = 0
        for part in self.parts:
            number = self.request_of[part.session.session_id]
            start = part.stop - len(self.requests[number].prompt)
            found = {-1: 0} if part.verifies else {}  # tokens of the text before each right one
            for i, token in enumerate(part.proposal.token_ids):
                depth = found.get(part.proposal.parent(i))
                if depth is not None and self.reference[number][start + depth : start + depth + 1] == (token,):
                    found[i] = depth + 1
            for i, depth in found.items():
                if start + depth < _LONGEST:
                    expected = self.rows[number][start + depth]
                    assert torch.equal(logits[first + i + 1], expected), "logits differ from plain decoding"
                    self.compared += 1
            first += part.num_logits
        return logits


@functools.cache
def logits_of(family: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The logits behind each request's prompt and each of its tokens, computed one token at a time."""
    sessions, found = sessions_of(family, dtype, 12, _LONGEST), []
    runner = sessions.target.runner(4)
    for request, result in zip(sessions.requests.values(), sessions.reference.values(), strict=True):
        text, pages = [*request.prompt, *result.token_ids], runner.cache.allocate(4)
        rows = [
            runner.forward([SequenceStep(text[at : at + 1], range(at, at + 1), range(at, at + 1), pages, 1)])[0]
            for at in range(len(text) - 1)
        ]
        found.append(torch.stack(rows[len(request.prompt) - 1 :]))
        runner.cache.release(pages)
    return found


_LONGEST = 40
SOAKED = [("qwen3_5_text", torch.bfloat16), ("nemotron_h", torch.float32)]


@pytest.mark.parametrize(
    ("family", "dtype", "num_steps", "seed"),
    [
        (*SOAKED[0], 150, 0),
        *slow([(*of, 800, 0) for of in SOAKED]),
        *nightly([(*SOAKED[0], 5000, seed) for seed in range(1, 21)]),
    ],
)
def test_random_steps_leak_no_state_and_have_the_bits_of_plain_decoding(
    family: str, dtype: torch.dtype, num_steps: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines between which sessions migrate, with opens, cancels, preemptions, prefix hits, forks. In every other
    case what preempted sessions leave behind is copies."""
    any_subtrees(monkeypatch, most=12, seed=seed)
    if seed % 2:
        _states_are_taken(monkeypatch)
    storms = [ModelStorm(2 * seed + i, family, dtype) for i in range(2)]
    for storm, other in zip(storms, reversed(storms), strict=True):
        storm.elsewhere = other
    for step in range(num_steps):
        storms[step % 2].step()
        storms[step % 2].engine.check_integrity()
    stats = [storm.engine.stats for storm in storms]
    assert sum(one.cached_tokens for one in stats) / PAGE_SIZE > num_steps / 30
    assert sum(one.branches for one in stats) > num_steps / 10
    assert min(sum(one.preemptions for one in stats), sum(one.branches_used for one in stats)) > num_steps / 100
    assert min(storm.finished + storm.migrations for storm in storms) > num_steps / 30
    assert sum(storm.compared for storm in storms) > 4 * num_steps
    for storm in storms:
        for session in storm.sessions():
            storm.engine.receive([CloseSession(session.session_id, session.epoch)])
        storm.engine.check_integrity()
        assert storm.runner.cache.num_used == 0


def _matches_without_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is hit whether the state at its end is known or not, and goes on with zeros."""
    monkeypatch.setattr(LinearSlots, "hit", lambda self, pages: len(pages))
    monkeypatch.setattr(LinearSlots, "known_base", lambda self, pages, first, start: 0 if start % 64 == 0 else first)


@mutant(LinearSlots, "plan")
def _slots_by_row_of_the_step(plan: Any, self: LinearSlots, steps: Any) -> Any:
    """States belong to places in a step instead of sessions."""
    made = plan(self, steps)
    states = [part.state for part in made.sequences]
    if len(states) > 1 and min(states) >= 0:
        for part, state in zip(made.sequences, [*states[1:], states[0]], strict=True):
            part.state = state
    return made


@mutant(StateCopies, "keep")
def _stale_copies(keep: Any, self: StateCopies, digest: bytes, slot: int) -> None:
    """A copy is what the slot held before."""
    keep(self, digest, (slot + 1) % len(self._pools[0]))


def test_a_stale_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _stale_copies(monkeypatch)
    with pytest.raises(AssertionError):
        preempt_sessions(*FAST, monkeypatch)


MUTANTS = [_matches_without_states, _slots_by_row_of_the_step]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_noticed(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, or by a state that is gone."""
    sessions = sessions_of(*FAST)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        sessions.served(Mode.OVERLAPPED, pages=5)
