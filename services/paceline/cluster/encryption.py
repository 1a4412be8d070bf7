"""The ports that Ray Serve opens, and TLS: what Serve itself does not offer is brought in here.

    gRPC clients ══ server.tls, through haproxy ══▶ the gRPC port of a router
    HTTP clients ── server.tls ──▶ haproxy (``security.haproxy``) ──▶ the HTTP port of a router

Without ``server.tls`` haproxy encrypts the way to a router's gRPC port by ``internal_tls``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from paceline.config import InternalTls, ServerTls, ServiceConfig
from paceline.errors import ConfigError
from paceline.rpc.transport import server_credentials
from paceline.security import haproxy
from paceline.security.certificates import Certificates


def tls_settings(config: ServiceConfig) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """``server.tls`` and ``internal_tls`` as plain data."""
    server, internal = config.server.tls, config.internal_tls
    return None if server is None else server.model_dump(), None if internal is None else internal.model_dump()


def _settings_of_ray() -> tuple[ServerTls | None, InternalTls | None]:
    """Settings that the processes of this Ray cluster were started with. Raises ConfigError if it cannot be read."""
    try:
        given = json.loads(os.environ.get(haproxy.SETTINGS, "{}"))
        server, internal = given.get("server"), given.get("internal")
        return (
            None if server is None else ServerTls.model_validate(server),
            None if internal is None else InternalTls.model_validate(internal),
        )
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{haproxy.SETTINGS} is not as `paceline serve --print-environment` prints it") from error


def encrypt_ingress(config: ServiceConfig, certificates: Mapping[str, Certificates]) -> None:
    """Encrypts the gRPC port that Serve opens next in this process by the ``server`` certificates, or else by the
    ``internal`` ones, if there are any.

    Raises ConfigError unless the proxies of this cluster expect what the configuration says.
    """
    server_tls, internal_tls = tls_settings(config)
    if server_tls is None and internal_tls is None:
        return
    if _settings_of_ray() != (config.server.tls, config.internal_tls):
        raise ConfigError(
            f"server.tls and internal_tls differ from what this Ray cluster started with ({haproxy.SETTINGS})"
            ": start Ray with what `paceline serve --config FILE --print-environment` prints"
        )
    use = "server" if server_tls is not None else "internal"
    credentials = server_credentials(certificates[use], internal=use == "internal")
    from ray.serve._private import default_impl

    def add_encrypted_address(server: Any, address: str) -> None:
        if not server.add_secure_port(address, credentials):
            raise RuntimeError(f"{address} cannot be listened on")

    default_impl.add_grpc_address = add_encrypted_address
