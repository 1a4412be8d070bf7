"""Converts the streams between router and replicas to protobuf and back. Knows no sockets and no engines.

A batch is one protobuf message, in order::

    router ── encode_to_target ────▶ decode_to_target ─── target
    router ◀─ decode_from_target ─── encode_from_target ─ target
    router ── encode_to_draft ─────▶ decode_to_draft ──── draft
    router ◀─ decode_from_draft ──── encode_from_draft ── draft

These run once per step for all sessions of a replica, so they do little per session and token. Messages of several
sessions travel in columns, and a router relays nodes as bytes. Decoding never raises: an invalid message is dropped and
counted. What depends on a session's state (ids, ranges, the sum of q) is checked where that state is, by
``core/tree.py`` and the engines.

What both protocols carry (parameters, rounds, statuses) is converted in ``values.py``, the public protocol in
``generation.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate, chain, groupby, pairwise, repeat, starmap
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from pydantic import ValidationError

from paceline.errors.refusals import explain_parameter
from paceline.messages import (
    HINT_BYTES,
    MAX_STEP_S,
    STATE_BYTES,
    CloseSession,
    Commit,
    DraftState,
    Echo,
    FromDraft,
    FromTarget,
    Hint,
    InFlight,
    NodeColumns,
    Nodes,
    OpenSession,
    Outcome,
    PromptScores,
    RelayedNodes,
    SessionFailed,
    SparseDistribution,
    SpeculationWanted,
    States,
    ToDraft,
    ToTarget,
    TreeLost,
)
from paceline.rpc.protocol import unknown_fields
from paceline.rpc.values import (
    CAUSES_TO_PROTO,
    read_prompt_logprobs,
    read_round,
    read_top_logprobs,
    round_of,
    sampling_fields,
    sampling_to_proto,
    speculation_fields,
    speculation_to_proto,
    status_from_proto,
    status_to_proto,
    write_prompt_logprobs,
    write_round,
    write_top_logprobs,
)
from paceline.types import FinishReason, ReplicaStatus, SamplingParams, SpeculationParams, TopLogprobs
from paceline.v1 import draft_pb2, target_pb2, types_pb2

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_UNKNOWN = object()
"""Placeholder for a finish reason that this version does not know."""
_FINISH_REASONS_TO_PROTO = {reason: number for number, reason in _FINISH_REASONS.items()}
_FURTHER_ROUND_COLUMNS = attrgetter("lookup_drafted", "lookup_accepted", "head_drafted", "head_accepted")

T = TypeVar("T")

# -- one message of a batch: _write_* fills it in place, _read_* returns None if it is invalid -------------------------


def pack_nodes(message: Nodes) -> bytes:
    proto = types_pb2.Nodes()
    node_ids, parent_ids, token_ids, probs, sampled, qs = NodeColumns.of(message.nodes).columns
    proto.node_ids.extend(node_ids)
    proto.parent_ids.extend(parent_ids)
    proto.token_ids.extend(token_ids)
    proto.probs.extend(probs)
    proto.sampled.extend(sampled)
    for q in qs:
        entry = proto.qs.add()
        if q is not None:
            entry.token_ids, entry.probs = q.packed_ids, q.packed_probs
    proto.step_s = message.step_s
    if message.idle:
        proto.idle = True
    return proto.SerializeToString()


def unpacked(message: RelayedNodes) -> Nodes | None:
    """The nodes that a router relays, for one that looks at them; None: they are malformed."""
    return read_tree(message.session_id, message.epoch, message.context_len, message.packed)


def read_tree(session_id: str, epoch: int, context_len: int, packed: bytes) -> Nodes | None:
    found = _unpack(packed)
    if found is None or not session_id or not 0 <= found[2] <= MAX_STEP_S:
        return None
    return Nodes(session_id, epoch, context_len, *found)


def _unpack(packed: bytes) -> tuple[NodeColumns, bool, float] | None:
    try:
        proto = types_pb2.Nodes.FromString(packed)
    except DecodeError:
        return None
    node_ids, parent_ids, token_ids = tuple(proto.node_ids[:]), tuple(proto.parent_ids[:]), tuple(proto.token_ids[:])
    probs, sampled, packed_qs = tuple(proto.probs[:]), tuple(proto.sampled[:]), proto.qs
    size = len(node_ids)
    if not len(parent_ids) == len(token_ids) == len(probs) == size or math.isnan(sum(probs)):
        return None
    if len(sampled) not in (0, size) or len(packed_qs) not in (0, size):
        return None
    qs: list[SparseDistribution | None] = []
    for entry in packed_qs:
        q = SparseDistribution(entry.token_ids, entry.probs)
        if len(q.packed_ids) % 4 or len(q.packed_probs) != 2 * len(q.packed_ids):
            return None
        qs.append(q if q.packed_ids else None)
    return NodeColumns(node_ids, parent_ids, token_ids, probs, sampled, tuple(qs)), proto.idle, proto.step_s


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


def _write_scores(message: PromptScores, proto: target_pb2.PromptScores) -> None:
    proto.session_id, proto.epoch = message.session_id, message.epoch
    write_prompt_logprobs(message.logprobs, proto.logprobs)


def _read_scores(proto: target_pb2.PromptScores) -> PromptScores | None:
    if not proto.session_id:
        return None
    try:
        return PromptScores(proto.session_id, proto.epoch, read_prompt_logprobs(proto.logprobs))
    except ValueError:
        return None


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


def _write_hint(message: Hint, proto: types_pb2.Hint) -> None:
    proto.session_id, proto.epoch, proto.context_len = message.session_id, message.epoch, message.context_len
    proto.node_ids[:] = message.node_ids
    proto.weight, proto.packed = message.weight, message.packed


def _read_hint(proto: types_pb2.Hint) -> Hint | None:
    node_ids, packed, weight = tuple(proto.node_ids[:]), proto.packed, proto.weight
    if not proto.session_id or not node_ids or not packed or len(packed) % (HINT_BYTES * len(node_ids)):
        return None
    if not 0.0 < weight <= 1.0:
        return None
    return Hint(proto.session_id, proto.epoch, proto.context_len, node_ids, weight, packed)


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
    proto.suspected_s = message.suspected_s
    if message.pages_from:
        proto.pages_from, proto.pages_timeout_s = message.pages_from, message.pages_timeout_s


def _read_open_at_target(proto: types_pb2.OpenSession) -> OpenSession | SessionFailed | None:
    if proto.session_id and (unknown := [*unknown_fields(proto.sampling, "sampling.")]):
        reason = f"{unknown[0]} is set: this version of Paceline does not know the field"
        return SessionFailed(proto.session_id, proto.epoch, reason)
    return _read_open(proto)


def _read_open(proto: types_pb2.OpenSession) -> OpenSession | SessionFailed | None:
    token_ids = tuple(proto.token_ids[:])
    if not proto.session_id or not 1 <= proto.num_prompt_tokens <= len(token_ids):
        return None
    if not proto.HasField("sampling") or not proto.HasField("speculation"):
        return None
    try:
        sampling = SamplingParams(**sampling_fields(proto.sampling))
        speculation = SpeculationParams(**speculation_fields(proto.speculation))
    except ValidationError as error:
        model = SamplingParams if error.title == SamplingParams.__name__ else SpeculationParams
        return SessionFailed(proto.session_id, proto.epoch, explain_parameter(error, model))
    pages_from = proto.pages_from if 0 < proto.pages_timeout_s <= MAX_STEP_S else ""
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
        suspected_s=proto.suspected_s,
        pages_from=pages_from,
        pages_timeout_s=proto.pages_timeout_s if pages_from else 0.0,
    )


def _write_failed(message: SessionFailed, proto: types_pb2.SessionFailed) -> None:
    proto.session_id, proto.epoch = message.session_id, message.epoch
    # The text may quote anything; what UTF-8 cannot carry becomes a question mark.
    proto.message = message.message.encode("utf-8", "replace").decode()
    proto.request_at_fault = message.request_at_fault
    proto.turned_away = message.turned_away


def _read_failed(proto: types_pb2.SessionFailed) -> SessionFailed | None:
    if not proto.session_id:
        return None
    return SessionFailed(proto.session_id, proto.epoch, proto.message, proto.request_at_fault, proto.turned_away)


# -- several messages of one kind, in columns: _write_* fills them in place, _read_* returns the valid messages and the
# -- number of the others; of columns that do not fit together none is valid ------------------------------------------


def _write_trees(messages: Sequence[Nodes], proto: types_pb2.TreeUpdates) -> None:
    _write_headers(messages, proto)
    found = Nodes.write_plain(
        [(m.nodes.columns, m.idle, m.step_s) if isinstance(m.nodes, NodeColumns) else None for m in messages]
    )
    proto.nodes[:] = [packed or pack_nodes(message) for message, packed in zip(messages, found, strict=True)]


def _write_relayed(messages: Sequence[RelayedNodes], proto: types_pb2.TreeUpdates) -> None:
    _write_headers(messages, proto)
    proto.nodes[:] = [message.packed for message in messages]


def _read_trees(proto: types_pb2.TreeUpdates) -> tuple[list[Nodes], int]:
    columns = proto.session_ids[:], proto.epochs[:], proto.context_lens[:], proto.nodes[:]
    size = len(columns[0])
    if not len(columns[1]) == len(columns[2]) == len(columns[3]) == size:
        return [], max(1, size)
    messages = []
    for row, found in zip(zip(*columns, strict=True), Nodes.read_plain(columns[3]), strict=True):
        if found is None:
            nodes = read_tree(*row)
        elif session_id := row[0]:
            of_nodes, idle, step_s = found
            nodes = Nodes(session_id, row[1], row[2], NodeColumns(*of_nodes), idle, step_s)
        else:
            nodes = None
        if nodes is not None:
            messages.append(nodes)
    return messages, size - len(messages)


def _read_relayed(proto: types_pb2.TreeUpdates) -> tuple[list[RelayedNodes], int]:
    return _of_rows(RelayedNodes, proto.session_ids[:], proto.epochs[:], proto.context_lens[:], proto.nodes[:])


def _write_outcomes(messages: Sequence[Outcome], proto: target_pb2.Outcomes) -> None:
    _write_headers(messages, proto)
    proto.num_tokens[:], proto.token_ids = _joined("I", [message.token_ids for message in messages])
    proto.logprobs = _joined("d", [message.logprobs for message in messages])[1]
    rounds = [message.round for message in messages]
    proto.drafted[:], proto.accepted[:] = [r.num_drafted for r in rounds], [r.num_accepted for r in rounds]
    proto.causes[:] = [CAUSES_TO_PROTO[r.cause] for r in rounds]
    if any(r.lookup_drafted or r.head_drafted for r in rounds):
        columns = zip(*map(_FURTHER_ROUND_COLUMNS, rounds), strict=True)
        proto.lookup_drafted[:], proto.lookup_accepted[:], proto.head_drafted[:], proto.head_accepted[:] = columns
    reasons, cached = [m.finish_reason for m in messages], [m.cached_tokens for m in messages]
    if any(reasons):
        proto.finish_reasons[:] = [_FINISH_REASONS_TO_PROTO[reason] for reason in reasons]
    if any(cached):
        proto.cached_tokens[:] = cached
    top = [message.top_logprobs for message in messages]
    if any(top):
        proto.num_top_logprobs[:] = [len(places) for places in top]
        write_top_logprobs(list(chain.from_iterable(top)), proto.top_logprobs)


def _read_outcomes(proto: target_pb2.Outcomes) -> tuple[list[Outcome], int]:
    session_ids, counts = proto.session_ids[:], proto.num_tokens[:]
    size = len(session_ids)
    rounds: list[list[Any]] = [proto.drafted[:], proto.accepted[:], proto.causes[:]]
    further = [proto.lookup_drafted[:], proto.lookup_accepted[:], proto.head_drafted[:], proto.head_accepted[:]]
    if any(further):
        rounds += [column or [0] * size for column in further]
    top: list[tuple[TopLogprobs, ...]] = [()] * size
    if proto.top_logprobs:
        try:
            top = _cut(read_top_logprobs(proto.top_logprobs), proto.num_top_logprobs[:])
        except ValueError:
            top = []
    columns: list[list[Any]] = [
        proto.epochs[:],
        proto.context_lens[:],
        _parts("I", proto.token_ids, counts),
        _parts("d", proto.logprobs, counts),
        list(map(round_of, *rounds)),
        list(map(_FINISH_REASONS.get, proto.finish_reasons, repeat(_UNKNOWN))) or [None] * size,
        proto.cached_tokens[:] or [0] * size,
        top,
    ]
    if set(map(len, (*columns, *rounds))) != {size}:
        return [], max(1, size)
    valid_rounds, reasons = columns[4:6]
    if not all(valid_rounds) or _UNKNOWN in reasons:
        names = zip(session_ids, valid_rounds, reasons, strict=True)
        session_ids = [name if round_ and reason is not _UNKNOWN else "" for name, round_, reason in names]
    return _of_rows(Outcome, session_ids, *columns)


def _write_in_flights(messages: Sequence[InFlight], proto: target_pb2.InFlights) -> None:
    _write_headers(messages, proto)
    proto.num_nodes[:], proto.node_ids = _joined("I", [message.node_ids for message in messages])


def _read_in_flights(proto: target_pb2.InFlights) -> tuple[list[InFlight], int]:
    node_ids = _parts("I", proto.node_ids, proto.num_nodes[:])
    return _of_rows(InFlight, proto.session_ids[:], proto.epochs[:], proto.context_lens[:], node_ids)


def _write_commits(messages: Sequence[Commit], proto: draft_pb2.Commits) -> None:
    _write_headers(messages, proto)
    proto.num_tokens[:], proto.token_ids = _joined("I", [message.token_ids for message in messages])
    proto.num_in_flight[:], proto.in_flight = _joined("I", [message.in_flight for message in messages])


def _read_commits(proto: draft_pb2.Commits) -> tuple[list[Commit], int]:
    token_ids = _parts("I", proto.token_ids, proto.num_tokens[:])
    in_flight = _parts("I", proto.in_flight, proto.num_in_flight[:])
    return _of_rows(Commit, proto.session_ids[:], proto.epochs[:], proto.context_lens[:], token_ids, in_flight)


def _of_rows(kind: Callable[..., T], session_ids: list[str], *columns: list[Any]) -> tuple[list[T], int]:
    """One message of each row that names a session, and the number of the other rows."""
    size = len(session_ids)
    for column in columns:
        if len(column) != size:
            return [], max(1, size)
    if all(session_ids):
        return list(map(kind, session_ids, *columns)), 0
    rows = [row for row in zip(session_ids, *columns, strict=True) if row[0]]
    return list(starmap(kind, rows)), size - len(rows)


def _write_headers(messages: Sequence[Outcome | InFlight | Commit | Nodes | RelayedNodes], proto: Any) -> None:
    proto.session_ids[:] = [message.session_id for message in messages]
    proto.epochs[:] = [message.epoch for message in messages]
    proto.context_lens[:] = [message.context_len for message in messages]


def _joined(code: str, rows: Sequence[Sequence[float]]) -> tuple[list[int], bytes]:
    """Returns the length of each row, and all numbers packed by ``struct``: a repeated field takes ten times as
    long."""
    flat = list(chain.from_iterable(rows))
    return list(map(len, rows)), struct.pack(f"<{len(flat)}{code}", *flat)


def _parts(code: str, packed: bytes, counts: list[int]) -> list[tuple[Any, ...]]:
    """The numbers of each row; of no row if there are more than the counts say, or fewer."""
    size = sum(counts)
    if len(packed) != size * struct.calcsize(f"<{code}"):
        return []
    return _cut(struct.unpack(f"<{size}{code}", packed), counts)


def _cut(values: tuple[T, ...], counts: list[int]) -> list[tuple[T, ...]]:
    """The values of each row; of no row if there are more than the counts say, or fewer."""
    ends = list(accumulate(counts, initial=0))
    return [values[start:end] for start, end in pairwise(ends)] if ends[-1] == len(values) else []


class _Form(NamedTuple):
    """Wire form of one kind of message: entries of a batch that several make which follow each other, and back."""

    write: Callable[[Sequence[Any], Any], None]
    """Adds at least one message to the entries of a batch."""
    readers: Mapping[str, Callable[[Any], tuple[list[Any], int]]]
    """Keyed by the field in the oneof of an entry: the valid messages in it, and the number of the others."""


def _singly(field: str, write: Callable[[Any, Any], None], read: Callable[[Any], Any]) -> _Form:
    """Form of messages that have an entry each."""

    def write_each(messages: Sequence[Any], entries: Any) -> None:
        for message in messages:
            write(message, getattr(entries.add(), field))

    def read_one(proto: Any) -> tuple[list[Any], int]:
        message = read(proto)
        return ([], 1) if message is None else ([message], 0)

    return _Form(write_each, {field: read_one})


def _in_columns(field: str, write: Callable[[Any, Any], None], read: Callable[[Any], tuple[list[Any], int]]) -> _Form:
    """Form of messages that share an entry."""
    return _Form(lambda messages, entries: write(messages, getattr(entries.add(), field)), {field: read})


def _either(one: _Form, several: _Form) -> _Form:
    """One message alone costs less in an entry of its own, several cost less in columns."""

    def write(messages: Sequence[Any], entries: Any) -> None:
        (one if len(messages) == 1 else several).write(messages, entries)

    return _Form(write, {**one.readers, **several.readers})


def _flat(field: str, kind: type[Any], read: Callable[[Any], Any] | None = None) -> _Form:
    """Form of a dataclass of scalars that have the same names in the protocol. ``read`` replaces the obvious one."""
    names = [item.name for item in fields(kind)]
    optional = {item.name for item in fields(kind) if item.default is None}
    needs_id = "session_id" in names

    def write(message: Any, proto: Any) -> None:
        for name in names:
            if (value := getattr(message, name)) is not None:
                setattr(proto, name, value)

    def read_fields(proto: Any) -> Any:
        if needs_id and not proto.session_id:
            return None
        return kind(
            *[None if name in optional and not proto.HasField(name) else getattr(proto, name) for name in names]
        )

    return _singly(field, write, read or read_fields)


_OPEN_AT_TARGET = _singly("open_session", _write_open, _read_open_at_target)
_OPEN_AT_DRAFT = _singly("open_session", _write_open, _read_open)
_CLOSE = _flat("close_session", CloseSession)
_FAILED = _singly("session_failed", _write_failed, _read_failed)
_ECHO = _flat("echo", Echo)
_SCORES = _singly("prompt_scores", _write_scores, _read_scores)
_STATES = _flat("states", States, _read_states)
_HINT = _singly("hint", _write_hint, _read_hint)

_TO_TARGET = {
    OpenSession: _OPEN_AT_TARGET,
    CloseSession: _CLOSE,
    DraftState: _flat("draft_state", DraftState),
    Nodes: _in_columns("tree_updates", _write_trees, _read_trees),
    RelayedNodes: _in_columns("tree_updates", _write_relayed, _read_trees),
    Echo: _ECHO,
}
_FROM_TARGET = {
    Outcome: _either(
        _singly("outcome", _write_outcome, _read_outcome), _in_columns("outcomes", _write_outcomes, _read_outcomes)
    ),
    PromptScores: _SCORES,
    InFlight: _either(
        _singly("in_flight", _write_in_flight, _read_in_flight),
        _in_columns("in_flights", _write_in_flights, _read_in_flights),
    ),
    States: _STATES,
    Hint: _HINT,
    TreeLost: _flat("tree_lost", TreeLost),
    SpeculationWanted: _flat("speculation_wanted", SpeculationWanted),
    SessionFailed: _FAILED,
    Echo: _ECHO,
}
_TO_DRAFT = {
    OpenSession: _OPEN_AT_DRAFT,
    CloseSession: _CLOSE,
    Commit: _either(
        _singly("commit", _write_commit, _read_commit), _in_columns("commits", _write_commits, _read_commits)
    ),
    States: _STATES,
    Hint: _HINT,
    Echo: _ECHO,
}
_FROM_DRAFT = {
    Nodes: _in_columns("tree_updates", _write_trees, _read_relayed),
    RelayedNodes: _in_columns("tree_updates", _write_relayed, _read_relayed),
    SessionFailed: _FAILED,
    Echo: _ECHO,
}


def _readers(forms: Mapping[type[Any], _Form]) -> Mapping[str | None, Callable[[Any], tuple[list[Any], int]]]:
    return {field: read for form in forms.values() for field, read in form.readers.items()}


_TO_TARGET_READERS, _FROM_TARGET_READERS = _readers(_TO_TARGET), _readers(_FROM_TARGET)
_TO_DRAFT_READERS, _FROM_DRAFT_READERS = _readers(_TO_DRAFT), _readers(_FROM_DRAFT)


# -- batches -----------------------------------------------------------------------------------------------------------


def encode_to_target(messages: Iterable[ToTarget | Echo]) -> target_pb2.ToTarget:
    """Packs a batch for a target."""
    batch = target_pb2.ToTarget()
    _write(_TO_TARGET, messages, batch.commands)
    return batch


def decode_to_target(batch: target_pb2.ToTarget) -> tuple[list[ToTarget | Echo | SessionFailed], int]:
    """Returns the messages of a batch and how many were dropped; SessionFailed: the answer to an opening that this
    version cannot follow."""
    return _read(_TO_TARGET_READERS, batch.commands, "command")


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
    messages, num_malformed = _read(_FROM_TARGET_READERS, batch.events, "event")
    if not batch.HasField("status"):
        return messages, None, num_malformed
    status = status_from_proto(batch.status)
    return messages, status, num_malformed + (status is None)


def encode_to_draft(messages: Iterable[ToDraft | Echo]) -> draft_pb2.ToDraft:
    """Packs a batch for a draft."""
    batch = draft_pb2.ToDraft()
    _write(_TO_DRAFT, messages, batch.commands)
    return batch


def decode_to_draft(batch: draft_pb2.ToDraft) -> tuple[list[ToDraft | Echo | SessionFailed], int]:
    """Returns the messages of a batch and how many were dropped, as ``decode_to_target``."""
    return _read(_TO_DRAFT_READERS, batch.commands, "command")


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
    messages, num_malformed = _read(_FROM_DRAFT_READERS, batch.events, "event")
    if not batch.HasField("status"):
        return messages, None, num_malformed
    status = status_from_proto(batch.status)
    return messages, status, num_malformed + (status is None)


def _write(forms: Mapping[type[Any], _Form], messages: Iterable[Any], entries: Any) -> None:
    for kind, run in groupby(messages, type):
        forms[kind].write(list(run), entries)


def _read(
    readers: Mapping[str | None, Callable[[Any], tuple[list[Any], int]]], entries: Sequence[Any], oneof: str
) -> tuple[list[Any], int]:
    messages: list[Any] = []
    num_malformed = 0
    for entry in entries[:]:  # a repeated field is slow to iterate over
        field = entry.WhichOneof(oneof)
        read = readers.get(field)
        if read is None:  # empty, or a kind that this version does not know
            num_malformed += 1
            continue
        found, num_others = read(getattr(entry, field))
        messages += found
        num_malformed += num_others
    return messages, num_malformed
