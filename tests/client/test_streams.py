"""Chunks and results of both clients, against a real grpc.aio server that says what each test wants."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.client.support import TEXT, awaited, blocking, both
from tests.support.fake_service import SEED, WORDS, chunk, complete, sentence, wait_until

from paceline.errors import EngineError
from paceline.messages import Outcome
from paceline.router.session import Session
from paceline.rpc import generation as api
from paceline.types import (
    Cause,
    Chunk,
    FinishReason,
    PromptLogprobs,
    Round,
    SamplingParams,
    SpeculationParams,
    Timing,
    TokenLogprob,
    Usage,
)
from paceline.v1 import generation_pb2 as pb


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
    assert received == [replace(piece, usage=None, last=False) for piece in chunks]
    assert result == session.result


@both
@pytest.mark.parametrize("times", [1, 2])
def test_log_probabilities_of_the_prompt_come_once(server, generate, times):
    """Also where a server sends them from the first again, as it does when a request is sent again."""
    blocks = [PromptLogprobs(1, (TokenLogprob(-0.5, 1, ((4, -0.5),)),)), PromptLogprobs(2, (TokenLogprob(-2.0, 9),))]

    async def script(request, context):
        assert (request.sampling_params.prompt_logprobs, request.sampling_params.max_tokens) == (1, 0)
        for block in blocks * times:
            piece = Chunk((), (), (), (), None, prompt_logprobs=block)
            message = api.chunk_to_proto(piece, prompt_tokens=3, completion_tokens=0)
            yield pb.GenerateResponse(request_id=request.request_id, chunk=message)
        yield complete(request, 0, finish_reason="length")

    server.script = script
    received, result = generate(server.address, [1, 2, 3], prompt_logprobs=1, max_tokens=0, seed=SEED)
    assert [piece.prompt_logprobs for piece in received] == blocks
    assert result.prompt_logprobs == (None, *(token for block in blocks for token in block.tokens))
    assert (result.token_ids, result.usage.completion_tokens) == ((), 0)


@both
def test_a_server_that_knows_no_log_probabilities_of_prompts_is_reported(server, generate):
    server.script = finishing()
    with pytest.raises(EngineError, match="sent 0 log probabilities of a prompt of 3 tokens"):
        generate(server.address, [1, 2, 3], prompt_logprobs=0)
    _, result = generate(server.address, [1, 2, 3])
    assert result.prompt_logprobs == ()


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
