"""What several commands share: exit statuses, the models that the flags name, the text as it appears."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from paceline.checkpoint.files import embedded_paths
from paceline.config import DraftModel, LocalConfig, NgramOptions, TargetModel, wants_colour
from paceline.errors import ConfigError
from paceline.types import Chunk

EXIT_ENGINE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def local_config(args: argparse.Namespace, with_draft: bool = True) -> LocalConfig:
    """The pipeline that the model flags describe. Raises ConfigError."""
    embedded_target, embedded_draft = embedded_paths()
    run: dict[str, Any] = given(args, ["dtype", "compile"])
    target = TargetModel(
        path=path_of("--target", args.target, str(embedded_target)),
        **run,
        **given(args, ["tensor_parallel_size"]),
    )
    if args.target is not None and args.draft is None and args.drafter != "ngram" and with_draft:
        raise ConfigError("--target is given without --draft: name one, or use --drafter ngram or --mode plain")
    if args.drafter == "ngram" and args.draft is not None:
        raise ConfigError(f"--draft {args.draft} is given with --drafter ngram, which needs no model")
    draft: DraftModel | NgramOptions | None = None
    if with_draft and args.drafter == "ngram":
        draft = NgramOptions()
    elif with_draft:
        draft = DraftModel(path=path_of("--draft", args.draft, str(embedded_draft)), **run)
    return LocalConfig(target=target, draft=draft)


def path_of(flag: str, value: str | None, default: str) -> str:
    if value == "":
        raise ConfigError(f"{flag} is empty: a model id or a directory is needed")
    return default if value is None else value


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def write_text(generation: Iterable[Chunk], stream: TextIO) -> None:
    """Writes the text as it is produced; on a terminal accepted draft tokens are green."""
    colour = wants_colour(stream)
    for chunk in generation:
        for text, drafted in chunk.segments:
            stream.write(f"{_GREEN}{text}{_PLAIN}" if colour and drafted else text)
        stream.flush()
    stream.write("\n")
    stream.flush()
