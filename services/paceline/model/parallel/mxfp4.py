"""Experts in MXFP4, as gpt-oss is published: each rank dequantizes its own slices while it reads them.

``NAME_blocks`` [experts, outputs, groups, 16] holds two numbers of 4 bits in a byte, ``NAME_scales`` [experts, outputs,
groups] the exponent of each group of 32 (OCP Microscaling Formats 1.0). The parameter NAME has inputs before outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.model.parallel.load import Files

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
"""Numbers with one exponent."""


class Mxfp4Files:
    """The tensors of a checkpoint as if they were not packed: packed ones have the shape and values of plain ones."""

    def __init__(self, files: Files) -> None:
        """``files``: the stored tensors."""
        self.path, self._files = files.path, files
        self._packed = {name.removesuffix(_BLOCKS) for name in files if name.endswith(_BLOCKS)}

    def __iter__(self) -> Iterator[str]:
        yield from self._packed
        stored = {name + end for name in self._packed for end in (_BLOCKS, _SCALES)}
        yield from (name for name in self._files if name not in stored)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if the files do not hold the tensor."""
        if name not in self._packed:
            return self._files.shape(name)
        experts, outputs, groups, _ = self._files.shape(name + _BLOCKS)
        return experts, groups * _GROUP, outputs

    def copy(self, name: str, box: tuple[slice, ...], target: Tensor) -> None:
        """Copies a box of a tensor to ``target``; of a packed one an expert at a time."""
        if name not in self._packed:
            self._files.copy(name, box, target)
            return
        experts, inputs, outputs = box
        groups = slice(inputs.start // _GROUP, -(-inputs.stop // _GROUP))
        first = inputs.start - groups.start * _GROUP
        size = (1, outputs.stop - outputs.start, groups.stop - groups.start)
        blocks, scales = torch.empty(*size, _GROUP // 2, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        for place, expert in enumerate(range(experts.start, experts.stop)):
            part = (slice(expert, expert + 1), outputs, groups)
            self._files.copy(name + _BLOCKS, (*part, slice(0, _GROUP // 2)), blocks)
            self._files.copy(name + _SCALES, part, scales)
            values = convert_moe_packed_tensors(blocks, scales, dtype=target.dtype)  # [1, inputs, outputs]
            target[place].copy_(values[0, first : first + inputs.stop - inputs.start])
