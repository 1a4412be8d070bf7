"""Ports of this machine: which are free, and faults of the ports that the service should listen on.

Called by ``preflight.service``, by ``cluster.ports``, which chooses ports, and by ``serve --local``.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

from paceline.preflight.findings import Finding

_PORTS_TRIED = 32
"""Ports after a taken one that are looked at for a free one."""


def check_ports(host: str, grpc_port: int, http_port: int) -> list[Finding]:
    """Returns an error for each port that cannot be used, naming one that can."""
    findings = []
    for name, port in (("grpc_port", grpc_port), ("http_port", http_port)):
        try:
            bind(host, port)
        except OSError as error:
            findings.append(refusal(host, name, port, error, (grpc_port, http_port)))
            if findings[-1].key == "server.host":
                return findings[-1:]
    return findings


def refusal(host: str, name: str, port: int, error: OSError, taken: Collection[int] = ()) -> Finding:
    """The error of a port that cannot be used, with one that can.

    Args:
        host: address that is listened on.
        name: key of the port below ``server``.
        port: its value.
        error: what binding it raised.
        taken: ports that are not proposed.
    """
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        problem = f"is {host!r}, which is not an address of this machine: use '127.0.0.1', or '0.0.0.0' for all"
        return Finding.error("server.host", problem)
    others = range(max(port, 1023) + 1, min(max(port, 1023) + _PORTS_TRIED, 65536))
    free = next((p for p in others if p not in taken and is_free(p, host)), None)
    remedy = "choose another port" if free is None else f"--{name.replace('_', '-')} {free} is free"
    reason = f"which cannot be used ({(error.strerror or str(error)).lower()})"
    if error.errno == errno.EADDRINUSE:
        reason = "and another process listens there"
    elif error.errno == errno.EACCES:
        reason = "and this user may not listen below 1024"
    return Finding.error(f"server.{name}", f"is {port}, {reason}: {remedy}")


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
