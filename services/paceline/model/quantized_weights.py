"""What is held of a weight of 8 or 4 bits, as its products take it (``scaled.py``, ``scaled_triton.py``)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

INTEGER_ZEROS = {8: 0, 4: 8}
"""What an integer is stored for that is zero where no zero points are, by its bits."""


class Weights(NamedTuple):
    """A weight of a linear layer, or those of experts, as ``ScaledWeight`` holds them."""

    codes: Tensor
    """[.., outputs, bytes of filled rows] int8."""
    scales: Tensor
    """[.., outputs, 1 or groups]."""
    factors: Tensor | None
    """[.., outputs] float32."""
    zeros: Tensor | None
    """int8 of the shape of the scales, taken from the codes."""
    bits: int
    exponent: int
    """Bits of a number, and of its exponent; 0: integers."""
