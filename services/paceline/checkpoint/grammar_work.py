"""Computes masks of structured outputs alongside the steps of an engine.

A step has a budget for masks, which all sessions share. A session whose masks are costly does not spend it: a thread
computes them, while the engine runs steps of other sessions. The session waits for its own mask.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.checkpoint.grammar_matcher import Matcher, StepTime

CHEAP_S = 0.002
"""A session whose last mask took more has the next one computed by the thread."""
POLL_S = 0.001
"""Time after which an engine without other work looks for masks again."""
MAX_S = 10.0
"""CPU time of one piece of costly work, beyond which its session fails. The library cannot be interrupted."""

log = logging.getLogger(__name__)


class MaskThread:
    """The thread of one engine for costly masks. It starts with the first.

    The library does not hold the interpreter lock while it compiles, consumes tokens or finds a mask.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._running: tuple[Future[object], float] | None = None
        """The running job, and the CPU time of the thread when it began."""

    def submit(self, function: Callable[[], object]) -> Future[object]:
        """Queues a function; functions run in the order of submission."""
        job: Future[object] = Future()
        self._jobs.put((job, function))
        if self._worker is None:
            self._start()
        return job

    def gives_up(self, job: Future[object]) -> bool:
        """True if a function has used ``MAX_S`` of CPU time; then a new thread runs the functions queued after it."""
        worker, running = self._worker, self._running
        if worker is None or running is None or running[0] is not job or _cpu_s(worker) - running[1] < MAX_S:
            return False
        log.error(
            "a mask of a structured output takes more than %g s: its session fails, and its thread goes on", MAX_S
        )
        self._start()
        return True

    def close(self) -> None:
        """Drops jobs that have not begun. Idempotent."""
        with contextlib.suppress(Empty):
            while (waiting := self._jobs.get_nowait()) is not None:
                waiting[0].cancel()
        self._jobs.put(None)

    def _start(self) -> None:
        self._running = None
        self._worker = threading.Thread(target=self._work, name="paceline-masks", daemon=True)
        self._worker.start()

    def _work(self) -> None:
        this = threading.current_thread()
        while self._worker is this and (waiting := self._jobs.get()) is not None:
            job, function = waiting
            self._running = job, _cpu_s(this)
            try:
                job.set_result(function())
            except Exception as error:
                job.set_exception(error)


def _cpu_s(thread: threading.Thread) -> float:
    """CPU time of a thread; where the platform does not tell, the time of the clock."""
    if hasattr(time, "pthread_getcpuclockid") and thread.ident is not None:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return time.monotonic()


class PacedMatcher:
    """A session's grammar whose costly work is done outside the steps. Owned by one engine.

    The engine asks ``ready`` before it schedules the session, and schedules it once that is true. A lenient one is
    never waited for: until it is ready it allows all tokens, as a draft may.
    """

    def __init__(
        self,
        make: Callable[[], Matcher],
        thread: MaskThread,
        step: StepTime,
        vocab_size: int,
        *,
        is_made_cheaply: bool,
        lenient: bool = False,
        ahead: bool = True,
    ) -> None:
        """Begins to make the matcher.

        Args:
            make: compiles the form, and consumes the output so far.
            thread: does costly work.
            step: the time that cheap work is charged to.
            vocab_size: ids of the masks.
            is_made_cheaply: ``make`` is called at once, and its errors are raised; else they are the ``failure``.
            lenient: all tokens are allowed where the matcher is not ready, or fails.
            ahead: cheap masks are computed by ``ready``; False: by ``masks``.
        """
        self._make, self._thread, self._step = make, thread, step
        self._lenient, self._ahead, self._num_bytes = lenient, ahead, 4 * -(-vocab_size // 32)
        self._tokens: list[int] = []
        """Committed tokens that the matcher has not consumed."""
        self._matcher: Matcher | None = None
        self._job: Future[object] | None = None
        self._fault = ""
        self._last_s = 0.0
        """Seconds that the last committed tokens and their mask took."""
        if is_made_cheaply:
            self._matcher = make()
        else:
            self._start()

    @property
    def failure(self) -> str:
        """Reason why some place could not be decided; empty if there was none."""
        return self._fault or ("" if self._matcher is None else self._matcher.failure)

    def append(self, token_ids: Sequence[int]) -> bool:
        """Commits tokens, which are consumed before the next mask. Always true: a forbidden token fails at that
        mask."""
        self._tokens += token_ids
        return True

    def ready(self) -> bool:
        """True if the mask after the committed tokens is known, or cheap. Else it is being computed."""
        if self._job is not None:
            if self._job.done():
                self._finish(self._job)
            elif self._thread.gives_up(self._job):
                self._job, self._fault = None, f"a mask takes more than {MAX_S:g} s"
            else:
                return False
        if self._is_decided:
            return True
        is_cheap = self._last_s <= CHEAP_S and self._matcher is not None and self._matcher.is_intact
        if is_cheap and self._step.allows():
            if self._ahead:
                self._run_now()
            if not self._ahead or self._is_decided:
                return True
        self._start()
        return False

    def masks(self, suffixes: Sequence[tuple[int, ...]]) -> NDArray[np.uint8]:
        """The masks of ``Matcher.masks``. Waits for work that has begun, unless this is lenient."""
        import numpy

        if self._lenient and not self.ready():
            return numpy.full((len(suffixes), self._num_bytes), 0xFF, numpy.uint8)
        if self._job is not None:
            self._finish(self._job)
        if not self._is_decided:
            self._run_now()
        if not self._is_decided:
            self._finish(self._start())
        if self._matcher is None or self._fault:
            return numpy.full((len(suffixes), self._num_bytes), 0xFF if self._lenient else 0, numpy.uint8)
        return self._matcher.masks(suffixes)

    @property
    def _is_decided(self) -> bool:
        if self._fault:
            return True
        return self._matcher is not None and not self._tokens and self._matcher.is_decided

    def _start(self) -> Future[object]:
        tokens, self._tokens = self._tokens, []
        self._job = self._thread.submit(lambda: self._advance(tokens))
        return self._job

    def _finish(self, job: Future[object]) -> None:
        self._job = None
        job.result()

    def _run_now(self) -> None:
        tokens, self._tokens = self._tokens, []
        self._advance(tokens, in_step=True)
        self._step.spent_s += self._last_s

    def _advance(self, tokens: Sequence[int], *, in_step: bool = False) -> None:
        """Consumes committed tokens and computes the mask after them; making the state again is left to the thread."""
        if self._matcher is None:
            try:
                self._matcher = self._make()
            except PacelineError as error:
                self._fault = str(error)
                return
        before, self._matcher.in_step = time.thread_time(), in_step
        if tokens:
            self._matcher.append(tokens)
        self._matcher.masks([()])
        self._last_s = time.thread_time() - before
