"""``paceline train-draft``: a draft model for any target, which begins as the target's first layers."""

from __future__ import annotations

import argparse

from paceline.cli.train_head import add_data_flags, add_training_flags, run_train_head
from paceline.drafters.training.options import DRAFT_MODEL


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline train-draft``."""
    parser.description = (
        "Trains a draft model for a target, as train-head does heads: the target's first layers, on what the target "
        "writes. The model, its tokenizer and its report are in --out, which `paceline serve --draft` reads."
    )
    add_data_flags(parser, "draft")
    group = parser.add_argument_group("draft")
    group.add_argument(
        "--layers", dest="num_layers", type=int, default=2, metavar="N", help="of the target's layers (default 2)"
    )
    group.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="N",
        help="the target's most frequent tokens, and the tokens they are merged from (default: all); it is served "
        "with vocabulary: shared",
    )
    group.add_argument("--depths", type=int, default=4, metavar="N", help="tokens of a round of the report (default 4)")
    add_training_flags(parser)
    parser.set_defaults(kind=DRAFT_MODEL, run=run_train_head)
