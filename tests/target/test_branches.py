"""Rows of a subtree have the bits of plain decoding, on every kernel; one that lies elsewhere has others."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tests.model.families import small_config
from tests.model.parallel.ranks import Ranks, load
from tests.support.compilers import needs_attention
from tests.support.models import VOCAB, prompt, random_model
from tests.support.rings import nightly, slow
from transformers import MixtralConfig

from paceline.core.tree import Proposal
from paceline.model.attention.kernels import Kernel
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.loading import prepare
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import Follower, LeadingRunner
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep, StepPlan
from paceline.target.branches import accepted_table, branches_of, page_tables, sequence_steps
from paceline.types import PAGE_SIZE, pages_for

PAGES = 60
MIXTRAL = MixtralConfig(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LLAMA4 = small_config("llama4_text", attention_chunk_size=65, vocab_size=VOCAB)
"""Borders of chunks at 65, 130, 195 and 260."""
MODELS = {"llama": "llama", "sliding windows": "gemma3", "experts": MIXTRAL, "chunks": LLAMA4}
BOUNDARIES = (1, 30, PAGE_SIZE - 3, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE - 2, 100, 150, 255)


def random_subtree(rng: random.Random, size: int) -> Proposal:
    """Tokens whose parents are any earlier ones, branch by branch; siblings differ."""
    children: dict[int, list[int]] = {-1: []}
    tokens: list[int] = []
    for index in range(size):  # parents first, in any order
        parent = rng.randrange(-1, index) if rng.random() < 0.5 else index - 1
        taken = {tokens[child] for child in children[parent]}
        tokens.append(rng.choice([token for token in range(10, 40) if token not in taken]))
        children[parent].append(index)
        children[index] = []
    order: list[int] = []
    stack = [*reversed(children[-1])]
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(children[order[-1]]))
    place = {-1: -1} | {index: at for at, index in enumerate(order)}
    parent_of = {child: parent for parent, found in children.items() for child in found}
    return Proposal(tuple(tokens[i] for i in order), parents=tuple(place[parent_of[i]] for i in order)).first(size)


class Case:
    """One session: a context of which the last tokens are computed together with a subtree."""

    def __init__(self, rng: random.Random, runner: ModelRunner, proposal: Proposal) -> None:
        self.proposal = proposal
        length = max(2, rng.choice(BOUNDARIES) + rng.randrange(3))
        self.context = prompt(rng.randrange(1000), length)
        self.start = length - 1 if rng.random() < 0.7 else rng.randrange(max(0, length - 20), length)
        self.branches = branches_of(proposal)
        cache = runner.cache
        self.pages = cache.allocate(pages_for(length + self.branches[0].stop))
        private = [cache.allocate(branch.num_pages(length)) for branch in self.branches[1:]]
        self.held = [*self.pages, *(page for pages in private for page in pages)]
        self.tables = page_tables(self.pages, private, self.branches, length)
        if self.start:
            span = range(self.start)
            runner.forward([SequenceStep(self.context[: self.start], span, span, self.pages, 1)])

    def steps(self) -> list[SequenceStep]:
        return sequence_steps(self.context[self.start :], self.start, self.proposal, self.tables)

    def plain(self, runner: ModelRunner) -> list[torch.Tensor]:
        """Logits of the same rows, one token at a time; a branch overwrites the rows of the one before."""
        pages = runner.cache.allocate(pages_for(len(self.context) + len(self.proposal)))

        def decode(token: int, row: int) -> torch.Tensor:
            return runner.forward([SequenceStep([token], [row], [row], pages, 1)])[0]

        span = range(len(self.context) - 1)
        if span:
            runner.forward([SequenceStep(self.context[:-1], span, span, pages, 1)])
        rows = [decode(self.context[-1], len(span))]
        for index, token in enumerate(self.proposal.token_ids):
            rows.append(decode(token, len(span) + len(self.proposal.path(index))))
        runner.cache.release(pages)
        return rows


def unchanged(steps: list[SequenceStep]) -> None:
    """Leaves branches where they are."""


def num_different(
    runner: ModelRunner,
    num_rows: int,
    seed: int = 0,
    change: Callable[[list[SequenceStep]], None] = unchanged,
) -> tuple[int, int, int]:
    """Rows of random subtrees compared with plain decoding, how many of them differ in any bit, and after how many
    accepted paths the next row does."""
    rng = random.Random(seed)
    compared = different = wrong = 0
    while compared < num_rows:
        cases = [Case(rng, runner, random_subtree(rng, rng.randint(1, 14))) for _ in range(rng.randint(1, 3))]
        want = [case.plain(runner) for case in cases]
        steps = [case.steps() for case in cases]
        for of_case in steps:
            change(of_case)
        got = iter(runner.forward([step for of_case in steps for step in of_case]))
        for rows in want:
            for row in rows:
                compared += 1
                different += not torch.equal(next(got), row)
        for case in cases:
            wrong += not goes_on(rng, runner, case)
            runner.cache.release(case.held)
        assert runner.cache.num_used == 0
    return compared, different, wrong


def goes_on(rng: random.Random, runner: ModelRunner, case: Case) -> bool:
    """What follows the accepted path reads its branch's pages: the next token's logits are plain decoding's."""
    path = case.proposal.path(rng.randrange(-1, len(case.proposal)))
    row = len(case.context) + len(path)
    table = [*accepted_table(case.proposal, path, case.tables)]
    added = runner.cache.allocate(max(0, pages_for(row + 1) - len(table)))
    got = runner.forward([SequenceStep([50], [row], [row], [*table, *added], 1)])
    text = [*case.context, *(case.proposal.token_ids[i] for i in path), 50]
    chain = Case.__new__(Case)
    chain.context, chain.proposal = text, Proposal()
    runner.cache.release(added)
    return torch.equal(got[0], chain.plain(runner)[0])


def shifted(steps: list[SequenceStep]) -> None:
    """Writes every further branch one row behind its position, as a masked tree would."""
    for step in steps[1:]:
        first = step.positions[0]
        rows = range(first + 1, first + 1 + len(step.rows))
        if pages_for(rows.stop) > len(step.pages):
            continue
        step.rows = rows
        step.visible = torch.zeros(rows.stop, dtype=torch.bool)
        step.own_rows = [[r for r in range(row + 1) if r != first] for row in rows]
        step.key_positions = torch.arange(rows.stop) - (torch.arange(rows.stop) > first).long()


KERNELS = [
    "sdpa",
    pytest.param("native", marks=needs_attention),
]
NO_TRITON = importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1"
interpreted = pytest.mark.skipif(NO_TRITON, reason="needs triton and TRITON_INTERPRET=1")
DTYPES = ["float32", "bfloat16"]


def runner_of(model: str, kernel: Kernel, dtype: str) -> ModelRunner:
    """An eager model of ``MODELS``."""
    made = random_model(MODELS[model], dtype=getattr(torch, dtype))
    return prepare(made, compile=False, attention=kernel).runner(PAGES)


@pytest.mark.parametrize(
    ("model", "dtype", "num_rows"),
    [
        ("llama", "float32", 100),
        *[(model, "bfloat16", 100) for model in MODELS],
        *slow([("llama", dtype, 2_000) for dtype in DTYPES]),
        *nightly([(model, dtype, 10_000) for model in MODELS for dtype in DTYPES]),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_subtrees_have_the_bits_of_plain_decoding(
    model: str, dtype: str, num_rows: int, kernel: Kernel
) -> None:
    compared, *faults = num_different(runner_of(model, kernel, dtype), num_rows)
    assert compared >= num_rows
    assert faults == [0, 0]


@pytest.mark.parametrize(("model", "dtype"), [("llama", "float32"), *slow([*itertools.product(MODELS, DTYPES)][1:])])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_branch_at_a_shifted_row_is_caught(model: str, dtype: str, kernel: Kernel) -> None:
    """In bfloat16 fewer rows differ, and each of the cases has some."""
    assert num_different(runner_of(model, kernel, dtype), 150, change=shifted)[1] > 0


@interpreted
def test_triton_reads_a_copied_page_as_it_reads_the_first() -> None:
    """In any query row. Places within one are not compared: the interpreter multiplies by numpy, whose sums depend on
    the place in a block, in chains as well."""
    from paceline.model.attention.triton import attend_in_place

    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(8, PAGE_SIZE, 2, 16, generator=generator) for _ in "kv")
    keys[5], values[5] = keys[1], values[1]
    query = torch.randn(1, 2, 8, 16, generator=generator)  # a row of 4 places for 2 groups of heads

    def attend(tables: list[list[int]]) -> torch.Tensor:
        seen = torch.arange(2 * PAGE_SIZE) <= 100
        mask = torch.zeros(len(tables), 1, 4, 2 * PAGE_SIZE).masked_fill_(~seen, -math.inf)
        rows = query.repeat(len(tables), 1, 1, 1)
        return attend_in_place(rows, keys, values, torch.tensor(tables), mask, 0.25, None)[-1]

    plain = attend([[0, 1]])
    assert torch.equal(attend([[0, 1], [0, 5]]), plain)
    assert torch.equal(attend([[2, 3], [0, 1], [0, 5]]), plain)
    assert not torch.equal(attend([[0, 1], [0, 4]]), plain)


def unshared(steps: list[SequenceStep]) -> None:
    """Leaves shared tokens out of the pages of the branches that did not compute them."""
    for step in steps:
        step.also = ()


def uncopied(steps: list[SequenceStep]) -> None:
    for step in steps:
        step.copies = ()


@pytest.mark.parametrize("mutant", [unshared, uncopied])
def test_a_branch_without_what_it_shares_is_caught(mutant: Callable[[Sequence[SequenceStep]], None]) -> None:
    runner = prepare(random_model("llama"), compile=False).runner(PAGES)
    assert num_different(runner, 60, change=mutant)[1] > 0


def _on_rank(
    group: Collectives, path: str, dtype: torch.dtype, num_rows: int, change: Callable[[list[SequenceStep]], None]
) -> tuple[int, int, int] | None:
    model = load(group, path, dtype)
    if group.rank > 0:
        follower = Follower(model.runner(PAGES))
        while follower.step():
            pass
        return None
    runner = model.runner(PAGES)
    result = num_different(runner, num_rows, change=change)
    assert isinstance(runner, LeadingRunner)
    runner.end()
    return result


def on_two_ranks(
    two: Ranks,
    model: str,
    dtype: str,
    num_rows: int,
    folder: Path,
    change: Callable[[list[SequenceStep]], None] = unchanged,
) -> tuple[int, int, int]:
    """``num_different`` of a model that two ranks share."""
    random_model(MODELS[model]).save_pretrained(folder / "model")
    given = str(folder / "model"), getattr(torch, dtype), num_rows, change
    result: tuple[int, int, int] = two.run(_on_rank, *given)[0]
    return result


@pytest.mark.parametrize(
    ("model", "dtype", "num_rows"),
    [
        *slow([("llama", "bfloat16", 300)]),
        *nightly([(model, dtype, 10_000) for model in MODELS for dtype in DTYPES]),
    ],
)
def test_rows_of_subtrees_have_the_bits_of_plain_decoding_on_two_ranks(
    model: str, dtype: str, num_rows: int, two: Ranks, tmp_path: Path
) -> None:
    """Pages are copied on every rank."""
    compared, *faults = on_two_ranks(two, model, dtype, num_rows, tmp_path)
    assert compared >= num_rows
    assert faults == [0, 0]


@pytest.mark.parametrize(
    ("model", "dtype"), [*slow([("llama", "bfloat16")]), *nightly(itertools.product(MODELS, DTYPES))]
)
def test_a_branch_at_a_shifted_row_is_caught_on_two_ranks(model: str, dtype: str, two: Ranks, tmp_path: Path) -> None:
    assert on_two_ranks(two, model, dtype, 150, tmp_path, shifted)[1] > 0


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_steps")
@pytest.mark.parametrize(
    ("dtype", "num_rows"),
    [*slow([(dtype, 500) for dtype in DTYPES]), *nightly([(dtype, 10_000) for dtype in DTYPES])],
)
def test_rows_of_subtrees_have_the_bits_of_plain_decoding_when_compiled(dtype: str, num_rows: int) -> None:
    model = random_model("llama", dtype=getattr(torch, dtype))
    compared, *faults = num_different(prepare(model, compile=True).runner(PAGES), num_rows)
    assert compared >= num_rows
    assert faults == [0, 0]


def test_recorded_steps_take_branches() -> None:
    """A recorded shape has room for two writes a token; padded and replayed rows have the bits of plain ones."""
    model = prepare(random_model("llama"), compile=False)
    runner = model.runner(PAGES)
    runner.backend = DeviceBackend(
        runner.cache, model.dtype, model.sliding_window, kernel=model.kernel, recorder=Calls(), max_shapes=64
    )
    runner.record(Limits(4, 64, 8))
    assert num_different(runner, 60)[1:] == (0, 0)


class Calls:
    """Records a step by remembering how to take it."""

    def has_room(self) -> bool:
        return True

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function


def test_the_plan_of_branches_survives_its_frame() -> None:
    """Copies and further rows reach the other ranks with the plan."""
    rng = random.Random(1)
    runner = prepare(random_model("llama"), compile=False).runner(PAGES)
    seen = 0
    while seen < 3:
        case = Case(rng, runner, random_subtree(rng, 9))
        plan = StepPlan.of(case.steps(), runner.cache.scratch_row)
        twin = StepPlan.decode(plan.encode())
        assert twin.copies == plan.copies
        assert torch.equal(twin.arrays.write_tokens, plan.arrays.write_tokens)
        seen += bool(plan.copies) and plan.shape.writes > plan.shape.tokens
        runner.cache.release(case.held)


@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1])
def test_branches_share_what_lies_before_the_page_in_which_they_part(length: int) -> None:
    proposal = Proposal((1, 2, 3, 4, 5), parents=(-1, 0, 1, 0, -1))
    first, second, third = branches = branches_of(proposal)
    assert [(b.first, b.stop, b.parent, b.depth) for b in branches] == [(0, 3, -1, 0), (3, 4, 0, 1), (4, 5, 0, 0)]
    assert second.page(length) == (length + 1) // PAGE_SIZE
    assert [b.num_pages(length) for b in (second, third)] == [1, 1]
    tables = page_tables([9, 8], [[7], [6]], branches, length)
    assert tables[1] == [*[9, 8][: second.page(length)], 7]
    assert accepted_table(proposal, (0, 3), tables) == tables[1]
    assert accepted_table(proposal, (0,), tables) == [9, 8]
    assert first.stop == 3
