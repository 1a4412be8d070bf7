"""Compares the answers to chat prompts, token by token, by speculative and by plain decoding, on a real model.

The reference is plain decoding in this process. Each way answers all prompts at temperature 0 and 1 with the same
seeds, 8 at a time: engines in this process, `paceline serve --local` over HTTP (the service renders the chats) and
gRPC, with trees, chains, suffix and prompt lookup in the target, a draft of suffixes, a head in the draft pool and a
draft model (hardly trained, if none is named: their tokens are verified all the same). Answers that a JSON Schema
binds, and calls of a tool, are compared over HTTP. Log-likelihoods, as lm-eval asks for them, are compared with
transformers' on the same weights in float32. Exit status 1: an answer differs.

    python benchmarks/chat_texts.py [--prompts 200] [--max-tokens 48] [--target smollm2] [--ways pool model HTTP]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from paceline import Client
from paceline.checkpoint.chat import ChatTemplate, load_chat
from paceline.checkpoint.files import Checkpoint
from paceline.cluster.ports import free_ports
from paceline.config import DraftModel, HeadDraftOptions, HeadOptions, LocalConfig, SuffixOptions, TargetModel
from paceline.drafters.training.options import HeadForm, Schedule, TrainingOptions
from paceline.drafters.training.run import train_head
from paceline.local import LocalPipeline
from paceline.model.loading import load_pretrained
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
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up in an encyclopedia.",
        "parameters": {
            "type": "object",
            "properties": {"subject": {"type": "string"}, "language": {"enum": ["en", "fr", "de"]}},
            "required": ["subject", "language"],
        },
    },
}
TEMPERATURES = (0.0, 1.0)
_AT_ONCE = 8
_PATIENT = {"target_timeout_s": 600.0, "draft_timeout_s": 600.0}
"""No speed is measured: it may run beside other work, with a low priority."""

VERIFIED: Counter[str] = Counter()
"""Tokens of the way that answers now."""

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
                result = pipeline.generate(ids, sampling(i, temperature, args), SpeculationParams(mode=mode)).result
                VERIFIED["drafted"] += result.speculation.drafted
                VERIFIED["accepted"] += result.speculation.accepted
                return result.token_ids

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


def made(kind: str, folder: Path, target: str) -> str:
    """A head or a draft model of the target that was hardly trained, for few of its tokens."""
    options = TrainingOptions(
        HeadForm(kind, draft_vocab_size=8192),  # type: ignore[arg-type]
        target,
        [Path(__file__).parents[1] / "docs"],
        folder / kind,
        Schedule(1),
        num_tokens=4096,
        temperatures=(),
        held_out_rows=2,
    )
    train_head(options, lambda *told: None)
    return str(folder / kind)


def likelihoods(port: int, args: argparse.Namespace, found: dict[tuple[int, float], Answer], chat: ChatTemplate) -> str:
    """Log-likelihoods of greedy answers given their prompts, as lm-eval asks for them, and transformers', in words."""
    model = load_pretrained(Checkpoint.open(args.target), torch.float32).eval()
    texts = [(encoded(chat, i), answer) for (i, temperature), answer in found.items() if not temperature]
    most = whole = largest = 0.0
    num_tokens = greedy = 0
    for prompt, answer in texts:
        ids = [*prompt, *answer]
        body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
        url, kind = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), kind)) as reply:
            columns = json.load(reply)["choices"][0]["logprobs"]
        ours = torch.tensor(columns["token_logprobs"][len(prompt) : len(ids)])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        most = max(most, float((ours - theirs).abs().max()))
        whole = max(whole, float((ours - theirs).sum().abs()))
        largest = max(largest, float(theirs.sum().abs()))
        tops = columns["top_logprobs"][len(prompt) : len(ids)]
        greedy += sum(one == max(top.values()) for one, top in zip(ours.tolist(), tops, strict=True))
        num_tokens += len(answer)
    return (
        f"HTTP, log-likelihoods of {len(texts)} greedy answers: at most {most:.4f} nats a token and {whole:.3f} a text "
        f"from transformers' in float32 (texts of up to {largest:.0f}); {greedy} of {num_tokens} tokens are likeliest"
    )


def main() -> int:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"default and at most {len(PROMPTS)}")
    parser.add_argument("--forms", type=int, default=20, help="prompts whose answers a schema binds (default 20)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", metavar="DIR", help="MTP head of the target for the draft pool")
    parser.add_argument("--draft", metavar="DIR", help="draft model of the target, with a vocabulary of its own or not")
    ways = ("target", "suffixes", "pool", "model", "HTTP")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help=f"default {' '.join(ways)}")
    args = parser.parse_args()
    chat = load_chat(args.target)
    assert chat is not None
    prompts = range(min(args.prompts, len(PROMPTS)))
    reference: dict[tuple[int, float], Answer] = {}
    differing = 0

    def report(name: str, ask: Ask, wanted: dict[tuple[int, float], Answer] = reference) -> None:
        nonlocal differing
        VERIFIED.clear()
        found = answers(ask, sorted({i for i, _ in wanted}))
        wrong = [key for key in wanted if found[key] != wanted[key]]
        differing += len(wrong)
        tokens = sum(map(len, found.values()))
        first = f"; the first: {wrong[0]}" if wrong else ""
        if VERIFIED["drafted"]:
            first = f", {VERIFIED['accepted']} of {VERIFIED['drafted']} drafted ones accepted{first}"
        print(
            f"{name}: {len(found) - len(wrong)} of {len(found)} answers equal, {tokens} tokens{first}",
            flush=True,
        )

    suffix = [HeadOptions(method="suffix")]
    with local(args, chat, heads=suffix) as asking:
        reference |= answers(asking(Mode.PLAIN), prompts)
        if "target" in args.ways:
            report("local, plain, again", asking(Mode.PLAIN))
            report("local, suffix and prompt lookup in the target, trees", asking(Mode.OVERLAPPED))
    if "target" in args.ways:
        with local(args, chat, heads=suffix, tree_verification="off") as asking:
            report("local, suffix and prompt lookup in the target, chains", asking(Mode.OVERLAPPED))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        drafts: dict[str, Callable[[], Any]] = {
            "suffixes": SuffixOptions,
            "pool": lambda: HeadDraftOptions(
                method="mtp", model=args.head or made("mtp", folder, args.target), ahead=True
            ),
            "model": lambda: DraftModel(
                path=args.draft or made("draft_model", folder, args.target), vocabulary="shared", compile=True
            ),
        }
        names = {"suffixes": "a draft of suffixes", "pool": "an MTP head in the pool", "model": "a draft model"}
        for way in [way for way in drafts if way in args.ways]:
            with local(args, chat, draft=drafts[way](), adaptive=False) as asking:
                report(f"local, {names[way]}, overlapped", asking(Mode.OVERLAPPED))
                report(f"local, {names[way]}, sequential", asking(Mode.SEQUENTIAL))
    if "HTTP" not in args.ways:
        return 1 if differing else 0
    with served(args) as (http_port, grpc_port), Client(f"127.0.0.1:{grpc_port}") as client:
        report("HTTP, chats rendered by the service", over_http(http_port, args))

        def ask(i: int, temperature: float) -> Answer:
            return client.generate(encoded(chat, i), sampling(i, temperature, args)).result.token_ids

        report("gRPC", ask)
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}}
        plainly = {**form, "speculation": {"enabled": False}}
        bound = answers(over_http(http_port, args, plainly), range(min(args.forms, len(prompts))))
        report("HTTP, bound by a JSON Schema, to plain decoding over HTTP", over_http(http_port, args, form), bound)
        if chat.calls_tools:
            call = {"tools": [TOOL], "tool_choice": "required"}
            plainly = {**call, "speculation": {"enabled": False}}
            bound = answers(over_http(http_port, args, plainly), range(min(args.forms, len(prompts))))
            report("HTTP, calls of a tool, to plain decoding over HTTP", over_http(http_port, args, call), bound)
        else:
            print("HTTP, calls of a tool: none, the chat template has no tools", flush=True)
        print(likelihoods(http_port, args, reference, chat), flush=True)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
