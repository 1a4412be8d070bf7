"""Weights of 4 and 8 bits against bfloat16 on one core: step times, tokens/s, memory, and the likelihood of a text.

A GGUF file runs in bfloat16, as it is stored, and rounded again by ``quantization``; any other checkpoint in bfloat16
and rounded. Each variant is compiled and lives in a process of its own. They take turns. Of each step the fastest
counts, in seconds of its thread, so that other processes count little; tokens/s are of whole generations, by the clock.

    taskset -c 1 python benchmarks/quantized.py FILE.gguf [--peer PYTHON] [--rounds 9] [--only VARIANT ..]

``--peer``: llama.cpp on the same file, with one thread, by the environment that README.md says how to make.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, ModelOptions, TargetModel, apply_worker_environment, cache_dir
from paceline.logs import configure

CONTEXT, NUM_TOKENS = 192, 48
ROWS = (1, 2, 4, 8, 16)
"""Rows of a step: a decoded token, and tokens of a proposal under verification or of several sessions."""
PROMPT, GENERATED = "The history of the lighthouse begins", 128
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
TEXT_TOKENS = 2000


def serve(path: str, quantization: Any, pipe: Connection) -> None:
    """Loads a variant in its own process, tells its facts, then does what it is asked for."""
    apply_worker_environment()
    configure(logging.WARNING)
    import torch

    from paceline.local import LocalPipeline
    from paceline.model.loading import load_model
    from paceline.model.selftest import check_invariance
    from paceline.model.step_plan import SequenceStep
    from paceline.types import pages_for

    torch.set_num_threads(1)
    before, checkpoint = resident_bytes(), Checkpoint.open(path)
    options = {"dtype": "bfloat16", "device": "cpu", "compile": True, "quantization": quantization}
    model = load_model(checkpoint, ModelOptions(**options))
    runner = model.runner(pages_for(TEXT_TOKENS) + 16)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident, holds = resident_bytes() - before, check_invariance(runner).holds
    pages = runner.cache.allocate(pages_for(max(CONTEXT + NUM_TOKENS, TEXT_TOKENS)))

    def step(num_rows: int) -> float:
        """Fastest seconds of a step behind a context."""
        best = float("inf")
        for start in range(CONTEXT, CONTEXT + NUM_TOKENS - num_rows + 1, num_rows):
            span = range(start, start + num_rows)
            started = time.thread_time()
            runner.forward([SequenceStep([11] * num_rows, span, span, pages, num_rows)])
            best = min(best, time.thread_time() - started)
        return best

    def likelihood() -> float:
        """Mean log-likelihood of a token of the text, in nats."""
        ids = checkpoint.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TEXT_TOKENS]
        total = 0.0
        for start in range(0, len(ids) - 1, 250):
            stop = min(start + 250, len(ids) - 1)
            logits = runner.forward(
                [SequenceStep(ids[start:stop], range(start, stop), range(start, stop), pages, stop - start)]
            )
            found = logits.float().log_softmax(-1)
            total += float(found.gather(1, torch.tensor(ids[start + 1 : stop + 1])[:, None]).sum())
        return total / (len(ids) - 1)

    prefill = range(CONTEXT)
    said = likelihood()
    runner.forward([SequenceStep([7] * CONTEXT, prefill, prefill, pages, num_logits=1)])
    config = LocalConfig(target=TargetModel(path=path, **options), pin_cores=False)
    with LocalPipeline(config) as pipeline:
        pipe.send((resident, holds, said))
        while (asked := pipe.recv()) is not None:
            pipe.send(generate(pipeline) if asked == 0 else step(asked))


def generate(pipeline: Any) -> float:
    """Tokens/s of a plain greedy generation, prompt included."""
    started = time.perf_counter()
    result = pipeline.generate(PROMPT, temperature=0.0, max_tokens=GENERATED, ignore_eos=True).result
    return len(result.token_ids) / (time.perf_counter() - started)


def serve_peer(path: str, python: str, pipe: Connection) -> None:
    """llama.cpp on one thread, by the Python of its environment."""
    from paceline_bench.peers import PeerProcess, Unit, start_of
    from paceline_bench.settings import Peer

    ids = Checkpoint.open(path).tokenizer.encode(PROMPT)
    cores = sorted(os.sched_getaffinity(0))[:1]
    with PeerProcess(python, start_of(Peer("llama.cpp", python), (path, ""), 0, cores, "bfloat16", 1)) as process:
        pipe.send((0, True, float("nan")))
        while pipe.recv() is not None:
            started = time.perf_counter()
            process.generate(Unit((ids,), (GENERATED,), 0.0, 0, 0))
            pipe.send(GENERATED / (time.perf_counter() - started))


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(variants: dict[str, tuple[Callable[..., None], str, str | None]], rounds: int) -> None:
    """Prints the tables; the first variant is what the others are compared with."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes: dict[str, Connection] = {}
        facts = {}
        for name, (target, path, quantization) in variants.items():
            pipes[name], theirs = context.Pipe()
            process = context.Process(target=target, args=(path, quantization, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(pipes[name].send, None)
            facts[name] = pipes[name].recv()
        steps = {name: dict.fromkeys(ROWS, float("inf")) for name in variants if variants[name][0] is serve}
        speeds = dict.fromkeys(variants, 0.0)
        for _ in range(rounds):
            for rows in ROWS:
                for name, best in steps.items():
                    pipes[name].send(rows)
                    best[rows] = min(best[rows], pipes[name].recv())
            for name in variants:
                pipes[name].send(0)
                speeds[name] = max(speeds[name], pipes[name].recv())
    plain = next(iter(variants))
    print(
        f"{'':12}{'verifies':>10}{'resident':>10}{'nats/token':>12}{'tokens/s':>10}  ms of a step of "
        + "".join(f"{n:>8}" for n in ROWS)
    )
    for name in variants:
        resident, holds, said = facts[name]
        row = f"{name:12}{'same bits' if holds else 'NOT':>10}{resident / 1e6:7.0f} MB{said:12.4f}{speeds[name]:10.1f}"
        print(f"{row:72}" + "".join(f"{1e3 * t:8.2f}" for t in steps.get(name, {}).values()))
    for name in list(variants)[1:]:
        ratios = "".join(f"{steps[plain][n] / t:8.2f}" for n, t in steps.get(name, {}).items())
        print(f"{name + ' to ' + plain:44}{speeds[name] / speeds[plain]:10.2f}{'':18}{ratios}")


def main() -> None:
    """The tables of one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="variants to measure, the first compared with")
    args = parser.parse_args()
    path, is_gguf = args.checkpoint, Checkpoint.open(args.checkpoint).gguf is not None
    if is_gguf:
        from paceline.checkpoint.gguf.convert import convert

        path = str(cache_dir() / "benchmarks" / f"{Path(path).stem}-bfloat16")
        if not Path(path).exists():
            convert(Path(Checkpoint.open(args.checkpoint).location), Path(path), lambda done, total: None)
    variants: dict[str, tuple[Callable[..., None], str, str | None]] = {"bfloat16": (serve, path, None)}
    if is_gguf:
        variants["as stored"] = (serve, args.checkpoint, None)
    variants |= {"int8": (serve, path, "int8"), "int4": (serve, path, "int4")}
    if args.peer:
        variants["llama.cpp"] = (serve_peer, args.checkpoint, args.peer)
    measure({name: variants[name] for name in args.only or variants}, args.rounds)


if __name__ == "__main__":
    main()
