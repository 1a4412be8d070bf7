"""A process of its own that answers what it is sent over a pipe, so that it is idle while others are measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, Self

from paceline.config import apply_worker_environment
from paceline.errors import EngineError
from paceline.runtime.workers import pin

Prepare = Callable[..., AbstractContextManager[Callable[[Any], Any]]]
"""Sets the process up; its context gives the function that answers."""
_STOP_TIMEOUT_S = 10.0


class Child:
    """The process and the pipe to it. A context manager, which waits until the process is prepared."""

    def __init__(self, name: str, core: int | None, prepare: Prepare, *args: Any) -> None:
        """``core``: what all threads of the process are pinned to; None: wherever the system puts them."""
        context = multiprocessing.get_context("spawn")
        self._connection, self._child = context.Pipe()
        self._process = context.Process(
            target=_main, args=(self._child, core, prepare, *args), name=f"paceline-{name}", daemon=True
        )

    def __enter__(self) -> Self:
        self.start()
        try:
            self.receive()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process; the first ``receive`` returns once it is prepared."""
        self._process.start()
        self._child.close()

    def send(self, work: Any) -> None:
        """Sends something to be answered."""
        self._connection.send(work)

    def receive(self) -> Any:
        """The next answer.

        Raises:
            EngineError: the process failed or ended.
        """
        try:
            answer = self._connection.recv()
        except EOFError:
            raise EngineError(f"{self._process.name} ended") from None
        if isinstance(answer, str):
            raise EngineError(f"{self._process.name} failed: {answer}")
        return answer

    def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


def _main(connection: Connection, core: int | None, prepare: Prepare, *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    apply_worker_environment()
    pin(() if core is None else (core,))  # before any thread starts: they inherit it
    try:
        with prepare(*args) as answer:
            connection.send(True)
            while (work := connection.recv()) is not None:
                connection.send(answer(work))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
