"""Sessions beyond those for which their target wants drafts: they have none, also before the target says so itself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.router.world import Draft, Target, World, expected, request, result_of, without_sockets

from paceline.messages import CloseSession, DraftState, OpenSession, SpeculationWanted
from paceline.router.router import Router


class Crowd:
    """A target with room for all, a draft, and the requests that come one after the other."""

    def __init__(self, world: World, router: Router) -> None:
        self.world, self.router = world, router
        self.tasks: list[asyncio.Task] = []

    @property
    def target(self) -> Target:
        return self.world.targets[0]

    @property
    def with_draft(self) -> list[str]:
        """Requests that have a draft, by the router's books."""
        assert self.world.draft is not None
        (link,) = self.world.draft.links
        return sorted(self.router._by_session[name].request.request_id for name in link.sessions)

    async def come(self, *names: str, max_tokens: int = 20) -> None:
        for name in names:
            wanted = request(name, ord(name), max_tokens)
            self.tasks.append(asyncio.create_task(self._answer(wanted)))
            while name not in self.router.active or not self.router.active[name].opened:
                await asyncio.sleep(0)

    async def _answer(self, wanted) -> None:
        token_ids, _ = await result_of(self.router, wanted)
        assert tuple(token_ids) == expected(wanted)

    def wish(self, wanted: bool, most_sessions: int | None) -> None:
        """The target says it to the session that came first."""
        link = self.target.links[self.router]
        first = next(iter(link.sessions.values()))
        link.receive([SpeculationWanted(first.session_id, first.target_epoch, wanted, most_sessions)], None)


@contextlib.asynccontextmanager
async def crowd(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowd]:
    without_sockets(monkeypatch)
    world = World(64, draft=Draft(64))
    async with world.router() as router:
        found = Crowd(world, router)
        yield found
        await world.until(*found.tasks)
        await asyncio.gather(*found.tasks)


async def test_a_burst_opens_no_more_drafts_than_its_target_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is spared those that come, and the ones that had come before it was known how many there are."""
    async with crowd(monkeypatch) as burst:
        await burst.come("a")
        burst.wish(True, 2)
        await burst.come("b")
        assert burst.with_draft == ["a", "b"]
        draft = burst.world.draft
        assert draft is not None
        assert draft.commands() == [OpenSession] * 2
        await burst.come("c", "d")
        assert burst.with_draft == []
        assert draft.commands() == [CloseSession] * 2
        (link,) = burst.target.links.values()
        told = {m.session_id: m.available for m in link.outbox if isinstance(m, DraftState)}
        assert len(told) == 4
        assert not any(told.values())
        await burst.world.turn()
        assert burst.with_draft == [], "an outcome is no reason to give one"


async def test_drafts_are_given_when_the_target_wants_them_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowd(monkeypatch) as burst:
        await burst.come("a")
        burst.wish(False, 0)
        await burst.come("b", "c")
        assert burst.with_draft == []
        burst.wish(True, None)
        await burst.world.turn()
        assert burst.with_draft == ["a", "b", "c"]


async def test_drafts_are_given_when_so_many_have_ended_that_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowd(monkeypatch) as burst:
        await burst.come("a")
        burst.wish(True, 2)
        await burst.come("b", max_tokens=3)
        await burst.come("c")
        assert burst.with_draft == []
        await burst.world.until(burst.tasks[1])
        await burst.world.turn()
        assert burst.with_draft == ["a", "c"]


@pytest.mark.parametrize("gone", ["target", "draft"])
async def test_what_a_replica_that_is_gone_has_led_to_does_not_hold_for_the_next(gone, monkeypatch) -> None:
    async with crowd(monkeypatch) as burst:
        await burst.come("a")
        burst.wish(False, 0)
        await burst.come("b")
        (target,), (draft,) = burst.target.links.values(), burst.world.draft.links  # type: ignore[union-attr]
        if gone == "target":
            burst.target.die()
            burst.target.up = True
            target.receive([], burst.target.status)
        else:
            draft.on_down("silent for 1.0 s")
            draft.receive([], burst.world.draft.status)  # type: ignore[union-attr]
        for _ in range(2):  # b waits for the first token of a
            await burst.world.turn()
        assert burst.with_draft == (["a", "b"] if gone == "target" else ["b"]), "a was paused by itself"
