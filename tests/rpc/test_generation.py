"""api.py: what goes in comes out, both ways; what cannot be served is refused with the field and what is allowed.

Mutants that must fail here: a seed cut to 32 or 63 bits; an absent parameter sent as proto3's zero.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.messages import (
    INF,
    NAN,
    any_sampling,
    any_speculation,
    ids,
    numbers,
    rounds,
    sampling_params,
    seconds,
    sent,
    speculation_params,
    statuses,
    tokens,
    tuples,
    uint31,
    uint64,
)

from paceline.errors import EngineError, InvalidRequestError
from paceline.rpc import generation as api
from paceline.types import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    Cause,
    Chunk,
    FinishReason,
    Mode,
    ModelInfo,
    PromptLogprobs,
    Request,
    Result,
    Round,
    SamplingParams,
    ServerInfo,
    SpeculationParams,
    SpeculationStats,
    StructuredOutput,
    Timing,
    TokenLogprob,
    Usage,
)
from paceline.v1 import generation_pb2, types_pb2

# -- requests ----------------------------------------------------------------------------------------------------------

requests = st.builds(
    Request,
    request_id=ids,
    prompt=st.text(min_size=1, max_size=20) | tokens.filter(bool),
    sampling=sampling_params(),
    speculation=speculation_params,
    stop=tuples(st.text(min_size=1, max_size=5), 3),
    generated_token_ids=tokens,
    cache_salt=st.text(max_size=9),
).map(lambda request: request if request.sampling.seed is not None else replace(request, generated_token_ids=()))


@given(requests, st.booleans())
def test_request(request_, logprobs):
    proto = sent(api.request_to_proto(request_, logprobs))
    assert proto.logprobs is logprobs
    assert api.request_from_proto(proto) == request_


def test_what_a_client_leaves_open_stays_open():
    proto = api.request_to_proto(Request("r", "Hi", SamplingParams(top_k=0), SpeculationParams()))
    assert [f.name for f, _ in proto.sampling_params.ListFields()] == ["top_k"]  # zero, but said
    assert proto.speculation.ListFields() == []


@pytest.mark.parametrize(
    "form",
    [
        {"json_schema": {"type": "null"}},
        {"json_object": True},
        {"regex": "a+"},
        {"grammar": 'root ::= "a"'},
        {"choice": ("yes", "n\u00f6")},
    ],
    ids=lambda form: next(iter(form)),
)
def test_a_structured_output_arrives_as_it_is(form):
    sampling = SamplingParams(structured_output=StructuredOutput(**form))
    proto = api.request_to_proto(Request("r", "Hi", sampling, SpeculationParams()))
    assert api.request_from_proto(proto).sampling == sampling


def test_a_structured_output_without_a_form_is_refused():
    proto = generation_pb2.GenerateRequest(text="Hi")
    proto.sampling_params.structured_output.SetInParent()
    with pytest.raises(InvalidRequestError, match="holds nothing: exactly one of json_schema"):
        api.request_from_proto(proto)
    proto.sampling_params.structured_output.regex = ""
    with pytest.raises(InvalidRequestError, match="is '': at least one character"):
        api.request_from_proto(proto)


def test_absent_parameters_take_our_defaults():
    request_ = api.request_from_proto(generation_pb2.GenerateRequest(text="Hi"))
    assert (request_.prompt, request_.stop) == ("Hi", ())
    assert (request_.sampling, request_.speculation) == (SamplingParams(), SpeculationParams())


def test_zero_is_not_absent():
    params = types_pb2.SamplingParams(top_k=0, seed=0, ignore_eos=False)
    options = types_pb2.SpeculationOptions(max_draft_tokens=0)
    proto = generation_pb2.GenerateRequest(text="Hi", sampling_params=params, speculation=options)
    request_ = api.request_from_proto(sent(proto))
    assert request_.sampling.seed == 0
    assert request_.speculation.max_draft_tokens == 0


def test_an_absent_id_is_drawn():
    proto = generation_pb2.GenerateRequest(text="Hi")
    drawn = {api.request_from_proto(proto).request_id for _ in range(3)}
    assert len(drawn) == 3
    assert all(drawn)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, Mode.OVERLAPPED),
        ({"enabled": True}, Mode.OVERLAPPED),
        ({"enabled": True, "mode": "sequential"}, Mode.SEQUENTIAL),
        ({"enabled": False}, Mode.PLAIN),
        ({"enabled": False, "mode": "plain"}, Mode.PLAIN),
        ({"mode": "plain"}, Mode.PLAIN),
    ],
)
def test_enabled(options, mode):
    proto = generation_pb2.GenerateRequest(text="Hi", speculation=types_pb2.SpeculationOptions(**options))
    assert api.request_from_proto(sent(proto)).speculation.mode is mode


SAMPLING_FAULTS = [
    ({"temperature": -1}, ("sampling_params.temperature is -1.0", "at least 0 and at most 100")),
    ({"temperature": NAN}, ("sampling_params.temperature is nan", "finite")),
    ({"temperature": INF}, ("sampling_params.temperature is inf", "finite")),
    ({"top_p": 0}, ("sampling_params.top_p is 0.0", "more than 0 and at most 1")),
    ({"top_p": NAN}, ("sampling_params.top_p is nan",)),
    ({"min_p": 1.5}, ("sampling_params.min_p is 1.5", "at least 0 and at most 1")),
    ({"repetition_penalty": 0}, ("sampling_params.repetition_penalty is 0.0", "more than 0 and at most 100")),
    ({"presence_penalty": 3}, ("sampling_params.presence_penalty is 3.0", "at least -2 and at most 2")),
    ({"frequency_penalty": -3}, ("sampling_params.frequency_penalty is -3.0", "at least -2 and at most 2")),
    ({"max_tokens": 0}, ("sampling_params.max_tokens is 0", "at least 1")),
    ({"max_tokens": 3, "min_tokens": 5}, ("sampling_params.min_tokens is 5", "at most max_tokens (3)")),
    ({"bad_words": [types_pb2.TokenSequence()]}, ("sampling_params.bad_words", "empty", "at least one token id")),
    ({"logit_bias": {7: NAN}}, ("sampling_params.logit_bias[7] is nan", "at most 10000 either way")),
    ({"stop": ["ok", ""]}, ("sampling_params.stop[1] is ''", "at least one character")),
]
SPECULATION_FAULTS = [
    ({"max_draft_tokens": 33}, ("speculation.max_draft_tokens is 33", "at least 0 and at most 32")),
    ({"mode": "fast"}, ("speculation.mode is 'fast'", "'plain', 'sequential' or 'overlapped'")),
    ({"mode": ""}, ("speculation.mode is ''", "'plain', 'sequential' or 'overlapped'")),
    ({"acceptance": "maybe"}, ("speculation.acceptance is 'maybe'", "'coupled' or 'rejection'")),
    ({"saguaro": 0}, ("speculation.saguaro is 0.0", "more than 0 and at most 1")),
    ({"enabled": True, "mode": "plain"}, ("speculation.enabled is true", "speculation.mode is 'plain'")),
    ({"enabled": False, "mode": "overlapped"}, ("speculation.enabled is false", "mode is 'overlapped'")),
    ({"enabled": False, "mode": "fast"}, ("speculation.enabled is false", "mode is 'fast'", "'plain' or absent")),
]
FAULTS = [
    *(({"text": "Hi", "sampling_params": types_pb2.SamplingParams(**f)}, parts) for f, parts in SAMPLING_FAULTS),
    *(({"text": "Hi", "speculation": types_pb2.SpeculationOptions(**f)}, parts) for f, parts in SPECULATION_FAULTS),
    ({}, ("no input", "text or tokenized")),
    ({"text": ""}, ("text is empty", "at least one character")),
    ({"tokenized": generation_pb2.TokenizedInput()}, ("tokenized.input_ids is empty", "at least one token id")),
    ({"text": "Hi", "generated_token_ids": [3]}, ("sampling_params.seed is absent", "seed of the broken stream")),
    ({"text": "Hi", "request_id": "r" * 257}, ("request_id has 257 characters", "at most 256")),
    ({"text": "Hi", "cache_salt": "s" * 257}, ("cache_salt has 257 characters", "at most 256")),
]


@pytest.mark.parametrize(("values", "parts"), FAULTS, ids=[parts[0] for _, parts in FAULTS])
def test_what_is_wrong_with_a_request(values, parts):
    with pytest.raises(InvalidRequestError) as caught:
        api.request_from_proto(sent(generation_pb2.GenerateRequest(**values)))
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert "Input should" not in text


@given(any_sampling, any_speculation, st.text(max_size=2))
def test_a_request_is_served_or_refused(params, options, text):
    proto = generation_pb2.GenerateRequest(text=text, sampling_params=params, speculation=options)
    refusal = None
    try:
        api.request_from_proto(sent(proto))
    except InvalidRequestError as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith(("sampling_params.", "speculation.", "text "))


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (Request("r", (1, 2**32)), ("tokenized.input_ids", "4294967296", "at most 4294967295")),
        (Request("r", (1, -1)), ("tokenized.input_ids", "-1", "at least 0")),
        (Request("r", "a", SamplingParams().model_copy(update={"seed": -1})), ("seed is -1", f"at most {2**64 - 1}")),
        (Request("r", "a", SamplingParams().model_copy(update={"seed": 2**64})), (f"seed is {2**64}", "at least 0")),
        (Request("r", "a\ud800"), ("text", "\\ud800", "at 1")),
        (Request("r\ud800", "a"), ("request_id", "\\ud800")),
        (Request("r", "a", stop=("\ud800",)), ("sampling_params.stop", "\\ud800")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_sent(request_, parts):
    with pytest.raises(InvalidRequestError) as caught:
        api.request_to_proto(request_)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_server_refuses_an_empty_prompt_of_a_client():
    for prompt in ("", ()):
        with pytest.raises(InvalidRequestError, match="is empty"):
            api.request_from_proto(sent(api.request_to_proto(Request("r", prompt))))


# -- responses ---------------------------------------------------------------------------------------------------------


@st.composite
def chunks(draw):
    token_ids, round_ = draw(tokens), draw(st.none() | rounds())
    return Chunk(
        token_ids,
        tuple(draw(numbers) for _ in token_ids),
        tuple(draw(st.booleans()) for _ in token_ids),
        draw(tuples(st.tuples(st.text(max_size=5), st.booleans()), 3)),
        round_,
        top_logprobs=draw(st.sampled_from([(), (((3, -0.5), (1, -1.5)),) * len(token_ids)])),
        prompt_logprobs=draw(st.sampled_from([None, PromptLogprobs(3, (TokenLogprob(-0.5, 4, ((9, -0.25),)),))])),
        earlier_rounds=() if round_ is None else draw(tuples(rounds(), 2)),
    )


small = st.integers(1, 2**16)
stats = st.builds(
    SpeculationStats,
    uint31,
    uint31,
    uint31,
    st.dictionaries(st.sampled_from(Cause), small),
    st.dictionaries(st.integers(0, MAX_DRAFT_TOKENS), small),
)
results = st.builds(
    Result,
    text=st.just(""),
    token_ids=st.just(()),
    logprobs=st.just(()),
    finish_reason=st.sampled_from(FinishReason),
    usage=st.builds(Usage, uint31, uint31, uint31),
    speculation=stats,
    timing=st.builds(Timing, prefill_s=seconds, decode_s=seconds, tokens_per_s=seconds, queue_s=seconds),
    seed=uint64,
    matched_stop=st.none() | uint31 | st.text(max_size=5),
)


@given(chunks(), uint31, uint31, uint31, st.booleans())
def test_chunk(chunk, prompt_tokens, completion_tokens, cached_tokens, logprobs):
    proto = sent(
        api.chunk_to_proto(
            chunk,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            logprobs=logprobs,
        )
    )
    assert api.chunk_from_proto(proto) == (chunk if logprobs else replace(chunk, logprobs=()))
    assert proto.text == chunk.text
    counts = (proto.prompt_tokens, proto.completion_tokens, proto.cached_tokens)
    assert counts == (prompt_tokens, completion_tokens, cached_tokens)


@given(results, st.lists(chunks(), max_size=3))
def test_result(result, parts):
    result = replace(
        result,
        text="".join(chunk.text for chunk in parts),
        token_ids=sum((chunk.token_ids for chunk in parts), ()),
        logprobs=sum((chunk.logprobs for chunk in parts), ()),
        top_logprobs=sum((chunk.top_logprobs for chunk in parts), ()),
    )
    proto = sent(api.complete_to_proto(result))
    assert api.complete_from_proto(proto, parts) == result
    assert (proto.spec_accepted_tokens, proto.spec_draft_tokens) == (
        result.speculation.accepted,
        result.speculation.drafted,
    )
    assert (proto.speculation.hits, proto.speculation.misses) == (result.speculation.hits, result.speculation.misses)


def test_the_words_of_a_complete():
    stats_ = SpeculationStats()
    for round_ in (Round(0, 0, Cause.START), Round(4, 3, Cause.HIT), Round(0, 0, Cause.TOKEN), Round(4, 3, Cause.HIT)):
        stats_.add(round_)
    result = Result("", (), (), FinishReason.STOP, Usage(5, 10), stats_, Timing(0.1, 0.2, 45.0), 7, matched_stop="END")
    proto = api.complete_to_proto(result)
    assert (proto.finish_reason, proto.WhichOneof("matched_stop"), proto.matched_stop_str) == (
        "stop",
        "matched_stop_str",
        "END",
    )
    assert dict(proto.speculation.causes) == {"start": 1, "hit": 2, "token": 1}
    assert list(proto.speculation.acceptance_histogram) == [0, 0, 0, 2]
    assert api.complete_to_proto(replace(result, matched_stop=0)).WhichOneof("matched_stop") == "matched_token_id"
    assert api.complete_to_proto(replace(result, matched_stop=None)).WhichOneof("matched_stop") is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"round": types_pb2.SpeculationRound(cause=99)}, ("cause 99",)),
        ({"round": types_pb2.SpeculationRound()}, ("cause 0",)),
        ({"earlier_rounds": [types_pb2.SpeculationRound(cause=98)]}, ("cause 98",)),
        ({"round": types_pb2.SpeculationRound(accepted=2, drafted=1, cause=1)}, ("2 of 1",)),
        ({"token_ids": [1, 2], "drafted": [True]}, ("2 tokens with 1 flags",)),
        ({"token_ids": [1], "drafted": [True], "output_logprobs": [-1.0, -2.0]}, ("2 log probabilities",)),
        ({"top_logprobs": [types_pb2.TopLogprobs(token_ids=[1], logprobs=[-1.0])]}, ("0 tokens with 1 entries",)),
        ({"top_logprobs": [types_pb2.TopLogprobs(token_ids=[1])]}, ("tokens without log probabilities",)),
        ({"prompt_logprobs": types_pb2.PromptLogprobs(logprobs=bytes(4))}, ("tokens without log probabilities",)),
    ],
)
def test_a_chunk_that_makes_no_sense(changes, parts):
    with pytest.raises(EngineError) as caught:
        api.chunk_from_proto(generation_pb2.GenerateStreamChunk(**changes))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_complete_that_makes_no_sense():
    with pytest.raises(EngineError, match="'bored'"):
        api.complete_from_proto(generation_pb2.GenerateComplete(finish_reason="bored"), [])
    stats_ = generation_pb2.SpeculationStats(causes={"luck": 1})
    with pytest.raises(EngineError, match="'luck'"):
        api.complete_from_proto(generation_pb2.GenerateComplete(finish_reason="stop", speculation=stats_), [])


rates = st.floats(0, 1)
model_infos = st.builds(
    ModelInfo,
    model_id=ids,
    draft_model_id=st.none() | ids,
    tokenizer_fingerprint=st.text(max_size=8),
    vocab_size=uint31,
    max_context_length=uint31,
    eos_token_ids=tokens,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    modes=tuples(st.sampled_from(Mode)),
    acceptances=tuples(st.sampled_from(Acceptance)),
    max_draft_tokens=st.integers(0, MAX_DRAFT_TOKENS),
    batch_invariant=st.sampled_from(["yes", "no", "untested", ""]),
)
server_infos = st.builds(
    ServerInfo,
    version=st.text(max_size=8),
    uptime_s=seconds,
    pools=st.dictionaries(st.sampled_from(["target", "draft", "router"]), tuples(statuses, 2)),
    sessions_running=uint31,
    sessions_queued=uint31,
    acceptance_rate=rates,
    acceptance_length=st.floats(1, 1 + MAX_DRAFT_TOKENS),
    hit_rate=rates,
)


@given(model_infos)
def test_model_info(info):
    assert api.model_info_from_proto(sent(api.model_info_to_proto(info))) == info


@given(server_infos)
def test_server_info(info):
    assert api.server_info_from_proto(sent(api.server_info_to_proto(info))) == info


def test_a_replica_without_a_name_is_left_out():
    nameless = generation_pb2.Pool(name="draft", replicas=[types_pb2.ReplicaStatus(kind="draft")])
    assert api.server_info_from_proto(generation_pb2.GetServerInfoResponse(pools=[nameless])).pools == {"draft": ()}
