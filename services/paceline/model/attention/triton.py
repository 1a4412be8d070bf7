"""Attention that reads pages in place, for CUDA: no gathered copy of the keys, and bits that no neighbour changes.

Every place sees its keys in tiles of one page, or of a part of one if heads are wide. The tiles of ``SPLIT`` pages are
summed in order; then these partial results are summed in order. None of these sizes depends on the step, and a masked
tile adds exact zeros. So a token's result does not depend on the rest of the batch or the length of the page table, and
is the same in decoding and verification. (Flash-decoding, Dao et al. 2023, with a fixed split size.) A fixed number of
programs takes the pieces of work of a step (``schedule.py``) in turn. So a launch depends only on the number of tokens,
and pages that no token sees cost nothing.

There are two launches. ``partial_results`` computes partial results of few queries, which ``combine_results`` adds up:
for decoding and verification, whose keys must be spread over a device. ``walk_pages`` takes the many queries of a
prompt's full rows and walks all their keys. So it reads keys less often and keeps the sums in registers. Both call the
same functions for a tile and for a sum, compiled without fused multiply-adds. Weights are summed by a product, so no
order of summation depends on a tile's layout in the threads. A device's matrix units might sum in another order for
more rows. So ``walked_block`` compares the bits of both before it allows large tiles.

Imports triton, so that it is imported only where this kernel was chosen (``kernels.py``).
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.checkpoint.kv_scales import UNSCALED, KVScales
from paceline.model.attention.schedule import BLOCK, LEAST_WALKS, SPLIT, Seen, num_splits, sum_bytes
from paceline.model.kv_cache import FP8, to_fp8
from paceline.model.shapes import QUERY_ROW_LEN
from paceline.types import PAGE_SIZE

_UNROLLED = tl.constexpr(8)
"""Partial results that are fetched together when they are added up."""
_ONES = tl.constexpr(16)
"""Columns of the product that sums weights: the fewest that matrix units take."""
_ROWS = 256
"""Rows that one load fetches when the row of a piece of work is looked up."""
NUM_PROGRAMS = 1024
"""Programs that share the pieces of work of a call: several for each multiprocessor of any device."""
_PREFETCHED_BYTES = 1 << 15
"""Most bytes of a tile of keys and values for which the next tile is prefetched. Two such tiles fit the shared memory
of any device.
"""
_TILE_BYTES = 1 << 16
"""Most bytes of a tile of keys and values. Wider heads have tiles of fewer keys, but at least ``BLOCK``."""
_WIDE = 256
"""Keys of more numbers are multiplied in two parts: the largest power of two, and the rest."""
_TRIED_PAGES, NUM_TRIED = 9, 1 << 22
"""Pages of the contexts that tiles of different sizes are compared on, and numbers of the queries: millions, since
rounding hides most differences.
"""
BLOCKS: dict[tuple[object, ...], int] = {}
"""Results of ``walked_block`` by device, dtype and sizes of heads."""
log = logging.getLogger(__name__)


# By integers: neither all devices nor triton's interpreter have such numbers.
@triton.jit
def _from_fp8(x):  # type: ignore[no-untyped-def]
    """Bytes of float8_e4m3fn as float16, which has 2 ** -8 of each number in the same bits, further left."""
    bits = (x.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001  # without the second copy of the sign
    return bits.to(tl.float16, bitcast=True) * tl.where((x & 0x7F) == 0x7F, float("nan"), 256.0).to(tl.float16)


@triton.jit
def _to_fp8(x):  # type: ignore[no-untyped-def]
    """Numbers as bytes of float8_e4m3fn (``kv_cache.to_fp8``)."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = tl.minimum(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3), 0x7E)
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF  # in units of 2 ** -9
    rounded = tl.where(size < 0x3C800000, small, normal)
    return (tl.where(size > 0x7F800000, 0x7F, rounded) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _read(at, mask, like):  # type: ignore[no-untyped-def]
    """Keys or values on pages in the dtype of ``like``; zeros where not ``mask``."""
    if at.dtype.element_ty == tl.uint8:
        return _from_fp8(tl.load(at, mask=mask, other=0)).to(like.dtype)
    else:
        return tl.load(at, mask=mask, other=0.0)


# Without fused multiplications and additions, which a compiler places differently in each kernel.
@triton.jit  # type: ignore[untyped-decorator]
def _row_of(ends, num_rows, piece, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of a piece of work, by the running ends of the rows' pieces."""
    offsets = tl.arange(0, ROWS)
    at = tl.sum((tl.load(ends + offsets, offsets < num_rows, piece + 1) <= piece).to(tl.int32), 0)
    for base in range(ROWS, num_rows, ROWS):
        more = tl.load(ends + base + offsets, base + offsets < num_rows, piece + 1)
        at += tl.sum((more <= piece).to(tl.int32), 0)
    return at


@triton.jit  # type: ignore[untyped-decorator]
def _shown(mask_rows, real, split, num_pages, end, PAGE: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pages of a split that a mask shows to some query: one that nobody sees may hold anything."""
    own = split * SPLIT * PAGE + tl.arange(0, SPLIT * PAGE)
    inside = real[:, None] & (own < num_pages * PAGE)[None, :]
    masked = tl.load(mask_rows[:, None] + own[None, :], inside, float("-inf"))
    shown = tl.max(masked.to(tl.float32), 0) > float("-inf")
    return tl.min(tl.where(shown, own // PAGE, end), 0), tl.max(tl.where(shown, own // PAGE + 1, 0), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _with_keys(  # type: ignore[no-untyped-def]
    top,
    total,
    out,
    q,
    q_rest,
    index,
    shown,
    low,
    high,
    keys,
    values,
    pages,
    mask_rows,
    head,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    HIDES: tl.constexpr,
):
    """Softmax sums after adding tile ``index`` of the keys, whose hidden keys add exact zeros.

    With ``HIDES`` a tile that is not ``shown`` is not read.
    """
    places, key_dims, value_dims = tl.arange(0, KEYS), tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    key = index * KEYS + places
    seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    if MASKED:
        hidden = tl.load(mask_rows[:, None] + key[None, :], mask=seen, other=float("-inf"))
        seen = hidden > float("-inf")
    page = tl.load(pages + index * KEYS // PAGE).to(tl.int64)
    kv_rows = (page * PAGE + index * KEYS % PAGE + places) * HEADS + head
    own_keys = keys + kv_rows[None, :] * KEY_DIM
    key_mask, value_mask = (key_dims < KEY_DIM)[:, None], (value_dims < VALUE_DIM)[None, :]
    if HIDES:
        key_mask, value_mask = key_mask & shown, value_mask & shown
    k = _read(own_keys + key_dims[:, None], key_mask, q)
    scores = tl.dot(q, k, input_precision="ieee")
    if KEY_DIM > KEY_TILE:
        rest_dims = KEY_TILE + tl.arange(0, REST_TILE)
        rest_mask = (rest_dims < KEY_DIM)[:, None]
        if HIDES:
            rest_mask = rest_mask & shown
        k_rest = _read(own_keys + rest_dims[:, None], rest_mask, q)
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
        v = _read(own_values + value_dims[None, :], value_mask, q)
    weights = weights.to(v.dtype)
    sums = tl.dot(weights, tl.full([KEYS, _ONES], 1.0, tl.float32).to(v.dtype), input_precision="ieee")
    total = total * fade + tl.max(sums, 1)  # of equal columns
    out = out * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
    return higher, total, out


@triton.jit
def _merged(top, total, out, more_top, more_total, more_out):  # type: ignore[no-untyped-def]
    """Softmax sums after adding the next split."""
    higher = tl.maximum(top, more_top)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    fade, share = tl.exp(top - level), tl.exp(more_top - level)
    return higher, total * fade + more_total * share, out * fade[:, None] + more_out * share[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _average(top, total, out, sink, like, scale, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values weighted by the softmax, from its sums, rounded to the dtype of ``like``, then times their ``scale``;
    zeros for a token that sees no key."""
    if SINKS:
        higher = tl.maximum(top, sink)
        fade = tl.exp(top - higher)
        total, out = total * fade + tl.exp(sink - higher), out * fade[:, None]
    average = (out / tl.where(total == 0.0, 1.0, total)[:, None]).to(like.dtype.element_ty)
    return (average.to(tl.float32) * scale).to(like.dtype.element_ty)


# Triton compiles a variant for each kind of size (1, multiples of 16, others) and of address, which would happen in the
# middle of serving. These kernels are compiled once for a model, when its first step runs.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "first_row", "first_place", "row_len", "num_pages", "head_stride", "token_stride"],
    do_not_specialize_on_alignment=["table", "gather", "first", "stop", "mask", "work"],
)
def partial_results(  # type: ignore[no-untyped-def]
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
    key_dims, value_dims = tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    rest_dims = KEY_TILE + tl.arange(0, REST_TILE)
    num_items = tl.load(ends + num_rows - 1) * HEADS
    for item in range(tl.program_id(0), num_items, PROGRAMS):
        head, piece = item % HEADS, item // HEADS
        at = _row_of(ends, num_rows, piece, ROWS)
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
            if MASKED:
                start, end = _shown(mask_rows, real, split, num_pages, end, PAGE, SPLIT)
            tokens = tl.load(gather + place, real, 0).to(tl.int64)
            heads = head * GROUPS + own_query % GROUPS
            own_heads = query + (heads * head_stride + tokens * token_stride)[:, None]
            q = tl.load(own_heads + key_dims[None, :], mask=real[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
            q_rest = q
            if KEY_DIM > KEY_TILE:
                has_rest = real[:, None] & (rest_dims < KEY_DIM)[None, :]
                q_rest = tl.load(own_heads + rest_dims[None, :], mask=has_rest, other=0.0)
            top = tl.full([BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
            for index in range(start * (PAGE // KEYS), end * (PAGE // KEYS)):
                top, total, out = _with_keys(
                    top,
                    total,
                    out,
                    q,
                    q_rest,
                    index,
                    True,
                    low,
                    high,
                    keys,
                    values,
                    table + row * num_pages,
                    mask_rows,
                    head,
                    scale,
                    softcap,
                    HEADS,
                    KEY_DIM,
                    VALUE_DIM,
                    VALUE_STRIDE,
                    KEY_TILE,
                    REST_TILE,
                    VALUE_TILE,
                    VALUES_IN_KEYS,
                    KEYS,
                    PAGE,
                    CAPPED,
                    MASKED,
                    False,
                )
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
def combine_results(  # type: ignore[no-untyped-def]
    sums,
    maxima,
    totals,
    sinks,
    scatter,
    work,
    result,
    value_scale,
    num_rows,
    first_row,
    first_place,
    row_len,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up the partial results of one token's head, split after split, if they are there."""
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
    dims = tl.arange(0, VALUE_TILE)[None, :]
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    out = tl.zeros([1, VALUE_TILE], tl.float32)
    one = tl.arange(0, 1)
    for split in tl.range(num_splits, loop_unroll_factor=_UNROLLED):
        partial = first + split * num_queries + one
        more_top = tl.load(maxima + partial)
        seen = (more_top > float("-inf"))[:, None] & (dims < VALUE_DIM)
        more_out = tl.load(sums + partial[:, None] * VALUE_DIM + dims, mask=seen, other=0.0)
        top, total, out = _merged(top, total, out, more_top, tl.load(totals + partial), more_out)
    sink = tl.load(sinks + head + one).to(tl.float32) if SINKS else top
    tl.store(
        result + (token * HEADS * GROUPS + head) * VALUE_DIM + dims,
        _average(top, total, out, sink, result, value_scale, SINKS),
        mask=here & (dims < VALUE_DIM),
    )


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_rows", "row_len", "num_pages", "head_stride", "token_stride"],
    do_not_specialize_on_alignment=["table", "gather", "first", "stop", "mask", "ends"],
)
def walk_pages(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    gather,
    first,
    stop,
    mask,
    sinks,
    ends,
    result,
    scale,
    softcap,
    value_scale,
    num_rows,
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
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attention of full rows for one KV head, ``TILES`` tiles of queries a row: each over all the keys that it sees."""
    key_dims, value_dims = tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    rest_dims = KEY_TILE + tl.arange(0, REST_TILE)
    num_items = tl.load(ends + num_rows - 1) * (HEADS * TILES)
    for item in range(tl.program_id(0), num_items, PROGRAMS):
        head, tile = item % HEADS, item // HEADS % TILES
        row = _row_of(ends, num_rows, item // (HEADS * TILES), ROWS).to(tl.int64)
        own_query = tile * BLOCK + tl.arange(0, BLOCK)
        real = own_query < row_len * GROUPS
        place = row * row_len + own_query // GROUPS
        low, high = tl.load(first + place, real, num_pages * PAGE), tl.load(stop + place, real, 0)
        first_page, stop_page = tl.min(low, 0) // PAGE, (tl.max(high, 0) + PAGE - 1) // PAGE
        mask_rows = mask + place * num_pages * PAGE
        tokens = tl.load(gather + place, real, 0).to(tl.int64)
        heads = head * GROUPS + own_query % GROUPS
        own_heads = query + (heads * head_stride + tokens * token_stride)[:, None]
        q = tl.load(own_heads + key_dims[None, :], mask=real[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
        q_rest = q
        if KEY_DIM > KEY_TILE:
            has_rest = real[:, None] & (rest_dims < KEY_DIM)[None, :]
            q_rest = tl.load(own_heads + rest_dims[None, :], mask=has_rest, other=0.0)
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
        if MASKED:
            first_page = first_page // SPLIT * SPLIT
        own_top = tl.full([BLOCK], float("-inf"), tl.float32)
        own_total = tl.zeros([BLOCK], tl.float32)
        own_out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
        start, end = first_page, stop_page
        for step in range((stop_page - first_page) * (PAGE // KEYS)):
            index = first_page * (PAGE // KEYS) + step
            if index % (SPLIT * PAGE // KEYS) == 0:  # a split begins
                top, total, out = _merged(top, total, out, own_top, own_total, own_out)
                own_top = tl.full([BLOCK], float("-inf"), tl.float32)
                own_total = tl.zeros([BLOCK], tl.float32)
                own_out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
                if MASKED:
                    start, end = _shown(
                        mask_rows, real, index * KEYS // (SPLIT * PAGE), num_pages, stop_page, PAGE, SPLIT
                    )
            page = index * KEYS // PAGE
            own_top, own_total, own_out = _with_keys(
                own_top,
                own_total,
                own_out,
                q,
                q_rest,
                index,
                (page >= start) & (page < end),
                low,
                high,
                keys,
                values,
                table + row * num_pages,
                mask_rows,
                head,
                scale,
                softcap,
                HEADS,
                KEY_DIM,
                VALUE_DIM,
                VALUE_STRIDE,
                KEY_TILE,
                REST_TILE,
                VALUE_TILE,
                VALUES_IN_KEYS,
                KEYS,
                PAGE,
                CAPPED,
                MASKED,
                MASKED,
            )
        top, total, out = _merged(top, total, out, own_top, own_total, own_out)
        sink = tl.load(sinks + heads).to(tl.float32) if SINKS else top
        tl.store(
            result + (tokens * (HEADS * GROUPS) + heads)[:, None] * VALUE_DIM + value_dims[None, :],
            _average(top, total, out, sink, result, value_scale, SINKS),
            mask=real[:, None] & (value_dims < VALUE_DIM)[None, :],
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
    key_scale,
    value_scale,
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
    """Writes one token's key and value of one head into one KV row, by their scales and rounded where pages are in
    FP8."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64) * HEADS + tl.program_id(1)
    token, head = tl.load(tokens + tl.program_id(0)).to(tl.int64), tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, KEY_TILE)
    source = key + head * key_head_stride + token * key_token_stride
    x = tl.load(source + dims, mask=dims < KEY_DIM)
    if keys.dtype.element_ty == tl.uint8:
        x = _to_fp8(tl.div_rn(x.to(tl.float32), key_scale))
    tl.store(keys + row * KEY_DIM + dims, x, mask=dims < KEY_DIM)
    dims = tl.arange(0, VALUE_TILE)
    source = value + head * value_head_stride + token * value_token_stride
    x = tl.load(source + dims, mask=dims < VALUE_DIM)
    if values.dtype.element_ty == tl.uint8:
        x = _to_fp8(tl.div_rn(x.to(tl.float32), value_scale))
    tl.store(values + row * VALUE_DIM + dims, x, mask=dims < VALUE_DIM)


def write_in_place(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    write_rows: Tensor,
    write_tokens: Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Writes keys and values of tokens into pages.

    Args:
        key, value: [1, num_kv_heads, T, dim].
        key_pages, value_pages: [num_pages, page_size, num_kv_heads, dim], written in place; of the same dtype, or in
            FP8 (``kv_cache.py``).
        write_rows: [W] flat KV rows. write_tokens: [W] the token that each takes.
        scales: what pages in FP8 hold keys and values divided by.
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
        *map(float, scales),
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
    value_scale: float = 1.0,
) -> Tensor:
    """Attention over pages.

    Args:
        query: [1, num_heads, T, key_dim]. key_pages, value_pages: [num_pages, page_size, num_kv_heads, dim]; values may
            be the beginning of the keys.
        page_table: [B, pages]; entries behind the last key that a row sees are not read. gather_index: [B, n] the token
            at each place. scatter_index: [T] each token's place among B * n.
        seen: the keys that each place sees. sinks: [num_heads].
        value_scale: what the results are multiplied by, once they are rounded.

    Returns:
        [1, T, num_heads, value_dim]; zeros for a token that sees no key.
    """
    query = _dense(query)
    given = query, key_pages, value_pages, page_table, gather_index, scatter_index, seen, sinks, scale, softcap
    return _attended(*given, walked_block(query, key_pages, value_pages), value_scale)


def _attended(
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
    block: int,
    value_scale: float = 1.0,
) -> Tensor:
    """``attend_in_place``. ``block``: queries of a tile of rows that are walked; 0: none are."""
    _, num_heads, num_tokens, key_dim = query.shape
    _, page_size, num_kv_heads, value_dim = value_pages.shape
    num_pages, row_len, groups = page_table.shape[1], gather_index.shape[1], num_heads // num_kv_heads
    tiles = -(-row_len * groups // block) if block else 0
    todo, walked = seen.work(sum_bytes(num_heads, value_dim), num_tokens, num_kv_heads * tiles)
    most = max([call.num_sums for call, _ in todo], default=0) * num_heads
    sums = query.new_empty(most, value_dim, dtype=torch.float32)
    maxima = query.new_empty(most, dtype=torch.float32)
    totals = torch.empty_like(maxima)
    # Tokens of padding are in no row that is walked, and those of a library in none at all.
    made = query.new_empty if walked is None and seen.by_library is None else query.new_zeros
    result = made(1, num_tokens, num_heads, value_dim)
    (key_tile, rest_tile), value_tile = _tiles(key_dim), _tile(value_dim)
    in_keys = value_pages.stride(2) == key_dim and key_tile == value_dim < key_dim  # the beginning of the keys
    key_bytes = (key_tile + (key_dim > key_tile) * rest_tile + (not in_keys) * value_tile) * query.element_size()
    keys = page_size
    while keys > BLOCK and keys * key_bytes > _TILE_BYTES:
        keys //= 2
    page_table, gather_index = page_table.contiguous(), gather_index.contiguous()
    first, stop, mask = seen.first, seen.stop, seen.mask
    strides, scales = (query.stride(1), query.stride(2)), (scale, softcap or 1.0)
    tables = page_table, gather_index, first, stop, first if mask is None else mask.contiguous()
    sizes = {
        "HEADS": num_kv_heads,
        "GROUPS": groups,
        "VALUE_DIM": value_dim,
        "VALUE_TILE": value_tile,
        "SINKS": sinks is not None,
    }
    shape = sizes | {
        "KEY_DIM": key_dim,
        "VALUE_STRIDE": value_pages.stride(2),
        "KEY_TILE": key_tile,
        "REST_TILE": rest_tile,
        "VALUES_IN_KEYS": in_keys,
        "KEYS": keys,
        "PAGE": page_size,
        "SPLIT": SPLIT,
        "ROWS": _ROWS,
        "PROGRAMS": NUM_PROGRAMS,
        "CAPPED": softcap is not None,
        "MASKED": mask is not None,
        "enable_fp_fusion": False,
    }
    few = {"num_stages": 2 if keys * key_bytes <= _PREFETCHED_BYTES else 1, "num_warps": 4 if key_dim <= _WIDE else 8}
    given_sinks = query if sinks is None else sinks
    if walked is not None:
        walk_pages[(NUM_PROGRAMS,)](
            query,
            key_pages,
            value_pages,
            *tables,
            given_sinks,
            walked,
            result,
            *scales,
            value_scale,
            walked.shape[0],
            row_len,
            num_pages,
            *strides,
            BLOCK=block,
            TILES=tiles,
            **shape,
            **(few if block == BLOCK else {"num_stages": 2, "num_warps": 8}),
        )
    for call, work in todo:
        rows = call.stop_row - call.first_row
        at = call.first_row, call.first_place, row_len
        partial_results[(NUM_PROGRAMS,)](
            query,
            key_pages,
            value_pages,
            *tables,
            work,
            sums,
            maxima,
            totals,
            *scales,
            rows,
            *at,
            num_pages,
            *strides,
            BLOCK=BLOCK,
            **{name: value for name, value in shape.items() if name != "SINKS"},
            **few,
        )
        combine_results[(num_tokens, num_heads)](
            sums,
            maxima,
            totals,
            given_sinks,
            scatter_index,
            work,
            result,
            value_scale,
            rows,
            *at,
            enable_fp_fusion=False,
            **sizes,
        )
    return result


def walked_block(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> int:
    """Queries of a tile of rows that are walked: the largest with the same bits as ``partial_results`` on this device.

    The first call for each size of heads compares them, unless a step is being recorded.
    """
    (_, num_heads, _, key_dim), (*_, num_kv_heads, value_dim) = query.shape, value_pages.shape
    key = str(query.device), query.dtype, key_pages.dtype, num_heads, num_kv_heads, key_dim, value_dim
    if key not in BLOCKS:
        if not can_try(query):
            return 0
        candidates = walked_blocks(query.dtype, num_heads // num_kv_heads, key_dim)
        in_keys = value_pages.stride(2) == key_dim
        sizes = query, num_kv_heads, -value_dim if in_keys else value_dim
        fp8 = key_pages.dtype == FP8
        BLOCKS[key] = next((b for b in candidates if blocks_agree(b, *sizes, fp8=fp8, most=NUM_TRIED)), 0)
        if BLOCKS[key] != candidates[0]:
            log.warning(
                "attention of heads of %d numbers has other bits in tiles of %d queries on %s: it has tiles of %d",
                key_dim,
                candidates[0],
                query.device,
                BLOCKS[key] or BLOCK,
            )
    return BLOCKS[key]


def walked_blocks(dtype: torch.dtype, groups: int, key_dim: int) -> list[int]:
    """Sizes of tiles to try, the largest first: no larger than the queries of a row, or than registers hold."""
    most = BLOCK if dtype == torch.float32 else 64 if _tile(key_dim) <= _WIDE // 2 else 32
    return sorted({BLOCK, min(most, _tile(QUERY_ROW_LEN * groups))}, reverse=True)


def can_try(query: Tensor) -> bool:
    """True if sizes of blocks can be timed here and now."""
    return query.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def blocks_agree(block: int, like: Tensor, num_kv_heads: int, value_dim: int, *, fp8: bool = False, most: int) -> bool:
    """True if random full rows have the same bits walked, in tiles of ``block``, as by splits.

    Args:
        block: queries of a tile.
        like: queries, for their sizes, dtype and device.
        num_kv_heads: heads of keys. value_dim: numbers of a value; below 0: it is the beginning of the key.
        fp8: True: pages are in FP8.
        most: numbers of the queries; more, where fewer rows would not be walked.
    """
    _, num_heads, _, key_dim = like.shape
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=like.device).to(like.dtype)

    programs = num_kv_heads * -(-QUERY_ROW_LEN * num_heads // num_kv_heads // block)
    num_rows = max(most // (QUERY_ROW_LEN * num_heads * key_dim), -(-LEAST_WALKS // programs))
    places = torch.arange(num_rows * QUERY_ROW_LEN, device=like.device)
    query = random(len(places), num_heads, key_dim).transpose(0, 1)[None]
    dims = (key_dim,) if value_dim < 0 else (key_dim, value_dim)
    pools = [random(_TRIED_PAGES, PAGE_SIZE, num_kv_heads, dim) for dim in dims]
    keys, *own = [to_fp8(pool) for pool in pools] if fp8 else pools
    values = own[0] if own else keys[..., :-value_dim]
    gather = places.view(num_rows, QUERY_ROW_LEN)
    table = torch.arange(_TRIED_PAGES, device=like.device).repeat(num_rows, 1)
    stop = (places * 7 % (_TRIED_PAGES * PAGE_SIZE - QUERY_ROW_LEN) + QUERY_ROW_LEN).int().view_as(gather)
    full = torch.full((num_rows,), QUERY_ROW_LEN, device=like.device)
    sizes = [QUERY_ROW_LEN] * num_rows, [num_splits(_TRIED_PAGES)] * num_rows
    seen = Seen(stop // 3, stop, full, sizes=sizes)
    given = query, keys, values, table, gather, places, seen, None, key_dim**-0.5, None
    return torch.equal(_attended(*given, block), _attended(*given, 0))


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
