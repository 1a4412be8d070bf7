"""A draft, a head of the target, and both on one verification tree, under a virtual clock.

    python benchmarks/merged_trees.py > benchmarks/results/merged-trees.txt

Models, engines, trees and policies are those of production; only time is not (`simulate.py`). A step of the target
lasts one unit up to `--free-rows` rows and in proportion beyond, so rows are free up to there; a tree step of the draft
lasts `--draft-step` units beside it, a call of the head `--head-step` units before it. One session at a time; the first
`--warm-up` texts do not count. Each text must be that of the first way. Tokens per unit have their standard error over
texts, and so has their ratio to the better of the draft and the head alone, by the jackknife over the same texts.

    draft, chains   the draft alone, no siblings verified
    draft           the same, siblings of its own included
    head            the head alone
    head, path      the same, one path of the head and the tokens beside it
    backup          both; the head is asked where the draft has nothing
    merged          both; the head is also asked beside the draft's tokens, where that is expected to pay

Misses are steps for which the draft had nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import simulate
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import Outcome
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.router.session import Session
from paceline.target.engine import TargetEngine
from paceline.target.heads import asking
from paceline.target.heads.driver import Heads
from paceline.target.heads.mounted import MountedHead
from paceline.target.mount import features_of, load_heads, open_heads
from paceline.types import SamplingParams, SpeculationParams
from paceline_bench.prompts import Prompt, held_out_prompts


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str
    head: str = ""
    draft: bool = True
    leaves: int = asking.MOST_LEAVES
    joins: bool = True
    trees: bool = True


Texts = Sequence[tuple[int, float]]
"""Tokens after the first outcome and units of each text of a way."""


def ways(heads: Sequence[str], *, paths: bool) -> Iterator[Way]:
    """The draft alone, then each head in all ways."""
    yield Way("draft, chains", trees=False)
    yield Way("draft")
    for head in heads:
        yield Way(head, head, draft=False)
        if paths:
            yield Way(f"{head}, path", head, draft=False, leaves=1)
        yield Way(f"{head}, backup", head, joins=False)
        yield Way(f"{head}, merged", head)


class TimedHead:
    """A head each of whose calls takes some units. Everything else is the head's."""

    def __init__(self, head: Any, clock: simulate.Clock, units: float) -> None:
        self._head, self._clock, self._seconds = head, clock, units * simulate.UNIT_S

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def expand(self, leaves: Any) -> Any:
        self._clock.now_s += self._seconds
        return self._head.expand(leaves)

    def feed(self, fed: Any) -> None:
        self._clock.now_s += self._seconds
        self._head.feed(fed)


@contextmanager
def limited(way: Way) -> Iterator[None]:
    """What a way leaves out."""
    with mock.patch.object(asking, "MOST_LEAVES", way.leaves):
        if way.joins:
            yield
            return
        with mock.patch.object(Heads, "_may_join", return_value=False):
            yield


def mounted(way: Way, target: LoadedModel, checkpoint: Checkpoint, clock: simulate.Clock, units: float, k: int) -> Any:
    """The head of a way, if it has one."""
    if not way.head:
        return []
    options = HeadOptions(method=way.head, model=f"paceline/embedded-{way.head}", num_speculative_tokens=k, probe=False)
    setup = TargetSetup(str(TARGET_DIR), TargetOptions(device="cpu", heads=[options]))
    (found,) = load_heads(setup, open_heads(setup, checkpoint), checkpoint, target, None)
    return [MountedHead(found.name, TimedHead(found.head, clock, units), num_tokens=found.num_tokens)]  # type: ignore[arg-type]


def measure(
    options: argparse.Namespace,
    way: Way,
    models: dict[str, LoadedModel],
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    temperature: float,
) -> tuple[list[list[int]], Texts, tuple[str, ...]]:
    """The texts of a way, what each of those that count took, and the rest of its row of the table."""
    clock = simulate.Clock()
    target = models["target"]
    heads = mounted(way, target, checkpoint, clock, options.head_step, options.head_tokens)
    simulation = simulate.Simulation(
        target,
        models["draft"],
        draft_step=options.draft_step,
        max_leaves=16,
        tree_budget=256,
        fan_out=6,
        cost=lambda num_rows: max(1.0, num_rows / options.free_rows),
        heads=heads,
        clock=clock,
        trees=way.trees,
    )
    engine, texts, took = simulation._target, [], []
    engine.calibrate()
    speculation, before = SpeculationParams(max_draft_tokens=options.draft_tokens), counts(engine)
    on_misses: list[int] = []
    with limited(way):
        for index, prompt in enumerate(prompts):
            sampling = SamplingParams(
                max_tokens=options.max_tokens, temperature=temperature, seed=index, ignore_eos=True
            )
            session = Session(f"s{index}", prompt.token_ids, sampling, speculation, decode=lambda _: "")
            with seen(session) as outcomes:
                tokens, first, units = simulation.run(session, draft_available=way.draft)
            texts.append(tokens)
            if index + 1 == options.warm_up:
                before = counts(engine)
            if index >= options.warm_up:
                took.append((len(tokens) - first, units))
                on_misses += [len(each.token_ids) for each in outcomes[1:] if not of_draft(each)]
    rounds, rows, calls, *used = (now - then for now, then in zip(counts(engine), before, strict=True))
    steps = rounds - len(prompts) + options.warm_up
    shares = (f"{each / steps:.2f}" for each in used)
    figures = f"{sum(num_tokens for num_tokens, _ in took) / steps:.3f}", f"{rows / steps:.1f}"
    missed = f"{len(on_misses) / steps:.2f}", f"{statistics.mean(on_misses):.2f}" if on_misses else "-"
    return texts, took, (*figures, *shares, *missed, f"{calls / steps:.2f}")


def rate(texts: Texts) -> float:
    """Tokens per unit of all texts together."""
    return sum(num_tokens for num_tokens, _ in texts) / sum(units for _, units in texts)


def jackknifed(figure: Callable[..., float], *ways: Texts) -> str:
    """A figure of ways that wrote the same texts, and its standard error over texts (the jackknife's)."""
    num = len(ways[0])
    others = [figure(*([*way[:i], *way[i + 1 :]] for way in ways)) for i in range(num if num > 1 else 0)]
    error = math.sqrt((num - 1) * statistics.pvariance(others)) if others else math.nan
    return f"{figure(*ways):.3f} ± {error:.3f}"


@contextmanager
def seen(session: Session) -> Iterator[list[Outcome]]:
    """The outcomes that a session gets meanwhile."""
    outcomes: list[Outcome] = []
    on_target = session.on_target

    def noted(event: Any) -> Any:
        if isinstance(event, Outcome):
            outcomes.append(event)
        return on_target(event)

    with mock.patch.object(session, "on_target", noted):
        yield outcomes


def of_draft(outcome: Outcome) -> int:
    """Tokens of the draft that were verified."""
    return outcome.round.num_drafted - outcome.round.head_drafted - outcome.round.lookup_drafted


def counts(engine: TargetEngine) -> tuple[int, ...]:
    """Rounds, rows of proposals, calls of heads, and accepted tokens of the draft, of heads, of lookups."""
    stats = engine.stats
    rows = stats.draft_rows + stats.head_rows + stats.lookup_rows
    calls = sum(each.stats.depths for each in engine.heads.mounted)
    return stats.rounds, rows, calls, stats.nodes_used, stats.head_rows_used, stats.lookup_rows_used


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--free-rows", type=int, default=16, help="of a step (default 16)")
    parser.add_argument("--draft-step", type=float, default=0.2, help="in steps of the target (default 0.2)")
    parser.add_argument("--head-step", type=float, default=0.03, help="in steps of the target (default 0.03)")
    parser.add_argument("--draft-tokens", type=int, default=8, help="K (default 8)")
    parser.add_argument("--head-tokens", type=int, default=4, help="of a head (default 4)")
    parser.add_argument("--heads", nargs="*", default=["mtp", "eagle3", "medusa"], choices=["mtp", "eagle3", "medusa"])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--no-paths", dest="paths", action="store_false", help='without the rows "head, path"')
    parser.add_argument("--compile", action="store_true", help="in bfloat16: faster; compiles once per machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(str(TARGET_DIR))
    prompts = held_out_prompts(load_tokenizer(str(TARGET_DIR)), options.prompts)
    options_of = [HeadOptions(method=head, model=f"paceline/embedded-{head}", probe=False) for head in options.heads]
    opened = open_heads(TargetSetup(str(TARGET_DIR), TargetOptions(heads=options_of)), checkpoint)
    dtype = torch.bfloat16 if options.compile else torch.float32
    models = {
        name: prepare(load_pretrained(Checkpoint.open(str(path)), dtype), compile=options.compile, features=features)
        for name, path, features in (("target", TARGET_DIR, features_of(opened)), ("draft", DRAFT_DIR, None))
    }
    given = vars(options)
    print(", ".join(f"{name.replace('_', ' ')} {given[name]}" for name in given))
    for temperature in options.temperatures:
        columns = (
            "tokens/unit",
            "of the better alone",
            "tokens/step",
            "rows/step",
            "of the draft",
            "of the head",
            "looked up",
            "misses",
            "tokens on them",
            "head calls/step",
        )
        rows: list[tuple[str, ...]] = [(f"temperature {temperature:g}", *columns)]
        texts: list[list[int]] | None = None
        alone: dict[str, Texts] = {}
        for way in ways(options.heads, paths=options.paths):
            found, took, row = measure(options, way, models, checkpoint, prompts, temperature)
            texts = texts or found
            assert found == texts, f"{way.name}: another text than the first way's"
            if way.name in ("draft", way.head):
                alone[way.name] = took
            both = bool(way.head) and way.draft
            better = max(alone["draft"], alone[way.head], key=rate) if both else took
            ratio = jackknifed(lambda way, other: rate(way) / rate(other), took, better) if both else "-"
            rows.append((way.name, jackknifed(rate, took), ratio, *row))
        print("", *table(rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
