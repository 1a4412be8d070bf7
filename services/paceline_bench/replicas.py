"""Devices used without disaggregation: a whole replica on each of two cores, each with half of the sessions.

    core 0   target (and draft) ◀─ even requests        core 1   target (and draft) ◀─ odd requests

``replicated`` decodes plainly, ``colocated`` speculates sequentially with a draft on the target's own core. The
processes wait in ``recv`` between units, so they are idle while anything else is measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from paceline.config import LocalConfig
from paceline.local import LocalPipeline
from paceline.runtime.workers import available_cores
from paceline.types import Mode, SpeculationParams
from paceline_bench.children import Child
from paceline_bench.jobs import Job, Reply, run_jobs
from paceline_bench.steps import WatchedFactory, timed_draft, timed_target

NUM_REPLICAS = 2
"""Number of replicas, equal to the devices of a target and its draft."""
MODES = {"replicated": Mode.PLAIN, "colocated": Mode.SEQUENTIAL}
"""Mode of each replica, by the name of the baseline."""


class Replicas:
    """The processes. A context manager."""

    def __init__(self, config: LocalConfig) -> None:
        """``config`` is that of one replica."""
        config = config.model_copy(update={"worker": "thread", "pin_cores": False})
        cores = available_cores()
        self._members = [
            Child(f"replica-{i}", cores[i] if len(cores) >= NUM_REPLICAS else None, _replica, config)
            for i in range(NUM_REPLICAS)
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for member in self._members:
                member.start()
                stack.callback(member.stop)
            for member in self._members:
                member.receive()  # built
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, jobs: Sequence[Job], params: SpeculationParams) -> list[Reply]:
        """Runs job i on replica i modulo NUM_REPLICAS, all of them concurrently.

        Raises:
            EngineError: a replica failed.
        """
        for i, member in enumerate(self._members):
            member.send((jobs[i::NUM_REPLICAS], params))
        replies: list[Reply | None] = [None] * len(jobs)
        for i, member in enumerate(self._members):
            replies[i::NUM_REPLICAS] = member.receive()
        return [reply for reply in replies if reply is not None]


@contextlib.contextmanager
def _replica(config: LocalConfig) -> Iterator[Callable[[tuple[Sequence[Job], SpeculationParams]], list[Reply]]]:
    nowhere, draft = Path(os.devnull), config.draft_setup()
    with LocalPipeline(
        config,
        target_factory=WatchedFactory(config.target_setup(), nowhere, timed_target),  # for its empty prefix cache
        draft_factory=None if draft is None else WatchedFactory(draft, nowhere, timed_draft),
    ) as pipeline:
        yield lambda work: run_jobs(pipeline, *work)
