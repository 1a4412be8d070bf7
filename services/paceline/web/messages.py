"""Bodies of chats: messages, tools, and how they become what a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown
from paceline.web.schema import INERT, NOTHING, Body

_FIELDS_OF_ANSWERS = ("refusal", "annotations", "audio", "function_call")
"""Fields that clients send back as they got them, empty."""

CHAT_INERT = MappingProxyType(
    {
        **INERT,
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none",),
        "prediction": NOTHING,
        "audio": NOTHING,
        "web_search_options": NOTHING,
        "store": (False,),
        "verbosity": ("medium",),
        "add_special_tokens": (False,),
        "chat_template": NOTHING,
        "chat_template_content_format": ("auto", "string"),
    }
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class CalledFunction(_Strict):
    """A function that an earlier answer has called."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    """An object, sent as its JSON text; chat templates read the object."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, given: Any) -> Any:
        value = given
        if isinstance(given, str):
            try:
                value = json.loads(given or "{}")
            except ValueError:
                value = None
        if not isinstance(value, dict):
            raise Fault("", f"is {shown(given)}: the JSON text of an object is needed")
        return value


class ToolCall(_Strict):
    """A call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(_Strict):
    """One message. Content in parts is joined by newlines."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        for name in _FIELDS_OF_ANSWERS:
            if data.get(name) in ([], {}, ""):
                del data[name]
        if "reasoning" in data and "reasoning_content" not in data:
            data["reasoning_content"] = data.pop("reasoning")
        if isinstance(parts := data.get("content"), list):
            data["content"] = "\n".join(_text_of(part, i) for i, part in enumerate(parts))
        return data

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise Fault("content", "is missing: it is needed")
        if self.tool_calls and self.role != "assistant":
            raise Fault("tool_calls", f"is given with role {self.role!r}: only an assistant calls tools")
        return self

    def as_template_reads(self) -> dict[str, Any]:
        """The message for a chat template, which reads arguments as an object."""
        found: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                found[name] = value
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    **({"id": call.id} if call.id else {}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return found


def _text_of(part: Any, i: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise Fault(f"content[{i}]", f"is {shown(part)}: a part of type 'text' is allowed")
    if not isinstance(text := part.get("text"), str):
        raise Fault(f"content[{i}].text", f"is {shown(text)}: it must be text")
    return text


class Function(_Strict):
    """A function that an answer may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """True: the arguments of every call are held to the schema."""


class Tool(_Strict):
    """A tool that an answer may call."""

    type: Literal["function"]
    function: Function


class ToolsBody(Body):
    """Parts common to chats and responses: tools, and variables of the chat template."""

    tool_choice: Any = None
    """``auto``, ``none``, ``required``, or a function that must be called."""
    parallel_tool_calls: bool = True
    """False: an answer holds one call at most."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template."""

    @field_validator("tool_choice")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        match value:
            case None | "none" | "auto" | "required":
                return value
            case {"type": "function", "function": {"name": str(name), **rest}, **more} if not (rest or more):
                return {"name": name}
            case {"type": "function", "name": str(name), **more} if not more:  # of responses
                return {"name": name}
        allowed = "'none', 'auto', 'required', or a function by its name is allowed"
        raise Fault("", f"is {shown(value)}: {allowed}")


class ChatBody(ToolsBody):
    """POST /v1/chat/completions."""

    INERT = CHAT_INERT
    RENAMED = MappingProxyType({"max_completion_tokens": "max_tokens"})

    messages: list[ChatMessage] = Field(min_length=1)
    """The chat so far."""
    logprobs: bool = False
    """The log probability of each token."""
    tools: list[Tool] = Field(default_factory=list)
    """Functions that the answer may call."""
    reasoning_effort: str | None = None
    """A variable of the chat template."""
    add_generation_prompt: bool = True
    """The template opens an answer after the last message."""
    continue_final_message: bool = False
    """The answer continues the last message."""

    @model_validator(mode="after")
    def _shown(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise Fault("top_logprobs", f"is {self.top_logprobs} without logprobs: it is a part of what that adds")
        return self

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        opens = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens:
            raise Fault("continue_final_message", "is true and add_generation_prompt is true: one of them is allowed")
        return self


def offered(tools: Sequence[Tool], choice: Any) -> list[dict[str, Any]] | None:
    """The tools as a template reads them; None if there are none, or none may be called.

    Raises InvalidRequestError if ``choice`` demands a call of what is not there.
    """
    names = [tool.function.name for tool in tools]
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice is 'required', but no tools are given")
    if isinstance(choice, dict) and choice["name"] not in names:
        raise InvalidRequestError(f"tool_choice is {choice['name']!r}, but tools hold no function of this name")
    if not tools or choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in tools]
