"""POST /v1/chat/completions: templates, tools, reasoning, streams; by OpenAI's own client."""

from __future__ import annotations

import itertools
import json

import openai
import pytest
from openai.types.chat import ChatCompletion
from tests.support.models import letters_tokenizer
from tests.web.chats import RESPONSE, TEMPLATE, Scripted, called, save_chat
from tests.web.support import MODEL, call, edge_over, events, refusal, served

from paceline.checkpoint.chat import ChatTemplate, load_chat
from paceline.errors import ConfigError
from paceline.types import FinishReason, SamplingParams

USER = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_chat(str(save_chat(tmp_path_factory.mktemp("chat"))))


@pytest.fixture
def model(scripted):
    """(the script, OpenAI's client of it)"""
    service, at = scripted
    service.says, service.finish_reason, service.step = "hi<7>", FinishReason.STOP, 3
    service.requests.clear()
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        yield service, client


@pytest.fixture(scope="module")
def real(pipeline, chat):
    """The application over real engines."""
    with served(edge_over(pipeline, chat=chat)) as at:
        yield at


def said(stream):
    """(content, reasoning, calls, finish reason) of a stream."""
    content, reasoning, calls, reason = "", "", [], None
    for part in stream:
        for choice in part.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            calls += [(one.index, one.function.name, one.function.arguments) for one in choice.delta.tool_calls or []]
            reason = choice.finish_reason or reason
    return content, reasoning, calls, reason


def whole(answer):
    """The same of an answer that was not streamed."""
    (choice,) = answer.choices
    message = choice.message
    calls = [(i, one.function.name, one.function.arguments) for i, one in enumerate(message.tool_calls or [])]
    return message.content or "", getattr(message, "reasoning_content", ""), calls, choice.finish_reason


def rendered(messages, **options):
    return letters_tokenizer().apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, **{"add_generation_prompt": True, **options}
    )


def test_the_prompt_is_the_rendered_chat_and_the_tokens_are_the_pipelines(real, pipeline):
    messages = [{"role": "system", "content": "be brief"}, *USER]
    ids = letters_tokenizer().encode(rendered(messages), add_special_tokens=False)
    sampling = SamplingParams(max_tokens=20, seed=5, temperature=0.8, ignore_eos=True)
    expected = pipeline.generate(ids, sampling).result
    body = {"messages": messages, "max_completion_tokens": 20, "seed": 5, "temperature": 0.8, "ignore_eos": True}
    status, _, answer = call(f"{real}/v1/chat/completions", body | {"return_token_ids": True})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == ids
    assert choice["token_ids"] == list(expected.token_ids)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    streamed = events(f"{real}/v1/chat/completions", body | {"stream": True, "return_token_ids": True})
    tokens = [i for event in streamed[:-1] for i in event["choices"][0].get("token_ids", [])]
    assert tokens == list(expected.token_ids)


def test_the_likeliest_tokens_are_in_the_place_of_each(real):
    body = {"messages": USER, "max_tokens": 5, "logprobs": True, "top_logprobs": 4, "ignore_eos": True}
    status, _, answer = call(f"{real}/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["content"]) == 5
    for entry in choice["logprobs"]["content"]:
        first, *others = entry.pop("top_logprobs")
        assert first == entry  # greedy
        assert [one["logprob"] for one in others] == sorted((one["logprob"] for one in others), reverse=True)
        assert len(others) == 3
    _, _, plain = call(f"{real}/v1/chat/completions", body | {"speculation": {"enabled": False}})
    assert plain["choices"][0]["message"] == choice["message"]


def test_an_answer_may_fill_the_context_unless_it_is_told_otherwise(model):
    service, client = model
    client.chat.completions.create(model=MODEL, messages=USER)
    (request,) = service.requests
    assert (request.sampling.max_tokens, "max_tokens" in request.sampling.model_fields_set) == (4000, False)


def test_an_answer_is_content(model):
    _, client = model
    answer = client.chat.completions.create(model=MODEL, messages=USER, n=2, logprobs=True)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert [choice.message.content for choice in answer.choices] == ["hi", "hi"]
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["h", "i", "<7>"]
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert parts[0].choices[0].delta.role == "assistant"
    assert said(parts) == ("hi", "", [], "stop")
    assert parts[-1].usage.completion_tokens == 3
    assert sum(len(p.choices[0].logprobs.content) for p in parts if p.choices and p.choices[0].logprobs) == 3


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
def test_reasoning_and_calls_are_told_from_content(model, step):
    service, client = model
    service.step = step
    service.says = f"<4>let me think<5>one moment{called(city='Rome', days='3')}{called(city='Oslo')}<7>"
    wanted = (
        "one moment",
        "let me think",
        [(0, "weather", '{"city": "Rome", "days": 3}'), (1, "weather", '{"city": "Oslo"}')],
        "tool_calls",
    )
    asked = {"model": MODEL, "messages": USER, "tools": [WEATHER], "tool_choice": "auto"}
    assert whole(client.chat.completions.create(**asked)) == wanted
    assert said(client.chat.completions.create(**asked, stream=True)) == wanted
    assert b"tweather" in letters_prompt(service)


def letters_prompt(service):
    return letters_tokenizer().decode(list(service.requests[0].prompt)).encode()


def test_the_reasoning_that_the_template_opens_is_reasoning(model):
    service, client = model
    service.says = "because<5>yes<7>"
    asked = {"model": MODEL, "messages": USER, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
    assert whole(client.chat.completions.create(**asked)) == ("yes", "because", [], "stop")
    assert said(client.chat.completions.create(**asked, stream=True)) == ("yes", "because", [], "stop")


def test_without_tools_nothing_is_called(model):
    service, client = model
    service.says = f"so{called(city='Rome')}<7>"
    for extra in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        service.requests.clear()
        content, _, calls, reason = whole(client.chat.completions.create(model=MODEL, messages=USER, **extra))
        assert (calls, reason) == ([], "stop")
        assert content.startswith("so")
        assert "Rome" in content
        assert b"tweather" not in letters_prompt(service)


NO_CALLS = [('<6>{"name": <8><7>', "stop"), ('<6>{"name": "wea', "length"), ('<6>{"name": 3}<8><7>', "stop")]


@pytest.mark.parametrize(("says", "reason"), NO_CALLS)
def test_a_call_that_is_none_is_content(model, says, reason):
    service, client = model
    service.says, service.finish_reason = says, FinishReason(reason)
    asked = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
    for found in (
        whole(client.chat.completions.create(**asked)),
        said(client.chat.completions.create(**asked, stream=True)),
    ):
        assert found[2:] == ([], reason)
        assert '{"name":' in found[0]


def test_the_turns_of_a_tool_reach_the_template(model, scripted):
    service, client = model
    turns = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "rome"}'}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}],
        },
        {"role": "developer", "content": "short"},
    ]
    client.chat.completions.create(model=MODEL, messages=turns)
    read = letters_tokenizer().decode(list(service.requests[0].prompt), skip_special_tokens=False)
    assert "cweatherarome" in read.replace(" ", "")
    assert "system" in read.replace(" ", "")  # this template knows no developer


def test_habits_are_accepted(scripted):
    _, at = scripted
    habits = {
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "n": 1,
        "modalities": ["text"],
        "store": False,
        "user": "x",
    }
    status, _, answer = call(f"{at}/v1/chat/completions", {"messages": USER, "tool_choice": "auto"} | habits)
    assert status == 200, answer


def test_a_base_model_refuses_chats_in_one_sentence(url):
    assert "'tests/target' has no chat template: use /v1/completions" in refusal(
        f"{url}/v1/chat/completions", {"messages": USER}
    )


def test_without_a_response_template_tools_are_refused_and_all_is_content(tmp_path):
    service = Scripted()
    service.says = "<4>x<5>y<7>"
    with served(edge_over(service, chat=load_chat(str(save_chat(tmp_path, response=False))))) as at:
        status, _, answer = call(f"{at}/v1/chat/completions", {"messages": USER, "tools": [WEATHER]})
        assert (status, "no form is known" in answer["error"]["message"]) == (400, True)
        _, _, answer = call(f"{at}/v1/chat/completions", {"messages": USER, "stop": ["zz"]})
        assert answer["choices"][0]["message"]["content"] == "xy"


def test_tools_are_refused_where_the_template_reads_none(tmp_path):
    """The model would not see them, and a call that is bound to their form would be nonsense."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for response in (RESPONSE, None):  # a form of calls would not help
        tokenizer.response_template = response
        tokenizer.save_pretrained(tmp_path / str(response is None))
    edges = [edge_over(Scripted(), chat=load_chat(str(folder))) for folder in tmp_path.iterdir()]
    with served(edges[0]) as at, served(edges[1]) as formless:
        for url, choice in itertools.product((at, formless), ("auto", "required")):
            body = {"messages": USER, "tools": [WEATHER], "tool_choice": choice}
            status, _, answer = call(f"{url}/v1/chat/completions", body)
            assert (status, "reads no tools" in answer["error"]["message"]) == (400, True)
        assert call(f"{at}/v1/chat/completions", {"messages": USER})[0] == 200


def test_a_template_may_come_from_a_file(tmp_path):
    letters_tokenizer().save_pretrained(tmp_path)
    assert load_chat(str(tmp_path)) is None
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = load_chat(str(tmp_path), str(file))
    assert chat.render([{"role": "user", "content": "abc"}], None, {}) == "abc"
    assert chat.encode("abc") == tuple(letters_tokenizer().encode("abc"))
    for text, sentence in (("{% for %}", "not valid, line 1"), (" ", "it is empty")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            load_chat(str(tmp_path), str(file))
    with pytest.raises(ConfigError, match="it cannot be read"):
        load_chat(str(tmp_path), str(tmp_path / "nowhere"))


def test_the_model_types_of_transformers_server_have_its_response_templates(tmp_path):
    save_chat(tmp_path, response=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    chat = load_chat(str(tmp_path))
    assert chat.calls_tools
    assert {region.kind for region in chat.format.regions} == {"reasoning", "call", "nothing"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_chat(str(tmp_path)).format.regions == ()


async def test_the_asynchronous_client_streams_calls(scripted):
    service, at = scripted
    service.says, service.step = f"{called(city='Rome')}<7>", 2
    async with openai.AsyncOpenAI(base_url=f"{at}/v1", api_key="none") as client:
        asked = {"model": MODEL, "messages": USER, "tools": [WEATHER]}
        stream = await client.chat.completions.create(**asked, stream=True)
        assert said([part async for part in stream]) == ("", "", [(0, "weather", '{"city": "Rome"}')], "tool_calls")


def test_reading_an_answer_without_its_prompt_is_noticed(model, monkeypatch):
    """The mutant: the parser does not see what the template has opened."""
    monkeypatch.setattr(ChatTemplate, "begun", lambda *_: "")
    with pytest.raises(AssertionError):
        test_the_reasoning_that_the_template_opens_is_reasoning(model)
