"""``--quiet``: results, warnings and errors stay, and nothing else is told."""

from __future__ import annotations

import argparse
import io
import logging
import os

import pytest
from rich.console import Console
from tests.support.fake_service import WORDS, FakeService

from paceline import logs
from paceline.cli.main import COMMANDS, build_parser, main
from paceline.cli.startup import StartView, tell_ready
from paceline.cli.table import working
from paceline.cli.train_head import Bars

QUIET = {"-q", "--quiet"}


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser, by name."""
    return next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})


@pytest.mark.parametrize("command", [*COMMANDS, "bench"])
def test_every_command_has_it(command):
    parser = parsers(build_parser(command))[command]
    for one in parsers(parser).values() or (parser,):
        assert {flag for action in one._actions for flag in action.option_strings} >= QUIET


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_result_is_the_same_and_its_summary_is_left_out(capsys, monkeypatch, flags):
    monkeypatch.setitem(os.environ, "HF_HUB_DISABLE_PROGRESS_BARS", "0")
    with FakeService() as service:
        asked = ["generate", "hello", "--address", service.address, *flags]
        assert main(asked) == 0
        loud = capsys.readouterr()
        assert main([*asked, "-q"]) == 0
    quiet = capsys.readouterr()
    assert quiet.out == loud.out
    assert "".join(WORDS)[:5] in quiet.out
    assert quiet.err == ""
    assert ("tokens/s" in loud.err) == (not flags)
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert not logs.is_quiet()


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_of_a_start_is_shown_and_what_is_printed_meanwhile_is(capsys, terminal):
    out = io.StringIO()
    with logs.quiet(True), StartView(Console(file=out, force_terminal=terminal)) as view:
        logging.getLogger(logs.STAGES).info("loading", extra={"engine": "target"})
        print("a result")
        tell_ready(view, ["try this"])
    assert out.getvalue() == ""
    assert capsys.readouterr() == ("a result\n", "")


def test_neither_a_spinner_nor_a_bar_is_shown(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    shown = []
    for quiet in (False, True):
        with logs.quiet(quiet), working("measuring"), Bars() as bars:
            bars("training", 1, 2)
        shown.append(capsys.readouterr().err)
    assert "training" in shown[0]
    assert "measuring" in shown[0]
    assert shown[1] == ""
