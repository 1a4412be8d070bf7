"""A wave of Cancels for requests that are with other routers: few questions, bounded answers."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from paceline.router.peer_routers import Named, PeerRouters


async def test_two_hundred_cancels_are_two_questions() -> None:
    """The first is asked at once; all that come while it is under way are one more."""
    asked: list[Sequence[Named]] = []
    theirs = {(f"r{i}", "") for i in range(0, 200, 2)}

    async def ask(names: Sequence[Named]) -> list[Named]:
        asked.append(names)
        await asyncio.sleep(0)
        found = [name for name in names if name in theirs]
        theirs.difference_update(found)
        return found

    peers = PeerRouters(ask, timeout_s=5.0)
    first = asyncio.create_task(peers.cancel("r0", ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = [peers.cancel(f"r{i}", "") for i in range(1, 200)]
    assert list(await asyncio.gather(first, *rest)) == [i % 2 == 0 for i in range(200)]
    assert [len(names) for names in asked] == [1, 199]


async def test_an_id_of_another_caller_is_not_found() -> None:
    async def ask(names: Sequence[Named]) -> list[Named]:
        return [("r", "alice")]

    peers = PeerRouters(ask, timeout_s=5.0)
    assert list(await asyncio.gather(peers.cancel("r", "bob"), peers.cancel("r", "alice"))) == [False, True]


async def test_an_error_or_silence_ends_one_question_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Callers that leave do not hold the others up either."""
    num = 0

    async def ask(names: Sequence[Named]) -> Sequence[Named]:
        nonlocal num
        num += 1
        if num == 1:
            raise RuntimeError("broken by a test")
        if num == 2:
            await asyncio.Event().wait()
        return names

    with caplog.at_level(logging.WARNING):
        peers = PeerRouters(ask, timeout_s=0.05)
        answers = [await peers.cancel("a", ""), await peers.cancel("b", "")]
        left = asyncio.create_task(peers.cancel("c", ""))
        await asyncio.sleep(0)
        left.cancel()
        answers.append(await peers.cancel("d", ""))
        await peers.stop()
        assert answers == [False, False, True]
    first, second = (record.getMessage() for record in caplog.records if "other routers" in record.getMessage())
    assert "RuntimeError('broken by a test')" in first
    assert "TimeoutError" in second
