"""One forward as integers: the new tokens of a batch of sessions, laid out for the model.

Made on the host, sent to other ranks as one frame, packed into one buffer for a recorded step. Knows no weights and
runs nothing.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.model.kv_cache import KVCache
from paceline.model.shapes import QUERY_ROW_LEN, padded_pages, padded_row_len, padded_tokens
from paceline.types import PAGE_SIZE, pages_for


@dataclass(slots=True)
class SequenceStep:
    """The new tokens of one session in a step.

    Rows are the session's KV rows; a token is written to its row and sees rows [0, row] of its session, unless
    ``visible`` says otherwise (a tree, where a row does not follow its neighbour).

    A branch of a subtree that the target verifies is a sequence of its own: its page table holds private pages from
    the one on in which it leaves the others (``target/branches.py``), so that each of its tokens has the row of its
    position, as in plain decoding. Tokens that branches share are computed in one of them and written to all.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each token."""
    rows: Sequence[int]
    pages: Sequence[int]
    """The session's page table; covers every row that is written or seen. An ``array("q")`` is read as it is."""
    num_logits: int
    """Logits are wanted for the last ``num_logits`` tokens."""
    visible: Tensor | None = None
    """bool [len(token_ids), num_rows]; rows beyond are hidden."""
    key_positions: Tensor | None = None
    """Rotary position of each visible row, where rows are no positions (sliding windows need them)."""
    also: Sequence[tuple[int, int]] = ()
    """Further flat KV rows that tokens of this step are written to: (index among ``token_ids``, row) each."""
    copies: Sequence[tuple[int, int]] = ()
    """Pages that are copied before the step: (from, to) each."""


INTEGER_BYTES = 8
"""Bytes of an integer in the buffer of ``StepArrays``."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The sizes of a step, which are all that a recorded step is fixed to."""

    tokens: int
    writes: int
    """KV rows that are written."""
    wanted: int
    """Rows of logits."""
    rows: int
    """Query rows."""
    row_len: int
    pages: int
    """Length of the page tables."""
    is_tree: bool = False
    """True: the step lists what each token sees (``visible``); False: a token sees every row up to its own."""

    @property
    def num_keys(self) -> int:
        """Keys that each query row attends to, masked ones included."""
        return self.pages * PAGE_SIZE

    def covers(self, other: StepShape) -> bool:
        """True if a step of the ``other`` shape can be packed into this one."""
        return (
            self.is_tree == other.is_tree
            and self.tokens >= other.tokens
            and self.writes >= other.writes
            and self.wanted >= other.wanted
            and self.rows >= other.rows
            and self.row_len >= other.row_len
            and self.pages >= other.pages
        )

    @property
    def cost(self) -> tuple[int, int, int]:
        """Orders shapes by what they compute: keys times places first, which padding multiplies."""
        return self.rows * self.row_len * self.num_keys, self.tokens, self.wanted

    @property
    def num_integers(self) -> int:
        """Integers in the front part of the packed buffer."""
        return sum(math.prod(size) for size in self._sizes())

    @property
    def num_bytes(self) -> int:
        """Size of the packed buffer in bytes."""
        return self.num_integers * INTEGER_BYTES + (self.rows * self.row_len * self.num_keys if self.is_tree else 0)

    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the integer fields, in the order of ``StepArrays``."""
        flat, writes, places = (self.tokens,), (self.writes,), (self.rows, self.row_len)
        sizes = (flat, flat, (self.wanted,), writes, writes, (self.rows, self.pages), places, flat, places)
        return (*sizes, (self.rows, self.num_keys)) if self.is_tree else sizes


class StepArrays(NamedTuple):
    """A step's fields as views of one buffer; see ``StepPlan``. Tensors or arrays, on any device."""

    tokens: Any
    positions: Any
    logits_index: Any
    write_rows: Any
    write_tokens: Any
    page_table: Any
    gather: Any
    scatter: Any
    query_rows: Any
    key_positions: Any = None
    visible: Any = None


_INTEGERS = (
    "tokens",
    "positions",
    "logits_index",
    "write_rows",
    "write_tokens",
    "page_table",
    "gather",
    "scatter",
    "query_rows",
)
"""Fields of a plan that are always there, in the order of a frame."""
_NUM_SIZES = 9
"""Integers that begin a frame: the sizes, whether the step has a tree, and how many pages are copied."""


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
    """[W] flat KV rows that are written."""
    write_tokens: Tensor
    """[W] the token whose keys and values each of them takes: most tokens once, in their order."""
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
    copies: tuple[tuple[int, int], ...] = ()
    """Pages that are copied before the step, on every rank: (from, to) each."""

    @classmethod
    def of(cls, steps: Sequence[SequenceStep], scratch_row: int, spare_tokens: int = 0) -> Self:
        """Lays the new tokens of sessions out; at least ``spare_tokens`` of padding come behind them.

        Sequence i owns tokens [first[i], first[i] + lengths[i]), page numbers [tables[i], tables[i] + num_pages_of[i])
        and query rows [row[i], row[i + 1]). All of it is computed by columns: no token or page is looked at alone.
        """
        num_tokens_of = [len(step.token_ids) for step in steps]
        num_tokens, row_len = sum(num_tokens_of), _row_len(num_tokens_of)
        lengths = np.array(num_tokens_of)
        ends = lengths.cumsum()
        first = ends - lengths
        ids = np.fromiter(chain.from_iterable([step.token_ids for step in steps]), np.int64, num_tokens)
        rows = np.fromiter(chain.from_iterable([step.rows for step in steps]), np.int64, num_tokens)
        positions = rows
        if any(step.positions is not step.rows for step in steps):
            positions = np.fromiter(chain.from_iterable([step.positions for step in steps]), np.int64, num_tokens)
        pages = [step.pages if isinstance(step.pages, array) else array("q", step.pages) for step in steps]
        num_pages_of = np.array([len(table) for table in pages])
        tables = num_pages_of.cumsum() - num_pages_of
        page_ids = np.frombuffer(b"".join(pages), np.int64)
        page, within = np.divmod(rows, PAGE_SIZE)
        also: list[tuple[int, int]] = []
        if any(step.also for step in steps):
            bases = first.tolist()
            also = [(base + token, row) for base, step in zip(bases, steps, strict=True) for token, row in step.also]
        num_logits_of = np.array([step.num_logits for step in steps])
        num_logits = int(num_logits_of.sum())
        num_rows = int(rows.max()) + 1
        is_tree = any(step.visible is not None for step in steps)
        if is_tree:
            num_rows = max(num_rows, *(step.visible.shape[1] for step in steps if step.visible is not None))
        num_pages = padded_pages(pages_for(num_rows))

        # One buffer of all integers: a crossing to torch costs as much as a hundred of them.
        num_writes = num_tokens + len(also)
        padded = padded_tokens(num_tokens, spare_tokens)
        rows_of = -(-lengths // row_len)  # query rows of each sequence
        num_query_rows = int(rows_of.sum())
        sizes = [
            padded,
            padded,
            padded_tokens(num_logits, spare_tokens),
            padded_tokens(num_writes, spare_tokens),
            padded_tokens(num_writes, spare_tokens),
            num_query_rows * num_pages,
            num_query_rows * row_len,
            padded,
            num_query_rows * row_len,
        ]
        buffer = np.zeros(sum(sizes), np.int64)
        whole = torch.from_numpy(buffer)
        by_name = dict(zip(_INTEGERS, torch.split(whole, sizes), strict=True))
        stops = [*accumulate(sizes)]
        into = StepArrays(*(buffer[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)))
        into.tokens[:num_tokens] = ids
        into.positions[:num_tokens] = positions
        into.logits_index[:num_logits] = _ragged(ends - num_logits_of, num_logits_of)
        into.write_rows[num_writes:] = scratch_row + np.arange(sizes[3] - num_writes) % PAGE_SIZE
        into.write_tokens[:num_tokens] = np.arange(num_tokens)
        if also:
            into.write_tokens[num_tokens:num_writes], into.write_rows[num_tokens:num_writes] = zip(*also, strict=True)
        # Masked keys weigh exactly zero, but 0 * NaN is NaN: what pads a table must be the session's own.
        column = np.arange(num_pages)
        table = page_ids[tables[:, None] + column * (column < num_pages_of[:, None])]  # [sequences, num_pages]
        of_token = np.repeat(tables, lengths)
        into.write_rows[:num_tokens] = page_ids[of_token + page] * PAGE_SIZE + within
        place = np.arange(row_len)
        if num_query_rows == len(steps):
            gather = first[:, None] + np.minimum(place, lengths[:, None] - 1)
            row = np.arange(num_query_rows)
        else:
            row = rows_of.cumsum() - rows_of
            begins = _ragged(np.zeros_like(rows_of), rows_of) * row_len  # of each query row, within its sequence
            gather = np.repeat(first, rows_of)[:, None] + np.minimum(
                begins[:, None] + place, np.repeat(lengths, rows_of)[:, None] - 1
            )
            table = np.repeat(table, rows_of, axis=0)
        into.page_table[:] = table.reshape(-1)
        into.gather[:] = gather.reshape(-1)
        into.query_rows[:] = rows[into.gather]
        into.scatter[:num_tokens] = _ragged(row * row_len, lengths)  # the rows of a sequence lie next to each other
        for name in ("page_table", "gather", "query_rows"):
            by_name[name] = by_name[name].view(num_query_rows, -1)
        if is_tree:
            local = gather - np.repeat(first, rows_of)[:, None]  # [rows, n] index of the token among its sequence's
            owners = [*zip(steps, row.tolist(), rows_of.tolist(), strict=True)]
            by_name |= _tree_columns(owners, local, rows[gather], num_pages * PAGE_SIZE)
        copies = tuple([pair for step in steps for pair in step.copies])
        return cls(num_logits, **by_name, copies=copies)

    @property
    def shape(self) -> StepShape:
        """The sizes that a recorded step must cover."""
        rows, row_len = self.gather.shape
        return StepShape(
            len(self.tokens),
            len(self.write_rows),
            len(self.logits_index),
            rows,
            row_len,
            self.page_table.shape[1],
            self.visible is not None,
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
            self.write_tokens.to(device),
            self.page_table.to(device),
            self.gather.to(device),
            self.scatter.to(device),
            [mask.to(device) for mask in self.masks(dtype, window)],
            cache.model_keys,
            cache.model_values,
        )

    def encode(self) -> bytes:
        """A frame for ``decode``: the sizes and all integers as int32, then the tree's bits."""
        parts = [getattr(self, name).reshape(-1) for name in _INTEGERS]
        if self.key_positions is not None:
            parts.append(self.key_positions.reshape(-1))
        (num_rows, row_len), num_pages = self.gather.shape, self.page_table.shape[1]
        lengths = [len(self.tokens), len(self.write_rows), len(self.logits_index)]
        is_tree = self.visible is not None
        sizes = [self.num_logits, *lengths, num_rows, row_len, num_pages, int(is_tree), len(self.copies)]
        parts.append(torch.tensor([*chain(*self.copies)], dtype=torch.int64))
        frame = torch.cat([torch.tensor(sizes), *parts]).to(torch.int32).numpy().tobytes()
        return frame + self.visible.numpy().tobytes() if self.visible is not None else frame

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """The plan that another rank has encoded."""
        sizes = torch.frombuffer(bytearray(frame[: 4 * _NUM_SIZES]), dtype=torch.int32).tolist()
        num_logits, num_tokens, num_writes, num_wanted, num_rows, row_len, num_pages, is_tree, num_copies = sizes
        places, keys = (num_rows, row_len), num_pages * PAGE_SIZE
        flat, writes = (num_tokens,), (num_writes,)
        shapes = [flat, flat, (num_wanted,), writes, writes, (num_rows, num_pages), places, flat, places]
        if is_tree:
            shapes.append((num_rows, keys))
        shapes.append((num_copies, 2))
        lengths = [math.prod(shape) for shape in shapes]
        end = 4 * (_NUM_SIZES + sum(lengths))
        integers = torch.frombuffer(bytearray(frame[4 * _NUM_SIZES : end]), dtype=torch.int32).long()
        names = (*_INTEGERS, "key_positions") if is_tree else _INTEGERS
        *parts, copied = [part.view(shape) for part, shape in zip(torch.split(integers, lengths), shapes, strict=True)]
        tensors = dict(zip(names, parts, strict=True))
        copies = tuple((source, target) for source, target in copied.tolist())
        visible = torch.frombuffer(bytearray(frame[end:]), dtype=torch.bool).view(*places, keys) if is_tree else None
        return cls(num_logits, visible=visible, copies=copies, **tensors)


def _ragged(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges [starts[i], starts[i] + counts[i]), one behind the other."""
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])


def _tree_columns(
    owners: Sequence[tuple[SequenceStep, int, int]],
    local: NDArray[np.int64],
    query_rows: NDArray[np.int64],
    num_keys: int,
) -> dict[str, Tensor]:
    """``visible`` and ``key_positions`` of a step with trees.

    Args:
        owners: each sequence, its first query row, and how many it has.
        local: [rows, n] index of the token at each place among its sequence's.
        query_rows: [rows, n] the last row that each place sees where its sequence is no tree.
        num_keys: rows that each place could see.
    """
    key = np.arange(num_keys)
    visible = np.zeros((*local.shape, num_keys), np.bool_)
    key_positions = np.empty((len(local), num_keys), np.int64)
    key_positions[:] = key
    for step, at, count in owners:
        own = slice(at, at + count)
        if step.visible is None:
            visible[own] = key <= query_rows[own, :, None]
            continue
        of_step = step.visible.numpy()
        visible[own, :, : of_step.shape[1]] = of_step[local[own]]
        if step.key_positions is not None:
            key_positions[own, : of_step.shape[1]] = step.key_positions.numpy()
    return {"visible": torch.from_numpy(visible), "key_positions": torch.from_numpy(key_positions)}


def _row_len(lengths: Sequence[int]) -> int:
    """Query row length: whole sequences, unless long ones share the step with short ones."""
    shortest, longest = min(lengths), padded_row_len(max(lengths))
    if len(lengths) > 1 and longest > QUERY_ROW_LEN and shortest <= longest // 2:
        return max(QUERY_ROW_LEN, padded_row_len(shortest))
    return longest


def attention_masks(step: StepPlan | StepArrays, dtype: torch.dtype, window: int | None) -> list[Tensor]:
    """Additive masks ``[B, 1, n, pages * PAGE_SIZE]`` on the step's device: full attention, then a window if any."""
    key = torch.arange(step.page_table.shape[1] * PAGE_SIZE, device=step.page_table.device)
    seen = key <= step.query_rows[:, :, None] if step.visible is None else step.visible
    masks = [_additive(seen, dtype)]
    if window is not None:
        query_positions = step.positions[step.gather]
        key_positions = key[None] if step.key_positions is None else step.key_positions
        near = query_positions[:, :, None] - key_positions[:, None, :] < window
        masks.append(_additive(seen & near, dtype))
    return masks


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``seen``, else -inf. By bits: torch chooses between two numbers place by place, at 30 times the cost."""
    integer, infinity = _minus_infinity(dtype)
    return seen.to(integer).sub_(1).bitwise_and_(infinity).view(dtype).unsqueeze(1)


@functools.cache
def _minus_infinity(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The integer dtype that holds the bits of ``dtype``, and the bits of its -inf."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return integer, int(torch.tensor(-math.inf, dtype=dtype).view(integer))
