"""The way of a deployed service from its start to "ready", and its end, told on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.errors import EngineError, PacelineError, by_name

if TYPE_CHECKING:
    from paceline.types import Startup

_REPEAT_S = 10.0
_GONE_AFTER_S = 10.0
"""Without an answer for so long Ray is taken for dead."""


class Watch:
    """Asks Serve and the monitor how things are, and says what has changed."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.is_ready = self._announced = False
        self._running: dict[str, tuple[int, int]] = {}
        self._said: dict[str, tuple[str, float]] = {}
        self._answered = time.monotonic()

    def became_ready(self) -> bool:
        """True once."""
        first, self._announced = self.is_ready and not self._announced, self.is_ready
        return first

    async def poll(self) -> None:
        """One round of questions. Raises ConfigError or EngineError if the service cannot come up or is gone."""
        from ray import serve

        from paceline.cluster.app import APPLICATION

        try:
            status = await asyncio.wait_for(asyncio.to_thread(serve.status), 10)
            self._answered = time.monotonic()
        except Exception as error:
            if time.monotonic() - self._answered > _GONE_AFTER_S:
                raise EngineError(f"Ray does not answer any more: {first_line(error)}") from error
            return
        application = status.applications.get(APPLICATION)
        if application is None:
            return
        for name, deployment in application.deployments.items():
            self._look_at(name, deployment)
        if _name(application.status) == "DEPLOY_FAILED":
            messages = [d.message for d in application.deployments.values() if _name(d.status) == "DEPLOY_FAILED"]
            raise reason_of("\n".join([application.message, *messages]))
        if not self.is_ready:
            await self._look_at_start(application)

    def _look_at(self, name: str, deployment: Any) -> None:
        states = {_name(state): count for state, count in deployment.replica_states.items()}
        running = states.get("RUNNING", 0)
        now = (running, sum(count for state, count in states.items() if state != "STOPPING"))
        before, self._running[name] = self._running.get(name), now
        if before is not None and before != now and name != "Monitor":
            fewer = " (a replica has ended)" if running < before[0] and now[1] >= before[1] else ""
            say(f"{name}: {running} of {now[1]} running{fewer}")
        message = deployment.message
        if not self.is_ready and "ConfigError" in message:  # a further try would fail like the first
            raise reason_of(message)
        if message and (running < now[1]):
            self._say_once(name, gist(message))

    async def _look_at_start(self, application: Any) -> None:
        from ray import serve

        from paceline.cluster.app import APPLICATION

        if self._running.get("Monitor", (0, 0))[0]:
            monitor = serve.get_deployment_handle("Monitor", APPLICATION)
            with contextlib.suppress(Exception):
                starting: list[Startup] = await asyncio.wait_for(monitor.starting.remote(), 2)
                for startup in starting:
                    self._say_once(startup.replica_id, f"{startup.kind} {startup.replica_id}: {startup.doing}")
        if _name(application.status) == "RUNNING":
            router = serve.get_deployment_handle("Router", APPLICATION)
            with contextlib.suppress(Exception):
                self.is_ready = await asyncio.wait_for(router.is_ready.remote(), 2)

    def _say_once(self, key: str, text: str) -> None:
        """Again after a while, with the time since the start: a user wants to see that it is alive."""
        said, when = self._said.get(key, ("", 0.0))
        now = time.monotonic()
        if text and (text != said or now - when > _REPEAT_S):
            self._said[key] = (text, now)
            say(f"{text} ({now - self._started:.0f} s)")


def reason_of(message: str) -> PacelineError:
    """Returns Paceline's error in a traceback as Serve reports it, else the traceback's last line as an EngineError."""
    found = re.findall(r"paceline\.errors\.(\w+): (.+)", message)
    if found:
        name, text = found[-1]
        return by_name(name)(text)
    return EngineError(gist(message) or "the application could not be deployed, and Serve does not say why")


def gist(message: str) -> str:
    """The line of a message from Serve that says most: the last one of a traceback, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    errors = [line for line in lines if re.match(r"([\w.]+(Error|Exception): |\[ALERT\])", line)]
    return errors[-1] if errors else lines[0]


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
