"""The clients against the real service, router and replicas: what they hand out is what one process gives."""

import asyncio
import contextlib

import pytest
from tests.service.support import replicas, routed, tiny_pair
from tests.support.door import opened

from paceline.client import AsyncClient, Client
from paceline.errors import DeadlineExceededError, InvalidRequestError
from paceline.types import FinishReason, SamplingParams

PROMPT = "the quick brown fox "


@pytest.fixture(scope="module")
def engines(checkpoints):
    with replicas(tiny_pair(checkpoints), target_pause_s=0.005) as started:
        yield started


@contextlib.asynccontextmanager
async def served(checkpoints, engines):
    """The address of a service over a router, and the router."""
    async with routed(tiny_pair(checkpoints), *engines) as (router, *_), opened(router) as address:
        yield address, router


async def _idle(router):
    """Waits until neither the router nor a replica holds a session."""
    async with asyncio.timeout(60):
        while router.num_running or any(s.num_sessions for found in router.statuses().values() for s in found):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_tokens_are_those_of_one_process(checkpoints, engines, plain, temperature):
    sampling = SamplingParams(max_tokens=60, temperature=temperature, seed=11, ignore_eos=True)

    def blocking(address):
        with Client(address) as client:
            stream = client.generate(PROMPT, sampling, logprobs=True)
            return "".join(chunk.text for chunk in stream), stream.result

    async with served(checkpoints, engines) as (address, _):
        text, result = await asyncio.to_thread(blocking, address)
        async with AsyncClient(address) as client:
            other = await client.generate(PROMPT, sampling).result
        assert result.token_ids == other.token_ids == plain(PROMPT, sampling)
        assert text == result.text == other.text
        assert len(result.logprobs) == 60
        assert result.finish_reason is FinishReason.LENGTH
        assert result.usage.completion_tokens == 60
        assert result.speculation.rounds > 0
        assert result.timing.decode_s > 0


async def test_a_request_that_is_left_is_freed(checkpoints, engines):
    long = {"max_tokens": 1500, "ignore_eos": True}
    async with served(checkpoints, engines) as (address, router), AsyncClient(address) as client:
        async for _ in client.generate(PROMPT, **long):
            assert router.num_running == 1
            break
        await _idle(router)
        stream = client.generate(PROMPT, **long)
        await anext(stream)
        assert await client.cancel(stream.request_id)
        result = await stream.result
        assert result.finish_reason is FinishReason.ABORT
        assert 0 < len(result.token_ids) < 1500
        await _idle(router)
        with pytest.raises(DeadlineExceededError):
            await client.generate(PROMPT, **long, timeout_s=0.5).result
        await _idle(router)


async def test_what_the_service_refuses(checkpoints, engines):
    async with served(checkpoints, engines) as (address, _), AsyncClient(address) as client:
        for prompt, part in (("", "text is empty"), ([], "input_ids is empty"), ([10**6], "1000000")):
            with pytest.raises(InvalidRequestError, match=part):
                await client.generate(prompt).result
