"""Sessions under which one target after another hangs or dies are ended, and they alone."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.router.world import Target, World, expected, request, result_of, without_sockets

from paceline.errors import PoisonRequestError
from paceline.messages import OpenSession, SessionFailed
from paceline.metrics.catalogue import FAILED
from paceline.router import losses
from paceline.router.losses import Losses
from paceline.router.pool import StaticPool
from paceline.router.router import Router
from paceline.rpc.status import to_status
from paceline.web.errors import to_http

POISON = 666
"""The seed of sessions under which targets hang."""


class Fragile(Target):
    """A target that hangs once a session of the poison's seed has a context of ``at`` tokens, ``after`` of its own."""

    at = after = 0
    down_for = 0
    num_hangs = 0

    def turn(self) -> None:
        served = list(self.sessions.values())[: self.places]
        if any(
            opened.sampling.seed == POISON and len(context) >= max(self.at, len(opened.token_ids) + self.after)
            for opened, context in served
        ):
            self.num_hangs += 1
            self.die("its engine has been in one step for 5.1 s")
            self.down_for = 20
            return
        super().turn()


class FragileWorld(World):
    """Targets come back some turns after they have hung."""

    def __init__(self, *places: int, at: int = 0) -> None:
        super().__init__(*places)
        self.fragile = [Fragile(f"target-{i}", size) for i, size in enumerate(places)]
        self.targets = [*self.fragile]
        for target in self.fragile:
            target.at = at

    async def turn(self) -> None:
        for target in self.fragile:
            if not target.up and target.down_for:
                target.down_for -= 1
                if not target.down_for:
                    target.up = True
                    target.beat()
        await super().turn()

    @property
    def num_hangs(self) -> int:
        return sum(target.num_hangs for target in self.fragile)


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    without_sockets(monkeypatch)


def counted(router: Router, name: str = "PoisonRequestError") -> float:
    """Failed requests by reason."""
    return router.metrics.registry.counter(FAILED, name)._value.get()  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [0, 5, 9], ids=["in its prompt", "at its third token", "later"])
@pytest.mark.parametrize("places", [(16, 16), (16, 16, 16), (16,)], ids=str)
async def test_a_session_that_hangs_two_targets_is_ended_and_no_other(places: tuple[int, ...], at: int) -> None:
    """Fifteen neighbors were on each target that hung, and lose no token."""
    world = FragileWorld(*places, at=at)
    async with world.router() as router:
        good = [request(f"s{i}", i, 60) for i in range(15)]
        tasks = [asyncio.create_task(result_of(router, each)) for each in good[:8]]
        for _ in range(2):
            await world.turn()
        poison = asyncio.create_task(result_of(router, request("poison", POISON, 60)))
        tasks += [asyncio.create_task(result_of(router, each)) for each in good[8:]]
        await world.until(*tasks, poison, turns=800)
        with pytest.raises(PoisonRequestError, match="under the request, or failed it, 2 times"):
            poison.result()
        assert world.num_hangs == 2
        for each, task in zip(good, tasks, strict=True):
            assert tuple((await task)[0]) == expected(each)
        assert counted(router) == 1
        assert not router.active
        assert not router.orphaned
        assert not router.placement._on_trial


async def test_without_trials_one_by_one_neighbors_would_be_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: suspected sessions are opened all at once."""
    monkeypatch.setattr(Losses, "on_trial", lambda *_: False)
    with pytest.raises(PoisonRequestError):
        await test_a_session_that_hangs_two_targets_is_ended_and_no_other((16, 16), 0)


class Arbiter(Fragile):
    """A target that takes one suspected session at a time, as engines do."""

    tried: tuple[Any, str] | None = None
    num_turned_away = 0

    def take(self) -> None:
        turned_away = []
        for router, link in self.links.items():
            for message in link.outbox[:]:
                if isinstance(message, OpenSession) and message.suspected_s:
                    if self._tries():
                        link.outbox.remove(message)
                        turned_away.append((link, message))
                    else:
                        self.tried = router, message.session_id
                        self.sessions[self.tried] = message, list(message.token_ids)
        super().take()
        self.num_turned_away += len(turned_away)
        for link, message in turned_away:
            link.receive([SessionFailed(message.session_id, message.epoch, "another", turned_away=True)], None)

    def _tries(self) -> bool:
        opened, context = self.sessions.get(self.tried, (None, [])) if self.tried is not None else (None, [])
        return opened is not None and len(context) == len(opened.token_ids)


@pytest.mark.parametrize("places", [(16, 16), (16, 16, 16)], ids=str)
async def test_the_poison_of_one_router_ends_no_session_of_another(places: tuple[int, ...]) -> None:
    """Both routers have sessions on each target that hung, and continue them at the same moment."""
    world = FragileWorld(*places)
    world.fragile = [Arbiter(f"target-{i}", size) for i, size in enumerate(places)]
    world.targets = [*world.fragile]
    async with world.router() as one, world.router() as other:
        good = [request(f"s{i}", i, 60) for i in range(12)]
        tasks = [asyncio.create_task(result_of(other if i % 4 else one, each)) for i, each in enumerate(good)]
        for _ in range(2):
            await world.turn()
        poison = asyncio.create_task(result_of(one, request("poison", POISON, 60)))
        await world.until(*tasks, poison, turns=800)
        with pytest.raises(PoisonRequestError, match="2 times"):
            poison.result()
        assert world.num_hangs == 2
        for each, task in zip(good, tasks, strict=True):
            assert tuple((await task)[0]) == expected(each)
        assert sum(target.num_turned_away for target in world.fragile if isinstance(target, Arbiter)) > 0
        assert not one.orphaned
        assert not other.orphaned


async def test_without_the_targets_word_sessions_of_the_other_router_would_be_ended_too(monkeypatch) -> None:
    """The mutant: a target that takes every suspected session."""
    monkeypatch.setattr(Arbiter, "_tries", lambda _: False)
    with pytest.raises(PoisonRequestError):
        await test_the_poison_of_one_router_ends_no_session_of_another((16, 16))


async def test_poison_that_gets_on_a_little_with_each_target_is_ended_too() -> None:
    world = FragileWorld(4, 4, 4)
    for target in world.fragile:
        target.after = 3
    async with world.router() as router:
        poison = asyncio.create_task(result_of(router, request("poison", POISON, 400)))
        good = asyncio.create_task(result_of(router, request("good", 1, 500)))
        await world.until(poison, good, turns=2_000)
        error = poison.exception()
        assert isinstance(error, PoisonRequestError)
        assert f"{losses.MOST_IN_ALL} times" in str(error)
        assert world.num_hangs == losses.MOST_IN_ALL
        assert tuple((await good)[0]) == expected(request("", 1, 500))


async def test_new_requests_do_not_take_the_places_of_sessions_that_wait_for_their_trial() -> None:
    world = World(4, 4)
    async with world.router(max_queued_requests=2) as router:
        old = [asyncio.create_task(result_of(router, request(f"s{i}", i, 30))) for i in range(4)]
        for _ in range(3):
            await world.turn()
        world.targets[0].die()  # two sessions each
        assert len(router.orphaned) == 1  # the other is on trial
        new = [asyncio.create_task(result_of(router, request(f"n{i}", i, 30))) for i in range(2)]
        for _ in range(2):
            await world.turn()
        assert not router.orphaned
        assert len(world.targets[1].sessions) == 4
        assert all(a.target is not None for a in router.active.values() if a.request.request_id[0] == "s")
        await world.until(*old, *new)


def test_a_target_that_leaves_its_pool_while_it_hangs_is_lost_and_not_drained() -> None:
    """Serve notices before the link does: the session counts as one that a target has hung under."""

    async def test(busy_s: float) -> int:
        world = World(2, 2)
        async with world.router() as router:
            task = asyncio.create_task(result_of(router, request("s0", 0, 30)))
            for _ in range(3):
                await world.turn()
            (active,) = router.active.values()
            link = active.target
            assert link is not None
            assert link.status is not None
            link.status = replace(link.status, busy_s=busy_s)
            pool: Any = router.targets.pool
            assert isinstance(pool, StaticPool)
            pool.set_members([t.member for t in world.targets if t.member is not link.member])
            await world.until(task)
            return active.losses.num_in_all

    assert asyncio.run(test(0.1)) == 0
    assert asyncio.run(test(30.0)) == 1


async def test_targets_that_fail_the_session_alone_count_as_well() -> None:
    """The error of an engine for one session, such as one without memory for it."""
    world = World(2)
    async with world.router() as router:
        task = asyncio.create_task(result_of(router, request("s0", 0, 30)))
        for _ in range(2):
            await world.turn()
            (active,) = router.active.values()
            link = active.target
            assert link is not None
            failed = SessionFailed(active.session.session_id, active.session.target_epoch, "no memory", False)
            link.receive([failed], None)
            if active.losses.num_in_a_row == 1:
                link.outbox.clear()  # the target never says a word about it
        with pytest.raises(PoisonRequestError, match="no memory"):
            await task
        assert counted(router) == 1


def test_losses_with_tokens_between_them_are_not_in_a_row() -> None:
    found = Losses()
    found.note_opened(3, 0.0)
    assert not found.note_lost(3)
    assert found.suspected(3)
    found.note_opened(3, 10.0)
    assert found.on_trial(3, 11.0, 10.0)
    assert not found.on_trial(4, 11.0, 10.0)
    assert not found.on_trial(3, 20.0, 10.0)
    assert not found.note_lost(4)
    assert found.suspected(4)
    assert found.note_lost(4)


def test_no_client_sends_it_again_by_itself() -> None:
    """Libraries repeat what has status 429 or 5xx, and gRPC what is UNAVAILABLE: that would hang the next targets."""
    error = PoisonRequestError("2 targets hung")
    status, body, headers = to_http(error)
    assert (status, body["error"]["code"]) == (422, "poison_request")
    assert "Retry-After" not in headers
    assert to_status(error)[0].name == "INTERNAL"
