"""POST /tokenize and /detokenize: token ids of texts and chats, and texts of token ids, with vLLM's bodies."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault
from paceline.web.chat import ChatCompletion
from paceline.web.messages import ChatBody, ChatMessage
from paceline.web.schema import Body
from paceline.web.service import Edge

_CONTEXTS = 2
"""Contexts whose tokens are made text at once."""


class TokenizeBody(ChatBody):
    """POST /tokenize: a text, or a chat with its options."""

    prompt: str | None = None
    """Text."""
    messages: list[ChatMessage] = Field(default_factory=list)
    """A chat."""
    add_special_tokens: bool | None = None
    """Adds special tokens around the prompt. Default: yes for a text, no for a chat, whose template has its own."""
    return_token_strs: bool = False
    """The answer also holds the tokens as the tokenizer writes them."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) is not bool(self.messages):
            held = "neither is given" if self.prompt is None else "messages are given, too"
            raise Fault("prompt", f"or messages are needed: {held}")
        if self.messages and self.add_special_tokens:
            raise Fault("add_special_tokens", "is true for a chat, whose template has them: only false is supported")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]
    """Token ids."""


class Tokens:
    """The answer to one body of /tokenize."""

    def __init__(self, edge: Edge, body: TokenizeBody, request_id: str) -> None:
        """Raises InvalidRequestError for a chat that cannot be rendered."""
        info = edge.service.info
        if body.prompt is None:
            ids = ChatCompletion(edge, body, request_id).prompt_token_ids
        else:
            ids = list(info.tokenize(body.prompt, special=body.add_special_tokens is not False))
        strings = info.tokenizer.token_strings(ids) if body.return_token_strs else None
        self.content = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}


class Text:
    """The answer to one body of /detokenize."""

    def __init__(self, edge: Edge, body: DetokenizeBody, request_id: str) -> None:
        """Raises InvalidRequestError for an id that no token has."""
        tokenizer, most = edge.service.info.tokenizer, _CONTEXTS * edge.service.info.max_model_len
        if len(body.tokens) > most:
            raise InvalidRequestError(f"tokens holds {len(body.tokens)} token ids: at most {most} are allowed")
        for wrong in (max(body.tokens, default=0), min(body.tokens, default=0)):
            if not 0 <= wrong < tokenizer.num_ids:
                raise InvalidRequestError(f"tokens holds {wrong}: 0 to {tokenizer.num_ids - 1} are allowed")
        self.content: dict[str, Any] = {"prompt": tokenizer.decode(body.tokens, special=True)}
