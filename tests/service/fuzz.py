"""Random and mutated messages for the public, internal and HTTP ports of a service: does it survive, and forget?

    python -m tests.service.fuzz --messages 100000 [--seed 7]       a router and two replicas of its own, in one process
    python -m tests.service.fuzz --messages 1000 --address HOST:9000 --http HOST:8000     a service that runs

A message is random bytes, a message of random fields, or a good message with bytes changed, cut, doubled or swapped.
After each batch: a victim's tokens are those of plain decoding, no session, KV page or task is left, memory is bounded;
every status is one that names the caller's mistake or limits. Everything follows from the seed.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2
from tests.service.hostile.replicas import assert_free, both
from tests.service.support import collect, routed, tiny_pair, until
from tests.support.door import opened

from paceline.config import ServiceConfig
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.router.service import GenerationService
from paceline.rpc.transport import CHANNEL_OPTIONS, TOKEN_KEY
from paceline.security.access import Access
from paceline.types import SamplingParams
from paceline.v1 import draft_pb2, target_pb2
from paceline.v1 import generation_pb2 as pb

PUBLIC = "/paceline.v1.GenerationService/"
METHODS = [
    (PUBLIC + "Generate", pb.GenerateRequest, 20),
    (PUBLIC + "Cancel", pb.CancelRequest, 4),
    (PUBLIC + "GetModelInfo", pb.GetModelInfoRequest, 1),
    (PUBLIC + "GetServerInfo", pb.GetServerInfoRequest, 1),
    (PUBLIC + "Nothing", pb.GenerateRequest, 1),
    ("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, 2),
    ("/grpc.health.v1.Health/List", health_pb2.HealthListRequest, 1),
]
"""Path, type and weight of the public methods."""
INTERNAL = {
    "target": ("/paceline.v1.TargetService/Rounds", target_pb2.ToTarget),
    "draft": ("/paceline.v1.DraftService/Rounds", draft_pb2.ToDraft),
}
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}
"""Statuses of the public port. INTERNAL and UNKNOWN are our mistakes, UNAVAILABLE is a loss."""
PROMPT, VICTIM = "abcdefgh", SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
MAX_GROWTH_MB = 150.0
_PATHS = ("metrics", "health", "ping", "version", "v1/models", "v1/models/x", "x")
_BODIES: dict[str, dict[str, Any]] = {
    "v1/completions": {"prompt": "abc", "max_tokens": 3, "n": 2, "logprobs": 1, "stop": ["x"], "stream": True},
    "v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "tools": []},
    "v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "system": "def", "stream": True},
    "v1/responses": {"input": "abc", "max_output_tokens": 3, "instructions": "def", "stream": True},
}
"""Path and body of the HTTP requests that are not for everybody."""
_VALUES = (None, True, -1, 0, 2, 2**64, 1e308, "", "\0", "s" * 3000, [], [[]], [7, -1], {}, {"a": {}}, [{"type": "x"}])
_CALL_S, _AT_ONCE = 0.15, 24
_WORDS = (
    b"GET",
    b"POST",
    b"/metrics",
    b"/health",
    b"/v1/completions",
    b" ",
    b"HTTP/1.1",
    b"\r\n",
    b"Host: x",
    b"Content-Length: -1",
    b"\x00",
)


class Fuzz:
    """Messages that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def message(self, kind: type[Message]) -> bytes:
        """One for a method that expects a ``kind``."""
        style = self.rng.random()
        if style < 0.3:
            return self.noise(400)
        data = self.filled(kind).SerializeToString()
        return data if style < 0.5 else self.mutated(data)

    def noise(self, most: int) -> bytes:
        """Random bytes."""
        return self.rng.randbytes(self.rng.randrange(most))

    def mutated(self, data: bytes) -> bytes:
        """A message with a few changes of its bytes."""
        changed, rng = bytearray(data or b"\n\x00"), self.rng
        for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
            at, to = sorted((rng.randrange(len(changed) + 1), rng.randrange(len(changed) + 1)))
            match rng.randrange(5):
                case 0 if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                case 1:
                    del changed[at : min(to, at + 9)]
                case 2:
                    changed[at:at] = self.noise(9)
                case 3:
                    changed[at:at] = changed[at : min(to, at + 200)]
                case 4:
                    changed[at:to] = changed[at:to][::-1]
        return bytes(changed)

    def filled(self, kind: type[Message], depth: int = 0) -> Message:
        """A message with some of its fields, of values that are usual, extreme or senseless."""
        message = kind()
        for field in kind.DESCRIPTOR.fields:
            if self.rng.random() < 0.5:
                continue
            with contextlib.suppress(ValueError, TypeError):  # a value that the field cannot hold
                self._fill(message, field, depth)
        return message

    def http(self) -> bytes:
        """An HTTP request as a client makes it; the values in its body may be any."""
        path = self.rng.choice((*_PATHS, *_BODIES))
        head = f"Host: x\r\nConnection: {self.rng.choice(('close', 'keep-alive'))}\r\n"
        if path not in _BODIES:
            return f"GET /{path} HTTP/1.1\r\n{head}\r\n".encode()
        body = {name: value for name, value in _BODIES[path].items() if self.rng.random() < 0.9}
        for name in self.rng.sample([*_BODIES[path], "temperature", "seed", "x"], self.rng.choice((0, 0, 1, 3))):
            body[name] = self.rng.choice(_VALUES)
        data = json.dumps(body).encode()
        return f"POST /{path} HTTP/1.1\r\n{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        rng, held = self.rng, getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(rng.choice((0, 1, 3, 40))):
                held[self._scalar(field.message_type.fields[0])] = self._scalar(field.message_type.fields[1])
        elif field.is_repeated and field.message_type is not None:
            for _ in range(rng.choice((0, 1, 1, 2, 5)) if depth < 4 else 0):
                held.add().CopyFrom(self.filled(type(held.add()), depth + 1))
        elif field.is_repeated:
            held.extend(self._scalar(field) for _ in range(rng.choice((0, 1, 2, 9, 300))))
        elif field.message_type is not None:
            if depth < 4:
                held.CopyFrom(self.filled(type(held), depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        rng = self.rng
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                text = rng.choice(
                    ("", "a", "overlapped", "coupled", "x" * 300, "s" * 2000, "\u6728\U0001f600\x00", "r1")
                )
                return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return rng.choice((0.0, 0.5, 1.0, 0.9, -1.0, 1e308, float("inf"), float("-inf"), float("nan"), 5e-324))
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case _:
                small = rng.choice((0, 1, 2, 5, 20, 40))
                return rng.choice(
                    (small, small, small, rng.randrange(100), 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
                )


async def attack_public(address: str, fuzz: Fuzz, count: int) -> Counter[str]:
    """Calls public methods; returns how often each status came. Raises AssertionError for one that may not come."""
    statuses: Counter[str] = Counter()
    paths, kinds, weights = zip(*METHODS, strict=True)
    async with aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)]) as channel:

        async def call(path: str, data: bytes) -> None:
            stream = channel.unary_stream(path)(data, timeout=_CALL_S)  # a unary answer is a stream of one message
            with contextlib.suppress(grpc.RpcError):
                async for _ in stream:
                    if fuzz.rng.random() < 0.2:
                        stream.cancel()
                        break
            code = await stream.code()
            statuses[code.name] += 1
            assert code in EXPECTED, f"{path} answers {data!r} with {code.name}: {await stream.details()}"

        def calls() -> Sequence[Awaitable[None]]:
            chosen = fuzz.rng.choices(range(len(paths)), weights, k=min(_AT_ONCE, count - statuses.total()))
            return [call(paths[i], fuzz.message(kinds[i])) for i in chosen]

        while statuses.total() < count:
            await asyncio.gather(*calls())
    return statuses


async def attack_internal(address: str, kind: str, fuzz: Fuzz, count: int, token: str = "") -> Counter[str]:
    """Streams to a replica's own port, each of up to 20 messages; returns how many there were."""
    statuses: Counter[str] = Counter()
    path, batch = INTERNAL[kind]
    metadata = ((TOKEN_KEY, token),) if token else None
    async with aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        sent = 0
        while sent < count:
            call = channel.stream_stream(path)(metadata=metadata)
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for _ in range(fuzz.rng.randrange(20)):
                    sent += 1
                    data = fuzz.noise(200) if fuzz.rng.random() < 0.1 else fuzz.filled(batch).SerializeToString()
                    await call.write(data if fuzz.rng.random() < 0.7 else fuzz.mutated(data))
            if fuzz.rng.random() < 0.5:
                await asyncio.sleep(0.002)
            call.cancel()
            await call.code()
            statuses[f"{kind} streams"] += 1
            sent += 1
    return statuses


async def attack_http(host: str, port: int, fuzz: Fuzz, count: int) -> Counter[str]:
    """HTTP requests that are none, or almost; returns how often each status came. Raises AssertionError for a 5xx."""
    statuses: Counter[str] = Counter()
    for _ in range(count):
        reader, writer = await asyncio.open_connection(host, port)
        good = fuzz.http()
        words = b"".join(fuzz.rng.choices(_WORDS, k=fuzz.rng.randrange(12)))
        writer.write(
            fuzz.rng.choice((good, fuzz.mutated(good), fuzz.mutated(good), words, fuzz.noise(300))) + b"\r\n\r\n"
        )
        with contextlib.suppress(OSError):
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(4096), 60)
            line = answer.split(b"\r\n", 1)[0]
            statuses[line.decode("latin-1")[9:12] or "closed"] += 1
            assert not line.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5")) or line[9:12] == b"503", line
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return statuses


@contextlib.asynccontextmanager
async def http_port(router: Any) -> AsyncIterator[int]:
    """The application that Serve gets from the ingress, on a server of its own."""
    import uvicorn

    from paceline.cluster.ingress import Ingress

    async def exposition() -> str:
        return "paceline_up 1\n"

    ingress = object.__new__(Ingress)
    ingress.config, ingress.router, ingress.service = ServiceConfig(), router, GenerationService(router)
    ingress.access, ingress._chat = Access(None, AccessMetrics(Registry("router"))), None
    ingress._monitor = SimpleNamespace(exposition=SimpleNamespace(remote=exposition))  # type: ignore[assignment]
    app = ingress.__serve_build_asgi_app__()

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started, what="the HTTP port")
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def rounds(
    config: Any,
    plain: Callable[[str, SamplingParams], tuple[int, ...]],
    seed: int,
    messages: int,
    batch: int = 2500,
    patience_s: float = 60.0,
) -> Counter[str]:
    """Attacks a service of this process with batches of messages and checks it after each; returns the statuses.

    ``patience_s``: time that a router may take until it has forgotten the requests of a batch.
    """
    fuzz, statuses = Fuzz(seed), Counter[str]()
    token = "internal"
    async with (
        both(config, token=token) as (target, draft),
        routed(config, [target], [draft], token=token) as (router, _, _),
        opened(router) as address,
        http_port(router) as port,
    ):

        async def check() -> None:
            _, result = await collect(router, PROMPT, sampling=VICTIM)
            assert result.token_ids == plain(PROMPT, VICTIM), "the tokens of another stream have changed"
            await until(lambda: not (router.active or router.entering), patience_s, "the router holds no request")
            await until(lambda: not router.admission.preparation.is_busy, what="no prompt is tokenized")
            await assert_free(target, draft)

        await check()
        num_tasks, memory_mb = _num_tasks(), 0.0
        done = 0
        while done < messages:
            size = min(batch, messages - done)
            statuses += await attack_public(address, fuzz, size * 7 // 10)
            for one in (target, draft):
                share = size // 10
                statuses += await attack_internal(one.server.address, one.host.kind, fuzz, share, token)
            statuses += await attack_internal(target.server.address, "target", fuzz, size // 50)
            statuses += await attack_http("127.0.0.1", port, fuzz, size // 12)
            done += size
            await check()
            await until(lambda: _num_tasks() <= num_tasks, what="no task is left")
            if not memory_mb:  # everything has been used once
                memory_mb = _memory_mb()
            assert _memory_mb() < memory_mb + MAX_GROWTH_MB, f"{memory_mb:.0f} MB have become {_memory_mb():.0f}"
    return statuses


def _num_tasks() -> int:
    """Tasks of the service: its own, and gRPC's for each call that a server answers; not those of the attacker."""
    names = (task.get_name() for task in asyncio.all_tasks())
    return sum(name.startswith(("paceline", "rpc_task", "HandleExceptions[")) for name in names)


def _memory_mb() -> float:
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    return 0.0


async def from_outside(address: str, http: str | None, seed: int, messages: int) -> Counter[str]:
    """Attacks a service that runs: its statuses and its health are all that can be checked."""
    fuzz = Fuzz(seed)
    statuses = await attack_public(address, fuzz, messages)
    if http is not None:
        host, _, port = http.rpartition(":")
        statuses += await attack_http(host, int(port), fuzz, messages // 10)
    async with aio.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = health_pb2.HealthCheckResponse.FromString(await check(b"", timeout=60))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, "it does not serve any more"
    return statuses


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--address", help="HOST:PORT of a service that runs; without it one is started here")
    parser.add_argument("--http", help="HOST:PORT of its HTTP")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    logging.disable()  # a warning for each stream that ends badly
    if args.address is not None:
        statuses = asyncio.run(from_outside(args.address, args.http, args.seed, args.messages))
    else:
        from tests.support.models import save_pair

        from paceline.local import LocalPipeline

        with tempfile.TemporaryDirectory() as folder:
            config = tiny_pair(save_pair(Path(folder)))
            with LocalPipeline(config.model_copy(update={"draft": None})) as pipeline:
                expected = pipeline.generate(PROMPT, VICTIM).result.token_ids
            statuses = asyncio.run(rounds(config, lambda *_: expected, args.seed, args.messages))
    print(", ".join(f"{name}: {count}" for name, count in statuses.most_common()))


if __name__ == "__main__":
    main()
