"""Tool calls that an answer must make: forms by the response template, real engines, and what cannot be bound."""

import json
import urllib.request

import jsonschema
import pytest
from openai import OpenAI
from tests.web.chats import SHORT, of_template, told
from tests.web.support import MODEL, call, edge_over, refusal, served
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as TEMPLATES

from paceline.checkpoint.answer_formats import format_of
from paceline.checkpoint.chat import ChatTemplate
from paceline.errors import InvalidRequestError
from paceline.web import chat as chats
from paceline.web.calls import bound_calls

USER = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["rome", "oslo"]}},
    },
    "wait": {
        "type": "object",
        "properties": {"seconds": {"type": "integer", "minimum": 1, "maximum": 30}},
        "required": ["seconds"],
        "additionalProperties": False,
    },
}


def tools(**more):
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in PARAMETERS.items()
    ]


def calls_of(answer):
    """The calls, once they are known to be those of the tools."""
    found = [(one.function.name, json.loads(one.function.arguments)) for one in answer.choices[0].message.tool_calls]
    for name, arguments in found:
        jsonschema.validate(arguments, PARAMETERS[name])
    return found


ASKED = {"messages": USER, "temperature": 1.0, "max_tokens": 200, "logit_bias": SHORT, "return_token_ids": True}


@pytest.mark.parametrize(
    ("more", "name", "num_calls"),
    [
        ({"tool_choice": "required"}, None, None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, None, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "wait"}}}, "wait", 1),
    ],
)
def test_a_call_that_is_demanded_comes_with_arguments_of_its_schema(at, more, name, num_calls):
    """A model of random weights says what was asked for, by the tokens of plain decoding."""
    with OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        for seed in range(3):
            asked = {"model": MODEL, "messages": USER, **more, "tools": tools(), "seed": seed}
            options = {name: value for name, value in ASKED.items() if name != "messages"}
            answer, plain = (
                client.chat.completions.create(**asked, extra_body=options | {"speculation": {"enabled": enabled}})
                for enabled in (True, False)
            )
            found = calls_of(answer)
            assert answer.choices[0].token_ids == plain.choices[0].token_ids
            assert answer.choices[0].finish_reason == "tool_calls"
            assert num_calls in (None, len(found))
            assert name in (None, found[0][0])
            assert not answer.choices[0].message.content


def events_of(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        lines = [line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("cut", [False, True])
def test_arguments_of_a_demanded_call_are_streamed_in_pieces(speaking, cut):
    """By all three APIs the name first, then pieces that join to the whole; also where the answer is cut off."""
    pipeline, chat = speaking
    hermes = ChatTemplate(chat._tokenizer, None, format_of("", (), None, "hermes", "none"))
    asked = ASKED | {"messages": USER, "seed": 1}
    with served(edge_over(pipeline, chat=hermes)) as url:
        body = asked | {"tools": tools(), "tool_choice": "required"}
        length = 200
        if cut:
            text = call(f"{url}/v1/chat/completions", body)[2]["choices"][0]
            length = len(text["token_ids"]) - len("}</tool_call>") - 3
        body |= {"max_tokens": length}
        (choice,) = call(f"{url}/v1/chat/completions", body)[2]["choices"]
        calls = [{"name": one["function"]["name"], "arguments": ""} for one in choice["message"]["tool_calls"]]
        pieces = 0
        for event in events_of(url, "/v1/chat/completions", body | {"stream": True}):
            for delta in event["choices"][0]["delta"].get("tool_calls", ()):
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
                assert ("id" in delta) is ("name" in delta["function"])
                pieces += "id" not in delta
        assert calls == [one["function"] for one in choice["message"]["tool_calls"]]
        assert pieces >= len(calls)
        assert choice["finish_reason"] == ("length" if cut else "tool_calls")
        assert not choice["message"]["content"]

        flat = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools()]
        body = asked | {"tools": flat, "tool_choice": {"type": "any"}, "max_tokens": length}
        whole, blocks = call(f"{url}/v1/messages", body)[2]["content"], dict[int, str]()
        for event in events_of(url, "/v1/messages", body | {"stream": True}):
            if event["type"] == "content_block_delta":
                at = event["index"]
                blocks[at] = blocks.get(at, "") + event["delta"]["partial_json"]
        assert [*blocks.values()] == [one["arguments"] for one in calls]
        inputs = [one["input"] for one in whole]
        assert inputs[:-1] == [json.loads(one["arguments"]) for one in calls[:-1]]
        assert inputs[-1] == ({} if cut else json.loads(calls[-1]["arguments"]))

        flat = [{"type": "function", **one["function"]} for one in tools()]
        options = {name: value for name, value in asked.items() if name not in ("messages", "max_tokens")}
        body = options | {"input": "hi", "tools": flat, "tool_choice": "required", "max_output_tokens": length}
        events = events_of(url, "/v1/responses", body | {"stream": True})
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [{"name": one["name"], "arguments": one["arguments"]} for one in items] == calls
        assert items[-1]["status"] == ("incomplete" if cut else "completed")
        deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(one["arguments"] for one in calls)


def test_a_form_that_gets_lost_is_noticed(at, monkeypatch):
    """The mutant: nothing is bound, and such a model calls nothing."""
    monkeypatch.setattr(chats, "bound_calls", lambda *_, **__: None)
    body = ASKED | {"tools": tools(), "tool_choice": "required", "seed": 0, "max_tokens": 12}
    _, _, answer = call(f"{at}/v1/chat/completions", body)
    assert not answer["choices"][0]["message"].get("tool_calls")


def form(chat, choice, parallel=True, in_reasoning=False, **more):
    found = bound_calls(chat, tools(**more), choice, parallel=parallel, in_reasoning=in_reasoning)
    return None if found is None else json.loads(found.structural_tag)["format"]["elements"]


def test_free_calls_are_bound_if_they_are_strict_or_may_be_one_alone(speaking):
    _, chat = speaking
    assert form(chat, "auto") is None
    assert form(chat, None, strict=False) is None
    thought, calls = form(chat, "auto", strict=True)
    assert thought["content"]["begin"] == "<4>"
    assert (calls["type"], calls["triggers"], calls["stop_after_first"]) == ("triggered_tags", ["<6>"], False)
    assert calls["tags"][0]["content"]["elements"][2]["json_schema"] == PARAMETERS["weather"]
    _, calls = form(chat, None, parallel=False)
    assert calls["stop_after_first"] is True
    assert calls["tags"][0]["content"]["elements"][2]["json_schema"] == {"type": "object"}
    begun, *_ = form(chat, "required", in_reasoning=True)
    assert (begun["type"], begun["begin"]) == ("tag", "")


def of_type(speaking, model_type):
    (response,) = [template for types, template in TEMPLATES.items() if model_type in types]
    return of_template(speaking[1]._tokenizer, response)


def test_qwens_calls_are_bound_as_qwen_writes_them(speaking):
    chat = of_type(speaking, "qwen3")
    thought, _, calls = form(chat, {"name": "wait"})
    assert thought["content"] == {"type": "tag", "content": {"type": "any_text"}, "end": "</think>", "begin": "<think>"}
    (tag,) = calls["tags"]
    assert (tag["begin"], tag["end"], calls["separator"]) == ("<tool_call>", "</tool_call>", "\n")
    texts = [part["value"] for part in tag["content"]["elements"] if part["type"] == "const_string"]
    assert texts == ['{"name": "wait", "arguments": ', "}"]
    said = '\n<tool_call>\n{"name": "wait", "arguments": {"seconds": 3}}\n</tool_call>'
    assert told(chat.format, said, tools()) == ("", "", [("wait", {"seconds": 3})])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"choice": "required"},
            "tool_choice is 'required', but this model writes calls in",
        ),
        (
            {"choice": "auto", "parallel": False},
            "parallel_tool_calls is false, but this model writes calls in",
        ),
        (
            {"choice": None, "strict": True},
            "tools hold one that is strict, but this model writes calls in",
        ),
    ],
)
def test_calls_in_another_form_are_refused(speaking, asked, sentence):
    """Lines of keys and values, which no form here is."""
    lines = {"open": "<call>", "close": "</call>", "content": "kv-lines", "transform": {"function": "{content}"}}
    response = {"start_anchor": "<3>", "fields": {"tool_calls": lines, "content": {"content": "text"}}}
    chat = of_template(speaking[1]._tokenizer, response)
    with pytest.raises(InvalidRequestError, match=sentence):
        form(chat, **asked)


def test_a_schema_that_cannot_be_bound_is_refused_with_its_place(at):
    wrong = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    one = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    body = {"messages": USER, "tools": [one], "tool_choice": "required"}
    assert refusal(f"{at}/v1/chat/completions", body).startswith(
        "tools[0].function.parameters: #/properties/a has 'contains'"
    )
    flat = {"type": "function", "name": "f", "parameters": wrong}
    status, _, answer = call(f"{at}/v1/responses", {"input": "hi", "tools": [flat | {"strict": True}]})
    assert status == 400, answer


def test_a_response_must_call_too(at):
    flat = [{"type": "function", **tool["function"]} for tool in tools(strict=True)]
    choice = {"type": "function", "name": "wait"}
    options = {name: value for name, value in ASKED.items() if name not in ("messages", "max_tokens")}
    asked = options | {"input": "hi", "tools": flat, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    status, _, answer = call(f"{at}/v1/responses", asked)
    assert status == 200, answer
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == (choice, False)
    (item,) = answer["output"]
    assert (item["type"], item["name"]) == ("function_call", "wait")
    jsonschema.validate(json.loads(item["arguments"]), PARAMETERS["wait"])
