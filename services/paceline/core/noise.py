"""Noise without state: every (seed, position, token, stream) has its own value, the same on every device.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
2011), in int64 tensors whose products wrap modulo 2^64. The 64-bit seed is the key; the counter is

    word 0   token // 4 (the four output words belong to four neighbouring tokens), or a lane
    word 1   position, low 32 bits
    word 2   position, bits 32 to 55, and the stream in the top byte
    word 3   nonce

Gumbel values are -log(-log u) with u = (k + 0.5) / 2^32 and k an output word, so u is strictly inside (0, 1). The
logarithm uses only IEEE additions, multiplications and divisions of float64, each rounded separately. These agree on
every device; library logarithms differ in the last bits. Its error is below 2e-15 relative; the result is rounded to
float32. Sampling from 32-bit words is off by at most V * 2^-32 in total variation, with vocabulary size V. Rounding
adds to it, because equal scores go to the lower token id. Two equal logits tie with probability 1.4e-8, so 6.9e-9 of it
moves to the lower one.
"""

from __future__ import annotations

import enum
import math

import torch
from torch import Tensor

from paceline.core import cuda
from paceline.core import rows as native

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # its low 21 bits are zero: exponent * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SERIES = tuple(1.0 / (2 * i + 1) for i in range(12))

MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33))) + 1e-5
MIN_GUMBEL = -math.log(33 * math.log(2.0)) - 1e-5
"""No Gumbel value lies outside [MIN_GUMBEL, MAX_GUMBEL]: about -3.13 to 22.87."""

CPU_CACHED_TOKENS = 2**17
"""Tokens whose intermediate values (some 24 bytes each) stay in a core's cache; more go piecewise on CPUs."""


class Stream(enum.IntEnum):
    """Independent uses of noise at one position. The rejection rule must never touch COUPLED."""

    COUPLED = 0
    """Shared by draft and target under the coupled rule."""
    ACCEPT = 1
    """Rejection rule: the uniform that is compared with p/q."""
    RECOVER = 2
    """Rejection rule: the recovered or bonus token, with the text before it as nonce. Drafts guess by it."""
    DRAFT = 3
    """Rejection rule: the draft's own choice."""


def seed_bits(seed: int) -> int:
    """The int64 with the bits of a 64-bit seed in ``[0, 2**64)``."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}: a 64-bit key in [0, 2**64) is allowed")
    return seed - 2**64 if seed >= 2**63 else seed


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four int64 tensors of 32-bit output words, in the broadcast shape of the arguments.

    Arguments are int64 tensors holding 32-bit words. Words 1 and 3 carry garbage above bit 31 between rounds (whole
    products instead of their low halves). Factors are masked, so the garbage goes no further.
    """
    x0, x1, x2, x3 = counter
    for k0, k1 in zip(_key_schedule(key[0], _W0), _key_schedule(key[1], _W1), strict=True):
        product0, product1 = x0 * _M0, x2 * _M1
        x0 = _xor_(product1 >> 32, x1 ^ k0)
        x2 = _xor_(product0 >> 32, x3 ^ k1)
        x1, x3 = product1, product0
    return x0, x1 & _MASK, x2, x3 & _MASK


def _key_schedule(word: Tensor, increment: int) -> tuple[Tensor, ...]:
    rounds = torch.arange(_ROUNDS, device=word.device).mul_(increment).view(-1, *(1,) * word.dim())
    return (word + rounds).bitwise_and_(_MASK).unbind()


def _xor_(a: Tensor, b: Tensor) -> Tensor:
    out = a.bitwise_xor_(b) if a.shape == b.shape else a ^ b
    return out.bitwise_and_(_MASK)


def gumbel(
    seeds: Tensor, positions: Tensor, stream: Stream, num_tokens: int, nonces: Tensor | None = None, first: int = 0
) -> Tensor:
    """Gumbel noise of the tokens [first, first + num_tokens).

    Args:
        seeds, positions: [rows] int64; seeds are bit patterns (``seed_bits``).
        nonces: [rows] int64, 0 if absent.

    Returns:
        [rows, num_tokens] float32.
    """
    # One Philox call yields the four words of tokens 4 i to 4 i + 3: whole lanes, then cut to the tokens asked for.
    lanes = torch.arange(first // 4, (first + num_tokens + 3) // 4, device=seeds.device)[None]
    words = philox(_counter(lanes, positions[:, None], stream, _column(nonces)), _key(seeds[:, None]))
    return exact_gumbel(torch.stack(words, dim=-1).flatten(1)[:, first % 4 : first % 4 + num_tokens])


def fast_gumbel_at(
    seeds: Tensor, positions: Tensor, stream: Stream, token_ids: Tensor, nonces: Tensor | None = None
) -> Tensor:
    """``gumbel`` of single tokens [rows, m], in float64 by the device's own logarithm: within 2e-6, where bits do not
    matter."""
    counter = _counter(token_ids >> 2, positions[:, None], stream, _column(nonces))
    words = torch.stack(philox(counter, _key(seeds[:, None])), dim=-1)
    return _unit_interval(words.gather(-1, (token_ids & 3)[..., None]).squeeze(-1)).log_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, stream: Stream, lane: int = 0) -> Tensor:
    """[rows] float64 multiples of 2^-53 in [0, 1). Lanes of one position and stream are independent."""
    lanes = torch.full_like(positions, lane)
    words = philox(_counter(lanes, positions, stream, None), _key(seeds))
    return ((words[0] << 21) | (words[1] >> 11)).to(torch.float64) * 2.0**-53


def gumbel_argmax(
    log_weights: Tensor, seeds: Tensor, positions: Tensor, stream: Stream, nonces: Tensor | None = None
) -> Tensor:
    """A sample of each row's softmax: argmax_v(``log_weights[row, v] + gumbel[row, v]``).

    Args:
        log_weights: [rows, vocab] float, not NaN, need not be normalized; -inf never wins. Every row needs a
        finite value.

    Returns:
        [rows] int64 token ids.
    """
    return gumbel_max(log_weights, seeds, positions, stream, 0, nonces)[1]


def gumbel_max(
    log_weights: Tensor, seeds: Tensor, positions: Tensor, stream: Stream, first: int, nonces: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Runs ``gumbel_argmax`` on a part of the vocabulary: the part with the largest score has the sample of the whole.

    Sums are taken in float64 of the exact float32 noise; equal ones go to the lower id. One pass does it: ``rows.cpp``
    on the CPU, ``cuda_rows.py`` on CUDA. The torch form replaces both.

    Args:
        log_weights: [rows, tokens] float, of the tokens [first, first + tokens). May hold -inf only.

    Returns:
        Scores [rows] float64 and token ids [rows] int64. Equal scores of two parts go to the lower id.
    """
    if native.usable(log_weights, torch.float32, torch.float64, torch.bfloat16):
        nonces = torch.zeros_like(positions) if nonces is None else nonces
        keys = torch.stack((seeds, positions, nonces), dim=-1).flatten().tolist()
        token_ids, best = native.gumbel_max(log_weights, keys, stream, first)
        return best, token_ids
    if cuda.usable(log_weights):
        from paceline.core import cuda_rows  # imports triton

        return cuda_rows.gumbel_max(log_weights, seeds, positions, nonces, stream, first)
    num_rows, num_tokens = log_weights.shape
    at_once = max(1, CPU_CACHED_TOKENS // num_tokens if log_weights.device.type == "cpu" else num_rows)
    best, token_ids = torch.empty(num_rows).to(seeds.device, torch.float64), torch.empty_like(seeds)
    for start in range(0, num_rows, at_once):
        own = slice(start, start + at_once)
        last = None if nonces is None else nonces[own]
        noise = gumbel(seeds[own], positions[own], stream, num_tokens, last, first)
        best[own], token_ids[own] = noise.to(torch.float64).add_(log_weights[own]).max(-1)
    return best, token_ids + first


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & _MASK, (seeds >> 32) & _MASK


def _counter(
    first: Tensor, positions: Tensor, stream: Stream, nonces: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    high = ((positions >> 32) & 0xFFFFFF) | (int(stream) << 24)
    last = torch.zeros_like(positions) if nonces is None else nonces & _MASK
    return first, positions & _MASK, high, last


def _column(values: Tensor | None) -> Tensor | None:
    return None if values is None else values[:, None]


def _unit_interval(words: Tensor) -> Tensor:
    return words.to(torch.float64).add_(0.5).mul_(2.0**-32)


def exact_gumbel(words: Tensor) -> Tensor:
    """Gumbel noise, float32, of random words of any shape: the same bits on every machine."""
    return exact_log(exact_log(_unit_interval(words)).neg_()).neg_().to(torch.float32)


def exact_log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64 values, the same bits on every device, error below 2e-15.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)) exactly; log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| <
    0.1716, as a series of 12 terms (the rest is below 1e-19). No operation is fused with another.
    """
    bits = x.view(torch.int64)  # sign (0), 11 bits of exponent, 52 bits of mantissa
    # Adding the distance from sqrt(1/2) to 1 to the bits rounds the exponent at sqrt(1/2).
    exponent = ((bits + 0x00095F619980C433) >> 52).sub_(1023)
    mantissa = (bits - (exponent << 52)).view(torch.float64)
    e = exponent.to(torch.float64)
    s = (mantissa - 1.0).div_(mantissa.add_(1.0))
    square = s * s
    series = torch.full_like(s, _SERIES[-1])
    for coefficient in reversed(_SERIES[1:-1]):
        series.mul_(square).add_(coefficient)
    # 2s + (2s * square * series + e * ln2_low), then the exact e * ln2_high.
    s.mul_(2.0)
    series.mul_(square).mul_(s).add_(e * _LN2_LOW)
    return series.add_(s).add_(e.mul_(_LN2_HIGH))
