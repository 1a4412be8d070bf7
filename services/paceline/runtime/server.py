"""The internal gRPC port of a replica: TargetService or DraftService over one EngineHost."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc import aio

from paceline.config import DraftSetup, TargetSetup
from paceline.errors import EngineError
from paceline.rpc import protocol, streams
from paceline.rpc.transport import start_server
from paceline.runtime.build import EngineSpec
from paceline.runtime.host import Decode, Encode, EngineHost, Observer
from paceline.runtime.page_mover import HostMemoryMover, serve_pages
from paceline.runtime.ranks import MakeFollower, process_ranks
from paceline.security.certificates import Certificates
from paceline.types import Rendezvous
from paceline.v1 import draft_pb2_grpc, target_pb2, target_pb2_grpc


class _Protocol(NamedTuple):
    """Codec and service of one kind of engine. The batches are protobuf messages, which only ``rpc`` reads."""

    decode: Decode[Any]
    encode: Encode[Any, Any]
    add: Callable[[Any, aio.Server], None]
    """Registers the servicer."""


_PROTOCOLS = {
    "target": _Protocol(
        streams.decode_to_target, streams.encode_from_target, target_pb2_grpc.add_TargetServiceServicer_to_server
    ),
    "draft": _Protocol(
        streams.decode_to_draft, streams.encode_from_draft, draft_pb2_grpc.add_DraftServiceServicer_to_server
    ),
}


class _RoundsService:
    """Implements TargetService and DraftService: one long-lived stream per router, all its sessions on it."""

    def __init__(self, host: EngineHost[Any], protocol: _Protocol) -> None:
        self._host, self._protocol = host, protocol

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
            await serve_pages(self._host.call, request, context.write)
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
    ) -> None:
        """``bind``: the address to listen on; in a cluster the node's. For the others see ``start_server``."""
        self._certificates = certificates
        self.host = host
        self.address = ""
        """``host:port``, once started."""
        self._bind, self._token = bind, token
        self._server: aio.Server | None = None

    async def start(self) -> None:
        """Builds the engine, then listens on a port that the system chooses. Raises what the factory raises."""
        await self.host.start()
        protocol = _PROTOCOLS[self.host.kind]
        add = functools.partial(protocol.add, _RoundsService(self.host, protocol))
        self._server, port = await start_server(add, self._bind, 0, self._token, self._certificates)
        self.address = f"{self._bind}:{port}"

    async def stop(self) -> None:
        """Ends streams, server and engine. Idempotent."""
        if self._server is not None:
            await self._server.stop(0)
        await self.host.stop()


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
    ``observer`` is told what the engine does.
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
    if spec.kind == "target":
        host.take_pages(HostMemoryMover(host.call, token, certificates))
    return EngineServer(host, bind=bind, token=token, certificates=certificates)
