"""A model that is compiled beside its engine: what the engine sees of it, and that nothing is left of it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import time

import pytest
from tests.support.models import prompt, save_pair

from paceline.config import DraftOptions, DraftSetup, ModelOptions, TargetOptions, TargetSetup
from paceline.draft.build import build_draft_engine
from paceline.errors import ConfigError
from paceline.messages import OpenSession, Outcome
from paceline.model.compiled import background, worker
from paceline.model.compiled.background import Compilation, CompileJob, SelfTest
from paceline.model.features import Features
from paceline.model.selftest import InvarianceReport
from paceline.target.build import build_target_engine
from paceline.target.engine import TargetEngine
from paceline.types import SamplingParams, SpeculationParams

JOB = CompileJob("a/model", ModelOptions())
PATIENCE_S = 600.0


def step(*inputs: object) -> object:
    raise AssertionError("nobody runs it")


def compilation(monkeypatch: pytest.MonkeyPatch, program: str, load=lambda: step) -> Compilation:
    """One whose worker is a program of Python."""

    def spawn() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-c", program]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )

    monkeypatch.setattr(background, "spawn", spawn)
    return Compilation(JOB, load)


def test_the_step_is_taken_once_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, and once."""
    made = compilation(monkeypatch, """print('{"error": null, "test": "batch-invariant"}', flush=True); input()""")
    assert (made.execution, made.take()) == ("compiling", None)
    made.start()
    made.wait()
    assert made.execution == "compiled"
    assert made.take() is step
    assert made.take() is None
    made.close()


@pytest.mark.parametrize(
    ("program", "load", "reason"),
    [
        ("import sys; sys.exit(3)", lambda: step, "the process that compiles it ended with status 3"),
        ("""print('{"error": "g++ is out of memory", "test": null}')""", lambda: step, "g++ is out of memory"),
        ("""print('{"error": null, "test": null}')""", lambda: None, "the compiled artifact belongs to other weights"),
        ("print('what?')", lambda: step, "Expecting value"),
    ],
)
def test_what_cannot_be_compiled_stays_eager_and_says_so(program, load, reason, monkeypatch, caplog) -> None:
    """Whatever goes wrong: a warning with the reason, and no step."""
    made = compilation(monkeypatch, program, load)
    with caplog.at_level(logging.WARNING, logger=background.log.name):
        made.start()
        made.wait()
    assert (made.execution, made.take()) == ("failed", None)
    (record,) = [r for r in caplog.records if r.name == background.log.name]
    assert record.getMessage().startswith(f"model 'a/model' could not be compiled and stays eager: {reason}")
    made.close()


def test_a_worker_that_cannot_be_started_is_a_compilation_that_fails(monkeypatch, caplog) -> None:
    """No process is left to the system, say."""
    monkeypatch.setattr(background, "spawn", lambda: (_ for _ in ()).throw(OSError("no process can be started")))
    made = Compilation(JOB, lambda: step)
    made.start()
    made.wait()
    assert made.execution == "failed"
    assert "no process can be started" in caplog.text


def begin(made: Compilation) -> None:
    """Returns when the worker runs."""
    made.start()
    deadline = time.monotonic() + 60
    while made._process is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_worker_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Also in the middle of a compilation, without a word; and one that never began needs none."""
    made = compilation(monkeypatch, "import time; time.sleep(600)")
    begin(made)
    made.close()
    made.close()
    assert made._process.returncode == -9
    assert made.execution == "compiling"
    assert not caplog.records
    compilation(monkeypatch, "").close()


DETACHED = CompileJob("a/model", ModelOptions(background_compilation="detached"))
_WORKER = """
import sys, time
from pathlib import Path
from paceline.model.compiled import worker
def perform(job):
    print("begun", file=sys.stderr, flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    Path(sys.argv[1]).write_text("done")
worker.perform = perform
worker.main()
"""


@pytest.mark.slow
def test_a_detached_worker_finishes_what_it_has_begun_after_its_engine(tmp_path, monkeypatch) -> None:
    """Another one does not, and neither does a second one of the same job, which waits for the first."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))

    def started(job: CompileJob, mark: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _WORKER, str(tmp_path / mark)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, start_new_session=True, **pipes)
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        return process

    def ended(process: subprocess.Popen[bytes]) -> int:
        process.stdin.close()
        process.stdout.close()
        status = process.wait(PATIENCE_S)
        process.stderr.close()
        return status

    first = started(DETACHED, "first")
    assert first.stderr.readline() == b"begun\n"
    assert ended(started(DETACHED, "second")) == -9, "it waits for the first"
    (tmp_path / "first").touch()
    assert ended(first) == 0
    assert (tmp_path / "first").read_text() == "done"
    ordinary = started(JOB, "ordinary")
    assert ordinary.stderr.readline() == b"begun\n"
    assert ended(ordinary) == -9


def test_an_engine_leaves_its_detached_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``close`` returns at once, and the worker runs on."""
    made = compilation(monkeypatch, "import sys; sys.stdin.read()")
    made._job = DETACHED
    begin(made)
    made.close()
    assert made._process.poll() is None
    background._kill(made._process)
    made.wait()
    assert made.execution == "compiling"


def test_a_compiled_step_that_depends_on_its_neighbors_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager one does not, or it would not serve: compiling must not lose that. For a draft there is no test."""
    report = InvarianceReport(384, 9, 1, 0.5)
    monkeypatch.setattr("paceline.model.selftest.check_invariance", lambda *given: report)
    monkeypatch.setattr("paceline.checkpoint.files.Checkpoint.open", lambda *given: None)

    class Loaded:
        def runner(self, num_pages: int) -> None:
            assert num_pages > 1

    def load(checkpoint: None, options: ModelOptions, features: Features | None, **_: object) -> Loaded:
        assert options.compile is True
        return Loaded()

    monkeypatch.setattr("paceline.model.loading.load_model", load)
    with pytest.raises(ConfigError, match=r"the compiled model is NOT batch-invariant here: 9 of 384 rows"):
        worker.perform(CompileJob("a/model", ModelOptions(), test=SelfTest(512, 64)))
    assert worker.perform(JOB) is None


def tokens(engine: TargetEngine, sent: list, name: str) -> tuple[int, ...]:
    """What a session gets that is opened now."""
    ids = tuple(prompt(5, 20))
    engine.receive([OpenSession(name, 0, ids, len(ids), 7, SamplingParams(max_tokens=24), SpeculationParams())])
    sent.clear()
    while engine.num_sessions:
        engine.step()
    return tuple(token for one in sent if isinstance(one, Outcome) for token in one.token_ids)


def until_compiled(engine) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while engine.execution == "compiling":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert engine.execution == "compiled"


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_an_engine_serves_before_it_is_compiled_and_is_compiled_when_it_starts_again(tmp_path, monkeypatch) -> None:
    """A real worker, for a target and a draft; the engine finds its artifact by its own weights."""
    source = str(save_pair(tmp_path / "pair") / "target")
    run = {"dtype": "float32", "device": "cpu", "max_model_len": 256}
    setup, sent = TargetSetup(source, TargetOptions(**run, max_step_tokens=32), tree_budget=16), []
    engine = build_target_engine(setup, sent.extend)
    try:
        assert engine.execution == "compiling"
        early = tokens(engine, sent, "early")
        until_compiled(engine)
        eager = engine.runner
        late = tokens(engine, sent, "late")
        assert engine.runner is not eager
        assert engine.runner.execution == "compiled"
        assert len(early) == len(late) == 24
    finally:
        engine.close()
    monkeypatch.setattr(background, "spawn", lambda: pytest.fail("it is in the cache"))
    again = build_target_engine(setup, sent.extend)
    assert (again.execution, again.runners._compilation) == ("compiled", None)
    assert tokens(again, sent, "again") == late
    draft = build_draft_engine(
        DraftSetup.for_target(setup, source, DraftOptions(dtype="float32", device="cpu")), lambda messages: None
    )
    assert draft.execution == "compiled", "of the same weights"
    again.close()
    draft.close()
