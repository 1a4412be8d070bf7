"""Sixty-four requests of all kinds at once, through the real service: every one gets what plain decoding gives it.

The oracle is one process without a draft. The rejection rule has no such oracle: it is held to its lengths and counts.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.cluster.ray.conftest import ON_RAY, letters, until
from tests.cluster.ray.test_app import assert_all_free, replicas
from tests.support.local import plain_results
from tests.support.loops import finish

from paceline.client import AsyncClient
from paceline.types import Acceptance, FinishReason, Mode, Request, SamplingParams, SpeculationParams

pytestmark = ON_RAY

NUM_REQUESTS = 64
MODES = [
    SpeculationParams(mode=Mode.PLAIN),
    SpeculationParams(),
    SpeculationParams(mode=Mode.SEQUENTIAL),
    SpeculationParams(max_draft_tokens=0),
    SpeculationParams(max_draft_tokens=32),
    SpeculationParams(max_draft_tokens=1),
    SpeculationParams(max_draft_tokens=5, mode=Mode.SEQUENTIAL),
    SpeculationParams(acceptance=Acceptance.REJECTION),
    SpeculationParams(acceptance=Acceptance.REJECTION, mode=Mode.SEQUENTIAL, max_draft_tokens=3),
    SpeculationParams(acceptance=Acceptance.REJECTION, max_draft_tokens=12, saguaro=0.7),
]
EDITS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"top_k": 12},
    {"top_p": 0.85},
    {"min_p": 0.05, "top_k": 40},
    {"logit_bias": {15: 2.0, 22: -100.0}, "bad_words": ((30,), (31, 32))},
    {"stop_token_ids": tuple(range(100, 130)), "min_tokens": 5},
    {"ignore_eos": True},
]
STOPS = [(), (), ("qu",), ("e", "zz"), ("not there",)]


def requests():
    """The same on every run."""
    rng = random.Random(20)
    made = []
    for i in range(NUM_REQUESTS):
        max_tokens = rng.choice([1, 2, 7, 30, 64, 120, 200])
        sampling = SamplingParams(
            temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
            seed=1000 + i,
            max_tokens=max_tokens,
            **{k: min(v, max_tokens) if k == "min_tokens" else v for k, v in EDITS[i % len(EDITS)].items()},
        )
        prompt = letters(rng.randrange(1, 150), i)
        made.append(Request(f"mixed-{i}", prompt, sampling, MODES[i % len(MODES)], STOPS[i % len(STOPS)]))
    return made


def is_exact(request):
    """Whether its tokens are those of plain decoding; without a temperature both rules are the same."""
    return (
        request.speculation.acceptance is Acceptance.COUPLED
        or request.sampling.temperature == 0
        or request.speculation.mode is Mode.PLAIN
    )


def check_counts(request, chunks, result):
    """What holds whatever the tokens are."""
    assert result.usage.completion_tokens == len(result.token_ids) == len(result.logprobs)
    assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert 0 < len(result.token_ids) <= request.sampling.max_tokens
    if result.finish_reason is FinishReason.LENGTH:
        assert len(result.token_ids) == request.sampling.max_tokens
    assert all(logprob <= 1e-6 for logprob in result.logprobs)
    # One that ends within the first min_tokens tokens is held back.
    assert request.sampling.min_tokens or not any(stop in result.text for stop in request.stop)
    stats = result.speculation
    assert 0 <= stats.accepted <= stats.drafted <= request.speculation.max_draft_tokens * stats.rounds
    assert stats.rounds == sum(stats.causes.values())
    assert stats.rounds + stats.accepted >= len(result.token_ids)
    assert sum(n * count for n, count in stats.acceptance_histogram.items()) == stats.accepted
    assert max(stats.acceptance_histogram, default=0) <= request.speculation.max_draft_tokens
    if request.speculation.mode is Mode.PLAIN or request.speculation.max_draft_tokens == 0:
        assert stats.drafted == 0
    assert result.seed == request.sampling.seed


def test_mixed_requests_are_served_as_in_one_process(app):
    check_lossless(app)


def check_lossless(app):
    """All requests at once, each compared with what one process gives it."""
    made = requests()
    expected = plain_results(app.pair / "target", [(r.prompt, r.sampling, r.stop) for r in made])

    async def ask(client, request):
        stream = client.generate(
            request.prompt,
            request.sampling,
            request.speculation,
            stop=request.stop,
            request_id=request.request_id,
            logprobs=True,
            timeout_s=200,
        )
        chunks = [chunk async for chunk in stream]
        return chunks, await stream.result

    async def run():
        async with AsyncClient(app.address) as client:
            results = await asyncio.gather(*(ask(client, request) for request in made))
        await assert_all_free(app)
        await until(lambda: no_page(), 60, "no KV page is used")
        return results

    async def no_page():
        return not any(status.kv_pages_used for status in await replicas(app, "target"))

    results = finish(run())
    for request, plain, (chunks, result) in zip(made, expected, results, strict=True):
        check_counts(request, chunks, result)
        assert result.usage.prompt_tokens == plain.usage.prompt_tokens
        if not is_exact(request):
            continue
        assert result.token_ids == plain.token_ids, request
        assert result.text == plain.text
        assert (result.finish_reason, result.matched_stop) == (plain.finish_reason, plain.matched_stop)
        assert result.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert sum(is_exact(request) for request in made) > NUM_REQUESTS // 2
    reasons = {result.finish_reason for _, result in results}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    matched = {type(result.matched_stop) for _, result in results}
    assert matched == {int, str, type(None)}
    drawn = [result for request, (_, result) in zip(made, results, strict=True) if not is_exact(request)]
    assert sum(result.speculation.accepted for result in drawn) > 0
