"""A link that is made slower on purpose."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.router.link import DRAFT, Link
from paceline.router.pool import Member

DELAY_S, BATCHES = 0.1, 20


async def stream(batches: Sequence[Any]) -> AsyncIterator[Any]:
    for batch in batches:
        yield batch


def test_delays_of_batches_overlap_and_keep_their_order() -> None:
    """Twenty batches take one delay, either way, and not twenty."""
    heard: list[Any] = []

    async def test() -> float:
        kind = replace(DRAFT, decode=lambda batch: (batch, None, 0))
        link = Link(
            Member("draft-0", "127.0.0.1:1"), kind, on_messages=lambda _, messages: heard.extend(messages),
            on_change=lambda _: None, silence_s=5.0, delay_s=DELAY_S,
        )  # fmt: skip
        link.up = True
        started = time.monotonic()
        for i in range(BATCHES):
            link.send([i])
        await link._read(stream([[i] for i in range(BATCHES)]))
        while len(link._outbox) < BATCHES or len(heard) < BATCHES:
            await asyncio.sleep(0.005)
        assert link._outbox == heard == list(range(BATCHES))
        return time.monotonic() - started

    assert DELAY_S <= asyncio.run(test()) < BATCHES * DELAY_S / 2
