"""Bodies of requests that follow from a seed: good ones, and what their schemas allow, with a few mistakes."""

import json
import random
from types import MappingProxyType
from typing import Any

from paceline.web.anthropic_schema import CountBody, MessageBody
from paceline.web.chat_batch import ChatBatchBody
from paceline.web.messages import ChatBody
from paceline.web.responses import ResponseBody
from paceline.web.schema import Body, CompletionBody
from paceline.web.tokenization import DetokenizeBody, TokenizeBody

_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS, "strict": None}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "x"}'}}
_CHAT = [
    {"role": "system", "content": "abc", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "abc", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "user", "content": "abc"},
]
_SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.5,
    "seed": 7,
    "stop": ["x"],
    "logit_bias": {"5": -1},
    "bad_words": ["ab", [5]],
    "stop_token_ids": [5],
    "allowed_token_ids": [5, 6, 7],
    "top_k": 3,
    "min_p": 0.1,
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_salt": "s",
    "speculation": {"mode": "sequential", "max_draft_tokens": 3},
    "truncate_prompt_tokens": 5,
    "return_token_ids": True,
    "request_id": "mine",
    "structured_outputs": {"choice": ["a", "b"]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _PARAMETERS}},
}
_CHATTING = _SAMPLING | {
    "messages": _CHAT,
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "chat_template_kwargs": {"thinking": True},
    "reasoning_effort": "low",
    "logprobs": True,
    "top_logprobs": 2,
    "logprob_token_ids": [5, 6],
}
_ANTHROPIC = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "abc"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"city": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]},
    ],
    "max_tokens": 2,
    "system": "s",
    "tools": [{"name": "f", "input_schema": _PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "stream": True,
}
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, _SAMPLING | {"prompt": "abc", "logprobs": 1, "echo": False, "suffix": ""}),
    "/v1/chat/completions": (ChatBody, _CHATTING),
    "/v1/chat/completions/batch": (
        ChatBatchBody,
        {name: value for name, value in _CHATTING.items() if not name.startswith("stream")} | {"messages": [_CHAT] * 2},
    ),
    "/v1/responses": (
        ResponseBody,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "abc"}]}],
            "instructions": "i",
            "max_output_tokens": 2,
            "tools": [{"type": "function", **_FUNCTION}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "stream": True,
        },
    ),
    "/v1/messages": (MessageBody, _ANTHROPIC),
    "/v1/messages/count_tokens": (CountBody, _ANTHROPIC),
    "/tokenize": (TokenizeBody, {"messages": _CHAT, "return_token_strs": True}),
    "/detokenize": (DetokenizeBody, {"tokens": [5, 6, 7]}),
}
"""Path -> the schema of its bodies, and one that uses many of its fields."""
_NEEDED = ("messages", "prompt", "input", "tokens", "max_tokens")
ODD = MappingProxyType(
    {
        "surrogate": "a\ud83d",
        "other surrogate": "\udc00",
        "zero": "\0",
        "replacement": "\ufffd\u2028\U0001f600",
        "mark": "<7><2><6>{",
        "long": "ab " * 9000,
        "template": "{{ 7*7 }}{% raise %}",
        "json": '{"a": "\\ud800"}',
        "deep json": "[" * 9000,
        "null": None,
        "true": True,
        "minus one": -1,
        "zero number": 0,
        "2^64": 2**64,
        "huge": 10**300,
        "fraction": 0.5,
        "nan": float("nan"),
        "infinite": float("inf"),
        "tiny": 5e-324,
        "list": [],
        "lists": [[[]]],
        "ids": [7, -1, 2**40],
        "object": {},
        "objects": {"a": {"type": "x"}, "": 1},
        "part": [{"type": "image_url", "image_url": {"url": "data:,"}}],
        "schema": {"type": "object", "$ref": "#/x", "properties": {"a": {"pattern": "(?<=a)\\p"}}},
    }
)
"""Values that fit nowhere, or hardly."""
_REFUSED_AT_ONCE = ("surrogate", "other surrogate", "nan", "infinite")
DEEPER = [value for name, value in ODD.items() if name not in _REFUSED_AT_ONCE]
"""Those that get beyond the parser."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value within a value, itself included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with another value in one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


class Bodies:
    """Bodies that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def body(self) -> tuple[str, bytes]:
        """A path, and a body for it."""
        rng = self.rng
        path = rng.choice(list(BODIES))
        kind, good = BODIES[path]
        kept = {name: value for name, value in good.items() if name in _NEEDED or rng.random() < 0.25}
        value: Any = kept
        for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 4))):
            value = self._changed(kind, value)
        data = json.dumps(value).encode()
        if rng.random() < 0.05:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice((b"", b"\xff", b'"', b"\\ud800", b"{", data[at:] * 2)) + data[at + 1 :]
        return path, data

    def _changed(self, kind: type[Body], value: Any) -> Any:
        rng = self.rng
        odd = rng.choice(DEEPER if rng.random() < 0.95 else list(ODD.values()))
        if isinstance(value, dict) and rng.random() < 0.4:
            names = rng.choice((list(kind.model_fields), list(kind.INERT), list(kind.FORMS), ["x", ""]))
            return {**value, rng.choice(names): odd} if names else value
        place = rng.choice(places(value))
        if place and isinstance(place[-1], str) and rng.random() < 0.2:  # another key
            inner = value
            for key in place[:-1]:
                inner = inner[key]
            return put(value, place[:-1], {**inner, rng.choice(("x", "type", "name")): odd})
        return put(value, place, odd)
