"""Our values as protobuf messages and back: the only module that knows both. Knows no sockets and no engines.

Between router and replicas a message is a batch, in order::

    router ── encode_to_target ────▶ decode_to_target ─── target
    router ◀─ decode_from_target ─── encode_from_target ─ target
    router ── encode_to_draft ─────▶ decode_to_draft ──── draft
    router ◀─ decode_from_draft ──── encode_from_draft ── draft

These run once per step for all sessions of a replica, so they do as little per token as they can: nodes travel in
columns, and a router relays them without looking inside. Decoding never raises: a message that is no valid value is
dropped, and the number of those is returned. What depends on a session's state (ids, ranges, the sum of q) is
checked where that state is, by ``speculation.py`` and the engines.

With clients: a request that cannot be served is an InvalidRequestError that names the field as the protocol does.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeVar, assert_never

from pydantic import BaseModel, ValidationError

from paceline.errors import EngineError, InvalidRequestError
from paceline.explain import explain
from paceline.router.session import Chunk, Result, Timing, Usage
from paceline.types import (
    Acceptance,
    Cause,
    CloseSession,
    Commit,
    DraftState,
    Echo,
    FinishReason,
    InFlight,
    Mode,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    ReplicaStatus,
    Request,
    Round,
    SamplingParams,
    SessionFailed,
    SparseDistribution,
    SpeculationParams,
    SpeculationStats,
    SpeculationWanted,
    TreeLost,
)
from paceline.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2

MAX_REQUEST_ID_LEN = 256
"""Characters of a request's id: it travels with every message of its session."""

_MAX_UINT32 = 2**32 - 1

_CAUSES = {
    types_pb2.CAUSE_HIT: Cause.HIT,
    types_pb2.CAUSE_MISS_TOKEN: Cause.TOKEN,
    types_pb2.CAUSE_MISS_K: Cause.K,
    types_pb2.CAUSE_LATE: Cause.LATE,
    types_pb2.CAUSE_DRAFT_DOWN: Cause.DRAFT_DOWN,
    types_pb2.CAUSE_DISABLED: Cause.DISABLED,
    types_pb2.CAUSE_SEQUENTIAL: Cause.SEQUENTIAL,
    types_pb2.CAUSE_START: Cause.START,
}
_CAUSES_TO_PROTO = {cause: number for number, cause in _CAUSES.items()}
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_FINISH_REASONS_TO_PROTO = {reason: number for number, reason in _FINISH_REASONS.items()}

# Fields with the same name and meaning on both sides.
_SAMPLING_SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "ignore_eos", "seed",
)  # fmt: skip
_SPECULATION_SCALARS = ("max_draft_tokens", "mode", "acceptance", "growth", "saguaro")
_STATUS_SCALARS = (
    "replica_id", "kind", "incarnation", "num_sessions", "num_waiting", "max_sessions", "kv_pages_used", "kv_pages",
    "busy_s", "pid", "node", "model", "draining",
)  # fmt: skip

_Model = TypeVar("_Model", bound=BaseModel)


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
    num_dropped = len(batch.events) - len(messages)
    if not batch.HasField("status"):
        return messages, None, num_dropped
    status = status_from_proto(batch.status)
    return messages, status, num_dropped + (status is None)


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
    num_dropped = len(batch.events) - len(messages)
    if not batch.HasField("status"):
        return messages, None, num_dropped
    status = status_from_proto(batch.status)
    return messages, status, num_dropped + (status is None)


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
    if not session_id or not 0 <= step_s < math.inf:
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
    _write_round(message.round, proto.round)
    proto.finish_reason = _FINISH_REASONS_TO_PROTO[message.finish_reason]
    proto.cached_tokens = message.cached_tokens


def _read_outcome(proto: target_pb2.Outcome) -> Outcome | None:
    session_id, round_, reason = proto.session_id, _read_round(proto.round), proto.finish_reason
    token_ids, logprobs = tuple(proto.token_ids[:]), tuple(proto.logprobs[:])
    if not session_id or round_ is None or reason not in _FINISH_REASONS or len(token_ids) != len(logprobs):
        return None
    finish_reason, cached_tokens = _FINISH_REASONS[reason], proto.cached_tokens
    return Outcome(
        session_id, proto.epoch, proto.context_len, token_ids, logprobs, round_, finish_reason, cached_tokens
    )


def _write_round(round_: Round, proto: types_pb2.SpeculationRound) -> None:
    proto.drafted, proto.accepted = round_.num_drafted, round_.num_accepted
    proto.cause = _CAUSES_TO_PROTO[round_.cause]


def _read_round(proto: types_pb2.SpeculationRound) -> Round | None:
    drafted, accepted, cause = proto.drafted, proto.accepted, _CAUSES.get(proto.cause)
    return Round(drafted, accepted, cause) if cause is not None and accepted <= drafted else None


def _write_open(message: OpenSession, proto: types_pb2.OpenSession) -> None:
    proto.session_id, proto.epoch, proto.seed = message.session_id, message.epoch, message.seed
    proto.token_ids.extend(message.token_ids)
    proto.num_prompt_tokens = message.num_prompt_tokens
    # Every field is written, so that two versions with different defaults do not sample differently.
    proto.sampling.CopyFrom(_sampling_to_proto(message.sampling, SamplingParams.model_fields))
    proto.speculation.CopyFrom(_speculation_to_proto(message.speculation, SpeculationParams.model_fields))
    proto.eos_token_ids.extend(message.eos_token_ids)


def _read_open(proto: types_pb2.OpenSession) -> OpenSession | None:
    token_ids = tuple(proto.token_ids[:])
    if not proto.session_id or not 1 <= proto.num_prompt_tokens <= len(token_ids):
        return None
    if not proto.HasField("sampling") or not proto.HasField("speculation"):
        return None
    try:
        sampling = SamplingParams(**_sampling_fields(proto.sampling))
        speculation = SpeculationParams(**_given(proto.speculation, _SPECULATION_SCALARS))
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


def status_to_proto(status: ReplicaStatus) -> types_pb2.ReplicaStatus:
    """What a replica says of itself."""
    scalars = {name: getattr(status, name) for name in _STATUS_SCALARS}
    return types_pb2.ReplicaStatus(counters=status.counters, **scalars)


def status_from_proto(proto: types_pb2.ReplicaStatus) -> ReplicaStatus | None:
    """What a replica says of itself; None if it does not say who it is."""
    if not proto.replica_id:
        return None
    scalars = {name: getattr(proto, name) for name in _STATUS_SCALARS}
    return ReplicaStatus(counters=dict(proto.counters), **scalars)


# -- parameters --------------------------------------------------------------------------------------------------------


def _sampling_to_proto(params: SamplingParams, names: Collection[str]) -> types_pb2.SamplingParams:
    """Of the scalars, those that are named."""
    return types_pb2.SamplingParams(
        logit_bias=params.logit_bias,
        bad_words=[types_pb2.TokenSequence(token_ids=words) for words in params.bad_words],
        stop_token_ids=params.stop_token_ids,
        **{name: getattr(params, name) for name in _SAMPLING_SCALARS if name in names},
    )


def _sampling_fields(proto: types_pb2.SamplingParams) -> dict[str, Any]:
    """Arguments of SamplingParams: what the message holds, so that defaults stand for the rest."""
    fields = _given(proto, _SAMPLING_SCALARS)
    if proto.logit_bias:
        fields["logit_bias"] = dict(proto.logit_bias)
    if proto.bad_words:
        fields["bad_words"] = tuple(tuple(words.token_ids) for words in proto.bad_words)
    if proto.stop_token_ids:
        fields["stop_token_ids"] = tuple(proto.stop_token_ids)
    return fields


def _speculation_to_proto(params: SpeculationParams, names: Collection[str]) -> types_pb2.SpeculationOptions:
    """Those fields that are named."""
    return types_pb2.SpeculationOptions(
        **{name: getattr(params, name) for name in _SPECULATION_SCALARS if name in names}
    )


def _given(proto: Any, names: Sequence[str]) -> dict[str, Any]:
    """The optional scalars that a message holds."""
    return {name: getattr(proto, name) for name in names if proto.HasField(name)}


# -- requests ----------------------------------------------------------------------------------------------------------


def request_to_proto(request: Request, logprobs: bool = False) -> generation_pb2.GenerateRequest:
    """A request as a client sends it: fields that were not set stay absent, the server's defaults stand for them.

    Raises InvalidRequestError for what the protocol cannot carry.
    """
    sampling = request.sampling
    _check_utf8("request_id", request.request_id)
    for stop in request.stop:
        _check_utf8("sampling_params.stop", stop)
    proto = generation_pb2.GenerateRequest(
        request_id=request.request_id,
        sampling_params=_sampling_to_proto(sampling, sampling.model_fields_set),
        speculation=_speculation_to_proto(request.speculation, request.speculation.model_fields_set),
        logprobs=logprobs,
    )
    proto.sampling_params.stop.extend(request.stop)
    if isinstance(request.prompt, str):
        _check_utf8("text", request.prompt)
        proto.text = request.prompt
    else:
        _check_uint32("tokenized.input_ids", request.prompt)
        proto.tokenized.SetInParent()  # it is there even if it is empty
        proto.tokenized.input_ids.extend(request.prompt)
    return proto


def request_from_proto(proto: generation_pb2.GenerateRequest) -> Request:
    """What a client asks for; an id is drawn if it names none.

    Raises InvalidRequestError with the field, its value and what is allowed. Whether token ids are in the
    vocabulary and the prompt fits the context is for those to say who know the model.
    """
    if len(proto.request_id) > MAX_REQUEST_ID_LEN:
        size = len(proto.request_id)
        raise InvalidRequestError(f"request_id has {size} characters: at most {MAX_REQUEST_ID_LEN} are allowed")
    prompt: str | tuple[int, ...]
    kind = proto.WhichOneof("input")
    if kind == "text":
        prompt = proto.text
        if not prompt:
            raise InvalidRequestError("text is empty: at least one character is needed")
    elif kind == "tokenized":
        prompt = tuple(proto.tokenized.input_ids[:])
        if not prompt:
            raise InvalidRequestError("tokenized.input_ids is empty: at least one token id is needed")
    else:
        raise InvalidRequestError("the request has no input: text or tokenized is needed")
    stop = tuple(proto.sampling_params.stop)
    if "" in stop:
        raise InvalidRequestError(
            f"sampling_params.stop[{stop.index('')}] is '': each stop string needs at least one character"
        )
    return Request(
        request_id=proto.request_id or secrets.token_hex(16),
        prompt=prompt,
        sampling=_validated(SamplingParams, "sampling_params", _sampling_fields(proto.sampling_params)),
        speculation=_validated(SpeculationParams, "speculation", _speculation_fields(proto.speculation)),
        stop=stop,
    )


def _speculation_fields(proto: types_pb2.SpeculationOptions) -> dict[str, Any]:
    fields = _given(proto, _SPECULATION_SCALARS)
    if not proto.HasField("enabled"):
        return fields
    mode = fields.get("mode")
    if proto.enabled and mode == Mode.PLAIN:
        raise InvalidRequestError(
            "speculation.enabled is true and speculation.mode is 'plain': with true the mode must be 'sequential' or"
            " 'overlapped', or absent"
        )
    if not proto.enabled:
        if mode not in (None, Mode.PLAIN):
            raise InvalidRequestError(
                f"speculation.enabled is false and speculation.mode is {mode!r}: with false the mode must be 'plain' or"
                " absent"
            )
        fields["mode"] = Mode.PLAIN
    return fields


def _validated(kind: type[_Model], path: str, fields: Mapping[str, Any]) -> _Model:
    try:
        return kind(**fields)
    except ValidationError as error:
        fault = error.errors()[0].get("ctx", {}).get("error")
        text = str(fault) if fault is not None else explain(error, kind).replace("Input should be ", "")
        raise InvalidRequestError(f"{path}.{text}") from None


def _check_uint32(field: str, values: Collection[int]) -> None:
    if values and (wrong := max(values)) > _MAX_UINT32:
        raise InvalidRequestError(f"{field} holds {wrong}: at most {_MAX_UINT32} is allowed")
    if values and (wrong := min(values)) < 0:
        raise InvalidRequestError(f"{field} holds {wrong}: at least 0 is allowed")


def _check_utf8(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{field} holds {text[error.start]!r} at {error.start}: it must be text that UTF-8 can carry"
        ) from None


# -- responses ---------------------------------------------------------------------------------------------------------


def chunk_to_proto(
    chunk: Chunk, *, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, logprobs: bool = False
) -> generation_pb2.GenerateStreamChunk:
    """A chunk for a client. ``completion_tokens`` counts up to the end of this chunk."""
    proto = generation_pb2.GenerateStreamChunk(
        token_ids=chunk.token_ids,
        text=chunk.text,
        output_logprobs=chunk.logprobs if logprobs else (),
        drafted=chunk.drafted,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
    )
    for text, drafted in chunk.segments:
        proto.segments.add(text=text, drafted=drafted)
    if chunk.round is not None:
        _write_round(chunk.round, proto.round)
    return proto


def chunk_from_proto(proto: generation_pb2.GenerateStreamChunk) -> Chunk:
    """A chunk from a server; no logprobs unless they were asked for.

    Raises EngineError if it makes no sense, which is what a server of another version may send.
    """
    round_ = _read_round(proto.round) if proto.HasField("round") else None
    if round_ is None and proto.HasField("round"):
        raise EngineError(
            f"the server sent a round of cause {proto.round.cause} with {proto.round.accepted} of"
            f" {proto.round.drafted} tokens accepted: this client knows the causes 1 to {max(_CAUSES)}"
        )
    token_ids, logprobs, drafted = tuple(proto.token_ids[:]), tuple(proto.output_logprobs[:]), tuple(proto.drafted[:])
    if len(drafted) != len(token_ids) or len(logprobs) not in (0, len(token_ids)):
        raise EngineError(
            f"the server sent {len(token_ids)} tokens with {len(drafted)} flags and {len(logprobs)} log probabilities"
        )
    segments = tuple((segment.text, segment.drafted) for segment in proto.segments)
    return Chunk(token_ids, logprobs, drafted, segments, round_)


def complete_to_proto(result: Result) -> generation_pb2.GenerateComplete:
    """The end of a stream; text, tokens and logprobs are in its chunks."""
    usage, stats, timing = result.usage, result.speculation, result.timing
    histogram = stats.acceptance_histogram
    proto = generation_pb2.GenerateComplete(
        finish_reason=result.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        spec_accepted_tokens=stats.accepted,
        spec_draft_tokens=stats.drafted,
        speculation=generation_pb2.SpeculationStats(
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            hits=stats.hits,
            misses=stats.misses,
            causes={cause.value: count for cause, count in stats.causes.items()},
            acceptance_histogram=[histogram.get(i, 0) for i in range(max(histogram, default=-1) + 1)],
        ),
        timing=generation_pb2.Timing(
            queue_s=timing.queue_s,
            prefill_s=timing.prefill_s,
            decode_s=timing.decode_s,
            tokens_per_s=timing.tokens_per_s,
        ),
        seed=result.seed,
    )
    if isinstance(result.matched_stop, int):
        proto.matched_token_id = result.matched_stop
    elif result.matched_stop is not None:
        proto.matched_stop_str = result.matched_stop
    return proto


def complete_from_proto(proto: generation_pb2.GenerateComplete, chunks: Sequence[Chunk]) -> Result:
    """The result of a stream: its end, and all its chunks in order.

    Raises EngineError if it makes no sense, which is what a server of another version may send.
    """
    stats, timing = proto.speculation, proto.timing
    try:
        finish_reason = FinishReason(proto.finish_reason)
        causes = {Cause(name): count for name, count in stats.causes.items()}
    except ValueError as error:
        raise EngineError(f"the server sent a result that this client does not know: {error}") from None
    matched_stop: int | str | None = None
    if proto.HasField("matched_token_id"):
        matched_stop = proto.matched_token_id
    elif proto.HasField("matched_stop_str"):
        matched_stop = proto.matched_stop_str
    return Result(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=finish_reason,
        usage=Usage(proto.prompt_tokens, proto.completion_tokens, proto.cached_tokens),
        speculation=SpeculationStats(
            rounds=stats.rounds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            causes=causes,
            acceptance_histogram={i: count for i, count in enumerate(stats.acceptance_histogram) if count},
        ),
        timing=Timing(
            prefill_s=timing.prefill_s,
            decode_s=timing.decode_s,
            tokens_per_s=timing.tokens_per_s,
            queue_s=timing.queue_s,
        ),
        seed=proto.seed,
        matched_stop=matched_stop,
    )


def model_info(
    *,
    model_id: str,
    draft_model_id: str | None,
    tokenizer_fingerprint: str,
    vocab_size: int,
    max_context_length: int,
    eos_token_ids: Iterable[int],
    dtype: str,
    modes: Iterable[Mode] = tuple(Mode),
    acceptances: Iterable[Acceptance] = tuple(Acceptance),
    max_draft_tokens: int,
) -> generation_pb2.GetModelInfoResponse:
    """What is served. ``draft_model_id`` None: no draft."""
    return generation_pb2.GetModelInfoResponse(
        model_id=model_id,
        draft_model_id=draft_model_id or "",
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        max_context_length=max_context_length,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        modes=list(modes),
        acceptances=list(acceptances),
        max_draft_tokens=max_draft_tokens,
    )


def server_info(
    *,
    version: str,
    uptime_s: float,
    pools: Mapping[str, Iterable[ReplicaStatus]],
    sessions_running: int,
    sessions_queued: int,
    speculation: SpeculationStats,
) -> generation_pb2.GetServerInfoResponse:
    """The state of the service. ``speculation``: all sessions since the start."""
    chances = speculation.hits + speculation.misses
    return generation_pb2.GetServerInfoResponse(
        version=version,
        uptime_s=uptime_s,
        pools=[
            generation_pb2.Pool(name=name, replicas=[status_to_proto(status) for status in replicas])
            for name, replicas in pools.items()
        ],
        sessions_running=sessions_running,
        sessions_queued=sessions_queued,
        acceptance_rate=speculation.accepted / speculation.drafted if speculation.drafted else 0.0,
        acceptance_length=1 + speculation.accepted / speculation.rounds if speculation.rounds else 0.0,
        hit_rate=speculation.hits / chances if chances else 0.0,
    )
