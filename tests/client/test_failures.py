"""Errors, deadlines and broken connections, as the callers of both clients see them."""

import asyncio
import threading
import time

import grpc
import pytest
from tests.client.support import TEXT, blocking, both
from tests.support.fake_service import WORDS, FakeService, Wire, aborting, chunk, endless, failing, sentence, silent

from paceline.client import AsyncClient, Client
from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    ResourceExhaustedError,
)

ERRORS = [
    PromptTooLongError("the prompt has 5 tokens"),
    ResourceExhaustedError("the queue is full", 0.25),
    EngineError("no target is left"),
]
"""A kind of a kind, one with a hint, one that is tried again; ``rpc/test_status.py`` has every error."""


@both
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_arrives_as_itself(server, generate, error, after):
    server.script = failing(error, after)
    with pytest.raises(type(error)) as caught:
        generate(server.address, "hi", resume=False)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    # only UNAVAILABLE before the first message is tried again
    retried = isinstance(error, EngineError) and after == 0
    assert len(server.requests) == (3 if retried else 1)
    assert len({(r.request_id, r.sampling_params.seed) for r in server.requests}) == 1


@both
@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (grpc.StatusCode.INTERNAL, EngineError, "boom"),
        (grpc.StatusCode.PERMISSION_DENIED, InvalidRequestError, "boom"),
        (grpc.StatusCode.UNIMPLEMENTED, ConfigError, "is not a Paceline service of this version: boom"),
        (grpc.StatusCode.UNAVAILABLE, EngineError, "cannot be reached: boom"),
    ],
)
def test_codes_from_what_is_in_between(server, generate, code, kind, sentence):
    """One of each way; ``rpc/test_status.py`` has every code."""
    server.script = aborting(code, "boom")
    with pytest.raises(kind, match=sentence) as caught:
        generate(server.address, "hi")
    assert type(caught.value) is kind
    server.script = aborting(code, "boom", after=2)
    with pytest.raises(kind, match="boom") as caught:
        generate(server.address, "hi", resume=False)
    if kind is EngineError:
        assert str(caught.value) == f"the stream from {server.address} broke after 4 tokens: boom"


@both
def test_an_error_that_the_server_did_not_foresee(server, generate):
    async def script(request, context):
        yield chunk(request, 0, "a")
        raise KeyError("x")

    server.script = script
    with pytest.raises(EngineError):
        generate(server.address, "hi")


def test_the_error_comes_back_every_time_and_chunks_before_it_were_delivered(server, client):
    server.script = failing(EngineError("gone"), after=2)
    stream = client.generate("hi")
    assert [next(stream).text, next(stream).text] == list(WORDS[:2])
    for _ in range(2):
        with pytest.raises(EngineError, match="gone"):
            next(stream)
        with pytest.raises(EngineError, match="gone"):
            _ = stream.result


def test_an_unavailable_service_is_asked_again_before_the_first_message(server, client):
    left = [2]

    async def script(request, context):
        if left[0]:
            left[0] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        async for message in sentence(request, context):
            yield message

    server.script = script
    stream = client.generate("hi")
    assert "".join(c.text for c in stream) == TEXT
    assert len(server.requests) == 3


@both
@pytest.mark.parametrize("script", [silent, endless])
def test_the_deadline(server, generate, script):
    server.script = script
    request_id = f"deadline-{generate.__name__}-{script.__name__}"
    for timeout_s in (0.3, 3.0, 30.0):  # a busy machine may not get as far as sending it in the first
        with pytest.raises(
            DeadlineExceededError, match=rf"the time limit of {timeout_s:g} s was over after \d+ tokens"
        ):
            generate(server.address, "hi", timeout_s=timeout_s, request_id=request_id)
        if server.requests:
            break
    server.wait_cancelled(request_id)


@both
def test_a_deadline_beyond_all_clocks(server, generate):
    for timeout_s in (1e9, 1e20, float("inf")):
        assert generate(server.address, "hi", timeout_s=timeout_s)[1].text == TEXT


@both
def test_a_stream_without_a_result(server, generate):
    async def script(request, context):
        yield chunk(request, 0, "a")

    server.script = script
    with pytest.raises(EngineError, match="ended the stream without a result"):
        generate(server.address, "hi")


@both
def test_a_failure_after_the_result_changes_nothing(server, generate):
    async def script(request, context):
        async for message in sentence(request, context):
            yield message
        await context.abort(grpc.StatusCode.UNAVAILABLE, "late")

    server.script = script
    assert generate(server.address, "hi")[1].text == TEXT


def _until_cut(wire, request_id):
    with Client(wire.address) as client:
        for index, _ in enumerate(client.generate("hi", request_id=request_id, resume=False)):
            if index == 5:
                wire.cut()


async def _async_until_cut(wire, request_id):
    index = 0
    async with AsyncClient(wire.address) as client:
        async for _ in client.generate("hi", request_id=request_id, resume=False):
            index += 1
            if index == 5:
                wire.cut()


@pytest.mark.parametrize("read", [_until_cut, lambda wire, name: asyncio.run(_async_until_cut(wire, name))])
def test_a_connection_that_is_reset_in_mid_stream(server, read):
    server.script = endless
    request_id = f"reset-{time.monotonic_ns()}"
    with Wire(server.port) as wire, pytest.raises(EngineError) as caught:
        read(wire, request_id)
    assert type(caught.value) is EngineError
    assert str(caught.value).startswith(f"the stream from {wire.address} broke after ")
    server.wait_cancelled(request_id)
    assert len(server.requests) == 1, "it was sent twice"


@both
def test_a_server_that_stops_in_mid_stream(generate):
    async def script(request, context):
        async for message in endless(request, context):
            yield message
            if message.chunk.completion_tokens == 40:
                threading.Thread(target=server.stop).start()

    with FakeService(script) as server, pytest.raises(EngineError) as caught:
        generate(server.address, "hi", resume=False)
    assert str(caught.value).startswith(f"the stream from {server.address} broke after")


@both
def test_no_server_at_all(generate):
    with Wire(1) as wire:
        wire.cut()
    with pytest.raises(EngineError) as caught:
        generate(wire.address, "hi")
    assert str(caught.value).startswith(f"the service at {wire.address} cannot be reached: ")
    assert "refused" in str(caught.value)


@both
def test_a_host_that_does_not_exist(generate):
    with pytest.raises(EngineError, match=r"the service at no-such-host\.invalid:9000 cannot be reached"):
        generate("no-such-host.invalid:9000", "hi", timeout_s=120)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":9000", "localhost:http", "http://localhost:9000", "a:0", "a:65536", 9000],
)
def test_an_address_that_is_none(kind, address):
    with pytest.raises(ConfigError, match=r"it must be HOST:PORT of gRPC, such as localhost:9000") as caught:
        kind(address)
    assert repr(str(address)) in str(caught.value)


def test_other_forms_of_an_address(server):
    for address in (f"localhost:{server.port}", f"dns:///localhost:{server.port}", f"ipv4:127.0.0.1:{server.port}"):
        assert blocking(address, "hi")[1].text == TEXT
    Client("[::1]:9000").close()
