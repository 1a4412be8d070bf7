"""What others' clients send, against real engines: the helpers of OpenAI's client, and guidellm's calls replayed."""

from typing import Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field
from tests.web.chats import SHORT
from tests.web.support import MODEL, call, events

USER = [{"role": "user", "content": "hi"}]
OPTIONS = {"temperature": 1.0, "extra_body": {"logit_bias": SHORT, "seed": 3}}


class Place(BaseModel):
    city: Literal["rome", "oslo"]
    days: int = Field(ge=0, le=9)


@pytest.fixture(scope="module")
def client(at):
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_strict_tool_is_called_in_a_stream(client):
    """The client sends ``strict: true`` and parses the arguments itself."""
    with client.chat.completions.stream(
        model=MODEL,
        messages=USER,
        tools=[pydantic_function_tool(Place)],
        tool_choice={"type": "function", "function": {"name": "Place"}},
        parallel_tool_calls=False,
        max_tokens=120,
        **OPTIONS,
    ) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (called,) = choice.message.tool_calls
    assert isinstance(called.function.parsed_arguments, Place)


def test_guidellms_calls_are_answered(at):
    """As it was recorded by a server that only listened: health, models, and a stream with counts in every event."""
    assert call(f"{at}/health")[0] == 200
    (model,) = call(f"{at}/v1/models")[2]["data"]
    body = {
        "model": model["id"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 6,
        "ignore_eos": True,
    }
    *parts, last, done = events(f"{at}/v1/chat/completions", body)
    assert done == "[DONE]"
    assert all(part["usage"] for part in parts)
    assert last["usage"]["completion_tokens"] == 6


def test_one_path_takes_chats_and_prompts(at):
    """SageMaker's ``/invocations``."""
    chat = call(f"{at}/invocations", {"messages": USER, "max_tokens": 3})[2]
    text = call(f"{at}/invocations", {"prompt": "hi", "max_tokens": 3})[2]
    assert [chat["object"], text["object"]] == ["chat.completion", "text_completion"]
    assert call(f"{at}/invocations", [])[0] == 400


def test_the_tokenizer_tells_its_special_tokens(at):
    info = call(f"{at}/tokenizer_info")[2]
    assert info["eos_token"] == "<7>"
    assert "tool.function.name" in info["chat_template"]


def test_counts_in_events_begin_at_zero_and_grow(at):
    body = {"messages": USER, "stream": True, "max_tokens": 6, "ignore_eos": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *parts, _ = events(f"{at}/v1/chat/completions", body | options)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 6
