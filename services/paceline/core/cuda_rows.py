"""Passes over vocabulary rows on CUDA: a few launches where torch's operators take a dozen, or with noise some 140.

The reference implementations in torch (``noise.py``, ``sampling.py``) give the same tokens and scores bit for bit,
because each float64 operation is rounded separately: ``UNFUSED`` ensures that.

Imports triton, so that it is imported only where these kernels can run (``cuda.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Tokens of one program: a row of 128,256 makes 126 programs, about the number that a large device runs at once."""
UNFUSED = {"enable_fp_fusion": False}
"""An option of each launch whose float64 must be exact: by default triton fuses products with sums."""
_NOWHERE = tl.constexpr(1 << 62)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """``noise.philox`` on uint32."""
    m0, m1 = tl.full(c0.shape, 0xD2511F53, tl.uint32), tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full(c0.shape, 0x9E3779B9, tl.uint32), tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0, high1, low1 = tl.umulhi(c0, m0), c0 * m0, tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + w0, k1 + w1
    return c0, c1, c2, c3


@triton.jit
def exact_log(x):  # type: ignore[no-untyped-def]
    """``noise.exact_log``, in its order of operations."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits + 0x00095F619980C433) >> 52) - 1023
    mantissa = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    e = exponent.to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = tl.full(x.shape, 1.0 / 23, tl.float64)
    for i in tl.static_range(10, 0, -1):
        series = series * square + 1.0 / (2 * i + 1)
    s *= 2.0
    series = series * square * s + e * 1.9082149292705877e-10
    return (series + s) + e * 0.6931471803691238


@triton.jit
def _winner(scores, tokens, last):  # type: ignore[no-untyped-def]
    """The largest score and the lowest of its tokens; ``last`` at most, where NaN is in the way."""
    best = tl.max(scores, 0)
    return best, tl.minimum(tl.min(tl.where(scores == best, tokens, _NOWHERE), 0), last)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(seed, position, nonce, stream, first_lane, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Exact Gumbel noise of the tokens [4 first_lane, 4 first_lane + BLOCK): float32 values in float64."""
    zeros = tl.zeros([BLOCK // 4], tl.uint32)
    w0, w1, w2, w3 = _philox(
        (first_lane + tl.arange(0, BLOCK // 4)).to(tl.uint32),
        zeros + (position & 0xFFFFFFFF).to(tl.uint32),
        zeros + ((position >> 32) & 0xFFFFFF | stream.to(tl.int64) << 24).to(tl.uint32),
        zeros + (nonce & 0xFFFFFFFF).to(tl.uint32),
        zeros + (seed & 0xFFFFFFFF).to(tl.uint32),
        zeros + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])  # the four of a lane next to each other
    noise = -exact_log(-exact_log((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10))
    return noise.to(tl.float32).to(tl.float64)


_COUNTS = ["num_tokens", "first", "stream", "row_stride", "seed_stride", "position_stride", "nonce_stride"]
_POINTERS = ["log_weights", "seeds", "positions", "nonces"]


# Compiled once per dtype for all sizes and addresses, like the kernels of ``model/attention/triton.py``.
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_POINTERS)  # type: ignore[untyped-decorator]
def best_of_parts(  # type: ignore[no-untyped-def]
    log_weights,
    seeds,
    positions,
    nonces,
    scores,
    tokens,
    num_tokens,
    first,
    stream,
    row_stride,
    seed_stride,
    position_stride,
    nonce_stride,
    HAS_NONCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest sum of log weight and noise among ``BLOCK`` tokens of a row, and its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, position = tl.load(seeds + row * seed_stride), tl.load(positions + row * position_stride)
    nonce = tl.load(nonces + row * nonce_stride) if HAS_NONCES else position * 0
    noise = _noise(seed, position, nonce, stream, first // 4 + part * (BLOCK // 4), BLOCK)
    column = first // 4 * 4 - first + part * BLOCK + tl.arange(0, BLOCK)
    real = (column >= 0) & (column < num_tokens)
    weight = tl.load(log_weights + row * row_stride + column, mask=real, other=float("-inf"))
    best, token = _winner(
        noise + weight.to(tl.float64), tl.where(real, (first + column).to(tl.int64), _NOWHERE), first + num_tokens - 1
    )
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, best)
    tl.store(tokens + at, token)


@triton.jit(do_not_specialize=["num_parts", "last"])  # type: ignore[untyped-decorator]
def best_of_row(scores, tokens, best, token, num_parts, last, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best of a row's parts."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    at = row * num_parts + parts
    of_parts = tl.load(scores + at, mask=parts < num_parts, other=float("-inf"))
    highest, lowest = _winner(of_parts, tl.load(tokens + at, mask=parts < num_parts, other=_NOWHERE), last)
    tl.store(best + row, highest)
    tl.store(token + row, lowest)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "row_stride"], do_not_specialize_on_alignment=["logits"]
)
def tops_of_parts(logits, tops, num_tokens, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of ``BLOCK`` logits; inf if one of them is NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < num_tokens, other=float("-inf")).to(tl.float32)
    tl.store(tops + row * tl.num_programs(1) + part, tl.max(tl.where(x == x, x, float("inf")), 0))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "row_stride", "stream"],
    do_not_specialize_on_alignment=["logits", "keys", "tops", "chosen", "sums"],
)
def picked_parts(  # type: ignore[no-untyped-def]
    logits,
    keys,
    tops,
    scores,
    tokens,
    chosen,
    sums,
    num_tokens,
    row_stride,
    stream,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of ``BLOCK`` tokens of a row, its logit after the temperature, and the sum of the exponentials."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    parts = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)
    temperature = tl.load(keys + row * 3 + 2).to(tl.int32).to(tl.float32, bitcast=True)
    column = part * BLOCK + tl.arange(0, BLOCK)
    real = column < num_tokens
    x = tl.load(logits + row * row_stride + column, mask=real, other=float("-inf")).to(tl.float32)
    is_void = tl.abs(top) == float("inf")  # then the numbers mean nothing, and there are no NaN
    x = tl.where(is_void, 0.0, x) - tl.where(is_void, 0.0, top)
    if temperature == 0.0:
        score = x.to(tl.float64)
    else:
        x = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + temperature)
        seed, position = tl.load(keys + row * 3), tl.load(keys + row * 3 + 1)
        score = x.to(tl.float64) + _noise(seed, position, position * 0, stream, part * (BLOCK // 4), BLOCK)
    best, token = _winner(score, tl.where(real, column.to(tl.int64), _NOWHERE), num_tokens - 1)
    at = row * num_parts + part
    tl.store(scores + at, best)
    tl.store(tokens + at, token)
    tl.store(chosen + at, tl.max(tl.where(column == token, x, float("-inf")), 0))
    tl.store(sums + at, tl.sum(tl.exp(x), 0))


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_parts", "last"], do_not_specialize_on_alignment=["tops", "chosen", "sums"]
)
def picked_of_row(  # type: ignore[no-untyped-def]
    scores, tokens, tops, chosen, sums, picked, num_parts, last, PARTS: tl.constexpr
):
    """The best of a row's parts and its log-probability; -1 where the row has no finite maximum."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    at, real = row * num_parts + parts, parts < num_parts
    of_parts = tl.load(tokens + at, mask=real, other=_NOWHERE)
    _, token = _winner(tl.load(scores + at, mask=real, other=float("-inf")), of_parts, last)
    x = tl.max(tl.where(of_parts == token, tl.load(chosen + at, mask=real, other=float("-inf")), float("-inf")), 0)
    total = tl.sum(tl.load(sums + at, mask=real, other=0.0), 0)
    top = tl.max(tl.load(tops + at, mask=real, other=float("-inf")), 0)
    tl.store(picked + row * 2, tl.where(tl.abs(top) < float("inf"), token, -1).to(tl.float64))
    tl.store(picked + row * 2 + 1, (x - tl.log(total)).to(tl.float64))


def pick(logits: Tensor, keys: Tensor, stream: int) -> Tensor:
    """``rows.pick`` of one token without masks and cuts: (logits - their maximum) / temperature + noise is largest.

    Args:
        logits: [rows, tokens] of any float dtype and any distance of rows.
        keys: [rows, 3] int64, contiguous: seed bits, position, the bits of the temperature as float32. 0: no noise.

    Returns:
        [rows, 2] float64: token ids and log-probabilities (float32); -1 for rows with NaN, +inf or nothing but -inf.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, num_tokens = logits.shape
    num_parts = triton.cdiv(num_tokens, _BLOCK)
    sizes = {"PARTS": triton.next_power_of_2(num_parts)}
    tops, chosen, sums = logits.new_empty(3, rows, num_parts, dtype=torch.float32)
    scores = logits.new_empty(rows, num_parts, dtype=torch.float64)
    tokens = torch.empty_like(scores, dtype=torch.int64)
    picked = scores.new_empty(rows, 2)
    programs, stride = (rows, num_parts), logits.stride(0)
    tops_of_parts[programs](logits, tops, num_tokens, stride, BLOCK=_BLOCK)
    found = tops, scores, tokens, chosen, sums
    picked_parts[programs](logits, keys, *found, num_tokens, stride, int(stream), BLOCK=_BLOCK, **sizes, **UNFUSED)
    picked_of_row[(rows,)](scores, tokens, tops, chosen, sums, picked, num_parts, num_tokens - 1, **sizes)
    return picked


def gumbel_max(
    log_weights: Tensor, seeds: Tensor, positions: Tensor, nonces: Tensor | None, stream: int, first: int
) -> tuple[Tensor, Tensor]:
    """``noise.gumbel_max``: scores [rows] float64 and token ids [rows] int64.

    Args:
        log_weights: [rows, tokens] of any float dtype and any distance of rows. A row with NaN gets any token of its
            own.
        seeds, positions, nonces: [rows] int64 at any distance; no nonces are zeros.
    """
    if log_weights.stride(1) != 1:
        log_weights = log_weights.contiguous()
    rows, num_tokens = log_weights.shape
    num_parts = triton.cdiv(first % 4 + num_tokens, _BLOCK)
    last = first + num_tokens - 1
    scores = log_weights.new_empty(rows, num_parts, dtype=torch.float64)
    tokens = torch.empty_like(scores, dtype=torch.int64)
    keys = seeds if nonces is None else nonces
    best_of_parts[(rows, num_parts)](
        log_weights,
        seeds,
        positions,
        keys,
        scores,
        tokens,
        num_tokens,
        first,
        int(stream),
        log_weights.stride(0),
        seeds.stride(0),
        positions.stride(0),
        keys.stride(0),
        HAS_NONCES=nonces is not None,
        BLOCK=_BLOCK,
        **UNFUSED,
    )
    best = scores.new_empty(rows)
    token = tokens.new_empty(rows)
    best_of_row[(rows,)](scores, tokens, best, token, num_parts, last, PARTS=triton.next_power_of_2(num_parts))
    return best, token
