"""JSON from outside: every parsed value can safely be written as UTF-8, compared, hashed and walked."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Most levels of lists and objects within each other."""
MAX_CONTAINERS = 16384
"""Maximum lists and objects in a text with bounded values. Each takes the memory of many numbers."""

_TOO_DEEP = f"is nested too deeply: at most {MAX_DEPTH} levels are allowed"


class _NotReadError(ValueError):
    """Raised by hooks of the parser."""


def parse(text: str | bytes, max_values: int | None = None) -> Any:
    """The value of a JSON text.

    ``max_values``: maximum values in bytes of a text, together with ``MAX_CONTAINERS``. They are counted first.

    Raises:
        ValueError: the text is not JSON (RFC 8259), has a key twice, is nested too deeply, or holds too many values, a
            lone surrogate or a number beyond floats. The message continues a sentence about the text.
    """
    if max_values is not None:
        assert isinstance(text, bytes)
        _check_numbers(text, max_values)
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
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
    check_writable(value)
    return value


def _check_numbers(text: bytes, max_values: int) -> None:
    """Raises ValueError for a text that holds too many values, by its brackets and commas alone.

    Only searches for bytes are used: some milliseconds for each MiB, for any text.
    """
    if _within(text, max_values):  # brackets and commas of strings are counted, too
        return
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # quotes of strings alone are left
    most_quotes = 4 * max_values + 2  # of keys and values, or of a text that is one string
    outside = b"".join(bare.split(b'"', most_quotes)[::2])
    if not _within(outside, max_values):
        _check_depth(outside)
        raise ValueError(
            f"holds too many values: at most {max_values}, of these {MAX_CONTAINERS} lists and objects, are allowed"
        )


def _check_depth(text: bytes) -> None:
    """Raises ValueError if brackets nest too deeply; checks only the first ``MAX_CONTAINERS`` brackets."""
    depth = 0
    for bracket in itertools.islice(re.finditer(rb"[\[{]|[\]}]", text), MAX_CONTAINERS):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)


def _within(text: bytes, max_values: int) -> bool:
    """False if a text has more values than are allowed: there is a bracket or a comma before each."""
    num_containers = text.count(b"[") + text.count(b"{")
    return num_containers <= MAX_CONTAINERS and num_containers + text.count(b",") <= max_values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise _NotReadError(f"holds the key {twice[:60]!a} twice: once is allowed")
    return found


def _constant(name: str) -> NoReturn:
    raise _NotReadError(f"is no JSON: it holds {name}")


def check_writable(value: Any) -> None:
    """Raises ValueError for text and numbers that cannot be written, and for values that are nested too deeply."""
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                check_text(item)
            elif kind is dict:
                for name in item:
                    check_text(name)
                below += item.values()
            elif kind is list:
                below += item
            elif kind in (int, float) and not math.isfinite(_as_float(item)):
                raise ValueError("holds a number that is too large: at most 1.8e308 is allowed")
        level, depth = below, depth + 1
        if level and depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)


def check_text(text: str) -> None:
    """Raises ValueError for text that is not UTF-8 when written."""
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
