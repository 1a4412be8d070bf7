"""A request in progress, as its caller sees it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from paceline.errors import PacelineError
from paceline.router.session import Actions, Chunk, Result, Session


class Generation:
    """A request in progress: iterate over its chunks, then read ``result``. One consumer."""

    def __init__(self, session: Session, cancel: Callable[[Generation], None]) -> None:
        self.session = session
        self._cancel = cancel
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._error: PacelineError | None = None

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """The next chunk, waiting for it. Raises EngineError if the target is lost."""
        chunk = self._chunks.get()
        if chunk is not None:
            return chunk
        self._chunks.put(None)  # every later call ends, too
        if self._error is not None:
            raise self._error
        raise StopIteration

    @property
    def result(self) -> Result:
        """The finished session, waiting for it. Raises EngineError if the target was lost."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self.session.result is not None
        return self.session.result

    @property
    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Ends the request now; what has arrived is its result, finish_reason ``abort``."""
        self._cancel(self)

    def deliver(self, actions: Actions) -> bool:
        """For the pipeline: passes chunks on; True if the session is finished."""
        for chunk in actions.chunks:
            self._chunks.put(chunk)
        if actions.result is not None:
            self._finish()
        return actions.result is not None

    def fail(self, error: PacelineError) -> None:
        """For the pipeline: ends the request with an error."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done.set()
        self._chunks.put(None)
