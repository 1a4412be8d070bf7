"""Kinds of values on the command line of ``paceline bench``; each says what is given and what is allowed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.types import MAX_DRAFT_TOKENS, Mode
from paceline_bench.latency import LIMITED
from paceline_bench.local import BASELINES, FIFTH

_T = TypeVar("_T")


def several(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Values with commas between them, each once."""

    def parse(text: str) -> tuple[_T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return parse


def mode(text: str) -> Mode:
    """A mode."""
    try:
        return Mode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mode: {', '.join(mode.value for mode in Mode)} are") from None


def baselines(text: str) -> tuple[str, ...]:
    """Names of baselines, ``none`` or ``all``."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("none",):
        return ()
    if names == ("all",):
        return BASELINES
    for name in names:
        if name not in BASELINES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no baseline: {', '.join(BASELINES)} are, or none or all alone"
            )
    return names


def _integer(text: str, least: int, most: int | None) -> int:
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is given, {allowed} is needed") from None
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{value} is given, {allowed} is needed")
    return value


def positive(most: int | None = None) -> Callable[[str], int]:
    """An integer from 1."""
    return lambda text: _integer(text, 1, most)


def natural(text: str) -> int:
    """An integer from 0."""
    return _integer(text, 0, 2**40)


def k(text: str) -> int:
    """Draft tokens."""
    return _integer(text, 1, MAX_DRAFT_TOKENS)


def temperature(text: str) -> float:
    """Of sampling."""
    return _number(text, 0, 100, "a number from 0 to 100 is needed")


def delay(text: str) -> float:
    """Milliseconds."""
    return _number(text, 0, 10_000, "milliseconds from 0 to 10000 are needed")


def rate(text: str) -> float:
    """Requests per second."""
    return _number(text, 1e-3, 1e5, "requests per second from 0.001 to 100000 are needed")


def burstiness(text: str) -> float:
    """Shape of the gamma distribution of gaps."""
    return _number(text, 0.01, 1e4, "a shape from 0.01 to 10000 is needed")


def goodput(texts: list[str]) -> dict[str, float]:
    """Limits as ``ttft:200``, in milliseconds. Raises ArgumentTypeError."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITED or name in limits:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given, each of {', '.join(LIMITED)} may be limited once, as ttft:200 (milliseconds)"
            )
        try:
            limits[name] = _number(value, 1e-6, 1e9, "")
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given, milliseconds above 0 are needed, as in {name}:200"
            ) from None
    return limits


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is given, an object in JSON is needed")
    return value


def _number(text: str, least: float, most: float, needed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is given, {needed}")
    return value


def size(text: str) -> int | None:
    """Parameters, such as 150M; ``none``: as it is."""
    if text == "none":
        return None
    from paceline_bench.grow import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def draft_size(text: str) -> int | None:
    """Parameters, or ``fifth``."""
    return FIFTH if text == "fifth" else size(text)
