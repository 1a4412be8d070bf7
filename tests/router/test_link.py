"""The end of a link, and one that is made slower on purpose."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.messages import Commit, Hint, States
from paceline.router import link as link_module
from paceline.router.link import DRAFT, Link
from paceline.router.pool import Member
from paceline.router.replica import DraftLink
from paceline.types import ReplicaStatus

DELAY_S = 0.1


async def stream(batches: Sequence[Any]) -> AsyncIterator[Any]:
    for batch in batches:
        yield batch


def delay(link: Any, delay_s: float) -> None:
    """Adds ``delay_s`` to each way of a link; delays overlap and keep the order."""
    loop = asyncio.get_running_loop()
    queue, receive = link._queue, link.receive
    link._queue = lambda messages: loop.call_later(delay_s, queue, list(messages))
    link.receive = lambda *received: loop.call_later(delay_s, receive, *received)


async def test_states_that_a_stream_is_too_slow_for_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are not: the mutant that drops commits as well loses one here."""
    monkeypatch.setattr(link_module, "MAX_STATES_BYTES", 20)
    dropped: list[str] = []
    link = Link(
        Member("draft-0", "127.0.0.1:1"), DRAFT, on_messages=lambda _, messages: None,
        on_change=lambda _: None, on_dropped=dropped.append, silence_s=5.0,
    )  # fmt: skip
    link.up = True
    for i in range(4):
        link.send([Commit("s", 1, i, (5,)), States("s", 1, i, 4, bytes(8))])
    link.send([Hint("s", 1, 4, (0,), 0.5, bytes(8))])
    first, link.outbox, link._states_bytes = link.outbox, [], 0
    link.send([States("s", 1, 4, 4, bytes(8))])
    sent = [*first, *link.outbox]
    assert [m.context_len for m in sent if isinstance(m, Commit)] == [0, 1, 2, 3]
    assert [m.position for m in sent if isinstance(m, States)] == [0, 1, 4]
    assert not any(isinstance(m, Hint) for m in sent)
    assert dropped == ["states", "states", "hint"]


async def test_a_way_longer_than_heartbeats_are_apart_is_measured() -> None:
    """Heartbeats every 20 ms over a way of 200 ms; the mutant that sends an echo with each knows only the last one."""
    latencies: list[float] = []
    status = ReplicaStatus("draft-0", "draft", incarnation=1, num_sessions=0, num_waiting=0, max_sessions=1)
    kind = replace(DRAFT, decode=lambda batch: (batch, status, 0))
    link = Link(
        Member("draft-0", "127.0.0.1:1"), kind, on_messages=lambda _, messages: None,
        on_change=lambda _: None, on_latency=latencies.append, silence_s=5.0,
    )  # fmt: skip

    async def replica() -> AsyncIterator[Any]:
        for _ in range(40):
            await asyncio.sleep(0.02)
            batch, link.outbox = link.outbox, []
            yield batch

    delay(link, DELAY_S)
    await link.read_stream(replica())
    assert len(latencies) >= 2
    assert all(latency >= 2 * DELAY_S for latency in latencies)


async def changes_of(*loads: int) -> int:
    """How often a link says that placement may change, by heartbeats with so many sessions of two."""
    changes: list[DraftLink] = []
    kind = replace(DRAFT, decode=lambda status: ([], status, 0))
    link: DraftLink = Link(
        Member("draft-0", "127.0.0.1:1"), kind, on_messages=lambda *_: None, on_change=changes.append, silence_s=5.0
    )

    async def replica() -> AsyncIterator[Any]:
        for load in loads:
            yield ReplicaStatus(
                "draft-0", "draft", incarnation=1, num_sessions=load, num_waiting=0, max_sessions=2, kv_pages_used=load
            )

    await link.read_stream(replica())
    return len(changes)


@pytest.mark.parametrize("any_heartbeat", [False, True])
async def test_sessions_are_placed_again_only_when_room_appears_or_goes(any_heartbeat, monkeypatch) -> None:
    """Not at each of the heartbeats, of which a router gets hundreds a second; the mutant does so."""
    if any_heartbeat:
        monkeypatch.setattr(Link, "standing", property(lambda self: object()))
    found = [await changes_of(*loads) for loads in ((0,), (0, 1, 0, 1), (0, 1, 2, 2, 2), (0, 2, 2, 1, 0, 2))]
    assert (found == [1, 1, 2, 4]) is not any_heartbeat, found


async def test_a_link_that_is_stopped_while_its_stream_breaks_ends() -> None:
    """The group of the stream's tasks is being ended by its reader, and loses the cancellation that comes then."""
    link: DraftLink = Link(
        Member("draft-0", "127.0.0.1:1"), DRAFT, on_messages=lambda *_: None,
        on_change=lambda _: None, silence_s=5.0,
    )  # fmt: skip

    async def read(call: Any) -> str:
        link.stop()
        return "the replica ended the stream"

    link.read_stream = read  # type: ignore[method-assign]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        link.start(tasks)
