"""POST /v1/messages: a chat in Anthropic's words, and its answer as blocks or their events."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from paceline.types import Chunk, FinishReason, Result, Usage
from paceline.web.anthropic_schema import CountBody
from paceline.web.chat import Asked
from paceline.web.choices import speculation_of
from paceline.web.service import Edge
from paceline.web.speech import Part

PATH = "/v1/messages"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's ``type`` of an error."""


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Anthropic's body of an error, and the last event of a stream that fails."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class Message:
    """The answer to one body: its request, then events, or one object with the whole result."""

    ends_with_done = False

    def __init__(self, edge: Edge, body: CountBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._body, self._id = edge, body, request_id
        messages = body.chat()
        tools = [tool.as_chats_have_it() for tool in body.tools]
        self._asked = Asked(edge, body, messages, tools, request_id, options=body.options(messages, edge.chat))
        self.requests = self._asked.requests
        self._speech = self._asked.speech()
        self._shows_thoughts = body.thinking.display != "omitted"
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._text: list[str] = []
        self._usage: Usage | None = None
        self._result: Result | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._asked.token_ids)

    def take(self, i: int, item: Chunk | Result) -> Iterator[dict[str, Any]]:
        """Records a chunk or the result of the request; yields its events."""
        is_first, self._usage = self._usage is None, item.usage
        if is_first:
            yield {"type": "message_start", "message": self._whole([])}
            yield {"type": "ping"}
        if isinstance(item, Result):
            self._result = item
            for part in self._speech.finish():
                yield from self._say(part)
            yield from self.close_block()
        else:
            for part in self._speech.take(item):
                yield from self._say(part)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the last events of a stream."""
        assert self._result is not None
        yield {"type": "message_delta", "delta": self._end(), "usage": self._counts(), **self._extra(self._result)}
        yield {"type": "message_stop"}

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        assert self._result is not None
        return self._whole(self._blocks) | self._end() | self._extra(self._result)

    def failure(self, status: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the last event of a stream that fails; ``body``: OpenAI's body of the error."""
        yield error_body(status, body["error"]["message"], self._id)

    def _whole(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._edge.model_id,
            "content": list(blocks),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._counts(),
        }

    def _counts(self) -> dict[str, Any]:
        usage = self._usage
        assert usage is not None, "every chunk of a session has it"
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._speech.num_reasoning_tokens},
        }

    def _end(self) -> dict[str, Any]:
        """The reason why the answer ended."""
        result = self._result
        assert result is not None
        if result.finish_reason is FinishReason.LENGTH:
            fills = result.usage.completion_tokens < self._body.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if fills else "max_tokens", "stop_sequence": None}
        if isinstance(result.matched_stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": result.matched_stop}
        called = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

    def _extra(self, result: Result) -> dict[str, Any]:
        """Fields that are no part of Anthropic's API."""
        found: dict[str, Any] = {"speculation": speculation_of(result)}
        if self._body.return_token_ids:
            found |= {"token_ids": list(result.token_ids), "prompt_token_ids": list(self._asked.token_ids)}
        return found

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks.append(block)
        self._is_open = True
        self._text = []
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _say(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.kind == "tool_call":
            yield from self.close_block()
            called = {"type": "tool_use", "id": part.call_id, "name": part.name}
            yield self._start(called | {"input": {}})
        if part.kind in ("tool_call", "tool_arguments"):
            self._text.append(part.text)
            yield self._delta("input_json_delta", "partial_json", part.text)
            return
        kind = "thinking" if part.kind == "reasoning" else "text"
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self.close_block()
            yield self._start({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._text.append(part.text)
        if kind == "text" or self._shows_thoughts:
            yield self._delta(f"{kind}_delta", kind, part.text)

    def close_block(self) -> Iterator[dict[str, Any]]:
        """Ends the block that is open."""
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._text)
        if block["type"] == "thinking":
            signature = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
            self._blocks[-1] = block | {"thinking": text if self._shows_thoughts else "", "signature": signature}
            yield self._delta("signature_delta", "signature", signature)
        elif block["type"] == "tool_use":
            self._blocks[-1] = block | {"input": _input_of(text)}
        elif block["type"] == "text":
            self._blocks[-1] = block | {"text": text}
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._is_open = False


def _input_of(arguments: str) -> Any:
    """The input of a call; empty if the answer was cut off within its arguments."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}
