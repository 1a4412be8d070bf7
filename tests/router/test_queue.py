"""Whose turn it is: places and queue are shared fairly, and nothing is kept free.

Mutants: a queue in order of arrival; shares without regard to the places that they hold; a share that comes back to the
front when its queue was empty; a full queue that refuses every share.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.world import World, expected, request, result_of, without_sockets

from paceline.config import ServiceConfig
from paceline.errors import InvalidRequestError, ResourceExhaustedError
from paceline.router.admission import TargetInfo
from paceline.router.queue import FairQueue
from paceline.router.router import Router
from paceline.security.access import Access

LIMIT = 64


def served(queue: FairQueue[str], num_places: int) -> list[str]:
    """All requests in the order of their turns, while each holds a place until the oldest gives one back."""
    order: list[str] = []
    held: list[str] = []
    while queue:
        if len(held) == num_places:
            held.pop(0)
        item = queue.pop(Counter(held))
        order.append(item)
        held.append(item[0])
    return order


def filled(*items: str) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.add(item, item[0])
    return queue


def test_shares_take_turns_whatever_their_numbers_and_keep_their_own_order() -> None:
    queue = filled(*(f"a{i}" for i in range(6)), "b0", "b1", "c0")
    assert served(queue, 1) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4", "a5"]
    assert not list(queue)


def test_a_place_goes_to_the_share_that_holds_the_fewest() -> None:
    queue = filled("a0", "a1", "b0", "b1", "b2")
    assert [queue.pop({"a": 3}) for _ in range(2)] == ["b0", "b1"]
    assert queue.pop({"a": 1, "b": 2}) == "a0"


def test_a_share_that_waits_all_the_time_is_not_starved_by_one_that_comes_and_goes() -> None:
    """With one place; the other's next request comes as soon as its last one is served."""
    queue = filled(*(f"a{i}" for i in range(10)))
    order = ""
    for i in range(20):
        if queue.may_wait("b", LIMIT) and "b" not in order[-1:]:
            queue.add(f"b{i}", "b")
        order += queue.pop({})[0]
    assert order[:10] == "ababababab"


def test_single_requests_without_keys_are_served_in_order_of_arrival_and_those_that_go_on_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "xyz":
        queue.add(name, name)
    queue.add("r", "r", first=True)
    queue.add("s", "r")
    assert [queue.pop({}) for _ in range(5)] == ["r", "x", "y", "z", "s"]


def test_going_on_gives_no_share_more_than_its_part() -> None:
    """A key cannot pass others by requests that say that they continue a stream."""
    queue: FairQueue[str] = FairQueue()
    for i in range(9):
        queue.add(f"a{i}", "a", first=True)
    queue.add("b0", "b")
    assert queue.pop({"a": 1}) == "b0"


@given(st.lists(st.sampled_from("abcdefgh"), max_size=600), st.integers(0, 40))
def test_the_queue_is_bounded_and_no_share_is_shut_out(arrivals: list[str], limit: int) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: Counter[str] = Counter()
    for i, share in enumerate(arrivals):
        others = len([name for name in waiting if name != share])
        may = queue.may_wait(share, limit)
        if may:
            queue.add(i, share)
            waiting[share] += 1
        else:
            assert len(queue) >= limit, "room was kept free"
            assert waiting[share] >= limit // (others + 1), "a share had less than its part"
        assert len(queue) == sum(waiting.values()) == len(list(queue))
        assert max(waiting.values(), default=0) <= limit
    assert len(queue) <= sum(limit / i for i in range(1, 9))


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans()), max_size=60))
def test_what_is_added_comes_out_once_unless_it_is_removed(events: list[tuple[str, bool, bool]]) -> None:
    queue: FairQueue[str] = FairQueue()
    kept = []
    for i, (share, first, leaves) in enumerate(events):
        queue.add(item := f"{share}{i}", share, first=first)
        if leaves:
            assert queue.remove(item, share)
            assert not queue.remove(item, share)
        else:
            kept.append(item)
    out = served(queue, 3)
    assert sorted(out) == sorted(kept)


# -- the router ------------------------------------------------------------------------------------------------


def tasks_of(router: Router, share: str, num: int, max_tokens: int = 20) -> list[asyncio.Task[Any]]:
    """Sequences of one share, the i-th with seed i."""
    wanted = [replace(request(f"{share}{i}", i, max_tokens), share=share) for i in range(num)]
    return [asyncio.create_task(result_of(router, each)) for each in wanted]


async def test_eighty_sequences_of_one_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One share has all 16 places and the whole queue; others are taken in, and served as soon as a place is free."""
    without_sockets(monkeypatch)
    world = World(16)
    async with world.router() as router:
        many = tasks_of(router, "a", 80)
        for _ in range(3):
            await world.turn()
        assert router.num_running == 16
        assert router.num_queued == LIMIT
        others = [task for share in "bcd" for task in tasks_of(router, share, 3)]
        with pytest.raises(ResourceExhaustedError, match="at most 64 may wait") as error:
            await result_of(router, replace(request("one more", 1), share="a"))
        assert error.value.retry_after_s > 0
        await world.until(*others, turns=45)  # two rounds of twenty tokens
        assert sum(task.done() for task in many) <= 32
        await world.until(*many)
        for i, task in enumerate(many):
            assert tuple((await task)[0]) == expected(request("", i))


async def test_a_share_has_every_place_while_no_other_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(4)
    async with world.router() as router:
        first = tasks_of(router, "a", 8, 10)
        other = tasks_of(router, "b", 1, 10)
        await world.until(*first, *other, turns=36)  # nine sequences of ten tokens at four places
        assert world.num_turns <= 36


# -- what can never be served ----------------------------------------------------------------------------------


def test_more_sequences_than_can_run_and_wait_are_refused_by_name() -> None:
    info = TargetInfo(None, 100, (), most_sequences=80)  # type: ignore[arg-type]
    info.check_sequences(1, 80)
    info.check_sequences(8, 10)
    TargetInfo(None, 100, ()).check_sequences(1, 128)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"^n is 81: at most 80 sequences can run or wait here at once$"):
        info.check_sequences(1, 81)
    with pytest.raises(InvalidRequestError, match=r"^prompt has 9 entries and n is 9: at most 80 sequences"):
        info.check_sequences(9, 9)


def test_a_service_counts_the_places_of_all_targets_that_there_may_be() -> None:
    assert ServiceConfig().most_sequences == 16 + LIMIT
    settings: dict[str, Any] = {
        "target_config": {
            "engine_kwargs": {"max_sessions": 8},
            "deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 3}},
        },
        "router_config": {"max_queued_requests": 5},
    }
    assert ServiceConfig.parse(settings).most_sequences == 3 * 8 + 5
    settings["target_config"]["deployment_config"] = {"num_replicas": "auto"}
    assert ServiceConfig.parse(settings).most_sequences is None


def test_more_sequences_than_a_key_may_ever_run_are_refused_and_not_told_to_come_again() -> None:
    keys: Any = SimpleNamespace(keys={"team": SimpleNamespace(name="team", max_requests=4, tokens_per_minute=None)})
    access = Access(keys, SimpleNamespace())  # type: ignore[arg-type]
    access.check_sequences("team", 4)
    access.check_sequences("another", 5)
    with pytest.raises(InvalidRequestError, match="n makes 5 sequences of the request: at most 4 of this API key"):
        access.check_sequences("team", 5)
