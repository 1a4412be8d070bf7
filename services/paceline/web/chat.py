"""POST /v1/chat/completions: a chat and its answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint.answers import AnswerParser
from paceline.checkpoint.tokenizer import encode_bounded
from paceline.errors import InvalidRequestError
from paceline.types import Chunk, Request, Result, TokenLogprob
from paceline.web.calls import bound_calls
from paceline.web.choices import Totals, ended, metrics_of, round_of, speculation_of, with_defaults, with_seed
from paceline.web.logprobs import prompt_entries, token_logprobs
from paceline.web.messages import ChatBody, Tool, ToolsBody, for_template, offered, variables
from paceline.web.service import Edge
from paceline.web.speech import Part, Speech, ends_of

REASONING_NAMES = ("reasoning_content", "reasoning")
"""The reasoning of a message: as DeepSeek and earlier versions of vLLM call it, and as vLLM does."""


class Asked:
    """A rendered chat: the requests for its answers, and the readers that separate their parts."""

    def __init__(
        self,
        edge: Edge,
        body: ToolsBody,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        request_id: str,
        *,
        logprobs: bool = False,
        options: Mapping[str, Any],
    ) -> None:
        """``options``: of the chat template. Raises InvalidRequestError for a request that can never be served."""
        chat = edge.chat
        if chat is None:
            raise InvalidRequestError(
                f"messages are given, but {edge.model_id!r} has no chat template: use /v1/completions, or start the "
                "service with --chat-template FILE"
            )
        edge.service.info.check_sequences(1, body.n)
        self._chat, self._tokenizer = chat, edge.service.info.tokenizer
        self.tools, choice = offered(tools, body.tool_choice)
        stop, speculation = body.stop_strings(edge.service.limits), body.speculation.params()
        if self.tools and "tools" not in chat.variables_with_tools:
            raise InvalidRequestError(
                f"tools are given, but the chat template of {edge.model_id!r} reads no tools: start the service with "
                "--chat-template FILE, a template that does, or describe them in a message"
            )
        if self.tools and not chat.calls_tools:
            raise InvalidRequestError(
                "tools are given, but no form is known in which this model calls them: start the service with "
                "--tool-call-parser NAME"
            )
        ignored = body.ignored
        messages = for_template(messages, lambda name: chat.reads_field(name, self.tools), ignored)
        options = variables(body.chat_template_kwargs, options, chat.variables, ignored)
        self.prompt = chat.render(messages, self.tools, options)
        info = edge.service.info
        prompt = body.cut(chat.tokenizer, self.prompt, info.max_model_len, special=False)
        if isinstance(prompt, str):
            prompt = encode_bounded(chat.tokenizer, prompt, info.max_model_len, special=False)
        self.token_ids: tuple[int, ...] = prompt
        self._begun = chat.begun(self.prompt, messages, self.tools, options)
        self._fresh = not options.get("continue_final_message")
        self._skips_special = body.skip_special_tokens
        given, is_bound = body.sampling(logprobs), False
        if self.tools or given.structured_output is not None:
            parallel, content = body.parallel_tool_calls, given.structured_output
            in_reasoning = chat.reading(self._tokenizer).parser(None, self._begun, fresh=self._fresh).in_reasoning
            form = bound_calls(chat, self.tools or (), choice, content, parallel=parallel, in_reasoning=in_reasoning)
            if form is not None and form is not content:
                given, is_bound = given.bound(form), True
        self._reading = chat.reading(self._tokenizer, skips_special=self._skips_special, bound=is_bound)
        sampling = with_defaults(given, edge.service.info.max_model_len)
        self._ends = ends_of(sampling, edge.service.info.eos_token_ids)
        self.requests = [
            Request(
                request_id if body.n == 1 else f"{request_id}-{i}",
                self.token_ids,
                with_seed(sampling, i),
                speculation,
                stop,
                cache_salt=body.cache_salt,
            )
            for i in range(body.n)
        ]

    def speech(self) -> Speech:
        """Returns a reader that separates the parts of one answer."""
        ids, skips = self._chat.format.call_ids, self._skips_special
        return Speech(
            self._parser(), self._reading, self._tokenizer, self.token_ids, self._ends, ids, skips_special=skips
        )

    def _parser(self) -> AnswerParser:
        return self._reading.parser(self.tools, self._begun, fresh=self._fresh)


@dataclass(slots=True)
class _Choice:
    """State of one answer: all that it has said so far."""

    speech: Speech
    text: dict[str, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": []})
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    scores: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    """Log probabilities of the prompt, if they were asked for."""
    last: Chunk | None = None
    """Last chunk of the choice; its last event also says why the answer ends."""
    result: Result | None = None


class ChatCompletion:
    """The answer to one body: its requests, then events, or one object with all results."""

    ends_with_done = True

    def __init__(self, edge: Edge, body: ChatBody, request_id: str) -> None:
        """Raises InvalidRequestError for a body that can never be served."""
        self._edge, self._body = edge, body
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": edge.model_id,
            "system_fingerprint": edge.system_fingerprint,
        }
        options: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
        if body.continue_final_message:
            options = {"add_generation_prompt": False, "continue_final_message": True}
        if body.reasoning_effort is not None:
            options["reasoning_effort"] = body.reasoning_effort
        if body.documents:
            options["documents"] = body.documents
        messages = [message.as_template_reads() for message in body.messages]
        self._asked = Asked(edge, body, messages, body.tools, request_id, logprobs=body.logprobs, options=options)
        self.requests = self._asked.requests
        self._totals = Totals(body.n)
        self._choices = [_Choice(self._asked.speech()) for _ in self.requests]
        self._begun: set[int] = set()

    def take(self, i: int, item: Chunk | Result) -> Iterator[dict[str, Any]]:
        """Records a chunk or the result of choice ``i``; yields its events."""
        choice = self._choices[i]
        if isinstance(item, Chunk) and item.prompt_logprobs is not None:
            choice.scores += item.prompt_logprobs.tokens
            return
        if isinstance(item, Chunk) and item.last:
            choice.last = item
            return
        if i not in self._begun:
            self._begun.add(i)
            self._totals.begin(i, item)
            yield self._event(i, {"role": "assistant", "content": ""}) | self._prompt_ids()
            if echoed := self._echoed:
                yield self._event(i, self._delta(choice, Part("content", echoed)))
        if isinstance(item, Chunk):
            yield from self._take_chunk(i, item)
            return
        events = [] if choice.last is None else list(self._take_chunk(i, choice.last))
        self._totals.note(i, item)
        choice.result = item
        events += [self._event(i, self._delta(choice, part)) for part in self._sent(choice.speech.finish())]
        events = events or [self._event(i, {})]
        ended(events[-1]["choices"][0], self._end(choice))
        yield from events

    def _take_chunk(self, i: int, item: Chunk) -> Iterator[dict[str, Any]]:
        """Records a chunk with tokens; yields its events."""
        choice = self._choices[i]
        self._totals.note(i, item)
        extra: dict[str, Any] = {}
        choice.token_ids += item.token_ids
        if self._body.return_token_ids:
            extra["token_ids"] = list(item.token_ids)
        if self._body.logprobs and item.token_ids:
            tokenizer, as_ids = self._edge.service.info.tokenizer, self._body.return_tokens_as_token_ids
            entries = token_logprobs(item, tokenizer, as_ids=as_ids)
            choice.logprobs += entries
            extra["logprobs"] = {"content": entries, "refusal": None}
        options = self._body.stream_options
        if options is not None and options.include_speculation:
            extra["speculation"] = round_of(item)
        for part in self._sent(choice.speech.take(item)):
            yield self._event(i, self._delta(choice, part), extra)
            extra = {}
        if extra:
            yield self._event(i, {}, extra)

    def _usage(self) -> dict[str, Any]:
        """Returns OpenAI's ``usage`` so far; completion tokens include the reasoning."""
        usage = self._totals.counts()
        num = sum(choice.speech.num_reasoning_tokens for choice in self._choices)
        usage["completion_tokens_details"]["reasoning_tokens"] = num
        return usage

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yields the last events of a stream."""
        options = self._body.stream_options
        if options is not None and options.include_usage:
            counts = {"usage": self._usage(), **self._metrics()}
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], **counts}

    def failure(self, status: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the last event of a stream that fails."""
        yield body

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = []
        for i, choice in enumerate(self._choices):
            said = {kind: "".join(text) for kind, text in choice.text.items()}
            message: dict[str, Any] = {"role": "assistant", "content": said["content"], "refusal": None}
            if said["reasoning"]:
                message |= dict.fromkeys(REASONING_NAMES, said["reasoning"])
            if choice.calls:
                message |= {"content": said["content"] or None, **self._calls(choice.calls)}
            logprobs = {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None
            token_ids = choice.token_ids if self._body.return_token_ids else None
            one = {"index": i, "message": message, "logprobs": logprobs, **self._end(choice), "token_ids": token_ids}
            choices.append(one)
        whole = {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        of_prompt: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": None}
        if self._body.prompt_logprobs is not None:
            scores, tokenizer = self._choices[0].scores, self._edge.service.info.tokenizer
            of_prompt["prompt_logprobs"] = prompt_entries(scores, self._asked.token_ids, tokenizer)
        return {**whole, **self._metrics(), **of_prompt, **self._prompt_ids()}

    @property
    def _echoed(self) -> str:
        """The beginning of the answer that the request holds, if the answer is to show it."""
        last = self._body.messages[-1]
        return last.content or "" if self._body.echo and last.role == "assistant" else ""

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the rendered chat."""
        return list(self._asked.token_ids)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_token_ids} if self._body.return_token_ids else {}

    def _calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"function_call": calls[0]["function"]} if self._body.functions else {"tool_calls": calls}

    def _metrics(self) -> dict[str, Any]:
        return metrics_of(self.requests, [choice.result for choice in self._choices])

    def _event(self, i: int, delta: dict[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None, **(extra or {})}
        event = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        options = self._body.stream_options
        if options is not None and options.include_usage:
            event["usage"] = self._usage() if options.continuous_usage_stats else None
        return event

    def _sent(self, parts: Iterable[Part]) -> Iterator[Part]:
        return (part for part in parts if part.kind != "reasoning" or self._body.include_reasoning)

    def _delta(self, choice: _Choice, part: Part) -> dict[str, Any]:
        """The part as a delta; it is also kept for the whole answer."""
        if part.kind == "tool_arguments":
            last = choice.calls[-1]["function"]
            choice.calls[-1] = {**choice.calls[-1], "function": {**last, "arguments": last["arguments"] + part.text}}
            more = {"arguments": part.text}
            if self._body.functions:
                return {"function_call": more}
            return {"tool_calls": [{"index": len(choice.calls) - 1, "function": more}]}
        if part.kind == "tool_call":
            function = {"name": part.name, "arguments": part.text}
            call = {"id": part.call_id, "type": "function", "function": function}
            choice.calls.append(call)
            if self._body.functions:
                return {"function_call": function}
            return {"tool_calls": [{"index": len(choice.calls) - 1, **call}]}
        choice.text[part.kind].append(part.text)
        return {"content": part.text} if part.kind == "content" else dict.fromkeys(REASONING_NAMES, part.text)

    def _end(self, choice: _Choice) -> dict[str, Any]:
        result = choice.result
        assert result is not None
        reason, calls = result.finish_reason.value, choice.calls and not choice.speech.cuts_call
        called = "function_call" if self._body.functions else "tool_calls"
        return {
            "finish_reason": called if calls and reason == "stop" else reason,
            "stop_reason": result.matched_stop,
            "speculation": speculation_of(result),
        }
