"""``paceline serve --local``: HTTP and gRPC over both engines in processes of this machine, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client import generate_latest

from paceline import logs
from paceline.checkpoint.chat import load_chat
from paceline.cli.local_grpc import LocalPublic, serve_grpc
from paceline.cli.local_http import BoundedProtocol
from paceline.cli.startup import StartView, next_steps, tell_ready
from paceline.config import (
    EMBEDDED_TARGET,
    DraftModel,
    LocalConfig,
    ModelDraftConfig,
    RouterConfig,
    ServerConfig,
    ServiceConfig,
    TargetModel,
    TracingConfig,
)
from paceline.config.base import Strict
from paceline.config.engines import Growing
from paceline.config.memory import tune_server_process
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.metrics.tracing import Tracing, trace_headers
from paceline.preflight.ports import bind, refusal
from paceline.router.service import GenerationService
from paceline.security.access import Access
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.security.keys import KeyRing
from paceline.web.app import make_app
from paceline.web.response_store import LOCAL_BYTES, ResponseStore
from paceline.web.service import Edge, fingerprint_of

log = logging.getLogger(__name__)

_GOODBYE_S = 5
_RELOAD_S = 1.0
_SIGNAL_S = 0.1
_OF_OTHERS = {"recovery_timeout_s", "cold_start_timeout_s", "page_move_timeout_s", "deployment_config"}
"""Keys of ``router_config`` that are about several replicas."""
_TIMEOUTS = {"target_timeout_s", "draft_timeout_s"}
"""Keys of ``router_config`` that are the pipeline's where there is no router. Left out they are longer than a router's,
which has other targets to go to."""


def serve_local(
    config: LocalConfig,
    server: ServerConfig,
    model_id: str = EMBEDDED_TARGET,
    tracing_config: TracingConfig | None = None,
    router: RouterConfig | None = None,
) -> None:
    """Serves until a signal arrives; SIGINT leaves as KeyboardInterrupt.

    Raises:
        ConfigError: models, files or the port cannot be used.
        EngineError: an engine could not be started.
    """
    keys = None if server.api_keys is None else KeyRing(server.api_keys)
    tls = server.tls
    if tls is not None and not tls.http:
        raise ConfigError("server.tls.http is false with --local, whose HTTP port serves requests: true is allowed")
    files = None
    if tls is not None:
        files = CertificateFiles.at("server.tls", tls.certificate, tls.key, tls.client_ca, "client_ca")
    certificates = None if files is None else Certificates(files)
    server = _with_grpc_port(server)
    registry = Registry()
    pipeline = LocalPipeline(config, router=router, metrics=RouterMetrics(registry, model_id))
    tracing = None if tracing_config is None else Tracing.open(model_id, **tracing_config.arguments)
    edge = local_edge(pipeline, server, model_id, keys, tracing)
    assert isinstance(edge.service, GenerationService)
    public = LocalPublic(pipeline, edge.service, edge.access, edge.model_id)
    with contextlib.closing(_listening(server)) as listening, contextlib.ExitStack() as stack:
        if tracing is not None:
            stack.callback(tracing.close)
        with StartView() as view:
            stack.enter_context(pipeline)
        steps = next_steps(server, https=tls is not None, chats=edge.chat is not None)
        one = _Server(
            uvicorn.Config(
                make_app(edge),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GOODBYE_S,
                ssl_certfile=None if files is None else files.certificate,
                ssl_keyfile=None if files is None else files.key,
            ),
            _Renewed(keys, certificates, AccessMetrics(registry)),
            partial(
                serve_grpc,
                public,
                server.host,
                server.grpc_port,
                server.max_message_bytes,
                certificates,
                server.grpc_max_connection_age_s,
            ),
            partial(edge.service.drain, server.drain_timeout_s),
            _addresses(server),
            lambda: tell_ready(view, steps),
        )
        with _signals():
            one.run([listening])
        if one.failure is not None:
            raise one.failure


def _addresses(server: ServerConfig) -> str:
    """The lines that say where it listens."""
    host = f"[{server.host}]" if ":" in server.host else server.host
    scheme = "http" if server.tls is None else "https"
    http = f"HTTP     {scheme}://{host}:{server.http_port}/v1  OpenAI-compatible"
    return f"{http}\ngRPC     {host}:{server.grpc_port}"


def _with_grpc_port(server: ServerConfig) -> ServerConfig:
    """Returns the addresses with a free gRPC port: the configured one, or any instead of the default.

    Raises ConfigError for a configured port that is taken.
    """
    try:
        bind(server.host, server.grpc_port)
        return server
    except OSError as error:
        found = refusal(server.host, "grpc_port", server.grpc_port, error, (server.http_port,))
        if found.key == "server.host" or "grpc_port" in server.model_fields_set:
            raise ConfigError(found.message) from None
    with _bound(server.host, 0) as free:
        return server.model_copy(update={"grpc_port": free.getsockname()[1]})


def local_of(config: ServiceConfig) -> LocalConfig:
    """The engines of a service's configuration, on this machine. Raises ConfigError for keys of what is not there."""
    target, draft = config.target_config, config.draft_config
    parts: dict[str, tuple[Strict | None, set[str]]] = {
        "target_config": (target, {"model_loading_config", "engine_kwargs"}),
        "draft_config": (draft, {"kind", "model_loading_config", "engine_kwargs"}),
        "router_config": (config.router_config, set(RouterConfig.model_fields) - _OF_OTHERS),
        "server": (config.server, set(ServerConfig.model_fields)),
        "": (config, {"target_config", "draft_config", "router_config", "server", "tracing"}),
    }
    for place, (part, served) in parts.items():
        for name in sorted(set() if part is None else part.model_fields_set - served):
            key = f"{place}.{name}".removeprefix(".")
            raise ConfigError(f"{key} is set with --local, which has one target, one router and no logs of them")
    models = {"target_config": target, "draft_config": draft if isinstance(draft, ModelDraftConfig) else None}
    for place, model in models.items():
        if model is not None and model.model_loading_config.tokenizer_source is not None:
            raise ConfigError(
                f"{place}.model_loading_config.tokenizer_source is set with --local, which has no such key"
            )
    drafter: DraftModel | Growing | None = None
    if isinstance(draft, ModelDraftConfig):
        drafter = DraftModel(path=draft.model_loading_config.source, **_given(draft.engine_kwargs))
    elif draft is not None:
        drafter = draft.engine_kwargs
    return LocalConfig(
        target=TargetModel(path=target.model_loading_config.source, **_given(target.engine_kwargs)),
        draft=drafter,
        generation_config=config.router_config.generation_config,
        **{key: getattr(config.router_config, key) for key in _TIMEOUTS & config.router_config.model_fields_set},
    )


def _given(options: Strict) -> dict[str, Any]:
    """The options that were set; defaults of the others depend on where an engine runs."""
    return {name: getattr(options, name) for name in options.model_fields_set}


def local_edge(
    pipeline: LocalPipeline,
    server: ServerConfig,
    model_id: str,
    keys: KeyRing | None = None,
    tracing: Tracing | None = None,
) -> Edge:
    """The edge of HTTP over a pipeline of this machine. Raises ConfigError for a template that cannot be read."""
    pipeline.load()
    target = pipeline.config.target
    chat = load_chat(
        target.path,
        server.chat_template,
        target.trust_remote_code,
        tool_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
    )
    registry = pipeline.metrics.registry
    names = server.served_model_name or (model_id,)
    replicas = {kind: ReplicaMetrics(registry) for kind in ("target", "draft")}

    async def page() -> str:
        for status in itertools.chain(*pipeline.server_info().pools.values()):
            replicas[status.kind].update(replace(status, model=model_id))
        return generate_latest(registry).decode()

    kept = LOCAL_BYTES if server.responses_store_bytes is None else server.responses_store_bytes
    return Edge(
        names[0],
        GenerationService(pipeline.router, tracing, shares_cache=server.share_cache_between_keys),
        Access(keys, AccessMetrics(registry)),
        server.max_message_bytes,
        metrics=page,
        chat=chat,
        status=partial(asyncio.to_thread, pipeline.server_info),
        aliases=names[1:],
        system_fingerprint=fingerprint_of(pipeline.config.model_dump_json()),
        cors_origins=server.cors_origins,
        allowed_hosts=server.hosts,
        force_include_usage=server.force_include_usage,
        strict_fields=server.strict_fields,
        playground=server.playground,
        responses=ResponseStore(kept) if kept else None,
        trace_headers=None if tracing is None else trace_headers,
    )


def _listening(server: ServerConfig) -> socket.socket:
    """The port, taken before a model is loaded. Raises ConfigError."""
    try:
        return _bound(server.host, server.http_port)
    except OSError as error:
        found = refusal(server.host, "http_port", server.http_port, error, (server.grpc_port,))
        raise ConfigError(found.message) from error


def _bound(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handlers for the signal that uvicorn raises again at its end, also where a shell had SIGINT ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGTERM: _done, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _done(number: int, frame: FrameType | None) -> None:
    """Ignores the signal that uvicorn raises again after it has ended."""


class _Renewed:
    """Files that others renew while the service runs: the keys, and the certificate of the port."""

    def __init__(self, keys: KeyRing | None, certificates: Certificates | None, metrics: AccessMetrics) -> None:
        self._keys, self._certificates, self._metrics = keys, certificates, metrics
        self._shown = None if certificates is None else certificates.current

    def refresh(self, context: ssl.SSLContext | None) -> None:
        """Rereads changed files; ``context`` shows the certificate to later connections."""
        if self._keys is not None:
            self._keys.refresh()
            self._metrics.reload_failures("api_keys", self._keys.num_failures)
        if self._certificates is None or context is None:
            return
        identity = self._certificates.refresh()
        self._metrics.certificate("server", identity.expires_at)
        self._metrics.reload_failures("server", self._certificates.num_failures)
        if identity is not self._shown:
            with tempfile.NamedTemporaryFile() as checked:  # readable by this user alone: the version that was checked
                checked.write(identity.key + b"\n" + identity.chain)
                checked.flush()
                context.load_cert_chain(checked.name)
            self._shown = identity


class _Server(uvicorn.Server):
    """Serves gRPC, too; says where it listens, and takes keys and certificate again when their files have changed."""

    def __init__(
        self,
        config: uvicorn.Config,
        renewed: _Renewed,
        serve_grpc: Callable[[], Awaitable[Any]],
        drain: Callable[[], Coroutine[Any, Any, None]],
        addresses: str,
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._renewed, self._serve_grpc, self._drain = renewed, serve_grpc, drain
        self._addresses, self._on_ready = addresses, on_ready
        self._num_signals = 0
        self.failure: ConfigError | None = None
        """The reason why the gRPC port could not be used, if so."""

    async def main_loop(self) -> None:
        try:
            grpc = await self._serve_grpc()
        except ConfigError as error:  # uvicorn ends as after a signal
            self.failure = error
            return
        print(f"{self._addresses}\nready", flush=True)
        self._on_ready()
        tune_server_process()
        task = asyncio.create_task(self._renew(), name="paceline-renewal")
        try:
            await super().main_loop()
            await self._drained()
        finally:
            task.cancel()
            await asyncio.gather(task, grpc.stop(_GOODBYE_S), return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        super().handle_exit(sig, frame)

    async def _drained(self) -> None:
        """Serves what is in progress, and refuses what comes, until it has ended or a second signal comes."""
        draining = asyncio.create_task(self._drain(), name="paceline-drain")
        await asyncio.wait([draining], timeout=_SIGNAL_S)
        if not draining.done() and not logs.is_quiet():
            print("paceline: requests in progress are being completed; interrupt again to end them", file=sys.stderr)
        while not draining.done() and self._num_signals < 2:
            await asyncio.wait([draining], timeout=_SIGNAL_S)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            try:
                self._renewed.refresh(self.config.ssl)
            except Exception as error:  # it is tried again, and what is in use stays
                logs.unexpected(log, error)
            await asyncio.sleep(_RELOAD_S)
