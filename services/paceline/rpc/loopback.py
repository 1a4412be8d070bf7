"""Keeps the ports of a Ray of our own to this machine; only HAProxy's two public ones are at the address asked for.

Ray's own processes listen on the node's address, which ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`` makes 127.0.0.1. Serve's
gRPC servers (of routers, of its fallback proxy, and of every replica) always listen on all addresses: ``keep_local``
is the ``worker_process_setup_hook`` that turns that into 127.0.0.1.
"""

from __future__ import annotations

from typing import Any

LOOPBACK = "127.0.0.1"
_ALL = ("[::]:", "0.0.0.0:")


def local_address(address: str) -> str:
    """The address to listen on for one that was asked for: all addresses become the loopback."""
    return next((f"{LOOPBACK}:{address.removeprefix(all_)}" for all_ in _ALL if address.startswith(all_)), address)


def keep_local() -> None:
    """Makes every gRPC server of this process listen on the loopback where it would on all addresses."""
    from grpc.aio._server import Server

    insecure, secure = Server.add_insecure_port, Server.add_secure_port

    def add_insecure_port(self: Server, address: str) -> int:
        return insecure(self, local_address(address))

    def add_secure_port(self: Server, address: str, server_credentials: Any) -> int:
        return secure(self, local_address(address), server_credentials)

    Server.add_insecure_port, Server.add_secure_port = add_insecure_port, add_secure_port  # type: ignore[method-assign]
