"""The pass over vocabulary rows that draws tokens, on CUDA: ``noise.gumbel_max`` in two launches instead of some 140.

Its twin in torch (``noise.py``) gives the same bits, as every operation of float64 is rounded on its own: ``UNFUSED``
sees to that.

Imports triton, so that it is imported only where these kernels can run (``cuda.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Tokens of one program: a row of 128,256 keeps 126 of them busy, about as many as a large device runs at once."""
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
def _exact_log(x):  # type: ignore[no-untyped-def]
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


_COUNTS = ["num_tokens", "first", "stream", "row_stride", "seed_stride", "position_stride", "nonce_stride"]
_POINTERS = ["log_weights", "seeds", "positions", "nonces"]


# Compiled once for a dtype, as those of ``model/attention/triton.py``: for sizes and addresses of all kinds.
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_POINTERS)  # type: ignore[untyped-decorator]
def _parts(  # type: ignore[no-untyped-def]
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
    zeros = tl.zeros([BLOCK // 4], tl.uint32)
    lanes = first // 4 + part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = _philox(
        lanes.to(tl.uint32),
        zeros + (position & 0xFFFFFFFF).to(tl.uint32),
        zeros + ((position >> 32) & 0xFFFFFF | stream.to(tl.int64) << 24).to(tl.uint32),
        zeros + (nonce & 0xFFFFFFFF).to(tl.uint32),
        zeros + (seed & 0xFFFFFFFF).to(tl.uint32),
        zeros + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])  # the four of a lane next to each other
    noise = -_exact_log(-_exact_log((words.to(tl.float64) + 0.5) * 2.3283064365386963e-10))
    column = first // 4 * 4 - first + part * BLOCK + tl.arange(0, BLOCK)
    real = (column >= 0) & (column < num_tokens)
    weight = tl.load(log_weights + row * row_stride + column, mask=real, other=float("-inf"))
    score = tl.where(real, noise.to(tl.float32).to(tl.float64) + weight.to(tl.float64), float("-inf"))
    best, token = _winner(score, tl.where(real, (first + column).to(tl.int64), _NOWHERE), first + num_tokens - 1)
    at = row * tl.num_programs(1) + part
    tl.store(scores + at, best)
    tl.store(tokens + at, token)


@triton.jit(do_not_specialize=["num_parts", "last"])  # type: ignore[untyped-decorator]
def _whole(scores, tokens, best, token, num_parts, last, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best of a row's parts."""
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    at = row * num_parts + parts
    of_parts = tl.load(scores + at, mask=parts < num_parts, other=float("-inf"))
    highest, lowest = _winner(of_parts, tl.load(tokens + at, mask=parts < num_parts, other=_NOWHERE), last)
    tl.store(best + row, highest)
    tl.store(token + row, lowest)


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
    _parts[(rows, num_parts)](
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
    _whole[(rows,)](scores, tokens, best, token, num_parts, last, PARTS=triton.next_power_of_2(num_parts))
    return best, token
