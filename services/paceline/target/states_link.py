"""Hidden states for a head in the draft pool: fused here, kept on the KV pages, sent after outcomes.

    forward ─▶ verify ─▶ commit ─▶ send ─▶ fuse, keep on the pages ─▶ States, up to the limit of a step

A fused state is one vector per token: exactly the head's first result, and a third or a fifth of its input. It is
stored on the session's own pages like keys and values, in a layer of its own. So a prompt with a cached prefix has its
states, and a re-opened draft gets all of them, with a context of any length. Chunks are small and a step sends few of
them, so that no outcome waits long for the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from paceline.core.deferred import upload
from paceline.messages import STATE_BYTES, States
from paceline.model.features import Features
from paceline.model.kv_cache import KVCache, LayerSpec, flat_rows
from paceline.target.heads.feeding import Computed, full_pages
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE

STEP_BYTES = 8 << 20
"""States that one step sends, of all sessions together; one chunk of one position is sent in any case."""


@dataclass(slots=True)
class _Followed:
    """State of one session: kept and sent."""

    attachment: int = -1
    """The session's pages that it speaks of (``TargetSession.attachment``)."""
    num_held: int = 0
    """Positions [0, num_held) were found with their states on shared pages."""
    first: int = 0
    """First position that the session itself computed; positions between have no states."""
    stop: int = 0
    """Positions below it have been computed."""
    draft_epoch: int = -1
    num_sent: int = 0
    """Positions below it have been sent to the draft of ``draft_epoch``, or have no states."""


class StatesLink:
    """The states of one target for its drafts. Owned by the engine's thread."""

    def __init__(self, fuse: Callable[[Tensor], Tensor], wanted: Features, width: int) -> None:
        """Makes a link.

        Args:
            fuse: the concatenated states of the boundaries -> [..., width].
            wanted: the boundaries, in the order of ``fuse``'s input.
            width: numbers of a fused state.
        """
        self.wanted, self.width = wanted, width
        self.num_sent = 0
        """Positions whose states were sent; a position that is sent again counts again."""
        self.num_bytes = 0
        """Bytes of the states that were sent, repeats included."""
        self._fuse = fuse
        self._columns: tuple[int, ...] = ()
        self._num_boundaries = 0
        self._pool = torch.empty(0)
        self._holds: set[int] = set()
        """Full pages with states in all rows."""
        self.sessions: dict[str, _Followed] = {}

    @property
    def layer(self) -> LayerSpec:
        """Size of the states that the link keeps per token on the target's pages."""
        return LayerSpec(1, self.width, 0)

    def bind(self, cache: KVCache, states: Features) -> None:
        """Binds the link to its layer of the target's cache. ``states``: returned by the target's steps."""
        assert states.every_position
        self._columns, self._num_boundaries = (
            tuple(states.boundaries.index(b) for b in self.wanted.boundaries),
            len(states.boundaries),
        )
        self._pool = cache.keys[cache.add_layers([self.layer])].flatten(0, 2)

    def keep(self, computed: Sequence[Computed], states: Tensor) -> None:
        """Fuses the states of a step's computed rows, and stores them on the sessions' pages."""
        source: list[int] = []
        target: list[int] = []
        for each in computed:
            session, start, stop = each.session, each.start, each.session.num_computed
            followed = self.sessions.setdefault(session.session_id, _Followed())
            if followed.attachment != session.attachment:
                shared = session.pages[: session.num_attached // PAGE_SIZE]
                held = len(list(takewhile(self._holds.__contains__, shared))) * PAGE_SIZE
                followed.attachment, followed.num_held, followed.first = session.attachment, held, start
            followed.stop = stop
            source += range(each.row, each.row + stop - start)
            target += flat_rows(session.pages, start, stop)
            self._holds.update(page for page, rows in full_pages(each) if rows.start >= followed.first)
        if source:
            rows = self._of_boundaries(states[upload(source, states.device)])
            self._pool[upload(target, self._pool.device)] = self._fuse(rows).to(self._pool.dtype)

    def take(self, sessions: Iterable[TargetSession]) -> list[States]:
        """Returns the messages of one step: states that sessions' drafts lack, sessions that lack the fewest first."""
        lacking = []
        for session in sessions:
            followed = self.sessions.get(session.session_id)
            if followed is None or not session.draft_available or followed.attachment != session.attachment:
                continue
            if followed.draft_epoch != session.draft_epoch:
                followed.draft_epoch, followed.num_sent = session.draft_epoch, 0
            if followed.num_sent < min(followed.stop, session.num_computed):  # it has no pages while it is preempted
                lacking.append((followed.stop - followed.num_sent, session, followed))
        lacking.sort(key=lambda each: each[0])
        left = max(1, STEP_BYTES // (STATE_BYTES * self.width))
        chunks: list[tuple[TargetSession, range]] = []
        for _, session, followed in lacking:
            for rows in _chunks(followed, left):
                chunks.append((session, rows))
                followed.num_sent = rows.stop
                left -= len(rows)
        return self._packed(chunks)

    def close(self, session: TargetSession) -> None:
        """Forgets a session. States of the step with which it ends were not kept, so its last pages lack some."""
        followed = self.sessions.pop(session.session_id, None)
        known = followed is not None and followed.attachment == session.attachment
        num_rows = followed.stop if followed is not None and known else 0
        self._holds.difference_update(session.pages[max(session.num_attached, num_rows) // PAGE_SIZE :])

    def _of_boundaries(self, states: Tensor) -> Tensor:
        """The columns of the boundaries that are fused."""
        size = states.shape[1] // max(1, self._num_boundaries)
        if self._columns == tuple(range(self._num_boundaries)):
            return states
        return torch.cat([states[:, i * size : (i + 1) * size] for i in self._columns], 1)

    def _packed(self, chunks: Sequence[tuple[TargetSession, range]]) -> list[States]:
        if not chunks:
            return []
        rows = [row for session, chunk in chunks for row in flat_rows(session.pages, chunk.start, chunk.stop)]
        gathered = self._pool[upload(rows, self._pool.device)].to(torch.bfloat16).cpu()
        data = gathered.view(torch.int16).numpy().tobytes()
        messages, at = [], 0
        for session, chunk in chunks:
            size = STATE_BYTES * self.width * len(chunk)
            packed = data[at : at + size]
            at += size
            messages.append(States(session.session_id, session.draft_epoch, chunk.start, self.width, packed))
        self.num_sent += len(rows)
        self.num_bytes += len(data)
        return messages


def _chunks(followed: _Followed, most: int) -> list[range]:
    """Positions with states to send now, page by page, at most ``most``."""
    found: list[range] = []
    for start, stop in ((0, followed.num_held), (followed.first, followed.stop)):
        at = max(start, followed.num_sent)
        while at < stop and most > 0:
            end = min(stop, at + most, (at // PAGE_SIZE + 1) * PAGE_SIZE)
            found.append(range(at, end))
            most -= end - at
            at = end
    return found
