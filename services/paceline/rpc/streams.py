"""Converts the streams between router and replicas to protobuf and back. Knows no sockets and no engines.

A batch is one protobuf message, in order::

    router ── encode_to_target ────▶ decode_to_target ─── target
    router ◀─ decode_from_target ─── encode_from_target ─ target
    router ── encode_to_draft ─────▶ decode_to_draft ──── draft
    router ◀─ decode_from_draft ──── encode_from_draft ── draft

These run once per step for all sessions of a replica, so they do as little per token as they can: nodes travel in
columns, and a router relays them without looking inside. Decoding never raises: an invalid message is dropped and
counted. What depends on a session's state (ids, ranges, the sum of q) is checked where that state is, by
``core/tree.py`` and the engines.

What both protocols carry (parameters, rounds, statuses) is converted in ``values.py``, the public protocol in
``generation.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import ValidationError

from paceline.messages import (
    STATE_BYTES,
    CloseSession,
    Commit,
    DraftState,
    Echo,
    FromDraft,
    FromTarget,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    RelayedNodes,
    SessionFailed,
    SparseDistribution,
    SpeculationWanted,
    States,
    ToDraft,
    ToTarget,
    TreeLost,
)
from paceline.rpc.values import (
    read_round,
    read_top_logprobs,
    sampling_fields,
    sampling_to_proto,
    speculation_fields,
    speculation_to_proto,
    status_from_proto,
    status_to_proto,
    write_round,
    write_top_logprobs,
)
from paceline.types import FinishReason, ReplicaStatus, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, target_pb2, types_pb2

MAX_STEP_S = 3600.0
"""Longest tree step that a draft may report, in seconds: the target averages them, and one absurd value would stay."""

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_NODE_COLUMNS = attrgetter("node_id", "parent_id", "token_id", "prob", "sampled", "q")
_FINISH_REASONS_TO_PROTO = {reason: number for number, reason in _FINISH_REASONS.items()}

# -- one message of a batch: _write_* fills it in place, _read_* returns None if it is invalid -------------------------


def _write_nodes(message: Nodes, proto: types_pb2.Nodes) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    if message.nodes:
        node_ids, parent_ids, token_ids, probs, sampled, qs = zip(*map(_NODE_COLUMNS, message.nodes), strict=True)
        proto.node_ids[:], proto.parent_ids[:], proto.token_ids[:], proto.probs[:] = (
            node_ids,
            parent_ids,
            token_ids,
            probs,
        )
        if not all(sampled):
            proto.sampled[:] = sampled
        if any(qs):
            for q in qs:
                entry = proto.qs.add()
                if q is not None:
                    entry.token_ids, entry.probs = q.packed_ids, q.packed_probs
    proto.step_s = message.step_s
    if message.idle:
        proto.idle = True


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
            q = SparseDistribution(entry.token_ids, entry.probs)
            if len(q.packed_ids) % 4 or len(q.packed_probs) != 2 * len(q.packed_ids):
                return None
            qs.append(q if q.packed_ids else None)
        flags = sampled or repeat(True)
        nodes = tuple(map(Node, node_ids, parent_ids, token_ids, probs, flags, qs or repeat(None)))
    return Nodes(session_id, proto.epoch, proto.context_len, nodes, proto.idle, step_s)


def _write_relayed(message: RelayedNodes, proto: types_pb2.Nodes) -> None:
    assert isinstance(message.packed, types_pb2.Nodes)
    proto.MergeFrom(message.packed)  # it is empty, and copying into it takes twice as long


def _read_relayed(proto: types_pb2.Nodes) -> RelayedNodes | None:
    """The nodes unopened: ``_read_nodes`` validates them at the target."""
    session_id = proto.session_id
    return RelayedNodes(session_id, proto.epoch, proto.context_len, proto) if session_id else None


def unpacked(message: RelayedNodes) -> Nodes | None:
    """The nodes that a router relays, for one that looks at them; None: they are malformed."""
    assert isinstance(message.packed, types_pb2.Nodes)
    return _read_nodes(message.packed)


def _write_outcome(message: Outcome, proto: target_pb2.Outcome) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    proto.token_ids[:], proto.logprobs[:] = message.token_ids, message.logprobs
    write_round(message.round, proto.round)
    if message.finish_reason is not None:
        proto.finish_reason = _FINISH_REASONS_TO_PROTO[message.finish_reason]
    if message.cached_tokens:
        proto.cached_tokens = message.cached_tokens
    if message.top_logprobs:
        write_top_logprobs(message.top_logprobs, proto.top_logprobs)


def _read_outcome(proto: target_pb2.Outcome) -> Outcome | None:
    session_id, round_, reason = proto.session_id, read_round(proto.round), proto.finish_reason
    token_ids, logprobs = tuple(proto.token_ids[:]), tuple(proto.logprobs[:])
    if not session_id or round_ is None or reason not in _FINISH_REASONS or len(token_ids) != len(logprobs):
        return None
    finish_reason, cached_tokens = _FINISH_REASONS[reason], proto.cached_tokens
    try:
        top = read_top_logprobs(proto.top_logprobs) if proto.top_logprobs else ()
    except ValueError:
        return None
    return Outcome(
        session_id, proto.epoch, proto.context_len, token_ids, logprobs, round_, finish_reason, cached_tokens, top
    )


def _write_in_flight(message: InFlight, proto: target_pb2.InFlight) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    if message.node_ids:
        proto.node_ids[:] = message.node_ids


def _read_in_flight(proto: target_pb2.InFlight) -> InFlight | None:
    session_id = proto.session_id
    return InFlight(session_id, proto.epoch, proto.context_len, tuple(proto.node_ids[:])) if session_id else None


def _write_commit(message: Commit, proto: draft_pb2.Commit) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    if message.token_ids:
        proto.token_ids[:] = message.token_ids
    if message.in_flight:
        proto.in_flight[:] = message.in_flight


def _read_commit(proto: draft_pb2.Commit) -> Commit | None:
    session_id = proto.session_id
    if not session_id:
        return None
    return Commit(session_id, proto.epoch, proto.context_len, tuple(proto.token_ids[:]), tuple(proto.in_flight[:]))


def _read_states(proto: types_pb2.States) -> States | None:
    width, packed = proto.width, proto.packed
    if not proto.session_id or not width or not packed or len(packed) % (STATE_BYTES * width):
        return None
    return States(proto.session_id, proto.epoch, proto.position, width, packed)


def _write_open(message: OpenSession, proto: types_pb2.OpenSession) -> None:
    proto.session_id, proto.epoch, proto.seed = message.session_id, message.epoch, message.seed
    proto.token_ids.extend(message.token_ids)
    proto.num_prompt_tokens = message.num_prompt_tokens
    # Every field is written, so that two versions with different defaults do not sample differently.
    proto.sampling.CopyFrom(sampling_to_proto(message.sampling, SamplingParams.model_fields))
    proto.speculation.CopyFrom(speculation_to_proto(message.speculation, SpeculationParams.model_fields))
    proto.eos_token_ids.extend(message.eos_token_ids)
    proto.cache_salt = message.cache_salt
    if message.traceparent:
        proto.traceparent = message.traceparent


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
        cache_salt=proto.cache_salt,
        traceparent=proto.traceparent,
    )


def _write_failed(message: SessionFailed, proto: types_pb2.SessionFailed) -> None:
    proto.session_id, proto.epoch = message.session_id, message.epoch
    # The text may quote anything; what UTF-8 cannot carry becomes a question mark.
    proto.message = message.message.encode("utf-8", "replace").decode()
    proto.request_at_fault = message.request_at_fault


def _read_failed(proto: types_pb2.SessionFailed) -> SessionFailed | None:
    if not proto.session_id:
        return None
    return SessionFailed(proto.session_id, proto.epoch, proto.message, proto.request_at_fault)


class _Form(NamedTuple):
    """Wire form of one kind of message: its field in the oneof of a batch entry, and the conversion both ways."""

    field: str
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


def _flat(field: str, kind: type[Any]) -> _Form:
    """Form of a dataclass of scalars that have the same names in the protocol."""
    names = [item.name for item in fields(kind)]
    needs_id = "session_id" in names

    def write(message: Any, proto: Any) -> None:
        for name in names:
            setattr(proto, name, getattr(message, name))

    def read(proto: Any) -> Any:
        if needs_id and not proto.session_id:
            return None
        return kind(*[getattr(proto, name) for name in names])

    return _Form(field, write, read)


_OPEN = _Form("open_session", _write_open, _read_open)
_CLOSE = _flat("close_session", CloseSession)
_FAILED = _Form("session_failed", _write_failed, _read_failed)
_ECHO = _flat("echo", Echo)
_STATES = _Form("states", _flat("states", States).write, _read_states)

_TO_TARGET = {
    OpenSession: _OPEN,
    CloseSession: _CLOSE,
    DraftState: _flat("draft_state", DraftState),
    Nodes: _Form("nodes", _write_nodes, _read_nodes),
    RelayedNodes: _Form("nodes", _write_relayed, _read_nodes),
    Echo: _ECHO,
}
_FROM_TARGET = {
    Outcome: _Form("outcome", _write_outcome, _read_outcome),
    InFlight: _Form("in_flight", _write_in_flight, _read_in_flight),
    States: _STATES,
    TreeLost: _flat("tree_lost", TreeLost),
    SpeculationWanted: _flat("speculation_wanted", SpeculationWanted),
    SessionFailed: _FAILED,
    Echo: _ECHO,
}
_TO_DRAFT = {
    OpenSession: _OPEN,
    CloseSession: _CLOSE,
    Commit: _Form("commit", _write_commit, _read_commit),
    States: _STATES,
    Echo: _ECHO,
}
_FROM_DRAFT = {
    Nodes: _Form("nodes", _write_nodes, _read_relayed),
    RelayedNodes: _Form("nodes", _write_relayed, _read_relayed),
    SessionFailed: _FAILED,
    Echo: _ECHO,
}


# -- batches -----------------------------------------------------------------------------------------------------------


def encode_to_target(messages: Iterable[ToTarget | Echo]) -> target_pb2.ToTarget:
    """Packs a batch for a target."""
    batch = target_pb2.ToTarget()
    _write(_TO_TARGET, messages, batch.commands)
    return batch


def decode_to_target(batch: target_pb2.ToTarget) -> tuple[list[ToTarget | Echo], int]:
    """Returns the messages of a batch and how many were dropped."""
    messages = _read(_TO_TARGET, batch.commands, "command")
    return messages, len(batch.commands) - len(messages)


def encode_from_target(
    messages: Iterable[FromTarget | Echo], status: ReplicaStatus | None = None
) -> target_pb2.FromTarget:
    """Packs a batch from a target, with its status when that is due."""
    batch = target_pb2.FromTarget()
    _write(_FROM_TARGET, messages, batch.events)
    if status is not None:
        batch.status.CopyFrom(status_to_proto(status))
    return batch


def decode_from_target(batch: target_pb2.FromTarget) -> tuple[list[FromTarget | Echo], ReplicaStatus | None, int]:
    """Returns the messages of a batch, the target's status if there is one, and how many of all these were dropped."""
    messages = _read(_FROM_TARGET, batch.events, "event")
    status = status_from_proto(batch.status)
    return messages, status, len(batch.events) - len(messages) + (batch.HasField("status") and status is None)


def encode_to_draft(messages: Iterable[ToDraft | Echo]) -> draft_pb2.ToDraft:
    """Packs a batch for a draft."""
    batch = draft_pb2.ToDraft()
    _write(_TO_DRAFT, messages, batch.commands)
    return batch


def decode_to_draft(batch: draft_pb2.ToDraft) -> tuple[list[ToDraft | Echo], int]:
    """Returns the messages of a batch and how many were dropped."""
    messages = _read(_TO_DRAFT, batch.commands, "command")
    return messages, len(batch.commands) - len(messages)


def encode_from_draft(messages: Iterable[FromDraft | Echo], status: ReplicaStatus | None = None) -> draft_pb2.FromDraft:
    """Packs a batch from a draft, with its status when that is due."""
    batch = draft_pb2.FromDraft()
    _write(_FROM_DRAFT, messages, batch.events)
    if status is not None:
        batch.status.CopyFrom(status_to_proto(status))
    return batch


def decode_from_draft(batch: draft_pb2.FromDraft) -> tuple[list[FromDraft | Echo], ReplicaStatus | None, int]:
    """Returns the messages of a batch, the draft's status if there is one, and how many of all these were dropped.

    Nodes stay packed: ``decode_to_target`` validates them.
    """
    messages = _read(_FROM_DRAFT, batch.events, "event")
    status = status_from_proto(batch.status)
    return messages, status, len(batch.events) - len(messages) + (batch.HasField("status") and status is None)


def _write(forms: Mapping[type[Any], _Form], messages: Iterable[Any], entries: Any) -> None:
    for message in messages:
        field, write, _ = forms[type(message)]
        write(message, getattr(entries.add(), field))


def _read(forms: Mapping[type[Any], _Form], entries: Iterable[Any], oneof: str) -> list[Any]:
    readers = {form.field: form.read for form in forms.values()}
    messages = []
    for entry in entries:
        field = entry.WhichOneof(oneof)  # None: empty, or a kind that this version does not know
        if field is not None and (message := readers[field](getattr(entry, field))) is not None:
            messages.append(message)
    return messages
