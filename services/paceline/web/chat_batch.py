"""POST /v1/chat/completions/batch: several chats and an answer to each, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, model_validator

from paceline.errors.refusals import Fault
from paceline.types import Chunk, Result
from paceline.web.chat import ChatCompletion
from paceline.web.messages import ChatBody, ChatMessage
from paceline.web.schema import MAX_CHOICES
from paceline.web.service import Edge


class ChatBatchBody(ChatBody):
    """POST /v1/chat/completions/batch: the fields of a chat, which all chats share."""

    messages: list[list[ChatMessage]] = Field(min_length=1, max_length=MAX_CHOICES)  # type: ignore[assignment]
    """The chats so far."""
    n: int = Field(default=1, ge=1, le=1)
    """One answer to each chat."""

    @model_validator(mode="after")
    def _whole(self) -> ChatBatchBody:
        if self.stream:
            raise Fault("stream", "is true: several chats are answered as a whole")
        for i, chat in enumerate(self.messages):
            if not chat:
                raise Fault(f"messages[{i}]", "is []: at least one message is needed")
        return self


class ChatBatch:
    """The answers to one body: a choice for each chat, in their order."""

    ends_with_done = False

    def __init__(self, edge: Edge, body: ChatBatchBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        edge.service.info.check_sequences(len(body.messages), 1)
        self._chats = [
            ChatCompletion(edge, body.model_copy(update={"messages": messages}), f"{request_id}-{i}")
            for i, messages in enumerate(body.messages)
        ]
        self._id = f"chatcmpl-{request_id}"
        self.requests = [chat.requests[0] for chat in self._chats]

    def take(self, i: int, item: Chunk | Result) -> Iterable[dict[str, Any]]:
        """Records a chunk or the result of chat ``i``; its events are never sent."""
        return self._chats[i].take(0, item)

    def finish(self) -> Iterable[dict[str, Any]]:
        """Returns no events."""
        return ()

    def failure(self, status: int, body: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Returns OpenAI's body of the error."""
        return (body,)

    def body(self) -> dict[str, Any]:
        """Returns the whole answer. Fields about a prompt are part of its choice."""
        answers = [chat.body() for chat in self._chats]
        of_prompt = ("prompt_token_ids", "prompt_logprobs")
        choices = [
            {
                **answer["choices"][0],
                "index": i,
                **{name: answer[name] for name in of_prompt if answer[name] is not None},
            }
            for i, answer in enumerate(answers)
        ]
        head = {name: value for name, value in answers[0].items() if name not in ("metrics", *of_prompt)}
        usage = _sum([answer["usage"] for answer in answers])
        return {**head, "id": self._id, "choices": choices, "usage": usage}


def _sum(counts: list[Any]) -> Any:
    """The sums of counts that have one shape."""
    first = counts[0]
    if isinstance(first, dict):
        return {name: _sum([one[name] for one in counts]) for name in first}
    return sum(counts)
