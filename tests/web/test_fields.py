"""Fields without a parameter of their own: accepted, named in a header, refused, or read by the chat template."""

import json
import logging
import urllib.request
from types import MappingProxyType

import pytest
from tests.web.chats import RESPONSE, TEMPLATE, Bytes, Scripted, called
from tests.web.support import call, edge_over, events, refusal, served

from paceline.checkpoint.answer_formats import of_response
from paceline.checkpoint.chat import ChatTemplate
from paceline.web import fields
from paceline.web.anthropic_schema import MessageBody
from paceline.web.fields import ANY, HEADER, NOTED, Ignored
from paceline.web.messages import ChatBody
from paceline.web.responses import ResponseBody
from paceline.web.schema import CompletionBody, read

USER = {"role": "user", "content": "hi"}
BODIES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}
KINDS = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessageBody,
}
READS_MORE = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content }}{{ message.mood }}{% if 'thinking' in message %}({{ message['thinking'] }}){% endif %}",
).replace("{% if thinking %}", "{{ documents }}{{ reasoning_effort }}{% if enable_thinking %}")
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


class Tokenizer(Bytes):
    """A tokenizer of characters with a chat template that is rendered as transformers does."""

    added_tokens_decoder = MappingProxyType({})

    def get_chat_template(self, given=None, tools=None):
        return given or TEMPLATE

    def apply_chat_template(self, chat, tools=None, chat_template=None, tokenize=False, **options):
        from transformers.utils.chat_template_utils import render_jinja_template

        options.pop("continue_final_message", None)
        rendered, _ = render_jinja_template(conversations=[chat], tools=tools, chat_template=chat_template, **options)
        return rendered[0]


@pytest.fixture(scope="module")
def scripted():
    service = Scripted()
    chat = ChatTemplate(Tokenizer(), None, of_response(RESPONSE))
    with served(edge_over(service, chat=chat)) as at:
        yield service, at


@pytest.fixture(scope="module")
def strict():
    with served(
        edge_over(Scripted(), chat=ChatTemplate(Tokenizer(), None, of_response(RESPONSE)), strict_fields=True)
    ) as at:
        yield at


@pytest.fixture(scope="module")
def reading():
    """A service whose template reads more of messages, and more variables."""
    service = Scripted()
    with served(edge_over(service, chat=ChatTemplate(Tokenizer(), READS_MORE, of_response(RESPONSE)))) as at:
        yield service, at


@pytest.fixture(autouse=True)
def _says(scripted, reading):
    for service, _ in (scripted, reading):
        service.says, service.requests = "yes<2>", []


def prompt_of(service):
    return Bytes().decode(service.requests[-1].prompt)


def own(path):
    """Parameters of a path, which the table of fields does not decide on."""
    return {*KINDS[path].model_fields, *KINDS[path].RENAMED, *KINDS[path].FORMS}


def told(headers):
    """The fields that an answer says were ignored."""
    return [one.strip() for one in (headers.get(HEADER) or "").split(",") if one.strip()]


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_changes_nothing_is_accepted_in_silence(scripted, path):
    _, at = scripted
    accepted = {
        name: [1, "x", {"a": [1]}] if values == ANY else [value for value in values if value is not NOTED]
        for name, values in KINDS[path].INERT.items()
        if name not in own(path)
    }
    for i in range(max(map(len, accepted.values()))):
        fields = {name: values[i % len(values)] for name, values in accepted.items() if values}
        status, headers, body = call(at + path, BODIES[path] | fields)
        assert status == 200, (fields, body)
        assert told(headers) == [], fields


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_would_change_the_answer_is_refused_by_its_name(scripted, path):
    _, at = scripted
    kind = KINDS[path]
    for name, values in kind.INERT.items():
        if values == ANY or NOTED in values or name in own(path):
            continue
        status, _, body = call(at + path, BODIES[path] | {name: {"a": 77}})
        assert status == 400, (name, body)
        assert body["error"]["message"].startswith(f"{name} is "), body
        assert body["error"].get("param") in (name, None)


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_named_in_a_header(scripted, path):
    _, at = scripted
    given = BODIES[path] | {"foo": 1, "temprature": 0.5, "bad name\n": 1, "priority": 3}
    status, headers, _ = call(at + path, given)
    assert status == 200
    assert told(headers) == ["foo", "temprature;did_you_mean=temperature", '"bad name\\n"', "priority"]


def test_streams_name_ignored_fields_too(scripted):
    _, at = scripted
    body = json.dumps(BODIES["/v1/completions"] | {"foo": 1, "stream": True, "stream_options": {"bar": 1}})
    with urllib.request.urlopen(f"{at}/v1/completions", body.encode(), timeout=60) as reply:
        assert told(reply.headers) == ["foo", "stream_options.bar"]


def test_strict_fields_refuse_what_is_not_known(strict):
    for path, body in BODIES.items():
        status, _, answer = call(strict + path, body | {"temprature": 1})
        assert (status, answer["error"]["message"]) == (
            400,
            "temprature is 1, but there is no such key: did you mean temperature?",
        )
        assert call(strict + path, body | {"user": "me", "mirostat": 0})[0] == 200
    chat = {"messages": [USER | {"mood": "glad"}]}
    status, _, answer = call(f"{strict}/v1/chat/completions", chat)
    assert (status, answer["error"]["message"][:16]) == (400, "messages.mood is")


def test_each_ignored_field_is_logged_once_without_its_value(caplog, monkeypatch):
    monkeypatch.setattr(fields, "logged_fields", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            read(CompletionBody, {"prompt": "a", "foo": "secret", "\nbad": 1}).ignored.warn()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines] == ["requests hold the field foo", 'requests hold the field "\\nbad"']
    assert "secret" not in caplog.text


def test_what_is_named_is_bounded():
    ignored = Ignored()
    for i in range(1000):
        ignored.note("x" * 500 + str(i), 1)
        ignored.note(f"name{i}", 1)
    header = ignored.header[HEADER]
    assert len(header) < 3000
    assert header.endswith("...")


MESSAGES = {
    "sent back as it came": [{"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}],
    "of LiteLLM": [{"role": "assistant", "content": "a", "provider_specific_fields": {"x": 1}, "thinking_blocks": []}],
    "with a prompt cache": [{"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}]}],
    "of a frontend": [{"role": "user", "content": "b", "id": 5, "timestamp": 1}],
    "with signatures": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": ""}, "extra_content": {}}]}
    ],
    "in older names": [
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "3"},
    ],
    "in strings": [{"role": "user", "content": ["b", {"type": "text", "text": "c"}]}],
    "refused": [{"role": "assistant", "content": None, "refusal": "no"}],
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_as_clients_send_them(scripted, kind):
    service, at = scripted
    status, headers, body = call(f"{at}/v1/chat/completions", {"messages": [USER, *MESSAGES[kind], USER]})
    assert status == 200, body
    assert told(headers) == []
    said = prompt_of(service)
    assert said.count("hi") == 2
    expected = {"in older names": "cweathera", "in strings": "b\nc", "refused": "no", "with signatures": "cweather"}
    assert expected.get(kind, "") in said


def test_an_unknown_field_of_a_message_tool_or_part_is_named(scripted):
    _, at = scripted
    call_ = {"function": {"name": "weather", "arguments": "{}", "w": 1}, "x": 1}
    given = {
        "messages": [USER | {"mood": "glad", "reasning_content": "x"}, {"role": "assistant", "tool_calls": [call_]}],
        "tools": [{"type": "function", "function": WEATHER | {"examples": []}, "y": 1, "cache_control": {}}],
    }
    status, headers, _ = call(f"{at}/v1/chat/completions", given)
    assert status == 200
    assert set(told(headers)) == {
        "messages.mood",
        "messages.reasning_content;did_you_mean=messages.reasoning_content",
        "messages.tool_calls.x",
        "messages.tool_calls.function.w",
        "tools.y",
        "tools.function.examples",
    }


@pytest.mark.parametrize("field", ["prefix", "partial", "images", "audio"])
def test_a_field_of_a_message_that_would_change_the_answer_is_refused(scripted, field):
    _, at = scripted
    url = f"{at}/v1/chat/completions"
    assert call(url, {"messages": [USER | {field: []}]})[0] == 200
    assert refusal(url, {"messages": [USER, USER | {field: ["x"]}]}).startswith(f"messages[1].{field} is")


def test_a_field_that_the_template_reads_is_honored(reading):
    service, at = reading
    url = f"{at}/v1/chat/completions"
    status, headers, _ = call(url, {"messages": [USER | {"mood": "glad"}]})
    assert (status, told(headers)) == (200, [])
    assert "higlad" in prompt_of(service)
    for name in ("reasoning_content", "reasoning", "thinking"):
        call(url, {"messages": [USER, {"role": "assistant", "content": "a", name: "deep"}, USER]})
        assert "(deep)" in prompt_of(service)
    details = [{"type": "reasoning.text", "text": "deep"}]
    call(url, {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_details": details}, USER]})
    assert "(deep)" in prompt_of(service)
    status, headers, _ = call(url, {"messages": [USER], "documents": [{"text": "facts"}]})
    assert (status, told(headers)) == (200, [])
    assert "facts" in prompt_of(service)


def test_documents_that_no_template_reads_are_refused(scripted):
    _, at = scripted
    url = f"{at}/v1/chat/completions"
    assert call(url, {"messages": [USER], "documents": []})[0] == 200
    status, _, body = call(url, {"messages": [USER], "documents": [{"text": "x"}]})
    assert (status, body["error"]["param"]) == (400, "documents")


OFF = [
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"enable_thinking": False},
    {"thinking": {"type": "disabled"}},
    {"think": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
]


@pytest.mark.parametrize("given", OFF)
def test_each_way_to_switch_reasoning_off(reading, given):
    service, at = reading
    url = f"{at}/v1/chat/completions"
    call(url, {"messages": [USER], "reasoning_effort": "high"})
    assert prompt_of(service).endswith("high<4>")
    status, _, body = call(url, {"messages": [USER]} | given)
    assert status == 200, body
    assert not prompt_of(service).endswith("<4>")


def test_an_effort_that_no_template_reads_changes_nothing(scripted):
    service, _ = scripted
    chat = ChatTemplate(Tokenizer(), TEMPLATE.replace("thinking", "mood"), of_response(RESPONSE))
    with served(edge_over(service, chat=chat)) as plain:
        url = f"{plain}/v1/chat/completions"
        call(url, {"messages": [USER]})
        for effort in ("low", "none"):
            status, headers, _ = call(url, {"messages": [USER], "reasoning_effort": effort})
            assert (status, told(headers)) == (200, ["reasoning_effort"])
            assert service.requests[-1].prompt == service.requests[0].prompt
        status, headers, _ = call(url, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}})
        assert (status, told(headers)) == (200, ["chat_template_kwargs.enable_thinking"])


def test_functions_are_the_older_name_of_tools(scripted):
    service, at = scripted
    url = f"{at}/v1/chat/completions"
    service.says = called(city="Oslo") + "<2>"
    body = {"messages": [USER], "functions": [WEATHER], "function_call": "auto"}
    choice = call(url, body)[2]["choices"][0]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    *chunks, done = events(url, body | {"stream": True})
    assert done == "[DONE]"
    assert [c["choices"][0]["delta"]["function_call"] for c in chunks if "function_call" in c["choices"][0]["delta"]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    call(url, body | {"function_call": "none"})
    assert "tweather" not in prompt_of(service)
    for wrong in ("always", {"name": "f", "x": 1}, 3):
        assert call(url, body | {"function_call": wrong})[0] == 400
    assert call(url, body | {"tools": [{"type": "function", "function": WEATHER}]})[0] == 400


def test_allowed_tools_are_the_only_ones(scripted):
    service, at = scripted
    url = f"{at}/v1/chat/completions"
    tools = [{"type": "function", "function": WEATHER | {"name": name}} for name in ("weather", "clock")]
    named = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    status, _, body = call(url, {"messages": [USER], "tools": tools, "tool_choice": choice})
    assert status == 200, body
    assert "tweather" in prompt_of(service)
    assert "tclock" not in prompt_of(service)
    named[0]["function"]["name"] = "nobody"
    status, _, body = call(url, {"messages": [USER], "tools": tools, "tool_choice": choice})
    assert (status, body["error"]["message"][:25]) == (400, "tool_choice is 'nobody', ")


def test_reasoning_that_is_not_wanted_is_not_sent(scripted):
    service, at = scripted
    url = f"{at}/v1/chat/completions"
    service.says = "<4>hm<5>yes<2>"
    assert "reasoning_content" in call(url, {"messages": [USER]})[2]["choices"][0]["message"]
    message = call(url, {"messages": [USER], "include_reasoning": False})[2]["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == "yes"
    assert "hm" not in str(events(url, {"messages": [USER], "include_reasoning": False, "stream": True}))


MUTANTS = {
    "a value that changes something is let through": (
        "check",
        lambda *_: None,
        lambda s: test_a_field_that_would_change_the_answer_is_refused_by_its_name(s, "/v1/completions"),
    ),
    "unknown fields are not told": (
        "Ignored.note",
        lambda *_: None,
        lambda s: test_an_unknown_field_is_named_in_a_header(s, "/v1/completions"),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_noticed(monkeypatch, scripted, mutant):
    name, wrong, check = MUTANTS[mutant]
    if name == "check":
        monkeypatch.setattr("paceline.web.schema.check", wrong)
    else:
        monkeypatch.setattr(Ignored, "note", wrong)
    with pytest.raises(AssertionError):
        check(scripted)
