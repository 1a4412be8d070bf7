"""The router: from a request to its stream of text, over any number of target and draft replicas.

    generate ─▶ admit (bounded queue) ─▶ choose a target and a draft ─▶ Relay ─▶ chunks
                     ▲                        ▲ lost, hung, draining: re-opened elsewhere from the tokens
                     └── room, replicas up ───┘

One event loop owns everything here: nothing needs a lock, and between two awaits the state is consistent. A session
has at most one target and one draft; a draft is expendable, and a session whose target is lost is *orphaned* until it
is migrated to another one. Refuses to know Ray, protobuf and how replicas are found (``pool.py``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.config import RouterConfig
from paceline.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PacelineError,
    RequestInProgressError,
    RouterStoppedError,
)
from paceline.logs import unexpected
from paceline.messages import CloseSession, FromDraft, FromTarget, ToDraft, ToTarget
from paceline.metrics.router import RouterMetrics
from paceline.metrics.tracing import RequestSpans
from paceline.router.admission import ActiveRequest, Admission, TargetInfo
from paceline.router.link import streams
from paceline.router.losses import poisonous
from paceline.router.outlet import Outlet, Sink
from paceline.router.placement import LinkPool, Placement, outdated
from paceline.router.pool import Member, Pool
from paceline.router.relay import Outbox
from paceline.router.replica import Connect, DraftLink, TargetLink
from paceline.router.session import Actions
from paceline.security.certificates import Certificates
from paceline.types import Chunk, ReplicaStatus, Request, Result, RouterView, request_key

log = logging.getLogger(__name__)

TICK_S = 0.1
_HANGS_S = 10.0
"""A target that is taken out of its pool in a longer step is taken out because it hangs."""


class Router:
    """Serves requests on the replicas of two pools."""

    def __init__(
        self,
        info: TargetInfo,
        targets: Pool,
        drafts: Pool | None,
        config: RouterConfig,
        *,
        metrics: RouterMetrics,
        token: str = "",
        certificates: Certificates | None = None,
        connect: Connect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``connect`` makes the links; None: streams, where replicas ask for ``token`` and see ``certificates``."""
        self.info = info
        self.router_id = secrets.token_hex(4)
        self._config, self.metrics, self._clock = config, metrics, clock
        self._connect = connect or streams(config, metrics, token, certificates)
        self.closed: PacelineError | None = None
        """The error of all requests that come; None: they are served."""
        self.chunk_window_s = config.chunk_window_s
        """Longest wait of a round for others of its stream."""
        self.limits = config.limits
        """Bounds of a request."""
        self.targets = LinkPool(targets, self._link_to_target)
        self.drafts = None if drafts is None else LinkPool(drafts, self._link_to_draft)
        self.placement = Placement(
            self.targets, self.drafts, self.router_id, trial_s=2 * config.target_timeout_s, clock=clock
        )
        self.admission = Admission(info, config, self.router_id, metrics=metrics, clock=clock)
        self.queue = self.admission.queue
        self.active: dict[str, ActiveRequest] = {}  # by Request.key
        self.entering: dict[str, bool] = {}  # requests in tokenization -> True if cancelled
        self._entering_ends: dict[str, PacelineError] = {}  # errors that end them
        self._by_session: dict[str, ActiveRequest] = {}
        self.orphaned: list[ActiveRequest] = []
        self._touched: dict[str, ActiveRequest] = {}  # sessions to digest, by session id
        self._had_drafts = False
        self.target_seen_s = clock()  # when a target was last up
        self._main: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None  # while the router runs

    def _link_to_target(self, member: Member) -> TargetLink:
        return self._connect("target", member, self._on_target, self._on_target_change)

    def _link_to_draft(self, member: Member) -> DraftLink:
        return self._connect("draft", member, self._on_draft, self._on_draft_change)

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connects to the replicas; requests may come at once and wait for them."""
        started = asyncio.Event()
        self._main = asyncio.create_task(self._run(started), name="paceline-router")
        await started.wait()
        for side in self._pools():
            side.pool.watch(self.reconcile)
        self.reconcile()

    async def _run(self, started: asyncio.Event) -> None:
        """Owns all background work until it is cancelled: the tick and the tasks of the links."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.tick_forever(), name="paceline-router-tick")
            started.set()

    async def stop(self) -> None:
        """Ends the requests in progress with an error, and closes all streams."""
        self._tasks = None
        self.end(RouterStoppedError("the router is being stopped: another one can continue the stream"))
        self.placement.demand_target(False)
        self.admission.close()
        for side in self._pools():
            for link in side.links.values():
                link.stop()
        if self._main is not None:
            self._main.cancel()
            await asyncio.gather(self._main, return_exceptions=True)

    def end(self, error: PacelineError) -> None:
        """Ends all requests in progress with an error, also during tokenization."""
        self._entering_ends.update(dict.fromkeys(self.entering, error))
        for active in list(self.active.values()):
            self._fail(active, error)

    def close(self, error: PacelineError) -> None:
        """Ends all requests with an error, and all that come until ``closed`` is None again."""
        self.closed = error
        self.end(error)

    def _pools(self) -> Sequence[LinkPool[Any]]:
        return [self.targets] if self.drafts is None else [self.targets, self.drafts]

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(
        self, request: Request, spans: RequestSpans | None = None
    ) -> AsyncGenerator[Chunk | Result, None]:
        """Yields chunks as they are decided, then the Result. Leaving the generator frees the session everywhere.

        ``spans`` records the events of the request; the caller begins and ends it.

        Raises:
            InvalidRequestError: the request can never be served.
            ResourceExhaustedError: the queue is full.
            EngineError: no target is up.
            PoisonRequestError: one target after another hung or died under it, or failed it.
            DeadlineExceededError: the request took longer than ``request_timeout_s``.
        """
        outlet = Outlet(self.chunk_window_s)
        active = await self.begin(request, outlet, spans)
        try:
            async for item in items_of(active, outlet):
                yield item
        finally:
            self.leave(active)

    async def begin(
        self,
        request: Request,
        outlet: Sink,
        spans: RequestSpans | None = None,
        *,
        on_open: Callable[[], None] = lambda: None,
        may_wait: bool = False,
    ) -> ActiveRequest:
        """Serves a request or queues it; the caller calls ``leave`` at its end. Raises errors as ``generate`` does.

        ``outlet`` takes its chunks. ``on_open`` is called when it is opened on a target. ``may_wait``: however many do.
        """
        active = await self._enter(request, outlet, may_wait=may_wait)
        active.on_open = on_open
        if spans is not None:
            active.spans, active.session.traceparent = spans, spans.traceparent
        try:
            if active.session.result is not None:  # it lacked no more than its end, or was cancelled
                active.result = active.session.result
                _end(active)
            else:
                self.admission.enqueue(active)
                self._place_queue()
        except BaseException:
            self.leave(active)
            raise
        return active

    async def _enter(self, request: Request, outlet: Sink, *, may_wait: bool) -> ActiveRequest:
        self._require_new(request)
        if not may_wait:
            self._require_room(request)  # before anything that slows running requests
        self.entering[request.key] = False
        try:
            active = await self.admission.prepare(request, self.targets.statuses(), outlet)
        finally:
            cancelled = self.entering.pop(request.key)
            error = self._entering_ends.pop(request.key, None)
        if error is not None:
            raise error
        if not active.session.finished and not cancelled and not may_wait:
            self._require_room(request)
        self.active[request.key] = active
        self._by_session[active.session.session_id] = active
        if cancelled:
            self.cancel(request.request_id, request.owner)
        return active

    def _require_new(self, request: Request) -> None:
        if self.closed is not None:
            raise self.closed.with_traceback(None)
        if request.key in self.active or request.key in self.entering:
            raise RequestInProgressError(f"request_id {request.request_id!r} is in progress: each needs its own")

    def _require_room(self, request: Request) -> None:
        """Raises ResourceExhaustedError if no target has room and the queue is full.

        Streams that broke and resume may exceed the queue's limit by the sessions that a lost router can have served.
        """
        self._place_queue()
        limit = self._config.max_queued_requests
        if request.generated_token_ids:
            limit += sum(link.max_sessions for link in self.targets.open_links())
        if not self._has_room and not self.queue.may_wait(request.share or request.request_id, limit):
            raise self.admission.refusal(self.num_running)

    @property
    def _has_room(self) -> bool:
        """True if a target has a place that no orphaned session waits for."""
        return self.placement.has_room(self.orphaned)

    def leave(self, active: ActiveRequest) -> None:
        """Ends a request's part here: its replicas are told if it was not done."""
        self.admission.leave(active)
        if not active.done:
            self._apply(active, active.session.cancel())
        self._release(active)
        if dropped := active.session.relay_stats.dropped:
            self.metrics.dropped("relay", dropped)
        del self.active[active.request.key]
        del self._by_session[active.session.session_id]
        self.admission.note_ended(active)
        self.reconcile()

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Ends a request of ``owner`` with the tokens so far, finish reason ``abort``; False: it is not here."""
        key = request_key(request_id, owner)
        if key in self.entering:
            self.entering[key] = True
            return True
        active = self.active.get(key)
        if active is None or active.done:
            return False
        self.admission.leave(active)
        self._apply(active, active.session.cancel())
        return True

    @property
    def num_running(self) -> int:
        """Number of requests that have been opened on a target."""
        return len(self.active) - len(self.queue)

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for room."""
        return len(self.queue)

    @property
    def num_returned(self) -> int:
        """Number of the refused requests that should have come again by now."""
        return self.admission.num_returned

    @property
    def ready(self) -> bool:
        """True if a request would be served now, or once it has woken a pool that is scaled to zero."""
        return self.closed is None and (bool(self.targets.open_links()) or self._asleep)

    @property
    def _asleep(self) -> bool:
        """True if there is no target, and a request that waits has one started."""
        return self.targets.pool.wakes and not self.targets.pool.members()

    @property
    def trouble(self) -> str:
        """Why no request would be served now; empty if one would be."""
        return "" if self.ready else str(self.closed or "no target is up")

    def statuses(self) -> Mapping[str, list[ReplicaStatus]]:
        """Returns the latest statuses of the replicas that are up, by kind."""
        return {side.pool.name: side.statuses() for side in self._pools()}

    def view(self) -> RouterView:
        """Returns the state of the service as this router sees it."""
        sessions = [active.session for active in self.active.values() if active.opened]
        sessions = [session for session in sessions if session.speculates and not session.finished]
        return RouterView(
            members={side.pool.name: tuple(side.pool.members()) for side in self._pools()},
            speculating=len(sessions),
            drafting=sum(session.draft_available or session.wants_draft for session in sessions),
        )

    # -- reconciling sessions with replicas ----------------------------------------------------------------

    def reconcile(self) -> None:
        """Brings sessions and replicas together, after a change of members, links or room."""
        if self._tasks is None:
            return
        self.placement.sync(self._tasks)
        self._place_orphans()
        for link in list(self.targets.links.values()):
            if self.targets.is_draining(link):
                busy_s = 0.0 if link.status is None else link.status.busy_s
                for active in [self._by_session[session_id] for session_id in link.sessions]:
                    if busy_s > _HANGS_S:
                        link.send([CloseSession(active.session.session_id, active.session.target_epoch)])
                        self._lose(active, f"its engine has been in one step for {busy_s:.1f} s")
                    else:
                        self._migrate(active, "drain")
        self._place_queue()
        self._give_drafts()
        if self.drafts is not None:
            self.metrics.draft_replicas(sum(link.up for link in self.drafts.links.values()))
        self.metrics.sessions(len(self.queue), self.num_running, len(self.orphaned))

    def _place_orphans(self) -> None:
        """Continues orphaned sessions elsewhere, the one that has waited longest first, as far as there is room."""
        for active in list(self.orphaned):
            if self.placement.all_too_old(active):
                self._fail(active, outdated(active))
            else:
                self._migrate(active, "failover")

    def _place_queue(self) -> None:
        """Opens queued requests, in fair turns, where there is room that no orphaned session takes."""
        self._place_orphans()
        while self.queue and self._has_room:
            active = self.queue.pop(Counter(a.share for a in self.active.values() if a.opened and not a.done))
            link = self.placement.choose_target(active)
            if link is None:
                self._fail(active, outdated(active))
            else:
                self._open(active, link)
        self.placement.demand_target(bool(self.queue or self.orphaned))

    def _open(self, active: ActiveRequest, link: TargetLink) -> None:
        session, queue_s = active.session, self.admission.opened(active)
        self.placement.attach_target(active, link)
        draft = self.placement.choose_draft(active) if session.speculates and not link.crowded else None
        if active.spans is not None:
            active.spans.opened(link.member.replica_id)
        if draft is not None:
            self.placement.attach_draft(active, draft)
        self._apply(active, session.open(draft is not None, queue_s=queue_s))
        if link.crowded:  # a target in the middle of a step does not yet know how many there are
            for other in [self._by_session[session_id] for session_id in link.sessions]:
                self._take_draft(other)

    def _migrate(self, active: ActiveRequest, reason: str) -> bool:
        """Continues a session on another target; returns False if none has room."""
        link = self.placement.choose_target(active)
        if link is None:
            return False
        session, old = active.session, active.target
        timeout_s = self._config.page_move_timeout_s
        pages_from = old.member.address if timeout_s and reason == "drain" and old is not None and old.up else ""
        if pages_from:
            self.placement.keep_pages(active, timeout_s)
        self.placement.release_target(active)
        if active in self.orphaned:
            self.orphaned.remove(active)
            active.orphaned_since = None
        if old is not None:
            old.send([CloseSession(session.session_id, session.target_epoch)])
        self.placement.attach_target(active, link)
        self.metrics.moved(reason)
        if active.spans is not None:
            active.spans.moved(reason, link.member.replica_id)
        extra = {"request_id": active.request.request_id}
        log.info("session continues on target %s (%s)", link.member.replica_id, reason, extra=extra)
        suspected_s = self.placement.suspected_s(active)
        self._apply(
            active,
            session.reopen_target(suspected_s=suspected_s, pages_from=pages_from, pages_timeout_s=timeout_s),
        )
        return True

    def _give_drafts(self) -> None:
        """Opens sessions that have no draft, or whose draft drains, on one that is up."""
        if self.drafts is None:
            return
        has_drafts = bool(self.drafts.open_links())
        if has_drafts and not self._had_drafts:
            # The targets' limits were for the drafts that are gone, not for new ones.
            for target in self.targets.links.values():
                target.most_with_drafts = None
        self._had_drafts = has_drafts
        if not self.placement.drafts_with_room():
            return
        for active in self.active.values():
            if not active.opened or active.session.finished or active.target is None:
                continue
            drains = active.draft is not None and self.drafts.is_draining(active.draft)
            if drains or (active.draft is None and active.session.wants_draft):
                self._give_draft(active)

    def _give_draft(self, active: ActiveRequest) -> None:
        crowded = active.target is not None and active.target.crowded
        link = None if crowded else self.placement.choose_draft(active)
        if link is None:
            return
        self._take_draft(active)
        self.placement.attach_draft(active, link)
        self.metrics.draft_reopened("opened")
        self._apply(active, active.session.on_draft_up())

    def _take_draft(self, active: ActiveRequest) -> None:
        """Closes a session on its draft, if it has one."""
        if active.draft is not None:
            self._apply(active, active.session.leave_draft())
            self.placement.release_draft(active)

    def _release(self, active: ActiveRequest) -> None:
        self.placement.release_target(active)
        self.placement.release_pages(active)
        self.placement.release_draft(active)
        if active in self.orphaned:
            self.orphaned.remove(active)

    # -- what can happen to replicas -----------------------------------------------------------------------

    def _on_target_change(self, link: TargetLink) -> None:
        if not link.up:
            link.most_with_drafts = None
            self.placement.forget_prefixes(link)
            for active in sorted((self._by_session[name] for name in link.sessions), key=lambda a: a.arrived_s):
                self._lose(active, link.reason)
        self.reconcile()

    def _on_draft_change(self, link: DraftLink) -> None:
        if not link.up:
            for session_id in list(link.sessions):
                active = self._by_session[session_id]
                self.placement.release_draft(active)  # the draft forgets it by itself: the stream has ended
                self._apply(active, active.session.on_draft_down())
        self.reconcile()

    def _lose(self, active: ActiveRequest, reason: str) -> None:
        """Orphans a session whose target is lost, or has failed it; ends one that has lost too many."""
        if active.losses.note_lost(active.session.context_len):
            self._fail(active, poisonous(active.losses, reason))
            return
        self.placement.release_target(active)
        self._orphan(active)

    def _orphan(self, active: ActiveRequest) -> None:
        if active not in self.orphaned:
            self.orphaned.append(active)
            active.orphaned_since = self._clock()
            if active.spans is not None:
                active.spans.lost()

    async def tick_forever(self) -> None:
        """Calls ``tick`` every ``TICK_S`` seconds."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            started = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.target_seen_s += max(0.0, time.monotonic() - started - 2 * TICK_S)  # none could be seen meanwhile
            try:
                self.tick()
            except Exception:  # without the next tick no time limit would hold any more
                log.exception("unexpected error in background task %s", task.get_name())

    def tick(self) -> None:
        """Fails the requests that have run, or have been without any live target, for too long."""
        config, now = self._config, self._clock()
        if self.targets.open_links():
            self.target_seen_s = now
        oldest = now - config.recovery_timeout_s
        if self.target_seen_s < oldest:
            for active in [active for active in self.orphaned if (active.orphaned_since or 0.0) < oldest]:
                self._fail(
                    active, EngineError(self.no_target_reason("the target was lost and", config.recovery_timeout_s))
                )
            patience_s = config.cold_start_timeout_s if self._asleep else config.recovery_timeout_s
            for active in [active for active in self.queue if active.arrived_s < now - patience_s]:
                self._fail(active, EngineError(self.no_target_reason("", patience_s)))
        if (limit_s := config.request_timeout_s) is not None:
            for active in [active for active in self.active.values() if active.arrived_s < now - limit_s]:
                self._fail(active, DeadlineExceededError(f"the request took longer than {limit_s:g} s"))
        drains = any(map(self.targets.is_draining, self.targets.links.values()))
        if self.orphaned or self.queue or drains:
            self.reconcile()  # were an error to end one attempt, the next would be far away

    def no_target_reason(self, what: str, waited_s: float) -> str:
        """Says for how long no target was up, and why each link is down."""
        reasons = "; ".join(f"{rid}: {link.reason}" for rid, link in self.targets.links.items() if not link.up)
        waited = f"no target replica was up for {waited_s:g} s"
        return f"{what} {waited}".strip() + (f" ({reasons})" if reasons else "")

    def _fail(self, active: ActiveRequest, error: PacelineError) -> None:
        if active.done:
            return
        self.admission.leave(active)
        active.error = error
        self.metrics.failed(type(error).__name__)
        actions = active.session.discard()
        self._apply(active, Actions(to_target=actions.to_target, to_draft=actions.to_draft))
        self._release(active)
        _end(active)

    # -- the relay -----------------------------------------------------------------------------------------

    def _on_target(self, link: TargetLink, messages: Sequence[FromTarget]) -> None:
        outbox = link.relay.on_target(messages)
        link.send(outbox.to_target)
        self._send_to_drafts(outbox.to_draft)
        self._after_batch(outbox)
        if outbox.wish is not None:
            link.most_with_drafts = outbox.wish.most_sessions
        for session_id, reason in outbox.refused.items():
            self._fail(self._by_session[session_id], InvalidRequestError(reason))
        for session_id, reason in outbox.target_failed.items():
            active = self._by_session[session_id]
            log.warning("a target failed a session: %s", reason, extra={"request_id": active.request.request_id})
            self._lose(active, reason)
            if not active.done:
                self._migrate(active, "session_failed")
        for session_id in outbox.turned_away:
            self.placement.turned_away(self._by_session[session_id])
            self._orphan(self._by_session[session_id])
        if self.orphaned:  # one may have waited for another's trial
            self._place_orphans()
        for session in outbox.draft_wanted:
            self._give_draft(self._by_session[session.session_id])
        if outbox.touched and not self._touched:
            asyncio.get_running_loop().call_soon(self.digest)  # text, after the engines have what they need
        self._touched |= {session_id: self._by_session[session_id] for session_id in outbox.touched}

    def _on_draft(self, link: DraftLink, messages: Sequence[FromDraft]) -> None:
        outbox = link.relay.on_draft(messages)
        self._send_to_targets(outbox.to_target)
        # Sessions that need a draft now get one after the next outcome: a replica without room would refuse at once.
        self._after_batch(outbox)

    def _after_batch(self, outbox: Outbox) -> None:
        if outbox.num_dropped:
            self.metrics.dropped("unknown", outbox.num_dropped)
        for session_id, session in outbox.touched.items():
            if not session.draft_available:
                self.placement.release_draft(self._by_session[session_id])

    def _send_to_targets(self, messages: Iterable[ToTarget]) -> None:
        by_link: dict[TargetLink, list[ToTarget]] = defaultdict(list)
        for message in messages:
            if (link := self._by_session[message.session_id].target) is not None:
                by_link[link].append(message)
        for link, batch in by_link.items():
            link.send(batch)

    def _send_to_drafts(self, messages: Iterable[ToDraft]) -> None:
        by_link: dict[DraftLink, list[ToDraft]] = defaultdict(list)
        for message in messages:
            if (link := self._by_session[message.session_id].draft) is not None:
                by_link[link].append(message)
        for link, batch in by_link.items():
            link.send(batch)

    def _apply(self, active: ActiveRequest, actions: Actions) -> None:
        """Sends a session's messages and hands its text to the client."""
        if actions.to_target and active.target is not None:
            active.target.send(actions.to_target)
        if actions.to_draft and active.draft is not None:
            active.draft.send(actions.to_draft)
        if actions.chunks or actions.result is not None:
            self.deliver(active, actions)

    def digest(self) -> None:
        touched, self._touched = self._touched, {}
        for active in touched.values():
            if active.done:
                continue
            try:
                self._apply(active, active.session.digest())
            except Exception as error:  # the texts of the others still have to be delivered
                unexpected(log, error)
                self._fail(active, EngineError("the router could not process the output of this request"))

    def deliver(self, active: ActiveRequest, actions: Actions) -> None:
        now = self._clock()
        for chunk in actions.chunks:
            if chunk.round is not None:
                if not active.last_chunk_s:
                    self.metrics.first_token(now - active.arrived_s)
                gap_s = now - active.last_chunk_s if active.last_chunk_s else None
                self.metrics.round(chunk.round, len(chunk.token_ids), gap_s)
                if active.spans is not None:
                    active.spans.round(chunk.round, len(chunk.token_ids))
                active.last_chunk_s = now
                self.placement.release_pages(active)
            active.outlet.put(chunk)
        if actions.result is not None:
            active.result = actions.result
            self.metrics.finished(actions.result, active.session.sampling.max_tokens)
            if active.spans is not None:
                active.spans.finished(actions.result)
            self._release(active)
            asyncio.get_running_loop().call_soon(self.reconcile)  # there is room now
            _end(active)


def _end(active: ActiveRequest) -> None:
    active.ended.set()
    active.outlet.close()


async def items_of(active: ActiveRequest, outlet: Outlet) -> AsyncGenerator[Chunk | Result, None]:
    """Yields the chunks of a request that has begun, then its result. Raises its error."""
    while True:
        await outlet.due()
        for chunk in outlet.take():
            yield chunk
        if len(outlet) or not outlet.closed:
            continue
        if active.error is not None:
            raise active.error
        assert active.result is not None
        yield active.result
        return
