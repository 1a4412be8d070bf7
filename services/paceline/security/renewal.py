"""The certificates of a running haproxy: checked, kept next to its configuration, and renewed without a restart.

files of the configuration ─▶ one bundle per use, which haproxy reads ─▶ its admin socket, whenever they change
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.security.certificates import CertificateFiles, Certificates, Identity
from paceline.security.haproxy_config import Pem, write_privately

log = logging.getLogger(__name__)

_NO_NAME = "paceline.invalid"
"""A name that no client asks for. The only certificate serves every name. But haproxy 2.8 forgets ALPN and the check of
clients when it renews a certificate without a name, such as one for addresses alone."""
_PERIOD_S = 1.0
_ANSWER_S = 5.0


def pems(settings: Mapping[str, Any], folder: Path) -> dict[str, Pem]:
    """The uses of certificates by haproxy itself: ``server`` at the HTTP port, and ``internal`` towards routers."""
    found = {}
    server, internal = settings.get("server"), settings.get("internal")
    if server is not None and server.get("http", True):
        found["server"] = Pem.of(
            CertificateFiles.at("server.tls", server["certificate"], server["key"]), folder, "server"
        )
    if internal is not None:
        files = CertificateFiles.at("internal_tls", internal["certificate"], internal["key"], internal["ca"])
        found["internal"] = Pem.of(files, folder, "internal")
    return found


def write(pem: Pem, identity: Identity) -> None:
    """Replaces the files of one use, each in one step."""
    write_privately(pem.listing, f"{pem.bundle} {_NO_NAME}\n".encode())
    write_privately(pem.bundle, joined(identity.chain, identity.key))
    if pem.ca is not None and identity.ca is not None:
        write_privately(pem.ca, joined(identity.ca))


def joined(*parts: bytes) -> bytes:
    """PEM texts in one, without empty lines: the admin socket takes such a line for the end."""
    return b"".join(line + b"\n" for part in parts for line in part.splitlines() if line.strip())


def update_commands(pem: Pem, identity: Identity) -> Iterator[bytes]:
    """Commands of the admin socket that put a version in use; connections that are open keep theirs."""
    yield from _replace("cert", pem.bundle, joined(identity.chain, identity.key))
    if pem.ca is not None and identity.ca is not None:
        yield from _replace("ca-file", pem.ca, joined(identity.ca))


def _replace(kind: str, path: Path, data: bytes) -> Iterator[bytes]:
    yield f"set ssl {kind} {path} <<\n".encode() + data + b"\n"
    yield f"commit ssl {kind} {path}\n".encode()


def tell(admin: str, command: bytes) -> str:
    """Sends one command to an admin socket and returns the answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(admin)
        connection.sendall(command)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode(errors="replace").strip()


class Keeper:
    """Brings renewed certificates into a running haproxy."""

    def __init__(self, used: Mapping[str, Pem], admin: str) -> None:
        self._used, self._admin = used, admin
        self._certificates: dict[str, Certificates] = {}
        self._in_use: dict[str, Identity] = {}

    def prepare(self) -> None:
        """Writes the files that haproxy reads. Raises ConfigError if one is unusable and there is none from before."""
        for use, pem in self._used.items():
            try:
                self._certificates[use] = certificates = Certificates(pem.certificates)
            except ConfigError as error:
                if not pem.bundle.exists() or (pem.ca is not None and not pem.ca.exists()):
                    raise
                log.error("the certificate from before is used: %s", error)
            else:
                write(pem, certificates.current)
                self._in_use[use] = certificates.current

    def tick(self) -> None:
        """Checks the files and passes valid new versions to haproxy; failed updates are tried again."""
        for use, pem in self._used.items():
            try:
                certificates = self._certificates.get(use) or Certificates(pem.certificates)
            except ConfigError:  # as at the start
                continue
            self._certificates[use] = certificates
            identity = certificates.refresh()
            if identity is not self._in_use.get(use):
                write(pem, identity)
                if self._tell(pem, identity):
                    self._in_use[use] = identity

    def _tell(self, pem: Pem, identity: Identity) -> bool:
        try:
            answers = [tell(self._admin, command) for command in update_commands(pem, identity)]
        except OSError as error:
            log.warning("haproxy does not answer, and will be told again: %s", error)
            return False
        refused = [answer for answer in answers[1::2] if "Success" not in answer]
        if refused:
            log.error("haproxy did not take the new certificate: %s", "; ".join(answers))
        return not refused


def start(settings: Mapping[str, Any], config: str, folder: Path) -> tuple[dict[str, Pem], Keeper]:
    """Writes the certificates that haproxy reads, and returns their files and what renews them. Raises ConfigError.

    ``config``: haproxy's configuration.
    """
    logging.basicConfig(level=logging.INFO, format="paceline: %(message)s", stream=sys.stderr)
    used = pems(settings, folder)
    admin = re.search(r"^\s*stats socket (\S+)", config, re.MULTILINE)
    if admin is None:
        raise ConfigError("Ray Serve's configuration of haproxy has no admin socket: certificates cannot be renewed")
    keeper = Keeper(used, admin[1])
    keeper.prepare()
    return used, keeper


def keep(keeper: Keeper, owner: Path) -> None:
    """Starts a child that renews the certificates while this process lives and no newer one has taken over."""
    haproxy = os.getpid()
    if os.fork():
        return
    own = str(os.getpid())
    write_privately(owner, own.encode())
    while os.getppid() == haproxy and owner.exists() and owner.read_text(encoding="ascii") == own:
        try:
            keeper.tick()
        except Exception:
            log.exception("unexpected error while certificates are renewed")
        time.sleep(_PERIOD_S)
    os._exit(0)
