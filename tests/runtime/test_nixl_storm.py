"""Many moves of KV pages at once between two targets whose pages are reused meanwhile, by a stand-in for NIXL.

The content of a page is a function of its hash, so a page that was read before it was complete, or after it was reused,
is recognized. Sessions leave, transfers hang and fail, and the old target dies and comes back.
"""

import asyncio
import random
from typing import Any

import pytest
from tests.lossless.test_moved_pages import SESSIONS, Engine
from tests.runtime.test_nixl import pages_are_not_kept, pages_are_taken_before_the_transfer_is_complete
from tests.runtime.test_page_mover import TOKEN, call_of, serving
from tests.support.models import pair, prompt
from tests.support.mutants import Mutant, mutant
from tests.support.nixl import Handle, StandIn

from paceline.model.kv_cache import page_hash, root_hash
from paceline.runtime import page_mover
from paceline.runtime.nixl import NixlAgent
from paceline.runtime.page_mover import NixlMover, serve_pages
from paceline.target.pages import PageStore, fill_page, page_contents
from paceline.types import PAGE_SIZE

CONTEXTS = [tuple(prompt(100 + i, 70 + PAGE_SIZE * i)) for i in range(5)]
"""Of one to five pages."""
FOREVER = 1 << 30


def hashes_of(token_ids: tuple[int, ...]) -> list[bytes]:
    hashes = [root_hash("")]
    for start in range(0, len(token_ids) - PAGE_SIZE, PAGE_SIZE):
        hashes.append(page_hash(hashes[-1], token_ids[start : start + PAGE_SIZE]))
    return hashes[1:]


class Target:
    """The pages of a target, which no model computes."""

    def __init__(self, world: StandIn, pages: int) -> None:
        self.world, self.engine = world, Engine(pair("llama")[0], pages=pages).engine
        self.store, self.cache = self.engine.pages, self.engine.runner.cache
        self.agent, self.name, self.alive = NixlAgent(world.make), "", True

    def content(self, digest: bytes) -> bytes:
        return (digest * (self.store.page_bytes // len(digest) + 1))[: self.store.page_bytes]

    async def answer(self, request: Any, context: Any) -> None:
        """Implements ``TargetService.Pages``."""
        if not self.alive:
            raise ConnectionResetError
        await serve_pages(call_of(self.store), request, context.write, self.agent)

    def compute(self, token_ids: tuple[int, ...]) -> None:
        """Has the pages of a context in the cache, if there is room."""
        hashes = hashes_of(token_ids)
        pages = self.cache.share(hashes)
        missing = hashes[len(pages) :]
        if len(missing) <= self.cache.num_available:
            for page, digest in zip(self.cache.allocate(len(missing)), missing, strict=True):
                fill_page(self.cache, page, self.content(digest))
                self.cache.publish(page, digest)
                pages.append(page)
        self.cache.release(pages)

    def reuse(self, count: int) -> None:
        """Uses pages for something else."""
        pages = self.cache.allocate(count)
        for page in pages:
            fill_page(self.cache, page, bytes([255]) * self.store.page_bytes)
        self.cache.release(pages)

    def check(self) -> None:
        """Asserts that no page is lost and that each known one has its content."""
        self.engine.check_integrity()
        for token_ids in CONTEXTS:
            hashes = hashes_of(token_ids)
            for page, digest in zip(self.cache.find(hashes), hashes, strict=False):
                assert page_contents(self.cache, page) == self.content(digest)

    async def restart(self) -> None:
        """Dies, with all transfers from it, and comes back with other contents."""
        self.alive = False
        self.world.dead.add(self.name)
        self.reuse(self.cache.num_available)
        memory, others = self.store.memory(), {*self.world.agents}
        assert memory is not None
        self.agent, self.alive = NixlAgent(self.world.make), True
        await self.agent.start(memory)
        (self.name,) = {*self.world.agents} - others


class Storm:
    """Random events at the new target ``new``, which reads from ``old``."""

    def __init__(self, seed: int) -> None:
        self.rng, self.world = random.Random(seed), StandIn()
        self.old, self.new = Target(self.world, 14), Target(self.world, 9)
        self.mover = NixlMover(call_of(self.new.store), TOKEN, agent=self.new.agent)
        self.moves: list[asyncio.Task[tuple[int, int]]] = []
        self.ended: list[Any] = []

    def handles(self) -> list[Handle]:
        return [handle for agent in self.world.agents.values() for handle in agent.handles]

    def release_transfers(self) -> None:
        for handle in self.handles():
            handle.left = min(handle.left, 3)

    async def step(self, address: str) -> None:
        rng, event = self.rng, self.rng.random()
        self.world.looks, self.world.fails = rng.choice([1, 3, FOREVER]), rng.random() < 0.1
        if event < 0.5 and len(self.moves) < 6:
            token_ids = rng.choice(CONTEXTS)
            self.old.compute(token_ids)
            opened = SESSIONS["s3"].opened("s", token_ids)
            self.moves.append(asyncio.create_task(self.mover.move(address, opened)))
        elif event < 0.6 and self.moves:
            rng.choice(self.moves).cancel()
        elif event < 0.75:
            self.old.reuse(self.old.cache.num_available)
        elif event < 0.85:
            self.new.reuse(rng.randint(1, max(1, self.new.cache.num_available)) if self.new.cache.num_available else 0)
        elif event < 0.9:
            await self.old.restart()
        elif event < 0.97:
            self.release_transfers()
        self.mover.by_contents.clear()  # the next one comes by NIXL again
        await asyncio.sleep(0.002)
        self.check()

    def check(self) -> None:
        self.old.check()
        self.new.check()
        assert self.mover.transfers or not self.new.store.lent, "no transfer ends later"
        for move in [move for move in self.moves if move.done()]:
            self.moves.remove(move)
            self.ended.append("cancelled" if move.cancelled() else move.exception() or move.result())

    async def end(self) -> None:
        """Every move ends, and nothing is left of any."""
        self.world.looks = 1
        while self.moves or self.mover.transfers:
            self.release_transfers()
            await asyncio.sleep(0.001)
            self.check()
        while self.old.store.lent:
            await asyncio.sleep(0.001)
        await self.mover.close()
        await self.old.agent.close()
        for target in (self.old, self.new):
            assert not target.store.lent
            assert target.cache.num_used == 0
        assert not any(agent.handles or agent.remote for agent in self.world.agents.values())


async def storm(seed: int, num_steps: int, patch: pytest.MonkeyPatch) -> Storm:
    patch.setattr(page_mover, "READ_S", 0.2)
    patch.setattr(page_mover, "LENT_S", 2.0)
    patch.setattr(page_mover, "MOST_BLOCKS", 8)  # two pages
    found = Storm(seed)
    await found.old.restart()
    await found.mover.start()
    async with serving(lambda request, context: found.old.answer(request, context)) as address:
        try:
            for _ in range(num_steps):
                await found.step(address)
            async with asyncio.timeout(60):
                await found.end()
        finally:
            for move in found.moves:  # a mutant leaves some, whose calls the server would wait for
                move.cancel()
            found.release_transfers()
    return found


async def test_a_page_that_has_come_is_the_page_that_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await storm(1, 80, monkeypatch)
    assert all(isinstance(each, tuple | OSError) or each == "cancelled" for each in found.ended), found.ended
    assert len(found.ended) > 10


# -- mutants -----------------------------------------------------------------------------------------------------------


@mutant(PageStore, "give_back")
def pages_are_never_given_back(original: Any, store: PageStore, key: object) -> None:
    return None


@mutant(NixlMover, "transfer_pages")
def pages_of_a_transfer_under_way_are_given_back(original: Any, mover: NixlMover, *args: Any) -> Any:
    return asyncio.wait_for(original(mover, *args), 0.005)


@pytest.mark.parametrize(
    "change",
    [
        pages_are_not_kept,
        pages_are_taken_before_the_transfer_is_complete,
        pages_are_never_given_back,
        pages_of_a_transfer_under_way_are_given_back,
    ],
    ids=lambda change: change.__name__,
)
async def test_wrong_moves_are_noticed(change: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        await storm(1, 80, monkeypatch)
