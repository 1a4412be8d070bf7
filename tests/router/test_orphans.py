"""Sessions whose target is lost: they wait for room as long as another target lives, and go before new requests."""

import asyncio
import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.router.world import World, expected, request, result_of, without_sockets

from paceline.errors import DeadlineExceededError, EngineError, ResourceExhaustedError
from paceline.router import link as link_module
from paceline.router import router as router_module
from paceline.router.pool import StaticPool
from paceline.router.router import Router
from paceline.types import FinishReason


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)


async def begun(world: World, router: Router, num: int, *, max_tokens: int) -> list[asyncio.Task[Any]]:
    """Streams ``s0``, ``s1`` ... that have their first tokens; stream i has seed i."""
    wanted = [request(f"s{i}", i, max_tokens) for i in range(num)]
    tasks = [asyncio.create_task(result_of(router, each)) for each in wanted]
    for _ in range(3):
        await world.turn()
    assert all(active.session.stats.rounds for active in router.active.values() if active.opened)
    return tasks


async def assert_own_tokens(tasks: list[asyncio.Task[Any]], max_tokens: int) -> None:
    for i, task in enumerate(tasks):
        token_ids, result = await task
        assert result.finish_reason is FinishReason.LENGTH
        assert tuple(token_ids) == result.token_ids == expected(request("", i, max_tokens))


async def test_all_streams_of_a_lost_target_end_at_the_other_one_although_it_is_full() -> None:
    """Two targets with 16 sessions each; the streams last far longer than the router waits without any target."""
    world = World(16, 16)
    async with world.router(recovery_timeout_s=1.0) as router:
        tasks = await begun(world, router, 32, max_tokens=200)
        world.targets[0].die()
        assert len(router.orphaned) == 16
        await world.until(*tasks)
        await assert_own_tokens(tasks, 200)
        assert not router.active
    assert world.clock.now > 15


async def test_orphaned_sessions_go_before_new_requests_and_the_oldest_first() -> None:
    """New requests that wait, or come at the very moment at which a place is free, are served after them."""
    opened: list[str] = []
    world = World(4, 4)
    async with world.router() as router:
        tasks = await begun(world, router, 8, max_tokens=20)
        new = [asyncio.create_task(result_of(router, request(f"n{i}", i))) for i in range(4)]
        await world.turn()
        sessions = world.targets[0].links[router].sessions
        lost = sorted(router._by_session[name].request.request_id for name in sessions)
        attach = router.placement.attach_target

        def noted(active: Any, link: Any) -> None:
            opened.append(active.request.request_id)
            attach(active, link)

        router.placement.attach_target = noted  # type: ignore[method-assign]
        deliver = router.deliver

        def stolen(active: Any, actions: Any) -> None:
            deliver(active, actions)
            if actions.result is not None and len(new) < 8:  # a place is free, and nobody has been told
                wanted = request(f"n{len(new)}", len(new))
                new.append(asyncio.create_task(result_of(router, wanted)))
                router._place_queue()

        router.deliver = stolen  # type: ignore[method-assign]
        world.targets[0].die()
        await world.until(*tasks)
        await world.until(*new)
        assert opened[:4] == lost
        assert opened[4:] == [f"n{i}" for i in range(8)]
        await assert_own_tokens(tasks, 20)


async def test_only_time_without_any_target_counts() -> None:
    """A target that is up for a moment, without room, starts the count again."""
    world = World(1, 1)
    async with world.router(recovery_timeout_s=1.0) as router:
        tasks = await begun(world, router, 2, max_tokens=100)
        (waiting,) = [asyncio.create_task(result_of(router, request("q", 9)))]
        world.targets[0].die()
        for _ in range(40):  # two seconds
            await world.turn()
        world.targets[1].die()
        for _ in range(19):
            await world.turn()
        assert not any(task.done() for task in [*tasks, waiting])
        for _ in range(4):
            await world.turn()
        for task in [*tasks, waiting]:
            with pytest.raises(EngineError, match="no target replica was up for 1 s"):
                task.result()


@pytest.mark.parametrize("wakes", [True, False])
async def test_requests_wait_for_the_first_target_of_a_pool_that_was_scaled_to_zero(wakes: bool) -> None:
    """A pool of at least one target has lost its last: there a request fails after ``recovery_timeout_s``."""
    world = World(1)
    async with world.router(recovery_timeout_s=1.0, cold_start_timeout_s=60.0) as router:
        pool = router.targets.pool
        assert isinstance(pool, StaticPool)
        pool.wakes = wakes
        world.targets[0].die("scaled to zero")
        pool.set_members([])
        assert router.ready == wakes
        assert bool(router.trouble) != wakes
        waiting = asyncio.create_task(result_of(router, request("q", 9)))
        for _ in range(30):  # one and a half seconds
            await world.turn()
        if not wakes:
            with pytest.raises(EngineError, match="no target replica was up for 1 s"):
                waiting.result()
            return
        assert not waiting.done()
        world.clock.now += 57
        await world.turn()
        assert not waiting.done()
        world.clock.now += 2
        await world.turn()
        with pytest.raises(EngineError, match="no target replica was up for 60 s"):
            waiting.result()


async def test_the_limits_of_clients_and_of_requests_hold_for_orphaned_sessions() -> None:
    world = World(2, 2)
    async with world.router(request_timeout_s=3.0) as router:
        tasks = await begun(world, router, 4, max_tokens=2000)
        world.targets[0].die()
        left, kept = (active.request.request_id for active in router.orphaned)
        tasks[int(left[1:])].cancel()
        await world.turn()
        assert [active.request.request_id for active in router.orphaned] == [kept]
        with contextlib.suppress(AssertionError):
            await world.until(*tasks, turns=60)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[int(kept[1:])], DeadlineExceededError)
        assert not router.orphaned


async def test_a_session_comes_next_where_other_routers_hold_every_place() -> None:
    """Their requests would fill each place before this router knows that it is free."""
    world = World(2, 4)
    lost, kept = world.targets
    async with world.router() as mine, world.router(max_queued_requests=500) as other:
        mine_at_kept = kept.links.pop(mine)  # it is new, and not up for this router yet
        mine_at_kept.up, other.targets.links["target-0"].up = False, False
        tasks = await begun(world, mine, 2, max_tokens=60)
        crowd = [asyncio.create_task(result_of(other, request(f"c{i}", i))) for i in range(300)]
        for _ in range(10):
            await world.turn()
        kept.links[mine] = mine_at_kept
        kept.beat()
        lost.die()
        assert len(mine.orphaned) == 1
        await world.until(*tasks, turns=300)
        await assert_own_tokens(tasks, 60)
        assert sum(not task.done() for task in crowd) > 50, "they did not wait for the end of the crowd"
        for task in crowd:
            task.cancel()
        await asyncio.wait(crowd)


async def test_the_time_in_which_the_router_stood_still_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that comes 40 s late ends nothing that waits for a target: none could have been seen."""
    monkeypatch.undo()
    seen: list[float] = []
    async with World().router() as router:
        before = router.target_seen_s
        times = iter([0.0, 40.0, 40.0, 40.1])
        monkeypatch.setattr(router_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
        monkeypatch.setattr(router_module, "TICK_S", 0.1)
        monkeypatch.setattr(router_module, "asyncio", SimpleNamespace(sleep=_at_once, current_task=lambda: Named()))
        monkeypatch.setattr(router, "tick", lambda: seen.append(router.target_seen_s - before))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await router.tick_forever()
        monkeypatch.undo()
    assert seen == pytest.approx([39.8, 39.8])


async def test_a_router_that_stood_still_does_not_take_its_replicas_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a freeze of 20 s the messages of that time are read first; silence counts while the loop runs."""
    ends: list[str] = []
    async with World(1).router() as router:
        (link,) = router.targets.links.values()
        link.up = True
        times = itertools.chain([0.0], *([t, t + 1.0, t + 1.0] for t in (0.0, 1.0)))  # two quiet seconds
        frozen = [*times, 2.0, 22.0, 22.0, *itertools.chain(*([t, t + 1.0, t + 1.0] for t in (22.0, 23.0, 24.0)))]
        clock = iter(frozen)
        monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        monkeypatch.setattr(link_module, "asyncio", SimpleNamespace(sleep=_at_once))
        ends.append(await link.watch_silence())
        assert next(clock, None) is None
        monkeypatch.undo()
        link.up = False
    assert ends == ["silent for 6.0 s"]


async def test_a_stream_that_its_client_continues_is_not_refused_and_goes_before_new_requests() -> None:
    """The queue is full: a router that died has left them; beyond its number they are refused like others."""
    world = World(2)
    async with world.router(max_queued_requests=2) as router:
        tasks = await begun(world, router, 4, max_tokens=20)
        wanted = request("broken", 7, 20)
        broken = [replace(wanted, request_id=f"b{i}", generated_token_ids=expected(wanted)[:5]) for i in range(3)]
        resumed = [asyncio.create_task(result_of(router, each)) for each in broken]
        await world.turn()
        assert {active.request.request_id for active in router.queue} == {"b0", "b1", "s2", "s3"}
        with pytest.raises(ResourceExhaustedError, match="4 are queued"):
            await resumed[2]
        await world.until(*resumed[:2])
        assert not tasks[2].done()
        assert not tasks[3].done()
        await world.until(*tasks)
        for task in resumed[:2]:
            assert tuple((await task)[0]) == expected(wanted)[5:]


class Named:
    """A task's name."""

    def get_name(self) -> str:
        return "tick"


async def _at_once(_: float) -> None:
    pass


async def test_heartbeats_without_news_place_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of a hundred replicas gets four hundred heartbeats a second."""
    count = 0
    reconcile = Router.reconcile

    def counted(router: Router) -> None:
        nonlocal count
        count += 1
        reconcile(router)

    world = World(2, 2)
    async with world.router() as router:
        tasks = [asyncio.create_task(result_of(router, request(f"s{i}", i, 30))) for i in range(2)]
        await world.turn()
        monkeypatch.setattr(Router, "reconcile", counted)
        target = world.targets[0]
        (link,) = target.links.values()
        for sessions, expected_count in ((1, 0), (1, 0), (0, 0), (2, 1), (3, 1), (1, 2), (1, 2)):
            link.receive([], replace(target.status, num_sessions=sessions))
            assert count == expected_count, sessions
        await world.until(*tasks)
