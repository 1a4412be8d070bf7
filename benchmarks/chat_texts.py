"""Compares the answers to chat prompts, token by token, by speculative and by plain decoding, on a real model.

The reference is plain decoding in this process. Each way answers all prompts at temperature 0 and 1 with the same
seeds, 8 at a time: engines in this process, `paceline serve --local` over HTTP (the service renders the chats) and
gRPC, with trees, chains, suffix and prompt lookup in the target, and a draft of suffixes. Answers that a JSON Schema
binds are compared over HTTP. Exit status 1: an answer differs.

    python benchmarks/chat_texts.py [--prompts 200] [--max-tokens 48] [--target smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline import Client
from paceline.checkpoint.chat import ChatTemplate, load_chat
from paceline.cluster.ports import free_ports
from paceline.config import HeadOptions, LocalConfig, SuffixOptions, TargetModel
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

TASKS = (
    "What is {}?",
    "Explain {} to a child in three sentences.",
    "Write a short poem about {}.",
    "List five facts about {}.",
    "Write a Python function that has to do with {}.",
    "Summarize what you know about {} in one paragraph, then repeat the paragraph.",
    "Write a dialogue between two friends about {}.",
    "Give step-by-step instructions for someone who wants to learn about {}.",
    "Translate the sentence 'I like {}.' into French and German.",
    "Make a Markdown table with three columns about {}.",
)
SUBJECTS = (
    *("the moon", "sorting algorithms", "bread", "the French Revolution", "photosynthesis", "chess", "black holes"),
    *("bicycles", "the Python language", "volcanoes", "jazz", "prime numbers", "honey bees", "the Roman Empire"),
    *("electric cars", "recursion", "tea", "dinosaurs", "climate", "databases"),
)
PROMPTS = [task.format(subject) for subject in SUBJECTS for task in TASKS]
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "facts": {"type": "array", "items": {"type": "string"}, "maxItems": 3}},
    "required": ["title", "facts"],
    "additionalProperties": False,
}
TEMPERATURES = (0.0, 1.0)
_AT_ONCE = 8
_PATIENT = {"target_timeout_s": 600.0, "draft_timeout_s": 600.0}
"""No speed is measured: it may run beside other work, with a low priority."""

Answer = tuple[int, ...]
Ask = Callable[[int, float], Answer]
"""Token ids of the answer to the prompt of an index at a temperature."""


def answers(ask: Ask, prompts: Sequence[int]) -> dict[tuple[int, float], Answer]:
    """The answers to all prompts at all temperatures."""
    asked = [(i, temperature) for temperature in TEMPERATURES for i in prompts]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(asked, pool.map(lambda one: ask(*one), asked), strict=True))


def sampling(i: int, temperature: float, args: argparse.Namespace) -> SamplingParams:
    """How prompt ``i`` is answered."""
    return SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)


@contextlib.contextmanager
def local(args: argparse.Namespace, chat: ChatTemplate, **options: Any) -> Iterator[Callable[[Mode], Ask]]:
    """Engines of this process."""
    draft = options.pop("draft", None)
    target = TargetModel(path=args.target, compile=True, max_sessions=_AT_ONCE, **options)
    with LocalPipeline(LocalConfig(target=target, draft=draft, **_PATIENT)) as pipeline:

        def asking(mode: Mode) -> Ask:
            def ask(i: int, temperature: float) -> Answer:
                ids = encoded(chat, i)
                return pipeline.generate(
                    ids, sampling(i, temperature, args), SpeculationParams(mode=mode)
                ).result.token_ids

            return ask

        yield asking


def encoded(chat: ChatTemplate, i: int) -> tuple[int, ...]:
    """Token ids of the chat of prompt ``i``."""
    messages = [{"role": "user", "content": PROMPTS[i]}]
    return chat.encode(chat.render(messages, None, {"add_generation_prompt": True}))


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """HTTP and gRPC port of ``paceline serve --local``."""
    http_port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", "paceline", "serve", args.target, "--local", "--compile", "--max-num-seqs", "8"]
    command += [part for name, value in _PATIENT.items() for part in ("--set", f"router_config.{name}={value}")]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not any(line.strip() == "ready" for line in process.stdout):
                raise SystemExit("the service has not started")
            yield http_port, grpc_port
        finally:
            process.terminate()


def over_http(port: int, args: argparse.Namespace, more: dict[str, Any] | None = None) -> Ask:
    """Asks by ``/v1/chat/completions``."""

    def ask(i: int, temperature: float) -> Answer:
        body = {"messages": [{"role": "user", "content": PROMPTS[i]}], "return_token_ids": True, "seed": i}
        body |= {"max_tokens": args.max_tokens, "temperature": temperature, **(more or {})}
        url, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as reply:
            return tuple(json.load(reply)["choices"][0]["token_ids"])

    return ask


def main() -> int:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"default and at most {len(PROMPTS)}")
    parser.add_argument("--forms", type=int, default=20, help="prompts whose answers a schema binds (default 20)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--target", default="smollm2")
    args = parser.parse_args()
    chat = load_chat(args.target)
    assert chat is not None
    prompts = range(min(args.prompts, len(PROMPTS)))
    reference: dict[tuple[int, float], Answer] = {}
    differing = 0

    def report(name: str, ask: Ask, wanted: dict[tuple[int, float], Answer] = reference) -> None:
        nonlocal differing
        found = answers(ask, sorted({i for i, _ in wanted}))
        wrong = [key for key in wanted if found[key] != wanted[key]]
        differing += len(wrong)
        tokens = sum(map(len, found.values()))
        first = f"; the first: {wrong[0]}" if wrong else ""
        print(
            f"{name}: {len(found) - len(wrong)} of {len(found)} answers equal, {tokens} tokens{first}",
            flush=True,
        )

    suffix = [HeadOptions(method="suffix")]
    with local(args, chat, heads=suffix) as asking:
        reference |= answers(asking(Mode.PLAIN), prompts)
        report("local, plain, again", asking(Mode.PLAIN))
        report("local, suffix and prompt lookup in the target, trees", asking(Mode.OVERLAPPED))
    with local(args, chat, heads=suffix, tree_verification="off") as asking:
        report("local, suffix and prompt lookup in the target, chains", asking(Mode.OVERLAPPED))
    with local(args, chat, draft=SuffixOptions()) as asking:
        report("local, a draft of suffixes, overlapped", asking(Mode.OVERLAPPED))
        report("local, a draft of suffixes, sequential", asking(Mode.SEQUENTIAL))
    with served(args) as (http_port, grpc_port), Client(f"127.0.0.1:{grpc_port}") as client:
        report("HTTP, chats rendered by the service", over_http(http_port, args))

        def ask(i: int, temperature: float) -> Answer:
            return client.generate(encoded(chat, i), sampling(i, temperature, args)).result.token_ids

        report("gRPC", ask)
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}}
        plainly = {**form, "speculation": {"enabled": False}}
        bound = answers(over_http(http_port, args, plainly), range(min(args.forms, len(prompts))))
        report("HTTP, bound by a JSON Schema, to plain decoding over HTTP", over_http(http_port, args, form), bound)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
