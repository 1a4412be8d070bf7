"""A router in a thread of its own, with the event loop that it needs: any thread and any other loop may ask it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline import logs
from paceline.errors import EngineError, PacelineError
from paceline.metrics.tracing import RequestSpans
from paceline.router.admission import ActiveRequest
from paceline.router.outlet import FarOutlet, Sink
from paceline.router.router import Router, items_of
from paceline.types import Chunk, Request, Result

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Held:
    """A request that the router's loop begins and, after its end, leaves."""

    begun: Future[ActiveRequest] = field(default_factory=Future)
    """The request once it is served or queued, or the error that refuses it."""
    left: Future[None] = field(default_factory=Future)
    """Done once the router has let go of it."""
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        for future in (self.begun, self.left):
            future.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it

    def settle(self, task: asyncio.Task[None]) -> None:
        """Records the end of its task."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, PacelineError):
            logs.unexpected(log, error)
        if not self.begun.done():
            self.begun.set_exception(error or EngineError("the router has been stopped"))
        self.left.set_result(None)


class RouterThread(Router):
    """A router whose ``generate``, ``cancel`` and ``end`` may be called anywhere, while its thread runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Arguments: of ``Router``."""
        super().__init__(*args, **options)
        self._loop: asyncio.AbstractEventLoop | None = None  # while it takes calls
        self._lock = threading.Lock()  # no call comes after the last one that the loop takes
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="paceline-router", daemon=True)
        self._started: Future[None] = Future()

    def start_thread(self) -> None:
        """Starts the thread and the router in it."""
        self._thread.start()
        self._started.result()

    def stop_thread(self, timeout_s: float) -> None:
        """Stops the router, and waits for the end of its thread. Idempotent."""
        with self._lock:
            if self._loop is None:
                self._ended.set()
            else:
                self._loop.call_soon_threadsafe(self._ended.set)
            self._loop = None
        if self._thread.ident is not None and not self.is_current:
            self._thread.join(timeout_s)

    async def _serve(self) -> None:
        try:
            with self._lock:
                self._loop = asyncio.get_running_loop()
            await self.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        else:
            self._started.set_result(None)
            await self._ended.wait()
            await self.stop()
        finally:
            with self._lock:
                self._loop = None

    @property
    def is_alive(self) -> bool:
        """True until its thread has ended."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True in the router's own thread, which calls back."""
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *args: Any) -> bool:
        """Calls a function in the router's thread, soon; False: the router does not run, or in another process."""
        with self._lock:
            if self._loop is None or not self.is_alive:
                return False
            self._loop.call_soon_threadsafe(function, *args)
            return True

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls a function where nothing else touches the router; returns or raises its result."""
        called: Future[_T] = Future()

        def call() -> None:
            try:
                called.set_result(function())
            except BaseException as error:
                called.set_exception(error)

        if self.is_current or not self.post(call):
            return function()
        return called.result()

    def hold(self, request: Request, outlet: Sink, spans: RequestSpans | None = None, **options: Any) -> Held:
        """Begins a request, as ``begin`` does; the router leaves it at its end or by ``release``."""
        held = Held()

        async def attend() -> None:
            active = await self.begin(request, outlet, spans, **options)
            held.begun.set_result(active)
            try:
                await active.ended.wait()
            finally:
                self.leave(active)

        def begin() -> None:
            held.task = asyncio.get_running_loop().create_task(attend(), name="paceline-request")
            held.task.add_done_callback(held.settle)

        if not self.post(begin):
            raise self.closed or EngineError("no router runs in this process")
        return held

    def release(self, held: Held) -> None:
        """Leaves a request, which is cancelled unless it has ended."""
        self.post(lambda: held.task is not None and held.task.cancel())

    async def generate(
        self, request: Request, spans: RequestSpans | None = None
    ) -> AsyncGenerator[Chunk | Result, None]:
        """As that of ``Router``, on any event loop."""
        outlet = FarOutlet(self.chunk_window_s)
        held = self.hold(request, outlet, spans)
        try:
            active = await asyncio.wrap_future(held.begun)
            async for item in items_of(active, outlet):
                yield item
        finally:
            self.release(held)
            await asyncio.wrap_future(held.left)

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """As that of ``Router``, in any thread."""
        return self.call(lambda: super(RouterThread, self).cancel(request_id, owner))

    def end(self, error: PacelineError) -> None:
        """As that of ``Router``, in any thread."""
        self.call(lambda: super(RouterThread, self).end(error))
