"""Mutual TLS between processes, over real connections: who gets in, and what a renewal changes."""

import asyncio
import contextlib
import ssl

import grpc
import pytest
from grpc import aio
from tests.security.conftest import Mounted, write

from paceline.rpc import transport
from paceline.rpc.transport import CHANNEL_OPTIONS, TOKEN_KEY, channel, start_server
from paceline.security.certificates import CertificateFiles, Certificates

METHOD = "/test.Service/Count"


class Counting(grpc.GenericRpcHandler):
    """A stream of numbers, one for each message."""

    def service(self, details):
        async def count(requests, context):
            number = 0
            async for _ in requests:
                number += 1
                yield str(number).encode()

        return grpc.stream_stream_rpc_method_handler(count)


@pytest.fixture
def mounted(tmp_path):
    return Mounted(tmp_path, names=("internal.paceline",))


def certificates(mounted, server_name="internal.paceline"):
    files = CertificateFiles("internal_tls", mounted.certificate, mounted.key, mounted.ca, server_name=server_name)
    return Certificates(files)


@contextlib.asynccontextmanager
async def serving(mounted, token=""):
    """An address; without encryption if nothing is mounted."""

    def add(server):
        server.add_generic_rpc_handlers((Counting(),))

    server, port = await start_server(add, "127.0.0.1", 0, token, mounted and certificates(mounted))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(connection, metadata=()):
    async with connection, asyncio.timeout(60):
        call = connection.stream_stream(METHOD)(metadata=metadata)
        await call.write(b"")
        return await call.read()


async def shown(address):
    """The certificate that a server shows now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
    try:
        return writer.get_extra_info("ssl_object").getpeercert(True)
    finally:
        writer.transport.abort()


async def test_peers_of_the_same_authority_reach_each_other(mounted):
    async with serving(mounted) as address:
        assert await ask(channel(address, certificates(mounted))) == b"1"


async def test_everybody_else_is_refused(mounted, tmp_path):
    (tmp_path / "other").mkdir()
    other = Mounted(tmp_path / "other", names=("internal.paceline",))
    stranger = Mounted.__new__(Mounted)  # a certificate of another authority, which trusts ours
    stranger.certificate, stranger.key, stranger.ca = other.certificate, other.key, mounted.ca

    def secure(**parts):
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "internal.paceline")]
        return lambda address: aio.secure_channel(address, grpc.ssl_channel_credentials(**parts), options=options)

    async with serving(mounted) as address:
        for connect in (
            aio.insecure_channel,
            secure(root_certificates=mounted.ca.read_bytes()),
            lambda a: channel(a, certificates(stranger)),
            lambda a: channel(a, certificates(other)),  # it trusts only its own authority
            lambda a: channel(a, certificates(mounted, "another.name")),
        ):
            with pytest.raises(aio.AioRpcError) as refused:
                await ask(connect(address))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_token_is_asked_for_beside_the_certificate(mounted):
    async with serving(mounted, token="secret-token") as address:
        for metadata in ((), ((TOKEN_KEY, "secret"),), ((TOKEN_KEY, "secret-token-and-more"),)):
            async with channel(address, certificates(mounted)) as connection, asyncio.timeout(60):
                with pytest.raises(aio.AioRpcError) as refused:
                    await connection.stream_stream(METHOD)(metadata=metadata).read()  # a write may come too late
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(channel(address, certificates(mounted)), ((TOKEN_KEY, "secret-token"),)) == b"1"


async def test_a_renewal_concerns_new_connections_alone_and_a_broken_one_nobody(mounted):
    async with serving(mounted) as address, channel(address, certificates(mounted)) as old, asyncio.timeout(60):
        stream = old.stream_stream(METHOD)()
        await stream.write(b"")
        assert await stream.read() == b"1"
        first = await shown(address)
        mounted.renew()
        second = await shown(address)
        assert second != first
        write(mounted.key, b"broken")
        assert await shown(address) == await shown(address) == second
        await stream.write(b"")
        assert await stream.read() == b"2"
        mounted.renew()
        assert await shown(address) not in (first, second)
        assert await ask(channel(address, certificates(mounted))) == b"1"
        await stream.write(b"")
        assert await stream.read() == b"3"


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_connection_that_says_nothing_is_closed_and_one_that_asked_is_not(mounted, monkeypatch, encrypted):
    options = [
        (transport.HANDSHAKE_TIMEOUT, 500) if name == transport.HANDSHAKE_TIMEOUT else (name, value)
        for name, value in transport.SERVER_OPTIONS
    ]
    assert options != transport.SERVER_OPTIONS
    monkeypatch.setattr(transport, "SERVER_OPTIONS", options)
    used = mounted if encrypted else None
    async with serving(used) as address, channel(address, used and certificates(used)) as connection:
        call = connection.stream_stream(METHOD)()
        await call.write(b"")
        assert await call.read() == b"1"
        reader, writer = await asyncio.open_connection(*address.split(":"))
        async with asyncio.timeout(60):
            await reader.read()  # to its end: the server may greet before
        writer.close()
        await call.write(b"")
        assert await call.read() == b"2"
