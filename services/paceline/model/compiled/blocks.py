"""Weights of 4 and 8 bits in blocks of 32 inputs, for the native products (``blocks.h``).

A weight is ``scale * u + minimum``, or ``scale * (u - zero)``. Its ``u`` has 4 or 8 bits; 32 inputs of an output share
a scale and a minimum in float16. A product rounds the inputs to 8 bits, with a float32 scale for each 32 of them. So
the sums within blocks are whole numbers. The blocks are added in float32 in their order. What an output is depends on
its row and weights alone: not on other rows, the number of threads or the processor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint.gguf.blocks import BLOCK, Blocks

OUTPUTS = 16
"""Outputs of a tile: their weights lie together."""


class Layout(NamedTuple):
    """Layout of weights in the tiles of a format."""

    bits: int
    has_minima: bool

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 outputs and 32 inputs, scales and minima included. The number identifies the format."""
        return OUTPUTS * BLOCK * self.bits // 8 + 2 * OUTPUTS * (1 + self.has_minima)


LAYOUTS = [Layout(4, has_minima=False), Layout(4, has_minima=True), Layout(8, has_minima=False)]


def bits_of(packed: Tensor) -> int:
    """Bits of the weights that were packed."""
    return next(layout.bits for layout in LAYOUTS if layout.tile_bytes == packed.shape[-1])


def pack_blocks(blocks: Blocks) -> Tensor:
    """The tiles ``[ceil(N / 16), ceil(K / 32), bytes]``, uint8; outputs that fill up the last ones are zero."""
    values, scales = torch.from_numpy(blocks.values), torch.from_numpy(blocks.scales)
    outputs, num_blocks = scales.shape
    rest = -outputs % OUTPUTS
    tiles = F.pad(values, (0, 0, 0, rest)).view(-1, OUTPUTS, num_blocks, BLOCK).transpose(1, 2)
    if blocks.bits == 4:
        tiles = tiles[..., : BLOCK // 2] | tiles[..., BLOCK // 2 :] << 4
    grouped = tiles.reshape(*tiles.shape[:3], -1, 4).transpose(2, 3)  # [.., groups of 4 inputs, outputs, 4]
    parts = [grouped.reshape(*tiles.shape[:2], -1)]
    for halves in (scales, None if blocks.minima is None else torch.from_numpy(blocks.minima)):
        if halves is not None:
            padded = F.pad(halves, (0, 0, 0, rest)).view(-1, OUTPUTS, num_blocks).transpose(1, 2).contiguous()
            parts.append(padded.view(torch.uint8))
    return torch.cat(parts, -1)


def quantize(weight: Tensor, bits: int) -> Blocks:
    """Rounds a matrix ``[N, K]``: 4 bits between the least and the largest number of each block, 8 bits around zero.

    The last column fills up the last block; inputs there are zero.
    """
    whole = weight.detach().float()
    rest = -whole.shape[1] % BLOCK
    whole = torch.cat([whole, whole[:, -1:].expand(-1, rest)], 1).view(len(weight), -1, BLOCK)
    if bits == 8:
        scales = (whole.abs().amax(-1) / 127).half()
        values = (whole / _divisors(scales)).round().clamp(-127, 127) + 128
        return Blocks(values.to(torch.uint8).flatten(1).numpy(), scales.numpy(), None, bits)
    minima = whole.amin(-1).half()
    scales = ((whole.amax(-1) - minima.float()) / 15).half()
    values = ((whole - minima.float()[..., None]) / _divisors(scales)).round().clamp(0, 15)
    return Blocks(values.to(torch.uint8).flatten(1).numpy(), scales.numpy(), minima.numpy(), bits)


def _divisors(scales: Tensor) -> Tensor:
    """The scales ``[N, B]`` as divisors ``[N, B, 1]``; of blocks whose numbers are all alike, any."""
    return scales.float().masked_fill(scales == 0, torch.inf)[..., None]
