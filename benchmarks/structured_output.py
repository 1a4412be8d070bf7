"""CPU time that structured output adds to the steps of target and draft: `python benchmarks/structured_output.py`.

The embedded pair serves prompts under a JSON Schema, one at a time, by plain decoding and with its draft; target and
draft take turns in this thread. Whatever a step does with logits it does a second time as if there were no schema, on
the same logits and the same proposal, in turns first and last, and each time after as many bytes were read as the model
has weights, which displaces what the processor's caches hold. So a step is compared with itself, and neither the text
nor what else runs on the machine tells the two apart. Printed are the thread's CPU milliseconds for each step of either
engine without and with the schema, the difference in percent, and, of a second pass, the percent that finding masks and
following the text take.

    python benchmarks/structured_output.py [--prompts 16] [--tokens 160] [--no-compile]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from paceline.checkpoint.grammar import Matcher
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.core.processors import Row, SamplerState
from paceline.draft.build import build_draft_engine
from paceline.drafters import model as model_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.router.relay import Relay
from paceline.router.session import Session
from paceline.target import engine as target_engine
from paceline.target.build import build_target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams, StructuredOutput
from paceline_bench.prompts import held_out_prompts

_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "size": {"type": "integer", "minimum": 0, "maximum": 100000},
        "kind": {"enum": ["file", "folder", "link"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z_]+$"}, "maxItems": 4},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
FORM = StructuredOutput(json_schema={"type": "array", "items": _ITEM, "minItems": 100})


class Cost:
    """CPU seconds of this thread in the steps of one engine."""

    def __init__(self, num_bytes: int, *, follows_in_step: bool) -> None:
        """``num_bytes``: of the model's weights. ``follows_in_step``: whether its steps follow the text themselves."""
        self.num_steps = 0
        self.step_s = self.bound_s = self.free_s = self.masks_s = self.follow_s = 0.0
        self._follows_in_step = follows_in_step
        self._apart_s = 0.0
        self._first_is_bound = False
        self._weights = torch.ones(num_bytes // 4, dtype=torch.int32)

    def step(self, engine: Any, count: Callable[[], int]) -> bool:
        """Lets an engine step; it counts if ``count`` has grown."""
        before, self._apart_s, started = count(), 0.0, time.thread_time()
        worked = bool(engine.step())
        if count() > before:
            self.num_steps += count() - before
            self.step_s += time.thread_time() - started - self._apart_s
        return worked

    def both(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function(logits, rows, ...)``, which also runs without structured outputs, outside of the step."""

        def called(logits: Any, rows: Sequence[Row], *others: Any) -> Any:
            entered = time.thread_time()
            self._first_is_bound = not self._first_is_bound
            spent, results = {}, {}
            for bound in (self._first_is_bound, not self._first_is_bound):
                given = rows if bound else unbound(rows)
                self._weights.max()
                started = time.thread_time()
                results[bound] = function(logits, given, *others)
                spent[bound] = time.thread_time() - started
            self.bound_s += spent[True]
            self.free_s += spent[False]
            self._apart_s += time.thread_time() - entered - spent[True]
            return results[True]

        return called

    @property
    def added_s(self) -> float:
        """What the schema adds."""
        return self.bound_s - self.free_s + self.follow_s

    @property
    def without_s(self) -> float:
        """The steps without the schema."""
        return self.step_s - self.added_s + (0.0 if self._follows_in_step else self.follow_s)


def timed(function: Callable[..., Any], name: str, costs: tuple[Cost, Cost]) -> Callable[..., Any]:
    """A method of matchers whose seconds are added to ``name`` of the target's or the draft's cost."""

    def called(matcher: Any, *args: Any) -> Any:
        cost, started = costs[matcher._lenient], time.thread_time()  # the draft's are lenient
        try:
            return function(matcher, *args)
        finally:
            setattr(cost, name, getattr(cost, name) + time.thread_time() - started)

    return called


def unbound(rows: Sequence[Row]) -> list[Row]:
    """The rows without their structured outputs."""
    states: dict[int, SamplerState] = {}
    for row in rows:
        if id(row.state) not in states:
            state = copy.copy(row.state)
            state.grammar = None
            vars(state).pop("only_scales", None)  # it was found with the grammar
            states[id(row.state)] = state
    return [Row(states[id(row.state)], row.suffix) for row in rows]


def serve(target: Any, draft: Any, outboxes: tuple[list[Any], list[Any]], session: Session, costs: Any) -> None:
    """Serves one session to its end."""
    relay = Relay()
    relay.sessions[session.session_id] = session

    def carry(actions: Any) -> None:
        target.receive(actions.to_target)
        draft.receive(actions.to_draft)

    carry(session.open())
    while session.result is None:
        worked = costs[0].step(target, lambda: target.stats.steps)
        messages = [*outboxes[0]]
        outboxes[0].clear()
        carry(relay.on_target(messages))
        carry(session.digest())
        for _ in range(4):  # about what fits beside one step of the target
            if not costs[1].step(draft, lambda: draft.stats.tree_steps):
                break
            worked = True
        messages = [*outboxes[1]]
        outboxes[1].clear()
        carry(relay.on_draft(messages))
        if not worked and not messages:
            time.sleep(min(0.001, target.wait_s() or 0.0))


Engines = tuple[Any, Any, tuple[list[Any], list[Any]]]


def measured(
    engines: Engines, mode: Mode, prompts: Sequence[Any], num_tokens: int, *, parts: bool
) -> tuple[Cost, Cost]:
    """The costs of target and draft over all prompts. ``parts``: masks too, whose clock costs something itself."""
    costs = (
        Cost((TARGET_DIR / "model.safetensors").stat().st_size, follows_in_step=True),
        Cost((DRAFT_DIR / "model.safetensors").stat().st_size, follows_in_step=False),
    )
    patches = [
        mock.patch.object(target_engine, "decide", costs[0].both(target_engine.decide)),
        mock.patch.object(model_drafter, "best_unprocessed", costs[1].both(model_drafter.best_unprocessed)),
        mock.patch.object(model_drafter, "draft_candidates", costs[1].both(model_drafter.draft_candidates)),
        mock.patch.object(Matcher, "append", timed(Matcher.append, "follow_s", costs)),
    ]
    if parts:
        patches.append(mock.patch.object(Matcher, "masks", timed(Matcher.masks, "masks_s", costs)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=i, structured_output=FORM)
            name, speculation = f"{mode.value}-{parts}-{i}", SpeculationParams(mode=mode)
            session = Session(name, prompt.token_ids, sampling, speculation, decode=lambda _: "")
            serve(*engines, session, costs)
    return costs


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = LocalConfig(
        target=TargetModel(path=str(TARGET_DIR), compile=args.compile),
        draft=DraftModel(path=str(DRAFT_DIR), compile=args.compile),
    )
    draft_setup, outboxes = config.draft_setup(), ([], [])
    assert draft_setup is not None
    target = build_target_engine(config.target_setup(), outboxes[0].extend)
    draft = build_draft_engine(draft_setup, outboxes[1].extend)
    prompts = held_out_prompts(load_tokenizer(str(TARGET_DIR)), args.prompts)
    titles = ("steps", "ms without", "ms with", "added", "by masks", "by following the text")
    rows: list[tuple[str, ...]] = [("engine", "mode", *titles)]
    for mode in (Mode.PLAIN, Mode.OVERLAPPED):
        found = [measured((target, draft, outboxes), mode, prompts, args.tokens, parts=p) for p in (False, True)]
        for name, cost, parts in zip(("target", "draft"), *found, strict=True):
            if cost.num_steps:
                each = [1e3 * s / cost.num_steps for s in (cost.without_s, cost.without_s + cost.added_s)]
                shares = [cost.added_s / cost.without_s]
                shares += [s / parts.without_s for s in (parts.masks_s, parts.follow_s)]
                texts = (*(f"{ms:.2f}" for ms in each), *(f"{100 * share:.1f} %" for share in shares))
                rows.append((name, mode.value, str(cost.num_steps), *texts))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
