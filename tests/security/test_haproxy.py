"""The proxy with TLS: the real haproxy, with a configuration such as Ray Serve writes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc import aio
from tests.security.conftest import Mounted, write

from paceline.cluster.ports import free_ports
from paceline.errors import ConfigError
from paceline.rpc.transport import server_credentials
from paceline.security import haproxy, haproxy_config, renewal
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.security.haproxy_config import TLS_HEADER
from paceline_bench.processes import read_process

METHOD = "/paceline.v1.GenerationService/Generate"


CONFIG = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
    maxconn 100
    nbthread 1
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend http_frontend
    bind 127.0.0.1:{http_port}
    http-request return status 200 content-type text/plain string "success"
backend http-app
    option httpchk GET /
    http-check expect status 200
    default-server inter 250ms fall 4 rise 1 check
    server router 127.0.0.1:{health_port} check
frontend grpc_frontend
    # gRPC requires HTTP/2.
    bind 127.0.0.1:{grpc_port} proto h2
    mode http
    acl is_healthz path /ray.serve.RayServeAPIService/Healthz
    default_backend app
backend app
    mode http
    http-reuse always
    option tcp-check
    tcp-check connect
    tcp-check send-binary {request}
    tcp-check expect binary {answer}
    default-server inter 250ms fall 4 rise 1
    server router 127.0.0.1:{router_port} proto h2 check
    server fallback 127.0.0.1:1 proto h2 check backup
"""
"""What matters here of that which Ray Serve writes; ``tests/cluster/ray`` has the whole."""


HEALTH_CHECK = (
    "505249202a20485454502f322e300d0a0d0a534d0d0a0d0a00000004000000000000009001040000000100073a6d6574686f"
    "6404504f535400073a736368656d65046874747000053a70617468252f7261792e73657276652e5261795365727665415049"
    "536572766963652f4865616c74687a000a3a617574686f726974790e7261792d73657276652d677270630002746508747261"
    "696c657273000c636f6e74656e742d74797065106170706c69636174696f6e2f677270630000050001000000010000000000"
)
"""A call of Healthz as bytes of HTTP/2, as Ray Serve has its proxy send it."""


def serve_config(folder: Path, grpc_port: int, http_port: int, router_port: int, health_port: int = 4) -> Path:
    path = folder / "haproxy.cfg"
    ports = {
        "request": HEALTH_CHECK,
        "answer": b"success".hex(),
        "grpc_port": grpc_port,
        "http_port": http_port,
        "router_port": router_port,
        "health_port": health_port,
    }
    path.write_text(CONFIG.format(folder=folder, **ports))
    return path


class Router(grpc.GenericRpcHandler):
    """A router's gRPC port: messages until the client leaves, the first says how the connection is, or its name."""

    def __init__(self, name=None):
        self._name, self.healthy = name, True

    def service(self, details):
        async def healthy(request, context):
            return b"\x0a\x07success" if self.healthy else b""

        async def generate(request, context):
            yield self._name or context.auth_context()["transport_security_type"][0]
            while True:
                await asyncio.sleep(0.05)
                yield b"x"

        if details.method.endswith("Healthz"):
            return grpc.unary_unary_rpc_method_handler(healthy)
        return grpc.unary_stream_rpc_method_handler(generate)


async def healthy(reader, writer):
    """A router's HTTP port, as far as checks of its health go."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


@contextlib.contextmanager
def started(folder, variables, config):
    """The program that Serve starts instead of haproxy."""
    command = [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config), "-dR"]
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, env=os.environ | variables, stderr=stderr, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Proxy:
    """A running proxy in front of a router."""

    def __init__(self, folder, public, internal, client_ca, uses):
        self.folder, self.public, self.internal = folder, public, internal
        files = {"certificate": str(public.certificate), "key": str(public.key), "http": True}
        files["client_ca"] = str(public.ca) if client_ca else None
        self.files = CertificateFiles.at("server.tls", files["certificate"], files["key"], files["client_ca"])
        server = files if "server" in uses else None
        files = {"certificate": str(internal.certificate), "key": str(internal.key), "ca": str(internal.ca)}
        inner = files | {"server_name": "internal.paceline"} if "internal" in uses else None
        self.settings = server, inner

    async def start(self):
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((Router(),))
        self._healthy = await asyncio.start_server(healthy, "127.0.0.1", 0)
        if self.settings[0] is not None:
            credentials = server_credentials(Certificates(self.files), internal=False)
        else:
            files = CertificateFiles("internal_tls", self.internal.certificate, self.internal.key, self.internal.ca)
            credentials = server_credentials(Certificates(files))
        self.router_port = self._server.add_secure_port("127.0.0.1:0", credentials)
        await self._server.start()
        self.port, self.http_port = free_ports(2)
        health_port = self._healthy.sockets[0].getsockname()[1]
        self.config = serve_config(self.folder, self.port, self.http_port, self.router_port, health_port)
        variables = haproxy.environment(self.folder, {}) | haproxy.tls_environment(*self.settings)
        self._running = contextlib.ExitStack()
        self.process = self._running.enter_context(started(self.folder, variables, self.config))
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(self._up):
                assert self.process.poll() is None, (self.folder / "stderr").read_text()
                await asyncio.sleep(0.05)

    def _up(self):
        with contextlib.suppress(OSError):
            rows = renewal.tell(str(self.folder / "admin.sock"), b"show stat\n").splitlines()
            (row,) = (row for row in rows if row.startswith("app,router,"))
            assert ",DOWN," not in row, row
            return ",UP," in row
        return False

    async def stop(self):
        self._running.close()
        self._healthy.close()
        await self._server.stop(0)

    def channel(self, ca=True, certificate=False):
        parts = {"root_certificates": self.public.ca.read_bytes() if ca else None}
        if certificate:
            parts |= {
                "private_key": self.public.key.read_bytes(),
                "certificate_chain": self.public.certificate.read_bytes(),
            }
        return aio.secure_channel(f"127.0.0.1:{self.port}", grpc.ssl_channel_credentials(**parts))

    async def shown(self, port=None):
        """The certificate that the proxy shows now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port or self.port, ssl=context)
        try:
            return writer.get_extra_info("ssl_object").getpeercert(True)
        finally:
            writer.transport.abort()

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not await condition():
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def proxy(tmp_path, client_ca=False, uses=("server", "internal")):
    folders = [tmp_path / name for name in ("p", "public", "internal")]
    for folder in folders:
        folder.mkdir()
    public, internal = Mounted(folders[1], ("127.0.0.1",)), Mounted(folders[2], ("internal.paceline",))
    running = Proxy(folders[0], public, internal, client_ca, uses)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def first(channel, metadata=()):
    async with channel, asyncio.timeout(60):
        return await channel.unary_stream(METHOD)(b"", metadata=metadata).read()


async def test_calls_are_encrypted_all_the_way_and_the_router_knows(tmp_path):
    async with proxy(tmp_path) as running:
        assert await first(running.channel()) == b"ssl"
        for connection in (aio.insecure_channel(f"127.0.0.1:{running.port}"), running.channel(ca=False)):
            with pytest.raises(aio.AioRpcError):
                await first(connection)
        with pytest.raises(aio.AioRpcError):  # past the proxy
            await first(aio.insecure_channel(f"127.0.0.1:{running.router_port}"))
        assert await running.shown(running.http_port) == await running.shown()
        modes = {path.stat().st_mode & 0o777 for path in running.folder.glob("*.pem")}
        assert modes == {0o600}


async def test_the_proxy_shows_routers_its_certificate_where_clients_are_in_the_clear(tmp_path):
    async with proxy(tmp_path, uses=("internal",)) as running:
        assert await first(aio.insecure_channel(f"127.0.0.1:{running.port}")) == b"ssl"
        with pytest.raises(aio.AioRpcError):  # past the proxy: a router's port asks for a certificate
            await first(aio.insecure_channel(f"127.0.0.1:{running.router_port}"))


async def test_clients_show_a_certificate_where_it_is_asked_for(tmp_path):
    async with proxy(tmp_path, client_ca=True) as running:
        assert await first(running.channel(certificate=True)) == b"ssl"
        with pytest.raises(aio.AioRpcError):
            await first(running.channel())


async def test_a_renewal_under_a_running_stream(tmp_path):
    async with (
        proxy(tmp_path, client_ca=True) as running,
        running.channel(certificate=True) as channel,
        asyncio.timeout(120),
    ):
        stream = channel.unary_stream(METHOD)(b"")
        assert await stream.read() == b"ssl"
        before = await running.shown()
        issued = running.public.renew()
        running.internal.renew()

        async def renewed():
            new = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
            return await running.shown() == new == await running.shown(running.http_port)

        await running.until(renewed)
        after = await running.shown()
        assert after != before
        write(running.public.key, b"broken")

        async def noticed():
            return "stays as it was: server.tls.key is" in (running.folder / "stderr").read_text()

        await running.until(noticed)
        assert await running.shown() == after == await running.shown(running.http_port)
        for _ in range(3):
            assert await stream.read() == b"x"
        running.public.renew()
        assert await first(running.channel(certificate=True)) == b"ssl"
        with pytest.raises(aio.AioRpcError):  # clients are checked as before
            await first(running.channel())


async def test_the_one_beside_the_proxy_ends_with_it(tmp_path):
    async with proxy(tmp_path) as running:
        keeper = int((running.folder / "tls-keeper").read_text())
        os.kill(keeper, 0)
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if read_process(keeper) is None:
            return
        time.sleep(0.1)
    pytest.fail("it runs on")


# -- without a process -----------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path):
    mounted = Mounted(tmp_path)
    server = {"certificate": str(mounted.certificate), "key": str(mounted.key)}
    return {"server": server, "internal": None}


def edited(config, settings, folder, binds=None):
    """The configuration, and the lines of each of its sections."""
    text = haproxy_config.edited(config, settings, renewal.pems(settings, folder), binds or {})
    name, sections = "", {}
    for line in text.splitlines():
        if line[0].isspace():
            sections[name].append(line.strip())
        else:
            name = line
            sections[name] = []
    return sections


def test_a_configuration_that_is_not_as_expected_is_refused(tmp_path, settings):
    config = serve_config(tmp_path, 1, 2, 3).read_text()
    assert (
        f"http-request set-header {TLS_HEADER} %[ssl_fc]"
        in edited(config, settings, tmp_path)["frontend http_frontend"]
    )
    for changed in (config.replace("frontend grpc_frontend", "frontend other"), "global\n", ""):
        with pytest.raises(ConfigError, match="not as expected"):
            edited(changed, settings, tmp_path)


def test_connections_of_grpc_pass_and_requests_of_http_are_balanced(tmp_path):
    config = serve_config(tmp_path, 1, 2, 3).read_text()
    sections = edited(config, {}, tmp_path)
    assert sections["frontend grpc_frontend"] == [
        "bind 127.0.0.1:1",
        "mode tcp",
        "log global",
        "option tcplog",
        "tcp-request inspect-delay 10s",
        "tcp-request content accept if { req.len gt 0 }",
        "tcp-request content reject",
        "default_backend app",
    ]
    assert sections["backend app"][0] == "mode tcp"
    assert sections["backend app"][-2:] == [
        "server router 127.0.0.1:3 check",
        "server fallback 127.0.0.1:1 check backup",
    ]
    assert "http-reuse always" not in sections["backend app"]
    assert "tcp-check connect" in sections["backend app"]
    assert "timeout http-request 10s" in sections["defaults"]
    before = edited(config, {}, tmp_path, {"9": "h"})
    assert sections == before
    assert "mode http" in sections["defaults"]


@pytest.mark.parametrize("encrypted", [False, True])
def test_applications_that_share_the_port_are_told_apart_by_their_header_unless_it_is_encrypted(
    tmp_path, settings, encrypted
):
    config = serve_config(tmp_path, 1, 2, 3).read_text()
    shared = config.replace("default_backend app", "default_backend default_grpc_backend")
    shared = shared.replace("backend app", "backend grpc-paceline") + "backend default_grpc_backend\n    mode http\n"
    sections = edited(shared, settings if encrypted else {}, tmp_path)
    if encrypted:
        assert sections["frontend grpc_frontend"][-1] == "default_backend grpc-paceline"
        assert sections["backend grpc-paceline"] == ["mode tcp", "server router 127.0.0.1:3 track http-app/router"]
    else:
        assert "bind 127.0.0.1:1 proto h2" in sections["frontend grpc_frontend"]
        assert "mode http" in sections["backend grpc-paceline"]
    none = config[: config.index("backend app")].replace("default_backend app", "default_backend default_grpc_backend")
    found = edited(none, settings if encrypted else {}, tmp_path)["frontend grpc_frontend"]
    assert ("mode tcp" in found) is encrypted, "no router yet: clear text is answered, and never where TLS is asked for"
    assert any("hdr grpc-status 14 hdr grpc-retry-pushback-ms 500" in line for line in found) is not encrypted


def test_only_the_ports_of_routers_are_spoken_to_in_tls(tmp_path, settings):
    internal = settings["server"] | {"ca": settings["server"]["certificate"], "server_name": "name"}
    lines = """global
defaults
    mode http
frontend http_frontend
    bind *:1
frontend grpc_frontend
    bind *:2 proto h2
    default_backend app
backend grpc_fallback_backend
    server fallback h:1 proto h2 check
backend http
    server router h:2 check
    server fallback h:9 check backup
backend app
    server router h:3 proto h2 check
    server fallback h:1 proto h2 check backup
"""
    sections = edited(lines, {"server": None, "internal": internal}, tmp_path)
    ((server, name, address, *rest),) = (line.split() for line in sections["backend app"])
    assert (server, name, address) == ("server", "router", "h:3")
    assert "verify required verifyhost name" in " ".join(rest)
    assert not any(" ssl " in line for name, lines in sections.items() if name != "backend app" for line in lines)


def test_ports_are_where_they_are_told_to_be(tmp_path):
    config = serve_config(tmp_path, 1, 2, 3).read_text() + "listen stats\n  bind *:7\nfrontend p\n    bind :8\n"
    sections = edited(config, {}, tmp_path, {"1": "*", "2": "*", "7": "127.0.0.1", "8": "127.0.0.1"})
    found = [line for lines in sections.values() for line in lines if line.startswith("bind")]
    assert found == ["bind *:2", "bind *:1", "bind 127.0.0.1:7", "bind 127.0.0.1:8"]


def test_the_admin_socket_takes_no_empty_line_for_a_part_of_a_certificate():
    assert renewal.joined(b"a\n\n b\r\n", b"c") == b"a\n b\nc\n"


def test_a_broken_file_at_the_start_is_refused_unless_there_is_one_from_before(tmp_path, settings):
    used = renewal.pems(settings, tmp_path)
    renewal.Keeper(used, "none").prepare()
    write(Path(settings["server"]["key"]), b"broken")
    renewal.Keeper(used, "none").prepare()
    used["server"].bundle.unlink()
    with pytest.raises(ConfigError, match=r"server\.tls\.key"):
        renewal.Keeper(used, "none").prepare()


@pytest.mark.parametrize("name", [haproxy.SETTINGS, haproxy.BINDS])
def test_with_settings_that_cannot_be_read_nothing_is_started(tmp_path, name):
    (tmp_path / "haproxy.cfg").write_text("global\n")
    program = haproxy._written(tmp_path / haproxy.PROGRAM)
    done = subprocess.run(
        [program, "-f", str(tmp_path / "haproxy.cfg")],
        env=os.environ | {name: "[1]"},
        capture_output=True,
        timeout=300,
        text=True,
    )
    assert done.returncode == 1
    assert f"{name} is not as" in done.stderr


def test_the_variables_name_the_program_and_what_it_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/usr/sbin/haproxy")
    assert haproxy.tls_environment(None, None) == {}
    server = {"certificate": "c", "key": "k"}
    variables = haproxy.environment(tmp_path, {7: "h"}) | haproxy.tls_environment(server, None)
    assert json.loads(variables[haproxy.SETTINGS]) == {"server": server, "internal": None}
    assert json.loads(variables[haproxy.BINDS]) == {"7": "h"}
    program = variables["RAY_SERVE_HAPROXY_BINARY_PATH"]
    assert os.access(program, os.X_OK)
    assert sys.executable in Path(program).read_text()
    assert variables[haproxy.BINARY] == "/usr/sbin/haproxy"
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", program)
    assert haproxy.BINARY not in haproxy.environment(tmp_path, {})
