"""Routers among targets of a virtual clock: real sessions, admission, placement and links, without sockets or engines.

A target decides one token per turn for each session that it serves, by a rule of seed and position alone; sessions
beyond its places wait in line. What a test changes is who is up, how many places there are and how fast turns are.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.letters import Letters
from tests.support.pump import Clock

from paceline.config import RouterConfig
from paceline.messages import CloseSession, Echo, OpenSession, Outcome
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.link import Link
from paceline.router.pool import Member, StaticPool
from paceline.router.replica import DraftLink, TargetLink
from paceline.router.router import Router
from paceline.types import Cause, FinishReason, ReplicaStatus, Request, Result, Round, SamplingParams


def token_at(seed: int, position: int) -> int:
    """The token of a session at a position of its context."""
    return 97 + (seed * 7919 + position * position) % 26


def expected(request: Request) -> tuple[int, ...]:
    """The tokens of a request, whoever serves it."""
    assert request.sampling.seed is not None
    start = len(request.prompt)
    return tuple(token_at(request.sampling.seed, start + i) for i in range(request.sampling.max_tokens))


class Target:
    """A target replica, and the links of the routers to it."""

    def __init__(self, name: str, places: int) -> None:
        self.member = Member(name, "127.0.0.1:1")
        self.places = places
        self.up = True
        self.numerics = ""
        self.links: dict[Router, TargetLink] = {}
        self.sessions: dict[tuple[Router, str], tuple[OpenSession, list[int]]] = {}
        """Open sessions, those that have waited longest first, with their contexts."""

    @property
    def status(self) -> ReplicaStatus:
        name, num = self.member.replica_id, len(self.sessions)
        waiting = max(0, num - self.places)
        return ReplicaStatus(name, "target", 1, num, waiting, self.places, numerics=self.numerics)

    def take(self) -> None:
        """Takes what the routers have sent."""
        for router, link in self.links.items():
            messages, link.outbox = link.outbox, []
            for message in messages:
                key = router, getattr(message, "session_id", "")
                if isinstance(message, OpenSession):
                    self.sessions[key] = message, list(message.token_ids)
                elif isinstance(message, CloseSession):
                    self.sessions.pop(key, None)

    def turn(self) -> None:
        """Decides a token for each session that has a place."""
        batches: dict[Router, list[Any]] = {router: [] for router in self.links}
        for (router, name), (opened, context) in list(self.sessions.items())[: self.places]:
            length = len(context)
            context.append(token_at(opened.sampling.seed, length))
            ended = len(context) == opened.num_prompt_tokens + opened.sampling.max_tokens
            finish = FinishReason.LENGTH if ended else None
            if ended:
                del self.sessions[router, name]
            round_ = Round(0, 0, Cause.DISABLED)
            batches[router].append(Outcome(name, opened.epoch, length, (context[-1],), (-0.5,), round_, finish))
        for router, messages in batches.items():
            if messages and self.links[router].up:
                self.links[router].receive(messages, None)

    def beat(self) -> None:
        """Sends the heartbeat."""
        for link in self.links.values():
            link.receive([], self.status)

    def die(self, reason: str = "silent for 5.0 s") -> None:
        """All routers notice."""
        self.up = False
        self.sessions.clear()
        for link in self.links.values():
            link.on_down(reason)


class Draft:
    """A draft replica that sends nothing, and what the routers have sent to it."""

    def __init__(self, places: int) -> None:
        self.member = Member("draft-0", "127.0.0.1:2")
        self.status = ReplicaStatus("draft-0", "draft", 1, 0, 0, places)
        self.links: list[DraftLink] = []

    def commands(self) -> list[type]:
        """The kinds of the commands that have come since the last call."""
        taken = [type(message) for link in self.links for message in link.outbox if not isinstance(message, Echo)]
        for link in self.links:
            link.outbox = []
        return taken


class World:
    """Targets and routers; time passes in turns only."""

    def __init__(self, *places: int, turn_s: float = 0.05, draft: Draft | None = None) -> None:
        self.clock = Clock()
        self.draft = draft
        self.targets = [Target(f"target-{i}", size) for i, size in enumerate(places)]
        self.turn_s = turn_s
        self.num_turns = 0

    @contextlib.asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[Router]:
        """A started router that has heard of all targets that are up."""
        info = TargetInfo(Letters(), 4096, ())  # type: ignore[arg-type]
        pool = StaticPool("target", [target.member for target in self.targets])
        drafts = None if self.draft is None else StaticPool("draft", [self.draft.member])
        metrics = RouterMetrics(Registry("router"), "none")
        router = Router(info, pool, drafts, RouterConfig(**settings), metrics=metrics, clock=self.clock)
        await router.start()
        for target in self.targets:
            target.links[router] = link = router.targets.links[target.member.replica_id]
            if target.up:
                link.receive([], target.status)
        if self.draft is not None:
            assert router.drafts is not None
            self.draft.links.append(link := router.drafts.links[self.draft.member.replica_id])
            link.receive([], self.draft.status)
        try:
            yield router
        finally:
            await router.stop()

    async def turn(self) -> None:
        """Everybody has a turn; then heartbeats, if it is time, and the routers' ticks."""
        self.num_turns += 1
        self.clock.now += self.turn_s
        for target in self.targets:
            if target.up:
                target.take()
                target.turn()
                if self.num_turns % 5 == 0:
                    target.beat()
        for router in {router: None for target in self.targets for router in target.links}:
            router.tick()
        for _ in range(5):  # the clients
            await asyncio.sleep(0)

    async def until(self, *tasks: asyncio.Future[Any], turns: int = 10_000) -> None:
        """Turns until all tasks are done."""
        for _ in range(turns):
            if all(task.done() for task in tasks):
                return
            await self.turn()
        raise AssertionError(f"{sum(not task.done() for task in tasks)} of {len(tasks)} have no end")


def without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links connect to nobody, and the routers' ticks are the world's."""

    async def idle(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Link, "run_forever", idle)
    monkeypatch.setattr(Router, "tick_forever", idle)


def request(name: str, seed: int, max_tokens: int = 20) -> Request:
    """One of ``max_tokens`` tokens."""
    return Request(name, "abc", SamplingParams(max_tokens=max_tokens, seed=seed))


async def result_of(router: Router, wanted: Request) -> tuple[list[int], Result]:
    """The tokens of all chunks, and the result."""
    token_ids: list[int] = []
    async with contextlib.aclosing(router.generate(wanted)) as items:
        async for item in items:
            if isinstance(item, Result):
                return token_ids, item
            token_ids += item.token_ids
    raise AssertionError("a stream without a result")
