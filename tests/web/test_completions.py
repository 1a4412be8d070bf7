"""POST /v1/completions by OpenAI's own clients: text, streams, choices, log probabilities, token counts."""

from __future__ import annotations

import asyncio
import http.client
import json
import re

import openai
import pytest
from openai.types import Completion
from tests.support.fake_service import wait_until
from tests.support.models import prompt
from tests.web.support import MODEL, call, events

from paceline.types import SamplingParams

ASKED = {"model": MODEL, "max_tokens": 24, "seed": 5, "temperature": 0.8, "extra_body": {"ignore_eos": True}}
BODY = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "ignore_eos": True}


def expected(pipeline, text, **options):
    given = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "ignore_eos": True, **options}
    return pipeline.generate(text, SamplingParams(**given)).result


def test_the_models_are_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "paceline", 2048)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'tests/target' is served"):
        client.models.retrieve("gpt-5")


def test_the_paths_are_described(url):
    status, _, described = call(f"{url}/openapi.json")
    assert status == 200
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"} <= described["paths"].keys()
    assert described["paths"]["/ping"].keys() == {"get", "post"}


def test_a_completion_is_what_the_pipeline_says(client, pipeline):
    answer = client.completions.create(prompt="thequick", **ASKED)
    Completion.model_validate(answer.model_dump(), strict=True)
    result = expected(pipeline, "thequick")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (result.text, "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (result.usage.prompt_tokens, 24)
    assert usage.total_tokens == usage.prompt_tokens + 24
    spoken = choice.speculation
    assert usage.completion_tokens_details.accepted_prediction_tokens == spoken["accepted"]
    assert usage.completion_tokens_details.rejected_prediction_tokens == spoken["drafted"] - spoken["accepted"]
    assert spoken["seed"] == 5
    assert spoken["rounds"] >= 1


def test_a_stream_says_the_same_in_parts(client, pipeline):
    stream = client.completions.create(prompt="thequick", stream=True, stream_options={"include_usage": True}, **ASKED)
    parts = list(stream)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected(pipeline, "thequick").text
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == 24
    assert all(part.usage is None for part in parts[:-1])
    assert parts[-2].choices[0].finish_reason == "length"
    assert len(parts) > 1  # rounds may leave together
    assert len({part.id for part in parts}) == 1


async def test_the_asynchronous_client_reads_several_streams_at_once(url, pipeline):
    async def one(client, text):
        stream = await client.completions.create(prompt=text, stream=True, **ASKED)
        return "".join([part.choices[0].text async for part in stream])

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert await asyncio.gather(*(one(client, text) for text in ("lazy", "dog", "jumps"))) == [
            expected(pipeline, text).text for text in ("lazy", "dog", "jumps")
        ]


def test_choices_have_the_seeds_from_the_requests_on(client, pipeline):
    answer = client.completions.create(prompt=["lazy", "brown"], n=2, **ASKED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    wanted = [expected(pipeline, text, seed=seed).text for text in ("lazy", "brown") for seed in (5, 6)]
    assert [choice.text for choice in answer.choices] == wanted
    assert len(set(wanted)) == 4
    one = client.completions.create(prompt=["lazy", "brown"], **ASKED).usage
    assert answer.usage.prompt_tokens == one.prompt_tokens  # a prompt counts once, however many choices it has
    assert answer.usage.completion_tokens == 4 * 24


def test_choices_of_a_stream_are_told_apart_by_their_index(url, pipeline):
    texts = ["", "", ""]
    for event in events(f"{url}/v1/completions", BODY | {"prompt": "lazy", "n": 3, "stream": True})[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [expected(pipeline, "lazy", seed=seed).text for seed in (5, 6, 7)]


def test_token_ids_go_in_and_out(url, pipeline):
    ids = prompt(3, 20)
    body = BODY | {"prompt": ids, "return_token_ids": True}
    status, _, answer = call(f"{url}/v1/completions", body)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(expected(pipeline, ids).token_ids)
    assert choice["prompt_token_ids"] == ids
    streamed = events(f"{url}/v1/completions", body | {"stream": True})[:-1]
    assert [i for event in streamed for i in event["choices"][0].get("token_ids", [])] == choice["token_ids"]


def test_a_salt_parts_the_caches(url):
    cached = []
    for salt in ("", "a", "b", "a", ""):
        body = BODY | {"prompt": prompt(11, 100), "cache_salt": salt}
        usage = call(f"{url}/v1/completions", body)[2]["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 64, 64]
    status, _, answer = call(f"{url}/v1/completions", BODY | {"cache_salt": "s" * 257})
    assert status == 400
    assert answer["error"]["param"] == "cache_salt"


def test_log_probabilities_are_raw_unless_the_request_says_otherwise(client, pipeline):
    for extra, mode in (({}, "raw_logprobs"), ({"logprobs_mode": "processed_logprobs"}, "processed_logprobs")):
        asked = ASKED | {"extra_body": {"ignore_eos": True, **extra}}
        (choice,) = client.completions.create(prompt="lazy", logprobs=0, **asked).choices
        result = expected(pipeline, "lazy", logprobs_mode=mode)
        assert choice.logprobs.token_logprobs == pytest.approx(result.logprobs)
        assert re.sub("<[0-9]>", "", "".join(choice.logprobs.tokens)) == choice.text  # text has no special tokens
        assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
        streamed = client.completions.create(prompt="lazy", logprobs=0, stream=True, **asked)
        parts = [part.choices[0].logprobs for part in streamed]
        assert [x for part in parts if part for x in part.token_logprobs] == choice.logprobs.token_logprobs
        offsets = [x for part in parts if part for x in part.text_offset]
        assert offsets == choice.logprobs.text_offset


def test_echo_puts_the_prompt_before_the_text(client, pipeline):
    result = expected(pipeline, "lazy")
    assert client.completions.create(prompt="lazy", echo=True, **ASKED).choices[0].text == "lazy" + result.text
    streamed = client.completions.create(prompt="lazy", echo=True, stream=True, **ASKED)
    assert "".join(part.choices[0].text for part in streamed) == "lazy" + result.text


def test_a_stop_string_ends_the_text_and_is_named(client, pipeline):
    text = expected(pipeline, "lazy").text
    stop = text[6:9]
    (choice,) = client.completions.create(prompt="lazy", stop=stop, **ASKED).choices
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    with_it = ASKED | {"extra_body": {**ASKED.get("extra_body", {}), "include_stop_str_in_output": True}}
    (choice,) = client.completions.create(prompt="lazy", stop=stop, **with_it).choices
    assert choice.text == text[: text.index(stop) + len(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_every_event_counts_tokens_if_asked(url):
    options = {"continuous_usage_stats": True, "include_usage": True}
    body = BODY | {"prompt": "lazy", "stream": True, "stream_options": options}
    counts = [event["usage"]["completion_tokens"] for event in events(f"{url}/v1/completions", body)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    body["stream_options"] = {"continuous_usage_stats": True}  # of a usage that is not asked for
    assert not any("usage" in event for event in events(f"{url}/v1/completions", body)[:-1])


def test_events_tell_drafted_text_from_the_targets_own(url):
    body = BODY | {"prompt": "lazy", "stream": True, "stream_options": {"include_speculation": True}}
    choices = [event["choices"][0] for event in events(f"{url}/v1/completions", body)[:-1]]
    told = [choice["speculation"] for choice in choices]
    assert "".join(segment["text"] for one in told for segment in one["segments"]) == "".join(
        choice["text"] for choice in choices
    )
    rounds = [of for one in told if "round" in one for of in (*one.get("earlier_rounds", ()), one["round"])]
    assert sum(of["accepted"] for of in rounds) == told[-1]["accepted"]


def test_speculation_can_be_chosen_and_changes_no_token(url, pipeline):
    text = expected(pipeline, "lazy").text
    for speculation in ({"enabled": False}, {"mode": "sequential", "max_draft_tokens": 3}, {"max_draft_tokens": 0}):
        _, _, answer = call(f"{url}/v1/completions", BODY | {"prompt": "lazy", "speculation": speculation})
        assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["speculation"]["drafted"] == 0


def test_a_client_that_leaves_ends_its_request(url, pipeline):
    """Also one that waits for the whole answer, and one whose stream has not begun."""
    host = url.removeprefix("http://")
    for stream in (True, False):
        connection = http.client.HTTPConnection(host, timeout=60)
        body = {"prompt": "lazy", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        wait_until(lambda: pipeline.router.active)
        if stream:
            connection.getresponse().read(10)
        connection.close()
        if connection.sock is not None:
            connection.sock.close()
        wait_until(lambda: not pipeline.router.active)


def test_the_likeliest_tokens_come_with_their_log_probabilities(client, pipeline):
    options = {"max_tokens": 6, "temperature": 0.7, "seed": 4}
    result = pipeline.generate("lazy", top_logprobs=3, logprobs_mode="raw_logprobs", **options).result
    asked = {"model": MODEL, "prompt": "lazy", "logprobs": 3, **options}
    (choice,) = client.completions.create(**asked).choices
    decode = pipeline.tokenizer.decode
    for token_id, logprob, top, found in zip(
        result.token_ids, result.logprobs, result.top_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert found == {decode([i], special=True): value for i, value in (*top, (token_id, logprob))}
        assert len(top) == 3
    assert choice.logprobs.token_logprobs == list(result.logprobs)
    streamed = [part.choices[0].logprobs for part in client.completions.create(**asked, stream=True)]
    assert [one for part in streamed if part for one in part.top_logprobs] == choice.logprobs.top_logprobs
