"""What a router knows of a replica: whether it is up, its load and its sessions. No gRPC, no processes.

``Link`` reaches a replica by a stream, ``local.link.WorkerLink`` an engine that this process runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from paceline.messages import ToDraft, ToTarget
from paceline.router.pool import Member
from paceline.router.relay import Relay
from paceline.router.session import Session
from paceline.types import UNSTATED_PROTOCOL, ReplicaStatus

Sent = TypeVar("Sent")


class ReplicaLink(Generic[Sent]):
    """A replica as one router sees it. All methods run on the router's event loop."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.up = False
        self.reason = "not connected yet"
        """Reason why the link is down."""
        self.status: ReplicaStatus | None = None
        """The replica's latest status."""
        self.num_others = 0
        """Sessions of other routers on the replica, as of the last heartbeat."""
        self.relay = Relay()
        """This router's sessions on the replica. Owned by the router."""
        self.most_with_drafts: int | None = None
        """The most sessions for which a target wants drafts, as it said last; None: any number. Owned by the router."""

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Comes up as soon as the replica is there, by tasks of the group."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the link. Idempotent; the router is not told."""
        raise NotImplementedError

    def send(self, messages: Sequence[Sent]) -> None:
        """Sends messages in order. Those of a link that is down are dropped: sessions are re-opened."""
        raise NotImplementedError

    @property
    def sessions(self) -> dict[str, Session]:
        """This router's sessions on the replica, by session id."""
        return self.relay.sessions

    @property
    def load(self) -> int:
        """Sessions on the replica: this router's, and other routers' as of the last heartbeat."""
        return len(self.sessions) + self.num_others

    @property
    def max_sessions(self) -> int:
        """Number of sessions that the replica serves at once; 0 before its first status."""
        return self.status.max_sessions if self.status is not None else 0

    @property
    def protocol(self) -> int:
        """Version of the protocol that the replica speaks, by its latest status."""
        return UNSTATED_PROTOCOL if self.status is None else self.status.protocol

    @property
    def numerics(self) -> str:
        """Digest of what decides the bits of the replica's logits, by its latest status; empty: not known."""
        return "" if self.status is None else self.status.numerics

    @property
    def has_room(self) -> bool:
        """True if the replica would serve one more session at once."""
        return self.load < self.max_sessions

    @property
    def crowded(self) -> bool:
        """True if a target has more sessions than it wants drafts for."""
        return self.most_with_drafts is not None and self.load > self.most_with_drafts


TargetLink: TypeAlias = ReplicaLink[ToTarget]
DraftLink: TypeAlias = ReplicaLink[ToDraft]

OnMessages: TypeAlias = Callable[[Any, Sequence[Any]], None]
"""Takes a link and what its replica has sent."""
OnChange: TypeAlias = Callable[[Any], None]
"""Takes a link that has come up, gone down, or has room where it had none, and the reverse."""
Connect: TypeAlias = Callable[[str, Member, OnMessages, OnChange], ReplicaLink[Any]]
"""Makes the link to a replica of a kind, which is started when it is a member of its pool."""
