"""Text to train a head on: documents from files, and windows of them that the target continues."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.errors import ConfigError
from paceline.errors.files import MOST_TEXT_BYTES, read_bytes

_KEYS = ("text", "prompt")
"""Keys of a JSON record that hold its text."""


def read_documents(paths: Sequence[Path], flag: str = "--data") -> list[str]:
    """The texts of files and of all files below folders, in order. ``flag``: names them in errors.

    A ``.jsonl`` file holds one record a line, an object with ``text`` or ``prompt``, or a string; any other file is one
    text. Files below a folder that are not UTF-8 are left out.

    Raises:
        ConfigError: a path does not exist, a file that was named is not UTF-8, a record has no text, or there is none.
    """
    documents = [text for path in paths for text in _read(path, flag) if text]
    if not documents:
        raise ConfigError(f"{flag} is {', '.join(map(str, paths))}: there is no text in it")
    return documents


def _read(path: Path, flag: str) -> Iterator[str]:
    if path.is_dir():
        for inner in sorted(inner for inner in path.rglob("*") if inner.is_file()):
            try:
                yield from _read_file(inner, flag)
            except UnicodeDecodeError:
                continue
        return
    try:
        yield from _read_file(path, flag)
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} is {str(path)!r}: it is not UTF-8 text") from None


def _read_file(path: Path, flag: str) -> Iterator[str]:
    text = read_bytes(path, f"{flag} is {str(path)!r}", MOST_TEXT_BYTES).decode("utf-8")
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                record = next((record[key] for key in _KEYS if key in record), None)
            if not isinstance(record, str):
                raise ConfigError(f"{flag} {path}:{number} is no object with {' or '.join(_KEYS)}, and no string")
            yield record


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of each document, as the service encodes a prompt."""
    return [ids for text in documents if (ids := tokenizer.encode(text))]


def windows(documents: Sequence[Sequence[int]], count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` random windows of ``length`` tokens, each from one document; a shorter document is taken whole.

    Every window is as likely as any other, so long documents are drawn from more often.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([max(1, len(ids) - length + 1) for ids in documents], dtype=torch.float64)
    chosen = torch.multinomial(weights, count, replacement=True, generator=generator).tolist()
    found = []
    for index in chosen:
        ids = documents[index]
        start = int(torch.randint(max(1, len(ids) - length + 1), (), generator=generator))
        found.append(list(ids[start : start + length]))
    return found
