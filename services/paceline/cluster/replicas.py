"""Deployment classes of Serve other than the ingress: the monitor, and one for each kind of engine.

They are plain classes; ``app.py`` makes deployments of them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from paceline import logs
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.checkpoint.vocabulary import require_tokens
from paceline.cluster import local_streams
from paceline.cluster.rank_actors import actor_ranks, reserved_gpus
from paceline.config import (
    DraftSetup,
    InternalTls,
    LogConfig,
    TargetSetup,
    TracingConfig,
    apply_worker_environment,
    show_gpus,
)
from paceline.fleet.follow import WANTED, WANTED_AT
from paceline.fleet.monitor import Monitor
from paceline.fleet.report import Report, Reporter
from paceline.metrics.engine_tracing import EngineSpans
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.tracing import Tracing
from paceline.runtime.cores import CoreClaim
from paceline.runtime.server import engine_server
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.types import ServerInfo, Startup

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 5.0
"""Longest wait for another replica's answer that no client's stream depends on."""

_REPORT_S = 1.0
_LEASE_BEAT_S = 15.0
_SILENT_AFTER_S = 10.0
"""A controller of Serve that answers later than this is silent."""
_TOKEN_KEY, _NAMESPACE = "internal-token", "paceline"


class MonitorReplica:
    """The monitor of the fleet: metrics, starting replicas, and the decided sizes of the pools."""

    def __init__(self) -> None:
        self._monitor = Monitor()
        self._starting: dict[str, tuple[Startup, float]] = {}
        self._ticker: Pusher | None = None
        self._asker: Pusher | None = None
        self._serve_answered: float | None = None

    async def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Sets ``ServiceConfig.scaling``; Serve calls it at start and after every change."""
        logs.configure_replica(LogConfig.model_validate(settings["log"]), replica_id())
        self._monitor.autoscaler.configure(settings)
        if self._ticker is None:
            self._ticker = Pusher(self._tick)
            self._asker = Pusher(self._ask_serve)

    async def _tick(self) -> None:
        self._monitor.tick()

    async def _ask_serve(self) -> None:
        """Checks that Serve's controller answers."""
        if self._serve_answered is None:
            self._serve_answered = time.monotonic()
        controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        await controller.check_alive.remote()
        self._serve_answered = time.monotonic()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the decided sizes, for ``fleet.follow.post``. Called by Serve."""
        at, wanted = self._monitor.autoscaler.wanted()
        return {WANTED_AT: at} | {WANTED + pool: float(size) for pool, size in wanted.items() if size is not None}

    async def push(self, report: Report) -> tuple[str, ...]:
        """Records a report, whose sender has started by now. Returns the pools whose sizes are decided here."""
        self._starting.pop(report.source_id, None)
        self._monitor.push(report)
        return tuple(self._monitor.autoscaler.wanted()[1])

    async def note_startup(self, startup: Startup) -> None:
        """Records the stage of a starting replica."""
        self._starting[startup.replica_id] = (startup, time.monotonic())

    async def starting(self) -> list[Startup]:
        """Returns the starting replicas: with a note within the last 3 s."""
        oldest = time.monotonic() - 3 * _REPORT_S
        self._starting = {rid: entry for rid, entry in self._starting.items() if entry[1] >= oldest}
        return [startup for startup, _ in self._starting.values()]

    async def exposition(self) -> str:
        """Returns the metrics page in Prometheus' text format."""
        return self._monitor.exposition()

    async def server_info(self) -> ServerInfo:
        """Returns an overview of the fleet; uptime and events count since the monitor began."""
        answered = self._serve_answered
        silence = 0.0 if answered is None else time.monotonic() - answered
        info = self._monitor.server_info(await self.starting())
        return replace(info, serve_silent_s=silence if silence > _SILENT_AFTER_S else 0.0)


class _Notes(logging.Handler):
    """Remembers the stage that a start is in, and when it began."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self.text, self.began_s = text, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        self.text, self.began_s = record.getMessage(), time.monotonic()


class Pusher:
    """Calls ``send`` once a second, such as a report to the monitor, and goes on if it fails."""

    def __init__(self, send: Callable[[], Awaitable[Any]]) -> None:
        self._send = send
        self._failing = False
        self._task = asyncio.create_task(self._run(), name="paceline-reports")

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    await self._send()
                self._failing = False
            except Exception as error:
                log.log(logging.DEBUG if self._failing else logging.WARNING, "%s failed: %r", self._send, error)
                self._failing = True  # the first failure in a row is reported: the monitor may be away for long
            await asyncio.sleep(max(0.0, started + _REPORT_S - time.monotonic()))

    async def stop(self) -> None:
        """Ends the calls. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class EngineDeployment:
    """One engine, its internal gRPC port, and its leases in Serve."""

    kind = ""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        setup: TargetSetup | DraftSetup,
        *,
        model: str,
        log_config: LogConfig,
        tokenizers: Sequence[tuple[str, bool]] = (),
        internal_tls: InternalTls | None = None,
        tracing: TracingConfig | None = None,
        monitor: DeploymentHandle | None = None,
    ) -> None:
        """Builds the engine; returns when it is ready. Raises ConfigError or EngineError.

        ``model``: the name that statuses show. ``tokenizers``: sources of the target's and the draft's, which must
        fit together, and whether their code is trusted.
        """
        apply_worker_environment()
        show_gpus(reserved_gpus().names)  # each rank adds the others' GPUs
        started = time.monotonic()
        self._setup = setup
        self._monitor = monitor
        self._replica_id = replica_id()
        logs.configure_replica(log_config, self._replica_id)
        self._node = ray.util.get_node_ip_address()
        threads = getattr(setup.options, "cpu_threads", 1)
        self._claim = CoreClaim.take(count=threads) if self._runs_on_cpu() else None
        self._tracing = None
        if tracing is not None:
            self._tracing = Tracing.open(model, instance_id=self._replica_id, **tracing.arguments)
        registry = Registry(self._replica_id, mirror=True)
        self._metrics = ReplicaMetrics(registry)
        self._reporter = Reporter(self._replica_id, self.kind, registry)
        self._pusher: Pusher | None = None
        self._num_leases = 0
        self._stopped = False
        notes = _Notes(f"loading {model}")
        stages = logging.getLogger(logs.STAGES)
        stages.addHandler(notes)
        stages.setLevel(logging.INFO)  # at any log level: stages go to the monitor
        stages.propagate = False
        startup = None
        if monitor is not None:
            startup = Pusher(lambda: self._note_startup(notes.text, time.monotonic() - notes.began_s))
        try:
            if tokenizers:
                target, draft = (load_tokenizer(source, trusted) for source, trusted in tokenizers)
                require_tokens(target, draft, getattr(setup.options, "vocabulary", "same"))
            self._server = engine_server(
                setup,
                replica_id=self._replica_id,
                bind=self._node,
                node=self._node,
                token=internal_token(),
                certificates=internal_certificates(internal_tls),
                model=model,
                cores=() if self._claim is None else self._claim.cores,
                ranks=actor_ranks(setup, self._replica_id, self._node, log_config),
                observer=None if self._tracing is None else EngineSpans(self._tracing, self.kind, self._replica_id),
            )
            await self._server.start()
            self._host = self._server.host
        finally:
            stages.removeHandler(notes)
            if startup is not None:
                await startup.stop()
        if monitor is not None:
            self._pusher = Pusher(self._report)
        log.info("%s %s is ready after %.1f s", self.kind, self._replica_id, time.monotonic() - started)

    def _runs_on_cpu(self) -> bool:
        return not reserved_gpus().names

    async def _note_startup(self, doing: str, elapsed_s: float) -> None:
        assert self._monitor is not None
        await self._monitor.note_startup.remote(Startup(self._replica_id, self.kind, self._node, doing, elapsed_s))

    async def _report(self) -> None:
        assert self._monitor is not None
        status = self._host.status()
        if self.kind == "target":  # no session waits for a draft
            local_streams.note(status.num_sessions)
        self._metrics.update(status)
        own = {"leases": float(self._num_leases), "asyncio_tasks": float(len(asyncio.all_tasks()))}
        status = replace(status, counters={**status.counters, **own})
        await self._monitor.push.remote(self._reporter.report(status))

    # -- called by Serve --

    async def lease(self, session_id: str) -> AsyncIterator[None]:
        """Holds a session's place here until the router that asked for it cancels, or dies."""
        self._num_leases += 1
        try:
            while True:
                yield None
                await asyncio.sleep(_LEASE_BEAT_S)
        finally:
            self._num_leases -= 1

    async def num_leases(self) -> int:
        """Returns the number of leases that are open here."""
        return self._num_leases

    def record_replica_metadata(self) -> dict[str, Any]:
        """Returns where routers find this replica. Serve reads it once."""
        incarnation = self._host.status().incarnation
        return {"address": self._server.address, "incarnation": incarnation, "node": self._node}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns statistics for autoscaling policies other than Paceline's (``fleet``)."""
        status = self._host.status()
        return {"sessions": float(status.num_sessions), "waiting": float(status.num_waiting)}

    async def check_health(self) -> None:
        """Raises EngineError if the engine has died or hangs: Serve then replaces the replica."""
        self._host.check()

    async def stop(self) -> None:
        """Ends the engine and its streams. Idempotent."""
        self._stopped = True
        if self._pusher is not None:
            await self._pusher.stop()
        await self._server.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._claim is not None:
            self._claim.release()

    def __del__(self) -> Any:
        """Stops the replica. Serve calls and awaits it when the replica has drained; the interpreter may call
        it, too.
        """
        return self.stop() if not getattr(self, "_stopped", True) and loop_runs() else None


class Target(EngineDeployment):
    """A target replica."""

    kind = "target"

    _setup: TargetSetup

    async def dtype(self) -> str:
        """Returns the dtype of the weights: float32 or bfloat16."""
        from paceline.preflight.device import dtype_name  # loads torch

        return dtype_name(self._setup.options)


class Draft(EngineDeployment):
    """A draft replica."""

    kind = "draft"

    _setup: DraftSetup

    def _runs_on_cpu(self) -> bool:
        return self._setup.runs_model and super()._runs_on_cpu()


def replica_id() -> str:
    """Returns the id of this Serve replica, as request routers know it."""
    return str(serve.get_replica_context().replica_id.unique_id)


def internal_token() -> str:
    """Returns the secret that the internal streams of this cluster carry: drawn once, kept by Ray's control store.

    It outlives deployments, so that old and new replicas talk to each other during a rolling update.
    """
    _internal_kv_put(_TOKEN_KEY, secrets.token_hex(16), overwrite=False, namespace=_NAMESPACE)
    return bytes(_internal_kv_get(_TOKEN_KEY, namespace=_NAMESPACE)).decode()


def internal_certificates(tls: InternalTls | None) -> Certificates | None:
    """Returns the certificates of this process for the others of the service. Raises ConfigError."""
    if tls is None:
        return None
    files = CertificateFiles.at("internal_tls", tls.certificate, tls.key, tls.ca)
    return Certificates(replace(files, server_name=tls.server_name))


def loop_runs() -> bool:
    """True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
