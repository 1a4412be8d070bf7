"""OpenAI's Python client."""

from __future__ import annotations

import openai
import pytest

from conftest import COMPARE, HELLO, MODEL, SUNNY, THOUGHT, TOOL, WEATHER, Place

USER = [{"role": "user", "content": "hi"}]
ASKED = [{"role": "user", "content": WEATHER}]
COLD = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(v1):
    with openai.OpenAI(base_url=v1, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_an_answer_has_its_thought_apart_and_counts(client):
    answer = client.chat.completions.create(messages=USER, **COLD)
    message = answer.choices[0].message
    assert HELLO in message.content
    assert THOUGHT in message.reasoning_content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.reasoning_tokens > 5
    assert "<|" not in message.content


def test_a_thought_may_be_switched_off(client):
    for body in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        message = client.chat.completions.create(messages=USER, **COLD, **body).choices[0].message
        assert message.content.startswith("Hello!")
        assert not getattr(message, "reasoning_content", None)


def test_a_stream_says_the_same(client):
    whole = client.chat.completions.create(messages=USER, **COLD).choices[0].message
    parts = list(
        client.chat.completions.create(messages=USER, stream=True, stream_options={"include_usage": True}, **COLD)
    )
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.reasoning_content
    assert deltas[0].role == "assistant"
    assert parts[-1].usage.completion_tokens > 10
    assert [part.usage for part in parts[:-1]] == [None] * (len(parts) - 1)


def called(message):
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


ROME, OSLO = ("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')


def test_the_model_chooses_a_call_and_its_answer_goes_back(client):
    first = client.chat.completions.create(messages=ASKED, tools=[TOOL], **COLD).choices[0]
    assert called(first.message) == [ROME]
    assert first.finish_reason == "tool_calls"
    reply = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "sunny"}
    turns = [*ASKED, first.message.model_dump(exclude_none=True), reply]
    last = client.chat.completions.create(messages=turns, tools=[TOOL], **COLD).choices[0]
    assert SUNNY in last.message.content
    assert last.finish_reason == "stop"


def test_two_calls_come_in_one_answer_unless_one_is_allowed(client):
    both = {"messages": [{"role": "user", "content": COMPARE}], "tools": [TOOL], **COLD}
    assert called(client.chat.completions.create(**both).choices[0].message) == [ROME, OSLO]
    assert called(client.chat.completions.create(parallel_tool_calls=False, **both).choices[0].message) == [ROME]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_demanded(client, choice, stream):
    asked = {"messages": USER, "tools": [TOOL], "tool_choice": choice, "max_tokens": 120, **COLD}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"


def test_calls_come_in_a_stream(client):
    with client.chat.completions.stream(messages=ASKED, tools=[TOOL], **COLD) as events:
        final = events.get_final_completion().choices[0]
    assert called(final.message) == [ROME]
    assert final.finish_reason == "tool_calls"


def test_an_answer_is_parsed_as_a_model(client):
    answer = client.chat.completions.parse(messages=USER, response_format=Place, max_tokens=200, **COLD)
    assert isinstance(answer.choices[0].message.parsed, Place)


def test_a_form_and_tools_stand_together(client):
    asked = {"tools": [openai.pydantic_function_tool(Place)], "response_format": Place, "max_tokens": 200}
    message = client.chat.completions.parse(messages=USER, **asked, **COLD).choices[0].message
    assert message.parsed or message.tool_calls


def test_log_probabilities_have_the_bytes_of_their_tokens(client):
    choice = client.chat.completions.create(
        messages=USER, logprobs=True, top_logprobs=2, reasoning_effort="none", **COLD
    ).choices[0]
    entries = choice.logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    said = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert choice.message.content.encode() in said


def test_several_answers_have_their_seeds(client):
    asked = {"messages": USER, "model": MODEL, "temperature": 1.2, "seed": 7, "max_tokens": 24, "n": 3}
    first, again = (client.chat.completions.create(**asked).choices for _ in range(2))
    assert [one.message for one in first] == [one.message for one in again]
    assert [one.index for one in first] == [0, 1, 2]


def test_a_stop_string_ends_an_answer(client):
    choice = client.chat.completions.create(messages=USER, stop=["see you"], reasoning_effort="none", **COLD).choices[0]
    assert choice.message.content == "Hello! It is good to "
    assert choice.finish_reason == "stop"


def test_a_refusal_says_what_is_allowed(client):
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as refused:
        client.chat.completions.create(messages=USER, model=MODEL, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="nonesuch"):
        client.chat.completions.create(messages=USER, model="nonesuch")
    bad = {"type": "function", "function": {"name": "no spaces", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="no spaces"):
        client.chat.completions.create(messages=USER, model=MODEL, tools=[bad])


def test_a_stream_may_be_left(client):
    stream = client.chat.completions.create(
        messages=USER, model=MODEL, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client.models.list().data[0].id == MODEL


def test_completions_echo_their_prompt_with_log_probabilities(client):
    choice = client.completions.create(
        model=MODEL, prompt="The city is", max_tokens=0, echo=True, logprobs=1, temperature=0
    ).choices[0]
    assert choice.text == "The city is"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset == [0, 3, 8]


def test_responses_are_served(client):
    answer = client.responses.create(model=MODEL, input="hi", temperature=0)
    assert HELLO in answer.output_text
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    with client.responses.stream(model=MODEL, input="hi", temperature=0) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == answer.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_responses_call_tools_and_take_their_answers(client):
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    first = client.responses.create(model=MODEL, input=WEATHER, tools=tools, temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ROME
    reply = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns = [{"role": "user", "content": WEATHER}, *first.output, reply]
    assert SUNNY in client.responses.create(model=MODEL, input=turns, tools=tools, temperature=0).output_text


def test_responses_are_parsed_as_a_model(client):
    answer = client.responses.parse(model=MODEL, input="hi", text_format=Place, max_output_tokens=200, temperature=0)
    assert isinstance(answer.output_parsed, Place)
