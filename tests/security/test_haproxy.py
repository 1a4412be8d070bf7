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
from paceline.security import haproxy
from paceline.security.access import TLS_HEADER
from paceline.security.certificates import CertificateFiles, Certificates
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
frontend grpc_frontend
    # gRPC requires HTTP/2.
    bind 127.0.0.1:{grpc_port} proto h2
    default_backend app
backend app
    option tcp-check
    tcp-check connect
    tcp-check send-binary {request}
    tcp-check expect binary {answer}
    default-server inter 250ms fall 2 rise 1
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


def serve_config(folder: Path, grpc_port: int, http_port: int, router_port: int) -> Path:
    path = folder / "haproxy.cfg"
    ports = {
        "request": HEALTH_CHECK,
        "answer": b"success".hex(),
        "grpc_port": grpc_port,
        "http_port": http_port,
        "router_port": router_port,
    }
    path.write_text(CONFIG.format(folder=folder, **ports))
    return path


class Router(grpc.GenericRpcHandler):
    """A router's gRPC port: numbers until the client leaves; the first message says which header came."""

    def service(self, details):
        async def healthy(request, context):
            return b"\x0a\x07success"

        async def generate(request, context):
            yield dict(context.invocation_metadata()).get(TLS_HEADER, "none").encode()
            while True:
                await asyncio.sleep(0.05)
                yield b"x"

        if details.method.endswith("Healthz"):
            return grpc.unary_unary_rpc_method_handler(healthy)
        return grpc.unary_stream_rpc_method_handler(generate)


class Proxy:
    """A running proxy in front of a router."""

    def __init__(self, folder, public, internal, client_ca):
        self.folder, self.public, self.internal = folder, public, internal
        server = {"certificate": str(public.certificate), "key": str(public.key), "http": True}
        server["client_ca"] = str(public.ca) if client_ca else None
        files = {"certificate": str(internal.certificate), "key": str(internal.key), "ca": str(internal.ca)}
        self.settings = server, files | {"server_name": "internal.paceline"}

    async def start(self):
        files = CertificateFiles("internal_tls", self.internal.certificate, self.internal.key, self.internal.ca)
        self._server = aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((Router(),))
        self.router_port = self._server.add_secure_port("127.0.0.1:0", server_credentials(Certificates(files)))
        await self._server.start()
        self.port, self.http_port = free_ports(2)
        self.config = serve_config(self.folder, self.port, self.http_port, self.router_port)
        variables = haproxy.environment(*self.settings, self.folder)
        with (self.folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(self.config), "-dR"],
                env=os.environ | variables,
                stderr=stderr,
                stdout=subprocess.DEVNULL,
            )
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(self._up):
                assert self.process.poll() is None, (self.folder / "stderr").read_text()
                await asyncio.sleep(0.05)

    def _up(self):
        with contextlib.suppress(OSError):
            rows = haproxy.tell(str(self.folder / "admin.sock"), b"show stat\n").splitlines()
            (row,) = (row for row in rows if row.startswith("app,router,"))
            assert ",DOWN," not in row, row
            return ",L7OK," in row
        return False

    async def stop(self):
        self.process.kill()
        self.process.wait()
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
async def proxy(tmp_path, client_ca=False):
    folders = [tmp_path / name for name in ("p", "public", "internal")]
    for folder in folders:
        folder.mkdir()
    public, internal = Mounted(folders[1], ("127.0.0.1",)), Mounted(folders[2], ("internal.paceline",))
    running = Proxy(folders[0], public, internal, client_ca)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()


async def first(channel, metadata=()):
    async with channel, asyncio.timeout(20):
        return await channel.unary_stream(METHOD)(b"", metadata=metadata).read()


def test_calls_are_encrypted_all_the_way_and_the_router_is_told(tmp_path):
    async def test():
        async with proxy(tmp_path) as running:
            assert await first(running.channel()) == b"1"
            assert await first(running.channel(), ((TLS_HEADER, "0"),)) == b"1"
            for connection in (aio.insecure_channel(f"127.0.0.1:{running.port}"), running.channel(ca=False)):
                with pytest.raises(aio.AioRpcError):
                    await first(connection)
            with pytest.raises(aio.AioRpcError):  # past the proxy: a router's port asks for a certificate
                await first(aio.insecure_channel(f"127.0.0.1:{running.router_port}"))
            assert await running.shown(running.http_port) == await running.shown()
            modes = {path.stat().st_mode & 0o777 for path in running.folder.glob("*.pem")}
            assert modes == {0o600}

    asyncio.run(test())


def test_clients_show_a_certificate_where_it_is_asked_for(tmp_path):
    async def test():
        async with proxy(tmp_path, client_ca=True) as running:
            assert await first(running.channel(certificate=True)) == b"1"
            with pytest.raises(aio.AioRpcError):
                await first(running.channel())

    asyncio.run(test())


def test_a_renewal_under_a_running_stream(tmp_path):
    async def test():
        async with (
            proxy(tmp_path, client_ca=True) as running,
            running.channel(certificate=True) as channel,
            asyncio.timeout(120),
        ):
            stream = channel.unary_stream(METHOD)(b"")
            assert await stream.read() == b"1"
            before = await running.shown()
            issued = running.public.renew()
            running.internal.renew()

            async def renewed():
                return await running.shown() == ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())

            await running.until(renewed)
            after = await running.shown()
            assert after != before
            write(running.public.key, b"broken")

            async def noticed():
                return "stays as it was: server.tls.key is" in (running.folder / "stderr").read_text()

            await running.until(noticed)
            assert await running.shown() == after
            for _ in range(3):
                assert await stream.read() == b"x"
            running.public.renew()
            assert await first(running.channel(certificate=True)) == b"1"
            with pytest.raises(aio.AioRpcError):  # clients are checked as before
                await first(running.channel())

    asyncio.run(test())


def test_the_one_beside_the_proxy_ends_with_it(tmp_path):
    async def test():
        async with proxy(tmp_path) as running:
            keeper = int((running.folder / "tls-keeper").read_text())
            os.kill(keeper, 0)
        return keeper

    keeper = asyncio.run(test())
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


def test_a_configuration_that_is_not_as_expected_is_refused(tmp_path, settings):
    used = haproxy.pems(settings, tmp_path)
    config = serve_config(tmp_path, 1, 2, 3).read_text()
    assert haproxy.secured(config, settings, used).count(" ssl crt-list ") == 2
    assert haproxy.secured(config, settings, used).count(f"http-request set-header {TLS_HEADER} %[ssl_fc]") == 2
    for changed in (config.replace("frontend grpc_frontend", "frontend other"), "global\n", ""):
        with pytest.raises(ConfigError, match="not as expected"):
            haproxy.secured(changed, settings, used)


def test_only_the_ports_of_routers_are_spoken_to_in_tls(tmp_path, settings):
    settings["internal"] = settings["server"] | {"ca": settings["server"]["certificate"], "server_name": "name"}
    lines = """global
frontend http_frontend
    bind *:1
frontend grpc_frontend
    bind *:2 proto h2
backend grpc_fallback_backend
    server fallback h:1 proto h2 check
backend http
    server router h:2 check
backend app
    server router h:3 proto h2 check
    server fallback h:1 proto h2 check backup
"""
    text = haproxy.secured(lines, settings, haproxy.pems(settings, tmp_path))
    (line,) = (line for line in text.splitlines() if "server " in line and " ssl " in line)
    assert line.split()[:3] == ["server", "router", "h:3"]
    assert "backup" not in text
    assert "verify required verifyhost name" in line


def test_the_admin_socket_takes_no_empty_line_for_a_part_of_a_certificate():
    assert haproxy.joined(b"a\n\n b\r\n", b"c") == b"a\n b\nc\n"


def test_a_broken_file_at_the_start_is_refused_unless_there_is_one_from_before(tmp_path, settings):
    used = haproxy.pems(settings, tmp_path)
    haproxy.Keeper(used, "none").prepare()
    write(Path(settings["server"]["key"]), b"broken")
    haproxy.Keeper(used, "none").prepare()
    used["server"].bundle.unlink()
    with pytest.raises(ConfigError, match=r"server\.tls\.key"):
        haproxy.Keeper(used, "none").prepare()


def test_without_settings_nothing_is_started(tmp_path):
    (tmp_path / "haproxy.cfg").write_text("global\n")
    program = haproxy._written(tmp_path / haproxy.PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != haproxy.SETTINGS}
    done = subprocess.run(
        [program, "-f", str(tmp_path / "haproxy.cfg")], env=environment, capture_output=True, timeout=60, text=True
    )
    assert done.returncode == 1
    assert "PACELINE_TLS is not set" in done.stderr


def test_no_variables_without_tls(tmp_path):
    assert haproxy.environment(None, None, tmp_path) == {}
    server = {"certificate": "c", "key": "k"}
    variables = haproxy.environment(server, None, tmp_path)
    assert json.loads(variables[haproxy.SETTINGS]) == {"server": server, "internal": None}
    assert os.access(variables["RAY_SERVE_HAPROXY_BINARY_PATH"], os.X_OK)
    assert sys.executable in Path(variables["RAY_SERVE_HAPROXY_BINARY_PATH"]).read_text()
