"""A draft model, with linear layers or without: every node has the logits of its path, whatever grew, was committed or
dropped."""

import functools
import random
from typing import Any

import pytest
import torch
from tests.model.test_linear import _states_of_speculated_rows
from tests.support.hybrids import FAMILIES, hybrid, poison
from tests.support.models import prompt, random_model
from tests.support.mutants import mutant
from tests.support.rings import nightly, slow

from paceline.checkpoint.linear import Slots
from paceline.core.processors import SamplerState
from paceline.drafters.branch_rows import Branch, BranchSession
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Leaf
from paceline.errors import EngineError
from paceline.model.loading import prepare
from paceline.types import SamplingParams

FAMILY = "qwen3_5_text"
LENGTHS = (1, 15, 16, 17, 47, 63, 64, 65, 79, 127)
"""Lengths of prompts: before, at and behind the ends of chunks and pages."""


class Trees:
    """Random trees of several sessions at one drafter. Every candidate is compared with those of the path alone."""

    def __init__(self, seed: int, family: str = FAMILY, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.rng, self.is_linear = random.Random(seed), family in FAMILIES
        self.model = hybrid(family, dtype) if self.is_linear else prepare(random_model(family), compile=False)
        self.runner = self.model.runner(**{"num_pages": 60, "max_sessions": 4} | options)
        if self.is_linear:
            poison(self.runner)
        sizes = {"max_leaves": 16, "max_prefill_tokens": 40, "top_m": 4}
        self.drafter = ModelDrafter(self.runner, **sizes)
        self.alone = self.model.runner(8)
        self.texts: dict[str, list[int]] = {}
        self.samplers: dict[str, SamplerState] = {}
        self.paths: dict[str, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self.expanded: dict[str, set[int]] = {}
        self.num_nodes = self.num_checked = self.num_refused = 0

    def open(self, name: str, tokens: list[int]) -> None:
        sampler = SamplerState(SamplingParams(temperature=0.0), 0, tokens, vocab_size=self.model.vocab_size)
        self.texts[name], self.samplers[name] = [*tokens], sampler
        self.paths[name], self.expanded[name] = {0: ((), ())}, set()
        self.drafter.open(name, tokens, sampler)

    def close(self, name: str) -> None:
        self.drafter.close(name)
        for of in (self.texts, self.samplers, self.paths, self.expanded):
            del of[name]

    def prefill(self) -> None:
        while self.drafter.prefill():
            self.drafter.check_integrity()

    def anchor(self, name: str) -> int:
        """The node of the session's last token; -1: it is expanded."""
        return next(node for node, (ids, _) in self.paths[name].items() if not ids)

    def expand(self) -> None:
        """Expands some nodes that are not, of all ready sessions, and gives each some children."""
        leaves: list[Leaf] = []
        for name, paths in self.paths.items():
            if not self.drafter.ready(name):
                continue
            anchor = self.anchor(name)
            open_ = [node for node in paths if node not in self.expanded[name]]
            if anchor in open_:
                open_ = [anchor]
            for node in self.rng.sample(open_, min(len(open_), self.rng.randint(1, 5))):
                leaves.append(Leaf(name, node, *paths[node]))
        if not (leaves := leaves[:16]):
            return
        found = self.drafter.expand(leaves)
        self.drafter.check_integrity()
        for leaf, token_ids, log_q in zip(leaves, found.token_ids.tolist(), found.log_q, strict=True):
            self.expanded[leaf.session_id].add(leaf.node_id)
            if not log_q.isfinite().any():
                self.num_refused += 1
                continue
            expected_ids, expected = self.candidates_of((*self.texts[leaf.session_id], *leaf.path))
            assert token_ids == expected_ids
            torch.testing.assert_close(log_q, expected, rtol=0, atol=0 if self.is_linear else 2e-5)
            self.num_checked += 1
            for token_id in self.rng.sample(token_ids, self.rng.randint(1, 3)):
                self.num_nodes += 1
                ids, path = self.paths[leaf.session_id][leaf.node_id]
                self.paths[leaf.session_id][self.num_nodes] = ((*ids, self.num_nodes), (*path, token_id))

    @functools.cache  # noqa: B019
    def candidates_of(self, tokens: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        """By a drafter without a tree, which takes the tokens as its prompt."""
        drafter = ModelDrafter(self.alone, max_leaves=1, max_prefill_tokens=64, top_m=4)
        drafter.open("x", tokens, SamplerState(SamplingParams(temperature=0.0), 0, tokens, vocab_size=1 << 20))
        while drafter.prefill():
            pass
        found = drafter.expand([Leaf("x", 0, (), ())])
        drafter.close("x")
        return found.token_ids[0].tolist(), found.log_q[0]

    def commit(self, name: str) -> None:
        """Commits a path, a part of one, or one with a token more that no node has."""
        ids, path = self.rng.choice([*self.paths[name].values()])
        token_ids, node_ids = [*path], [*ids]
        if not ids or self.rng.random() < 0.3:
            token_ids.append(self.rng.randrange(self.model.vocab_size))
            node_ids.append(1_000_000 + len(self.texts[name]))
        depth, last = len(token_ids), node_ids[-1]
        below = {
            node: (ids[depth:], path[depth:])
            for node, (ids, path) in self.paths[name].items()
            if len(ids) >= depth and ids[depth - 1] == last
        }
        self.paths[name] = below or {last: ((), ())}
        kept = [node for node, (ids, _) in below.items() if ids and node in self.expanded[name]]
        self.texts[name] += token_ids
        self.samplers[name].append(token_ids)
        self.drafter.advance(name, token_ids, node_ids, kept)
        self.drafter.check_integrity()

    def say(self, name: str, tokens: list[int]) -> None:
        """Commits tokens that no node has."""
        last = 1_000_000 + len(self.texts[name]) + len(tokens)
        self.paths[name], self.expanded[name] = {last: ((), ())}, set()
        self.texts[name] += tokens
        self.samplers[name].append(tokens)
        self.drafter.advance(name, tokens, [*range(last - len(tokens) + 1, last + 1)], ())
        self.drafter.check_integrity()


def grow(seed: int, rounds: int, *args: Any, **options: Any) -> Trees:
    """Random rounds of three sessions."""
    trees = Trees(seed, *args, **options)
    for i, length in enumerate(trees.rng.sample(LENGTHS, 3)):
        trees.open(f"s{i}", prompt(i, length))
    for _ in range(rounds):
        trees.prefill()
        trees.expand()
        for name in [*trees.texts]:
            if trees.rng.random() < 0.35:
                trees.commit(name)
    for name in [*trees.texts]:
        trees.close(name)
    trees.drafter.check_integrity()
    assert trees.runner.cache.num_used == 0
    assert trees.num_checked > 40
    return trees


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        (FAMILY, torch.float32),
        *slow([("lfm2", torch.bfloat16), ("nemotron_h", torch.bfloat16)]),
        *nightly([(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]),
    ],
)
def test_every_node_has_the_candidates_of_its_path(family: str, dtype: torch.dtype) -> None:
    """Bit for bit, before, at and behind boundaries, after any commits. Free slots hold NaN."""
    assert grow(1, 20, family, dtype).num_refused == 0


@pytest.mark.parametrize(
    ("family", "seed"),
    [("llama", 1), *slow([("llama", 0), ("gemma3", 1)]), *nightly([("llama", 2), ("gemma3", 0), ("gemma3", 2)])],
)
def test_in_a_tight_cache_what_is_answered_is_right(family: str, seed: int) -> None:
    """Leaves go without, and prompts wait for the pages of others."""
    assert grow(seed, 60, family, num_pages=4).num_refused > 0


def test_sessions_wait_for_a_state_and_leaves_go_without_where_rows_are_full() -> None:
    """States for one session at a time, and rows and pages for few branches: what is answered is right."""
    trees = Trees(3, num_pages=12, max_sessions=1, state_slots=2)
    linear = trees.runner.cache.linear
    assert linear is not None
    linear.slots, linear.free_rows = Slots(2, 7), linear.free_rows[-7:]
    for i, length in enumerate((63, 15, 1)):
        trees.open(f"s{i}", prompt(i, length))
    for i in range(3):
        trees.prefill()
        assert [trees.drafter.ready(f"s{j}") for j in range(i, 3)] == [True, *[False] * (2 - i)]
        for _ in range(12):
            trees.expand()
            for name in [*trees.texts]:
                if trees.rng.random() < 0.35:
                    trees.commit(name)
        trees.close(f"s{i}")
    assert trees.num_refused > 0
    assert trees.num_checked > 40


def wait_for_long() -> None:
    """A session of one token gets 150 more while it waits for a state, and 50 while those are computed, 40 at once."""
    trees = Trees(4, max_sessions=1, state_slots=2)
    linear = trees.runner.cache.linear
    assert linear is not None
    linear.slots, linear.free_rows = Slots(2, 7), linear.free_rows[-7:]
    sizes, forward = list[int](), trees.runner.forward

    def measured(steps: Any, *args: Any) -> Any:
        sizes.append(sum(len(step.token_ids) for step in steps))
        return forward(steps, *args)

    trees.runner.forward = measured  # type: ignore[method-assign]
    for i in range(2):
        trees.open(f"s{i}", prompt(i, 1))
    trees.prefill()
    for i in range(20):
        trees.say("s1", prompt(i, 10))
        if i == 14:
            trees.close("s0")
        if i >= 14:
            trees.drafter.prefill()
    trees.prefill()
    trees.expand()
    assert trees.num_checked == 1
    assert sum(sizes) == 201
    assert max(sizes) <= 40


def test_tokens_of_a_session_that_waited_for_long_are_computed_in_chunks() -> None:
    wait_for_long()


@mutant(ModelDrafter, "advance")
def _prompts_alone_are_chunked(advance: Any, self: ModelDrafter, session_id: str, *rest: Any) -> None:
    session = self.sessions[session_id]
    num_prefill = session.num_prefill
    advance(self, session_id, *rest)
    session.num_prefill = num_prefill


def test_tokens_that_are_computed_in_one_call_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _prompts_alone_are_chunked(monkeypatch)
    with pytest.raises(AssertionError):
        wait_for_long()


@mutant(BranchSession, "fork")
def _siblings_share_rows(fork: Any, self: BranchSession, cache: Any, owner: Any, branch: Branch, rows: range) -> Any:
    self.reserve(cache, branch, rows.stop)
    cache.promise(owner, 2)
    return branch, ()


@mutant(BranchSession, "fork")
def _no_copy(fork: Any, self: BranchSession, *rest: Any) -> Any:
    return fork(self, *rest)[0], ()


@mutant(BranchSession, "make_trunk")
def _commits_tokens_without_rows(commit: Any, self: BranchSession, branch: Branch) -> None:
    """The trunk stays the trunk."""


WRONG = [_siblings_share_rows, _no_copy, _states_of_speculated_rows, _commits_tokens_without_rows]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_change_is_caught(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    with pytest.raises((AssertionError, EngineError, KeyError)):
        grow(1, 20)
