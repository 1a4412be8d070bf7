"""The internal door of a draft replica: ``DraftService`` over one EngineHost."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from grpc import aio

from paceline.config import DraftSetup
from paceline.draft.engine import DraftEngine
from paceline.errors import EngineError
from paceline.rpc.streams import decode_to_draft, encode_from_draft
from paceline.runtime.build import EngineSpec
from paceline.runtime.host import EngineHost, EngineServer
from paceline.runtime.ranks import MakeFollower, process_ranks
from paceline.types import Rendezvous
from paceline.v1 import draft_pb2, draft_pb2_grpc


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """One long-lived bidirectional stream per router, all its sessions on it."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Rounds(  # type: ignore[override]  # the stub is typed for both the sync and the async server
        self,
        request_iterator: AsyncIterator[draft_pb2.ToDraft],
        context: aio.ServicerContext[draft_pb2.ToDraft, draft_pb2.FromDraft],
    ) -> None:
        """See protos/paceline/v1/draft.proto."""
        try:
            await self._host.serve(request_iterator, context.write, decode_to_draft, encode_from_draft)
        except EngineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def describe(engine: DraftEngine) -> Mapping[str, Any]:
    """What a draft's status says of its engine."""
    return {"num_sessions": engine.num_sessions, "counters": dataclasses.asdict(engine.stats)}


def draft_server(
    setup: DraftSetup,
    *,
    replica_id: str,
    bind: str = "127.0.0.1",
    token: str = "",
    model: str = "",
    node: str = "",
    core: int | None = None,
    ranks: tuple[Rendezvous | None, Sequence[MakeFollower]] | None = None,
) -> EngineServer:
    """A draft replica, not started yet. ``core`` and ``ranks``: see ``target_server``."""
    rendezvous, followers = ranks or process_ranks(setup)

    def add(host: EngineHost, server: aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftService(host), server)

    host = EngineHost(
        "draft",
        EngineSpec(setup, rendezvous).build,
        describe,
        replica_id=replica_id,
        max_sessions=setup.num_sessions,
        model=model,
        node=node,
        core=core,
        followers=followers,
    )
    return EngineServer(host, add, bind=bind, token=token)
