"""Attention that reads pages in place, for CUDA: no gathered copy of the keys, and bits that no neighbour changes.

Every place sees its keys in tiles of one page, or of a part of one if heads are wide. The tiles of ``SPLIT`` pages are
summed in order; then these partial results are summed in order. None of these sizes depends on the step, and a masked
tile adds exact zeros. So a token's result does
not depend on the rest of the batch, on the length of the page table, or on whether it is decoded or verified.
(Flash-decoding, Dao et al. 2023, with a fixed split size.) A fixed number of programs takes the pieces of work of a
step (``schedule.py``) in turn, so a launch depends on nothing but the number of tokens, and pages that nobody sees cost
nothing.

Imports triton, so that it is imported only where this kernel was chosen (``kernels.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.attention.schedule import BLOCK, SPLIT, Seen, sum_bytes

_CHUNK = 16
"""Partial results that one load fetches when they are added up."""
_ROWS = 256
"""Rows that one load fetches when the row of a piece of work is looked up."""
_PROGRAMS = 1024
"""Programs that share the pieces of work of a call: several for each multiprocessor of any device."""
_PREFETCHED_BYTES = 1 << 15
"""Most bytes of a tile of keys and values for which the next tile is prefetched. Two such tiles fit the shared memory
of any device.
"""
_TILE_BYTES = 1 << 16
"""Most bytes of a tile of keys and values. Wider heads have tiles of fewer keys, but at least ``BLOCK``."""
_WIDE = 256
"""Keys of more numbers are multiplied in two parts: the largest power of two, and the rest."""


# Triton compiles a variant for each kind of size (1, multiples of 16, others) and of address, which would happen in the
# middle of serving. These kernels are compiled once for a model, when its first step runs.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "first_row", "first_place", "row_len", "num_pages", "head_stride", "token_stride"],
    do_not_specialize_on_alignment=["table", "gather", "first", "stop", "mask", "work"],
)
def _partial(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    gather,
    first,
    stop,
    mask,
    work,
    sums,
    maxima,
    totals,
    scale,
    softcap,
    num_rows,
    first_row,
    first_place,
    row_len,
    num_pages,
    head_stride,
    token_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Softmax sums of all places of one row over one split's keys, for one KV head: piece after piece of the work."""
    ends, sum_ends = work + 2 * num_rows, work + 3 * num_rows
    offsets = tl.arange(0, ROWS)
    places, key_dims, value_dims = tl.arange(0, KEYS), tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    rest_dims = KEY_TILE + tl.arange(0, REST_TILE)
    num_items = tl.load(ends + num_rows - 1) * HEADS
    for item in range(tl.program_id(0), num_items, PROGRAMS):
        head, piece = item % HEADS, item // HEADS
        at = tl.sum((tl.load(ends + offsets, offsets < num_rows, piece + 1) <= piece).to(tl.int32), 0)
        for base in range(ROWS, num_rows, ROWS):
            more = tl.load(ends + base + offsets, base + offsets < num_rows, piece + 1)
            at += tl.sum((more <= piece).to(tl.int32), 0)
        start_piece = tl.load(ends + at - 1, at > 0, 0)
        splits = tl.load(ends + at) - start_piece
        num_places = tl.load(work + num_rows + at)
        num_queries = num_places * GROUPS
        split = tl.load(work + at) + piece - start_piece
        start_sum = tl.load(sum_ends + at).to(tl.int64) - splits * num_places
        start_sum = start_sum * (HEADS * GROUPS) + (head * splits + piece - start_piece) * num_queries
        row = (first_row + at).to(tl.int64)
        for block in range((num_queries + BLOCK - 1) // BLOCK):
            own_query = block * BLOCK + tl.arange(0, BLOCK)
            real = own_query < num_queries
            place = row * row_len + first_place + own_query // GROUPS
            low, high = tl.load(first + place, real, num_pages * PAGE), tl.load(stop + place, real, 0)
            start = tl.maximum(split * SPLIT, tl.min(low, 0) // PAGE)
            end = tl.minimum(split * SPLIT + SPLIT, (tl.max(high, 0) + PAGE - 1) // PAGE)
            mask_rows = mask + place * num_pages * PAGE
            if MASKED:  # a page that nobody sees is not read: it may hold anything
                own = split * SPLIT * PAGE + tl.arange(0, SPLIT * PAGE)
                inside = real[:, None] & (own < num_pages * PAGE)[None, :]
                masked = tl.load(mask_rows[:, None] + own[None, :], inside, float("-inf"))
                shown = tl.max(masked.to(tl.float32), 0) > float("-inf")
                start = tl.min(tl.where(shown, own // PAGE, end), 0)
                end = tl.max(tl.where(shown, own // PAGE + 1, 0), 0)
            tokens = tl.load(gather + place, real, 0).to(tl.int64)
            heads = head * GROUPS + own_query % GROUPS
            own_heads = query + (heads * head_stride + tokens * token_stride)[:, None]
            q = tl.load(own_heads + key_dims[None, :], mask=real[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
            if KEY_DIM > KEY_TILE:
                has_rest = real[:, None] & (rest_dims < KEY_DIM)[None, :]
                q_rest = tl.load(own_heads + rest_dims[None, :], mask=has_rest, other=0.0)
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
            for index in range(start * (PAGE // KEYS), end * (PAGE // KEYS)):
                key = index * KEYS + places
                seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
                if MASKED:
                    hidden = tl.load(mask_rows[:, None] + key[None, :], mask=seen, other=float("-inf"))
                    seen = hidden > float("-inf")
                page = tl.load(table + row * num_pages + index * KEYS // PAGE).to(tl.int64)
                kv_rows = (page * PAGE + index * KEYS % PAGE + places) * HEADS + head
                own_keys = keys + kv_rows[None, :] * KEY_DIM
                k = tl.load(own_keys + key_dims[:, None], mask=(key_dims < KEY_DIM)[:, None], other=0.0)
                scores = tl.dot(q, k, input_precision="ieee")
                if KEY_DIM > KEY_TILE:
                    k_rest = tl.load(own_keys + rest_dims[:, None], mask=(rest_dims < KEY_DIM)[:, None], other=0.0)
                    scores = tl.dot(q_rest, k_rest, scores, input_precision="ieee")
                scores *= scale
                if CAPPED:
                    scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
                scores = tl.where(seen, scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: weights of zero, not NaN
                weights, fade = tl.exp(scores - level[:, None]), tl.exp(top - level)
                if VALUES_IN_KEYS:
                    v = tl.trans(k)
                else:
                    own_values = values + kv_rows[:, None] * VALUE_STRIDE
                    v = tl.load(own_values + value_dims[None, :], mask=(value_dims < VALUE_DIM)[None, :], other=0.0)
                total = total * fade + tl.sum(weights, 1)
                out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                top = higher
            partial = start_sum + own_query
            tl.store(maxima + partial, top, mask=real)
            tl.store(totals + partial, total, mask=real)
            tl.store(
                sums + partial[:, None] * VALUE_DIM + value_dims[None, :],
                out,
                mask=(real & (top > float("-inf")))[:, None] & (value_dims < VALUE_DIM)[None, :],
            )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "first_row", "first_place", "row_len"],
    do_not_specialize_on_alignment=["scatter", "work"],
)
def _combined(  # type: ignore[no-untyped-def]
    sums,
    maxima,
    totals,
    sinks,
    scatter,
    work,
    result,
    num_rows,
    first_row,
    first_place,
    row_len,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up the partial results of one token's head, ``CHUNK`` splits after ``CHUNK`` splits, if they are there."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(scatter + token).to(tl.int64)
    row, place = place // row_len - first_row, place % row_len - first_place
    inside = (row >= 0) & (row < num_rows)
    num_places = tl.load(work + num_rows + row, inside, 0)
    here = inside & (place >= 0) & (place < num_places)
    ends = work + 2 * num_rows + row
    num_splits = tl.load(ends, here, 0) - tl.load(ends - 1, here & (row > 0), 0)
    num_queries = num_places * GROUPS
    first = tl.load(ends + num_rows, here, 0).to(tl.int64) - num_splits * num_places
    first = first * (HEADS * GROUPS) + head // GROUPS * num_splits * num_queries + place * GROUPS + head % GROUPS
    dims = tl.arange(0, VALUE_TILE)
    first_split = tl.load(work + row, here, 0)
    aligned = first_split - first_split % CHUNK  # the same split is at the same slot, whatever else its row sees
    slots = aligned - first_split + tl.arange(0, CHUNK)
    tops = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, first_split + num_splits - aligned, CHUNK):
        split = start + slots
        known = (split >= 0) & (split < num_splits)
        tops = tl.maximum(tops, tl.load(maxima + first + split * num_queries, known, float("-inf")))
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    level = tl.where(top == float("-inf"), 0.0, top)  # a token that sees no key: zeros, not NaN
    shares, out = tl.zeros([CHUNK], tl.float32), tl.zeros([VALUE_TILE], tl.float32)
    for start in range(0, first_split + num_splits - aligned, CHUNK):
        split = start + slots
        known = (split >= 0) & (split < num_splits)
        partial = first + split * num_queries
        maximum = tl.load(maxima + partial, known, float("-inf"))
        weight = tl.exp(maximum - level)
        shares += weight * tl.load(totals + partial, known, 0.0)
        seen = (maximum > float("-inf"))[:, None] & (dims < VALUE_DIM)[None, :]
        part = tl.load(sums + partial[:, None] * VALUE_DIM + dims[None, :], mask=seen, other=0.0)
        out += tl.sum(weight[:, None] * part, 0)
    total = tl.sum(shares, 0)
    if SINKS:
        total += tl.exp(sink - level)
    tl.store(
        result + (token * HEADS * GROUPS + head) * VALUE_DIM + dims,
        (out / tl.where(total == 0.0, 1.0, total)).to(result.dtype.element_ty),
        mask=here & (dims < VALUE_DIM),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["key_head_stride", "key_token_stride", "value_head_stride", "value_token_stride"],
    do_not_specialize_on_alignment=["rows", "tokens"],
)
def _write(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    rows,
    tokens,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Writes one token's key and value of one head into one KV row."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * HEADS + tl.program_id(1)
    token, head = tl.load(tokens + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, KEY_TILE)
    source = key + head * key_head_stride + token * key_token_stride
    tl.store(keys + row * KEY_DIM + dims, tl.load(source + dims, mask=dims < KEY_DIM), mask=dims < KEY_DIM)
    dims = tl.arange(0, VALUE_TILE)
    source = value + head * value_head_stride + token * value_token_stride
    tl.store(values + row * VALUE_DIM + dims, tl.load(source + dims, mask=dims < VALUE_DIM), mask=dims < VALUE_DIM)


def write_in_place(
    key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor, write_rows: Tensor, write_tokens: Tensor
) -> None:
    """Writes keys and values of tokens into pages.

    Args:
        key, value: [1, num_kv_heads, T, dim].
        key_pages, value_pages: [num_pages, page_size, num_kv_heads, dim], written in place.
        write_rows: [W] flat KV rows. write_tokens: [W] the token that each takes.
    """
    key, value = _dense(key), _dense(value)
    num_heads, key_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    _write[(len(write_rows), num_heads)](
        key,
        value,
        key_pages,
        value_pages,
        write_rows,
        write_tokens,
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_TILE=_tile(key_dim),
        VALUE_TILE=_tile(value_dim),
    )


def attend_in_place(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    gather_index: Tensor,
    scatter_index: Tensor,
    seen: Seen,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention over pages.

    Args:
        query: [1, num_heads, T, key_dim]. key_pages, value_pages: [num_pages, page_size, num_kv_heads, dim]; values may
            be the beginning of the keys.
        page_table: [B, pages]; entries behind the last key that a row sees are not read. gather_index: [B, n] the token
            at each place. scatter_index: [T] each token's place among B * n.
        seen: the keys that each place sees. sinks: [num_heads].

    Returns:
        [1, T, num_heads, value_dim]; zeros for a token that sees no key.
    """
    query = _dense(query)
    _, num_heads, num_tokens, key_dim = query.shape
    _, page_size, num_kv_heads, value_dim = value_pages.shape
    num_pages, row_len, groups = page_table.shape[1], gather_index.shape[1], num_heads // num_kv_heads
    todo = seen.calls(sum_bytes(num_heads, value_dim))
    most = max(call.num_sums for call, _ in todo) * num_heads
    sums = query.new_empty(most, value_dim, dtype=torch.float32)
    maxima = query.new_empty(most, dtype=torch.float32)
    totals = torch.empty_like(maxima)
    result = query.new_empty(1, num_tokens, num_heads, value_dim)
    (key_tile, rest_tile), value_tile = _tiles(key_dim), _tile(value_dim)
    in_keys = value_pages.stride(2) == key_dim and key_tile == value_dim < key_dim  # the beginning of the keys
    key_bytes = (key_tile + (key_dim > key_tile) * rest_tile + (not in_keys) * value_tile) * query.element_size()
    keys = page_size
    while keys > BLOCK and keys * key_bytes > _TILE_BYTES:
        keys //= 2
    page_table, gather_index = page_table.contiguous(), gather_index.contiguous()
    first, stop, mask = seen.first, seen.stop, seen.mask
    for call, work in todo:
        rows = call.stop_row - call.first_row
        _partial[(_PROGRAMS,)](
            query,
            key_pages,
            value_pages,
            page_table,
            gather_index,
            first,
            stop,
            first if mask is None else mask.contiguous(),
            work,
            sums,
            maxima,
            totals,
            scale,
            softcap or 1.0,
            rows,
            call.first_row,
            call.first_place,
            row_len,
            num_pages,
            query.stride(1),
            query.stride(2),
            HEADS=num_kv_heads,
            GROUPS=groups,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            VALUE_STRIDE=value_pages.stride(2),
            KEY_TILE=key_tile,
            REST_TILE=rest_tile,
            VALUE_TILE=value_tile,
            VALUES_IN_KEYS=in_keys,
            KEYS=keys,
            PAGE=page_size,
            SPLIT=SPLIT,
            BLOCK=BLOCK,
            ROWS=_ROWS,
            PROGRAMS=_PROGRAMS,
            CAPPED=softcap is not None,
            MASKED=mask is not None,
            num_stages=2 if keys * key_bytes <= _PREFETCHED_BYTES else 1,
            num_warps=4 if key_dim <= _WIDE else 8,
        )
        _combined[(num_tokens, num_heads)](
            sums,
            maxima,
            totals,
            maxima if sinks is None else sinks,
            scatter_index,
            work,
            result,
            rows,
            call.first_row,
            call.first_place,
            row_len,
            HEADS=num_kv_heads,
            GROUPS=groups,
            VALUE_DIM=value_dim,
            VALUE_TILE=value_tile,
            CHUNK=_CHUNK,
            SINKS=sinks is not None,
        )
    return result


def _tiles(dim: int) -> tuple[int, int]:
    """Numbers of a key that are multiplied first, and then; the rest is not, if the first ones are all."""
    if dim <= _WIDE:
        return _tile(dim), BLOCK
    first = 1 << (dim.bit_length() - 1)
    return first, _tile(dim - first)


def _tile(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _dense(heads: Tensor) -> Tensor:
    """``heads`` with the numbers of each token's head next to each other."""
    return heads if heads.stride(3) == 1 else heads.contiguous()
