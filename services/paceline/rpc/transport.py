"""gRPC between Paceline's processes: options of servers and channels, mutual TLS, the internal token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from paceline.security.certificates import Certificates, Identity

_UNLIMITED = -1
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", _UNLIMITED),
    ("grpc.max_receive_message_length", _UNLIMITED),
]
HANDSHAKE_TIMEOUT = "grpc.server_handshake_timeout_ms"
"""Option: milliseconds in which a new client must send its first bytes and finish its TLS handshake."""
SERVER_OPTIONS = [
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    (HANDSHAKE_TIMEOUT, 10_000),  # a connection that says nothing holds a file descriptor
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


def max_age(age_s: float) -> tuple[str, int]:
    """Returns the server option by which connections of about ``age_s`` seconds take no new calls.

    gRPC varies the age by a tenth.
    """
    return ("grpc.max_connection_age_ms", round(1000 * age_s))


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
        given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        right = isinstance(given, str) and hmac.compare_digest(given.encode(), self._token.encode())
        return await continuation(handler_call_details) if right else self._refusal


def server_credentials(certificates: Certificates, *, internal: bool = True) -> grpc.ServerCredentials:
    """Returns the credentials of a server that shows its newest certificate.

    The server refuses peers without a certificate of the same authority. A public one (``internal`` false) does so only
    if ``certificates`` name an authority. The files are looked at with each new connection. Open streams keep the
    certificate that they began with.
    """

    def configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(identity.key, identity.chain)], identity.ca)

    return grpc.dynamic_ssl_server_credentials(
        configuration(certificates.current),
        lambda: configuration(certificates.refresh()),
        require_client_authentication=internal or certificates.current.ca is not None,
    )


def channel(address: str, certificates: Certificates | None) -> aio.Channel:
    """Returns a channel to the replica at ``address`` (``host:port``). ``certificates`` None: it is not encrypted."""
    if certificates is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    own = certificates.refresh()
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", certificates.files.server_name)]
    return aio.secure_channel(address, grpc.ssl_channel_credentials(own.ca, own.key, own.chain), options=options)


async def start_server(
    add: Callable[[aio.Server], None],
    host: str,
    port: int = 0,
    token: str = "",
    certificates: Certificates | None = None,
    *,
    max_message_bytes: int = _UNLIMITED,
    internal: bool = True,
    max_age_s: float | None = None,
) -> tuple[aio.Server, int]:
    """Starts a server; returns it and its port (0: the system chooses). Raises OSError if the address cannot be bound.

    ``add`` registers the servicers. Every call must carry ``token``, unless that is empty. ``certificates``: see
    ``server_credentials``, as for ``internal``; None: nothing is encrypted. ``max_message_bytes``: the most that the
    server receives. ``max_age_s``: of a connection, as ``max_age``; None: no limit.
    """
    interceptors = [_TokenCheck(token)] if token else []
    options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    if max_age_s is not None:
        options.append(max_age(max_age_s))
    server = aio.server(options=options, interceptors=interceptors)
    add(server)
    try:
        if certificates is None:
            bound = server.add_insecure_port(f"{host}:{port}")
        else:
            bound = server.add_secure_port(f"{host}:{port}", server_credentials(certificates, internal=internal))
    except RuntimeError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {error}") from error
    await server.start()
    return server, bound
