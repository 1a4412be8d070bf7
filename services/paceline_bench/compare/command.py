"""``paceline bench compare SPEC``: its flags, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.numbers import integer, number
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline_bench.compare.spec import Arm, Spec, arm_of, read_spec
from paceline_bench.flags import several

if TYPE_CHECKING:
    from paceline_bench.compare.run import Found, Load


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the file, and what changes it."""
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml", help="see benchmarks/specs")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the file")
    parser.add_argument("--arm", action="append", metavar="NAME", help="only this one and the baseline (repeatable)")
    parser.add_argument("--sessions", type=several(integer(1, 1024)), metavar="N,...", help="requests at once")
    parser.add_argument("--temperatures", type=several(number(0, 100)), metavar="T,...")
    parser.add_argument("--prompts", type=int, metavar="N")
    parser.add_argument("--repeats", type=int, metavar="R")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns 1 if a text differs from the baseline's, or an arm fails.

    Raises:
        ConfigError: the file or a flag is wrong.
        PacelineError: the baseline fails.
    """
    given = {}
    for text in args.set:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: it has the form NAME=VALUE")
        given[name] = value
    fields = ("sessions", "temperatures", "prompts", "repeats", "max_tokens")
    loads = {name: value for name in fields if (value := getattr(args, name)) is not None}
    spec = read_spec(args.spec, given, loads)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        return _measure(spec, _arms(spec, args.arm, Path(folder)), args.json)


def _arms(spec: Spec, names: Sequence[str] | None, folder: Path) -> list[Arm]:
    """The arms of the file, with their models."""
    from paceline_bench.compare import made  # torch is for the kinds that run a model

    arms = [arm_of(spec, name, changes) for name, changes in spec.arms.items()] + made.method_arms(spec, folder)
    if names is not None:
        known = [arm.name for arm in arms]
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"--arm is {unknown[0]!r}: use some of {', '.join(known)}")
        arms = [arm for arm in arms if arm.name in (spec.baseline, *names)]
    for arm in arms:
        try:
            ServiceConfig.parse(arm.tree)
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name!r}: {error}") from error
    return [replace(arm, tree=made.with_models(arm.tree, folder)) for arm in arms]


def _measure(spec: Spec, arms: Sequence[Arm], file: Path | None) -> int:
    from paceline_bench.compare import table
    from paceline_bench.compare.run import compare
    from paceline_bench.machine import environment

    facts = environment()

    def say(load: Load, found: Sequence[Found]) -> None:
        print(*table.text(load, found, spec), sep="\n", file=sys.stderr, flush=True)

    results = table.joined(compare(spec, arms, say), spec)
    print(f"{facts['command']}     ({facts['cores']} cores with a load of {facts['load_average'][0]:.0f} at the start)")
    for load, found in results.items():
        print("", *table.text(load, found, spec), sep="\n")
    if file is not None:
        data = {"environment": facts, "spec": spec.model_dump(), "results": table.as_json(results)}
        file.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    return int(table.is_wrong(results))
