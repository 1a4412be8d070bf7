"""The ingress: the class that answers clients, over gRPC and HTTP. ``app.py`` makes a deployment of it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline import logs
from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cluster import local_streams
from paceline.cluster.connections import limit_ages, note_shutdown
from paceline.cluster.encryption import encrypt_ingress
from paceline.cluster.replicas import (
    CONTROL_TIMEOUT_S,
    Pusher,
    internal_certificates,
    internal_token,
    replica_id,
)
from paceline.config import ServiceConfig
from paceline.config.installed import installed_version
from paceline.config.memory import tune_server_process
from paceline.errors import EngineError
from paceline.fleet.public import public
from paceline.fleet.report import Reporter
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.metrics.tracing import Tracing, trace_headers
from paceline.router.admission import TargetInfo
from paceline.router.peer_routers import Named, PeerRouters
from paceline.router.pool import Lease
from paceline.router.public import PublicMethods, model_info
from paceline.security.access import Access
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.security.keys import KeyRing
from paceline.types import PROTOCOL_VERSION, ModelInfo, ReplicaStatus, ServerInfo

log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 2.0
"""Longest wait for the other routers' answer about requests to cancel; a Cancel takes at most twice as long."""


_LAST_WORDS_S = 2.0
"""Time to send the errors of streams before Serve kills the replica."""


class Ingress(PublicMethods):
    """The ingress: the public gRPC methods, health, and HTTP. Serve calls a method by its RPC's name.

    Serve makes replicas of ``IngressReplica``.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ServiceConfig,
        targets: DeploymentHandle,
        drafts: DeploymentHandle | None,
        monitor: DeploymentHandle,
    ) -> None:
        """Reads the tokenizer and connects to the replicas that are there; requests may wait for others."""
        from paceline.cluster.placement import ServePool
        from paceline.router import router as core
        from paceline.router.service import GenerationService

        self.config = config
        self._monitor, self._targets = monitor, targets
        self._token = internal_token()
        self._replica_id = replica_id()
        logs.configure_replica(self.config.log, self._replica_id)
        self._incarnation = time.time_ns()
        self._facts = await asyncio.to_thread(model_facts, self.config)
        loading, engine = self.config.target_config.model_loading_config, self.config.target_config.engine_kwargs
        server = self.config.server
        self._chat = await asyncio.to_thread(
            load_chat,
            loading.tokenizer,
            server.chat_template,
            engine.trust_remote_code,
            tool_parser=server.tool_call_parser,
            reasoning_parser=server.reasoning_parser,
        )
        self._pools = [ServePool("target", targets, wakes=config.target_config.deployment_config.least_replicas == 0)]
        if drafts is not None:
            self._pools.append(ServePool("draft", drafts))
        registry = Registry(self._replica_id, mirror=True)
        self._access_metrics = AccessMetrics(registry)
        self._keys = None if server.api_keys is None else KeyRing(server.api_keys)
        self.access = Access(self._keys, self._access_metrics, require_tls=server.tls is not None)
        self._certificates: dict[str, Certificates] = {}
        if (tls := server.tls) is not None:
            files = CertificateFiles.at("server.tls", tls.certificate, tls.key, tls.client_ca, "client_ca")
            self._certificates["server"] = Certificates(files)
        if (internal := internal_certificates(self.config.internal_tls)) is not None:
            self._certificates["internal"] = internal
        encrypt_ingress(self.config, self._certificates)
        limit_ages(server.grpc_max_connection_age_s)
        model_id = self.config.target_config.model_loading_config.model_id
        self._reporter = Reporter(self._replica_id, "router", registry)
        self.router = core.Router(
            self._facts,
            self._pools[0],
            self._pools[1] if drafts is not None else None,
            self.config.router_config,
            metrics=RouterMetrics(registry, model_id),
            token=self._token,
            certificates=internal,
        )
        count_departures_as_cancelled()
        self._loop = asyncio.get_running_loop()
        note_shutdown(self._stop_within)
        tracing = self.config.tracing
        self._tracing = (
            None if tracing is None else Tracing.open(model_id, instance_id=self._replica_id, **tracing.arguments)
        )
        self.service = GenerationService(self.router, self._tracing, shares_cache=server.share_cache_between_keys)
        longest, allowed = self.service.bounds.max_message_bytes, config.server.max_message_bytes
        if longest > allowed:
            log.warning("server.max_message_bytes is %d: prompts that fit the context have up to %d", allowed, longest)
        self._myself = serve.get_replica_context()
        self._peers: DeploymentHandle | None = None
        self._peer_routers = PeerRouters(self._cancel_at_peers, timeout_s=_CANCEL_TIMEOUT_S)
        self._dtype: str | None = None
        self._stopped = False
        self._demand: Lease | None = None
        self._decided: tuple[str, ...] = ()
        await self.router.start()
        tune_server_process()
        self._pushers = [Pusher(self._report), Pusher(self._ask_for_drafts)]

    # -- what the public methods ask of it --

    async def cancel_elsewhere(self, request_id: str, owner: str) -> bool:
        """Cancels a request that may be with another router: all are asked."""
        return await self._peer_routers.cancel(request_id, owner)

    async def is_ready(self) -> bool:
        """True if a request would be served now."""
        return self.router.ready

    async def statuses(self) -> Mapping[str, list[ReplicaStatus]]:
        """Newest status of every replica that is up, by kind."""
        return self.router.statuses()

    async def num_requests(self) -> int:
        """Requests that run or wait here."""
        return self.router.num_running + self.router.num_queued

    async def cancel_these(self, requests: Sequence[Named]) -> list[Named]:
        """Cancels the requests that this router has, and returns them."""
        return [(request_id, owner) for request_id, owner in requests if self.service.cancel(request_id, owner)]

    async def _cancel_at_peers(self, requests: Sequence[Named]) -> set[Named]:
        return {named for found in await self._ask_peers("cancel_these", requests) for named in found}

    async def model_info(self) -> ModelInfo:
        """The model that is served."""
        draft, speculates = self.config.draft_config, self.config.target_setup().speculates
        return model_info(
            self._facts,
            model_id=self.config.target_config.model_loading_config.model_id,
            draft_model_id=None if draft is None else draft.drafter_name,
            dtype=await self._served_dtype(),
            speculates=speculates,
            batch_invariant=_weakest(self.router.statuses().get("target", ())),
        )

    async def _served_dtype(self) -> str:
        """The default as the targets resolved it; as it is configured while none is up."""
        if self._dtype is None and self.router.ready:
            try:
                async with asyncio.timeout(CONTROL_TIMEOUT_S):
                    self._dtype = await self._targets.dtype.remote()
            except Exception as error:
                log.info("no target says its dtype: %s", error)
        return self._dtype or self.config.target_config.engine_kwargs.dtype

    async def server_info(self) -> ServerInfo:
        """The state of the service, as clients may see it. Raises EngineError."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                info = await self._monitor.server_info.remote()
        except Exception as error:
            raise EngineError(f"the monitor does not answer: {type(error).__name__}") from error
        return public(info, self._token)

    def __serve_build_asgi_app__(self) -> Any:
        """The application of the HTTP port; Serve asks for it when the replica is made."""
        from paceline.web.app import make_app
        from paceline.web.response_store import ResponseStore
        from paceline.web.service import Edge, fingerprint_of

        model_id = self.config.target_config.model_loading_config.model_id
        server = self.config.server
        names = server.served_model_name or (model_id,)
        kept = ResponseStore(server.responses_store_bytes) if server.responses_store_bytes else None
        edge = Edge(
            names[0],
            self.service,
            self.access,
            server.max_message_bytes,
            metrics=self._metrics_page,
            chat=self._chat,
            status=self.server_info,
            aliases=names[1:],
            system_fingerprint=fingerprint_of(self.config.target_config.model_dump_json()),
            cors_origins=server.cors_origins,
            allowed_hosts=server.hosts,
            force_include_usage=server.force_include_usage,
            strict_fields=server.strict_fields,
            playground=server.playground,
            responses=kept,
            trace_headers=None if self.config.tracing is None else trace_headers,
        )
        return make_app(edge)

    async def _metrics_page(self) -> str:
        """The page for Prometheus. Raises EngineError."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return str(await self._monitor.exposition.remote())
        except Exception as error:
            raise EngineError(f"the monitor does not answer: {type(error).__name__}") from error

    # -- called by Serve --

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for autoscaling policies other than ours (``scaling``)."""
        return {"running": float(self.router.num_running), "queued": float(self.router.num_queued)}

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, and returns when none is in progress (``GenerationService.drain``)."""
        await self.service.drain(timeout_s)

    def _stop_within(self, left_s: float) -> float:
        """Ends streams by an error that would be cut without one: Serve kills the replica after ``left_s``. Returns how
        long clients may take until they have left; a service that is drained as a whole has no other router for
        them."""
        self._leaving = True
        reason = f"this router is being stopped, and the request did not end within {left_s:g} s"
        last_words_s = max(left_s / 2, left_s - _LAST_WORDS_S)
        self._loop.call_soon_threadsafe(self._loop.call_later, last_words_s, self.service.end, reason)
        return 0.0 if self.service.draining else min(1.2 * self.config.server.grpc_max_connection_age_s, left_s / 2)

    async def stop(self) -> None:
        """Ends the requests in progress with an error, and returns all leases. Idempotent."""
        self._stopped = True
        for pusher in self._pushers:
            await pusher.stop()
        await self._peer_routers.stop()
        await self.router.stop()
        for pool in self._pools:
            await pool.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _reload(self) -> None:
        """Reloads keys and certificates if their files have changed."""
        metrics = self._access_metrics
        if self._keys is not None:
            self._keys.refresh()
            metrics.reload_failures("api_keys", self._keys.num_failures)
        for use, certificates in self._certificates.items():
            metrics.certificate(use, certificates.refresh().expires_at)
            metrics.reload_failures(use, certificates.num_failures)

    async def _report(self) -> None:
        self._reload()
        num_queued = self.router.num_queued
        local_streams.note(self.router.num_running + num_queued)
        status = ReplicaStatus(
            self._replica_id,
            "router",
            self._incarnation,
            num_sessions=self.router.num_running + num_queued,
            num_waiting=num_queued,
            max_sessions=sum(s.max_sessions for s in self.router.statuses().get("target", [])),
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            version=installed_version(),
            protocol=PROTOCOL_VERSION,
            model=self.config.target_config.model_loading_config.model_id,
            counters={
                "leases": float(sum(pool.num_leases for pool in self._pools)),
                "asyncio_tasks": float(len(asyncio.all_tasks())),
                "cpu_s": time.process_time(),
                "returned": float(self.router.num_returned),
            },
        )
        self._decided = await self._monitor.push.remote(self._reporter.report(status, self.router.view()))

    async def _ask_for_drafts(self) -> None:
        """A lease without a replica wakes a draft pool that was scaled to zero while requests run. If the monitor
        decides the size of the pool, it is empty on purpose."""
        if len(self._pools) < 2:
            return
        ours = "draft" in self._decided
        wanted = not ours and self.router.num_running > 0 and not self._pools[1].members()
        if wanted and self._demand is None:
            self._demand = self._pools[1].lease(f"{self.router.router_id}.draft-demand", None)
        elif not wanted and self._demand is not None:
            self._demand.close()
            self._demand = None

    async def _ask_peers(self, method: str, *args: Any) -> list[Any]:
        """Returns the answers of all routers, including this one; omits failures."""
        if self._peers is None:
            self._peers = serve.get_deployment_handle(self._myself.deployment, self._myself.app_name)
        try:
            answers = await self._peers.broadcast(method, *args).results_async(
                timeout_s=CONTROL_TIMEOUT_S, return_exceptions=True
            )
        except Exception as error:
            log.info("the other routers could not be asked: %s", error)
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]


@serve.ingress()
class IngressReplica(Ingress):
    """The ingress for Serve's HTTP; a separate class, since only Serve may call a destructor that is awaited."""

    async def __del__(self) -> None:
        """Stops the router when Serve ends the replica, which awaits this."""
        if not getattr(self, "_stopped", True):
            await self.stop()


def count_departures_as_cancelled() -> None:
    """Makes Serve count a stream that its client has left as cancelled, and not log it as an error of the service.

    grpc.aio closes the generator of a call that is cancelled while a message is written, and Serve treats GeneratorExit
    as an unexpected error. A waiting generator gets CancelledError, which Serve knows.
    """
    from ray.serve._private import replica

    status_of = replica.get_grpc_response_status

    def status(exc: BaseException, request_timeout_s: float | None, request_id: str) -> Any:
        left = isinstance(exc, GeneratorExit)
        return status_of(asyncio.CancelledError() if left else exc, request_timeout_s, request_id)

    replica.get_grpc_response_status = status


def model_facts(config: ServiceConfig) -> TargetInfo:
    """Limits and token ids of the target that requests are checked against. Raises ConfigError."""
    loading = config.target_config.model_loading_config
    trusted = config.target_config.engine_kwargs.trust_remote_code
    checkpoint = Checkpoint.open(loading.source, trusted)
    own = loading.tokenizer == loading.source
    tokenizer = checkpoint.tokenizer if own else load_tokenizer(loading.tokenizer, trusted)
    return TargetInfo.of(
        checkpoint,
        tokenizer,
        config.target_config.engine_kwargs.max_model_len,
        generation_config=config.router_config.generation_config,
        most_sequences=config.most_sequences,
    )


def _weakest(statuses: Sequence[ReplicaStatus]) -> str:
    """The verdict that holds for all targets: one that fails the test, or says nothing, speaks for all."""
    found = {status.batch_invariant for status in statuses}
    return next((verdict for verdict in ("no", "", "untested", "yes") if verdict in found), "")
