"""Body of POST /v1/messages: Anthropic's fields, and their conversion for a chat template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from paceline.checkpoint.chat import ChatTemplate
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown
from paceline.web.fields import ANY, INERT, NOTED, NOTHING, BodyPart
from paceline.web.messages import Function, Tool, ToolsBody

_JOINT = "\n"
"""Stands between two texts of one message."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Type of Anthropic's ``tool_choice`` -> ours."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch the reasoning on and off."""


class Thinking(BodyPart):
    """Enables or disables reasoning before the answer."""

    PLACE = "thinking"

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    """``enabled`` and ``disabled`` set the variable of the chat template; the others leave it as it is."""
    budget_tokens: int | None = Field(default=None, ge=1)
    """The variable ``thinking_budget`` of the chat template, where it reads one; it ends no reasoning by itself."""
    display: Literal["summarized", "omitted"] = "summarized"
    """``omitted``: blocks of reasoning are sent without their text."""


class OutputConfig(BodyPart):
    """Output options of the answer."""

    PLACE = "output_config"

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The variable ``reasoning_effort`` of the chat template, where it reads one."""
    format: dict[str, Any] | None = None
    """JSON Schema of the answer."""


class AnthropicTool(BodyPart):
    """A tool that the client runs."""

    PLACE = "tools"

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON Schema of its input."""
    type: Literal["custom"] = "custom"
    strict: bool | None = None
    """True: the input of every call is held to the schema."""
    cache_control: dict[str, Any] | None = None
    """Prompts are cached without it."""
    eager_input_streaming: bool | None = None
    """A call is sent when it is complete, either way."""
    input_examples: list[dict[str, Any]] = Field(default_factory=list, max_length=0)
    """No template reads examples."""
    allowed_callers: list[Literal["direct"]] | None = None
    """Nothing but the model calls tools."""
    defer_loading: Literal[False] = False
    """Every tool is in the prompt."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        if (kind := data.get("type", "custom")) != "custom":
            raise Fault("type", f"is {shown(kind)}: only 'custom' is supported, a tool that the client runs")
        return data

    def as_chats_have_it(self) -> Tool:
        """Returns the tool as the body of a chat names it."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class CountBody(ToolsBody):
    """POST /v1/messages/count_tokens, and the part of POST /v1/messages that makes the prompt."""

    INERT = MappingProxyType(
        {
            **INERT,
            "service_tier": ("auto", "standard_only", NOTED),
            "cache_control": ANY,
            "diagnostics": ANY,
            "inference_geo": ANY,
            "user_profile_id": ANY,
            "workspace_id": ANY,
            "speed": ("standard",),
            "container": NOTHING,
            "context_management": NOTHING,
            "mcp_servers": ([],),
        }
    )
    RENAMED = MappingProxyType({"stop_sequences": "stop"})

    messages: list[dict[str, Any]] = Field(min_length=1)
    """The chat so far. A last message of the assistant is continued."""
    system: str | list[Any] = ""
    """The system's message: text, or blocks of text."""
    tools: list[AnthropicTool] = Field(default_factory=list)
    """Tools that the answer may call."""
    thinking: Thinking = Thinking(type="adaptive")
    """Enables or disables reasoning before the answer."""
    output_config: OutputConfig = OutputConfig()
    """Output options of the answer."""
    n: int = Field(default=1, ge=1, le=1)
    """One answer."""

    @classmethod
    def spelling(cls, data: Mapping[str, Any]) -> dict[str, str]:
        """Our names of parameters -> the body's names, which refusals use."""
        config = data.get("output_config")
        has_form = isinstance(config, dict) and config.get("format") is not None
        form = "output_config.format" if has_form else "output_format" if "output_format" in data else ""
        return super().spelling(data) | ({"structured_output.json_schema": form} if form else {})

    @model_validator(mode="before")
    @classmethod
    def _by_our_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = dict(data)
        if (choice := given.get("tool_choice")) is not None:
            given |= _choice(choice)
        config = given.get("output_config")
        forms = {
            "output_config.format": config.get("format") if isinstance(config, dict) else None,
            "output_format": given.pop("output_format", None),  # its older name
        }
        match [(name, form) for name, form in forms.items() if form is not None]:
            case [(_, {"type": "json_schema", "schema": dict(schema)})]:
                given["structured_output"] = {"json_schema": schema}
            case [(name, form)]:
                raise Fault(name, f"is {shown(form)}: an object of type 'json_schema' with a schema is allowed")
            case [_, _]:
                raise Fault("output_format", "is given with output_config.format: one of them is allowed")
        return given

    def chat(self) -> list[dict[str, Any]]:
        """The messages as a chat template reads them. Raises InvalidRequestError."""
        turns: list[list[dict[str, Any]]] = []
        if system := _joined(_blocks(self.system), "system"):
            turns.append([{"role": "system", "content": system}])
        for i, message in enumerate(self.messages):
            for turn in _turns(message, f"messages[{i}]"):
                if turns and turn["role"] == turns[-1][0]["role"] != "tool":
                    turns[-1].append(turn)
                else:
                    turns.append([turn])
        found = [_as_one(parts) for parts in turns]
        if found[-1]["role"] == "assistant" and "tool_calls" in found[-1]:
            raise InvalidRequestError("messages end with a block of type 'tool_use': the tool_result is needed")
        return found

    def options(self, messages: Sequence[Mapping[str, Any]], chat: ChatTemplate | None) -> dict[str, Any]:
        """The options of the chat template. Raises InvalidRequestError for reasoning that cannot be switched off."""
        goes_on = messages[-1]["role"] == "assistant"
        options: dict[str, Any] = {"add_generation_prompt": not goes_on}
        if goes_on:
            options["continue_final_message"] = True
        variables = frozenset[str]() if chat is None else chat.variables
        switch = next((name for name in _SWITCHES if name in variables), None)
        if self.thinking.type in ("enabled", "disabled") and switch is not None:
            options[switch] = self.thinking.type == "enabled"
        elif self.thinking.type == "disabled" and chat is not None and chat.format.reasoning is not None:
            raise InvalidRequestError("thinking.type is 'disabled', but the chat template cannot switch it off")
        given = {"thinking_budget": self.thinking.budget_tokens, "reasoning_effort": self.output_config.effort}
        return options | {name: value for name, value in given.items() if value is not None and name in variables}


class MessageBody(CountBody):
    """POST /v1/messages."""

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if "max_tokens" not in self.model_fields_set:
            raise Fault("max_tokens", "is missing: it is needed")
        return self


def _choice(choice: Any) -> dict[str, Any]:
    """Anthropic's ``tool_choice`` by our names."""
    match choice:
        case {"type": "tool", "name": str(name), **rest}:
            found: dict[str, Any] = {"tool_choice": {"type": "function", "name": name}}
        case {"type": ("auto" | "any" | "none") as kind, **rest}:
            found = {"tool_choice": _CHOICES[kind]}
        case _:
            allowed = "an object of type 'auto', 'any', 'none', or 'tool' with a name is allowed"
            raise Fault("tool_choice", f"is {shown(choice)}: {allowed}")
    alone = rest.pop("disable_parallel_tool_use", None)
    if rest:
        raise Fault("tool_choice", f"is {shown(choice)}: {next(iter(rest))!r} is no key of it")
    if alone not in (None, True, False):
        raise Fault("tool_choice.disable_parallel_tool_use", f"is {shown(alone)}: true or false is allowed")
    return found if alone is None else found | {"parallel_tool_calls": not alone}


def _blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _joined(blocks: Sequence[Any], place: str) -> str:
    """The text of blocks that may hold nothing else. Raises InvalidRequestError."""
    texts = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise _fault(block, f"{place}[{i}]", "'text'")
        texts.append(_text(block, "text", f"{place}[{i}]"))
    return _JOINT.join(texts)


def _turns(message: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """The messages of a chat that one of Anthropic's makes: results of tools are messages of their own."""
    content = message.get("content")
    if not isinstance(content, str | list):
        raise InvalidRequestError(f"{place}.content is {shown(content)}: text or a list of blocks is needed")
    blocks, within = _blocks(content), f"{place}.content"
    match message.get("role"):
        case "system":
            yield {"role": "system", "content": _joined(blocks, within)}
        case "user":
            yield from _of_user(blocks, within)
        case "assistant":
            yield _of_assistant(blocks, within)
        case role:
            raise InvalidRequestError(f"{place}.role is {shown(role)}: 'user', 'assistant' or 'system' is allowed")


def _of_user(blocks: Sequence[Any], place: str) -> Iterator[dict[str, Any]]:
    for i, block in enumerate(blocks):
        at = f"{place}[{i}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                yield {"role": "user", "content": _text(block, "text", at)}
            case "tool_result":
                said = _joined(_blocks(block.get("content") or ""), f"{at}.content")
                failed = "Error: " if block.get("is_error") else ""
                yield {"role": "tool", "tool_call_id": _text(block, "tool_use_id", at), "content": failed + said}
            case _:
                raise _fault(block, at, "'text' or 'tool_result'")
    if not blocks:
        yield {"role": "user", "content": ""}


def _of_assistant(blocks: Sequence[Any], place: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for i, block in enumerate(blocks):
        at = f"{place}[{i}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                part: dict[str, Any] = {"content": _text(block, "text", at)}
            case "thinking":
                thought = _text(block, "thinking", at)
                part = {"reasoning_content": thought} if thought else {}
            case "tool_use":
                if not isinstance(given := block.get("input"), dict):
                    raise InvalidRequestError(f"{at}.input is {shown(given)}: an object is needed")
                function = {"name": _text(block, "name", at), "arguments": given}
                part = {"tool_calls": [{"id": _text(block, "id", at), "type": "function", "function": function}]}
            case _:
                raise _fault(block, at, "'text', 'thinking' or 'tool_use'")
        parts.append(part)
    return _as_one(parts)


def _as_one(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of one turn as one message."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: _in_one(name, given) for name, given in values.items()}


def _in_one(name: str, values: list[Any]) -> Any:
    if name == "role" or len(values) == 1:
        return values[0]
    return [*itertools.chain(*values)] if isinstance(values[0], list) else _JOINT.join(filter(None, values))


def _text(block: Mapping[str, Any], name: str, place: str) -> str:
    if not isinstance(text := block.get(name), str):
        raise InvalidRequestError(f"{place}.{name} is {shown(text)}: text is needed")
    return text


def _fault(block: Any, place: str, allowed: str) -> InvalidRequestError:
    if not isinstance(block, dict):
        return InvalidRequestError(f"{place} is {shown(block)}: an object of type {allowed} is needed")
    return InvalidRequestError(f"{place}.type is {shown(block.get('type'))}: {allowed} is allowed")
