"""Lookahead: what rides beside a step is what the target would say there, and changes no text and no bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support.models import prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, plain_reference, requests_for
from tests.support.rings import slow

from paceline.core.processors import SamplerState
from paceline.core.tree import Proposal
from paceline.drafters.lookahead import LookaheadHead
from paceline.drafters.protocol import Leaf
from paceline.model.loading import LoadedModel, prepare
from paceline.target import scheduler as target_scheduler
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.runners import Runners
from paceline.types import PAGE_SIZE, Mode, Result, SamplingParams

WINDOW, NGRAM, GUESSES = 4, 4, 3
PREFIX = prompt(999, PAGE_SIZE)


@functools.cache
def target(family: str) -> LoadedModel:
    return prepare(random_model(family), compile=False)


def requests_of(temperature: float, num_tokens: int = 40, **speculation: Any) -> dict[str, Request]:
    prompts = [prompt(n, n) for n in (1, 50, 63, 64, 120)] + [[*PREFIX, *prompt(i, i)] for i in (1, 40)]
    return requests_for(prompts, temperature=temperature, max_tokens=num_tokens, max_draft_tokens=4, **speculation)


@functools.cache
def plain(family: str, temperature: float) -> dict[str, Result]:
    return plain_reference(target(family), requests_of(temperature))


class Watched(LookaheadHead):
    """Remembers what rode behind which context, and what was learned of it."""

    engine: TargetEngine

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes, max_leaves=5)
        self.rode: list[tuple[list[int], Proposal, Sequence[int]]] = []
        self._riding: dict[str, tuple[list[int], Proposal]] = {}

    def guesses(self, session_id: str) -> Proposal:
        found = super().guesses(session_id)
        self._riding[session_id] = [*self.engine.sessions[session_id].tokens], found
        return found

    def learn(self, session_id: str, token_ids: Sequence[int]) -> None:
        super().learn(session_id, token_ids)
        if token_ids:
            self.rode.append((*self._riding.pop(session_id), token_ids))

    def wrong(self, family: str) -> float:
        """Share of the learned tokens that transformers would not have said."""
        model, wrong, compared = random_model(family), 0, 0
        for context, tree, learned in self.rode[:: max(1, len(self.rode) // 30)]:
            leaves = [i for i in range(len(tree)) if i + 1 == len(tree) or tree.parent(i + 1) != i]
            assert len(leaves) == len(learned) == WINDOW
            for leaf, token_id in zip(leaves, learned, strict=True):
                path = [tree.token_ids[i] for i in tree.path(leaf)]
                with torch.no_grad():
                    logits = model(torch.tensor([[*context, *path]]), use_cache=False).logits[0, -1]
                wrong += int(logits.argmax()) != token_id
                compared += 1
        assert compared > 40
        return wrong / compared


def pump_of(family: str, *, sizes: tuple[int, ...] = (WINDOW, NGRAM, GUESSES), **options: Any) -> tuple[Pump, Watched]:
    head = Watched(*sizes)
    mounted = MountedHead("lookahead", head, num_tokens=4)
    options = {"pages": 40, "late": 0.0, "adaptive": False, "max_step_tokens": 120} | options
    pump = Pump(target(family), None, heads=[mounted], **options)
    head.engine = pump.target
    return pump, head


def mounted_of(pump: Pump) -> MountedHead:
    (mounted,) = pump.target.heads.mounted
    assert not mounted.failure
    return mounted


FAMILIES = ["llama", *slow(["gemma3", "qwen3", "gpt2"])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_changes_and_what_rides_is_the_targets(family: str, temperature: float) -> None:
    """Contexts that end anywhere on a page, prefill chunks and shared prefixes beside it, sliding windows."""
    pump, head = pump_of(family)
    assert_same(pump.run(requests_of(temperature)), plain(family, temperature))
    mounted, stats = mounted_of(pump), pump.target.stats
    assert stats.guesses == mounted.stats.guesses
    assert 0 <= stats.guesses - len(head.rode) * head.num_guesses <= len(plain(family, 0.0)) * head.num_guesses
    assert stats.guesses > 100 * head.num_guesses
    assert head.wrong(family) == 0
    assert mounted.stats.rows > 20
    if temperature == 0:
        assert mounted.stats.rows_used > 20


def test_the_bits_of_committed_rows_are_those_without_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of every step, computed once more without what rides."""
    forward, compared = Runners.forward, []

    def twice(self: Runners, parts: Any, **wanted: Any) -> Any:
        alone = self.current.forward([step for part in parts for step in part.sequence_steps()])
        found = forward(self, parts, **wanted)
        assert torch.equal(alone, found.logits)
        compared.append(found.guessed is not None)
        return found

    monkeypatch.setattr(Runners, "forward", twice)
    pump, _ = pump_of("llama")
    assert_same(pump.run(requests_of(0.0)), plain("llama", 0.0))
    assert sum(compared) > 30


def test_where_pages_or_tokens_are_short_nothing_rides() -> None:
    """Preemption goes on as ever; a step has no more tokens than it may."""
    pump, head = pump_of("llama", pages=9, max_step_tokens=33)
    sizes: list[int] = []
    forward = pump.target.runner.forward
    pump.target.runner.forward = lambda steps: (  # type: ignore[method-assign]
        sizes.append(sum(len(s.token_ids) for s in steps)) or forward(steps)
    )
    assert_same(pump.run(requests_of(0.0)), plain("llama", 0.0))
    assert pump.target.stats.preemptions > 0
    assert max(sizes) <= 33
    assert 0 < len(head.rode) < pump.target.stats.rounds / 2


def test_plain_sessions_have_none() -> None:
    pump, head = pump_of("llama")
    assert_same(pump.run(requests_of(0.0, mode=Mode.PLAIN)), plain("llama", 0.0))
    assert not head.rode
    assert pump.target.stats.guesses == 0


# -- never slower -----------------------------------------------------------------------------------------------------


def paced(step_s: Callable[[int], float]) -> Pump:
    pump, _ = pump_of("llama", adaptive=True, step_s=step_s)
    pump.target.calibrate()
    pump.clock.now = 0.0
    pump.run(requests_for([prompt(i, 30) for i in range(2)], temperature=1.0, max_tokens=300))
    return pump


def test_where_rows_cost_it_is_paused_and_where_they_are_free_it_is_not() -> None:
    """By the virtual clock, on text that does not repeat: rows as dear as steps, then rows for nothing."""
    dear = paced(lambda num_tokens: 0.01 * num_tokens)
    mounted = mounted_of(dear)
    assert mounted.gate.num_pauses > 0
    assert dear.target.stats.guesses < 0.1 * dear.target.stats.rounds * mounted.rider.num_guesses  # type: ignore[union-attr]
    free = paced(lambda num_tokens: 0.01)
    assert mounted_of(free).gate.num_pauses == 0
    assert free.target.stats.guesses > 0.8 * free.target.stats.rounds * mounted.rider.num_guesses  # type: ignore[union-attr]


# -- mutants ----------------------------------------------------------------------------------------------------------


@mutant(target_scheduler, "riding_steps")
def _copies_the_wrong_way(make, *args: Any) -> Any:
    """The guesses' empty page is copied over the session's."""
    steps = make(*args)
    for step in steps:
        step.copies = tuple((to, source) for source, to in step.copies)
    return steps


@mutant(target_scheduler, "riding_tables")
def _on_the_sessions_pages(make: Any, pages: Sequence[int], *args: Any) -> Any:
    """Guesses are written where the proposal lies."""
    return [[*pages, *table[len(pages) :]] for table in make(pages, *args)]


@pytest.mark.parametrize("mutate", [_copies_the_wrong_way, _on_the_sessions_pages])
def test_text_changes_if_guesses_reach_committed_rows(mutate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    pump, _ = pump_of("llama")
    with pytest.raises(AssertionError):
        assert_same(pump.run(requests_of(0.0)), plain("llama", 0.0))


@mutant(target_scheduler, "riding_steps")
def _without_the_anchor(make: Any, own: Any, *args: Any) -> Any:
    """The token that the step itself computes is not on the guesses' pages."""
    before = own.also
    steps = make(own, *args)
    own.also = before
    return steps


@mutant(target_scheduler, "riding_steps")
def _no_copies(make, *args: Any) -> Any:
    steps = make(*args)
    for step in steps:
        step.copies = ()
    return steps


def _columns_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Watched.learn
    monkeypatch.setattr(Watched, "learn", lambda self, name, tokens: learn(self, name, tokens[::-1]))


@pytest.mark.parametrize("mutate", [_without_the_anchor, _no_copies, _columns_in_reverse])
def test_wrong_guesses_are_noticed(mutate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is plain's all the same."""
    mutate(monkeypatch)
    pump, head = pump_of("llama")
    assert_same(pump.run(requests_of(0.0)), plain("llama", 0.0))
    assert head.wrong("llama") > 0.1


# -- window and pool --------------------------------------------------------------------------------------------------


def opened(window: int, ngram: int, guesses: int, *prompt: int) -> LookaheadHead:
    head, text = LookaheadHead(window, ngram, guesses), prompt or (5, 6, 7)
    head.open("s", text, SamplerState(SamplingParams(), 1, text, vocab_size=100))
    return head


def candidates(head: LookaheadHead, *path: int) -> list[int]:
    found = head.expand([Leaf("s", len(path), tuple(range(1, len(path) + 1)), path)])
    return [t for t, q in zip(found.token_ids[0].tolist(), found.log_q[0].tolist(), strict=True) if q > -1e9]


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("ngram", [3, 5])
def test_the_window_moves_up_and_its_columns_become_ngrams(window: int, ngram: int) -> None:
    """A target that always says the next number: after N - 2 steps every column is a run of numbers."""
    head = opened(window, ngram, 3, 7, 8, 9)  # of which the text goes on as a run, too
    for step in range(ngram + 2):
        tree = head.guesses("s")
        assert len(tree) == head.num_guesses == window * (ngram - 1) - 1
        leaves = [i for i in range(len(tree)) if i + 1 == len(tree) or tree.parent(i + 1) != i]
        assert len(leaves) == window
        for column, leaf in zip(reversed(range(window)), leaves, strict=True):
            assert len(tree.path(leaf)) == column + ngram - 2
        said = [(tree.token_ids[leaf] + 1) % 100 for leaf in leaves]
        head.learn("s", said)
        head.advance("s", [10 + step], [1], [])
        head.check_integrity()
    for key, tails in head.sessions["s"].pool.items():
        for tail in tails:
            run = [*tail] if window == 1 or key >= 10 else [key, *tail]
            assert all(b == (a + 1) % 100 for a, b in pairwise(run[1:])), (key, tail)


def test_the_pool_has_the_ngrams_of_prompt_and_answer() -> None:
    """As prompt lookup: what followed a token before is proposed after it, across the end of the prompt, too."""
    head = opened(2, 4, 2, 1, 2, 3, 4, 5)
    assert [*head.sessions["s"].pool.items()] == [(1, {(2, 3, 4): None}), (2, {(3, 4, 5): None})]
    head.advance("s", [1], [1], [])
    assert candidates(head) == [2]
    assert candidates(head, 2) == [3], "the n-gram goes on, and so does the one that begins with 2"
    head.advance("s", [6, 7, 3], [2, 3, 4], [])
    assert candidates(head) == [4]
    assert (4, 5, 1) in head.sessions["s"].pool[3]
    head.check_integrity()


def test_the_pool_keeps_what_was_seen_last_and_answers_along_a_path() -> None:
    head = opened(2, 4, 2)
    pool = head.sessions["s"].pool
    for tail in ((1, 2, 3), (1, 5, 6), (1, 2, 3), (4, 4, 4)):
        head._keep(pool, 7, tail)
    assert list(pool[7]) == [(1, 2, 3), (4, 4, 4)]
    head._keep(pool, 1, (9, 9, 9))
    assert candidates(head) == [4, 1]
    assert candidates(head, 1) == [2, 9], "the n-gram that began before comes first"
    assert candidates(head, 1, 2) == [3]
    assert candidates(head, 4, 4, 4) == []
    head.guesses("s")
    with pytest.raises(AssertionError, match="``learn`` is called after each step"):
        head.check_integrity()
    head.learn("s", ())
    head.check_integrity()
