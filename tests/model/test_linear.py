"""Linear layers: transformers' numbers, and the bits of decoding one token at a time, whatever a step holds."""

import contextlib
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from tests.model.conformance import FP32_LIMIT, assert_follows, assert_invariant, transformers_logits
from tests.model.families import checkpoint
from tests.support.hybrids import FAMILIES, hybrid, hybrid_config, hybrid_model, poison
from tests.support.models import prompt
from tests.support.mutants import mutant
from tests.support.rings import nightly, slow
from tests.target.test_branches import random_subtree
from torch import Tensor

from paceline.checkpoint.linear import LinearSpec, Slots
from paceline.core.tree import Proposal
from paceline.errors import EngineError
from paceline.model.kv_cache import page_hash
from paceline.model.linear import families, native, operator
from paceline.model.linear import layers as linear_layers
from paceline.model.linear.plan import CHUNKS_OF_PAGE, NONE, Chunk, LinearSlots, LinearStep
from paceline.model.loading import prepare
from paceline.model.quantized import round_linear
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep
from paceline.target.branches import accepted_table, branches_of, page_tables, sequence_steps
from paceline.types import PAGE_SIZE, pages_for

FP32, BF16 = torch.float32, torch.bfloat16
CONTEXTS = (1, 15, 16, 17, 31, 47, 48, 63, 64, 65, 79, 127, 128, 129)
"""Before, at and behind the ends of chunks and pages."""
_MORE = 20
_TEXT = prompt(3, 300)


def chunk(tokens: Sequence[int], start: int, stop: int, pages: Sequence[int], num_logits: int = 0) -> SequenceStep:
    """The tokens [start, stop) of a context."""
    return SequenceStep(tokens[start:stop], range(start, stop), range(start, stop), pages, num_logits)


@functools.cache
def runner_of(family: str, dtype: torch.dtype) -> ModelRunner:
    """A runner whose free slots hold NaN."""
    return poison(hybrid(family, dtype).runner(60, max_sessions=16))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family: str) -> None:
    """Prefill in chunks that end anywhere, then decoding."""
    assert_follows(hybrid(family).runner(8), hybrid_model(family), _TEXT[:100], (37, 38), 20, 2 * FP32_LIMIT)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_5_text", FP32),
        ("lfm2", BF16),
        ("nemotron_h", BF16),
        ("kimi_linear", BF16),
        *slow([("qwen3_next", BF16), ("minimax", BF16), ("jamba", FP32)]),
    ],
)
def test_the_self_test_holds(family: str, dtype: torch.dtype) -> None:
    """With branches, across ends of chunks."""
    assert_invariant(runner_of(family, dtype))


class Walk:
    """A context that is computed in some way, verifies a subtree, accepts one path of it, and goes on."""

    def __init__(self, runner: ModelRunner, rng: random.Random, context: int) -> None:
        self.runner, self.rng, self.context = runner, rng, context
        self.proposal = random_subtree(rng, rng.choice((4, 9, 16)))
        self.end = rng.randrange(-1, len(self.proposal))
        """The last accepted token."""
        self.pages = runner.cache.allocate(pages_for(context + 80))

    def prefill(self, neighbor: SequenceStep | None) -> None:
        """All tokens but the last one, in random chunks; every second one in addition to a neighbor's."""
        at, stop = 0, self.context - 1
        while at < stop:
            size = min(stop - at, self.rng.choice((1, 3, 16, 33, 70)))
            steps = [chunk(_TEXT, at, at + size, self.pages, 1)]
            if neighbor is not None and at % 2:
                steps.insert(self.rng.randrange(2), neighbor)
            self.runner.forward(steps)
            at += size

    def verify(self, neighbor: SequenceStep | None) -> list[Tensor]:
        """Logits after the context, after each token of the proposal, and after the tokens that follow."""
        cache, proposal, context = self.runner.cache, self.proposal, self.context
        branches = branches_of(proposal)
        private = [cache.allocate(branch.num_pages(context)) for branch in branches[1:]]
        tables = page_tables(self.pages, private, branches, context)
        steps = sequence_steps(_TEXT[context - 1 : context], context - 1, proposal, tables)
        rows = self.runner.forward([*steps, *([] if neighbor is None else [neighbor])])[: len(proposal) + 1]
        path = self.path
        table = [*(accepted_table(proposal, path, tables) if path else self.pages)]
        kept = {*table}
        cache.release([page for page in [*self.pages, *chain(*private)] if page not in kept])
        self.pages = table + cache.allocate(pages_for(context + 80) - len(table))
        return [*rows, *self.goes_on(self.rng.choice((1, 5, 20)))]

    @property
    def path(self) -> list[int]:
        return [*self.proposal.path(self.end)] if self.end >= 0 else []

    def goes_on(self, size: int) -> list[Tensor]:
        """Logits of the tokens behind the accepted ones, in steps of ``size``."""
        tokens = [*_TEXT[: self.context], *[self.proposal.token_ids[i] for i in self.path], *_TEXT[200 : 200 + _MORE]]
        first, rows = len(tokens) - _MORE, []
        for at in range(first, len(tokens), size):
            stop = min(at + size, len(tokens))
            rows += [*self.runner.forward([chunk(tokens, at, stop, self.pages, stop - at)])]
        return rows

    def expected(self) -> list[Tensor]:
        """The same by a prefill of the context at once and one token at a time, in pages of its own."""
        own, rows, start = Walk.__new__(Walk), [], self.context - 1
        own.__dict__ |= {**self.__dict__, "pages": self.runner.cache.allocate(pages_for(self.context + 80))}
        if start:
            self.runner.forward([chunk(_TEXT, 0, start, own.pages, 1)])
        for node in [*range(-1, len(self.proposal)), self.end]:  # the accepted path last: it goes on
            tokens = [*_TEXT[: self.context], *[self.proposal.token_ids[i] for i in self.proposal.path(node)]]
            for at in range(start, len(tokens)):
                step = replace(chunk(tokens, at, at + 1, own.pages, 1), committed=start)
                row = self.runner.forward([step])[0]
            rows.append(row)
        rows = [*rows[:-1], *own.goes_on(1)]
        self.runner.cache.release(own.pages)
        return rows


def differing(family: str, dtype: torch.dtype, contexts: Sequence[int], seed: int = 0) -> int:
    """``differing_of`` the runner of a family."""
    return differing_of(runner_of(family, dtype), contexts, seed)


def differing_of(runner: ModelRunner, contexts: Sequence[int], seed: int = 0, neighbor_len: int = 70) -> int:
    """Rows of random walks that differ from decoding, with neighbors of ``neighbor_len`` tokens or none."""
    rng, count = random.Random(seed), 0
    beside = runner.cache.allocate(2)
    neighbor = chunk(_TEXT, 0, neighbor_len, beside, 0)
    try:
        for context in contexts:
            walk = Walk(runner, rng, context)
            walk.prefill(neighbor)
            rows = walk.verify(neighbor if context % 2 else None)
            expected = walk.expected()
            assert len(rows) == len(expected)
            count += sum(not torch.equal(a, b) for a, b in zip(rows, expected, strict=True))
            runner.cache.release(walk.pages)
            runner.cache.check_integrity([beside])
    finally:
        runner.cache.release(beside)
    return count


@pytest.mark.parametrize(
    ("family", "dtype", "contexts"),
    [
        ("qwen3_5_text", FP32, (16, 63, 65)),
        ("lfm2", BF16, (16, 63, 65)),
        ("nemotron_h", FP32, (63, 65)),
        ("kimi_linear", BF16, (63, 65)),
        ("minimax", BF16, (63, 65)),
        ("jamba", BF16, (63, 65)),
        ("falcon_h1", BF16, (63,)),
        ("zamba2", FP32, (63,)),
        *slow([("qwen3_next", BF16, CONTEXTS[:8]), ("olmo_hybrid", FP32, CONTEXTS[8:])]),
        *slow([("nemotron_h", BF16, CONTEXTS[:8]), ("jamba", FP32, CONTEXTS[8:])]),
        *nightly([(family, dtype, CONTEXTS) for family in FAMILIES for dtype in (FP32, BF16)]),
    ],
)
def test_any_tree_has_the_bits_of_decoding(family: str, dtype: torch.dtype, contexts: Sequence[int]) -> None:
    """Trees at and across ends of chunks and pages, of up to 16 tokens, after prefill in random chunks."""
    assert differing(family, dtype, contexts) == 0


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [("qwen3_5_text", BF16, "int8"), *slow([("nemotron_h", FP32, "int4"), ("kimi_linear", BF16, "int8")])],
)
def test_quantized_weights_have_the_bits_of_decoding(family, dtype, quantization) -> None:
    """And logits that are near those of plain weights."""
    model, plain = checkpoint(hybrid_config(family)).to(dtype), hybrid(family, dtype).runner(4)
    round_linear(model, quantization, torch.device("cpu"), family)
    runner = poison(prepare(model, compile=False).runner(40, max_sessions=16))
    step = [chunk(_TEXT, 0, 40, [0], 40)]
    rows, expected = runner.forward(step).float(), plain.forward(step).float()
    assert 0 < float((rows - expected).norm() / expected.norm()) < 0.5
    assert differing_of(runner, (63,), seed=14) == 0


def test_what_a_failed_step_has_stored_is_not_used() -> None:
    """A state behind accepted rows is folded by the next step; if that fails, by the one after it."""
    linear, pages = LinearSlots(Slots(states=4, rows=8)), [0]
    linear.plan([replace(chunk(_TEXT, 0, 20, pages), committed=10)])
    linear.confirm()
    assert linear.hold(pages, 18, NONE) == NONE  # eight draft tokens were accepted, across the boundary at 16
    step = replace(chunk(_TEXT, 18, 19, pages), committed=19)
    for confirmed in (False, True):
        (part,) = linear.plan([step]).sequences
        assert part.state == NONE
        assert [(of.first, of.count, of.store != NONE) for of in part.chunks] == [(16, 0, True), (2, 1, False)]
        if confirmed:
            linear.confirm()
    (part,) = linear.plan([step]).sequences
    assert part.state != NONE
    assert len(part.chunks) == 1


@pytest.mark.parametrize("forgets", [False, True])
def test_a_cached_page_keeps_no_rows(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: rows stay with the page."""
    if forgets:
        monkeypatch.setattr(LinearSlots, "rest", lambda self, page: None)
    linear, pages = LinearSlots(Slots(states=4, rows=8)), [0]
    linear.plan([chunk(_TEXT, 0, PAGE_SIZE - 1, pages)])
    linear.confirm()
    assert linear.num_chunks(0) > 0
    linear.rest(0)
    with pytest.raises(AssertionError, match="a cached page owns rows") if forgets else contextlib.nullcontext():
        linear.check_integrity([], [0], [])


def test_a_failed_step_leaves_no_state_for_a_prefix_or_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It folds the end of a page that has been published; the session ends, as one without memory does."""
    runner, pages = runner_of("qwen3_5_text", FP32), runner_of("qwen3_5_text", FP32).cache.allocate(2)
    cache, digest = runner.cache, page_hash(b"", _TEXT[:64])
    runner.forward([chunk(_TEXT, 0, 60, pages)])
    held = cache.hold(pages, 60, NONE)
    runner.forward([replace(chunk(_TEXT, 60, 68, pages, 8), committed=61)])
    held = cache.hold(pages, 68, held)  # seven draft tokens were accepted
    cache.publish(pages[0], digest)
    with monkeypatch.context() as patch:
        patch.setattr(linear_layers, "run", _without_memory)
        with pytest.raises(MemoryError):
            runner.forward([replace(chunk(_TEXT, 68, 69, pages), committed=69)])
    cache.copy_states(pages, [digest])
    assert cache.state_copies is not None
    assert digest not in cache.state_copies
    cache.let_go(held)
    cache.release(pages)
    assert cache.match_prefix(_TEXT[:100]) == ([], [])
    cache.check_integrity([])


@pytest.mark.parametrize("start", [20, 32])
def test_a_prompt_goes_on_after_a_failed_step(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the state and the rows that it had: in smaller parts, as in a step without memory."""
    runner = runner_of("qwen3_5_text", FP32)
    cache = runner.cache
    (first,), pages = cache.allocate(1), cache.allocate(2)
    expected = runner.forward([chunk(_TEXT, 0, 60, [first], 1)])
    runner.forward([chunk(_TEXT, 0, start, pages)])
    held = cache.hold(pages, start, NONE)
    with monkeypatch.context() as patch:
        patch.setattr(linear_layers, "run", _without_memory)
        with pytest.raises(MemoryError):
            runner.forward([chunk(_TEXT, start, 60, pages, 1)])
    cache.check_integrity([[first], pages], [held])
    runner.forward([chunk(_TEXT, start, 40, pages)])
    held = cache.hold(pages, 40, held)
    assert torch.equal(runner.forward([chunk(_TEXT, 40, 60, pages, 1)]), expected)
    cache.let_go(held)
    cache.release([first, *pages])


def _without_memory(*arguments: Any) -> Tensor:
    raise MemoryError


def test_branches_take_no_states() -> None:
    """Behind a boundary that accepted draft tokens have passed. Two states are enough for a session with branches."""
    linear, pages = LinearSlots(Slots(states=2, rows=64)), [0]
    linear.plan([replace(chunk(_TEXT, 0, 36, pages), committed=17)])
    linear.confirm()
    held = linear.hold(pages, 33, NONE)  # 16 draft tokens were accepted
    siblings = Proposal(tuple(range(12)), parents=(-1,) * 12)
    branches = branches_of(siblings)
    tables = page_tables(pages, [[i] for i in range(1, 12)], branches, 34)
    made = linear.plan(sequence_steps(_TEXT[33:34], 33, siblings, tables))
    linear.confirm()
    assert [any(of.store != NONE for of in part.chunks) for part in made.sequences] == [True] + [False] * 11
    assert linear.hold([3], 35, held) != NONE  # the session goes on with a branch, whose rows lead to the next state
    (part,) = linear.plan([replace(chunk(_TEXT, 35, 36, [3]), committed=36)]).sequences
    assert [of.store != NONE for of in part.chunks] == [True, False]


def conflicts(made: LinearStep) -> int:
    """Slots that sequences of one group write and those of another read or write."""
    touched = []
    for group in made.groups():
        slots = [made.sequences[i].slots for i in group]
        reads, writes = ({slot for pair in slots for slot in pair[i]} for i in (0, 1))
        touched.append((reads, writes))
    return sum(
        len(writes & (other_reads | other_writes))
        for i, (_, writes) in enumerate(touched)
        for j, (other_reads, other_writes) in enumerate(touched)
        if i != j
    )


def _made(num_sessions: int) -> list[LinearStep]:
    """Steps of sessions that pass ends of chunks, with few slots: of prompts, of trees, of single tokens."""
    linear, made = LinearSlots(Slots(states=2 * num_sessions, rows=200)), []
    sizes = [20 + 16 * i for i in range(num_sessions)]
    tables = [[10 * i, 10 * i + 1] for i in range(num_sessions)]
    held = [NONE] * num_sessions

    def run(steps: Sequence[SequenceStep]) -> None:
        made.append(linear.plan(steps))
        linear.confirm()

    run([chunk(_TEXT, 0, size, pages) for size, pages in zip(sizes, tables, strict=True)])
    siblings = Proposal((1, 2, 3), parents=(-1, -1, -1))
    for _ in range(20):
        steps: list[SequenceStep] = []
        for i, (size, pages) in enumerate(zip(sizes, tables, strict=True)):
            held[i] = linear.hold(pages, size, held[i])
            branches = branches_of(siblings)
            private = [[10 * i + 2 + k] for k in range(len(branches) - 1)]
            branch_pages = page_tables(pages, private, branches, size + 1)
            steps += sequence_steps(_TEXT[size : size + 1], size, siblings, branch_pages)
        run(steps)
        for i in range(num_sessions):
            linear.forget(range(10 * i + 2, 10 * i + 10))
            sizes[i] += 1
    for _ in range(20):  # all pass an end of a chunk in the same steps
        held = [linear.hold(pages, size, key) for pages, size, key in zip(tables, sizes, held, strict=True)]
        run([chunk(_TEXT, size, size + 1, pages) for size, pages in zip(sizes, tables, strict=True)])
        sizes = [size + 1 for size in sizes]
    return made


def test_sequences_of_different_groups_share_no_slot() -> None:
    """Groups are computed at the same time: a session's branches are one, and sessions do not wait for each other."""
    for made in _made(3):
        assert conflicts(made) == 0
        assert len(made.groups()) == 3
    assert [*chain.from_iterable(made.groups())] == [*range(len(made.sequences))]


def _reused_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of a state that one session reads is given to another one in the same step."""

    def changed(self: LinearSlots, key: int) -> int:
        self.free_states.append(slot := self.state_of[key])
        return slot

    monkeypatch.setattr(LinearSlots, "use_state", changed)


def _no_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearStep, "groups", lambda self: [range(i, i + 1) for i in range(len(self.sequences))])


@pytest.mark.parametrize("mutant", [_reused_in_the_step, _no_dependencies])
def test_wrong_groups_are_noticed(mutant, monkeypatch) -> None:
    mutant(monkeypatch)
    assert any(conflicts(made) or len(made.groups()) != 3 for made in _made(3))


def test_a_state_for_prefix_hits_takes_no_slot_that_a_session_needs() -> None:
    """A prompt passes the end of a page, whose state is kept while there is room, and ends behind it."""
    linear, pages = LinearSlots(Slots(states=2, rows=8)), [0, 1, 2]
    linear.plan([chunk(_TEXT, 0, 32, pages)])
    linear.confirm()
    held = linear.hold(pages, 32, NONE)
    (part,) = linear.plan([chunk(_TEXT, 32, 80, pages)]).sequences
    assert [of.store != NONE for of in part.chunks] == [False, False, True]
    linear.confirm()
    assert linear.hold(pages, 80, held) != NONE


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs linear layers by the reference implementation, as on a machine without a compiler."""
    monkeypatch.setattr(native, "unavailable", lambda: "they are not to run")


def _folded(tile: list[Tensor], stop: int, state: Tensor, spec: LinearSpec) -> Tensor:
    """The state behind the first ``stop`` rows of a chunk."""
    _, keys, updates, decays = tile
    wide = keys.repeat_interleave(spec.value_heads // spec.key_heads, 1)
    total = state * decays[stop - 1].exp()[..., None]
    for row in range(stop):
        faded = wide[row] * (decays[stop - 1] - decays[row]).exp()
        total = total + faded[:, :, None] * updates[row][:, None]
    return total


def _from_the_first_token(monkeypatch: pytest.MonkeyPatch, count: int = 0) -> None:
    """Sums begin at the step's first token instead of the chunk's; ``count``: only of steps of so many tokens."""
    tokens = operator.compute_tokens

    def wrong(tile: list[Tensor], of: Chunk, state: Tensor, tail: Tensor, spec: LinearSpec, *rest: Any) -> Tensor:
        if not of.first or count not in (0, of.count):
            return tokens(tile, of, state, tail, spec, *rest)
        kept, before = [part[: of.first].clone() for part in tile[1:]], tile[3][of.first - 1].clone()
        state = _folded(tile, of.first, state, spec)
        for part in tile[1:]:
            part[: of.first] = 0
        out = tokens(tile, of, state, tail, spec, *rest)
        tile[3][of.first : of.first + of.count] += before
        for part, own in zip(tile[1:], kept, strict=True):
            part[: of.first] = own
        return out

    by_torch(monkeypatch)
    monkeypatch.setattr(operator, "compute_tokens", wrong)


def _one_token_by_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding has a form of its own."""
    _from_the_first_token(monkeypatch, count=1)


@mutant(operator, "scanned")
def _one_token_by_sums(scanned: Any, tile: list[Tensor], own: slice, state: Tensor, *rest: Any) -> Any:
    """Decoding of Mamba sums over the chunk's rows in place of going from its beginning row by row."""
    if own.stop - own.start != 1:
        return scanned(tile, own, state, *rest)
    *_, gates = rest
    _, keys, updates, steps = before = [part[: own.start].clone() for part in tile]
    total = state * (gates.decay * steps.sum(0)).exp()[..., None]
    for row in range(own.start):
        fade = (gates.decay * steps[row + 1 :].sum(0)).exp()[..., None]
        total = total + fade * keys[row][..., None] * updates[row][:, None]
    for part in tile[1:]:
        part[: own.start] = 0
    out = scanned(tile, own, total, *rest)
    for part, kept in zip(tile, before, strict=True):
        part[: own.start] = kept
    return out


def _one_token_by_sums_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch(monkeypatch)
    _one_token_by_sums(monkeypatch)


def _cumulative_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decays are summed by one call."""
    by_torch(monkeypatch)
    monkeypatch.setattr(operator, "summed", lambda before, rates: before + rates.cumsum(0))


@mutant(LinearSlots, "copy_states")
def _no_state_for_siblings(copy: Any, self: LinearSlots, source: int, target: int) -> list[tuple[int, int]]:
    """A private page does not get the states of the page that it is a copy of."""
    pairs = [*copy(self, source, target)]
    for key in range(target * CHUNKS_OF_PAGE, (target + 1) * CHUNKS_OF_PAGE):
        self.drop_state(key)
    return pairs


@mutant(LinearSlots, "write_also")
def _also_writes_one_place(write: Any, self: LinearSlots, of: Chunk, *rest: Any, **options: Any) -> None:
    """Rows that branches share are written to the first one alone."""
    write(self, of, *rest, **options)
    of.also.clear()


@mutant(LinearSlots, "plan")
def _rows_of_siblings(plan: Any, self: LinearSlots, steps: Sequence[SequenceStep]) -> LinearStep:
    """A branch has its rows where the one has them that it leaves, and so reads those of siblings."""
    made = plan(self, steps)
    shared = dict(zip([to for _, to in made.copies], [of for of, _ in made.copies], strict=True))
    for of in [of for part in made.sequences for of in part.chunks]:
        of.rows = shared.get(of.rows, of.rows)
    return made


def _states_of_speculated_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are stored behind draft tokens, too, and rows before them given up."""
    sequence = LinearSlots.sequence_part
    monkeypatch.setattr(LinearSlots, "sequence_part", lambda self, step: sequence(self, replace(step, committed=-1)))


MUTANTS = [
    _from_the_first_token,
    _one_token_by_another_form,
    _cumulative_sums,
    _no_state_for_siblings,
    _also_writes_one_place,
    _rows_of_siblings,
    _states_of_speculated_rows,
]
IN_THE_SELF_TEST = [_from_the_first_token, _one_token_by_another_form, _cumulative_sums, _also_writes_one_place]


OF_SLOTS = [_no_state_for_siblings, _also_writes_one_place, _rows_of_siblings, _states_of_speculated_rows]
"""Mutants of any kind of layers, whether it has states or the inputs of a convolution alone."""


@pytest.mark.parametrize(
    ("family", "mutant"),
    [
        *(("qwen3_5_text", mutant) for mutant in MUTANTS),
        *(("lfm2", mutant) for mutant in OF_SLOTS),
        *(
            ("jamba", mutant)
            for mutant in (_one_token_by_sums_of_torch, _no_state_for_siblings, _states_of_speculated_rows)
        ),
        *(("nemotron_h", mutant) for mutant in (_from_the_first_token, _cumulative_sums, _no_state_for_siblings)),
        *(("kimi_linear", mutant) for mutant in IN_THE_SELF_TEST[:3]),
        ("minimax", _from_the_first_token),
    ],
)
def test_mistakes_are_noticed(family, mutant, monkeypatch) -> None:
    """By bits, or by a state that is no longer there."""
    runner_of.cache_clear()
    mutant(monkeypatch)
    try:
        found = any(differing(family, FP32, contexts) for contexts in ((63,), (47, 79, 128), (62,)))
    except EngineError as error:
        found = "no longer there" in str(error)
    finally:
        runner_of.cache_clear()
    assert found


def _difference_from_transformers(family: str, **changes: Any) -> float:
    """The largest of the logits of a text in chunks, relative to the largest logit."""
    model = checkpoint(hybrid_config(family, **changes))
    expected = transformers_logits(model, list(_TEXT[:60]))
    runner = prepare(model, compile=False).runner(4)
    pages = runner.cache.allocate(1)
    rows = [runner.forward([chunk(_TEXT, a, b, pages, b - a)]) for a, b in ((0, 37), (37, 38), (38, 60))]
    return float((torch.cat(rows) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("least", [0.001, 1.0])
def test_steps_of_mamba2_keep_their_limit(least: float) -> None:
    """In decoding, too, whose form in transformers does not; where no step is as short, both are the same."""
    assert _difference_from_transformers("nemotron_h", time_step_min=least) < 2 * FP32_LIMIT


def test_steps_without_a_limit_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = families._MAMBA2.weights
    unlimited = families._MAMBA2._replace(weights=lambda layer: {**weights(layer), "limits": (0.0, math.inf)})
    monkeypatch.setitem(families.FAMILIES, "NemotronHMamba2Mixer", unlimited)
    assert _difference_from_transformers("nemotron_h", time_step_min=1.0) > 100 * FP32_LIMIT


@pytest.mark.parametrize("mutant", slow(IN_THE_SELF_TEST))
def test_the_self_test_notices_mistakes(mutant, monkeypatch) -> None:
    mutant(monkeypatch)
    assert not check_invariance(poison(hybrid("qwen3_5_text", FP32).runner(16)), 160, 64).holds
