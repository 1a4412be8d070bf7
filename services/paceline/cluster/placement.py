"""Serve as the control plane of sessions: which replicas of a deployment take them, and the places they hold there.

    controller ──▶ request router of a handle ──▶ registry ──▶ ServePool ──▶ the router core
                                                               ServePool ── lease (a streaming call) ──▶ replica

Serve's own request router, one per handle, knows the running replicas; draining ones are not among them. A lease is a
streaming call that stays open. It counts as load in Serve (draining, autoscaling), waits while no replica runs, and
ends by itself when this process dies. No session ever waits for its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from paceline.router.pool import Lease, Member

log = logging.getLogger(__name__)

_PIN = "pin:"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 5.0
ANSWER_S = 5.0
"""A call that has no answer within this time waits for a replica: it can be cancelled."""

Deployment = tuple[str, str]
"""Names of an application and of a deployment in it."""


class Registry:
    """The members of each deployment, as the request routers of this process were last told. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[Deployment, Mapping[str, Member]] = {}
        self._watchers: dict[Deployment, list[Callable[[Mapping[str, Member]], None]]] = {}

    def publish(self, deployment: Deployment, members: Mapping[str, Member]) -> None:
        """Replaces the members and tells who watches, in this thread."""
        with self._lock:
            self._members[deployment] = members
            watchers = list(self._watchers.get(deployment, ()))
        for changed in watchers:
            changed(members)

    def watch(
        self, deployment: Deployment, changed: Callable[[Mapping[str, Member]], None]
    ) -> tuple[Mapping[str, Member], Callable[[], None]]:
        """The members now, and what ends the watch. ``changed`` is called in any thread."""
        with self._lock:
            self._watchers.setdefault(deployment, []).append(changed)
            return self._members.get(deployment, {}), lambda: self._forget(deployment, changed)

    def _forget(self, deployment: Deployment, changed: Callable[[Mapping[str, Member]], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._watchers[deployment].remove(changed)


REGISTRY = Registry()
"""The one of this process."""


class PoolRequestRouter(RequestRouter):  # type: ignore[misc]  # ray is not followed by mypy
    """Publishes the replicas that take sessions, and sends a lease to the replica that it names.

    Serve pickles this class by value, with copies of what it names at module level: hence the imports in the methods.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called with all running replicas whenever that set changes."""
        from paceline.cluster.placement import REGISTRY, members_of

        super().update_replicas(replicas)
        REGISTRY.publish((self._deployment_id.app_name, self._deployment_id.name), members_of(replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica that the lease is pinned to; without a pin, all of them."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve asks again without a pause
        session_id = pending_request.metadata.session_id
        if not session_id.startswith(_PIN):
            return [candidate_replicas]
        return [[r for r in candidate_replicas if r.replica_id.unique_id == session_id.removeprefix(_PIN)]]


def members_of(replicas: Sequence[RunningReplica]) -> Mapping[str, Member]:
    """Members by replica id. A replica that does not say where it listens takes no sessions."""
    members: dict[str, Member] = {}
    for replica in replicas:
        metadata = replica.replica_metadata or {}
        if address := metadata.get("address"):
            replica_id = str(replica.replica_id.unique_id)
            members[replica_id] = Member(replica_id, str(address), str(metadata.get("node", "")))
    return members


class ServePool:
    """The replicas of one Serve deployment, for one router core. A Pool; lives on one event loop."""

    def __init__(
        self, name: str, handle: DeploymentHandle, registry: Registry = REGISTRY, *, wakes: bool = False
    ) -> None:
        """Must be called on the event loop. The deployment's request router has to be PoolRequestRouter.

        ``handle``'s replicas have a method ``lease(session_id)`` that yields until it is cancelled. ``wakes``: whether
        the deployment may have no replica, and starts one for a lease that waits.
        """
        self.name, self.wakes = name, wakes
        self._loop = asyncio.get_running_loop()
        self._watchers: list[Callable[[], None]] = []
        self._leases: set[_ServeLease] = set()
        self._members: Mapping[str, Member] = {}
        # over gRPC: only such a call is cancelled when the process that holds it dies
        self._handle = handle.options(stream=True, _by_reference=False)  # also starts the handle's request router
        self._members, self._unwatch = registry.watch((handle.app_name, handle.deployment_name), self._on_members)

    def members(self) -> Mapping[str, Member]:
        return self._members

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def lease(self, session_id: str, replica_id: str | None) -> Lease:
        """Opens a lease in the background (``Pool.lease``); one pinned to a replica that has gone ends quietly."""
        lease = _ServeLease(session_id, replica_id, self._call)
        lease.task = self._loop.create_task(
            lease.hold(lambda: replica_id is None or replica_id in self._members),
            name=f"paceline-lease-{session_id}",
            # none of the request's context: Serve would tie the lease to it, and confuse several leases of one request
            context=contextvars.Context(),
        )
        self._leases.add(lease)
        lease.task.add_done_callback(lambda _: self._leases.discard(lease))
        return lease

    @property
    def num_leases(self) -> int:
        """Leases that are open or being opened."""
        return len(self._leases)

    async def stop(self) -> None:
        """Ends all leases. Idempotent."""
        self._unwatch()
        tasks = [lease.task for lease in self._leases if lease.task is not None]
        for lease in list(self._leases):
            lease.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, session_id: str, replica_id: str | None) -> Any:
        pin = session_id if replica_id is None else f"{_PIN}{replica_id}"
        return self._handle.options(session_id=pin).lease.remote(session_id)

    def _on_members(self, members: Mapping[str, Member]) -> None:
        """Runs in the thread of the request router, which may be this one."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._set_members, members)

    def _set_members(self, members: Mapping[str, Member]) -> None:
        if members == self._members:
            return
        self._members = members
        for lease in list(self._leases):
            if lease.replica_id is not None and lease.replica_id not in members:
                lease.end_if_waiting()
        for changed in self._watchers:
            changed()


class _ServeLease:
    """One lease and the task that holds it."""

    def __init__(self, session_id: str, replica_id: str | None, call: Callable[[str, str | None], Any]) -> None:
        self.replica_id = replica_id
        self.task: asyncio.Task[None] | None = None
        self._session_id, self._call = session_id, call
        self._held = self._closed = False

    def close(self) -> None:
        """Ends the lease.

        A call that is on its way to a replica must not be cancelled: Serve would lose track of it, and the replica
        would hold the place indefinitely. So its first answer is awaited, for a while.
        """
        if self._closed or self.task is None:
            return
        self._closed = True
        if self._held:
            self.task.cancel()
        else:
            timer = asyncio.get_running_loop().call_later(ANSWER_S, self.task.cancel)
            self.task.add_done_callback(lambda _: timer.cancel())

    def abort(self) -> None:
        """Cancels the task now, in any state."""
        if self.task is not None:
            self.task.cancel()

    def end_if_waiting(self) -> None:
        """Ends a lease that is not held yet: its replica accepts no more sessions."""
        if not self._held:
            self.close()

    async def hold(self, wanted: Callable[[], bool]) -> None:
        """Holds the lease, and takes it again if it breaks while the replica is still there."""
        pause_s = _FIRST_RETRY_S
        while wanted():
            call = None
            try:
                call = self._call(self._session_id, self.replica_id)
                async for _ in call:
                    self._held, pause_s = True, _FIRST_RETRY_S
                    if self._closed:
                        return
                reason = "the replica ended it"
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            finally:
                if call is not None:
                    call.cancel()
                self._held = False
            log.info("the lease of session %s broke: %s", self._session_id, reason)
            if self._closed:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
