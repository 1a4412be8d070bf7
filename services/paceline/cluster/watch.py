"""The way of a deployed service from its start to "ready", and its end, told on standard error.

A service is ended by evidence alone: Serve says that the application failed, or a process of our own Ray is dead. That
Serve does not answer is none: its controller may be busy, paused or on its way back, and streams need none of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import EngineError, PacelineError, by_name
from paceline.logs import BUILT, narrate

if TYPE_CHECKING:
    from paceline.types import Startup

_REPEAT_S = 10.0
ANSWER_S = 2.0
"""Longest wait for Serve in one round, so that replicas which died during the wait are noticed soon."""
_SILENT_AFTER_S, _SILENT_REPEAT_S = 10.0, 600.0
"""Silence is reported after ``_SILENT_AFTER_S``, again when it is twice as long, and so on, at least every
``_SILENT_REPEAT_S``."""

_SLOW = "to initialize"
"""Part of Serve's message for a replica that starts slowly. The replica's own stages say what it does."""

Question = concurrent.futures.Future[Any]
"""A question to Serve that may never be answered."""


class StatusSource:
    """Asks Serve for its status, in a thread that blocks no caller, one question at a time.

    ``serve.status`` has no deadline, and blocks for as long as the controller is paused.
    """

    def __init__(self, status: Callable[[], Any] | None = None) -> None:
        """``status``: ``serve.status``, unless it is given."""
        self._status = status or _serve_status
        self._question: Question | None = None

    def ask(self) -> Question:
        """The question that is open; a new one if the last has been answered."""
        if self._question is None or self._question.done():
            self._question = Question()
            self._question.set_running_or_notify_cancel()
            threading.Thread(target=self._answer, args=(self._question,), name="paceline-status", daemon=True).start()
        return self._question

    def _answer(self, question: Question) -> None:
        try:
            question.set_result(self._status())
        except BaseException as error:
            question.set_exception(error)


def _serve_status() -> Any:
    from ray import serve

    return serve.status()


def dead_process() -> str | None:
    """The process of a Ray that this process has started without which nothing can go on, if it has ended."""
    from ray._private.worker import _global_node

    if _global_node is None:
        return None
    for kind, process in _global_node.dead_processes():
        if kind in ("gcs_server", "raylet"):
            return f"Ray's {kind} (pid {process.pid}) has ended with status {process.returncode}"
    return None


class Watch:
    """Polls Serve and the monitor, and reports changes."""

    def __init__(
        self,
        application: str,
        ask: Callable[[], Question],
        dead: Callable[[], str | None] = dead_process,
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[str, str], None] | None = None,
    ) -> None:
        """``ask`` asks for Serve's status. ``dead`` names what has ended without which the service cannot go on.

        ``show`` is told what each part does while the service starts, ``ready`` when it has started; None: lines on
        standard error, again every 10 s.
        """
        self._show = show
        self._starting: set[str] = set()
        self._application, self._ask, self._dead, self._clock = application, ask, dead, clock
        self._started = clock()
        self.is_ready = self._announced = False
        self._running: dict[str, tuple[int, int]] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._answered = clock()
        self._silence_said_s = 0.0
        """Length of the silence when it was last reported; 0: it was not."""

    def became_ready(self) -> bool:
        """True once."""
        first, self._announced = self.is_ready and not self._announced, self.is_ready
        return first

    async def poll(self) -> None:
        """One round of questions. Raises ConfigError or EngineError if the service cannot come up or is gone."""
        if (ended := self._dead()) is not None:
            raise EngineError(ended)
        question = self._ask()
        answer = asyncio.wrap_future(question)
        await asyncio.wait([answer], timeout=ANSWER_S)
        if not answer.done():
            answer.cancel()  # the question stays open
            self._note_silence("")
            return
        if (error := answer.exception()) is not None:
            self._note_silence(first_line(error))
            return
        self._note_answer()
        status = answer.result()
        application = status.applications.get(self._application)
        if application is None:
            return
        for name, deployment in application.deployments.items():
            self.look_at(name, deployment)
        if _name(application.status) == "DEPLOY_FAILED":
            messages = [d.message for d in application.deployments.values() if _name(d.status) == "DEPLOY_FAILED"]
            raise reason_of("\n".join([application.message, *messages]))
        if not self.is_ready:
            await self._look_at_start(application)

    def _note_silence(self, reason: str) -> None:
        """Says that Serve is silent: after a while, and then ever more rarely."""
        silence = self._clock() - self._answered
        if silence < _SILENT_AFTER_S or silence < self._silence_said_s + min(self._silence_said_s, _SILENT_REPEAT_S):
            return
        self._silence_said_s = silence
        goes_on = "what runs goes on, but nothing is replaced or scaled until it does"
        say(f"Serve's controller has not answered for {silence:.0f} s{reason and f' ({reason})'}: {goes_on}")

    def _note_answer(self) -> None:
        if self._silence_said_s:
            say(f"Serve's controller answers again, after {self._clock() - self._answered:.0f} s")
        self._answered, self._silence_said_s = self._clock(), 0.0

    def look_at(self, name: str, deployment: Any) -> None:
        """Reports a deployment's numbers of replicas where they changed."""
        states = {_name(state): count for state, count in deployment.replica_states.items()}
        running = states.get("RUNNING", 0)
        now = (running, sum(count for state, count in states.items() if state != "STOPPING"))
        before, self._running[name] = self._running.get(name), now
        if before is not None and before != now and name != "Monitor":
            fewer = " (a replica has ended)" if running < before[0] and now[1] >= before[1] else ""
            (say if fewer else tell)(f"{name}: {running} of {now[1]} running{fewer}")
        message = deployment.message
        if not self.is_ready and "ConfigError" in message:  # a further try would fail like the first
            raise reason_of(message)
        if message and (running < now[1]) and _SLOW not in message:
            self._say_once(name, gist(message), say)

    async def _look_at_start(self, application: Any) -> None:
        monitored = self._running.get("Monitor", (0, 0))[0] > 0
        if not monitored and _name(application.status) != "RUNNING":
            return
        from ray import serve

        if monitored:
            monitor = serve.get_deployment_handle("Monitor", self._application)
            with contextlib.suppress(Exception):
                starting: list[Startup] = await asyncio.wait_for(monitor.starting.remote(), 2)
                self.note_starting(starting)
        if _name(application.status) == "RUNNING":
            router = serve.get_deployment_handle("Router", self._application)
            with contextlib.suppress(Exception):
                self.is_ready = await asyncio.wait_for(router.is_ready.remote(), 2)

    def note_starting(self, starting: list[Startup]) -> None:
        """Shows what each replica that starts is doing."""
        parts = {f"{startup.kind} {startup.replica_id}": startup.doing for startup in starting}
        show = self._show or self._say_once
        for part, doing in parts.items():
            show(part, doing)
        for part in sorted(self._starting - {*parts}):
            show(part, BUILT)
        self._starting = {*parts}

    def _say_once(self, part: str, doing: str, how: Callable[[str], None] | None = None) -> None:
        """Again after a while, with the time since the start: a user wants to see that it is alive. ``how``: None is
        ``tell``."""
        if not doing:
            return
        said, when = self._said.get(part, ("", 0.0))
        now = self._clock()
        if doing != said or now - when > _REPEAT_S:
            self._said[part] = (doing, now)
            (how or tell)(f"{part}: {doing} ({now - self._started:.0f} s)")


def reason_of(message: str) -> PacelineError:
    """Returns Paceline's error in a traceback as Serve reports it, else the traceback's last line as an EngineError."""
    found = re.findall(r"paceline\.errors\.(\w+): (.+)", message)
    if found:
        name, text = found[-1]
        return by_name(name)(text)
    return EngineError(gist(message) or "the application could not be deployed, and Serve does not say why")


def gist(message: str) -> str:
    """The most informative line of a message from Serve: the last one of a traceback, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    errors = [line for line in lines if re.match(r"([\w.]+(Error|Exception): |\[ALERT\])", line)]
    return errors[-1] if errors else lines[0]


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def tell(text: str) -> None:
    """Prints how the service comes and goes; not with --quiet."""
    narrate(f"paceline: {text}")


def say(text: str) -> None:
    """Prints a message that may need action."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
