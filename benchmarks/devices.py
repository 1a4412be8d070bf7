"""Several devices on one machine, by paced engines (`paced.py`): plain, co-located, sequential and overlapped decoding.

    python benchmarks/devices.py published   the paper's setting: 70 B on four H100s, a draft of 1 B on a fifth
    python benchmarks/devices.py sharing     one draft for four targets against five devices that draft for themselves
    python benchmarks/devices.py delay       a slower link between router and draft

Steps last as long as told; models are small and real, and so are the engines, trees, policies, streams and the
router. All ways of a setting are measured in turn, window by window. Prompts come again, so that their whole pages
are in the caches.

*Published* (arXiv 2603.03251): 54.7 tokens/s plain, 161.8 with the draft on the same devices (k = 6), 255.8 with the
draft on a fifth (k = 7). Target and draft are the same model, and the draft's logits are disturbed until the target
accepts a stated share of its tokens: at temperature 0 every row has its two largest exchanged with probability 1 -
share; at temperature 1 every distribution is mixed with 1 - share of itself on other tokens. The share that the three
figures imply, and a step of the draft, are the defaults: a round of 6 draft steps and a target's step yields (1 -
a^7) / (1 - a) tokens at 161.8 tokens/s, and one without waiting at most (1 - a^8) / (1 - a) at 255.8, which gives a =
0.86 and 1.75 ms.

Beside each row stands what `paceline plan` simulates for it, from what was measured of the parts: the acceptance, the
mean step of the draft, the target's mean time between two forwards, the link, what a branch costs, the share of a
first candidate's misses that its siblings hold, and prompt lookups. A row of which siblings are verified says nothing
of first candidates alone, so its plan takes the acceptance of rows that verify chains. "No host" is how many times
the best co-located row an overlapped one is in the same simulations if what is done beside the devices takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import paced
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, HeadOptions, LocalConfig, TargetModel
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.plan.advice import equivalent
from paceline.plan.closed_form import MOST_LEAVES, RANKED, Load, Requests, System
from paceline.plan.outcomes import Outcomes
from paceline.plan.times import StepTable
from paceline.plan.trees import simulate
from paceline.router.router import Router
from paceline.types import PAGE_SIZE, Acceptance, Mode, SamplingParams, SpeculationParams
from paceline_bench.prompts import held_out_prompts

ROWS = 295
"""Rows that cost as much as a step: an H100 in bf16 (``cli/plan.py``)."""
TREE_STEP_TOKENS, TREE_BUDGET, FAN_OUT = 32, 1024, 3
MIN_PATH_PROB = 0.01
"""Growth goes further than by default, and deeper rather than wider: the draft has a device of its own."""
LARGEST_OWN_K = 8
"""Draft tokens of a co-located draft, at most."""
AWAKE_S = 0.003
"""How long before its end a forward stops sleeping: a CUDA stream is polled by who waits for it."""
PUBLISHED = {("plain", 0): 54.7, ("co-located", 6): 161.8, ("overlapped", 7): 255.8}
"""Tokens/s of one request at temperature 0."""
SIMULATED_S, WARM_S, OUTPUT_TOKENS = 60.0, 3.0, 256


class Disturbed:
    """A runner whose logits a target that computes the right ones accepts only in part."""

    chains = False
    """Several steps in one native call would be undisturbed."""

    def __init__(self, runner: Any, share: float, temperature: float) -> None:
        self._runner, self._share, self._greedy = runner, share, temperature == 0.0
        self._generator = torch.Generator().manual_seed(0)
        self._moved = runner.vocab_size // 2 + 1
        """Places by which the other distribution is shifted."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, steps: Any) -> torch.Tensor:
        """Logits of the steps, [rows, vocabulary]."""
        logits: torch.Tensor = self._runner.forward(steps)
        if self._greedy:
            wrong = torch.rand(len(logits), generator=self._generator) >= self._share
            values, tokens = logits[wrong].topk(2)
            logits[wrong] = logits[wrong].scatter(1, tokens, values.flip(1))
            return logits
        p, by = (logits.float() - logits.amax(-1, keepdim=True)).exp_(), self._moved  # up to a factor for each row
        mixed = self._share * p
        mixed[:, by:].add_(p[:, :-by], alpha=1.0 - self._share)
        mixed[:, :by].add_(p[:, -by:], alpha=1.0 - self._share)
        return mixed.log_().to(logits.dtype)


@dataclass(frozen=True)
class Way:
    """One way of serving."""

    name: str
    mode: Mode
    k: int = 0
    delay_s: float = 0.0
    """Added to each way of the draft link."""

    @property
    def alone(self) -> bool:
        """True if no draft replica takes part."""
        return self.mode is Mode.PLAIN or self.name == "co-located"


@dataclass(frozen=True)
class Setting:
    """Devices, and what is measured on them."""

    targets: int
    own: int
    """Targets with a draft model of their own (a head); a router of their own places the sessions."""
    steps_s: tuple[float, float]
    """Seconds of a step of target and draft."""
    model: str
    """Directory of the target."""
    ways: Sequence[Way]
    cells: Sequence[tuple[float, Acceptance, int]]
    """(temperature, rule, sessions)."""
    disturbed: Callable[[Any], Any] | None = None
    parts: int = 1
    """Devices that are one target: the published one has four."""
    published: bool = False

    @property
    def paces(self) -> tuple[paced.Pace, paced.Pace]:
        """Of target and draft."""
        target, draft = (paced.Pace(step_s, step_s / ROWS, AWAKE_S) for step_s in self.steps_s)
        return target, draft

    def devices(self, way: Way) -> int:
        """Number of devices that a way takes."""
        if way.alone:
            return max(self.own, 1) * self.parts
        return self.targets * self.parts + 1


@dataclass
class Devices:
    """The replicas of a setting, with a router for each delay and one for targets with draft models of their own."""

    routers: dict[float, Router]
    own: Router | None
    prompts: list[tuple[int, ...]]
    windows: dict[Way, list[paced.Window]] = field(default_factory=dict)

    async def window(self, way: Way, sessions: int, sampling: SamplingParams, rule: Acceptance, seconds: float) -> None:
        """Measures a way once more."""
        drafting = {} if way.mode is Mode.PLAIN else {"max_draft_tokens": way.k, "acceptance": rule}
        speculation = SpeculationParams(mode=way.mode, **drafting)
        router = self.own if way.alone and self.own is not None else self.routers[way.delay_s]
        found = await paced.load(router, self.prompts, sessions, sampling, speculation, WARM_S, seconds)
        self.windows.setdefault(way, []).append(found)
        print(f"{sessions} sessions, {way}: {found.tokens_per_s:.1f} tokens/s", file=sys.stderr, flush=True)


async def measure(setting: Setting, seconds: float, repeats: int) -> None:
    """All ways in turn in each cell of a setting; prints a table for each."""
    growth = {"fan_out": FAN_OUT, "min_path_prob": MIN_PATH_PROB}
    config = LocalConfig(
        target=TargetModel(
            path=setting.model, max_model_len=1024, max_sessions=max(8, *(n for _, _, n in setting.cells))
        ),
        draft=DraftModel(path=str(DRAFT_DIR), tree_step_tokens=TREE_STEP_TOKENS, tree_budget=TREE_BUDGET, **growth),
    )
    target, draft = setting.paces
    prompts = [prompt.token_ids for prompt in held_out_prompts(load_tokenizer(config.target.path), 24)]
    async with contextlib.AsyncExitStack() as stack:
        factory = functools.partial(paced.PacedFactory, target=target, draft=draft, disturbed=setting.disturbed)
        pools = [factory("target", config)] * setting.targets + [factory("draft", config)]
        members = paced.replicas(stack, pools)
        own = None
        if setting.own:
            head = HeadOptions(method="draft_model", model=str(DRAFT_DIR), num_speculative_tokens=LARGEST_OWN_K)
            with_head = config.model_copy(update={"target": config.target.model_copy(update={"heads": [head]})})
            devices = paced.replicas(stack, [factory("target", with_head)] * setting.own)
            own = await stack.enter_async_context(paced.routed(with_head, devices))
        routers = {
            delay_s: await stack.enter_async_context(paced.routed(config, members, delay_s=delay_s))
            for delay_s in dict.fromkeys(way.delay_s for way in setting.ways)
        }
        for temperature, rule, sessions in setting.cells:
            devices = Devices(routers, own, prompts)
            for repeat in range(repeats):
                turn = repeat % len(setting.ways)
                for way in (*setting.ways[turn:], *setting.ways[:turn]):
                    sampling = SamplingParams(
                        max_tokens=OUTPUT_TOKENS, temperature=temperature, ignore_eos=True, seed=repeat
                    )
                    await devices.window(way, sessions, sampling, rule, seconds)
            found = {way: paced.total(windows) for way, windows in devices.windows.items()}
            print(f"temperature {temperature:g}, {rule.value} rule, {sessions} at once")
            print("\n".join(table(rows_of(setting, found, (temperature, rule, sessions), prompts))) + "\n", flush=True)


def planned(row: Way, w: paced.Window, times: Sequence[float], rule: Acceptance, acceptance: float) -> System:
    """What `paceline plan` is told of a row: the engines' settings, and what was measured of the parts."""
    target, draft = (paced.Pace(step_s, step_s / ROWS) for step_s in times)
    first_s = w.draft_step_s - (w.draft_leaves / max(w.draft_steps, 1) - 1) * draft.row_s
    steps = StepTable.affine(target.step_s, target.row_s), StepTable.affine(max(draft.step_s, first_s), draft.row_s)
    outcomes = Outcomes.derived(acceptance or 0.5, coupled=rule is Acceptance.COUPLED)
    if row.mode is not Mode.OVERLAPPED:
        return System(
            *(*steps, outcomes),
            gap_s=w.gap_s(target),
            link_s=w.link_s if row.name == "sequential" else 0.0,
            colocated=row.name != "sequential",
            ranked=RANKED if row.name == "co-located" else 1,
            most_leaves=MOST_LEAVES if row.name == "co-located" else 1,
        )
    if (found := w.siblings_hold(acceptance)) is not None:
        outcomes = outcomes.with_siblings(found, FAN_OUT)
    rows = round(w.looked_up / max(w.lookups, 1))
    return System(
        *(*steps, outcomes),
        link_s=w.link_s,
        gap_s=w.gap_s(target),
        fan_out=FAN_OUT,
        tree_budget=TREE_BUDGET,
        min_path_prob=MIN_PATH_PROB,
        draft_width=TREE_STEP_TOKENS,
        trees=True,
        branch_s=w.branch_s / max(w.steps, 1),
        lookup_share=w.lookups / max(w.rounds, 1),
        lookup_acceptance=equivalent(w.lookups_accepted / max(w.lookups, 1), rows),
    )


def rows_of(
    setting: Setting,
    found: dict[Way, paced.Window],
    cell: tuple[float, Acceptance, int],
    prompts: Sequence[Sequence[int]],
) -> list[tuple[str, ...]]:
    """The table of a cell."""
    temperature, rule, sessions = cell
    computed = round(sum((len(ids) - 1) % PAGE_SIZE + 1 for ids in prompts) / len(prompts))
    in_turn = [w for way, w in found.items() if way.mode is Mode.SEQUENTIAL]
    base = max(w.tokens_per_s for way, w in found.items() if way.mode is Mode.SEQUENTIAL and not way.delay_s)
    chains = paced.acceptance(in_turn)
    first = {(way.mode, way.k): w for way, w in reversed(found.items())}
    links = {(way.mode, way.k): w.link_s for way, w in found.items() if not way.delay_s}
    draft = setting.paces[1]
    best = 0.0  # of rows in turn, without a host
    head = ("", "K", "delay ms", "tokens/s", "a device", "x in turn", "of no delay", "accepted", "tok/round", "hits")
    more = (
        "siblings",
        "lookups",
        "draft ms",
        "gap ms",
        "link ms",
        "branch ms",
        "plan",
        "error",
        "no host",
        "published",
    )
    rows: list[tuple[str, ...]] = [(*head, *more)]
    for way, w in found.items():
        trees = way.mode is Mode.OVERLAPPED
        accepted = paced.acceptance([w]) if way.k else 0.0
        of_first = chains if trees and rule is Acceptance.COUPLED else accepted
        system = planned(way, w, setting.steps_s, rule, of_first)
        if way.delay_s:
            system = replace(system, link_s=links[way.mode, way.k] + way.delay_s)
        targets = min(sessions, max(setting.own, 1)) if way.alone else setting.targets
        load = Load(sessions, targets, 0 if way.alone else 1, Requests(OUTPUT_TOKENS, computed))
        paces = StepTable.affine(draft.step_s, draft.row_s)
        bare = replace(system, draft=paces, gap_s=0.0, link_s=0.0, branch_s=0.0)
        forecast, bound = (
            simulate(each, load, way.mode, way.k, seconds=SIMULATED_S).tokens_per_s for each in (system, bare)
        )
        best = max(best, bound) if way.mode is Mode.SEQUENTIAL else best
        known = PUBLISHED.get((way.name, way.k)) if setting.published and (temperature, sessions) == (0, 1) else None
        speeds = w.tokens_per_s / setting.devices(way), w.tokens_per_s / base
        over_first = w.tokens_per_s / first[way.mode, way.k].tokens_per_s
        row = (way.name, str(way.k or "-"), f"{1e3 * way.delay_s:g}", f"{w.tokens_per_s:.1f}", f"{speeds[0]:.1f}")
        row += (
            f"{speeds[1]:.2f}",
            f"{over_first:.2f}",
            f"{accepted:.3f}" if way.k else "-",
            f"{w.tokens_per_round:.2f}",
        )
        row += ("-" if w.hit_rate is None else f"{w.hit_rate:.2f}",)
        siblings = (w.siblings_hold(of_first) or 0.0, system.lookup_share)
        row += tuple(f"{share:.2f}" if trees else "-" for share in siblings)
        row += (f"{1e3 * w.draft_step_s:.2f}" if way.k else "-", f"{1e3 * system.gap_s:.2f}")
        row += tuple(f"{1e3 * s:.2f}" if trees else "-" for s in (system.link_s, system.branch_s))
        row += (f"{forecast:.1f}", f"{forecast / w.tokens_per_s - 1:+.1%}", f"{bound / best:.2f}" if trees else "-")
        rows.append((*row, "" if known is None else f"{known:g}"))
    return rows


PLAIN = Way("plain", Mode.PLAIN)
COUPLED, REJECTION = Acceptance.COUPLED, Acceptance.REJECTION


def settings(args: argparse.Namespace) -> list[Setting]:
    """What a command line measures: a setting for each temperature, as drafts are disturbed by it."""
    target_s, draft_s = (ms * args.scale / 1e3 for ms in args.step_ms or STEPS_MS[args.setting])
    sessions = args.sessions or SESSIONS[args.setting]
    if args.setting == "published":
        ways = [PLAIN, *(Way("co-located", Mode.SEQUENTIAL, k) for k in (4, 6, 8))]
        ways += [Way("overlapped", Mode.OVERLAPPED, k) for k in (7, 12)]
        rules = {0.0: (COUPLED,), 1.0: (COUPLED, REJECTION)}
        return [
            Setting(
                *(1, 1, (target_s, draft_s), str(DRAFT_DIR), ways),
                cells=[(temperature, rule, n) for n in sessions for rule in rules[temperature]],
                disturbed=functools.partial(Disturbed, share=args.share, temperature=temperature),
                parts=4,
                published=True,
            )
            for temperature in args.temperatures
        ]
    cells = [(temperature, COUPLED, n) for temperature in args.temperatures[:1] for n in sessions]
    if args.setting == "sharing":
        ways = [PLAIN, *(Way("co-located", Mode.SEQUENTIAL, k) for k in (3, 4)), Way("sequential", Mode.SEQUENTIAL, 3)]
        ways += [Way("overlapped", Mode.OVERLAPPED, k) for k in (4, 8)]
        return [Setting(4, 5, (target_s, draft_s), str(TARGET_DIR), ways, cells)]
    ways = [PLAIN]
    for delay_ms in dict.fromkeys((0.0, *args.delays_ms)):
        ways += [
            Way("sequential", Mode.SEQUENTIAL, 4, delay_ms / 1e3),
            Way("overlapped", Mode.OVERLAPPED, 8, delay_ms / 1e3),
        ]
    return [Setting(1, 0, (target_s, draft_s), str(TARGET_DIR), ways, cells)]


STEPS_MS = {"published": (18.3, 1.75), "sharing": (60.0, 12.0), "delay": (40.0, 4.0)}
SESSIONS = {"published": (1, 8), "sharing": (4, 20), "delay": (1,)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=STEPS_MS)
    parser.add_argument("--step-ms", type=float, nargs=2, metavar=("TARGET", "DRAFT"), help="of the setting by default")
    parser.add_argument("--scale", type=float, default=1.0, help="all steps so many times as long (default 1)")
    parser.add_argument("--share", type=float, default=0.86, help="of draft tokens that fit (published; default 0.86)")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0, 10.0], help="of delay")
    parser.add_argument("--temperatures", type=float, nargs="+", choices=(0.0, 1.0), default=[0.0, 1.0])
    parser.add_argument("--sessions", type=int, nargs="+", help="at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="of every window, in turn (default 3)")
    args = parser.parse_args()
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, steps times {args.scale:g}\n")
    for setting in settings(args):
        asyncio.run(measure(setting, args.seconds, args.repeats))


if __name__ == "__main__":
    main()
