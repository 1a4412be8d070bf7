"""POST /v1/responses by OpenAI's own client: items, events, tools, refusals."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response
from tests.security.conftest import digest, write_keys
from tests.support.models import letters_tokenizer
from tests.web.chats import Scripted, called, save_chat
from tests.web.support import MODEL, call, edge_over, served

from paceline.checkpoint.chat import load_chat
from paceline.config import ServiceConfig
from paceline.errors import ConfigError, EngineError
from paceline.security.keys import KeyRing
from paceline.types import FinishReason
from paceline.web import response_store, responses
from paceline.web.response_store import ResponseStore
from paceline.web.responses_schema import ResponseBody
from paceline.web.speech import Speech

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}


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
    monkeypatch.setattr(Speech, "places_of", lambda self, one: list(range(one.end)))
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
    assert answer.output[-1].status == "incomplete"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert service.requests[0].sampling.max_tokens == 2


def test_habits_are_accepted(scripted):
    habits = {
        "store": True,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": "detailed"},
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "prompt_cache_key": "mine",
        "service_tier": "auto",
        "client_metadata": {"origin": "codex"},
    }
    status, _, answer = call(f"{scripted[1]}/v1/responses", {"input": "hello"} | habits)
    assert status == 200, answer
    shown = {name: answer[name] for name in ("metadata", "max_tool_calls", "prompt_cache_key", "previous_response_id")}
    assert shown == {"metadata": {"a": "b"}, "max_tool_calls": 3, "prompt_cache_key": "mine"} | {
        "previous_response_id": None
    }
    assert (answer["store"], answer["service_tier"]) == (False, "default")


CODEX = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be careful"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "ls"}], "encrypted_content": None},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look"}],
        },
        {"type": "function_call", "name": "weather", "arguments": '{"city": "rome"}', "call_id": "call_1", "id": None},
        {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "a.py"}]},
    ],
    "tools": [{**TOOL, "description": "runs"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a-b-c",
    "client_metadata": {"x-codex-installation-id": "1"},
}
"""A later turn of an agent as Codex sends it."""


def test_an_agents_turn_is_read_and_answered(model):
    service, client = model
    events = list(client.responses.create(model=MODEL, stream=True, extra_body=CODEX))
    prompt = read(service)
    assert "<1>user<3>listfiles<2><1>assistant<3>lookcweatherarome<2><1>tool<3>apy<2>" in prompt
    assert (prompt.count("<1>system<3>"), "becareful<2><1>user" in prompt) == (1, True)
    summary = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    last = events[-1].response
    assert summary == last.output[0].summary[0].text == last.output[0].content[0].text == "hmm"
    assert last.reasoning.summary == "auto"
    kinds = [event.type.removeprefix("response.") for event in events]
    first = kinds.index("reasoning_summary_part.added")
    assert kinds[first - 1] == "content_part.added"
    assert kinds.count("content_part.added") == kinds.count("content_part.done") == 2


def test_the_reasoning_of_an_agent_reaches_the_template():
    body = ResponseBody(input=CODEX["input"])
    assistant = next(message for message in body.messages() if message["role"] == "assistant")
    assert assistant["reasoning_content"] == "ls"
    assert assistant["content"] == "I look"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "rome"}}


def test_the_helper_that_gathers_a_stream_has_the_answer(model):
    _, client = model
    with client.responses.stream(model=MODEL, input="hello", tools=[TOOL], reasoning={"summary": "auto"}) as stream:
        for _ in stream:
            pass
        whole = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]


def test_tokens_are_counted_as_the_request_has_them(model):
    service, client = model
    asked = {"model": MODEL, "input": "hello", "instructions": "brief", "tools": [TOOL]}
    counted = client.responses.input_tokens.count(**asked)
    assert (counted.object, service.requests) == ("response.input_tokens", [])
    client.responses.create(**asked)
    assert counted.input_tokens == len(service.requests[0].prompt)


def test_the_oldest_turns_are_left_out_if_they_may_be(model):
    service, client = model
    service.says = "so"
    turns = [{"role": role, "content": "hi" * 100} for _ in range(20) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "last"})
    room = service.info.max_model_len
    asked = {"model": MODEL, "input": turns, "instructions": "brief", "max_output_tokens": 100}
    client.responses.create(**asked)
    assert len(service.requests[-1].prompt) > room - 100
    answer = client.responses.create(**asked, truncation="auto")
    kept = service.requests[-1].prompt
    assert room - 100 - 450 < len(kept) <= room - 100
    assert answer.truncation == "auto"
    assert read(service).startswith("<1>system<3>brief<2><1>user<3>")
    assert "<1>user<3>last<2>" in read(service)
    client.responses.create(**asked | {"input": turns[-3:]}, truncation="auto")
    assert len(service.requests[-1].prompt) < 400


def test_leaving_turns_out_renders_what_the_context_holds_and_not_the_chat_again_and_again(model, monkeypatch):
    _, client = model
    sizes, plain = [], responses.Response.ask

    def counted(self, messages):
        sizes.append(len(messages))
        return plain(self, messages)

    monkeypatch.setattr(responses.Response, "ask", counted)
    turns = [{"role": "user", "content": "hi" * 100}] * 3000
    client.responses.create(model=MODEL, input=turns, truncation="auto", max_output_tokens=100)
    fitting = sizes[-1]
    assert fitting < 40
    assert sum(sizes) < 3000 + 20 * fitting


def test_an_answer_that_fails_says_so_in_its_last_event(model, monkeypatch):
    service, client = model

    async def run(request, owner="", on_usage=None):
        async for item in Scripted.run(service, request):
            yield item
            raise EngineError("no target is up")

    monkeypatch.setattr(service, "run", run)
    events = list(client.responses.create(model=MODEL, input="hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "no target is up"
    assert events[-1].response.status == "failed"


# -- responses that are kept -----------------------------------------------------------------------------------------


@pytest.fixture
def keeping(tmp_path):
    """(the script, a client for each key) of a service that keeps 12 kB for each key."""
    service = Scripted()
    entries = ({"name": name, "sha256": digest(name[0])} for name in ("ann", "bob"))
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", *entries))
    edge = edge_over(service, keys=keys, chat=load_chat(str(save_chat(tmp_path))), responses=ResponseStore(12_000))
    with served(edge) as at:
        yield service, *(openai.OpenAI(base_url=f"{at}/v1", api_key=key, max_retries=0) for key in "ab")


def test_a_response_follows_another_one_as_if_all_items_were_sent(keeping):
    service, ann, _ = keeping
    service.says = f"so{called(city='Rome')}<7>"
    asked = {"model": MODEL, "tools": [TOOL]}
    first = ann.responses.create(**asked, input="hello", instructions="brief")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    second = ann.responses.create(**asked, input=[output], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    third = list(ann.responses.create(**asked, input="bye", previous_response_id=second.id, stream=True))[-1].response
    kept = service.requests[-1].prompt
    hello, bye = ({"role": "user", "content": text} for text in ("hello", "bye"))
    items = [item.model_dump(exclude_none=True) for one in (first, second) for item in one.output]
    half = len(first.output)
    ann.responses.create(**asked, input=[hello, *items[:half], output, *items[half:], bye], store=False)
    assert service.requests[-1].prompt == kept
    assert ann.responses.retrieve(third.id).model_dump() == third.model_dump()


def test_an_item_of_a_kept_response_may_be_named_instead_of_sent(keeping):
    service, ann, bob = keeping
    service.says = f"so{called(city='Rome')}<7>"
    asked = {"model": MODEL, "tools": [TOOL], "store": False}
    first = ann.responses.create(**asked | {"store": True}, input="hello")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"}
    sent = [item.model_dump(exclude_none=True) for item in first.output]
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    ann.responses.create(**asked, input=[*sent, output])
    prompt = service.requests[-1].prompt
    ann.responses.create(**asked, input=[*named, output])
    assert service.requests[-1].prompt == prompt
    for client, item_id in ((bob, first.output[0].id), (ann, "rs_x_0"), (ann, "x")):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].id is '.*': no such item is kept"):
            client.responses.create(**asked, input=[{"type": "item_reference", "id": item_id}, output])


def test_what_is_not_kept_cannot_be_followed(keeping):
    service, ann, bob = keeping
    service.says = "so<7>"
    first = ann.responses.create(model=MODEL, input="hello")
    unkept = ann.responses.create(model=MODEL, input="hello", store=False)
    for client, response_id in ((bob, first.id), (ann, unkept.id), (ann, "resp_x")):
        with pytest.raises(openai.BadRequestError, match="no such response is kept") as refused:
            client.responses.create(model=MODEL, input="a", previous_response_id=response_id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.delete(first.id)
    ann.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.delete(first.id)


def test_the_oldest_responses_make_room_within_their_key(keeping):
    service, ann, bob = keeping
    service.says = "so<7>"
    bobs = bob.responses.create(model=MODEL, input="hello")
    ids = [ann.responses.create(model=MODEL, input="h" * 3000).id for _ in range(8)]
    held = [one for one in ids if _is_kept(ann, one)]
    assert held == ids[-len(held) :]
    assert 2 <= len(held) < 8
    assert _is_kept(bob, bobs.id)
    metadata = {f"k{i}": "x" * 512 for i in range(16)}
    large = ann.responses.create(model=MODEL, input="h" * 3900, instructions="b" * 30, metadata=metadata)
    assert large.model_extra["store"] is False
    assert not _is_kept(ann, large.id)
    assert _is_kept(ann, ids[-1])


def _is_kept(client, response_id):
    try:
        return client.responses.retrieve(response_id).id == response_id
    except openai.NotFoundError:
        return False


def test_the_store_counts_too(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore(1 << 20)
    for i in range(5):
        assert store.put("ann", {"id": f"{i}"}, [])
    assert [i for i in range(5) if store.get("ann", f"{i}") is not None] == [2, 3, 4]


@pytest.mark.parametrize("routers", [{"num_replicas": 2}, {"num_replicas": "auto"}])
def test_several_routers_keep_no_responses(routers):
    config = {"server": {"responses_store_bytes": 1}, "router_config": {"deployment_config": routers}}
    with pytest.raises(ConfigError, match=r"server\.responses_store_bytes is 1 with several routers"):
        ServiceConfig.parse(config)
    ServiceConfig.parse({"server": {"responses_store_bytes": 1}})
