"""Body of POST /v1/responses: OpenAI's fields, and how its items become what a chat template reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown
from paceline.web.fields import ANY, INERT, NOTHING, BodyPart
from paceline.web.forms import FORMS
from paceline.web.messages import ChatBody, ChatMessage, Function, Tool, ToolsBody
from paceline.web.schema import read

TEXT = {"format": {"type": "text"}}
"""The ``text`` of a body that names no form."""
LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that shows log probabilities."""
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
"""Bounds of ``metadata``, the same as OpenAI's. ``_MAX_VALUE`` also bounds each field in ``_REPEATED``."""
_REPEATED = ("user", "safety_identifier", "prompt_cache_key")
"""Fields that each response repeats and nothing else reads."""
_OF_ITEMS = ("id", "status", "type", "phase")
"""Fields of messages that clients send back as they got them."""


class ResponseTool(Function):
    """A function that the answer may call."""

    PLACE = "tools"

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    """Nothing but the model calls tools."""
    defer_loading: Literal[False] | None = None
    """Every tool is in the prompt."""
    output_schema: dict[str, Any] | None = None
    """Schema of the function's return value: no template reads it."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, data: Any) -> Any:
        if isinstance(data, dict) and (kind := data.get("type")) != "function":
            raise Fault("type", f"is {shown(kind)}: only 'function' is supported, a tool that the client runs")
        return data

    def as_chats_have_it(self) -> Tool:
        """Returns the tool as the body of a chat names it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)


class Reasoning(BodyPart):
    """Options of reasoning."""

    PLACE = "reasoning"

    effort: str | None = None
    """The variable ``reasoning_effort`` of the chat template."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Send the reasoning, whole, as its summary too."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The older name of ``summary``."""
    context: Literal["auto"] | None = None
    """The chat template decides which reasoning of earlier turns it shows."""
    mode: Literal["standard"] | None = None
    """There is one way to reason."""

    @property
    def summarizes(self) -> bool:
        """True if a summary is asked for."""
        return (self.summary or self.generate_summary) is not None


class ResponseBody(ToolsBody):
    """POST /v1/responses."""

    INERT = MappingProxyType(
        {
            **INERT,
            "background": (False,),
            "background_options": NOTHING,
            "client_metadata": ANY,
            "access_programs": ANY,
            "image": ANY,
            "prompt_cache_options": ANY,
            "context_management": NOTHING,
            "conversation": NOTHING,
            "moderation": NOTHING,
            "prompt": NOTHING,
        }
    )
    RENAMED = MappingProxyType({"max_output_tokens": "max_tokens"})
    FORMS = ("text", *FORMS)
    NO_LOGPROBS = f", but include holds no {LOGPROBS!r}, which shows them"

    text: dict[str, Any] = Field(default_factory=lambda: dict(TEXT))
    """``format``: the form of the answer."""
    input: str | list[dict[str, Any]] = Field(min_length=1)
    """Input: text of the user, or items."""
    instructions: str | None = None
    """The system's message."""
    previous_response_id: str | None = None
    """The response that this one follows."""
    store: bool = True
    """Keep the response, where responses are kept."""
    truncation: Literal["auto", "disabled"] = "disabled"
    """``auto``: the oldest turns are left out until the prompt fits the context."""
    tools: list[ResponseTool] = Field(default_factory=list)
    """Functions that the answer may call."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most calls of tools that the server runs: there are none."""
    reasoning: Reasoning = Reasoning()
    """Options of reasoning."""
    n: int = Field(default=1, ge=1, le=1)
    """One answer."""
    include: list[
        Literal[
            "message.output_text.logprobs",
            "reasoning.encrypted_content",
            "message.input_image.image_url",
            "file_search_call.results",
            "web_search_call.results",
            "web_search_call.action.sources",
            "computer_call_output.output.image_url",
            "code_interpreter_call.outputs",
        ]
    ] = Field(default_factory=list)
    """Parts of the answer that are left out by default: the log probability of each token of its text. The others are
    of items that no answer here holds."""
    enable_response_messages: bool = False
    """The response holds prompt and output as the model reads and writes them, with their token ids."""
    metadata: dict[str, Any] | None = None
    """Shown by the response."""
    user: Any = None
    """Shown by the response."""
    safety_identifier: Any = None
    """Shown by the response."""
    prompt_cache_key: Any = None
    """Shown by the response."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        """Refuses what OpenAI refuses: each response, event and kept copy repeats these fields."""
        for name in _REPEATED:
            if (size := _num_characters(getattr(self, name))) > _MAX_VALUE:
                raise Fault(name, f"has {size} characters: at most {_MAX_VALUE} are allowed")
        for i, (key, value) in enumerate((self.metadata or {}).items()):
            size = _num_characters(value)
            if i >= _MAX_PAIRS or len(key) > _MAX_KEY or size > _MAX_VALUE:
                found = f"has {len(self.metadata or {})} pairs, one of {len(key)} and {size} characters"
                allowed = f"at most {_MAX_PAIRS}, of {_MAX_KEY} and {_MAX_VALUE} characters, are allowed"
                raise Fault("metadata", f"{found}: {allowed}")
        return self

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer shows the log probability of each token."""
        return LOGPROBS in self.include

    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input

    def messages(self, before: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Returns the items ``before`` and the input as messages of a chat. Raises InvalidRequestError."""
        found: list[ChatMessage] = []
        for i, item in enumerate([*before, *self.items()], -len(before)):
            message = _message(item, i)
            if not message:
                continue
            try:
                (one,) = read(ChatBody, {"messages": [message]}, self.ignored).messages
            except InvalidRequestError as error:
                raise InvalidRequestError(f"input[{i}]" + str(error).removeprefix("messages[0]")) from None
            if found and _continues(found[-1], one):
                found[-1] = _joined(found[-1], one)
            else:
                found.append(one)
        if not found:
            raise InvalidRequestError("input holds no message: at least one is needed")
        messages = [one.as_template_reads() for one in found]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return _with_one_head(messages)


def _num_characters(value: Any) -> int:
    """Returns the length of a repeated value: of a string itself, or of any other value as JSON text."""
    return len(value if isinstance(value, str) else json.dumps(value))


def _with_one_head(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins the leading messages of system and developer: many templates read the first one only."""
    heads = list(itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    if len(heads) < 2:
        return messages
    content = "\n\n".join(head["content"] for head in heads)
    return [{"role": "system", "content": content}, *messages[len(heads) :]]


def _continues(before: ChatMessage, message: ChatMessage) -> bool:
    """True for items of one answer: its reasoning, text and calls are one message of a chat."""
    both = before.role == message.role == "assistant"
    return both and not (before.model_fields_set & message.model_fields_set - {"role", "tool_calls"})


def _joined(before: ChatMessage, message: ChatMessage) -> ChatMessage:
    """One message of the parts of two."""
    given = {name: getattr(message, name) for name in message.model_fields_set}
    calls = [*(before.tool_calls or ()), *(message.tool_calls or ())]
    return before.model_copy(update=given | ({"tool_calls": calls} if calls else {}))


def _message(item: Mapping[str, Any], i: int) -> dict[str, Any]:
    """An item as a message of a chat; empty if it says nothing."""
    match item.get("type", "message"):
        case "message":
            return {name: value for name, value in item.items() if name not in _OF_ITEMS}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case "reasoning":
            if item.get("encrypted_content"):
                raise InvalidRequestError(f"input[{i}].encrypted_content is given: only null is supported")
            thought = _thought(item, "content", i) or _thought(item, "summary", i)
            return {"role": "assistant", "reasoning_content": thought} if thought else {}
    allowed = "'message', 'function_call', 'function_call_output' or 'reasoning' is allowed"
    raise InvalidRequestError(f"input[{i}].type is {shown(item['type'])}: {allowed}")


def _thought(item: Mapping[str, Any], name: str, i: int) -> str:
    """The text of the parts of some reasoning."""
    texts, parts = [], item.get(name) or []
    if not isinstance(parts, list):
        raise InvalidRequestError(f"input[{i}].{name} is {shown(parts)}: a list of parts with text is needed")
    for j, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
            raise InvalidRequestError(f"input[{i}].{name}[{j}] is {shown(part)}: a part with text is needed")
        texts.append(text)
    return "".join(texts)
