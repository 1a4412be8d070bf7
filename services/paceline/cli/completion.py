"""``paceline completion``: the script by which a shell completes commands, flags, choices and files."""

from __future__ import annotations

import argparse

import shtab

from paceline.cli.exit import EXIT_DONE

SHELLS = ("bash", "zsh", "fish")
_OF_FILES = ("FILE", "DIRECTORY", "ID_OR_PATH")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of ``paceline completion``."""
    parser.description = 'Prints a completion script; for this shell alone: eval "$(paceline completion bash)".'
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=run_completion)


def run_completion(args: argparse.Namespace) -> int:
    """Runs ``paceline completion``."""
    from paceline.cli.main import build_parser

    parser = build_parser()
    _complete_files(parser)
    print(shtab.complete(parser, args.shell))
    return EXIT_DONE


def _complete_files(parser: argparse.ArgumentParser) -> None:
    """Marks the flags whose values are files, in all commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner)
        elif isinstance(action.metavar, str) and any(word in action.metavar for word in _OF_FILES):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks
