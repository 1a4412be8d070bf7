"""The same devices used without disaggregation: a whole replica on each of two cores, each with half of the sessions.

    core 0   target (and draft) ◀─ even requests        core 1   target (and draft) ◀─ odd requests

``replicated`` decodes plainly, ``colocated`` speculates in lock step with a draft on the target's own core. The
processes wait in ``recv`` between units, so they are idle while anything else is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from paceline.config import LocalConfig, apply_worker_environment
from paceline.errors import EngineError
from paceline.local import LocalPipeline
from paceline.runtime.workers import available_cores, pin
from paceline.types import Acceptance, Chunk, Mode, SamplingParams, SpeculationParams
from paceline_bench.prompts import Prompt
from paceline_bench.records import RoundRecord
from paceline_bench.steps import TimedDraftFactory, TimedTargetFactory

NUM_REPLICAS = 2
"""As many devices as a target and its draft have."""
MODES = {"replicated": Mode.PLAIN, "colocated": Mode.SEQUENTIAL}
"""What each replica does."""
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request for a pipeline."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """What it gave. Times of rounds: seconds since all jobs were submitted."""

    token_ids: tuple[int, ...]
    rounds: tuple[RoundRecord, ...]
    prefill_s: float
    decode_s: float


def speculation(mode: Mode, draft_tokens: int, acceptance: Acceptance, growth: str) -> SpeculationParams:
    """``draft_tokens``: K; ignored in plain mode."""
    return SpeculationParams.model_validate(
        {"mode": mode, "acceptance": acceptance, "max_draft_tokens": draft_tokens, "growth": growth}
    )


def run_jobs(pipeline: LocalPipeline, jobs: Sequence[Job], params: SpeculationParams) -> list[Reply]:
    """Runs all jobs at once. Raises what the pipeline raises."""
    started = time.perf_counter()
    runs = []
    for job in jobs:
        generation = pipeline.submit(job.prompt.token_ids, job.sampling, params)
        chunks: list[tuple[Chunk, float]] = []

        def collect(generation: Iterator[Chunk], chunks: list[tuple[Chunk, float]]) -> None:
            with contextlib.suppress(EngineError):  # ``result`` raises it
                for chunk in generation:
                    chunks.append((chunk, time.perf_counter() - started))

        reader = threading.Thread(target=collect, args=(generation, chunks), daemon=True)
        reader.start()
        runs.append((generation, chunks, reader))
    replies = []
    for generation, chunks, reader in runs:
        result = generation.result
        reader.join()
        rounds = tuple(
            RoundRecord(c.round.num_drafted, c.round.num_accepted, len(c.token_ids), c.round.cause.value, at)
            for c, at in chunks
            if c.round is not None
        )
        replies.append(Reply(result.token_ids, rounds, result.timing.prefill_s, result.timing.decode_s))
    return replies


class Replicas:
    """The processes. A context manager."""

    def __init__(self, config: LocalConfig) -> None:
        """``config``: of one replica."""
        config = config.model_copy(update={"worker": "thread", "pin_cores": False})
        cores = available_cores()
        self._members = [
            _Member(config, cores[i] if len(cores) >= NUM_REPLICAS else None, i) for i in range(NUM_REPLICAS)
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for member in self._members:
                member.process.start()
                stack.callback(member.stop)
            for member in self._members:
                member.receive()  # built
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, jobs: Sequence[Job], params: SpeculationParams) -> list[Reply]:
        """Job i goes to replica i modulo NUM_REPLICAS, all of them at once. Raises EngineError."""
        for i, member in enumerate(self._members):
            member.connection.send((jobs[i::NUM_REPLICAS], params))
        replies: list[Reply | None] = [None] * len(jobs)
        for i, member in enumerate(self._members):
            replies[i::NUM_REPLICAS] = member.receive()
        return [reply for reply in replies if reply is not None]


class _Member:
    """One replica's process and the pipe to it."""

    def __init__(self, config: LocalConfig, core: int | None, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, self._child = context.Pipe()
        self.process = context.Process(
            target=_main, args=(self._child, config, core), name=f"paceline-replica-{number}", daemon=True
        )

    def receive(self) -> Any:
        """The next answer. Raises EngineError if the process failed."""
        self._child.close()
        try:
            answer = self.connection.recv()
        except EOFError:
            raise EngineError(f"{self.process.name} ended") from None
        if isinstance(answer, str):
            raise EngineError(f"{self.process.name} failed: {answer}")
        return answer

    def stop(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(_STOP_TIMEOUT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _main(connection: Connection, config: LocalConfig, core: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    apply_worker_environment()
    pin(core)  # before any thread starts: they inherit it
    nowhere = Path(os.devnull)
    try:
        with LocalPipeline(
            config,
            target_factory=TimedTargetFactory(config.target_setup(), nowhere),  # for its empty prefix cache
            draft_factory=TimedDraftFactory(draft, nowhere) if (draft := config.draft_setup()) is not None else None,
        ) as pipeline:
            connection.send(True)
            while (work := connection.recv()) is not None:
                jobs, params = work
                connection.send(run_jobs(pipeline, jobs, params))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
