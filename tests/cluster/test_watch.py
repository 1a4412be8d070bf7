"""What ends ``paceline serve``: evidence, never silence. A Serve of our own making on a clock of our own."""

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest

from paceline import logs
from paceline.cluster import watch
from paceline.cluster.watch import Question, StatusSource, Watch
from paceline.errors import ConfigError, EngineError
from paceline.logs import BUILT
from paceline.types import Startup


class Serve:
    """A status source that answers, fails or is silent, and a clock that every question moves."""

    def __init__(self, every_s: float = 1.0) -> None:
        self.now_s, self.every_s = 0.0, every_s
        self.dead: str | None = None
        self.fails: Exception | None = None
        self.silent = False
        self.status = "DEPLOYING"
        self.message = ""
        self.replica_states = {"RUNNING": 0, "STARTING": 1}

    def ask(self) -> Question:
        self.now_s += self.every_s
        question = Question()
        question.set_running_or_notify_cancel()
        if self.fails is not None:
            question.set_exception(self.fails)
        elif not self.silent:
            states = self.replica_states
            deployment = SimpleNamespace(status=self.status, message=self.message, replica_states=states)
            application = SimpleNamespace(
                status=self.status, message=self.message, deployments={"Target:t": deployment}
            )
            question.set_result(SimpleNamespace(applications={"paceline": application}))
        return question

    def watch(self) -> Watch:
        return Watch("paceline", self.ask, lambda: self.dead, lambda: self.now_s)


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 0.0)


def polls(watched: Watch, count: int) -> None:
    async def run():
        for _ in range(count):
            await watched.poll()

    asyncio.run(run())


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("fails", [None, RuntimeError("The actor is temporarily unavailable")])
def test_silence_ends_nothing_and_is_told_ever_more_rarely(capsys, fails, ready):
    serve = Serve()
    watched = serve.watch()
    polls(watched, 3)
    watched.is_ready = ready
    serve.fails, serve.silent = fails, fails is None
    capsys.readouterr()
    polls(watched, 3600)  # an hour
    told = [line for line in capsys.readouterr().err.splitlines() if "has not answered" in line]
    seconds = [int(line.split(" for ")[1].split()[0]) for line in told]
    assert seconds[:6] == [10, 20, 40, 80, 160, 320]
    assert max(b - a for a, b in itertools.pairwise(seconds)) <= 640
    assert len(seconds) < 14
    assert all(("temporarily unavailable" in line) is (fails is not None) for line in told)
    serve.fails, serve.silent = None, False
    polls(watched, 1)
    assert "answers again" in capsys.readouterr().err
    polls(watched, 1)
    assert "answer" not in capsys.readouterr().err


def test_a_short_silence_is_not_worth_a_word(capsys):
    serve = Serve()
    watched = serve.watch()
    polls(watched, 1)
    serve.silent = True
    polls(watched, 9)
    serve.silent = False
    polls(watched, 1)
    assert "answer" not in capsys.readouterr().err


def test_a_dead_process_of_our_own_ray_ends_it_at_once_even_in_silence():
    serve = Serve()
    serve.silent, serve.dead = True, "Ray's gcs_server (pid 7) has ended with status -9"
    with pytest.raises(EngineError, match="gcs_server"):
        polls(serve.watch(), 1)


def test_a_failed_application_ends_it():
    serve = Serve()
    serve.status, serve.message = "DEPLOY_FAILED", "paceline.errors.ConfigError: no weights there"
    with pytest.raises(ConfigError, match="no weights there"):
        polls(serve.watch(), 1)


def test_a_paused_controller_is_asked_one_question_however_often_it_is_polled():
    paused, asked = threading.Event(), []

    def status():
        asked.append(1)
        paused.wait(60)
        raise RuntimeError("gone")

    source = StatusSource(status)
    question = source.ask()
    assert all(source.ask() is question for _ in range(100))
    paused.set()
    with pytest.raises(RuntimeError, match="gone"):
        question.result(60)
    assert asked == [1]
    with pytest.raises(RuntimeError, match="gone"):
        source.ask().result(60)
    assert asked == [1, 1]


def startup(replica_id, doing):
    return Startup(replica_id, "target", "", doing, 1.0)


def test_a_view_is_told_each_stage_and_that_a_replica_has_started(capsys):
    serve, told = Serve(), []
    watched = Watch("paceline", serve.ask, lambda: None, lambda: serve.now_s, lambda *stage: told.append(stage))
    watched.note_starting([startup("a", "loading"), startup("b", "loading")])
    watched.note_starting([startup("b", "compiling")])
    watched.note_starting([])
    stages = [("a", "loading"), ("b", "loading"), ("b", "compiling"), ("a", BUILT), ("b", BUILT)]
    assert told == [(f"target {replica}", doing) for replica, doing in stages]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_to_be_quiet_leaves_what_has_to_be_looked_after(capsys, quiet):
    serve = Serve()
    watched = serve.watch()
    told = []
    with logs.quiet(quiet):
        for states in ({"STARTING": 2}, {"RUNNING": 2}, {"RUNNING": 1, "STARTING": 1}):
            serve.replica_states = states
            polls(watched, 1)
            told.append(capsys.readouterr().err)
    assert told == [
        "",
        "" if quiet else "paceline: Target:t: 2 of 2 running\n",
        "paceline: Target:t: 1 of 2 running (a replica has ended)\n",
    ]


def test_without_a_view_a_stage_is_a_line_with_the_seconds_since_the_start(capsys):
    serve = Serve()
    watched = serve.watch()
    serve.now_s += 12
    watched.note_starting([startup("a", "loading")])
    watched.note_starting([startup("a", "loading")])
    assert capsys.readouterr().err == "paceline: target a: loading (12 s)\n"
    serve.now_s += 11
    watched.note_starting([startup("a", "loading")])
    assert capsys.readouterr().err == "paceline: target a: loading (23 s)\n"


@pytest.mark.parametrize(("waits_for", "is_told"), [("be scheduled. It needs GPUs", True), ("initialize.", False)])
def test_serve_is_quoted_on_what_the_stages_do_not_tell(capsys, waits_for, is_told):
    serve = Serve()
    serve.message = f"Deployment 'Target:t' has 1 replicas that have taken more than 30s to {waits_for}"
    watched = serve.watch()
    watched.look_at("Target:t", serve.ask().result().applications["paceline"].deployments["Target:t"])
    assert (serve.message in capsys.readouterr().err) == is_told
