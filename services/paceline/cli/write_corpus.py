"""``paceline write-corpus``: texts that a target writes, for suffix decoding."""

from __future__ import annotations

import argparse
import sys

from paceline.cli.exit import EXIT_DONE
from paceline.cli.table import table
from paceline.cli.train_head import Bars, add_data_flags, add_running_flags, options_of, until_stopped
from paceline.drafters.training.options import CORPUS

_MEANING = """\
accepted     drafted tokens that the target takes, per round of {depths}
T=1          drawn at temperature 1"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline write-corpus``."""
    parser.description = (
        "Has a target continue texts, or write chats of its own, and keeps them as the corpus of suffix decoding: what "
        "it wrote before is what it is likely to write again. Nothing is trained. An interrupted run continues where "
        "it was when the command is repeated. The corpus and its report are in --out; inside or next to the target's "
        "directory `paceline serve` finds it."
    )
    add_data_flags(parser, "corpus")
    parser.add_argument("--depths", type=int, default=4, metavar="N", help="tokens of a reported round (default 4)")
    add_running_flags(parser)
    parser.set_defaults(kind=CORPUS, run=run_write_corpus)


def run_write_corpus(args: argparse.Namespace) -> int:
    """Runs ``paceline write-corpus``."""
    from paceline.drafters.training.corpus import write_corpus  # with torch

    options = options_of(args)
    with until_stopped(), Bars() as progress:
        report = write_corpus(options, progress)
    rows = [["held out", "own text alone", "+-", "with the corpus", "+-"]]
    for greedy, name in ((True, "greedy"), (False, "T=1")):
        found = [one for one in report.replayed if one.greedy is greedy]
        rows.append([name, *(f"{figure:.3f}" for one in found for figure in (one.accepted, one.standard_error))])
    print("\n".join([*table(rows, sys.stdout), "", _MEANING.format(depths=report.depths)]))
    print(f"\nthe corpus is in {options.out}: {report.num_tokens} tokens")
    return EXIT_DONE
