"""Connections of gRPC through the real haproxy: routers die and are stopped under clients that know nothing of it."""

import asyncio
import contextlib
import subprocess
import sys

import grpc
import pytest
from grpc import aio
from tests.security.test_haproxy import METHOD, Router, serve_config, started

from paceline.cluster import connections
from paceline.cluster.ports import free_ports
from paceline.rpc.transport import max_age
from paceline.security import haproxy

AGE_S = 1.0


class Served:
    """A server of gRPC as Serve starts one, in clear text."""

    def __init__(self, name):
        self.router = Router(name.encode())
        self._server = aio.server(options=[("grpc.so_reuseport", 0), max_age(AGE_S)])
        self._server.add_generic_rpc_handlers((self.router,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.wait, self.stop = self._server.wait_for_termination, self._server.stop

    async def __aenter__(self):
        await self._server.start()
        return self

    async def __aexit__(self, *_):
        await self.stop(0)


async def serve(name):
    """A router's process."""
    async with Served(name) as router:
        print(router.port, flush=True)
        await router.wait()


@contextlib.contextmanager
def process(name):
    """A router that can be killed."""
    script = f"import asyncio; from tests.cluster.test_connections import serve; asyncio.run(serve({name!r}))"
    running = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        running.port = int(running.stdout.readline())
        yield running
    finally:
        running.kill()
        running.communicate()


class Stranger:
    """A client of gRPC with a connection of its own, and one stream after the other."""

    def __init__(self, address):
        self.channel = aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])

    async def begin(self):
        """Starts a stream, and returns the router's name."""
        self.stream = self.channel.unary_stream(METHOD)(b"", wait_for_ready=True)
        return await self.stream.read()

    async def error(self):
        """The status by which the stream ends."""
        try:
            while True:
                await self.stream.read()
        except aio.AioRpcError as error:
            return error.code()


@contextlib.asynccontextmanager
async def proxied(folder, ports):
    """The address of a proxy before these routers."""
    port, http_port = free_ports(2)
    text = serve_config(folder, port, http_port, 0).read_text()
    lines = [f"    server r{i} 127.0.0.1:{at} proto h2 check\n" for i, at in enumerate(ports)]
    config = folder / "haproxy.cfg"
    config.write_text(text.replace("    server router 127.0.0.1:0 proto h2 check\n", "".join(lines)))
    with started(folder, haproxy.environment(folder, {}), config):
        yield f"127.0.0.1:{port}"


async def strangers(stack, address, num):
    """Clients by the router that they are at."""
    found = {}
    for _ in range(num):
        client = Stranger(address)
        stack.push_async_callback(client.channel.close)
        found.setdefault(await client.begin(), []).append(client)
    return found


async def test_streams_of_a_router_that_dies_are_unavailable_and_those_of_others_go_on(tmp_path):
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        dies, lives = stack.enter_context(process("a")), await stack.enter_async_context(Served("b"))
        address = await stack.enter_async_context(proxied(tmp_path, [dies.port, lives.port]))
        clients = await strangers(stack, address, 6)
        assert {name: len(each) for name, each in clients.items()} == {b"a": 3, b"b": 3}
        dies.kill()
        assert {await client.error() for client in clients[b"a"]} == {grpc.StatusCode.UNAVAILABLE}
        assert {await client.stream.read() for client in clients[b"b"]} == {b"x"}
        assert {await client.begin() for client in clients[b"a"]} == {b"b"}, "connections are opened to the other"


@pytest.mark.parametrize("busy", [True, False])
async def test_clients_of_a_router_that_is_stopped_leave_it_without_an_error(tmp_path, busy):
    """A client that never has a stream at the moment leaves as one does that always has one."""

    async def calls(client):
        """Streams without a pause, until one is at the other router."""
        if not busy:
            client.stream.cancel()
        kept = client.stream
        while (found := await client.begin()) == b"a":
            client.stream.cancel()
        assert found == b"b"
        if busy:
            assert await kept.read() == b"x", "the stream from before goes on"
            kept.cancel()
        client.stream.cancel()

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
        stopped, other = [await stack.enter_async_context(Served(name)) for name in "ab"]
        address = await stack.enter_async_context(proxied(tmp_path, [stopped.port, other.port]))
        clients = (await strangers(stack, address, 6))[b"a"]
        assert connections.num_connections(stopped.port) >= len(clients) == 3
        stopped.router.healthy = False
        moving = [asyncio.create_task(calls(client)) for client in clients]
        await connections.until_left(stopped.port, 30)
        await stopped.stop(30)  # with a call on its way it would be CANCELLED
        await asyncio.gather(*moving)
