"""``paceline status`` against a server that answers, and one that does not."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from tests.support.fake_service import FakeService

from paceline.cli.main import main
from paceline.cli.status import report
from paceline.cluster.ports import free_ports
from paceline.errors import EngineError
from paceline.rpc import generation as api
from paceline.types import PoolScaling, ReplicaStatus, ServerInfo, Startup
from paceline.v1 import generation_pb2 as pb

DRAFTS = PoolScaling("draft", 2, 1, 0, 3, 1.75, "drafts are busy 95%", "speculation pays", 125.0)
CHOSEN = {"rounds": 100.0, "draft_rows": 310.0, "draft_rows_trimmed": 45.0, "drafts_paused": 7.0, "drafts_resumed": 5.0}
INFO = ServerInfo(
    version="1.2.3",
    uptime_s=7385.0,
    pools={
        "draft": (
            ReplicaStatus(
                "d1",
                "draft",
                1,
                3,
                0,
                16,
                node="n2",
                model="small",
                draining=True,
                busy_share=0.9,
                controller="n-grams",
            ),
        ),
        "router": (ReplicaStatus("r1", "router", 1, 5, 2, 16, node="n1", model="big"),),
        "target": (
            ReplicaStatus(
                "t1", "target", 1, 3, 1, 4, 30, 120, node="n1", model="big", busy_share=0.257, counters=CHOSEN
            ),
        ),
    },
    sessions_running=3,
    sessions_queued=2,
    acceptance_rate=0.714,
    acceptance_length=3.125,
    hit_rate=0.9,
    sessions_speculating=3,
    sessions_drafting=2,
    scaling=(
        DRAFTS,
        PoolScaling("target", None, 1, 1, 3, None, "nothing is known", "nothing has been decided yet", None),
    ),
    starting=(Startup("d2", "draft", "n3", "loading small", 4.4),),
)


LINES = """
Paceline 1.2.3, up 2 h 3 min

pool replica state sessions waiting KV busy node model
router r1 up 5 2 n1 big
target t1 up 3/4 1 25% 26% n1 big
draft d1 draining 3/16 0 90% n2 small
draft d2 starting n3 loading small (4 s)

sessions: 3 running, 2 waiting
speculation: on for 2 of 3 sessions that may have a draft; since the start accepted 71%, mean acceptance length 3.12, hits 90%
draft d1: n-grams
controllers: 3.10 draft tokens verified per round, 0.45 not worth verifying; drafting of a session was paused 7 times and resumed 5 times

pool wanted actual least most needed
draft 2 1 0 3 1.75
target - 1 1 3 ?
draft: drafts are busy 95%
draft: changed 2 min 5 s ago: speculation pays
target: nothing is known
"""  # noqa: E501


def words(lines):
    return [line.split() for line in lines]


def test_what_is_printed():
    assert words(report(INFO)) == words(LINES.strip().splitlines())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sessions_speculating": 0, "sessions_drafting": 0},
            "speculation: no running session requests a draft; since",
        ),
        (
            {"sessions_speculating": 0, "sessions_drafting": 0, "sessions_running": 0},
            "speculation: no session is running; since",
        ),
        (
            {"sessions_drafting": 0},
            "speculation: off: the targets request no draft for any of the 3 sessions that may have one",
        ),
        ({"acceptance_rate": 0.0, "acceptance_length": 1.0}, "may have a draft; no draft token has been verified"),
        ({"pools": {}}, "; no target is up"),
        ({"uptime_s": 59.4}, "up 59 s"),
        ({"uptime_s": 90061.0}, "up 1 d 1 h"),
    ],
)
def test_what_the_service_is_like(changes, text):
    assert text in "\n".join(report(replace(INFO, **changes)))


def test_a_service_without_drafts_has_no_hits():
    pools = {kind: up for kind, up in INFO.pools.items() if kind != "draft"}
    text = "\n".join(report(replace(INFO, pools=pools, hit_rate=0.0, sessions_speculating=0, sessions_drafting=0)))
    assert "hits" not in text
    assert "speculation: no draft pool; heads and prompt lookup draft in the targets; since the start" in text


@pytest.mark.parametrize(
    ("draft_s", "words"),
    [
        (0.0005, "; draft co-located with its target is faster: `paceline advise` writes its configuration"),
        (0.005, "with a separate draft: draft co-located with its target 0."),
    ],
)
def test_another_layout_that_would_be_faster_is_named(draft_s, words):
    """By the times of both kinds of replicas; one session."""
    steps = {"steps": 500.0, "bubble_s": 0.5, "bubble_steps": 500.0}
    times = {"step_seconds:1": 0.015, "step_seconds:4": 0.015, "step_seconds:16": 0.03, "acceptance": 0.7}
    target = ReplicaStatus("t1", "target", 1, 1, 0, 4, counters=steps, measures=times)
    draft = ReplicaStatus("d1", "draft", 1, 1, 0, 4, counters={"tree_steps": 200.0, "step_s": 200.0 * draft_s})
    pools = {"target": (target,), "draft": (draft,)}
    (line,) = [line for line in report(replace(INFO, pools=pools, sessions_running=1)) if line.startswith("layout: ")]
    assert line.startswith("layout: with the times measured here, 1 session on the same devices would have")
    assert words in line
    assert ("is faster" in line) is ("is faster" in words)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("yes", "target t1: batch-invariant: verification and decoding give the same bits"),
        ("no", "target t1: NOT batch-invariant: tokens may differ from plain decoding at near-ties"),
        ("untested", "target t1: not tested for batch invariance: tokens may differ"),
    ],
)
def test_what_the_self_test_of_a_target_found(verdict, words):
    (target,) = INFO.pools["target"]
    tested = replace(INFO, pools={**INFO.pools, "target": (replace(target, batch_invariant=verdict),)})
    assert words in "\n".join(report(tested))
    assert "invarian" not in "\n".join(report(INFO)), "an older target says nothing"


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ("compiling", "target t1: eager until it is compiled, which is done in the background"),
        ("failed", "target t1: eager, as it could not be compiled: its log says why"),
    ],
)
def test_a_model_that_is_eager_for_now(execution, words):
    (target,) = INFO.pools["target"]
    for found, said in ((execution, True), ("compiled", False), ("eager", False), ("", False)):
        info = replace(INFO, pools={**INFO.pools, "target": (replace(target, execution=found),)})
        assert (words in "\n".join(report(info))) is said


def test_a_service_that_sizes_no_pool_says_nothing_of_it():
    assert "wanted" not in "\n".join(report(replace(INFO, scaling=())))


def test_it_travels_whole():
    assert api.server_info_from_proto(api.server_info_to_proto(INFO)) == INFO
    assert api.server_info_from_proto(pb.GetServerInfoResponse(version="0.1.0")).scaling == (), "an older server"


def test_the_command(capsys):
    with FakeService() as service:
        assert main(["status", "--address", service.address]) == 0
        assert "target t1 up 0/16 0" in " ".join(capsys.readouterr().out.split())
        assert main(["status", "--address", service.address, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert (found["acceptance_rate"], found["pools"]["target"][0]["counters"]) == (0.5, {"steps": 3.0})
    assert (found["scaling"], found["starting"]) == ([], [])


def test_no_target_is_a_status_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr("paceline.cli.status.Client.server_info", lambda self, timeout_s: replace(INFO, pools={}))
    assert main(["status"]) == 1
    assert "no target is up" in capsys.readouterr().out


def test_watching_goes_on_when_nobody_answers_for_a_while(capsys, monkeypatch):
    answers = iter([INFO, EngineError("nobody there"), INFO])

    def server_info(self, timeout_s):
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, EngineError):
            raise answer
        return answer

    monkeypatch.setattr("paceline.cli.status.Client.server_info", server_info)
    assert main(["status", "--watch", "0.01", "--json"]) == 130
    out, err = capsys.readouterr()
    assert [json.loads(line)["version"] for line in out.splitlines()] == ["1.2.3", "1.2.3"]
    assert "nobody there" in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_watching_leaves_the_terminal_as_it_was(monkeypatch):
    answers = iter([INFO, INFO])
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("paceline.cli.status.Client.server_info", lambda self, timeout_s: _next(answers))
    assert main(["status", "--watch", "0.01"]) == 130
    text = terminal.getvalue()
    entered, left = "\x1b[?1049h", "\x1b[?1049l"
    assert text.count(entered) == text.count(left) == 1
    assert text.index(entered) < text.index("Paceline 1.2.3") < text.rindex("Paceline 1.2.3") < text.index(left)


def _next(answers):
    answer = next(answers, None)
    if answer is None:
        raise KeyboardInterrupt
    return answer


def test_nobody_answers(capsys):
    (port,) = free_ports(1)
    assert main(["status", "--address", f"127.0.0.1:{port}", "--timeout", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"127.0.0.1:{port}" in err
    assert len(err.splitlines()) == 1
