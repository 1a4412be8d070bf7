"""An engine of this machine as its router sees it: up, or down since its worker has died or hangs.

A target that hangs is down until it comes back; one that dies, for good. A draft that hangs or dies is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Self

from paceline import __version__, logs
from paceline.errors import PacelineError
from paceline.messages import ToDraft, ToTarget
from paceline.router.pool import Member
from paceline.router.replica import OnChange, OnMessages, ReplicaLink, Sent
from paceline.rpc.protocol import VERSION
from paceline.runtime.pulse import Pulse
from paceline.runtime.workers import Emit, Worker
from paceline.types import ReplicaStatus, Startup

log = logging.getLogger(__name__)

RESTART_S, _LONGEST_RESTART_S = 0.5, 60.0
"""Pause before a dead draft is started again, doubled each time."""

MakeWorker = Callable[[Emit[Any], Callable[[str], None]], Worker[Any]]
"""Makes a worker that calls the first function with the engine's messages, the second with the reason of its death."""


class WorkerLink(ReplicaLink[Sent], Generic[Sent]):
    """One engine and its worker. Methods without another note run on the router's event loop."""

    kind: str

    def __init__(self, make_worker: MakeWorker, *, timeout_s: float, max_sessions: int, model: str) -> None:
        """``timeout_s``: a longer step counts as hung. ``max_sessions``: its places. ``model``: its name."""
        super().__init__(Member(f"{self.kind}-0", ""))
        self.num_restarts = 0
        self._post: Callable[..., bool] = lambda *_: False
        self._make_worker = make_worker
        self.worker = self.made()
        self._pulse = Pulse(timeout_s)
        self._blank = ReplicaStatus(
            self.member.replica_id, self.kind, 0, 0, 0, max_sessions, model=model, version=__version__, protocol=VERSION
        )
        self._watch: asyncio.Task[None] | None = None

    def attach(self, post: Callable[..., bool], on_messages: OnMessages, on_change: OnChange) -> Self:
        """Sets the callbacks of the router, and ``post``, which calls a function on its loop."""
        self._post, self._on_messages, self._on_change = post, on_messages, on_change
        return self

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Comes up: the worker is ready."""
        self.up, self.reason = True, ""
        self.refresh()
        self._watch = tasks.create_task(self._watch_pulse(), name=f"paceline-{self.kind}-watch")
        if not self.worker.alive:  # nobody listened when it died
            self._post(self.on_death, self.worker, f"{self.kind} engine failed: its process ended")

    def stop(self) -> None:
        self.up = False
        if self._watch is not None:
            self._watch.cancel()

    def send(self, messages: Sequence[Sent]) -> None:
        if self.up and messages:
            self.worker.send(messages)

    def refresh(self) -> None:
        """Reads the engine's facts into ``status``."""
        facts = {**self.worker.facts, "num_sessions": len(self.sessions), "num_waiting": 0}
        self.status = replace(self._blank, incarnation=self.num_restarts, busy_s=self._pulse.stuck_s, **facts)

    def end(self, timeout_s: float) -> None:
        """Ends the worker, which no other follows. Any thread may call it."""
        self.worker.stop(timeout_s)

    def made(self) -> Worker[Any]:
        """A worker whose messages and whose death come here."""

        def came(messages: Sequence[Any]) -> None:
            self._post(self.receive, messages)

        def died(reason: str) -> None:
            self._post(self.on_death, worker, reason)

        worker = self._make_worker(came, died)
        return worker

    def receive(self, messages: Sequence[Any]) -> None:
        """Passes messages to the router."""
        if not self.up:
            return
        try:
            self._on_messages(self, messages)
        except Exception as error:  # to stay up without these messages would hang their sessions
            logs.unexpected(log, error)
            self.on_death(self.worker, f"{type(error).__name__}: {error}")

    def on_death(self, worker: Worker[Any], reason: str) -> None:
        """The engine of a worker has ended, or what it sends cannot be used."""
        raise NotImplementedError

    @property
    def watched(self) -> bool:
        """True if its engine has been built, which may hang."""
        return True

    def on_hang(self, hangs: bool) -> None:
        """The engine has been asked whether it comes round."""
        raise NotImplementedError

    def go(self, *, up: bool, reason: str = "") -> None:
        """Comes up, or goes down and loses the sessions. The router is told."""
        self.up, self.reason = up, reason
        self.refresh()
        self._on_change(self)

    async def _watch_pulse(self) -> None:
        while True:
            await asyncio.sleep(self._pulse.period_s)
            try:
                if self.watched:
                    self.on_hang(self._pulse.hangs(self.worker))
                self.refresh()
            except Exception as error:  # without the next question no hang would be noticed any more
                logs.unexpected(log, error)


class TargetWorkerLink(WorkerLink[ToTarget]):
    """The target, which nothing replaces."""

    kind = "target"
    on_trouble: Callable[[str], None]
    """Called before it goes down, with the reason; and with "" when a target that hung has come back."""
    _dead = False

    def on_death(self, worker: Worker[Any], reason: str) -> None:
        self._dead = True
        self.on_trouble(reason)
        self.go(up=False, reason=reason)

    def on_hang(self, hangs: bool) -> None:
        if self._dead or hangs is not self.up:
            return
        reason = ""
        if hangs:
            limit_s = self._pulse.limit_s
            reason = f"the target hangs: its step takes longer than target_timeout_s, {limit_s:g} s"
            log.error("%s; requests fail until it ends", reason)
        else:
            log.warning("the target has come back: requests are served again")
        self.on_trouble(reason)
        self.go(up=not hangs, reason=reason)


class DraftWorkerLink(WorkerLink[ToDraft]):
    """The draft, of which another is started while sessions go on by plain decoding."""

    kind = "draft"
    _lost: Worker[Any] | None = None  # the last one that died or hung
    _lost_s = 0.0
    _restart: threading.Thread | None = None

    def __init__(self, make_worker: MakeWorker, *, timeout_s: float, max_sessions: int, model: str) -> None:
        super().__init__(make_worker, timeout_s=timeout_s, max_sessions=max_sessions, model=model)
        self._ending = threading.Event()
        self._worker_lock = threading.Lock()  # the last worker is ended after it was made

    @property
    def starting(self) -> tuple[Startup, ...]:
        """The draft that is started again, if one is."""
        if self.up or self._lost is None:
            return ()
        doing, elapsed_s = "it has ended and is started again", time.monotonic() - self._lost_s
        return (Startup(self.member.replica_id, "draft", "", doing, elapsed_s),)

    def end(self, timeout_s: float) -> None:
        self._ending.set()
        with self._worker_lock:
            super().end(timeout_s)
        if self._restart is not None:
            self._restart.join(timeout_s)

    def on_death(self, worker: Worker[Any], reason: str) -> None:
        if worker is self._lost or self._ending.is_set():
            return
        log.warning("%s; sessions continue by plain decoding until it is back", reason)
        self._lost, self._lost_s = worker, time.monotonic()
        self._restart = threading.Thread(target=self._start_again, name="paceline-restart", daemon=True)
        self._restart.start()
        self.go(up=False, reason=reason)

    @property
    def watched(self) -> bool:
        return self.up

    def on_hang(self, hangs: bool) -> None:
        if hangs:
            self.on_death(self.worker, f"the draft has been in one step for {self._pulse.stuck_s:.1f} s")

    def _start_again(self) -> None:
        """Tries until a draft is up again."""
        while not self._ending.wait(min(RESTART_S * 2**self.num_restarts, _LONGEST_RESTART_S)):
            self.worker.stop(timeout_s=0.5)
            with self._worker_lock:
                if self._ending.is_set():
                    return
                self.num_restarts += 1
                self.worker = worker = self.made()
                worker.spawn()
            try:
                worker.wait_ready()
            except PacelineError as error:
                log.info("the draft could not be started again: %s", error)
                continue
            self._post(self.on_ready, worker)
            return

    def on_ready(self, worker: Worker[Any]) -> None:
        """The engine of another worker has been built."""
        if worker is not self._lost:  # it has died again already
            self.go(up=True)
