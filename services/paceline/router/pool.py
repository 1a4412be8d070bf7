"""Where the replicas of one kind are, and which of them a session goes to. No Ray, no gRPC, no clock.

A pool says which replicas take new sessions; a replica that has left it is draining: what it still serves goes on
until it is moved. A lease tells whoever runs the pool that a session occupies a replica.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.types import PAGE_SIZE

_REMEMBERED_PIECES = 65536
_MORE_LOAD = 2
"""How many sessions more than the least loaded replica one may have and still be chosen for its cached prefix."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes sessions."""

    replica_id: str
    address: str
    """``host:port`` of its internal gRPC server."""
    node: str = ""


class Lease(Protocol):
    """A session's place on a replica, as the control plane sees it."""

    def close(self) -> None:
        """Gives the place back. Idempotent; never blocks."""
        ...


class Pool(Protocol):
    """The replicas of one kind."""

    name: str

    def members(self) -> Mapping[str, Member]:
        """Those that take sessions now, by replica id."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls ``changed`` on the running event loop whenever ``members`` has changed."""
        ...

    def lease(self, session_id: str, replica_id: str | None) -> Lease:
        """Registers a session. None: it waits for any replica, which wakes a pool that is scaled to zero."""
        ...


class _NoLease:
    def close(self) -> None:
        pass


class StaticPool:
    """A fixed set of replicas, or one that the owner changes by hand."""

    def __init__(self, name: str, members: Iterable[Member] = ()) -> None:
        self.name = name
        self._members = {member.replica_id: member for member in members}
        self._watchers: list[Callable[[], None]] = []

    def members(self) -> Mapping[str, Member]:
        """See Pool."""
        return self._members

    def watch(self, changed: Callable[[], None]) -> None:
        """See Pool."""
        self._watchers.append(changed)

    def lease(self, session_id: str, replica_id: str | None) -> Lease:
        """See Pool."""
        return _NoLease()

    def set_members(self, members: Iterable[Member]) -> None:
        """Replaces the members. Must be called on the event loop of those who watch."""
        self._members = {member.replica_id: member for member in members}
        for changed in self._watchers:
            changed()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica with room, as the choice sees it."""

    replica_id: str
    num_sessions: int
    max_sessions: int


class PrefixIndex:
    """Which replica has probably cached how much of a prompt: what was sent there, least recently used forgotten."""

    def __init__(self, max_pieces: int = _REMEMBERED_PIECES) -> None:
        self._max_pieces = max_pieces
        self._pieces: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica_id: str, token_ids: Sequence[int]) -> None:
        """The replica has computed this context."""
        known = self._pieces.setdefault(replica_id, OrderedDict())
        for digest in _chain(token_ids):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._max_pieces:
            known.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        self._pieces.pop(replica_id, None)

    def match(self, replica_id: str, token_ids: Sequence[int]) -> int:
        """Tokens of the prompt that the replica has probably cached."""
        known = self._pieces.get(replica_id)
        if not known:
            return 0
        return PAGE_SIZE * sum(1 for _ in itertools.takewhile(known.__contains__, _chain(token_ids)))


def _chain(token_ids: Sequence[int]) -> Iterable[int]:
    """One number for each piece that fills a KV page of the targets; it stands for the prompt up to its end."""
    digest = 0
    for end in range(PAGE_SIZE, len(token_ids) + 1, PAGE_SIZE):
        digest = hash((digest, tuple(token_ids[end - PAGE_SIZE : end])))
        yield digest


def choose(candidates: Sequence[Candidate], cached_tokens: Mapping[str, int] | None = None) -> Candidate | None:
    """The replica for a session: the longest cached prefix unless that one is busier by far, else the least loaded.

    None: no candidate has room.
    """
    free = [c for c in candidates if c.num_sessions < c.max_sessions]
    if not free:
        return None
    least = min(free, key=lambda c: c.num_sessions / c.max_sessions)
    if cached_tokens:
        near = [c for c in free if c.num_sessions <= least.num_sessions + _MORE_LOAD]
        best = max(near, key=lambda c: (cached_tokens.get(c.replica_id, 0), -c.num_sessions / c.max_sessions))
        if cached_tokens.get(best.replica_id, 0) > cached_tokens.get(least.replica_id, 0):
            return best
    return least
