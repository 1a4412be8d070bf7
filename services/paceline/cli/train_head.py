"""``paceline train-head``: a drafting head for any target, trained on the target's own continuations of some text."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.cli.exit import EXIT_DONE
from paceline.cli.flags import device
from paceline.cli.table import table
from paceline.config import DType
from paceline.drafters.training.options import DRAFT_MODEL, KINDS, SMALLER, HeadForm, Schedule, TrainingOptions
from paceline.errors import ConfigError
from paceline.logs import is_quiet

if TYPE_CHECKING:
    from paceline.drafters.training.run import Report

Made = TypeVar("Made")
_MEANING = """\
depth d      how often the head drafts the target's token at depth d, where all shallower ones were right
accepted     drafted tokens that the target takes, per round of {depths}
T=1          drawn at temperature 1; the head draws with the target's noise, as in the service"""
_AS_IS = "as-is"
_PROMPT_TOKENS = 64
_NUM_TOKENS = 262_144


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline train-head``."""
    parser.description = (
        "Trains a drafting head for a target on the target's own continuations of the data. An interrupted run "
        "continues where it was when the command is repeated. The head, its checkpoint and its report are in --out."
    )
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    add_data_flags(parser, "head")
    group = parser.add_argument_group("head")
    group.add_argument("--depths", type=int, default=4, metavar="N", help="tokens drafted in a row (default 4)")
    group.add_argument(
        "--boundaries",
        "--boundary",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="eagle3, peagle, dflash, dspark, jetspec: layers whose input it reads; early_exit: the layers below it "
        "draft; speculative_streaming: those from it on",
    )
    group.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="N",
        help=f"{', '.join(SMALLER)}: the most frequent tokens (default: all)",
    )
    group.add_argument("--own-lm-head", action="store_true", help="medusa: an LM head for each depth")
    group.add_argument(
        "--inner-dim", type=int, default=0, metavar="N", help="width of mlp_speculator's state or early_exit's MLP"
    )
    group.add_argument(
        "--layers",
        dest="num_layers",
        type=int,
        default=2,
        metavar="N",
        help="dflash, dspark, jetspec: its layers (default 2)",
    )
    group.add_argument(
        "--anchors",
        dest="num_anchors",
        type=int,
        default=64,
        metavar="N",
        help="dflash, dspark, jetspec, speculative_streaming: blocks of each row (default 64)",
    )
    group.add_argument(
        "--rank",
        type=int,
        default=32,
        metavar="N",
        help="speculative_streaming: of its additions; dspark: of its Markov chain (default 32)",
    )
    add_training_flags(parser)


def add_data_flags(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the flags that say for which target and on which text ``what`` is trained."""
    parser.add_argument("--target", metavar="ID_OR_PATH", help="target model (default: the embedded one)")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files, .jsonl files of objects with text or prompt, or folders of such files",
    )
    parser.add_argument(
        "--held-out",
        type=Path,
        nargs="+",
        default=[],
        metavar="PATH",
        help="data for the report, left out of the training (default: a random twentieth of the documents)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"folder of the {what}")
    parser.add_argument(
        "--chats",
        type=int,
        default=0,
        metavar="N",
        help="in place of --data: chats that the target writes itself by its template, users and answers",
    )
    group = parser.add_argument_group("features")
    group.add_argument("--cache", type=Path, metavar="DIR", help="folder of the features (default: features in --out)")
    group.add_argument(
        "--tokens",
        dest="num_tokens",
        type=int,
        metavar="N",
        help="tokens to train on (default 262144; of chats one row for each of them and each temperature)",
    )
    group.add_argument("--length", type=int, default=256, metavar="N", help="tokens of a row (default 256)")
    group.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of a document that the target continues; a shorter document is taken whole (default 64; of chats "
        "half of --length)",
    )
    group.add_argument(
        "--temperatures",
        default="0,0.7,1",
        metavar="X,X",
        help=f"of the continuations, in turn; {_AS_IS}: the data are the target's own text (default 0,0.7,1)",
    )
    group.add_argument("--held-out-rows", type=int, default=128, metavar="N", help="rows of the report (default 128)")


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the training itself."""
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=int, default=4000, metavar="N", help="updates (default 4000)")
    group.add_argument("--batch-rows", type=int, default=1, metavar="N", help="rows of an update (default 1)")
    group.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="at its peak (default 0.001)")
    add_running_flags(group)
    parser.add_argument("--compare", metavar="ID_OR_PATH", help="a draft model whose figures are reported, too")
    parser.set_defaults(run=run_train_head)


def add_running_flags(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the flags that say how the target runs."""
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of text and order (default 0)")
    parser.add_argument("--device", type=device, default="auto", metavar="TEXT", help="default auto")
    parser.add_argument("--dtype", choices=get_args(DType), default="auto", help="default auto")


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """SIGTERM ends the training as Ctrl-C does, which saves a checkpoint."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_train_head(args: argparse.Namespace) -> int:
    """Runs ``paceline train-head``."""
    from paceline.drafters.training.run import train_head  # with torch

    options = options_of(args)
    with until_stopped(), Bars() as progress:
        report = train_head(options, progress)
    print("\n".join(as_table(report)))
    print(f"\nthe {'draft' if options.form.kind == DRAFT_MODEL else 'head'} is in {options.out}")
    return EXIT_DONE


def options_of(args: argparse.Namespace) -> TrainingOptions:
    """The options that the flags stand for. Raises ConfigError."""
    if args.kind not in KINDS and args.command == "train-head":
        raise ConfigError(f"KIND is {args.kind!r}: it must be one of {', '.join(KINDS)}")
    if args.target is None:
        from paceline.checkpoint.files import embedded_paths

        args.target = str(embedded_paths()[0])
    temperatures = _temperatures(args.temperatures)
    return _of_flags(
        TrainingOptions,
        args,
        num_tokens=_num_tokens(args, len(temperatures)),
        form=_of_flags(HeadForm, args),
        schedule=_of_flags(Schedule, args),
        prompt_tokens=_prompt_tokens(args),
        temperatures=temperatures,
    )


def _of_flags(kind: Callable[..., Made], args: argparse.Namespace, **own: Any) -> Made:
    """An object of ``own`` fields and of flags; it keeps the default of a field that is no flag of the command."""
    given = {field.name: getattr(args, field.name) for field in fields(cast("Any", kind)) if hasattr(args, field.name)}
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in given.items()} | own)


def _num_tokens(args: argparse.Namespace, num_temperatures: int) -> int:
    """More rows of a few chats would be copies of them, at temperature 0 to the token."""
    if args.num_tokens is not None:
        return int(args.num_tokens)
    return args.chats * max(1, num_temperatures) * args.length if args.chats > 0 else _NUM_TOKENS


def _prompt_tokens(args: argparse.Namespace) -> int:
    given: int | None = args.prompt_tokens
    if given is None:
        return args.length // 2 if args.chats else _PROMPT_TOKENS
    return given


def _temperatures(text: str) -> tuple[float, ...]:
    if text == _AS_IS:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--temperatures is {text!r}: numbers with commas between them, or {_AS_IS}") from None


def as_table(report: Report) -> list[str]:
    """The lines of the report."""
    depths = [f"depth {depth + 1}" for depth in range(report.depths)]
    rows = [["held out", *depths, "accepted", "+-"]]
    for each in report.figures:
        for name, found in (("greedy", each.greedy), ("T=1", each.sampled)):
            shares = [f"{share:.3f}" for share in found.given_prefix()]
            ends = [f"{found.accepted_per_round(report.depths):.3f}", f"{found.standard_error(report.depths):.3f}"]
            rows.append([f"{each.name}, {name}", *shares, *ends])
    rows.append(["most frequent token, greedy", f"{report.unigram:.3f}", *[""] * (report.depths + 1)])
    return [*table(rows, sys.stdout), "", _MEANING.format(depths=report.depths)]


class Bars:
    """One bar for each stage, on standard error."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        note = TextColumn("{task.fields[note]}")
        self._bars = Progress(*columns, note, console=Console(stderr=True), disable=is_quiet())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        if not self._tasks:
            self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, note="")
        self._bars.update(self._tasks[stage], completed=done, note=note)
