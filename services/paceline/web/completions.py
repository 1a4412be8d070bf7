"""POST /v1/completions: a prompt and its continuations."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.token_text import Detokenizer
from paceline.checkpoint.tokenizer import Tokenizer
from paceline.types import Chunk, Request, Result, TokenLogprob
from paceline.web.choices import Totals, ended, metrics_of, round_of, speculation_of, with_seed
from paceline.web.logprobs import TokenColumns, echoed, prompt_entries
from paceline.web.prompts import filling
from paceline.web.schema import CompletionBody
from paceline.web.service import Edge


@dataclass(slots=True)
class _Choice:
    """State of one choice: all that it has yielded so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    columns: TokenColumns | None = None
    """Log probabilities of the tokens, if they are shown."""
    detokenizer: Detokenizer | None = None
    """Tells where each of its tokens begins, then."""
    num_echoed: int = 0
    """Characters of the prompt before its text."""
    scores: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    """Log probabilities of the prompt, if they were asked for."""
    last: Chunk | None = None
    """Last chunk of the choice; its event also says why the text ends."""
    result: Result | None = None


class Completion:
    """The answer to one body: its requests, then events, or one object with all results."""

    ends_with_done = True

    def __init__(self, edge: Edge, body: CompletionBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._body = edge, body
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": edge.model_id,
            "system_fingerprint": edge.system_fingerprint,
        }
        stop, speculation = body.stop_strings(edge.service.limits), body.speculation.params()
        sampling = body.sampling_of_prompts()
        edge.service.info.check_sequences(len(body.prompts()), body.n)
        self._prompts: list[str | tuple[int, ...]] = []
        self._encoded: dict[str, tuple[int, ...]] = {}
        """Tokens of each prompt that was given as text, if they are shown."""
        ends: tuple[int, ...] = ()
        info = edge.service.info
        for prompt in body.prompts():
            if body.suffix:
                filled, ends = filling(info.tokenizer, prompt, body.suffix, info.max_model_len)
                self._prompts.append(filled)
                continue
            if isinstance(prompt, str) and not body.add_special_tokens:
                prompt = info.tokenize(prompt, special=False)
            prompt = body.cut(info.tokenizer, prompt, info.max_model_len, special=body.add_special_tokens)
            if isinstance(prompt, str) and body.shows_tokens:
                self._encoded[prompt] = info.tokenize(prompt)
            self._prompts.append(prompt)
        if ends:
            sampling = sampling.model_copy(update={"stop_token_ids": (*sampling.stop_token_ids, *ends)})
        num = len(self._prompts) * body.n
        self.requests = [
            Request(
                request_id if num == 1 else f"{request_id}-{i}",
                self._ids_of(self._prompts[i // body.n]),
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
        """Records a chunk or the result of choice ``i``; yields its events."""
        choice = self._choices[i]
        if isinstance(item, Chunk) and item.prompt_logprobs is not None:
            self._totals.note(i, item)
            choice.scores += item.prompt_logprobs.tokens
            return
        if isinstance(item, Chunk) and item.last:
            choice.last = item
            return
        if isinstance(item, Chunk):
            text, logprobs, extra = self._take_chunk(i, item)
            if text or extra or logprobs:
                yield self._event(self._choice(i, text, logprobs=logprobs, extra=extra))
            return
        text, logprobs, extra = self._take_chunk(i, choice.last)
        self._totals.note(i, item)
        choice.result = item
        yield self._event(self._choice(i, text, logprobs=logprobs, result=item, extra=extra))

    def _take_chunk(self, i: int, chunk: Chunk | None) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
        """Records a chunk with tokens; returns the text, log probabilities and further fields of its event.

        None: there is no token.
        """
        choice, text = self._choices[i], ""
        extra: dict[str, Any] = {}
        if i not in self._begun:
            self._begun.add(i)
            text = self._echo(i) if self._body.echo else ""
            extra = {"prompt_token_ids": list(self._prompt_ids(i))} if self._body.return_token_ids else {}
        if chunk is not None:
            self._totals.note(i, chunk)
            text += chunk.text
            choice.token_ids += chunk.token_ids
            if self._body.return_token_ids:
                extra["token_ids"] = list(chunk.token_ids)
            options = self._body.stream_options
            if options is not None and options.include_speculation:
                extra["speculation"] = round_of(chunk)
            self._take_logprobs(i, chunk)
        choice.text.append(text)
        columns = self._columns(i)
        return text, None if columns is None else columns.take(), extra

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the last events of a stream."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            yield {**self._head, "choices": [], "usage": self._totals.counts(), **self._metrics()}

    def failure(self, status: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the last event of a stream that fails."""
        yield body

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for i, choice in enumerate(self._choices):
            extra: dict[str, Any] = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
            if self._body.return_token_ids:
                extra |= {"token_ids": choice.token_ids, "prompt_token_ids": list(self._prompt_ids(i))}
            if self._body.prompt_logprobs is not None:
                extra["prompt_logprobs"] = prompt_entries(choice.scores, self._prompt_ids(i), self._tokenizer)
            columns = self._columns(i)
            logprobs = None if columns is None else columns.whole()
            choices.append(self._choice(i, "".join(choice.text), logprobs=logprobs, result=choice.result, extra=extra))
        return {**self._head, "choices": choices, "usage": self._totals.counts(), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self.requests, [choice.result for choice in self._choices])

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            event["usage"] = self._totals.counts() if options.continuous_usage_stats else None
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
        choice |= extra or {}
        if result is not None:
            end = {"finish_reason": result.finish_reason.value, "stop_reason": result.matched_stop}
            ended(choice, {**end, "speculation": speculation_of(result)})
        return choice

    def _columns(self, i: int) -> TokenColumns | None:
        """The log probabilities of a choice so far; None if they are not shown."""
        choice = self._choices[i]
        if choice.columns is None and self._body.logprobs is not None:
            choice.columns = TokenColumns(self._tokenizer, as_ids=self._body.return_tokens_as_token_ids)
            choice.detokenizer = self._tokenizer.detokenizer(
                self._prompt_ids(i), special=not self._body.skip_special_tokens
            )
        return choice.columns

    def _take_logprobs(self, i: int, chunk: Chunk) -> None:
        """Adds the log probabilities of a chunk, if they are shown."""
        columns = self._columns(i)
        if columns is None:
            return
        choice, tops = self._choices[i], chunk.top_logprobs or ((),) * len(chunk.token_ids)
        text = choice.detokenizer
        assert text is not None
        for token_id, logprob, top in zip(chunk.token_ids, chunk.logprobs, tops, strict=True):
            columns.add(token_id, logprob, top, choice.num_echoed + text.place(token_id), text)
            text.add(token_id)

    def _echo(self, i: int) -> str:
        """The text of a choice's prompt; its tokens come first among the log probabilities, if these are shown."""
        choice, columns, prompt = self._choices[i], self._columns(i), self._prompts[i // self._body.n]
        if columns is None:
            return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, special=True)
        token_ids = self._prompt_ids(i)
        text, offsets = echoed(self._tokenizer, prompt, token_ids)
        choice.num_echoed = len(text)
        for token_id, score, offset in zip(token_ids, choice.scores, offsets, strict=True):
            if score is None:
                columns.add(token_id, None, (), offset)
            else:
                columns.add(token_id, score.logprob, score.top[: self._body.logprobs], offset)
        return text

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._edge.service.info.tokenizer

    def _prompt_ids(self, i: int) -> Sequence[int]:
        """The tokens of a choice's prompt."""
        ids = self._ids_of(self._prompts[i // self._body.n])
        assert not isinstance(ids, str), "they are shown"
        return ids

    def _ids_of(self, prompt: str | tuple[int, ...]) -> str | tuple[int, ...]:
        return self._encoded.get(prompt, prompt) if isinstance(prompt, str) else prompt
