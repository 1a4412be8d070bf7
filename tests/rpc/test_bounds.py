"""What a request may weigh is checked on its bytes and on the lengths of its lists, before anything is made of it."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.rpc import bounds as bounds_module
from paceline.rpc.bounds import MAX_SMALL_BYTES, RequestBounds, field_sizes, parse
from paceline.rpc.generation import request_from_proto
from paceline.types import RequestLimits
from paceline.v1.generation_pb2 import CancelRequest, GenerateRequest, TokenizedInput
from paceline.v1.types_pb2 import SamplingParams, TokenSequence

SMALL = RequestLimits(
    max_stop_strings=2,
    max_stop_chars=3,
    max_stop_token_ids=4,
    max_bad_words=2,
    max_bad_words_tokens=5,
    max_logit_bias=3,
    max_allowed_token_ids=2,
)
BOUNDS = RequestBounds(SMALL, max_model_len=40_000, max_token_bytes=8)


def words(*sizes: int) -> list[TokenSequence]:
    return [TokenSequence(token_ids=[1] * size) for size in sizes]


AT_THE_BOUND = {
    "stop": ["abc", "木木木"],
    "stop_token_ids": [1, 2, 3, 4],
    "bad_words": words(2, 3),
    "logit_bias": {1: 1.0, 2: 1.0, 3: 1.0},
    "allowed_token_ids": [1, 2],
    "logprob_token_ids": [2**31 - 1] * 128,
}
OVER = [
    ({"stop": ["a"] * 3}, "sampling_params.stop has 3 strings: at most 2 are allowed"),
    ({"stop": ["a", "abcd"]}, r"sampling_params.stop\[1\] has 4 characters: at most 3 are allowed"),
    ({"stop_token_ids": [1] * 5}, "sampling_params.stop_token_ids has 5 ids: at most 4 are allowed"),
    ({"bad_words": words(1, 1, 1)}, "sampling_params.bad_words has 3 sequences: at most 2 are allowed"),
    ({"bad_words": words(3, 3)}, "sampling_params.bad_words has 6 token ids: at most 5 are allowed"),
    ({"logit_bias": dict.fromkeys(range(4), 1.0)}, "sampling_params.logit_bias has 4 entries: at most 3 are allowed"),
    ({"allowed_token_ids": [1] * 3}, "sampling_params.allowed_token_ids has 3 ids: at most 2 are allowed"),
    ({"logprob_token_ids": [1] * 129}, "sampling_params.logprob_token_ids"),
]


def test_a_request_at_every_bound_is_served() -> None:
    message = GenerateRequest(text="x" * 320_000, sampling_params=SamplingParams(**AT_THE_BOUND))
    request, logprobs = BOUNDS.read(message.SerializeToString())
    assert (len(request.stop), len(request.sampling.bad_words), logprobs) == (2, 2, False)
    ids = GenerateRequest(tokenized=TokenizedInput(input_ids=[2**32 - 1] * 39_999), logprobs=True)
    request, logprobs = BOUNDS.read(ids.SerializeToString())
    assert (len(request.prompt), logprobs) == (39_999, True)


@pytest.mark.parametrize(("fields", "text"), OVER, ids=[text for _, text in OVER])
def test_one_entry_more_is_refused_by_name(fields: dict[str, object], text: str) -> None:
    message = GenerateRequest(text="x", sampling_params=SamplingParams(**fields))
    with pytest.raises(InvalidRequestError, match=text):
        BOUNDS.read(message.SerializeToString())


def test_the_defaults_bound_every_list() -> None:
    for fields in ({"stop": ["a"] * 65}, {"bad_words": words(8193)}, {"logit_bias": dict.fromkeys(range(1025), 1.0)}):
        with pytest.raises(InvalidRequestError, match="at most"):
            request_from_proto(GenerateRequest(text="x", sampling_params=SamplingParams(**fields)))


HEAVY = [
    (GenerateRequest(text="x" * 320_001), PromptTooLongError, "text has 320003 bytes|text has 320005 bytes"),
    (
        GenerateRequest(tokenized=TokenizedInput(input_ids=[2**32 - 1] * 60_000)),
        PromptTooLongError,
        r"tokenized has 30000\d bytes: at most 240016 can fit the model's context of 40000 tokens",
    ),
    (
        GenerateRequest(text="x", sampling_params=SamplingParams(bad_words=words(*[0] * 100_000))),
        InvalidRequestError,
        r"sampling_params has 20000\d bytes: at most \d+ are allowed",
    ),
    (
        GenerateRequest(text="x", generated_token_ids=[2**32 - 1] * 60_000),
        PromptTooLongError,
        r"generated_token_ids has 30000\d bytes: at most 240000 can fit",
    ),
    (GenerateRequest(text="x", request_id="r" * 100_000), InvalidRequestError, "other fields has 10000"),
]


@pytest.mark.parametrize(("message", "kind", "text"), HEAVY, ids=[text for *_, text in HEAVY])
def test_a_heavy_part_is_refused_before_it_is_parsed(message, kind, text, monkeypatch) -> None:
    """Empty entries cost two bytes each and become objects of dozens."""
    parsed: list[int] = []
    monkeypatch.setattr(bounds_module, "parse", lambda *args, **_: parsed.append(1))
    text = text if "text has" not in text else r"text has 32000\d bytes: at most 320000 can fit the model's context"
    with pytest.raises(kind, match=text):
        BOUNDS.read(message.SerializeToString())
    assert not parsed


def test_parts_that_come_often_are_added_up() -> None:
    part = GenerateRequest(sampling_params=SamplingParams(bad_words=words(*[0] * 20_000))).SerializeToString()
    with pytest.raises(InvalidRequestError, match="sampling_params has"):
        BOUNDS.read(part * 3)
    with pytest.raises(InvalidRequestError, match="more than 64 fields"):
        BOUNDS.read(b"\x30\x01" * 40_000)


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\x12\x02\xff\xfe", b"not a message", b"\xff" * 20, b"\x0b"])
def test_bytes_that_are_not_a_message_are_refused_by_name(data: bytes) -> None:
    for raw in (data, data + b"\x12" + b"\xff" * (MAX_SMALL_BYTES + 1)):
        with pytest.raises(InvalidRequestError, match=rf"{len(raw)} bytes that are not a valid paceline.v1.Generate"):
            BOUNDS.read(raw)
    with pytest.raises(InvalidRequestError, match=r"not a valid paceline\.v1\.CancelRequest"):
        parse(CancelRequest, b"\x0a\xff")


def test_a_message_that_a_host_has_parsed_is_taken_as_it_is() -> None:
    message = CancelRequest(request_id="r")
    assert parse(CancelRequest, message) is message
    assert BOUNDS.read(GenerateRequest(text="x"))[0].prompt == "x"


def test_a_long_unary_request_is_refused() -> None:
    data = CancelRequest(request_id="r" * MAX_SMALL_BYTES).SerializeToString()
    with pytest.raises(InvalidRequestError, match=f"the request has {len(data)} bytes: at most {MAX_SMALL_BYTES}"):
        parse(CancelRequest, data)


@given(
    st.builds(
        GenerateRequest,
        text=st.text(max_size=300),
        request_id=st.text(max_size=20),
        logprobs=st.booleans(),
        generated_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=50),
        sampling_params=st.builds(SamplingParams, temperature=st.floats(), stop=st.lists(st.text(max_size=9))),
    )
)
def test_the_sizes_are_those_of_the_fields(message: GenerateRequest) -> None:
    sizes = field_sizes(message.SerializeToString(), GenerateRequest)
    alone = {2: len(message.text.encode()), 4: message.sampling_params.ByteSize()}
    for number, size in alone.items():
        assert sizes[number] == (size if size else sizes[number])
    assert sum(sizes.values()) <= message.ByteSize()


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for raw in (data, data + bytes(MAX_SMALL_BYTES)):
        with contextlib.suppress(InvalidRequestError):
            BOUNDS.read(raw)
