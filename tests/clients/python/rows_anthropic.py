"""Anthropic's Python client at ``/v1/messages``."""

from __future__ import annotations

import anthropic
import pytest

from conftest import CITY, HELLO, MODEL, SUNNY, THOUGHT, URL, WEATHER

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "get_weather", "description": "Says how the weather is in a city.", "input_schema": CITY}
COLD = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
"""This client has no parameter of sampling; a server of open models reads it all the same."""


@pytest.fixture(scope="module")
def client():
    with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_has_its_text_and_counts(client):
    message = client.messages.create(messages=USER, system="Be brief.", thinking={"type": "disabled"}, **COLD)
    assert [block.type for block in message.content] == ["text"]
    assert text_of(message).lstrip().startswith("Hello!")
    assert message.stop_reason == "end_turn"
    assert message.role == "assistant"
    assert message.usage.input_tokens > 5
    assert message.usage.output_tokens > 5


def test_a_thought_is_a_block_of_its_own(client):
    options = {**COLD, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = client.messages.create(messages=USER, **options)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert THOUGHT in message.content[0].thinking
    assert HELLO in text_of(message)
    turns = [*USER, {"role": "assistant", "content": message.content}, *USER]
    assert client.messages.create(messages=turns, **options).stop_reason == "end_turn"


def test_a_stream_says_the_same(client):
    whole = client.messages.create(messages=USER, **COLD)
    with client.messages.stream(messages=USER, **COLD) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_the_model_chooses_a_call_and_its_answer_goes_back(client):
    asked = [{"role": "user", "content": WEATHER}]
    first = client.messages.create(messages=asked, tools=[TOOL], **COLD)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
    assert first.stop_reason == "tool_use"
    reply = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [reply]}]
    assert SUNNY in text_of(client.messages.create(messages=turns, tools=[TOOL], **COLD))


def test_calls_come_in_a_stream(client):
    with client.messages.stream(messages=[{"role": "user", "content": WEATHER}], tools=[TOOL], **COLD) as stream:
        final = stream.get_final_message()
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert call.input == {"city": "Rome"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_is_demanded(client, choice):
    message = client.messages.create(messages=USER, tools=[TOOL], tool_choice=choice, **COLD)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "get_weather"


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model=MODEL, messages=USER).input_tokens
    assert counted == client.messages.create(messages=USER, **COLD).usage.input_tokens


def test_a_stop_sequence_ends_an_answer(client):
    message = client.messages.create(messages=USER, stop_sequences=["see you"], thinking={"type": "disabled"}, **COLD)
    assert text_of(message).lstrip() == "Hello! It is good to "
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "see you"


def test_a_refusal_says_what_is_allowed(client):
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1"):
        client.messages.create(messages=USER, model=MODEL, max_tokens=5, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match="nonesuch"):
        client.messages.create(messages=USER, model="nonesuch", max_tokens=5)


def test_a_stream_may_be_left(client):
    with client.messages.stream(messages=USER, model=MODEL, max_tokens=2000) as stream:
        next(iter(stream))
