"""Bodies of chats: messages, tools, and how they become what a chat template reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown
from paceline.web.fields import ANY, INERT, NOTHING, OFF, BodyPart, Ignored, disregard
from paceline.web.json_text import parse
from paceline.web.schema import WITHOUT_LOGPROBS, Body

CHAT_INERT = MappingProxyType(
    {
        **INERT,
        "modalities": (["text"],),
        "prediction": NOTHING,
        "audio": NOTHING,
        "web_search_options": NOTHING,
        "verbosity": ("medium",),
        "add_special_tokens": (False,),
        "chat_template": NOTHING,
        "chat_template_content_format": ("auto", "string"),
        **dict.fromkeys(("prompt", "suffix"), OFF),
    }
)
_MESSAGE_INERT = {
    **dict.fromkeys(("timestamp", "created_at", "weight", "refusal", "status", "type", "model", "usage"), ANY),
    **dict.fromkeys(("prefix", "partial", "images", "audio", "function_call"), OFF),
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names by which clients send the reasoning of an earlier answer."""


class CalledFunction(BodyPart):
    """A function that an earlier answer has called."""

    PLACE = "messages.tool_calls.function"

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    """An object, sent as its JSON text; chat templates read the object."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _parsed(cls, given: Any) -> Any:
        value = given
        if isinstance(given, str):
            try:
                value = parse(given or "{}")
            except ValueError:
                value = None
        if not isinstance(value, dict):
            raise Fault("", f"is {shown(given)}: the JSON text of an object is needed")
        return value


class ToolCall(BodyPart):
    """A call of an earlier answer."""

    PLACE = "messages.tool_calls"

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(BodyPart):
    """One message. Content in parts is joined by newlines. Fields of no meaning here may have one for a template."""

    model_config = ConfigDict(extra="allow")
    PLACE = "messages"

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
        if isinstance(parts := data.get("content"), list):
            data["content"], thought = _text_of(parts)
            if thought:
                data.setdefault("reasoning_content", thought)
        _take_reasoning(data)
        if isinstance(refusal := data.get("refusal"), str) and refusal and not data.get("content"):
            data["content"] = refusal
        if isinstance(call := data.get("function_call"), dict) and call:  # OpenAI's older name of a call
            data.setdefault("tool_calls", [{"function": data.pop("function_call")}])
        if data.get("role") == "function":
            data["role"] = "tool"
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
        found: dict[str, Any] = {"role": self.role, "content": self.content or "", **(self.model_extra or {})}
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


def for_template(
    messages: Sequence[Mapping[str, Any]], reads: Callable[[str], bool], ignored: Ignored
) -> list[dict[str, Any]]:
    """Returns the messages with only the fields that a template reads.

    Raises Fault or InvalidRequestError for a field that is not read and would have to change the answer.
    """
    found = []
    for i, message in enumerate(messages):
        one = {}
        for name, value in message.items():
            if name in ChatMessage.model_fields or reads(name):
                one[name] = value
                continue
            try:
                disregard(f"messages.{name}", value, _MESSAGE_INERT, ignored, ChatMessage.model_fields)
            except Fault as fault:
                raise InvalidRequestError(f"messages[{i}].{fault}") from None
        found.append(one)
    return found


def _take_reasoning(data: dict[str, Any]) -> None:
    """Leaves the reasoning of a message under one name, by which it is known here."""
    texts = [data.pop(name) for name in _REASONING if isinstance(data.get(name), str)]
    for name, key in (("thinking_blocks", "thinking"), ("reasoning_details", "text")):  # LiteLLM, OpenRouter
        blocks = data.pop(name, None)
        if isinstance(blocks, list):
            texts.append("".join(str(b[key]) for b in blocks if isinstance(b, dict) and isinstance(b.get(key), str)))
    if texts:
        data["reasoning_content"] = next(filter(None, texts), "")


def _text_of(parts: list[Any]) -> tuple[str, str]:
    """Joins the parts of a content. Returns the text of the content and the text of its reasoning."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else "text"
        name = _PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise Fault(f"content[{i}]", f"is {shown(part)}: a part of type 'text' is allowed")
        text = part.get(name, part.get("text")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise Fault(f"content[{i}].{name}", f"is {shown(text)}: it must be text")
        texts["reasoning" if kind in ("thinking", "reasoning") else "content"].append(text)
    return "\n".join(texts["content"]), "\n".join(texts["reasoning"])


_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part of a content -> its field that holds the text."""


class Function(BodyPart):
    """A function that an answer may call."""

    PLACE = "tools.function"

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """True: the arguments of every call are held to the schema."""


class Tool(BodyPart):
    """A tool that an answer may call."""

    PLACE = "tools"

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
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
            }:
                return {"mode": mode, "allowed": [_name_of(tool) for tool in tools]}
            case {"type": "allowed_tools", **given}:
                match given.get("allowed_tools", given):  # responses have no object of their own for it
                    case {"mode": "auto" | "required" as mode, "tools": list(tools)}:
                        return {"mode": mode, "allowed": [_name_of(tool) for tool in tools]}
        allowed = "'none', 'auto', 'required', or a function by its name, or allowed_tools with mode and tools"
        raise Fault("", f"is {shown(value)}: {allowed}, is allowed")


def _name_of(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise Fault("", f"allows {shown(tool)}: a function by its name is needed")


class ChatBody(ToolsBody):
    """POST /v1/chat/completions."""

    INERT = CHAT_INERT
    NO_LOGPROBS = WITHOUT_LOGPROBS
    SCORES_PROMPT = True
    RENAMED = MappingProxyType({"max_completion_tokens": "max_tokens"})

    messages: list[ChatMessage] = Field(min_length=1)
    """The chat so far."""
    logprobs: bool = False
    """The log probability of each token."""
    tools: list[Tool] = Field(default_factory=list)
    """Functions that the answer may call."""
    functions: list[Any] = Field(default_factory=list)
    """OpenAI's older name of ``tools``; a call is then the ``function_call`` of the answer."""
    reasoning_effort: str | None = None
    """A variable of the chat template; ``none`` asks for no reasoning."""
    include_reasoning: bool = True
    """False: the answer is sent without its reasoning."""
    documents: list[dict[str, Any]] = Field(default_factory=list)
    """A variable of the chat template."""
    add_generation_prompt: bool = True
    """The template opens an answer after the last message."""
    continue_final_message: bool = False
    """The answer continues the last message."""
    echo: bool = False
    """The content begins with the last message's content, if that message is the assistant's."""

    @property
    def shows_logprobs(self) -> bool:
        """True if the answer shows the log probability of each token."""
        return self.logprobs

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """Reads ``functions`` as tools, and what other services call the options of reasoning."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        _take_functions(data)
        _take_effort(data)
        return data

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        opens = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens:
            raise Fault("continue_final_message", "is true and add_generation_prompt is true: one of them is allowed")
        return self


def _take_functions(data: dict[str, Any]) -> None:
    choice = data.pop("function_call", None)
    if functions := data.get("functions"):
        if data.get("tools"):
            raise Fault("functions", "is given with tools: one of them is allowed")
        if not isinstance(functions, list):
            raise Fault("functions", f"is {shown(functions)}: a list is needed")
        data["tools"] = [{"type": "function", "function": one} for one in functions]
        data["parallel_tool_calls"] = False
    match choice:
        case None | "auto":
            return
        case "none":
            data.setdefault("tool_choice", "none")
        case {"name": str(name)} if functions:
            data["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            allowed = "'none', 'auto', or a function by its name, of those in functions, is allowed"
            raise Fault("function_call", f"is {shown(choice)}: {allowed}")


def _take_effort(data: dict[str, Any]) -> None:
    """Reads what other services call ``reasoning_effort``, ``include_reasoning`` and ``enable_thinking``.

    These are ``reasoning`` (OpenRouter), ``thinking`` (DeepSeek, GLM), ``think`` (Ollama), ``enable_thinking`` (Qwen).
    """
    enabled, effort = data.pop("enable_thinking", None), None
    for name in ("thinking", "think", "reasoning"):
        match data.pop(name, None):
            case None | {"type": "auto" | "adaptive"}:
                pass
            case bool(value):
                enabled = value
            case "low" | "medium" | "high" as value if name == "think":
                effort = value
            case {"type": "enabled" | "disabled" as value, **more} if name == "thinking" and not more:
                enabled = value == "enabled"
            case {**given} if name == "reasoning" and not given.keys() - {"enabled", "effort", "exclude", "summary"}:
                enabled, effort = given.get("enabled", enabled), given.get("effort")
                if given.get("exclude"):
                    data.setdefault("include_reasoning", False)
            case value:
                raise Fault(name, f"is {shown(value)}: it is not supported, use reasoning_effort")
    if effort is not None:
        data.setdefault("reasoning_effort", effort)
    if enabled is False:
        data.setdefault("reasoning_effort", "none")
    elif enabled is not None and isinstance(kwargs := data.get("chat_template_kwargs", {}), dict):
        data["chat_template_kwargs"] = {"enable_thinking": enabled} | kwargs


def offered(tools: Sequence[Tool], choice: Any) -> tuple[list[dict[str, Any]] | None, Any]:
    """Returns the tools for the template, None if none may be called, and the choice among them.

    Raises:
        InvalidRequestError: ``choice`` demands a call of a tool that is not offered.
    """
    names = [tool.function.name for tool in tools]
    asked = [choice["name"]] if isinstance(choice, dict) and "name" in choice else []
    if isinstance(choice, dict) and "allowed" in choice:
        asked, mode = choice["allowed"], choice["mode"]
        tools, choice = [tool for tool in tools if tool.function.name in asked], mode
    for name in asked:
        if name not in names:
            raise InvalidRequestError(f"tool_choice is {name!r}, but tools hold no function of this name")
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice is 'required', but no tools are given")
    if not tools or choice == "none":
        return None, choice
    return [tool.model_dump(exclude_none=True) for tool in tools], choice


def variables(
    given: Mapping[str, Any], options: Mapping[str, Any], read: Collection[str], ignored: Ignored
) -> dict[str, Any]:
    """Returns the variables and options that a chat template reads.

    Args:
        given: the variables that a body names.
        read: names of the variables that the template reads.
        options: ``reasoning_effort`` and ``documents``, which are body parameters, and options of the rendering.
    """
    found, options = dict(given), dict(options)
    effort, documents = options.pop("reasoning_effort", None), options.pop("documents", None)
    for name in sorted(found.keys() & {"messages", "tools", *_USES}):
        raise InvalidRequestError(f"chat_template_kwargs.{name} is {shown(found[name])}: it is a parameter of the body")
    if effort is not None:
        switches = [name for name in ("enable_thinking", "thinking") if name in read]
        for name in switches:
            found.setdefault(name, effort != "none")
        if "reasoning_effort" in read:
            found.setdefault("reasoning_effort", effort)
        elif not (switches and effort == "none"):
            ignored.note("reasoning_effort", effort)
    for name in [name for name in found if name not in read]:
        ignored.note(f"chat_template_kwargs.{name}", found.pop(name))
    if documents:
        if "documents" not in read:
            raise InvalidRequestError(f"documents is {shown(documents)}: the chat template reads no documents")
        found["documents"] = documents
    return {**found, **options}


_USES = ("add_generation_prompt", "continue_final_message", "documents")
