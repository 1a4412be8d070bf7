"""POST /v1/responses by OpenAI's own client: items, events, tools, refusals."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response
from tests.support.models import letters_tokenizer
from tests.web.chats import Scripted, called, save_chat
from tests.web.support import MODEL, call, edge_over, served

from paceline.checkpoint.chat import load_chat
from paceline.types import FinishReason
from paceline.web.speech import Speech

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    service = Scripted()
    with served(edge_over(service, chat=load_chat(str(save_chat(tmp_path_factory.mktemp("chat")))))) as at:
        yield service, at


@pytest.fixture
def model(scripted):
    service, at = scripted
    service.says, service.finish_reason = f"<4>hmm<5>so{called(city='Rome')}<7>", FinishReason.STOP
    service.requests.clear()
    with openai.OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client:
        yield service, client


def read(service):
    return letters_tokenizer().decode(list(service.requests[-1].prompt)).replace(" ", "")


def test_an_answer_is_items(model):
    service, client = model
    answer = client.responses.create(model=MODEL, input="hello", instructions="brief", tools=[TOOL])
    Response.model_validate(answer.model_dump(warnings=False))
    reasoning, message, asked = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "hmm")
    assert (message.type, answer.output_text) == ("message", "so")
    assert (asked.type, asked.name, asked.arguments) == ("function_call", "weather", '{"city": "Rome"}')
    assert (answer.status, answer.usage.input_tokens) == ("completed", len(service.requests[0].prompt))
    assert answer.usage.output_tokens_details.reasoning_tokens >= 3
    assert read(service).startswith("tweather<3><1>system<3>brief<2><1>user<3>hello")


def test_its_items_may_be_sent_back(model):
    service, client = model
    answer = client.responses.create(model=MODEL, input="hello", tools=[TOOL])
    items = [item.model_dump(exclude_none=True) for item in answer.output]
    output = {"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "sunny"}
    client.responses.create(model=MODEL, input=[{"role": "user", "content": "hello"}, *items, output], tools=[TOOL])
    assert "<1>user<3>hello<2><1>assistant<3>socweatheraome<2><1>tool<3>sunny<2>" in read(service)


def test_a_stream_tells_the_same_by_events(model):
    _, client = model
    events = list(client.responses.create(model=MODEL, input="hello", tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "so"
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hmm"
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == '{"city": "Rome"}'
    last = events[-1].response
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
    assert last.usage.total_tokens > 0


SHOWN = {"include": ["message.output_text.logprobs"]}


def texts_of_logprobs(client, **more):
    """The tokens that have log probabilities: of the message of an answer, and of the events of a stream."""
    answer = client.responses.create(model=MODEL, input="hello", tools=[TOOL], **SHOWN, **more)
    Response.model_validate(answer.model_dump(warnings=False))
    (message,) = (item for item in answer.output if item.type == "message")
    events = list(client.responses.create(model=MODEL, input="hello", tools=[TOOL], stream=True, **SHOWN, **more))
    deltas = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one.token for one in deltas]
    return [one.token for one in message.content[0].logprobs], [one.token for one in deltas]


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (f"<4>hmm<5>so{called(city='Rome')}<7>", "so"),
        ("so it is<2>", "so it is"),
        ("<6>{no call<8>after", "{no callafter"),
    ],
)
def test_the_log_probabilities_shown_are_those_of_the_text(model, says, text):
    service, client = model
    service.says = says
    whole, streamed = texts_of_logprobs(client)
    assert whole == streamed
    assert "".join(token for token in whole if len(token) == 1) == text


def test_tokens_of_the_reasoning_among_them_are_noticed(model, monkeypatch):
    """The mutant: every token so far is one of the text."""
    monkeypatch.setattr(Speech, "_places_of", lambda self, one: list(range(one.end)))
    whole, _ = texts_of_logprobs(model[1])
    assert "".join(whole) != "so"


def test_the_log_probabilities_are_those_of_a_chat(speaking):
    pipeline, chat = speaking
    marks = {str(i): -100 for i in range(10)}
    asked = {"temperature": 1.0, "seed": 5, "logit_bias": marks, "ignore_eos": True, "top_logprobs": 3}
    with served(edge_over(pipeline, chat=chat)) as at:
        body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 12}
        chatted = call(f"{at}/v1/chat/completions", asked | body)[2]["choices"][0]["logprobs"]["content"]
        answer = call(f"{at}/v1/responses", asked | {"input": "hi", "max_output_tokens": 12} | SHOWN)[2]
    (message,) = answer["output"]
    shown = message["content"][0]["logprobs"]
    assert (len(shown), answer["top_logprobs"]) == (12, 3)
    for one, other in zip(shown, chatted, strict=True):
        assert one["token"] == other["token"]
        assert one["bytes"] == (other["bytes"] or [])
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        values = [[top["logprob"] for top in entry["top_logprobs"]] for entry in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_an_answer_that_was_cut_is_incomplete(model):
    service, client = model
    service.says, service.finish_reason = "so", FinishReason.LENGTH
    answer = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert service.requests[0].sampling.max_tokens == 2


REFUSED = [
    ({"input": []}, "input is []"),
    ({"input": None}, "input is missing"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] is"),
    ({"previous_response_id": "resp_1"}, "previous_response_id is 'resp_1': it is not supported"),
    ({"background": True}, "background is true"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format is"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format is"),
    ({"text": {"verbosity": "high"}}, "text.verbosity is"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice is 'required'"),
    ({"n": 2}, "n is 2"),
    ({"include": ["file_search_call.results"]}, "include[0] is 'file_search_call.results'"),
    ({"top_logprobs": 2}, "top_logprobs is 2, but include holds no 'message.output_text.logprobs'"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs is 21"),
    ({"stream": False, "stream_options": {}}, "stream_options is given"),
]


@pytest.mark.parametrize(("body", "sentence"), REFUSED)
def test_what_is_not_served_is_refused_by_its_name(scripted, body, sentence):
    status, _, answer = call(f"{scripted[1]}/v1/responses", {"input": "hello"} | body)
    assert status == 400, answer
    assert answer["error"]["message"].startswith(sentence), answer


def test_habits_are_accepted(scripted):
    habits = {"store": True, "text": {"format": {"type": "text"}}, "truncation": "disabled", "reasoning": {}}
    assert call(f"{scripted[1]}/v1/responses", {"input": "hello"} | habits)[0] == 200
