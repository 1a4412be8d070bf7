"""A service that is told to stop: what runs ends by itself or by an error that says so, and what comes is refused.

Mutants: ``drain`` that does not wait, that does not end what is left, or that lets new requests in; ``ready`` without
``_draining``; ``end`` without those that are still tokenized; errors without a time to come again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx2 as httpx
import pytest
from tests.router.test_queue import tasks_of
from tests.router.world import World, expected, request, result_of, without_sockets
from tests.web.support import edge_over
from tests.web.test_fair import held as held

from paceline.errors import EngineError, RouterStoppedError
from paceline.router.service import GenerationService
from paceline.rpc.status import RETRY_TRAILER, to_status
from paceline.types import Request, Result
from paceline.web.app import make_app
from paceline.web.errors import to_http


async def answer(service: GenerationService, wanted: Request) -> Result:
    async with contextlib.aclosing(service.run(wanted)) as items:
        async for item in items:
            if isinstance(item, Result):
                return item
    raise AssertionError("a stream without a result")


async def test_what_runs_and_what_waits_ends_and_what_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(2)
    async with world.router() as router:
        service = GenerationService(router)
        tasks = [asyncio.create_task(answer(service, request(f"s{i}", i, 10))) for i in range(5)]
        await world.turn()
        assert service.ready
        assert service.num_running == 5
        draining = asyncio.create_task(service.drain(600.0))
        await world.turn()
        assert not draining.done()
        assert not service.ready
        assert service.trouble == "the service is being stopped"
        with pytest.raises(RouterStoppedError, match="is being stopped") as refused:
            await answer(service, request("late", 9))
        assert 590 < refused.value.retry_after_s <= 600
        await world.until(*tasks, draining)
        for i, task in enumerate(tasks):
            assert task.result().token_ids == expected(request("", i, 10))


async def test_what_does_not_end_in_time_ends_by_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1)
    async with world.router() as router:
        service = GenerationService(router)
        tasks = [asyncio.create_task(answer(service, request(f"s{i}", i, 10))) for i in range(3)]
        await world.turn()
        await service.drain(0.01)
        for task in tasks:
            with pytest.raises(RouterStoppedError, match=r"did not end within the 0\.01 s .* send it again"):
                await task
        assert not router.active


async def test_a_request_that_is_still_tokenized_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1)
    async with world.router() as router:
        go, prepare = asyncio.Event(), router.admission.prepare

        async def slowly(*args: Any) -> Any:
            await go.wait()
            return await prepare(*args)

        router.admission.prepare = slowly  # type: ignore[method-assign]
        task = asyncio.create_task(result_of(router, request("s", 1)))
        await asyncio.sleep(0)
        router.end(RouterStoppedError("stopped"))
        go.set()
        with pytest.raises(RouterStoppedError):
            await task
        assert not router.active
        assert not router.entering


async def test_an_idle_service_drains_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1)
    async with world.router() as router, asyncio.timeout(60):
        await GenerationService(router).drain(600.0)
        (task,) = tasks_of(router, "a", 1)
        await world.until(task)


async def test_over_http_health_refusals_and_events_say_that_the_service_stops(held) -> None:
    pipeline, target = held
    service = GenerationService(pipeline.router)
    app = make_app(edge_over(service, playground=False))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        def ask(**options: Any) -> Any:
            return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, **options})

        ended, stream, body = (asyncio.create_task(ask(stream=stream)) for stream in (False, True, False))
        while service.num_running < 3 or len(target.opened) < 2:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(service.drain(60.0))
        await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 503
        late = await ask()
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "unavailable"
        assert 1 <= int(late.headers["retry-after"]) <= 60
        target.end_one()
        assert (await ended).status_code == 200
        service.end("enough")  # as after the time
        await draining
        text = (await stream).text
        assert "enough: send it again" in text
        assert "[DONE]" not in text
        assert (await body).status_code == 503
        assert (await body).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "error", [EngineError("no target is up"), RouterStoppedError("stopped"), RouterStoppedError("", 7)]
)
def test_whatever_is_unavailable_says_when_to_come_again(error: EngineError) -> None:
    code, _, trailers = to_status(error)
    assert code.name == "UNAVAILABLE"
    assert int(dict(trailers)[RETRY_TRAILER]) == 1000 * error.retry_after_s > 0
    status, _, headers = to_http(error)
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
