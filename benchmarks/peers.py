r"""A chat model beside other engines on the same cores: ours in bfloat16 and in 4 bits, plain and as it is served.

Prompts are chats that the model's template renders. ``as served`` is what ``paceline serve`` does for a model without a
draft: suffixes and prompt lookup, here with as many threads as the others have. In a folder with the same weights in
bfloat16, openvino and vllm read what ours reads; llama.cpp reads the GGUF file, as our 4 bits do. Each group is
compared with its own plain decoding. Methods take turns in an order that rotates; no prompt is cached.

    python benchmarks/peers.py --peer openvino=ov/bin/python --peer vllm=vllm/bin/python \
        --peer llama.cpp=llama/bin/python

``--texts`` adds ``with texts``: as served with the corpus of an id or file, such as that of the small chat model, by
which ``paceline serve smollm2`` drafts.

Exit status 1: an answer of ours differs from plain decoding's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.gguf.convert import convert
from paceline.cli.table import table
from paceline.config import HeadOptions, LocalConfig, SuffixMatching, TargetModel, cache_dir
from paceline.config.loading import SMALL_CHAT_MODEL, place_of
from paceline.local import LocalPipeline
from paceline.runtime.workers import available_cores
from paceline.types import Acceptance, Mode, SamplingParams
from paceline_bench.jobs import Job, Reply, run_jobs, speculation
from paceline_bench.peers import PeerProcess, Unit, start_of
from paceline_bench.prompts import Prompt, chat_prompts
from paceline_bench.records import RequestRecord
from paceline_bench.report.summaries import Summary, summarize
from paceline_bench.settings import Peer
from paceline_bench.steps import WatchedFactory, timed_target

PROMPTS = Path(__file__).with_name("chat_prompts.jsonl")
STORED, DTYPE = "as stored", "bfloat16"
_DRAFT_TOKENS = 8
_WARM_UP_TOKENS = 24
_MS = 1e3

Run = Callable[[Sequence[Prompt], int, float, int], list[Reply]]
"""Answers prompts at once: their number of tokens, temperature and first seed."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to answer."""

    weights: str
    name: str
    engine: str
    run: Run


def converted(target: str) -> str:
    """The directory of the target's weights in bfloat16, made once."""
    if not target.endswith(".gguf"):
        return target
    folder = cache_dir() / "benchmarks" / f"{Path(target).stem}-{DTYPE}"
    if not (folder / "config.json").exists():
        convert(Path(Checkpoint.open(target).location), folder, lambda done, total: None)
    return str(folder)


@contextlib.contextmanager
def ours(path: str, weights: str, threads: int, sessions: int, texts: str = "") -> Iterator[list[Method]]:
    """A target as ``paceline serve --cpu-threads`` makes it where no draft is at hand; ``texts``: but a corpus."""
    target = TargetModel(
        path=path,
        dtype=DTYPE,
        compile=True,
        cpu_threads=threads,
        max_sessions=sessions,
        heads=[HeadOptions(method="suffix", suffix=SuffixMatching(corpus=[texts] if texts else []))],
    )
    config = LocalConfig(target=target, generation_config="none")
    factory = WatchedFactory(config.target_setup(), Path(os.devnull), timed_target)  # empties its prefix cache
    with LocalPipeline(config, target_factory=factory) as pipeline:

        def running(mode: Mode) -> Run:
            def run(prompts: Sequence[Prompt], tokens: int, temperature: float, seed: int) -> list[Reply]:
                jobs = [
                    Job(p, SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=seed + i))
                    for i, p in enumerate(prompts)
                ]
                return run_jobs(pipeline, jobs, speculation(mode, _DRAFT_TOKENS, Acceptance.COUPLED))

            return run

        ways = {"plain": Mode.PLAIN, "as served": Mode.OVERLAPPED} if not texts else {"with texts": Mode.OVERLAPPED}
        yield [Method(weights, name, "", running(mode)) for name, mode in ways.items()]


@contextlib.contextmanager
def theirs(peer: Peer, path: str, weights: str, threads: int, sessions: int) -> Iterator[list[Method]]:
    """Another engine, which decodes plainly."""
    start = start_of(peer, (path, ""), 0, available_cores()[:threads], DTYPE, sessions)
    with PeerProcess(peer.python, start) as process:

        def run(prompts: Sequence[Prompt], tokens: int, temperature: float, seed: int) -> list[Reply]:
            ids = tuple(p.token_ids for p in prompts)
            return process.generate(Unit(ids, (tokens,) * len(prompts), temperature, seed, 0))

        yield [Method(weights, peer.engine, peer.engine, run)]


def measure(
    methods: Sequence[Method], prompts: Sequence[Prompt], args: argparse.Namespace
) -> Iterator[tuple[int, list[RequestRecord]]]:
    """Yields (number at once, records) for each load; each load has prompts of its own while there are enough."""
    for method in methods:
        method.run(prompts[-max(args.loads) :], _WARM_UP_TOKENS, 0.0, 0)
        method.run(prompts[:1], _WARM_UP_TOKENS, 0.0, 0)
    taken = 0
    for load in args.loads:
        count = load * max(1, args.prompts // load)
        chosen = [prompts[(taken + i) % len(prompts)] for i in range(count)]
        taken += count
        units = [chosen[i : i + load] for i in range(0, count, load)]
        found: list[RequestRecord] = []
        for turn, (repeat, unit) in enumerate((r, u) for r in range(args.repeats) for u in range(len(units))):
            first = turn % len(methods)
            for temperature in args.temperatures:
                for method in [*methods[first:], *methods[:first]]:
                    blank = RequestRecord(
                        *(method.name, method.weights, 0, temperature, unit, repeat, "", 0, (), 0.0, 0.0, ()),
                        cores=args.threads,
                        engine=method.engine,
                    )
                    replies = method.run(units[unit], args.max_tokens, temperature, 1000 * unit)
                    found += [r.to_record(blank, p) for r, p in zip(replies, units[unit], strict=True)]
        yield load, found


def compared(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Records of one group with ``identical``: texts beside plain decoding's, of others at temperature 0."""
    plain = {(r.temperature, r.prompt): r.token_ids for r in records if r.method == "plain"}
    return [
        replace(r, identical=r.token_ids == plain[r.temperature, r.prompt]) if r.temperature == 0 or not r.engine else r
        for r in records
    ]


def row(weights: str, s: Summary, records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """A line of a table."""
    mine = [r for r in records if (r.method, r.temperature) == (s.method, s.temperature)]
    each = median(r.decode_s / (r.num_tokens - 1) for r in mine)
    same = "-" if s.identical is None or not s.identical.events else f"{s.identical.hits}/{s.identical.events}"
    ratio, end_to_end = (f"{r.value:.2f}" if r else "-" for r in (s.ratio, s.end_to_end_ratio))
    return (
        *(f"{s.temperature:g}", weights, s.method, f"{s.decode_tokens_per_s:.1f}", ratio),
        *(f"{s.end_to_end_tokens_per_s:.1f}", end_to_end, f"{_MS * median(r.prefill_s for r in mine):.0f}"),
        *(f"{_MS * each:.2f}", f"{s.tokens_per_step:.2f}", same),
    )


HEADER = (
    *("temperature", "weights", "method", "tokens/s", "x plain", "e2e tok/s", "x plain"),
    *("first token ms", "ms/token", "tok/step", "same"),
)


def main() -> int:
    """The tables of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=SMALL_CHAT_MODEL, metavar="P", help="a GGUF file or a checkpoint")
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE=PYTHON", help="repeatable")
    parser.add_argument("--threads", type=int, default=2, help="of each engine, a core for each (default 2)")
    parser.add_argument("--prompts-file", type=Path, default=PROMPTS, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=4, help="of a load, at least one for each at once")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="requests at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--texts", metavar="ID", help="paceline/smollm2-texts, or a corpus of the target's texts")
    args = parser.parse_args()
    target, sessions = str(place_of(args.target)), max(args.loads)
    prompts, folder = chat_prompts(target, args.prompts_file), converted(target)
    lengths = sorted(len(p.token_ids) for p in prompts)
    print(
        f"{len(prompts)} chats of {lengths[0]} to {lengths[-1]} tokens, half of at least {lengths[len(lengths) // 2]}"
    )
    with contextlib.ExitStack() as stack:
        methods = stack.enter_context(ours(folder, DTYPE, args.threads, sessions))
        if target != folder:
            methods += stack.enter_context(ours(target, STORED, args.threads, sessions))
        if args.texts:
            for path, weights in ((folder, DTYPE), (target, STORED)) if target != folder else ((folder, DTYPE),):
                methods += stack.enter_context(ours(path, weights, args.threads, sessions, args.texts))
        for engine, _, python in (given.partition("=") for given in args.peer):
            reads = (target, STORED) if engine == "llama.cpp" else (folder, DTYPE)
            methods += stack.enter_context(theirs(Peer(engine, python), *reads, args.threads, sessions))
        differs = False
        for load, records in measure(methods, prompts, args):
            print(f"\n{load} at once, {args.max_tokens} tokens each; load of the machine {os.getloadavg()[0]:.1f}")
            rows = [HEADER]
            for weights in dict.fromkeys(m.weights for m in methods):
                group = compared([r for r in records if r.mode == weights])
                differs |= any(r.identical is False for r in group if not r.engine)
                rows += [row(weights, s, group) for s in summarize(group)]
            print("\n".join(table(rows)), flush=True)
    return int(differs)


if __name__ == "__main__":
    raise SystemExit(main())
