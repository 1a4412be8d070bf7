"""Acceptance, tokens per step and tokens per second of every drafting method, on the embedded target.

    python benchmarks/train_heads.py heads
    python benchmarks/methods.py --heads heads > benchmarks/results/methods.txt
    python benchmarks/methods.py --method PARD --method lookahead

Each method is served alone, as docs/methods.md configures it, one request at a time, by engines in processes of their
own; each text must be that of plain decoding. Methods take turns: all of a group, and plain decoding by a target that
has no drafter, answer one prompt before the next, so that a busy moment of the machine hits all alike. Beside them are
transformers' own methods, in processes of one thread. Heads that the package does not ship are those of
`train_heads.py`; drafts of another vocabulary, and of PARD, are made here of the embedded draft, as `pool_drafters.py`
makes them; the plugin is the example of docs/own-drafters.md.

In the target and in sequential mode the tokens of a step depend on no clock; those of an overlapped draft depend on how
fast this machine is as well. +- is one standard error over the prompts. The first token of each text, which the
prompt's own step brings, is not counted.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import HeadDraftOptions, LocalConfig, ServiceConfig
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.errors import EngineError
from paceline.local import LocalPipeline
from paceline.runtime.workers import available_cores
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.prompts import Prompt, held_out_prompts
from pool_drafters import adapted_for_pard, other_vocabulary

MODEL = {"dtype": "float32", "device": "cpu", "compile": False}
CHAINS = (2, 4, 6)
"""Draft tokens of the embedded draft in sequential mode, of which the fastest is its best chain."""
NUM_SHARED = 3000
"""Tokens of the draft of another vocabulary, all of them among the target's 4,096."""
THEIRS = {
    "transformers": "transformers, plain",
    "assisted": "transformers, assisted",
    "universal": "transformers, another vocabulary",
    "lookup": "transformers, prompt lookup",
    "early_exit": "transformers, early exit",
    "mtp": "transformers, MTP",
}
"""Mode of transformers -> its row."""
OWN_DRAFTERS = Path(__file__).parents[1] / "docs" / "own-drafters.md"

Worker = Literal["process", "thread"]


@dataclass(frozen=True)
class Answer:
    """One text, without the first step and what it brought."""

    token_ids: Sequence[int]
    """All of the text."""
    steps: int
    tokens: int
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    """None: not counted by who serves it."""


Ask = Callable[[Prompt, SamplingParams], Answer]


@dataclass
class Row:
    """One method at one K, and its answers by temperature."""

    name: str
    k: int
    """0: it has none, or one of its own."""
    ask: Ask
    lossless: bool = True
    """Its texts must be those of plain decoding, and it must not fail."""
    answers: dict[float, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[float, str] = field(default_factory=dict)
    """Temperature -> why it has no answers there."""
    plain: dict[float, list[Answer]] = field(default_factory=dict)
    """Plain decoding of the same prompts, in turns with it."""


Open = Callable[[ExitStack], list[Row]]
"""Opens what answers some rows; the stack closes it."""


def total(answers: Sequence[Answer], name: str) -> float:
    """Sum of one of the answers' numbers."""
    return sum(getattr(answer, name) or 0 for answer in answers)


def quotient(answers: Sequence[Answer], above: str, below: str) -> str:
    """Sum of one number over the sum of another, and its standard error over the answers."""
    over = total(answers, below)
    value, n = total(answers, above) / over, len(answers)
    if n == 1:
        return f"{value:.3f}"
    squares = sum(((getattr(a, above) or 0) - value * (getattr(a, below) or 0)) ** 2 for a in answers)
    return f"{value:.3f} +- {math.sqrt(n / (n - 1) * squares) / over:.3f}"


# ------------------------------------------------------------------------------------------------ who answers


def install_example(folder: Path) -> None:
    """The package of docs/own-drafters.md, installed for this process and those that it starts."""
    page = OWN_DRAFTERS.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r"^bigrams = \"(.*)\"$", page, re.MULTILINE)
    info = folder / "my_drafters-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "my_drafters.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-drafters\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[paceline.drafters]\nbigrams = {entry}\n", encoding="utf-8")
    sys.path.insert(0, str(folder))


def model_of(method: Method, heads: Path | None, folder: Path, pard_steps: int) -> str | None:
    """The checkpoint that a method reads: of the package, trained, or made in ``folder``; None: none is there."""
    kind = str(method.options.get("method", method.kind))
    if kind in HEAD_DIRS:
        return f"paceline/embedded-{kind}"
    if method.options.get("vocabulary") == "shared":
        return other_vocabulary(folder / "other", NUM_SHARED)
    if isinstance(tokens_at_once := method.options.get("parallel_tokens"), int):
        return adapted_for_pard(folder / "pard", tokens_at_once, pard_steps)
    if kind in ("model", "draft_model", "cascade"):
        return "paceline/embedded-draft"
    if heads is None or not method.reads or kind == "gemma4_assistant":  # that one drafts for a Gemma 4 alone
        return None
    if not (heads / kind / "report.json").is_file():
        raise SystemExit(f"--heads is {heads}: it holds no trained {kind}, which benchmarks/train_heads.py makes")
    return str((heads / kind).resolve())


def local_config(method: Method, model: str | None, k: int, worker: Worker) -> LocalConfig:
    """The configuration of the page on this machine, every token asked for and verified, and heads as they are, however
    little they were trained. In overlapped mode a head in the pool drafts ahead of outcomes."""
    config = ServiceConfig.parse(method.configuration("paceline/embedded-target", model))
    setup, draft_setup = config.target_setup(), config.draft_setup()
    given = {"num_speculative_tokens": k, "probe": False}
    heads = [head.model_dump(exclude_unset=True) | given for head in setup.options.heads]
    target = MODEL | {"path": setup.source, "adaptive": not method.kind, "heads": heads}
    draft = draft_setup and draft_setup.options
    if draft_setup is not None and draft_setup.source is not None:
        draft = draft_setup.options.model_dump(exclude_unset=True) | MODEL | {"path": draft_setup.source}
    if isinstance(draft, HeadDraftOptions):
        draft = draft.model_copy(update={"dtype": MODEL["dtype"], "device": MODEL["device"], "ahead": True})
    return LocalConfig(target=target, draft=draft, worker=worker)


def asked(pipeline: LocalPipeline, mode: Mode, k: int) -> Ask:
    """Asks a pipeline, and takes the time from the first tokens to the last."""

    def ask(prompt: Prompt, sampling: SamplingParams) -> Answer:
        generation = pipeline.submit(list(prompt.token_ids), sampling, SpeculationParams(mode=mode, max_draft_tokens=k))
        times = [time.perf_counter() for _ in generation]
        result, seconds = generation.result, times[-1] - times[0]
        counted = result.speculation
        tokens = len(result.token_ids) - 1
        return Answer(result.token_ids, counted.rounds - 1, tokens, seconds, counted.drafted, counted.accepted)

    return ask


def ours(method: Method, model: str | None, k: int, worker: Worker) -> Open:
    """The rows of one method: the draft's chains, and a head in the pool in both modes, since its states have come in
    sequential mode and are late in the other."""
    chain = method.place is Place.POOL and method.mode is Mode.SEQUENTIAL and method.kind == "model"
    modes = (Mode.SEQUENTIAL, Mode.OVERLAPPED) if method.kind == "head" else (method.mode,)

    def rows(stack: ExitStack) -> list[Row]:
        pipeline = stack.enter_context(LocalPipeline(local_config(method, model, k, worker)))
        return [
            Row(f"{method.name}, {mode.value}" if len(modes) > 1 else method.name, n, asked(pipeline, mode, n))
            for mode in modes
            for n in (CHAINS if chain else (k,))
        ]

    return rows


def theirs(mode: str, draft: str) -> Open:
    """The row of one of transformers' modes. What it cannot do ends its process, and the next request has a new one."""

    def rows(stack: ExitStack) -> list[Row]:
        processes: list[GenerateProcess] = []

        def ask(prompt: Prompt, sampling: SamplingParams) -> Answer:
            if not processes:
                core = next(iter(available_cores()), None)
                process = GenerateProcess(str(TARGET_DIR), draft, "float32", core)
                processes.append(stack.enter_context(process))
            wanted = (sampling.max_tokens or 0,)
            request = GenerateRequest(
                mode, (prompt.token_ids,), wanted, sampling.temperature or 0.0, sampling.seed or 0
            )
            try:
                (reply,) = processes[0].generate(request)
            except EngineError:
                processes.clear()
                raise
            first, *rest = reply.rounds
            return Answer(reply.token_ids, len(rest), len(reply.token_ids) - first.tokens, reply.decode_s)

        return [Row(THEIRS[mode], 0, ask, lossless=False)]

    return rows


# ------------------------------------------------------------------------------------------------ taking turns


def asks(row: Row, prompt: Prompt, sampling: SamplingParams) -> Answer | None:
    """A row's answer. None: it has failed at this temperature, now or before, and is one that may."""
    temperature = sampling.temperature or 0.0
    if temperature in row.failures:
        return None
    try:
        return row.ask(prompt, sampling)
    except EngineError as error:
        if row.lossless:
            raise
        row.failures[temperature] = str(error)
        return None


def take_turns(rows: Sequence[Row], prompts: Sequence[Prompt], max_tokens: int, temperature: float) -> None:
    """Every row answers every prompt, each prompt first by the next row; the first row is plain decoding.

    Raises AssertionError if a text is not that of plain decoding.
    """
    for row in rows:  # what only a first request costs is in no figure
        asks(row, prompts[0], SamplingParams(temperature=temperature, max_tokens=4, seed=0, ignore_eos=True))
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True)
        first = i % len(rows)
        for row in (*rows[first:], *rows[:first]):
            if (answer := asks(row, prompt, sampling)) is not None:
                row.answers[temperature].append(answer)
        text = rows[0].answers[temperature][i].token_ids
        for row in rows:
            if row.lossless:
                assert row.answers[temperature][i].token_ids == text, f"{row.name}: another text than plain decoding's"
    for row in rows:
        row.plain[temperature] = rows[0].answers[temperature]


def measure(
    openers: Sequence[Open], prompts: Sequence[Prompt], max_tokens: int, temperatures: Sequence[float], worker: Worker
) -> list[Row]:
    """Plain decoding and the rows of these methods, all in turns with each other.

    Raises AssertionError if a text is not that of plain decoding.
    """
    with ExitStack() as stack:
        config = LocalConfig(target=MODEL | {"path": str(TARGET_DIR)}, draft=None, worker=worker)
        pipeline = stack.enter_context(LocalPipeline(config))
        plain = Row("plain", 0, asked(pipeline, Mode.PLAIN, 1))
        rows = [plain, *(row for opener in openers for row in opener(stack))]
        for temperature in temperatures:
            take_turns(rows, prompts, max_tokens, temperature)
        return rows


# ------------------------------------------------------------------------------------------------ the table


def line(row: Row, temperature: float) -> tuple[str, ...]:
    """A line of the table."""
    answers, k = row.answers[temperature], str(row.k or "own")
    if temperature in row.failures:
        return row.name, k, *"----"
    share = quotient(answers, "accepted", "drafted") if total(answers, "drafted") else "-"
    speed = total(answers, "tokens") / total(answers, "seconds")
    plain = row.plain.get(temperature, answers)
    times = f"{speed * total(plain, 'seconds') / total(plain, 'tokens'):.2f}"
    return row.name, k, share, quotient(answers, "tokens", "steps"), f"{speed:.1f}", times


def tables(rows: Sequence[Row], temperatures: Sequence[float]) -> Iterator[str]:
    """The lines of a table for each temperature. Plain decoding, which every group has, is one row."""
    plain = [row for row in rows if row.name == "plain"]
    first = Row("plain", 0, plain[0].ask)
    shown = [first, *(row for row in rows if row.name != "plain")]
    for temperature in temperatures:
        first.answers[temperature] = [answer for row in plain for answer in row.answers[temperature]]
        header = f"temperature {temperature:g}", "K", "accepted/drafted", "tokens/step", "tokens/s", "/ plain"
        yield from ("", *table([header, *(line(row, temperature) for row in shown)]))
        for row in shown:
            if temperature in row.failures:
                yield f"{row.name}: {row.failures[temperature]}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--draft-tokens", type=int, default=4, help="K of all but the draft's chains")
    parser.add_argument("--pard-steps", type=int, default=400, help="of adapting the embedded draft to PARD")
    parser.add_argument(
        "--heads", type=Path, metavar="FOLDER", help="of train_heads.py; without, such rows are left out"
    )
    parser.add_argument("--at-once", type=int, default=6, help="methods of a group, whose engines run at once")
    parser.add_argument(
        "--worker",
        choices=("process", "thread"),
        default="process",
        help="of an engine; thread: its start is cheap, its speed says nothing",
    )
    names = [method.name for method in METHODS]
    parser.add_argument("--method", action="append", default=[], choices=names, metavar="NAME", help=", ".join(names))
    args = parser.parse_args()
    prompts, temperatures = held_out_prompts(load_tokenizer(str(TARGET_DIR)), args.prompts), (0.0, 1.0)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    command = f"python benchmarks/methods.py --prompts {args.prompts} --max-tokens {args.max_tokens}"
    command += "" if args.heads is None else f" --heads {args.heads.name}"
    command += " --worker thread" * (args.worker == "thread")
    command += "".join(f" --method '{name}'" for name in args.method)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install_example(folder / "plugin")
        openers: list[Open] = []
        for method in METHODS:
            if not args.method or method.name in args.method:
                model = model_of(method, args.heads, folder, args.pard_steps)
                if model is not None or not method.reads:
                    openers.append(ours(method, model, args.draft_tokens, args.worker))
        if not args.method:
            other = folder / "other"
            openers += [theirs(mode, str(other if mode == "universal" else DRAFT_DIR)) for mode in THEIRS]
        rows: list[Row] = []
        for start in range(0, len(openers), args.at_once):
            group = measure(openers[start : start + args.at_once], prompts, args.max_tokens, temperatures, args.worker)
            rows += group
            print(*tables(group, temperatures), sep="\n", file=sys.stderr, flush=True)
    print(f"{command}     ({cores} cores with a load of {load:.0f} at the start)")
    print(*tables(rows, temperatures), sep="\n")


if __name__ == "__main__":
    main()
