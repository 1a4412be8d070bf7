"""Costs and savings of int8 weights against bfloat16: memory, the artifact, and the time of a step.

Each variant lives in a process of its own with one thread. They take turns, so that a drift of the machine's speed
meets all of them alike.

    python benchmarks/quantized.py [CHECKPOINT ...]

Without checkpoints: the embedded target, and the 150 M parameter one that `paceline bench local --grow-target 150M`
has grown from it, if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions, apply_worker_environment, cache_dir
from paceline.embedded import TARGET_DIR
from paceline.logs import configure

VARIANTS = [(compile, quantization) for compile in (False, True) for quantization in (None, "int8")]
CONTEXT, NUM_TOKENS, ROUNDS = 192, 32, 7
STEPS = (1, 5, 9)
"""Tokens of a step: a decoded one, and proposals of 4 and 8 tokens under verification."""


def serve(path: str, compile: bool, quantization: str | None, pipe: Connection) -> None:
    """Loads the variant in its own process, reports its memory, then runs a step size whenever it gets one."""
    apply_worker_environment()
    configure(logging.WARNING)
    import torch

    from paceline.model.loading import load_model
    from paceline.model.selftest import check_invariance
    from paceline.model.step_plan import SequenceStep
    from paceline.types import pages_for

    torch.set_num_threads(1)
    before = resident_bytes()
    model = load_model(
        Checkpoint.open(path), ModelOptions(dtype="bfloat16", device="cpu", compile=compile, quantization=quantization)
    )
    runner = model.runner(16)
    report = check_invariance(runner)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pipe.send((resident_bytes() - before, report.holds, model.num_parameters))
    pages = runner.cache.allocate(pages_for(CONTEXT + NUM_TOKENS))
    prefill = range(CONTEXT)
    runner.forward([SequenceStep([7] * CONTEXT, prefill, prefill, pages, num_logits=1)])
    while (num_tokens := pipe.recv()) is not None:
        started, count = time.perf_counter(), 0
        for start in range(CONTEXT, CONTEXT + NUM_TOKENS - num_tokens + 1, num_tokens):
            span = range(start, start + num_tokens)
            runner.forward([SequenceStep([11] * num_tokens, span, span, pages, num_tokens)])
            count += 1
        pipe.send((time.perf_counter() - started) / count)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(path: str) -> None:
    """Prints the table of one checkpoint."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pipes: dict[tuple[bool, str | None], Connection] = {}
        facts = {}
        artifacts: dict[tuple[bool, str | None], int] = {}
        for variant in VARIANTS:
            if variant[0]:  # built by another process: what compiling takes is not what running takes
                artifacts[variant] = build(context, path, variant)
            pipes[variant], theirs = context.Pipe()
            process = context.Process(target=serve, args=(path, *variant, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(pipes[variant].send, None)
            facts[variant] = pipes[variant].recv()
        times: dict[tuple[bool, str | None], dict[int, list[float]]] = {v: {n: [] for n in STEPS} for v in VARIANTS}
        for _ in range(ROUNDS):
            for num_tokens in STEPS:
                for variant in VARIANTS:
                    pipes[variant].send(num_tokens)
                    times[variant][num_tokens].append(pipes[variant].recv())
    parameters = facts[VARIANTS[0]][2] / 1e6
    print(
        f"\n{parameters:.1f} M parameters, arithmetic in bfloat16, one thread, "
        f"medians of {ROUNDS} rounds of {NUM_TOKENS} tokens"
    )
    head = "".join(f"{f'{n} token' + 's' * (n > 1):>10}" for n in STEPS)
    print(f"{'':20}{'verifies':>10}{'resident':>10}{'artifact':>10}{'tokens/s':>10}   ms per step of{head}")
    medians = {v: {n: statistics.median(t) for n, t in times[v].items()} for v in VARIANTS}
    for variant in VARIANTS:
        compiled, quantization = variant
        resident, holds, _ = facts[variant]
        size = f"{artifacts[variant] / 1e6:.0f} MB" if compiled else "-"
        print(
            f"{name_of(compiled):9}{quantization or 'bfloat16':11}{'same bits' if holds else 'NOT':>10}"
            f"{resident / 1e6:7.0f} MB{size:>10}{1 / medians[variant][1]:10.1f}{'':17}"
            + "".join(f"{1e3 * medians[variant][n]:10.2f}" for n in STEPS)
        )
    for compiled in (False, True):
        ratios = (medians[compiled, None][n] / medians[compiled, "int8"][n] for n in STEPS)
        print(f"{name_of(compiled):9}{'speed of int8 to bfloat16':68}" + "".join(f"{ratio:10.2f}" for ratio in ratios))


def name_of(compiled: bool) -> str:
    """Name in the tables."""
    return "compiled" if compiled else "eager"


def build(context: SpawnContext, path: str, variant: tuple[bool, str | None]) -> int:
    """Compiles a variant if it is not in the cache; returns the bytes of its artifact."""
    pipe, theirs = context.Pipe()
    pipe.send(None)
    process = context.Process(target=serve, args=(path, *variant, theirs))
    process.start()
    process.join()
    used = max((cache_dir() / "compiled").glob("*.lock"), key=lambda lock: lock.stat().st_mtime)
    return used.with_suffix(".pt2").stat().st_size


def main() -> None:
    """One table for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="*")
    args = parser.parse_args()
    grown = sorted((cache_dir() / "grown").glob("target-150000000-bfloat16-*"))
    for path in args.checkpoint or [str(TARGET_DIR), *map(str, grown[-1:])]:
        measure(path)


if __name__ == "__main__":
    main()
