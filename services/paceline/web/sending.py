"""Answers as JSON and as server-sent events; the making of large ones does not hold the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.errors import InvalidRequestError
from paceline.router.preparation import LateTrim
from paceline.types import Request

MAX_PROMPT_LOGPROBS = 1 << 18
"""Log probabilities of prompts in one answer: each takes some hundred bytes while the answer is made."""
SLICE = 256
"""Items of a list that are written without giving up the interpreter lock."""
_DEPTH = 6
"""Levels of an answer below which its lists are short."""

_T = TypeVar("_T")


class Json(JSONResponse):
    """A small answer."""

    def render(self, content: Any) -> bytes:
        """The content as JSON."""
        return dumps(content).encode("utf-8", "replace")


class Events(StreamingResponse):
    """Server-sent events. What makes them notices itself that the client has left."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the connection is gone
                await self.stream_response(send)
        finally:
            assert isinstance(self.body_iterator, AsyncGenerator)
            await self.body_iterator.aclose()


class LargeAnswers:
    """Makes large answers in a thread, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "paceline-answer")
        self._trim = LateTrim(self._thread)

    async def run(self, function: Callable[[], _T]) -> _T:
        """Runs a function there; returns or raises its result."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        finally:
            self._trim.schedule()

    async def json(self, make: Callable[[], Any], headers: dict[str, str]) -> Response:
        """The response with what ``make`` returns, as JSON."""
        data = await self.run(lambda: "".join(pieces(make())).encode("utf-8", "replace"))
        return Response(data, headers=headers, media_type="application/json")


def framed(event: dict[str, Any]) -> bytes:
    """An event as a stream holds it."""
    kind = event.get("type")  # of /v1/responses and /v1/messages
    data = dumps(event).encode("utf-8", "replace")
    return (b"" if kind is None else f"event: {kind}\n".encode()) + b"data: " + data + b"\n\n"


def dumps(content: Any) -> str:
    """JSON without blanks."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def pieces(content: Any, depth: int = _DEPTH) -> Iterator[str]:
    """``dumps``, in pieces that each take some milliseconds at most: the encoder keeps the interpreter lock.

    An iterator is written as a list, and its items are made meanwhile.
    """
    if depth and isinstance(content, dict) and content:
        for i, (key, value) in enumerate(content.items()):
            yield f"{',' if i else '{'}{dumps(key)}:"
            yield from pieces(value, depth - 1)
        yield "}"
    elif isinstance(content, Iterator):
        yield "["
        separator = ""
        while some := list(itertools.islice(content, SLICE)):
            yield separator + dumps(some)[1:-1]
            separator = ","
        yield "]"
    elif depth and isinstance(content, list) and content:
        for begin in range(0, len(content), SLICE):
            yield "," if begin else "["
            some = content[begin : begin + SLICE]
            if len(content) > SLICE:
                yield dumps(some)[1:-1]
                continue
            for i, value in enumerate(some):
                yield "," if i else ""
                yield from pieces(value, depth - 1)
        yield "]"
    else:
        yield dumps(content)


def shows_many(requests: Sequence[Request]) -> bool:
    """True if the answer to these requests may hold many values for each token."""
    return any(
        one.sampling.top_logprobs or one.sampling.logprob_token_ids or one.sampling.prompt_logprobs is not None
        for one in requests
    )


def check_prompt_logprobs(requests: Sequence[Request]) -> None:
    """Refuses requests for too many log probabilities of prompts. Raises InvalidRequestError."""
    asked = [one for one in requests if one.sampling.prompt_logprobs is not None]
    total = sum(len(one.prompt) * (1 + (one.sampling.prompt_logprobs or 0)) for one in asked)
    if total > MAX_PROMPT_LOGPROBS:
        first = asked[0]
        raise InvalidRequestError(
            f"{len(asked)} choices show {1 + (first.sampling.prompt_logprobs or 0)} log probabilities for each token "
            f"of their prompts, {total} in all: at most {MAX_PROMPT_LOGPROBS} are allowed"
        )
