"""``paceline convert``: a GGUF file becomes a directory of transformers, in bfloat16."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import Progress

from paceline.cli.exit import EXIT_DONE
from paceline.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.description = (
        "Writes the model of a GGUF file as a directory that transformers reads, with weights in bfloat16. Paceline "
        "itself reads GGUF files as they are."
    )
    parser.add_argument(
        "source", metavar="MODEL.gguf", help="a GGUF file, a directory with one, or OWNER/NAME:FILE.gguf"
    )
    parser.add_argument("folder", metavar="DIR", help="the directory to make")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converts the file; returns the exit status.

    Raises:
        ConfigError: the source is no GGUF file, or the directory is not empty or cannot be written.
    """
    from paceline.checkpoint.files import Checkpoint
    from paceline.checkpoint.gguf.convert import convert
    from paceline.checkpoint.gguf.described import describes
    from paceline.checkpoint.size import gib

    folder = Path(args.folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"DIR is {args.folder!r}, which is there already: a new or empty directory is needed")
    described = Checkpoint.open(args.source).folder
    if described is None or not describes(described):
        raise ConfigError(f"MODEL.gguf is {args.source!r}: a GGUF file is needed")
    try:
        with Progress(transient=True, disable=args.quiet) as bar:
            task = bar.add_task("converting")
            size = convert(described, folder, lambda done, total: bar.update(task, completed=done, total=total))
    except OSError as error:
        raise ConfigError(f"{args.folder!r} cannot be written: {error.strerror or error}") from error
    print(f"{args.folder}: {gib(size)} in bfloat16")
    return EXIT_DONE
