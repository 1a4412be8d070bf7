"""The flags of ``paceline bench``, and the kinds of their values: an error names what is given and what is allowed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from paceline.checkpoint.files import embedded_paths
from paceline.cli.flags import DRAFTER_HELP, device, drafters
from paceline.cli.numbers import integer, number
from paceline.config import DType
from paceline.types import MAX_DRAFT_TOKENS, Acceptance, Mode
from paceline_bench.endpoint import APIS
from paceline_bench.latency import LIMITED
from paceline_bench.local import BASELINES
from paceline_bench.models import FIFTH
from paceline_bench.peer_worker import ENGINES
from paceline_bench.settings import PARTS, Peer
from paceline_bench.tasks import GROUPS

_T = TypeVar("_T")
K = integer(1, MAX_DRAFT_TOKENS)
"""Parser of numbers of draft tokens."""


def add_local_flags(parser: argparse.ArgumentParser, one: Sequence[str], several_: Sequence[str]) -> None:
    """Adds the flags of ``paceline bench local``; ``one`` and ``several_`` are its default baselines."""
    models = _add_model_flags(parser)
    models.set_defaults(draft=None)
    models.add_argument("--drafter", choices=drafters("none"), metavar="NAME", default="model", help=DRAFTER_HELP)
    help_ = "a drafter inside the target, such as eagle3=DIRECTORY, and its most tokens at once (repeatable)"
    models.add_argument("--head", action="append", metavar="METHOD=MODEL[,TOKENS]", help=help_)
    help_ = "device of the draft model (default auto: with GPUs the first one that the target leaves free)"
    models.add_argument("--draft-device", type=device, default="auto", metavar="DEVICE", help=help_)
    models.add_argument("--worker", choices=["process", "thread"], default="process")
    group = parser.add_argument_group("what is compared")
    group.add_argument("--modes", type=several(mode), metavar="MODE,...", help="default: all, but those without sense")
    defaults = f"default: {','.join(one)}, for several sessions {','.join(several_)}"
    help_ = f"{', '.join(BASELINES)}, all or none ({defaults})"
    group.add_argument("--baselines", type=baselines, metavar="NAME,...", help=help_)
    group.add_argument("--draft-tokens", type=several(K), default=(8,), metavar="K,...", help="default 8")
    help_ = "all are measured, the best counts (default 2,3,4,6)"
    group.add_argument("--sequential-draft-tokens", type=several(K), default=(2, 3, 4, 6), metavar="K,...", help=help_)
    group.add_argument("--acceptance", choices=[a.value for a in Acceptance], default=Acceptance.COUPLED.value)
    group.add_argument("--tree-step-tokens", type=integer(1, 1024), metavar="N")
    help_ = "also measure targets whose products this many cores share, and 1 core, for paceline advise --from"
    group.add_argument("--cpu-threads", type=several(integer(2, 64)), default=(), metavar="N,...", help=help_)
    help_ = f"also measure {' or '.join(ENGINES)}, by the Python of the environment that has it (repeatable)"
    group.add_argument(
        "--peer", dest="peers", action="append", type=peer, default=[], metavar="ENGINE=PYTHON", help=help_
    )
    group = _add_load_flags(parser, "default 8, or all of --prompts-file")
    group.add_argument("--sessions", type=integer(1, 1024), default=1, metavar="N", help="prompts at once")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline bench serve``."""
    _add_model_flags(parser)
    parser.add_argument("--draft-tokens", type=K, default=8, metavar="K", help="default 8")
    help_ = "requests of a unit, but at least two per session (default 8); with --prompts-file also how many of it"
    group = _add_load_flags(parser, help_)
    _add_service_loads(group)
    group = parser.add_argument_group("another server to compare with")
    group.add_argument("--endpoint", metavar="URL", help="of an OpenAI API, measured with the same load")
    _add_server_flags(group)


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline bench endpoint``."""
    parser.add_argument("endpoint", metavar="URL", help="of an OpenAI API")
    _add_server_flags(parser.add_argument_group("server"))
    group = _add_load_flags(parser, "requests of a unit (default 8)", temperatures=(0.0,))
    target, _ = embedded_paths()
    help_ = "cuts held-out prompts (default: the embedded one)"
    group.add_argument("--tokenizer", dest="target", default=str(target), metavar="P", help=help_)
    _add_service_loads(group)


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline bench sweep``."""
    _add_model_flags(parser).set_defaults(grow_target=150_000_000, grow_draft=15_000_000)
    group = parser.add_argument_group("load")
    help_ = f"{', '.join(PARTS)} (default: all)"
    group.add_argument("--parts", type=several(str), default=PARTS, metavar="NAME,...", help=help_)
    _add_counts(group, 4, "at one session (default 4)", 64)
    help_ = "at one session; several sessions have the first and the last (default 0,0.6,1)"
    _add_temperatures(group, (0.0, 0.6, 1.0), help_)
    help_ = "requests at once (default 1,4,16)"
    group.add_argument("--sessions", type=several(integer(1, 1024)), default=(1, 4, 16), metavar="N,...", help=help_)
    _add_rates(group, (1.0, 2.0), "open loads of the service, arrivals per second (default 1,2)")
    add_report_flags(parser.add_argument_group("result"), "JSON files and the report")


def add_report_flags(group: argparse._ActionsContainer, out: str) -> None:
    """Adds the flags of a report; ``out`` is the help of its directory."""
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    group.add_argument("--title", default="Paceline: measured", metavar="TEXT")


def _add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    target, draft = embedded_paths()
    group = parser.add_argument_group("models")
    group.add_argument("--target", default=str(target), metavar="P", help="default: the embedded target")
    group.add_argument("--draft", default=str(draft), metavar="P", help="default: the embedded draft")
    group.add_argument("--grow-target", type=size, metavar="SIZE", help="cost of a larger target, e.g. 150M")
    help_ = 'cost of a larger draft; "fifth": a fifth of the target\'s size'
    group.add_argument("--grow-draft", type=draft_size, metavar="SIZE", help=help_)
    group.add_argument("--dtype", choices=get_args(DType), default="bfloat16")
    group.add_argument("--no-compile", dest="compile", action="store_false", help="run the engines eagerly")
    return group


def _add_load_flags(
    parser: argparse.ArgumentParser, prompts: str, temperatures: tuple[float, ...] = (0.0, 1.0)
) -> argparse._ArgumentGroup:
    """Adds prompts, temperatures and ``--json``; ``prompts`` is the help of their number."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")
    group = parser.add_argument_group("load")
    _add_counts(group, None, prompts, 128)
    help_ = 'JSONL with "prompt", "turns" or "conversations" per line'
    group.add_argument("--prompts-file", type=Path, metavar="FILE", help=help_)
    help_ = f"--prompts of each, each reported on its own: {', '.join(GROUPS)} or all; categories of --prompts-file"
    group.add_argument(
        "--task-group", dest="task_groups", type=several(str), default=(), metavar="NAME,...", help=help_
    )
    _add_temperatures(group, temperatures, None)
    return group


def _add_counts(group: argparse._ArgumentGroup, prompts: int | None, help_: str, max_tokens: int) -> None:
    group.add_argument("--prompts", dest="num_prompts", type=integer(), default=prompts, metavar="N", help=help_)
    help_ = f"default {max_tokens}"
    group.add_argument("--max-tokens", type=integer(), default=max_tokens, metavar="N", help=help_)
    group.add_argument("--repeats", type=integer(), default=1, metavar="R")
    group.add_argument("--seed", type=integer(0, 2**40), default=0, metavar="S", help="of prompts and sampling")


def _add_temperatures(group: argparse._ArgumentGroup, default: tuple[float, ...], help_: str | None) -> None:
    group.add_argument("--temperatures", type=several(number(0, 100)), default=default, metavar="T,...", help=help_)


def _add_rates(group: argparse._ArgumentGroup, default: tuple[float, ...], help_: str) -> None:
    group.add_argument(
        "--request-rate", dest="rates", type=several(number(1e-3, 1e5)), default=default, metavar="R,...", help=help_
    )


def _add_service_loads(group: argparse._ArgumentGroup) -> None:
    help_ = "closed loads: requests at once (default 1,4,16, or none with --request-rate)"
    group.add_argument("--sessions", type=several(integer(1, 1024)), metavar="N,...", help=help_)
    _add_rates(group, (), "open loads: arrivals per second; --prompts of them (default 32)")
    help_ = "shape of the gamma distribution of their gaps: 1 is Poisson, less is burstier (default 1)"
    group.add_argument("--burstiness", type=number(0.01, 1e4), metavar="B", help=help_)
    help_ = f"requests per second that keep all limits: {', '.join(LIMITED)}"
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help=help_)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--endpoint-model", metavar="NAME", help="default: the first that it lists")
    group.add_argument("--endpoint-api", choices=APIS, default=APIS[0], help=f"default {APIS[0]}")
    group.add_argument("--endpoint-key-file", type=Path, metavar="FILE", help="holds the bearer token")
    help_ = 'fields added to each request (default {"ignore_eos": true})'
    group.add_argument("--endpoint-body", type=json_object, metavar="JSON", help=help_)


def several(kind: Callable[[str], _T]) -> Callable[[str], tuple[_T, ...]]:
    """Parser of values with commas between them, each kept once."""

    def parse(text: str) -> tuple[_T, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    return parse


def mode(text: str) -> Mode:
    """A mode."""
    try:
        return Mode(text)
    except ValueError:
        modes = ", ".join(mode.value for mode in Mode)
        raise argparse.ArgumentTypeError(f"unknown mode {text!r}: use {modes}") from None


def baselines(text: str) -> tuple[str, ...]:
    """Names of baselines, ``none`` or ``all``."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("none",):
        return ()
    if names == ("all",):
        return BASELINES
    for name in names:
        if name not in BASELINES:
            allowed = f"{', '.join(BASELINES)}, or none or all alone"
            raise argparse.ArgumentTypeError(f"unknown baseline {name!r}: use {allowed}")
    return names


def peer(text: str) -> Peer:
    """An engine and the Python of its environment."""
    engine, _, python = text.partition("=")
    if engine not in ENGINES or not python:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given, {' or '.join(ENGINES)} with the Python of the environment that has it is needed, such "
            f"as {ENGINES[0]}=/opt/{ENGINES[0]}/bin/python"
        )
    return Peer(engine, python)


def goodput(texts: list[str]) -> dict[str, float]:
    """Limits such as ``ttft:200``, in milliseconds.

    Raises:
        argparse.ArgumentTypeError: a limit is unknown, given twice or not a positive number.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITED or name in limits:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given, each of {', '.join(LIMITED)} may be limited once, as ttft:200 (milliseconds)"
            )
        try:
            limits[name] = number(1e-6, 1e9)(value)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given, milliseconds above 0 are needed, as in {name}:200"
            ) from None
    return limits


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is given, an object in JSON is needed")
    return value


def size(text: str) -> int | None:
    """A number of parameters such as 150M; ``none`` for a model that is not grown."""
    if text == "none":
        return None
    from paceline_bench.grow import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def draft_size(text: str) -> int | None:
    """A number of parameters, or ``fifth``."""
    return FIFTH if text == "fifth" else size(text)


def add_virtual_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of ``paceline bench virtual``."""
    parser.add_argument("kind", choices=("overlap", "rows", "hits", "hints"), help="overlap, rows, hits or hints")
    parser.add_argument("--draft-step", type=float, default=0.2, help="in target steps (default 0.2)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-tokens", type=int, default=8, help="K of overlapped decoding (default 8)")
    parser.add_argument("--sequential-draft-tokens", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 12, 16, 32], help="draft tokens of a step")
    parser.add_argument("--fan-out", type=int, default=3, help="children below each node of hits (default 3)")
    parser.add_argument("--boundaries", type=int, nargs="+", default=[6, 7], help="layers below the exit of hints")
    parser.add_argument("--head", metavar="FOLDER", help="exit head of the boundary")
    parser.add_argument("--compile", action="store_true", help="faster; compiles once per machine")
