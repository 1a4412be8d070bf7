"""Start-up checks: do decoding and verification give the same bits on this machine, with this model? Do replays?

Losslessness in bf16 rests on the first (``shapes.py``). If it does not hold on a platform, the result says so: tokens
can then differ from plain decoding where two scores are closer than the rounding of the dtype. A recorded step that is
not, bit for bit, the eager one is not used. Hidden states that drafters read are compared as logits are; where they
differ, a drafter's guesses depend on the step, and the output does not. A compiled step from which hidden states leave
must have the logits of the one without.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.model.compiled.backend import DeviceBackend, Outputs, StepFunction
from paceline.model.kv_cache import KVCache, flat_rows
from paceline.model.linear.plan import LinearSlots, LinearStep
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep, StepArrays, StepPlan, StepShape
from paceline.types import PAGE_SIZE, pages_for

_CHUNKS = (2, 5, 9, 17, 33)
_NUM_TOKENS = 96
_MAX_STEP_TOKENS = 256
_BRANCH, _SHARED = 8, 2
"""Tokens of each of two branches that are verified in one step, and how many of them both share."""
_UNEVEN = 100
"""Tokens of a chunk that ends at no place where a library's request does."""
_LAST = 5
"""Tokens that are decoded, and verified, at the end of each long context."""
_FIRST_CONTEXT, _GROWTH = 1000, 4
"""The first long context, and how many times longer each of the next is."""
MIN_BUDGET_S = 1.0
"""Long contexts may take this long, or as long as everything before them took."""
_Rows = tuple[Tensor, ...]
"""Logits ``[n, vocab]`` of some tokens, and their states ``[n, width]`` if the model returns them."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class InvarianceReport:
    """Counts of logit rows that differ in any bit from decoding one token at a time, and how far was looked."""

    num_rows: int = 0
    num_different: int = 0
    num_flips: int = 0
    """Rows whose argmax differs."""
    max_difference: float = 0.0
    max_step_tokens: int = 0
    """Tokens of the largest step that was compared."""
    max_context: int = 0
    """Positions of the longest context that was compared."""
    num_states_different: int = 0
    """Rows whose hidden states differ, of a model that returns them."""
    has_branches: bool = False
    """True if branches of a tree were compared, too."""

    @property
    def holds(self) -> bool:
        """True if every bit was equal."""
        return self.num_different == 0

    def add(self, verified: Tensor, decoded: Tensor, *, step_tokens: int, context: int) -> None:
        """Compares logits ``[n, vocab]`` of a step of ``step_tokens`` that ends at position ``context``."""
        self.num_rows += len(verified)
        self.num_different += int((verified != decoded).any(-1).sum())
        self.num_flips += int((verified.argmax(-1) != decoded.argmax(-1)).sum())
        self.max_difference = max(self.max_difference, float((verified.float() - decoded.float()).abs().max()))
        self.max_step_tokens = max(self.max_step_tokens, step_tokens)
        self.max_context = max(self.max_context, context)

    def add_states(self, verified: Tensor, decoded: Tensor) -> None:
        """Compares the hidden states ``[n, width]`` of the same rows."""
        self.num_states_different += int((verified != decoded).any(-1).sum())

    def __str__(self) -> str:
        reach = f"steps of up to {self.max_step_tokens} tokens, contexts of up to {self.max_context}"
        reach += ", branches of a tree" if self.has_branches else ""
        if self.num_states_different:
            reach += f"; the hidden states of {self.num_states_different} rows differ, which drafters alone notice"
        if self.holds:
            return f"batch-invariant: {self.num_rows} verified rows equal decoding bit for bit ({reach})"
        return (
            f"NOT batch-invariant here: {self.num_different} of {self.num_rows} rows differ from decoding "
            f"(by at most {self.max_difference:.2g}; the argmax of {self.num_flips}; {reach}): tokens may differ from "
            "plain decoding at near-ties"
        )


def check_invariance(
    runner: ModelRunner, max_len: int | None = None, max_step_tokens: int = _MAX_STEP_TOKENS
) -> InvarianceReport:
    """Decodes random tokens one by one, then computes them in other ways and compares the bits.

    The other ways: in chunks, alone and with others; in a step of ``max_step_tokens``; by prefill, as a session that is
    resumed; a few at the end of ever longer contexts, up to ``max_len`` or until these have taken as long as all before
    them; as two branches of a tree, if the cache has two pages for them; and a block of a prompt for a library in
    chunks of two sizes. Starts at a context that crosses the 256-key boundary, if the cache and ``max_len`` positions
    have room for it. Leaves the KV cache without references.

    Raises:
        ConfigError: the cache has fewer than two pages.
    """
    started, available = time.perf_counter(), runner.cache.num_available
    if available < 2:
        raise ConfigError(
            f"the KV cache has room for {available} KV pages of {PAGE_SIZE} tokens: at least 2 are needed"
        )
    limit = min(max_len or 1 << 20, (available - 1) * PAGE_SIZE)
    start = min(
        3 * PAGE_SIZE, max(0, available // 2 - 2) * PAGE_SIZE, max(0, limit - _NUM_TOKENS) // PAGE_SIZE * PAGE_SIZE
    )
    total = min(start + _NUM_TOKENS, limit)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, runner.vocab_size, (total,), generator=generator).tolist()
    pages, spare = runner.cache.allocate(pages_for(total)), runner.cache.allocate(1)
    report = InvarianceReport()
    try:
        for first in range(0, start, PAGE_SIZE):
            runner.forward([_chunk(tokens, first, first + PAGE_SIZE, pages)])
        decoded = _decode(runner, [_chunk(tokens, i, i + 1, pages) for i in range(start, total)])
        few = _chunk(tokens, 0, min(3, total), spare)
        for size in _CHUNKS:
            for i in range(start, total, size):
                steps = [_chunk(tokens, i, min(i + size, total), pages), *([few] if i % 2 else [])]
                _compare(report, runner, steps, 0, _from(decoded, i - start))
        _check_largest_step(report, runner, tokens, start, (pages, spare), decoded, max_step_tokens)
        _check_prefill(report, runner, tokens, start, decoded, max_step_tokens)
        longest = min(max_len or 1 << 20, available * PAGE_SIZE)
        _check_long_contexts(report, runner, tokens, start, (pages, spare), longest, time.perf_counter() - started)
        _check_branches(report, runner, tokens, start, pages, decoded)
        check_blocks(report, runner, max_len, max_step_tokens)
        return report
    finally:
        runner.cache.release(pages)
        runner.cache.release(spare)


def num_different_rows(
    step: StepFunction, other: StepFunction, cache: KVCache, dtype: torch.dtype, window: int | None, vocab_size: int
) -> tuple[int, int]:
    """Compares the logits of two steps of one model on the same random tokens.

    The tokens are a prompt, tokens decoded one by one, and a chunk that is verified. ``cache`` has room for four pages.
    States that only one of the steps returns are ignored. Returns the number of rows that differ in a bit, and of all
    rows.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (3 * PAGE_SIZE,), generator=generator).tolist()
    first, last = PAGE_SIZE + 6, PAGE_SIZE + 26
    spans = [(0, first), *((i, i + 1) for i in range(first, last)), (last, len(tokens))]
    pages, rows = cache.allocate(pages_for(len(tokens))), []
    try:
        for each in (step, other):
            runner = ModelRunner(each, cache, dtype=dtype, sliding_window=window, vocab_size=vocab_size)
            rows.append(torch.cat([runner.forward([_chunk(tokens, *span, pages)]) for span in spans]))
    finally:
        cache.release(pages)
    return int((rows[0] != rows[1]).any(-1).sum()), len(rows[0])


def _forward(runner: ModelRunner, steps: list[SequenceStep]) -> list[_Rows]:
    """Rows with logits of each sequence of a step: its last ones."""
    num_logits = [step.num_logits for step in steps]
    if runner.features is None:
        return [(rows,) for rows in torch.split(runner.forward(steps), num_logits)]
    logits, states = runner.forward_with_states(steps)
    sizes = [len(step.token_ids) for step in steps] if runner.features.every_position else num_logits
    parts = [part[len(part) - num :] for part, num in zip(torch.split(states, sizes), num_logits, strict=True)]
    return [*zip(torch.split(logits, num_logits), parts, strict=True)]


def _decode(runner: ModelRunner, steps: list[SequenceStep]) -> _Rows:
    """The rows of steps that are taken one by one."""
    return tuple(torch.cat(part) for part in zip(*(_forward(runner, [step])[0] for step in steps), strict=True))


def _from(rows: _Rows, first: int) -> _Rows:
    return tuple(part[first:] for part in rows)


def _compare(
    report: InvarianceReport, runner: ModelRunner, steps: list[SequenceStep], which: int, decoded: _Rows
) -> None:
    """Runs a step, and compares the rows of one of its sequences with the first of ``decoded``."""
    rows, size = _forward(runner, steps)[which], sum(len(step.token_ids) for step in steps)
    num_rows = len(rows[0])
    report.add(rows[0], decoded[0][:num_rows], step_tokens=size, context=steps[which].positions[-1] + 1)
    if len(rows) > 1:
        report.add_states(rows[1], decoded[1][:num_rows])


def _check_largest_step(
    report: InvarianceReport,
    runner: ModelRunner,
    tokens: list[int],
    start: int,
    owned: tuple[list[int], list[int]],
    decoded: _Rows,
    max_step_tokens: int,
) -> None:
    """Verifies the first tokens as the first, and as the last, of a step as large as an engine takes."""
    pages, spare = owned
    ours = _chunk(tokens, start, min(start + _CHUNKS[-1], len(tokens)), pages)
    longest, room = min(PAGE_SIZE, len(tokens)), max_step_tokens - len(ours.token_ids)
    others = [_chunk(tokens, 0, min(longest, room - at), spare, num_logits=1) for at in range(0, room, longest)]
    _compare(report, runner, [ours, *others], 0, decoded)
    _compare(report, runner, [*others, ours], len(others), decoded)


def _check_prefill(
    report: InvarianceReport,
    runner: ModelRunner,
    tokens: list[int],
    start: int,
    decoded: _Rows,
    max_step_tokens: int,
) -> None:
    """Computes all tokens as a prompt, in other pages, the last ones from what the others left there."""
    if runner.cache.num_available < pages_for(len(tokens)):
        return
    pages = runner.cache.allocate(pages_for(len(tokens)))
    try:
        last = max(start, len(tokens) - _CHUNKS[2])
        for first, stop in pairwise(sorted({*range(0, last, max_step_tokens), last, len(tokens)})):
            num_logits = max(0, stop - max(first, start))
            step = _chunk(tokens, first, stop, pages, num_logits=num_logits)
            if num_logits:
                _compare(report, runner, [step], 0, _from(decoded, max(first, start) - start))
            else:
                runner.forward([step])
    finally:
        runner.cache.release(pages)


def _check_long_contexts(
    report: InvarianceReport,
    runner: ModelRunner,
    tokens: list[int],
    start: int,
    owned: tuple[list[int], list[int]],
    longest: int,
    spent_s: float,
) -> None:
    """Verifies and decodes the last tokens of contexts that consist of the same few KV pages again and again.

    Of such a context the rows of the last page alone are computed, and it takes no memory.
    """
    (first, *_), (last,) = owned
    limit_s, spent_s, took_s, length = max(MIN_BUDGET_S, spent_s), 0.0, 0.0, _FIRST_CONTEXT
    while length < _GROWTH * longest and spent_s + _GROWTH * took_s < limit_s:
        started, context = time.perf_counter(), min(length, longest)
        if context <= max(report.max_context, PAGE_SIZE + _LAST):
            return
        if length == _FIRST_CONTEXT:  # whole pages, of one text: only their beginnings were computed last
            for page in range(start, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
                runner.forward([_chunk(tokens, page, page + PAGE_SIZE, owned[0], num_logits=0)])
        # The last tokens lie in the second half of a page of their own.
        end = context // PAGE_SIZE * PAGE_SIZE - 3
        repeated = [*owned[0][: len(tokens) // PAGE_SIZE]] or [first]
        table = [repeated[i % len(repeated)] for i in range(pages_for(end) - 1)] + [last]
        span, before = range(end - _LAST, end), range((len(table) - 1) * PAGE_SIZE, end - _LAST)
        runner.forward([SequenceStep(tokens[: len(before)], before, before, table, num_logits=0)])
        steps = [SequenceStep(tokens[i : i + 1], [at], [at], table, num_logits=1) for i, at in enumerate(span)]
        decoded = _decode(runner, steps)
        verified = SequenceStep(tokens[:_LAST], span, span, table, num_logits=_LAST)  # a few rows back
        few = _chunk(tokens, 0, 3, [first], num_logits=1)
        _compare(report, runner, [verified], 0, decoded)
        _compare(report, runner, [few, verified], 1, decoded)
        took_s = time.perf_counter() - started
        spent_s += took_s
        length *= _GROWTH


def check_blocks(report: InvarianceReport, runner: ModelRunner, max_len: int | None, max_step_tokens: int) -> None:
    """Computes a block of a prompt in chunks of two sizes, if there is a library for it, and a few tokens after it."""
    block_len = runner.backend.block_len
    total = block_len + _BRANCH
    if not block_len or total > (max_len or total) or runner.cache.num_available < pages_for(total):
        return
    tokens = torch.randint(0, runner.vocab_size, (total,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for chunk, after in ((max_step_tokens, 1), (_UNEVEN, _BRANCH)):
        pages = runner.cache.allocate(pages_for(total))
        try:
            cuts = sorted({*range(0, block_len, chunk), *range(block_len, total, after), total})
            steps = [_chunk(tokens, first, stop, pages) for first, stop in pairwise(cuts)]
            for step in steps:
                step.num_by_library = len(step.token_ids) if step.rows[0] < block_len else 0
            found.append(_decode(runner, steps))
        finally:
            runner.cache.release(pages)
    report.add(found[1][0], found[0][0], step_tokens=max_step_tokens, context=total)


def _check_branches(
    report: InvarianceReport,
    runner: ModelRunner,
    tokens: list[int],
    start: int,
    pages: list[int],
    decoded: _Rows,
) -> None:
    """Verifies two branches in one step, as ``target/branches.py`` lays them out, and decodes a token after each.

    The branches leave each other within a page and end in the next one. Their rows hold other tokens before the step,
    so that a row which the step fails to write is noticed.
    """
    first = start + PAGE_SIZE - _BRANCH // 2
    fork, stop, split = first // PAGE_SIZE, first + _BRANCH, first + _SHARED
    if stop >= len(tokens) or runner.cache.num_available < 2:
        return
    private = runner.cache.allocate(2)
    try:
        runner.forward([_chunk(tokens, start, split, pages, num_logits=0)])
        table, other = [*pages[:fork], *private], [(token + 1) % runner.vocab_size for token in tokens]
        alone = [replace(_chunk(other, at, at + 1, table), committed=first) for at in range(split, stop + 1)]
        alone[0] = replace(alone[0], copies=[(pages[fork], private[0])])
        expected = _decode(runner, alone)
        noise = [(token + 2) % runner.vocab_size for token in tokens]
        rejected = [_chunk(noise, first, stop + 1, each, num_logits=1) for each in (pages, table)]
        runner.forward([replace(step, committed=first) for step in rejected])
        ours = replace(_chunk(tokens, first, stop, pages), also=[*enumerate(flat_rows(table, first, split))])
        steps = [replace(step, committed=first + 1) for step in (ours, _chunk(other, split, stop, table))]
        _compare(report, runner, steps, 1, expected)
        _compare(report, runner, steps, 0, _from(decoded, first - start))
        _compare(report, runner, [_chunk(tokens, stop, stop + 1, pages)], 0, _from(decoded, stop - start))
        _compare(report, runner, [_chunk(other, stop, stop + 1, table)], 0, _from(expected, stop - split))
        report.has_branches = True
    finally:
        runner.cache.release(private)


def check_replay(runner: ModelRunner, max_len: int | None = None) -> list[StepShape]:
    """Runs a random full step of every recorded shape both ways, and drops recordings whose bits differ.

    Positions stay below ``max_len``. Leaves the KV cache without references. Returns the shapes of the dropped
    recordings, for a warning; empty where no step is recorded.
    """
    backend = runner.backend
    if not isinstance(backend, DeviceBackend) or not backend.recorded:
        return []
    generator = torch.Generator().manual_seed(0)
    most = max(max(shape.pages, pages_for(shape.tokens)) for shape in backend.recorded)
    pages = runner.cache.allocate(min(most, runner.cache.num_available))
    dropped = []
    try:
        for shape in backend.recorded:
            farthest = min(max_len or shape.num_keys, backend.most_keys(shape))
            plan = _full_plan(shape, pages, runner.vocab_size, farthest, generator, runner.cache.linear)
            with torch.no_grad():
                eager, replayed = backend.compute(runner.step_function, plan, shape), backend.replay(plan, shape)
            if not backend.least(_equal(eager, replayed)):
                backend.forget(shape)
                dropped.append(shape)
    finally:
        runner.cache.release(pages)
    total = len(backend.recorded) + len(dropped)
    if dropped:
        log.warning("%d of %d recorded steps differ from eager ones and are not used: %s", len(dropped), total, dropped)
    else:
        log.info("%d recorded steps equal eager ones bit for bit", total)
    return dropped


def _equal(eager: Outputs, replayed: Outputs) -> bool:
    """True if logits, and states if there are any, have the same bits."""
    (logits, states), (other_logits, other_states) = eager, replayed
    if states is None or other_states is None:
        return torch.equal(logits, other_logits)
    return torch.equal(logits, other_logits) and torch.equal(states, other_states)


def _full_plan(
    shape: StepShape,
    pages: list[int],
    vocab_size: int,
    farthest: int,
    generator: torch.Generator,
    slots: LinearSlots | None,
) -> StepPlan:
    """A step of random tokens, spread over all rows. Each writes its own row and sees a random number of rows below
    ``farthest``. ``slots``: of linear layers, whose states are read and not written."""

    def random(*size: int, end: int) -> Tensor:
        return torch.randint(0, end, size, generator=generator)

    places, tokens = torch.arange(shape.rows * shape.row_len), torch.arange(shape.tokens)
    turn = tokens % len(places)
    scatter = turn % shape.rows * shape.row_len + turn // shape.rows
    gather = (places // shape.row_len % shape.tokens).index_copy(0, scatter, tokens).view(shape.rows, shape.row_len)
    write = torch.arange(shape.writes) % min(shape.tokens, len(pages) * PAGE_SIZE)
    owned = torch.tensor(pages)
    positions = random(shape.tokens, end=farthest)
    visible = key_positions = None
    if shape.is_tree:
        # Every token sees some key, in a sliding window too: in a tree the first one, which is as far on as any.
        visible = torch.rand(shape.rows, shape.row_len, shape.num_keys, generator=generator) < 0.5
        visible[:, :, 0] = True
        key_positions = random(shape.rows, shape.num_keys, end=farthest)
        key_positions[:, 0] = farthest - 1
    linear = None if slots is None else LinearStep.filled(shape.tokens, slots.slots.states)
    plan = StepPlan(shape.logit_rows, shape, torch.empty(shape.num_bytes, dtype=torch.uint8), linear=linear)
    values = StepArrays(
        tokens=random(shape.tokens, end=vocab_size),
        positions=positions,
        logits_index=torch.arange(shape.logit_rows) % shape.tokens,
        write_rows=owned[write // PAGE_SIZE] * PAGE_SIZE + write % PAGE_SIZE,
        write_tokens=write,
        page_table=owned[torch.arange(shape.pages) % len(pages)].repeat(shape.rows, 1),
        gather=gather,
        scatter=scatter,
        query_rows=positions[gather],
        visible=visible,
        key_positions=key_positions,
    )
    for field, value in zip(plan.arrays, values, strict=True):
        if field is not None:
            field.copy_(value)
    return plan


def _chunk(tokens: list[int], start: int, stop: int, pages: list[int], num_logits: int | None = None) -> SequenceStep:
    span = range(start, stop)
    return SequenceStep(tokens[start:stop], span, span, pages, stop - start if num_logits is None else num_logits)
