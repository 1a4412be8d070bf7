"""Ray Serve's configuration of haproxy, as Paceline runs it: text in, text out. Imports little: it runs at each reload.

    HTTP  ── server.tls ──▶ haproxy, which picks a router per request ──▶ HTTP port of the router
    gRPC  ── haproxy, which picks a router per connection (mode tcp) ──▶ gRPC port of the router, which ends server.tls

In mode http haproxy terminates HTTP/2 itself. If a router dies, it resets the streams by CANCEL, which gRPC clients
mistake for a cancellation of their own and do not retry. In mode tcp a client's connection ends with the router's, and
gRPC says UNAVAILABLE. Bytes also pass without being parsed twice.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.security.certificates import CertificateFiles

TLS_HEADER = "paceline-tls"
"""1 on an encrypted connection. The proxy for HTTP, and the router itself for gRPC, set it and replace a client's
value."""
APPLICATION = "paceline"
SERVER_NAME = "internal.paceline"
FIRST_BYTES_S = 10
"""For the headers of an HTTP request, where Serve gives an hour, and for the first bytes of a gRPC connection."""

_UNAVAILABLE = (
    "    http-request return status 200 content-type application/grpc hdr grpc-status 14 hdr grpc-retry-pushback-ms 500"
    ' hdr grpc-message "no router is known here yet: send it again"'
)

_HTTP, _GRPC = "frontend http_frontend", "frontend grpc_frontend"


@dataclass(frozen=True, slots=True)
class Pem:
    """The files that haproxy reads of one use of certificates: ours, checked, and readable by this user alone."""

    certificates: CertificateFiles
    bundle: Path
    """Certificate chain and key."""
    listing: Path
    """Names the bundle, for the port that clients reach."""
    ca: Path | None

    @classmethod
    def of(cls, files: CertificateFiles, folder: Path, use: str) -> Pem:
        """The files of one ``use``, below a folder."""
        names = [folder / f"{use}{suffix}" for suffix in (".pem", ".list")]
        return cls(files, names[0], names[1], None if files.ca is None else folder / f"{use}-ca.pem")


@dataclass
class _Section:
    """One section: its first line, and the lines below."""

    header: str
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """``frontend NAME``, ``backend NAME``, ``defaults``, ..."""
        return " ".join(self.header.split()[:2])

    def servers(self) -> set[str]:
        """Names of the routers of a backend, without backups."""
        words = [line.split() for line in self.lines]
        return {each[1] for each in words if each[:1] == ["server"] and "backup" not in each}


def edited(config: str, settings: Mapping[str, Any], used: Mapping[str, Pem], binds: Mapping[str, str]) -> str:
    """The configuration that haproxy is started with.

    ``settings``: of TLS, as ``haproxy.encode`` writes them; empty: nothing is encrypted. ``used``: the files of its
    certificates. ``binds``: the address of each port that is not to be where Serve puts it. Raises ConfigError where
    the configuration is not as expected.
    """
    sections = list(_sections(config))
    by_name = {section.name: section for section in sections}
    if not {"global", "defaults", _HTTP, _GRPC} <= by_name.keys():
        raise ConfigError("Ray Serve's configuration of haproxy is not as expected: its proxy cannot be started safely")
    by_name["defaults"].lines.append(f"    timeout http-request {FIRST_BYTES_S}s")
    for section in sections:
        section.lines = [_moved(line, binds) for line in section.lines]
    if settings:
        ours = "ssl-min-ver TLSv1.2"
        by_name["global"].lines += [f"    ssl-default-{end}-options {ours}" for end in ("bind", "server")]
        by_name[_HTTP].lines = list(_encrypted_http(by_name[_HTTP].lines, used.get("server")))
    _pass_grpc(by_name, settings, used)
    return "\n".join(line for section in sections for line in (section.header, *section.lines)) + "\n"


def _sections(config: str) -> Iterator[_Section]:
    section = None
    for line in config.splitlines():
        if line and not line[0].isspace():
            if section is not None:
                yield section
            section = _Section(line)
        elif section is not None:
            section.lines.append(line)
    if section is not None:
        yield section


def _moved(line: str, binds: Mapping[str, str]) -> str:
    """The line of a ``bind``, with the address where its port belongs."""
    words = line.split()
    if words[:1] != ["bind"]:
        return line
    port = words[1].rpartition(":")[2]
    return f"    bind {binds[port]}:{' '.join([port, *words[2:]])}" if port in binds else line


def _encrypted_http(lines: Sequence[str], server: Pem | None) -> Iterator[str]:
    for line in lines:
        if line.split()[:1] != ["bind"]:
            yield line
            continue
        yield line if server is None else f"{line} ssl crt-list {server.listing} alpn h2,http/1.1"
        yield f"    http-request set-header {TLS_HEADER} %[ssl_fc]"


def _pass_grpc(by_name: Mapping[str, _Section], settings: Mapping[str, Any], used: Mapping[str, Pem]) -> None:
    """Makes haproxy pass connections of gRPC on to the routers.

    Serve selects the application by a header, which stays so without encryption. With it, the port serves routers
    alone. Without a router, Serve's answer would be NOT_FOUND.
    """
    frontend = by_name[_GRPC]
    app = next((f"backend {w[1]}" for w in map(str.split, frontend.lines) if w[:1] == ["default_backend"]), "")
    if app not in by_name or app == "backend default_grpc_backend":
        app = f"backend grpc-{APPLICATION}"
        if not settings:
            if not any(name.startswith("backend grpc-") for name in by_name):
                frontend.lines += [_UNAVAILABLE]
            return
    binds = [line.replace(" proto h2", "") for line in frontend.lines if line.split()[:1] == ["bind"]]
    first = f"    tcp-request inspect-delay {FIRST_BYTES_S}s"
    accept = ["    tcp-request content accept if { req.len gt 0 }", "    tcp-request content reject"]
    frontend.lines = [*binds, "    mode tcp", "    log global", "    option tcplog", first, *accept]
    if (backend := by_name.get(app)) is None:
        return  # no router yet: connections are closed
    frontend.lines.append(f"    default_{app}")
    checked = {
        server: name.split()[1] for name, one in by_name.items() if one is not backend for server in one.servers()
    }
    backend.lines = list(_passed(backend.lines, settings, used.get("internal"), checked))


def _passed(
    lines: Sequence[str], settings: Mapping[str, Any], internal: Pem | None, checked: Mapping[str, str]
) -> Iterator[str]:
    """The lines of the backend in mode tcp.

    ``checked``: the backend that checks the HTTP port of each router. If routers terminate TLS, that check counts for
    gRPC as well: haproxy has no client certificate that such a port may demand.
    """
    ended = settings.get("server") is not None
    for line in lines:
        words = line.split()
        if words == ["mode", "http"]:
            yield "    mode tcp"
        elif words[:1] == ["http-reuse"] or (ended and {"tcp-check", "default-server"} & set(words)):
            continue
        elif words[:1] != ["server"]:
            # a check is encrypted as its server's line says
            yield f"{line} default" if words == ["tcp-check", "connect"] and internal is not None else line
        elif "backup" in words and settings:
            continue  # Serve's own proxy, which knows no TLS
        elif ended:
            check = f" track {checked[words[1]]}/{words[1]}" if words[1] in checked else ""
            yield f"    server {words[1]} {words[2]}{check}"
        elif internal is not None:
            name = settings["internal"].get("server_name", SERVER_NAME)
            tls = f" ssl crt {internal.bundle} ca-file {internal.ca} verify required verifyhost {name} alpn h2"
            yield line.replace(" proto h2", "") + f"{tls} sni str({name}) check-sni {name} check-alpn h2"
        else:
            yield line.replace(" proto h2", "")


def write_privately(path: Path, data: bytes) -> None:
    """Replaces a file in one step; only its owner reads it."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IRUSR | stat.S_IWUSR), "wb") as file:
        file.write(data)
    os.replace(new, path)
