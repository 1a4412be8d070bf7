"""Ports of this machine: which are free, and faults of the ports that the service should listen on.

Called by ``preflight.service``, and by ``cluster.ports``, which chooses ports.
"""

from __future__ import annotations

import errno
import socket

from paceline.preflight.findings import Finding

_PORTS_TRIED = 32
"""Ports after a taken one that are looked at for a free one."""


def check_ports(host: str, grpc_port: int, http_port: int) -> list[Finding]:
    """Yields an error for each port that cannot be used, naming one that can."""
    findings = []
    for name, port in (("grpc_port", grpc_port), ("http_port", http_port)):
        try:
            bind(host, port)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                problem = f"is {host!r}, which is not an address of this machine: use '127.0.0.1', or '0.0.0.0' for all"
                return [Finding.error("server.host", problem)]
            others = range(port + 1, min(port + _PORTS_TRIED, 65536))
            free = next((p for p in others if p not in (grpc_port, http_port) and is_free(p, host)), None)
            remedy = "choose another port" if free is None else f"--{name.replace('_', '-')} {free} is free"
            problem = f"is {port}, {_reason(error)}: {remedy}"
            findings.append(Finding.error(f"server.{name}", problem))
    return findings


def _reason(error: OSError) -> str:
    """Why a port cannot be used, as a clause."""
    if error.errno == errno.EADDRINUSE:
        return "and another process listens there"
    if error.errno == errno.EACCES:
        return "and this user may not listen below 1024"
    return f"which cannot be used ({(error.strerror or str(error)).lower()})"


def bind(host: str, port: int) -> None:
    """Binds a port for a moment. Raises OSError if a server could not."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)


def is_free(port: int, host: str = "0.0.0.0") -> bool:
    """True if a server could listen on the port now."""
    try:
        bind(host, port)
    except OSError:
        return False
    return True
