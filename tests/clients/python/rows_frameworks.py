"""LangChain, LlamaIndex, Pydantic AI, Instructor and OpenAI's agents."""

from __future__ import annotations

import asyncio

import agents
import instructor
import openai
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from conftest import HELLO, MODEL, SUNNY, THOUGHT, URL, WEATHER, Place


def get_weather(city: str) -> str:
    """Says how the weather is in a city."""
    return f"sunny in {city}"


class TestLangChain:
    @pytest.fixture(params=["chat", "responses", "anthropic"])
    def model(self, request, v1):
        if request.param == "anthropic":
            return ChatAnthropic(model_name=MODEL, base_url=URL, api_key="none", max_retries=0, temperature=0)
        return ChatOpenAI(
            model=MODEL,
            base_url=v1,
            api_key="none",
            max_retries=0,
            temperature=0,
            use_responses_api=request.param == "responses",
        )

    def test_an_answer_and_a_stream_say_the_same(self, model):
        whole = model.invoke([("system", "Be brief."), ("user", "hi")])
        assert HELLO in whole.text
        assert whole.usage_metadata["output_tokens"] > 10
        parts = list(model.stream([("system", "Be brief."), ("user", "hi")]))
        assert "".join(part.text for part in parts) == whole.text
        assert len(parts) > 1

    def test_an_agent_calls_a_tool(self, model):
        messages = create_agent(model, [get_weather]).invoke({"messages": [("user", WEATHER)]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert SUNNY in messages[-1].text

    def test_an_answer_is_parsed_as_a_model(self, model):
        assert isinstance(model.with_structured_output(Place).invoke("hi"), Place)


class TestLlamaIndex:
    @pytest.fixture
    def model(self, v1):
        return OpenAILike(
            model=MODEL,
            api_base=v1,
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_retries=0,
            max_tokens=200,
        )

    def test_an_answer_and_a_stream_say_the_same(self, model):
        whole = model.chat([ChatMessage(role="user", content="hi")]).message.content
        assert HELLO in whole
        assert (
            "".join(part.delta or "" for part in model.stream_chat([ChatMessage(role="user", content="hi")])) == whole
        )
        assert HELLO in model.complete("hi").text

    def test_a_tool_is_called(self, model):
        tool = FunctionTool.from_defaults(fn=get_weather)
        answer = model.chat_with_tools([tool], user_msg=WEATHER)
        (call,) = model.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Rome"})
        said = model.predict_and_call([tool], user_msg=WEATHER)
        assert "sunny in Rome" in str(said)

    def test_an_answer_is_parsed_as_a_model(self, model):
        assert isinstance(model.as_structured_llm(Place).complete("hi").raw, Place)


class TestPydanticAi:
    @pytest.fixture(params=["chat", "responses"])
    def model(self, request, v1):
        kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
        return kind(MODEL, provider=OpenAIProvider(base_url=v1, api_key="none"))

    def test_an_agent_calls_a_tool(self, model):
        agent = Agent(model, tools=[get_weather], system_prompt="Be brief.", model_settings={"temperature": 0.0})
        result = agent.run_sync(WEATHER)
        assert SUNNY in result.output
        assert result.usage.output_tokens > 10 if not callable(result.usage) else result.usage().output_tokens > 10

    def test_a_stream_says_the_text(self, model):
        async def test():
            agent = Agent(model, model_settings={"temperature": 0.0})
            async with agent.run_stream("hi") as result:
                return [part async for part in result.stream_text(delta=True, debounce_by=None)]

        assert HELLO in "".join(asyncio.run(test()))

    def test_an_answer_is_parsed_as_a_model(self, model):
        result = Agent(model, output_type=Place, model_settings={"temperature": 0.0}).run_sync("hi")
        assert isinstance(result.output, Place)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_parses_a_model(v1, mode):
    client = instructor.from_openai(
        openai.OpenAI(base_url=v1, api_key="none", max_retries=0), mode=instructor.Mode[mode]
    )
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 300}
    assert isinstance(client.chat.completions.create(response_model=Place, max_retries=0, **asked), Place)


class TestAgents:
    @pytest.fixture(params=["chat", "responses"])
    def model(self, request, v1):
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=v1, api_key="none", max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
        return kind(model=MODEL, openai_client=client)

    def agent(self, model, **options):
        return agents.Agent(name="brief", model=model, model_settings=agents.ModelSettings(temperature=0), **options)

    def test_an_agent_calls_a_tool(self, model):
        tool = agents.function_tool(get_weather)
        result = agents.Runner.run_sync(self.agent(model, tools=[tool]), WEATHER)
        assert SUNNY in result.final_output

    def test_a_stream_says_the_text(self, model):
        async def test():
            result = agents.Runner.run_streamed(self.agent(model), "hi")
            kinds = [event.type async for event in result.stream_events()]
            return kinds, result.final_output

        kinds, said = asyncio.run(test())
        assert "raw_response_event" in kinds
        assert HELLO in said

    def test_an_answer_is_parsed_as_a_model(self, model):
        assert isinstance(agents.Runner.run_sync(self.agent(model, output_type=Place), "hi").final_output, Place)


def test_thoughts_are_read_by_frameworks(v1):
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=v1, api_key="none"))
    result = Agent(model, model_settings={"temperature": 0.0}).run_sync("hi")
    thoughts = [
        part.content for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"
    ]
    assert any(THOUGHT in thought for thought in thoughts)
