"""Calls of Open WebUI, ``vllm bench serve`` and AIPerf, as their own code makes them, to ``serve --local``."""

import time
import urllib.request

import pytest
from tests.web.chats import SHORT
from tests.web.support import MODEL, call, events, served

from paceline.cli.local_service import local_edge
from paceline.config import ServerConfig


@pytest.fixture(scope="module")
def at(speaking):
    with served(local_edge(speaking[0], ServerConfig(), MODEL)) as url:
        yield url


IDENTITY = {"X-OpenWebUI-User-Name": "me", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-User-Role": "admin"}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": [{"type": "text", "text": "say it"}]},
]


def asked(url, body):
    """(status, body) of a request with Open WebUI's headers."""
    status, _, answer = call(url, body, {**IDENTITY, "Authorization": "Bearer none"})
    return status, answer


def test_open_webui_finds_the_model(at):
    """The connection is verified, and the list of models is filled, by the same call."""
    status, listed = asked(f"{at}/v1/models", None)
    assert status == 200
    assert [(one["id"], one["object"]) for one in listed["data"]] == [(MODEL, "model")]


def test_open_webui_streams_a_chat_with_its_usage(at):
    """What a user has set for the model is a part of the body, and what is not set is absent."""
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 3, "max_tokens": 24}
    settings |= {"frequency_penalty": 0.1, "presence_penalty": 0.0, "logit_bias": SHORT, "stop": None}
    body = {"model": MODEL, "messages": TURNS, "stream": True, "stream_options": {"include_usage": True}}
    *parts, last, done = events(f"{at}/v1/chat/completions", body | settings)
    assert done == "[DONE]"
    assert {(part["object"], len(part["choices"])) for part in parts} == {("chat.completion.chunk", 1)}
    assert parts[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    usage = last["usage"]
    assert last["choices"] == []
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_open_webui_asks_for_a_title(at, limit):
    """The name of the limit depends on the model's; tags, queries and follow-ups are asked for likewise."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "### Task:\nname it"}], "stream": False, limit: 9}
    status, answer = asked(f"{at}/v1/chat/completions", body | {"logit_bias": {"4": -100}})
    assert status == 200
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert answer["usage"]["completion_tokens"] <= 9


def test_open_webui_shows_what_was_refused(at):
    """It takes the error as it is: an image that this model cannot see is named."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    status, answer = asked(f"{at}/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert status == 400
    assert answer["error"]["message"].startswith("messages[0].content[0] is")


def spec_decode(at):
    """The counters as the benchmark reads them, line by line: totals by name, and accepted tokens by position."""
    with urllib.request.urlopen(f"{at}/metrics", timeout=60) as reply:
        lines = reply.read().decode().split("\n")
    found, by_position = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0), {}
    for line in lines:
        if not line.startswith("vllm:spec_decode"):
            continue
        name, value = line.split()[0].partition("{")[0], int(float(line.split()[-1]))
        if "num_accepted_tokens_per_pos" in name:
            position = int(line.split('position="')[1].partition('"')[0])
            by_position[position] = by_position.get(position, 0) + value
        else:
            found[next(one for one in ("num_draft_tokens", "num_drafts", "num_accepted_tokens") if one in name)] += (
                value
            )
    return found, by_position


def test_vllm_bench_serve_counts_tokens_and_reads_acceptance(at):
    before, before_by_position = spec_decode(at)
    (model,) = call(f"{at}/v1/models")[2]["data"]
    accepted = drafted = 0
    extras = ({}, {"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "best_of": 1})
    for i in range(300):
        if i >= len(extras) and accepted:  # a draft that is late has nothing accepted yet
            break
        body = {
            "model": model["id"],
            "prompt": "def read(path):",
            "repetition_penalty": 1.0,
            "max_tokens": 16 + i % 3,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        *parts, last, done = events(f"{at}/v1/completions", body | extras[i % 3])
        assert done == "[DONE]"
        assert all(isinstance(part["choices"][0]["text"], str) for part in parts)
        assert not last["choices"]
        assert last["usage"]["completion_tokens"] == 16 + i % 3
        assert last["usage"]["prompt_tokens"] > 0
        details = last["usage"]["completion_tokens_details"]
        accepted += details["accepted_prediction_tokens"]
        drafted += details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    wanted = {"num_accepted_tokens": accepted, "num_draft_tokens": drafted}
    for _ in range(600):  # counters follow the answers
        found, by_position = spec_decode(at)
        grown = {name: value - before[name] for name, value in found.items()}
        if grown.items() >= wanted.items():
            break
        time.sleep(0.1)
    assert grown.items() >= wanted.items()
    assert sum(by_position.values()) - sum(before_by_position.values()) == accepted > 0
    assert 0 < grown["num_drafts"] <= drafted


def test_vllm_bench_serve_asks_chats(at):
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    *parts, last, _ = events(f"{at}/v1/chat/completions", body)
    assert all("delta" in part["choices"][0] for part in parts)
    assert last["usage"]["completion_tokens"] == 12


def acceptance(answer):
    """AIPerf's record of an answer: what it demands of vLLM's payload, and that it agrees with the usage."""
    found = answer["metrics"]["speculative_decoding"]
    histogram, usage = found["acceptance_histogram"], answer["usage"]["completion_tokens_details"]
    assert all(type(count) is int for count in histogram)
    assert len(histogram) == found["num_spec_tokens"] + 1 == 9
    assert sum(histogram) == found["num_spec_steps"] > 0
    assert sum(i * count for i, count in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert found["num_accepted_draft_tokens"] == usage["accepted_prediction_tokens"]
    assert found["num_draft_tokens"] == usage["accepted_prediction_tokens"] + usage["rejected_prediction_tokens"] > 0
    assert found["draft_acceptance_rate"] == found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    return found


EXTRA_INPUTS = {"ignore_eos": True, "temperature": 0, "speculation": {"mode": "sequential"}}
"""As given to AIPerf; sequential drafts are late for no step but the first."""


@pytest.mark.parametrize("streams", [True, False])
def test_aiperf_reads_acceptance_by_request(at, streams):
    body = {"prompt": "def read(path):", "model": MODEL, "stream": streams, "max_tokens": 32, **EXTRA_INPUTS}
    if streams:
        *parts, last, done = events(f"{at}/v1/completions", body | {"stream_options": {"include_usage": True}})
        assert done == "[DONE]"
        assert not any("metrics" in part for part in parts)
        assert last["choices"] == []
    else:
        last = call(f"{at}/v1/completions", body)[2]
    assert last["usage"]["completion_tokens"] == 32
    assert acceptance(last)["num_spec_steps"] < 32


def test_aiperf_reads_acceptance_of_chats_and_of_one_choice_alone(at):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    body = {"messages": messages, "model": MODEL, "max_completion_tokens": 12, **EXTRA_INPUTS}
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *parts, last, _ = events(f"{at}/v1/chat/completions", body | stream)
    assert [part["usage"]["completion_tokens"] for part in parts][-1] == 12
    for answer in (last, call(f"{at}/v1/chat/completions", body)[2]):
        assert acceptance(answer)["num_spec_steps"] < 12
    for without in ({"n": 2}, {"speculation": {"mode": "plain"}}):
        answer = call(f"{at}/v1/chat/completions", body | without)[2]
        assert answer["usage"]["completion_tokens"] in (12, 24)
        assert "speculative_decoding" not in answer.get("metrics", {})
        assert ("metrics" in answer) is ("n" not in without)
