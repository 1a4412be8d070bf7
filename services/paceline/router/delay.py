"""A slow network between router and drafts, for experiments (``router_config.draft_link_delay_s``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.messages import Echo
from paceline.router.link import Link, Received, Sent
from paceline.types import ReplicaStatus


class DelayedLink(Link[Sent, Received]):
    """A link that adds ``delay_s`` to every batch, each way; delays overlap and keep the order."""

    def __init__(self, *args: Any, delay_s: float, **options: Any) -> None:
        """Takes the arguments of ``Link`` too."""
        super().__init__(*args, **options)
        self._delay_s = delay_s

    def _queue(self, messages: Sequence[Sent | Echo]) -> None:
        asyncio.get_running_loop().call_later(self._delay_s, super()._queue, list(messages))

    def _receive(self, batch: Sequence[Received | Echo], status: ReplicaStatus | None) -> None:
        asyncio.get_running_loop().call_later(self._delay_s, super()._receive, batch, status)
