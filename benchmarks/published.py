"""The published setting of speculative speculative decoding, on paced engines: `python benchmarks/published.py`.

The paper (arXiv 2603.03251) measures Llama 3.1 70B on four H100s with a draft of 1 B: 54.7 tokens/s plain, 161.8 with
the draft on the same devices (k = 6), 255.8 with the draft on a fifth (k = 7). Here steps last as long as they do there
(`paced.py`); models are small and real, and so are the engines, trees, policies, streams and the router. Target and
draft are the same model, and the draft's logits are disturbed until the target accepts a stated share of its tokens:

- at temperature 0 every row of logits has its two largest exchanged with probability 1 - share;
- at temperature 1 every distribution is mixed with 1 - share of itself on other tokens, so that the rejection rule
  accepts ``share`` of a first token and a little more.

The share that the paper's own three figures imply, and a step of its draft, are the defaults: a round of 6 draft steps
and a target's step yields (1 - a^7) / (1 - a) tokens at 161.8 tokens/s, and one without waiting at most
(1 - a^8) / (1 - a) at 255.8, which gives a = 0.86 and 1.75 ms.

Beside each row stands what `paceline plan` simulates for it, from what was measured of the parts: the acceptance, the
mean step of the draft, the target's mean time between two forwards (they last as long as they are told to, and what
threads do comes on top), the link, what a branch costs, the share of a first candidate's misses that its siblings hold,
and how often and how well the target finds tokens in a session's own text. A row of which siblings are verified says
nothing of first candidates alone, so its plan takes the acceptance of the co-located ones, which verify chains.
"No host" is how many times the best co-located row an overlapped one is in the same simulations if what is done beside
the devices takes no time: draft steps as told to, no time between forwards, no link and no price of a branch.
Prompts come again, so that their whole pages are in the caches. All rows of a setting are measured in turn, window by
window.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import paced
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.embedded import DRAFT_DIR
from paceline.plan.advice import equivalent
from paceline.plan.closed_form import Load, Requests, System
from paceline.plan.outcomes import Outcomes
from paceline.plan.simulate import simulate
from paceline.plan.times import StepTable
from paceline.types import PAGE_SIZE, Acceptance, Mode, SamplingParams
from paceline_bench.prompts import held_out_prompts

ROWS = 295
"""Rows that cost as much as a step: an H100 in bf16 (``cli/plan.py``)."""
TREE_STEP_TOKENS, TREE_BUDGET, FAN_OUT = 32, 1024, 3
MIN_PATH_PROB = 0.01
"""Growth goes further than by default, and deeper rather than wider: the draft has a device of its own."""
AWAKE_S = 0.003
"""How long before its end a forward stops sleeping: a CUDA stream is polled by who waits for it."""
TARGET_DEVICES, DRAFT_DEVICES = 4, 1
PUBLISHED = {"plain": 54.7, "co-located": 161.8, "overlapped": 255.8}
"""Tokens/s of one request at temperature 0."""
OUTPUT_TOKENS = 256
SIMULATED_S = 60.0


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
class Row:
    """One way of serving that is measured."""

    name: str
    mode: Mode
    k: int = 0

    @property
    def devices(self) -> int:
        return TARGET_DEVICES + (DRAFT_DEVICES if self.name == "overlapped" else 0)


TRIED = (
    Row("plain", Mode.PLAIN),
    *(Row("co-located", Mode.SEQUENTIAL, k) for k in (4, 6, 8)),
    *(Row("overlapped", Mode.OVERLAPPED, k) for k in (7, 12)),
)
SETTINGS = ((0.0, Acceptance.COUPLED), (1.0, Acceptance.COUPLED), (1.0, Acceptance.REJECTION))


def main() -> None:
    parser = argparse.ArgumentParser(description="the published setting, on paced engines")
    parser.add_argument("--target-ms", type=float, default=18.3, help="a target's step (default 18.3)")
    parser.add_argument("--draft-ms", type=float, default=1.75, help="a draft's step (default 1.75)")
    parser.add_argument("--share", type=float, default=0.86, help="of draft tokens that fit (default 0.86)")
    parser.add_argument("--scale", type=float, default=1.0, help="all steps so many times as long (default 1)")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8], help="at once (default 1 8)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window (default 8)")
    parser.add_argument("--repeats", type=int, default=3, help="of every window, in turn (default 3)")
    options = parser.parse_args()
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, steps times {options.scale:g}\n")
    for temperature in dict.fromkeys(temperature for temperature, _ in SETTINGS):
        asyncio.run(measure(options, temperature))


async def measure(options: argparse.Namespace, temperature: float) -> None:
    """All rows of a temperature, with both rules where they differ, at every number of sessions."""
    config = LocalConfig(
        target=TargetModel(path=str(DRAFT_DIR), max_model_len=1024, max_sessions=max(8, *options.sessions)),
        draft=DraftModel(
            path=str(DRAFT_DIR),
            tree_step_tokens=TREE_STEP_TOKENS,
            tree_budget=TREE_BUDGET,
            fan_out=FAN_OUT,
            min_path_prob=MIN_PATH_PROB,
        ),
    )
    times = [ms * options.scale / 1e3 for ms in (options.target_ms, options.draft_ms)]
    target, draft = (paced.Pace(step_s, step_s / ROWS, AWAKE_S) for step_s in times)
    disturbed = functools.partial(Disturbed, share=options.share, temperature=temperature)
    prompts = [p.token_ids for p in held_out_prompts(load_tokenizer(config.target.path), 24)]
    computed = round(sum((len(ids) - 1) % PAGE_SIZE + 1 for ids in prompts) / len(prompts))
    with paced.processes() as started:
        members = paced.replicas(started, config, [("target", target), ("draft", draft)], disturbed=disturbed)
        (own,) = paced.in_turn(started, config, target, draft, 1, disturbed)
        async with paced.routed(config, members) as router:
            for sessions in options.sessions:
                for rule in (rule for at, rule in SETTINGS if at == temperature):
                    windows: dict[Row, list[paced.Window]] = {row: [] for row in TRIED}
                    for repeat in range(options.repeats):
                        turn = repeat % len(TRIED)
                        for row in (*TRIED[turn:], *TRIED[:turn]):
                            sampling = SamplingParams(
                                max_tokens=OUTPUT_TOKENS, temperature=temperature, ignore_eos=True, seed=repeat
                            )
                            speculation = paced.speculation_of(row.mode, row.k, rule)
                            arguments = (prompts, sessions, sampling, speculation, 3.0, options.seconds)
                            if row.name == "co-located":
                                own.pipe.send(arguments)
                                window = await asyncio.to_thread(own.answer)
                            else:
                                window = await paced.load(router, *arguments)
                            windows[row].append(window)
                            print(f"{sessions} sessions, {row}: {window.tokens_per_s:.1f} tokens/s", file=sys.stderr)
                    setting = f"temperature {temperature:g}, {rule.value} rule, {sessions} at once"
                    show(setting, {row: paced.total(w) for row, w in windows.items()}, sessions, times, rule, computed)


def planned(row: Row, w: paced.Window, times: list[float], rule: Acceptance, acceptance: float) -> System:
    """What `paceline plan` is told of a row: the engines' settings, and what was measured of the parts."""
    target, draft = (paced.Pace(step_s, step_s / ROWS) for step_s in times)
    first_s = w.draft_step_s - (w.draft_leaves / max(w.draft_steps, 1) - 1) * draft.row_s
    coupled = rule is Acceptance.COUPLED
    outcomes = Outcomes.derived(acceptance or 0.5, coupled=coupled)
    if row.mode is not Mode.OVERLAPPED:
        return System(
            StepTable.affine(target.step_s, target.row_s),
            StepTable.affine(max(draft.step_s, first_s), draft.row_s),
            outcomes,
            gap_s=w.gap_s(target),
            colocated=True,
        )
    if (found := w.siblings_hold(acceptance)) is not None:
        outcomes = outcomes.with_siblings(found, FAN_OUT)
    rows = round(w.looked_up / max(w.lookups, 1))
    return System(
        StepTable.affine(target.step_s, target.row_s),
        StepTable.affine(max(draft.step_s, first_s), draft.row_s),
        outcomes,
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


def show(
    setting: str,
    found: dict[Row, paced.Window],
    sessions: int,
    times: list[float],
    rule: Acceptance,
    prompt_tokens: int,
) -> None:
    """Prints a setting's table."""
    base = max(w.tokens_per_s for row, w in found.items() if row.name == "co-located")
    chains = paced.acceptance([w for row, w in found.items() if row.name == "co-located"])
    rows: list[tuple[str, ...]] = [
        (
            *("", "K", "tokens/s", "a request", "a device", "x co-located", "accepted", "tok/round", "hits"),
            *("siblings", "lookups", "draft ms", "gap ms", "link ms", "branch ms", "plan", "error"),
            *("no host", "published"),
        )
    ]
    draft = paced.Pace(times[1], times[1] / ROWS)
    paces = StepTable.affine(draft.step_s, draft.row_s)
    best = 0.0  # of co-located rows, without a host
    for row, w in found.items():
        accepted = paced.acceptance([w]) if row.k else 0.0
        trees = row.mode is Mode.OVERLAPPED
        first = chains if trees and rule is Acceptance.COUPLED else accepted
        system = planned(row, w, times, rule, first)
        load = Load(sessions, 1, 1 if trees else 0, Requests(OUTPUT_TOKENS, prompt_tokens))
        forecast = simulate(system, load, row.mode, row.k, seconds=SIMULATED_S).tokens_per_s
        bare = replace(system, draft=paces, gap_s=0.0, link_s=0.0, branch_s=0.0)
        bound = simulate(bare, load, row.mode, row.k, seconds=SIMULATED_S).tokens_per_s
        if row.name == "co-located":
            best = max(best, bound)
        published = "temperature 0" in setting and sessions == 1
        rows.append(
            (
                row.name,
                str(row.k or "-"),
                f"{w.tokens_per_s:.1f}",
                f"{w.tokens_per_s / sessions:.1f}",
                f"{w.tokens_per_s / row.devices:.1f}",
                f"{w.tokens_per_s / base:.2f}",
                f"{accepted:.3f}" if row.k else "-",
                f"{w.tokens_per_round:.2f}",
                "-" if w.hit_rate is None else f"{w.hit_rate:.2f}",
                f"{w.siblings_hold(first) or 0.0:.2f}" if trees else "-",
                f"{system.lookup_share:.2f}" if trees else "-",
                f"{1e3 * w.draft_step_s:.2f}" if row.k else "-",
                f"{1e3 * system.gap_s:.2f}",
                f"{1e3 * system.link_s:.2f}" if trees else "-",
                f"{1e3 * system.branch_s:.2f}" if trees else "-",
                f"{forecast:.1f}",
                f"{forecast / w.tokens_per_s - 1:+.1%}",
                f"{bound / best:.2f}" if trees else "-",
                f"{PUBLISHED[row.name]:g}" if published and row.k in (0, 6, 7) else "",
            )
        )
    print(setting)
    print("\n".join(table(rows)) + "\n", flush=True)


if __name__ == "__main__":
    main()
