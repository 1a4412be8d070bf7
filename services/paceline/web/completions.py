"""POST /v1/completions: a prompt and its continuations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.types import Chunk, Request, Result
from paceline.web.choices import Totals, metrics_of, round_of, speculation_of, with_seed
from paceline.web.schema import CompletionBody
from paceline.web.service import Edge


@dataclass(slots=True)
class _Choice:
    """State of one choice: all that it has yielded so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    next_offset: int = 0
    result: Result | None = None


class Completion:
    """The answer to one body: its requests, then events or one object made of what they yield."""

    def __init__(self, edge: Edge, body: CompletionBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._body = edge, body
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": edge.model_id,
        }
        stop, speculation = body.stop_strings(edge.service.limits), body.speculation.params()
        sampling = body.sampling(body.logprobs is not None, body.logprobs or 0)
        self._prompts = body.prompts()
        num = len(self._prompts) * body.n
        self.requests = [
            Request(
                request_id if num == 1 else f"{request_id}-{i}",
                self._prompts[i // body.n],
                with_seed(sampling, i % body.n),
                speculation,
                stop,
                cache_salt=body.cache_salt,
            )
            for i in range(num)
        ]
        self._totals = Totals(body.n)
        self._choices = [_Choice() for _ in range(num)]
        self._begun: set[int] = set()

    def take(self, i: int, item: Chunk | Result) -> Iterator[dict[str, Any]]:
        """Takes what choice ``i`` has yielded; yields the events that tell of it."""
        self._totals.note(i, item)
        choice = self._choices[i]
        if isinstance(item, Result):
            choice.result = item
            yield self._event(self._choice(i, "", result=item))
            return
        text = item.text
        extra: dict[str, Any] = {}
        if i not in self._begun:
            self._begun.add(i)
            text = self._prompt_text(i) + text if self._body.echo else text
            extra = {"prompt_token_ids": self._prompt_ids(i)} if self._body.return_token_ids else {}
        choice.text.append(text)
        choice.token_ids += item.token_ids
        if self._body.return_token_ids:
            extra["token_ids"] = list(item.token_ids)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = self._take_logprobs(choice, item)
        options = self._body.stream_options
        if options is not None and options.include_speculation:
            extra["speculation"] = round_of(item)
        if text or extra or logprobs:
            yield self._event(self._choice(i, text, logprobs=logprobs, extra=extra))

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the last events of a stream."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._totals.counts(), **self._metrics()}

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for i, choice in enumerate(self._choices):
            extra: dict[str, Any] = {}
            if self._body.return_token_ids:
                extra = {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_ids(i)}
            logprobs = None
            if self._body.logprobs is not None:
                logprobs = _logprobs(choice)
            choices.append(self._choice(i, "".join(choice.text), logprobs=logprobs, result=choice.result, extra=extra))
        return {**self._head, "choices": choices, "usage": self._totals.counts(), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self.requests, [choice.result for choice in self._choices])

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            event["usage"] = self._totals.counts()
        elif options is not None and options.include_usage:
            event["usage"] = None
        return event

    def _choice(
        self,
        i: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        result: Result | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": None}
        if result is not None:
            choice |= {"finish_reason": result.finish_reason.value, "stop_reason": result.matched_stop}
            choice["speculation"] = speculation_of(result)
        return choice | (extra or {})

    def _take_logprobs(self, choice: _Choice, chunk: Chunk) -> dict[str, Any] | None:
        if not chunk.token_ids:
            return None
        tokenizer = self._edge.service.info.tokenizer
        begin = len(choice.tokens)
        for i, (token_id, logprob) in enumerate(zip(chunk.token_ids, chunk.logprobs, strict=True)):
            token = tokenizer.decode([token_id], special=True)
            choice.tokens.append(token)
            choice.logprobs.append(logprob)
            choice.offsets.append(choice.next_offset)
            choice.next_offset += len(token)
            if self._body.logprobs:
                top: dict[str, float] = {}
                for other, value in chunk.top_logprobs[i]:
                    top.setdefault(tokenizer.decode([other], special=True), value)
                choice.top_logprobs.append(top | {token: logprob})  # it is there even if others are likelier
        return _logprobs(choice, begin)

    def _prompt_text(self, i: int) -> str:
        prompt = self._prompts[i // self._body.n]
        return prompt if isinstance(prompt, str) else self._edge.service.info.tokenizer.decode(prompt)

    def _prompt_ids(self, i: int) -> list[int]:
        prompt = self._prompts[i // self._body.n]
        return list(self._edge.service.info.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)


def _logprobs(choice: _Choice, begin: int = 0) -> dict[str, Any]:
    """OpenAI's ``logprobs`` of a choice, from one of its tokens on."""
    return {
        "tokens": choice.tokens[begin:],
        "token_logprobs": choice.logprobs[begin:],
        "top_logprobs": choice.top_logprobs[begin:] or None,
        "text_offset": choice.offsets[begin:],
    }
