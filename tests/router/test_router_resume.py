"""A router that is asked to continue a broken stream: what it refuses, and what it answers without any target."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.router.test_router import running
from tests.support.pump import Clock

from paceline.errors import InvalidRequestError, RequestInProgressError
from paceline.types import FinishReason, Request, Result, SamplingParams


def resumed(generated, request_id="r", **sampling):
    params = SamplingParams(seed=1, **sampling)
    return Request(request_id, "ab", params, stop=("!",), generated_token_ids=tuple(generated))


async def answers(router, request):
    return [item async for item in router.generate(request)]


async def test_a_token_that_the_model_does_not_have_is_refused():
    async with running(Clock()) as router:
        with pytest.raises(InvalidRequestError, match=r"^generated_token_ids holds token id 128: ids in \[0, 128\)"):
            await answers(router, resumed([97, 128]))


@pytest.mark.parametrize("num_tokens", [4, 2000])
async def test_a_stream_that_lacks_its_end_only_gets_it_though_no_target_is_up(num_tokens):
    async with running(Clock()) as router:
        router.admission._info = replace(router.info, max_model_len=4096)
        request = resumed(b"a" * (num_tokens - 1) + b"!", max_tokens=num_tokens + 5)
        (result,) = await answers(router, request)
        assert isinstance(result, Result)
        assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, "!")
        assert result.usage.completion_tokens == num_tokens
        assert router.active == {}


async def test_a_request_whose_first_stream_still_runs_is_refused_by_a_name_of_its_own():
    """The connection may break before the router notices: the client tries again."""
    async with running(Clock()) as router:
        first = asyncio.create_task(answers(router, resumed([])))
        while not router.num_queued:
            await asyncio.sleep(0)
        with pytest.raises(RequestInProgressError, match="'r' is in progress"):
            await answers(router, resumed([97]))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert router.active == {}
