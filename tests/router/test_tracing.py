"""The spans of requests over a router: where they waited, what each round did, and where they went on."""

import asyncio
import contextlib

import pytest
from opentelemetry.trace import StatusCode
from tests.router.world import World, expected, request, without_sockets
from tests.support.door import opened
from tests.support.spans import REQUEST, Recorded, tree, values

from paceline.client import AsyncClient
from paceline.errors import ResourceExhaustedError
from paceline.metrics.tracing import RequestSpans, Tracing
from paceline.router.service import GenerationService
from paceline.types import Result


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch):
    without_sockets(monkeypatch)


async def tokens_of(service, wanted):
    """The tokens of a request."""
    found = []
    async with contextlib.aclosing(service.run(wanted)) as items:
        async for item in items:
            if not isinstance(item, Result):
                found += item.token_ids
    return tuple(found)


@contextlib.asynccontextmanager
async def served(world, tracing, **settings):
    """A router, and a service over it."""
    async with world.router(**settings) as router:
        yield router, GenerationService(router, tracing)


async def test_a_request_has_a_span_and_below_it_its_queue_its_prefill_and_sampled_rounds():
    recorded = Recorded(first_rounds=2, round_every=8)
    world = World(1)
    async with served(world, recorded.tracing) as (_, service):
        first, second = request("first", 1), request("second", 2)
        tasks = [asyncio.create_task(tokens_of(service, one)) for one in (first, second)]
        await world.until(*tasks)
        assert [task.result() for task in tasks] == [expected(first), expected(second)]
    rounds = ["round"] * 4  # 1, 2, 8 and 16 of 0 to 19
    assert tree(recorded.spans) == {"first": ["queue", "prefill", *rounds], "second": ["queue", "prefill", *rounds]}
    for name in ("first", "second"):
        spans = [span for span in recorded.spans if span.attributes.get("gen_ai.response.id") == name]
        (own,) = spans
        assert own.parent is None
        assert own.attributes["gen_ai.usage.output_tokens"] == own.attributes["paceline.rounds"] == 20
        assert own.attributes["gen_ai.usage.input_tokens"] == 3
        assert own.attributes["gen_ai.response.finish_reasons"] == ("length",)
        below = [span for span in recorded.spans if span.parent and span.parent.span_id == own.context.span_id]
        assert below[0].end_time == below[1].start_time
        assert below[1].end_time == below[2].start_time, "rounds begin where the prefill ends"
        assert [span.attributes["paceline.round.index"] for span in below[2:]] == [1, 2, 8, 16]
        assert {span.attributes["paceline.round.tokens"] for span in below[2:]} == {1}
        assert below[1].attributes["paceline.target"] == "target-0"


@pytest.mark.parametrize("how", ["failover", "drain"])
async def test_a_session_that_is_moved_has_a_span_until_it_goes_on_elsewhere(how):
    recorded = Recorded()
    world = World(2, 2)
    async with served(world, recorded.tracing) as (router, service):
        wanted = request("moved", 3)
        task = asyncio.create_task(tokens_of(service, wanted))
        while not world.targets[0].sessions:
            await world.turn()
        for _ in range(4):
            await world.turn()
        if how == "failover":
            world.targets[0].die()
        else:
            router.targets.pool.set_members([world.targets[1].member])
        await world.until(task)
        assert task.result() == expected(wanted)
    assert tree(recorded.spans) == {"moved": ["queue", "prefill", "migration"]}
    (moved,) = recorded.named("migration")
    assert dict(moved.attributes) == {"paceline.migration.reason": how, "paceline.target": "target-1"}
    assert moved.end_time > moved.start_time


async def test_a_request_that_is_refused_tells_its_error_s_class_and_not_its_message():
    recorded = Recorded()
    world = World(1)
    async with served(world, recorded.tracing, max_queued_requests=1) as (router, service):
        tasks = [asyncio.create_task(tokens_of(service, request(f"r{i}", i))) for i in range(2)]
        while not router.num_queued:
            await world.turn()
        with pytest.raises(ResourceExhaustedError) as caught:
            await tokens_of(service, request("refused", 2))
        await world.until(*tasks)
        (refused,) = [span for span in recorded.spans if span.attributes.get("gen_ai.response.id") == "refused"]
        assert refused.attributes["error.type"] == "ResourceExhaustedError"
        assert refused.status.status_code is StatusCode.ERROR
        assert str(caught.value) not in values(recorded.spans)
        assert tree(recorded.spans)["refused"] == ["queue"]


async def test_a_client_that_leaves_ends_every_span():
    recorded = Recorded()
    world = World(1)
    async with served(world, recorded.tracing) as (_, service):
        task = asyncio.create_task(tokens_of(service, request("left", 1)))
        while not world.targets[0].sessions:
            await world.turn()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert tree(recorded.spans)["left"][:2] == ["queue", "prefill"]
    (own,) = recorded.named(REQUEST)
    assert own.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert own.status.status_code is StatusCode.UNSET


async def test_the_client_s_own_span_is_the_parent_over_grpc():
    """Real sockets: the metadata of our client's call, read at the other end."""
    recorded = Recorded()
    theirs = recorded.provider.get_tracer("theirs")
    world = World(2)
    async with (
        served(world, recorded.tracing) as (router, _),
        opened(router, tracing=recorded.tracing) as address,
        AsyncClient(address) as client,
    ):
        with theirs.start_as_current_span("theirs") as above:
            stream = client.generate("abc", max_tokens=20, seed=5)
        plain = client.generate("abc", max_tokens=20, seed=5)
        tasks = [asyncio.ensure_future(each) for each in (_result(stream), _result(plain))]
        while not all(task.done() for task in tasks):
            await world.turn()
            await asyncio.sleep(0.002)
        wanted = request("", 5)
        assert [task.result().token_ids for task in tasks] == [expected(wanted)] * 2
        assert {span.name for span in recorded.named("theirs")} == {"theirs"}
        spans = {span.attributes["gen_ai.response.id"]: span for span in recorded.named(REQUEST)}
        assert spans[stream.request_id].parent.span_id == above.get_span_context().span_id
        assert spans[stream.request_id].context.trace_id == above.get_span_context().trace_id
        assert spans[plain.request_id].parent is None


async def _result(stream):
    return await stream.result


async def test_without_traces_nothing_of_them_is_called(monkeypatch):
    def never(*_, **__):
        raise AssertionError("called")

    for kind in (Tracing, RequestSpans):
        for name in [name for name in vars(kind) if not name.startswith("__")]:
            monkeypatch.setattr(kind, name, never)
    monkeypatch.setattr("paceline.router.service.trace_headers", never)
    world = World(1)
    async with served(world, None) as (_, service):
        wanted = request("one", 1)
        task = asyncio.create_task(tokens_of(service, wanted))
        await world.until(task)
        assert task.result() == expected(wanted)
