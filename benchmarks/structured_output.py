"""CPU time that structured output adds to the steps of target and draft: `python benchmarks/structured_output.py`.

The embedded pair serves the same prompts with and without a JSON Schema, one at a time, by plain decoding and with its
draft; target and draft take turns in this thread. Printed are the thread's CPU milliseconds for each step of either
engine, and the share of them in which structured output finds and applies masks and follows the text.

    python benchmarks/structured_output.py [--prompts 4] [--tokens 160] [--no-compile]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from paceline.checkpoint.grammar import Matcher
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.core import processors
from paceline.draft.build import build_draft_engine
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.router.relay import Relay
from paceline.router.session import Session
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


class CpuTime:
    """CPU seconds of this thread in steps of an engine and, within them, in structured output."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_s = 0.0
        self.masks_s = 0.0

    def step(self, engine: Any, count: Callable[[], int]) -> bool:
        """Lets an engine step; it counts if ``count`` has grown."""
        before, masks_s, started = count(), _masks_s[0], time.thread_time()
        worked = bool(engine.step())
        if count() > before:
            self.num_steps += count() - before
            self.step_s += time.thread_time() - started
            self.masks_s += _masks_s[0] - masks_s
        return worked


_masks_s = [0.0]


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            _masks_s[0] += time.thread_time() - started

    return timed


def serve(target: Any, draft: Any, outboxes: tuple[list[Any], list[Any]], session: Session) -> tuple[CpuTime, CpuTime]:
    """Serves one session to its end; CPU times of target and draft."""
    times, relay = (CpuTime(), CpuTime()), Relay()
    relay.sessions[session.session_id] = session

    def carry(actions: Any) -> None:
        target.receive(actions.to_target)
        draft.receive(actions.to_draft)

    carry(session.open())
    while session.result is None:
        worked = times[0].step(target, lambda: target.stats.steps)
        messages = [*outboxes[0]]
        outboxes[0].clear()
        carry(relay.on_target(messages))
        carry(session.digest())
        for _ in range(4):  # about what fits beside one step of the target
            if not times[1].step(draft, lambda: draft.stats.tree_steps):
                break
            worked = True
        messages = [*outboxes[1]]
        outboxes[1].clear()
        carry(relay.on_draft(messages))
        if not worked and not messages:
            time.sleep(min(0.001, target.wait_s() or 0.0))
    return times


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
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
    rows = [("engine", "mode", "form", "steps", "CPU ms per step", "of it structured output")]
    with (
        mock.patch.object(processors, "_forbid_", _timed(processors._forbid_)),
        mock.patch.object(Matcher, "masks", _timed(Matcher.masks)),
        mock.patch.object(Matcher, "append", _timed(Matcher.append)),
    ):
        for mode in (Mode.PLAIN, Mode.OVERLAPPED):
            for form in (None, FORM):
                found: list[tuple[CpuTime, CpuTime]] = []
                for i, prompt in enumerate(prompts):
                    sampling = SamplingParams(
                        max_tokens=args.tokens, temperature=1.0, seed=i, structured_output=form, ignore_eos=form is None
                    )
                    session = Session(
                        f"{mode.value}-{form is None}-{i}",
                        prompt.token_ids,
                        sampling,
                        SpeculationParams(mode=mode),
                        decode=lambda _: "",
                    )
                    found.append(serve(target, draft, outboxes, session))
                for name, times in zip(("target", "draft"), zip(*found, strict=True), strict=True):
                    if num_steps := sum(time_.num_steps for time_ in times):
                        step_s, masks_s = sum(time_.step_s for time_ in times), sum(time_.masks_s for time_ in times)
                        what = "none" if form is None else "JSON Schema"
                        share = f"{100 * masks_s / step_s:.1f} %"
                        rows.append((name, mode.value, what, str(num_steps), f"{1e3 * step_s / num_steps:.2f}", share))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
