"""One forward of a ragged batch: sequences of new tokens in, logits out. Eager or compiled, same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.model.kv_cache import PAGE_SIZE, KVCache, pages_for
from paceline.model.shapes import QUERY_ROW_LEN, padded_pages, padded_row_len, padded_tokens

StepFunction = Callable[..., Tensor]
"""The traced signature: see ``StepInputs.tensors``."""


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


class StepInputs:
    """The tensors of one step, in the order of the traced signature."""

    def __init__(self, steps: Sequence[SequenceStep], cache: KVCache, dtype: torch.dtype, window: int | None) -> None:
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
        self.num_logits = len(logits_index)
        logits_index.extend([0] * (padded_tokens(self.num_logits) - self.num_logits))
        padding = padded_tokens(len(tokens)) - len(tokens)
        tokens.extend([0] * padding)
        positions.extend([0] * padding)
        write_rows.extend(range(cache.scratch_row, cache.scratch_row + padding))

        num_pages = padded_pages(max(pages_for(_num_rows(s)) for s in steps))
        gather: list[list[int]] = []
        scatter = [0] * len(tokens)
        page_table: list[list[int]] = []
        query_rows: list[list[int]] = []
        for i, (step, first, count, flat) in enumerate(rows):
            gather.append([flat + min(j, count - 1) for j in range(row_len)])
            for j in range(count):
                scatter[flat + j] = i * row_len + j
            table = list(step.pages[:num_pages])
            # Masked keys weigh exactly zero, but 0 * NaN is NaN: what pads a table must be the session's own.
            page_table.append(table + table[:1] * (num_pages - len(table)))
            query_rows.append([step.rows[first + min(j, count - 1)] for j in range(row_len)])

        key = torch.arange(num_pages * PAGE_SIZE)
        seen = key <= torch.tensor(query_rows)[:, :, None]  # [B, n, Tk]
        query_pos: Tensor | None = None
        if window is not None:
            query_pos = torch.tensor([[s.positions[f + min(j, c - 1)] for j in range(row_len)] for s, f, c, _ in rows])
        key_pos = key.expand(len(rows), -1)
        if any(s.visible is not None for s in steps):
            key_pos = key_pos.clone()
            for i, (step, first, count, _) in enumerate(rows):
                if step.visible is None:
                    continue
                width = step.visible.shape[1]
                index = torch.arange(row_len).clamp_(max=count - 1) + first
                seen[i, :, :width] = step.visible[index]
                seen[i, :, width:] = False
                if step.key_positions is not None:
                    key_pos[i, :width] = step.key_positions
        masks = [_additive(seen, dtype)]
        if window is not None and query_pos is not None:
            masks.append(_additive(seen & (query_pos[:, :, None] - key_pos[:, None, :] < window), dtype))

        device = cache.keys[0].device
        self.tensors: tuple[Any, ...] = (
            torch.tensor([tokens], device=device),  # [1, T]
            torch.tensor([positions], device=device),  # [1, T]
            torch.tensor(logits_index, device=device),  # [R]
            torch.tensor(write_rows, device=device),  # [T]
            torch.tensor(page_table, device=device),  # [B, pages]
            torch.tensor(gather, device=device),  # [B, n]
            torch.tensor(scatter, device=device),  # [T]
            [m.to(device) for m in masks],  # each [B, 1, n, Tk]
            cache.keys,
            cache.values,
        )


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
    ) -> None:
        self.cache = cache
        self.dtype = dtype
        self.sliding_window = sliding_window
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self._step = step

    def forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        """Writes the KV of all new tokens and returns logits ``[sum(num_logits), vocab_size]``, steps in order."""
        inputs = StepInputs(steps, self.cache, self.dtype, self.sliding_window)
        self.num_forwards += 1
        with torch.no_grad():
            return self._step(*inputs.tensors)[0, : inputs.num_logits]


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


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill_(~seen, float("-inf")).unsqueeze(1)
