"""Tokens per target step under a virtual clock: `python benchmarks/simulate.py`.

The engines, tree, growth, ranking, calibration, waiting policy and the session's relay are those of production,
and so are the models; only time is not. A target step lasts one unit, a draft tree step `--draft-step` units,
whatever is in them, and messages take no time. So the figure shows what the method can win and nothing of this
machine: tokens emitted after a request's first outcome, per unit of virtual time ("per target step").

A message is taken in between two steps of its receiver, like in `workers.py`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.draft.engine import DraftEngine
from paceline.drafters.model import ModelDrafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import Hint, Outcome, SpeculationWanted
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.router.session import Session
from paceline.target.engine import TargetEngine
from paceline.target.heads.mounted import MountedHead
from paceline.target.hints import Hints
from paceline.target.mount import bind_heads
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.prompts import held_out_prompts

UNIT_S = 0.02
"""Seconds that the engines see pass in one unit: they hold defaults and limits in seconds."""
_EPSILON_S = 1e-9


@dataclass
class Clock:
    """Virtual seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class DraftClock:
    """Clock of the draft engine, which reads it within a step too: after the forward the step's duration has passed."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        self._clock, self._step_s, self._passed_s = clock, step_s, 0.0

    def __call__(self) -> float:
        return self._clock.now_s + self._passed_s

    def begin(self) -> None:
        """A step begins at the time of the common clock."""
        self._passed_s = 0.0

    def timed(self, drafter: Any) -> Any:
        """``drafter``, whose expansions take a step."""
        expand = drafter.expand

        def expanded(leaves: Any) -> Any:
            self._passed_s = self._step_s
            return expand(leaves)

        drafter.expand = expanded
        return drafter


@dataclass
class Mailbox:
    """Messages on their way to one engine, with the time of their arrival."""

    messages: list[tuple[float, Any]] = field(default_factory=list)

    def put(self, at_s: float, messages: Sequence[Any]) -> None:
        self.messages += [(at_s, message) for message in messages]

    def take(self, now_s: float) -> list[Any]:
        arrived = [m for at_s, m in self.messages if at_s <= now_s + _EPSILON_S]
        self.messages = [(at_s, m) for at_s, m in self.messages if at_s > now_s + _EPSILON_S]
        return arrived

    def next_s(self) -> float:
        return min((at_s for at_s, _ in self.messages), default=math.inf)


class TimedRunner:
    """A runner whose forward takes the units that ``cost`` says of its rows. Everything else is the runner's."""

    def __init__(self, runner: Any, clock: Clock, cost: Callable[[int], float]) -> None:
        self._runner, self._clock, self._cost = runner, clock, cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, steps: Any) -> Any:
        logits = self._runner.forward(steps)
        self._pass(steps)
        return logits

    def forward_with_states(self, steps: Any) -> Any:
        found = self._runner.forward_with_states(steps)
        self._pass(steps)
        return found

    def _pass(self, steps: Any) -> None:
        self._clock.now_s += UNIT_S * self._cost(sum(len(step.token_ids) for step in steps))


class Simulation:
    """One target and one draft; sessions one after another, so that calibration and policy learn."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        *,
        draft_step: float,
        max_leaves: int,
        tree_budget: int,
        fan_out: int,
        cost: Callable[[int], float] = lambda num_rows: 1.0,
        heads: Sequence[MountedHead] = (),
        hints: Hints | None = None,
        hint_after: float = 0.0,
        clock: Clock | None = None,
        adaptive: bool = True,
        trees: bool = True,
    ) -> None:
        """``cost``: units of a target's step by its rows. ``heads``: bound already, on ``clock`` if they take time.
        ``hint_after``: units from the beginning of a step to its hints. ``trees``: siblings may be verified."""
        self._draft_step_s = draft_step * UNIT_S
        self._clock = clock or Clock()
        self._events: list[tuple[float, Any]] = []
        self._nodes: list[Any] = []
        runner: Any = TimedRunner(target.runner(64), self._clock, cost)
        bind_heads(heads, runner.cache)
        self._target = TargetEngine(
            runner,
            lambda messages: self._events.extend(
                (self._clock.now_s + UNIT_S * hint_after * isinstance(m, Hint), m) for m in messages
            ),
            max_sessions=1,
            max_step_tokens=256,
            max_model_len=target.max_len,
            adaptive=adaptive,
            trees=trees,
            heads=heads,
            hints=hints,
            clock=self._clock,
        )
        drafter = ModelDrafter(draft.runner(64), max_leaves=max_leaves, max_prefill_tokens=256, top_m=256)
        self._draft_clock = DraftClock(self._clock, self._draft_step_s)
        self._draft = DraftEngine(
            self._draft_clock.timed(drafter),
            self._nodes.extend,
            vocab_size=target.vocab_size,
            tree_budget=tree_budget,
            fan_out=fan_out,
            clock=self._draft_clock,
        )

    def run(self, session: Session, *, draft_available: bool = True) -> tuple[list[int], int, float]:
        """(all tokens, tokens of the first outcome, units from the first outcome to the last)."""
        to_target, to_draft = Mailbox(), Mailbox()
        target_s = draft_s = self._clock.now_s  # when each engine acts next; inf: when a message comes
        actions = session.open(draft_available=draft_available)
        to_target.put(target_s, actions.to_target)
        to_draft.put(target_s, actions.to_draft)
        tokens: list[int] = []
        first, first_s = 0, 0.0
        while True:
            if target_s <= draft_s:
                self._clock.now_s = now_s = target_s
                self._target.receive(to_target.take(now_s))
                worked = self._target.step()
                target_s = self._clock.now_s
                if not worked:
                    wait_s = self._target.wait_s()
                    target_s = math.inf if wait_s is None else now_s + max(wait_s, _EPSILON_S)
                    target_s = max(min(target_s, to_target.next_s()), now_s)
                events, self._events[:] = list(self._events), []
                for at_s, event in events:
                    actions = session.on_target(event)
                    to_draft.put(at_s, actions.to_draft)
                    to_target.put(at_s, actions.to_target)
                    if isinstance(event, SpeculationWanted) and event.wanted and session.wants_draft:  # again
                        actions = session.on_draft_up()
                        to_draft.put(at_s, actions.to_draft)
                        to_target.put(at_s, actions.to_target)
                    draft_s = min(draft_s, max(to_draft.next_s(), now_s))
                    if isinstance(event, Outcome):
                        if not tokens:
                            first, first_s = len(event.token_ids), at_s
                        tokens += event.token_ids
                        if event.finish_reason is not None:
                            self._draft.receive(to_draft.take(math.inf))
                            return tokens, first, (at_s - first_s) / UNIT_S
            else:
                now_s = draft_s
                self._draft_clock.begin()
                self._draft.receive(to_draft.take(now_s))
                before = self._draft.stats.tree_steps
                worked = self._draft.step()
                took_s = self._draft_step_s if self._draft.stats.tree_steps > before else 0.0
                draft_s = now_s + took_s if worked else to_draft.next_s()
                nodes, self._nodes[:] = list(self._nodes), []
                for message in nodes:
                    to_target.put(now_s + took_s, session.on_draft(message).to_target)
                # A target in its step is not disturbed: it takes the message when the step has ended.
                if nodes and target_s > now_s + took_s:
                    target_s = max(self._clock.now_s, now_s + took_s)


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str
    speculation: SpeculationParams
    max_leaves: int = 16
    tree_budget: int = 256
    fan_out: int = 3


def ways(options: argparse.Namespace) -> list[Way]:
    k = options.draft_tokens
    sequential = [SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=n) for n in options.sequential_draft_tokens]
    best = SpeculationParams(max_draft_tokens=k)
    return [
        *(Way(f"lock step K={s.max_draft_tokens}", s) for s in sequential),
        Way(f"best first F=6 K={k}, 16 branches", best, 16, options.tree_budget, 6),
        Way(f"best first F=6 K={k}, 32 branches", best, 32, options.tree_budget, 6),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per target step under a virtual clock")
    parser.add_argument("--draft-step", type=float, default=0.2, help="in target steps (default 0.2)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--draft-tokens", type=int, default=8, help="K of the overlapped ways")
    parser.add_argument("--sequential-draft-tokens", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--tree-budget", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="faster; compiles once per machine")
    options = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(TARGET_DIR))
    prompts = held_out_prompts(tokenizer, options.prompts)
    models = [
        prepare(load_pretrained(Checkpoint.open(str(path)), torch.bfloat16), compile=options.compile)
        for path in (TARGET_DIR, DRAFT_DIR)
    ]
    print(f"draft step {options.draft_step:g}, {options.prompts} prompts x {options.max_tokens} tokens, coupled")
    texts: dict[tuple[float, int], list[int]] = {}
    for temperature in options.temperatures:
        rows = [("way", "tokens/unit", "tokens/step", "of best lock step", "texts", "s")]
        best_lock_step = 0.0
        for way in ways(options):
            started = time.perf_counter()
            simulation = Simulation(
                models[0],
                models[1],
                draft_step=options.draft_step,
                max_leaves=way.max_leaves,
                tree_budget=way.tree_budget,
                fan_out=way.fan_out,
            )
            num_tokens, units, steps, same = 0, 0.0, 0, 0
            for index, prompt in enumerate(prompts):
                sampling = SamplingParams(
                    max_tokens=options.max_tokens, temperature=temperature, seed=index, ignore_eos=True
                )
                session = Session(f"s{index}", prompt.token_ids, sampling, way.speculation, decode=lambda _: "")
                steps_before = simulation._target.stats.rounds
                tokens, first, took = simulation.run(session)
                num_tokens, units = num_tokens + len(tokens) - first, units + took
                steps += simulation._target.stats.rounds - steps_before - 1
                same += texts.setdefault((temperature, index), tokens) == tokens
            rate = num_tokens / units
            if way.speculation.mode is Mode.SEQUENTIAL:
                best_lock_step = max(best_lock_step, rate)
            against = "" if way.speculation.mode is Mode.SEQUENTIAL else f"{rate / best_lock_step:.2f}"
            rows.append(
                (
                    way.name,
                    f"{rate:.2f}",
                    f"{num_tokens / steps:.2f}",
                    against,
                    f"{same}/{len(prompts)} same",
                    f"{time.perf_counter() - started:.0f}",
                )
            )
        print(f"\ntemperature {temperature:g}")
        print("\n".join(table(rows)), flush=True)


if __name__ == "__main__":
    main()
