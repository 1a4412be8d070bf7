"""Start-up checks: do decoding and verification give the same bits on this machine, with this model? Do replays?

Losslessness in bf16 rests on the first (``shapes.py``). A platform that does not hold it is told so plainly; tokens
can then differ from plain decoding where two scores are closer than the rounding of the dtype. A recorded step that
is not, bit for bit, the eager one is not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep, StepPlan, StepShape
from paceline.types import PAGE_SIZE, pages_for

_CHUNKS = (2, 5, 9, 17)
_NUM_TOKENS = 96
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """Counts of logit rows that differ in any bit from decoding one token at a time."""

    num_rows: int
    num_different: int
    num_flips: int
    """Rows whose argmax differs."""
    max_difference: float

    @property
    def holds(self) -> bool:
        """True if every bit was equal."""
        return self.num_different == 0

    def __str__(self) -> str:
        if self.holds:
            return f"batch-invariant: {self.num_rows} verified rows equal decoding bit for bit"
        return (
            f"NOT batch-invariant here: {self.num_different} of {self.num_rows} rows differ from decoding "
            f"(by at most {self.max_difference:.2g}; the argmax of {self.num_flips}): tokens may differ from plain "
            "decoding at near-ties"
        )


def check_invariance(runner: ModelRunner, max_len: int | None = None) -> InvarianceReport:
    """Decodes up to ``_NUM_TOKENS`` random tokens one by one, then in chunks, alone and beside others; compares bits.

    Starts at a context that crosses the 256-key boundary, if the cache and ``max_len`` positions have room for it.
    Leaves the KV cache without references.

    Raises:
        ConfigError: the cache has fewer than two pages.
    """
    available = runner.cache.num_available
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
    pages, beside = runner.cache.allocate(pages_for(total)), runner.cache.allocate(1)
    try:
        for first in range(0, start, PAGE_SIZE):
            runner.forward([_chunk(tokens, first, first + PAGE_SIZE, pages)])
        reference = torch.cat([runner.forward([_chunk(tokens, i, i + 1, pages)]) for i in range(start, total)])
        different = flips = rows = 0
        largest = 0.0
        for size in _CHUNKS:
            chunks: list[Tensor] = []
            for i in range(start, total, size):
                steps = [_chunk(tokens, i, min(i + size, total), pages)]
                if i % 2:
                    steps.append(_chunk(tokens, 0, min(3, total), beside))
                chunks.append(runner.forward(steps)[: min(size, total - i)])
            verified = torch.cat(chunks)
            rows += len(verified)
            different += int((verified != reference).any(-1).sum())
            flips += int((verified.argmax(-1) != reference.argmax(-1)).sum())
            largest = max(largest, float((verified.float() - reference.float()).abs().max()))
        return InvarianceReport(rows, different, flips, largest)
    finally:
        runner.cache.release(pages)
        runner.cache.release(beside)


def check_replay(runner: ModelRunner, max_len: int | None = None) -> list[StepShape]:
    """Runs a random full step of every recorded shape both ways, and drops recordings whose bits differ.

    Positions stay below ``max_len``. Leaves the KV cache without references. Returns what was dropped, which a
    warning names; nothing where no step is recorded.
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
            plan = _full_plan(shape, pages, runner.vocab_size, max_len or 1 << 20, generator)
            with torch.no_grad():
                eager, replayed = backend.compute(runner._step, plan, shape), backend.replay(plan, shape)
            if not torch.equal(eager, replayed):
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


def _full_plan(
    shape: StepShape, pages: list[int], vocab_size: int, max_len: int, generator: torch.Generator
) -> StepPlan:
    """A step without padding: random tokens, each writing a row of its own, that see random numbers of rows."""

    def random(*size: int, end: int) -> Tensor:
        return torch.randint(0, end, size, generator=generator)

    places = torch.arange(shape.rows * shape.row_len)
    write = torch.arange(shape.tokens) % (len(pages) * PAGE_SIZE)
    owned = torch.tensor(pages)
    visible = torch.rand(shape.rows, shape.row_len, shape.num_keys, generator=generator) < 0.5
    visible[:, :, 0] = True
    return StepPlan(
        num_logits=shape.wanted,
        tokens=random(shape.tokens, end=vocab_size),
        positions=random(shape.tokens, end=min(max_len, shape.num_keys)),
        logits_index=torch.arange(shape.wanted) % shape.tokens,
        write_rows=owned[write // PAGE_SIZE] * PAGE_SIZE + write % PAGE_SIZE,
        page_table=owned[torch.arange(shape.pages) % len(pages)].repeat(shape.rows, 1),
        gather=(places % shape.tokens).view(shape.rows, shape.row_len),
        scatter=torch.arange(shape.tokens) % len(places),
        query_rows=random(shape.rows, shape.row_len, end=shape.num_keys),
        visible=visible if shape.is_tree else None,
        key_positions=random(shape.rows, shape.num_keys, end=min(max_len, shape.num_keys)) if shape.is_tree else None,
    )


def _chunk(tokens: list[int], start: int, stop: int, pages: list[int]) -> SequenceStep:
    span = range(start, stop)
    return SequenceStep(tokens[start:stop], span, span, pages, num_logits=stop - start)
