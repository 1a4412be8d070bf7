"""Step time of a target on two ranks against one process, one thread each, and against transformers' own tp_plan.

Each way is loaded once, in processes of its own; then they take turns, a block of steps each, for several rounds, so
that what else the machine does meets all of them. A step runs after 100 tokens of context, with 1 token (decoding), 5
and 9 (verification). The smallest and the median time are given. transformers' plan needs the accelerate package.

    python benchmarks/tensor_parallel.py MODEL [--dtype bfloat16] [--rounds 8] [--no-compile] [--no-transformers]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from paceline.checkpoint.files import Checkpoint
from paceline.model.loading import load_pretrained, prepare
from paceline.model.parallel.collectives import Collectives, TorchCollectives
from paceline.model.parallel.model import load_shard
from paceline.model.parallel.runner import Follower, LeadingRunner
from paceline.model.parallel.shared_memory import SharedMemoryCollectives
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep

SIZES = (1, 5, 9)
CONTEXT = 100
STEPS = 10
"""Number of steps of each size in a block."""

Times = dict[int, list[float]]
"""Seconds of each step, by its number of tokens."""
Way = Callable[[], Times | None]
"""A block of steps; None on the ranks that follow."""


def timed(forward: Callable[[int], Any]) -> Times:
    """``forward(n)`` takes a step of n tokens after the context."""
    times: Times = {}
    for size in SIZES:
        forward(size)
        times[size] = []
        for _ in range(STEPS):
            started = time.perf_counter()
            forward(size)
            times[size].append(time.perf_counter() - started)
    return times


def timed_runner(runner: ModelRunner) -> Times:
    """Steps of one session in a KV cache of its own."""
    pages = runner.cache.allocate(2)
    span = range(CONTEXT)
    runner.forward([SequenceStep([7] * CONTEXT, span, span, pages, num_logits=1)])

    def forward(size: int) -> None:
        rows = range(CONTEXT, CONTEXT + size)
        runner.forward([SequenceStep([7] * size, rows, rows, pages, num_logits=size)])

    return timed(forward)


def one_process(path: str, dtype: torch.dtype, compile: bool) -> Way:
    """The engine's model, whole."""
    model = prepare(load_pretrained(Checkpoint.open(path), dtype), compile=compile)
    return lambda: timed_runner(model.runner(3))


def ranks(path: str, dtype: torch.dtype, group: Collectives, compile: bool) -> Way:
    """The engine's model, sharded."""
    model = prepare(load_shard(Checkpoint.open(path), dtype, group), compile=compile)

    def run() -> Times | None:
        runner = model.runner(3)
        if not isinstance(runner, LeadingRunner):
            follower = Follower(runner)
            while follower.step():
                pass
            return None
        times = timed_runner(runner)
        runner.end()
        return times

    return run


def transformers_model(path: str, dtype: torch.dtype, store: dist.Store, rank: int, degree: int) -> Way:
    """transformers' model with its dynamic cache, by its own plan if there is more than one rank."""
    options = {}
    if degree > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=degree)
        options["distributed_config"] = DistributedConfig(tp_size=degree)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False, **options).eval()

    def run() -> Times:
        with torch.no_grad():
            cache = model(input_ids=torch.full((1, CONTEXT), 7), use_cache=True).past_key_values

            def forward(size: int) -> None:
                model(input_ids=torch.full((1, size), 7), past_key_values=cache, use_cache=True)
                cache.crop(-size)

            return timed(forward)

    return run


def exchange(group: Collectives, hidden_size: int, dtype: torch.dtype) -> Way:
    """One sum of the size that a layer takes."""
    tensors = {size: torch.ones(1, max(4, size), hidden_size, dtype=dtype) for size in SIZES}

    def forward(size: int) -> None:
        for _ in range(20):
            group.all_reduce(tensors[size])

    return lambda: timed(forward)


def serve(pipe: Connection, rank: int, degree: int, folder: str, path: str, dtype: torch.dtype) -> None:
    """A process that loads ways by name, and runs a block of one when it is asked to."""
    torch.set_num_threads(1)
    ways: dict[str, Way] = {}
    numbers = itertools.count()

    def store() -> dist.Store:
        return dist.FileStore(f"{folder}/{degree}-{next(numbers)}", degree)

    def gloo() -> Collectives:
        return TorchCollectives(store(), rank, degree, timeout_s=300)

    def shared() -> Collectives:
        return SharedMemoryCollectives(store(), rank, degree, timeout_s=300)

    hidden = 384
    make: dict[str, Callable[[], Way]] = {
        "one process, eager": lambda: one_process(path, dtype, compile=False),
        "one process, compiled": lambda: one_process(path, dtype, compile=True),
        "two ranks, eager, gloo": lambda: ranks(path, dtype, gloo(), compile=False),
        "two ranks, eager, shared memory": lambda: ranks(path, dtype, shared(), compile=False),
        "two ranks, compiled, shared memory": lambda: ranks(path, dtype, shared(), compile=True),
        "transformers, one process": lambda: transformers_model(path, dtype, store(), 0, 1),
        "transformers, tp_plan, gloo": lambda: transformers_model(path, dtype, store(), rank, degree),
        "20 sums, gloo": lambda: exchange(gloo(), hidden, dtype),
        "20 sums, shared memory": lambda: exchange(shared(), hidden, dtype),
    }
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        if name not in ways:
            ways[name] = make[name]()
            pipe.send(None)
        else:
            pipe.send(ways[name]())


class Pool:
    """Processes that do the same. A context manager."""

    def __init__(self, degree: int, *args: Any) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        for rank in range(degree):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, rank, degree, *args), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def __call__(self, name: str) -> list[Any]:
        """Results of all processes: None the first time, which loads; then the times of a block."""
        for pipe in self._pipes:
            pipe.send(name)
        return [pipe.recv() for pipe in self._pipes]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    names = [
        "one process, eager",
        "two ranks, eager, gloo",
        "two ranks, eager, shared memory",
        "one process, compiled",
        "two ranks, compiled, shared memory",
        "transformers, one process",
        "transformers, tp_plan, gloo",
        "20 sums, gloo",
        "20 sums, shared memory",
    ]
    names = [n for n in names if not (args.no_compile and "compiled" in n)]
    names = [n for n in names if not (args.no_transformers and "transformers" in n)]
    beside = "one process, compiled" if "one process, compiled" in names else "one process, eager"
    blocks: dict[str, list[Times]] = {name: [] for name in [*names, f"{beside}, beside another"]}
    with tempfile.TemporaryDirectory() as folder:
        shared = (folder, str(Path(args.model).expanduser()), getattr(torch, args.dtype))
        one, other, two = Pool(1, *shared), Pool(1, *shared), Pool(2, *shared)
        for name in names:
            print(f"loading: {name}", flush=True)
            (one if "one process" in name else two)(name)
        other(beside)
        with contextlib.suppress(KeyboardInterrupt):  # what has been measured until then is printed
            for _ in range(args.rounds):
                for name in names:
                    blocks[name].append((one if "one process" in name else two)(name)[0])
                # Both read their weights at the same time: what the cores share shows.
                other._pipes[0].send(beside)
                blocks[f"{beside}, beside another"].append(one(beside)[0])
                other._pipes[0].recv()
    rounds = min(map(len, blocks.values()))
    name = Path(args.model).name
    print(f"{name}, {args.dtype}, {rounds} rounds of {STEPS} steps; ms per step: smallest (median)\n")
    print(f"{'':45}" + "".join(f"{f'{size} tokens':>16}" for size in SIZES))
    for name, results in blocks.items():
        row = ""
        for size in SIZES:
            times = [1e3 * t for block in results for t in block[size]]
            row += f"{f'{min(times):.2f} ({statistics.median(times):.2f})':>16}"
        print(f"{name:45}{row}")


if __name__ == "__main__":
    main()
