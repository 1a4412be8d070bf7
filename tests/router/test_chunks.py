"""Rounds that leave a router in one chunk, as clients of gRPC and of HTTP see them: real sessions, scripted targets.

Five rounds of a stream come at once, so that the clock decides nothing.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tests.router.world import World, expected, request, without_sockets
from tests.support.door import Door, opened
from tests.support.mutants import mutant
from tests.web.support import edge_over

from paceline.client import AsyncClient
from paceline.router import outlet
from paceline.router.router import Router
from paceline.router.service import GenerationService
from paceline.types import Chunk, FinishReason, Result
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc
from paceline.web.app import make_app

WANTED = request("r", 5)
NUM_TOKENS, BURST = WANTED.sampling.max_tokens, 5
WINDOWS_S = pytest.mark.parametrize("window_s", [0.0, 0.005])


async def in_bursts(world: World, task: asyncio.Task[Any], may_decide: Callable[[], bool] = lambda: True) -> Any:
    """Has the target decide five tokens at once, again and again where it may, until the client is done."""
    async with asyncio.timeout(60):
        while not task.done():
            (target,) = world.targets
            target.take()
            if may_decide():
                for _ in range(BURST - 1):
                    target.turn()
                await world.turn()
            await asyncio.sleep(0.001)
    return await task


def is_joined(window_s: float, num_chunks: int) -> bool:
    """True if there are as many chunks as the window lets leave."""
    return num_chunks <= NUM_TOKENS // BURST if window_s else num_chunks == NUM_TOKENS


async def over_grpc(address: str) -> tuple[list[Chunk], Result]:
    async with AsyncClient(address) as client:
        stream = client.generate(WANTED.prompt, WANTED.sampling, logprobs=True)
        return [chunk async for chunk in stream], await stream.result


async def by_grpc(window_s: float) -> None:
    world = World(4)
    async with world.router(chunk_window_s=window_s) as router, opened(router) as address:
        chunks, result = await in_bursts(world, asyncio.create_task(over_grpc(address)))
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    assert tokens == result.token_ids == expected(WANTED)
    assert "".join(chunk.text for chunk in chunks) == result.text == bytes(tokens).decode()
    assert [one for chunk in chunks for one in chunk.logprobs] == [-0.5] * NUM_TOKENS == list(result.logprobs)
    assert sum(len(chunk.rounds) for chunk in chunks) == result.speculation.rounds == NUM_TOKENS
    assert result.usage.completion_tokens == NUM_TOKENS
    assert is_joined(window_s, len(chunks)), len(chunks)


@WINDOWS_S
async def test_clients_of_grpc_get_the_same_in_fewer_chunks(monkeypatch: pytest.MonkeyPatch, window_s: float) -> None:
    without_sockets(monkeypatch)
    await by_grpc(window_s)


async def over_http(router: Router) -> list[Any]:
    """The events of a stream of the real application."""
    body = {"prompt": WANTED.prompt, "max_tokens": NUM_TOKENS, "seed": WANTED.sampling.seed, "temperature": 1}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])
    sent: list[bytes] = []

    async def receive() -> Any:
        for message in messages:
            return message
        return await asyncio.Event().wait()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "raw_path": b"",
        "query_string": b"", "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("localhost", 80), "root_path": "", "state": {},
    }  # fmt: skip
    await make_app(edge_over(GenerationService(router)))(scope, receive, send)
    *events, done = [one.removeprefix(b"data: ") for one in b"".join(sent).split(b"\n\n") if one]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


@WINDOWS_S
async def test_clients_of_http_get_the_same_in_fewer_events(monkeypatch: pytest.MonkeyPatch, window_s: float) -> None:
    without_sockets(monkeypatch)
    world = World(4)
    async with world.router(chunk_window_s=window_s) as router:
        *events, last = await in_bursts(world, asyncio.create_task(over_http(router)))
    choices = [event["choices"][0] for event in events]
    tokens = tuple(token for choice in choices for token in choice.get("token_ids", ()))
    assert tokens == expected(WANTED)
    assert "".join(choice["text"] for choice in choices) == bytes(tokens).decode()
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    assert is_joined(window_s, sum(bool(choice.get("token_ids")) for choice in choices))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda service: service.cancel(WANTED.request_id), FinishReason.ABORT),
        (lambda service: service.end("the test ends it"), grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["cancel", "error"],
)
async def test_what_was_decided_before_an_end_comes_before_it(monkeypatch, end, reason) -> None:
    """The end comes while rounds wait for the longest window that there is."""
    without_sockets(monkeypatch)
    world, tokens, ended = World(4), list[int](), False
    async with world.router(chunk_window_s=1.0) as router, opened(router) as address:
        service = Door(router).service
        async with grpc.aio.insecure_channel(address) as channel:
            sampling = {"max_tokens": NUM_TOKENS, "seed": WANTED.sampling.seed}
            message = pb.GenerateRequest(request_id=WANTED.request_id, text="abc", sampling_params=sampling)
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)

            async def read() -> Any:
                nonlocal ended
                try:
                    async for response in stub.Generate(message):
                        tokens.extend(response.chunk.token_ids)
                        if response.HasField("complete"):
                            return FinishReason(response.complete.finish_reason)
                        if not ended:
                            ended = True
                            (target,) = world.targets
                            for _ in range(BURST):
                                target.turn()
                            for _ in range(5):  # the router's
                                await asyncio.sleep(0)
                            end(service)
                except grpc.aio.AioRpcError as error:
                    return error.code()

            def may_decide() -> bool:
                """After its first tokens the target waits for the client, which may be slow to read them."""
                (target,) = world.targets
                return ended or all(len(tokens) == len(one.token_ids) for one, tokens in target.sessions.values())

            assert await in_bursts(world, asyncio.create_task(read()), may_decide) is reason
        assert not router.num_running
    assert BURST < len(tokens) <= NUM_TOKENS
    assert tuple(tokens) == expected(WANTED)[: len(tokens)]


# -- mutants -----------------------------------------------------------------------------------------------------------


@mutant(outlet, "joined")
def a_round_of_a_chunk_is_lost(original: Any, chunks: Any) -> list[Chunk]:
    found: list[Chunk] = original(chunks)
    return [*found[:-1], original(chunks[-1:])[0]] if len(chunks) > 1 else found


async def test_a_lost_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    a_round_of_a_chunk_is_lost(monkeypatch)
    with pytest.raises(AssertionError):
        await by_grpc(0.005)
