"""The contract of what connects an engine with its owner: a thread, a process, a stream to a target or to a draft.

Messages keep their order in both directions, however large they are; to send never waits for the engine; an engine
that fails is reported once; what is closed drops what it is sent. Each mutant breaks the contract of one row.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.recording import Build
from tests.support.mutants import mutant

from paceline.messages import CloseSession, OpenSession
from paceline.router.link import DRAFT, TARGET, Link
from paceline.router.pool import Member
from paceline.runtime.host import EngineHost
from paceline.runtime.process_worker import ProcessWorker
from paceline.runtime.server import EngineServer
from paceline.runtime.workers import ThreadWorker
from paceline.types import SamplingParams, SpeculationParams

LIMIT_S = 60.0


def opened(session_id: str, num_tokens: int = 1) -> OpenSession:
    return OpenSession(session_id, 1, (1,) * num_tokens, num_tokens, 0, SamplingParams(), SpeculationParams())


class Connection:
    """An engine as its owner sees it."""

    def __init__(self) -> None:
        self.send: Callable[[Sequence[Any]], None] = lambda _: None
        self.leave: Callable[[], None] = lambda: None
        """The owner goes, and the engine stays."""
        self.host: Any = None
        self.deaths: list[str] = []
        self._messages: list[Any] = []
        self._changed = threading.Condition()

    def take(self, messages: Sequence[Any]) -> None:
        with self._changed:
            self._messages += messages
            self._changed.notify()

    def died(self, reason: str) -> None:
        with self._changed:
            self.deaths.append(reason)
            self._changed.notify()

    def _wait(self, condition: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT_S)

    async def answers(self, count: int) -> list[tuple[str, str]]:
        """The next answers: the session that asked, and what was said."""
        await asyncio.to_thread(self._wait, lambda: len(self._messages) >= count)
        taken, self._messages = self._messages[:count], self._messages[count:]
        return [(message.session_id, message.message) for message in taken]

    async def death(self) -> str:
        await asyncio.to_thread(self._wait, lambda: self.deaths)
        return self.deaths[0]


@contextlib.asynccontextmanager
async def by_worker(kind: Any, gate: Path) -> AsyncIterator[Connection]:
    connection = Connection()
    worker = kind("engine", Build(gate), connection.take, connection.died)
    await asyncio.to_thread(worker.start)
    connection.send = worker.send
    try:
        yield connection
    finally:
        for _ in range(2):
            await asyncio.to_thread(worker.stop)
        assert not worker.alive


@contextlib.asynccontextmanager
async def by_stream(kind: Any, gate: Path) -> AsyncIterator[Connection]:
    connection = Connection()
    host: EngineHost[Any] = EngineHost(kind.name, Build(gate), replica_id="replica", max_sessions=1)
    server = EngineServer(host)
    await server.start()
    up = asyncio.Event()

    def changed(link: Link[Any, Any]) -> None:
        if link.up:
            up.set()
        elif up.is_set():
            connection.died(link.reason)

    link: Link[Any, Any] = Link(
        Member("replica", server.address), kind, on_messages=lambda _, messages: connection.take(messages),
        on_change=changed, silence_s=LIMIT_S,
    )  # fmt: skip
    connection.send, connection.leave, connection.host = link.send, link.stop, host
    running = asyncio.create_task(_run(link))
    try:
        await asyncio.wait_for(up.wait(), LIMIT_S)
        yield connection
    finally:
        for _ in range(2):
            link.stop()
        await running
        for _ in range(2):
            await server.stop()


async def _run(link: Link[Any, Any]) -> None:
    async with asyncio.TaskGroup() as tasks:
        link.start(tasks)


ROWS: dict[str, Any] = {
    "thread": lambda gate: by_worker(ThreadWorker, gate),
    "process": lambda gate: by_worker(ProcessWorker, gate),
    "target stream": lambda gate: by_stream(TARGET, gate),
    "draft stream": lambda gate: by_stream(DRAFT, gate),
}
each = pytest.mark.parametrize("row", ROWS)


async def keeps_its_order(row: str, folder: Path) -> None:
    """Both ways: of what the engine gets, and of what it says."""
    lengths = {f"echo {i}": 1 + i for i in range(300)}
    messages = [opened(name, length) for name, length in lengths.items()]
    async with ROWS[row](folder / "gate") as connection:
        for i in range(0, 300, 3):
            connection.send(messages[i : i + 3])
        assert await connection.answers(300) == [(name, str(length)) for name, length in lengths.items()]
        cancelled = [opened("hold a"), CloseSession("hold a", 1), opened("hold b")]
        assert await told(connection, cancelled) == [*lengths, "hold a", "close hold a", "hold b", "tell"]


async def told(connection: Connection, messages: Sequence[Any]) -> list[str]:
    """Sends messages; returns all that the engine has received."""
    connection.send([*messages, opened("tell")])
    ((_, said),) = await connection.answers(1)
    return said.split(", ")


@each
async def test_messages_keep_their_order(row: str, tmp_path: Path) -> None:
    await keeps_its_order(row, tmp_path)


async def sends_without_waiting(row: str, folder: Path) -> None:
    """More than any buffer between the two holds, while the engine is in a step; large answers are whole."""
    gate = folder / "gate"
    async with ROWS[row](gate) as connection:
        connection.send([opened("stuck")])
        for i in range(20):
            connection.send([opened(f"echo {i}", 100_000)])
        gate.touch()
        assert await connection.answers(20) == [(f"echo {i}", "100000") for i in range(20)]
        connection.send([opened("large"), opened("echo")])
        assert [len(text) for _, text in await connection.answers(2)] == [3_000_000, 1]


@each
async def test_to_send_never_waits_for_the_engine(row: str, tmp_path: Path) -> None:
    await sends_without_waiting(row, tmp_path)


@each
async def test_an_engine_that_waits_is_stepped_again_without_a_message(row: str, tmp_path: Path) -> None:
    async with ROWS[row](tmp_path / "gate") as connection:
        connection.send([opened("tick")])
        assert await connection.answers(1) == [("tick", "three steps")]


@each
async def test_the_end_closes_the_engine_and_is_no_death(row: str, tmp_path: Path) -> None:
    """The end comes twice."""
    async with ROWS[row](tmp_path / "gate") as connection:
        connection.send([opened("hold")])
    connection.send([opened("nobody hears this")])
    assert (tmp_path / "closed").exists()
    assert connection.deaths == []


async def reports_a_failure_once(row: str, folder: Path) -> None:
    async with ROWS[row](folder / "gate") as connection:
        connection.send([opened("raise")])
        assert "RuntimeError: out of order" in await connection.death()
        connection.send([opened("too late")])
    assert len(connection.deaths) == 1
    assert (folder / "closed").exists()


@each
async def test_a_failing_step_is_reported_once(row: str, tmp_path: Path) -> None:
    await reports_a_failure_once(row, tmp_path)


async def frees_what_its_owner_held(row: str, folder: Path) -> None:
    """The engine stays, and hears that the sessions of the one who has gone are closed."""
    async with ROWS[row](folder / "gate") as connection:
        connection.send([opened("hold")])
        assert await told(connection, []) == ["hold", "tell"]
        connection.leave()
        async with asyncio.timeout(LIMIT_S):
            while connection.host.num_sessions:
                await asyncio.sleep(0.005)
        assert await connection.host.call(lambda engine: engine.said) == ["hold", "tell", "close hold"]


@pytest.mark.parametrize("row", ["target stream", "draft stream"])
async def test_sessions_of_an_owner_that_goes_are_closed(row: str, tmp_path: Path) -> None:
    await frees_what_its_owner_held(row, tmp_path)


@mutant(ThreadWorker, "send")
def _the_last_comes_first(send: Any, worker: Any, messages: Sequence[Any]) -> None:
    send(worker, messages[::-1])


@mutant(Link, "send")
def _the_last_goes_first(send: Any, link: Any, messages: Sequence[Any]) -> None:
    send(link, messages[::-1])


@mutant(Link, "__init__")
def _down_is_said_twice(init: Any, link: Any, *args: Any, on_change: Any, **options: Any) -> None:
    def changed(link: Any) -> None:
        for _ in range(2):
            on_change(link)

    init(link, *args, on_change=changed, **options)


@mutant(ThreadWorker, "send")
def _nobody_closes(send: Any, worker: Any, messages: Sequence[Any]) -> None:
    send(worker, [message for message in messages if not isinstance(message, CloseSession)])


@pytest.mark.parametrize(
    ("change", "check", "row"),
    [
        (_the_last_comes_first, keeps_its_order, "thread"),
        (_the_last_goes_first, keeps_its_order, "draft stream"),
        (_down_is_said_twice, reports_a_failure_once, "target stream"),
        (_nobody_closes, frees_what_its_owner_held, "target stream"),
    ],
)
async def test_a_mutant_is_noticed(change, check, row, tmp_path, monkeypatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        await check(row, tmp_path)
