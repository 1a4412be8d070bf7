"""POST /v1/responses: instructions and input in, items and their events out."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.errors.refusals import shown
from paceline.types import Chunk, FinishReason, Result
from paceline.web.chat import Asked
from paceline.web.choices import Totals, speculation_of
from paceline.web.errors import PreviousResponseError, UnknownResponseError
from paceline.web.logprobs import token_logprobs
from paceline.web.responses_schema import ResponseBody
from paceline.web.service import Edge
from paceline.web.speech import Part

PATH = "/v1/responses"


def kept(edge: Edge, owner: str, response_id: str) -> bytes:
    """A response that is kept, as JSON. Raises NotFoundError."""
    found = None if edge.responses is None else edge.responses.get(owner, response_id)
    if found is None:
        raise unknown(response_id)
    return found.data


def unknown(response_id: str) -> UnknownResponseError:
    """The error of an id that no response has."""
    return UnknownResponseError(f"Response with id {shown(response_id)} not found.")  # as OpenAI says it


class Response:
    """The answer to one body: its request, then events, or one object with the whole result."""

    ends_with_done = True

    def __init__(self, edge: Edge, body: ResponseBody, request_id: str, owner: str = "") -> None:
        """``owner``: the API key of the caller. Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._id, self._owner = edge, request_id, owner
        if not isinstance(body.input, str):
            body = body.model_copy(update={"input": [self._resolved(item, i) for i, item in enumerate(body.input)]})
        self._body = body
        self._before = [] if body.previous_response_id is None else self._items_of(body.previous_response_id)
        self._asked = self._fitting(body.messages(self._before))
        self.requests = self._asked.requests
        self._speech = self._asked.speech()
        self._totals, self._created = Totals(1), int(time.time())
        self._shows_logprobs = body.shows_logprobs
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while text is added to it
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []  # log probabilities by place, if they are shown
        self._logprobs: list[dict[str, Any]] = []  # of the open item
        self._result: Result | None = None
        self._num_events = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._asked.token_ids)

    def _items_of(self, response_id: str) -> list[dict[str, Any]]:
        """The conversation that ends with an earlier response. Raises InvalidRequestError."""
        name = f"previous_response_id is {shown(response_id)}"
        if self._edge.responses is None:
            raise InvalidRequestError(f"{name}: this service keeps no responses, send their items as input")
        found = self._edge.responses.get(self._owner, response_id)
        if found is None:
            raise PreviousResponseError(f"{name}: no such response is kept")
        return found.items

    def _resolved(self, item: dict[str, Any], i: int) -> dict[str, Any]:
        """The item of an earlier response that a reference names; any other item as it is."""
        if item.get("type") != "item_reference":
            return item
        name, item_id = f"input[{i}].id is {shown(item.get('id'))}", str(item.get("id"))
        if self._edge.responses is None:
            raise InvalidRequestError(f"{name}: this service keeps no responses, send the item itself")
        request_id = item_id.partition("_")[2].rpartition("_")[0]  # as _add writes it
        found = self._edge.responses.get(self._owner, f"resp_{request_id}")
        for one in () if found is None else found.response["output"]:
            if one["id"] == item_id:
                return dict(one)
        raise PreviousResponseError(f"{name}: no such item is kept")

    def _fitting(self, messages: list[dict[str, Any]]) -> Asked:
        """The chat; if it may be truncated, without the oldest turns that do not fit the context."""
        body = self._body
        if body.truncation == "disabled":
            return self.ask(messages)
        room = self._edge.service.info.max_model_len - (body.max_tokens if "max_tokens" in body.model_fields_set else 1)

        def fits(some: list[dict[str, Any]]) -> bool:
            try:
                return len(self.ask(some).token_ids) <= room
            except PromptTooLongError:
                return False

        head = messages[:1] if messages[0]["role"] == "system" else []
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
        if not starts or fits(messages):
            return self.ask(messages)
        width = 1  # last turns that may fit: the search is bounded by the context, not by the chat
        while width < len(starts) and fits(head + messages[starts[-width] :]):
            width *= 2
        last = starts[-width:]
        k = bisect.bisect_left(last, True, key=lambda i: fits(head + messages[i:]))
        return self.ask(messages if k == len(last) else head + messages[last[k] :])

    def ask(self, messages: Sequence[dict[str, Any]]) -> Asked:
        """Returns the request for a response to these messages."""
        body = self._body
        tools = [tool.as_chats_have_it() for tool in body.tools]
        options: dict[str, Any] = {"add_generation_prompt": True}
        if body.reasoning.effort is not None:
            options["reasoning_effort"] = body.reasoning.effort
        return Asked(self._edge, body, messages, tools, self._id, logprobs=body.shows_logprobs, options=options)

    def take(self, i: int, item: Chunk | Result) -> Iterator[dict[str, Any]]:
        """Records a chunk or the result of the request; yields its events."""
        self._totals.note(i, item)
        if not self._num_events:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._whole("in_progress"))
        if isinstance(item, Result):
            self._result = item
            for part in self._speech.finish():
                yield from self._say(part)
            yield from self.close_block(cut=item.finish_reason is FinishReason.LENGTH or self._speech.cuts_call)
        else:
            if self._shows_logprobs:
                tokenizer, as_ids = self._edge.service.info.tokenizer, self._body.return_tokens_as_token_ids
                self._entries += map(_with_bytes, token_logprobs(item, tokenizer, as_ids=as_ids))
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
        """Returns the whole answer, and stores it if the request asks for that."""
        result, kept = self._result, self._edge.responses
        assert result is not None
        whole = self._whole("incomplete" if result.finish_reason is FinishReason.LENGTH else "completed")
        usage = self._totals.counts(responses=True)
        usage["output_tokens_details"]["reasoning_tokens"] = self._speech.num_reasoning_tokens
        if self._body.return_token_ids:
            whole |= {"token_ids": list(result.token_ids), "prompt_token_ids": list(self._asked.token_ids)}
        if self._body.enable_response_messages:
            texts = self._asked.prompt, self._edge.service.info.tokenizer.decode(result.token_ids, special=True)
            of_both = zip(texts, (self._asked.token_ids, result.token_ids), strict=True)
            messages = [[{"type": "raw_message_tokens", "message": m, "tokens": list(t)}] for m, t in of_both]
            whole |= dict(zip(("input_messages", "output_messages"), messages, strict=True))
        whole |= {"completed_at": int(time.time()), "usage": usage, "speculation": speculation_of(result)}
        if kept is not None and self._body.store:
            items = [*self._before, *self._body.items(), *self._output]
            whole["store"] = kept.put(self._owner, whole | {"store": True}, items)
        return whole

    def _whole(self, status: str) -> dict[str, Any]:
        body = self._body
        given = body.model_fields_set
        reasoning = body.reasoning
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "model": self._edge.model_id,
            "output": list(self._output),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature if "temperature" in given else None,
            "top_p": body.top_p if "top_p" in given else None,
            "top_logprobs": body.top_logprobs,
            "max_output_tokens": body.max_tokens if "max_tokens" in given else None,
            "max_tool_calls": body.max_tool_calls,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "tool_choice": _choice_of(body.tool_choice),
            "tools": [tool.model_dump(include=_TOOL) for tool in body.tools],
            "text": body.text,
            "truncation": body.truncation,
            "service_tier": "default",
            "store": False,
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
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

    def _done(self, status: str = "completed") -> dict[str, Any]:
        self._output[-1] = item = {**self._output[-1], "status": status}
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _say(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.kind == "tool_call":
            yield from self.close_block()
            called = {"call_id": part.call_id, "name": part.name}
            yield self._add("function_call", "fc", **called, arguments="")
            self._open, self._text = self._output[-1], []
        if part.kind in ("tool_call", "tool_arguments"):
            self._text.append(part.text)
            yield self._of_item("function_call_arguments.delta", delta=part.text)
            return
        kind = "message" if part.kind == "content" else "reasoning"
        if self._open is None or self._open["type"] != kind:
            yield from self.close_block()
            if kind == "message":
                yield self._add(kind, "msg", role="assistant", content=[])
                yield self._of_item("content_part.added", content_index=0, part=_output_text("", []))
            else:
                yield self._add(kind, "rs", summary=[], content=[])
                yield self._of_item("content_part.added", content_index=0, part=_reasoning_text(""))
                if self._body.reasoning.summarizes:
                    yield self._of_item("reasoning_summary_part.added", summary_index=0, part=_summary_text(""))
            self._open, self._text, self._logprobs = self._output[-1], [], []
        self._text.append(part.text)
        if kind == "message":
            logprobs = [self._entries[place] for place in part.places] if self._entries else []
            self._logprobs += logprobs
            yield self._of_item("output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)
            return
        yield self._of_item("reasoning_text.delta", content_index=0, delta=part.text)
        if self._body.reasoning.summarizes:
            yield self._of_item("reasoning_summary_text.delta", summary_index=0, delta=part.text)

    def close_block(self, *, cut: bool = False) -> Iterator[dict[str, Any]]:
        """Ends the item that text was added to. ``cut``: the answer was cut within it."""
        if self._open is None:
            return
        text = "".join(self._text)
        if self._open["type"] == "function_call":
            self._output[-1] = {**self._output[-1], "arguments": text}
            yield self._of_item("function_call_arguments.done", arguments=text, name=self._open["name"])
        elif self._open["type"] == "message":
            part = _output_text(text, self._logprobs)
            self._output[-1] = {**self._output[-1], "content": [part]}
            yield self._of_item("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._of_item("content_part.done", content_index=0, part=part)
        else:
            part = _reasoning_text(text)
            self._output[-1] = {**self._output[-1], "content": [part]}
            yield self._of_item("reasoning_text.done", content_index=0, text=text)
            yield self._of_item("content_part.done", content_index=0, part=part)
            if self._body.reasoning.summarizes:
                self._output[-1] |= {"summary": [_summary_text(text)]}
                yield self._of_item("reasoning_summary_text.done", summary_index=0, text=text)
                yield self._of_item("reasoning_summary_part.done", summary_index=0, part=_summary_text(text))
        yield self._done("incomplete" if cut else "completed")
        self._open = None


_TOOL = {"type", "name", "description", "parameters", "strict"}


def _choice_of(choice: Any) -> Any:
    match choice:
        case {"mode": mode, "allowed": names}:
            tools = [{"type": "function", "name": name} for name in names]
            return {"type": "allowed_tools", "mode": mode, "tools": tools}
        case {"name": name}:
            return {"type": "function", "name": name}
    return choice or "auto"


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """The log probability of a token with a list for its bytes, where chats have null: no whole characters."""
    others = [other | {"bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
    return entry | {"bytes": entry["bytes"] or [], "top_logprobs": others}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _summary_text(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
