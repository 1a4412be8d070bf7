"""Engines in a thread or a process of their own, behind one client interface.

The worker's loop is the whole contract between an engine and its surroundings::

    drain the inbox ─▶ receive ─▶ step ─▶ (step had nothing to do) wait for a message, at most wait_s

A process worker talks over a socket pair: one pickled list of messages per frame. The worker owns its
process, its socket and its threads, and ends them in ``stop``. A worker whose parent dies ends itself.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from paceline import errors, logs
from paceline.config import apply_worker_environment
from paceline.errors import EngineError, PacelineError
from paceline.runtime.pipe import Channel

log = logging.getLogger(__name__)

Emit = Callable[[Sequence[Any]], None]

_SWITCH_INTERVAL_S = 1e-4


class Engine(Protocol):
    """What a worker runs: the target engine and the draft engine both have this. One thread calls it."""

    def receive(self, messages: Sequence[Any]) -> None:
        """Takes in messages; does no heavy work."""
        ...

    def step(self) -> bool:
        """One unit of work. False: nothing to do until a message arrives or ``wait_s`` has passed."""
        ...

    def wait_s(self) -> float | None:
        """How long the worker may sleep now, in seconds; None: until a message arrives."""
        ...

    def close(self) -> None:
        """Gives up what the engine holds outside its process. Idempotent; the last call."""
        ...


EngineFactory = Callable[[Emit], Engine]
"""Builds an engine that sends its messages through ``emit``. May take long. Picklable for a process."""


class Worker(Protocol):
    """The client side of a running engine. ``send`` never blocks and never raises; any thread may call it."""

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

    def send(self, messages: Sequence[Any]) -> None:
        """Delivers ``messages`` in order; to a dead worker: drops them (``on_death`` tells)."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer."""
        ...

    def stop(self, timeout_s: float = 5.0) -> None:
        """Asks the engine to end after its step, waits, then kills it (a process). Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


@dataclass(frozen=True, slots=True)
class _Failed:
    error_name: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> _Failed:
        name = type(error).__name__ if isinstance(error, PacelineError) else "EngineError"
        text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        return cls(name, text, "".join(traceback.format_exception(error)))

    def to_error(self) -> PacelineError:
        kind = getattr(errors, self.error_name, EngineError)
        return kind(self.message) if issubclass(kind, PacelineError) else EngineError(self.message)


def available_cores() -> list[int]:
    """The cores this process may run on; [] where the platform does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(core: int | None) -> None:
    """Keeps the calling thread on one core; None: where it is."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # a core that went offline or left the cpuset
            os.sched_setaffinity(0, {core})  # 0: the calling thread


def settle() -> None:
    """Once an engine is built: what is there now stays, and the garbage collector need not look at it during a step.

    Libraries and models are some hundred thousand objects, which take a tenth of a second to go through.
    """
    gc.collect()
    gc.freeze()


def _limit_torch_threads() -> None:
    torch = sys.modules.get("torch")  # an engine without torch does not pay for its import
    if torch is not None:
        torch.set_num_threads(1)


def _run(engine: Engine, drain: Callable[[float | None], list[Any] | None]) -> None:
    """The loop. ``drain(timeout_s)`` returns what has arrived, waiting for the first; None: stop."""
    wait_s: float | None = 0.0
    while (messages := drain(wait_s)) is not None:
        if messages:
            engine.receive(messages)
        wait_s = 0.0 if engine.step() else engine.wait_s()


class ThreadWorker:
    """An engine in a thread of this process. Its messages are delivered in that thread."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory,
        on_messages: Emit,
        on_death: Callable[[str], None],
        core: int | None = None,
    ) -> None:
        self.name = name
        self._factory, self._on_messages, self._on_death, self._core = factory, on_messages, on_death, core
        self._inbox: queue.SimpleQueue[Sequence[Any] | _Stop] = queue.SimpleQueue()
        self._built = threading.Event()
        self._error: PacelineError | None = None
        self._thread = threading.Thread(target=self._main, name=f"paceline-{name}", daemon=True)

    def spawn(self) -> None:
        """See Worker."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread.start()

    def wait_ready(self) -> None:
        """See Worker."""
        self._built.wait()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """See Worker."""
        self.spawn()
        self.wait_ready()

    def send(self, messages: Sequence[Any]) -> None:
        """See Worker."""
        self._inbox.put(messages)

    @property
    def alive(self) -> bool:
        """See Worker."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """See Worker. A thread cannot be killed: one that hangs is left to die with the process."""
        self._inbox.put(_Stop())
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _drain(self, timeout_s: float | None) -> list[Any] | None:
        messages: list[Any] = []
        try:
            batch = self._inbox.get(timeout=timeout_s) if timeout_s != 0 else self._inbox.get_nowait()
            while True:
                if isinstance(batch, _Stop):
                    return None
                messages.extend(batch)
                batch = self._inbox.get_nowait()
        except queue.Empty:
            return messages

    def _main(self) -> None:
        try:
            pin(self._core)
            engine = self._factory(self._on_messages)
            _limit_torch_threads()
        except Exception as error:
            self._error = _Failed.of(error).to_error()
            self._error.__cause__ = error
            return
        finally:
            self._built.set()
        try:
            _run(engine, self._drain)
        except Exception as error:
            log.debug("engine %s failed", self.name, exc_info=True)
            self._on_death(f"{self.name} engine failed: {_Failed.of(error).message}")
        finally:
            engine.close()
            gc.unfreeze()  # what its factory has settled


class ProcessWorker:
    """An engine in a process of its own (spawned). Its messages are delivered in a reader thread here."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory,
        on_messages: Emit,
        on_death: Callable[[str], None],
        core: int | None = None,
    ) -> None:
        self.name = name
        self._on_messages, self._on_death = on_messages, on_death
        self._factory, self._core = factory, core
        self._sock: socket.socket | None = None
        self._process: BaseProcess | None = None
        self._built = threading.Event()
        self._stopping = False
        self._failure: _Failed | None = None
        self._send_lock = threading.Lock()
        self._backlog: deque[bytes] = deque()  # frames that the socket had no room for, in order
        self._reader = threading.Thread(target=self._read, name=f"paceline-{name}-reader", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id, None before ``spawn``."""
        return None if self._process is None else self._process.pid

    def spawn(self) -> None:
        """See Worker."""
        self._sock, child_sock = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_process_main,
            args=(child_sock, pickle.dumps(self._factory), self._core, logs.level()),
            name=f"paceline-{self.name}",
            daemon=True,
        )
        resource_tracker.ensure_running()  # started by the first worker otherwise, and that unblocks SIGINT again
        with _sigint_deferred(), child_sock:  # the child ignores it from its first line on
            self._process.start()
            self._reader.start()

    def wait_ready(self) -> None:
        """See Worker."""
        self._built.wait()
        if self._failure is not None:
            log.debug("engine %s could not be built:\n%s", self.name, self._failure.trace)
            raise self._failure.to_error()

    def start(self) -> None:
        """See Worker."""
        self.spawn()
        self.wait_ready()

    def send(self, messages: Sequence[Any]) -> None:
        """See Worker. A helper thread writes what the socket has no room for: a relay must never block."""
        self._send_frame(Channel.frame(messages))

    @property
    def alive(self) -> bool:
        """See Worker."""
        return self._reader.is_alive()

    def stop(self, timeout_s: float = 5.0) -> None:
        """See Worker."""
        self._stopping = True
        if self._process is not None and self._process.pid is not None:
            self._send_frame(Channel.frame(_Stop()))
            self._process.join(timeout_s)
            if self._process.is_alive():
                self._kill(self._process.pid)
                self._process.join()
            if self._reader.ident is not None and self._reader is not threading.current_thread():
                self._reader.join(timeout_s)
        if self._sock is not None:
            self._sock.close()

    def _kill(self, pid: int) -> None:
        try:
            os.killpg(pid, signal.SIGKILL)  # with a compiler that it may be running
        except ProcessLookupError:  # it has no group of its own yet
            assert self._process is not None
            self._process.kill()

    def _send_frame(self, frame: bytes) -> None:
        assert self._sock is not None, "send comes after spawn"
        with self._send_lock:
            if self._backlog:
                self._backlog.append(frame)
                return
            try:
                sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:  # the process is gone; the reader tells
                return
            if sent < len(frame):
                self._backlog.append(frame[sent:])
                threading.Thread(target=self._write_backlog, name=f"paceline-{self.name}-writer", daemon=True).start()

    def _write_backlog(self) -> None:
        assert self._sock is not None
        while True:
            try:
                self._sock.sendall(self._backlog[0])
            except OSError:
                with self._send_lock:
                    self._backlog.clear()
                return
            with self._send_lock:
                self._backlog.popleft()
                if not self._backlog:
                    return

    def _read(self) -> None:
        assert self._sock is not None
        channel = Channel(self._sock)
        failure: _Failed | None = None
        try:
            while failure is None:
                for frame in channel.receive(None):
                    if isinstance(frame, list):
                        self._on_messages(frame)
                    elif isinstance(frame, _Ready):
                        self._built.set()
                    elif isinstance(frame, _Failed):
                        failure = frame
        except (EOFError, OSError):
            pass
        if not self._built.is_set():
            died = _Failed("EngineError", f"the {self.name} worker ended while it was starting", "")
            self._failure = failure or died
            self._built.set()
        elif not self._stopping:
            if failure is not None:
                log.debug("engine %s failed:\n%s", self.name, failure.trace)
            self._on_death(f"{self.name} engine failed: {failure.message if failure else 'its process ended'}")


@contextlib.contextmanager
def _sigint_deferred() -> Iterator[None]:
    """Holds SIGINT back from what is started meanwhile, and from this thread until that is done.

    The mask is inherited by the child. It does not suffice for this process: another thread may take the signal,
    and Python runs the handler in the main thread.
    """
    arrived: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is not None:
        signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)


def _process_main(sock: socket.socket, factory_pickle: bytes, core: int | None, log_level: int) -> None:
    """Entry point of a worker process. The factory, and with it torch, is loaded only after set-up."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which decides; what this process starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    apply_worker_environment()
    logs.configure(log_level)
    threading.Thread(target=_end_with_parent, name="paceline-parent-watch", daemon=True).start()
    pin(core)
    channel = Channel(sock)

    def drain(timeout_s: float | None) -> list[Any] | None:
        messages: list[Any] = []
        for frame in channel.receive(timeout_s):
            if isinstance(frame, _Stop):
                return None
            messages.extend(frame)
        return messages

    try:
        factory: EngineFactory = pickle.loads(factory_pickle)
        engine = factory(lambda messages: channel.send(list(messages)))
        _limit_torch_threads()
        settle()
        channel.send(_Ready())
        try:
            _run(engine, drain)
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(_Failed.of(error))
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
