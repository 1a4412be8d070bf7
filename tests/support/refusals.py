"""Refusals of the command line."""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path

from paceline.cli.main import main
from paceline.cluster.ports import free_ports


def refusal_of(*arguments: str) -> str:
    """What the command line says when it refuses its arguments, on standard error alone."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as stopped:  # argparse's own
            status = int(str(stopped.code))
    assert (status, out.getvalue()) == (2, ""), err.getvalue()
    assert "Traceback" not in err.getvalue()
    return err.getvalue().rstrip("\n")


def answer_of(command: str) -> str:
    """What is said to a command of a page in the root of the repository; $PORT is a free port, $PYTHON this Python."""
    names = {"$PORT": str(free_ports(1)[0]), "$PYTHON": sys.executable}
    _, *arguments = shlex.split(command)
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    with contextlib.chdir(Path(__file__).parents[2]):
        said = refusal_of(*arguments)
    for name, value in names.items():
        said = said.replace(value, name)
    return said
