"""One forward of a ragged batch: sequences of new tokens in, logits out. Eager or compiled, same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paceline.model.compiled.backend import Backend, HostBackend, attention_masks
from paceline.model.compiled.backend import StepFunction as StepFunction  # also part of what this module offers
from paceline.model.compiled.buckets import Limits, StepShape
from paceline.model.kv_cache import PAGE_SIZE, KVCache, pages_for
from paceline.model.shapes import QUERY_ROW_LEN, padded_pages, padded_row_len, padded_tokens


@dataclass(slots=True)
class SequenceStep:
    """The new tokens of one session in a step.

    Rows are the session's KV rows; a token is written to its row and sees rows [0, row] of its session, unless
    ``visible`` says otherwise (a tree, where a row does not follow its neighbour).
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each token."""
    rows: Sequence[int]
    pages: Sequence[int]
    """The session's page table; covers every row that is written or seen."""
    num_logits: int
    """Logits are wanted for the last ``num_logits`` tokens."""
    visible: Tensor | None = None
    """bool [len(token_ids), num_rows]; rows beyond are hidden."""
    key_positions: Tensor | None = None
    """Rotary position of each visible row, where rows are no positions (sliding windows need them)."""


_INTEGERS = ("tokens", "positions", "logits_index", "write_rows", "page_table", "gather", "scatter", "query_rows")
_NUM_SIZES = 7


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward as integers on the host, padded to the shapes of ``shapes.py``.

    T tokens in B query rows of n, with page tables of one length. Everything that a rank needs to take the same step
    as another: page numbers mean the same on all of them.
    """

    num_logits: int
    """Rows of the result that are wanted; the others are padding."""
    tokens: Tensor
    """[T] ids."""
    positions: Tensor
    """[T] rotary positions."""
    logits_index: Tensor
    """[R] tokens whose logits are computed."""
    write_rows: Tensor
    """[T] flat KV rows."""
    page_table: Tensor
    """[B, pages]."""
    gather: Tensor
    """[B, n] the token at each place of a query row."""
    scatter: Tensor
    """[T] the place of each token among the B * n."""
    query_rows: Tensor
    """[B, n] session row of each place: it sees rows up to this one."""
    visible: Tensor | None = None
    """bool [B, n, pages * PAGE_SIZE], instead of ``query_rows``, if a session of the step is a tree."""
    key_positions: Tensor | None = None
    """[B, pages * PAGE_SIZE] rotary position of each row, if it is not the row's own number."""

    @classmethod
    def of(cls, steps: Sequence[SequenceStep], scratch_row: int) -> Self:
        """Lays the new tokens of sessions out."""
        tokens: list[int] = []
        positions: list[int] = []
        write_rows: list[int] = []
        logits_index: list[int] = []
        row_len = _row_len(steps)
        rows: list[tuple[SequenceStep, int, int, int]] = []  # (step, first token, number, flat index of the first)
        for step in steps:
            base = len(tokens)
            tokens.extend(step.token_ids)
            positions.extend(step.positions)
            pages = step.pages
            write_rows.extend(pages[r // PAGE_SIZE] * PAGE_SIZE + r % PAGE_SIZE for r in step.rows)
            end = len(tokens)
            logits_index.extend(range(end - step.num_logits, end))
            for first in range(0, end - base, row_len):
                rows.append((step, first, min(row_len, end - base - first), base + first))
        num_logits = len(logits_index)
        logits_index.extend([0] * (padded_tokens(num_logits) - num_logits))
        padding = padded_tokens(len(tokens)) - len(tokens)
        tokens.extend([0] * padding)
        positions.extend([0] * padding)
        write_rows.extend(range(scratch_row, scratch_row + padding))

        num_pages = padded_pages(max(pages_for(_num_rows(s)) for s in steps))
        gather: list[int] = []
        scatter: list[int] = []
        page_table: list[int] = []
        query_rows: list[int] = []
        for step, first, count, flat in rows:
            fill = row_len - count
            gather += range(flat, flat + count)
            gather += [flat + count - 1] * fill
            query_rows += step.rows[first : first + count]
            query_rows += [step.rows[first + count - 1]] * fill
            scatter += range(len(gather) - row_len, len(gather) - fill)
            page_table += step.pages[:num_pages]
            # Masked keys weigh exactly zero, but 0 * NaN is NaN: what pads a table must be the session's own.
            page_table += [step.pages[0]] * (num_pages - len(step.pages))
        scatter += [0] * padding

        # One tensor of all integers: a crossing from Python to torch costs as much as a hundred of them.
        flat_lists = (tokens, positions, logits_index, write_rows, page_table, gather, scatter, query_rows)
        parts = torch.split(torch.tensor([*chain(*flat_lists)]), [len(part) for part in flat_lists])
        by_name = dict(zip(_INTEGERS, parts, strict=True))
        for name in ("page_table", "gather", "query_rows"):
            by_name[name] = by_name[name].view(len(rows), -1)
        visible: Tensor | None = None
        key_positions: Tensor | None = None
        if any(s.visible is not None for s in steps):
            key = np.arange(num_pages * PAGE_SIZE)
            seen, key_position = np.zeros((len(rows), row_len, len(key)), np.bool_), np.tile(key, (len(rows), 1))
            for i, (step, first, count, _) in enumerate(rows):
                if step.visible is None:
                    seen[i] = key <= np.array(query_rows[i * row_len : (i + 1) * row_len])[:, None]
                    continue
                of_step, width = step.visible.numpy(), step.visible.shape[1]
                seen[i, :count, :width] = of_step[first : first + count]
                seen[i, count:, :width] = of_step[first + count - 1]
                if step.key_positions is not None:
                    key_position[i, :width] = step.key_positions.numpy()
            visible, key_positions = torch.from_numpy(seen), torch.from_numpy(key_position)
        return cls(num_logits, **by_name, visible=visible, key_positions=key_positions)

    @property
    def shape(self) -> StepShape:
        """The sizes that a recorded step must cover."""
        rows, row_len = self.gather.shape
        return StepShape(
            len(self.tokens), len(self.logits_index), rows, row_len, self.page_table.shape[1], self.visible is not None
        )

    def masks(self, dtype: torch.dtype, window: int | None) -> list[Tensor]:
        """Additive masks ``[B, 1, n, pages * PAGE_SIZE]``: the causal one, and one with the sliding window if any."""
        return attention_masks(self, dtype, window)

    def inputs(self, cache: KVCache, dtype: torch.dtype, window: int | None) -> tuple[Any, ...]:
        """The arguments of the traced signature, on the device of ``cache``."""
        device = cache.keys[0].device
        return (
            self.tokens[None].to(device),
            self.positions[None].to(device),
            self.logits_index.to(device),
            self.write_rows.to(device),
            self.page_table.to(device),
            self.gather.to(device),
            self.scatter.to(device),
            [mask.to(device) for mask in self.masks(dtype, window)],
            cache.keys,
            cache.values,
        )

    def encode(self) -> bytes:
        """A frame for ``decode``: the sizes and all integers as int32, then the tree's bits."""
        parts = [getattr(self, name).reshape(-1) for name in _INTEGERS]
        if self.key_positions is not None:
            parts.append(self.key_positions.reshape(-1))
        (num_rows, row_len), num_pages = self.gather.shape, self.page_table.shape[1]
        sizes = [self.num_logits, len(self.tokens), len(self.logits_index), num_rows, row_len, num_pages]
        is_tree = self.visible is not None
        frame = torch.cat([torch.tensor([*sizes, int(is_tree)]), *parts]).to(torch.int32).numpy().tobytes()
        return frame + self.visible.numpy().tobytes() if self.visible is not None else frame

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """The plan that another rank has encoded."""
        sizes = torch.frombuffer(bytearray(frame[: 4 * _NUM_SIZES]), dtype=torch.int32).tolist()
        num_logits, num_tokens, num_wanted, num_rows, row_len, num_pages, is_tree = sizes
        places, keys = (num_rows, row_len), num_pages * PAGE_SIZE
        flat = (num_tokens,)
        shapes = [flat, flat, (num_wanted,), flat, (num_rows, num_pages), places, flat, places]
        if is_tree:
            shapes.append((num_rows, keys))
        lengths = [math.prod(shape) for shape in shapes]
        end = 4 * (_NUM_SIZES + sum(lengths))
        integers = torch.frombuffer(bytearray(frame[4 * _NUM_SIZES : end]), dtype=torch.int32).long()
        parts = zip((*_INTEGERS, "key_positions"), torch.split(integers, lengths), shapes, strict=False)
        tensors = {name: part.view(shape) for name, part, shape in parts}
        visible = torch.frombuffer(bytearray(frame[end:]), dtype=torch.bool).view(*places, keys) if is_tree else None
        return cls(num_logits, visible=visible, **tensors)


class ModelRunner:
    """Runs steps of one model against one KV cache on one device. Owned by one engine thread."""

    def __init__(
        self,
        step: StepFunction,
        cache: KVCache,
        *,
        dtype: torch.dtype,
        sliding_window: int | None,
        vocab_size: int,
        backend: Backend | None = None,
    ) -> None:
        """``backend``: how steps reach the device; by default one by one, from the host's own memory."""
        self.cache = cache
        self.dtype = dtype
        self.sliding_window = sliding_window
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self.backend = backend or HostBackend(cache, dtype, sliding_window)
        self._step = step

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Writes the KV of all new tokens and returns logits ``[sum(num_logits), vocab_size]``, steps in order."""
        return self.run(StepPlan.of(steps, self.cache.scratch_row))

    def close(self) -> None:
        """Gives up what other processes take part in. Idempotent."""

    def run(self, plan: StepPlan) -> Tensor:
        """``forward`` of a plan: logits ``[num_logits, vocab_size]``."""
        self.num_forwards += 1
        with torch.no_grad():
            return self.backend.run(self._step, plan)

    def record(self, limits: Limits) -> None:
        """Records the steps of an engine that keeps to ``limits``, where the backend replays steps; see ``Backend``."""
        with torch.no_grad():
            self.backend.record(self._step, limits)


def _num_rows(step: SequenceStep) -> int:
    if step.visible is not None:
        return max(int(step.visible.shape[1]), max(step.rows) + 1)
    return max(step.rows) + 1


def _row_len(steps: Sequence[SequenceStep]) -> int:
    """Query row length: whole sequences, unless long ones share the step with short ones."""
    lengths = [len(s.token_ids) for s in steps]
    longest = padded_row_len(max(lengths))
    if len(lengths) > 1 and longest > QUERY_ROW_LEN and min(lengths) <= longest // 2:
        return max(QUERY_ROW_LEN, padded_row_len(min(lengths)))
    return longest
