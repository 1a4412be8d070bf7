"""The native attention against torch's: `paceline bench parts attention`.

First one layer's attention alone, keys and values written and read, with the heads of the grown target and of an 8B
model; "cold": after 48 MiB have been written elsewhere, as the weights of a step would have been read. Then whole
compiled steps of a model. Kernels take turns; printed are first quartiles and their ratio.

    paceline bench parts attention [--dtype bfloat16] [--model DIRECTORY] [--rounds 25] [--cpu-threads 2]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.cli.table import table
from paceline.config import ModelOptions
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.paged import paged_attention
from paceline.model.compiled import linear as cpu_linear
from paceline.model.loading import LoadedModel, load_model
from paceline.model.shapes import padded_pages, padded_row_len
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for
from paceline_bench.parts.turns import in_turn

Kernel = Literal["sdpa", "native"]
HEADS = {"6 heads, 2 of keys, 64": (6, 2, 64), "32 heads, 8 of keys, 128": (32, 8, 128)}
LAYER_CASES = (
    (1, 1, 128),
    (1, 1, 512),
    (1, 1, 2048),
    (16, 1, 200),
    (16, 8, 200),
    (1, 16, 128),
    (1, 16, 512),
    (1, 16, 2048),
    (1, 512, 0),
)
STEP_CASES = ((1, 1, 200), (1, 8, 200), (16, 1, 200), (16, 8, 200), (1, 1, 900), (1, 512, 0))
"""Sessions, new tokens of each, tokens before them."""


def layer(rows: int, num_tokens: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``paged_attention``, padded as a step of a model is."""
    num_heads, num_kv_heads, dim = heads
    row_len, pages = padded_row_len(num_tokens), padded_pages(pages_for(context + num_tokens))
    last = context + torch.arange(row_len).clamp(max=num_tokens - 1)
    seen = torch.arange(pages * PAGE_SIZE) <= last[:, None]
    row, place = torch.arange(rows)[:, None], torch.arange(num_tokens)
    written = last[:num_tokens]
    return {
        "query": torch.randn(1, num_heads, rows * num_tokens, dim).to(dtype),
        "key": torch.randn(1, num_kv_heads, rows * num_tokens, dim).to(dtype),
        "value": torch.randn(1, num_kv_heads, rows * num_tokens, dim).to(dtype),
        "keys": [torch.randn(rows * pages, PAGE_SIZE, num_kv_heads, dim).to(dtype)],
        "values": [torch.randn(rows * pages, PAGE_SIZE, num_kv_heads, dim).to(dtype)],
        "write_rows": (row * pages * PAGE_SIZE + written).flatten(),
        "write_tokens": torch.arange(rows * num_tokens),
        "page_table": torch.arange(rows * pages).view(rows, pages),
        "gather_index": row * num_tokens + torch.arange(row_len).clamp(max=num_tokens - 1),
        "scatter_index": (row * row_len + place).flatten(),
        "masks": [torch.zeros(rows, 1, row_len, pages * PAGE_SIZE, dtype=dtype).masked_fill_(~seen, -math.inf)],
        "attention_mask": None,
    }


def first_quartiles(
    calls: Mapping[Kernel, Callable[[], Any]], rounds: int, before: Callable[[], Any] = lambda: None
) -> dict[Kernel, float]:
    """Seconds of each call; all take turns, and ``before`` comes before each."""
    found = in_turn(calls, rounds=rounds, before=before)
    return {kernel: sorted(seconds)[rounds // 4] for kernel, seconds in found.items()}


def row_of(name: str, seconds: dict[Kernel, float], unit: float) -> list[str]:
    """Cells of one comparison."""
    sdpa, native = seconds["sdpa"], seconds["native"]
    return [name, f"{sdpa * unit:.3g}", f"{native * unit:.3g}", f"{sdpa / native:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        "paceline bench parts attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--model", help="checkpoint to compile and time whole steps of")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--cpu-threads", type=int, default=1, help="that share what is native")
    args = parser.parse_args(arguments)
    if reason := cpu_attention.unavailable():
        raise SystemExit(f"the native attention {reason}")
    torch.set_num_threads(1)
    if args.cpu_threads > 1:
        if reason := cpu_linear.why_not_shared(args.cpu_threads, torch.device("cpu"), torch.bfloat16):
            raise SystemExit(f"--cpu-threads is {args.cpu_threads}: {reason}")
        cpu_attention.share_by(cpu_linear.sharer())
        cpu_linear.share_products(args.cpu_threads)
    dtype, elsewhere = getattr(torch, args.dtype), torch.zeros(12 << 20)
    kernels: tuple[Kernel, ...] = get_args(Kernel)
    module: Any = SimpleNamespace(layer_idx=0)

    rows = []
    for name, heads in HEADS.items():
        for sessions, num_tokens, context in LAYER_CASES:
            given = layer(sessions, num_tokens, context, heads, dtype)
            calls = {k: partial(paged_attention, module, **given, kernel=k) for k in kernels}
            what = f"{name}: {sessions} x {num_tokens} at {context}"
            warm = first_quartiles(calls, args.rounds)
            cold = first_quartiles(calls, args.rounds, lambda: elsewhere.add_(1))
            rows.append(row_of(what, warm, 1e6) + row_of(what, cold, 1e6)[1:])
    titles = ["sessions x tokens at context", "sdpa us", "native us", "ratio", "cold: sdpa us", "native us", "ratio"]
    print(*table([titles, *rows]), sep="\n")

    if args.model:
        models = {
            k: load_model(Checkpoint.open(args.model), ModelOptions(dtype=args.dtype, device="cpu", attention=k))
            for k in kernels
        }
        rows = []
        for sessions, num_tokens, context in STEP_CASES:
            steps = {k: step_of(models[k], sessions, num_tokens, context) for k in kernels}
            name = f"{sessions} x {num_tokens} at {context}"
            rows.append(row_of(name, first_quartiles(steps, args.rounds), 1e3))
        print(*table([["compiled step", "sdpa ms", "native ms", "ratio"], *rows]), sep="\n")


def step_of(model: LoadedModel, sessions: int, num_tokens: int, context: int) -> Callable[[], Any]:
    """One forward, again and again at the same place."""
    pages = pages_for(context + num_tokens)
    runner = model.runner(sessions * pages + 1)
    span = range(context, context + num_tokens)
    steps = [
        SequenceStep([7] * num_tokens, span, span, runner.cache.allocate(pages), num_logits=min(num_tokens, 16))
        for _ in range(sessions)
    ]
    return lambda: runner.forward(steps)
