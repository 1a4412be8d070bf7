"""Products by scaled weights for CUDA: codes are read as they are stored, and become weights in registers.

A weight is ``(code - zero) * scale``, rounded once to the dtype of the inputs: the number that a dequantized checkpoint
holds (``dequantized.py``). Inputs are taken in blocks of ``BLOCK``. The blocks of a *split* are summed in float32 in
their order, then the splits in theirs. The number of splits depends on the sizes of the weight alone, so a row of the
result has the same bits for any number of rows.

For few tokens each split of an output is a separate program, to spread the weights over a device. ``_added`` adds their
sums. For many tokens a program takes the splits one after the other. Outputs are the rows of the product's tiles and
tokens their columns. So matrix units run the same instruction for any number of tokens and take weights from registers.
``most_tokens`` compares the bits of large tiles with those of small ones on a device, before they are used.

Imports triton, so that it is imported only where such weights run on a GPU (``scaled.py``).
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.checkpoint.packing import SCALED_BLOCK, factor
from paceline.model.quantized_weights import INTEGER_ZEROS, Weights

BLOCK = SCALED_BLOCK
"""Inputs of a block. Rows of codes are filled up to a multiple of it."""
_OUTPUTS = 64
"""Outputs of a tile of few tokens: the fewest rows that the matrix units of an H100 take."""
_FEW_TOKENS = 64
"""Tokens of the largest tile whose splits are programs of their own; tiles of many tokens have twice as many."""
_PROGRAMS, MAX_SPLITS, MIN_BLOCKS = 256, 8, 4
"""Programs of a product of few tokens, about two for each multiprocessor of an H100; the most splits of an output, and
the fewest blocks of a split."""
_ADDED = 1024
"""Outputs of a program that adds splits up."""
_PAIRS = 1024
"""Pairs of a token and an expert that are looked at at once."""
_TRIED = 4096, 1024, 4096
"""Inputs, outputs and tokens of the product by which tiles are compared: millions of results, since rounding hides
most differences."""
_MOST: dict[tuple[object, ...], int] = {}
"""What ``most_tokens`` has found, by device, dtype and format."""
log = logging.getLogger(__name__)


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(codes, like, half: tl.constexpr, BITS: tl.constexpr, EXPONENT: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes as float32, of ``PAIRS`` in the dtype of ``like``; of 4 bits those in one half of each byte. ``EXPONENT``:
    bits of a float's; 0: integers.

    The bits of a float are put to their places in the wider one. Its exponent is too small by a constant, by which
    ``_scale`` is too large. An integer of 4 bits becomes the last ones of a power of two, which is taken from it later.
    """
    if PAIRS:
        is_wide: tl.constexpr = like.dtype.element_ty == tl.bfloat16  # its exponent has 8 bits, not 5
        bits = codes.to(tl.uint8, bitcast=True).to(tl.uint16)
        if EXPONENT == 0:
            bits = ((bits >> 4 * half) & 15) | (0x4300 if is_wide else 0x6400)
        else:
            place: tl.constexpr = 5 if is_wide else 8  # one product shifts the sign and the rest by their own lengths
            if not is_wide:
                bits &= 15 << 4 * half  # what is shifted would overlap
            bits = (bits * ((1 << (place - 4 * half)) + (1 << (15 - 4 * half)))) & (0x8000 + (14 << place))
        numbers = bits.to(like.dtype.element_ty, bitcast=True)
    elif BITS == 4:
        bits = codes.to(tl.uint8, bitcast=True).to(tl.int32)
        if EXPONENT == 0:
            bits = ((bits >> 4 * half) & 15) | 0x4B000000
        else:
            bits = ((bits << (21 - 4 * half)) | (bits << (31 - 4 * half))) & ((14 << 21) - 0x80000000)
        numbers = bits.to(tl.float32, bitcast=True)
    elif EXPONENT == 0:
        numbers = codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32) << (16 + EXPONENT)  # of which the sign is the first
        numbers = (bits & ((0x7F << (16 + EXPONENT)) - 0x80000000)).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _scale(stored, more):  # type: ignore[no-untyped-def]
    """Scales as float32, times ``more``. Bytes without a sign are exponents, those with one floats of 4 and 3 bits."""
    if stored.dtype == tl.uint8:
        bits = stored.to(tl.int32) << 23
        return tl.where(stored == 0, 0x00400000, bits).to(tl.float32, bitcast=True) * more
    if stored.dtype == tl.int8:
        bits = (stored.to(tl.int32) << 20) & (0x07F00000 - 0x80000000)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * more  # 2**120
    return stored.to(tl.float32) * more


# Variants for kinds of sizes and of addresses would be compiled in the middle of serving (``attention/triton.py``).
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "groups", "group", "split_blocks", "splits", "per_token"]
)
def _product(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    factors,
    zeros,
    bias,
    out,
    tiles,
    order,
    num_tokens,
    inputs,
    outputs,
    row_len,
    groups,
    group,
    split_blocks,
    splits,
    per_token,
    BITS: tl.constexpr,
    EXPONENT: tl.constexpr,
    PAIRS: tl.constexpr,
    FACTOR: tl.constexpr,
    ZERO: tl.constexpr,
    FACTORS: tl.constexpr,
    ZEROS: tl.constexpr,
    ROUTED: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of the result, or of the sum of one split.

    ``ROUTED``: 0: of one weight; 1: of the experts in ``tiles``, by the inputs of the tokens whose pairs ``order``
    has, ``per_token`` each; 2: the same, by inputs in that order, to results in the order of the pairs.
    ``BLOCK``: bytes of a row of codes. ``PARTS``: scales of a row of as many numbers. ``PAIRS``: weights are made
    in the dtype of the inputs, two by one instruction. ``ZERO``: what ``_numbers`` makes of zero.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split, place, part_of = tl.program_id(2), tl.arange(0, BLOCK), tl.arange(0, PARTS)
    is_row, num_blocks, given_at, taken_at = rows < outputs, row_len // BLOCK, tokens, tokens
    row = tl.minimum(rows, outputs - 1).to(tl.int64)
    is_token = tokens < num_tokens
    if ROUTED:
        of_tile = tiles + 3 * tl.program_id(0)
        expert, first_token, stop = tl.load(of_tile), tl.load(of_tile + 1), tl.load(of_tile + 2)
        tokens = first_token + tl.arange(0, TOKENS)
        is_token = tokens < stop
        pair = tl.load(order + tokens, is_token, 0)
        given_at = pair // per_token if ROUTED == 1 else tokens
        taken_at = tokens if ROUTED == 1 else pair
        row += expert.to(tl.int64) * outputs
        num_blocks = tl.where(first_token < stop, num_blocks, 0)
    of_row = codes + row[:, None] * row_len
    of_token = x + given_at.to(tl.int64)[None, :] * inputs
    more = tl.load(factors + row)[:, None] if FACTORS else 1.0
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + row).to(tl.float32), 0.0)[:, None]
    for index in range(splits if WHOLE else 1):
        first = (index if WHOLE else split) * split_blocks
        part = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for block in range(first, tl.minimum(first + split_blocks, num_blocks)):
            stored = tl.load(of_row + (block * BLOCK + place)[None, :])
            for half in tl.static_range(8 // BITS):
                start = (block * (8 // BITS) + half) * BLOCK
                scale_at = row[:, None] * groups + start // group + part_of[None, :]
                weights = _numbers(stored, x, half, BITS, EXPONENT, PAIRS)
                scale = (_scale(tl.load(scales + scale_at), more) * FACTOR).to(weights.dtype)
                zero = (tl.load(zeros + scale_at).to(tl.float32) + ZERO).to(weights.dtype) if ZEROS else ZERO
                if PARTS > 1:
                    weights = tl.reshape(weights, (OUTPUTS, PARTS, BLOCK // PARTS))
                    if ZEROS or ZERO:
                        weights -= zero[:, :, None] if ZEROS else ZERO
                    weights = tl.reshape(weights * scale[:, :, None], (OUTPUTS, BLOCK))
                else:
                    if ZEROS or ZERO:
                        weights -= zero
                    weights *= scale
                at = start + place
                given = tl.load(of_token + at[:, None], (at < inputs)[:, None] & is_token[None, :], 0.0)
                part = tl.dot(weights.to(x.dtype.element_ty), given, part)
        total += part
    if not WHOLE:
        out += split.to(tl.int64) * num_tokens * outputs
    to = out + taken_at.to(tl.int64)[None, :] * outputs + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), is_row[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _added(sums, out, num_tokens, outputs, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the splits of a token's outputs up, in their order."""
    token, rows = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = rows < outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * num_tokens + token).to(tl.int64) * outputs + rows, is_row, 0.0)
    tl.store(out + token.to(tl.int64) * outputs + rows, total.to(out.dtype.element_ty), is_row)


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def _ordered(chosen, order, ends, num_pairs, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes an expert's pairs to their places in the order of the experts, and where they end."""
    expert, before = tl.program_id(0), 0
    for start in range(0, num_pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        before += tl.sum((tl.load(chosen + at, at < num_pairs, expert) < expert).to(tl.int32))
    for start in range(0, num_pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        is_own = ((tl.load(chosen + at, at < num_pairs, -1) == expert) & (at < num_pairs)).to(tl.int32)
        tl.store(order + before + tl.cumsum(is_own, 0) - 1, at, is_own == 1)
        before += tl.sum(is_own)
    tl.store(ends + expert, before)


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def _cut(ends, tiles, num_experts, most, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cuts the pairs of each expert into tiles; tiles that are left have none."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    first = tl.load(ends + expert - 1, is_expert & (expert > 0), 0)
    end = tl.load(ends + expert, is_expert, 0)
    own = tl.where(is_expert, (end - first + TOKENS - 1) // TOKENS, 0)
    at = tl.cumsum(own, 0) - own
    for index in range(tl.max(own)):
        to, start = tiles + 3 * (at + index), first + index * TOKENS
        tl.store(to, expert, index < own)
        tl.store(to + 1, start, index < own)
        tl.store(to + 2, tl.minimum(start + TOKENS, end), index < own)
    for start in range(tl.sum(own), most, EXPERTS):
        rest = start + expert
        for part in tl.static_range(3):
            tl.store(tiles + 3 * rest + part, 0, rest < most)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(  # type: ignore[no-untyped-def]
    results, chosen, weights, out, num_experts, outputs, per_token, OUTPUTS: tl.constexpr
):
    """Adds a token's results up by their weights."""
    token, rows = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, total = rows < outputs, tl.zeros([OUTPUTS], tl.float32)
    for index in range(per_token):
        pair = token.to(tl.int64) * per_token + index
        is_there = is_row & (tl.load(chosen + pair) < num_experts)
        result = tl.load(results + pair * outputs + rows, is_there, 0.0).to(tl.float32)
        product = result * tl.load(weights + pair).to(tl.float32)
        total += product.to(weights.dtype.element_ty).to(tl.float32)
    tl.store(out + token.to(tl.int64) * outputs + rows, total.to(out.dtype.element_ty), is_row)


def in_pairs(dtype: torch.dtype, weights: Weights) -> bool:
    """True if weights are computed as products of numbers and scales in ``dtype``, which is also that of the inputs.
    float32 would hold the products exactly, so both ways round them once."""
    scales = torch.uint8 if weights.exponent else dtype
    return weights.bits == 4 and dtype.itemsize == 2 and weights.factors is None and weights.scales.dtype == scales


@functools.cache
def _has_pairs_of_float32(device: torch.device) -> bool:
    """True if a device adds and multiplies two numbers of float32 by one instruction, so that integers gain nothing."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def zero_of(dtype: torch.dtype) -> int:
    """The number that ``_numbers`` makes in ``dtype`` of an integer of 4 bits that stands for zero."""
    return {torch.bfloat16: 1 << 7, torch.float16: 1 << 10}.get(dtype, 1 << 23) + INTEGER_ZEROS[4]


def num_splits(inputs: int, outputs: int) -> tuple[int, int]:
    """Splits of an output's sum, and blocks of each: a matter of the weight's sizes alone."""
    blocks, tiles = -(-inputs // BLOCK), -(-outputs // _OUTPUTS)
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * MIN_BLOCKS <= blocks and tiles * splits < _PROGRAMS:
        splits *= 2
    each = -(-blocks // splits)
    return -(-blocks // each), each


class Routes(NamedTuple):
    """The pairs of a token and an expert that it chose, ordered by the experts, and cut into tiles."""

    order: Tensor
    """[pairs] int32, of which a token has ``per_token`` one after the other."""
    tiles: Tensor
    """[most tiles, 3] int32: an expert, and the first and the end of its pairs in their order."""
    per_token: int
    tokens: int
    """Pairs of a tile."""


def multiply(x: Tensor, weights: Weights, bias: Tensor | None) -> Tensor:
    """``[T, inputs] -> [T, outputs]``, in the dtype of ``x``: bfloat16 or float16.

    Args:
        x: the inputs, each token's numbers next to each other.
        weights: [outputs, inputs].
        bias: [outputs].
    """
    return multiplied(x, weights, bias, most_tokens(x, weights))


def multiplied(
    x: Tensor, weights: Weights, bias: Tensor | None, most: int, routes: Routes | None = None, *, back: bool = False
) -> Tensor:
    """``multiply``, or its like for pairs of tokens and experts in order; ``back``: from that order to the first one.

    ``most``: tokens of the largest tile.
    """
    codes, scales, factors, zeros, bits, exponent = weights
    inputs, (*_, outputs, row_len) = x.shape[1], codes.shape
    pairs = in_pairs(x.dtype, weights) and (exponent > 0 or not _has_pairs_of_float32(x.device))
    filled = row_len * 8 // bits
    (splits, blocks), groups = num_splits(inputs, outputs), scales.shape[-1]
    num_rows = x.shape[0] if routes is None else routes.order.shape[0]
    whole = num_rows > _FEW_TOKENS or splits == 1
    tokens = min(most, max(16, int(triton.next_power_of_2(num_rows)))) if routes is None else routes.tokens
    is_large = tokens > _FEW_TOKENS
    rows, block = (2 * _OUTPUTS, BLOCK // 2) if is_large else (_OUTPUTS, BLOCK * bits // 8)  # what registers hold
    out = x.new_empty(num_rows, outputs)
    sums = out if whole else x.new_empty(splits, num_rows, outputs, dtype=torch.float32)
    num_tiles = -(-num_rows // tokens) if routes is None else routes.tiles.shape[0]
    _product[(num_tiles, -(-outputs // rows), 1 if whole else splits)](
        x,
        codes,
        scales,
        x if factors is None else factors,
        x if zeros is None else zeros,
        x if bias is None else bias,
        sums,
        x if routes is None else routes.tiles,
        x if routes is None else routes.order,
        num_rows,
        inputs,
        outputs,
        row_len,
        groups,
        filled // groups,
        blocks * BLOCK * bits // 8 // block,
        splits,
        1 if routes is None else routes.per_token,
        BITS=bits,
        EXPONENT=exponent,
        PAIRS=pairs,
        FACTOR=factor(exponent, 5 if pairs and x.dtype == torch.float16 else 8),
        ZERO=zero_of(x.dtype if pairs else torch.float32) if (bits, exponent) == (4, 0) else 0,
        FACTORS=factors is not None,
        ZEROS=zeros is not None,
        ROUTED=0 if routes is None else 2 if back else 1,
        WHOLE=whole,
        BIASED=bias is not None,
        PARTS=max(1, block * groups // filled),
        OUTPUTS=rows,
        TOKENS=tokens,
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=8 if is_large else 4,
        num_stages=4 if not is_large else 3 if bits == 8 else 2,
    )
    if not whole:
        grid = num_rows, -(-outputs // _ADDED)
        _added[grid](sums, out, num_rows, outputs, SPLITS=splits, OUTPUTS=_ADDED, enable_fp_fusion=False)
    return out


def routed(x: Tensor, chosen: Tensor, weights: Weights) -> Routes:
    """The pairs of tokens ``x`` ``[T, inputs]`` and of the experts ``chosen`` ``[T, k]``, in the order of the experts.

    What is beyond the last expert is left out. The host does not wait for the device.
    """
    num_experts, num_pairs = weights.codes.shape[0], chosen.numel()
    average = max(16, int(triton.next_power_of_2(-(-num_pairs // num_experts))))
    tokens = min(most_tokens(x, weights), average)
    order, ends = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (num_pairs, num_experts))
    most = min(num_pairs, num_experts) + num_pairs // tokens
    tiles = order.new_empty(most, 3)
    _ordered[(num_experts,)](chosen.contiguous(), order, ends, num_pairs, PAIRS=_PAIRS)
    _cut[(1,)](ends, tiles, num_experts, most, TOKENS=tokens, EXPERTS=triton.next_power_of_2(num_experts))
    return Routes(order, tiles, chosen.shape[1], tokens)


def multiply_routed(x: Tensor, weights: Weights, bias: Tensor | None, routes: Routes, *, back: bool = False) -> Tensor:
    """The inputs of each pair of a token and an expert times the expert's weights: ``[pairs, outputs]``.

    Args:
        x: [T, inputs], of the tokens; ``back``: of the pairs, in the order of the experts.
        weights: [experts, outputs, inputs].
        bias: [experts, outputs].
        routes: the pairs.
        back: False: results are in the order of the experts; True: in the order in which tokens have chosen.
    """
    return multiplied(x.contiguous(), weights, bias, routes.tokens, routes, back=back)


def weighted(results: Tensor, chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """``[T * k, outputs] -> [T, outputs]``: the sum of a token's results by its ``weights`` ``[T, k]``, in their order,
    but for those ``chosen`` beyond the last expert."""
    (num_tokens, per_token), outputs = chosen.shape, results.shape[1]
    out = results.new_empty(num_tokens, outputs)
    _weighted[(num_tokens, -(-outputs // _ADDED))](
        results,
        chosen.contiguous(),
        weights.contiguous(),
        out,
        num_experts,
        outputs,
        per_token,
        OUTPUTS=_ADDED,
        enable_fp_fusion=False,
    )
    return out


def most_tokens(x: Tensor, weights: Weights) -> int:
    """Tokens of the largest tile: one whose bits are those of small tiles on this device.

    The first call for each dtype and format compares them, unless a step is being recorded.
    """
    filled = weights.codes.shape[-1] * 8 // weights.bits
    group = min(BLOCK, filled // weights.scales.shape[-1])
    key = str(x.device), x.dtype, *weights[4:], group, weights.scales.dtype, weights.zeros is None
    if key not in _MOST:
        if x.device.type != "cuda":
            return 2 * _FEW_TOKENS
        if torch.cuda.is_current_stream_capturing():
            return 16
        _MOST[key] = 2 * _FEW_TOKENS if tiles_agree(x, weights, _TRIED) else 16
        if _MOST[key] < 2 * _FEW_TOKENS:
            log.warning(
                "products by weights of few bits have other bits in large tiles on %s: they are slower", x.device
            )
    return _MOST[key]


def tiles_agree(like: Tensor, weights: Weights, sizes: tuple[int, int, int]) -> bool:
    """True if random tokens have the same bits in tiles of all sizes, of the dtype and on the device of ``like``, by
    weights of the same format.

    ``sizes``: inputs, outputs and tokens.
    """
    inputs, outputs, num_tokens = sizes
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=like.device)

    filled = weights.codes.shape[-1] * 8 // weights.bits
    groups = inputs // min(BLOCK, filled // weights.scales.shape[-1])
    codes = (random(outputs, inputs * weights.bits // 8) * 30).clamp(-100, 100).to(torch.int8)  # as floats no NaN
    scales = random(outputs, groups).abs()
    if weights.scales.dtype.itemsize == 1:  # exponents, or floats
        scales = scales * 2 + (118 if weights.scales.dtype == torch.uint8 else 56)
    factors = None if weights.factors is None else random(outputs).abs()
    zeros = None if weights.zeros is None else (random(outputs, groups) * 2).to(torch.int8)
    tried = Weights(codes, scales.to(weights.scales.dtype), factors, zeros, *weights[4:])
    x = random(num_tokens, inputs).to(like.dtype)
    large = multiplied(x, tried, None, 2 * _FEW_TOKENS)
    for tokens in (16, 32, _FEW_TOKENS):
        parts = [multiplied(part, tried, None, tokens) for part in torch.split(x, tokens)]
        if not torch.equal(torch.cat(parts), large):
            return False
    return True
