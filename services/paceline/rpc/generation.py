"""Converts the public API to protobuf and back: requests, responses and infos of ``GenerationService``.

Knows no sockets and no engines. A request that cannot be served is an InvalidRequestError that names the field as the
protocol does. The streams between router and replicas are in ``streams.py``.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from paceline.errors import EngineError, InvalidRequestError, PromptTooLongError
from paceline.errors.refusals import explain_parameter
from paceline.rpc.protocol import unknown_fields
from paceline.rpc.values import (
    CAUSES,
    read_prompt_logprobs,
    read_round,
    read_top_logprobs,
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
from paceline.types import (
    MAX_SALT_LEN,
    Cause,
    Chunk,
    FinishReason,
    ModelInfo,
    PoolScaling,
    Request,
    RequestLimits,
    Result,
    Round,
    SamplingParams,
    ServerInfo,
    SpeculationParams,
    SpeculationStats,
    Startup,
    Timing,
    Usage,
    check_request_id,
    speculation_arguments,
)
from paceline.v1 import generation_pb2, types_pb2

_MAX_UINT32 = 2**32 - 1

_SERVER_INFO_SCALARS = (
    "version", "uptime_s", "sessions_running", "sessions_queued", "acceptance_rate", "acceptance_length", "hit_rate",
    "sessions_speculating", "sessions_drafting", "serve_silent_s",
)  # fmt: skip
_MODEL_INFO_SCALARS = (
    "model_id", "tokenizer_fingerprint", "vocab_size", "max_context_length", "dtype", "max_draft_tokens",
    "batch_invariant",
)  # fmt: skip
_MODEL_INFO_LISTS = ("eos_token_ids", "modes", "acceptances")

_Model = TypeVar("_Model", bound=BaseModel)


# -- requests ----------------------------------------------------------------------------------------------------------


def request_to_proto(request: Request, logprobs: bool = False) -> generation_pb2.GenerateRequest:
    """Returns a request as a client sends it. Fields that were not set stay absent, and the server's defaults apply.

    Raises:
        InvalidRequestError: the protocol cannot carry a value.
    """
    sampling = request.sampling
    sampling.check_seed()
    _check_utf8("request_id", request.request_id)
    _check_utf8("cache_salt", request.cache_salt)
    for stop in request.stop:
        _check_utf8("sampling_params.stop", stop)
    proto = generation_pb2.GenerateRequest(
        request_id=request.request_id,
        sampling_params=sampling_to_proto(sampling, sampling.model_fields_set),
        speculation=speculation_to_proto(request.speculation, request.speculation.model_fields_set),
        logprobs=logprobs,
        cache_salt=request.cache_salt,
    )
    proto.sampling_params.stop.extend(request.stop)
    _check_uint32("generated_token_ids", request.generated_token_ids)
    proto.generated_token_ids.extend(request.generated_token_ids)
    if isinstance(request.prompt, str):
        _check_utf8("text", request.prompt)
        proto.text = request.prompt
    else:
        _check_uint32("tokenized.input_ids", request.prompt)
        proto.tokenized.SetInParent()  # it is there even if it is empty
        proto.tokenized.input_ids.extend(request.prompt)
    return proto


def request_from_proto(
    proto: generation_pb2.GenerateRequest, limits: RequestLimits | None = None, max_model_len: int | None = None
) -> Request:
    """Returns a client's request; an id is drawn if it has none.

    ``limits``: None stands for the defaults. ``max_model_len``: length of the context, if it is known.

    Raises InvalidRequestError with the field, its value and the allowed ones. The vocabulary and the length of a text
    are checked by the router, which knows the model.
    """
    for unknown in unknown_fields(proto):
        if not unknown.startswith("speculation."):  # what changes no token may be ignored
            raise InvalidRequestError(f"{unknown} is set: this version of Paceline does not know the field")
    check_request_id(proto.request_id)
    if (size := len(proto.cache_salt)) > MAX_SALT_LEN:
        raise InvalidRequestError(f"cache_salt has {size} characters: at most {MAX_SALT_LEN} are allowed")
    lists = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
    (limits or RequestLimits()).check(
        **_named(proto.sampling_params, lists),
        bad_words_sizes=(len(words.token_ids) for words in proto.sampling_params.bad_words),
        where="sampling_params.",
    )
    prompt: str | tuple[int, ...]
    kind = proto.WhichOneof("input")
    if kind == "text":
        prompt = proto.text
        if not prompt:
            raise InvalidRequestError("text is empty: at least one character is needed")
    elif kind == "tokenized":
        if max_model_len is not None and (num := len(proto.tokenized.input_ids)) >= max_model_len:
            raise PromptTooLongError(
                f"tokenized.input_ids has {num} tokens: at most {max_model_len - 1} leave room for a token in the "
                f"model's context of {max_model_len}"
            )
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
    if max_model_len is not None and (num := len(proto.generated_token_ids)) >= max_model_len:
        raise PromptTooLongError(
            f"generated_token_ids has {num} tokens: fewer than {max_model_len} fit the model's context"
        )
    if proto.generated_token_ids and not proto.sampling_params.HasField("seed"):
        raise InvalidRequestError(
            "sampling_params.seed is absent and generated_token_ids is not: the seed of the broken stream is needed"
        )
    mode = proto.speculation.enabled if proto.speculation.HasField("enabled") else None
    speculation = speculation_arguments(speculation_fields(proto.speculation), mode)
    return Request(
        request_id=proto.request_id or secrets.token_hex(16),
        prompt=prompt,
        sampling=_validated(SamplingParams, "sampling_params", sampling_fields(proto.sampling_params)),
        speculation=_validated(SpeculationParams, "speculation", speculation),
        stop=stop,
        generated_token_ids=tuple(proto.generated_token_ids[:]),
        cache_salt=proto.cache_salt,
    )


def _validated(kind: type[_Model], path: str, fields: Mapping[str, Any]) -> _Model:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise InvalidRequestError(f"{path}.{explain_parameter(error, kind)}") from None


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
    """Converts a chunk for a client. ``completion_tokens`` counts up to the end of this chunk."""
    proto = generation_pb2.GenerateStreamChunk(
        token_ids=chunk.token_ids,
        text=chunk.text,
        output_logprobs=chunk.logprobs if logprobs else (),
        drafted=chunk.drafted,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
    )
    write_top_logprobs(chunk.top_logprobs, proto.top_logprobs)
    if chunk.prompt_logprobs is not None:
        write_prompt_logprobs(chunk.prompt_logprobs, proto.prompt_logprobs)
    for text, drafted in chunk.segments:
        proto.segments.add(text=text, drafted=drafted)
    if chunk.round is not None:
        write_round(chunk.round, proto.round)
    for round_ in chunk.earlier_rounds:
        write_round(round_, proto.earlier_rounds.add())
    return proto


def chunk_from_proto(proto: generation_pb2.GenerateStreamChunk) -> Chunk:
    """Converts a chunk from a server; it has no logprobs unless they were asked for.

    Raises EngineError if it is inconsistent, as from a server of another version.
    """
    round_ = _read_round(proto.round) if proto.HasField("round") else None
    token_ids, logprobs, drafted = tuple(proto.token_ids[:]), tuple(proto.output_logprobs[:]), tuple(proto.drafted[:])
    if len(drafted) != len(token_ids) or len(logprobs) not in (0, len(token_ids)):
        raise EngineError(
            f"the server sent {len(token_ids)} tokens with {len(drafted)} flags and {len(logprobs)} log probabilities"
        )
    try:
        top = read_top_logprobs(proto.top_logprobs)
        of_prompt = read_prompt_logprobs(proto.prompt_logprobs) if proto.HasField("prompt_logprobs") else None
    except ValueError:
        raise EngineError(
            "the server sent tokens without log probabilities among top_logprobs or prompt_logprobs"
        ) from None
    if len(top) not in (0, len(token_ids)):
        raise EngineError(f"the server sent {len(token_ids)} tokens with {len(top)} entries of top_logprobs")
    segments = tuple((segment.text, segment.drafted) for segment in proto.segments)
    earlier = tuple(map(_read_round, proto.earlier_rounds))
    return Chunk(
        token_ids,
        logprobs,
        drafted,
        segments,
        round_,
        top_logprobs=top,
        prompt_logprobs=of_prompt,
        earlier_rounds=earlier,
    )


def _read_round(proto: types_pb2.SpeculationRound) -> Round:
    round_ = read_round(proto)
    if round_ is None:
        raise EngineError(
            f"the server sent a round of cause {proto.cause} with {proto.accepted} of {proto.drafted} tokens accepted:"
            f" this client knows the causes 1 to {max(CAUSES)}"
        )
    return round_


def complete_to_proto(result: Result) -> generation_pb2.GenerateComplete:
    """Converts the end of a stream; text, tokens and logprobs are in its chunks."""
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
            causes={cause.value: count for cause, count in stats.causes.items()},
            acceptance_histogram=[histogram.get(i, 0) for i in range(max(histogram, default=-1) + 1)],
            **stats.counts(),
        ),
        timing=generation_pb2.Timing(**asdict(timing)),
        seed=result.seed,
    )
    if isinstance(result.matched_stop, int):
        proto.matched_token_id = result.matched_stop
    elif result.matched_stop is not None:
        proto.matched_stop_str = result.matched_stop
    return proto


def complete_from_proto(proto: generation_pb2.GenerateComplete, chunks: Sequence[Chunk]) -> Result:
    """Returns the result of a stream from its end and all its chunks, in order.

    Raises EngineError if it is inconsistent, as from a server of another version.
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
        top_logprobs=tuple(place for chunk in chunks for place in chunk.top_logprobs),
        finish_reason=finish_reason,
        usage=Usage(proto.prompt_tokens, proto.completion_tokens, proto.cached_tokens),
        speculation=SpeculationStats(
            causes=causes,
            acceptance_histogram={i: count for i, count in enumerate(stats.acceptance_histogram) if count},
            **_named(stats, SpeculationStats().counts().keys() - {"hits", "misses"}),
        ),
        timing=Timing(**_named(timing, [field.name for field in fields(Timing)])),
        seed=proto.seed,
        matched_stop=matched_stop,
    )


def model_info_to_proto(info: ModelInfo) -> generation_pb2.GetModelInfoResponse:
    """Converts the description of the served model for a client."""
    return generation_pb2.GetModelInfoResponse(
        draft_model_id=info.draft_model_id or "",
        default_sampling_params=sampling_to_proto(info.default_sampling, SamplingParams.model_fields.keys() - {"seed"}),
        **_named(info, (*_MODEL_INFO_SCALARS, *_MODEL_INFO_LISTS)),
    )


def model_info_from_proto(proto: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    """Converts the description of the model that a server serves."""
    lists: dict[str, Any] = {name: tuple(values) for name, values in _named(proto, _MODEL_INFO_LISTS).items()}
    return ModelInfo(
        draft_model_id=proto.draft_model_id or None,
        default_sampling=SamplingParams(**sampling_fields(proto.default_sampling_params)),
        **_named(proto, _MODEL_INFO_SCALARS),
        **lists,
    )


def server_info_to_proto(info: ServerInfo) -> generation_pb2.GetServerInfoResponse:
    """Converts the state of the service for a client."""
    pools = [
        generation_pb2.Pool(name=name, replicas=map(status_to_proto, replicas)) for name, replicas in info.pools.items()
    ]
    return generation_pb2.GetServerInfoResponse(
        pools=pools,
        scaling=[generation_pb2.PoolScaling(**asdict(scaling)) for scaling in info.scaling],  # None is absent
        starting=[generation_pb2.StartingReplica(**asdict(startup)) for startup in info.starting],
        **_named(info, _SERVER_INFO_SCALARS),
    )


def server_info_from_proto(proto: generation_pb2.GetServerInfoResponse) -> ServerInfo:
    """Converts the state of a service; replicas without an id are left out."""
    replicas = {pool.name: map(status_from_proto, pool.replicas) for pool in proto.pools}
    return ServerInfo(
        pools={name: tuple(status for status in found if status is not None) for name, found in replicas.items()},
        scaling=tuple(map(_scaling_from_proto, proto.scaling)),
        starting=tuple(
            Startup(**_named(startup, [field.name for field in fields(Startup)])) for startup in proto.starting
        ),
        **_named(proto, _SERVER_INFO_SCALARS),
    )


def _scaling_from_proto(proto: generation_pb2.PoolScaling) -> PoolScaling:
    given = _named(proto, [field.name for field in fields(PoolScaling)])
    absent = {name: None for name in ("wanted", "demand", "changed_s") if not proto.HasField(name)}
    return PoolScaling(**given | absent)


def _named(source: object, names: Collection[str]) -> dict[str, Any]:
    """The fields of a message or a value that the other form has by the same names."""
    return {name: getattr(source, name) for name in names}
