"""The service as a Ray Serve application: plain classes, wrapped once. With ``placement.py`` the only user of Serve.

    clients ──▶ HAProxy ──▶ Router ══ internal streams ══▶ Target:<model>, Draft:<model>
                              │  └── leases (handles) ──▶       │
                              └─────── reports ──▶ Monitor ◀────┘

Serve places, watches, replaces and scales the replicas; what a session exchanges with its engines goes past it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from prometheus_client import generate_latest
from pydantic import BaseModel
from ray import serve
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from paceline import __version__, logs
from paceline.checkpoints import read_checkpoint
from paceline.config import (
    ModelDraftConfig,
    NgramDraftConfig,
    PairConfig,
    ServiceConfig,
    apply_worker_environment,
)
from paceline.cores import CoreClaim
from paceline.errors import ConfigError, EngineError, NotFoundError, PacelineError
from paceline.metrics import Registry, ReplicaMetrics, RouterMetrics
from paceline.monitor import Monitor, Report, Reporter
from paceline.replica import ReplicaServer
from paceline.router.pool import Lease
from paceline.router.router import ModelFacts
from paceline.status import to_status
from paceline.tokenization import load_tokenizer, require_same_tokens
from paceline.types import MAX_DRAFT_TOKENS, Acceptance, Mode, ModelInfo, ReplicaStatus, ServerInfo

log = logging.getLogger(__name__)

APPLICATION = "paceline"
"""Name of the Serve application."""

GRPC_SERVICES = [
    "paceline.v1.generation_pb2_grpc.add_GenerationServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
"""What Serve's ``grpc_options.grpc_servicer_functions`` has to name."""

_REPORT_S = 1.0
_LEASE_BEAT_S = 15.0
_CONTROL_TIMEOUT_S = 5.0
_CONSTRUCTOR_TRIES = 3
_TOKEN_KEY, _NAMESPACE = "internal-token", "paceline"


# -- what runs in the replicas --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Startup:
    """What a replica that is not ready yet is doing."""

    replica_id: str
    kind: str
    node: str
    doing: str
    elapsed_s: float


class MonitorReplica:
    """The fleet's numbers in one place, and what its replicas do while they start."""

    def __init__(self) -> None:
        self._monitor = Monitor()
        self._starting: dict[str, tuple[Startup, float]] = {}

    async def push(self, report: Report) -> None:
        """Takes a report; whoever sends one has started."""
        self._starting.pop(report.source_id, None)
        self._monitor.push(report)

    async def note_startup(self, startup: Startup) -> None:
        """Takes what a replica does on its way up."""
        self._starting[startup.replica_id] = (startup, time.monotonic())

    async def starting(self) -> list[Startup]:
        """Replicas on their way up that were heard of just now."""
        oldest = time.monotonic() - 3 * _REPORT_S
        self._starting = {rid: entry for rid, entry in self._starting.items() if entry[1] >= oldest}
        return [startup for startup, _ in self._starting.values()]

    async def exposition(self) -> str:
        """All metrics in Prometheus' text format."""
        return self._monitor.exposition()

    async def server_info(self) -> ServerInfo:
        """The fleet at a glance; uptime and events since the monitor began."""
        return self._monitor.server_info()


class _Notes(logging.Handler):
    """Remembers the last line that Paceline logged: what a long start-up is busy with."""

    def __init__(self, text: str) -> None:
        super().__init__(logging.INFO)
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class _Pusher:
    """Does something once a second, such as a report to the monitor; one that is away is no reason to stop."""

    def __init__(self, send: Callable[[], Awaitable[Any]]) -> None:
        self._send = send
        self._task = asyncio.create_task(self._run(), name="paceline-reports")

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            try:
                async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                    await self._send()
            except Exception as error:
                log.debug("%s failed: %s", self._send, error)
            await asyncio.sleep(max(0.0, started + _REPORT_S - time.monotonic()))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class _EngineReplica:
    """One engine, its internal gRPC port, and its place in Serve."""

    kind = ""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], monitor: DeploymentHandle | None = None
    ) -> None:
        """Builds the engine; returns when it is ready. Raises ConfigError or EngineError."""
        apply_worker_environment()
        started = time.monotonic()
        self.config = ServiceConfig.parse(config)
        self._monitor = monitor
        self._replica_id = replica_id()
        logs.configure_service(self.config.log, replica_id=self._replica_id)
        self._node = ray.util.get_node_ip_address()
        self._core = CoreClaim.take() if self._runs_on_cpu() else None
        registry = Registry(self._replica_id, mirror=True)
        self._metrics = ReplicaMetrics(registry)
        self._reporter = Reporter(self._replica_id, self.kind, registry)
        self._pusher: _Pusher | None = None
        self._num_leases = 0
        self._stopped = False
        notes = _Notes(f"loading {self._model()}")
        logging.getLogger("paceline").addHandler(notes)
        startup = None
        if monitor is not None:
            startup = _Pusher(lambda: self._note_startup(notes.text, time.monotonic() - started))
        try:
            self._server = self._make_server(
                self.config.pair(),
                replica_id=self._replica_id,
                bind=self._node,
                node=self._node,
                token=internal_token(),
                model=self._model(),
                core=None if self._core is None else self._core.core,
            )
            await self._server.start()
            self._host = self._server.host
        finally:
            logging.getLogger("paceline").removeHandler(notes)
            if startup is not None:
                await startup.stop()
        if monitor is not None:
            self._pusher = _Pusher(self._report)
        log.info("%s %s is ready after %.1f s", self.kind, self._replica_id, time.monotonic() - started)

    def _make_server(self, config: PairConfig, **options: Any) -> ReplicaServer:
        raise NotImplementedError

    def _model(self) -> str:
        raise NotImplementedError

    def _runs_on_cpu(self) -> bool:
        return not ray.get_runtime_context().get_accelerator_ids().get("GPU")

    async def _note_startup(self, doing: str, elapsed_s: float) -> None:
        assert self._monitor is not None
        await self._monitor.note_startup.remote(Startup(self._replica_id, self.kind, self._node, doing, elapsed_s))

    async def _report(self) -> None:
        assert self._monitor is not None
        status = self._host.status()
        self._metrics.update(status)
        own = {"leases": float(self._num_leases), "asyncio_tasks": float(len(asyncio.all_tasks()))}
        status = replace(status, counters={**status.counters, **own})
        await self._monitor.push.remote(self._reporter.report(status))

    # -- called by Serve --

    async def lease(self, session_id: str) -> AsyncIterator[None]:
        """A session's place here: open until whoever asked for it cancels, or dies."""
        self._num_leases += 1
        try:
            while True:
                yield None
                await asyncio.sleep(_LEASE_BEAT_S)
        finally:
            self._num_leases -= 1

    async def num_leases(self) -> int:
        """Leases that are open here."""
        return self._num_leases

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where routers find it. Read once."""
        incarnation = self._host.status().incarnation
        return {"address": self._server.address, "incarnation": incarnation, "node": self._node}

    def record_routing_stats(self) -> dict[str, Any]:
        """For request routers that ask."""
        return {"sessions": self._host.status().num_sessions}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For autoscaling policies that ask."""
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
        if self._core is not None:
            self._core.release()

    def __del__(self) -> Any:
        """Serve calls this, and awaits what it returns, when the replica has drained; the interpreter calls it too."""
        return self.stop() if not getattr(self, "_stopped", True) and _loop_runs() else None


class Target(_EngineReplica):
    """A target replica."""

    kind = "target"

    def _make_server(self, config: PairConfig, **options: Any) -> ReplicaServer:
        from paceline.target.service import target_server

        return target_server(config, **options)

    def _model(self) -> str:
        return self.config.target_config.model_loading_config.model_id

    async def dtype(self) -> str:
        """Of the weights: float32 or bfloat16."""
        import torch

        from paceline.model.loading import resolve_device, resolve_dtype

        model = self.config.pair().target
        return str(resolve_dtype(model.dtype, torch.device(resolve_device(model.device)))).removeprefix("torch.")


class Draft(_EngineReplica):
    """A draft replica."""

    kind = "draft"

    def _make_server(self, config: PairConfig, **options: Any) -> ReplicaServer:
        from paceline.draft.service import draft_server

        if isinstance(self.config.draft_config, ModelDraftConfig):
            require_same_tokens(
                load_tokenizer(self.config.target_config.model_loading_config.tokenizer),
                load_tokenizer(self.config.draft_config.model_loading_config.tokenizer),
            )
        return draft_server(config, **options)

    def _model(self) -> str:
        assert self.config.draft_config is not None
        return draft_name(self.config.draft_config)

    def _runs_on_cpu(self) -> bool:
        return isinstance(self.config.draft_config, ModelDraftConfig) and super()._runs_on_cpu()


class Router:
    """The ingress: the public gRPC methods, health, and the metrics page. Serve calls a method by its RPC's name."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        targets: DeploymentHandle,
        drafts: DeploymentHandle | None,
        monitor: DeploymentHandle,
    ) -> None:
        """Reads the tokenizer and connects to the replicas that are there; requests may wait for others."""
        from paceline.placement import ServePool
        from paceline.router import router as core
        from paceline.router.service import GenerationDoor

        self.config = ServiceConfig.parse(config)
        self._monitor, self._targets = monitor, targets
        self._replica_id = replica_id()
        logs.configure_service(self.config.log, replica_id=self._replica_id)
        self._incarnation = time.time_ns()
        self._facts = await asyncio.to_thread(model_facts, self.config)
        self._pools = [ServePool("target", targets)]
        if drafts is not None:
            self._pools.append(ServePool("draft", drafts))
        self._registry = registry = Registry(self._replica_id, mirror=True)
        model_id = self.config.target_config.model_loading_config.model_id
        self._reporter = Reporter(self._replica_id, "router", registry)
        self._router = core.Router(
            self._facts,
            self._pools[0],
            self._pools[1] if drafts is not None else None,
            self.config.router_config,
            metrics=RouterMetrics(registry, model_id),
            token=internal_token(),
            draft_delay_s=self.config.router_config.draft_link_delay_s,
        )
        self._door = GenerationDoor(self._router)
        self._myself = serve.get_replica_context()
        self._peers: DeploymentHandle | None = None
        self._dtype: str | None = None
        self._stopped = False
        self._demand: Lease | None = None
        await self._router.start()
        self._pushers = [_Pusher(self._report), _Pusher(self._ask_for_drafts)]

    # -- the public service --

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """See protos/paceline/v1/generation.proto."""
        try:
            async with contextlib.aclosing(self._door.generate(request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            _set_status(grpc_context, error)

    async def Cancel(self, request: Any, grpc_context: Any) -> Any:
        """See protos/paceline/v1/generation.proto. The request may be with another router: all are asked."""
        cancelled = self._door.cancel(request.request_id)
        if not cancelled and request.request_id:
            cancelled = any(await self._ask_peers("cancel_here", request.request_id))
        from paceline.v1.generation_pb2 import CancelResponse

        return CancelResponse(cancelled=cancelled)

    async def is_ready(self) -> bool:
        """Whether a request would be served now."""
        return self._router.ready

    async def statuses(self) -> Mapping[str, list[ReplicaStatus]]:
        """What the replicas that are up said last, by kind."""
        return self._router.statuses()

    async def num_requests(self) -> int:
        """Requests that run or wait here."""
        return self._router.num_running + self._router.num_queued

    async def own_metrics(self) -> str:
        """The metrics of this router alone, in Prometheus' text format."""
        return generate_latest(self._registry.collectors).decode()

    async def cancel_here(self, request_id: str) -> bool:
        """Cancels a request if it is with this router."""
        return self._door.cancel(request_id)

    async def GetModelInfo(self, request: Any, grpc_context: Any) -> Any:
        """See protos/paceline/v1/generation.proto."""
        from paceline.api import model_info_to_proto

        draft = self.config.draft_config
        info = ModelInfo(
            model_id=self.config.target_config.model_loading_config.model_id,
            draft_model_id=None if draft is None else draft_name(draft),
            tokenizer_fingerprint=self._facts.tokenizer.fingerprint,
            vocab_size=self._facts.tokenizer.vocab_size,
            max_context_length=self._facts.max_model_len,
            eos_token_ids=self._facts.eos_token_ids,
            dtype=await self._served_dtype(),
            modes=tuple(Mode) if draft is not None else (Mode.PLAIN,),
            acceptances=tuple(Acceptance),
            max_draft_tokens=MAX_DRAFT_TOKENS if draft is not None else 0,
        )
        return model_info_to_proto(info)

    async def _served_dtype(self) -> str:
        """As the targets resolved it; as it is configured while none is up."""
        if self._dtype is None and self._router.ready:
            try:
                async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                    self._dtype = await self._targets.dtype.remote()
            except Exception as error:
                log.info("no target says its dtype: %s", error)
        return self._dtype or self.config.target_config.engine_kwargs.dtype

    async def GetServerInfo(self, request: Any, grpc_context: Any) -> Any:
        """See protos/paceline/v1/generation.proto."""
        from paceline.api import server_info_to_proto
        from paceline.v1.generation_pb2 import GetServerInfoResponse

        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                info = await self._monitor.server_info.remote()
        except Exception as error:
            _set_status(grpc_context, EngineError(f"the monitor does not answer: {type(error).__name__}"))
            return GetServerInfoResponse()
        return server_info_to_proto(info)

    # -- health and metrics --

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1: whether a request would be served now."""
        if request.service not in _HEALTH_SERVICES:
            _set_status(grpc_context, NotFoundError(f"no service {request.service!r}: {_HEALTH_SERVICES[1]} is served"))
        return self._health(request.service)

    async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1: the status now, and again whenever it changes."""
        last = None
        while True:
            now = self._health(request.service)
            if now != last:
                yield now
            last = now
            await asyncio.sleep(_HEALTH_PERIOD_S)

    def _health(self, service: str) -> Any:
        from grpc_health.v1.health_pb2 import HealthCheckResponse  # type: ignore[import-untyped]  # no stubs

        if service not in _HEALTH_SERVICES:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = HealthCheckResponse.SERVING if self._router.ready else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=serving)

    async def __call__(self, request: Any) -> Any:
        """HTTP: ``/metrics`` for Prometheus, ``/health`` (200 or 503); ``/-/healthz`` is Serve's own."""
        from starlette.responses import PlainTextResponse

        if request.url.path == "/metrics":
            try:
                async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                    text = await self._monitor.exposition.remote()
            except Exception as error:
                return PlainTextResponse(f"the monitor does not answer: {type(error).__name__}\n", 503)
            return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
        if request.url.path == "/health":
            ready = self._router.ready
            return PlainTextResponse("serving\n" if ready else "no target is up\n", 200 if ready else 503)
        return PlainTextResponse("not found: /metrics and /health are here; the service itself speaks gRPC\n", 404)

    # -- called by Serve --

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For autoscaling policies that ask."""
        return {"running": float(self._router.num_running), "queued": float(self._router.num_queued)}

    async def stop(self) -> None:
        """Fails what is in progress, gives all leases back. Idempotent."""
        self._stopped = True
        for pusher in self._pushers:
            await pusher.stop()
        await self._router.stop()
        for pool in self._pools:
            await pool.stop()

    def __del__(self) -> Any:
        """See _EngineReplica."""
        return self.stop() if not getattr(self, "_stopped", True) and _loop_runs() else None

    async def _report(self) -> None:
        num_queued = self._router.num_queued
        status = ReplicaStatus(
            self._replica_id,
            "router",
            self._incarnation,
            num_sessions=self._router.num_running + num_queued,
            num_waiting=num_queued,
            max_sessions=sum(s.max_sessions for s in self._router.statuses().get("target", [])),
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            model=self.config.target_config.model_loading_config.model_id,
            counters={
                "leases": float(sum(pool.num_leases for pool in self._pools)),
                "asyncio_tasks": float(len(asyncio.all_tasks())),
            },
        )
        await self._monitor.push.remote(self._reporter.report(status))

    async def _ask_for_drafts(self) -> None:
        """A lease without a replica wakes a draft pool that has been scaled to zero while requests run."""
        if len(self._pools) < 2:
            return
        wanted = self._router.num_running > 0 and not self._pools[1].members()
        if wanted and self._demand is None:
            self._demand = self._pools[1].lease(f"{self._router.router_id}.draft-demand", None)
        elif not wanted and self._demand is not None:
            self._demand.close()
            self._demand = None

    async def _ask_peers(self, method: str, *args: Any) -> list[Any]:
        """What all routers answer, this one included; those that fail are left out."""
        if self._peers is None:
            self._peers = serve.get_deployment_handle(self._myself.deployment, self._myself.app_name)
        try:
            answers = await self._peers.broadcast(method, *args).results_async(
                timeout_s=_CONTROL_TIMEOUT_S, return_exceptions=True
            )
        except Exception as error:
            log.info("the other routers could not be asked: %s", error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


_HEALTH_SERVICES = ("", "paceline.v1.GenerationService")
_HEALTH_PERIOD_S = 0.5


def _set_status(grpc_context: Any, error: Exception) -> None:
    """Ends a call with an error. The method then has to return: on a raise Serve would drop the trailers."""
    code, details, trailers = to_status(error)
    if not isinstance(error, PacelineError):
        log.exception("a request failed unforeseen")
    grpc_context.set_code(code)
    grpc_context.set_details(details)
    grpc_context.set_trailing_metadata(list(trailers))


def model_facts(config: ServiceConfig) -> ModelFacts:
    """What routers need to know of the target. Raises ConfigError."""
    loading = config.target_config.model_loading_config
    checkpoint, tokenizer = read_checkpoint(loading.source), load_tokenizer(loading.tokenizer)
    limit = config.target_config.engine_kwargs.max_model_len
    return ModelFacts(
        tokenizer=tokenizer,
        max_model_len=min(limit or checkpoint.max_model_len, checkpoint.max_model_len),
        eos_token_ids=checkpoint.eos_token_ids or tokenizer.eos_token_ids,
    )


def replica_id() -> str:
    """Of this Serve replica, as request routers know it."""
    return str(serve.get_replica_context().replica_id.unique_id)


def internal_token() -> str:
    """The secret that the internal streams of this cluster carry: drawn once, kept by Ray's control store.

    It outlives deployments, so that old and new replicas talk to each other during a rolling update.
    """
    _internal_kv_put(_TOKEN_KEY, secrets.token_hex(16), overwrite=False, namespace=_NAMESPACE)
    return bytes(_internal_kv_get(_TOKEN_KEY, namespace=_NAMESPACE)).decode()


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- the application ------------------------------------------------------------------------------------------------


def build(args: Mapping[str, Any] | ServiceConfig) -> Application:
    """The whole service; what ``import_path: paceline.app:build`` of a Serve config file names.

    Raises ConfigError if ``args`` is refused.
    """
    config = args if isinstance(args, ServiceConfig) else ServiceConfig.parse(args)
    monitor_options = {"ray_actor_options": {"num_cpus": 0}, "num_replicas": 1}
    monitor = _deployment(MonitorReplica, config, monitor_options, "Monitor", ())
    bound = monitor.bind()
    targets = build_target_deployment(config, bind_kwargs={"monitor": bound})
    drafts = None if config.draft_config is None else build_draft_deployment(config, bind_kwargs={"monitor": bound})
    names = (config.target_config.model_loading_config, config.draft_config and draft_name(config.draft_config))
    needs = (*names, config.target_config.engine_kwargs, config.router_config, config.server)
    router = _deployment(Router, config, config.router_config.deployment_options(), "Router", needs)
    return cast(Application, router.bind(config.to_dict(), targets, drafts, bound))


build_spec_decode_app = build
"""The same, by the naming of ``ray.serve.llm``."""


def build_target_deployment(
    config: ServiceConfig,
    *,
    name_prefix: str = "Target:",
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: type = Target,
) -> Application:
    """The pool of targets. ``bind_kwargs``: more arguments of its class; ``override_serve_options``: of Serve's."""
    options = config.target_config.deployment_options() | _POOL_OPTIONS | dict(override_serve_options or {})
    needs = (config.target_config,)
    name = name_prefix + deployment_name(config.target_config.model_loading_config.model_id)
    return cast(
        Application,
        _deployment(deployment_cls, config, options, name, needs).bind(config.to_dict(), **(bind_kwargs or {})),
    )


def build_draft_deployment(
    config: ServiceConfig,
    *,
    name_prefix: str = "Draft:",
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: type = Draft,
) -> Application:
    """The pool of drafts; see ``build_target_deployment``. Raises ConfigError if none is configured."""
    if config.draft_config is None:
        raise ConfigError("draft_config is null: there is no draft to deploy")
    options = config.draft_config.deployment_options() | _POOL_OPTIONS | dict(override_serve_options or {})
    target = config.target_config
    needs = (config.draft_config, target.model_loading_config, target.engine_kwargs)
    name = name_prefix + deployment_name(draft_name(config.draft_config))
    return cast(
        Application,
        _deployment(deployment_cls, config, options, name, needs).bind(config.to_dict(), **(bind_kwargs or {})),
    )


_POOL_OPTIONS = {"request_router_config": {"request_router_class": "paceline.placement.PoolRequestRouter"}}


def deployment_name(model_id: str) -> str:
    """A model's name as a part of a deployment's."""
    return model_id.replace("/", "--").replace(".", "_")


def draft_name(config: ModelDraftConfig | NgramDraftConfig) -> str:
    """What drafts: a model's name, or ``ngram``."""
    return config.model_loading_config.model_id if isinstance(config, ModelDraftConfig) else config.kind


def _deployment(cls: type, config: ServiceConfig, options: Mapping[str, Any], name: str, needs: Sequence[Any]) -> Any:
    """A deployment whose replicas are replaced when what it ``needs`` of the configuration has changed, and only then:
    a new draft leaves the targets as they are. What Serve can change in place it does."""
    defaults = {
        "max_ongoing_requests": 4096,
        "max_constructor_retry_count": _CONSTRUCTOR_TRIES,
        "logging_config": {"enable_access_log": False, "log_level": config.log.level},
    }
    parts = [part.model_dump(exclude={"deployment_config"}) if isinstance(part, BaseModel) else part for part in needs]
    content = json.dumps([__version__, config.log.model_dump(), parts], sort_keys=True, default=str)
    version = hashlib.sha256(content.encode()).hexdigest()[:12]
    return serve.deployment(name=name, **(defaults | dict(options)))(cls).options(version=version, _internal=True)
