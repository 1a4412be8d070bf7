"""The gRPC connections of a router: clients are balanced by connection, so these must move when routers come and go.

    a connection is as old as it may be ─▶ GOAWAY: its streams go on, new calls open a connection, to any router
    a router is stopped ─▶ the proxy opens none to it any more; once all have left, it stops its server

gRPC sends that GOAWAY so that no call is lost. A server that is stopped earlier sends one, too, but refuses calls that
are on their way as CANCELLED.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.rpc.transport import max_age

_POLL_S = 0.25
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"


def limit_ages(age_s: float) -> None:
    """Makes the gRPC port that Serve opens next in this process one whose connections move."""
    from ray.serve._private import grpc_util

    options = [*grpc_util.DEFAULT_GRPC_SERVER_OPTIONS, max_age(age_s)]
    grpc_util.DEFAULT_GRPC_SERVER_OPTIONS = options


def note_shutdown(begins: Callable[[float], float]) -> None:
    """Calls ``begins`` with the remaining seconds when Serve begins to stop the replica of this process. Serve then
    waits until all clients have left, at most for the seconds that ``begins`` returns.

    Serve notifies a replica of its end once it has no requests, and kills it after graceful_shutdown_timeout_s in any
    case.
    """
    from ray.serve._private import replica

    perform = replica.Replica._perform_graceful_shutdown

    async def told(self: Any) -> None:
        limit_s = begins(self._deployment_config.graceful_shutdown_timeout_s)
        self._shutting_down = True  # as ``perform`` would: checks of health say so
        await until_left(self._grpc_port, limit_s)
        await perform(self)

    replica.Replica._perform_graceful_shutdown = told


async def until_left(port: int | None, limit_s: float) -> None:
    """Returns when no connection of a port is open any more, or the time has passed."""
    end = time.monotonic() + limit_s
    while port is not None and time.monotonic() < end and num_connections(port):
        await asyncio.sleep(_POLL_S)


def num_connections(port: int) -> int:
    """Open connections of a port of this machine; 0 where the system does not tell."""
    count = 0
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                count += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    return count
