"""What several commands share: exit statuses, the models that the flags name, the text as it appears."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from paceline.checkpoint.files import embedded_paths
from paceline.config import DrafterConfig, DraftModelConfig, LocalConfig, ModelConfig, NgramConfig, wants_colour
from paceline.errors import ConfigError
from paceline.types import Chunk

EXIT_ENGINE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def local_config(args: argparse.Namespace, with_draft: bool = True) -> LocalConfig:
    """The pipeline that the model flags describe. Raises ConfigError."""
    embedded_target, embedded_draft = embedded_paths()
    compile = "auto" if args.compile is None else args.compile
    dtype = args.dtype or "auto"
    target = ModelConfig(
        path=path_of("--target", args.target, str(embedded_target)),
        dtype=dtype,
        compile=compile,
        **given(args, ["tensor_parallel_size"]),
    )
    if args.target is not None and args.draft is None and args.drafter != "ngram" and with_draft:
        raise ConfigError("--target is given without --draft: name one, or use --drafter ngram or --mode plain")
    if args.drafter == "ngram" and args.draft is not None:
        raise ConfigError(f"--draft {args.draft} is given with --drafter ngram, which needs no model")
    draft: DrafterConfig | None = None
    if with_draft and args.drafter == "ngram":
        draft = NgramConfig()
    elif with_draft:
        draft = DraftModelConfig(path=path_of("--draft", args.draft, str(embedded_draft)), dtype=dtype, compile=compile)
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
