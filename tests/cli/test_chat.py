"""``paceline chat``: lines in, answers out, with engines of this machine and with a service."""

from __future__ import annotations

import io

import pytest
from tests.web.chats import Scripted, save_chat
from tests.web.support import edge_over, served

from paceline.checkpoint.chat import load_chat
from paceline.cli.chat import converse
from paceline.cli.main import main
from paceline.errors import InvalidRequestError


def lines(monkeypatch, *said):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in said)))


def test_what_was_said_is_the_history_until_it_is_cleared(monkeypatch, capsys):
    asked = []

    def answer(messages):
        asked.append([(message["role"], message["content"]) for message in messages])
        yield from (("so ", True), (messages[-1]["content"], False))

    lines(monkeypatch, "one", "", "two", "/clear", "three")
    converse(answer, "be brief")
    system = ("system", "be brief")
    assert asked == [
        [system, ("user", "one")],
        [system, ("user", "one"), ("assistant", "so one"), ("user", "two")],
        [system, ("user", "three")],
    ]
    assert capsys.readouterr().out == "so one\nso two\nso three\n"


def test_a_refusal_and_an_interrupt_do_not_end_the_chat(monkeypatch, capsys):
    asked = []

    def answer(messages):
        asked.append(len(messages))
        yield "so", False
        if messages[-1]["content"] == "wrong":
            raise InvalidRequestError("messages are refused")
        if messages[-1]["content"] == "long":
            raise KeyboardInterrupt

    lines(monkeypatch, "wrong", "long", "fine")
    converse(answer)
    assert asked == [1, 1, 2]
    assert capsys.readouterr().out == "somessages are refused\nso\nso\n"


def test_a_service_answers(monkeypatch, capsys, tmp_path):
    service = Scripted()
    service.says = "hello<7>"
    with served(edge_over(service, chat=load_chat(str(save_chat(tmp_path))))) as url:
        lines(monkeypatch, "hi", "and")
        assert main(["chat", "--address", url, "--system", "x", "--temperature", "0.5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "hello\nhello\n"
    first, second = service.requests
    assert (first.sampling.temperature, first.sampling.seed) == (0.5, 3)
    assert len(second.prompt) > len(first.prompt)
    lines(monkeypatch, "hi")
    assert main(["chat", "--address", url]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.slow
def test_engines_of_this_machine_answer(monkeypatch, capsys, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}")
    lines(monkeypatch, "read a file", "write it")
    flags = ["--no-compile", "--dtype", "float32", "--max-tokens", "6"]
    assert main(["chat", "--chat-template", str(file), *flags]) == 0
    assert capsys.readouterr().out.strip()
