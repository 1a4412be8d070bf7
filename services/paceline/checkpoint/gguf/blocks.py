"""Matrices of GGUF files as they are stored: numbers of 4 or 8 bits, and a scale and perhaps a minimum for each 32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

BLOCK = 32
"""Numbers of a block, along the inputs of a linear layer."""
_HALF = 2
"""Bytes of a scale or minimum."""
_KINDS = {"Q4_0": (4, 0), "Q4_1": (4, 1), "Q5_0": (8, 0), "Q8_0": (8, 0), "IQ4_NL": (8, 0)}
"""Formats with blocks of 32 and scales in float16: the bits that hold their numbers, and whether there are minima."""


class Blocks(NamedTuple):
    """A matrix ``[N, K]``: ``scale * u + minimum``, or without minima ``scale * (u - zero)`` with ``zero`` 8 or 128."""

    values: np.ndarray[Any, Any]
    """``u``, uint8 ``[N, K]``."""
    scales: np.ndarray[Any, Any]
    """float16 ``[N, K / 32]``."""
    minima: np.ndarray[Any, Any] | None
    """float16 ``[N, K / 32]``; None: the format has no minima."""
    bits: int
    """Bits of each ``u``: 4 or 8."""


def is_kept(kind: str) -> bool:
    """True if ``blocks_of`` reads the format."""
    return kind in _KINDS


def blocks_of(kind: str, rows: np.ndarray[Any, Any]) -> Blocks:
    """The blocks of a matrix, from its rows of bytes, without rounding anything. ``is_kept(kind)`` comes first."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import IQ4_NL

    bits, has_minima = _KINDS[kind]
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    whole = np.ascontiguousarray(rows).reshape(len(rows), -1, size)
    at = _HALF * (1 + has_minima)
    scales = whole[..., :_HALF].copy().view(np.float16)[..., 0]
    minima = whole[..., _HALF:at].copy().view(np.float16)[..., 0] if has_minima else None
    numbers = whole[..., at:]
    if kind == "Q8_0":
        values = numbers ^ 0x80  # from -128 .. 127 to 0 .. 255
    else:
        packed = numbers[..., -BLOCK // 2 :]
        values = np.concatenate([packed & 15, packed >> 4], -1)
        if kind == "Q5_0":
            values |= np.unpackbits(numbers[..., :4], axis=-1, bitorder="little") << 4
            values += 128 - 16
        if kind == "IQ4_NL":
            values = (np.array(IQ4_NL.kvalues, np.int16) + 128).astype(np.uint8)[values]
    return Blocks(values.reshape(len(rows), -1), scales, minima, bits)
