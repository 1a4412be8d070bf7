"""Bodies with a value of the wrong kind in any place: read, or refused with its name; no other error."""

from __future__ import annotations

import pytest
from tests.web.bodies import places, put

from paceline.errors import InvalidRequestError
from paceline.web.anthropic_schema import MessageBody
from paceline.web.messages import ChatBody, offered
from paceline.web.responses_schema import ResponseBody
from paceline.web.schema import CompletionBody, read

ODD = (None, True, 0, -1, 10**30, 1.5, "", "a", "\x00", [], [[]], [None], ["a"], [{}], {}, {"a": 1}, {"type": []})
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMMON = {
    "stop": ["a"],
    "seed": 3,
    "logit_bias": {"5": 1.0},
    "bad_words": ["b", [3, 4]],
    "stop_token_ids": [9],
    "speculation": {"enabled": True, "mode": "overlapped"},
    "stream": True,
    "stream_options": {"include_usage": True},
}
CASES = [
    (CompletionBody, {"prompt": ["a", [1, 2]], "logprobs": 1, "response_format": {"type": "text"}, **COMMON}),
    (CompletionBody, {"prompt": "a", "structured_outputs": {"json": {"type": "object"}}}),
    (
        ChatBody,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
                {"role": "assistant", "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
                {"role": "assistant", "thinking_blocks": [{"thinking": "a"}], "reasoning_details": [{"text": "b"}]},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "reasoning": {"effort": "low"},
            "chat_template_kwargs": {"a": 1},
            **COMMON,
        },
    ),
    (
        ChatBody,
        {
            "messages": [{"role": "assistant", "refusal": "b", "function_call": {"name": "f", "arguments": "{}"}}],
            "functions": [FUNCTION],
            "function_call": {"name": "f"},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        },
    ),
    (
        ResponseBody,
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"text": "a"}], "summary": [{"text": "b"}]},
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": "low", "summary": "auto"},
            **COMMON,
        },
    ),
    (
        MessageBody,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
                    ],
                },
            ],
            "max_tokens": 1,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
            **COMMON,
        },
    ),
]


def understand(kind, body):
    """Reads all of a body that is read before a chat is rendered."""
    given = read(kind, body)
    if isinstance(given, ChatBody):
        offered(given.tools, given.tool_choice)
        [message.as_template_reads() for message in given.messages]
    elif isinstance(given, ResponseBody):
        given.messages()
    elif isinstance(given, MessageBody):
        given.options(given.chat(), None)
    elif isinstance(given, CompletionBody):
        given.prompts()


@pytest.mark.parametrize(("kind", "body"), CASES)
def test_a_value_of_the_wrong_kind_is_refused_where_it_is(kind, body):
    understand(kind, body)
    num_refused = 0
    for place in places(body)[1:]:
        for odd in ODD:
            try:
                understand(kind, put(body, place, odd))
            except InvalidRequestError:
                num_refused += 1
            except Exception as error:
                pytest.fail(f"{odd!r} in {place}: {error!r}")
    assert num_refused > len(ODD)
