"""For the same prompt, options and seed HTTP gives the tokens of gRPC and of the pipeline."""

import asyncio
import random

import pytest
from tests.support.models import prompt
from tests.web.support import call, edge_over, events, served

from paceline.router.service import GenerationService
from paceline.rpc.generation import request_to_proto
from paceline.types import Request, SamplingParams, SpeculationParams

NUM_REQUESTS = 30


def drawn(seed):
    """(prompt, sampling, speculation, stop) of one request, as plain data."""
    rng = random.Random(seed)
    sampling = {"max_tokens": rng.randint(4, 24), "seed": rng.randrange(2**64), "ignore_eos": rng.random() < 0.7}
    options = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_p": rng.choice([0.8, 0.95]),
        "top_k": rng.choice([5, 40]),
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "allowed_token_ids": rng.sample(range(10, 300), 40),
        "logit_bias": {str(rng.randrange(10, 300)): rng.choice([4.0, -100.0])},
        "bad_words": [[rng.randrange(10, 300)], prompt(seed, 2)],
        "stop_token_ids": prompt(seed + 1, 3),
        "seed_scope": "global",
        "include_stop_str_in_output": True,
    }
    sampling |= {name: options[name] for name in options if rng.random() < 0.4}
    speculation = rng.choice(
        [{}, {"mode": "plain"}, {"mode": "sequential", "max_draft_tokens": 3}, {"max_draft_tokens": 2}]
    )
    text = rng.choice([prompt(seed, rng.randint(1, 60)), "thequickbrownfox"[: rng.randint(1, 16)]])
    return text, sampling, speculation, rng.choice([[], ["a", "zz"]])


@pytest.fixture(scope="module")
def service(pipeline):
    """What the ingress has: requests over a router, which here is the pipeline's."""
    return GenerationService(pipeline.router)


@pytest.fixture(scope="module")
def over_service(service):
    with served(edge_over(service)) as at:
        yield at


def by_grpc(service, text, sampling, speculation, stop):
    """(token ids, text) by the message of gRPC."""
    prompt_of = text if isinstance(text, str) else tuple(text)
    request = Request("", prompt_of, SamplingParams(**sampling), SpeculationParams(**speculation), tuple(stop))
    message = request_to_proto(request).SerializeToString()

    async def collect():
        return [response async for response in service.generate(message) if response.HasField("chunk")]

    chunks = [response.chunk for response in asyncio.run(collect())]
    return [i for chunk in chunks for i in chunk.token_ids], "".join(chunk.text for chunk in chunks)


def by_http(at, text, sampling, speculation, stop, stream):
    body = {"prompt": text, **sampling, "speculation": speculation, "stop": stop, "return_token_ids": True}
    if not stream:
        status, _, answer = call(f"{at}/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"], answer["choices"][0]["text"]
    parts = [event["choices"][0] for event in events(f"{at}/v1/completions", body | {"stream": True})[:-1]]
    return [i for part in parts for i in part.get("token_ids", [])], "".join(part["text"] for part in parts)


def wanted(pipeline, text, sampling, speculation, stop):
    result = pipeline.generate(text, SamplingParams(**sampling), SpeculationParams(**speculation), stop).result
    return list(result.token_ids), result.text


@pytest.mark.parametrize("seed", range(NUM_REQUESTS))
def test_http_gives_the_tokens_of_grpc_and_of_the_pipeline(pipeline, service, url, over_service, seed):
    asked = drawn(seed)
    expected = wanted(pipeline, *asked)
    assert by_grpc(service, *asked) == expected
    assert by_http((url, over_service)[seed % 2], *asked, stream=seed % 3 == 0) == expected


def without(name):
    def sampling(self, *_):
        given = self.model_fields_set & SamplingParams.model_fields.keys() - {name}
        return SamplingParams(**{key: getattr(self, key) for key in given})

    return sampling


MUTANTS = {
    "a parameter is not handed on": ("paceline.web.schema.Body.sampling", without("temperature")),
    "the seed is not handed on": ("paceline.web.schema.Body.sampling", without("seed")),
    "stop strings are not handed on": ("paceline.web.schema.Body.stop_strings", lambda self, limits: ()),
    "seeds are off by one": (
        "paceline.web.completions.with_seed",
        lambda sampling, i: sampling.model_copy(update={"seed": sampling.seed ^ 1}),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_options_that_get_lost_are_noticed(monkeypatch, pipeline, url, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    cases = map(drawn, range(NUM_REQUESTS))
    assert any(by_http(url, *asked, stream=False) != wanted(pipeline, *asked) for asked in cases)
