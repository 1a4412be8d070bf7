"""The contract of pools: a fixed one, and the replicas of a Serve deployment, whose handle is a stand-in."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from tests.cluster.ray.test_placement import KEY, Handle, pool_of
from tests.config.support import needs_ray
from tests.support.mutants import Mutant, mutant

from paceline.router.pool import Member, StaticPool

A, B = Member("a", "10.0.0.1:1"), Member("b", "10.0.0.2:2")
Publish = Callable[[Iterable[Member]], None]


def fixed() -> tuple[Any, Publish]:
    pool = StaticPool("target", [])
    return pool, pool.set_members


def of_serve() -> tuple[Any, Publish]:
    pool, registry = pool_of(Handle())
    return pool, lambda members: registry.publish(KEY, {member.replica_id: member for member in members})


each = pytest.mark.parametrize("row", [fixed, pytest.param(of_serve, marks=needs_ray)])


async def tells_what_has_changed(row: Callable[[], tuple[Any, Publish]]) -> None:
    """Every watcher, once the members are the new ones."""
    pool, publish = row()
    seen: list[tuple[str, list[str]]] = []
    for name in "xy":
        pool.watch(lambda name=name: seen.append((name, [*pool.members()])))
    for members in ([A], [A, B], [B], []):
        publish(members)
        await asyncio.sleep(0)
        assert dict(pool.members()) == {member.replica_id: member for member in members}
    assert seen == [(name, ids) for ids in (["a"], ["a", "b"], ["b"], []) for name in "xy"]


@each
async def test_watchers_see_the_members_that_are_there(row: Any) -> None:
    await tells_what_has_changed(row)


@each
async def test_a_lease_may_be_closed_twice_and_outlive_its_replica(row: Any) -> None:
    pool, publish = row()
    publish([A])
    await asyncio.sleep(0)
    leases = [pool.lease("s", "a"), pool.lease("d", None), pool.lease("gone", "b")]
    publish([B])
    await asyncio.sleep(0)
    for lease in (*leases, *leases):
        lease.close()
    assert pool.name == "target"
    assert not pool.wakes


@mutant(StaticPool, "set_members")
def _nobody_is_told(_: Any, pool: StaticPool, members: Iterable[Member]) -> None:
    pool.__init__(pool.name, members)  # type: ignore[misc]


@mutant(StaticPool, "watch")
def _the_second_is_not_told(watch: Any, pool: StaticPool, changed: Any) -> None:
    watch(pool, changed)
    pool.watch = lambda changed: None  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_nobody_is_told, _the_second_is_not_told])
async def test_a_mutant_is_noticed(change: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        await tells_what_has_changed(fixed)
