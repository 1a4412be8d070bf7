"""LiteLLM, as its ``hosted_vllm`` and ``openai`` providers."""

from __future__ import annotations

import asyncio

import litellm
import pytest

from conftest import HELLO, SUNNY, THOUGHT, TOOL, URL, WEATHER, Place

litellm.suppress_debug_info = True
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["hosted_vllm/chat", "openai/chat"])
def ask(request, v1):
    def asked(**options):
        given = {"model": request.param, "api_base": v1, "api_key": "none", "temperature": 0, "num_retries": 0}
        return litellm.completion(**{**given, **options})

    return asked


def test_an_answer_has_its_thought_apart_and_counts(ask):
    answer = ask(messages=USER)
    assert HELLO in answer.choices[0].message.content
    assert THOUGHT in answer.choices[0].message.reasoning_content
    assert answer.usage.completion_tokens > 10


def test_a_stream_says_the_same(ask):
    parts = list(ask(messages=USER, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(parts)
    assert HELLO in whole.choices[0].message.content
    assert whole.usage.completion_tokens > 10


def test_a_call_and_its_answer(ask):
    asked = [{"role": "user", "content": WEATHER}]
    message = ask(messages=asked, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.arguments == '{"city": "Rome"}'
    reply = {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "sunny"}
    # LiteLLM's messages come back with fields of its own
    assert SUNNY in ask(messages=[*asked, message, reply], tools=[TOOL]).choices[0].message.content


def test_a_call_is_demanded(ask):
    message = ask(messages=USER, tools=[TOOL], tool_choice="required", max_tokens=120).choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"


def test_an_answer_has_a_form(ask):
    said = ask(messages=USER, response_format=Place, max_tokens=200).choices[0].message.content
    assert Place.model_validate_json(said)


def test_log_probabilities_arrive(ask):
    choice = ask(messages=USER, logprobs=True, top_logprobs=2, max_tokens=4).choices[0]
    assert len(choice.logprobs.content) == 4


def test_a_refusal_says_what_is_allowed(ask):
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        ask(messages=USER, temperature=-1)


def test_it_translates_anthropics_messages(v1):
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model="anthropic/chat", api_base=URL, api_key="none", max_tokens=100, messages=USER, temperature=0
        )
    )
    assert any(HELLO in block.get("text", "") for block in answer["content"])
