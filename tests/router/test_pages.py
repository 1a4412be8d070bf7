"""Where a session that moves is told its KV pages are, and how long the target that it has left is kept for them."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.world import Target, World, expected, request, result_of, without_sockets

from paceline.router.router import Router


class Leases:
    """A pool's leases, by replica."""

    def __init__(self, router: Router) -> None:
        self.open: list[str | None] = []
        router.targets.pool.lease = self._lease  # type: ignore[method-assign]

    def _lease(self, session_id: str, replica_id: str | None) -> _Lease:
        self.open.append(replica_id)
        return _Lease(self, replica_id)


class _Lease:
    def __init__(self, leases: Leases, replica_id: str | None) -> None:
        self._leases, self._replica_id, self._open = leases, replica_id, True

    def close(self) -> None:
        if self._open:
            self._leases.open.remove(self._replica_id)
        self._open = False


def pages_from(target: Target) -> list[str]:
    """What the sessions that a target has were told."""
    return [opened.pages_from for opened, _ in target.sessions.values()]


async def begun(world: World, router: Router) -> tuple[asyncio.Task, Target, Target]:  # type: ignore[type-arg]
    """A stream that has begun, its target and the other one."""
    task = asyncio.create_task(result_of(router, request("s", 1)))
    for _ in range(4):
        await world.turn()
    old, new = sorted(world.targets, key=lambda target: -len(target.sessions))
    assert (len(old.sessions), len(new.sessions)) == (1, 0)
    return task, old, new


@pytest.mark.parametrize("timeout_s", [30.0, 0.0])
async def test_a_drain_tells_where_pages_are_and_keeps_the_target_until_the_next_token(timeout_s, monkeypatch) -> None:
    without_sockets(monkeypatch)
    world = World(1, 1)
    async with world.router(page_move_timeout_s=timeout_s) as router:
        leases = Leases(router)
        task, old, new = await begun(world, router)
        new.places = 0  # it is busy: no token yet
        router.targets.pool.set_members([new.member])  # type: ignore[attr-defined]
        new.take()
        assert pages_from(new) == [old.member.address if timeout_s else ""]
        names = [old.member.replica_id, new.member.replica_id] if timeout_s else [new.member.replica_id]
        assert sorted(map(str, leases.open)) == sorted(names)
        await world.turn()
        assert sorted(map(str, leases.open)) == sorted(names)
        new.places = 1
        await world.turn()
        assert leases.open == [new.member.replica_id]
        await world.until(task)
        assert tuple(task.result()[0]) == expected(request("s", 1))
        assert leases.open == []


async def test_a_kept_target_is_let_go_when_the_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1, 1)
    async with world.router() as router:
        leases = Leases(router)
        task, old, new = await begun(world, router)
        new.places = 0
        router.targets.pool.set_members([new.member])  # type: ignore[attr-defined]
        assert old.member.replica_id in leases.open
        assert router.cancel("s")
        await world.until(task)
        assert leases.open == []


async def test_a_kept_target_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1, 1)
    async with world.router(page_move_timeout_s=0.01) as router:
        leases = Leases(router)
        task, old, new = await begun(world, router)
        new.places = 0
        router.targets.pool.set_members([new.member])  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            while old.member.replica_id in leases.open:
                await asyncio.sleep(0.01)
        new.places = 1
        await world.until(task)


async def test_no_pages_are_asked_of_a_target_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1, 1)
    async with world.router() as router:
        leases = Leases(router)
        task, old, new = await begun(world, router)
        old.die()
        new.take()
        assert pages_from(new) == [""]
        assert leases.open == [new.member.replica_id]
        await world.until(task)
