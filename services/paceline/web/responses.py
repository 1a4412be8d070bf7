"""POST /v1/responses in its text part: instructions and input in, items and their events out. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown
from paceline.types import Chunk, FinishReason, Result
from paceline.web.chat import Asked
from paceline.web.choices import Totals, speculation_of
from paceline.web.fields import INERT, NOTHING
from paceline.web.forms import FORMS
from paceline.web.logprobs import token_logprobs
from paceline.web.messages import ChatBody, Function, Tool, ToolsBody
from paceline.web.schema import read
from paceline.web.service import Edge
from paceline.web.speech import Part

_TEXT = {"format": {"type": "text"}}
_OF_ITEMS = ("id", "status", "type")
"""Fields of items that clients send back as they got them."""


class ResponseTool(Function):
    """A function that the answer may call."""

    type: Literal["function"]


class Reasoning(BaseModel):
    """Options of reasoning."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    effort: str | None = None
    """The variable ``reasoning_effort`` of the chat template."""
    summary: Literal["auto"] | None = None
    """There are no summaries: the reasoning itself is sent."""


class ResponseBody(ToolsBody):
    """POST /v1/responses."""

    INERT = MappingProxyType(
        {
            **INERT,
            "store": (True, False),
            "background": (False,),
            "truncation": ("disabled",),
            "previous_response_id": NOTHING,
            "conversation": NOTHING,
            "prompt": NOTHING,
            "max_tool_calls": NOTHING,
        }
    )
    RENAMED = MappingProxyType({"max_output_tokens": "max_tokens"})
    FORMS = ("text", *FORMS)

    text: dict[str, Any] = Field(default_factory=lambda: dict(_TEXT))
    """``format``: the form of the answer."""
    input: str | list[dict[str, Any]] = Field(min_length=1)
    """Input: text of the user, or items."""
    instructions: str | None = None
    """The system's message."""
    tools: list[ResponseTool] = Field(default_factory=list)
    """Functions that the answer may call."""
    reasoning: Reasoning = Reasoning()
    """Options of reasoning."""
    n: int = Field(default=1, ge=1, le=1)
    """One answer."""
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    """Parts of the answer that are left out by default: the log probability of each token of its text."""

    @model_validator(mode="after")
    def _top_logprobs(self) -> Self:
        if self.top_logprobs and not self.include:
            asked = "include holds no 'message.output_text.logprobs', which shows them"
            raise Fault("top_logprobs", f"is {self.top_logprobs}, but {asked}")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat. Raises InvalidRequestError."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        found: list[dict[str, Any]] = []
        for i, item in enumerate(items):
            message = _message(item, i)
            if found and _continues(found[-1], message):
                calls = [*found[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
                found[-1] |= message | ({"tool_calls": calls} if calls else {})
            else:
                found.append(message)
        try:
            chat = read(ChatBody, {"messages": found}, self.ignored)
        except InvalidRequestError as error:
            raise InvalidRequestError("input" + str(error).removeprefix("messages")) from None
        messages = [message.as_template_reads() for message in chat.messages]
        return [{"role": "system", "content": self.instructions}, *messages] if self.instructions else messages


def _continues(before: dict[str, Any], message: dict[str, Any]) -> bool:
    """True for items of one answer: its reasoning, text and calls are one message of a chat."""
    both = before.get("role") == message.get("role") == "assistant"
    return both and not (before.keys() & message.keys() - {"role", "tool_calls"})


def _message(item: dict[str, Any], i: int) -> dict[str, Any]:
    match item.get("type", "message"):
        case "message":
            return {name: value for name, value in item.items() if name not in _OF_ITEMS}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        case "reasoning":
            parts = [part.get("text", "") for part in item.get("content") or () if isinstance(part, dict)]
            return {"role": "assistant", "reasoning_content": "".join(map(str, parts))}
    allowed = "'message', 'function_call', 'function_call_output' or 'reasoning' is allowed"
    raise InvalidRequestError(f"input[{i}].type is {shown(item['type'])}: {allowed}")


class Response:
    """The answer to one body: its request, then events or one object made of what it yields."""

    ends_with_done = True

    def __init__(self, edge: Edge, body: ResponseBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._body, self._id = edge, body, request_id
        tools = [Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in body.tools]
        options: dict[str, Any] = {"add_generation_prompt": True}
        if body.reasoning.effort is not None:
            options["reasoning_effort"] = body.reasoning.effort
        shows = bool(body.include)
        self._asked = Asked(edge, body, body.messages(), tools, request_id, logprobs=shows, options=options)
        self.requests = self._asked.requests
        self._speech = self._asked.speech()
        self._totals, self._created = Totals(1), int(time.time())
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while text is added to it
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []  # log probabilities by place, if they are shown
        self._logprobs: list[dict[str, Any]] = []  # those of the open item
        self._result: Result | None = None
        self._num_events = 0

    def take(self, i: int, item: Chunk | Result) -> Iterator[dict[str, Any]]:
        """Takes what the request has yielded; yields the events that tell of it."""
        self._totals.note(i, item)
        if not self._num_events:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._whole("in_progress"))
        if isinstance(item, Result):
            self._result = item
            for part in self._speech.finish():
                yield from self._say(part)
            yield from self._close()
        else:
            if self._body.include:
                self._entries += map(_with_bytes, token_logprobs(item, self._edge.service.info.tokenizer))
            for part in self._speech.take(item):
                yield from self._say(part)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the last event of a stream."""
        whole = self.body()
        yield self._event(whole["status"], response=whole)

    def failure(self, status: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the last event of a stream that fails; ``body``: OpenAI's body of the error."""
        error = body["error"]
        code = "rate_limit_exceeded" if status == 429 else error["code"] or "server_error"
        yield self._event(
            "failed", response=self._whole("failed") | {"error": {"code": code, "message": error["message"]}}
        )

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        result = self._result
        assert result is not None
        whole = self._whole("incomplete" if result.finish_reason is FinishReason.LENGTH else "completed")
        usage = self._totals.counts(responses=True)
        usage["output_tokens_details"]["reasoning_tokens"] = self._speech.num_reasoning_tokens
        if self._body.return_token_ids:
            whole |= {"token_ids": list(result.token_ids), "prompt_token_ids": list(self._asked.token_ids)}
        return whole | {"usage": usage, "speculation": speculation_of(result)}

    def _whole(self, status: str) -> dict[str, Any]:
        body = self._body
        given = body.model_fields_set
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._edge.model_id,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature if "temperature" in given else None,
            "top_p": body.top_p if "top_p" in given else None,
            "top_logprobs": body.top_logprobs,
            "max_output_tokens": body.max_tokens if "max_tokens" in given else None,
            "tool_choice": _choice_of(body.tool_choice),
            "tools": [tool.model_dump() for tool in body.tools],
            "text": body.text or _TEXT,
            "truncation": "disabled",
            "store": False,
            "usage": None,
        }

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **content}

    def _of_item(self, kind: str, **content: Any) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return self._event(kind, **place, **content)

    def _add(self, kind: str, prefix: str, **content: Any) -> dict[str, Any]:
        item = {"id": f"{prefix}_{self._id}_{len(self._output)}", "type": kind, "status": "in_progress", **content}
        self._output.append(item)
        return self._event("output_item.added", output_index=len(self._output) - 1, item=dict(item))

    def _done(self) -> dict[str, Any]:
        self._output[-1] = item = {**self._output[-1], "status": "completed"}
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _say(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.kind == "tool_call":
            yield from self._close()
            called = {"call_id": part.call_id, "name": part.name}
            yield self._add("function_call", "fc", **called, arguments="")
            yield self._of_item("function_call_arguments.delta", delta=part.text)
            self._output[-1] = {**self._output[-1], "arguments": part.text}
            yield self._of_item("function_call_arguments.done", arguments=part.text, name=part.name)
            yield self._done()
            return
        kind = "message" if part.kind == "content" else "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            if kind == "message":
                yield self._add(kind, "msg", role="assistant", content=[])
                yield self._of_item("content_part.added", content_index=0, part=_output_text("", []))
            else:
                yield self._add(kind, "rs", summary=[], content=[])
            self._open, self._text, self._logprobs = self._output[-1], [], []
        self._text.append(part.text)
        if kind == "message":
            logprobs = [self._entries[place] for place in part.places] if self._entries else []
            self._logprobs += logprobs
            yield self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)
        else:
            yield self._of_item("reasoning_text.delta", content_index=0, delta=part.text)

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the item that text was added to."""
        if self._open is None:
            return
        text = "".join(self._text)
        if self._open["type"] == "message":
            part = _output_text(text, self._logprobs)
            self._output[-1] = {**self._output[-1], "content": [part]}
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            self._output[-1] = {**self._output[-1], "content": [{"type": "reasoning_text", "text": text}]}
            yield self._of_item("reasoning_text.done", content_index=0, text=text)
        yield self._done()
        self._open = None


def _choice_of(choice: Any) -> Any:
    return {"type": "function", **choice} if isinstance(choice, dict) else choice or "auto"


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """The log probability of a token with a list for its bytes, where chats have null: no whole characters."""
    others = [other | {"bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
    return entry | {"bytes": entry["bytes"] or [], "top_logprobs": others}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
