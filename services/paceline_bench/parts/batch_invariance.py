"""Worth and cost of the batch-invariant shapes, on the embedded target or another model with its tokens.

Verifies held-out Python in chunks of several sizes with the shapes that the model is given, and with each rule of
``paceline.model.shapes`` on and off, against decoding one token at a time, and counts rows whose bits or whose argmax
differ. Then times a decoding step with and without the rules, interleaved.

    paceline bench parts batch-invariance [--model PATH] [--dtype bfloat16] [--tokens 768] [--no-compile]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoTokenizer

from paceline.checkpoint.files import Checkpoint
from paceline.embedded import TARGET_DIR
from paceline.model.loading import load_pretrained, prepare
from paceline.model.runner import ModelRunner
from paceline.model.shapes import Shapes
from paceline.model.step_plan import SequenceStep
from paceline.types import pages_for
from paceline_bench.prompts import held_out_texts

CHUNKS = (2, 3, 5, 6, 9, 13, 17)
WITHOUT: dict[str, dict[str, Any]] = {
    "any number of tokens": {"least_tokens": 1, "few_sizes": False},
    "any query row length": {"query_multiple": 1},
    "any multiple of 64 keys": {"key_pages": False},
}


def shapes_of(runner: ModelRunner) -> dict[str, Shapes]:
    """By name: the model's own, those with all rules, without each one, and without any."""
    every = Shapes(spare_tokens=runner.shapes.spare_tokens)
    none = {name: value for rule in WITHOUT.values() for name, value in rule.items()}
    without = {name: replace(every, **rule) for name, rule in WITHOUT.items()}
    return {"as it is run": runner.shapes, "all rules": every, **without, "no rule": replace(every, **none)}


def logits_of(runner: ModelRunner, tokens: list[int], pages: list[int], chunk: int) -> torch.Tensor:
    """Logits [len(tokens), vocab] with ``chunk`` tokens per step."""
    rows = []
    for start in range(0, len(tokens), chunk):
        span = range(start, min(start + chunk, len(tokens)))
        rows.append(runner.forward([SequenceStep(tokens[span.start : span.stop], span, span, pages, len(span))]))
    return torch.cat(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        "paceline bench parts batch-invariance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=str(TARGET_DIR), help="a checkpoint with the embedded target's tokens")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = prepare(
        load_pretrained(Checkpoint.open(args.model), getattr(torch, args.dtype)), compile=not args.no_compile
    )
    runner = model.runner(pages_for(args.tokens) + 1)
    pages = runner.cache.allocate(pages_for(args.tokens))
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR, trust_remote_code=False)
    tokens = tokenizer("".join(held_out_texts().values())[: 8 * args.tokens]).input_ids[: args.tokens]
    if len(tokens) < args.tokens:
        raise SystemExit(f"--tokens {args.tokens}: the held-out text has {len(tokens)}")

    print(f"{args.dtype}, {'eager' if args.no_compile else 'compiled'}, {len(tokens)} positions, chunks {CHUNKS}")
    print(f"{'shapes':26} {'rows that differ':>18} {'argmax flips':>14} {'largest difference':>20}")
    shapes = shapes_of(runner)
    for name, rules in shapes.items():
        runner.shapes = rules
        reference = logits_of(runner, tokens, pages, 1)
        different = flips = 0
        largest = 0.0
        for chunk in CHUNKS:
            logits = logits_of(runner, tokens, pages, chunk)
            different += int((logits != reference).any(-1).sum())
            flips += int((logits.argmax(-1) != reference.argmax(-1)).sum())
            largest = max(largest, float((logits.float() - reference.float()).abs().max()))
        total = len(CHUNKS) * len(tokens)
        print(f"{name:26} {different:>9} of {total:<6} {flips:>6} ({100 * flips / total:.2f} %) {largest:>12.3g}")

    print("\none decoding step at 200, 260 and 700 tokens of context: least of 200 times, ms, and median")
    for context in (200, 260, 700):
        if context >= len(tokens):
            continue
        step = [SequenceStep(tokens[context : context + 1], [context], [context], pages, 1)]
        times: dict[str, list[float]] = {"all rules": [], "no rule": []}
        for _ in range(200):
            for name, measured in times.items():
                runner.shapes = shapes[name]
                started = time.perf_counter()
                runner.forward(step)
                measured.append(time.perf_counter() - started)
        padded, exact = (f"{1e3 * min(t):.3f} ({1e3 * statistics.median(t):.3f})" for t in times.values())
        print(f"{context:5}: {padded} with the rules, {exact} without")
