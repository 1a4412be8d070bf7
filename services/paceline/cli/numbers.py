"""Types of flags for numbers in a range; the message of an error names the range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(
    low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> Callable[[str], float]:
    """Parser of finite numbers from ``low`` to ``high``; ``open_low`` and ``open_high`` exclude the bound itself."""
    left = f"above {low:g}" if open_low else f"at least {low:g}"
    right = "" if high == math.inf else f" and below {high:g}" if open_high else f" and at most {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (value > low if open_low else value >= low) and (value < high if open_high else value <= high)
        if not inside or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text!r}: a number {left}{right} is needed")
        return value

    return parse


def integer(low: int = 1, high: int = 1_000_000) -> Callable[[str], int]:
    """Parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number from {low} to {high} is needed")
        return int(text)

    return parse


POSITIVE = number(0, open_low=True)
