"""A head in the draft pool: ``HeadDrafter`` on KV pages of its own, fed over the stream from the target.

Its anchor is the last token whose state has come. To the head, later committed tokens are a path of nodes that happen
to be decided::

    position      0 .. num_fed-1   num_fed     num_fed+1 ..     num_tokens-1
    state         of the target    -           the head's own   -               the target's are on their way
    token         cached           its anchor  the lag          the anchor
                                               └── a path below its anchor, on which the leaves of the tree continue

So a late state costs one more recursion, and nothing else. When states come, the rows of their positions are computed
from them. Rows of committed tokens that were computed from guesses are dropped; undecided nodes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.protocol import Candidates, DrafterSessionError, Fed, Leaf, OfSessions, StatesDrafter, with_hole
from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache
from paceline.types import PAGE_SIZE, pages_for

MOST_LAG = 16
"""Committed tokens without the target's states that a session is drafted for; the states of more are waited for."""


@dataclass(slots=True)
class _Session:
    tokens: list[int]
    """The whole context."""
    node_ids: list[int]
    """Node id of each token; 0 for tokens that were in the context at ``open``."""
    num_opened: int
    num_fed: int = 0
    """Positions [0, num_fed) have rows of the target's states, or are holes."""
    coming: list[tuple[int, Tensor]] = field(default_factory=list)
    """States that have arrived and are not computed yet, in order, each with its first position."""
    pages: list[int] = field(default_factory=list)
    holes: tuple[range, ...] = ()
    live: set[int] = field(default_factory=set)
    """Expanded nodes that the head may have states of."""

    @property
    def num_known(self) -> int:
        """Positions [0, num_known) have arrived, or never will."""
        if not self.coming:
            return self.num_fed
        position, states = self.coming[-1]
        return position + len(states)

    @property
    def ready(self) -> bool:
        return self.num_fed >= max(1, self.num_opened - 1)

    def lag(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns ids and tokens of the nodes that were committed after the head's anchor."""
        first = self.num_fed + 1
        return tuple(self.node_ids[first:]), tuple(self.tokens[first:])


class RemoteHead(OfSessions[_Session]):
    """Implements ``paceline.drafters.protocol.StatesDrafter`` for every head whose features want every position."""

    def __init__(self, head: HeadDrafter, cache: KVCache, *, width: int, max_prefill_tokens: int, max_len: int) -> None:
        """Makes a drafter of a head that was loaded with ``fused``.

        Args:
            head: the head, on this machine.
            cache: pages with the layers of the head, and no others.
            width: numbers of one state.
            max_prefill_tokens: positions that one ``prefill`` computes.
            max_len: tokens of the longest context.
        """
        assert head.features.every_position
        self.kind, self.max_leaves, self.width = head.kind, head.max_leaves, width
        self._head, self.cache = head, cache
        self._max_prefill_tokens, self._max_len = max_prefill_tokens, max_len
        self.sessions: dict[str, _Session] = {}
        head.bind(cache, 0)

    @property
    def states(self) -> StatesDrafter:
        """This drafter."""
        return self

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Begins a session; refuses a context that the whole cache cannot hold."""
        self._require_room(len(token_ids))
        self.sessions[session_id] = _Session([*token_ids], [0] * len(token_ids), len(token_ids))
        self._head.open(session_id, token_ids[:1], sampler, salt)

    def feed(self, session_id: str, position: int, states: Tensor) -> int:
        """Keeps states until they are computed, which ``prefill`` and ``expand`` do."""
        session = self._session(session_id)
        if states.ndim != 2 or states.shape[1] != self.width or not len(states):
            raise DrafterSessionError(session_id, f"states are {list(states.shape)}: [positions, {self.width}] is read")
        stop, known = position + len(states), session.num_known
        if not known < stop < len(session.tokens):
            return -1
        own = self.cache.keys[0]
        session.coming.append((max(position, known), states[max(0, known - position) :].to(own.device, own.dtype)))
        return max(0, position - known)

    def awaits(self, session_id: str) -> bool:
        """True if states of committed positions are still to come."""
        session = self._session(session_id)
        return session.num_known < len(session.tokens) - 1

    def prefill(self) -> bool:
        """Computes states of sessions that are not ready; those without room for them wait."""
        waiting = {name: s for name, s in self.sessions.items() if s.coming and not s.ready}
        return self.compute_states(waiting, self._max_prefill_tokens)

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Returns the candidates of the leaves, from the states that have arrived; none for a session whose states lag
        too far.
        """
        named = {leaf.session_id: self._session(leaf.session_id) for leaf in leaves}
        while self.compute_states({name: s for name, s in named.items() if s.coming and s.ready}):
            pass
        for name, session in named.items():
            if session.ready and session.coming:
                raise DrafterSessionError(name, "no KV page is free for its states")
        own, usable = [], []
        for index, leaf in enumerate(leaves):
            ids, tokens = named[leaf.session_id].lag()
            if len(tokens) <= MOST_LAG:
                usable.append(index)
                own.append(Leaf(leaf.session_id, leaf.node_id, (*ids, *leaf.path_ids), (*tokens, *leaf.path)))
        self._catch_up(own)
        for leaf in own:
            named[leaf.session_id].live.add(leaf.node_id)
        found = [(usable, *self._head.expand(own)[:2])] if own else []
        return Candidates.of_some(len(leaves), found)

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Extends the context; the states of its tokens are still to come."""
        session = self._session(session_id)
        session.tokens += token_ids
        session.node_ids += node_ids
        session.live &= {*kept, *session.lag()[0]}
        self._require_room(len(session.tokens))

    def close(self, session_id: str) -> None:
        """Frees the session's pages."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            self._head.close(session_id)
            self.cache.release(session.pages)

    def check_integrity(self) -> None:
        """Asserts that every page is free or a session's, and that states are in order."""
        self.cache.check_integrity([session.pages for session in self.sessions.values()])
        self._head.check_integrity()
        for session in self.sessions.values():
            assert len(session.node_ids) == len(session.tokens)
            assert session.num_known < len(session.tokens)
            at = session.num_fed
            for position, states in session.coming:
                assert position >= at, "states overlap"
                at = position + len(states)

    def _require_room(self, num_tokens: int) -> None:
        room = min(self.cache.num_pages * PAGE_SIZE, self._max_len)
        if num_tokens > room:
            raise ResourceExhaustedError(f"the context has {num_tokens} tokens: the draft's cache holds {room}")

    def compute_states(self, sessions: dict[str, _Session], budget: int = 1 << 60) -> bool:
        """Computes states that have come, at most ``budget`` positions; False if there were none, or no room."""
        fed: list[Fed] = []
        for name, session in sessions.items():
            taken = self._next(session, budget)
            if taken is None:
                continue
            position, states = taken
            stop = position + len(states)
            try:
                session.pages += self.cache.allocate(max(0, pages_for(stop + 1) - len(session.pages)))
            except ResourceExhaustedError:
                session.coming.insert(0, (position, states))
                continue
            budget -= len(states)
            if position > session.num_fed:
                session.holes = with_hole(session.holes, range(session.num_fed + 1, position + 1))
            lag, _ = session.lag()
            count = stop - session.num_fed
            session.live.difference_update(lag)  # the new states make better ones
            self._head.advance(name, session.tokens[session.num_fed + 1 : stop + 1], lag[:count], [*session.live])
            session.num_fed = stop
            tokens = tuple(session.tokens[position + 1 : stop + 1])
            fed.append(Fed(name, position, tokens, states, session.pages, session.holes))
        self._head.feed(fed)
        return bool(fed)

    def _next(self, session: _Session, budget: int) -> tuple[int, Tensor] | None:
        """Removes and returns the next contiguous states, at most ``budget`` positions; None: there are none."""
        if budget <= 0 or not session.coming:
            return None
        first = stop = session.coming[0][0]
        parts: list[Tensor] = []
        while session.coming and session.coming[0][0] == stop and stop - first < budget:
            position, states = session.coming.pop(0)
            room = budget - (stop - first)
            if len(states) > room:
                session.coming.insert(0, (position + room, states[room:]))
                states = states[:room]
            parts.append(states)
            stop += len(states)
        return first, torch.cat(parts)

    def _catch_up(self, leaves: Sequence[Leaf]) -> None:
        """Makes states of the nodes above the leaves that have none: of committed tokens that were not predicted."""
        missing: dict[tuple[str, int], Leaf] = {}
        for leaf in leaves:
            live = self.sessions[leaf.session_id].live
            for depth, node in enumerate(leaf.path_ids[:-1]):
                if node not in live:
                    path = Leaf(leaf.session_id, node, leaf.path_ids[: depth + 1], leaf.path[: depth + 1])
                    missing[leaf.session_id, node] = path
        for depth in sorted({len(leaf.path) for leaf in missing.values()}):
            level = [leaf for leaf in missing.values() if len(leaf.path) == depth]
            self._head.continue_to(level)
            for leaf in level:
                self.sessions[leaf.session_id].live.add(leaf.node_id)
