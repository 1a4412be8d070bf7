"""Both engines in one thread, with the messages that a router would relay: what measures them builds on this.

A step's time is divided by what it was spent on, exclusive of the other parts:

    forward    the model: the compiled graph, or the eager one
    inputs     from sessions to its arguments: tokens, rows, page tables, masks
    sampling   from logits to tokens: processors, noise, the verdict; of a draft, candidates and their order
    messages   protobuf and back at the engine's side of the wire
    python     all else: scheduling, trees, bookkeeping
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.draft.engine import DraftEngine
from paceline.messages import ToDraft, ToTarget
from paceline.router.relay import Outbox, Relay
from paceline.router.session import Actions, Session
from paceline.rpc.streams import (
    decode_from_draft,
    decode_from_target,
    decode_to_draft,
    decode_to_target,
    encode_from_draft,
    encode_from_target,
    encode_to_draft,
    encode_to_target,
)
from paceline.target.engine import TargetEngine
from paceline.v1 import draft_pb2, target_pb2

PARTS = ("forward", "inputs", "sampling", "messages", "python")


class Stopwatch:
    """Seconds by part of the step in progress; an inner part's are not its outer one's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside as ``name``."""
        self._inner.append(0.0)
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self.spent[name] += seconds - self._inner.pop()
            self._inner[-1] += seconds

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed as ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        spent, self.spent = self.spent, dict.fromkeys(PARTS, 0.0)
        return spent


@dataclass
class Side:
    """One engine at its end of the wire, and the times of its steps."""

    engine: Any
    watch: Stopwatch
    outbox: list[Any]
    """Messages that the engine emits."""
    decode: Callable[[bytes], Sequence[Any]]
    encode: Callable[[Sequence[Any]], bytes]
    count: Callable[[], int]
    """Steps that count so far: of a draft tree steps, of a target all."""
    width: Callable[[], int]
    """Tokens of all steps so far: of a draft leaves."""
    steps: list[dict[str, float]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def step(self, batch: bytes | None = None) -> tuple[bool, bytes | None]:
        """One turn: takes in what has come, steps, encodes what leaves."""
        before, wide = self.count(), self.width()
        self.watch.take()
        with self.watch.part("messages"):
            messages = self.decode(batch) if batch is not None else ()
        with self.watch.part("python"):
            if messages:
                self.engine.receive(messages)
            worked = self.engine.step()
        sent = None
        if self.outbox:
            with self.watch.part("messages"):
                sent = self.encode(self.outbox)
            self.outbox.clear()
        if self.count() > before:
            self.steps.append(self.watch.take())
            self.widths.append(self.width() - wide)
        return worked, sent


def target_side(engine: TargetEngine, watch: Stopwatch, outbox: list[Any]) -> Side:
    """The target's side."""
    return Side(
        engine,
        watch,
        outbox,
        decode=lambda batch: decode_to_target(target_pb2.ToTarget.FromString(batch))[0],
        encode=lambda messages: encode_from_target(messages).SerializeToString(),
        count=lambda: engine.stats.steps,
        width=lambda: engine.stats.tokens_computed,
    )


def draft_side(engine: DraftEngine, watch: Stopwatch, outbox: list[Any]) -> Side:
    """The draft's side."""
    return Side(
        engine,
        watch,
        outbox,
        decode=lambda batch: decode_to_draft(draft_pb2.ToDraft.FromString(batch))[0],
        encode=lambda messages: encode_from_draft(messages).SerializeToString(),
        count=lambda: engine.stats.tree_steps,
        width=lambda: engine.stats.leaves,
    )


class Router:
    """The router between both engines: its sessions, and encoded batches that come from either and go to either."""

    def __init__(self, sessions: dict[str, Session]) -> None:
        """Opens the sessions, of which ``to_target`` and ``to_draft`` tell the engines."""
        self._relay = Relay()
        self._relay.sessions.update(sessions)
        self._to_target: list[ToTarget] = []
        self._to_draft: list[ToDraft] = []
        for session in sessions.values():
            self._send(session.open())

    def on_target(self, batch: bytes) -> None:
        """Relays a batch from the target."""
        messages: list[Any] = [*decode_from_target(target_pb2.FromTarget.FromString(batch))[0]]  # nobody sends an Echo
        self._send(self._relay.on_target(messages))

    def on_draft(self, batch: bytes) -> None:
        """Relays a batch from the draft."""
        messages: list[Any] = [*decode_from_draft(draft_pb2.FromDraft.FromString(batch))[0]]
        self._send(self._relay.on_draft(messages))

    def to_target(self) -> bytes | None:
        """The next batch to the target; None: nothing."""
        messages, self._to_target = self._to_target, []
        return encode_to_target(messages).SerializeToString() if messages else None

    def to_draft(self) -> bytes | None:
        """The next batch to the draft; None: nothing."""
        messages, self._to_draft = self._to_draft, []
        return encode_to_draft(messages).SerializeToString() if messages else None

    def mean_context_len(self) -> int:
        """Tokens of a session's context."""
        return round(statistics.mean(len(session.history) for session in self._relay.sessions.values()))

    def cancel(self) -> None:
        """Ends all sessions, of which ``to_target`` and ``to_draft`` tell the engines."""
        for session in self._relay.sessions.values():
            self._send(session.cancel())

    def _send(self, consequences: Actions | Outbox) -> None:
        self._to_target += consequences.to_target
        self._to_draft += consequences.to_draft


def run(target: Side, draft: Side | None, router: Router, num_steps: int) -> None:
    """Steps until the target has done ``num_steps``. ``draft``: None in plain decoding."""
    batch = router.to_target()
    while len(target.steps) < num_steps:
        worked, sent = target.step(batch)
        if sent is not None:
            router.on_target(sent)
        drafted = draft is not None and _draft(draft, router)
        batch = router.to_target()
        if not worked and not drafted and batch is None:
            time.sleep(target.engine.wait_s() or 0.0)


def _draft(draft: Side, router: Router) -> bool:
    """Runs the draft's turns that fit into one step of the target. True: it has more to do."""
    batch, drafted = router.to_draft(), True
    for _ in range(4):
        drafted, sent = draft.step(batch)
        if sent is not None:
            router.on_draft(sent)
        if not drafted:
            break
        batch = None
    return drafted


def cancel(target: Side, draft: Side, router: Router) -> None:
    """Ends all sessions of a run, at the engines too."""
    router.cancel()
    for side, batch in ((target, router.to_target()), (draft, router.to_draft())):
        if batch is not None:
            side.step(batch)
