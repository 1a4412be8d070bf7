"""Prompts to measure with: text that neither embedded model was trained on, or the user's own.

Held-out prompts are windows of whole lines from the standard-library files in ``embedded/held_out.json``, at random
or by task group (``tasks.py``). If these files are not installed, windows of this package's own source replace them.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.embedded import held_out_files
from paceline.errors import ConfigError
from paceline_bench.dataset import Question, read_questions
from paceline_bench.tasks import GROUPS, group_after, group_lines

MIN_TOKENS, MAX_TOKENS = 64, 200
_TRIES = 1000
_WINDOW_LINES = 40
"""Number of lines in which a group is looked for: windows are seldom longer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its source."""

    source: str
    token_ids: tuple[int, ...]
    text: str = ""
    category: str = ""
    max_tokens: int | None = None
    """Limit of this prompt; None for that of the run."""


def held_out_texts() -> dict[str, str]:
    """Text by name of the held-out files that are installed; of this package's own modules if none is."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = {name: library / name for name in held_out_files()}
    if not any(path.is_file() for path in paths.values()):
        package = Path(paceline.__file__).resolve().parent
        paths = {str(path.relative_to(package.parent)): path for path in sorted(package.glob("[a-u]*/*.py"))}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}


def held_out_prompts(tokenizer: Tokenizer, count: int, seed: int = 0, group: str = "") -> list[Prompt]:
    """``count`` different windows of MIN_TOKENS to MAX_TOKENS tokens; equal seeds give equal windows. ``group`` is one
    of ``tasks.GROUPS``, or empty for any.

    Raises:
        ConfigError: the texts hold fewer.
    """
    rng = random.Random(f"{seed} {group}" if group else seed)
    texts = sorted(held_out_texts().items())
    weights = [len(text) for _, text in texts]
    groups = {name: group_lines(text) for name, text in texts} if group else {}
    found: dict[str, Prompt] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            return list(found.values())
        name, text = rng.choices(texts, weights)[0]
        lines = text.splitlines(keepends=True)
        start = rng.randrange(len(lines))
        if group and group not in groups[name][start : start + _WINDOW_LINES]:
            continue
        window = _window(tokenizer, lines[start:], rng.randint(MIN_TOKENS, MAX_TOKENS))
        if window is None:
            continue
        taken, token_ids = window
        if not group or group_after(groups[name], start + taken.count("\n")) == group:
            source = f"{name}:{start + 1}"
            found.setdefault(source, Prompt(source, token_ids, taken, group))
    of = f" of the group {group}" if group else ""
    raise ConfigError(f"--prompts is {count}: the held-out text holds only {len(found)} different ones{of}")


def _window(tokenizer: Tokenizer, lines: list[str], wanted: int) -> tuple[str, tuple[int, ...]] | None:
    """Whole lines up to the first line end at or after ``wanted`` tokens; None if that is out of bounds."""
    text = ""
    for line in lines[:MAX_TOKENS]:
        text += line
        if len(text) < wanted:  # a token is at least one character
            continue
        token_ids = tokenizer.encode(text)
        if len(token_ids) >= wanted:
            return (text, token_ids) if len(token_ids) <= MAX_TOKENS else None
    return None


def file_prompts(tokenizer: Tokenizer, path: Path, count: int | None, categories: Sequence[str] = ()) -> list[Prompt]:
    """The first ``count`` prompts (None: all) of a file; with ``categories`` the first of each.

    Raises:
        ConfigError: there are too few, or a line is wrong; the message names file and line.
    """
    prompts: list[Prompt] = []
    for category in categories or ("",):
        questions = list(read_questions(path, (category,) if category else ()))[:count]
        if not questions or (count is not None and len(questions) < count):
            wanted = "at least one is needed" if count is None else f"--prompts asks for {count}"
            of = f" of the category {category!r}" if category else ""
            raise ConfigError(f"--prompts-file {str(path)!r} holds {len(questions)} prompts{of}: {wanted}")
        prompts += [_prompt(tokenizer, question) for question in questions]
    return prompts


def chat_prompts(target: str, path: Path) -> list[Prompt]:
    """The prompts of a file as questions of a user, rendered by the chat template of a checkpoint.

    Raises:
        ConfigError: the checkpoint has no chat template, or a line is wrong.
    """
    from paceline.checkpoint.chat import load_chat  # with packages that a client of endpoints has not

    chat = load_chat(target)
    if chat is None:
        raise ConfigError(f"{target} has no chat template, which is needed to render {path}")
    found = []
    for q in read_questions(path):
        text = chat.render([{"role": "user", "content": q.text}], None, {"add_generation_prompt": True})
        found.append(Prompt(q.source, chat.encode(text), text, q.category, q.max_tokens))
    return found


def _prompt(tokenizer: Tokenizer, q: Question) -> Prompt:
    return Prompt(q.source, tokenizer.encode(q.text), q.text, q.category, q.max_tokens)


def choose(
    tokenizer: Tokenizer, path: Path | None, count: int | None, groups: Sequence[str], seed: int, default: int = 8
) -> list[Prompt]:
    """Prompts of a file or held-out ones: ``count`` of each group, or in all if there are no groups.

    Raises:
        ConfigError: a group is unknown, or there are too few prompts.
    """
    if path is not None:
        return file_prompts(tokenizer, path, count, groups)
    for group in groups:
        if group not in GROUPS:
            raise ConfigError(f"unknown --task-group {group!r} of the held-out text: use {', '.join(GROUPS)}")
    number = count or default
    return [p for group in groups or ("",) for p in held_out_prompts(tokenizer, number, seed, group)]
