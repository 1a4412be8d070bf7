"""LangChain's OpenAI chat model against real engines of random weights; ``clients/python`` has it with a chat model."""

from typing import Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from tests.web.chats import SHORT
from tests.web.support import MODEL

from paceline.web import chat as chats


class Place(BaseModel):
    """Where to, and for how long."""

    city: Literal["rome", "oslo"]
    days: int = Field(ge=0, le=9)


@tool
def wait(seconds: Literal[1, 20, 300]) -> str:
    """Waits for some seconds."""
    return f"{seconds} s are over"


EIGHT = {"max_tokens": 8, "extra_body": {"logit_bias": {"4": -100}, "ignore_eos": True}}
"""An answer of eight tokens, and no thought."""


@pytest.fixture
def model(at):
    """A model of LangChain with nothing but an address, and what makes random weights speak briefly."""

    def made(**options):
        return ChatOpenAI(
            model=MODEL,
            base_url=f"{at}/v1",
            api_key="none",
            max_retries=0,
            temperature=1.0,
            seed=3,
            **{"max_tokens": 120, "extra_body": {"logit_bias": SHORT}, **options},
        )

    return made


def test_a_stream_and_a_call_say_the_same(model):
    chat = model(**EIGHT, stream_usage=True)
    whole = chat.invoke([("system", "be brief"), ("user", "hi")])
    parts = list(chat.stream([("system", "be brief"), ("user", "hi")]))
    assert "".join(part.content for part in parts) == whole.content
    assert len(parts) > 1
    streamed = sum(parts[1:], parts[0])
    for message in (whole, streamed):
        assert message.response_metadata["finish_reason"] == "length"
        assert message.response_metadata["model_name"] == MODEL
        assert message.usage_metadata["output_tokens"] == 8
        assert message.usage_metadata["total_tokens"] == message.usage_metadata["input_tokens"] + 8


async def test_the_asynchronous_calls_and_a_batch_say_the_same(model):
    chat = model(**EIGHT)
    whole, parts = await chat.ainvoke("hi"), [part.content async for part in chat.astream("hi")]
    assert "".join(parts) == whole.content
    assert [one.content for one in chat.batch(["hi", "hi"])] == [whole.content] * 2


def test_log_probabilities_arrive(model):
    said = model(**EIGHT, logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in said] == [2] * 8


def test_a_schema_is_followed_by_a_tool_too(model):
    found = model().with_structured_output(Place, method="function_calling", strict=True).invoke("hi")
    assert isinstance(found, Place)


def agent(model, asked):
    """One turn of an agent: a call that is demanded, the tool's answer, and what the model says to it."""
    bound = model().bind_tools([wait, Place], strict=True, tool_choice="wait", parallel_tool_calls=False)
    first = bound.invoke([HumanMessage(asked)])
    (call,) = first.tool_calls
    said = wait.invoke(call)
    assert isinstance(said, ToolMessage)
    last = (
        model(**EIGHT)
        .bind_tools([wait, Place], strict=True, tool_choice="none")
        .invoke([HumanMessage(asked), first, said])
    )
    return call, said, last


def test_an_agent_calls_a_tool_and_goes_on_with_its_answer(model):
    call, said, last = agent(model, "wait a little")
    assert call["name"] == "wait"
    assert said.content == f"{call['args']['seconds']} s are over"
    assert last.content
    assert not last.tool_calls


def test_a_call_that_is_lost_is_noticed(model, monkeypatch):
    """The mutant: nothing is bound, and such a model calls nothing."""
    monkeypatch.setattr(chats, "bound_calls", lambda *_, **__: None)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        agent(model, "wait a little")


def test_calls_come_in_a_stream(model):
    bound = model().bind_tools([wait, Place], strict=True, tool_choice="any")
    parts = list(bound.stream("hi"))
    whole = sum(parts[1:], parts[0])
    assert isinstance(whole, AIMessageChunk)
    assert whole.tool_calls
    assert not whole.invalid_tool_calls
    for call in whole.tool_calls:
        assert Place(**call["args"]) if call["name"] == "Place" else wait.invoke(call)
