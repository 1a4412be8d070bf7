"""Compiles a model in a second process, while the engine serves it eagerly.

    engine   eager steps ───────────────────────────────┬▶ compiled steps
               │ CompileJob                             │ take
    worker     └▶ load ▶ compile ▶ self-test ▶ artifact ┘

The worker (``worker.py``) is a separate process of low priority on any core, because a compilation would block the
engine's interpreter for a minute. It shares only the cache of compiled models with the engine. A thread of the engine's
process loads the step from there once it is built. The worker ends with the engine; one that is detached finishes, for
the next start. The engine decides when to *take* the step, since sessions that began eagerly must keep their bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from paceline.config import ModelOptions, worker_environment
from paceline.errors import EngineError
from paceline.model.compiled.backend import StepFunction
from paceline.model.features import Features
from paceline.types import Execution

log = logging.getLogger(__name__)
stages = logging.getLogger("paceline.startup")


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Sizes of the self-test that a compiled step has to pass (``selftest.check_invariance``)."""

    max_len: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The task of a worker; it is sent as a pickle."""

    source: str
    options: ModelOptions
    features: Features | None = None
    """The states that the step returns in addition to the logits."""
    test: SelfTest | None = None
    """Test that the compiled step must pass; None: it is used untested, as for a draft."""
    cores: frozenset[int] = frozenset()
    """Cores that the worker may run on; empty: the cores of the process that starts it."""
    callback_boundary: int | None = None
    """The boundary whose states a listener may receive during the step; None: no listener."""
    max_model_len: int | None = None
    """The longest context; None: the model's own limit."""

    @classmethod
    def of(
        cls,
        source: str,
        options: ModelOptions,
        features: Features | None = None,
        test: SelfTest | None = None,
        callback_boundary: int | None = None,
        max_model_len: int | None = None,
    ) -> Self:
        """Makes the job for a model of this process. It may run on all cores. Of ``options`` it keeps the model's own
        fields.
        """
        own = ModelOptions(**options.model_dump(include=set(ModelOptions.model_fields)))
        return cls(source, own, features, test, all_cores(), callback_boundary, max_model_len)

    @property
    def detached(self) -> bool:
        """True if the worker finishes after its engine has ended."""
        return self.options.background_compilation == "detached"

    @property
    def digest(self) -> str:
        """Digest that is equal for all jobs that compile the same step, on any cores."""
        facts = (self.source, self.options.model_dump_json(), self.features, self.callback_boundary, self.max_model_len)
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class Compilation:
    """A running compilation of one model. Only ``execution`` may be read from other threads than the engine's."""

    def __init__(self, job: CompileJob, load: Callable[[], StepFunction | None]) -> None:
        """Starts nothing yet. ``load``: returns the step once it is in the cache, called in a thread of its own."""
        self.execution: Execution = "compiling"
        """``compiling``, then ``compiled`` or ``failed``. Any thread may read it."""
        self._job = job
        self._load: Callable[[], StepFunction | None] | None = load
        self._step: StepFunction | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="paceline-compilation", daemon=True)

    def start(self) -> None:
        """Starts the worker. What goes wrong is a warning, and leaves ``execution`` at ``failed``."""
        self._thread.start()

    def take(self) -> StepFunction | None:
        """The compiled step, once; None: it is not there, or has been taken."""
        step, self._step = self._step, None
        return step

    def wait(self) -> None:
        """Returns when the step is there, or will never be. ``start`` comes first."""
        self._thread.join()

    def close(self) -> None:
        """Ends the worker, unless it is detached. Idempotent; the last call."""
        with self._lock:
            self._closed = True
            process = self._process
        if self._job.detached:
            return
        if process is not None:
            _kill(process)
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def _follow(self) -> None:
        started = time.perf_counter()
        try:
            found = self._result()
            assert self._load is not None
            step = self._load()
            if step is None:
                raise EngineError("the compiled artifact belongs to other weights than the loaded ones")
        except Exception as error:
            if not self._closed:
                self._ended("failed")
                log.warning("model %r could not be compiled and stays eager: %s", self._job.source, error)
            return
        finally:
            self._load = None  # it holds the eager model
        self._step = step
        self._ended("compiled")
        log.info("model %r is compiled, after %.0f s%s", self._job.source, time.perf_counter() - started, found)

    def _ended(self, execution: Execution) -> None:
        self.execution = execution
        stages.info("%s", execution, extra={"execution": execution})

    def _result(self) -> str:
        """The findings of the worker, for the log. Raises EngineError if it has failed, with its reason."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine has ended")
            self._process = process = spawn()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: the status says why
                pickle.dump(self._job, process.stdin)
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5.0)
        finally:
            _kill(process)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what it did not read is lost
                    pipe.close()
        if not line:
            raise EngineError(f"the process that compiles it ended with status {process.returncode}")
        result = json.loads(line)
        if result["error"]:
            raise EngineError(result["error"])
        return f": {result['test']}" if result["test"] else ""


def all_cores() -> frozenset[int]:
    """The cores of all threads of this process: the calling one may be pinned to one of them."""
    cores: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                cores |= os.sched_getaffinity(int(task.name))
    return frozenset(cores)


def spawn() -> subprocess.Popen[bytes]:
    """The worker, in a session of its own, which signals of a terminal do not reach."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.model.compiled.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=worker_environment(PYTHONPATH=path),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker and the compilers that it runs, and collects its status."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
