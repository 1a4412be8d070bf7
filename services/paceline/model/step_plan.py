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

from paceline.model import layout
from paceline.model.attention.chunks import first_seen
from paceline.model.attention.schedule import SPLIT, Seen
from paceline.model.kv_cache import KVCache
from paceline.model.linear.operator import LinearInputs
from paceline.model.linear.plan import LinearStep
from paceline.model.shapes import QUERY_ROW_LEN, Shapes
from paceline.types import PAGE_SIZE, pages_for


@dataclass(slots=True)
class SequenceStep:
    """The new tokens of one session in a step.

    Rows are the session's KV rows; a token is written to its row and sees rows [0, row] of its session, unless
    ``visible`` says otherwise (a tree, where a row does not follow its neighbour).

    A branch of a subtree that the target verifies is a separate sequence. Its page table holds private pages from the
    page on in which it leaves the others (``target/branches.py``). So each of its tokens has the row of its position,
    as in plain decoding. Tokens that branches share are computed in one of them and written to all.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each token."""
    rows: Sequence[int]
    pages: Sequence[int]
    """The session's page table; covers every row that is written or seen. An ``array("q")`` is read as it is."""
    num_logits: int
    """Logits are computed for the last ``num_logits`` tokens."""
    visible: Tensor | None = None
    """bool [num_rows]: rows that all tokens see; rows beyond are hidden."""
    key_positions: Tensor | None = None
    """int64 [num_rows]: rotary position of each visible row, where rows are no positions (sliding windows need them).
    """
    own_rows: Sequence[Sequence[int]] = ()
    """Rows that each token sees in addition to ``visible``."""
    also: Sequence[tuple[int, int]] = ()
    """Further flat KV rows that tokens of this step are written to: (index among ``token_ids``, row) each."""
    copies: Sequence[tuple[int, int]] = ()
    """Pages that are copied before the step: (from, to) each."""
    num_by_library: int = 0
    """First tokens, of those that a kernel library attends to (``attention/flashinfer.py``)."""
    committed: int = -1
    """Length of the session's context after this step, without tokens that may be rejected; -1: none may be.

    Linear layers store states of committed tokens alone.
    """


INTEGER_BYTES = 8
"""Bytes of an integer in the buffer of ``StepArrays``."""
_REMEMBERED = 4096
"""Shapes whose sizes are remembered."""


class StepShape(NamedTuple):
    """The sizes of a step, which are all that a recorded step is fixed to. A tuple, as each step looks it up often."""

    tokens: int
    writes: int
    """KV rows that are written."""
    logit_rows: int
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
            and self.logit_rows >= other.logit_rows
            and self.rows >= other.rows
            and self.row_len >= other.row_len
            and self.pages >= other.pages
        )

    @property
    def cost(self) -> tuple[int, int, int]:
        """Orders shapes by what they compute: keys times places first, which padding multiplies."""
        return self.rows * self.row_len * self.num_keys, self.tokens, self.logit_rows

    @property
    def num_integers(self) -> int:
        """Integers in the front part of the packed buffer."""
        return sum(_fields(self)[1])

    @property
    def num_bytes(self) -> int:
        """Size of the packed buffer in bytes."""
        return _num_bytes(self)

    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the integer fields, in the order of ``StepArrays``."""
        flat, writes, places = (self.tokens,), (self.writes,), (self.rows, self.row_len)
        sizes = (flat, flat, (self.logit_rows,), writes, writes, (self.rows, self.pages), places, flat, places)
        return (*sizes, (self.rows, self.num_keys)) if self.is_tree else sizes


_shape = functools.lru_cache(_REMEMBERED)(StepShape)
"""One object for each shape, which makes it cheap to look up what is remembered of it."""


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


@functools.lru_cache(_REMEMBERED)
def _fields(shape: StepShape) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Shapes of the integer fields (``StepShape.sizes``), and the integers of each."""
    sizes = shape.sizes()
    return sizes, tuple([math.prod(size) for size in sizes])


@functools.lru_cache(_REMEMBERED)
def _num_bytes(shape: StepShape) -> int:
    bits = shape.rows * shape.row_len * shape.num_keys if shape.is_tree else 0
    return shape.num_integers * INTEGER_BYTES + bits


def unpack(shape: StepShape, buffer: Tensor) -> StepArrays:
    """The fields of a step in a uint8 ``buffer`` of at least ``shape.num_bytes``, as views of it."""
    sizes, counts = _fields(shape)
    front = sum(counts) * INTEGER_BYTES
    parts = buffer[:front].view(torch.int64).split_with_sizes(counts)
    views = [part if len(size) == 1 else part.view(size) for part, size in zip(parts, sizes, strict=True)]
    if not shape.is_tree:
        return StepArrays(*views)
    bits = buffer[front : shape.num_bytes].view(torch.bool)
    return StepArrays(*views)._replace(visible=bits.view(shape.rows, shape.row_len, shape.num_keys))


def arrays_of(shape: StepShape, buffer: Tensor) -> StepArrays:
    """``unpack`` of a buffer in the host's memory, as numpy arrays."""
    sizes, counts = _fields(shape)
    ends = [*accumulate(counts)]
    values = buffer.numpy()
    front = values[: ends[-1] * INTEGER_BYTES].view(np.int64)
    views = [front[end - count : end].reshape(size) for end, count, size in zip(ends, counts, sizes, strict=True)]
    if not shape.is_tree:
        return StepArrays(*views)
    bits = values[ends[-1] * INTEGER_BYTES : shape.num_bytes].view(np.bool_)
    return StepArrays(*views)._replace(visible=bits.reshape(shape.rows, shape.row_len, shape.num_keys))


_ALL_RULES = Shapes()
_NUM_SIZES = 11
"""Integers at the beginning of a frame: rows of logits, the shape, numbers of copied pages and of spans of a library,
size of the linear step."""


class StepPlan(NamedTuple):
    """One forward as integers on the host, padded by the rules of ``shapes.py``, in one buffer.

    T tokens in B query rows of n, with page tables of one length. Everything that a rank needs to take the same step
    as another: page numbers mean the same on all of them.
    """

    num_logits: int
    """Rows of logits that are returned; all further rows are padding."""
    shape: StepShape
    """The sizes that a recorded step must cover."""
    buffer: Tensor
    """uint8 [shape.num_bytes], which ``unpack`` reads."""
    copies: tuple[tuple[int, int], ...] = ()
    """Pages that are copied before the step, on every rank: (from, to) each."""
    linear: LinearStep | None = None
    """The work of linear layers; None: the model has none."""
    by_library: tuple[tuple[int, int], ...] = ()
    """Tokens that a kernel library attends to: first token and number of each span of one session."""
    drawn: Tensor | None = None
    """[n] int64 on an accelerator: the step's first tokens, in place of those in ``buffer``; None: these are right."""

    @classmethod
    def of(cls, steps: Sequence[SequenceStep], scratch_row: int, shapes: Shapes = _ALL_RULES) -> Self:
        """Lays the new tokens of sessions out, padded to ``shapes``."""
        found = layout.gather(steps)
        if found is None:
            return cls._by_python(steps, scratch_row, shapes)
        num_tokens, num_writes, num_logits, shortest, longest, num_rows, is_tree, copies, columns = found
        row_len = _row_len(len(steps), shortest, longest, shapes)
        rows = len(steps) if longest <= row_len else sum([-(-len(step.token_ids) // row_len) for step in steps])
        padded = map(shapes.tokens, (num_tokens, num_writes, num_logits))
        shape = _shape(*padded, rows, row_len, shapes.pages(pages_for(num_rows)), is_tree)
        buffer = torch.empty(shape.num_bytes, dtype=torch.uint8)
        layout.lay_out(columns, scratch_row, shape, buffer)
        return cls(num_logits, shape, buffer, copies)

    @classmethod
    def _by_python(cls, steps: Sequence[SequenceStep], scratch_row: int, shapes: Shapes) -> Self:
        """Reference implementation of ``layout.py``. It says what is wrong with steps that ``layout.py`` refuses.

        Raises:
            ValueError: a sequence cannot be laid out.
        """
        for step in steps:
            _check(step)
        lengths = [len(step.token_ids) for step in steps]
        num_tokens, row_len = sum(lengths), _row_len(len(lengths), min(lengths), max(lengths), shapes)
        ids, rows, pages, also = array("q"), array("q"), array("q"), array("q")
        apart, keys = False, []
        for step in steps:
            for base, row in step.also:
                also.extend((len(ids) + base, row))
            ids.extend(step.token_ids)
            rows.extend(step.rows)
            pages.extend(step.pages)
            apart = apart or step.positions is not step.rows
            keys.append(0 if step.visible is None else step.visible.size(-1))
        positions = array("q", chain.from_iterable([step.positions for step in steps])) if apart else rows
        is_tree = any(keys)
        num_rows = max(max(rows) + 1, *keys)
        num_logits = sum([step.num_logits for step in steps])
        num_query_rows = sum([-(-length // row_len) for length in lengths])
        padded = map(shapes.tokens, (num_tokens, num_tokens + len(also) // 2, num_logits))
        shape = _shape(*padded, num_query_rows, row_len, shapes.pages(pages_for(num_rows)), is_tree)
        buffer = torch.empty(shape.num_bytes, dtype=torch.uint8)
        _lay_out(steps, (ids, rows, positions, pages), also, scratch_row, shape, arrays_of(shape, buffer))
        return cls(num_logits, shape, buffer, tuple([pair for step in steps for pair in step.copies]))

    @property
    def arrays(self) -> StepArrays:
        """The fields, as tensors."""
        return unpack(self.shape, self.buffer)

    def masks(self, dtype: torch.dtype, window: int | None) -> list[Tensor]:
        """Additive masks ``[B, 1, n, pages * PAGE_SIZE]``: the causal one, and one of the window or chunks if any."""
        made = layout.masks(self.shape, self.buffer, dtype, window)
        return attention_masks(self.arrays, dtype, window) if made is None else made

    def inputs(self, cache: KVCache, dtype: torch.dtype, window: int | None) -> tuple[Any, ...]:
        """The arguments of the traced signature, on the device of ``cache``."""
        device, it = cache.keys[0].device, unpack(self.shape, self.buffer)
        return (
            it.tokens[None].to(device),
            it.positions[None].to(device),
            it.logits_index.to(device),
            it.write_rows.to(device),
            it.write_tokens.to(device),
            it.page_table.to(device),
            it.gather.to(device),
            it.scatter.to(device),
            [mask.to(device) for mask in self.masks(dtype, window)],
            cache.model_keys,
            cache.model_values,
            *(
                ()
                if self.linear is None
                else (LinearInputs(cache.linear_pools, torch.tensor(self.linear.encode()).to(device)).tensors,)
            ),
        )

    def encode(self) -> bytes:
        """A frame for ``decode``: the sizes and all integers as int32, then the tree's bits."""
        values, front = self.buffer.numpy(), self.shape.num_integers * INTEGER_BYTES
        linear = array("q") if self.linear is None else self.linear.encode()
        sizes = (self.num_logits, *self.shape, len(self.copies), len(self.by_library), len(linear))
        lists = np.array((*sizes, *chain(*self.copies, *self.by_library), *linear))
        integers = (lists, values[:front].view(np.int64))
        return np.concatenate(integers).astype(np.int32).tobytes() + values[front:].tobytes()

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """The plan that another rank has encoded."""
        sizes: list[int] = np.frombuffer(frame, np.int32, _NUM_SIZES).tolist()
        num_logits, tokens, writes, logit_rows, rows, row_len, pages, is_tree, num_copies, num_spans, num_linear = sizes
        shape = StepShape(tokens, writes, logit_rows, rows, row_len, pages, bool(is_tree))
        first = _NUM_SIZES + 2 * (num_copies + num_spans)
        num = first + num_linear
        lists = np.frombuffer(frame, np.int32, num)
        pairs, linear = lists[_NUM_SIZES:first].reshape(-1, 2).tolist(), lists[first:].tolist()
        buffer, front = np.empty(shape.num_bytes, np.uint8), shape.num_integers * INTEGER_BYTES
        buffer[:front].view(np.int64)[:] = np.frombuffer(frame, np.int32, shape.num_integers, 4 * num)
        buffer[front:] = np.frombuffer(frame, np.uint8, offset=4 * (num + shape.num_integers))
        copies, spans = pairs[:num_copies], pairs[num_copies:]
        step = LinearStep.decode(linear) if linear else None
        return cls(num_logits, shape, torch.from_numpy(buffer), _tuples(copies), step, _tuples(spans))


def _tuples(pairs: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((first, second) for first, second in pairs)


def spans_by_library(steps: Sequence[SequenceStep]) -> tuple[tuple[int, int], ...]:
    """``StepPlan.by_library`` of steps."""
    firsts = accumulate([len(step.token_ids) for step in steps], initial=0)
    return tuple((at, step.num_by_library) for at, step in zip(firsts, steps, strict=False) if step.num_by_library)


def _check(step: SequenceStep) -> None:
    """Raises ValueError if a sequence cannot be laid out, with the value that does not fit."""
    num_tokens, num_rows = len(step.token_ids), len(step.pages) * PAGE_SIZE
    of_pages = f"the page table has {len(step.pages)} pages, which hold {num_rows} rows"
    if not 0 < num_tokens == len(step.rows) == len(step.positions):
        lengths = f"{num_tokens}, {len(step.rows)} and {len(step.positions)} long"
        raise ValueError(f"token_ids, rows and positions are {lengths}: equal lengths of at least 1 are allowed")
    _check_each("rows", step.rows, num_rows, of_pages)
    _check_each("num_logits", [step.num_logits], num_tokens + 1, f"the sequence has {num_tokens} tokens")
    _check_each("also", [token for token, _ in step.also], num_tokens, f"the sequence has {num_tokens} tokens")
    _check_each("also", [row for _, row in step.also], 1 << 62, "a row is not negative")
    if step.visible is None:
        if step.own_rows:
            raise ValueError("own_rows is set: it is allowed with visible")
        return
    num_keys = step.visible.shape[-1]
    if step.visible.dim() != 1 or not 0 < num_keys <= num_rows:
        raise ValueError(f"visible is {[*step.visible.shape]}: 1 to {num_rows} rows are allowed")
    if step.key_positions is not None and step.key_positions.shape != (num_keys,):
        raise ValueError(f"key_positions is {[*step.key_positions.shape]}: {[num_keys]} is allowed")
    if len(step.own_rows) != num_tokens:
        raise ValueError(f"own_rows has {len(step.own_rows)} entries: one for each of {num_tokens} tokens is allowed")
    for rows in step.own_rows:
        _check_each("own_rows", rows, num_keys, f"visible has {num_keys} rows")


def _check_each(name: str, values: Sequence[int], end: int, allowed: str) -> None:
    for value in values:
        if not 0 <= value < end:
            raise ValueError(f"{name} has {value}: {allowed}")


def _lay_out(
    steps: Sequence[SequenceStep],
    given: Sequence[array[int]],
    also: array[int],
    scratch_row: int,
    shape: StepShape,
    into: StepArrays,
) -> None:
    """Fills the fields of a step by columns. Reference implementation of ``layout.lay_out``.

    Sequence i owns tokens [first[i], first[i] + lengths[i]), page numbers [tables[i], tables[i] + num_pages_of[i]) and
    query rows [row[i], row[i + 1]).
    """
    ids, rows, positions, page_ids = (np.array(column, np.int64) for column in given)
    lengths = np.array([len(step.token_ids) for step in steps])
    num_pages_of = np.array([len(step.pages) for step in steps])
    num_logits_of = np.array([step.num_logits for step in steps])
    ends = lengths.cumsum()
    first, tables = ends - lengths, num_pages_of.cumsum() - num_pages_of
    num_tokens, num_logits = len(ids), int(num_logits_of.sum())
    num_writes, row_len = num_tokens + len(also) // 2, shape.row_len
    rows_of = -(-lengths // row_len)  # query rows of each sequence
    for field in (into.tokens, into.positions, into.logits_index, into.write_tokens, into.scatter):
        field[:] = 0
    into.tokens[:num_tokens], into.positions[:num_tokens] = ids, positions
    into.logits_index[:num_logits] = ragged_ranges(ends - num_logits_of, num_logits_of)
    into.write_tokens[:num_tokens] = np.arange(num_tokens)
    into.write_tokens[num_tokens:num_writes], into.write_rows[num_tokens:num_writes] = also[::2], also[1::2]
    into.write_rows[num_writes:] = scratch_row + np.arange(shape.writes - num_writes) % PAGE_SIZE
    page, within = np.divmod(rows, PAGE_SIZE)
    into.write_rows[:num_tokens] = page_ids[np.repeat(tables, lengths) + page] * PAGE_SIZE + within
    # Masked keys weigh exactly zero, but 0 * NaN is NaN: what pads a table must be the session's own.
    column, place = np.arange(shape.pages), np.arange(row_len)
    table = page_ids[tables[:, None] + column * (column < num_pages_of[:, None])]  # [sequences, pages]
    into.page_table[:] = np.repeat(table, rows_of, axis=0)
    begins = ragged_ranges(np.zeros_like(rows_of), rows_of) * row_len  # of each query row, within its sequence
    local = np.minimum(begins[:, None] + place, np.repeat(lengths, rows_of)[:, None] - 1)
    into.gather[:] = np.repeat(first, rows_of)[:, None] + local
    into.query_rows[:] = rows[into.gather]
    row = rows_of.cumsum() - rows_of
    into.scatter[:num_tokens] = ragged_ranges(row * row_len, lengths)  # the rows of a sequence lie next to each other
    if shape.is_tree:
        _tree_columns([*zip(steps, row.tolist(), rows_of.tolist(), strict=True)], local, into)


def ragged_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges [starts[i], starts[i] + counts[i]), concatenated."""
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])


def _tree_columns(owners: Sequence[tuple[SequenceStep, int, int]], local: NDArray[np.int64], into: StepArrays) -> None:
    """Fills ``visible`` and ``key_positions`` of a step with trees.

    Args:
        owners: each sequence, its first query row, and how many it has.
        local: [rows, n] index of the token at each place among its sequence's.
        into: the fields, of which ``query_rows`` are filled.
    """
    key = np.arange(into.key_positions.shape[1])
    into.key_positions[:], into.visible[:] = key, False
    for step, at, count in owners:
        own = slice(at, at + count)
        if step.visible is None:
            into.visible[own] = key <= into.query_rows[own, :, None]
            continue
        of_step = np.repeat(step.visible.numpy()[None], len(step.token_ids), axis=0)
        for seen, rows in zip(of_step, step.own_rows, strict=True):
            seen[list(rows)] = True
        into.visible[own, :, : of_step.shape[1]] = of_step[local[own]]
        if step.key_positions is not None:
            into.key_positions[own, : of_step.shape[1]] = step.key_positions.numpy()


def _row_len(num_sequences: int, shortest: int, longest: int, shapes: Shapes) -> int:
    """Query row length: whole sequences, unless long ones share the step with short ones."""
    whole = shapes.row_len(longest)
    if num_sequences > 1 and whole > QUERY_ROW_LEN and shortest <= whole // 2:
        return max(QUERY_ROW_LEN, shapes.row_len(shortest))
    return whole


def attention_masks(step: StepArrays, dtype: torch.dtype, window: int | None) -> list[Tensor]:
    """Additive masks ``[B, 1, n, pages * PAGE_SIZE]`` on the step's device: full attention, then a window or chunks if
    any."""
    key = torch.arange(step.page_table.shape[1] * PAGE_SIZE, device=step.page_table.device)
    seen = key <= step.query_rows[:, :, None] if step.visible is None else step.visible
    masks = [_additive(seen, dtype)]
    if window is not None:
        query_positions = step.positions[step.gather]
        key_positions = key[None] if step.key_positions is None else step.key_positions
        near = key_positions[:, None, :] >= first_seen(query_positions, window)[:, :, None]
        masks.append(_additive(seen & near, dtype))
    return masks


def sizes_of(query_rows: NDArray[np.int64], scatter: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of places and of splits of each row.

    Args:
        query_rows: [B, n] KV row of each place; places of padding repeat one of their row.
        scatter: [T] place of each token among B * n.
    """
    num_rows, row_len = query_rows.shape
    places = np.zeros(num_rows, np.int64)
    np.maximum.at(places, scatter // row_len, scatter % row_len + 1)
    return places, query_rows.max(1) // (SPLIT * PAGE_SIZE) + 1


def attention_seen(
    step: StepArrays,
    dtype: torch.dtype,
    window: int | None,
    *,
    sizes: tuple[list[int], list[int]] | None = None,
    capacity: int = 0,
) -> list[Seen]:
    """What ``attention_masks`` say, for attention in place: bounds of keys, and masks of trees alone. ``sizes``,
    ``capacity``: of ``Seen``."""
    row_len = step.gather.shape[1]
    places = torch.zeros_like(step.page_table[:, 0])
    places.scatter_reduce_(0, step.scatter // row_len, step.scatter % row_len + 1, "amax")
    stop = (step.query_rows + 1).to(torch.int32)
    first = torch.zeros_like(stop)
    if step.visible is not None:
        stop = torch.full_like(stop, step.page_table.shape[1] * PAGE_SIZE)
        masks = attention_masks(step, dtype, window)
        return [Seen(first, stop, places, mask, sizes, capacity) for mask in masks]
    found = [Seen(first, stop, places, None, sizes, capacity)]
    if window is not None:
        near = first_seen(step.positions[step.gather], window).clamp_(min=0).to(torch.int32)
        found.append(Seen(near, stop, places, None, sizes, capacity))
    return found


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``seen``, else -inf. By bits: torch chooses between two numbers place by place, at 30 times the cost."""
    integer, infinity = _minus_infinity(dtype)
    return seen.to(integer).sub_(1).bitwise_and_(infinity).view(dtype).unsqueeze(1)


@functools.cache
def _minus_infinity(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """The integer dtype that holds the bits of ``dtype``, and the bits of its -inf."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return integer, int(torch.tensor(-math.inf, dtype=dtype).view(integer))
