"""Which target a prompt goes to: that which has its prefix cached for the same salt, else the least loaded one."""

from __future__ import annotations

import asyncio

import pytest
from tests.router.world import World, expected, result_of, without_sockets

from paceline.router import placement
from paceline.router.placement import PrefixIndex
from paceline.types import PAGE_SIZE, Request, SamplingParams

PROMPT = tuple(97 + i * i % 26 for i in range(3 * PAGE_SIZE))


def prefixes_are_of_a_salt() -> None:
    index = PrefixIndex()
    index.add("t", PROMPT, "x")
    index.add("t", PROMPT[: 2 * PAGE_SIZE], "y")
    assert [index.match("t", PROMPT, salt) for salt in ("x", "y", "")] == [3 * PAGE_SIZE, 2 * PAGE_SIZE, 0]
    assert index.match("t", PROMPT[PAGE_SIZE:], "x") == 0


def test_prefixes_are_of_a_salt() -> None:
    prefixes_are_of_a_salt()


def test_an_index_without_salts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = placement._chain
    monkeypatch.setattr(placement, "_chain", lambda token_ids, salt: chain(token_ids, ""))
    with pytest.raises(AssertionError):
        prefixes_are_of_a_salt()


def test_a_prompt_follows_those_of_its_own_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prompt of the key goes where the first is cached, although that target has more to do."""
    without_sockets(monkeypatch)

    async def test() -> None:
        world = World(4, 4)
        async with world.router() as router:
            tasks = []
            for i, owner in enumerate(["alice", "alice", "bob"]):
                request = Request(str(i), PROMPT, SamplingParams(max_tokens=20, seed=i, ignore_eos=True)).of(owner)
                tasks.append((request, asyncio.create_task(result_of(router, request))))
                await world.turn()
                await world.turn()  # the target has taken it
            assert sorted(len(target.sessions) for target in world.targets) == [1, 2]
            shared = next(target for target in world.targets if len(target.sessions) == 2)
            assert len({opened.cache_salt for opened, _ in shared.sessions.values()}) == 1
            await world.until(*(task for _, task in tasks))
            for request, task in tasks:
                assert tuple(task.result()[0]) == expected(request)

    asyncio.run(test())
