"""Whoever leaves a stream early, in whatever way: it is cancelled on the server, and the iteration ends quietly."""

import asyncio
import gc
import threading

import pytest
from tests.client.support import TEXT
from tests.support.fake_service import endless, silent, wait_until

from paceline.client import AsyncClient, Client
from paceline.errors import RequestCancelledError
from paceline.types import FinishReason, Usage


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
    once_running(server, "woken", stream.cancel)
    assert list(stream) == []
    assert stream.result.finish_reason is FinishReason.ABORT
    assert stream.result.usage == Usage(3, 0)
    assert stream.result.timing.prefill_s > 0
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


async def test_a_closed_client_says_so(server):
    client = Client(server.address)
    client.close()
    for ask in (client.model_info, lambda: client.generate("hi")):
        with pytest.raises(ValueError, match="the client is closed"):
            ask()
    other = AsyncClient(server.address)
    await other.model_info()
    await other.aclose()
    await other.aclose()
    with pytest.raises(ValueError, match="the client is closed"):
        await other.model_info()
    with pytest.raises(ValueError, match="the client is closed"):
        other.generate("hi")


async def _leave(server, client, how, request_id):
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
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await _consume(stream)
    elif how == "thread":
        once_running(server, request_id, stream.cancel)
        await _consume(stream)
        assert (await stream.result).finish_reason is FinishReason.ABORT
    elif how == "while waiting":
        loop = asyncio.get_running_loop()
        once_running(server, request_id, lambda: loop.call_soon_threadsafe(stream.cancel))
        await _consume(stream)
        assert (await stream.result).finish_reason is FinishReason.ABORT


def once_running(server, request_id, act):
    """Calls ``act`` in another thread when the server has the request."""
    threading.Thread(target=lambda: (wait_until(lambda: request_id in server.running), act())).start()


async def _consume(stream):
    async for _ in stream:
        pass


async def _fail_in_async_loop(stream):
    async for _ in stream:
        _ = 1 / 0


HOW = ["break", "aclose", "async with", "cancel", "exception", "task", "timeout", "thread", "while waiting"]


@pytest.mark.parametrize("how", HOW)
async def test_leaving_an_async_stream_cancels_on_the_server(server, how):
    server.script = endless
    request_id = f"async-{how}"
    async with AsyncClient(server.address) as client:
        await _leave(server, client, how, request_id)
        gc.collect()
        await asyncio.to_thread(server.wait_cancelled, request_id)


@pytest.mark.parametrize("how", ["while waiting", "thread"])
async def test_a_silent_async_stream_is_cancelled_too(server, how):
    server.script = silent
    request_id = f"silent-{how}"
    async with AsyncClient(server.address) as client:
        await _leave(server, client, how, request_id)
        await asyncio.to_thread(server.wait_cancelled, request_id)


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


async def test_async_cancel_by_id(server):
    server.script = endless
    async with AsyncClient(server.address) as client:
        stream = client.generate("hi")
        await anext(stream)
        assert await client.cancel(stream.request_id) is True
        assert (await stream.result).finish_reason is FinishReason.ABORT
        assert await client.cancel(stream.request_id) is False
