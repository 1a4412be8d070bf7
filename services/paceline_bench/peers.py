"""Other engines on the same cores, with the target's and the draft's own checkpoints: ``--peer``.

    openvino     OpenVINO GenAI, plain and with the draft model
    vllm         vLLM on the CPU, the same

Each runs in the environment that it is installed in, by ``peer_worker.py``: nothing of it is a dependency. There is a
process for every number of cores, and for every K of an engine that is built for one. It is stopped while others are
measured, so that no thread of it spins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from paceline.config import cache_dir
from paceline.errors import EngineError
from paceline.logs import narrate
from paceline_bench import peer_worker
from paceline_bench.jobs import Reply
from paceline_bench.records import RoundRecord
from paceline_bench.settings import Peer

_K_OF_A_REQUEST = ("openvino",)
"""Engines that take K with each request; others are built for one."""
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """The jobs that a process is started for; ``peer_worker.py`` reads these names."""

    engine: str
    target: str
    draft: str
    """Empty: it decodes plainly."""
    draft_tokens: int
    """K; 0 where requests bring it, or nothing is drafted."""
    cores: tuple[int, ...]
    dtype: str
    sessions: int
    cache: str = field(default_factory=lambda: str(cache_dir()))


@dataclass(frozen=True, slots=True)
class Unit:
    """Prompts that are submitted together; ``peer_worker.py`` reads these names."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    """Limit of each prompt."""
    temperature: float
    seed: int
    draft_tokens: int
    """K; 0: plain decoding."""


def start_of(
    peer: Peer, models: tuple[str, str], draft_tokens: int, cores: Sequence[int], dtype: str, sessions: int
) -> Start:
    """The process that serves an engine with K draft tokens; ``models``: the target's checkpoint and the draft's."""
    target, draft = models
    k = 0 if peer.engine in _K_OF_A_REQUEST else draft_tokens
    return Start(peer.engine, target, draft if draft_tokens else "", k, tuple(cores), dtype, sessions)


class PeerProcess:
    """A process of a peer. A context manager, which waits until the engine is up."""

    def __init__(self, python: str, start: Start) -> None:
        self._start = start
        self._command = [python, "-B", peer_worker.__file__, json.dumps(asdict(start))]

    def __enter__(self) -> Self:
        start = self._start
        narrate(f"starting {start.engine} on {len(start.cores)} cores" + (" with the draft" if start.draft else ""))
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=_environment(self._command[0], start),
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise EngineError(f"{start.engine} cannot be started: {error}") from error
        try:
            self._receive()
            os.killpg(self._process.pid, signal.SIGSTOP)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def generate(self, unit: Unit) -> list[Reply]:
        """Runs a unit; one reply per prompt.

        Raises:
            EngineError: the process failed or ended.
        """
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(unit)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        answers = self._receive()["answers"]
        os.killpg(self._process.pid, signal.SIGSTOP)
        return [_reply(answer) for answer in answers]

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure("ended")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise self._failure(f"failed: {found['error']}")
        return found

    def _failure(self, what: str) -> EngineError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        return EngineError(f"{self._start.engine} {what}" + (f" (its last words: {said[-1]})" if said else ""))

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and whatever it has started
        self._process.wait()
        self._log.close()


def _reply(answer: dict[str, Any]) -> Reply:
    rounds = (RoundRecord(0, 0, n, "", at) for n, at in zip(answer["sizes"], answer["times_s"], strict=True))
    return Reply.timed_by_rounds(tuple(answer["token_ids"]), tuple(rounds))


def _environment(python: str, start: Start) -> dict[str, str]:
    """As each project recommends for a CPU; the threads of OpenVINO are set by its options."""
    known = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    if start.engine != "vllm":
        return known
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    return known | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, start.cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}),
    }
