"""Processor time of the way of tokens to clients: from a router's rounds over protobuf and gRPC to a socket.

    paceline bench parts stream [--streams 1 16 64] [--rates 70 300 1000] [--seconds 2]

Every stream gets a token in each step, as from one target, and a client in a process of its own reads all. Reported are
chunks per token and processor time per token of the server's process, without and with a ``chunk_window_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence

import grpc

from paceline.config import RouterConfig
from paceline.router.outlet import Outlet
from paceline.rpc.generation import chunk_to_proto
from paceline.types import Cause, Chunk, Round, Usage
from paceline.v1.generation_pb2 import GenerateRequest, GenerateResponse

_SERVICE, _METHOD = "paceline.v1.GenerationService", "Generate"
_NUM_PROMPT_TOKENS = 9
WINDOWS_S = (0.0, RouterConfig().chunk_window_s)


class Server:
    """A router's side of its streams, with rounds of one token that come at a steady rate."""

    def __init__(self, window_s: float, num_tokens: int) -> None:
        self.window_s, self.num_tokens = window_s, num_tokens
        self.outlets: list[Outlet] = []
        self.num_chunks = 0

    async def generate(self, request: GenerateRequest, context: object) -> AsyncIterator[GenerateResponse]:
        """Streams the tokens of one request."""
        outlet, count = Outlet(self.window_s), 0
        self.outlets.append(outlet)
        while count < self.num_tokens:
            await outlet.due()
            for chunk in outlet.take():
                count += len(chunk.token_ids)
                self.num_chunks += 1
                proto = chunk_to_proto(chunk, prompt_tokens=_NUM_PROMPT_TOKENS, completion_tokens=count)
                yield GenerateResponse(chunk=proto)

    async def feed(self, rate: float) -> None:
        """Puts tokens into all streams, step by step."""
        began_s = time.perf_counter()
        for i in range(self.num_tokens):
            usage, last = Usage(_NUM_PROMPT_TOKENS, i + 1), i + 1 == self.num_tokens
            chunk = Chunk((i,), (-1.0,), (False,), ((" the", False),), Round(0, 0, Cause.DISABLED), usage, last=last)
            for outlet in self.outlets:
                outlet.put(chunk)
            await asyncio.sleep(max(0.0, began_s + (i + 1) / rate - time.perf_counter()))


def read(port: int, num_streams: int) -> None:
    """Reads all streams to their ends."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(
                f"/{_SERVICE}/{_METHOD}",
                request_serializer=GenerateRequest.SerializeToString,
                response_deserializer=GenerateResponse.FromString,
            )

            async def one() -> None:
                async for _ in call(GenerateRequest()):
                    pass

            await asyncio.gather(*(one() for _ in range(num_streams)))

    asyncio.run(run())


async def measure(window_s: float, rate: float, num_streams: int, seconds: float) -> tuple[float, float]:
    """Returns chunks per token and microseconds of processor time per token."""
    service, server = Server(window_s, max(2, round(rate * seconds))), grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        service.generate,
        request_deserializer=GenerateRequest.FromString,
        response_serializer=GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = multiprocessing.get_context("spawn").Process(target=read, args=(port, num_streams))
    client.start()
    try:
        while len(service.outlets) < num_streams:
            if not client.is_alive():
                raise SystemExit(f"the client ended with status {client.exitcode}")
            await asyncio.sleep(0.001)
        used_s = time.process_time()
        await service.feed(rate)
        await asyncio.to_thread(client.join)
        used_s = time.process_time() - used_s
    finally:
        client.kill()
        await server.stop(0)
    num_tokens = num_streams * service.num_tokens
    return service.num_chunks / num_tokens, 1e6 * used_s / num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each number of streams and rate."""
    parser = argparse.ArgumentParser(prog="paceline bench parts stream", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="+", default=[70, 300, 1000], help="tokens per second of a stream")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    args = parser.parse_args(argv)
    heads = (f"{1e3 * window_s:g} ms: chunks/token  us/token" for window_s in WINDOWS_S)
    print("streams  tokens/s", *heads, sep="  ")
    for num_streams, rate in itertools.product(args.streams, args.rates):
        found = [asyncio.run(measure(window_s, rate, num_streams, args.seconds)) for window_s in WINDOWS_S]
        cells = (f"{chunks:18.2f}  {microseconds:8.1f}" for chunks, microseconds in found)
        print(f"{num_streams:7}  {rate:8g}", *cells, sep="  ", flush=True)
    return 0
