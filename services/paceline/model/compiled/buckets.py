"""Step shapes that are recorded once and replayed: which there are, which one a step takes, and how it is filled.

A recorded step reads its integers from one buffer at fixed places and knows its shape only. So a step is *packed*: its
plan is written into a buffer of the shape that runs it. The rest of the buffer is padding that no result depends on.
The same buffer is what crosses to the device, in one copy. Nothing here knows a device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from paceline.model import layout
from paceline.model.shapes import QUERY_ROW_LEN, padded_pages, padded_tokens
from paceline.model.step_plan import StepArrays, StepShape, arrays_of
from paceline.types import PAGE_SIZE

if TYPE_CHECKING:
    from paceline.model.step_plan import StepPlan

_MIN_TOKENS = 16
"""Tokens of the smallest recorded step: one tile of a tensor core. So decoding and short verification run the same
matrix products, bit for bit, and both wait for the weights."""
_ROW_LENGTHS = (4, 16, 32)
"""Recorded query row lengths: decoding, and proposals or tree levels of up to 31 tokens."""
_CHUNK_LENGTHS, _CHUNKS = (64, 128, 256), (1, 2, 4)
"""Recorded lengths and numbers of prompt chunks. Only the last tokens of each chunk have logits."""
_MIN_PAGES, _PAGES_GROWTH = 8, 4
"""Page tables grow in large steps, so that there are few."""
_FEW_TOKENS, _STEPS_OF_AN_OCTAVE = 128, 4
"""Numbers of tokens that are recorded for attention in place: multiples of 16 up to 128, then four for each
doubling."""
_MOST_LOGIT_ROWS = 512
"""Rows of logits of the largest recorded steps: more tokens than these are prompts, which want few."""
_REMEMBERED = 4096


def pack(plan: StepPlan, shape: StepShape, scratch_row: int, buffer: Tensor) -> None:
    """Writes ``plan`` into a host ``buffer`` laid out for ``shape``, which must cover it.

    Writes that pad go to the scratch page, and the results of tokens that pad go nowhere. Padding places repeat the
    last place of their query row, and padding query rows repeat the first row. They see real keys, so nothing in them
    is NaN. Pages that pad repeat the first page of the row and are not seen.
    """
    own = plan.shape
    assert shape.covers(own), f"{own} does not fit {shape}"
    if layout.usable():
        layout.pack(own, plan.buffer, shape, buffer, scratch_row)
    else:
        _pack(own, arrays_of(own, plan.buffer), shape, arrays_of(shape, buffer), scratch_row)


def _pack(own: StepShape, plan: StepArrays, shape: StepShape, into: StepArrays, scratch_row: int) -> None:
    """Reference implementation of ``layout.pack``."""
    num_tokens, num_rows, row_len, num_pages = own.tokens, own.rows, own.row_len, own.pages
    for field, values in ((into.tokens, plan.tokens), (into.positions, plan.positions)):
        field[:num_tokens], field[num_tokens:] = values, 0
    into.write_rows[: own.writes] = plan.write_rows
    into.write_rows[own.writes :] = scratch_row + np.arange(shape.writes - own.writes) % PAGE_SIZE
    into.write_tokens[: own.writes], into.write_tokens[own.writes :] = plan.write_tokens, 0
    into.logits_index[: own.logit_rows], into.logits_index[own.logit_rows :] = plan.logits_index, 0
    into.scatter[:num_tokens] = plan.scatter + plan.scatter // row_len * (shape.row_len - row_len)
    into.scatter[num_tokens:] = 0
    into.page_table[:num_rows, :num_pages] = plan.page_table
    into.page_table[:num_rows, num_pages:] = into.page_table[:num_rows, :1]
    into.page_table[num_rows:] = into.page_table[0]
    for field, values in ((into.gather, plan.gather), (into.query_rows, plan.query_rows)):
        field[:num_rows, :row_len] = values
        field[:num_rows, row_len:] = field[:num_rows, row_len - 1 : row_len]
        field[num_rows:] = field[0]
    if not shape.is_tree:
        return
    num_keys = own.num_keys
    into.key_positions[:num_rows, :num_keys] = plan.key_positions
    into.key_positions[:num_rows, num_keys:] = 0
    into.key_positions[num_rows:] = into.key_positions[0]
    visible = into.visible
    visible[:num_rows, :row_len, :num_keys] = plan.visible
    visible[:num_rows, row_len:, :num_keys] = visible[:num_rows, row_len - 1 : row_len, :num_keys]
    visible[:num_rows, :, num_keys:] = False
    visible[num_rows:] = visible[0]


class Fits:
    """The cheapest of some shapes that covers another: one comparison of arrays, remembered for repeated sizes."""

    def __init__(self, recorded: Sequence[StepShape] = ()) -> None:
        """``recorded``: the shapes."""
        self._shapes = sorted(recorded, key=lambda shape: shape.cost)  # stable, as ``min`` is
        self._sizes = np.array([_comparable(shape) for shape in self._shapes])
        self.best = functools.lru_cache(_REMEMBERED)(self._best)

    def _best(self, shape: StepShape) -> StepShape | None:
        if not self._shapes:
            return None
        covers = np.all(self._sizes >= np.array(_comparable(shape)), axis=1)
        index = int(covers.argmax())
        return self._shapes[index] if covers[index] else None


def _comparable(shape: StepShape) -> tuple[int, ...]:
    """Numbers none of which is larger in a shape that is covered."""
    kind = int(shape.is_tree)
    return (shape.tokens, shape.writes, shape.logit_rows, shape.rows, shape.row_len, shape.pages, kind, -kind)


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest steps of an engine that are worth recording."""

    max_rows: int
    """Sessions of one step."""
    max_tokens: int
    max_pages: int
    """KV pages of one session."""
    is_tree: bool = False


def shapes_to_record(limits: Limits, most: int) -> list[StepShape]:
    """Returns at most ``most`` shapes, the most useful first: few sessions before many, short contexts before long.

    Each shape has two writes for a token, so that tokens that several branches share can be written to all of them. The
    number of rows doubles from one shape to the next. For each number of rows, the number of tokens doubles, too: from
    one token for each row, or from one full row, to full rows. Proposals and trees differ in length, so rows are rarely
    full.
    """
    max_pages, max_tokens = padded_pages(limits.max_pages), max(_MIN_TOKENS, padded_tokens(limits.max_tokens))
    sizes = []  # tokens, logits, rows, row_len
    for length in _ROW_LENGTHS:
        for rows in _growing(1, min(limits.max_rows, limits.max_tokens)):
            least = padded_tokens(max(_MIN_TOKENS, rows, length))
            sizes += [(tokens, tokens, rows, length) for tokens in _growing(least, padded_tokens(rows * length))]
    for length, rows in itertools.product(() if limits.is_tree else _CHUNK_LENGTHS, _CHUNKS):
        if rows <= limits.max_rows and length <= max_tokens:
            sizes.append((min(rows * length, max_tokens), rows * _MIN_TOKENS, rows, length))
    shapes = {
        StepShape(tokens, 2 * tokens, logit_rows, rows, length, pages, limits.is_tree)
        for tokens, logit_rows, rows, length in sizes
        if tokens <= max_tokens
        for pages in _growing(min(_MIN_PAGES, max_pages), max_pages, _PAGES_GROWTH)
    }
    return sorted(shapes, key=lambda s: (s.rows * s.pages, s.tokens, s.row_len))[:most]


def token_shapes(limits: Limits, most: int) -> list[StepShape]:
    """Returns at most ``most`` shapes for attention in place, shapes of few tokens first.

    The cost of such a step depends on the keys that its tokens see (``attention/schedule.py``), so its number of tokens
    is its shape. It has room for any spread of them over sessions, and for the longest context. A step of mostly prompt
    tokens has few rows of logits. So each number of tokens also has a shape with a quarter of these rows.
    """
    pages, last = padded_pages(limits.max_pages), max(_MIN_TOKENS, padded_tokens(limits.max_tokens))
    shapes = []
    for tokens in _token_counts(last):
        rows = min(tokens, limits.max_rows + tokens // QUERY_ROW_LEN)
        most_rows = min(tokens, _MOST_LOGIT_ROWS)
        for logit_rows in sorted({max(_MIN_TOKENS, padded_tokens(most_rows // 4)), most_rows}):
            shapes.append(StepShape(tokens, 2 * tokens, logit_rows, rows, QUERY_ROW_LEN, pages))
    return shapes[:most]


def _token_counts(last: int) -> list[int]:
    counts, step = [], _MIN_TOKENS
    tokens = _MIN_TOKENS
    while tokens < last:
        counts.append(tokens)
        if tokens >= _FEW_TOKENS and tokens % (step * 2 * _STEPS_OF_AN_OCTAVE) == 0:
            step = tokens // _STEPS_OF_AN_OCTAVE
        tokens += step
    return [*counts, last]


def _growing(first: int, last: int, by: int = 2) -> Sequence[int]:
    """``first``, ``by`` times that, ... and ``last``, which ends it; ``first`` alone if it is as large."""
    values, last = [], max(first, last)
    while first < last:
        values.append(first)
        first *= by
    return [*values, last]
