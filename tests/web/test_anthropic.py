"""POST /v1/messages by Anthropic's own client: blocks, events, tools, reasoning, refusals in its words."""

from __future__ import annotations

import itertools
import json
import urllib.request

import anthropic
import pytest
from anthropic.types import Message
from pydantic import BaseModel
from tests.support.models import letters_tokenizer
from tests.web.chats import SHORT, Scripted, called, save_chat
from tests.web.support import MODEL, call, edge_over, served

from paceline.checkpoint.chat import load_chat
from paceline.errors import EngineError
from paceline.types import FinishReason
from paceline.web import anthropic as answering
from paceline.web.anthropic_schema import CountBody
from paceline.web.schema import read as read_body

USER = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
ASKED = {"model": MODEL, "max_tokens": 2000, "messages": USER}
SAYS = f"<4>hmm<5>so{called(city='Rome')}{called(city='Oslo')}<7>"


@pytest.fixture
def model(scripted):
    """(the script, Anthropic's client of it)"""
    service, at = scripted
    service.says, service.finish_reason, service.step = SAYS, FinishReason.STOP, 3
    service.error = service.matched_stop = None
    service.requests.clear()
    with anthropic.Anthropic(base_url=at, api_key="none", max_retries=0) as client:
        yield service, client


def read(service):
    return letters_tokenizer().decode(list(service.requests[-1].prompt)).replace(" ", "")


def shown(message):
    return [
        getattr(block, "thinking", None) or getattr(block, "text", None) or (block.name, block.input)
        for block in message.content
    ]


def test_an_answer_is_blocks(model):
    service, client = model
    message = client.messages.create(**ASKED, tools=[WEATHER], system="brief")
    Message.model_validate(message.model_dump(warnings=False), strict=True)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert shown(message) == ["hmm", "so", ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})]
    assert message.content[0].signature
    assert len({block.id for block in message.content[2:]}) == 2
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "tool_use", None)
    assert message.usage.input_tokens == len(service.requests[0].prompt)
    assert message.usage.output_tokens_details.thinking_tokens >= 3
    assert read(service).startswith("tweather<3><1>system<3>brief<2><1>user<3>hello")


def raw(at, body):
    """(event, data) of each server-sent event."""
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{at}/v1/messages", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        found = reply.read().decode().strip().split("\n\n")
    events = [event.split("\n") for event in found]
    assert all(len(lines) == 2 for lines in events)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]


def test_the_events_of_a_stream_come_in_anthropics_order(model, scripted):
    service, _ = model
    service.says = f"<4>hmm<5>so{called(city='Rome')}<7>"
    found = raw(scripted[1], ASKED | {"tools": [WEATHER]})
    assert all(name == event["type"] for name, event in found)
    kinds = [
        (name, event.get("index"), event.get("delta", {}).get("type") or event.get("content_block", {}).get("type"))
        for name, event in found
    ]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        ("message_start", None, None),
        ("ping", None, None),
        ("content_block_start", 0, "thinking"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, "text"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, "tool_use"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    start, end = found[0][1]["message"], found[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 0
    assert found[2][1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    (call_begins,) = (event for _, event in found if event.get("index") == 2 and "content_block" in event)
    assert call_begins["content_block"].keys() == {"type", "id", "name", "input"}


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_a_stream_adds_up_to_the_answer(model, step):
    service, client = model
    service.step = step
    whole = client.messages.create(**ASKED, tools=[WEATHER])
    with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
        texts = "".join(stream.text_stream)
        added = stream.get_final_message()
    assert texts == "so"
    assert shown(added) == shown(whole)
    assert (added.stop_reason, added.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_call_whose_arguments_are_no_object_is_text(model):
    service, client = model
    service.says = '<6>{"name": "weather", "arguments": "[1]"}<8><7>'
    message = client.messages.create(**ASKED, tools=[WEATHER])
    (text,) = shown(message)
    assert ("[1]" in text, message.stop_reason) == (True, "end_turn")


ENDS = {
    "end_turn": (FinishReason.STOP, 7, 2000),
    "max_tokens": (FinishReason.LENGTH, None, 2),
    "model_context_window_exceeded": (FinishReason.LENGTH, None, 2000),
    "stop_sequence": (FinishReason.STOP, "!", 2000),
}


@pytest.mark.parametrize("reason", ENDS)
def test_the_reason_of_the_end(model, reason):
    service, client = model
    service.says = "so"
    service.finish_reason, service.matched_stop, most = ENDS[reason]
    message = client.messages.create(**ASKED | {"max_tokens": most})
    assert message.stop_reason == reason
    assert message.stop_sequence == (service.matched_stop if reason == "stop_sequence" else None)


def test_blocks_may_be_sent_back_with_the_results_of_the_tools(model):
    service, client = model
    message = client.messages.create(**ASKED, tools=[WEATHER])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
        for block in message.content
        if block.type == "tool_use"
    ]
    results[1] |= {"content": "no such city", "is_error": True, "cache_control": {"type": "ephemeral"}}
    turns = [
        *USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    client.messages.create(**ASKED | {"messages": turns}, tools=[WEATHER])
    calls = "cweatheraomecweatheraslo"
    results = "<1>tool<3>sunny<2><1>tool<3>rrornosuchcity<2>"
    wanted = f"<1>user<3>hello<2><1>assistant<3>so{calls}<2>{results}<1>user<3>goon<2>"
    assert wanted in read(service)


def test_turns_of_one_role_are_one(model):
    service, client = model
    turns = [*USER, {"role": "user", "content": [{"type": "text", "text": "you"}]}, {"role": "system", "content": "a"}]
    client.messages.create(**ASKED | {"messages": turns})
    assert "<1>user<3>helloyou<2><1>system<3>a<2>" in read(service)


def test_a_last_turn_of_the_assistant_is_continued(model):
    service, client = model
    service.says = "me<7>"
    turns = [*USER, {"role": "assistant", "content": "it is"}]
    message = client.messages.create(**ASKED | {"messages": turns})
    assert read(service).endswith("<1>assistant<3>itis")
    assert shown(message) == ["me"]


def test_reasoning_is_switched_by_the_variable_of_the_template(model):
    service, client = model
    service.says = "because<5>yes<7>"
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert shown(client.messages.create(**ASKED, thinking=budget)) == ["because", "yes"]
    assert read(service).endswith("<4>")
    hidden = client.messages.create(**ASKED, thinking=budget | {"display": "omitted"})
    assert [getattr(block, "thinking", None) for block in hidden.content] == ["", None]
    assert hidden.content[0].signature
    service.says = "yes<7>"
    for thinking in ({"type": "disabled"}, {"type": "adaptive"}):
        assert shown(client.messages.create(**ASKED, thinking=thinking)) == ["yes"]
        assert read(service).endswith("<3>")


def test_the_sampling_parameters_reach_the_request(model):
    service, client = model
    service.says = "so"
    client.messages.create(**ASKED, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": 3})
    sampling = service.requests[0].sampling
    found = (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)
    assert found == (2000, 0.5, 0.25, 7, 3)


def test_stop_sequences_are_stop_strings(tmp_path):
    service = Scripted()
    service.says = "so"
    with served(edge_over(service, chat=load_chat(str(save_chat(tmp_path, response=False))))) as at:
        assert call(f"{at}/v1/messages", ASKED | {"stop_sequences": ["zz"]})[0] == 200
    assert service.requests[0].stop == ("zz",)


def test_tokens_are_counted_as_the_request_has_them(model):
    service, client = model
    asked = {"model": MODEL, "messages": USER, "system": [{"type": "text", "text": "brief"}], "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked).input_tokens
    assert not service.requests
    client.messages.create(**asked, max_tokens=5)
    assert counted == len(service.requests[0].prompt)


def test_habits_are_accepted(model):
    service, client = model
    service.says = "so"
    client.messages.create(
        **ASKED,
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        system=[{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tools=[{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        tool_choice={"type": "none"},
        output_config={"effort": "low"},
        extra_headers={"anthropic-beta": "files-api-2025-04-14"},
    )
    assert "tweather" not in read(service)


def test_errors_are_anthropics(model, scripted):
    service, client = model
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**ASKED | {"model": "claude"})
    assert (refused.value.type, refused.value.request_id) == ("not_found_error", refused.value.body["request_id"])
    assert call(f"{scripted[1]}/v1/messages")[2]["type"] == "error"
    service.error = EngineError("no target is up")
    with pytest.raises(anthropic.APIStatusError, match="no target is up") as refused:
        client.messages.create(**ASKED)
    assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
    with pytest.raises(anthropic.APIStatusError, match="no target is up") as refused:
        list(client.messages.create(**ASKED, stream=True))
    assert refused.value.type == "overloaded_error"
    assert raw(scripted[1], ASKED)[-1][0] == "error"


def test_a_mutant_whose_blocks_stay_open_is_noticed(model, scripted, monkeypatch):
    monkeypatch.setattr(answering.Message, "close_block", lambda self: iter(()))
    found = [name for name, _ in raw(scripted[1], ASKED | {"tools": [WEATHER]})]
    assert found.count("content_block_start") != found.count("content_block_stop")


class Place(BaseModel):
    city: str
    days: int


DRAWN = {"temperature": 1.0, "seed": 5, "logit_bias": {"4": -100}}


def test_the_tokens_are_those_of_a_chat(at):
    """The same chat, tools and seed, asked three ways."""
    body = DRAWN | {"max_tokens": 40, "messages": USER, "ignore_eos": True, "return_token_ids": True}
    answer = call(f"{at}/v1/messages", body | {"tools": [WEATHER]})[2]
    function = {"type": "function", "function": {"name": "weather", "parameters": WEATHER["input_schema"]}}
    function["function"]["description"] = WEATHER["description"]
    chat = call(f"{at}/v1/chat/completions", body | {"tools": [function]})[2]
    (choice,) = chat["choices"]
    assert (answer["token_ids"], answer["prompt_token_ids"]) == (choice["token_ids"], chat["prompt_token_ids"])
    flat = {"type": "function", **function["function"]}
    asked = {name: value for name, value in body.items() if name not in ("messages", "max_tokens")}
    asked |= {"input": "hello", "max_output_tokens": 40, "tools": [flat]}
    assert call(f"{at}/v1/responses", asked)[2]["token_ids"] == choice["token_ids"]
    assert len(choice["token_ids"]) == 40


def test_a_tool_that_must_be_called_and_an_answer_that_is_parsed(at):
    schema = Place.model_json_schema() | {"additionalProperties": False}
    tool = {"name": "place", "input_schema": schema}
    choice = {"type": "tool", "name": "place", "disable_parallel_tool_use": True}
    short = {"extra_body": {"logit_bias": SHORT, "seed": 3, "temperature": 1.0}}
    with anthropic.Anthropic(base_url=at, api_key="none", max_retries=0) as client:
        message = client.messages.create(**ASKED | {"max_tokens": 300}, tools=[tool], tool_choice=choice, **short)
        (block,) = message.content
        Place.model_validate(block.input, strict=True)
        assert message.stop_reason == "tool_use"
        parsed = client.messages.parse(**ASKED | {"max_tokens": 300}, output_format=Place, **short)
        assert isinstance(parsed.parsed_output, Place)


@pytest.mark.parametrize(("disabled", "parallel"), [(True, False), (False, True), (None, True)])
def test_parallel_calls_are_disabled_by_their_own_name(disabled, parallel):
    choice = {"type": "any"} | ({} if disabled is None else {"disable_parallel_tool_use": disabled})
    body = read_body(CountBody, {"messages": [{"role": "user", "content": "a"}], "tool_choice": choice})
    assert body.parallel_tool_calls is parallel
