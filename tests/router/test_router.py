"""The router's background work: an error in a task is logged with the task's name, and recovery goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.router.world import World, expected, request, result_of, without_sockets
from tests.support.letters import Letters
from tests.support.pump import Clock

from paceline.config import RouterConfig
from paceline.errors import EngineError
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router import router as router_module
from paceline.router.admission import TargetInfo
from paceline.router.link import Link
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.router.session import Actions, Session
from paceline.types import ReplicaStatus, Request

NOWHERE = Member("target-0", "127.0.0.1:1")
STATUS = ReplicaStatus("target-0", "target", incarnation=1, num_sessions=0, num_waiting=0, max_sessions=8)


def lonely(clock: Clock, kind: type[Router] = Router) -> Router:
    """A router whose only target cannot be reached."""
    metrics = RouterMetrics(Registry("router"), "none")
    info = TargetInfo(Letters(), 256, ())  # type: ignore[arg-type]
    return kind(info, StaticPool("target", [NOWHERE]), None, RouterConfig(), metrics=metrics, clock=clock)


@contextlib.asynccontextmanager
async def running(clock: Clock) -> AsyncIterator[Router]:
    """One that has been started."""
    router = lonely(clock)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


def errors_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The errors that the service itself has logged: gRPC logs some of loops that tests before have closed."""
    return [r for r in caplog.records if r.levelno == logging.ERROR and r.name.startswith("paceline.")]


def once_broken(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fails in its first call."""
    broken = [True]

    def function(*args: Any) -> Any:
        if broken.pop() if broken else False:
            raise RuntimeError("broken by a test")
        return original(*args)

    return function


async def test_an_error_in_one_tick_is_logged_and_the_next_tick_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request that waits for a target still ends in time."""
    monkeypatch.setattr(router_module, "TICK_S", 0.001)
    monkeypatch.setattr(Router, "no_target_reason", once_broken(Router.no_target_reason))
    clock = Clock()
    async with running(clock) as router:
        waiting = anext(router.generate(Request("r", "abc")))
        asyncio.get_running_loop().call_later(0.02, setattr, clock, "now", 31.0)
        with pytest.raises(EngineError, match="no target replica was up for 30 s"):
            await asyncio.wait_for(waiting, 60)
    (record,) = errors_of(caplog)
    assert "paceline-router-tick" in record.getMessage()
    assert record.exc_info is not None
    assert "broken by a test" in str(record.exc_info[1])


async def test_an_error_in_the_text_of_one_request_ends_that_one_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Session, "digest", once_broken(lambda session: Actions()))
    async with running(Clock()) as router:
        first, second = (asyncio.ensure_future(anext(router.generate(Request(name, "abc")))) for name in "ab")
        while len(router.active) < 2:
            await asyncio.sleep(0)
        router._touched = dict(router.active)
        router.digest()
        with pytest.raises(EngineError, match="could not process the output of this request"):
            await asyncio.wait_for(first, 60)
        assert list(router.active) == ["b"]
        assert not second.done()
        second.cancel()
        await asyncio.wait([second])
    (record,) = errors_of(caplog)
    assert record.getMessage() == "unexpected error in a request: RuntimeError"


async def test_a_request_whose_text_cannot_be_made_ends_alone_and_frees_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Outcomes that have not become text are dropped with it: they would fail again, and take the rest along."""
    without_sockets(monkeypatch)
    world = World(3)
    async with world.router(request_timeout_s=10.0) as router:
        wanted = [request(name, seed) for seed, name in enumerate("abc")]
        tasks = [asyncio.create_task(result_of(router, each)) for each in wanted]
        await world.turn()
        broken = router.active["a"].session

        def decode(_: Any) -> str:
            raise RuntimeError("broken by a test")

        monkeypatch.setattr(broken._detokenizer, "decode_last", decode)
        world.targets[0].turn()  # two outcomes before the first becomes text
        await world.until(*tasks)
        with pytest.raises(EngineError, match="could not process the output of this request"):
            tasks[0].result()
        for task, each in zip(tasks[1:], wanted[1:], strict=True):
            assert tuple(task.result()[0]) == expected(each)
        assert not world.targets[0].sessions
    (record,) = errors_of(caplog)
    assert record.getMessage() == "unexpected error in a request: RuntimeError"


@pytest.mark.parametrize(
    ("method", "task"), [("read_stream", "reader"), ("write_stream", "writer"), ("watch_silence", "heartbeat")]
)
async def test_an_error_in_a_task_of_a_link_is_logged_and_it_connects_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, task: str
) -> None:
    streams: list[asyncio.Event] = []
    again = asyncio.Event()

    async def idle(*_: Any) -> str:
        await asyncio.Event().wait()
        return ""

    async def broken_once(*_: Any) -> str:
        streams.append(again)
        if len(streams) == 1:
            raise RuntimeError("broken by a test")
        again.set()
        return await idle()

    for name in ("read_stream", "write_stream", "watch_silence"):
        monkeypatch.setattr(Link, name, broken_once if name == method else idle)
    async with running(Clock()) as router:
        await asyncio.wait_for(again.wait(), 60)
        (link,) = router.targets.links.values()
        assert link.reason == "RuntimeError: broken by a test"
    (record,) = errors_of(caplog)
    assert f"paceline-link-target-0-{task}" in record.getMessage()


async def test_an_error_while_a_link_goes_down_is_logged_and_it_connects_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The router's own reaction may fail, too."""
    again = asyncio.Event()
    num_streams = 0

    async def stream(link: Any, _: Any) -> str:
        nonlocal num_streams
        num_streams += 1
        if num_streams == 1:
            link._note(STATUS)
            assert link.up
        else:
            again.set()
            await asyncio.Event().wait()
        return "the replica ended the stream"

    monkeypatch.setattr(Link, "serve_stream", stream)
    monkeypatch.setattr(Link, "on_down", once_broken(Link.on_down))
    async with running(Clock()) as router:
        await asyncio.wait_for(again.wait(), 60)
        assert not router.ready
    (record,) = errors_of(caplog)
    assert "paceline-link-target-0" in record.getMessage()
