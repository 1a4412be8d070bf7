"""Engines behind one client interface, and the worker that runs an engine in a thread of this process.

The worker's loop is the whole contract between an engine and its surroundings::

    drain the inbox ─▶ receive ─▶ step ─▶ (step had nothing to do) wait for a message, at most wait_s

``process_worker.py`` runs an engine in a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import PacelineError, as_paceline_error

log = logging.getLogger(__name__)

In = TypeVar("In")
"""Messages that an engine receives: ``messages.ToTarget`` or ``messages.ToDraft``."""
Out = TypeVar("Out")
"""Messages that an engine sends: ``messages.FromTarget`` or ``messages.FromDraft``."""
_In = TypeVar("_In", contravariant=True)

Emit = Callable[[Sequence[Out]], None]
"""Sends the messages of an engine."""
Facts = Mapping[str, Any]
"""Fields of ReplicaStatus that an engine sets: counters, execution, KV pages and others."""

_SWITCH_INTERVAL_S = 1e-4


class Engine(Protocol[_In]):
    """Interface of the target engine and the draft engine to the worker that runs them. One thread calls it."""

    def receive(self, messages: Sequence[_In]) -> None:
        """Applies messages; does no heavy work."""
        ...

    def step(self) -> bool:
        """One unit of work. False: nothing to do until a message arrives or ``wait_s`` has passed."""
        ...

    def wait_s(self) -> float | None:
        """Returns how long the worker may sleep now, in seconds; None: until a message arrives."""
        ...

    def facts(self) -> Facts:
        """Returns what the engine's process knows of it. Any thread may ask while the engine runs."""
        ...

    def close(self) -> None:
        """Releases the engine's resources outside its process. Idempotent; the last call."""
        ...


EngineFactory = Callable[[Emit[Out]], Engine[In]]
"""Builds an engine that sends its messages through ``emit``. May take long. Picklable for a process."""


class Worker(Protocol[_In]):
    """Client side of a running engine. ``send`` never blocks and never raises; any thread may call it."""

    name: str

    def spawn(self) -> None:
        """Begins to build the engine, without waiting for it."""
        ...

    def wait_ready(self) -> None:
        """Returns when the engine is built. Raises the factory's PacelineError, or EngineError."""
        ...

    def start(self) -> None:
        """``spawn`` and ``wait_ready``."""
        ...

    def send(self, messages: Sequence[_In]) -> None:
        """Delivers ``messages`` in order; to a dead worker: drops them (``on_death`` tells)."""
        ...

    @property
    def alive(self) -> bool:
        """True if the engine can still answer."""
        ...

    def came_round(self) -> bool:
        """False if the engine is still in the step, or in the wait for its process, of the last call. One thread asks,
        at intervals; never blocks."""
        ...

    @property
    def facts(self) -> Facts:
        """The engine's facts, at most as old as the last answered ``came_round``; empty before it is built. Any thread
        may ask."""
        ...

    def stop(self, timeout_s: float = 5.0) -> None:
        """Asks the engine to end after its step, waits, then kills it (a process). Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks an engine to end after its step."""


def available_cores() -> list[int]:
    """Returns the cores that this process may run on; [] where the platform does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(cores: Collection[int]) -> None:
    """Pins the calling thread, and threads that it starts, to these cores; none: leaves it where it is."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a core that went offline or left the cpuset
            os.sched_setaffinity(0, cores)  # 0: the calling thread


def limit_torch_threads() -> None:
    """Makes PyTorch compute in one thread, if the engine has imported it."""
    torch = sys.modules.get("torch")  # an engine without torch need not import it
    if torch is not None:
        torch.set_num_threads(1)


def run(engine: Engine[In], drain: Callable[[float | None], list[In] | None]) -> None:
    """Runs the loop of an engine until ``drain`` returns None.

    ``drain(timeout_s)`` returns the queued messages, and waits at most ``timeout_s`` for the first one. A step is in
    progress from its return to its next call.
    """
    wait_s: float | None = 0.0
    while (messages := drain(wait_s)) is not None:
        if messages:
            engine.receive(messages)
        wait_s = 0.0 if engine.step() else engine.wait_s()


class ThreadWorker(Generic[In, Out]):
    """An engine in a thread of this process. Its messages are delivered in that thread."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory[Out, In],
        on_messages: Emit[Out],
        on_death: Callable[[str], None],
        cores: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._factory, self._on_messages, self._on_death, self._cores = factory, on_messages, on_death, cores
        self._inbox: queue.SimpleQueue[Sequence[In] | Stop] = queue.SimpleQueue()
        self._built = threading.Event()
        self._error: PacelineError | None = None
        self._engine: Engine[In] | None = None
        self._num_steps, self._steps_seen, self._in_step = 0, -1, False
        self._thread = threading.Thread(target=self._main, name=f"paceline-{name}", daemon=True)

    def spawn(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread.start()

    def wait_ready(self) -> None:
        self._built.wait()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def send(self, messages: Sequence[In]) -> None:
        self._inbox.put(messages)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def came_round(self) -> bool:
        stuck = self._in_step and self._steps_seen == self._num_steps
        self._steps_seen = self._num_steps
        return not stuck

    @property
    def facts(self) -> Facts:
        engine = self._engine
        return {} if engine is None else engine.facts()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stops the engine. A thread cannot be killed: one that hangs is left to die with the process."""
        self._inbox.put(Stop())
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _drain(self, timeout_s: float | None) -> list[In] | None:
        messages: list[In] = []
        self._in_step = False
        try:
            batch = self._inbox.get(timeout=timeout_s) if timeout_s != 0 else self._inbox.get_nowait()
            while True:
                if isinstance(batch, Stop):
                    return None
                messages.extend(batch)
                batch = self._inbox.get_nowait()
        except queue.Empty:
            self._num_steps, self._in_step = self._num_steps + 1, True
            return messages

    def _main(self) -> None:
        try:
            pin(self._cores)
            engine = self._engine = self._factory(self._on_messages)
            limit_torch_threads()
        except Exception as error:
            self._error = as_paceline_error(error)
            if self._error is not error:
                self._error.__cause__ = error
            return
        finally:
            self._built.set()
        try:
            run(engine, self._drain)
        except Exception as error:
            log.debug("engine %s failed", self.name, exc_info=True)
            self._on_death(f"{self.name} engine failed: {as_paceline_error(error)}")
        finally:
            engine.close()
            self._engine = None
            gc.unfreeze()  # objects that its factory has frozen
