"""Products of linear layers on one core: by bfloat16, by blocks of 8 and 4 bits, oneDNN's, and what the memory gives.

Each way reads ``--mib`` of bfloat16 weights, which no cache holds, or those rounded, as several layers of one shape;
they take turns with a plain read of the same memory. Of each the fastest counts, in seconds of its thread: others
rarely disturb it. Products of up to four tokens should take what the read takes, products of many what the
multipliers do.

    paceline bench parts linear [--shapes 20736x384 384x10368] [--tokens 1 4 16 64 512]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.cli.table import table
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.blocks import pack_blocks, quantize
from paceline.model.compiled.package import _use_huge_pages, large_mappings
from paceline_bench.parts.turns import in_turn


def fastest_s(ways: list[Callable[[], object]], seconds: float) -> list[float]:
    """Fastest seconds of each way; they take turns for ``seconds``, and at least three times."""
    found = in_turn(dict(enumerate(ways)), seconds=seconds, clock=time.thread_time)
    return [min(times) for times in found.values()]


def measured(outputs: int, inputs: int, num_tokens: list[int], mib: int, seconds: float) -> list[tuple[str, ...]]:
    """The rows of one shape's table."""
    layers = max(1, (mib << 20) // (2 * outputs * inputs))
    before = set(large_mappings())
    weights = torch.randn(layers, outputs, inputs).mul_(inputs**-0.5).bfloat16()
    packed = torch.stack([cpu_linear.pack(weight) for weight in weights])
    blocks = {bits: torch.stack([pack_blocks(quantize(weight, bits)) for weight in weights]) for bits in (8, 4)}
    theirs = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    for span in set(large_mappings()) - before:
        _use_huge_pages(*span)  # as in a package

    def native(x: Tensor, packed: Tensor) -> None:
        for weight in packed:
            cpu_linear.linear(x, weight, None, outputs)

    def onednn(x: Tensor) -> None:
        for weight in theirs:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    listed: list[tuple[str, ...]] = []
    for tokens in num_tokens:
        x = torch.randn(tokens, inputs).bfloat16()
        ours_of = [partial(native, x, weights) for weights in (packed, blocks[8], blocks[4])]
        ours, int8, int4, other, read = fastest_s(
            [*ours_of, partial(onednn, x), packed.view(-1).view(torch.int64).sum], seconds
        )
        rate, flops = packed.nbytes / ours / 1e9, 2 * tokens * weights.numel() / ours / 1e9
        times = (f"{1e3 * ours:.2f}", f"{1e3 * other:.2f}", f"{other / ours:.2f}")
        small = (f"{1e3 * int8:.2f}", f"{1e3 * int4:.2f}", f"{ours / int8:.2f}", f"{ours / int4:.2f}")
        listed.append((str(tokens), *times, f"{rate:.1f}", f"{flops:.0f}", f"{100 * read / ours:.0f} %", *small))
    return listed


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table for each shape."""
    parser = argparse.ArgumentParser(
        "paceline bench parts linear", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["20736x384", "384x10368"], help="outputs x inputs")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 14, 16, 64, 512])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row of a table")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if not cpu_linear.usable():
        raise SystemExit("the native products cannot run here: they need AVX512-BF16 without AMX, and a C++ compiler")
    for shape in args.shapes:
        outputs, inputs = map(int, shape.split("x"))
        native = ("bfloat16 ms", "oneDNN ms", "oneDNN / bfloat16", "GB/s", "GFLOP/s", "of a read")
        head = (f"{shape}, tokens", *native, "int8 ms", "int4 ms", "bfloat16 / int8", "bfloat16 / int4")
        print(
            "\n".join(table([head, *measured(outputs, inputs, args.tokens, args.mib, args.seconds)])) + "\n", flush=True
        )
