"""KV pages that a target reads from the memory of another one: by a stand-in for NIXL, whose calls are NIXL's own.

``nixl_targets.py`` has NIXL itself, between processes.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lossless.test_moved_pages import Engine
from tests.model.attention.test_interpreter import ROOT
from tests.runtime.test_page_mover import NUM_PAGES, TOKEN, call_of, context, opened, serving
from tests.support.models import pair
from tests.support.mutants import mutant
from tests.support.nixl import StandIn

from paceline.config import LocalConfig, TargetModel
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError
from paceline.runtime import nixl, page_mover, server
from paceline.runtime.nixl import NixlAgent
from paceline.runtime.page_mover import HostMemoryMover, NixlMover, serve_pages
from paceline.target.pages import PageStore

PAGE_BYTES = 32768


class Served:
    """A new target, and an old one that lends its pages."""

    def __init__(self, world: StandIn, address: str, target: Engine, mover: NixlMover, lender: NixlAgent) -> None:
        self.world, self.address, self.target, self.mover, self.lender = world, address, target, mover, lender

    async def move(self) -> tuple[int, int]:
        moved = await self.mover.move(self.address, opened())
        self.target.engine.check_integrity()
        return moved

    def text(self) -> list[int]:
        """What the session goes on with here."""
        self.target.open(opened())
        return self.target.finish()["s7"]

    async def all_is_given_back(self) -> None:
        while context()[0].lent:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def two_targets(
    world: StandIn, *, lends: bool = True, stop: Callable[[Any], Any] | None = None, pages: int = 40
) -> AsyncIterator[Served]:
    """``lends`` False: the old target has no NIXL. ``stop``: is called before the old target answers."""
    source, target = context()[0], Engine(pair("llama")[0], pages=pages)
    lender = NixlAgent(world.make)
    memory = source.memory()
    assert memory is not None
    await lender.start(memory)
    mover = NixlMover(call_of(target.engine.pages), TOKEN, agent=NixlAgent(world.make))
    await mover.start()

    async def answer(request: Any, context_: Any) -> None:
        if stop is not None:
            await stop(request)
        await serve_pages(call_of(source), request, context_.write, lender if lends else None)

    async with serving(answer) as address:
        yield Served(world, address, target, mover, lender)
    await mover.close()
    await lender.close()
    assert not source.lent
    assert not any(agent.registered or agent.handles or agent.remote for agent in world.agents.values()), "a leak"


def right_text() -> list[int]:
    alone = Engine(pair("llama")[0])
    alone.open(opened())
    return alone.finish()["s7"]


@pytest.mark.parametrize("blocks", [1, 8, 4096])
async def test_pages_are_read_from_the_memory_of_the_other_target(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "MOST_BLOCKS", blocks)
    async with two_targets(StandIn()) as served:
        assert await served.move() == (NUM_PAGES, NUM_PAGES * PAGE_BYTES)
        assert served.mover.counters() == {"page_bytes_by_nixl": NUM_PAGES * PAGE_BYTES, "nixl_failed": 0}
        await served.all_is_given_back()
        assert await served.move() == (0, 0), "they are here"
        assert served.text() == right_text()
        assert served.target.engine.stats.tokens_computed < 330 - NUM_PAGES * 64 + 80


async def test_pages_are_read_as_far_as_there_is_room() -> None:
    async with two_targets(StandIn(), pages=4) as served:
        assert await served.move() == (4, 4 * PAGE_BYTES)
        assert served.mover.counters() == {"page_bytes_by_nixl": 4 * PAGE_BYTES, "nixl_failed": 0}
        assert await served.move() == (0, 0)


async def test_places_of_another_layout_are_not_read() -> None:
    async with two_targets(StandIn()) as served:
        memory = served.target.engine.pages.memory()
        assert memory is not None
        served.mover.agent.memory = fewer = replace(memory, pools=memory.pools[1:])
        served.target.engine.pages.memory = lambda: fewer  # type: ignore[method-assign]
        await served.move()
        assert served.mover.counters() == {"page_bytes_by_nixl": 0, "nixl_failed": 1}


@pytest.mark.parametrize("has", ["neither", "the old target", "the new target"])
async def test_contents_come_where_one_of_two_has_no_nixl(has: str) -> None:
    async with two_targets(StandIn(), lends=has == "the old target") as served:
        if has != "the new target":
            await served.mover.agent.close()
        assert await served.move() == (NUM_PAGES, NUM_PAGES * PAGE_BYTES)
        assert served.mover.counters() == {"page_bytes_by_nixl": 0, "nixl_failed": 0}
        assert served.text() == right_text()


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_contents_come_where_a_transfer_fails_and_from_then_on() -> None:
    async with two_targets(StandIn(fails=True)) as served:
        assert await served.move() == (NUM_PAGES, NUM_PAGES * PAGE_BYTES)
        assert served.mover.counters() == {"page_bytes_by_nixl": 0, "nixl_failed": 1}
        assert served.text() == right_text()
        served.target.engine.runner.cache.release(served.target.engine.runner.cache.allocate(40))  # all are evicted
        assert await served.move() == (NUM_PAGES, NUM_PAGES * PAGE_BYTES)
        assert served.mover.counters()["nixl_failed"] == 1, "it was not asked again"


async def test_a_transfer_that_hangs_keeps_its_pages_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session has its pages another way, and late contents are used by nobody."""
    monkeypatch.setattr(page_mover, "READ_S", 0.2)
    async with two_targets(StandIn(looks=1 << 30)) as served:
        assert await served.move() == (NUM_PAGES, NUM_PAGES * PAGE_BYTES)
        assert served.mover.counters() == {"page_bytes_by_nixl": 0, "nixl_failed": 1}
        (reader,) = (agent for agent in served.world.agents.values() if agent.handles)
        assert len(served.target.engine.pages.lent) == NUM_PAGES
        reader.handles[0].left = 1
        while served.target.engine.pages.lent:
            await asyncio.sleep(0.01)
        served.target.engine.check_integrity()
        assert served.mover.counters()["page_bytes_by_nixl"] == 0
        assert served.text() == right_text()


async def test_a_session_that_ends_meanwhile_leaves_its_transfer_to_itself() -> None:
    async with two_targets(StandIn(looks=1 << 30)) as served:
        moving = asyncio.create_task(served.mover.move(served.address, opened()))
        while not (handles := [handle for agent in served.world.agents.values() for handle in agent.handles]):
            await asyncio.sleep(0.01)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        served.target.engine.check_integrity()
        assert len(served.target.engine.pages.lent) == NUM_PAGES
        await served.all_is_given_back()  # and may be used for something else while they are read
        handles[0].left = 1
        while served.target.engine.pages.lent:
            await asyncio.sleep(0.01)
        served.target.engine.check_integrity()
        assert served.mover.counters()["page_bytes_by_nixl"] == 0


async def test_a_target_that_stops_ends_its_transfers() -> None:
    async with two_targets(StandIn(looks=1 << 30)) as served:
        moving = asyncio.create_task(served.mover.move(served.address, opened()))
        while not any(agent.handles for agent in served.world.agents.values()):
            await asyncio.sleep(0.01)
        await served.mover.close()
        assert await moving == (NUM_PAGES, NUM_PAGES * PAGE_BYTES), "by contents"
        assert not served.target.engine.pages.lent


async def test_pages_are_lent_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "LENT_S", 0.1)
    monkeypatch.setattr(page_mover, "READ_S", 0.0)
    async with two_targets(StandIn()) as served:
        await served.move()
        assert served.mover.counters() == {"page_bytes_by_nixl": 0, "nixl_failed": 1}, "it would have come too late"
        await served.all_is_given_back()


def test_lent_pages_are_not_evicted() -> None:
    source, (_, tokens) = Engine(pair("llama")[0]), context()
    source.open(opened())
    source.finish()
    store, cache = source.engine.pages, source.engine.runner.cache
    wanted = Engine(pair("llama")[0]).engine.pages.wanted(tokens, "")
    assert wanted is not None
    lent = store.lend("key", store.held(tokens, "", wanted.identity, 0))
    pages = cache.allocate(cache.num_available)
    assert not {*pages} & {*lent}
    store.give_back("key")
    store.give_back("key")
    assert cache.num_available == NUM_PAGES


async def test_memory_that_is_not_registered_is_neither_read_nor_lent() -> None:
    """A target that has other pages than those which it began with."""
    async with two_targets(StandIn()) as served:
        for agent in (served.mover.agent, served.lender):
            registered, agent.memory = agent.memory, Engine(pair("llama")[0]).engine.pages.memory()
            before = served.mover.counters()["page_bytes_by_nixl"]
            await served.move()
            assert served.mover.counters()["page_bytes_by_nixl"] == before
            agent.memory = registered
            served.mover.by_contents.clear()
            cache = served.target.engine.runner.cache
            cache.release(cache.allocate(cache.num_pages))


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "installed", "encrypted", "chosen"),
    [
        ("auto", True, False, NixlMover),
        ("auto", False, False, HostMemoryMover),
        ("auto", True, True, HostMemoryMover),
        ("nixl", True, True, NixlMover),
        ("host", True, False, HostMemoryMover),
    ],
)
def test_the_way_is_chosen(backend, installed, encrypted, chosen, monkeypatch) -> None:
    monkeypatch.setattr(server, "is_installed", lambda: installed)
    host: Any = SimpleNamespace(call=None)
    certificates: Any = object() if encrypted else None
    assert type(server._page_mover(host, backend, "", certificates)) is chosen


def test_nixl_that_is_asked_for_and_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "is_installed", lambda: False)
    config = LocalConfig(target=TargetModel(path=str(TARGET_DIR), kv_transfer_backend="nixl"), draft=None)
    with pytest.raises(ConfigError, match="kv_transfer_backend is 'nixl' and the package nixl is not installed"):
        server.engine_server(config.target_setup(), replica_id="t")


@pytest.mark.slow
def test_nixl_itself_reads_the_memory_of_another_process() -> None:
    """By its UCX backend, without a GPU; also of a process that dies. The calls of the stand-in are NIXL's."""
    folder = ROOT / "build" / "nixl"
    if not (folder / "nixl").is_dir():
        pytest.skip("nixl is not there: `make nixl`")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.runtime.nixl_targets", "all"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines()[-1:] == ["holds"], run.stdout + run.stderr[-4000:]


# -- mutants -----------------------------------------------------------------------------------------------------------


@mutant(NixlAgent, "begin_transfer")
def pages_are_taken_before_the_transfer_is_complete(original: Any, agent: NixlAgent, *args: Any) -> Any:
    name, handle, _ = original(agent, *args)
    return name, handle, nixl._DONE


@mutant(PageStore, "lend")
def pages_are_not_kept(original: Any, store: PageStore, key: object, hashes: Any) -> Any:
    return store.cache.find(hashes)


@mutant(NixlMover, "transfer_pages")
def pages_that_come_after_the_call_are_taken(original: Any, mover: NixlMover, *args: Any) -> Any:
    return original(mover, *args[:-1], asyncio.Event())


async def test_pages_that_are_taken_too_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pages_that_come_after_the_call_are_taken(monkeypatch)
    with pytest.raises(AssertionError):
        await test_a_session_that_ends_meanwhile_leaves_its_transfer_to_itself()


async def test_pages_that_are_taken_too_early_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pages_are_taken_before_the_transfer_is_complete(monkeypatch)
    with pytest.raises(AssertionError):
        await test_pages_are_read_from_the_memory_of_the_other_target(4096, monkeypatch)


def test_pages_that_are_not_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pages_are_not_kept(monkeypatch)
    with pytest.raises(AssertionError):
        test_lent_pages_are_not_evicted()
