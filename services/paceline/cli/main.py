"""The command line: finds the command, runs it, and turns every error into one sentence and an exit status.

A command is a module of this package, imported when the command runs, or an entry point of the group
``paceline.commands`` (``paceline bench``).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from pydantic import ValidationError

from paceline import __version__, logs
from paceline.cli.exit import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from paceline.cli.extras import explain_missing, require_extras
from paceline.cli.flags import add_quiet_flag, describe
from paceline.errors import ConfigError, InvalidRequestError, PacelineError

COMMANDS = {
    "generate": "continue a prompt",
    "chat": "chat in the terminal",
    "batch": "answer a file of requests in OpenAI's batch format",
    "serve": "run the service",
    "status": "report how a running service is",
    "check": "report whether the service would start, and what memory it takes",
    "config": "print the configuration, or its reference",
    "plan": "how many targets and drafts, of which K, at what cost",
    "advise": "which drafting methods suit a target, and what they should bring",
    "demo": "overlapped against plain decoding",
    "train-head": "train a drafting head for a target",
    "train-draft": "train a draft model for a target",
    "write-corpus": "write a corpus for suffix decoding by a target",
    "convert": "write a GGUF file as a directory of transformers",
    "completion": "print what completes commands in a shell",
}
"""Module of this package -> its line in ``paceline --help``. ``add_flags(parser)`` there adds its flags and sets
``run``."""

_OWN = {"bench": "measure speed, latency and acceptance"}
"""Lines of entry points of this distribution."""
_EXAMPLES = """\
examples:
  paceline generate "def read_file(path):"      the embedded pair, in this process
  paceline serve --local                        an OpenAI-compatible server, without Ray
  paceline serve --target MODEL --draft MODEL   the service, with a pair of your own
  paceline COMMAND --help                       the flags of a command"""


_REPHRASED = (
    (r"argument (.+?): invalid int value: (.*)", r"\1 is \2: a whole number is needed"),
    (r"argument (.+?): invalid float value: (.*)", r"\1 is \2: a number is needed"),
    (r"argument (.+?): invalid choice: (.*?) \(choose from (.*)\)", r"\1 is \2: \3 are allowed"),
    (r"argument (.+?): expected one argument", r"\1 is given without a value: one is needed"),
    (r"argument (.+?): expected at least one argument", r"\1 is given without a value: at least one is needed"),
    (r"argument (.+?): ignored explicit argument (.*)", r"\1 is given the value \2: it takes none"),
    (r"argument (.+?): not allowed with argument (.+)", r"\1 is given with \2: one of them is allowed"),
    (r"argument (.+?): ('.*|\".*)", r"\1 is \2"),
)
"""Patterns of argparse's messages, and their replacements."""
_ALIKE = 0.7
"""Least similarity of a mistyped name and its suggestion, by difflib. --temperature and --chat-template have 0.64."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence."""

    def error(self, message: str) -> Any:
        """Exits with status 2."""
        near = _nearest_choice(message)
        for pattern, said in _REPHRASED:
            if (match := re.fullmatch(pattern, message, re.DOTALL)) is not None:
                message = match.expand(said) + near
                break
        self.exit(EXIT_USAGE, f"{self.prog}: {' '.join(message.split())}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown flags of this command, and names the nearest one."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and self._subparsers is None:
            flag = next((one.partition("=")[0] for one in rest if one.startswith("--")), None)
            if flag is None:
                remedy = "quote a text that has spaces" if self._get_positional_actions() else "only flags are allowed"
                self.error(f"{rest[0]!r} is one argument too many: {remedy}")
            near = difflib.get_close_matches(str(flag), [*self._option_string_actions], n=1, cutoff=_ALIKE)
            remedy = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists the flags"
            self.error(f"{flag} is not a flag: {remedy}")
        return found, rest


def _nearest_choice(message: str) -> str:
    """The choice that was meant perhaps, as the end of argparse's message of a wrong one; "" if there is none."""
    if (match := re.fullmatch(_REPHRASED[2][0], message, re.DOTALL)) is None:
        return ""
    value, *choices = (one.strip("'") for one in (match[2], *match[3].split(", ")))
    near = difflib.get_close_matches(value, choices, n=1, cutoff=_ALIKE)
    return f"; did you mean {near[0]!r}?" if near else ""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser with the flags of ``command``; None: with all commands' flags."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="paceline", description="Lossless speculative decoding.", epilog=_EXAMPLES, formatter_class=form
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text)
        if command in (None, name):
            import_module(f"paceline.cli.{name.replace('-', '_')}").add_flags(one)
            add_quiet_flag(one)
    for entry in entry_points(group="paceline.commands"):
        add = _adder(entry, wanted=command == entry.name) if command in (None, entry.name) else None
        if add is not None:
            add(commands)
        else:
            commands.add_parser(entry.name, help=_OWN.get(entry.name, f"provided by {entry.module}"))
    return parser


def _adder(entry: EntryPoint, *, wanted: bool) -> Any:
    """Returns the function that adds the command of an entry point; None: packages that it needs are missing, and it
    is not the one asked for."""
    try:
        return entry.load()
    except ModuleNotFoundError:
        if wanted:
            raise
        return None


def console_script() -> NoReturn:
    """Runs the command of ``sys.argv`` and ends the process with its exit status."""
    status = main()
    if status == EXIT_INTERRUPTED:
        # An interrupt leaves gRPC's threads in the middle of something. The interpreter ends such threads wherever they
        # are, and then waits, perhaps for ever, for locks that they held: it is not asked to end.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command (None: from ``sys.argv``). Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = None
    words = [argument for argument in argv if not argument.startswith("-")] or [""]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still shows the rest
    try:
        args = build_parser(words[0]).parse_args(argv)
        if args.command is None:
            raise ConfigError("a command is needed: paceline --help lists them")
        require_extras(args)
        is_quiet, is_verbose = getattr(args, "quiet", False), getattr(args, "verbose", False)
        if is_quiet and is_verbose:
            raise ConfigError("--quiet is given with --verbose: one of them is needed, or none")
        if is_quiet:
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of downloads, here and in processes of engines
        logs.configure(logging.INFO if is_verbose else logging.WARNING)
        with logs.quiet(is_quiet):
            status: int = args.run(args)
            return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:  # installed for a client alone
        if error.name is None or error.name.startswith("paceline"):
            raise
        return _complain(explain_missing(words, error.name), EXIT_USAGE)
    except ValidationError as error:
        return _complain(describe(error), EXIT_USAGE)
    except (ConfigError, InvalidRequestError) as error:
        return _complain(_named(str(error), args), EXIT_USAGE)
    except PacelineError as error:
        return _complain(str(error), EXIT_FAILED)


def _named(message: str, args: argparse.Namespace | None) -> str:
    """A message about a model, with the flag that names it."""
    for name in ("target", "draft"):
        value, flag = getattr(args, name, None), f"--{name}"
        if value is not None and repr(value) in message and flag not in message:
            return f"{flag}: {message}"
    return message


def _complain(message: str, status: int) -> int:
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr)
    return status
