"""The stream from this router to one replica: all of its sessions there, one message per turn of the loop.

    up ──▶ down (broken, silent, or its engine hangs) ──▶ connecting ──▶ up ...

Silence counts: a replica says how it is every quarter of a second, so one that has been stopped, or is cut off
without a reset, is noticed within ``silence_s``. Knows epochs and sessions no better than a wire does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpc import aio

from paceline.messages import Echo
from paceline.router.pool import Member
from paceline.rpc.streams import decode_from_draft, decode_from_target, encode_to_draft, encode_to_target
from paceline.rpc.transport import CHANNEL_OPTIONS, TOKEN_KEY
from paceline.types import ReplicaStatus
from paceline.v1 import draft_pb2_grpc, target_pb2_grpc

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class StreamKind:
    """What tells the stream to a target from the one to a draft."""

    name: str
    stub: Callable[[aio.Channel], Any]
    encode: Callable[[Sequence[Any]], Any]
    decode: Callable[[Any], tuple[Sequence[Any], ReplicaStatus | None, int]]


TARGET = StreamKind("target", target_pb2_grpc.TargetServiceStub, encode_to_target, decode_from_target)
DRAFT = StreamKind("draft", draft_pb2_grpc.DraftServiceStub, encode_to_draft, decode_from_draft)


class Link:
    """A replica as one router sees it. All methods and callbacks run on the event loop."""

    def __init__(
        self,
        member: Member,
        kind: StreamKind,
        *,
        on_messages: Callable[[Link, Sequence[Any]], None],
        on_change: Callable[[Link], None],
        on_latency: Callable[[float], None] | None = None,
        silence_s: float,
        token: str = "",
        delay_s: float = 0.0,
    ) -> None:
        """``on_change``: it came up, went down, or its status changed. ``silence_s``: when a silent replica is down.

        ``on_latency`` takes what the way there and back takes, in seconds, with heartbeats: one at a time.

        ``delay_s`` is added to every message in both directions, for experiments with slow networks.
        """
        self.member = member
        self.kind = kind
        self.up = False
        self.reason = "not connected yet"
        """Why it is down."""
        self.status: ReplicaStatus | None = None
        """The newest that the replica said."""
        self.num_malformed = 0
        self.sessions: dict[str, Any] = {}
        """This router's sessions on the replica, by session id. Kept by the router."""
        self.draft_wanted = True
        """Whether the target last asked for a draft or to do without: new sessions begin so. Kept by the router."""
        self._on_messages, self._on_change, self._on_latency = on_messages, on_change, on_latency
        self._silence_s, self._delay_s, self._token = silence_s, delay_s, token
        self._outbox: list[Any] = []
        self._wake = asyncio.Event()
        self._heard_at = 0.0
        self._echo_ns = 0
        """When the echo that is on its way was sent; 0: none is."""
        self._num_others = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects, and again whenever it breaks, until ``stop``."""
        self._task = asyncio.create_task(self._run(), name=f"paceline-link-{self.member.replica_id}")

    async def stop(self) -> None:
        """Ends the stream. Idempotent; ``on_change`` is not called."""
        self.up = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, messages: Sequence[Any]) -> None:
        """Queues messages for the next batch. While the link is down they are dropped: sessions are re-opened."""
        if not self.up or not messages:
            return
        if self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._queue, list(messages))
        else:
            self._queue(messages)

    @property
    def load(self) -> int:
        """Sessions on the replica: this router's own, and those of others at the last heartbeat."""
        return len(self.sessions) + self._num_others

    @property
    def max_sessions(self) -> int:
        """How many the replica serves at once; 0 before it has said so."""
        return self.status.max_sessions if self.status is not None else 0

    def _queue(self, messages: Sequence[Any]) -> None:
        self._outbox.extend(messages)
        self._wake.set()

    async def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while True:
            async with aio.insecure_channel(self.member.address, options=CHANNEL_OPTIONS) as channel:
                try:
                    reason = await self._stream(channel)
                except Exception as error:  # a fault of ours: to stay up without a reader would hang every session
                    log.exception("the stream to %s %s failed unforeseen", self.kind.name, self.member.replica_id)
                    reason = f"{type(error).__name__}: {error}"
            if self.up:
                pause_s = _FIRST_RETRY_S
                self._down(reason)
            else:
                self.reason = reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def _stream(self, channel: aio.Channel) -> str:
        """One stream from its beginning to its end; returns why it ended."""
        call = self.kind.stub(channel).Rounds(metadata=((TOKEN_KEY, self._token),) if self._token else None)
        parts = [asyncio.create_task(part) for part in (self._read(call), self._write(call), self._listen())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            call.cancel()
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, call: Any) -> str:
        try:
            async for batch in call:
                self._heard_at = time.monotonic()
                messages, status, num_malformed = self.kind.decode(batch)
                self.num_malformed += num_malformed
                if self._delay_s:
                    asyncio.get_running_loop().call_later(self._delay_s, self._hear, messages, status)
                else:
                    self._hear(messages, status)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "the replica ended the stream"

    def _hear(self, messages: Sequence[Any], status: ReplicaStatus | None) -> None:
        if status is not None:
            self._note(status)
        messages = [message for message in messages if not self._is_echo(message)]
        if messages and self.up:
            self._on_messages(self, messages)

    def _is_echo(self, message: Any) -> bool:
        if not isinstance(message, Echo):
            return False
        if message.sent_ns == self._echo_ns:
            self._echo_ns = 0
            if self._on_latency is not None:
                self._on_latency((time.monotonic_ns() - message.sent_ns) / 1e9)
        return True

    async def _write(self, call: Any) -> str:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self._outbox = self._outbox, []
                if batch:
                    await call.write(self.kind.encode(batch))
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            await asyncio.sleep(_CONNECT_TIMEOUT_S)  # the reader knows why
            return f"the stream cannot be written to: {error}"

    async def _listen(self) -> str:
        self._heard_at = time.monotonic()
        period_s = self._silence_s / 5
        while True:
            started = time.monotonic()
            await asyncio.sleep(period_s)
            lag_s = time.monotonic() - started - period_s
            if lag_s > period_s:  # this loop was held up, and heard nobody meanwhile
                self._heard_at += lag_s
            silent_s = time.monotonic() - self._heard_at
            if silent_s > (self._silence_s if self.up else _CONNECT_TIMEOUT_S):
                return f"silent for {silent_s:.1f} s"
            if self.up and self.status is not None and self.status.busy_s > self._silence_s:
                return f"its engine has been in one step for {self.status.busy_s:.1f} s"

    def _note(self, status: ReplicaStatus) -> None:
        self.status = status
        self._num_others = max(0, status.num_sessions - len(self.sessions))
        if not self.up:
            if status.busy_s > self._silence_s:  # it still hangs
                return
            self.up, self.reason = True, ""
            log.info("%s %s is up at %s", self.kind.name, self.member.replica_id, self.member.address)
        if not self._echo_ns:
            self._echo_ns = time.monotonic_ns()
            self.send([Echo(self._echo_ns)])
        self._on_change(self)

    def _down(self, reason: str) -> None:
        self.up, self.reason = False, reason
        self._outbox.clear()
        self._echo_ns = 0
        log.warning("%s %s is down: %s", self.kind.name, self.member.replica_id, reason)
        self._on_change(self)


async def stop_links(links: Sequence[Link]) -> None:
    """Ends them side by side."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(link.stop() for link in links))
