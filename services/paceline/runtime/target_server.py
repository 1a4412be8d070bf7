"""The internal door of a target replica: ``TargetService`` over one EngineHost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from grpc import aio

from paceline.config import TargetSetup
from paceline.errors import EngineError
from paceline.rpc.streams import decode_to_target, encode_from_target
from paceline.runtime.build import EngineSpec
from paceline.runtime.host import EngineHost, EngineServer
from paceline.runtime.ranks import MakeFollower, process_ranks
from paceline.target.control.report import Explainer
from paceline.target.engine import TargetEngine
from paceline.types import Rendezvous
from paceline.v1 import target_pb2, target_pb2_grpc


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """One long-lived bidirectional stream per router, all its sessions on it."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Rounds(  # type: ignore[override]  # the stub is typed for both the sync and the async server
        self,
        request_iterator: AsyncIterator[target_pb2.ToTarget],
        context: aio.ServicerContext[target_pb2.ToTarget, target_pb2.FromTarget],
    ) -> None:
        """See protos/paceline/v1/target.proto."""
        try:
            await self._host.serve(request_iterator, context.write, decode_to_target, encode_from_target)
        except EngineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def describe(engine: TargetEngine, explainer: Explainer) -> Mapping[str, Any]:
    """What a target's status says of its engine and of its controller."""
    cache = engine.runner.cache
    return {
        "num_sessions": engine.num_sessions,
        "num_waiting": engine.num_waiting,
        "kv_pages_used": cache.num_pages - cache.num_available,
        "kv_pages": cache.num_pages,
        "counters": {**dataclasses.asdict(engine.stats), "trials": engine.steering.governor.num_trials},
        **explainer(engine),
    }


def target_server(
    setup: TargetSetup,
    *,
    replica_id: str,
    bind: str = "127.0.0.1",
    token: str = "",
    model: str = "",
    node: str = "",
    core: int | None = None,
    ranks: tuple[Rendezvous | None, Sequence[MakeFollower]] | None = None,
) -> EngineServer:
    """A target replica, not started yet. ``core``: the one to pin the engine's thread to.

    ``ranks``: where they meet, and makers of all but the first. None: processes of this host, if there are several.
    """
    rendezvous, followers = ranks or process_ranks(setup)

    def add(host: EngineHost, server: aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(TargetService(host), server)

    host = EngineHost(
        "target",
        EngineSpec(setup, rendezvous).build,
        functools.partial(describe, explainer=Explainer()),
        replica_id=replica_id,
        max_sessions=setup.options.max_sessions,
        model=model,
        node=node,
        core=core,
        followers=followers,
    )
    return EngineServer(host, add, bind=bind, token=token)
