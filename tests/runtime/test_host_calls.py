"""Work of others in an engine's thread: between steps, one at a time, and never without an answer."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.fakes import Idle

from paceline.errors import EngineError
from paceline.runtime.host import EngineHost


class Engine(Idle):
    """An engine that counts its steps, and has work only while it is ``busy``."""

    def __init__(self) -> None:
        self.num_steps, self.busy, self.broken = 0, False, False
        self.log: list[int] = []
        self.thread = threading.get_ident()

    def receive(self, messages: Sequence[Any]) -> None:
        raise AssertionError

    def step(self) -> bool:
        if self.broken:
            raise RuntimeError("broken by a test")
        self.num_steps += 1
        return self.busy


async def started() -> tuple[EngineHost[Any], Engine]:
    engines: list[Engine] = []

    def build(emit: Any) -> Engine:
        engines.append(Engine())
        return engines[0]

    host: EngineHost[Any] = EngineHost("target", build, replica_id="t", max_sessions=1)
    await host.start()
    return host, engines[0]


def note(engine: Engine) -> int:
    """Runs in the engine's thread."""
    assert threading.get_ident() == engine.thread
    engine.log.append(engine.num_steps)
    return len(engine.log)


@pytest.mark.parametrize("busy", [False, True])
async def test_each_call_comes_before_a_step_of_its_own(busy: bool) -> None:
    host, engine = await started()
    engine.busy = busy
    assert sorted(await asyncio.gather(*(host.call(note) for _ in range(20)))) == [*range(1, 21)]
    assert len({*engine.log}) == 20, "two without a step between"
    engine.busy = False
    await host.stop()


async def test_an_error_is_the_callers_and_the_engine_goes_on() -> None:
    host, _ = await started()
    with pytest.raises(ZeroDivisionError):
        await host.call(lambda engine: 1 // 0)
    assert await host.call(note) == 1
    await host.stop()


async def test_a_caller_that_gives_up_does_not_hold_up_the_next() -> None:
    host, _ = await started()
    held, waits = threading.Event(), asyncio.create_task(host.call(note))
    await waits
    slow = asyncio.create_task(host.call(lambda engine: held.wait(60)))
    given_up, others = asyncio.create_task(host.call(note)), asyncio.create_task(host.call(note))
    await asyncio.sleep(0.01)
    slow.cancel()
    given_up.cancel()
    held.set()
    assert await others == 2
    await host.stop()


async def test_a_call_ends_with_the_replica() -> None:
    host, _ = await started()
    held = threading.Event()
    waiting = asyncio.create_task(host.call(lambda engine: held.wait(60)))
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(host.stop())
    with pytest.raises(EngineError, match="has been stopped"):
        await waiting
    held.set()
    await stopping
    with pytest.raises(EngineError, match="has been stopped"):
        await host.call(note)


async def test_a_call_ends_with_the_engine() -> None:
    host, engine = await started()
    begun, held = threading.Event(), threading.Event()
    first = asyncio.create_task(host.call(lambda engine: (begun.set(), held.wait(60))[1]))
    second = asyncio.create_task(host.call(note))
    assert await asyncio.to_thread(begun.wait, 60)
    engine.broken = True
    held.set()
    assert await first
    with pytest.raises(EngineError, match="broken by a test"):
        await second
    await host.stop()
