"""Structured outputs are tried in a process that can be killed, before an engine sees them.

What a grammar costs is known only once it is compiled, and the library cannot be interrupted. So a helper process holds
the vocabulary, and forks a child for each new form. The child compiles it and takes its first tokens under limits of
CPU time, memory and stack. A form that exceeds one is refused with the reason, and nothing else notices. Verdicts are
kept, so a form is tried once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING

from paceline.errors import EngineError, InvalidRequestError, PacelineError, ResourceExhaustedError
from paceline.types import StructuredOutput

if TYPE_CHECKING:
    from paceline.checkpoint.grammar import Grammars

MAX_CPU_S = 0.25
"""CPU time in which a form must be compiled and its first tokens be found."""
MAX_MEMORY_BYTES = 64 << 20
"""Memory that a compiled form may hold."""
MAX_WAITING = 32
"""Forms that wait to be tried, beyond which requests are refused for now."""
MAX_ADDRESS_BYTES = 512 << 20
"""Address space of a trial beyond what its process has; allocators reserve more than they use."""
_STACK_BYTES = 4 << 20
"""Half the stack of an engine's thread: a form that fits here does not exhaust that one."""
_NUM_TOKENS = 24
MAX_WALL_S = 5.0
"""Time for one trial; on a machine that is not overloaded its CPU time ends it long before."""
_START_S = 60.0
_MAX_VERDICTS = 8192
_SHARE_OF_COSTLY = 0.25
"""Part of the time in which costly forms may be accepted, since each is compiled by the engines too."""
_COSTLY_S = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial. ``reason``: why the form is refused; empty: it is accepted."""

    reason: str = ""
    cpu_s: float = 0.0
    in_time: bool = True
    """False: the machine had no time for it, which says nothing about the form."""


class GrammarTrials:
    """Tries the forms of one vocabulary. Thread-safe. Its process starts with the first form."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_lock, self._turn = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(1, "paceline-grammar")
        self._num_waiting = 0
        self._next_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    async def checked(self, form: StructuredOutput, salt: str = "") -> None:
        """``check`` without blocking the event loop."""
        key = _key(form, salt)
        if (known := self._known(key)) is not None:
            self._require(form, known)
            return
        with self._place():
            await asyncio.get_running_loop().run_in_executor(self._threads, self._decide, form, key)

    def check(self, form: StructuredOutput, salt: str = "") -> None:
        """Returns if engines may be given a form. ``salt``: verdicts are kept for requests of the same one.

        Raises InvalidRequestError with the reason if not; and ResourceExhaustedError while too many others wait for
        their trial.
        """
        key = _key(form, salt)
        if (known := self._known(key)) is not None:
            self._require(form, known)
            return
        with self._place():
            self._decide(form, key)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Holds a place in the queue. Raises ResourceExhaustedError if it is full."""
        with self._known_lock:
            if self._num_waiting >= MAX_WAITING:
                raise ResourceExhaustedError(
                    f"{self._num_waiting} structured outputs are to be compiled: at most {MAX_WAITING} may wait"
                )
            self._num_waiting += 1
        try:
            yield
        finally:
            with self._known_lock:
                self._num_waiting -= 1

    def _decide(self, form: StructuredOutput, key: bytes) -> None:
        with self._turn:
            verdict = self._known(key) or self._try(form, key)
        self._require(form, verdict)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _known(self, key: bytes) -> Verdict | None:
        with self._known_lock:
            if (found := self._verdicts.get(key)) is not None:
                self._verdicts.move_to_end(key)
            return found

    @staticmethod
    def _require(form: StructuredOutput, verdict: Verdict) -> None:
        if not verdict.in_time:
            raise ResourceExhaustedError(f"structured_output.{form.kind} could not be compiled within {MAX_WALL_S} s")
        if verdict.reason:
            raise InvalidRequestError(verdict.reason)

    def _try(self, form: StructuredOutput, key: bytes) -> Verdict:
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        try:
            verdict = self.ask(form)
        except (EOFError, OSError) as error:  # the helper process was killed from outside
            self._end()
            raise EngineError(f"structured_output.{form.kind} could not be compiled: its process ended") from error
        if verdict.cpu_s > _COSTLY_S and not verdict.reason:
            self._next_at = time.monotonic() + verdict.cpu_s * (1 / _SHARE_OF_COSTLY - 1)
        if verdict.in_time:
            with self._known_lock:
                self._verdicts[key] = verdict
                if len(self._verdicts) > _MAX_VERDICTS:
                    self._verdicts.popitem(last=False)
        return verdict

    def ask(self, form: StructuredOutput) -> Verdict:
        """Returns the verdict of the process that tries forms."""
        connection = self._connection or self._start()
        connection.send(form)
        if not connection.poll(MAX_WALL_S + _START_S):
            raise EOFError
        found: Verdict = connection.recv()
        return found

    def _start(self) -> Connection:
        vocabulary = self._grammars.vocabulary()
        ours, theirs = Pipe()
        with theirs:
            code = f"from paceline.checkpoint import grammar_trial; grammar_trial.serve({theirs.fileno()})"
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=env | {"TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = ours
        ours.send(vocabulary)
        return ours

    def _end(self) -> None:
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if process is not None:
            process.kill()  # who waits for its answer meets the end of the connection
            process.wait()
        if connection is not None:
            connection.close()


def _key(form: StructuredOutput, salt: str) -> bytes:
    return hashlib.sha256("\0".join((form.kind, str(len(salt)), salt, form.text)).encode()).digest()


def serve(descriptor: int) -> None:
    """The helper process: reads the vocabulary, then answers each form with a ``Verdict``, until its caller ends."""
    import numpy  # noqa: F401  # what all forms need is there before the first fork

    from paceline.checkpoint.grammar import Grammars

    with contextlib.suppress(EOFError, OSError), Connection(descriptor) as connection:
        grammars = Grammars(*connection.recv())
        with contextlib.suppress(InvalidRequestError):  # a vocabulary that cannot write it
            grammars.matcher(StructuredOutput(json_object=True)).masks([()])
        gc.collect()
        gc.freeze()
        while True:
            connection.send(try_in_child(grammars, connection.recv()))


def try_in_child(grammars: Grammars, form: StructuredOutput) -> Verdict:
    """Returns the verdict on a form that a forked process compiles."""
    reader, writer = Pipe(duplex=False)
    with reader:
        if (child := os.fork()) == 0:
            _in_child(grammars, form, writer)
        writer.close()
        in_time, verdict = reader.poll(MAX_WALL_S), None
        if in_time:
            with contextlib.suppress(EOFError):
                verdict = reader.recv()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    cpu_s = usage.ru_utime + usage.ru_stime
    if verdict is not None:
        return Verdict(verdict, cpu_s)
    if not in_time:
        return Verdict(in_time=False)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if not ended_by:
        raise RuntimeError(f"the trial of a structured output ended with status {status}")
    if ended_by == signal.SIGPROF:
        cost = f"takes more than {round(MAX_CPU_S * 1000)} ms to compile"
    else:
        cost = f"nests too deep, or takes more than {MAX_ADDRESS_BYTES >> 20} MiB"
    return Verdict(f"structured_output.{form.kind} {cost}: {_ADVICE}", cpu_s)


_ADVICE = "it needs fewer rules, properties or alternatives, or smaller numbers"


def _in_child(grammars: Grammars, form: StructuredOutput, writer: Connection) -> None:
    import resource

    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library prints before it aborts
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (pages := _pages()) is not None:
            limit = pages[0] * resource.getpagesize() + MAX_ADDRESS_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        threading.stack_size(_STACK_BYTES)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(_try_out(grammars, form)))
        thread.start()
        thread.join()
        writer.send(found[0])
        status = 0
    finally:
        os._exit(status)


def _try_out(grammars: Grammars, form: StructuredOutput) -> str:
    """Compiles a form and follows some output of it: why it is refused, or nothing."""
    import numpy

    before, rng = _pages(), random.Random(0)
    try:
        state = grammars.matcher(form)
    except PacelineError as error:
        return str(error)
    except MemoryError:
        os.abort()  # as the library does
    for _ in range(_NUM_TOKENS):
        if time.process_time() > MAX_CPU_S / 2:
            break
        allowed = numpy.unpackbits(state.masks([()])[0], bitorder="little").nonzero()[0]
        if state.failure:
            return f"structured_output.{form.kind} cannot be followed: {state.failure}: {_ADVICE}"
        if not len(allowed) or not state.append((int(rng.choice(allowed)),)):
            break
    after = _pages()
    if before is not None and after is not None:
        held = (after[1] - before[1]) * os.sysconf("SC_PAGE_SIZE")
        if held > MAX_MEMORY_BYTES:
            limit = MAX_MEMORY_BYTES >> 20
            return f"structured_output.{form.kind} takes {held >> 20} MiB: at most {limit} are allowed: {_ADVICE}"
    return ""


def _pages() -> tuple[int, int] | None:
    """Returns (pages of this process's address space, pages in memory); None if the platform does not report them."""
    try:
        with open("/proc/self/statm") as file:
            total, resident = file.read().split()[:2]
    except OSError:
        return None
    return int(total), int(resident)
