"""The text of an answer, told apart as it grows: content, reasoning, tool calls."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.types import Chunk

log = logging.getLogger(__name__)

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field of a response template that holds reasoning."""


_NO_CALL = (ValueError, LookupError, TypeError, AttributeError)
"""Errors of a call that cannot be parsed, or lacks a name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an answer: text of the content or of the reasoning, or one whole tool call."""

    kind: str
    """``content``, ``reasoning`` or ``tool_call``."""
    text: str = ""
    """The text; of a call the JSON text of its arguments."""
    name: str = ""
    """The function that is called."""
    call_id: str = ""
    places: tuple[int, ...] = ()
    """Indices of the tokens of the answer, from 0, whose text this is, for content."""


class Speech:
    """One answer. Without a parser all of it is content."""

    def __init__(
        self,
        chat: ChatTemplate,
        tokenizer: Tokenizer,
        prefix: str,
        token_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] | None,
        *,
        by_text: bool,
    ) -> None:
        """``prefix`` is the rendered chat, of these tokens. ``by_text``: read the text as it is sent, which ends before
        a stop string but shows no special tokens; else that of the tokens, with special ones."""
        self._parser = chat.parser(prefix, tools)
        self._detokenizer = None if by_text else tokenizer.detokenizer(token_ids, special=True)
        self._call = ""
        self._num_tokens = 0
        self._open: list[int] = []  # places of tokens whose text may still become content
        self.num_reasoning_tokens = 0

    def take(self, chunk: Chunk) -> Iterator[Part]:
        """The parts that a chunk completes."""
        if self._parser is None or self._detokenizer is None:
            yield from self._feed(chunk.text, len(chunk.token_ids))
        else:
            for token_id in chunk.token_ids:
                yield from self._feed(self._detokenizer.add(token_id), 1)

    def finish(self) -> Iterator[Part]:
        """The parts that were open at the end."""
        if self._parser is not None and self._detokenizer is not None:
            yield from self._feed(self._detokenizer.flush(), 0)
        if self._parser is not None:
            try:
                parts = list(self._parts(self._parser.finalize()[1]))
            except _NO_CALL:
                parts = list(self._give_up())
            yield from self._placed(parts)

    def _feed(self, text: str, num_tokens: int) -> Iterator[Part]:
        self._open += range(self._num_tokens, self._num_tokens + num_tokens)
        self._num_tokens += num_tokens
        if self._parser is None:  # there is none, or it has been given up
            yield from self._placed(_content(text))
            return
        try:
            events = self._parser.feed(text)
            parts = list(self._parts(events))
        except _NO_CALL:
            self._call += text
            yield from self._placed(self._give_up())
            return
        if any(part.kind == "reasoning" for part in parts):
            self.num_reasoning_tokens += num_tokens
        yield from self._placed(parts)
        if any(event["type"] == "region_close" for event in events):  # by a token that is no text of any part
            self._open.clear()

    def _placed(self, parts: Iterable[Part]) -> Iterator[Part]:
        """The parts, the first of content with the places that are open; whatever else is said closes these."""
        for part in parts:
            yield replace(part, places=tuple(self._open)) if part.kind == "content" else part
            self._open.clear()

    def _give_up(self) -> Iterator[Part]:
        """Text that looks like a call and is none is content, and so is all that follows."""
        log.info("a tool call could not be parsed: it is sent as content")
        self._parser = None
        yield from _content(self._call)

    def _parts(self, events: Sequence[dict[str, Any]]) -> Iterator[Part]:
        for event in events:
            name, text = event["field"], event.get("text") or ""
            match event["type"], event.get("dirty"):
                case "region_open", _:
                    self._call = ""
                case "region_chunk", True:
                    self._call += text
                case "region_chunk", _ if name in REASONING:
                    yield Part("reasoning", text)
                case "region_chunk", _ if name == "content":
                    yield from _content(text)
                case "region_close", _ if name == "tool_calls":
                    value = event["value"]
                    for call in value if isinstance(value, list) else [value]:
                        yield self._called(call["function"])
                    self._call = ""

    def _called(self, function: dict[str, Any]) -> Part:
        name, arguments = function["name"], function.get("arguments") or {}
        if not isinstance(name, str):
            raise TypeError("a call names no function")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return Part("tool_call", arguments, name, f"call_{secrets.token_hex(12)}")


def _content(text: str) -> Iterator[Part]:
    if text:
        yield Part("content", text)
