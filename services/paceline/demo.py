"""``paceline demo``: one prompt, decoded plain and overlapped; the tokens must be the same.

Both runs use the same pair of running engines, so the figures compare decoding and nothing else.
"""

from __future__ import annotations

import argparse
import sys

from paceline.cli import EXIT_ENGINE, local_config, summary, write_text
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

PROMPT = '''"""Helpers for reading configuration files."""

import os
import sys


class ConfigReader:
    """Read settings from a file."""

    def __init__(self, filename):
'''


def run_demo(args: argparse.Namespace) -> int:
    """Returns 0 if both runs gave the same tokens."""
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    results = {}
    with LocalPipeline(local_config(args)) as pipeline:
        warm_up = SamplingParams(max_tokens=16)
        for mode in (Mode.PLAIN, Mode.OVERLAPPED):
            _ = pipeline.generate(PROMPT, warm_up, SpeculationParams(mode=mode)).result
        for mode in (Mode.PLAIN, Mode.OVERLAPPED):
            print(f"--- {mode.value} " + "-" * 60)
            sys.stdout.write(PROMPT)
            generation = pipeline.generate(PROMPT, sampling, SpeculationParams(mode=mode))
            write_text(generation, sys.stdout)
            results[mode] = generation.result
    plain, overlapped = results[Mode.PLAIN], results[Mode.OVERLAPPED]
    same = plain.token_ids == overlapped.token_ids
    print("-" * 72)
    print(f"plain       {summary(plain)}")
    print(f"overlapped  {summary(overlapped)}")
    if plain.timing.tokens_per_s > 0:
        print(f"speed-up    {overlapped.timing.tokens_per_s / plain.timing.tokens_per_s:.2f}")
    if same:
        print(f"tokens      identical ({len(plain.token_ids)} of {len(plain.token_ids)})")
        return 0
    pairs = zip(plain.token_ids, overlapped.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(overlapped.token_ids))
    print(f"tokens      DIFFERENT from position {first} on")
    return EXIT_ENGINE
