"""Refusals of the command line."""

from __future__ import annotations

import pytest

from paceline.cli.main import main


def refusal_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a command says that refuses its arguments, which is one sentence of ours."""
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse's own
        status = int(str(stopped.code))
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    message: str = output.err.strip().splitlines()[-1]
    assert message.startswith("paceline")
    return message
