"""The stream from this router to one replica: all of its sessions there, one message per turn of the loop.

    up ──▶ down (broken, silent, or its engine hangs) ──▶ connecting ──▶ up ...

Silence counts: a replica sends its status every quarter of a second, so one that has been stopped, or is cut off
without a reset, is noticed within ``silence_s``. Knows epochs and sessions no better than a wire does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from grpc import aio

from paceline.config import RouterConfig
from paceline.messages import Echo, FromDraft, FromTarget, Hint, States, ToDraft, ToTarget
from paceline.metrics.router import RouterMetrics
from paceline.router.pool import Member
from paceline.router.replica import Connect, OnChange, OnMessages, ReplicaLink, Sent
from paceline.rpc import protocol
from paceline.rpc.streams import decode_from_draft, decode_from_target, encode_to_draft, encode_to_target
from paceline.rpc.transport import TOKEN_KEY, channel
from paceline.security.certificates import Certificates
from paceline.types import ReplicaStatus
from paceline.v1 import draft_pb2_grpc, target_pb2_grpc

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
MAX_STATES_BYTES = 64 << 20
"""States and hints that wait to be written; more are dropped."""

Received = TypeVar("Received")


@dataclass(frozen=True, slots=True)
class StreamKind(Generic[Sent, Received]):
    """Differences between the stream to a target and the one to a draft. The batches are protobuf messages."""

    name: str
    stub: Callable[[aio.Channel], Any]
    encode: Callable[[Iterable[Sent | Echo]], Any]
    decode: Callable[[Any], tuple[list[Received | Echo], ReplicaStatus | None, int]]


TARGET: StreamKind[ToTarget, FromTarget] = StreamKind(
    "target", target_pb2_grpc.TargetServiceStub, encode_to_target, decode_from_target
)
DRAFT: StreamKind[ToDraft, FromDraft] = StreamKind(
    "draft", draft_pb2_grpc.DraftServiceStub, encode_to_draft, decode_from_draft
)


class _StreamEnded(Exception):
    """Ends the tasks of a stream; the message is the reason."""


class Link(ReplicaLink[Sent], Generic[Sent, Received]):
    """The stream to one replica. All methods and callbacks run on the event loop."""

    def __init__(
        self,
        member: Member,
        kind: StreamKind[Sent, Received],
        *,
        on_messages: Callable[[Link[Sent, Received], Sequence[Received]], None],
        on_change: Callable[[Link[Sent, Received]], None],
        on_latency: Callable[[float], None] | None = None,
        on_dropped: Callable[[str], None] | None = None,
        silence_s: float,
        token: str = "",
        certificates: Certificates | None = None,
    ) -> None:
        """``on_change`` is called when the link comes up, goes down, or has room where it had none, and the reverse.

        ``silence_s`` is the time after which a silent replica counts as down. ``on_latency`` takes the round trip in
        seconds, which is measured with heartbeats, one at a time. ``on_dropped`` gets the kind of each message that is
        dropped because the stream is too slow.
        """
        super().__init__(member)
        self.kind = kind
        self.num_malformed = 0
        self._on_messages, self._on_change = on_messages, on_change
        self._on_latency, self._on_dropped = on_latency, on_dropped
        self._silence_s, self._token, self._certificates = silence_s, token, certificates
        self.outbox: list[Sent | Echo] = []
        self._states_bytes = 0  # of the states in the outbox
        self._wake = asyncio.Event()
        self._seen_at = 0.0  # when the latest batch came
        self._echo_ns = 0  # when the echo that is on its way was sent; 0: none is
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Connects, and again whenever the stream breaks, in a task of the group until ``stop``."""
        self._task = tasks.create_task(self.run_forever(), name=f"paceline-link-{self.member.replica_id}")

    def stop(self) -> None:
        """Ends the stream, and with it the link. Idempotent; ``on_change`` is not called."""
        self.up, self._stopped = False, True
        if self._task is not None:
            self._task.cancel()

    def send(self, messages: Sequence[Sent | Echo]) -> None:
        """Queues messages for the next batch. While the link is down they are dropped: sessions are re-opened. States
        and hints are also dropped, and counted, while many wait: a draft can do without, and tokens must not wait for
        them."""
        if self.up and messages:
            self._queue([each for each in messages if not isinstance(each, States | Hint) or self._holds(each)])

    def _holds(self, aside: States | Hint) -> bool:
        """Reserves room for states or a hint; False: there is none, and they are dropped."""
        if self._states_bytes + len(aside.packed) > MAX_STATES_BYTES:
            if self._on_dropped is not None:
                self._on_dropped("states" if isinstance(aside, States) else "hint")
            return False
        self._states_bytes += len(aside.packed)
        return True

    def _queue(self, messages: Sequence[Sent | Echo]) -> None:
        self.outbox.extend(messages)
        self._wake.set()

    async def run_forever(self) -> None:
        """Connects, serves a stream, and connects again after a pause that grows."""
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                async with channel(self.member.address, self._certificates) as connection:
                    reason = await self.serve_stream(connection)
                if self.up:
                    pause_s = _FIRST_RETRY_S
                    self.on_down(reason)
                elif reason != self.reason:
                    self.reason = reason
                    log.warning("%s %s is not up: %s", self.kind.name, self.member.replica_id, reason)
            except Exception as error:  # an error of ours: without this task the replica would never come back
                self._log_unexpected()
                self.up, self.reason = False, f"{type(error).__name__}: {error}"
            if self._stopped:  # a TaskGroup that a task of its own has ended forgets that it was cancelled, too
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def serve_stream(self, channel: aio.Channel) -> str:
        """Serves one stream from its beginning to its end; returns why it ended."""
        token = ((TOKEN_KEY, self._token),) if self._token else ()
        call = self.kind.stub(channel).Rounds(metadata=((protocol.KEY, str(protocol.VERSION)), *token))
        name, reasons = f"paceline-link-{self.member.replica_id}", []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._part(self.read_stream(call)), name=f"{name}-reader")
                tasks.create_task(self._part(self.write_stream(call)), name=f"{name}-writer")
                tasks.create_task(self._part(self.watch_silence()), name=f"{name}-heartbeat")
        except* _StreamEnded as ended:
            reasons = [str(error) for error in ended.exceptions]
        finally:
            call.cancel()
        return reasons[0]

    async def _part(self, work: Awaitable[str]) -> None:
        """Runs one of a stream's three tasks. The first that ends, with a reason or an error, ends the others."""
        try:
            reason = await work
        except Exception as error:  # an error of ours: to stay up without a reader would hang every session
            self._log_unexpected()
            reason = f"{type(error).__name__}: {error}"
        raise _StreamEnded(reason)

    def _log_unexpected(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        log.exception("unexpected error in background task %s", task.get_name())

    async def read_stream(self, call: Any) -> str:
        """Delivers the replica's messages; returns why the stream ended."""
        try:
            async for batch in call:
                self._seen_at = time.monotonic()
                messages, status, num_malformed = self.kind.decode(batch)
                self.num_malformed += num_malformed
                if status is not None and (refusal := protocol.refusal(status.protocol)):
                    return refusal
                self.receive(messages, status)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "the replica ended the stream"

    def receive(self, batch: Sequence[Received | Echo], status: ReplicaStatus | None) -> None:
        if status is not None:
            self._note(status)
        messages: list[Received] = []
        for message in batch:
            if isinstance(message, Echo):
                self._note_echo(message)
            else:
                messages.append(message)
        if messages and self.up:
            self._on_messages(self, messages)

    def _note_echo(self, echo: Echo) -> None:
        if echo.sent_ns == self._echo_ns:
            self._echo_ns = 0
            if self._on_latency is not None:
                self._on_latency((time.monotonic_ns() - echo.sent_ns) / 1e9)

    async def write_stream(self, call: Any) -> str:
        """Sends the outbox; returns why the stream ended."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self.outbox, self._states_bytes = self.outbox, [], 0
                if batch:
                    await call.write(self.kind.encode(batch))
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            await asyncio.sleep(_CONNECT_TIMEOUT_S)  # the reader knows why
            return f"the stream cannot be written to: {error}"

    async def watch_silence(self) -> str:
        """Returns once the replica has been silent for too long."""
        self._seen_at = time.monotonic()
        period_s = self._silence_s / 5
        while True:
            started = time.monotonic()
            await asyncio.sleep(period_s)
            lag_s = time.monotonic() - started - period_s
            if lag_s > period_s:  # this loop was held up and could not read meanwhile
                self._seen_at += lag_s
            silent_s = time.monotonic() - self._seen_at
            if silent_s > (self._silence_s if self.up else _CONNECT_TIMEOUT_S):
                return f"silent for {silent_s:.1f} s"
            if self.up and self.status is not None and self.status.busy_s > self._silence_s:
                return f"its engine has been in one step for {self.status.busy_s:.1f} s"

    def _note(self, status: ReplicaStatus) -> None:
        before = self.standing
        self.status = status
        self.num_others = max(0, status.num_sessions - len(self.sessions))
        if not self.up:
            if status.busy_s > self._silence_s:  # it still hangs
                return
            self.up, self.reason = True, ""
            log.info("%s %s is up at %s", self.kind.name, self.member.replica_id, self.member.address)
        if not self._echo_ns:
            self._echo_ns = time.monotonic_ns()
            self.send([Echo(self._echo_ns)])
        if self.standing != before:
            self._on_change(self)

    @property
    def standing(self) -> tuple[bool, bool, bool, int]:
        """The values that placement depends on and a heartbeat may change."""
        return self.up, self.has_room, self.crowded, self.max_sessions

    def on_down(self, reason: str) -> None:
        """Drops unsent messages and reports the link as down."""
        self.up, self.reason = False, reason
        self.outbox.clear()
        self._states_bytes = 0
        self._echo_ns = 0
        log.warning("%s %s is down: %s", self.kind.name, self.member.replica_id, reason)
        self._on_change(self)


def streams(
    config: RouterConfig, metrics: RouterMetrics, token: str = "", certificates: Certificates | None = None
) -> Connect:
    """Makes links by gRPC. ``token`` is the one that replicas ask for, ``certificates`` are what they are shown."""
    shown: dict[str, Any] = {"token": token, "certificates": certificates}

    def connect(kind: str, member: Member, on_messages: OnMessages, on_change: OnChange) -> ReplicaLink[Any]:
        told: dict[str, Any] = {"on_messages": on_messages, "on_change": on_change, **shown}
        if kind == TARGET.name:
            return Link(member, TARGET, silence_s=config.target_timeout_s, **told)
        told |= {"on_latency": metrics.draft_link, "on_dropped": metrics.dropped}
        return Link(member, DRAFT, silence_s=config.draft_timeout_s, **told)

    return connect
