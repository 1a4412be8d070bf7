"""What heads are fed with: the states of a step, cut to each session's committed tokens.

A head whose features want every position is fed with each position once, in order. A session that shares pages with
another lacks the state of the last shared position, which the head's first row needs: it is kept for each full page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafters.protocol import FATAL, DrafterSessionError, Features, Fed
from paceline.target.heads.mounted import MountedHead
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Computed:
    """Rows that a step has computed for one session, after its outcome was committed."""

    session: TargetSession
    start: int
    """The first position computed; positions [start, session.num_computed) belong to committed tokens."""
    row: int
    """Row of its first token among all tokens of the step."""
    logits_row: int
    """Its first row among those with logits; -1: a prefill chunk, without any."""
    num_accepted: int
    """Draft tokens accepted: the state behind them is at ``logits_row + num_accepted``."""


class Feeding:
    """Feeds the heads of one target."""

    def __init__(self, features: Features | None, num_pages: int) -> None:
        """``features``: what the target's steps return; None: nothing. ``num_pages``: of the target's KV cache."""
        self._features = features
        self._num_pages = num_pages
        self._page_states: Tensor | None = None
        """[num_pages, width]: of the last position of each full page. A session that shares a page lacks this state."""

    def feed(self, mounted: MountedHead, computed: Sequence[Computed], states: Tensor | None) -> bool:
        """Feeds one head with a step; None as ``states``: it misses the step. True if it was fed with anything."""
        fed: list[Fed] = []
        if states is not None:
            fed = [item for each in computed if (item := self._fed(mounted, each, states)) is not None]
        served = self._feed(mounted, fed)
        if mounted.every_position:
            for each in computed:
                is_fed = each.session.session_id in served
                keep = mounted.pages.update if is_fed else mounted.pages.difference_update
                keep(_full_pages(each))
        return bool(fed)

    def _feed(self, mounted: MountedHead, fed: Sequence[Fed]) -> set[str]:
        """Feeds one head; returns the sessions that it has taken."""
        while fed:
            try:
                mounted.head.feed(fed)
            except FATAL:
                raise
            except DrafterSessionError as error:
                mounted.lose(error)
                fed = [item for item in fed if item.session_id in mounted.sessions]
                continue
            except Exception as error:
                mounted.switch_off(error)
                return set()
            for item in fed:
                mounted.sessions[item.session_id].num_fed = item.position + len(item.token_ids)
            return {item.session_id for item in fed}
        return set()

    def _fed(self, mounted: MountedHead, computed: Computed, states: Tensor) -> Fed | None:
        """Input of a head from one session; None: nothing, or it has missed something before."""
        session, start, stop = computed.session, computed.start, computed.session.num_computed
        followed = mounted.sessions.get(session.session_id)
        if followed is None:
            return None
        assert self._features is not None
        if not mounted.every_position:
            if computed.logits_row < 0:
                return None
            followed.attachment = session.attachment
            every = self._features.every_position
            last = computed.row + stop - 1 - start if every else computed.logits_row + computed.num_accepted
            rows = self._columns(mounted, states[last : last + 1])
            return Fed(session.session_id, stop - 1, (session.tokens[stop],), rows, session.pages)
        if followed.attachment != session.attachment:
            followed.attachment, followed.num_fed = session.attachment, 0
        rows = self._columns(mounted, states[computed.row : computed.row + stop - start])
        if start == session.num_attached > 0:  # the session that computed these pages had the state that is missing
            page = session.pages[start // PAGE_SIZE - 1]
            if self._page_states is None or not mounted.pages.issuperset(session.pages[: start // PAGE_SIZE]):
                return None
            rows = torch.cat((self._columns(mounted, self._page_states[page : page + 1]), rows))
            start -= 1
        elif start != followed.num_fed:
            return None
        return Fed(session.session_id, start, tuple(session.tokens[start + 1 : stop + 1]), rows, session.pages)

    def _columns(self, mounted: MountedHead, states: Tensor) -> Tensor:
        assert self._features is not None
        num = len(self._features.boundaries)
        if mounted.columns == tuple(range(num)):
            return states
        parts = states.chunk(num, dim=-1)
        return torch.cat([parts[i] for i in mounted.columns], dim=-1)

    def keep_page_states(self, computed: Sequence[Computed], states: Tensor) -> None:
        """Copies the states of the last positions of pages that have become full."""
        assert self._features is not None
        if not self._features.every_position:
            return
        if self._page_states is None:
            self._page_states = states.new_zeros(self._num_pages, states.shape[1])
        for each in computed:
            first = each.start // PAGE_SIZE
            for index, page in enumerate(_full_pages(each), first):
                self._page_states[page] = states[each.row + (index + 1) * PAGE_SIZE - 1 - each.start]


def _full_pages(computed: Computed) -> list[int]:
    """The pages that a step has filled up for a session."""
    session = computed.session
    return session.pages[computed.start // PAGE_SIZE : session.num_computed // PAGE_SIZE]
