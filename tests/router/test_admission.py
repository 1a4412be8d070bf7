"""Requests on their way in: long prompts are tokenized where no stream waits, lengths fit, faults are the client's."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.router.world import World, request, result_of, without_sockets
from tests.support.letters import Letters

from paceline.errors import InvalidRequestError, PromptTooLongError, RequestInProgressError, ResourceExhaustedError
from paceline.messages import SessionFailed
from paceline.router.admission import TargetInfo
from paceline.router.router import Router
from paceline.types import FinishReason, Request, SamplingParams

LONG = "x" * 3000


class Slow(Letters):
    """Long texts take until ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> tuple[int, ...]:
        if len(text) == len(LONG):
            self.threads.append(threading.current_thread())
            assert self.go.wait(60)
        return super().encode(text)


@contextlib.asynccontextmanager
async def slow_router(
    monkeypatch: pytest.MonkeyPatch, world: World, **settings: Any
) -> AsyncIterator[tuple[Router, Slow]]:
    without_sockets(monkeypatch)
    tokenizer = Slow()
    async with world.router(**settings) as router:
        router.admission._info = TargetInfo(tokenizer, 4096, ())  # type: ignore[arg-type]
        try:
            yield router, tokenizer
        finally:
            tokenizer.go.set()


async def started(router: Router, tokenizer: Slow, wanted: Request) -> asyncio.Task[Any]:
    """A request whose text is being tokenized."""
    task = asyncio.ensure_future(result_of(router, wanted))
    while not tokenizer.threads:
        await asyncio.sleep(0.001)
    return task


async def test_a_stream_goes_on_while_a_long_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4)
    async with slow_router(monkeypatch, world) as (router, tokenizer):
        long = await started(router, tokenizer, Request("long", LONG, SamplingParams(max_tokens=5, seed=1)))
        short = asyncio.ensure_future(result_of(router, request("short", 2)))
        await world.until(short)
        assert not long.done()
        assert tokenizer.threads != [threading.current_thread()]
        tokenizer.go.set()
        while not router.active:
            await asyncio.sleep(0.001)
        await world.until(long)
        assert long.result()[1].usage.prompt_tokens == len(LONG)


async def test_a_request_is_cancelled_by_its_id_while_its_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_router(monkeypatch, World(4)) as (router, tokenizer):
        long = await started(router, tokenizer, Request("long", LONG))
        with pytest.raises(RequestInProgressError):
            await result_of(router, Request("long", "abc"))
        assert router.cancel("long")
        tokenizer.go.set()
        token_ids, result = await long
        assert (token_ids, result.finish_reason) == ([], FinishReason.ABORT)
        assert not router.active
        assert not router.entering


async def test_a_caller_that_leaves_while_its_prompt_is_tokenized_leaves_nothing(monkeypatch) -> None:
    async with slow_router(monkeypatch, World(4)) as (router, tokenizer):
        long = await started(router, tokenizer, Request("long", LONG))
        long.cancel()
        await asyncio.wait([long])
        assert not router.active
        assert not router.entering
        assert not router.admission.preparation.is_busy


async def test_no_more_long_prompts_wait_than_requests_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_router(monkeypatch, World(4), max_queued_requests=1) as (router, _):
        tasks = [asyncio.ensure_future(result_of(router, Request(name, LONG))) for name in "abc"]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(ResourceExhaustedError, match="2 long prompts are to be tokenized: at most 1 may"):
            await done.pop()
        assert len(waiting) == 2
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_the_default_length_is_what_the_prompt_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(4)
    async with world.router() as router:
        plain = Request("a", "x" * 4092, SamplingParams(seed=1))
        served = asyncio.ensure_future(result_of(router, plain))
        while not router.active:  # it is tokenized in a thread
            await asyncio.sleep(0.001)
        await world.until(served)
        token_ids, result = served.result()
        assert (len(token_ids), result.finish_reason) == (4, FinishReason.LENGTH)
        for sampling, text in (
            (SamplingParams(max_tokens=5), "4092 tokens and max_tokens is 5: together at most 4096 fit"),
            (SamplingParams(min_tokens=5), "4092 tokens and min_tokens is 5: together at most 4096 fit"),
        ):
            with pytest.raises(PromptTooLongError, match=text):
                await result_of(router, Request("b", "x" * 4092, sampling))


async def test_a_request_that_an_engine_finds_at_fault_is_tried_nowhere_else(monkeypatch) -> None:
    without_sockets(monkeypatch)
    world = World(4, 4)
    async with world.router() as router:
        task = asyncio.ensure_future(result_of(router, request("a", 1)))
        while not any(target.sessions for target in world.targets):
            await world.turn()
        (target,) = [target for target in world.targets if target.sessions]
        ((_, session_id),) = target.sessions
        target.links[router].receive([SessionFailed(session_id, 0, "all is forbidden", True)], None)
        with pytest.raises(InvalidRequestError, match="all is forbidden"):
            await task
        target.sessions.clear()
        await world.turn()
        assert not any(target.sessions for target in world.targets)


async def test_options_that_forbid_every_token_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    async with World(4).router() as router:
        sampling = SamplingParams(bad_words=tuple((i,) for i in range(128)))
        with pytest.raises(InvalidRequestError, match="bad_words forbid every token: at least one of 128"):
            await result_of(router, Request("a", "abc", sampling))
