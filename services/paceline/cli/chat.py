"""``paceline chat``: a chat in the terminal, with engines on this machine or with a running service over HTTP.

Accepted draft tokens are green. Ctrl-C ends an answer, Ctrl-D the chat; ``/clear`` forgets what was said.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.cli.exit import EXIT_DONE
from paceline.cli.flags import (
    add_model_argument,
    add_sampling_flags,
    add_speculation_flags,
    given,
    take_model_argument,
)
from paceline.cli.generate import add_engine_flags, local_config
from paceline.cli.remote import CONNECT_S, HttpService, add_remote_flags, not_http, service_of
from paceline.config import SMALL_CHAT_MODEL
from paceline.errors import ConfigError, EngineError, InvalidRequestError, PacelineError
from paceline.types import Mode, SamplingParams, SpeculationParams

Messages = Sequence[Mapping[str, str]]
Answer = Callable[[Messages], Iterator[tuple[str, bool]]]
"""Yields pieces of an answer: text, and whether it was drafted."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline chat``."""
    parser.description = (
        "Chat in the terminal. Ctrl-C ends an answer, Ctrl-D the chat; /clear forgets the conversation."
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system's message")
    add_engine_flags(parser, "run both engines on this machine (the default)", target=SMALL_CHAT_MODEL)
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template (default: the target's)")
    add_remote_flags(parser)
    add_sampling_flags(parser)
    add_speculation_flags(parser)
    parser.set_defaults(run=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Runs ``paceline chat``."""
    take_model_argument(args)
    if args.target is None and args.chat_template is None and args.address is None:
        args.target = SMALL_CHAT_MODEL  # the embedded model has no template
    service, options = service_of(args), (given(args, SamplingParams), given(args, SpeculationParams))
    with _local(args, *options) if service is None else _remote(service, args.stop, *options) as answer:
        converse(answer, args.system)
    return EXIT_DONE


def converse(answer: Answer, system: str | None = None) -> None:
    """Reads lines and writes answers until the input ends."""
    console = Console(highlight=False)
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    while (line := _line()) is not None:
        if line == "/clear":
            messages = list(first)
        if not line or line == "/clear":
            continue
        messages.append({"role": "user", "content": line})
        said: list[str] = []
        try:
            for text, drafted in answer(messages):
                said.append(text)
                console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
        except KeyboardInterrupt:
            pass  # what has come is the answer
        except InvalidRequestError as error:
            console.print(Text(str(error), style="red"), end="", soft_wrap=True)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": "".join(said)})
        console.print()


def _line() -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


@contextlib.contextmanager
def _local(args: argparse.Namespace, sampling: dict[str, Any], speculation: dict[str, Any]) -> Iterator[Answer]:
    from paceline.checkpoint.chat import load_chat
    from paceline.cli.startup import starting
    from paceline.local import LocalPipeline

    params = SamplingParams(**sampling), SpeculationParams(**speculation)
    config = local_config(args, with_draft=params[1].mode is not Mode.PLAIN)
    chat = load_chat(config.target.path, args.chat_template, config.target.trust_remote_code)
    if chat is None:
        raise ConfigError("the target has no chat template: name one by --chat-template FILE, or use paceline generate")
    pipeline = LocalPipeline(config)
    with starting(pipeline, verbose=args.verbose):

        def answer(messages: Messages) -> Iterator[tuple[str, bool]]:
            token_ids = chat.encode(chat.render(messages, None, {"add_generation_prompt": True}))
            filling = params[0].with_defaults(SamplingParams(max_tokens=pipeline.max_model_len))
            generation = pipeline.generate(token_ids, filling, params[1], args.stop or ())
            try:
                for chunk in generation:
                    yield from chunk.segments
            finally:
                generation.cancel()

        yield answer


@contextlib.contextmanager
def _remote(
    service: HttpService, stop: Sequence[str] | None, sampling: dict[str, Any], speculation: dict[str, Any]
) -> Iterator[Answer]:
    options = {
        **json.loads(SamplingParams(**sampling).model_dump_json(exclude_unset=True)),
        "speculation": json.loads(SpeculationParams(**speculation).model_dump_json(exclude_unset=True)),
        "stop": stop or None,
        "stream": True,
        "stream_options": {"include_speculation": True},
    }

    def answer(messages: Messages) -> Iterator[tuple[str, bool]]:
        body = json.dumps({"messages": messages, **options}).encode()
        request = urllib.request.Request(f"{service.url}/v1/chat/completions", body, service.headers)
        try:
            with urllib.request.urlopen(request, timeout=CONNECT_S, context=service.tls) as reply:
                for line in reply:
                    yield from _segments(line)
        except urllib.error.HTTPError as error:
            raise _as_error(error.read(), error.code) from None
        except OSError as error:  # http.client.RemoteDisconnected is one
            raise EngineError(f"{service.url} cannot be reached: {getattr(error, 'reason', error)}") from error
        except http.client.BadStatusLine:
            raise not_http(service) from None

    yield answer


def _segments(line: bytes) -> Iterator[tuple[str, bool]]:
    """Text of one line of a stream. Raises the error that it tells of."""
    data = line.strip().removeprefix(b"data: ")
    if not data or data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise _as_error(data, 503)
    for choice in event["choices"]:
        for segment in choice.get("speculation", {}).get("segments", ()):
            yield segment["text"], segment["drafted"]


def _as_error(body: bytes, status: int) -> PacelineError:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"the service answered with HTTP status {status}"
    return InvalidRequestError(message) if status == 400 else EngineError(message)
