"""Plain decoding, chains and subtrees give one text; a branch that is taken wrongly gives another."""

import itertools
import random
from typing import Any

import pytest
from tests.lossless.test_engines import mixed_batch, mixed_reference
from tests.lossless.test_reference import CASES, loaded, plain_tokens, request_of
from tests.support.models import noisy_copy, pair, prompt, random_model
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow

from paceline.core.tree import Proposal
from paceline.drafters.colocated import DraftModelHead
from paceline.model.loading import prepare
from paceline.model.step_plan import SequenceStep
from paceline.target import engine as target_engine
from paceline.target import scheduler as target_scheduler
from paceline.target.control.allocation import Allocation
from paceline.target.heads.mounted import MountedHead
from paceline.types import Mode, Result, SamplingParams, SpeculationParams


def any_subtrees(monkeypatch: pytest.MonkeyPatch, most: int = 14, seed: int = 0) -> None:
    """Every step verifies random numbers of each session's likeliest nodes, siblings and all."""
    rng = random.Random(seed)
    monkeypatch.setattr(Allocation, "offers_trees", lambda self: True)
    monkeypatch.setattr(
        Allocation,
        "allocate_draft_tokens",
        lambda self, offers, **options: [rng.randint(0, min(most, len(offer))) for offer in offers],
    )


@pytest.mark.parametrize("family", ["llama", *slow(["gemma3"])])
@pytest.mark.parametrize("temperature", [1.0, *slow([0.0, 0.7])])
def test_any_subtrees_give_identical_tokens(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among preemptions, shared prefixes, chunked prefill and late nodes, with every processor."""
    target, draft = pair(family)
    requests, reference = mixed_batch(temperature), mixed_reference(family, temperature)
    any_subtrees(monkeypatch)
    pump = Pump(target, draft, seed=4, pages=12, draft_pages=40, max_step_tokens=64)
    assert_same(pump.run(requests), reference)
    stats = pump.target.stats
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.branches > 10
    assert temperature == 0 or stats.branches_used > 0
    assert pump.target.runner.cache.num_used == 0


def head_of(seed: int = 5) -> MountedHead:
    """A draft model in the target that is another one than the draft, and about as good."""
    model = prepare(noisy_copy(random_model("llama"), 0.05, seed), compile=False)
    return MountedHead(
        "head", DraftModelHead(model.runner(96), max_leaves=8, max_prefill_tokens=64, top_m=64), num_tokens=5
    )


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0, 0.7])])
def test_a_draft_and_a_head_give_identical_tokens(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any nodes of either tree, and with ``adaptive`` off the whole chain of either; each with its maker."""
    target, draft = pair("llama")
    requests, reference = mixed_batch(temperature), mixed_reference("llama", temperature)
    any_subtrees(monkeypatch)
    for adaptive in (True, False):
        mounted = head_of()
        options = {"pages": 14, "draft_pages": 40, "max_step_tokens": 96, "draft_steps": (1, 8)}
        pump = Pump(target, draft, seed=4, heads=[mounted], adaptive=adaptive, **options)
        results = pump.run(requests)
        assert_same(results, reference)
        stats = pump.target.stats
        counted = [result.speculation for result in results.values()]
        assert min(stats.nodes_used, stats.head_rows_used) > 20
        assert (stats.branches > 20) == adaptive
        assert stats.cached_tokens > 0
        assert mounted.stats.rows_used >= stats.head_rows_used == sum(each.head_accepted for each in counted)
        assert stats.nodes_used == sum(each.accepted - each.head_accepted - each.lookup_accepted for each in counted)
        assert mounted.head.runner.cache.num_used == 0


def test_subtrees_of_measured_steps_give_identical_tokens() -> None:
    """The budget itself, where rows are free and branches too; and none with trees off."""
    target, draft = pair("llama")
    requests, reference = mixed_batch(1.0), mixed_reference("llama", 1.0)
    for trees in (True, False):
        pump = Pump(target, draft, seed=6, step_s=lambda n: 0.004 * max(64, n), draft_steps=(4, 8))
        pump.target.allocation.trees = trees
        assert_same(pump.run(requests), reference)
        assert (pump.target.stats.branches > 20) == trees


@pytest.mark.parametrize("trees", [False, True])
def test_the_engines_give_the_tokens_of_the_reference(trees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if trees:
        any_subtrees(monkeypatch)
    requests = {f"T={t} {options}": request_of(t, options, 8) for t, options in CASES}
    pump = Pump(loaded("target"), loaded("good"), seed=3, max_sessions=32, pages=96, draft_pages=96)
    results = pump.run(requests)
    assert [results[name].token_ids for name in requests] == [plain_tokens()[case] for case in CASES]
    assert (pump.target.stats.branches > 10) == trees


@pytest.mark.parametrize(("temperature", "num"), [*slow([(0.7, 60)]), *nightly([(0.0, 200), (0.7, 200), (1.0, 200)])])
def test_many_prompts_have_one_text(temperature: float, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair("llama")
    requests = {
        f"s{i}": Request(
            prompt(i, 1 + i % 90),
            SamplingParams(temperature=temperature, max_tokens=24, seed=i),
            SpeculationParams(max_draft_tokens=8),
        )
        for i in range(num)
    }
    reference = plain_reference(target, requests)
    assert_same(Pump(target, draft, seed=1, adaptive=False).run(requests), reference)
    any_subtrees(monkeypatch)
    assert_same(Pump(target, draft, seed=2).run(requests), reference)


def _keeps_the_first_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever path was accepted, the session goes on with the pages of the first branch."""
    monkeypatch.setattr(target_engine, "accepted_table", lambda proposal, path, tables: tables[0])


@mutant(target_scheduler, "sequence_steps")
def _forgets_what_is_shared(make, *args: Any) -> list[SequenceStep]:
    """Tokens that branches share are written to one of them only."""
    steps = make(*args)
    for step in steps:
        step.also = ()
    return steps


def _takes_siblings_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a branch see the draft tokens of the one before it, as far as penalties and positions go."""
    monkeypatch.setattr(Proposal, "suffixes", lambda self: [self.token_ids[:i] for i in range(len(self.token_ids) + 1)])


def first_of_mixed_batch(num: int) -> tuple[dict[str, Request], dict[str, Result]]:
    """``num`` of the requests, and their plain results."""
    requests = dict(itertools.islice(mixed_batch(1.0).items(), num))
    return requests, {name: mixed_reference("llama", 1.0)[name] for name in requests}


MUTANTS = [_keeps_the_first_branch, _forgets_what_is_shared, _takes_siblings_for_a_chain]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_mutants_are_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair("llama")
    requests, reference = first_of_mixed_batch(8)
    any_subtrees(monkeypatch)
    mutant(monkeypatch)
    pump = Pump(target, draft, seed=4, pages=24, draft_pages=40, draft_steps=(2, 8))
    results = pump.run(requests)
    assert pump.target.stats.branches > 20
    assert any(results[name].token_ids != r.token_ids for name, r in reference.items())


def test_modes_give_identical_tokens_with_subtrees(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair("llama")
    requests, reference = first_of_mixed_batch(6)
    any_subtrees(monkeypatch)
    for mode in Mode:
        assert_same(Pump(target, draft, seed=5, pages=24).run(in_mode(requests, mode)), reference)
