"""Prompts to measure with: text that neither embedded model was trained on, or the user's own.

Held-out prompts are windows of whole lines from the standard-library files in ``embedded/held_out.json``. Where
those files are not installed, windows of this package's own source take their place.
"""

from __future__ import annotations

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from paceline.embedded import held_out_files
from paceline.errors import ConfigError
from paceline.tokenization import Tokenizer

MIN_TOKENS, MAX_TOKENS = 64, 200
_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and where it is from."""

    source: str
    token_ids: tuple[int, ...]


def held_out_texts() -> dict[str, str]:
    """Text by name of the held-out files that are installed; of this package's own modules if none is."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: library / name for name in held_out_files()}
    if not any(path.is_file() for path in paths.values()):
        package = Path(__file__).resolve().parents[1]
        paths = {str(path.relative_to(package.parent)): path for path in sorted(package.glob("*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}


def held_out_prompts(tokenizer: Tokenizer, count: int, seed: int = 0) -> list[Prompt]:
    """``count`` different windows of MIN_TOKENS to MAX_TOKENS tokens; the same for the same seed.

    Raises ConfigError if the texts do not hold as many.
    """
    rng = random.Random(seed)
    texts = sorted(held_out_texts().items())
    weights = [len(text) for _, text in texts]
    found: dict[str, Prompt] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            return list(found.values())
        name, text = rng.choices(texts, weights)[0]
        lines = text.splitlines(keepends=True)
        start = rng.randrange(len(lines))
        window = _window(tokenizer, lines[start:], rng.randint(MIN_TOKENS, MAX_TOKENS))
        if window is not None:
            found.setdefault(f"{name}:{start + 1}", Prompt(f"{name}:{start + 1}", window))
    raise ConfigError(f"--prompts is {count}: the held-out text holds only {len(found)} different ones")


def _window(tokenizer: Tokenizer, lines: list[str], wanted: int) -> tuple[int, ...] | None:
    """Whole lines up to the first line end at or after ``wanted`` tokens; None if that is out of bounds."""
    text = ""
    for line in lines[:MAX_TOKENS]:
        text += line
        if len(text) < wanted:  # a token is at least one character
            continue
        token_ids = tokenizer.encode(text)
        if len(token_ids) >= wanted:
            return token_ids if len(token_ids) <= MAX_TOKENS else None
    return None


def file_prompts(tokenizer: Tokenizer, path: Path, count: int | None) -> list[Prompt]:
    """The first ``count`` prompts (None: all) of a JSONL file whose objects have a text ``prompt``.

    Raises ConfigError, naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts-file {str(path)!r} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number} is no JSON: {error}") from error
        text = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text:
            raise ConfigError(f'{path}:{number} needs a field "prompt" with some text')
        prompts.append(Prompt(f"{path.name}:{number}", tokenizer.encode(text)))
        if len(prompts) == count:
            break
    if not prompts or (count is not None and len(prompts) < count):
        wanted = "at least one is needed" if count is None else f"--prompts asks for {count}"
        raise ConfigError(f"--prompts-file {str(path)!r} holds {len(prompts)} prompts: {wanted}")
    return prompts
