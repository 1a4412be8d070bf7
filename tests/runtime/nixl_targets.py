"""Two targets as processes that move pages by NIXL itself, with host memory and without a GPU: a script.

``python -m tests.runtime.nixl_targets CASE``: prints ``holds``, or what does not.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import sys
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.lossless.test_moved_pages import Engine
from tests.runtime.test_nixl import PAGE_BYTES, right_text
from tests.runtime.test_page_mover import NUM_PAGES, TOKEN, call_of, context, opened, serving
from tests.support.models import pair
from tests.support.nixl import Agent

from paceline.runtime.nixl import Block, NixlAgent
from paceline.runtime.page_mover import NixlMover, serve_pages

MOVED = NUM_PAGES, NUM_PAGES * PAGE_BYTES


def lend(pipe: Connection) -> None:
    """The old target: says where it is, serves until it is told not to, and says what it still lends."""

    async def run() -> None:
        source, agent = context()[0], NixlAgent()
        memory = source.memory()
        assert memory is not None
        await agent.start(memory)

        async def answer(request: Any, context_: Any) -> None:
            await serve_pages(call_of(source), request, context_.write, agent)

        async with serving(answer) as address:
            pipe.send(address)
            await asyncio.to_thread(pipe.recv)
            while source.lent:
                await asyncio.sleep(0.01)
        await agent.close()
        pipe.send(source.lent)

    asyncio.run(run())


class Reader:
    """The new target."""

    def __init__(self, address: str) -> None:
        self.address, self.target = address, Engine(pair("llama")[0])
        self.mover = NixlMover(call_of(self.target.engine.pages), TOKEN, agent=NixlAgent())

    async def move(self) -> tuple[int, int]:
        return await self.mover.move(self.address, opened())

    def evict(self) -> None:
        cache = self.target.engine.runner.cache
        cache.release(cache.allocate(cache.num_pages))

    def text(self) -> list[int]:
        self.target.open(opened())
        return self.target.finish()["s7"]


def signatures(agent: NixlAgent) -> str:
    """The stand-in's calls are NIXL's, by name and order of parameters."""
    real = type(agent._agent)
    methods = [name for name in vars(Agent) if not name.startswith("_") and name != "has"]
    assert len(methods) == 10
    for name in methods:
        own = [*inspect.signature(getattr(Agent, name)).parameters]
        theirs = [*inspect.signature(getattr(real, name)).parameters]
        if theirs[: len(own)] != own:
            return f"{name} takes {theirs}, not {own}"
    return "holds"


async def moves(reader: Reader, process: Any) -> str:
    """Twice, the second time over a connection that had been given up."""
    for count in (1, 2):
        reader.evict()
        if (moved := await reader.move()) != MOVED:
            return f"{moved} were moved"
        if reader.mover.counters() != {"page_bytes_by_nixl": count * MOVED[1], "nixl_failed": 0}:
            return f"not by NIXL: {reader.mover.counters()}"
    return signatures(reader.mover.agent) if reader.text() == right_text() else "the text is another"


async def deaths(reader: Reader, process: Any) -> str:
    """The old target is killed when it has said where its pages are."""
    read = reader.mover.agent.read

    async def read_of_the_dead(metadata: bytes, theirs: Sequence[Block], ours: Sequence[Block]) -> None:
        process.kill()
        process.join()
        await read(metadata, theirs, ours)

    reader.mover.agent.read = read_of_the_dead  # type: ignore[method-assign]
    try:
        return f"{await reader.move()} came from the dead"
    except OSError:
        reader.target.engine.check_integrity()
    return "holds" if reader.text() == right_text() else "the text is another"


CASES: dict[str, Callable[[Reader, Any], Awaitable[str]]] = {"moves": moves, "deaths": deaths}


async def run_case(name: str) -> str:
    """What a case says, and after it the old target."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=lend, args=(theirs,), daemon=True)
    process.start()
    reader = Reader(await asyncio.to_thread(ours.recv))
    await reader.mover.start()
    said = await asyncio.wait_for(CASES[name](reader, process), 60)
    await reader.mover.close()
    if reader.target.engine.pages.lent and said == "holds":
        return "pages are still lent"
    if process.is_alive():
        ours.send(None)
        if (lent := await asyncio.to_thread(ours.recv)) and said == "holds":
            return f"{lent} are still lent"
        process.join()
    return said


if __name__ == "__main__":
    names = [*CASES] if sys.argv[1] == "all" else sys.argv[1:]
    print(next((said for name in names if (said := asyncio.run(run_case(name))) != "holds"), "holds"))
