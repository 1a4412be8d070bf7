"""Acceptance and tokens per step of every drafting method that has trained weights for the embedded target.

    python benchmarks/methods.py > benchmarks/results/methods.txt
    python benchmarks/methods.py --method PARD --method lookahead

Each method is served alone, as docs/methods.md configures it, one held-out prompt after another; each text is then
written again by plain decoding of the same engine, and must be the same. In the target and in sequential mode the
tokens of a step depend on no clock; those of the overlapped draft also depend on how fast this machine is. The same
prompts are taken by transformers' own assisted generation and prompt lookup. Tokens per second are given as a ratio to
plain decoding by the same engine, taken in turns with it. Drafts of another vocabulary, and of PARD, are made here of
the embedded draft, as `pool_drafters.py` makes them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import HeadDraftOptions, LocalConfig, ServiceConfig
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.types import Mode, Result, SamplingParams, SpeculationParams
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.prompts import Prompt, held_out_prompts
from pool_drafters import adapted_for_pard, other_vocabulary

MODEL = {"dtype": "float32", "device": "cpu", "compile": False}
CHAINS = (2, 4, 6)
"""Draft tokens of the embedded draft in sequential mode, of which the fastest is its best chain."""
NUM_SHARED = 3000
"""Tokens of the draft of another vocabulary, all of them among the target's 4,096."""


@dataclass(frozen=True)
class Run:
    """One method at one temperature, all prompts together."""

    name: str
    k: int
    steps: int
    tokens: int
    """Without the first of each text, which the prompt's own step brings."""
    drafted: int | None = None
    accepted: int | None = None
    """None: not counted by who serves it."""
    times_plain: float | None = None


def model_of(method: Method, folder: Path, pard_steps: int) -> str | None:
    """The checkpoint that a method reads, of the package or made in ``folder``; None: none is needed, or there."""
    if (kind := method.options.get("method", method.kind)) in HEAD_DIRS:
        return f"paceline/embedded-{kind}"
    if method.options.get("vocabulary") == "shared":
        return other_vocabulary(folder / "other", NUM_SHARED)
    if isinstance(tokens_at_once := method.options.get("parallel_tokens"), int):
        return adapted_for_pard(folder / "pard", tokens_at_once, pard_steps)
    return "paceline/embedded-draft" if method.kind in ("model", "draft_model", "cascade") else None


def measured(folder: Path, names: Sequence[str], pard_steps: int) -> Iterator[tuple[Method, str | None]]:
    """The methods that can be measured, with their checkpoints: those of the package or made here, or without any.

    ``names``: only these; (): all.
    """
    for method in METHODS:
        if method.kind == "plugin" or (names and method.name not in names):
            continue
        model = model_of(method, folder, pard_steps)
        if model is not None or not method.reads:
            yield method, model


def local_config(method: Method, model: str | None, k: int) -> LocalConfig:
    """The configuration of the page for one process, every token asked for and verified. In overlapped mode a head in
    the pool drafts ahead of outcomes."""
    config = ServiceConfig.parse(method.configuration("paceline/embedded-target", model))
    setup, draft_setup = config.target_setup(), config.draft_setup()
    heads = [{**head.model_dump(exclude_unset=True), "num_speculative_tokens": k} for head in setup.options.heads]
    target = MODEL | {"path": setup.source, "adaptive": not method.kind, "heads": heads}
    draft = draft_setup and draft_setup.options
    if draft_setup is not None and draft_setup.source is not None:
        draft = draft_setup.options.model_dump(exclude_unset=True) | MODEL | {"path": draft_setup.source}
    if isinstance(draft, HeadDraftOptions):
        draft = draft.model_copy(update={"dtype": MODEL["dtype"], "device": MODEL["device"], "ahead": True})
    return LocalConfig(target=target, draft=draft, worker="thread")


def in_modes(method: Method, model: str | None) -> Iterator[tuple[Method, str | None]]:
    """A head in the pool in both modes: its states have come in sequential mode, and are late in the other."""
    if method.kind == "head":
        for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED):
            yield replace(method, name=f"{method.name}, {mode.value}", mode=mode), model
    else:
        yield method, model


def timed(
    pipeline: LocalPipeline, prompt: Prompt, sampling: SamplingParams, mode: Mode, k: int
) -> tuple[Result, float]:
    """The result of a request, and the seconds from its first tokens to its last."""
    speculation = SpeculationParams(mode=mode, max_draft_tokens=k)
    generation, times = pipeline.submit(list(prompt.token_ids), sampling, speculation), []
    for _ in generation:
        times.append(time.perf_counter())
    return generation.result, times[-1] - times[0]


def runs(
    method: Method, model: str | None, prompts: Sequence[Prompt], k: int, max_tokens: int, temperature: float
) -> Run:
    """One method at one temperature. Raises AssertionError if a text is not that of plain decoding."""
    steps = tokens = drafted = accepted = 0
    seconds = {Mode.PLAIN: 0.0, method.mode: 0.0}
    with LocalPipeline(local_config(method, model, k)) as pipeline:
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True)
            result, took_s = timed(pipeline, prompt, sampling, method.mode, k)
            plain, plain_s = timed(pipeline, prompt, sampling, Mode.PLAIN, k)
            assert result.token_ids == plain.token_ids, f"{method.name}: another text than plain decoding's"
            seconds[method.mode], seconds[Mode.PLAIN] = seconds[method.mode] + took_s, seconds[Mode.PLAIN] + plain_s
            counted = result.speculation
            steps, tokens = steps + counted.rounds - 1, tokens + len(result.token_ids) - 1
            drafted, accepted = drafted + counted.drafted, accepted + counted.accepted
    return Run(method.name, k, steps, tokens, drafted, accepted, seconds[Mode.PLAIN] / seconds[method.mode])


def transformers_runs(prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> Iterator[Run]:
    """transformers' own methods on the same prompts."""
    with GenerateProcess(str(TARGET_DIR), str(DRAFT_DIR), "float32", None) as process:
        for mode, name in (("assisted", "transformers, assisted"), ("lookup", "transformers, prompt lookup")):
            ids, limits = tuple(p.token_ids for p in prompts), (max_tokens,) * len(prompts)
            replies = process.generate(GenerateRequest(mode, ids, limits, temperature, 0))
            steps = sum(len(reply.rounds) for reply in replies)
            yield Run(name, 0, steps, sum(len(reply.token_ids) for reply in replies))


def row(run: Run) -> tuple[str, ...]:
    """A line of the table."""
    share = f"{run.accepted / run.drafted:.3f}" if run.accepted is not None and run.drafted else "-"
    ratio = f"{run.times_plain:.2f}" if run.times_plain is not None else "-"
    return run.name, str(run.k or "own"), share, f"{run.tokens / run.steps:.3f}", ratio


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=4, help="K of all but the draft's chains")
    parser.add_argument("--pard-steps", type=int, default=400, help="of adapting the embedded draft to PARD")
    names = [method.name for method in METHODS]
    parser.add_argument("--method", action="append", default=[], choices=names, metavar="NAME", help=", ".join(names))
    args = parser.parse_args()
    prompts = held_out_prompts(load_tokenizer(str(TARGET_DIR)), args.prompts)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    command = f"python benchmarks/methods.py --prompts {args.prompts} --max-tokens {args.max_tokens}"
    command += "".join(f" --method '{name}'" for name in args.method)
    print(f"{command}     ({cores} cores with a load of {load:.0f} at the start)")
    with tempfile.TemporaryDirectory() as folder:
        methods = list(measured(Path(folder), args.method, args.pard_steps))
        for temperature in (0.0, 1.0):
            found = [Run("plain", 0, 1, 1, times_plain=1.0)]
            for method, model in [each for entry in methods for each in in_modes(*entry)]:
                chain = method.place is Place.POOL and method.mode is Mode.SEQUENTIAL and method.kind == "model"
                for k in CHAINS if chain else (args.draft_tokens,):
                    found.append(runs(method, model, prompts, k, args.max_tokens, temperature))
            if not args.method:
                found += transformers_runs(prompts, args.max_tokens, temperature)
            header = (f"temperature {temperature:g}", "K", "accepted/drafted", "tokens/step", "tokens/s / plain")
            print("", *table([header, *map(row, found)]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
