"""CPU time of an engine's thread per step, without the model: `python benchmarks/host_time.py`.

Real engines and a real router session take turns in one thread, through the messages that cross the wire; the models
are stubs, whose draft is wrong three times in ten, and steps are packed as for an accelerator. So what is left is what
an accelerator would wait for:

    plan + pack         from sessions to the one buffer that a step needs: tokens, rows, page tables
    scheduling, trees   all else in the engine: the choice of sessions, trees, verdicts' bookkeeping
    messages            protobuf and back at the engine's side of the wire
    sum                 of the three
    sampling            beside it: from logits to tokens; an accelerator does most of it itself

The relay is what the router does for one step of the target, messages included. Every K is 8 (adaptive off). The clock
is the thread's CPU time, so other processes hardly matter; the slowest tenth of the steps is left out.

    python benchmarks/host_time.py [--sessions 1 16 64] [--temperatures 0 1] [--modes plain overlapped] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.draft import engine as draft_engine
from paceline.draft.build import build_draft_engine
from paceline.drafters import model as model_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.compiled import backend
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.runner import ModelRunner
from paceline.router.session import Session
from paceline.rpc.streams import decode_to_draft, decode_to_target
from paceline.runtime.workers import settle
from paceline.target import engine as target_engine
from paceline.target.build import build_target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, target_pb2
from step_overhead import Side, Stopwatch, run

_PROMPT_LEN, _MAX_TOKENS = 120, 700
_STEP_TOKENS, _TREE_STEP_TOKENS = 640, 32
_PAGES = 16
_KEPT = 0.9
_COLUMNS = ("engine", "T", "sessions", "tokens", "plan + pack", "scheduling, trees", "messages", "sum", "sampling")


class Relay:
    """Seconds of a run outside the engines' turns: what the router spends."""

    def __init__(self) -> None:
        self.inside_s = 0.0

    def of(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``Side.step``, whose time is the engine's."""

        def timed(side: Side, *args: Any) -> Any:
            started = time.thread_time()
            result = step(side, *args)
            self.inside_s += time.thread_time() - started
            return result

        return timed


def stubbed(runner: ModelRunner, watch: Stopwatch, limits: Limits, *, misses: bool) -> None:
    """Replaces a model by a function of its tokens, and packs its steps as for an accelerator."""
    device = DeviceBackend(runner.cache, runner.dtype, runner.sliding_window, recorder=None, max_shapes=1024)
    device.record(runner._step, limits)
    runner.backend = device
    vocab_size = runner.vocab_size

    def stub(tokens: Tensor, positions: Tensor, index: Tensor, *rest: Any) -> Tensor:
        ids, at = tokens[0][index], positions[0][index]
        following = (ids * 31 + at * 17 + 7) % vocab_size
        if misses:
            following = torch.where((at * 7) % 10 < 3, (following + 1) % vocab_size, following)
        logits = torch.zeros(1, len(index), vocab_size, dtype=torch.bfloat16)
        logits[0, torch.arange(len(index)), following] = 9.0
        return logits

    patched: Any = runner
    patched._step = watch.of("forward", stub)
    patched.forward = watch.of("inputs", runner.forward)


def summary(side: Side) -> tuple[float, dict[str, float]]:
    """Mean tokens per step, and mean microseconds by part without the first steps and the slowest tenth."""
    skip = min(20, len(side.steps) // 3)
    steps = sorted(side.steps[skip:], key=lambda spent: sum(spent.values()) - spent["forward"])
    kept = steps[: max(1, int(_KEPT * len(steps)))]
    parts = {part: 1e6 * statistics.mean(step[part] for step in kept) for part in kept[0]}
    return statistics.mean(side.widths[skip:]), parts


def columns(side: Side) -> tuple[str, ...]:
    """The columns of an engine from the tokens on."""
    width, parts = summary(side)
    host = parts["inputs"] + parts["python"] + parts["messages"]
    spent = (parts["inputs"], parts["python"], parts["messages"], host, parts["sampling"])
    return (f"{width:.1f}", *(f"{part:.0f}" for part in spent))


def sessions_of(mode: Mode, count: int, temperature: float, vocab_size: int) -> dict[str, Session]:
    """Sessions with prompts of their own."""
    sessions = {}
    for index in range(count):
        sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=temperature, seed=index, ignore_eos=True)
        session_id = f"{mode.value}{count}.{temperature:g}.{index}"
        prompt = [(index * 131 + 7 * at) % vocab_size for at in range(_PROMPT_LEN)]
        sessions[session_id] = Session(session_id, prompt, sampling, SpeculationParams(mode=mode), decode=lambda _: "")
    return sessions


class Bench:
    """Both engines with stubs for models, and what their steps cost."""

    def __init__(self, max_sessions: int) -> None:
        """Builds the engines from the embedded pair."""
        options: dict[str, Any] = {"dtype": "bfloat16", "compile": False}
        limits: dict[str, Any] = {"max_sessions": max_sessions, "max_step_tokens": _STEP_TOKENS}
        config = LocalConfig(
            target=TargetModel(path=str(TARGET_DIR), adaptive=False, **limits, **options),
            draft=DraftModel(path=str(DRAFT_DIR), tree_step_tokens=_TREE_STEP_TOKENS, **options),
        )
        draft_setup = config.draft_setup()
        assert draft_setup is not None
        self._watch = Stopwatch(time.thread_time)
        self._outboxes: tuple[list[Any], list[Any]] = ([], [])
        self._target = build_target_engine(config.target_setup(), self._outboxes[0].extend)
        self._draft = build_draft_engine(draft_setup, self._outboxes[1].extend)
        drafter: Any = self._draft._drafter
        stubbed(self._target.runner, self._watch, Limits(max_sessions, _STEP_TOKENS, _PAGES), misses=False)
        tree_limits = Limits(_TREE_STEP_TOKENS, _TREE_STEP_TOKENS, _PAGES + 5, is_tree=True)
        stubbed(drafter._runner, self._watch, tree_limits, misses=True)

    def timed(self) -> ExitStack:
        """While it is open, the parts that are no methods of an engine are told apart."""
        stack = ExitStack()
        for module, name, part in (
            (target_engine, "decide", "sampling"),
            (draft_engine, "rank", "sampling"),
            (model_drafter, "draft_candidates", "sampling"),
            (backend, "attention_masks", "forward"),
        ):
            stack.enter_context(mock.patch.object(module, name, self._watch.of(part, getattr(module, name))))
        return stack

    def rows(self, mode: Mode, temperature: float, num_sessions: int, num_steps: int) -> list[tuple[str, ...]]:
        """Runs sessions for ``num_steps`` steps of the target: the rows of both engines and of the relay."""
        target, draft = self._target, self._draft
        sides = (
            Side(
                target,
                self._watch,
                lambda b: decode_to_target(target_pb2.ToTarget.FromString(b))[0],
                lambda: target.stats.steps,
                outbox=self._outboxes[0],
            ),
            Side(
                draft,
                self._watch,
                lambda b: decode_to_draft(draft_pb2.ToDraft.FromString(b))[0],
                lambda: draft.stats.tree_steps,
                outbox=self._outboxes[1],
            ),
        )
        sessions = sessions_of(mode, num_sessions, temperature, target.runner.vocab_size)
        relay = Relay()
        with mock.patch.object(Side, "step", relay.of(Side.step)):
            started = time.thread_time()
            run(sides[0], sides[1] if mode is Mode.OVERLAPPED else None, sessions, num_steps)
            relay_s = time.thread_time() - started - relay.inside_s
        for session in sessions.values():
            actions = session.cancel()
            target.receive(actions.to_target)
            draft.receive(actions.to_draft)
        for outbox in self._outboxes:
            outbox.clear()
        facts = (f"{temperature:g}", str(num_sessions))
        relayed = (f"relay {mode.value}", *facts, "", "", "", "", f"{1e6 * relay_s / len(sides[0].steps):.0f}", "")
        measured = [(name, side) for name, side in zip(("target", "draft"), sides, strict=True) if side.steps]
        return [*((f"{name} {mode.value}", *facts, *columns(side)) for name, side in measured), relayed]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table of microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--modes", type=Mode, nargs="+", default=[Mode.PLAIN, Mode.OVERLAPPED])
    parser.add_argument("--steps", type=int, default=60, help="of the target, per row")
    parser.add_argument("--profile", action="store_true", help="print what functions cost; the table is then inflated")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bench = Bench(max(args.sessions))
    settle()
    profile = cProfile.Profile(time.thread_time)
    rows: list[tuple[str, ...]] = []
    with bench.timed(), profile if args.profile else nullcontext():
        for mode in args.modes:
            for temperature in args.temperatures:
                for num_sessions in args.sessions:
                    rows += bench.rows(mode, temperature, num_sessions, args.steps)
    order = [f"{name} {mode.value}" for name in ("target", "draft", "relay") for mode in args.modes]
    rows.sort(key=lambda row: order.index(row[0]))
    print("CPU time of one thread per step, us")
    print("\n".join(table([_COLUMNS, *rows])))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
