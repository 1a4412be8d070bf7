"""What a huge request does to the streams at its side: `python benchmarks/hostile_input.py`.

Streams run on one router and one target (the embedded pair) over gRPC, without Ray: clients, router, target and the
hostile client are processes of their own. Then requests come that are far too large. Printed for each, and for as long
a time without any: the longest gap in any stream, the status that the request got and when, and by how much the
memory of router and target has grown. The memory before and after every round over all requests is printed, too: what
a round keeps is a leak if the next one adds as much.

    python benchmarks/hostile_input.py [--streams 32] [--seconds 6] [--rounds 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from paceline.checkpoint.files import Checkpoint, embedded_paths
from paceline.config import LocalConfig, RouterConfig, ServiceConfig, TargetModel, apply_worker_environment
from paceline.config.memory import settle_front
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.router.service import GenerationService
from paceline.rpc.services import add_generation
from paceline.rpc.status import to_status
from paceline.runtime.server import engine_server
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import types_pb2
from paceline_bench.processes import read_process

_GENERATE = "/paceline.v1.GenerationService/Generate"
_CHANNEL = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_context = multiprocessing.get_context("spawn")
CONTEXT = 1024


def config() -> LocalConfig:
    """The embedded target, as many sessions as there are streams."""
    path = str(embedded_paths()[0])
    return LocalConfig(target=TargetModel(path=path, max_model_len=CONTEXT, max_sessions=64, compile=False))


def _text(size: int) -> bytes:
    """A request of a text of ``size`` bytes that looks like code."""
    return pb.GenerateRequest(text=("def read_file(path):\n    return open(path).read()  # x\n" * (size // 50))[:size])


def _form(**form: Any) -> Any:
    """A request whose structured output costs much."""
    sampling = types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput(**form), max_tokens=900)
    return pb.GenerateRequest(text="x", sampling_params=sampling)


ATTACKS: dict[str, Callable[[], Any]] = {
    "64 MB of text": lambda: _text(64 * 10**6),
    "12 MB of text": lambda: _text(12 * 10**6),
    "1 MB of text": lambda: _text(10**6),
    "the longest text that is tokenized": lambda: _text(40_000),
    "4 million token ids": lambda: pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[7] * 4_000_000)),
    "4 million empty bad_words": lambda: pb.GenerateRequest(
        text="x", sampling_params=types_pb2.SamplingParams(bad_words=[types_pb2.TokenSequence()] * 4_000_000)
    ),
    "multiples of two primes": lambda: _form(
        json_schema='{"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}'
    ),
    "2,400 rules of GBNF": lambda: _form(
        grammar="\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(2400)), 'r2400 ::= "z"'])
    ),
    "1,800 optional properties": lambda: _form(
        json_schema=json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(1800)}})
    ),
    "a choice of 8,000": lambda: _form(choice=types_pb2.StructuredOutput.Choice(texts=[f"c{i}" for i in range(8000)])),
    "ambiguous grammar": lambda: _form(grammar='root ::= s\ns ::= s s s s s s | [a-z ] | "0.5"'),
    "nullable grammar": lambda: _form(grammar='start: s\ns: s s s s s s s s | a? | b?\na: s "a" s\nb: s "b" s'),
}
COPIES = 4
"""So many requests with one costly form come at once."""


# -- processes ---------------------------------------------------------------------------------------------------------


def _serve_target(pipe: Connection) -> None:
    apply_worker_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def run() -> None:
        server = engine_server(config().target_setup(), replica_id="target")
        await server.start()
        pipe.send(server.address)
        await asyncio.to_thread(pipe.poll, None)
        await server.stop()

    asyncio.run(run())


class _Host:
    """The service, as Serve hosts it."""

    def __init__(self, router: Router) -> None:
        self._service = GenerationService(router)

    def __getattr__(self, name: str) -> Any:
        return None

    async def Generate(self, request: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            async with contextlib.aclosing(self._service.generate(request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            code, details, trailers = to_status(error)
            context.set_code(code)
            context.set_details(details)
            context.set_trailing_metadata(trailers)


def _serve_router(pipe: Connection, address: str) -> None:
    apply_worker_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def run() -> None:
        checkpoint = Checkpoint.open(config().target.path)
        info = TargetInfo(checkpoint.tokenizer, CONTEXT, checkpoint.eos_token_ids)
        metrics = RouterMetrics(Registry("router"), "embedded")
        pool = StaticPool("target", [Member("target", address)])
        router = Router(info, pool, None, RouterConfig(), metrics=metrics)
        await router.start()
        limit = ServiceConfig().server.max_message_bytes
        server = aio.server(options=[("grpc.max_receive_message_length", limit)])
        add_generation(_Host(router), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        while not router.ready:
            await asyncio.sleep(0.05)
        settle_front()  # as every front of a service
        pipe.send(f"127.0.0.1:{port}")
        await asyncio.to_thread(pipe.poll, None)
        await server.stop(None)
        await router.stop()

    asyncio.run(run())


def _attack(pipe: Connection, address: str, name: str) -> None:
    """Sends one request, or a costly form four times at once; answers with the last status and when it came."""
    request = ATTACKS[name]()
    copies = COPIES if request.sampling_params.HasField("structured_output") else 1
    data = request.SerializeToString()
    with grpc.insecure_channel(address, options=_CHANNEL) as channel:
        call = channel.unary_stream(_GENERATE)
        grpc.channel_ready_future(channel).result(30)
        pipe.send(len(data))
        pipe.poll(None)
        started = time.monotonic()
        status, details = "OK", ""
        for answers in [call(data, timeout=240) for _ in range(copies)]:
            try:
                for _ in answers:
                    pass
            except grpc.RpcError as error:
                status, details = error.code().name, error.details()
        pipe.send((status, details, time.monotonic() - started))


@contextlib.contextmanager
def process(function: Callable[..., None], *args: Any) -> Any:
    """Runs a function in a process; yields it and the pipe to it."""
    ours, theirs = _context.Pipe()
    child = _context.Process(target=function, args=(theirs, *args), daemon=True)
    child.start()
    try:
        yield child, ours
    finally:
        with contextlib.suppress(OSError):
            ours.send("end")
        child.join(10)
        if child.is_alive():
            child.kill()


# -- the streams -------------------------------------------------------------------------------------------------------


class Streams:
    """Streams that follow one another; the longest gap between two chunks of one of them is noted."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self.longest_s = 0.0
        self.num_chunks = self.num_failed = 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with aio.insecure_channel(self._address, options=_CHANNEL) as channel:
            await asyncio.gather(*(self._one(channel, i) for i in range(self._count)))

    async def _one(self, channel: aio.Channel, seed: int) -> None:
        while True:
            sampling = types_pb2.SamplingParams(max_tokens=900, ignore_eos=True, seed=seed, temperature=1.0)
            request = pb.GenerateRequest(text="def main():", sampling_params=sampling)
            last = None
            try:
                async for _ in channel.unary_stream(_GENERATE)(request.SerializeToString()):
                    now = time.monotonic()
                    self.longest_s = max(self.longest_s, now - (last or now))
                    last = now
                    self.num_chunks += 1
            except grpc.RpcError:
                self.num_failed += 1
                await asyncio.sleep(0.1)


@dataclass
class Measured:
    """What one request did."""

    name: str
    message_bytes: int
    longest_gap_ms: float
    chunks_per_s: float
    failed_streams: int
    status: str
    answered_after_ms: float
    router_growth_mb: float
    target_growth_mb: float
    details: str


def _rss_mb(pid: int) -> float:
    found = read_process(pid)
    assert found is not None
    return found.rss_bytes / 2**20


def _print_memory(pids: Sequence[int]) -> None:
    router, target = (_rss_mb(pid) for pid in pids)
    print(f"memory: router {router:.0f} MB, target {target:.0f} MB", flush=True)


async def measure(address: str, pids: Sequence[int], streams: int, seconds: float, rounds: int) -> list[Measured]:
    """Attacks one after the other, each at the side of the streams; prints the memory before and after each round."""
    load = Streams(address, streams)
    task = asyncio.create_task(load.run())
    results = []
    while load.num_chunks < 20 * streams:
        await asyncio.sleep(0.1)
    _print_memory(pids)
    for name in [name for attack in ATTACKS for name in ("none", attack)] * rounds:
        before = [_rss_mb(pid) for pid in pids]
        with process(_attack, address, name) if name in ATTACKS else contextlib.nullcontext((None, None)) as (_, pipe):
            size = await asyncio.to_thread(pipe.recv) if pipe else 0
            await asyncio.sleep(1)  # the attacker's own start takes a core
            load.longest_s, load.num_chunks, load.num_failed, started = 0.0, 0, 0, time.monotonic()
            if pipe:
                pipe.send("go")
            await asyncio.sleep(seconds)
            status, details, answered_s = await asyncio.to_thread(pipe.recv) if pipe else ("", "", 0.0)
            took = time.monotonic() - started
            gap, chunks, failed = load.longest_s, load.num_chunks, load.num_failed
        growth = [_rss_mb(pid) - mb for pid, mb in zip(pids, before, strict=True)]
        one = Measured(name, size, 1e3 * gap, chunks / took, failed, status, 1e3 * answered_s, *growth, details[:90])
        print(
            f"{name}: longest gap {one.longest_gap_ms:.0f} ms, {one.chunks_per_s:.0f} chunks/s, {failed} failed;"
            f" router {growth[0]:+.1f} MB, target {growth[1]:+.1f} MB;"
            f" {status} after {one.answered_after_ms:.0f} ms {one.details}",
            flush=True,
        )
        results.append(one)
        if len(results) % (2 * len(ATTACKS)) == 0:
            await asyncio.sleep(seconds)
            _print_memory(pids)
    task.cancel()
    await asyncio.wait([task])
    return results


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long the streams are watched for each request")
    parser.add_argument("--rounds", type=int, default=1, help="how often all requests are sent")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    apply_worker_environment()
    with process(_serve_target) as (engine, target), process(_serve_router, target.recv()) as (router, pipe):
        results = asyncio.run(measure(pipe.recv(), (router.pid, engine.pid), args.streams, args.seconds, args.rounds))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
