"""The values that the public and the internal protocol share (``types.proto``) as protobuf messages and back:
sampling and speculation parameters, rounds and replica statuses.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from typing import Any

from paceline.types import (
    UNSTATED_PROTOCOL,
    Cause,
    PromptLogprobs,
    ReplicaStatus,
    Round,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
    TokenLogprob,
    TopLogprobs,
)
from paceline.v1 import types_pb2

CAUSES = {
    types_pb2.CAUSE_HIT: Cause.HIT,
    types_pb2.CAUSE_MISS_TOKEN: Cause.TOKEN,
    types_pb2.CAUSE_MISS_K: Cause.K,
    types_pb2.CAUSE_LATE: Cause.LATE,
    types_pb2.CAUSE_DRAFT_DOWN: Cause.DRAFT_DOWN,
    types_pb2.CAUSE_DISABLED: Cause.DISABLED,
    types_pb2.CAUSE_SEQUENTIAL: Cause.SEQUENTIAL,
    types_pb2.CAUSE_START: Cause.START,
}
"""Every cause that this version knows, by its protocol number."""
CAUSES_TO_PROTO = {cause: number for number, cause in CAUSES.items()}

# Fields with the same name and meaning on both sides.
_SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "seed",
    "seed_scope",
    "logprobs_mode",
    "top_logprobs",
    "prompt_logprobs",
)
_SPECULATION_SCALARS = ("max_draft_tokens", "mode", "acceptance", "saguaro")
_STATUS_SCALARS = (
    "replica_id",
    "kind",
    "incarnation",
    "num_sessions",
    "num_waiting",
    "max_sessions",
    "kv_pages_used",
    "kv_pages",
    "busy_s",
    "pid",
    "node",
    "model",
    "draining",
    "busy_share",
    "controller",
    "batch_invariant",
    "execution",
    "version",
    "numerics",
)


def write_top_logprobs(places: Sequence[TopLogprobs], proto: Any) -> None:
    """Adds the likeliest tokens of each place to ``proto``, a repeated field."""
    for place in places:
        proto.add(token_ids=[token_id for token_id, _ in place], logprobs=[logprob for _, logprob in place])


def read_top_logprobs(proto: Iterable[types_pb2.TopLogprobs]) -> tuple[TopLogprobs, ...]:
    """The likeliest tokens of each place. Raises ValueError if one has more tokens than log probabilities, or fewer."""
    return tuple(tuple(zip(place.token_ids, place.logprobs, strict=True)) for place in proto)


def write_prompt_logprobs(logprobs: PromptLogprobs, proto: types_pb2.PromptLogprobs) -> None:
    """Writes log probabilities of a prompt into ``proto``, by columns."""
    tokens = logprobs.tokens
    tops = list(chain.from_iterable(token.top for token in tokens))
    proto.position = logprobs.position
    proto.logprobs = _packed("f", [token.logprob for token in tokens])
    proto.ranks = _packed("I", [token.rank for token in tokens])
    proto.num_top = _packed("I", [len(token.top) for token in tokens])
    proto.top_token_ids = _packed("I", [token_id for token_id, _ in tops])
    proto.top_logprobs = _packed("f", [logprob for _, logprob in tops])


def read_prompt_logprobs(proto: types_pb2.PromptLogprobs) -> PromptLogprobs:
    """Log probabilities of a prompt. Raises ValueError for columns that do not fit together, and for no numbers."""
    logprobs, counts = _unpacked("f", proto.logprobs), _unpacked("I", proto.num_top)
    top = list(zip(_unpacked("I", proto.top_token_ids), _unpacked("f", proto.top_logprobs), strict=True))
    if not logprobs or sum(counts) != len(top) or math.isnan(sum(logprobs)):
        raise ValueError("the columns hold no token, too few of the likeliest ones, or no number")
    rest = iter(top)
    columns = zip(logprobs, _unpacked("I", proto.ranks), counts, strict=True)
    tokens = tuple(TokenLogprob(logprob, rank, tuple(islice(rest, count))) for logprob, rank, count in columns)
    return PromptLogprobs(proto.position, tokens)


def _packed(code: str, values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def _unpacked(code: str, packed: bytes) -> tuple[Any, ...]:
    """Numbers of four bytes. Raises ValueError for a part of one."""
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes hold no numbers of four bytes")
    return struct.unpack(f"<{len(packed) // 4}{code}", packed)


def write_round(round_: Round, proto: types_pb2.SpeculationRound) -> None:
    """Writes a round into ``proto``."""
    proto.drafted, proto.accepted = round_.num_drafted, round_.num_accepted
    proto.cause = CAUSES_TO_PROTO[round_.cause]
    if round_.lookup_drafted:
        proto.lookup = round_.lookup
        proto.lookup_drafted, proto.lookup_accepted = round_.lookup_drafted, round_.lookup_accepted
    if round_.head_drafted:
        proto.head = round_.head
        proto.head_drafted, proto.head_accepted = round_.head_drafted, round_.head_accepted


def read_round(proto: types_pb2.SpeculationRound) -> Round | None:
    """The round of a message; None if it is not a valid one."""
    own = proto.drafted, proto.accepted, proto.cause
    return round_of(*own, proto.lookup_drafted, proto.lookup_accepted, proto.head_drafted, proto.head_accepted)


@functools.lru_cache(1024)  # a service has few different rounds, and reads one per session and step
def round_of(
    drafted: int,
    accepted: int,
    cause: types_pb2.Cause.ValueType,
    lookup_drafted: int = 0,
    lookup_accepted: int = 0,
    head_drafted: int = 0,
    head_accepted: int = 0,
) -> Round | None:
    """The round of these fields of a message, its cause a protocol number; None if it is not a valid one."""
    known = CAUSES.get(cause)
    if known is None or accepted > drafted:
        return None
    if lookup_drafted + head_drafted > drafted or lookup_accepted + head_accepted > accepted:
        return None
    return Round(drafted, accepted, known, lookup_drafted, lookup_accepted, head_drafted, head_accepted)


def status_to_proto(status: ReplicaStatus) -> types_pb2.ReplicaStatus:
    """A replica's status as a message."""
    scalars = {name: getattr(status, name) for name in _STATUS_SCALARS}
    scalars |= {"counters": status.counters, "measures": status.measures, "protocol": status.protocol}
    return types_pb2.ReplicaStatus(**scalars)


def status_from_proto(proto: types_pb2.ReplicaStatus) -> ReplicaStatus | None:
    """A replica's status; None if it names no replica."""
    if not proto.replica_id:
        return None
    scalars = {name: getattr(proto, name) for name in _STATUS_SCALARS}
    scalars |= {"counters": dict(proto.counters), "measures": dict(proto.measures)}
    return ReplicaStatus(protocol=proto.protocol or UNSTATED_PROTOCOL, **scalars)


def sampling_to_proto(params: SamplingParams, names: Collection[str]) -> types_pb2.SamplingParams:
    """Sampling parameters as a message; scalars that are not in ``names`` stay unset."""
    form = params.structured_output
    return types_pb2.SamplingParams(
        structured_output=None if form is None else _form_to_proto(form),
        allowed_token_ids=params.allowed_token_ids,
        logit_bias=params.logit_bias,
        bad_words=[types_pb2.TokenSequence(token_ids=words) for words in params.bad_words],
        stop_token_ids=params.stop_token_ids,
        logprob_token_ids=params.logprob_token_ids,
        **{name: getattr(params, name) for name in _SAMPLING_SCALARS if name in names},
    )


def sampling_fields(proto: types_pb2.SamplingParams) -> dict[str, Any]:
    """Arguments of SamplingParams: the fields that the message holds, so that defaults stand for the rest."""
    fields = _given(proto, _SAMPLING_SCALARS)
    if proto.allowed_token_ids:
        fields["allowed_token_ids"] = tuple(proto.allowed_token_ids)
    if proto.logit_bias:
        fields["logit_bias"] = dict(proto.logit_bias)
    if proto.bad_words:
        fields["bad_words"] = tuple(tuple(words.token_ids) for words in proto.bad_words)
    if proto.stop_token_ids:
        fields["stop_token_ids"] = tuple(proto.stop_token_ids)
    if proto.logprob_token_ids:
        fields["logprob_token_ids"] = tuple(proto.logprob_token_ids)
    if proto.HasField("structured_output"):
        fields["structured_output"] = _form_fields(proto.structured_output)
    return fields


def _form_to_proto(form: StructuredOutput) -> types_pb2.StructuredOutput:
    if form.choice:
        return types_pb2.StructuredOutput(choice=types_pb2.StructuredOutput.Choice(texts=form.choice))
    return types_pb2.StructuredOutput(**{form.kind: getattr(form, form.kind)})


def _form_fields(proto: types_pb2.StructuredOutput) -> dict[str, Any]:
    """Arguments of StructuredOutput: the field that the message holds, if it holds one."""
    kind = proto.WhichOneof("format")
    if kind is None:
        return {}
    return {kind: tuple(proto.choice.texts) if kind == "choice" else getattr(proto, kind)}


def speculation_to_proto(params: SpeculationParams, names: Collection[str]) -> types_pb2.SpeculationOptions:
    """Speculation parameters as a message; fields that are not in ``names`` stay unset."""
    return types_pb2.SpeculationOptions(
        **{name: getattr(params, name) for name in _SPECULATION_SCALARS if name in names}
    )


def speculation_fields(proto: types_pb2.SpeculationOptions) -> dict[str, Any]:
    """Arguments of SpeculationParams: the fields that the message holds, so that defaults stand for the rest."""
    return _given(proto, _SPECULATION_SCALARS)


def _given(proto: Any, names: Sequence[str]) -> dict[str, Any]:
    """The optional scalars that a message holds, by name."""
    return {name: getattr(proto, name) for name in names if proto.HasField(name)}
