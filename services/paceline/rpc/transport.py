"""gRPC between Paceline's processes: options of servers and channels, the internal token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

_UNLIMITED = -1
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", _UNLIMITED),
    ("grpc.max_receive_message_length", _UNLIMITED),
]
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
"""Channel options for router-to-replica streams. Each link opens its own connection."""

TOKEN_KEY = "paceline-token"


class _TokenCheck(aio.ServerInterceptor):
    """Refuses calls without the token that all processes of a deployment share."""

    def __init__(self, token: str) -> None:
        self._token = token

        async def refuse(_: Any, context: aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the internal token is missing or wrong")

        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY)
        return await continuation(handler_call_details) if given == self._token else self._refusal


async def start_server(
    add: Callable[[aio.Server], None], host: str, port: int = 0, token: str = ""
) -> tuple[aio.Server, int]:
    """Starts a server; returns it and its port (0: the system chooses). Raises OSError if the address cannot be bound.

    ``add`` registers the servicers. Every call must carry ``token``, unless that is empty.
    """
    interceptors = [_TokenCheck(token)] if token else []
    server = aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
    add(server)
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error}") from error
    await server.start()
    return server, bound
