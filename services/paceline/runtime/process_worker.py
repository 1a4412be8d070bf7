"""Engines in a process of their own.

The worker talks to its process over a socket pair: one pickled list of messages per frame. It owns the process, the
socket and its threads, and ends them in ``stop``. A process whose parent dies ends itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Generic

from paceline import logs
from paceline.config import apply_worker_environment
from paceline.config.memory import tune_engine_process
from paceline.errors import PacelineError, as_paceline_error, by_name
from paceline.runtime.pipe import Channel
from paceline.runtime.workers import (
    Emit,
    EngineFactory,
    Facts,
    In,
    Out,
    Stop,
    available_cores,
    limit_torch_threads,
    pin,
    run,
)

log = logging.getLogger(__name__)
stages = logging.getLogger(logs.STAGES)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The engine is built."""

    facts: Facts


@dataclass(frozen=True, slots=True)
class _Stage:
    """The phase of the engine's process, while it builds the engine."""

    doing: str


@dataclass(frozen=True, slots=True)
class _Ping:
    """Asks the engine's process to answer with a pong, between two steps."""


@dataclass(frozen=True, slots=True)
class _Pong:
    """Answers a ping."""

    facts: Facts


class _Stages(logging.Handler):
    """Sends the stages of this process to its parent."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        # What has an engine is done by another rank, which this process has started; the rest is no stage.
        if not hasattr(record, "engine") and not hasattr(record, "execution"):
            self._channel.send(_Stage(record.getMessage()))


@dataclass(frozen=True, slots=True)
class _Failed:
    """The error that ended the engine, as text: not every error can be pickled."""

    error_name: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> _Failed:
        """Describes an error."""
        own = as_paceline_error(error)
        return cls(type(own).__name__, str(own), "".join(traceback.format_exception(error)))

    def to_error(self) -> PacelineError:
        """Rebuilds the error."""
        return by_name(self.error_name)(self.message)


class ProcessWorker(Generic[In, Out]):
    """An engine in a process of its own (spawned). Its messages are delivered in a reader thread here."""

    def __init__(
        self,
        name: str,
        factory: EngineFactory[Out, In],
        on_messages: Emit[Out],
        on_death: Callable[[str], None],
        cores: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._on_messages, self._on_death = on_messages, on_death
        self._factory, self._cores = factory, cores
        self._facts: Facts = {}
        self._sock: socket.socket | None = None
        self._process: BaseProcess | None = None
        self._built = threading.Event()
        self._stopping = False
        self._pinged = False  # and not answered yet
        self._failure: _Failed | None = None
        self._send_lock = threading.Lock()
        self._backlog: deque[bytes] = deque()  # frames that the socket had no room for, in order
        self._reader = threading.Thread(target=self._read, name=f"paceline-{name}-reader", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id, None before ``spawn``."""
        return None if self._process is None else self._process.pid

    def spawn(self) -> None:
        self._sock, child_sock = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_process_main,
            args=(child_sock, pickle.dumps(self._factory), self._cores, logs.level()),
            name=f"paceline-{self.name}",
            daemon=True,
        )
        resource_tracker.ensure_running()  # started by the first worker otherwise, and that unblocks SIGINT again
        with _sigint_deferred(), child_sock:  # the child ignores it from its first line on
            self._process.start()
            self._reader.start()

    def wait_ready(self) -> None:
        self._built.wait()
        if self._failure is not None:
            log.debug("engine %s could not be built:\n%s", self.name, self._failure.trace)
            raise self._failure.to_error()

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def send(self, messages: Sequence[In]) -> None:
        """Sends messages. A helper thread writes the bytes for which the socket has no room, so a relay never
        blocks.
        """
        self._send_frame(Channel.frame(messages))

    @property
    def alive(self) -> bool:
        return self._reader.is_alive()

    def came_round(self) -> bool:
        if self._pinged:
            return False
        self._pinged = True
        self._send_frame(Channel.frame(_Ping()))
        return True

    @property
    def facts(self) -> Facts:
        return self._facts

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping = True
        if self._process is not None and self._process.pid is not None:
            self._send_frame(Channel.frame(Stop()))
            self._process.join(timeout_s)
            if self._process.is_alive():
                self._kill(self._process.pid)
                self._process.join()
            if self._reader.ident is not None and self._reader is not threading.current_thread():
                self._reader.join(timeout_s)
        if self._sock is not None:
            self._sock.close()

    def _beside(self) -> list[int]:
        """Cores for the thread that receives the engine's messages: all but the engine's own, if it has several.

        Linux wakes the reader of a socket on the writer's core, where it would have to wait. The other cores rest at
        that time.
        """
        return [core for core in available_cores() if core != self._cores[0]] if len(self._cores) > 1 else []

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
        pin(self._beside())
        channel = Channel(self._sock)
        failure: _Failed | None = None
        try:
            while failure is None:
                for frame in channel.receive(None):
                    if isinstance(frame, list):
                        self._on_messages(frame)
                    elif isinstance(frame, _Pong):
                        self._pinged, self._facts = False, frame.facts
                    elif isinstance(frame, _Stage):
                        stages.info("%s", frame.doing, extra={"engine": self.name})
                    elif isinstance(frame, _Ready):
                        self._facts = frame.facts
                        stages.info(logs.BUILT, extra={"engine": self.name})
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
    """Defers SIGINT within the block, for this thread and for processes that are started in it.

    The mask is inherited by the child. It does not suffice for this process: another thread may take the signal, and
    Python runs the handler in the main thread.
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


def _process_main(sock: socket.socket, factory_pickle: bytes, cores: Sequence[int], log_level: int) -> None:
    """Entry point of a worker process. The factory, and with it torch, is loaded only after set-up."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which decides; what this process starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    apply_worker_environment()
    logs.configure(log_level)
    threading.Thread(target=_end_with_parent, name="paceline-parent-watch", daemon=True).start()
    pin(cores)
    channel = Channel(sock)

    def drain(timeout_s: float | None) -> list[Any] | None:
        messages: list[Any] = []
        for frame in channel.receive(timeout_s):
            if isinstance(frame, Stop):
                return None
            if isinstance(frame, _Ping):
                channel.send(_Pong(engine.facts()))
            else:
                messages.extend(frame)
        return messages

    try:
        with _stages_told(_Stages(channel)):
            factory: EngineFactory[Any, Any] = pickle.loads(factory_pickle)
            engine = factory(lambda messages: channel.send(list(messages)))
        limit_torch_threads()
        tune_engine_process()
        channel.send(_Ready(engine.facts()))
        try:
            run(engine, drain)
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(_Failed.of(error))
        os._exit(1)


@contextlib.contextmanager
def _stages_told(handler: logging.Handler) -> Iterator[None]:
    """Stages go to the parent during the block. They are logged there: it is the one that may show them."""
    stages.addHandler(handler)
    stages.setLevel(logging.INFO)
    stages.propagate = False
    try:
        yield
    finally:
        stages.removeHandler(handler)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
