"""A router that is asked to continue a broken stream: what it refuses, and what it answers without any target."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from tests.router.test_router import lonely, running
from tests.router.world import without_sockets
from tests.support.pump import Clock

from paceline.errors import InvalidRequestError, RequestInProgressError
from paceline.router.thread import RouterThread
from paceline.types import FinishReason, Request, Result, SamplingParams

PLACES = pytest.mark.parametrize("apart", [False, True], ids=["in its loop", "in a thread"])
"""Where the router is asked."""


@contextlib.asynccontextmanager
async def asked(apart):
    """The router; ``apart``: in a thread of its own."""
    if not apart:
        async with running(Clock()) as router:
            yield router
        return
    router = lonely(Clock(), RouterThread)
    router.start_thread()
    try:
        yield router
    finally:
        router.stop_thread(60)
        assert not router.is_alive


@pytest.fixture(autouse=True)
def _without_sockets(monkeypatch):
    without_sockets(monkeypatch)


def resumed(generated, request_id="r", **sampling):
    params = SamplingParams(seed=1, **sampling)
    return Request(request_id, "ab", params, stop=("!",), generated_token_ids=tuple(generated))


async def answers(router, request):
    return [item async for item in router.generate(request)]


@PLACES
async def test_a_token_that_the_model_does_not_have_is_refused(apart):
    async with asked(apart) as router:
        with pytest.raises(InvalidRequestError, match=r"^generated_token_ids holds token id 128: ids in \[0, 128\)"):
            await answers(router, resumed([97, 128]))


@PLACES
@pytest.mark.parametrize("num_tokens", [4, 2000])
async def test_a_stream_that_lacks_its_end_only_gets_it_though_no_target_is_up(num_tokens, apart):
    async with asked(apart) as router:
        router.admission._info = replace(router.info, max_model_len=4096)
        request = resumed(b"a" * (num_tokens - 1) + b"!", max_tokens=num_tokens + 5)
        (result,) = await answers(router, request)
        assert isinstance(result, Result)
        assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, "!")
        assert result.usage.completion_tokens == num_tokens
        assert router.active == {}


@PLACES
async def test_a_request_whose_first_stream_still_runs_is_refused_by_a_name_of_its_own(apart):
    """The connection may break before the router notices: the client tries again."""
    async with asked(apart) as router:
        first = asyncio.create_task(answers(router, resumed([])))
        while not router.num_queued:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestInProgressError, match="'r' is in progress"):
            await answers(router, resumed([97]))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert router.active == {}
