"""The ranks of a replica as Ray actors, one in each further bundle of the replica's placement group.

    replica (bundle 0)   engine, first rank ── owns ──▶ Rank actor (bundle 1), Rank actor (bundle 2), ...

An actor ends with its replica, and the replica with any of its actors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline import __version__, logs
from paceline.config import DraftSetup, LogConfig, TargetSetup, apply_worker_environment
from paceline.errors import ConfigError, PacelineError, as_paceline_error
from paceline.runtime.build import EngineSpec
from paceline.runtime.cores import CoreClaim
from paceline.runtime.ranks import MakeFollower, meeting_file, rank_name, sharded_options
from paceline.runtime.workers import EngineFactory, Facts, pin
from paceline.types import START_TIMEOUT_S, Rendezvous, ReservedGpus

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=START_TIMEOUT_S)


def reserved_gpus() -> ReservedGpus:
    """GPUs that Ray has reserved for the actor that calls this, also where Ray is told not to hide the others."""
    context = ray.get_runtime_context()
    names = context.get_accelerator_ids().get("GPU", [])
    return ReservedGpus(context.get_node_id(), tuple(sorted(names, key=lambda name: (len(name), name))))


class Rank:
    """One rank of a replica that is not its first; runs until that one leaves."""

    def __init__(self, name: str, log_config: LogConfig, version: str) -> None:
        """``name``: in logs. ``version``: of the first rank; all ranks need one version for the same bits.

        Raises ConfigError if this process runs another.
        """
        if version != __version__:
            raise ConfigError(f"{name} runs Paceline {__version__}, its first rank {version}: one is needed for all")
        apply_worker_environment()
        logs.configure_replica(log_config, name)

    def where(self) -> tuple[str, int]:
        """Node id and process id."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, factory: bytes, on_cpu: bool) -> None:
        """Builds the rank's engine and takes its steps. Ends with the error that ends it."""
        claim = CoreClaim.take() if on_cpu else None
        pin(() if claim is None else claim.cores)
        make: EngineFactory[Any, Any] = pickle.loads(factory)
        engine = make(lambda messages: None)
        try:
            while engine.step():
                pass
        finally:
            engine.close()


class ActorWorker:
    """A rank's actor as a worker (see ``workers.Worker``): nothing is sent to it, it follows."""

    def __init__(
        self,
        name: str,
        group: PlacementGroup,
        bundle: int,
        factory: EngineFactory[Any, Any],
        log_config: LogConfig,
        on_death: Callable[[str], None],
        keep: Any = None,
    ) -> None:
        """``bundle``: of ``group``, for the actor. ``keep``: objects that have to live as long as the actor."""
        self.name = name
        self._keep = keep
        self._group, self._bundle = group, bundle
        self._factory, self._log_config, self._on_death = pickle.dumps(factory), log_config, on_death
        self._actor: Any = None
        self._pid: int | None = None
        self._stopping = False
        self._placed = threading.Event()
        self._failure: PacelineError | None = None
        self._watcher = threading.Thread(target=self._watch, name=f"paceline-{name}", daemon=True)

    def spawn(self) -> None:
        resources = dict(self._group.bundle_specs[self._bundle])
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle)
        options = {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": {key: value for key, value in resources.items() if not key.startswith("bundle_group")},
        }
        self._on_cpu = not options["num_gpus"]
        self._actor = ray.remote(Rank).options(**options, scheduling_strategy=strategy, max_restarts=0)
        self._actor = self._actor.remote(self.name, self._log_config, __version__)
        self._watcher.start()

    def wait_ready(self) -> None:
        """Returns when it runs; whether it has loaded its share the first rank finds out."""
        self._placed.wait()
        if self._failure is not None:
            raise self._failure

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def send(self, messages: Any) -> None:
        """Never called: a follower receives no messages."""
        assert not messages

    @property
    def alive(self) -> bool:
        return self._watcher.is_alive()

    def came_round(self) -> bool:
        """True: its engine notices a follower that hangs (``rank_timeout_s``)."""
        return True

    @property
    def facts(self) -> Facts:
        """Nothing: the engine tells, which is the first rank."""
        return {}

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the actor now; one that hangs too, if it is on this node."""
        self._stopping = True
        if self._actor is None:
            return
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)  # one that is stopped does not hear Ray
        self._watcher.join(timeout_s)

    def _watch(self) -> None:
        try:
            node, pid = ray.get(self._actor.where.remote())
            if node == ray.get_runtime_context().get_node_id():
                self._pid = pid
            running = self._actor.run.remote(self._factory, self._on_cpu)
            self._placed.set()
            ray.get(running)
        except Exception as error:  # what a task raised comes as a RayError that is also of its own type
            cause = getattr(error, "cause", None) or error
            self._failure = as_paceline_error(cause)
            self._placed.set()
            if not self._stopping:
                log.error("%s failed: %s", self.name, self._failure)
                self._on_death(f"{self.name} failed: {self._failure}")


def actor_ranks(
    setup: TargetSetup | DraftSetup, replica_id: str, node: str, log_config: LogConfig
) -> tuple[Rendezvous | None, list[MakeFollower]]:
    """The place where this replica's ranks meet, and makers of the actors of all ranks but the first, itself.

    On one host they meet in a file, else at a port of ``node`` (this host's address) that the system chooses.

    Raises:
        ConfigError: the replica's placement group has no bundle for each rank.
    """
    options = sharded_options(setup)
    if options is None:
        return None, []
    degree, group = options.tensor_parallel_size, get_current_placement_group()
    num_bundles = 1 if group is None else group.bundle_count
    if group is None or num_bundles < degree:
        raise ConfigError(
            f"tensor_parallel_size is {degree} and the replica has {num_bundles} bundles: it needs one for each rank"
        )
    nodes = placement_group_table(group)["bundles_to_node_id"]
    store: Any = None
    if len({nodes[bundle] for bundle in range(degree)}) == 1:
        meeting = meeting_file()
    else:
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(node, 0, None, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        meeting = f"tcp:{node}:{store.port}"
    rendezvous = Rendezvous(meeting, degree, timeout_s=options.rank_timeout_s, reserved=reserved_gpus)

    def maker(rank: int) -> MakeFollower:
        spec = EngineSpec(setup, rendezvous.of(rank))
        name = f"{rank_name(spec.kind, rank)} of {replica_id}"
        return lambda on_death: ActorWorker(name, group, rank, spec.build, log_config, on_death, keep=store)

    return rendezvous, [maker(rank) for rank in range(1, degree)]
