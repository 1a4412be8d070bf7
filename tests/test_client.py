"""Both clients against a real grpc.aio server on the loopback that says what each test wants."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest
from tests.fake_service import (
    SEED,
    WORDS,
    FakeService,
    Wire,
    aborting,
    chunk,
    complete,
    endless,
    failing,
    sentence,
    silent,
    wait_until,
)

from paceline import api
from paceline.client import AsyncClient, Client, Tls
from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PromptTooLongError,
    RequestCancelledError,
    ResourceExhaustedError,
    TokenizerMismatchError,
)
from paceline.router.session import Session, Timing, Usage
from paceline.types import Cause, FinishReason, Mode, Outcome, Round, SamplingParams, SpeculationParams
from paceline.v1 import generation_pb2 as pb

TEXT = "".join(WORDS)


@pytest.fixture(scope="module")
def shared_server():
    with FakeService() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.script = sentence
    shared_server.info_error = None
    shared_server.health = "SERVING"
    shared_server.requests.clear()
    shared_server.finished.clear()
    return shared_server


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client


def blocking(address, *args, **kwargs):
    """Chunks and result from the blocking client."""
    with Client(address) as client:
        stream = client.generate(*args, **kwargs)
        return list(stream), stream.result


def awaited(address, *args, **kwargs):
    """Chunks and result from the client for asyncio."""

    async def main():
        async with AsyncClient(address) as client:
            stream = client.generate(*args, **kwargs)
            chunks = [chunk async for chunk in stream]
            return chunks, await stream.result

    return asyncio.run(main())


both = pytest.mark.parametrize("generate", [blocking, awaited])


# -- streams -------------------------------------------------------------------------------------------------------


@both
def test_chunks_add_up_to_the_result(server, generate):
    server.script = finishing(matched_token_id=7)
    chunks, result = generate(server.address, "hi", seed=SEED)
    assert [c.text for c in chunks] == list(WORDS)
    assert result.text == TEXT
    assert result.token_ids == tuple(t for c in chunks for t in c.token_ids)
    assert len(result.token_ids) == 2 * len(WORDS)
    assert result.finish_reason is FinishReason.STOP
    assert result.usage == Usage(3, 2 * len(WORDS), 1)
    assert result.speculation.rounds == result.speculation.hits == len(WORDS)
    assert (result.speculation.drafted, result.speculation.accepted) == (3 * len(WORDS), len(WORDS))
    assert result.speculation.causes == {Cause.HIT: len(WORDS)}
    assert result.timing == Timing(prefill_s=0.25, decode_s=2.0, tokens_per_s=8.0, queue_s=0.5)
    assert result.seed == SEED
    assert result.matched_stop == 7
    assert chunks[0].segments == (("d", True), ("ef ", False))
    assert chunks[0].drafted == (True, False)
    assert (chunks[0].round.num_drafted, chunks[0].round.num_accepted) == (3, 1)
    assert chunks[0].round.cause is Cause.HIT


@both
@pytest.mark.parametrize(("stop", "matched"), [((), 7), (("\u4e08",), "\u4e08"), (("no such text",), 7)])
def test_the_result_is_the_one_of_the_session(server, generate, stop, matched):
    """What a real session makes of outcomes, chunk by chunk over the wire, is what the client hands out."""
    sampling = SamplingParams(max_tokens=8, seed=SEED)
    session = Session("s", (1, 2, 3), sampling, SpeculationParams(), decode=_decode, stop=stop, eos_token_ids=(7,))
    session.open()
    rounds = [((4, 5), Round(3, 1, Cause.START)), ((6,), Round(2, 0, Cause.HIT)), ((8, 9, 7), Round(2, 2, Cause.HIT))]
    chunks, context_len = [], 3
    for token_ids, round_ in rounds:
        reason = FinishReason.STOP if 7 in token_ids else None
        logprobs = tuple(-1 / 3 / t for t in token_ids)
        session.on_target(Outcome("s", 0, context_len, token_ids, logprobs, round_, reason, cached_tokens=2))
        context_len += len(token_ids)
        chunks += session.digest().chunks

    async def script(request, context):
        counts = {"prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 2}
        for piece in chunks:
            message = api.chunk_to_proto(piece, **counts, logprobs=request.logprobs)
            yield pb.GenerateResponse(request_id=request.request_id, chunk=message)
        yield pb.GenerateResponse(request_id=request.request_id, complete=api.complete_to_proto(session.result))

    server.script = script
    assert session.result.matched_stop == matched
    received, result = generate(server.address, [1, 2, 3], sampling, logprobs=True)
    assert received == [replace(piece, usage=None) for piece in chunks]
    assert result == session.result


def _decode(token_ids):
    return "".join(chr(0x4E00 + t) for t in token_ids)


def finishing(**fields):
    async def script(request, context):
        for index, word in enumerate(WORDS):
            yield chunk(request, index, word)
        yield complete(request, len(WORDS), **fields)

    return script


@both
def test_why_it_stopped(server, generate):
    for fields, reason, matched in (
        ({"matched_stop_str": "\n"}, FinishReason.STOP, "\n"),
        ({"finish_reason": "length"}, FinishReason.LENGTH, None),
        ({"finish_reason": "abort"}, FinishReason.ABORT, None),
    ):
        server.script = finishing(**fields)
        _, result = generate(server.address, "hi")
        assert (result.finish_reason, result.matched_stop) == (reason, matched)


def test_both_clients_give_the_same(server):
    one, other = (generate(server.address, "hi", seed=3, logprobs=True) for generate in (blocking, awaited))
    assert one == other


def test_the_result_drains_the_stream_and_stays(client):
    stream = client.generate("hi")
    first = next(stream)
    result = stream.result
    assert first.text == WORDS[0]
    assert result.text == TEXT
    assert stream.result is result
    assert list(stream) == []
    stream.cancel()
    assert stream.result is result


def test_a_stream_that_was_read_to_its_end_is_not_cancelled(server, client):
    for request_id in ("a", "b", "c"):
        stream = client.generate("hi", request_id=request_id)
        assert stream.result.text == TEXT
        del stream
        wait_until(lambda name=request_id: name in server.finished)
        assert request_id not in server.cancelled


@both
def test_log_probabilities_only_if_asked_for(server, generate):
    chunks, result = generate(server.address, "hi", logprobs=True)
    assert chunks[0].logprobs == (-0.125, -0.25)
    assert result.logprobs == (-0.125, -0.25) * len(WORDS)
    chunks, result = generate(server.address, "hi")
    assert chunks[0].logprobs == result.logprobs == ()


@both
def test_text_of_any_script_and_text_that_lags_behind_its_tokens(server, generate):
    pieces = ["", "", "é", "👩‍👩‍👧", "\u0000", "木" * 1000, "\U0010ffff", ""]

    async def script(request, context):
        for index, piece in enumerate(pieces):
            yield chunk(request, index, piece, tokens=1)
        # text that was withheld, released by the end: no tokens, no round
        released = pb.GenerateStreamChunk(text="tail", segments=[pb.TextSegment(text="tail")])
        yield pb.GenerateResponse(request_id=request.request_id, chunk=released)
        yield complete(request, len(pieces), tokens=1)

    server.script = script
    chunks, result = generate(server.address, "naïve 木 😀\u0000")
    assert [c.text for c in chunks] == [*pieces, "tail"]
    assert chunks[-1].round is None
    assert result.text == "".join(pieces) + "tail"
    assert server.requests[-1].text == "naïve 木 😀\u0000"


@both
def test_messages_of_many_megabytes_both_ways(server, generate):
    async def script(request, context):
        yield chunk(request, 0, "x" * 6_000_000)
        yield complete(request, 1)

    server.script = script
    token_ids = np.arange(1_300_000) % 50_000 + 20_000  # three bytes each on the wire, or four
    _, result = generate(server.address, token_ids)
    assert len(result.text) == 6_000_000
    assert list(server.requests[-1].tokenized.input_ids) == token_ids.tolist()
    assert server.requests[-1].ByteSize() > 3_900_000
    generate(server.address, "é" * 2_500_000)
    assert server.requests[-1].text == "é" * 2_500_000


@both
def test_messages_that_only_newer_clients_know_are_passed_over(server, generate):
    async def script(request, context):
        yield pb.GenerateResponse(request_id=request.request_id)
        async for message in sentence(request, context):
            yield message

    server.script = script
    assert generate(server.address, "hi")[1].text == TEXT


@both
def test_a_message_that_makes_no_sense_ends_the_stream(server, generate):
    async def script(request, context):
        yield chunk(request, 0, "a", cause=99)
        await asyncio.sleep(3600)

    server.script = script
    with pytest.raises(EngineError, match="cause 99"):
        generate(server.address, "hi", request_id=f"nonsense-{generate.__name__}")
    server.wait_cancelled(f"nonsense-{generate.__name__}")


# -- requests ------------------------------------------------------------------------------------------------------


def sent(server, *args, **kwargs):
    """The request as the server got it."""
    blocking(server.address, *args, **kwargs)
    return server.requests[-1]


def test_what_is_asked_for_arrives(server):
    sampling = SamplingParams(
        temperature=0.1, top_p=0.9, max_tokens=9, logit_bias={5: -1.5}, bad_words=((1, 2),), seed=4
    )
    speculation = SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=3)
    request = sent(
        server, [1, 2, 2**32 - 1], sampling, speculation, stop=["\n\n", "木"], request_id="r1", logprobs=True
    )
    assert request.request_id == "r1"
    assert list(request.tokenized.input_ids) == [1, 2, 2**32 - 1]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.1, 0.9, 9, 4)
    assert dict(params.logit_bias) == {5: -1.5}
    assert list(params.bad_words[0].token_ids) == [1, 2]
    assert list(params.stop) == ["\n\n", "木"]
    assert (request.speculation.mode, request.speculation.max_draft_tokens) == ("sequential", 3)
    assert request.logprobs


def test_fields_instead_of_params(server):
    request = sent(server, "x", max_tokens=64, temperature=0.7, stop="end")
    assert (request.sampling_params.max_tokens, request.sampling_params.temperature) == (64, 0.7)
    assert list(request.sampling_params.stop) == ["end"]
    assert not request.logprobs


def test_an_id_and_a_seed_are_drawn(server):
    one, other = sent(server, "x"), sent(server, "x")
    assert one.request_id != other.request_id
    assert len(one.request_id) == 32
    assert one.sampling_params.HasField("seed")
    assert one.sampling_params.seed != other.sampling_params.seed
    assert sent(server, "x", SamplingParams(seed=0)).sampling_params.seed == 0


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("args", "kwargs", "parts"),
    [
        (("x", SamplingParams()), {"max_tokens": 3, "seed": 1}, ["sampling is given", "max_tokens, seed"]),
        (("x",), {"temperature": -1.0}, ["temperature is -1.0", "at least 0"]),
        (("x",), {"temperature": float("nan")}, ["temperature is nan: it must be a finite number"]),
        (("x",), {"max_tokens": "many"}, ["max_tokens is 'many': it must be a whole number"]),
        (("x",), {"temprature": 1.0}, ["temprature", "did you mean temperature"]),
        (("x",), {"min_tokens": 9, "max_tokens": 8}, ["min_tokens is 9", "at most max_tokens (8)"]),
        (("x",), {"seed": -1}, ["seed is -1: it must be at least 0 and at most 18446744073709551615"]),
        (("x",), {"seed": 2**64}, ["seed is 18446744073709551616: it must be at least 0 and at most"]),
        (("x", SamplingParams().model_copy(update={"seed": -1})), {}, ["seed is -1: at least 0 and at most 1844674"]),
        (("x", SamplingParams().model_copy(update={"seed": 2**64})), {}, ["seed is 18446744073709551616: at least 0"]),
        (("x",), {"timeout_s": 0}, ["timeout_s is 0"]),
        (("x",), {"timeout_s": float("nan")}, ["timeout_s is nan"]),
        ((b"abc",), {}, ["the prompt is bytes"]),
        (([1, -2],), {}, ["-2", "at least 0"]),
        (([2**32],), {}, [str(2**32), f"at most {2**32 - 1}"]),
        (([1.5],), {}, ["neither text nor a sequence of token ids"]),
        ((7,), {}, ["neither text nor a sequence of token ids"]),
        (("caf\udce9",), {}, ["text", "UTF-8"]),
        (("x",), {"stop": ["\udce9"]}, ["stop", "UTF-8"]),
    ],
)
def test_what_cannot_be_sent_is_refused_here(kind, args, kwargs, parts):
    with pytest.raises(InvalidRequestError) as caught:
        kind("localhost:1").generate(*args, **kwargs)
    for part in parts:
        assert part in str(caught.value)


# -- leaving early -------------------------------------------------------------------------------------------------


def test_break_cancels_on_the_server(server, client):
    server.script = endless
    for piece in client.generate("hi", request_id="break"):
        assert piece.text == "0 "
        break
    server.wait_cancelled("break")


def test_an_exception_in_the_loop_cancels_on_the_server(server, client):
    server.script = endless
    with pytest.raises(ZeroDivisionError):
        _fail_in_loop(client)
    gc.collect()
    server.wait_cancelled("exception")


def _fail_in_loop(client):
    for _ in client.generate("hi", request_id="exception"):
        _ = 1 / 0


def test_dropping_the_last_reference_cancels_on_the_server(server, client):
    server.script = endless
    stream = client.generate("hi", request_id="collected")
    next(stream)
    del stream
    server.wait_cancelled("collected")


def test_dropping_a_stream_that_was_never_read_cancels_on_the_server(server, client):
    server.script = silent
    stream = client.generate("hi", request_id="unread")
    wait_until(lambda: "unread" in server.running)
    del stream
    server.wait_cancelled("unread")


@pytest.mark.parametrize("leave", ["close", "with", "cancel"])
def test_leaving_ends_the_iteration_quietly(server, client, leave):
    server.script = endless
    request_id = f"leave-{leave}"
    stream = client.generate([1, 2, 3], request_id=request_id, seed=9, logprobs=True)
    chunks = [next(stream), next(stream)]
    if leave == "with":
        with stream as same:
            assert same is stream
    else:
        getattr(stream, leave)()
    server.wait_cancelled(request_id)
    assert list(stream) == []
    result = stream.result
    assert result.finish_reason is FinishReason.ABORT
    assert result.text == "0 1 "
    assert result.token_ids == chunks[0].token_ids + chunks[1].token_ids
    assert result.logprobs == chunks[0].logprobs + chunks[1].logprobs
    assert result.usage == Usage(3, 4, 1)
    assert (result.speculation.rounds, result.speculation.drafted, result.speculation.accepted) == (2, 6, 2)
    assert result.seed == 9
    assert result.timing.prefill_s > 0
    assert result.timing.decode_s > 0
    assert result.timing.tokens_per_s == pytest.approx(2 / result.timing.decode_s)


def test_cancel_from_another_thread_wakes_the_consumer(server, client):
    server.script = silent
    stream = client.generate([1, 2, 3], request_id="woken", seed=9)
    threading.Timer(0.1, stream.cancel).start()
    assert list(stream) == []
    assert stream.result.finish_reason is FinishReason.ABORT
    assert stream.result.usage == Usage(3, 0)
    assert stream.result.timing.prefill_s > 0.05
    server.wait_cancelled("woken")


def test_a_dropped_client_does_not_end_its_stream(server):
    stream = Client(server.address).generate("hi")
    gc.collect()
    assert stream.result.text == TEXT


def test_closing_the_client_ends_its_streams(server):
    server.script = endless
    client = Client(server.address)
    stream = client.generate("hi", request_id="closed")
    next(stream)
    client.close()
    client.close()
    with pytest.raises(RequestCancelledError):
        list(stream)
    server.wait_cancelled("closed")


def test_cancel_by_id(server, client):
    server.script = endless
    stream = client.generate("hi", request_id="by-id")
    next(stream)
    assert client.cancel("by-id") is True
    assert stream.result.finish_reason is FinishReason.ABORT
    assert client.cancel("by-id") is False
    assert "by-id" not in server.cancelled


def test_a_closed_client_says_so(server):
    client = Client(server.address)
    client.close()
    for ask in (client.model_info, lambda: client.generate("hi")):
        with pytest.raises(ValueError, match="the client is closed"):
            ask()

    async def main():
        other = AsyncClient(server.address)
        await other.model_info()
        await other.aclose()
        await other.aclose()
        with pytest.raises(ValueError, match="the client is closed"):
            await other.model_info()
        with pytest.raises(ValueError, match="the client is closed"):
            other.generate("hi")

    asyncio.run(main())


async def _leave(client, how, request_id):
    stream = client.generate("hi", request_id=request_id)
    if how == "break":
        async for _ in stream:
            break
    elif how == "aclose":
        async for _ in stream:
            await stream.aclose()
        assert (await stream.result).finish_reason is FinishReason.ABORT
    elif how == "async with":
        async with stream as same:
            assert same is stream
            await anext(stream)
        assert (await stream.result).text.startswith("0 ")
    elif how == "cancel":
        await anext(stream)
        stream.cancel()
        assert [c async for c in stream] == []
        result = await stream.result
        assert (result.finish_reason, result.text) == (FinishReason.ABORT, "0 ")
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            await _fail_in_async_loop(stream)
    elif how == "task":
        await anext(stream)
        task = asyncio.create_task(_consume(stream))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        result = await stream.result
        assert result.finish_reason is FinishReason.ABORT
        assert result.text.startswith("0 ")
    elif how == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await _consume(stream)
    elif how == "thread":
        threading.Timer(0.1, stream.cancel).start()
        await _consume(stream)
        assert (await stream.result).finish_reason is FinishReason.ABORT
    elif how == "while waiting":
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        await _consume(stream)
        assert (await stream.result).finish_reason is FinishReason.ABORT


async def _consume(stream):
    async for _ in stream:
        pass


async def _fail_in_async_loop(stream):
    async for _ in stream:
        _ = 1 / 0


HOW = ["break", "aclose", "async with", "cancel", "exception", "task", "timeout", "thread", "while waiting"]


@pytest.mark.parametrize("how", HOW)
def test_leaving_an_async_stream_cancels_on_the_server(server, how):
    server.script = endless
    request_id = f"async-{how}"

    async def main():
        async with AsyncClient(server.address) as client:
            await _leave(client, how, request_id)
            gc.collect()
            await asyncio.to_thread(server.wait_cancelled, request_id)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["while waiting", "thread"])
def test_a_silent_async_stream_is_cancelled_too(server, how):
    server.script = silent
    request_id = f"silent-{how}"

    async def main():
        async with AsyncClient(server.address) as client:
            await _leave(client, how, request_id)
            await asyncio.to_thread(server.wait_cancelled, request_id)

    asyncio.run(main())


def test_an_async_stream_that_outlives_its_loop(server):
    server.script = endless

    async def main():
        client = AsyncClient(server.address)
        stream = client.generate("hi", request_id="outlived")
        await anext(stream)
        return stream, client

    kept = asyncio.run(main())
    del kept
    gc.collect()
    server.wait_cancelled("outlived")


def test_async_cancel_by_id(server):
    server.script = endless

    async def main():
        async with AsyncClient(server.address) as client:
            stream = client.generate("hi")
            await anext(stream)
            assert await client.cancel(stream.request_id) is True
            assert (await stream.result).finish_reason is FinishReason.ABORT
            assert await client.cancel(stream.request_id) is False

    asyncio.run(main())


# -- failures ------------------------------------------------------------------------------------------------------


ERRORS = [
    InvalidRequestError("top_p is 2: at most 1 is allowed"),
    PromptTooLongError("the prompt has 5 tokens"),
    ConfigError("no tokenizer"),
    TokenizerMismatchError("a and b differ"),
    NotFoundError("no model 'x'"),
    ResourceExhaustedError("the queue is full", 0.25),
    DeadlineExceededError("the server's own limit of 3 s was over"),
    RequestCancelledError("cancelled by an administrator"),
    EngineError("no target is left"),
]


@both
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_every_error_arrives_as_itself(server, generate, error, after):
    server.script = failing(error, after)
    with pytest.raises(type(error)) as caught:
        generate(server.address, "hi")
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
        (grpc.StatusCode.UNKNOWN, EngineError, "boom"),
        (grpc.StatusCode.DATA_LOSS, EngineError, "boom"),
        (grpc.StatusCode.ABORTED, EngineError, "boom"),
        (grpc.StatusCode.PERMISSION_DENIED, InvalidRequestError, "boom"),
        (grpc.StatusCode.UNAUTHENTICATED, InvalidRequestError, "boom"),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidRequestError, "boom"),
        (grpc.StatusCode.ALREADY_EXISTS, InvalidRequestError, "boom"),
        (grpc.StatusCode.UNIMPLEMENTED, ConfigError, "is no Paceline service of this version: boom"),
        (grpc.StatusCode.UNAVAILABLE, EngineError, "cannot be reached: boom"),
        (grpc.StatusCode.NOT_FOUND, NotFoundError, "boom"),
    ],
)
def test_codes_from_what_is_in_between(server, generate, code, kind, sentence):
    server.script = aborting(code, "boom")
    with pytest.raises(kind, match=sentence) as caught:
        generate(server.address, "hi")
    assert type(caught.value) is kind
    server.script = aborting(code, "boom", after=2)
    with pytest.raises(kind, match="boom") as caught:
        generate(server.address, "hi")
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
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"the time limit of 0\.3 s was over after \d+ tokens"):
        generate(server.address, "hi", timeout_s=0.3, request_id=request_id)
    assert 0.25 < time.monotonic() - started_s < 10
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
        for index, _ in enumerate(client.generate("hi", request_id=request_id)):
            if index == 5:
                wire.cut()


async def _async_until_cut(wire, request_id):
    index = 0
    async with AsyncClient(wire.address) as client:
        async for _ in client.generate("hi", request_id=request_id):
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
    with FakeService(endless) as server:
        threading.Timer(0.3, server.stop).start()
        with pytest.raises(EngineError, match=f"the stream from {server.address} broke after"):
            generate(server.address, "hi")


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
        generate("no-such-host.invalid:9000", "hi", timeout_s=20)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:", ":9000", "localhost:http", "http://localhost:9000", "a:0", "a:65536"]
)
def test_an_address_that_is_none(kind, address):
    with pytest.raises(ConfigError, match=r"it must be HOST:PORT, such as localhost:9000") as caught:
        kind(address)
    assert repr(address) in str(caught.value)


def test_other_forms_of_an_address(server):
    for address in (f"localhost:{server.port}", f"dns:///localhost:{server.port}", f"ipv4:127.0.0.1:{server.port}"):
        assert blocking(address, "hi")[1].text == TEXT
    Client("[::1]:9000").close()


# -- everything else -----------------------------------------------------------------------------------------------


def test_one_client_in_several_threads(server, client):
    texts, errors = {}, []

    def work(name):
        try:
            for i in range(20):
                stream = client.generate(name, request_id=f"{name}-{i}")
                texts[name, i] = "".join(c.text for c in stream)
                assert client.model_info().model_id == "big"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"thread-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(texts) == 160
    assert set(texts.values()) == {TEXT}


def test_many_async_streams_at_once(server):
    async def main():
        async with AsyncClient(server.address) as client:
            streams = [client.generate("hi") for _ in range(64)]
            return [r.text for r in await asyncio.gather(*(s.result for s in streams))]

    assert asyncio.run(main()) == [TEXT] * 64


def info(client, server):
    return client.model_info(), client.server_info()


async def async_info(server):
    async with AsyncClient(server.address) as client:
        return await client.model_info(), await client.server_info()


def test_what_is_served_and_how_it_is(server, client):
    model, state = info(client, server)
    assert (model, state) == asyncio.run(async_info(server))
    assert (model.model_id, model.draft_model_id, model.eos_token_ids) == ("big", "small", (0, 7))
    assert (model.vocab_size, model.max_context_length, model.max_draft_tokens) == (1024, 2048, 16)
    assert model.modes == ("plain", "sequential", "overlapped")
    assert list(state.pools) == ["target", "draft"]
    assert state.pools["draft"] == ()
    assert state.pools["target"][0].replica_id == "t1"
    assert state.pools["target"][0].counters == {"steps": 3.0}
    assert (state.sessions_running, state.sessions_queued) == (2, 1)
    assert (state.acceptance_rate, state.acceptance_length, state.hit_rate) == (0.5, 2.5, 0.75)


def test_errors_of_the_other_calls(server, client):
    server.info_error = ResourceExhaustedError("busy", 1.5)
    with pytest.raises(ResourceExhaustedError, match="busy") as caught:
        client.model_info()
    assert caught.value.retry_after_s == 1.5
    with pytest.raises(ResourceExhaustedError, match="busy"):
        asyncio.run(async_info(server))
    with pytest.raises(InvalidRequestError, match="timeout_s is -1"):
        client.model_info(timeout_s=-1)


async def _async_ready(address, timeout_s):
    async with AsyncClient(address) as client:
        return await client.wait_ready(timeout_s)


def _ready(address, timeout_s):
    with Client(address) as client:
        return client.wait_ready(timeout_s)


either = pytest.mark.parametrize("ready", [_ready, lambda a, t: asyncio.run(_async_ready(a, t))])


@either
def test_waiting_for_a_service_that_starts(ready):
    with Wire(1) as wire:
        port = int(wire.address.rpartition(":")[2])
    service = FakeService(port=port)
    service.info_error = NotFoundError("no application yet")
    service.health = "NOT_SERVING"
    timers = [
        threading.Timer(0.3, service.__enter__),
        threading.Timer(0.6, setattr, (service, "info_error", None)),
        threading.Timer(0.9, setattr, (service, "health", "SERVING")),
    ]
    for timer in timers:
        timer.start()
    try:
        assert ready(f"127.0.0.1:{port}", 20).model_id == "big"
    finally:
        for timer in timers:
            timer.join()
        service.stop()


@either
def test_a_service_that_does_not_start_in_time(server, ready):
    server.info_error = EngineError("no target yet")
    sentence = rf"the service at {server.address} was not ready within 1 s: no target yet"
    with pytest.raises(DeadlineExceededError, match=sentence):
        ready(server.address, 1)


@either
def test_a_service_that_is_up_and_not_ready(server, ready):
    server.health = "NOT_SERVING"
    with pytest.raises(DeadlineExceededError, match=r"not ready within 1 s: it is up, and says that it is NOT_SERVING"):
        ready(server.address, 1)


@either
def test_waiting_ends_at_once_if_it_cannot_help(server, ready):
    server.info_error = ConfigError("the models do not fit")
    with pytest.raises(ConfigError, match="the models do not fit"):
        ready(server.address, 60)


def test_importing_the_package_loads_neither_grpc_nor_torch():
    script = """
import sys, paceline
assert not {"grpc", "torch", "transformers", "pydantic", "paceline.client"} & set(sys.modules)
from paceline import AsyncClient, Client
assert "grpc" in sys.modules
assert not {"torch", "transformers", "ray"} & set(sys.modules)
assert Client.__module__ == AsyncClient.__module__ == "paceline.client"
try:
    paceline.NoSuchName
except AttributeError as error:
    assert "NoSuchName" in str(error)
else:
    raise SystemExit(1)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a self-signed certificate for the name "paceline.test" and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    name = ["-subj", "/CN=paceline.test", "-addext", "subjectAltName=DNS:paceline.test"]
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    try:
        subprocess.run([*new, "-keyout", key, "-out", cert, *name], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


def test_tls(certificate):
    cert, key = certificate
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with FakeService(credentials=credentials) as server:
        with Client(server.address, tls=Tls(ca_file=cert, server_name="paceline.test")) as client:
            assert client.generate("hi").result.text == TEXT
        given = grpc.ssl_channel_credentials(cert.read_bytes())
        with Client(f"localhost:{server.port}", credentials=given) as client, pytest.raises(EngineError):
            _ = client.generate("hi").result  # the certificate is for another name
        for other in (Client(server.address), Client(server.address, tls=Tls(server_name="paceline.test"))):
            with other, pytest.raises(EngineError, match="cannot be reached"):
                _ = other.generate("hi").result

        async def main():
            async with AsyncClient(server.address, tls=Tls(ca_file=cert, server_name="paceline.test")) as client:
                return await client.generate("hi").result

        assert asyncio.run(main()).text == TEXT


def test_tls_settings_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.pem cannot be read: No such file"):
        Client("a:1", tls=Tls(ca_file=tmp_path / "none.pem"))
    (tmp_path / "key.pem").write_bytes(b"")
    with pytest.raises(ConfigError, match="go together"):
        Client("a:1", tls=Tls(key_file=tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="give one or the other"):
        Client("a:1", tls=Tls(), credentials=grpc.ssl_channel_credentials())
