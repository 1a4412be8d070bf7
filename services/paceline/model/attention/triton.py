"""Attention that reads pages in place, for CUDA: no gathered copy of the keys, and bits that no neighbour changes.

Every query row sees its keys in tiles of one page. Tiles are summed up one after the other, ``_SPLIT`` of them by one
program, and the programs' partial results one after the other again. None of these sizes depends on the step, and a
masked tile adds exact zeros: so a row's result does not depend on what else is in the batch, on the length of the
page table, nor on whether the row is decoded or verified. (Flash-decoding, Dao et al. 2023, with a fixed split size.)

Imports triton, so that it is imported only where this kernel was chosen (``kernels.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SPLIT = 4
"""Pages of one program: enough programs to fill a device at a few thousand keys."""
_BLOCK = 16
"""Query rows, times grouped heads, of one program: the smallest tile that matrix units take."""
_PREFETCHED_BYTES = 1 << 15
"""Keys and values of a page that the next one's are loaded beside: two of them fit the shared memory of any device."""


# Triton compiles a variant for each kind of size (1, multiples of 16, others) and of address, which would happen in the
# middle of serving. These kernels are compiled once for a model, when its first step runs.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_queries", "row_len", "num_pages", "num_splits"],
    do_not_specialize_on_alignment=["table", "mask"],
)
def _partial(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    mask,
    sums,
    maxima,
    totals,
    scale,
    softcap,
    num_queries,
    row_len,
    num_pages,
    num_splits,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Softmax sums of ``BLOCK`` query rows of one head over one split's keys."""
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), (tl.program_id(0) % HEADS).to(tl.int64)
    split, block = tl.program_id(1), tl.program_id(2)
    at = block * BLOCK + tl.arange(0, BLOCK)
    real = at < num_queries
    key_dims, value_dims, places = tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE), tl.arange(0, PAGE)
    first = (row * HEADS + head) * num_queries
    q = tl.load(
        query + (first + at)[:, None] * KEY_DIM + key_dims[None, :],
        mask=real[:, None] & (key_dims < KEY_DIM)[None, :],
        other=0.0,
    )
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, VALUE_TILE], tl.float32)
    mask_rows = mask + (row * row_len + at % row_len) * (num_pages * PAGE)
    for index in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, num_pages)):
        page = tl.load(table + row * num_pages + index).to(tl.int64)
        kv_rows = (page * PAGE + places) * HEADS + head
        k = tl.load(
            keys + kv_rows[None, :] * KEY_DIM + key_dims[:, None], mask=(key_dims < KEY_DIM)[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
        hidden = tl.load(mask_rows[:, None] + (index * PAGE + places)[None, :], mask=real[:, None], other=0.0)
        scores += hidden.to(tl.float32)
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: weights of zero, not NaN
        weights, fade = tl.exp(scores - level[:, None]), tl.exp(top - level)
        v = tl.load(
            values + kv_rows[:, None] * VALUE_DIM + value_dims[None, :],
            mask=(value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    partial = (row * HEADS + head) * num_splits + split
    tl.store(maxima + partial * num_queries + at, top, mask=real)
    tl.store(totals + partial * num_queries + at, total, mask=real)
    tl.store(
        sums + (partial * num_queries + at)[:, None] * VALUE_DIM + value_dims[None, :],
        out,
        mask=real[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_queries", "num_splits"])  # type: ignore[untyped-decorator]
def _combined(  # type: ignore[no-untyped-def]
    sums, maxima, totals, result, num_queries, num_splits, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr
):
    """Adds one query row's partial results up, the first split first."""
    pair, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, VALUE_TILE)
    top, total = tl.full([VALUE_TILE], float("-inf"), tl.float32), tl.zeros([VALUE_TILE], tl.float32)
    out = tl.zeros([VALUE_TILE], tl.float32)
    for split in range(num_splits):
        top = tl.maximum(top, tl.load(maxima + (pair * num_splits + split) * num_queries + at))
    for split in range(num_splits):
        partial = (pair * num_splits + split) * num_queries + at
        weight = tl.exp(tl.load(maxima + partial) - top)
        total += weight * tl.load(totals + partial)
        out += weight * tl.load(sums + partial * VALUE_DIM + dims, mask=dims < VALUE_DIM, other=0.0)
    tl.store(
        result + (pair * num_queries + at) * VALUE_DIM + dims,
        (out / total).to(result.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


def attend_in_place(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention over pages.

    Args:
        query: [B, num_kv_heads, groups * n, key_dim], places of a group next to each other.
        key_pages, value_pages: [num_pages, page_size, num_kv_heads, dim]. page_table: [B, pages].
        mask: additive [B, 1, n, pages * page_size]; every place sees some key.

    Returns:
        [B, num_kv_heads, groups * n, value_dim].
    """
    num_rows, num_heads, num_queries, key_dim = query.shape
    _, page_size, _, value_dim = value_pages.shape
    num_pages, row_len = page_table.shape[1], mask.shape[2]
    num_splits, pairs = -(-num_pages // _SPLIT), num_rows * num_heads
    sums = query.new_empty(pairs, num_splits, num_queries, value_dim, dtype=torch.float32)
    maxima = query.new_empty(pairs, num_splits, num_queries, dtype=torch.float32)
    totals = torch.empty_like(maxima)
    result = query.new_empty(num_rows, num_heads, num_queries, value_dim)
    key_tile, value_tile = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    tile_bytes = (key_tile + value_tile) * page_size * query.element_size()
    _partial[(pairs, num_splits, -(-num_queries // _BLOCK))](
        query.contiguous(),
        key_pages,
        value_pages,
        page_table.contiguous(),
        mask.contiguous(),
        sums,
        maxima,
        totals,
        scale,
        softcap or 1.0,
        num_queries,
        row_len,
        num_pages,
        num_splits,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_TILE=key_tile,
        VALUE_TILE=value_tile,
        PAGE=page_size,
        SPLIT=_SPLIT,
        BLOCK=_BLOCK,
        CAPPED=softcap is not None,
        num_stages=2 if tile_bytes <= _PREFETCHED_BYTES else 1,
    )
    _combined[(pairs, num_queries)](
        sums, maxima, totals, result, num_queries, num_splits, VALUE_DIM=value_dim, VALUE_TILE=value_tile
    )
    return result
