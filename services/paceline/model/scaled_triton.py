"""Products by scaled weights of 8 bits for CUDA: codes are read as they are stored, and become weights in registers.

A weight is ``code * scale`` in float32, rounded once to the dtype of the inputs: the number that a dequantized
checkpoint holds (``dequantized.py``). Inputs are taken in blocks of ``BLOCK``. The blocks of a *split* are summed in
float32 in their order, then the splits in theirs. The number of splits depends on the sizes of the weight alone, so a
row of the result has the same bits whatever the number of rows.

For few tokens each split of an output is a program of its own, as the weights must be spread over a device, and
``_added`` adds their sums up. For many tokens a program takes the splits one after the other. Outputs are the rows of
the product's tiles and tokens their columns: so matrix units run the same instruction for any number of tokens, and
weights go to them from registers. ``most_tokens`` compares the bits of large tiles with those of small ones on a
device, before they are used.

Imports triton, so that it is imported only where such weights run on a GPU (``scaled.py``).
"""

from __future__ import annotations

import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.checkpoint.packing import SCALED_BLOCK

BLOCK = SCALED_BLOCK
"""Inputs of a block. Rows of codes are filled up to a multiple of it."""
_OUTPUTS = 64
"""Outputs of a tile of few tokens: the fewest rows that the matrix units of an H100 take."""
_FEW_TOKENS = 64
"""Tokens of the largest tile whose splits are programs of their own; tiles of many tokens have twice as many."""
_PROGRAMS, _MOST_SPLITS, _LEAST_BLOCKS = 256, 8, 4
"""Programs of a product of few tokens, about two for each multiprocessor of an H100; the most splits of an output, and
the fewest blocks of a split."""
_ADDED = 1024
"""Outputs of a program that adds splits up."""
_TRIED = 4096, 1024, 4096
"""Inputs, outputs and tokens of the product by which tiles are compared: millions of results, since rounding hides
most differences."""
_MOST: dict[tuple[object, ...], int] = {}
"""What ``most_tokens`` has found, by device, dtype and format."""
log = logging.getLogger(__name__)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(codes, scale, EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes times scales. ``EXPONENT``: bits of a float's exponent; 0: codes are integers.

    The bits of a float are put to their places in a float32. Its exponent is too small by a constant, by which scales
    are too large (``scaled.py``).
    """
    if EXPONENT == 0:
        return codes.to(tl.float32) * scale
    bits = codes.to(tl.int32) << (16 + EXPONENT)  # of which the sign is the first
    bits &= (0x7F << (16 + EXPONENT)) - 0x80000000
    return bits.to(tl.float32, bitcast=True) * scale


# Variants for kinds of sizes and of addresses would be compiled in the middle of serving (``attention/triton.py``).
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_tokens", "groups", "group_blocks", "split_blocks", "splits"]
)
def _product(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    bias,
    out,
    num_tokens,
    inputs,
    outputs,
    row_len,
    groups,
    group_blocks,
    split_blocks,
    splits,
    EXPONENT: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of the result, or of the sum of one split."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split, place = tl.program_id(2), tl.arange(0, BLOCK)
    is_token, is_row = tokens < num_tokens, rows < outputs
    row = tl.minimum(rows, outputs - 1)
    of_row = codes + row.to(tl.int64)[:, None] * row_len
    of_token = x + tokens.to(tl.int64)[None, :] * inputs
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for index in range(splits if WHOLE else 1):
        first = (index if WHOLE else split) * split_blocks
        part = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for block in range(first, tl.minimum(first + split_blocks, row_len // BLOCK)):
            at = block * BLOCK + place
            scale = tl.load(scales + row * groups + block // group_blocks)
            weights = _weights(tl.load(of_row + at[None, :]), scale[:, None], EXPONENT)
            given = tl.load(of_token + at[:, None], (at < inputs)[:, None] & is_token[None, :], 0.0)
            part = tl.dot(weights.to(x.dtype.element_ty), given, part)
        total += part
    if WHOLE:
        if BIASED:
            total += tl.load(bias + row).to(tl.float32)[:, None]
    else:
        out += split.to(tl.int64) * num_tokens * outputs
    to = out + tokens.to(tl.int64)[None, :] * outputs + rows[:, None]
    tl.store(to, total.to(out.dtype.element_ty), is_row[:, None] & is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _added(  # type: ignore[no-untyped-def]
    sums, bias, out, num_tokens, outputs, SPLITS: tl.constexpr, BIASED: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Adds the splits of a token's outputs up, in their order."""
    token, rows = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row = rows < outputs
    total = tl.zeros([OUTPUTS], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * num_tokens + token).to(tl.int64) * outputs + rows, is_row, 0.0)
    if BIASED:
        total += tl.load(bias + rows, is_row, 0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * outputs + rows, total.to(out.dtype.element_ty), is_row)


def num_splits(inputs: int, outputs: int) -> tuple[int, int]:
    """Splits of an output's sum, and blocks of each: a matter of the weight's sizes alone."""
    blocks, tiles = -(-inputs // BLOCK), -(-outputs // _OUTPUTS)
    splits = 1
    while splits < _MOST_SPLITS and 2 * splits * _LEAST_BLOCKS <= blocks and tiles * splits < _PROGRAMS:
        splits *= 2
    each = -(-blocks // splits)
    return -(-blocks // each), each


def scratch_bytes(num_tokens: int, inputs: int, outputs: int) -> int:
    """Bytes of the sums of a product's splits, which are freed after it."""
    splits, _ = num_splits(inputs, outputs)
    return 4 * splits * num_tokens * outputs if splits > 1 and num_tokens <= _FEW_TOKENS else 0


def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, exponent: int) -> Tensor:
    """``[T, inputs] -> [T, outputs]``, in the dtype of ``x``: bfloat16 or float16.

    Args:
        x: the inputs, each token's numbers next to each other.
        codes: [outputs, inputs filled up to blocks] int8, the bits of floats.
        scales: [outputs, 1 or blocks] float32.
        bias: [outputs].
        exponent: bits of the exponents of codes that are floats; 0: they are integers.
    """
    return _multiplied(x, codes, scales, bias, exponent, most_tokens(x, exponent))


def _multiplied(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, exponent: int, most: int) -> Tensor:
    """``multiply``. ``most``: tokens of the largest tile."""
    num_tokens, inputs = x.shape
    outputs, row_len = codes.shape
    (splits, blocks), groups = num_splits(inputs, outputs), scales.shape[1]
    is_many = num_tokens > _FEW_TOKENS
    whole = is_many or splits == 1
    tokens = min(most, max(16, int(triton.next_power_of_2(num_tokens))))
    is_large = tokens > _FEW_TOKENS
    rows, block = (2 * _OUTPUTS, BLOCK // 2) if is_large else (_OUTPUTS, BLOCK)  # what registers hold
    out = x.new_empty(num_tokens, outputs)
    sums = out if whole else x.new_empty(splits, num_tokens, outputs, dtype=torch.float32)
    added = x if bias is None else bias
    grid = -(-num_tokens // tokens), -(-outputs // rows), 1 if whole else splits
    _product[grid](
        x,
        codes,
        scales,
        added,
        sums,
        num_tokens,
        inputs,
        outputs,
        row_len,
        groups,
        row_len // block if groups == 1 else BLOCK // block,
        blocks * BLOCK // block,
        splits,
        EXPONENT=exponent,
        WHOLE=whole,
        BIASED=bias is not None,
        OUTPUTS=rows,
        TOKENS=tokens,
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=8 if is_large else 4,
        num_stages=3 if is_large else 4,
    )
    if not whole:
        _added[(num_tokens, -(-outputs // _ADDED))](
            sums,
            added,
            out,
            num_tokens,
            outputs,
            SPLITS=splits,
            BIASED=bias is not None,
            OUTPUTS=_ADDED,
            enable_fp_fusion=False,
        )
    return out


def most_tokens(x: Tensor, exponent: int) -> int:
    """Tokens of the largest tile: one whose bits are those of small tiles on this device.

    The first call for each dtype and format compares them, unless a step is being recorded.
    """
    key = str(x.device), x.dtype, exponent
    if key not in _MOST:
        if x.device.type != "cuda":
            return 2 * _FEW_TOKENS
        if torch.cuda.is_current_stream_capturing():
            return 16
        _MOST[key] = 2 * _FEW_TOKENS if tiles_agree(x, exponent, _TRIED) else 16
        if _MOST[key] < 2 * _FEW_TOKENS:
            log.warning("products by weights of 8 bits have other bits in large tiles on %s: they are slower", x.device)
    return _MOST[key]


def tiles_agree(like: Tensor, exponent: int, sizes: tuple[int, int, int]) -> bool:
    """True if random tokens have the same bits in tiles of all sizes, of the dtype and on the device of ``like``.

    ``sizes``: inputs, outputs and tokens.
    """
    inputs, outputs, num_tokens = sizes
    generator = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=like.device)

    codes = (random(outputs, inputs) * 30).clamp(-100, 100).to(torch.int8)  # as floats no NaN
    scales, x = random(outputs, inputs // BLOCK).abs(), random(num_tokens, inputs).to(like.dtype)
    large = _multiplied(x, codes, scales, None, exponent, 2 * _FEW_TOKENS)
    for tokens in (16, 32, _FEW_TOKENS):
        parts = [_multiplied(part, codes, scales, None, exponent, tokens) for part in torch.split(x, tokens)]
        if not torch.equal(torch.cat(parts), large):
            return False
    return True
