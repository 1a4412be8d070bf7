"""Cost of going from logits to tokens, natively and in torch: `paceline bench parts sampling`.

Rows of random logits, as peaked as a language model's, go through the target's decision (`verification.decide`) and the
draft's candidates and their ranking, under the options that requests have. Both ways take turns in one thread; medians.
The share is that of a step whose floor is reading the output layer alone: ``--hidden`` numbers for each token of the
vocabulary, in bfloat16, at the bandwidth of one core that the same run measures. A whole model's step is longer.

    paceline bench parts sampling [--vocab-size 151936] [--hidden 896] [--rows 1 9]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

from paceline.cli.table import table
from paceline.core import rows as native
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import best_coupled, draft_candidates
from paceline.core.tree import Proposal
from paceline.core.verification import decide
from paceline.messages import SparseDistribution
from paceline.types import Acceptance, SamplingParams
from paceline_bench.machine import bandwidth
from paceline_bench.parts.turns import in_turn

OPTIONS = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 50, top-p 0.9, temperature 0.7": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "frequency and presence penalty": {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.1},
    "temperature 2, top-p 0.95 (flat)": {"temperature": 2.0, "top_p": 0.95},
}


def median_ms(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each way; they take turns."""
    return {name: 1e3 * statistics.median(values) for name, values in in_turn(ways, rounds=repeats).items()}


def in_torch(function: Callable[[], object]) -> Callable[[], object]:
    """``function`` without native code."""

    def run() -> object:
        with mock.patch.object(native, "usable", return_value=False):
            return function()

    return run


def ways(num_rows: int, vocab_size: int, logits: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Functions to measure, by name, with all rows in one proposal."""
    draft_tokens = tuple(range(400, 399 + num_rows))

    def batch(**options: Any) -> list[Row]:
        state = SamplerState(SamplingParams(**options), 7, range(300), range(30), vocab_size=vocab_size)
        return [Row(state, draft_tokens[:i]) for i in range(num_rows)]

    coupled, proposals = [Acceptance.COUPLED], [Proposal(draft_tokens)]
    decisions = {name: partial(decide, logits, batch(**o), proposals, coupled) for name, o in OPTIONS.items()}
    listed: dict[str, Callable[[], object]] = {**decisions}
    plain = batch(temperature=1.0)
    q = tuple(SparseDistribution.of((token,), (1.0,)) for token in draft_tokens)
    rejection = [Acceptance.REJECTION]
    listed["temperature 1, rejection rule"] = partial(decide, logits, plain, [Proposal(draft_tokens, q)], rejection)
    token_ids, log_q = draft_candidates(logits, plain, 256)
    listed["draft: 256 candidates"] = partial(draft_candidates, logits, plain, 256)
    listed["draft: the first 6 with noise"] = partial(best_coupled, token_ids, log_q, plain, 6)
    return listed


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table for each number of rows."""
    parser = argparse.ArgumentParser(
        "paceline bench parts sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    floor_ms = 1e3 * 2 * args.hidden * args.vocab_size / bandwidth(None).read_bytes_per_s
    generator = torch.Generator().manual_seed(0)
    print(f"vocabulary {args.vocab_size}, output layer of {args.hidden}: floor {floor_ms:.1f} ms")
    for num_rows in args.rows:
        logits = torch.randn(num_rows, args.vocab_size, generator=generator) * 2.2
        logits[:, :50] += torch.linspace(12, 4, 50)  # the head of the distribution: some tokens have most of the mass
        listed = [(f"{num_rows} rows", "native ms", "torch ms", "ratio", "native / floor")]
        for name, way in ways(num_rows, args.vocab_size, logits.bfloat16()).items():
            found = median_ms({"native": way, "torch": in_torch(way)}, args.repeats)
            fast, slow = found["native"], found["torch"]
            listed.append((name, f"{fast:.2f}", f"{slow:.2f}", f"{slow / fast:.1f}", f"{100 * fast / floor_ms:.1f} %"))
        print("\n" + "\n".join(table(listed)), flush=True)
