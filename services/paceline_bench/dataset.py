"""Prompts from a JSONL file, in the forms that benchmarks use; every other form is refused by its line.

    {"prompt": TEXT}                                           ours
    {"turns": [TEXT, ...], "category": NAME, ...}              Spec-Bench, MT-Bench: the first turn
    {"conversations": [{"from": "human", "value": TEXT}, ...]} ShareGPT: the first text of human or user

Each may have ``max_tokens`` (instead of the run's) and ``category``. Other fields are left alone. Only first turns are
asked: a later one depends on the answer to the earlier, so it would differ from server to server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.errors.files import read_text

FORMS = ("prompt", "turns", "conversations")
_HUMANS = ("human", "user")


@dataclass(frozen=True, slots=True)
class Question:
    """One line of a file."""

    source: str
    """Name of the file, and the line."""
    text: str
    category: str = ""
    max_tokens: int | None = None


def read_questions(path: Path, categories: Sequence[str] = ()) -> Iterator[Question]:
    """Yields the questions of a file in order; only of ``categories`` if any are given.

    Raises:
        ConfigError: the file cannot be read or a line is wrong; the message names file and line.
    """
    lines = read_text(path, f"--prompts-file is {str(path)!r}").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question = _question(f"{path.name}:{number}", f"{path}:{number}", line)
            if not categories or question.category in categories:
                yield question


def _question(source: str, place: str, line: str) -> Question:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is not an object, which every line must be, with one of {', '.join(FORMS)}")
    given = [form for form in FORMS if form in value]
    if len(given) != 1:
        said = "none" if not given else " and ".join(given)
        raise ConfigError(f"{place} has {said} of the fields {', '.join(FORMS)}: exactly one is needed")
    text = {"prompt": _prompt, "turns": _turn, "conversations": _said}[given[0]](value[given[0]], place)
    if not text.strip():
        raise ConfigError(f'{place}: the field "{given[0]}" needs some text')
    category, max_tokens = value.get("category", ""), value.get("max_tokens")
    if not isinstance(category, str):
        raise ConfigError(f"{place}: category is {category!r}, a text is needed")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 2):
        raise ConfigError(f"{place}: max_tokens is {max_tokens!r}, an integer of at least 2 is needed")
    return Question(source, text, category, max_tokens)


def _prompt(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f'{place}: the field "prompt" needs some text, {type(value).__name__} is given')
    return value


def _turn(value: Any, place: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
        raise ConfigError(f'{place}: the field "turns" needs a list of texts')
    first: str = value[0]
    return first


def _said(value: Any, place: str) -> str:
    entries = value if isinstance(value, list) else []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("value"), str):
            raise ConfigError(f'{place}: the field "conversations" needs a list of objects with "from" and "value"')
        if entry.get("from") in _HUMANS:
            said: str = entry["value"]
            return said
    raise ConfigError(f'{place}: in "conversations" nothing is from {" or ".join(_HUMANS)}')
