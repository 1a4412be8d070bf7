"""The ranks of a tensor-parallel replica, seen from outside: where they meet, and a worker for each.

    RankedWorker ── leader     (thread or process)   the engine
                 └─ followers  (a process each)      its other ranks

Starts without torch; the ranks themselves are in ``model/parallel/runner.py``.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal

from paceline.config import DraftSetup, LocalConfig, ModelOptions, TargetSetup
from paceline.errors import EngineError, PacelineError
from paceline.runtime.build import EngineSpec
from paceline.runtime.process_worker import ProcessWorker
from paceline.runtime.workers import Emit, Facts, In, ThreadWorker, Worker, available_cores
from paceline.types import Rendezvous

log = logging.getLogger(__name__)


MakeWorker = Callable[[Callable[[str], None]], Worker[In]]
"""Makes a worker that calls its argument with the reason when its engine dies."""
MakeFollower = MakeWorker[object]
"""Makes the worker of a rank that is not the first: nothing is sent to it."""


def ranked_worker(
    leader: MakeWorker[In], followers: Sequence[MakeFollower], on_death: Callable[[str], None]
) -> Worker[In]:
    """Makes one worker for all ranks of an engine."""
    return RankedWorker(leader, followers, on_death) if followers else leader(on_death)


class RankedWorker(Generic[In]):
    """An engine of several ranks as one worker: messages go to the leader; if any rank ends, all do."""

    def __init__(
        self, leader: MakeWorker[In], followers: Sequence[MakeFollower], on_death: Callable[[str], None]
    ) -> None:
        """Makes the workers of all ranks, without starting them."""
        self._on_death = on_death
        self._leader = leader(self._died)
        self.name = self._leader.name
        self._followers = [make(self._died) for make in followers]
        self._lock = threading.Lock()
        self._failure: PacelineError | None = None
        self._ready = False
        self._stopping = False
        self._settled = threading.Event()

    def spawn(self) -> None:
        for worker in (*self._followers, self._leader):
            worker.spawn()
        for worker in (*self._followers, self._leader):
            threading.Thread(
                target=self._watch, args=(worker,), name=f"paceline-{worker.name}-start", daemon=True
            ).start()

    def wait_ready(self) -> None:
        """Waits until every rank is ready (``Worker``). Ends as soon as one of the ranks has failed."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def send(self, messages: Sequence[In]) -> None:
        self._leader.send(messages)

    @property
    def alive(self) -> bool:
        return self._leader.alive and self._failure is None

    def came_round(self) -> bool:
        return self._leader.came_round()  # which notices ranks that hang (rank_timeout_s)

    @property
    def facts(self) -> Facts:
        return self._leader.facts

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stops all ranks (``Worker.stop``). The leader leaves first, which ends the followers."""
        self._stopping = True
        self._leader.stop(timeout_s)
        for worker in self._followers:
            worker.stop(timeout_s)

    def _watch(self, worker: Worker[In]) -> None:
        try:
            worker.wait_ready()
        except PacelineError as error:
            with self._lock:
                self._failure = self._failure or error
            self._settled.set()
            return
        if worker is self._leader:
            self._ready = True
            self._settled.set()

    def _died(self, reason: str) -> None:
        with self._lock:
            first, self._failure = self._failure is None, self._failure or EngineError(reason)
        self._settled.set()
        if first and self._ready and not self._stopping:
            self._on_death(reason)
        elif not self._stopping:
            log.info("%s", reason)


def sharded_options(setup: TargetSetup | DraftSetup | None) -> ModelOptions | None:
    """The options of an engine's model, if there is one and it has several ranks."""
    options = setup and setup.options
    return options if isinstance(options, ModelOptions) and options.tensor_parallel_size > 1 else None


def meeting_file() -> str:
    """Returns a new rendezvous of this host, as ``Rendezvous.store`` names it."""
    return f"file:{Path(tempfile.gettempdir()) / f'paceline-ranks-{secrets.token_hex(8)}'}"


def process_ranks(
    setup: TargetSetup | DraftSetup | None, cores: Sequence[int] = ()
) -> tuple[Rendezvous | None, list[MakeFollower]]:
    """Returns where the engine's ranks meet on this host, and makers of a process for each but the first.

    ``cores``: to pin the followers to, if there are enough.
    """
    options = sharded_options(setup)
    if setup is None or options is None:
        return None, []
    degree = options.tensor_parallel_size
    rendezvous = Rendezvous(meeting_file(), degree, timeout_s=options.rank_timeout_s)
    pinned: list[Sequence[int]] = [(core,) for core in cores] if len(cores) >= degree - 1 else [()] * degree

    def maker(rank: int) -> MakeFollower:
        spec = EngineSpec(setup, rendezvous.of(rank))
        name = rank_name(spec.kind, rank)
        return lambda on_death: ProcessWorker(name, spec.build, _ignore, on_death, pinned[rank - 1])

    return rendezvous, [maker(rank) for rank in range(1, degree)]


def local_worker(
    config: LocalConfig,
    kind: Literal["target", "draft"],
    factory: Any,
    on_messages: Emit[Any],
    on_death: Callable[[str], None],
) -> Worker[Any]:
    """Returns the worker of an engine and its other ranks, on cores of their own where there are enough.

    ``factory`` defaults to the engine that ``config`` names. For several ranks it is a dataclass with a rendezvous;
    with a draft of placement ``auto`` it also has a setup.
    """
    own, others, shared = _cores(config, is_draft=kind == "draft")
    setup: TargetSetup | DraftSetup | None = config.draft_setup() if kind == "draft" else config.target_setup()
    rendezvous, followers = process_ranks(setup, others)
    changes: dict[str, Any] = {} if rendezvous is None else {"rendezvous": rendezvous}
    if shared:
        setup = changes["setup"] = replace(config.target_setup(), shared_cores=shared)
    if factory is None:
        assert setup is not None
        factory = EngineSpec(setup, rendezvous).build
    elif changes:
        factory = replace(factory, **changes)
    make: Callable[..., Worker[Any]] = ProcessWorker if config.worker == "process" else ThreadWorker
    return ranked_worker(lambda died: make(kind, factory, on_messages, died, own), followers, on_death)


def _cores(config: LocalConfig, *, is_draft: bool) -> tuple[list[int], list[int], int]:
    """Returns the cores of an engine's first rank, [] if there are too few; the cores for its other ranks; and the
    number of the first rank's cores that a draft shares with its target."""
    cores = available_cores() if config.pin_cores else []
    # target, draft, the target's other ranks, the draft's other ranks, the target's other threads, the draft's
    models = [config.target] if config.draft is None else [config.target, config.draft]
    ranks = [getattr(model, "tensor_parallel_size", 1) for model in models]
    threads = [getattr(model, "cpu_threads", 1) - 1 for model in models]
    first_other = len(models) + (ranks[0] - 1 if is_draft else 0)
    if len(cores) < max(2, len(models) + sum(threads)):
        return [], cores[first_other:], 0
    if getattr(config.draft, "placement", "apart") == "auto" and sum(ranks) == len(models):
        target, draft = (1 + more for more in threads)
        return (cores[target:][:draft], [], 0) if is_draft else (cores[: target + draft], [], draft)
    first_thread = sum(ranks) + (threads[0] if is_draft else 0)
    return [cores[is_draft], *cores[first_thread:][: threads[is_draft]]], cores[first_other:], 0


def _ignore(messages: Sequence[object]) -> None:
    assert not messages, "followers send no messages"


def rank_name(kind: str, rank: int) -> str:
    """Returns a rank's name in logs."""
    return f"{kind} rank {rank}"
