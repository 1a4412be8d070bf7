"""Streams that break after their first token: both clients continue them, no token lost or twice, or say why not."""

import asyncio
import math
import threading
from collections import Counter

import grpc
import pytest
from tests.client.support import TEXT, both
from tests.rpc.test_status import Failed
from tests.support.fake_service import WORDS, chunk, complete, endless, wait_until
from tests.support.fakes import Clock

from paceline.client import AsyncClient, Client
from paceline.client import connection as connection_module
from paceline.client.retries import REACH_TIMEOUT_S, RESUME_TIMEOUT_S, Retries
from paceline.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    RequestCancelledError,
    RequestInProgressError,
    ResourceExhaustedError,
    RouterStoppedError,
)
from paceline.rpc.status import RETRY_TRAILER, to_status
from paceline.types import FinishReason, Usage

Code = grpc.StatusCode
TOKENS = tuple(100 * index + i for index in range(len(WORDS)) for i in range(2))
LOST = {
    "connection": (Code.UNAVAILABLE, "Socket closed", ()),
    "stream": (Code.CANCELLED, "Stream removed (RST_STREAM error code 8)", ()),
    "reset": (Code.INTERNAL, "Received RST_STREAM with error code 2", ()),
    "proxy": (Code.UNKNOWN, "Received http2 header with status: 500", ()),
    "new proxy": (
        Code.NOT_FOUND,
        "Application metadata not set. Ping /ray.serve.RayServeAPIService/ListApplications for available applications.",
        (),
    ),
    "stopped": to_status(RouterStoppedError("the router is being stopped")),
    "full": to_status(ResourceExhaustedError("the queue is full", 0.001)),
    "not yet noticed": to_status(RequestInProgressError("request_id 'r' is in progress")),
}


def breaking(status, *, at=(2, 2, 5), skip=0):
    """Speaks the words after those that were delivered, and breaks where it is told to. ``skip``: a mistake."""

    async def script(request, context):
        script.peers.append(context.peer())
        first = len(request.generated_token_ids) // 2
        assert tuple(request.generated_token_ids) == TOKENS[: 2 * first]
        for index in range(first + (skip if first else 0), len(WORDS)):
            if index in places:
                places.remove(index)
                await context.abort(*status)
            yield chunk(request, index, WORDS[index], cached=7 if first else 1)
        yield complete(request, len(WORDS))

    places, script.peers = list(at), []
    return script


@both
@pytest.mark.parametrize("status", LOST.values(), ids=LOST)
def test_a_stream_whose_server_is_lost_goes_on(server, generate, status):
    server.script = breaking(status)
    chunks, result = generate(server.address, "hi", logprobs=True)
    assert [c.text for c in chunks] == list(WORDS)
    assert result.text == TEXT
    assert result.token_ids == TOKENS
    assert len(result.logprobs) == len(TOKENS)
    assert result.usage == Usage(3, len(TOKENS), 1)
    assert result.speculation.rounds == result.speculation.hits == len(WORDS)
    assert (result.speculation.drafted, result.speculation.acceptance_histogram) == (3 * len(WORDS), {1: len(WORDS)})
    assert result.timing.decode_s > 0
    assert result.finish_reason is FinishReason.STOP
    assert [len(r.generated_token_ids) for r in server.requests] == [0, 4, 4, 10]
    assert len({(r.request_id, r.text, r.sampling_params.seed) for r in server.requests}) == 1


@both
def test_a_stream_that_broke_before_its_last_message_gets_that(server, generate):
    async def script(request, context):
        if not request.generated_token_ids:
            for index, word in enumerate(WORDS):
                yield chunk(request, index, word)
            await context.abort(*LOST["stream"])
        yield complete(request, len(WORDS))

    server.script = script
    assert generate(server.address, "hi")[1].text == TEXT


@both
@pytest.mark.parametrize("name", ["connection", "stream", "reset", "proxy", "new proxy"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_lost_server_is_an_engine_error_to_who_does_not_resume(server, generate, name, after):
    server.script = breaking(LOST[name], at=[after] * 3)
    with pytest.raises(EngineError) as caught:
        generate(server.address, "hi", resume=False)
    where = f"the stream from {server.address} broke after 4 tokens: " if after else "cannot be reached: "
    assert where + LOST[name][1] in str(caught.value)
    assert len(server.requests) == (1 if after else 3)


@both
@pytest.mark.parametrize("error", [EngineError("no target is left"), RequestCancelledError("by an administrator")])
def test_what_the_service_itself_ends_is_not_begun_again(server, generate, error):
    server.script = breaking(to_status(error))
    with pytest.raises(type(error), match=str(error)):
        generate(server.address, "hi")
    assert len(server.requests) == 1


@both
@pytest.mark.parametrize("skip", [1, -1])
def test_a_server_that_goes_on_elsewhere_is_an_error_and_no_wrong_text(server, generate, skip):
    server.script = breaking(LOST["stream"], skip=skip)
    with pytest.raises(EngineError, match="it cannot resume streams"):
        generate(server.address, "hi")


@both
def test_a_server_that_knows_no_resuming_is_an_error_and_no_text_twice(server, generate):
    async def script(request, context):
        for index, word in enumerate(WORDS):
            yield chunk(request, index, word)
            if index == 2 and not request.generated_token_ids:
                await context.abort(*LOST["stream"])

    server.script = script
    with pytest.raises(EngineError, match="counts 2 tokens where 8 have come: it cannot resume streams"):
        generate(server.address, "hi")


@both
def test_the_time_limit_is_that_of_the_whole_stream(server, generate):
    server.script = breaking(to_status(ResourceExhaustedError("full", 0.1)), at=[2] * 1000)
    with pytest.raises(DeadlineExceededError, match=r"the time limit of 0\.5 s was over after \d+ tokens"):
        generate(server.address, "hi", timeout_s=0.5)


def test_a_stream_goes_on_over_another_connection_and_its_neighbors_stay(server, client):
    server.script = endless
    neighbor = client.generate("hi", request_id="neighbor")
    next(neighbor)
    server.script = script = breaking(LOST["proxy"], at=[2])
    assert client.generate("hi").result.text == TEXT
    assert len(set(script.peers)) == 2
    next(neighbor)
    neighbor.cancel()


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_leaving_a_stream_while_it_waits_to_go_on(server, how):
    server.script = breaking(to_status(ResourceExhaustedError("full", 30.0)))
    client = Client(server.address)
    stream = client.generate("hi")
    assert [next(stream).text, next(stream).text] == list(WORDS[:2])
    threading.Timer(0.2, stream.cancel if how == "cancel" else client.close).start()
    if how == "cancel":
        assert stream.result.finish_reason is FinishReason.ABORT
        assert stream.result.text == "".join(WORDS[:2])
    else:
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            _ = stream.result
    assert len(server.requests) == 1


@pytest.mark.parametrize("how", ["cancel", "task"])
async def test_leaving_an_async_stream_while_it_waits_to_go_on(server, how):
    server.script = breaking(to_status(ResourceExhaustedError("full", 30.0)))
    async with AsyncClient(server.address) as client:
        stream = client.generate("hi")
        assert [(await anext(stream)).text, (await anext(stream)).text] == list(WORDS[:2])
        task = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0.2)
        if how == "cancel":
            stream.cancel()
            assert await task is None
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await stream.result).finish_reason is FinishReason.ABORT


# -- limits and pauses -------------------------------------------------------------------------------------------------


def retries(resume=True, **options):
    clock = Clock(100.0)
    return Retries(resume, clock=clock, uniform=lambda low, high: high, **options), clock


def lost(hint=None, code=Code.UNAVAILABLE):
    return Failed(code, "", () if hint is None else ((RETRY_TRAILER, str(hint)),))


def test_pauses_double_up_to_two_seconds_and_a_stream_that_does_not_go_on_fails_after_a_minute():
    policy, clock = retries()
    pauses = []
    while (pause_s := policy.pause_s(lost(), 5)) is not None:
        pauses.append(pause_s)
        clock.now += pause_s
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert RESUME_TIMEOUT_S - 2 < clock.now - 100 <= RESUME_TIMEOUT_S
    assert policy.pause_s(lost(), 6) == 0.1, "it has gone on: its patience is new"


def test_a_hint_takes_the_place_of_the_pause():
    policy, _ = retries()
    assert policy.pause_s(lost(1500), 5) == 1.5
    assert policy.pause_s(lost(0), 5) == 0
    assert policy.pause_s(lost(-1), 5) is None, "never again, it says"
    assert policy.pause_s(lost("soon"), 5) is not None
    assert policy.pause_s(lost(60_001), 5) is None
    assert policy.pause_s(lost(math.inf), 5) is not None, "no number: no hint"


def test_a_request_without_a_token_is_sent_three_times_with_or_without_resuming():
    for resume in (True, False):
        policy, _ = retries(resume)
        assert [policy.pause_s(lost(), 0) for _ in range(3)] == [0.1, 0.2, None]
    assert retries()[0].pause_s(Failed(Code.UNKNOWN, "boom"), 0) is None
    assert retries()[0].pause_s(Failed(*to_status(ResourceExhaustedError("full", 1))), 0) is None
    assert retries()[0].pause_s(Failed(*to_status(InvalidRequestError("top_p is 2"))), 3) is None
    assert retries(resume=False)[0].pause_s(lost(), 3) is None


def test_a_client_that_was_answered_before_waits_until_its_service_can_be_reached_again():
    policy, clock = retries(answered=True)
    while (pause_s := policy.pause_s(lost(), 0)) is not None:
        clock.now += pause_s
    assert REACH_TIMEOUT_S - 2 < clock.now - 100 <= REACH_TIMEOUT_S
    policy, _ = retries(answered=True)
    ours = Failed(*to_status(EngineError("no target is up")))
    assert [policy.pause_s(ours, 0) for _ in range(3)] == [0.2, 0.2, None], "it can be reached, and says no"
    policy, _ = retries(resume=False, answered=True)
    assert [policy.pause_s(lost(), 0) for _ in range(3)] == [0.1, 0.2, None]


@pytest.mark.parametrize("before", [True, False], ids=["answered", "new"])
def test_a_proxy_that_is_started_again_is_noticed_only_by_clients_that_are_new(server, before):
    server.script = breaking(LOST["connection"], at=())
    with Client(server.address) as client:
        if before:
            assert client.generate("hi").result.text == TEXT
        server.script = breaking(LOST["new proxy"], at=[0] * 4)
        if before:
            assert client.generate("hi").result.text == TEXT
        else:
            with pytest.raises(EngineError, match="cannot be reached: Application metadata not set"):
                assert client.generate("hi").result


# -- the age of connections --------------------------------------------------------------------------------------------


@pytest.fixture
def aging(monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_CONNECTION_AGE_S", 0.0)


def peers_of(server):
    """A script that notes which connection each call came by, and the notes."""
    peers = []

    async def script(request, context):
        peers.append(context.peer())
        async for message in endless(request, context):
            yield message

    server.script = script
    return peers


def test_new_calls_leave_an_old_connection_and_its_streams_stay(server, aging):
    peers = peers_of(server)
    with Client(server.address) as client:
        streams = [client.generate("hi", request_id=f"age-{i}") for i in range(3)]
        for stream in streams * 2:
            next(stream)
        assert len(set(peers)) == 3
        assert len(client._connections) == 3
        streams[0].cancel()
        del stream, streams[0]
        wait_until(lambda: len(client._connections) == 2)  # the connection went with its last stream
    for stream in streams:
        with pytest.raises(RequestCancelledError):
            list(stream)


async def test_new_calls_of_an_async_client_leave_an_old_connection(server, aging):
    peers = peers_of(server)
    async with AsyncClient(server.address) as client:
        streams = [client.generate("hi", request_id=f"age-{i}") for i in range(3)]
        for stream in streams * 2:
            await anext(stream)
        assert len(set(peers)) == 3
        assert (await client.model_info()).model_id == "big"
        for stream in streams:
            await stream.aclose()


def test_calls_of_a_young_connection_share_it(server, client):
    peers = peers_of(server)
    for _ in range(3):
        stream = client.generate("hi")
        next(stream)
        stream.close()
    assert len(set(peers)) == 1


def test_a_client_of_many_streams_opens_connections_that_can_be_balanced(server, monkeypatch):
    """Streams go where the fewest are; those that have ended leave their place."""
    monkeypatch.setattr(connection_module, "STREAMS_PER_CONNECTION", 2)
    monkeypatch.setattr(connection_module, "MAX_CONNECTIONS", 2)
    peers = peers_of(server)
    with Client(server.address) as client:
        streams = [client.generate("hi", request_id=f"many-{i}") for i in range(6)]
        for stream in streams:
            next(stream)
        assert sorted(Counter(peers).values()) == [3, 3]
        client.model_info()
        assert len(client._connections) == 2, "a unary call needs none of its own"
        for stream in streams[:5]:
            stream.close()
            list(stream)
        last = client.generate("hi", request_id="last")
        next(last)
        assert last._connection is not streams[5]._connection, "that has no stream"
        for stream in (streams[5], last):
            stream.close()


def test_a_unary_call_that_was_lost_leaves_its_connection(server, client):
    client.model_info()
    first = client.connection()
    server.info_error = EngineError("the monitor does not answer")
    with pytest.raises(EngineError):
        client.model_info()
    assert client.connection() is first, "a service that answers keeps its connection"
    server.info_error = RouterStoppedError("the router is being stopped")
    with pytest.raises(EngineError):
        client.model_info()
    assert client.connection() is not first
