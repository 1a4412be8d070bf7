"""Heads in the target: what they are fed with, what they propose, what may fail, and that they change no text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.heads import Oracle, signatures
from tests.support.models import pair, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, plain_reference, requests_for
from tests.support.rings import slow

from paceline.drafters.colocated import DraftModelHead
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare
from paceline.target.control import allocation as target_allocation
from paceline.target.engine import TargetEngine
from paceline.target.heads.driver import Heads
from paceline.target.heads.feeding import Feeding
from paceline.target.heads.mounted import MountedHead
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Mode, Result

EVERY = Features((0, OUT), every_position=True)
LAST = Features((OUT,), every_position=False)
_PREFIX = prompt(999, 2 * PAGE_SIZE)


@functools.cache
def target_with(features: Features | None) -> LoadedModel:
    return prepare(random_model("llama"), compile=False, features=features)


def requests_of(temperature: float = 1.0, max_tokens: int = 24) -> dict[str, Request]:
    """Prompts of 2 to 200 tokens; some share two pages, and some end at a page's end."""
    lengths = (2, 5, 63, 64, 65, 100, 127, 128, 129, 200)
    prompts = [prompt(n, n) for n in lengths] + [[*_PREFIX, *prompt(i, i)] for i in (1, 2, 40, 64)]
    return requests_for(prompts, temperature=temperature, max_tokens=max_tokens, max_draft_tokens=[4, 1, 7])


@functools.cache
def known(temperature: float, max_tokens: int = 24) -> tuple[dict[str, Request], dict[str, Result], list]:
    """Requests, their plain results, and the whole texts with their states' signatures, by features."""
    requests = requests_of(temperature, max_tokens)
    results = plain_reference(target_with(EVERY), requests)
    return requests, results, [[*r.prompt, *results[n].token_ids] for n, r in requests.items()]


def oracle(features: Features | None, texts: list[list[int]], **options) -> tuple[MountedHead, Oracle]:
    signed = [(t, signatures(target_with(features), t) if features else torch.zeros(0)) for t in texts]
    if features is not None and not features.every_position:
        signed = [(t, signatures(target_with(replace(features, every_position=True)), t)) for t in texts]
    head = Oracle(signed, features, paged=features is not None and features.every_position, **options)
    return MountedHead("oracle", head, num_tokens=5), head


def pump_with(features: Features | None, mounted: MountedHead, **options) -> Pump:
    options = {"pages": 12, "max_step_tokens": 48, "late": 0.0, "adaptive": False} | options
    pump = Pump(target_with(features), None, heads=[mounted], **options)
    cache = pump.target.runner.cache
    mounted.head.bind(cache, cache.add_layers(mounted.head.layers))
    return pump


# -- the oracle: acceptance 1, or something is off --------------------------------------------------------------------


@pytest.mark.parametrize("budget", [48, 33, *slow([64, 256])])
@pytest.mark.parametrize("features", [EVERY, LAST], ids=["every", "last"])
def test_everything_that_a_head_is_fed_with_is_right(features: Features, budget: int) -> None:
    """Chunks that end anywhere, shared prefixes, preemption, full pages: each row is what it must be, each token of
    the head is accepted, and no round after the first is without its proposal."""
    requests, reference, texts = known(1.0)
    mounted, head = oracle(features, texts)
    pump = pump_with(features, mounted, max_step_tokens=budget, pages=9)
    assert_same(pump.run(requests), reference)
    assert head.wrong == []
    assert head.rows_missed == 0
    stats = mounted.stats
    assert stats.rows == stats.rows_used > 100, "acceptance is 1"
    assert stats.sessions_failed == 0
    assert not mounted.failure
    for name, result in pump.results.items():
        k = min(5, requests[name].speculation.max_draft_tokens)
        counted = result.speculation
        assert counted.head_accepted == counted.accepted == counted.drafted
        assert counted.rounds == 1 + -(-(len(result.token_ids) - 1) // (k + 1)), name
    if budget == 48:
        assert pump.target.stats.preemptions > 0
        assert pump.target.stats.cached_tokens > 0
    assert pump.target.stats.head_rows_used == stats.rows_used
    assert not mounted.sessions
    assert not head.sessions


@mutant(Feeding, "fed_of")
def _shifted_token(fed, self, mounted, computed, states):
    """The token at P instead of the one at P + 1."""
    item = fed(self, mounted, computed, states)
    tokens = computed.session.tokens[item.position : item.position + len(item.token_ids)]
    return replace(item, token_ids=tuple(tokens))


@mutant(Feeding, "fed_of")
def _own_guess_at_chunks(fed, self, mounted, computed, states):
    """The last row of a chunk gets another token than the prompt's next one."""
    item = fed(self, mounted, computed, states)
    if item is None or computed.logits_row >= 0:
        return item
    return replace(item, token_ids=(*item.token_ids[:-1], 11))


@mutant(Feeding, "fed_of")
def _state_of_another_row(fed, self, mounted, computed, states):
    """Draft tokens that were rejected before it are not left out: the wrong row of a verification."""
    return fed(self, mounted, replace(computed, row=max(0, computed.row - 1)), states)


@mutant(Feeding, "fed_of")
def _first_logits_row(fed, self, mounted, computed, states):
    """The state of the first verified row instead of the last accepted one."""
    return fed(self, mounted, replace(computed, num_accepted=0), states)


def _no_page_states(each) -> None:
    """The state that a shared prefix lacks is not kept."""
    each.setattr(Feeding, "keep_page_states", lambda self, computed, states: None)


@mutant(Feeding, "keep_page_states")
def _page_states_of_the_next_row(keep, self, computed, states):
    keep(self, [replace(c, row=c.row - 1) for c in computed], states)


@mutant(TargetSession, "attach_prefix")
def _preemption_unnoticed(attach, self, cache):
    before = self.attachment
    attach(self, cache)
    self.attachment = max(1, before)


def _no_row_ahead(each) -> None:
    """No page is held for the row behind the last one."""
    each.setattr(Heads, "reserves", 0)


@pytest.mark.parametrize(
    ("features", "mutate"),
    [
        (EVERY, _shifted_token),
        (EVERY, _own_guess_at_chunks),
        (EVERY, _state_of_another_row),
        (LAST, _first_logits_row),
        (EVERY, _no_page_states),
        (EVERY, _page_states_of_the_next_row),
        (EVERY, _preemption_unnoticed),
        (EVERY, _no_row_ahead),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_oracle_notices_what_is_off_by_one(
    features: Features, mutate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails with each of these; the text is plain's all the same."""
    requests, reference, _ = known(1.0)
    mutate(monkeypatch)
    pump = None
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        pump = test_everything_that_a_head_is_fed_with_is_right(features, 48)
    assert pump is None
    mounted, _ = oracle(features, known(1.0)[2])
    assert_same(pump_with(features, mounted, pages=9).run(requests), reference)


@pytest.mark.parametrize("tokens_per_leaf", [3, 5, 7])
def test_a_head_may_predict_several_tokens_at_once(tokens_per_leaf: int) -> None:
    requests, reference, texts = known(0.7)
    mounted, head = oracle(EVERY, texts, tokens_per_leaf=tokens_per_leaf)
    assert_same(pump_with(EVERY, mounted).run(requests), reference)
    assert mounted.stats.rows == mounted.stats.rows_used > 100
    assert head.wrong == []


def test_two_heads_read_different_states() -> None:
    """Each is fed with its own boundaries of the union; a session is served by the first that is ready."""
    requests, reference, texts = known(1.0)
    union = Features((OUT, 0, 1), every_position=True)
    first, _ = oracle(Features((1, OUT), every_position=True), texts)
    second, other = oracle(LAST, texts)
    first.head.refuses = frozenset({"s3", "s4"})
    pump = Pump(target_with(union), None, heads=[first, second], late=0.0, adaptive=False, pages=12)
    cache = pump.target.runner.cache
    first.head.bind(cache, cache.add_layers(first.head.layers))
    assert_same(pump.run(requests), reference)
    assert first.stats.rows == first.stats.rows_used > 100
    assert second.stats.rows == second.stats.rows_used > 10
    assert first.stats.sessions_failed == 2
    assert other.wrong == first.head.wrong == []


def test_a_head_that_raises_is_switched_off_and_named() -> None:
    requests, reference, texts = known(1.0)
    mounted, head = oracle(EVERY, texts, breaks_at=12)
    pump = pump_with(EVERY, mounted)
    assert_same(pump.run(requests), reference)
    assert mounted.failure == "RuntimeError: the head is broken"
    assert not mounted.sessions
    assert not head.sessions
    assert mounted.stats.rows > 0


# -- the draft model in the target's process ---------------------------------------------------------------------------


def colocated(pages: int = 40, k: int = 4, max_len: int | None = None) -> MountedHead:
    runner = pair("llama")[1].runner(pages)
    head = DraftModelHead(runner, max_leaves=5, max_prefill_tokens=64, top_m=64)
    return MountedHead("draft_model", head, num_tokens=k, max_len=max_len)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_draft_model_in_the_target_changes_no_text(temperature: float, adaptive: bool) -> None:
    requests, reference, _ = known(temperature)
    mounted = colocated()
    pump = Pump(pair("llama")[0], None, heads=[mounted], pages=9, max_step_tokens=48, adaptive=adaptive, seed=3)
    assert_same(pump.run(requests), reference)
    assert mounted.stats.rows_used > 50
    assert sum(r.speculation.head_accepted for r in pump.results.values()) == mounted.stats.rows_used
    assert pump.target.stats.preemptions > 0
    assert mounted.head.runner.cache.num_used == 0, "every row of the draft model is free again"


@pytest.mark.parametrize("mode", [Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.PLAIN])
def test_a_head_beside_a_draft(mode: Mode) -> None:
    """The backup of an overlapped draft on a miss; none in sequential mode, which stays comparable, nor in plain."""
    requests, reference, _ = known(1.0)
    requests = {n: replace(r, speculation=r.speculation.model_copy(update={"mode": mode})) for n, r in requests.items()}
    mounted = colocated()
    target, draft = pair("llama")
    pump = Pump(target, draft, heads=[mounted], pages=12, draft_pages=60, draft_steps=(0, 2), seed=1)
    assert_same(pump.run(requests), reference)
    used = sum(r.speculation.accepted - r.speculation.head_accepted for r in pump.results.values())
    assert (mounted.stats.rows_used > 20) == (mode is Mode.OVERLAPPED)
    assert (used > 10) == (mode is not Mode.PLAIN)
    assert mounted.stats.rows == pump.target.stats.head_rows


@pytest.mark.parametrize("features", [EVERY, LAST], ids=["every", "last"])
def test_a_head_is_fed_with_the_accepted_path_of_a_subtree(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pages of the branch that was accepted, what lies behind it included."""
    requests, reference, texts = known(1.0)
    any_subtrees(monkeypatch)
    for broken in (False, True):
        mounted, head = oracle(features, texts)
        if broken:
            monkeypatch.setattr(TargetEngine, "accepted_first", lambda self, step, states: states)
        pump = Pump(
            target_with(features),
            pair("llama")[1],
            heads=[mounted],
            pages=20,
            draft_pages=60,
            draft_steps=(2, 5),
            seed=1,
        )
        head.bind(pump.target.runner.cache, pump.target.runner.cache.add_layers(head.layers))
        assert_same(pump.run(requests), reference)
        assert pump.target.stats.branches_used > 0
        assert mounted.stats.rows > 10
        assert bool(head.wrong) == broken


def test_a_session_that_outgrows_a_head_goes_on_without_it() -> None:
    requests, reference, _ = known(1.0)
    mounted = colocated(max_len=110)
    pump = Pump(target_with(EVERY), None, heads=[mounted], late=0.0)
    assert_same(pump.run(requests), reference)
    assert mounted.stats.rows > 0
    assert mounted.head.runner.cache.num_used == 0


def test_a_session_is_continued_from_tokens() -> None:
    """On another target: the head is opened with prompt and output."""
    requests, reference, texts = known(1.0)
    resumed = {n: replace(r, generated=reference[n].token_ids[:9]) for n, r in requests.items()}
    mounted, head = oracle(EVERY, texts)
    pump = pump_with(EVERY, mounted)
    results = pump.run(resumed)
    assert {n: r.token_ids for n, r in results.items()} == {n: r.token_ids[9:] for n, r in reference.items()}
    assert mounted.stats.rows == mounted.stats.rows_used > 50
    assert head.wrong == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_path_that_was_verified_in_part_is_continued(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one token of a longer path was verified, and the next token is the path's too: its nodes are expanded
    already, and are not expanded again."""
    requests, reference, _ = known(temperature)
    monkeypatch.setattr(
        target_allocation.Allocation,
        "allocate_draft_tokens",
        lambda self, offers, **_: [min(1, len(o)) for o in offers],
    )
    mounted = colocated()
    assert_same(Pump(pair("llama")[0], None, heads=[mounted], late=0.0).run(requests), reference)
    assert not mounted.failure
    assert mounted.stats.rows == mounted.stats.rounds > 100
    assert mounted.stats.rows_used > 50


def test_tokens_beside_the_best_path_are_verified_where_rows_are_free() -> None:
    """The head's other candidates become branches; what is accepted of them is the head's, too."""
    requests, reference, _ = known(1.0)
    mounted = colocated()
    pump = Pump(pair("llama")[0], None, heads=[mounted], pages=40, late=0.0, step_s=lambda num_tokens: 0.01)
    assert_same(pump.run(requests), reference)
    stats = pump.target.stats
    assert not mounted.failure
    assert stats.branches > 20
    assert stats.branches_used > 0
    assert stats.draft_rows == stats.nodes_used == 0
    assert mounted.stats.rows == stats.head_rows > stats.head_rows_used == mounted.stats.rows_used
    assert sum(r.speculation.head_accepted for r in pump.results.values()) == stats.head_rows_used
