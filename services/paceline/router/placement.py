"""Chooses the replicas of each session by load and cached prefix, and takes the leases. No gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from paceline.errors import EngineError
from paceline.router.admission import ActiveRequest
from paceline.router.pool import Lease, Member, Pool
from paceline.router.replica import DraftLink, ReplicaLink, TargetLink
from paceline.rpc import protocol
from paceline.types import PAGE_SIZE, ReplicaStatus

_REMEMBERED_PIECES = 65536
"""Pages of prompts that ``PrefixIndex`` remembers for each replica."""
_UPGRADE_S = 10.0
"""Seconds after which a client should repeat a request that only newer targets can serve."""
_TRIED_ELSEWHERE_S = 0.5
"""Seconds without suspected sessions for a target that has turned one away."""
_MORE_LOAD = 2
"""A replica may be chosen for its cached prefix or its nearness with at most this many sessions more than the least
loaded one."""
NUM_COMPARED = 4
"""Up to this number of replicas, the least loaded one is chosen; among more, the better of two at random."""
_RANDOM = Random()

AnyLink = TypeVar("AnyLink", bound=ReplicaLink[Any])


class LinkPool(Generic[AnyLink]):
    """The links to the replicas of one pool."""

    def __init__(self, pool: Pool, make_link: Callable[[Member], AnyLink]) -> None:
        self.pool = pool
        self.links: dict[str, AnyLink] = {}
        self._make_link = make_link

    def sync(self, tasks: asyncio.TaskGroup) -> list[AnyLink]:
        """Links to new members; stops and returns the links to former members that serve no session any more."""
        members = self.pool.members()
        gone = [link for rid, link in self.links.items() if rid not in members and not (link.up and link.sessions)]
        for link in gone:
            del self.links[link.member.replica_id]
            link.stop()
        for replica_id, member in members.items():
            if replica_id not in self.links:
                self.links[replica_id] = link = self._make_link(member)
                link.start(tasks)
        return gone

    def open_links(self) -> list[AnyLink]:
        """Returns the links that are up and whose replicas take sessions."""
        members = self.pool.members()
        return [link for rid, link in self.links.items() if link.up and rid in members]

    def is_draining(self, link: AnyLink) -> bool:
        """True if the link's replica takes no sessions any more."""
        return link.member.replica_id not in self.pool.members()

    def statuses(self) -> list[ReplicaStatus]:
        """Returns the latest status of each replica that is up."""
        return [link.status for link in self.links.values() if link.up and link.status is not None]

    def choose(
        self,
        current: AnyLink | None,
        gain: Callable[[str], int] | None = None,
        *,
        without: Iterable[AnyLink] = (),
    ) -> AnyLink | None:
        """Returns the best link except ``current`` and ``without``; None if no replica has room.

        ``gain``: savings of a replica, by its id, as ``choose`` weighs them.
        """
        not_these = [current, *without]
        links = {link.member.replica_id: link for link in self.open_links() if link not in not_these and link.has_room}
        gains = {rid: gain(rid) for rid in links} if gain is not None and len(links) > 1 else None
        chosen = choose([Candidate(rid, link.load, link.max_sessions) for rid, link in links.items()], gains)
        return None if chosen is None else links[chosen.replica_id]


class Placement:
    """Chooses targets and drafts for sessions, and records where each session is."""

    def __init__(
        self,
        targets: LinkPool[TargetLink],
        drafts: LinkPool[DraftLink] | None,
        router_id: str,
        *,
        trial_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``trial_s``: seconds within which routers notice that a target hangs. ``clock``: seconds."""
        self.targets, self.drafts = targets, drafts
        self._router_id, self._trial_s, self._clock = router_id, trial_s, clock
        self._on_trial: dict[TargetLink, ActiveRequest] = {}  # the session that each target tries
        self._tried_elsewhere: dict[TargetLink, float] = {}  # until when a target is taken to try another router's
        self._prefixes = PrefixIndex()
        self._demand: Lease | None = None  # wakes a target pool that is scaled to zero

    def sync(self, tasks: asyncio.TaskGroup) -> None:
        """Links to new members of both pools, and unlinks former ones."""
        for link in self.targets.sync(tasks):
            self.forget_prefixes(link)
        if self.drafts is not None:
            self.drafts.sync(tasks)

    def choose_target(self, active: ActiveRequest) -> TargetLink | None:
        """Returns another target for a session: by cached prefix, then by load; None if none has room.

        An orphaned session gets a full target while other routers hold every place: it is next in line there. Else
        those routers would take each place that becomes free. A session whose last target was lost is on trial. A
        target has at most one such session at a time: if that session is at fault, it is known and ends no other one. A
        target of an older Paceline gets no session that sets an option which it does not know. A session that moves
        waits for a target of the ``numerics`` of its last one while one is up: the others round differently.
        """
        never = self._never(active)
        link = self.best_target(active, [*never, *(self._trying() if _suspected(active) else ())])
        if link is None and active.orphaned_since is not None:
            links = [link for link in self.targets.open_links() if link not in never]
            if not any(link.sessions for link in links):
                return next((link for link in links if link.load == link.max_sessions), None)
        return link

    def best_target(self, active: ActiveRequest, without: Sequence[TargetLink]) -> TargetLink | None:
        """Returns the target with the most of a session's context in its cache unless it is far busier, else a lightly
        loaded one; None if none has room."""

        def num_cached(replica_id: str) -> int:
            return self._prefixes.match(replica_id, active.token_ids, active.request.cache_salt)

        return self.targets.choose(active.target, num_cached, without=without)

    def all_too_old(self, active: ActiveRequest) -> bool:
        """True if targets are up and none of them knows an option that the session sets."""
        links = self.targets.open_links()
        return bool(links) and len(self._too_old(active)) == len(links)

    def _never(self, active: ActiveRequest) -> list[TargetLink]:
        """Returns the targets that must not serve a session now, also if they have room."""
        return [*self._too_old(active), *self._unlike(active)]

    def _too_old(self, active: ActiveRequest) -> list[TargetLink]:
        needed = protocol.needed(active.session.sampling)
        return [link for link in self.targets.open_links() if link.protocol < needed]

    def _unlike(self, active: ActiveRequest) -> list[TargetLink]:
        """Returns the targets that round differently from a session's last one; none if there are no others."""
        links = self.targets.open_links()
        unlike = [link for link in links if active.numerics not in (None, link.numerics)]
        return unlike if len(unlike) < len(links) else []

    def _trying(self) -> list[TargetLink]:
        """Returns the targets that have a session on trial."""
        now = self._clock()
        ours = [
            link
            for link, active in self._on_trial.items()
            if active.losses.on_trial(active.session.context_len, now, self._trial_s)
        ]
        return ours + [link for link, until in self._tried_elsewhere.items() if now < until]

    def suspected_s(self, active: ActiveRequest) -> float:
        """Returns the seconds for which a target suspects a session that is opened now; 0: it does not."""
        return self._trial_s if _suspected(active) else 0.0

    def turned_away(self, active: ActiveRequest) -> None:
        """Records that a session's target refused it, since another router's session is on trial there."""
        if active.target is not None:
            self._tried_elsewhere[active.target] = self._clock() + _TRIED_ELSEWHERE_S
        self.release_target(active)

    def has_room(self, orphaned: Sequence[ActiveRequest]) -> bool:
        """True if a target has a place that no orphaned session waits for."""
        links = [link for link in self.targets.open_links() if link.has_room]
        num_free = sum(link.max_sessions - link.load for link in links)
        return num_free > sum(self.waits_for(active, links) for active in orphaned)

    def waits_for(self, active: ActiveRequest, links: Sequence[TargetLink]) -> bool:
        """True if a session may be served by one of the targets: by ``choose_target`` now, or after a trial there."""
        never = self._never(active)
        return any(link not in never for link in links)

    def choose_draft(self, active: ActiveRequest) -> DraftLink | None:
        """Returns another draft for a session: one on its target's node, then by load; None if none has room."""
        if self.drafts is None:
            return None
        links, node = self.drafts.links, active.target.member.node if active.target is not None else ""
        return self.drafts.choose(active.draft, lambda rid: int(node != "" and links[rid].member.node == node))

    def drafts_with_room(self) -> bool:
        """True if some draft takes one more session."""
        links = [] if self.drafts is None else self.drafts.open_links()
        return any(link.has_room for link in links)

    def attach_target(self, active: ActiveRequest, link: TargetLink) -> None:
        """Records that a session is served by a target from now on."""
        session = active.session
        active.target, active.numerics = link, link.numerics
        if _suspected(active):
            self._on_trial[link] = active
        active.losses.note_opened(session.context_len, self._clock())
        link.sessions[session.session_id] = session
        active.target_lease = self.targets.pool.lease(session.session_id, link.member.replica_id)
        self._prefixes.add(link.member.replica_id, active.token_ids, active.request.cache_salt)

    def attach_draft(self, active: ActiveRequest, link: DraftLink) -> None:
        """Records that a session is served by a draft from now on."""
        assert self.drafts is not None
        session = active.session
        active.draft = link
        link.sessions[session.session_id] = session
        active.draft_lease = self.drafts.pool.lease(session.session_id, link.member.replica_id)

    def release_target(self, active: ActiveRequest) -> None:
        """Records that a session has left its target. Idempotent."""
        if active.target is not None:
            active.target.sessions.pop(active.session.session_id, None)
            if self._on_trial.get(active.target) is active:
                del self._on_trial[active.target]
        if active.target_lease is not None:
            active.target_lease.close()
        active.target = active.target_lease = None

    def keep_pages(self, active: ActiveRequest, timeout_s: float) -> None:
        """Keeps the lease on a draining target that a session is about to leave, so that its KV pages can be read.

        The lease ends with ``release_pages``, at the latest after ``timeout_s`` seconds.
        """
        self.release_pages(active)
        lease, active.pages_lease, active.target_lease = active.target_lease, active.target_lease, None
        if lease is not None:
            asyncio.get_running_loop().call_later(timeout_s, lease.close)

    def release_pages(self, active: ActiveRequest) -> None:
        """Records that a session no longer needs the pages at the target that it has left. Idempotent."""
        if active.pages_lease is not None:
            active.pages_lease.close()
            active.pages_lease = None

    def release_draft(self, active: ActiveRequest) -> None:
        """Records that a session has left its draft. Idempotent."""
        if active.draft is not None:
            active.draft.sessions.pop(active.session.session_id, None)
        if active.draft_lease is not None:
            active.draft_lease.close()
        active.draft = active.draft_lease = None

    def forget_prefixes(self, link: TargetLink) -> None:
        """Forgets the prefix cache and the refusals of a target that is gone or was restarted."""
        self._tried_elsewhere.pop(link, None)
        self._prefixes.forget(link.member.replica_id)

    def demand_target(self, waiting: bool) -> None:
        """Holds a lease without a replica while requests wait and the target pool is empty: the pool then scales up."""
        if waiting and not self.targets.pool.members():
            self._demand = self._demand or self.targets.pool.lease(f"{self._router_id}.demand", None)
        elif self._demand is not None:
            self._demand.close()
            self._demand = None


def outdated(active: ActiveRequest) -> EngineError:
    """Returns the error of a session that uses an option which the targets with room do not support."""
    names = ", ".join(name for name in protocol.SINCE if getattr(active.session.sampling, name))
    error = EngineError(f"{names} is set: targets with room are of an older Paceline, which does not know it")
    error.retry_after_s = _UPGRADE_S
    return error


def _suspected(active: ActiveRequest) -> bool:
    return active.losses.suspected(active.session.context_len)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica and its load, as ``choose`` sees it."""

    replica_id: str
    num_sessions: int
    max_sessions: int


def choose(
    candidates: Sequence[Candidate], gains: Mapping[str, int] | None = None, random: Random = _RANDOM
) -> Candidate | None:
    """Returns the replica of the largest gain unless it is far busier, else a lightly loaded one; None if all are full.

    Of more than ``NUM_COMPARED`` the better of two random ones (Mitzenmacher, "The Power of Two Choices in Randomized
    Load Balancing", 2001). Routers learn of each other's sessions by heartbeats, so the least loaded replica would
    otherwise get the next sessions of all routers.

    Args:
        candidates: the replicas.
        gains: by replica: tokens of the prompt that it has cached, or 1 if it is near.
        random: draws the two.
    """
    free = [c for c in candidates if c.num_sessions < c.max_sessions]
    if not free:
        return None
    least = min(free, key=lambda c: c.num_sessions / c.max_sessions)
    if gains:
        like = [c for c in free if c.num_sessions <= least.num_sessions + _MORE_LOAD]
        best = max(like, key=lambda c: (gains.get(c.replica_id, 0), -c.num_sessions / c.max_sessions))
        if gains.get(best.replica_id, 0) > gains.get(least.replica_id, 0):
            return best
    return (
        least
        if len(free) <= NUM_COMPARED
        else min(random.sample(free, 2), key=lambda c: c.num_sessions / c.max_sessions)
    )


class PrefixIndex:
    """The prompt prefixes that each replica has probably cached, since they were sent there. Forgets the oldest first.

    The replicas' caches distinguish prefixes by salt, and so does the index.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, OrderedDict[int, None]] = {}

    def add(self, replica_id: str, token_ids: Sequence[int], salt: str = "") -> None:
        """Records that the replica has computed this context."""
        known = self._pieces.setdefault(replica_id, OrderedDict())
        for digest in page_hashes(token_ids, salt):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > _REMEMBERED_PIECES:
            known.popitem(last=False)

    def forget(self, replica_id: str) -> None:
        """Forgets a replica: it is gone, and its cache with it."""
        self._pieces.pop(replica_id, None)

    def match(self, replica_id: str, token_ids: Sequence[int], salt: str = "") -> int:
        """Returns the number of prompt tokens that the replica has probably cached."""
        known = self._pieces.get(replica_id)
        if not known:
            return 0
        return PAGE_SIZE * sum(1 for _ in itertools.takewhile(known.__contains__, page_hashes(token_ids, salt)))


def page_hashes(token_ids: Sequence[int], salt: str) -> Iterable[int]:
    """Yields one hash per full KV page; each covers the salt, and the prompt from its beginning to the page's end."""
    digest = hash(salt)
    for end in range(PAGE_SIZE, len(token_ids) + 1, PAGE_SIZE):
        digest = hash((digest, tuple(token_ids[end - PAGE_SIZE : end])))  # tokens [end - PAGE_SIZE, end)
        yield digest
