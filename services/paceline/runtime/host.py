"""One engine in a thread, served to the streams of the routers that use it. Knows neither models nor the wire format.

    router A ══ stream ══▶ ┌──────┐ ── send ─────▶ engine
    router B ══ stream ══▶ │ host │ ◀── handover ── thread
                           └──────┘
A session belongs to the stream that opened it. Messages for a session of another stream are dropped and counted;
when a stream ends, for whatever reason, its sessions are closed immediately. Everything but the engine's own thread
runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from paceline.config.installed import installed_version
from paceline.errors import EngineError
from paceline.messages import (
    CloseSession,
    Echo,
    FromDraft,
    FromTarget,
    OpenSession,
    Outcome,
    SessionFailed,
    ToDraft,
    ToTarget,
)
from paceline.runtime.handover import Handover
from paceline.runtime.page_mover import Arrivals, PageMover
from paceline.runtime.ranks import MakeFollower, ranked_worker
from paceline.runtime.workers import Emit, Engine, EngineFactory, Facts, ThreadWorker
from paceline.types import PROTOCOL_VERSION, ReplicaStatus

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""Period of the status that a replica sends on every stream."""
WRITE_TIMEOUT_S = 10.0
"""A router that takes nothing for this long has hung: its stream is ended and its sessions are freed."""
_STALLED_S = 60.0
"""An engine whose step takes longer than this hangs: the replica reports itself unhealthy."""

ToEngine = ToTarget | ToDraft
Out = TypeVar("Out", bound=FromTarget | FromDraft)
Batch = TypeVar("Batch")
Reply = TypeVar("Reply")
T = TypeVar("T")
Decode = Callable[[Batch], tuple[Sequence[ToEngine | Echo | SessionFailed], int]]
"""Reads a batch off the wire: its messages, SessionFailed for an opening that cannot be followed, and how many were
dropped because they are malformed."""
Encode = Callable[[Sequence[Out | Echo | SessionFailed], ReplicaStatus | None], Reply]


class Observer(Protocol):
    """Watches an engine at its work, in the engine's thread."""

    def received(self, messages: Sequence[ToEngine]) -> None:
        """The engine is about to take messages."""
        ...

    def stepping(self, engine: Any) -> None:
        """The engine is about to do a step."""
        ...

    def sent(self, messages: Sequence[FromTarget | FromDraft]) -> None:
        """The engine sends messages."""
        ...

    def closed(self) -> None:
        """The engine has ended."""
        ...


class Stream(Generic[Out]):
    """Messages that wait to be written to one router. Owned by the event loop."""

    def __init__(self) -> None:
        self._outbox: list[Out | Echo | SessionFailed] = []
        self._status_due = True
        self._wake = asyncio.Event()
        self._wake.set()
        self._ended = False
        self.failed: str | None = None

    def push(self, message: Out | Echo | SessionFailed) -> None:
        """Queues a message for the next batch."""
        self._outbox.append(message)
        self._wake.set()

    def beat(self) -> None:
        """Makes the next batch carry a status."""
        self._status_due = True
        self._wake.set()

    def fail(self, reason: str) -> None:
        """Makes the writer end the stream: the engine has failed."""
        self.failed = reason
        self._wake.set()

    def end(self) -> None:
        """Makes the writer return: the router has ended the stream."""
        self._ended = True
        self._wake.set()

    async def take(self) -> tuple[list[Out | Echo | SessionFailed], bool] | None:
        """Waits for messages or for a status to be due, and returns both; None once the stream has ended.

        Raises:
            EngineError: the engine has failed.
        """
        await self._wake.wait()
        self._wake.clear()
        if self.failed is not None:
            raise EngineError(self.failed)
        if self._ended:
            return None
        batch, self._outbox = self._outbox, []
        due, self._status_due = self._status_due, False
        return batch, due


@dataclass(slots=True)
class _Watched:
    """An engine that notes when its step in progress began. The note is read by other threads."""

    engine: Engine[ToEngine]
    observer: Observer | None
    busy_since: float | None = None
    calls: deque[Callable[[Any], None]] = field(default_factory=deque)
    """Work of others with the engine, one before each step. They never raise."""

    def receive(self, messages: Sequence[ToEngine]) -> None:
        self.busy_since = time.monotonic()
        if self.observer is not None:
            self.observer.received(messages)
        self.engine.receive(messages)

    def step(self) -> bool:
        self.busy_since = time.monotonic()
        if self.calls:
            self.calls.popleft()(self.engine)
        if self.observer is not None:
            self.observer.stepping(self.engine)
        worked = self.engine.step() or bool(self.calls)
        if not worked:
            self.busy_since = None
        return worked

    def wait_s(self) -> float | None:
        return self.engine.wait_s()

    def facts(self) -> Facts:
        return self.engine.facts()

    def close(self) -> None:
        if self.observer is not None:
            self.observer.closed()
        self.engine.close()


def _settle(called: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Ends a call, unless nobody waits for it any more."""
    if called.done():
        return
    if error is None:
        called.set_result(result)
    else:
        called.set_exception(error)


def _log_end(error: Exception) -> None:
    log.warning("the stream of a router ended: %s: %s", type(error).__name__, error)


class EngineHost(Generic[Out]):
    """Runs one engine in a thread and serves it to any number of streams."""

    def __init__(
        self,
        kind: str,
        factory: EngineFactory[Out, ToEngine],
        *,
        replica_id: str,
        max_sessions: int,
        model: str = "",
        node: str = "",
        cores: Sequence[int] = (),
        followers: Sequence[MakeFollower] = (),
        observer: Observer | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Sets up the host, without building the engine.

        ``factory`` builds the engine. ``max_sessions``: served concurrently without queueing. ``cores``: its threads
        are pinned to them. ``followers`` make the workers of its other ranks. ``observer`` receives its events.
        """
        self.kind = kind
        self.num_foreign = 0
        """Messages for sessions that the sender had not opened here, or that had ended."""
        self.num_malformed = 0
        """Messages that could not be read."""
        self.factory, self._observer = factory, observer
        self._heartbeat_s = heartbeat_s
        self._engine: _Watched | None = None
        self._worker = ranked_worker(
            lambda on_death: ThreadWorker(kind, self._build, self._on_messages, on_death, cores),
            followers,
            self._on_death,
        )
        self._handover: Handover | None = None
        self._calling = asyncio.Lock()
        self._called: asyncio.Future[Any] | None = None
        self._arrivals: Arrivals | None = None
        self._streams: set[Stream[Out]] = set()
        self.owners: dict[str, tuple[Stream[Out], int]] = {}  # session id -> who opened it, and its newest epoch
        self._failure: str | None = None
        self._beating: asyncio.Task[None] | None = None
        self._status = ReplicaStatus(
            replica_id,
            kind,
            time.time_ns(),
            num_sessions=0,
            num_waiting=0,
            max_sessions=max_sessions,
            pid=os.getpid(),
            node=node,
            model=model,
            version=installed_version(),
            protocol=PROTOCOL_VERSION,
        )

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Builds the engine without blocking the loop. Raises what the factory raises."""
        self._handover = Handover(asyncio.get_running_loop())
        self._worker.spawn()
        await asyncio.to_thread(self._worker.wait_ready)
        self._beating = asyncio.create_task(self._beat(), name=f"paceline-{self.kind}-heartbeat")
        self._beating.add_done_callback(self._on_beat_end)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends all streams and the engine. Idempotent."""
        self._fail("the replica has been stopped")
        if self._arrivals is not None:
            self._arrivals.stop()
        if self._beating is not None:
            self._beating.cancel()
        await asyncio.to_thread(self._worker.stop, timeout_s)
        if self._handover is not None:
            self._handover.close()

    def check(self) -> None:
        """Raises EngineError if the engine has died or hangs."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if (busy_s := self._busy_s()) > _STALLED_S:
            raise EngineError(f"the {self.kind} engine has been in one step for {busy_s:.0f} s")

    def status(self) -> ReplicaStatus:
        """Returns the status of the replica now."""
        facts = {} if self._engine is None else dict(self._engine.facts())
        counters = {**facts.pop("counters", {}), "messages_foreign": self.num_foreign}
        counters["messages_malformed"] = self.num_malformed
        if self._arrivals is not None:
            counters |= self._arrivals.counters()
            for key in ("num_sessions", "num_waiting"):
                facts[key] = facts.get(key, 0) + len(self._arrivals)
        return replace(self._status, busy_s=self._busy_s(), counters=counters, **facts)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open here."""
        return len(self.owners)

    def take_pages(self, mover: PageMover) -> None:
        """From now on sessions that move here bring their KV pages, by ``mover``."""
        self._arrivals = Arrivals(mover, self._worker.send)

    async def call(self, work: Callable[[Any], T]) -> T:
        """Calls ``work`` with the engine, in its thread and between two steps; one call at a time.

        Raises EngineError if the engine dies, and what ``work`` raises.
        """
        async with self._calling:
            if self._failure is not None or self._engine is None:
                raise EngineError(self._failure or "the engine is not built yet")
            called = self._called = asyncio.get_running_loop().create_future()
            self._engine.calls.append(lambda engine: self._answer(called, work, engine))
            self._worker.send(())
            result: T = await called
            return result

    def _answer(self, called: asyncio.Future[T], work: Callable[[Any], T], engine: Any) -> None:
        """Called in the engine's thread."""
        assert self._handover is not None
        if called.cancelled():
            return
        try:
            result = work(engine)
        except Exception as error:
            self._handover.call(_settle, called, None, error)
        else:
            self._handover.call(_settle, called, result, None)

    # -- streams -------------------------------------------------------------------------------------------

    async def serve(
        self,
        requests: AsyncIterable[Batch],
        write: Callable[[Reply], Awaitable[None]],
        decode: Decode[Batch],
        encode: Encode[Out, Reply],
    ) -> None:
        """Serves one router's stream until it ends. Raises EngineError when the engine has died."""
        stream = Stream[Out]()
        if self._failure is not None:
            raise EngineError(self._failure)
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(stream, write, encode))
                try:
                    await self._read(stream, requests, decode)  # returns when the router ends the stream
                except Exception as error:
                    _log_end(error)
                self._forget(stream)
                stream.end()  # gRPC cannot end a call while a write to it is in progress: the writer finishes that
        except ExceptionGroup as group:
            for one in group.exceptions:
                if isinstance(one, EngineError):
                    raise one from None
                _log_end(one)
        finally:
            self._forget(stream)

    async def _read(self, stream: Stream[Out], requests: AsyncIterable[Batch], decode: Decode[Batch]) -> None:
        async for batch in requests:
            messages, num_malformed = decode(batch)
            self.num_malformed += num_malformed
            mine = []
            for message in messages:
                if isinstance(message, Echo | SessionFailed):
                    stream.push(message)
                elif self.admit(stream, message):
                    mine.append(message)
            self._deliver(mine)

    async def _write(
        self, stream: Stream[Out], write: Callable[[Reply], Awaitable[None]], encode: Encode[Out, Reply]
    ) -> None:
        while (batch := await stream.take()) is not None:
            messages, status_due = batch
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await write(encode(messages, self.status() if status_due else None))

    def admit(self, stream: Stream[Out], message: ToEngine) -> bool:
        """True if a message is for the engine: its session was opened by this stream, or is opened by the message."""
        owner = self.owners.get(message.session_id)
        if isinstance(message, OpenSession) and (owner is None or owner[0] is stream):
            if owner is None or message.epoch > owner[1]:
                self.owners[message.session_id] = (stream, message.epoch)
            return True
        if owner is None or owner[0] is not stream:
            self.num_foreign += 1
            return False
        if isinstance(message, CloseSession) and message.epoch == owner[1]:
            del self.owners[message.session_id]
        return True

    def _forget(self, stream: Stream[Out]) -> None:
        """Closes the sessions of a stream. Idempotent."""
        self._streams.discard(stream)
        ended = [(sid, epoch) for sid, (owner, epoch) in self.owners.items() if owner is stream]
        for session_id, _ in ended:
            del self.owners[session_id]
        if ended:
            self._deliver([CloseSession(session_id, epoch) for session_id, epoch in ended])

    def _deliver(self, messages: Sequence[ToEngine]) -> None:
        """Passes messages to the engine, except for sessions that wait for their pages."""
        if self._arrivals is not None and not self._arrivals.idle(messages):
            messages = [message for message in messages if not self._arrivals.keeps(message)]
        if messages:
            self._worker.send(messages)

    # -- the engine ----------------------------------------------------------------------------------------

    def _build(self, emit: Emit[Out]) -> Engine[ToEngine]:
        engine = self.factory(emit)
        self._engine = _Watched(engine, self._observer)
        return self._engine

    def _on_messages(self, messages: Sequence[Out]) -> None:
        """Called in the engine's thread."""
        assert self._handover is not None
        if self._observer is not None:
            self._observer.sent(messages)
        self._handover.call(self._route, messages)

    def _on_death(self, reason: str) -> None:
        """Called in the engine's thread."""
        log.error("%s", reason)
        assert self._handover is not None
        self._handover.call(self._fail, reason)

    def _route(self, messages: Sequence[Out]) -> None:
        for message in messages:
            owner = self.owners.get(message.session_id)
            if owner is None:  # it was closed while the engine was in its last step
                continue
            stream, epoch = owner
            stream.push(message)
            ended = isinstance(message, SessionFailed) or (
                isinstance(message, Outcome) and message.finish_reason is not None
            )
            if ended and message.epoch == epoch:
                del self.owners[message.session_id]

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        for stream in self._streams:
            stream.fail(self._failure)
        if self._called is not None:
            _settle(self._called, None, EngineError(self._failure))

    def _busy_s(self) -> float:
        since = self._engine.busy_since if self._engine is not None else None
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for stream in self._streams:
                stream.beat()

    def _on_beat_end(self, task: asyncio.Task[None]) -> None:
        """Fails the replica, so that it is replaced: without statuses routers would give it up."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self._fail(f"{task.get_name()} failed: {type(error).__name__}: {error}")
