"""Pools: where the replicas of one kind are. No Ray, no gRPC, no clock.

The members of a pool take new sessions; a replica that has left it is draining: its sessions go on until they are
migrated. A lease tells the manager of the pool that a session occupies a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


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
        """Ends the lease. Idempotent; never blocks."""
        ...


class Pool(Protocol):
    """The replicas of one kind that take sessions."""

    name: str
    wakes: bool
    """True if the pool may be scaled to zero, and a session that waits for any replica has one started."""

    def members(self) -> Mapping[str, Member]:
        """Returns the replicas that take sessions now, by replica id."""
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

    wakes = False

    def __init__(self, name: str, members: Iterable[Member] = ()) -> None:
        self.name = name
        self._members = {member.replica_id: member for member in members}
        self._watchers: list[Callable[[], None]] = []

    def members(self) -> Mapping[str, Member]:
        """Returns the current members, by replica id."""
        return self._members

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls ``changed`` whenever the members are replaced."""
        self._watchers.append(changed)

    def lease(self, session_id: str, replica_id: str | None) -> Lease:
        """Returns a lease that holds nothing: this pool is not scaled."""
        return _NoLease()

    def set_members(self, members: Iterable[Member]) -> None:
        """Replaces the members. Must be called on the watchers' event loop."""
        self._members = {member.replica_id: member for member in members}
        for changed in self._watchers:
            changed()
