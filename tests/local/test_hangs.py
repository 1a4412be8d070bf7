"""Engines that hang in a step: a target makes requests fail and health say so until it comes back; a draft is replaced.

Mutants: ``came_round`` that is always true; ``hangs`` that counts all of a pause; ``_fail`` that does not close a hung
target's sessions; ``trouble`` without ``_hung``; a watch that leaves the draft alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest
from tests.local.test_drafts import nothing, token
from tests.local.test_local import config_of, run, sampled
from tests.support.fake_service import wait_until
from tests.support.fakes import Scripted
from tests.support.letters import Letters
from tests.support.models import prompt, save_pair

from paceline.checkpoint.files import Checkpoint
from paceline.cli.local_service import local_edge, local_of
from paceline.config import LocalConfig, ServerConfig, ServiceConfig, TargetModel
from paceline.errors import EngineError, PoisonRequestError
from paceline.local import LocalPipeline
from paceline.messages import CloseSession, OpenSession, SessionFailed
from paceline.runtime.pulse import Pulse
from paceline.types import Mode, SamplingParams
from paceline.web.app import make_app

LIMIT_S = 0.5


class Stuck(Scripted):
    """A scripted engine whose next step, once ``go`` is cleared, lasts until it is set."""

    go = threading.Event()

    def receive(self, messages: Sequence[Any]) -> None:
        self.received += messages
        self.go.wait()
        for message in messages:
            self.emit(list(self.answer(message)))


def one_token(message: Any) -> Sequence[Any]:
    return [token(message, 0, last=True)] if isinstance(message, OpenSession) else []


@pytest.fixture
def stuck() -> Iterator[tuple[LocalPipeline, dict[str, Any]]]:
    """A pipeline whose target answers a request by one token, while ``go`` is set; and its engines."""
    engines: dict[str, Any] = {}

    def factory(name: str, kind: type[Scripted], answer: Callable[[Any], Sequence[Any]]) -> Any:
        def build(emit: Any) -> Any:
            engines[name] = kind(emit, answer)
            engines[name].go = threading.Event()
            engines[name].go.set()
            return engines[name]

        return build

    pipeline = LocalPipeline(
        LocalConfig(
            target=TargetModel(path="scripted", max_sessions=2),
            worker="thread",
            pin_cores=False,
            target_timeout_s=LIMIT_S,
            draft_timeout_s=LIMIT_S,
        ),
        target_factory=factory("target", Stuck, one_token),
        draft_factory=factory("draft", Stuck, nothing),
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
    )
    with pipeline:
        yield pipeline, engines
        for engine in engines.values():
            engine.go.set()


def served(pipeline: LocalPipeline) -> bool:
    """True if a request was answered."""
    try:
        return len(pipeline.submit("abc", SamplingParams(max_tokens=4, seed=1)).result.token_ids) == 1
    except EngineError:  # a busy machine may keep a sound engine for longer than these tests' limit
        return False


def test_requests_of_a_hung_target_end_and_health_says_why_until_it_comes_back(stuck):
    pipeline, engines = stuck
    wait_until(lambda: served(pipeline))
    engines["target"].go.clear()
    waiting = [pipeline.submit("abc", SamplingParams(max_tokens=4, seed=1)) for _ in range(3)]  # one more than run
    for one in waiting:
        with pytest.raises(EngineError, match=r"^the target hangs: .* than target_timeout_s, 0\.5 s$"):
            _ = one.result
    assert not pipeline.ready
    assert pipeline.trouble.startswith("the target hangs")
    assert pipeline.server_info().pools["target"] == ()
    with pytest.raises(EngineError, match="the target hangs"):
        pipeline.submit("abc")
    engines["target"].go.set()
    wait_until(lambda: pipeline.ready and served(pipeline))
    opened = {one.session_id for one in engines["target"].received if isinstance(one, OpenSession)}
    wait_until(
        lambda: (
            {one.session.session_id for one in waiting} & opened
            <= {one.session_id for one in engines["target"].received if isinstance(one, CloseSession)}
        )
    )


def test_a_hung_draft_is_replaced_and_its_sessions_go_on(stuck, monkeypatch):
    monkeypatch.setattr("paceline.local.link.RESTART_S", 0.01)
    pipeline, engines = stuck
    first = engines["draft"]
    first.go.clear()
    generation = pipeline.submit("abc", SamplingParams(max_tokens=4, seed=1))  # which opens it on the draft, too
    assert len(generation.result.token_ids) == 1
    wait_until(lambda: pipeline.num_draft_restarts >= 1 and engines["draft"] is not first and pipeline.draft.up)
    wait_until(lambda: served(pipeline))
    first.go.set()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_session_that_the_target_fails_is_opened_there_once_more(num_failures):
    """Mutant: one that is opened again without end."""
    opened: list[OpenSession] = []

    def answer(message: Any) -> Sequence[Any]:
        if not isinstance(message, OpenSession):
            return []
        opened.append(message)
        if len(opened) <= num_failures:
            return [SessionFailed(message.session_id, message.epoch, "no memory")]
        return [replace(token(message, 0, last=True), epoch=message.epoch)]

    pipeline = LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted"), worker="thread", pin_cores=False),
        target_factory=lambda emit: Scripted(emit, answer),
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
    )
    with pipeline:
        generation = pipeline.submit("abc", SamplingParams(max_tokens=4, seed=1))
        if num_failures == 1:
            assert len(generation.result.token_ids) == 1
        else:
            with pytest.raises(PoisonRequestError, match="2 times: it is ended, and should not be sent again"):
                assert generation.result
            assert not pipeline.router.active, "whoever told the result has let go of it"
    assert len(opened) == 2


class Counted:
    """A worker that came round at some of the questions."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def came_round(self) -> bool:
        return self.answers.pop(0)


def test_a_step_counts_by_the_time_that_was_watched():
    now = 0.0
    pulse = Pulse(10.0, lambda: now)
    worker: Any = Counted(True, *[False] * 9, True, False)
    assert pulse.period_s == 1.0
    found = []
    for _ in range(11):
        found.append(pulse.hangs(worker))
        now += 1.0
    assert found == [False] * 11
    assert pulse.stuck_s == 9.0
    assert not pulse.hangs(worker)
    assert pulse.stuck_s == 0.0
    now += 1000.0  # this process stood still
    assert not pulse.hangs(worker)
    assert pulse.stuck_s == 2.0
    assert not pulse.hangs(Counted())  # type: ignore[arg-type]  # another worker: nothing is known of it
    assert pulse.stuck_s == 0.0


def test_the_limits_are_those_of_the_configuration():
    assert local_of(ServiceConfig()).target_timeout_s == 30.0
    config = ServiceConfig.parse({"router_config": {"target_timeout_s": 7, "draft_timeout_s": 0.5}})
    assert (local_of(config).target_timeout_s, local_of(config).draft_timeout_s) == (7.0, 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_engines_whose_processes_stand_still(tmp_path, monkeypatch):
    """SIGSTOP of the draft changes no token; that of the target is told within the limit, and it comes back."""
    monkeypatch.setattr("paceline.local.link.RESTART_S", 0.05)
    config = config_of(save_pair(tmp_path), worker="process").model_copy(
        update={"target_timeout_s": 3.0, "draft_timeout_s": 1.0}
    )
    with LocalPipeline(config) as pipeline:
        expected = run(pipeline, prompt(1, 30), sampled(200), Mode.PLAIN)
        generation = pipeline.submit(prompt(1, 30), sampled(200))
        next(generation)
        os.kill(pipeline.draft.worker.pid, signal.SIGSTOP)  # type: ignore[union-attr]
        assert generation.result.token_ids == expected.token_ids
        wait_until(lambda: pipeline.num_draft_restarts >= 1)

        edge = local_edge(pipeline, ServerConfig(playground=False), "letters")
        transport = httpx.ASGITransport(app=make_app(edge))

        async def health() -> tuple[int, str]:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                answer = await client.get("/health")
                return answer.status_code, answer.text

        assert asyncio.run(health()) == (200, "serving\n")
        generation = pipeline.submit(prompt(1, 9), sampled(1900))
        next(generation)
        os.kill(pipeline.target.worker.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="the target hangs"):
            for _ in generation:
                pass
        status, text = asyncio.run(health())
        assert status == 503
        assert text.startswith("the target hangs: its step takes longer than target_timeout_s, 3 s")
        os.kill(pipeline.target.worker.pid, signal.SIGCONT)
        wait_until(lambda: pipeline.ready)
        assert run(pipeline, prompt(1, 30), sampled(200), Mode.PLAIN).token_ids == expected.token_ids
