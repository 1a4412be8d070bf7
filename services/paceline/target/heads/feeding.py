"""The input of heads: the states of a step, cut to each session's committed tokens.

A head whose features want every position is fed with each position once, in order. A session that shares pages with
another lacks the state of the last shared position, which the head's first row needs. So this state is kept for each
full page.

A paused head misses steps. Their states are not requested, so a pause costs nothing, but these states are lost. The
head goes on from the first step after the pause. The missed rows are a hole in the session's context, which the head
does not attend to. It depends mostly on the latest tokens, so its acceptance recovers within a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from paceline.drafters.protocol import Features, Fed
from paceline.target.heads.mounted import MountedHead
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Computed:
    """The rows that a step has computed for one session, after its outcome was committed."""

    session: TargetSession
    start: int
    """The first position computed; positions [start, session.num_computed) belong to committed tokens."""
    row: int
    """Row of its first token among all tokens of the step."""
    logits_row: int
    """Index of the session's first row among the rows with logits; -1: a prefill chunk, which has none."""
    num_accepted: int
    """Accepted draft tokens. The state after the last of them is at ``logits_row + num_accepted``."""


class Feeding:
    """Feeds the heads of one target."""

    def __init__(self, features: Features | None, num_pages: int) -> None:
        """``features``: the states that the target's steps return; None: none. ``num_pages``: of the target's
        KV cache.
        """
        self._features = features
        self._num_pages = num_pages
        self._page_states: Tensor | None = None
        """[num_pages, width]: of the last position of each full page. A session that shares a page lacks this state."""

    def feed(self, mounted: MountedHead, computed: Sequence[Computed], states: Tensor | None) -> bool:
        """Feeds one head with a step and returns True if it was fed with anything. ``states`` None: the head misses the
        step.
        """
        fed: list[Fed] = []
        if states is not None:
            fed = [item for each in computed if (item := self.fed_of(mounted, each, states)) is not None]
        served = mounted.feed(fed)
        if mounted.every_position:
            for each in computed:
                followed = mounted.sessions[each.session.session_id] if each.session.session_id in served else None
                for page, rows in full_pages(each):
                    if followed is None or any(do_overlap(hole, rows) for hole in followed.holes):
                        mounted.pages.discard(page)
                    else:
                        mounted.pages.add(page)
        return bool(fed)

    def fed_of(self, mounted: MountedHead, computed: Computed, states: Tensor) -> Fed | None:
        """Returns the input of a head from one session; None: there is none."""
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
            followed.attachment, followed.num_fed, followed.holes = session.attachment, 0, ()
        rows = self._columns(mounted, states[computed.row : computed.row + stop - start])
        next_row = followed.num_fed + 1
        if followed.num_fed == 0 and session.num_attached > 0:
            shared = session.pages[: session.num_attached // PAGE_SIZE]
            num_held = len(list(takewhile(mounted.pages.__contains__, shared)))
            next_row = max(1, num_held * PAGE_SIZE)
            if start == next_row and self._page_states is not None:
                # The session that computed these pages had the state that is missing.
                page = shared[-1]
                rows = torch.cat((self._columns(mounted, self._page_states[page : page + 1]), rows))
                start -= 1
        if next_row < start + 1:
            followed.miss(range(next_row, start + 1))
            mounted.stats.holes += 1
        tokens = tuple(session.tokens[start + 1 : stop + 1])
        return Fed(session.session_id, start, tokens, rows, session.pages, followed.holes)

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
            for index, (page, _) in enumerate(full_pages(each), first):
                self._page_states[page] = states[each.row + (index + 1) * PAGE_SIZE - 1 - each.start]


def full_pages(computed: Computed) -> list[tuple[int, range]]:
    """The pages that a step has filled up for a session, and the rows of its context on each."""
    session = computed.session
    indices = range(computed.start // PAGE_SIZE, session.num_computed // PAGE_SIZE)
    return [(session.pages[index], range(index * PAGE_SIZE, (index + 1) * PAGE_SIZE)) for index in indices]


def do_overlap(hole: range, rows: range) -> bool:
    """True if two ranges of rows have a row in common."""
    return hole.start < rows.stop and rows.start < hole.stop
