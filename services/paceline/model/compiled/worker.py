"""The process that compiles a model while its engine serves it: see ``background.py``.

Reads a ``CompileJob`` from standard input, compiles into the cache, and writes one line of JSON: ``{"error": text or
null, "test": text or null}``. It ends when standard input does, with all that it has started. A detached one finishes
what it has begun then: it ends only while another worker has the same job.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator

from paceline.config import cache_dir
from paceline.errors import ConfigError, PacelineError
from paceline.model.compiled.background import CompileJob

_NICENESS = 10
"""A tenth of a core that an engine wants, too; all of a core that nobody else wants."""
_TEST_PAGES = 64
"""KV pages of the self-test."""


def main() -> None:
    """Runs the worker. Prints nothing but its result: what libraries print goes nowhere."""
    result, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    job: CompileJob = pickle.load(sys.stdin.buffer)
    finishes = threading.Event()
    threading.Thread(target=_end_with_parent, args=[finishes], daemon=True).start()
    os.nice(_NICENESS)
    if job.cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # cores that went offline
            os.sched_setaffinity(0, job.cores)
    error = test = None
    try:
        with contextlib.ExitStack() as stack:
            if job.detached:  # one worker for each job, however many engines end before it
                stack.enter_context(_locked(f"{job.digest}.job"))
                finishes.set()
            stack.enter_context(_locked("worker"))  # many replicas do not compile side by side
            test = perform(job)
    except PacelineError as refusal:
        error = str(refusal)
    except Exception as unexpected:  # whatever the exporter and the compiler raise
        error = f"{type(unexpected).__name__}: {str(unexpected).strip().partition(chr(10))[0]}"
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(result, json.dumps({"error": error, "test": test}).encode() + b"\n")


def perform(job: CompileJob) -> str | None:
    """Compiles a model, and tests what came of it; the finding in words, None without a test.

    Raises:
        ConfigError: the model cannot be loaded or compiled, or verification and decoding differ in a bit.
    """
    import torch

    from paceline.checkpoint.files import Checkpoint
    from paceline.model.loading import load_model
    from paceline.model.selftest import check_invariance

    torch.set_num_threads(1)
    options = job.options.model_copy(update={"compile": True})
    checkpoint = Checkpoint.open(job.source, options.trust_remote_code)
    model = load_model(
        checkpoint,
        options,
        features=job.features,
        callback_boundary=job.callback_boundary,
        max_model_len=job.max_model_len,
    )
    if job.test is None:
        return None
    report = check_invariance(model.runner(_TEST_PAGES), job.test.max_len, job.test.max_step_tokens)
    if not report.holds:
        raise ConfigError(f"the compiled model is {report}")
    return str(report)


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Waits for the worker of this machine that holds the lock of this name, and holds it."""
    folder = cache_dir() / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _end_with_parent(finishes: threading.Event) -> None:
    sys.stdin.buffer.read()
    if not finishes.is_set():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
