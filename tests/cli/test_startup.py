"""What is shown of a start, and what to type once it is ready."""

import io
import json
import logging
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.support.fakes import Clock

from paceline.cli.generate import tell_unfinished
from paceline.cli.main import build_parser
from paceline.cli.startup import StartView, next_steps
from paceline.config import ServerConfig, ServerTls
from paceline.logs import BUILT, STAGES
from paceline.types import ReplicaStatus


def shown(*, terminal: bool, live: bool = True, lasting: bool = True) -> str:
    """What a start of two engines shows."""
    out, clock = io.StringIO(), Clock(100.0)
    stages = logging.getLogger(STAGES)
    console = Console(file=out, force_terminal=terminal, width=60)
    with StartView(console, live=live, lasting=lasting, clock=clock) as view:
        stages.info("loading %s", "big", extra={"engine": "target"})
        stages.info("loading %s", "small", extra={"engine": "draft"})
        clock.now += 2.5
        stages.info("compiling", extra={"engine": "target"})
        stages.info("compiling", extra={"engine": "target"})
        clock.now += 60
        stages.info(BUILT, extra={"engine": "target"})
        assert view.elapsed_s == 62.5
    stages.warning("after the end", extra={"engine": "target"})
    return out.getvalue()


def test_stages_are_plain_lines_where_no_terminal_is():
    lines = ["target: loading big (0.0 s)", "draft: loading small (0.0 s)", "target: compiling (2.5 s)"]
    assert shown(terminal=False) == "".join(f"paceline: {line}\n" for line in lines)
    assert shown(terminal=True, live=False) == shown(terminal=False)


def test_a_terminal_shows_what_each_stage_took():
    text = shown(terminal=True)
    for line in (
        "target: loading big, done in 2.5 s",
        "target: compiling, done in 60.0 s",
        "draft: loading small",
    ):
        assert f"paceline: {line}" in text
    assert "after the end" not in text


def test_a_view_that_does_not_last_shows_stages_on_a_terminal_alone():
    text = shown(terminal=True, lasting=False)
    assert "draft: loading small" in text
    assert "done in" not in text
    assert shown(terminal=False, lasting=False) == ""


def test_the_logger_of_stages_is_left_as_it_was():
    logger = logging.getLogger(STAGES)
    before = logger.level, logger.propagate, logger.handlers[:]
    shown(terminal=False)
    assert (logger.level, logger.propagate, logger.handlers) == before


def commands(lines):
    return [shlex.split(line[9:]) for line in lines if not line.startswith("page")]


def test_what_to_type_next_is_right():
    lines = next_steps(ServerConfig(), https=False, chats=True)
    generate, curl, chat = commands(lines)
    for command in (generate, chat):
        assert build_parser(command[1]).parse_args(command[1:]).address
    assert generate[-1] == "127.0.0.1:9000"
    assert curl[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert json.loads(curl[-1])["max_tokens"] == 32
    assert lines[-1] == "page     http://127.0.0.1:8000/"


def test_what_to_type_next_follows_the_configuration():
    tls = ServerTls(certificate="a", key="b")
    server = ServerConfig(host="::", api_keys="keys.yaml", playground=False, tls=tls)
    generate, curl = commands(next_steps(server, https=True, chats=False))
    assert generate[-2:] == ["[::1]:9000", "--tls"]
    assert curl[1].startswith("https://[::1]:8000/")
    assert "authorization: Bearer $PACELINE_API_KEY" in curl
    assert commands(next_steps(ServerConfig(host="0.0.0.0"), https=False, chats=False))[1][1] == (
        "http://127.0.0.1:8000/v1/completions"
    )


@pytest.mark.parametrize(
    ("execution", "told"), [("compiling", True), ("compiled", False), ("eager", False), ("", False)]
)
def test_a_command_that_ends_before_its_models_are_compiled_says_so(capsys, execution, told):
    replica = ReplicaStatus("draft-0", "draft", 0, 0, 0, 1, execution=execution)
    info = SimpleNamespace(pools={"target": (replace(replica, execution="eager"),), "draft": (replica,)})
    tell_unfinished(info)
    assert ("are still being compiled, in the background" in capsys.readouterr().err) is (execution == "compiling")
