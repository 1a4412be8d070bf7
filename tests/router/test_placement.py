"""Which target a prompt goes to: that which has its prefix cached for the same salt, else the least loaded one.

And which draft: one on the node of the target, unless it is far busier.
"""

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.router.world import World, expected, result_of, without_sockets
from tests.support.mutants import mutant

from paceline.router import placement
from paceline.router.placement import Candidate, LinkPool, Placement, PrefixIndex, choose
from paceline.router.pool import Member, StaticPool
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
    chain = placement.page_hashes
    monkeypatch.setattr(placement, "page_hashes", lambda token_ids, salt: chain(token_ids, ""))
    with pytest.raises(AssertionError):
        prefixes_are_of_a_salt()


async def test_a_prompt_follows_those_of_its_own_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prompt of the key goes where the first is cached, although that target has more to do."""
    without_sockets(monkeypatch)
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


@pytest.mark.parametrize(
    ("node", "loads", "chosen"),
    [
        ("b", (0, 1, 0), "draft-1"),
        ("b", (0, 2, 1), "draft-1"),
        ("b", (0, 3, 1), "draft-0"),  # far busier
        ("b", (1, 4, 2), "draft-0"),  # full
        ("d", (1, 0, 2), "draft-1"),  # none is near
        ("", (1, 2, 0), "draft-2"),  # nor does a target say where it is
    ],
)
def test_a_draft_on_the_targets_node_is_preferred(node: str, loads: tuple[int, ...], chosen: str) -> None:
    members = [Member(f"draft-{i}", "127.0.0.1:1", where) for i, where in enumerate(("a", "b", ""))]
    drafts: Any = LinkPool(StaticPool("draft", members), lambda member: None)
    for member, load in zip(members, loads, strict=True):
        link = SimpleNamespace(member=member, up=True, load=load, has_room=load < 4, max_sessions=4)
        drafts.links[member.replica_id] = link
    placed = Placement(drafts, drafts, "router", trial_s=1.0, clock=lambda: 0.0)
    active: Any = SimpleNamespace(target=SimpleNamespace(member=Member("target", "127.0.0.1:2", node)), draft=None)
    found: Any = placed.choose_draft(active)
    assert found.member.replica_id == chosen


def busiest_of(num_routers: int, num_replicas: int, num_new: int) -> int:
    """Sessions of the busiest replica after a burst of which each router knows its own part. All have 30 before."""
    random = Random(1)
    seen = [[30] * num_replicas for _ in range(num_routers)]
    placed = [30] * num_replicas
    for i in range(num_new):
        view = seen[i % num_routers]
        chosen = choose([Candidate(str(j), load, 64) for j, load in enumerate(view)], random=random)
        assert chosen is not None
        for loads in (view, placed):
            loads[int(chosen.replica_id)] += 1
    return max(placed)


def test_a_burst_at_many_routers_is_spread() -> None:
    """Each of 100 targets has room for 34 sessions more, of 640 that 20 routers place between two heartbeats."""
    assert busiest_of(20, 100, 640) < 30 + 20
    assert busiest_of(1, 3, 30) == 40


def test_without_two_choices_targets_would_be_overrun_while_others_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "NUM_COMPARED", 1_000)
    assert busiest_of(20, 100, 640) >= 30 + 20


async def moves_to(*kinds: str) -> list[str]:
    """The numerics of the targets that serve a session of the first one ("A"), which dies, then of the next ..."""
    world = World(4, *[4] * len(kinds))
    for target, numerics in zip(world.targets, ("A", *kinds), strict=True):
        target.numerics, target.up = numerics, target is world.targets[0]
    served = []
    async with world.router() as router:
        wanted = Request("r", PROMPT, SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
        task = asyncio.create_task(result_of(router, wanted))
        await world.turn()
        await world.turn()
        for target in world.targets[1:]:
            target.up = True
            target.beat()
        for _ in kinds:
            (old,) = [target for target in world.targets if target.sessions]
            old.die()
            await world.turn()
            await world.turn()
            served += [target.numerics for target in world.targets if target.sessions]
        await world.until(task)
        assert tuple(task.result()[0]) == expected(wanted)
    return served


async def test_a_session_moves_to_targets_that_round_as_its_last_one_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there are any; then to one of the others, which it stays like."""
    without_sockets(monkeypatch)
    assert await moves_to("B", "A", "B") == ["A", "B", "B"]
    assert await moves_to("B") == ["B"]


async def waits_for_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session waits for room at a target like its last one, while another one goes on at once."""
    without_sockets(monkeypatch)
    world = World(2, 1, 2)
    for target, numerics in zip(world.targets, "AAB", strict=True):
        target.numerics, target.up = numerics, target is world.targets[0]
    requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=12, seed=i, ignore_eos=True)) for i in range(2)]
    async with world.router() as router:
        tasks = [asyncio.create_task(result_of(router, request)) for request in requests]
        await world.turn()
        await world.turn()
        for target in world.targets[1:]:
            target.up = True
            target.beat()
        world.targets[0].die()
        for task in tasks:
            while not task.done():
                await world.turn()
                assert not world.targets[2].sessions, "it rounds differently"
        assert [tuple(task.result()[0]) for task in tasks] == [expected(request) for request in requests]


async def test_a_session_waits_for_room_where_it_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    await waits_for_its_kind(monkeypatch)


async def nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a session waits for room at its kind, all places of another kind serve requests that come."""
    without_sockets(monkeypatch)
    world = World(2, 1, 2)
    for target, numerics in zip(world.targets, "AAB", strict=True):
        target.numerics, target.up = numerics, target is world.targets[0]
    requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=30, seed=i, ignore_eos=True)) for i in range(4)]
    async with world.router(max_queued_requests=0) as router:
        tasks = [asyncio.create_task(result_of(router, request)) for request in requests[:2]]
        await world.turn()
        await world.turn()
        for target in world.targets[1:]:
            target.up = True
            target.beat()
        world.targets[0].die()
        tasks += [asyncio.create_task(result_of(router, request)) for request in requests[2:]]
        await world.turn()
        await world.turn()
        assert [len(target.sessions) for target in world.targets] == [0, 1, 2]
        assert len(router.orphaned) == 1
        await world.until(*tasks)
        assert [tuple(task.result()[0]) for task in tasks] == [expected(request) for request in requests]


async def test_a_session_that_waits_for_its_kind_keeps_no_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    await nobody_else_waits(monkeypatch)


@mutant(Placement, "waits_for")
def everywhere(waits_for: Any, self: Placement, active: Any, links: Any) -> bool:
    return True


async def test_a_place_that_is_kept_for_nobody_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch)
    with pytest.raises(AssertionError):
        await nobody_else_waits(monkeypatch)


@mutant(Placement, "best_target")
def any_target(best: Any, self: Placement, active: Any, without: Any) -> Any:
    """Targets of the other kind are taken, too."""
    return best(self, active, self._too_old(active))


async def test_a_wait_that_ends_at_any_target_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    any_target(monkeypatch)
    with pytest.raises(AssertionError):
        await waits_for_its_kind(monkeypatch)


async def test_a_choice_among_all_targets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    any_target(monkeypatch)
    with pytest.raises(AssertionError):
        await test_a_session_moves_to_targets_that_round_as_its_last_one_did(monkeypatch)
