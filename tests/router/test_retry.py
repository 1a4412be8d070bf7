"""The hint of a refusal: clients that obey it come back about when there is room for them, whatever the crowd is."""

import asyncio
import contextlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from tests.router.world import World, expected, request, result_of, without_sockets

from paceline.errors import ResourceExhaustedError
from paceline.router import retry
from paceline.router.retry import LEAST_S, MOST_S, RetryHints
from paceline.router.router import Router


@dataclass
class Day:
    """What a service did in its time."""

    tries: int = 0
    answers: int = 0
    ended_s: float = 0.0


def serve(
    num_clients: int,
    *,
    places: int = 16,
    queued: int = 64,
    service_s: float = 2.5,
    again: bool,
    seed: int,
    until_s: float = 1e9,
    cold: bool = False,
    obey: Callable[[float], float] = lambda hint_s: hint_s,
) -> Day:
    """A service with so many places and clients that all come at once, want an answer each, or one after the other."""
    rng = random.Random(seed)
    hints, day, order = RetryHints(rng), Day(), itertools.count()
    if not cold:
        hints.note_freed(-100.0, service_s)
    events: list[tuple[float, int, str]] = [(rng.uniform(0, 0.2), next(order), "try") for _ in range(num_clients)]
    heapq.heapify(events)
    running = waiting = 0

    def later(at: float, what: str) -> None:
        heapq.heappush(events, (at, next(order), what))

    def begin(now: float) -> None:
        later(now + service_s * rng.uniform(0.6, 1.4), "end")

    while events and events[0][0] < until_s:
        now, _, what = heapq.heappop(events)
        if what == "try":
            day.tries += 1
            if running < places:
                running += 1
                begin(now)
            elif waiting < queued:
                waiting += 1
            else:
                later(now + obey(hints.refused(now, running)) + rng.uniform(0.0, 0.05), "try")
        else:
            day.answers, day.ended_s = day.answers + 1, now
            hints.note_freed(now, service_s)
            if waiting:
                waiting -= 1
                begin(now)
            else:
                running -= 1
            if again:
                later(now + rng.uniform(0.0, 0.05), "try")
    return day


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(("queued", "service_s"), [(64, 0.5), (64, 2.5), (64, 20.0), (0, 0.5), (0, 2.5)])
def test_150_clients_that_obey_try_at_most_twice_for_an_answer(queued: int, service_s: float, cold: bool) -> None:
    """Each wants one answer, or the next as soon as it has one; few places stay empty where durations are known."""
    for seed, again in itertools.product(range(5), (False, True)):
        until_s = 40 * service_s if again else 1e9
        day = serve(150, again=again, seed=seed, until_s=until_s, queued=queued, service_s=service_s, cold=cold)
        assert day.tries <= 2 * day.answers, (seed, again, day)
        if queued and not cold:
            assert day.ended_s <= 1.6 * day.answers * service_s / 16, (seed, again, day)


def test_the_first_crowd_is_not_told_to_wait_twice_as_long_as_its_places_take() -> None:
    """The crowd of benchmarks/crowd.py: nothing has ended by which to tell that a place becomes free every 0.1 s."""
    told: list[float] = []

    def obey(hint_s: float) -> float:
        told.append(hint_s)
        return hint_s

    for seed in range(5):
        told.clear()
        serve(150, queued=16, service_s=1.6, again=False, seed=seed, cold=True, obey=obey)
        first = told[: 150 - 16 - 16]
        assert max(first) <= 2 * len(first) * 1.6 / 16, (seed, max(first))


def test_clients_that_obey_a_constant_hint_try_far_more_often() -> None:
    """The mutants: the least hint there is, and every client the same one."""
    constant: list[Callable[[float], float]] = [lambda _: LEAST_S, lambda _: 1.0]
    for obey in constant:
        day = serve(150, again=False, seed=1, obey=obey)
        assert day.tries > 3 * day.answers


def test_hints_lie_within_their_bounds_and_differ() -> None:
    slow, fast = RetryHints(random.Random(1)), RetryHints(random.Random(2))
    for i in range(200):
        fast.note_freed(i * 1e-4, 1e-3)
    given = [fast.refused(0.02, 1000) for _ in range(3)]
    assert given == pytest.approx([LEAST_S] * 3, rel=0.5)
    assert min(given) >= LEAST_S
    slow.note_freed(0.0, 3600.0)
    given = [slow.refused(1.0, 1) for _ in range(100)]
    assert max(given) <= MOST_S
    assert min(given) >= MOST_S / 2
    assert len(set(given)) == 100, "those who are told the longest do not come together either"


def test_those_who_should_have_come_again_are_counted_once() -> None:
    hints = RetryHints(random.Random(1))
    told = sorted(hints.refused(10.0, 4) for _ in range(8))
    assert hints.num_returned(10.0) == 0
    assert hints.num_returned(10.0 + told[3] + 1e-6) in range(2, 6), "the hint differs from its slot by half a spacing"
    assert hints.num_returned(1000.0) == 8


def test_only_places_that_become_free_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that refuses a thousand requests a second says the same as one that refuses ten."""
    without_sockets(monkeypatch)

    async def hint_after(num_refused: int) -> float:
        world = World(2, turn_s=0.1)
        async with world.router(max_queued_requests=1) as router:
            router.admission._hints = RetryHints(random.Random(3))
            tasks = [asyncio.create_task(result_of(router, request(f"s{i}", i, 400))) for i in range(3)]
            await world.turn()
            last = 0.0
            for i in range(num_refused):
                last = await refused(router, f"r{i}")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            return last / num_refused

    async def refused(router: Router, name: str) -> float:
        with pytest.raises(ResourceExhaustedError, match="2 requests are running and 1 are queued") as refusal:
            await result_of(router, request(name, 1))
        return refusal.value.retry_after_s

    few, many = (asyncio.run(hint_after(num)) for num in (5, 40))
    assert few == pytest.approx(many, rel=0.2), "each is told a time of its own, as far apart"
    assert many > 1.0, "two streams of unknown length: not milliseconds"


async def test_a_full_queue_refuses_before_the_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)
    world = World(1)
    async with world.router(max_queued_requests=0) as router:
        task = asyncio.create_task(result_of(router, request("s", 1, 50)))
        await world.turn()

        async def prepare(*_: object) -> None:
            raise AssertionError("it was tokenized")

        monkeypatch.setattr(router.admission, "prepare", prepare)
        with pytest.raises(ResourceExhaustedError):
            await result_of(router, request("t", 1))
        await world.until(task)


async def test_150_clients_of_a_router_try_at_most_twice_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real admission, placement and sessions on a virtual clock; every client has its own tokens."""
    without_sockets(monkeypatch)
    tries = itertools.count()

    async def client(world: World, router: Router, i: int) -> None:
        wanted = request(f"c{i}", i, 20)
        while True:
            next(tries)
            try:
                token_ids, _ = await result_of(router, wanted)
            except ResourceExhaustedError as error:
                due = world.clock.now + error.retry_after_s
                while world.clock.now < due:
                    await asyncio.sleep(0)
            else:
                assert tuple(token_ids) == expected(wanted)
                return

    world = World(8, 8, turn_s=0.1)
    async with world.router(max_queued_requests=32) as router:
        tasks = [asyncio.create_task(client(world, router, i)) for i in range(150)]
        with contextlib.suppress(asyncio.CancelledError):
            await world.until(*tasks, turns=1000)
        await asyncio.gather(*tasks)
    assert next(tries) <= 2 * 150


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "NUM_REMEMBERED", 100)
    hints = RetryHints()
    for i in range(300):
        hints.note_freed(float(i), None)
        hints.refused(float(i), 1)
    assert [len(hints._freed), len(hints._refused), len(hints._told)] == [100, 100, 100]
