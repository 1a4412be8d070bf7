"""What a request says when it arrives, and what is refused before it is sent."""

import pytest
from tests.client.support import blocking

from paceline.client import AsyncClient, Client
from paceline.errors import InvalidRequestError
from paceline.types import Mode, SamplingParams, SpeculationParams


def sent(server, *args, **kwargs):
    """The request as the server got it."""
    blocking(server.address, *args, **kwargs)
    return server.requests[-1]


def test_what_is_asked_for_arrives(server):
    sampling = SamplingParams(
        temperature=0.1, top_p=0.9, max_tokens=9, logit_bias={5: -1.5}, bad_words=((1, 2),), seed=4
    )
    speculation = SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=3)
    request = sent(
        server, [1, 2, 2**32 - 1], sampling, speculation, stop=["\n\n", "木"], request_id="r1", logprobs=True
    )
    assert request.request_id == "r1"
    assert list(request.tokenized.input_ids) == [1, 2, 2**32 - 1]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.1, 0.9, 9, 4)
    assert dict(params.logit_bias) == {5: -1.5}
    assert list(params.bad_words[0].token_ids) == [1, 2]
    assert list(params.stop) == ["\n\n", "木"]
    assert (request.speculation.mode, request.speculation.max_draft_tokens) == ("sequential", 3)
    assert request.logprobs


def test_fields_instead_of_params(server):
    request = sent(server, "x", max_tokens=64, temperature=0.7, stop="end")
    assert (request.sampling_params.max_tokens, request.sampling_params.temperature) == (64, 0.7)
    assert list(request.sampling_params.stop) == ["end"]
    assert not request.logprobs


def test_an_id_and_a_seed_are_drawn(server):
    one, other = sent(server, "x"), sent(server, "x")
    assert one.request_id != other.request_id
    assert len(one.request_id) == 32
    assert one.sampling_params.HasField("seed")
    assert one.sampling_params.seed != other.sampling_params.seed
    assert sent(server, "x", SamplingParams(seed=0)).sampling_params.seed == 0


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("args", "kwargs", "parts"),
    [
        (("x", SamplingParams()), {"max_tokens": 3, "seed": 1}, ["sampling is given", "max_tokens, seed"]),
        (("x",), {"temperature": -1.0}, ["temperature is -1.0", "at least 0"]),
        (("x",), {"temperature": float("nan")}, ["temperature is nan: it must be a finite number"]),
        (("x",), {"max_tokens": "many"}, ["max_tokens is 'many': it must be a whole number"]),
        (("x",), {"temprature": 1.0}, ["temprature", "did you mean temperature"]),
        (("x",), {"min_tokens": 9, "max_tokens": 8}, ["min_tokens is 9", "at most max_tokens (8)"]),
        (("x",), {"seed": -1}, ["seed is -1: it must be at least 0 and at most 18446744073709551615"]),
        (("x",), {"seed": 2**64}, ["seed is 18446744073709551616: it must be at least 0 and at most"]),
        (("x", SamplingParams().model_copy(update={"seed": -1})), {}, ["seed is -1: at least 0 and at most 1844674"]),
        (("x", SamplingParams().model_copy(update={"seed": 2**64})), {}, ["seed is 18446744073709551616: at least 0"]),
        (("x",), {"timeout_s": 0}, ["timeout_s is 0"]),
        (("x",), {"timeout_s": float("nan")}, ["timeout_s is nan"]),
        ((b"abc",), {}, ["the prompt is bytes"]),
        (([1, -2],), {}, ["-2", "at least 0"]),
        (([2**32],), {}, [str(2**32), f"at most {2**32 - 1}"]),
        (([1.5],), {}, ["neither text nor a sequence of token ids"]),
        ((7,), {}, ["neither text nor a sequence of token ids"]),
        (("caf\udce9",), {}, ["text", "UTF-8"]),
        (("x",), {"stop": ["\udce9"]}, ["stop", "UTF-8"]),
    ],
)
def test_what_cannot_be_sent_is_refused_here(kind, args, kwargs, parts):
    with pytest.raises(InvalidRequestError) as caught:
        kind("localhost:1").generate(*args, **kwargs)
    for part in parts:
        assert part in str(caught.value)
