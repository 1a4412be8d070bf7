"""The internal gRPC port of a replica: TargetService or DraftService over one EngineHost."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc import aio

from paceline.config import DraftSetup, TargetSetup
from paceline.config.targets import KVTransferBackend
from paceline.errors import ConfigError, EngineError
from paceline.rpc import protocol, streams
from paceline.rpc.transport import start_server
from paceline.runtime.build import EngineSpec
from paceline.runtime.host import Decode, Encode, EngineHost, Observer
from paceline.runtime.nixl import NixlAgent, is_installed
from paceline.runtime.page_mover import HostMemoryMover, NixlMover, serve_pages
from paceline.runtime.ranks import MakeFollower, process_ranks
from paceline.security.certificates import Certificates
from paceline.types import Rendezvous
from paceline.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

_LONGEST_START_S = 60.0
"""To register the memory of pages."""


class _Protocol(NamedTuple):
    """Codec and service of one kind of engine. The batches are protobuf messages, which only ``rpc`` reads."""

    decode: Decode[Any]
    encode: Encode[Any, Any]
    add: Callable[[Any, aio.Server], None]
    """Registers the servicer."""


PROTOCOLS = {
    "target": _Protocol(
        streams.decode_to_target, streams.encode_from_target, target_pb2_grpc.add_TargetServiceServicer_to_server
    ),
    "draft": _Protocol(
        streams.decode_to_draft, streams.encode_from_draft, draft_pb2_grpc.add_DraftServiceServicer_to_server
    ),
}


class _RoundsService:
    """Implements TargetService and DraftService: one long-lived stream per router, all its sessions on it."""

    def __init__(self, host: EngineHost[Any], protocol: _Protocol, agent: NixlAgent | None) -> None:
        self._host, self._protocol, self._agent = host, protocol, agent

    async def Rounds(self, request_iterator: AsyncIterator[Any], context: aio.ServicerContext[Any, Any]) -> None:
        """Serves one router's stream (target.proto and draft.proto)."""
        try:
            refusal = protocol.refusal(protocol.stated(context.invocation_metadata()))
        except ValueError as error:
            refusal = str(error)
        if refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        try:
            await self._host.serve(request_iterator, context.write, self._protocol.decode, self._protocol.encode)
        except EngineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def Pages(self, request: target_pb2.PagesRequest, context: aio.ServicerContext[Any, Any]) -> None:
        """Serves another target, to which a session moves (target.proto)."""
        try:
            await serve_pages(self._host.call, request, context.write, self._agent)
        except EngineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


class EngineServer:
    """An EngineHost and the internal port that routers reach it by."""

    def __init__(
        self,
        host: EngineHost[Any],
        *,
        bind: str = "127.0.0.1",
        token: str = "",
        certificates: Certificates | None = None,
        mover: HostMemoryMover | None = None,
    ) -> None:
        """``bind``: the address to listen on; in a cluster the node's. ``mover``: of a target, brings pages here. For
        the others see ``start_server``."""
        self._certificates, self._mover = certificates, mover
        self.host = host
        self.address = ""
        """``host:port``, once started."""
        self._bind, self._token = bind, token
        self._server: aio.Server | None = None

    async def start(self) -> None:
        """Builds the engine, then listens on a port that the system chooses. Raises what the factory raises."""
        await self.host.start()
        if self._mover is not None:
            await _prepare(self._mover)
        protocol = PROTOCOLS[self.host.kind]
        agent = self._mover.agent if isinstance(self._mover, NixlMover) else None
        add = functools.partial(protocol.add, _RoundsService(self.host, protocol, agent))
        self._server, port = await start_server(add, self._bind, 0, self._token, self._certificates)
        self.address = f"{self._bind}:{port}"

    async def stop(self) -> None:
        """Ends streams, server and engine. Idempotent."""
        if self._server is not None:
            await self._server.stop(0)
        if self._mover is not None:
            await self._mover.close()
        await self.host.stop()


async def _prepare(mover: HostMemoryMover) -> None:
    """If this fails, or takes too long, pages are moved through host memory."""
    try:
        await asyncio.wait_for(mover.start(), _LONGEST_START_S)
    except (OSError, EngineError) as error:
        log.warning("KV pages are moved through host memory: %s", str(error) or type(error).__name__)


def engine_server(
    setup: TargetSetup | DraftSetup,
    *,
    replica_id: str,
    bind: str = "127.0.0.1",
    token: str = "",
    certificates: Certificates | None = None,
    model: str = "",
    node: str = "",
    cores: Sequence[int] = (),
    ranks: tuple[Rendezvous | None, Sequence[MakeFollower]] | None = None,
    observer: Observer | None = None,
) -> EngineServer:
    """Makes a target or draft replica, not started yet. ``cores``: to pin the engine's threads to.

    ``ranks``: where they meet, and makers of all but the first. None: processes of this host, if there are several.
    ``observer`` receives the engine's events.
    """
    rendezvous, followers = ranks or process_ranks(setup)
    spec = EngineSpec(setup, rendezvous, shares_interpreter=True)
    host: EngineHost[Any] = EngineHost(
        spec.kind,
        spec.build,
        replica_id=replica_id,
        max_sessions=setup.options.max_sessions if isinstance(setup, TargetSetup) else setup.num_sessions,
        model=model,
        node=node,
        cores=cores,
        followers=followers,
        observer=observer,
    )
    mover = None
    if isinstance(setup, TargetSetup):
        mover = _page_mover(host, setup.options.kv_transfer_backend, token, certificates)
        host.take_pages(mover)
    return EngineServer(host, bind=bind, token=token, certificates=certificates, mover=mover)


def _page_mover(
    host: EngineHost[Any], backend: KVTransferBackend, token: str, certificates: Certificates | None
) -> HostMemoryMover:
    """``auto``: NIXL where it is installed, unless internal connections are encrypted, as NIXL's are not."""
    if backend == "nixl" and not is_installed():
        raise ConfigError(
            "kv_transfer_backend is 'nixl' and the package nixl is not installed: pip install 'paceline[nixl]' adds it,"
            " 'auto' or 'host' is allowed"
        )
    if backend == "host" or not is_installed() or (backend == "auto" and certificates is not None):
        return HostMemoryMover(host.call, token, certificates)
    return NixlMover(host.call, token, certificates, agent=NixlAgent())
