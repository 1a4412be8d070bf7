"""Requests that are with another router: one question about all that are waited for, instead of one about each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

log = logging.getLogger(__name__)

Named = tuple[str, str]
"""Id of a request, and the name of its caller."""


class PeerRouters:
    """Asks the other routers to cancel requests, one question at a time. New requests join the next question. One event
    loop.
    """

    def __init__(self, ask: Callable[[Sequence[Named]], Awaitable[Collection[Named]]], *, timeout_s: float) -> None:
        """``ask`` returns the requests that another router had and has cancelled.

        ``timeout_s``: of a question; a request waits at most twice as long, since a question may precede its own.
        """
        self._ask, self._timeout_s = ask, timeout_s
        self._waiting: list[tuple[Named, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None

    async def cancel(self, request_id: str, caller: str) -> bool:
        """Cancels a request wherever it is; False if no router has it, or none answers in time."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((request_id, caller), answer))
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="paceline-cancel-elsewhere")
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            found: Collection[Named] = ()
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = set(await self._ask([named for named, _ in batch]))
            except Exception as error:  # the next question may be answered
                log.warning("the other routers did not say whether they have %d requests: %r", len(batch), error)
            for named, answer in batch:
                if not answer.done():  # its caller may have gone
                    answer.set_result(named in found)
        self._task = None

    async def stop(self) -> None:
        """Cancels the open question. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
