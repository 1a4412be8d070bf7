"""``paceline bench``: arguments only. Whatever is wrong with them is said before anything is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

from paceline.bench.local import FIFTH, Bench, Settings, with_grown_models
from paceline.bench.report import as_json, model_facts, render
from paceline.config import DType
from paceline.errors import ConfigError
from paceline.local import embedded_paths
from paceline.types import MAX_DRAFT_TOKENS, Acceptance, Mode

_T = TypeVar("_T")
_BASELINES = ("transformers", "assisted")
_DTYPES = get_args(DType)


def add_parser(subparsers: Any) -> None:
    """Adds ``bench`` to the commands."""
    bench = subparsers.add_parser("bench", help="measure", description="Benchmarks.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", parser_class=type(bench))
    local = kinds.add_parser(
        "local",
        help="all modes on this machine, and transformers' generate",
        description="Compares the modes and transformers' generate on the same prompts, in one run.",
    )
    add_local_flags(local)
    local.set_defaults(run=run_local)
    serve = kinds.add_parser(
        "serve",
        help="a service on this machine against the one-process pipeline",
        description="Starts a service and compares it with the one-process pipeline on the same prompts, in one run.",
    )
    add_serve_flags(serve)
    serve.set_defaults(run=run_serve)


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench local``."""
    group = _add_model_flags(parser)
    group.add_argument("--worker", choices=["process", "thread"], default="process")
    group = parser.add_argument_group("what is compared")
    group.add_argument("--modes", type=_several(_mode), default=tuple(Mode), metavar="MODE,...")
    group.add_argument(
        "--baselines", type=_baselines, metavar="NAME,...", help="transformers, assisted or none (default: both)"
    )
    group.add_argument("--draft-tokens", type=_several(_k), default=(8,), metavar="K,...", help="default 8")
    group.add_argument(
        "--sequential-draft-tokens", type=_several(_k), default=(2, 3, 4, 6), metavar="K,...",
        help="all are measured, the best counts (default 2,3,4,6)",
    )  # fmt: skip
    group.add_argument("--acceptance", choices=[a.value for a in Acceptance], default=Acceptance.COUPLED.value)
    group.add_argument("--growth", choices=["best_first", "uniform", "geometric"], default="best_first")
    group.add_argument("--tree-step-tokens", type=_positive(1024), metavar="N")
    group = parser.add_argument_group("load")
    group.add_argument("--prompts", type=_positive(), metavar="N", help="default 8, or all of --prompts-file")
    group.add_argument("--prompts-file", type=Path, metavar="FILE", help='JSONL with a field "prompt"')
    group.add_argument("--max-tokens", type=_positive(), default=128, metavar="N", help="default 128")
    group.add_argument("--temperatures", type=_several(_temperature), default=(0.0, 1.0), metavar="T,...")
    group.add_argument("--repeats", type=_positive(), default=1, metavar="R")
    group.add_argument("--sessions", type=_positive(1024), default=1, metavar="N", help="prompts at once")
    group.add_argument("--seed", type=_natural, default=0, metavar="S", help="of prompts and sampling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench serve``."""
    _add_model_flags(parser)
    parser.add_argument("--draft-tokens", type=_k, default=8, metavar="K", help="default 8")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--prompts", type=_positive(), metavar="N",
        help="requests of a unit, but at least two per session (default 8); with --prompts-file also how many of it",
    )  # fmt: skip
    group.add_argument("--prompts-file", type=Path, metavar="FILE", help='JSONL with a field "prompt"')
    group.add_argument("--max-tokens", type=_positive(), default=128, metavar="N", help="default 128")
    group.add_argument("--temperatures", type=_several(_temperature), default=(0.0, 1.0), metavar="T,...")
    group.add_argument(
        "--sessions", type=_several(_positive(1024)), default=(1, 4, 16), metavar="N,...",
        help="requests at once, one load after the other (default 1,4,16)",
    )  # fmt: skip
    group.add_argument(
        "--draft-link-delay-ms", type=_several(_delay), default=(0.0,), metavar="D,...",
        help="added to each way between router and draft; a service is started for each (default 0)",
    )  # fmt: skip
    group.add_argument("--repeats", type=_positive(), default=1, metavar="R")
    group.add_argument("--seed", type=_natural, default=0, metavar="S", help="of prompts and sampling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")


def _add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What both kinds share."""
    target, draft = embedded_paths()
    group = parser.add_argument_group("models")
    group.add_argument("--target", default=str(target), metavar="P", help="default: the embedded target")
    group.add_argument("--draft", default=str(draft), metavar="P", help="default: the embedded draft")
    group.add_argument("--grow-target", type=_size, metavar="SIZE", help="cost of a larger target, e.g. 150M")
    group.add_argument(
        "--grow-draft", type=_draft_size, metavar="SIZE", help='likewise; "fifth": a fifth of the target\'s size'
    )
    group.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    group.add_argument("--no-compile", dest="compile", action="store_false", help="run the engines eagerly")
    return group


def settings_of(args: argparse.Namespace) -> Settings:
    """What the flags say. Raises ConfigError where they contradict each other."""
    baselines = args.baselines
    if baselines is None:
        baselines = _BASELINES if args.sessions == 1 else ()
    elif baselines and args.sessions > 1:
        raise ConfigError(
            f"--sessions is {args.sessions}: transformers' generate is measured one at a time, use --baselines none"
        )
    _check_common(args)
    prompts = args.prompts if args.prompts is not None else None if args.prompts_file else 8
    if prompts is not None and prompts % args.sessions:
        raise ConfigError(f"--prompts is {prompts}: it must be a multiple of --sessions ({args.sessions})")
    return Settings(
        target=args.target, draft=args.draft, grow_target=args.grow_target, grow_draft=args.grow_draft,
        modes=args.modes, baselines=baselines, num_prompts=prompts, prompts_file=args.prompts_file,
        max_tokens=args.max_tokens, temperatures=args.temperatures, repeats=args.repeats,
        draft_tokens=args.draft_tokens, sequential_draft_tokens=args.sequential_draft_tokens,
        sessions=args.sessions, seed=args.seed, dtype=args.dtype, acceptance=Acceptance(args.acceptance),
        growth=args.growth, tree_step_tokens=args.tree_step_tokens, compile=args.compile, worker=args.worker,
    )  # fmt: skip


def _check_common(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens is 1: at least 2 are needed, the first belongs to prefill")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {str(args.json)!r}: its directory does not exist")


def run_local(args: argparse.Namespace) -> int:
    """``paceline bench local``. Returns 1 if a text differs that is claimed to be plain decoding's."""
    given = settings_of(args)
    settings = with_grown_models(given)
    facts = {"target": model_facts(settings.target), "draft": model_facts(settings.draft)}
    with Bench(settings) as bench:
        records = bench.run()
    title = (
        f"{len({r.prompt for r in records})} prompts x {settings.repeats}, {settings.max_tokens} tokens each, "
        f"{settings.sessions} at once; {settings.acceptance.value} acceptance, {settings.growth} growth, "
        f"{settings.tree_step_tokens or 'as many as cost little more than one'} nodes per draft step"
    )
    print(render(facts, settings.dtype, records, title))
    if args.json is not None:
        data = as_json(asdict(given) | {"target": facts["target"].path, "draft": facts["draft"].path}, facts, records)
        args.json.write_text(json.dumps(data, default=str, indent=1) + "\n", encoding="utf-8")
    own = {mode.value for mode in Mode}
    return 1 if any(r.identical is False for r in records if r.mode in own) else 0


def run_serve(args: argparse.Namespace) -> int:
    """``paceline bench serve``. Returns 1 if any request's tokens differ from plain decoding's in one process."""
    from paceline.bench import serve, serve_report  # gRPC is for this kind only

    _check_common(args)
    given = serve.Settings(
        target=args.target, draft=args.draft, grow_target=args.grow_target, grow_draft=args.grow_draft,
        num_prompts=args.prompts, prompts_file=args.prompts_file, max_tokens=args.max_tokens,
        temperatures=args.temperatures, sessions=args.sessions, delays_ms=args.draft_link_delay_ms,
        repeats=args.repeats, draft_tokens=args.draft_tokens, seed=args.seed, dtype=args.dtype, compile=args.compile,
    )  # fmt: skip
    settings = serve.grown_settings(given)
    facts = {"target": model_facts(settings.target), "draft": model_facts(settings.draft)}
    outcome = serve.measure(settings)
    print(serve_report.render(facts, settings, outcome))
    if args.json is not None:
        paths = {"target": facts["target"].path, "draft": facts["draft"].path}
        data = serve_report.as_json(asdict(given) | paths, facts, outcome)
        args.json.write_text(json.dumps(data, default=str) + "\n", encoding="utf-8")
    return 1 if serve.differing(outcome.units) else 0


def _several(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    def parse(text: str) -> tuple[_T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return parse


def _mode(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no mode: {', '.join(mode.value for mode in Mode)} are") from None


def _baselines(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("none",):
        return ()
    for name in names:
        if name not in _BASELINES:
            raise argparse.ArgumentTypeError(f"{name!r} is no baseline: {', '.join(_BASELINES)} are, or none alone")
    return names


def _integer(text: str, least: int, most: int | None) -> int:
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is given, {allowed} is needed") from None
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"{value} is given, {allowed} is needed")
    return value


def _positive(most: int | None = None) -> Callable[[str], int]:
    return lambda text: _integer(text, 1, most)


def _natural(text: str) -> int:
    return _integer(text, 0, 2**40)


def _k(text: str) -> int:
    return _integer(text, 1, MAX_DRAFT_TOKENS)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is given, a number from 0 to 100 is needed")
    return value


def _delay(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is given, milliseconds from 0 to 10000 are needed")
    return value


def _size(text: str) -> int:
    from paceline.bench.grow import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _draft_size(text: str) -> int:
    return FIFTH if text == "fifth" else _size(text)
