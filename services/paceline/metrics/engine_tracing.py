"""Spans of a target or draft replica, each session's below the span of its request.

    request ─┬─ target ─┬─ queue      until the engine takes the session from its queue
             │          ├─ prefill    until its first tokens
             │          └─ round ...  the step that decided the tokens of a round
             └─ draft ──┬─ prefill    until its first nodes
                        └─ round ...  from the tokens that were decided to the last nodes that continue them

A session that is opened on another replica has another span of this kind there, in the same trace. Requests without
traces carry no context, and a replica without ``tracing`` has no ``EngineSpans``: nothing of OpenTelemetry is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.messages import (
    CloseSession,
    Commit,
    FromDraft,
    FromTarget,
    Nodes,
    OpenSession,
    Outcome,
    SessionFailed,
    ToDraft,
    ToTarget,
)
from paceline.metrics.tracing import Clock, Spans, Tracing, round_attributes

if TYPE_CHECKING:
    from opentelemetry.context import Context


class EngineSpans:
    """Makes the spans of one replica's sessions from the messages of its engine. The engine's thread calls it."""

    def __init__(self, tracing: Tracing, kind: str, replica_id: str) -> None:
        """``kind``: ``target`` or ``draft``."""
        self._tracing, self._kind, self._replica_id = tracing, kind, replica_id
        self._sessions: dict[str, TargetSpans | _DraftSpans] = {}  # open sessions that are traced
        self._step_ns = time.perf_counter_ns()

    def received(self, messages: Sequence[ToTarget | ToDraft]) -> None:
        """The engine is given messages."""
        for message in messages:
            if isinstance(message, OpenSession):
                if message.traceparent:
                    self._open(message)
            elif (session := self._sessions.get(message.session_id)) is not None:
                if isinstance(message, CloseSession) and message.epoch >= session.epoch:
                    self._end(session)
                elif isinstance(message, Commit) and isinstance(session, _DraftSpans):
                    session.committed(message)

    def stepping(self, engine: Any) -> None:
        """The engine begins a step. A target tells which sessions its queue holds."""
        last_ns, self._step_ns = self._step_ns, time.perf_counter_ns()
        for session in self._sessions.values():
            if isinstance(session, TargetSpans) and session.queued and not engine.is_waiting(session.session_id):
                session.admitted(last_ns)

    def sent(self, messages: Sequence[FromTarget | FromDraft]) -> None:
        """The engine sends messages."""
        for message in messages:
            session = self._sessions.get(message.session_id)
            if session is None or message.epoch != session.epoch:
                continue
            if isinstance(message, SessionFailed):
                session.failed()
                self._end(session)
            elif isinstance(message, Outcome) and isinstance(session, TargetSpans):
                session.decided(message, self._step_ns)
                if message.finish_reason is not None:
                    self._end(session)
            elif isinstance(message, Nodes) and isinstance(session, _DraftSpans):
                session.drafted(message)

    def closed(self) -> None:
        """The engine has ended, and its sessions with it."""
        for session in list(self._sessions.values()):
            self._end(session)

    def _open(self, message: OpenSession) -> None:
        old = self._sessions.get(message.session_id)
        if old is not None:
            if message.epoch <= old.epoch:
                return
            self._end(old)
        parent = self._tracing.context(message.traceparent)
        if parent is None:
            return
        spans = (TargetSpans if self._kind == "target" else _DraftSpans)(self._tracing, message, parent)
        if spans.is_recording:
            spans.set("gen_ai.request.model", self._tracing.model_id)
            spans.set(f"paceline.{self._kind}", self._replica_id)
            self._sessions[message.session_id] = spans

    def _end(self, session: TargetSpans | _DraftSpans) -> None:
        del self._sessions[session.session_id]
        session.end()


class _SessionSpans(Spans):
    """The spans of one session on one replica: its own, and the one of its current phase."""

    kind = ""
    first_phase = ""

    def __init__(self, tracing: Tracing, message: OpenSession, parent: Context) -> None:
        from opentelemetry.trace import SpanKind

        self.session_id, self.epoch = message.session_id, message.epoch
        clock = Clock()
        now = clock.now_ns()
        span = tracing.tracer.start_span(self.kind, parent, SpanKind.SERVER, start_time=now)
        super().__init__(tracing, span, clock, self.first_phase, now)
        self.set("paceline.context_tokens", len(message.token_ids))

    @property
    def is_recording(self) -> bool:
        """False: the sampler of this process has left the session out."""
        return self._span.is_recording()

    def set(self, name: str, value: str | int) -> None:
        """Sets an attribute of the session's own span."""
        self._span.set_attribute(name, value)

    def failed(self) -> None:
        """The session cannot go on here. The reason is not told, since it may quote the request."""
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR)

    def end(self) -> None:
        """The session is over here."""
        now = self._clock.now_ns()
        self.end_phase(now)
        self.set("paceline.rounds", self._num_rounds)
        self._span.end(now)


class TargetSpans(_SessionSpans):
    kind, first_phase = "target", "queue"

    queued = True
    """False once the engine has taken the session from its queue."""

    def admitted(self, at_ns: int) -> None:
        """The session has left the queue in the step that began then."""
        self.queued = False
        now = self._clock.at(at_ns)
        self.end_phase(now)
        self._phase = self._child("prefill", now)

    def decided(self, outcome: Outcome, step_ns: int) -> None:
        """A round has ended, by the step that began then."""
        if self.queued:
            self.admitted(step_ns)
        now, index = self._clock.now_ns(), self._num_rounds
        self._num_rounds += 1
        if self._phase is not None:
            self._phase.set_attribute("paceline.cached_tokens", outcome.cached_tokens)
            self.end_phase(now)
        elif self._tracing.has_span(index):
            span = self._child("round", self._clock.at(step_ns))
            span.set_attributes(round_attributes(index, outcome.round, len(outcome.token_ids)))
            span.end(now)


class _DraftSpans(_SessionSpans):
    kind, first_phase = "draft", "prefill"

    def __init__(self, tracing: Tracing, message: OpenSession, parent: Context) -> None:
        super().__init__(tracing, message, parent)
        self._begun_ns: int | None = None  # of the round, if it has a span once there are nodes
        self._num_nodes = 0

    def committed(self, commit: Commit) -> None:
        """A round begins: the target has decided tokens."""
        if not commit.token_ids:
            return
        self._end_round()
        self._num_rounds += 1
        if self._phase is None and self._tracing.has_span(self._num_rounds):
            self._begun_ns = self._clock.now_ns()

    def drafted(self, nodes: Nodes) -> None:
        """Nodes are sent to the target."""
        now = self._clock.now_ns()
        self.end_phase(now)
        if nodes.nodes:
            self._num_nodes += len(nodes.nodes)
            self._last_ns = now

    def end(self) -> None:
        self._end_round()
        super().end()

    def _end_round(self) -> None:
        """A round in which it had nothing to add has no span."""
        if self._begun_ns is not None and self._num_nodes:
            span = self._child("round", self._begun_ns)
            span.set_attribute("paceline.round.index", self._num_rounds)
            span.set_attribute("paceline.round.nodes", self._num_nodes)
            span.end(self._last_ns)
        self._begun_ns, self._num_nodes = None, 0
