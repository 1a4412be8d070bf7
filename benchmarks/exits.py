"""Accepted tokens a round of drafters that are layers of the embedded target, on the same prompts: early exits with
their heads and without, and speculative streaming.

    paceline train-head early_exit --boundary 4 --data .. --out exit4          (and 2 and 6)
    paceline train-head speculative_streaming --boundary 6 --data .. --out streams6
    python benchmarks/exits.py exit2 exit4 exit6 streams6 > benchmarks/results/exits.txt

Each is served alone, every token asked for and verified, and each text must be that of plain decoding; what is accepted
depends on no clock.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from methods import measure, ours, total
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.drafters.catalogue import method_named
from paceline.drafters.heads.exit_adapter import MODEL_TYPE as EXIT
from paceline.embedded import TARGET_DIR
from paceline_bench.prompts import held_out_prompts

TEMPERATURES = (0.0, 1.0)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path, metavar="FOLDER", help="trained heads of the embedded target")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=4)
    args = parser.parse_args()
    prompts = held_out_prompts(load_tokenizer(str(TARGET_DIR)), args.prompts)
    given = f"{' '.join(folder.name for folder in args.heads)} --prompts {args.prompts} --max-tokens {args.max_tokens}"
    print(f"python benchmarks/exits.py {given}     ({args.draft_tokens} tokens drafted in a round)")
    rows: list[tuple[str, ...]] = [("method", "boundary", "temperature", "accepted/round, without", "with its head")]
    for folder in args.heads:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        boundary, model = config["boundary"], str(folder.resolve())
        if is_exit := config["model_type"] == EXIT:
            method = method_named("early exit")
            method = replace(method, options={**method.options, "boundaries": [boundary]})
        else:
            method = method_named("speculative streaming")
        sources = (None, model) if is_exit else (model,)
        openers = [ours(method, source, args.draft_tokens, "thread") for source in sources]
        _, *measured = measure(openers, prompts, args.max_tokens, TEMPERATURES, "thread")
        for temperature in TEMPERATURES:
            answers = [row.answers[temperature] for row in measured]
            found = [f"{total(each, 'accepted') / total(each, 'steps'):.2f}" for each in answers]
            without = [] if is_exit else ["-"]
            rows.append((method.name, str(boundary), f"{temperature:g}", *without, *found))
    print("", *table(rows, sys.stdout), sep="\n")


if __name__ == "__main__":
    main()
