"""Membership and leases without a cluster: a handle that is a stand-in, and lock files."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.router.pool import Member
from paceline.runtime.cores import CoreClaim, has_cpu_quota

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@dataclass
class Call:
    """A streaming call that is open until it is cancelled; ``fails`` ends it at once."""

    handle: Handle
    session_id: str
    fails: bool
    beats: int = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.fails:
            raise RuntimeError("the replica died")
        if self.handle.assigns and not self.beats:
            self.beats += 1
            return
        if not self.beats:
            await self.handle.answer.wait()
            self.beats += 1
            return
        await asyncio.Event().wait()

    def cancel(self):
        self.handle.cancelled.append(self.session_id)


@dataclass
class Handle:
    app_name: str = "app"
    deployment_name: str = "Target:m"
    assigns: bool = True
    failures: int = 0
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    pins: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)

    def options(self, **options):
        if "session_id" in options:
            self.pins.append(options["session_id"])
        return self

    @property
    def lease(self):
        return SimpleNamespace(remote=self._open)

    def _open(self, session_id):
        self.failures -= 1
        return Call(self, session_id, self.failures >= 0)


A, B = Member("a", "10.0.0.1:1"), Member("b", "10.0.0.2:2")
KEY = ("app", "Target:m")


def pool_of(handle):
    from paceline.cluster.placement import Registry, ServePool

    registry = Registry()
    return ServePool("target", handle, registry), registry


async def test_members_follow_the_registry_from_any_thread():
    """Those of the own deployment, until the end (``tests/router/test_pools.py`` has what is true of any pool)."""
    pool, registry = pool_of(Handle())
    seen = []
    pool.watch(lambda: seen.append(set(pool.members())))
    await asyncio.to_thread(registry.publish, KEY, {"a": A})
    await asyncio.sleep(0.01)
    registry.publish(("app", "Draft:m"), {"b": B})
    registry.publish(KEY, {"a": A})
    await asyncio.sleep(0)
    await pool.stop()
    registry.publish(KEY, {})
    await asyncio.sleep(0)
    assert seen == [{"a"}]


async def test_a_lease_is_pinned_and_closed():
    handle = Handle()
    pool, registry = pool_of(handle)
    registry.publish(KEY, {"a": A})
    await asyncio.sleep(0)
    lease, demand = pool.lease("s", "a"), pool.lease("d", None)
    await asyncio.sleep(0.01)
    assert handle.pins == ["pin:a", "d"]
    assert pool.num_leases == 2
    for _ in range(2):
        lease.close()
        demand.close()
    await asyncio.sleep(0.01)
    assert (sorted(handle.cancelled), pool.num_leases) == (["d", "s"], 0)


async def test_a_lease_that_is_on_its_way_is_cancelled_only_when_it_has_been_answered():
    handle = Handle()
    pool, registry = pool_of(handle)
    registry.publish(KEY, {"a": A})
    await asyncio.sleep(0)
    lease = pool.lease("s", "a")
    handle.assigns = False
    await asyncio.sleep(0.01)
    lease.close()
    await asyncio.sleep(0.05)
    assert (handle.cancelled, pool.num_leases) == ([], 1)
    handle.answer.set()
    await asyncio.sleep(0.01)
    assert (handle.cancelled, pool.num_leases) == (["s"], 0)


async def test_a_lease_that_breaks_is_taken_again_while_its_replica_is_there():
    handle = Handle(failures=1)
    pool, registry = pool_of(handle)
    registry.publish(KEY, {"a": A})
    await asyncio.sleep(0)
    pool.lease("s", "a")
    await asyncio.sleep(0.4)
    assert len(handle.pins) == 2
    handle.failures = 1
    await pool.stop()
    assert pool.num_leases == 0


async def test_a_lease_to_a_replica_that_has_gone_ends_quietly(monkeypatch):
    handle = Handle(assigns=False)
    pool, registry = pool_of(handle)
    pool.lease("nowhere", "x")
    registry.publish(KEY, {"a": A, "b": B})
    await asyncio.sleep(0.01)
    assert (handle.pins, pool.num_leases) == ([], 0)
    pool.lease("waits", "a")
    await asyncio.sleep(0.01)
    handle.assigns = True
    pool.lease("held", "a")
    pool.lease("other", "b")
    await asyncio.sleep(0.01)
    monkeypatch.setattr("paceline.cluster.placement.ANSWER_S", 0.05)
    registry.publish(KEY, {"b": B})  # a drains: what is held there stays until its session has moved
    await asyncio.sleep(0.1)
    assert handle.cancelled == ["waits"]
    await pool.stop()
    assert pool.num_leases == 0


def test_a_core_belongs_to_one_engine_until_it_dies(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [3, 5])
    monkeypatch.setattr("paceline.runtime.cores.has_cpu_quota", lambda: False)
    first, second = CoreClaim.take(tmp_path), CoreClaim.take(tmp_path)
    assert (first.cores, second.cores) == ([3], [5])
    assert CoreClaim.take(tmp_path) is None
    first.release()
    first.release()
    code = (
        "import paceline.runtime.cores as c, pathlib, sys; c.available_cores = lambda: [3, 5];"
        "c.has_cpu_quota = lambda: False;"
        "print(c.CoreClaim.take(pathlib.Path(sys.argv[1])).cores[0])"
    )
    for _ in range(2):  # the end of the process gave it back
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300, check=True
        )
        assert other.stdout == "3\n"
    second.release()


def test_one_core_is_shared_and_a_folder_that_cannot_be_made_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [0])
    assert CoreClaim.take(tmp_path) is None
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [0, 1])
    (tmp_path / "file").touch()
    assert CoreClaim.take(Path(tmp_path / "file")) is None


def test_no_core_is_claimed_where_containers_share_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runtime.cores.os.cpu_count", lambda: 4)
    monkeypatch.setattr("paceline.runtime.cores.has_cpu_quota", lambda: True)
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [0, 1, 2, 3])
    assert CoreClaim.take(tmp_path) is None
    # these have been given to this container
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [2, 3])
    assert CoreClaim.take(tmp_path).cores == [2]
    monkeypatch.setattr("paceline.runtime.cores.available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("paceline.runtime.cores.has_cpu_quota", lambda: False)
    assert CoreClaim.take(tmp_path).cores == [0]


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000\n", False), ("200000 100000\n", True), ("-1\n", False), ("50000\n", True)]
)
def test_a_cpu_quota_is_read_from_the_control_group(tmp_path, text, quota):
    (tmp_path / "cpu.max").write_text(text)
    assert has_cpu_quota([str(tmp_path / "missing"), str(tmp_path / "cpu.max")]) is quota
    assert has_cpu_quota([str(tmp_path / "missing")]) is False
