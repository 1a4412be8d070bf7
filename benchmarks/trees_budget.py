"""Tokens/s with trees and with chains, where the step's own budget decides: `python benchmarks/trees_budget.py`.

A grown target and the embedded draft, compiled, in bfloat16: two pipelines, one with `tree_verification` auto and one
with it off, take turns. A unit is one request per session, all at once, whose prompts are in the KV cache already. Both
adapt: where rows and branches cost more than they bring, neither verifies any, so trees must not be slower than chains
anywhere. Of each load and temperature the first unit of each pipeline does not count; those that follow take turns
until `--seconds` have passed, three of each at least. Every text must be the same.

Columns: tokens/s of both, and their ratio with its 95 % bootstrap interval over units in pairs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

from controller import shown, unit
from paceline.checkpoint.files import embedded_paths
from paceline.cli.table import table
from paceline.config import DraftModel, HeadOptions, LocalConfig, TargetModel
from paceline.local import LocalPipeline
from paceline_bench.arithmetic import Amount, rate, ratio
from paceline_bench.grow import parse_size
from paceline_bench.models import grown
from paceline_bench.prompts import held_out_prompts

WAYS = ("auto", "off")
_K = 8
_FEWEST_UNITS, _FEWEST_PROMPTS = 3, 24


def config(target: str, draft: str, trees: str, max_sessions: int, *, overlapped: bool) -> LocalConfig:
    """One pipeline; the draft in the target's process, or ``overlapped``."""
    head = HeadOptions(method="draft_model", model=draft, num_speculative_tokens=_K)
    return LocalConfig(
        target=TargetModel(
            path=target,
            dtype="bfloat16",
            compile=True,
            max_sessions=max_sessions,
            tree_verification=trees,
            heads=[] if overlapped else [head],
        ),
        draft=DraftModel(path=draft, dtype="bfloat16", compile=True) if overlapped else None,
    )


def main() -> None:
    """Measures, compares the texts, prints a row for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=parse_size("150M"), help="parameters of the target")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load and temperature (default 20)")
    parser.add_argument("--overlapped", action="store_true", help="the draft in a process of its own")
    args = parser.parse_args()
    target, draft = map(str, embedded_paths())
    target, most = grown(target, args.size, "bfloat16"), max(args.sessions)
    with ExitStack() as stack:
        pipelines = {
            way: stack.enter_context(LocalPipeline(config(target, draft, way, most, overlapped=args.overlapped)))
            for way in WAYS
        }
        num_prompts = max(_FEWEST_PROMPTS, most)
        prompts = held_out_prompts(pipelines["auto"].tokenizer, num_prompts)
        for pipeline in pipelines.values():
            unit(pipeline, 0, prompts, 0.0, 2)  # from now on they are found in the cache
        rows: list[tuple[str, ...]] = [("temperature", "sessions", "units", "trees", "chains", "trees / chains")]
        for temperature in args.temperatures:
            for sessions in args.sessions:
                amounts: dict[str, list[Amount]] = {way: [] for way in WAYS}
                until, turn = time.monotonic() + args.seconds, -1
                while turn < _FEWEST_UNITS or time.monotonic() < until:
                    first = max(turn, 0) * sessions
                    chosen = [prompts[(first + i) % num_prompts] for i in range(sessions)]
                    texts = {}
                    for way in WAYS if turn % 2 else WAYS[::-1]:
                        amount, texts[way] = unit(pipelines[way], _K, chosen, temperature, args.max_tokens)
                        if turn >= 0:
                            amounts[way].append(amount)
                    if texts["auto"] != texts["off"]:
                        raise SystemExit(f"texts differ: {sessions} sessions at temperature {temperature:g}")
                    turn += 1
                compared = ratio(amounts["auto"], amounts["off"])
                assert compared is not None
                speeds = [f"{rate(amounts[way]):.1f}" for way in WAYS]
                rows.append((f"{temperature:g}", str(sessions), str(turn), *speeds, shown(compared)))
                print(*rows[-1], flush=True)
    print("", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
