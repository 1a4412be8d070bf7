"""The router: from a request to its stream of text, over any number of target and draft replicas.

    generate ─▶ admit (bounded queue) ─▶ choose a target and a draft ─▶ Session relays ─▶ chunks
                     ▲                        ▲ lost, hung, draining: re-opened elsewhere from the tokens
                     └── room, replicas up ───┘

One event loop owns everything here: nothing needs a lock, and between two awaits the state is consistent. A session
has at most one target and one draft; a draft is expendable, and a session whose target is lost is *homeless* until
another one takes it over. Refuses to know Ray, protobuf and how replicas are found (``pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.checkpoint.tokenizer import Tokenizer, encode_prompt
from paceline.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PacelineError,
    ResourceExhaustedError,
)
from paceline.messages import CloseSession, SpeculationWanted, ToDraft, ToTarget
from paceline.metrics.router import RouterMetrics
from paceline.router.link import DRAFT, TARGET, Link, StreamKind, stop_links
from paceline.router.pool import Candidate, Lease, Member, Pool, PrefixIndex, choose
from paceline.router.session import Actions, Session, append_commits
from paceline.types import PAGE_SIZE, Chunk, ReplicaStatus, Request, Result, RouterView

log = logging.getLogger(__name__)

_TICK_S = 0.1
_LONG_PROMPT = 16384
"""Characters from which on a prompt is tokenised beside the event loop."""
_MAX_TARGET_FAILURES = 2
"""A session that this many targets have failed is itself at fault."""
_MAX_RECENT_S = 60.0


class Settings(Protocol):
    """What the router is told (``config.RouterConfig`` has it)."""

    @property
    def max_queued_requests(self) -> int:
        """Requests that may wait for room."""
        ...

    @property
    def recovery_timeout_s(self) -> float:
        """How long a request waits for a target when none is up."""
        ...

    @property
    def request_timeout_s(self) -> float | None:
        """Longest time of a request; None: no limit."""
        ...

    @property
    def draft_timeout_s(self) -> float:
        """Silence after which a draft counts as hung."""
        ...

    @property
    def target_timeout_s(self) -> float:
        """Silence after which a target counts as hung."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router knows of the target."""

    tokenizer: Tokenizer
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class _Live:
    """A request in progress."""

    request: Request
    session: Session
    token_ids: tuple[int, ...]
    arrived_s: float
    target: Link | None = None
    draft: Link | None = None
    target_lease: Lease | None = None
    draft_lease: Lease | None = None
    target_failures: int = 0
    homeless_since: float | None = None
    opened: bool = False
    chunks: deque[Chunk] = field(default_factory=deque)
    result: Result | None = None
    error: PacelineError | None = None
    last_chunk_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class _Side:
    """The replicas of one kind: their links, and which of them take sessions."""

    def __init__(self, pool: Pool, make_link: Callable[[Member], Link]) -> None:
        self.pool = pool
        self.links: dict[str, Link] = {}
        self._make_link = make_link

    def sync(self) -> list[Link]:
        """Links to new members; returns those to replicas that are members no more and serve nothing."""
        members = self.pool.members()
        gone = [link for rid, link in self.links.items() if rid not in members and not (link.up and link.sessions)]
        for link in gone:
            del self.links[link.member.replica_id]
        for replica_id, member in members.items():
            if replica_id not in self.links:
                self.links[replica_id] = link = self._make_link(member)
                link.start()
        return gone

    def open_links(self) -> list[Link]:
        """Those that are up and take sessions."""
        members = self.pool.members()
        return [link for rid, link in self.links.items() if link.up and rid in members]

    def is_draining(self, link: Link) -> bool:
        """Whether its replica takes no sessions any more."""
        return link.member.replica_id not in self.pool.members()

    def statuses(self) -> list[ReplicaStatus]:
        """What the replicas that are up last said."""
        return [link.status for link in self.links.values() if link.up and link.status is not None]


class Router:
    """Serves requests; see the module's docstring."""

    def __init__(
        self,
        facts: ModelFacts,
        targets: Pool,
        drafts: Pool | None,
        settings: Settings,
        *,
        metrics: RouterMetrics,
        token: str = "",
        draft_delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``token``: what the replicas ask for. ``draft_delay_s``: added to each way of draft links (experiments)."""
        self.facts = facts
        self.router_id = secrets.token_hex(4)
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._live: dict[str, _Live] = {}  # by request id
        self._queue: deque[_Live] = deque()
        self._homeless: list[_Live] = []
        self._touched: dict[str, _Live] = {}
        self._prefixes = PrefixIndex()
        self._finished: deque[float] = deque(maxlen=64)
        self._num_opened = 0
        self._demand: Lease | None = None
        self._had_drafts = False
        self._ticker: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._started_s = clock()

        def link(kind: StreamKind, **options: Any) -> Callable[[Member], Link]:
            return lambda member: Link(member, kind, on_change=self._on_link, token=token, **options)

        self._targets = _Side(targets, link(TARGET, on_messages=self._from_target, silence_s=settings.target_timeout_s))
        to_draft = link(
            DRAFT,
            on_messages=self._from_draft,
            on_latency=metrics.draft_link,
            silence_s=settings.draft_timeout_s,
            delay_s=draft_delay_s,
        )
        self._drafts = None if drafts is None else _Side(drafts, to_draft)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects to the replicas; requests may come at once and wait for them."""
        for side in self._sides():
            side.pool.watch(self._settle)
        self._settle()
        self._ticker = asyncio.create_task(self._tick(), name="paceline-router-tick")

    async def stop(self) -> None:
        """Fails what is in progress and ends all streams."""
        if self._ticker is not None:
            self._ticker.cancel()
        for live in list(self._live.values()):
            self._fail(live, EngineError("the router is being stopped"))
        if self._demand is not None:
            self._demand.close()
        await stop_links([link for side in self._sides() for link in side.links.values()])
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _sides(self) -> list[_Side]:
        return [self._targets] if self._drafts is None else [self._targets, self._drafts]

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Chunk | Result, None]:
        """Chunks as they are decided, then the Result. Leaving the generator frees the session everywhere.

        Raises InvalidRequestError, ResourceExhaustedError (the queue is full), EngineError (no target).
        """
        live = await self._enter(request)
        try:
            await self._admission(live)
            while True:
                while live.chunks:
                    yield live.chunks.popleft()
                if live.error is not None:
                    self._metrics.failed(type(live.error).__name__)
                    raise live.error
                if live.result is not None:
                    yield live.result
                    return
                live.changed.clear()
                await live.changed.wait()
        finally:
            self._leave(live)

    def cancel(self, request_id: str) -> bool:
        """Ends a request: its stream closes with what has arrived, finish reason ``abort``. False: not here."""
        live = self._live.get(request_id)
        if live is None or live.result is not None or live.error is not None:
            return False
        if live in self._queue:
            self._queue.remove(live)
        self._apply(live, live.session.cancel())
        live.admitted.set()
        return True

    @property
    def num_running(self) -> int:
        """Requests that have been opened on a target."""
        return len(self._live) - len(self._queue)

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether a request would be served now."""
        return bool(self._targets.open_links())

    def statuses(self) -> Mapping[str, list[ReplicaStatus]]:
        """What the replicas said last, by kind."""
        return {side.pool.name: side.statuses() for side in self._sides()}

    def view(self) -> RouterView:
        """What is seen here of the service."""
        may = [live.session for live in self._live.values() if live.opened and live.session.speculates]
        may = [session for session in may if not session.finished]
        return RouterView(
            members={side.pool.name: tuple(side.pool.members()) for side in self._sides()},
            speculating=len(may),
            drafting=sum(session.draft_available or session.wants_draft for session in may),
        )

    async def _enter(self, request: Request) -> _Live:
        if request.request_id in self._live:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in progress: each needs its own")
        facts, arrived_s = self.facts, self._clock()
        args = (facts.tokenizer, request.prompt, request.sampling.max_tokens, facts.max_model_len)
        if isinstance(request.prompt, str) and len(request.prompt) > _LONG_PROMPT:
            token_ids = await asyncio.to_thread(encode_prompt, *args)
        else:
            token_ids = encode_prompt(*args)
        request.sampling.check_vocabulary(facts.tokenizer.vocab_size)
        self._check_room(len(token_ids) + request.sampling.max_tokens)
        self._num_opened += 1
        session = Session(
            f"{self.router_id}.{self._num_opened}",
            token_ids,
            request.sampling,
            request.speculation,
            decode=facts.tokenizer.decode,
            stop=request.stop,
            eos_token_ids=facts.eos_token_ids,
            clock=self._clock,
        )
        if request.request_id in self._live:  # the same one came while this was tokenised
            raise InvalidRequestError(f"request_id {request.request_id!r} is in progress: each needs its own")
        live = _Live(request, session, token_ids, arrived_s)
        self._live[request.request_id] = live
        return live

    def _check_room(self, num_tokens: int) -> None:
        pages = [s.kv_pages for s in self._targets.statuses() if s.kv_pages]
        if pages and num_tokens > PAGE_SIZE * max(pages):
            raise InvalidRequestError(
                f"prompt and max_tokens need {num_tokens} tokens of KV, the targets hold {PAGE_SIZE * max(pages)}: "
                "shorten the prompt or lower max_tokens"
            )

    async def _admission(self, live: _Live) -> None:
        self._queue.append(live)
        self._place_queue()
        if not live.admitted.is_set():
            if len(self._queue) > self._settings.max_queued_requests:
                self._queue.remove(live)
                self._metrics.rejected("queue_full")
                raise ResourceExhaustedError(
                    f"{self.num_running - 1} requests are running and {len(self._queue)} are queued: at most "
                    f"{self._settings.max_queued_requests} may wait",
                    retry_after_s=self._expected_wait_s(),
                )
            await live.admitted.wait()

    def _expected_wait_s(self) -> float:
        """Until a place in the queue is free: the mean time between the last finishes."""
        times = self._finished
        if len(times) < 2 or self._clock() - times[0] > _MAX_RECENT_S:
            return 1.0
        return min(max((times[-1] - times[0]) / (len(times) - 1), 0.05), 30.0)

    def _leave(self, live: _Live) -> None:
        if live in self._queue:
            self._queue.remove(live)
        if live.result is None and live.error is None:
            self._apply(live, live.session.cancel())
        self._release(live)
        if dropped := live.session.relay.dropped:
            self._metrics.dropped("relay", dropped)
        del self._live[live.request.request_id]
        self._finished.append(self._clock())
        self._settle()

    # -- placing -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Brings sessions and replicas together: after a change of members, links or room."""
        for side in self._sides():
            for link in side.sync():
                self._prefixes.forget(link.member.replica_id)
                self._close(link)
        for live in list(self._homeless):
            self._rehome(live, "failover")
        for link in [
            link for link in self._targets.links.values() if link.sessions and self._targets.is_draining(link)
        ]:
            for live in list(link.sessions.values()):
                self._rehome(live, "drain")
        self._place_queue()
        self._give_drafts()
        if self._drafts is not None:
            self._metrics.draft_replicas(sum(link.up for link in self._drafts.links.values()))
        self._metrics.sessions(len(self._queue), self.num_running, len(self._homeless))

    def _place_queue(self) -> None:
        while self._queue:
            live = self._queue[0]
            link = self._choose_target(live)
            if link is None:
                break
            self._queue.popleft()
            self._open(live, link)
        if (self._queue or self._homeless) and not self._targets.pool.members():
            self._demand = self._demand or self._targets.pool.lease(f"{self.router_id}.demand", None)
        elif self._demand is not None:
            self._demand.close()
            self._demand = None

    def _open(self, live: _Live, link: Link) -> None:
        queue_s = self._clock() - live.arrived_s
        self._metrics.admitted(queue_s)
        live.opened = True
        draft = self._choose_draft(live) if live.session.speculates and link.draft_wanted else None
        self._attach_target(live, link)
        if draft is not None:
            self._attach_draft(live, draft)
        actions = live.session.open(draft is not None, draft_wanted=link.draft_wanted, queue_s=queue_s)
        self._apply(live, actions)
        live.admitted.set()

    def _rehome(self, live: _Live, reason: str) -> None:
        """Continues a session on another target, if there is one with room."""
        link = self._choose_target(live)
        if link is None:
            return
        session, old = live.session, live.target
        self._release_target(live)
        if live in self._homeless:
            self._homeless.remove(live)
            live.homeless_since = None
        if old is not None:
            old.send([CloseSession(session.session_id, session.target_epoch)])
        self._attach_target(live, link)
        self._metrics.moved(reason)
        log.info("session goes on at target %s (%s)", link.member.replica_id, reason,
                 extra={"request_id": live.request.request_id})  # fmt: skip
        self._apply(live, session.reopen_target())

    def _choose_target(self, live: _Live) -> Link | None:
        links = {link.member.replica_id: link for link in self._targets.open_links() if link is not live.target}
        if not links:
            return None
        cached = {rid: self._prefixes.match(rid, live.token_ids) for rid in links} if len(links) > 1 else None
        chosen = choose([Candidate(rid, link.load, link.max_sessions) for rid, link in links.items()], cached)
        return None if chosen is None else links[chosen.replica_id]

    def _choose_draft(self, live: _Live) -> Link | None:
        if self._drafts is None:
            return None
        links = {link.member.replica_id: link for link in self._drafts.open_links() if link is not live.draft}
        chosen = choose([Candidate(rid, link.load, link.max_sessions) for rid, link in links.items()])
        return None if chosen is None else links[chosen.replica_id]

    def _give_drafts(self) -> None:
        """Opens sessions that have no draft, or whose draft drains, on one that is up."""
        open_links = [] if self._drafts is None else self._drafts.open_links()
        if open_links and not self._had_drafts:
            # What targets said of drafts that are gone is no reason to do without these: they judge for themselves.
            for target in self._targets.links.values():
                target.draft_wanted = True
        self._had_drafts = bool(open_links)
        if self._drafts is None or not open_links:
            return
        if all(link.load >= link.max_sessions for link in open_links):
            return
        for live in self._live.values():
            if not live.opened or live.session.finished or live.target is None:
                continue
            drains = live.draft is not None and self._drafts.is_draining(live.draft)
            if drains or (live.draft is None and live.session.wants_draft):
                self._give_draft(live)

    def _give_draft(self, live: _Live) -> None:
        link = self._choose_draft(live)
        if link is None:
            return
        if live.draft is not None:
            self._apply(live, live.session.leave_draft())
            self._release_draft(live)
        self._attach_draft(live, link)
        self._metrics.draft_reopened("opened")
        self._apply(live, live.session.on_draft_up())

    def _attach_target(self, live: _Live, link: Link) -> None:
        session_id = live.session.session_id
        live.target = link
        link.sessions[session_id] = live
        live.target_lease = self._targets.pool.lease(session_id, link.member.replica_id)
        self._prefixes.add(link.member.replica_id, live.token_ids)

    def _attach_draft(self, live: _Live, link: Link) -> None:
        assert self._drafts is not None
        live.draft = link
        link.sessions[live.session.session_id] = live
        live.draft_lease = self._drafts.pool.lease(live.session.session_id, link.member.replica_id)

    def _release_target(self, live: _Live) -> None:
        if live.target is not None:
            live.target.sessions.pop(live.session.session_id, None)
            live.target = None
        if live.target_lease is not None:
            live.target_lease.close()
            live.target_lease = None

    def _release_draft(self, live: _Live) -> None:
        if live.draft is not None:
            live.draft.sessions.pop(live.session.session_id, None)
            live.draft = None
        if live.draft_lease is not None:
            live.draft_lease.close()
            live.draft_lease = None

    def _release(self, live: _Live) -> None:
        self._release_target(live)
        self._release_draft(live)
        if live in self._homeless:
            self._homeless.remove(live)

    # -- what can happen to replicas -----------------------------------------------------------------------

    def _on_link(self, link: Link) -> None:
        if link.kind is TARGET:
            if not link.up:
                self._prefixes.forget(link.member.replica_id)  # its cache is gone, or will not be ours
                for live in list(link.sessions.values()):
                    self._lose_target(live)
        elif not link.up:
            for live in list(link.sessions.values()):
                self._release_draft(live)  # it forgets the session by itself: the stream has ended
                self._apply(live, live.session.on_draft_down(link.reason))
        self._settle()

    def _lose_target(self, live: _Live) -> None:
        self._release_target(live)
        if live not in self._homeless:
            self._homeless.append(live)
            live.homeless_since = self._clock()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            oldest = self._clock() - self._settings.recovery_timeout_s
            for live in [live for live in self._homeless if (live.homeless_since or 0.0) < oldest]:
                self._fail(live, EngineError(self._no_target("the target was lost and")))
            if not self._targets.open_links():
                for live in [live for live in self._queue if live.arrived_s < oldest]:
                    self._fail(live, EngineError(self._no_target("")))
            if (limit_s := self._settings.request_timeout_s) is not None:
                for live in [live for live in self._live.values() if live.arrived_s < self._clock() - limit_s]:
                    self._fail(live, DeadlineExceededError(f"the request took longer than {limit_s:g} s"))

    def _no_target(self, what: str) -> str:
        reasons = "; ".join(f"{rid}: {link.reason}" for rid, link in self._targets.links.items() if not link.up)
        waited = f"no target replica was up for {self._settings.recovery_timeout_s:g} s"
        return f"{what} {waited}".strip() + (f" ({reasons})" if reasons else "")

    def _fail(self, live: _Live, error: PacelineError) -> None:
        if live.result is not None or live.error is not None:
            return
        if live in self._queue:
            self._queue.remove(live)
        actions = live.session.cancel()
        self._apply(live, Actions(to_target=actions.to_target, to_draft=actions.to_draft))
        live.error = error
        self._release(live)
        live.admitted.set()
        live.changed.set()

    def _close(self, link: Link) -> None:
        task = asyncio.create_task(link.stop())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- the relay -----------------------------------------------------------------------------------------

    def _from_target(self, link: Link, messages: Sequence[Any]) -> None:
        to_draft: dict[Link, list[ToDraft]] = {}
        to_target: list[ToTarget] = []
        for message in messages:
            live: _Live | None = link.sessions.get(message.session_id)
            if live is None:
                self._metrics.dropped("unknown", 1)
                continue
            draft = live.draft
            if isinstance(message, SpeculationWanted):
                link.draft_wanted = message.wanted
            actions = live.session.on_target(message)
            to_target += actions.to_target
            if draft is not None and actions.to_draft:
                append_commits(to_draft.setdefault(draft, []), actions.to_draft)
            if actions.target_lost is not None:
                self._target_failed(live, actions.target_lost)
            elif draft is None:
                if live.session.wants_draft:
                    self._give_draft(live)
            elif not live.session.draft_available:
                self._release_draft(live)
            self._touch(live)
        link.send(to_target)
        for draft, commits in to_draft.items():
            draft.send(commits)

    def _from_draft(self, link: Link, messages: Sequence[Any]) -> None:
        to_target: dict[Link, list[ToTarget]] = {}
        for message in messages:
            live: _Live | None = link.sessions.get(message.session_id)
            if live is None:
                self._metrics.dropped("unknown", 1)
                continue
            actions = live.session.on_draft(message)
            if live.target is not None and actions.to_target:
                to_target.setdefault(live.target, []).extend(actions.to_target)
            if not live.session.draft_available:
                self._release_draft(live)
        for target, nodes in to_target.items():
            target.send(nodes)

    def _target_failed(self, live: _Live, reason: str) -> None:
        live.target_failures += 1
        if live.target_failures >= _MAX_TARGET_FAILURES:
            self._fail(live, EngineError(f"the target failed the session: {reason}"))
            return
        log.warning("a target failed a session: %s", reason, extra={"request_id": live.request.request_id})
        self._lose_target(live)
        self._rehome(live, "session_failed")

    def _apply(self, live: _Live, actions: Actions) -> None:
        """Sends a session's messages and hands its text to the client."""
        if actions.to_target and live.target is not None:
            live.target.send(actions.to_target)
        if actions.to_draft and live.draft is not None:
            live.draft.send(actions.to_draft)
        if actions.chunks or actions.result is not None:
            self._deliver(live, actions)

    def _touch(self, live: _Live) -> None:
        """Its text is looked after when what is urgent has been sent."""
        if not self._touched:
            asyncio.get_running_loop().call_soon(self._digest)
        self._touched[live.session.session_id] = live

    def _digest(self) -> None:
        touched, self._touched = self._touched, {}
        for live in touched.values():
            if live.result is None and live.error is None:
                self._apply(live, live.session.digest())

    def _deliver(self, live: _Live, actions: Actions) -> None:
        now = self._clock()
        for chunk in actions.chunks:
            if chunk.round is not None:
                if not live.last_chunk_s:
                    self._metrics.first_token(now - live.arrived_s)
                gap_s = now - live.last_chunk_s if live.last_chunk_s else None
                self._metrics.round(chunk.round, len(chunk.token_ids), gap_s)
                live.last_chunk_s = now
            live.chunks.append(chunk)
        if actions.result is not None:
            live.result = actions.result
            self._metrics.finished(actions.result)
            self._release(live)
            asyncio.get_running_loop().call_soon(self._settle)  # there is room now
        live.changed.set()
