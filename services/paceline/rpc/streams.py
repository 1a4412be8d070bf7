"""The streams between router and replicas as protobuf messages and back. Knows no sockets and no engines.

A message is a batch, in order::

    router ── encode_to_target ────▶ decode_to_target ─── target
    router ◀─ decode_from_target ─── encode_from_target ─ target
    router ── encode_to_draft ─────▶ decode_to_draft ──── draft
    router ◀─ decode_from_draft ──── encode_from_draft ── draft

These run once per step for all sessions of a replica, so they do as little per token as they can: nodes travel in
columns, and a router relays them without looking inside. Decoding never raises: a message that is no valid value is
dropped, and the number of those is returned. What depends on a session's state (ids, ranges, the sum of q) is
checked where that state is, by ``speculation.py`` and the engines.

What both protocols carry (parameters, rounds, statuses) is converted in ``values.py``, the public protocol in
``generation.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import assert_never

from pydantic import ValidationError

from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    Echo,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    SessionFailed,
    SparseDistribution,
    SpeculationWanted,
    TreeLost,
)
from paceline.rpc.values import (
    read_round,
    sampling_fields,
    sampling_to_proto,
    speculation_fields,
    speculation_to_proto,
    status_from_proto,
    status_to_proto,
    write_round,
)
from paceline.types import FinishReason, ReplicaStatus, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, target_pb2, types_pb2

MAX_STEP_S = 3600.0
"""Longest tree step that a draft may tell of, in seconds: the target averages them, and one absurd value would stay."""

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_FINISH_REASONS_TO_PROTO = {reason: number for number, reason in _FINISH_REASONS.items()}


@dataclass(frozen=True, slots=True)
class RelayedNodes:
    """Nodes on their way through a router, packed as the draft sent them."""

    session_id: str
    epoch: int
    context_len: int
    """Length of the context at the draft when it sent them."""
    message: types_pb2.Nodes


# -- router and target -------------------------------------------------------------------------------------------------


def encode_to_target(
    messages: Iterable[OpenSession | CloseSession | DraftState | Nodes | RelayedNodes | Echo],
) -> target_pb2.ToTarget:
    """A batch for a target."""
    batch = target_pb2.ToTarget()
    for message in messages:
        command = batch.commands.add()
        if isinstance(message, RelayedNodes):
            command.nodes.CopyFrom(message.message)
        elif isinstance(message, Nodes):
            _write_nodes(message, command.nodes)
        elif isinstance(message, DraftState):
            state = command.draft_state
            state.session_id, state.epoch, state.available = message.session_id, message.epoch, message.available
            state.draft_epoch, state.context_len = message.draft_epoch, message.context_len
        elif isinstance(message, OpenSession):
            _write_open(message, command.open_session)
        elif isinstance(message, CloseSession):
            command.close_session.session_id, command.close_session.epoch = message.session_id, message.epoch
        elif isinstance(message, Echo):
            command.echo.sent_ns = message.sent_ns
        else:
            assert_never(message)
    return batch


def decode_to_target(
    batch: target_pb2.ToTarget,
) -> tuple[list[OpenSession | CloseSession | DraftState | Nodes | Echo], int]:
    """The messages of a batch, and how many were dropped."""
    messages: list[OpenSession | CloseSession | DraftState | Nodes | Echo] = []
    for command in batch.commands:
        kind = command.WhichOneof("command")
        message: OpenSession | CloseSession | DraftState | Nodes | Echo | None = None
        if kind == "nodes":
            message = _read_nodes(command.nodes)
        elif kind == "draft_state":
            if session_id := command.draft_state.session_id:
                state = command.draft_state
                message = DraftState(session_id, state.epoch, state.available, state.draft_epoch, state.context_len)
        elif kind == "open_session":
            message = _read_open(command.open_session)
        elif kind == "close_session":
            message = _read_close(command.close_session)
        elif kind == "echo":
            message = Echo(command.echo.sent_ns)
        if message is not None:
            messages.append(message)
    return messages, len(batch.commands) - len(messages)


def encode_from_target(
    messages: Iterable[Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed | Echo],
    status: ReplicaStatus | None = None,
) -> target_pb2.FromTarget:
    """A batch of a target's, with its status when that is due."""
    batch = target_pb2.FromTarget()
    for message in messages:
        event = batch.events.add()
        if isinstance(message, Outcome):
            _write_outcome(message, event.outcome)
        elif isinstance(message, InFlight):
            in_flight = event.in_flight
            in_flight.session_id, in_flight.epoch = message.session_id, message.epoch
            in_flight.context_len = message.context_len
            in_flight.node_ids.extend(message.node_ids)
        elif isinstance(message, TreeLost):
            event.tree_lost.session_id, event.tree_lost.epoch = message.session_id, message.epoch
        elif isinstance(message, SpeculationWanted):
            wanted = event.speculation_wanted
            wanted.session_id, wanted.epoch, wanted.wanted = message.session_id, message.epoch, message.wanted
        elif isinstance(message, SessionFailed):
            _write_failed(message, event.session_failed)
        elif isinstance(message, Echo):
            event.echo.sent_ns = message.sent_ns
        else:
            assert_never(message)
    if status is not None:
        batch.status.CopyFrom(status_to_proto(status))
    return batch


def decode_from_target(
    batch: target_pb2.FromTarget,
) -> tuple[list[Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed | Echo], ReplicaStatus | None, int]:
    """The messages of a batch, the target's status if there is one, and how many of all these were dropped."""
    messages: list[Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed | Echo] = []
    for event in batch.events:
        kind = event.WhichOneof("event")
        message: Outcome | InFlight | TreeLost | SpeculationWanted | SessionFailed | Echo | None = None
        if kind == "outcome":
            message = _read_outcome(event.outcome)
        elif kind == "in_flight":
            if session_id := event.in_flight.session_id:
                part = event.in_flight
                message = InFlight(session_id, part.epoch, part.context_len, tuple(part.node_ids[:]))
        elif kind == "tree_lost":
            if session_id := event.tree_lost.session_id:
                message = TreeLost(session_id, event.tree_lost.epoch)
        elif kind == "speculation_wanted":
            if session_id := event.speculation_wanted.session_id:
                message = SpeculationWanted(session_id, event.speculation_wanted.epoch, event.speculation_wanted.wanted)
        elif kind == "session_failed":
            message = _read_failed(event.session_failed)
        elif kind == "echo":
            message = Echo(event.echo.sent_ns)
        if message is not None:
            messages.append(message)
    status = status_from_proto(batch.status)
    num_dropped = len(batch.events) - len(messages) + (batch.HasField("status") and status is None)
    return messages, status, num_dropped


# -- router and draft --------------------------------------------------------------------------------------------------


def encode_to_draft(messages: Iterable[OpenSession | CloseSession | Commit | Echo]) -> draft_pb2.ToDraft:
    """A batch for a draft."""
    batch = draft_pb2.ToDraft()
    for message in messages:
        command = batch.commands.add()
        if isinstance(message, Commit):
            commit = command.commit
            commit.session_id, commit.epoch = message.session_id, message.epoch
            commit.context_len = message.context_len
            commit.token_ids.extend(message.token_ids)
            commit.in_flight.extend(message.in_flight)
        elif isinstance(message, OpenSession):
            _write_open(message, command.open_session)
        elif isinstance(message, CloseSession):
            command.close_session.session_id, command.close_session.epoch = message.session_id, message.epoch
        elif isinstance(message, Echo):
            command.echo.sent_ns = message.sent_ns
        else:
            assert_never(message)
    return batch


def decode_to_draft(batch: draft_pb2.ToDraft) -> tuple[list[OpenSession | CloseSession | Commit | Echo], int]:
    """The messages of a batch, and how many were dropped."""
    messages: list[OpenSession | CloseSession | Commit | Echo] = []
    for command in batch.commands:
        kind = command.WhichOneof("command")
        message: OpenSession | CloseSession | Commit | Echo | None = None
        if kind == "commit":
            if session_id := command.commit.session_id:
                part = command.commit
                token_ids, in_flight = tuple(part.token_ids[:]), tuple(part.in_flight[:])
                message = Commit(session_id, part.epoch, part.context_len, token_ids, in_flight)
        elif kind == "open_session":
            message = _read_open(command.open_session)
        elif kind == "close_session":
            message = _read_close(command.close_session)
        elif kind == "echo":
            message = Echo(command.echo.sent_ns)
        if message is not None:
            messages.append(message)
    return messages, len(batch.commands) - len(messages)


def encode_from_draft(
    messages: Iterable[Nodes | SessionFailed | Echo], status: ReplicaStatus | None = None
) -> draft_pb2.FromDraft:
    """A batch of a draft's, with its status when that is due."""
    batch = draft_pb2.FromDraft()
    for message in messages:
        event = batch.events.add()
        if isinstance(message, Nodes):
            _write_nodes(message, event.nodes)
        elif isinstance(message, SessionFailed):
            _write_failed(message, event.session_failed)
        elif isinstance(message, Echo):
            event.echo.sent_ns = message.sent_ns
        else:
            assert_never(message)
    if status is not None:
        batch.status.CopyFrom(status_to_proto(status))
    return batch


def decode_from_draft(
    batch: draft_pb2.FromDraft,
) -> tuple[list[RelayedNodes | SessionFailed | Echo], ReplicaStatus | None, int]:
    """The messages of a batch, the draft's status if there is one, and how many of all these were dropped.

    The inside of nodes is not looked at: ``decode_to_target`` does that.
    """
    messages: list[RelayedNodes | SessionFailed | Echo] = []
    for event in batch.events:
        kind = event.WhichOneof("event")
        message: RelayedNodes | SessionFailed | Echo | None = None
        if kind == "nodes":
            if session_id := event.nodes.session_id:
                message = RelayedNodes(session_id, event.nodes.epoch, event.nodes.context_len, event.nodes)
        elif kind == "session_failed":
            message = _read_failed(event.session_failed)
        elif kind == "echo":
            message = Echo(event.echo.sent_ns)
        if message is not None:
            messages.append(message)
    status = status_from_proto(batch.status)
    num_dropped = len(batch.events) - len(messages) + (batch.HasField("status") and status is None)
    return messages, status, num_dropped


# -- one message of a batch: _write_* fills it in place, _read_* returns None if it is no valid value ------------------


def _write_nodes(message: Nodes, proto: types_pb2.Nodes) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    nodes = message.nodes
    proto.node_ids.extend([node.node_id for node in nodes])
    proto.parent_ids.extend([node.parent_id for node in nodes])
    proto.token_ids.extend([node.token_id for node in nodes])
    proto.probs.extend([node.prob for node in nodes])
    sampled = [node.sampled for node in nodes]
    if not all(sampled):
        proto.sampled.extend(sampled)
    qs = [node.q for node in nodes]
    if any(qs):
        for q in qs:
            entry = proto.qs.add()
            if q is not None:
                entry.token_ids.extend(q.token_ids)
                entry.probs.extend(q.probs)
    proto.idle, proto.step_s = message.idle, message.step_s


def _read_nodes(proto: types_pb2.Nodes) -> Nodes | None:
    session_id, step_s = proto.session_id, proto.step_s
    node_ids, parent_ids, token_ids = proto.node_ids[:], proto.parent_ids[:], proto.token_ids[:]
    probs, sampled = proto.probs[:], proto.sampled[:]
    size = len(node_ids)
    if not session_id or not 0 <= step_s <= MAX_STEP_S:
        return None
    if not len(parent_ids) == len(token_ids) == len(probs) == size or math.isnan(sum(probs)):
        return None
    if len(sampled) not in (0, size) or len(proto.qs) not in (0, size):
        return None
    nodes: tuple[Node, ...]
    if not sampled and not proto.qs:
        nodes = tuple(map(Node, node_ids, parent_ids, token_ids, probs))
    else:
        qs: list[SparseDistribution | None] = []
        for entry in proto.qs:
            q = SparseDistribution(tuple(entry.token_ids[:]), tuple(entry.probs[:]))
            if len(q.token_ids) != len(q.probs) or math.isnan(sum(q.probs)):
                return None
            qs.append(q if q.token_ids else None)
        flags = sampled or repeat(True)
        nodes = tuple(map(Node, node_ids, parent_ids, token_ids, probs, flags, qs or repeat(None)))
    return Nodes(session_id, proto.epoch, proto.context_len, nodes, proto.idle, step_s)


def _write_outcome(message: Outcome, proto: target_pb2.Outcome) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    proto.token_ids.extend(message.token_ids)
    proto.logprobs.extend(message.logprobs)
    write_round(message.round, proto.round)
    proto.finish_reason = _FINISH_REASONS_TO_PROTO[message.finish_reason]
    proto.cached_tokens = message.cached_tokens


def _read_outcome(proto: target_pb2.Outcome) -> Outcome | None:
    session_id, round_, reason = proto.session_id, read_round(proto.round), proto.finish_reason
    token_ids, logprobs = tuple(proto.token_ids[:]), tuple(proto.logprobs[:])
    if not session_id or round_ is None or reason not in _FINISH_REASONS or len(token_ids) != len(logprobs):
        return None
    finish_reason, cached_tokens = _FINISH_REASONS[reason], proto.cached_tokens
    return Outcome(
        session_id, proto.epoch, proto.context_len, token_ids, logprobs, round_, finish_reason, cached_tokens
    )


def _write_open(message: OpenSession, proto: types_pb2.OpenSession) -> None:
    proto.session_id, proto.epoch, proto.seed = message.session_id, message.epoch, message.seed
    proto.token_ids.extend(message.token_ids)
    proto.num_prompt_tokens = message.num_prompt_tokens
    # Every field is written, so that two versions with different defaults do not sample differently.
    proto.sampling.CopyFrom(sampling_to_proto(message.sampling, SamplingParams.model_fields))
    proto.speculation.CopyFrom(speculation_to_proto(message.speculation, SpeculationParams.model_fields))
    proto.eos_token_ids.extend(message.eos_token_ids)


def _read_open(proto: types_pb2.OpenSession) -> OpenSession | None:
    token_ids = tuple(proto.token_ids[:])
    if not proto.session_id or not 1 <= proto.num_prompt_tokens <= len(token_ids):
        return None
    if not proto.HasField("sampling") or not proto.HasField("speculation"):
        return None
    try:
        sampling = SamplingParams(**sampling_fields(proto.sampling))
        speculation = SpeculationParams(**speculation_fields(proto.speculation))
    except ValidationError:
        return None
    return OpenSession(
        session_id=proto.session_id,
        epoch=proto.epoch,
        token_ids=token_ids,
        num_prompt_tokens=proto.num_prompt_tokens,
        seed=proto.seed,
        sampling=sampling,
        speculation=speculation,
        eos_token_ids=tuple(proto.eos_token_ids[:]),
    )


def _read_close(proto: types_pb2.CloseSession) -> CloseSession | None:
    return CloseSession(proto.session_id, proto.epoch) if proto.session_id else None


def _write_failed(message: SessionFailed, proto: types_pb2.SessionFailed) -> None:
    proto.session_id, proto.epoch = message.session_id, message.epoch
    # The text may quote anything; what UTF-8 cannot carry becomes a question mark.
    proto.message = message.message.encode("utf-8", "replace").decode()


def _read_failed(proto: types_pb2.SessionFailed) -> SessionFailed | None:
    return SessionFailed(proto.session_id, proto.epoch, proto.message) if proto.session_id else None
