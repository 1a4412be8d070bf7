"""Chains: a draft model's best path by one call is that of one call for each token, and nothing of it is lost."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from tests.support.chains import StepByStep, rank_row
from tests.support.models import LOSSLESS_FAMILIES, VOCAB, noisy_copy, prompt, random_model
from tests.support.pump import Pump, Request, requests_for
from tests.support.rings import nightly, slow

from paceline.core.processors import Row, SamplerState
from paceline.drafters.calibration import Calibration, ranked
from paceline.drafters.colocated import DraftModelHead
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Leaf
from paceline.drafters.ranking import RankingRow, Rule, rank
from paceline.model.chain import Draw, Ranked, Stop
from paceline.model.compiled.package import CompiledPackage
from paceline.model.loading import LoadedModel, prepare
from paceline.target.control.head_gate import HeadGate
from paceline.target.heads.mounted import MountedHead
from paceline.types import PAGE_SIZE, Mode, SamplingParams, SpeculationParams

NEVER = Stop((), (1.0,), (0.0,), 1.0, 1.0, 1.0, 0.0)
"""A chain that ends where it must."""
FAN_OUT = 4


def drafter(model: LoadedModel, pages: int = 12) -> ModelDrafter:
    """A drafter whose chains run step by step, unless the model is compiled."""
    runner = model.runner(pages)
    if not isinstance(model.step, CompiledPackage):
        runner.step_function = StepByStep(runner.step_function)
    return ModelDrafter(runner, max_leaves=8, max_prefill_tokens=512, top_m=64)


def begin(it: ModelDrafter, name: str, tokens: list[int], **sampling) -> SamplerState:
    sampler = SamplerState(SamplingParams(**sampling), 5, tokens, vocab_size=VOCAB, num_ranked=FAN_OUT)
    it.open(name, tokens, sampler)
    while it.prefill():
        pass
    return sampler


def one_by_one(it: ModelDrafter, sampler: SamplerState, leaf: Leaf, most: int) -> Ranked:
    """What ``chain`` returns, by ``expand``. Nodes are numbered from 101 on."""
    found: Ranked = []
    rule = Rule.GREEDY if sampler.greedy else Rule.COUPLED
    for depth in range(most):
        (ranking,) = rank(it.expand([leaf]), [RankingRow(Row(sampler, leaf.path), rule, FAN_OUT)])
        found.append((list(ranking.token_ids), list(ranking.gaps)))
        path_ids, path = (*leaf.path_ids, 101 + depth), (*leaf.path, ranking.token_ids[0])
        leaf = Leaf(leaf.session_id, path_ids[-1], path_ids, path)
    return found


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3, "top_k": 9, "min_p": 0.02}]
)
@pytest.mark.parametrize("family", ["llama", *slow(["gemma3"])])
def test_a_chain_is_what_one_call_for_each_token_finds(family: str, sampling: dict) -> None:
    """Over the end of a page, from the anchor and from a leaf, and again after what is committed of it and a miss."""
    model = prepare(random_model(family), compile=False)
    whole, single = drafter(model), drafter(model)
    text = prompt(3, PAGE_SIZE - 3, VOCAB)
    samplers = begin(whole, "a", text, **sampling), begin(single, "a", text, **sampling)
    for most, num_kept in ((5, 4), (2, 0), (6, 2)):
        found = whole.chain(Leaf("a", 0, (), ()), most, FAN_OUT, NEVER)
        expected = one_by_one(single, samplers[1], Leaf("a", 0, (), ()), most)
        assert [ids for ids, _ in found] == [ids for ids, _ in expected]
        for (_, scores), (_, gaps) in zip(found, expected, strict=True):
            torch.testing.assert_close(scores[0] - torch.tensor(scores[1:]), torch.tensor(gaps[1:]), rtol=0, atol=1e-4)
        nodes = list(range(101, 100 + most))
        whole.keep("a", nodes)
        whole.check_integrity()
        tokens = [*(ids[0] for ids, _ in found[:num_kept]), 7]
        for it, sampler in zip((whole, single), samplers, strict=True):
            sampler.append(tokens)
            it.advance("a", tokens, [*nodes[:num_kept], 900], [])
            it.check_integrity()
            assert it.sessions["a"].num_cached == len(it.sessions["a"].tokens) - 1, "only the miss is to be computed"
    deeper = whole.chain(Leaf("a", 0, (), ()), 2, FAN_OUT, NEVER)
    whole.keep("a", [201])
    below = (201,), (deeper[0][0][0],)
    again = whole.chain(Leaf("a", 201, *below), 3, FAN_OUT, NEVER)
    assert again[0][0] == deeper[1][0]
    whole.keep("a", [])
    whole.check_integrity()


def test_rows_that_become_no_nodes_are_free_again() -> None:
    it = drafter(prepare(random_model("llama"), compile=False), pages=1)
    sampler = begin(it, "a", prompt(1, 20, VOCAB), temperature=0.0)
    for turn in range(20):  # four rows each would fill the page twice over
        assert len(it.chain(Leaf("a", 0, (), ()), 4, 2, NEVER)) == 4
        it.keep("a", range(100, 100 + turn % 4))
        it.check_integrity()
        sampler.append([5])
        it.advance("a", [5], [900], [])
        it.check_integrity()


def test_a_chain_without_room_is_none_and_an_error_leaves_the_session_as_it_was(monkeypatch) -> None:
    it = drafter(prepare(random_model("llama"), compile=False), pages=1)
    begin(it, "a", prompt(1, PAGE_SIZE - 2, VOCAB), temperature=0.0)
    leaf = Leaf("a", 0, (), ())
    assert not it.chain(leaf, 8, 2, NEVER)
    it.check_integrity()

    def fail(*_):
        raise RuntimeError("no step")

    with monkeypatch.context() as patch:
        patch.setattr(it.runner.step_function, "run_chain", fail)
        with pytest.raises(RuntimeError, match="no step"):
            it.chain(leaf, 2, 2, NEVER)
    it.check_integrity()
    assert len(it.chain(leaf, 2, 2, NEVER)) == 2
    it.keep("a", [101])
    it.check_integrity()


def test_a_chain_ends_where_the_calibration_says_so() -> None:
    """The probability of the best path is the product of what ``Calibration`` says of its tokens."""
    model = prepare(random_model("llama"), compile=False)
    table, rng = Calibration(FAN_OUT), random.Random(1)
    for _ in range(500):
        table.observe([rng.expovariate(1) for _ in range(FAN_OUT)], rng.choice([None, 0, 0, 1, 2]))
    edges, constants, slopes, mass = table.first()

    def found(least: float) -> Ranked:
        it = drafter(model)
        begin(it, "a", prompt(1, 20, VOCAB), temperature=0.8)
        return it.chain(Leaf("a", 0, (), ()), 6, FAN_OUT, Stop(edges, constants, slopes, mass, 0.9, 0.8, least))

    path, lengths = 0.8, []
    for _, scores in found(0.0):
        path *= min(1.0, 0.9 * table.probabilities(ranked(scores))[0])
        lengths.append(path)
    assert len(lengths) == 6
    for num, least in enumerate(lengths[:-1], 1):
        assert len(found(least * (1 + 1e-9))) == num
        assert len(found(least * (1 - 1e-9))) == num + 1


@pytest.mark.parametrize("sampling", [{"logit_bias": {3: 1.0}}, {"top_p": 0.9}, {"repetition_penalty": 1.2}])
def test_other_processors_are_asked_for_token_by_token(sampling: dict) -> None:
    it = drafter(prepare(random_model("llama"), compile=False))
    begin(it, "a", [1, 2, 3], temperature=0.8, **sampling)
    assert not it.chains("a")


def mounted(draft: LoadedModel, *, chained: bool, k: int = 4) -> MountedHead:
    runner = draft.runner(48)
    if chained:
        runner.step_function = StepByStep(runner.step_function)
    return MountedHead("draft", DraftModelHead(runner, max_leaves=8, max_prefill_tokens=64, top_m=64), num_tokens=k)


def served(target: LoadedModel, head: MountedHead, *, adaptive: bool = False, at_once: bool = False) -> dict:
    """Texts of three requests that follow each other, each alone, or are served together."""
    pump = Pump(target, None, heads=[head], adaptive=adaptive, max_step_tokens=128)
    pump.target.allocation.trees = adaptive
    requests = requests_for([prompt(i, 9, VOCAB) for i in range(3)], temperature=[0.0, 0.8, 1.0], max_tokens=40)
    texts = {}
    for part in [requests] if at_once else [{name: request} for name, request in requests.items()]:
        texts |= {name: result.token_ids for name, result in pump.run(part).items()}
        pump.target.check_integrity()
    return texts


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    model = random_model("llama")
    return prepare(model, compile=False), prepare(noisy_copy(model, 0.02), compile=False)


@pytest.mark.compiler
def test_a_session_alone_is_drafted_for_by_chains_and_its_text_is_the_same(pair) -> None:
    """The same tokens are proposed and accepted as token by token."""
    target, draft = pair
    by_chains, by_tokens = mounted(draft, chained=True), mounted(draft, chained=False)
    texts = served(target, by_chains)
    assert texts == served(target, by_tokens)
    assert texts == served(target, mounted(draft, chained=False, k=1))
    assert by_chains.head.runner.step_function.num_chains > 20
    assert by_chains.stats == replace(by_tokens.stats, seconds=by_chains.stats.seconds)
    assert by_chains.stats.rows_used > 40


def _late_row(chain, depth):
    """A token does not see the one before it."""
    return {"rows": [chain.rows[0], *chain.rows[:-1]]}


def _same_position(chain, depth):
    """Noise and rotary position stay where they were."""
    return {"draw": replace(chain.draw, position=chain.draw.position - 1)}


@pytest.mark.parametrize("wrong", [_late_row, _same_position])
def test_a_chain_that_is_wrong_is_noticed(pair, monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    target, draft = pair
    right, run = mounted(draft, chained=True), StepByStep.run_chain
    texts = served(target, right)
    monkeypatch.setattr(
        StepByStep, "run_chain", lambda self, chain, *rest: run(self, replace(chain, **wrong(chain, 0)), *rest)
    )
    changed = mounted(draft, chained=True)
    assert served(target, changed) == texts, "whatever is drafted"
    assert changed.stats.rows_used < right.stats.rows_used


def test_chains_are_compared_with_trees_by_their_times() -> None:
    gate = HeadGate()
    assert [gate.chains(1, 4) for _ in range(8)] == [False] * 4 + [True] * 4, "both are measured first"
    assert gate.chains(1, 4), "nothing is known of it"
    assert not gate.chains(2, 4)
    gate.observe_depth(4, 1.0, first=False)
    gate.observe_depth(8, 1.3, first=False)
    gate.observe_chains([5], 4.0)
    assert not gate.chains(1, 4)
    assert gate.chains(1, 1), "there are no siblings to choose"
    for _ in range(60):
        gate.observe_chains([5, 3], 2.4)
    assert gate.chain_s == pytest.approx(0.3, rel=0.01)
    assert gate.depth_s(2, first=False) == pytest.approx(0.48, rel=0.01)
    assert gate.chains(1, 4), "0.3 s a token, where a depth takes one second"
    assert gate.chains(2, 4), "0.6 where it takes 1.3"
    assert not gate.chains(3, 4)
    assert sum(not gate.chains(1, 4) for _ in range(400)) == 4, "and again, now and then"


@pytest.mark.parametrize("at_once", [False, True])
def test_an_adaptive_engine_drafts_both_ways_and_keeps_the_text(pair, at_once: bool) -> None:
    target, draft = pair
    head = mounted(draft, chained=True)
    texts = served(target, head, adaptive=True, at_once=at_once)
    assert texts == served(target, mounted(draft, chained=False, k=1))
    assert 0 < head.head.runner.step_function.num_chains < head.stats.rounds
    assert head.stats.rows_used > 0


@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, Mode.OVERLAPPED])
def test_a_draft_of_one_session_answers_a_miss_by_a_chain(pair, mode: Mode) -> None:
    """Text, and with a proposal at a time what is drafted and accepted, are those of token by token."""
    target, draft = pair
    request = Request(
        prompt(5, 9, VOCAB),
        SamplingParams(temperature=0.8, seed=3, max_tokens=60),
        SpeculationParams(mode=mode, max_draft_tokens=4),
    )
    found, chains = [], []
    for chained in (True, False):
        runner = draft.runner(32)
        step = StepByStep(runner.step_function)
        if chained:
            runner.step_function = step
        model = ModelDrafter(runner, max_leaves=8, max_prefill_tokens=64, top_m=64)
        pump = Pump(target, None, drafter=model, adaptive=False, late=0.0, draft_steps=(6, 6))
        found.append(pump.run({"a": request})["a"])
        chains.append(step.num_chains)
        stats = pump.draft.stats
        assert stats.paths == step.num_chains
        assert (stats.path_tokens > stats.paths) == chained, "several tokens by one call"
        pump.draft.check_integrity()
    assert found[0].token_ids == found[1].token_ids
    assert chains[0] > 3
    assert chains[1] == 0
    assert found[0].speculation.accepted > 20
    if mode is Mode.SEQUENTIAL:
        assert found[0].speculation == found[1].speculation


@pytest.mark.parametrize("family", [*slow(["qwen3"]), *nightly(["gemma3"])])
def test_native_chains_are_those_of_their_twin(family: str) -> None:
    """By a compiled model: the same tokens, scores up to rounding, the same end; greedy and sampled."""
    assert family in LOSSLESS_FAMILIES
    model = prepare(random_model(family), compile=True)
    assert isinstance(model.step, CompiledPackage)
    rng = random.Random(2)
    for turn, sampling in enumerate(
        [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20, "min_p": 0.01}] * 3
    ):
        native, twin = drafter(model), drafter(model)
        twin.runner.step_function = StepByStep(twin.runner.step_function)
        text = prompt(turn, rng.randrange(5, 3 * PAGE_SIZE), VOCAB)
        least = rng.choice([0.0, 0.2, 0.5])
        stop = Stop((0.1, 1.0), (0.3, 0.4, 0.5), (0.2, 0.3, 0.4), 0.95, 1.1, 1.0, least)
        found = []
        for it in (native, twin):
            begin(it, "a", text, **sampling)
            found.append(it.chain(Leaf("a", 0, (), ()), 6, FAN_OUT, stop))
            it.keep("a", [])
            it.check_integrity()
        assert [ids for ids, _ in found[0]] == [ids for ids, _ in found[1]]
        for (_, scores), (_, expected) in zip(*found, strict=True):
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_ranked_tokens_are_those_of_the_target_where_the_draft_is_the_target() -> None:
    """``rank_row`` itself: at temperature 0 the largest logits, lower ids first, else the target's own token."""
    draw = Draw(0, 0, 0.0, VOCAB, -math.inf, 3)
    logits = torch.zeros(VOCAB)
    logits[[7, 5, 9]] = torch.tensor([2.0, 2.0, 3.0])
    assert rank_row(draw, 0, logits)[0] == [9, 5, 7]
