"""JSON from outside: what is parsed can be written as UTF-8, compared, hashed and walked by whoever reads it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Most levels of lists and objects within each other."""

_TOO_DEEP = f"is nested too deeply: at most {MAX_DEPTH} levels are allowed"


class _NotReadError(ValueError):
    """Raised by hooks of the parser."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON (RFC 8259), names a key twice, is nested too deeply, or holds a lone surrogate or a
            number that no float can hold. The message continues a sentence about the text.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at {error.pos}") from None
    except _NotReadError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"is no JSON: {error.reason} at {error.start}, UTF-8 is needed") from None
    except ValueError:
        raise ValueError("holds a number of too many digits: at most 4300 are allowed") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _NotReadError(f"holds the key {twice[:60]!a} twice: once is allowed")
    return found


def _constant(name: str) -> NoReturn:
    raise _NotReadError(f"is no JSON: it holds {name}")


def _check(value: Any) -> None:
    """Raises ValueError for text and numbers that cannot be written, and for values that are nested too deeply."""
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                _check_text(item)
            elif kind is dict:
                for name in item:
                    _check_text(name)
                below += item.values()
            elif kind is list:
                below += item
            elif kind in (int, float) and not math.isfinite(_as_float(item)):
                raise ValueError("holds a number that is too large: at most 1.8e308 is allowed")
        level, depth = below, depth + 1
        if level and depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"holds text that is not valid Unicode: {error.reason} at {error.start}") from None


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf
