"""CPU time of an engine's thread per step, without the model: `paceline bench parts host-time`.

Real engines and a real router session take turns in one thread, through the messages that cross the wire; the models
are stubs, whose draft is wrong three times in ten, and steps are packed as for an accelerator. So what is left is what
an accelerator would wait for:

    plan + pack         from sessions to the one buffer that a step needs: tokens, rows, page tables
    scheduling, trees   all else in the engine: the choice of sessions, trees, verdicts' bookkeeping
    messages            protobuf and back at the engine's side of the wire
    sum                 of the three
    sampling            separately: from logits to tokens; an accelerator does most of it itself

The relay is what the router does for one step of the target, messages included, and in this thread the loop around it.
Every K is 8 (adaptive off). The clock is the thread's CPU time, so other processes rarely matter; the slowest tenth of
the steps is left out.

In turns, each part finds the caches full of what the others have touched; in a service it has a process and a core of
its own. So ``--apart`` makes the same calls again, to each part alone in a new process, where its clock shows what it
showed before. That gives a second table, or an error if a part sends other bytes than in the first run. A machine that
others share has slow spells of seconds, which only ever add; so the calls are made ``--repeats`` times, each time to a
new part, and the table has the least of every row.

    paceline bench parts host-time [--sessions 1 16 64] [--temperatures 0 1] [--modes plain overlapped]
                                   [--apart [--repeats 3]] [--profile]
    paceline bench parts host-time --weights 150M [--sessions 1 4 16] [--temperatures 1]

``--weights SIZE``: the compiled models themselves, the target grown to that size, and the wall clock: all parts of a
step, and the floor, which is the time to read all weights and the sessions' KV once at the bandwidth of one
core that the same run has measured.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import multiprocessing
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.config.memory import tune_engine_process
from paceline.draft import grower
from paceline.draft.build import build_draft_engine
from paceline.draft.engine import DraftEngine
from paceline.drafters import model as model_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.compiled import backend
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.runner import ModelRunner
from paceline.router.session import Session
from paceline.target import engine as target_engine
from paceline.target.build import build_target_engine
from paceline.target.engine import TargetEngine
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.grow import parse_size
from paceline_bench.machine import bandwidth, step_bytes
from paceline_bench.models import grown
from paceline_bench.parts.engines import PARTS, Router, Side, Stopwatch, cancel, draft_side, run, target_side
from paceline_bench.parts.replay import Call, Clock, play, record
from paceline_bench.prompts import held_out_prompts

_PROMPT_LEN, _MAX_TOKENS = 120, 700
_STEP_TOKENS, _TREE_STEP_TOKENS = 640, 32
_PAGES = 16
_KEPT = 0.9
_COLUMNS = ("engine", "T", "sessions", "tokens", "plan + pack", "scheduling, trees", "messages", "sum", "sampling")
_CALLS = {
    "target": ("step",),
    "draft": ("step",),
    "relay": ("on_target", "on_draft", "to_target", "to_draft", "cancel"),
}
"""The methods of each part that a run calls."""

T = TypeVar("T")
Row = tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """The sessions of a run."""

    mode: Mode
    temperature: float
    num_sessions: int
    vocab_size: int

    def sessions(self, prompts: Sequence[Sequence[int]] = ()) -> dict[str, Session]:
        """New sessions with prompts of their own; (): made ones."""
        sessions = {}
        for index in range(self.num_sessions):
            sampling = SamplingParams(max_tokens=_MAX_TOKENS, temperature=self.temperature, seed=index, ignore_eos=True)
            session_id = f"{self.mode.value}{self.num_sessions}.{self.temperature:g}.{index}"
            made = [(index * 131 + 7 * at) % self.vocab_size for at in range(_PROMPT_LEN)]
            prompt = prompts[index] if prompts else made
            speculation = SpeculationParams(mode=self.mode)
            sessions[session_id] = Session(session_id, prompt, sampling, speculation, decode=lambda _: "")
        return sessions

    def row(self, part: str, columns: Row) -> Row:
        """The time of a part, from the column of tokens on, in its row of the table."""
        return (f"{part} {self.mode.value}", f"{self.temperature:g}", str(self.num_sessions), *columns)


Recording = list[tuple[Cell, list[Call]]]
"""The calls to one part in all runs."""


def stubbed(runner: ModelRunner, watch: Stopwatch, limits: Limits, *, misses: bool) -> None:
    """Replaces a model by a function of its tokens, and packs its steps as for an accelerator."""
    device = DeviceBackend(
        runner.cache, runner.dtype, runner.sliding_window, kernel="triton", recorder=None, max_shapes=1024
    )
    device.record(runner.step_function, limits)
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
    patched.step_function = watch.of("forward", stub)
    patched.forward = watch.of("inputs", runner.forward)


def kept(steps: Sequence[T], cost: Callable[[T], float]) -> list[T]:
    """Steps but the first ones and the slowest tenth."""
    ordered = sorted(steps[_num_first(steps) :], key=cost)
    return ordered[: max(1, int(_KEPT * len(ordered)))]


def _num_first(steps: Sequence[object]) -> int:
    return min(20, len(steps) // 3)


def engine_columns(side: Side) -> Row:
    """The columns of an engine from the tokens on: means over steps."""
    steps = kept(side.steps, lambda spent: sum(spent.values()) - spent["forward"])
    parts = {part: 1e6 * statistics.mean(step[part] for step in steps) for part in steps[0]}
    host = parts["inputs"] + parts["python"] + parts["messages"]
    spent = (parts["inputs"], parts["python"], parts["messages"], host, parts["sampling"])
    return (f"{statistics.mean(side.widths[_num_first(side.widths) :]):.1f}", *(f"{part:.0f}" for part in spent))


def relay_columns(seconds: float) -> Row:
    """The columns of the relay from the tokens on."""
    return ("", "", "", "", f"{1e6 * seconds:.0f}", "")


def _reading(clock: Clock, engine: type[Any]) -> Any:
    """While it is open, new engines of a class read ``clock``."""
    return mock.patch.dict(engine.__init__.__kwdefaults__, clock=clock)


def _timed(side: Side, turns: list[float]) -> None:
    """Adds the seconds of each of an engine's turns."""
    step = side.step

    def timed(batch: bytes | None = None) -> tuple[bool, bytes | None]:
        started = time.thread_time()
        result = step(batch)
        turns.append(time.thread_time() - started)
        return result

    side.step = timed  # type: ignore[method-assign]


class Bench:
    """Both engines with stubs for models, and what their steps cost."""

    def __init__(self, max_sessions: int, target: str | None = None) -> None:
        """Builds the engines from the embedded pair, with ``clocks`` of their own. ``target``: directory of a
        target that computes, as its draft does; None: stubs."""
        options: dict[str, Any] = {"dtype": "bfloat16", "compile": target is not None}
        limits: dict[str, Any] = {"max_sessions": max_sessions}
        if target is None:
            limits |= {"max_step_tokens": _STEP_TOKENS}
        config = LocalConfig(
            target=TargetModel(path=target or str(TARGET_DIR), adaptive=False, **limits, **options),
            draft=DraftModel(path=str(DRAFT_DIR), tree_step_tokens=None if target else _TREE_STEP_TOKENS, **options),
        )
        draft_setup = config.draft_setup()
        assert draft_setup is not None
        self._watch = Stopwatch(time.thread_time if target is None else time.perf_counter)
        self._outboxes: tuple[list[Any], list[Any]] = ([], [])
        self.clocks = {part: Clock() for part in _CALLS}
        with _reading(self.clocks["target"], TargetEngine), _reading(self.clocks["draft"], DraftEngine):
            self._target = build_target_engine(config.target_setup(), self._outboxes[0].extend)
            self._draft = build_draft_engine(draft_setup, self._outboxes[1].extend)
        drafter: Any = self._draft.drafter
        if target is not None:
            for runner in (self._target.runner, drafter.runner):
                runner.step_function = self._watch.of("forward", runner.step_function)
                runner.forward = self._watch.of("inputs", runner.forward)  # type: ignore[method-assign]
            return
        stubbed(self._target.runner, self._watch, Limits(max_sessions, _STEP_TOKENS, _PAGES), misses=False)
        tree_limits = Limits(_TREE_STEP_TOKENS, _TREE_STEP_TOKENS, _PAGES + 5, is_tree=True)
        stubbed(drafter.runner, self._watch, tree_limits, misses=True)

    def timed(self) -> ExitStack:
        """While it is open, the parts that are no methods of an engine are told apart."""
        stack = ExitStack()
        for module, name, part in (
            (target_engine, "decide", "sampling"),
            (grower, "rank", "sampling"),
            (grower, "rankings_of", "sampling"),
            (model_drafter, "best_unprocessed", "sampling"),
            (model_drafter, "draft_candidates", "sampling"),
            (backend, "attention_seen", "forward"),
        ):
            stack.enter_context(mock.patch.object(module, name, self._watch.of(part, getattr(module, name))))
        return stack

    def sides(self) -> dict[str, Side]:
        """Both engines, with no step so far."""
        target = target_side(self._target, self._watch, self._outboxes[0])
        return {"target": target, "draft": draft_side(self._draft, self._watch, self._outboxes[1])}

    def rows(
        self, mode: Mode, temperature: float, num_sessions: int, num_steps: int, recordings: Mapping[str, Recording]
    ) -> list[Row]:
        """Runs sessions for ``num_steps`` steps of the target: the rows of both engines and of the relay.

        ``recordings``: by parts, to which the calls of this run are added; no other calls are kept.
        """
        cell = Cell(mode, temperature, num_sessions, self._target.runner.vocab_size)
        sides, router = self.sides(), Router(cell.sessions())
        for part, recording in recordings.items():
            calls = record(router if part == "relay" else sides[part], _CALLS[part], self.clocks[part])
            recording.append((cell, calls))
        turns: list[float] = []
        for side in sides.values():
            _timed(side, turns)
        target, draft = sides["target"], sides["draft"]
        started = time.thread_time()
        run(target, draft if mode is Mode.OVERLAPPED else None, router, num_steps)
        relay_s = time.thread_time() - started - sum(turns)
        rows = [cell.row(part, engine_columns(side)) for part, side in sides.items() if side.steps]
        rows.append(cell.row("relay", relay_columns(relay_s / len(target.steps))))
        cancel(target, draft, router)
        return rows


def overhead_rows(args: argparse.Namespace) -> list[Row]:
    """The table of ``--weights``: milliseconds of a step's parts, and of its floor."""
    path = grown(str(TARGET_DIR), args.weights, "bfloat16")
    bench, speed = Bench(max(args.sessions), path), bandwidth(None).read_bytes_per_s
    read = {"target": step_bytes(path, "bfloat16"), "draft": step_bytes(str(DRAFT_DIR), "bfloat16")}
    prompts = [p.token_ids for p in held_out_prompts(load_tokenizer(str(TARGET_DIR)), max(args.sessions))]
    print(f"one core reads {speed / 1e9:.1f} GB/s")
    rows: list[Row] = [("engine", "T", "sessions", "tokens", "step ms", *PARTS, "floor ms", "floor/step")]
    with bench.timed():
        for mode, temperature, number in itertools.product(args.modes, args.temperatures, args.sessions):
            cell = Cell(mode, temperature, number, 0)
            sides, router = bench.sides(), Router(cell.sessions(prompts))
            run(sides["target"], sides["draft"] if mode is Mode.OVERLAPPED else None, router, args.steps)
            context = router.mean_context_len()
            cancel(sides["target"], sides["draft"], router)
            for part, side in sides.items():
                if side.steps:
                    kv = (read[part]["kv_bytes_per_token"] or 0) * number * context
                    rows.append(cell.row(part, overhead(side, ((read[part]["weight_bytes"] or 0) + kv) / speed)))
    return rows


def overhead(side: Side, floor_s: float) -> Row:
    """The columns of an engine from the tokens on: means over steps, and their shares."""
    steps = kept(side.steps, lambda spent: sum(spent.values()))
    parts = {part: 1e3 * statistics.mean(step[part] for step in steps) for part in PARTS}
    total = sum(parts.values())
    shares = (f"{parts[part]:.2f} ({100 * parts[part] / total:.1f} %)" for part in PARTS)
    width = statistics.mean(side.widths[_num_first(side.widths) :])
    return (f"{width:.1f}", f"{total:.2f}", *shares, f"{1e3 * floor_s:.2f}", f"{1e5 * floor_s / total:.0f} %")


def least(part: str, max_sessions: int, recording: Recording, repeats: int) -> list[Row]:
    """The rows of one part, each the one with the least sum of the repeats; see ``apart``."""
    torch.set_num_threads(1)
    at = _COLUMNS.index("sum")
    tables = [apart(part, max_sessions, recording) for _ in range(repeats)]
    return [min(rows, key=lambda row: int(row[at])) for rows in zip(*tables, strict=True)]


def apart(part: str, max_sessions: int, recording: Recording) -> list[Row]:
    """The rows of one part, to which the recorded calls are made in this process.

    Raises:
        RuntimeError: the part sends another batch than the recorded one.
    """
    rows = []
    if part == "relay":
        tune_engine_process()
        for cell, calls in recording:
            seconds = _steps(calls, play(Router(cell.sessions()), calls, Clock()))
            rows.append(cell.row(part, relay_columns(statistics.mean(kept(seconds, float)))))
        return rows
    bench = Bench(max_sessions)
    tune_engine_process()
    with bench.timed():
        for cell, calls in recording:
            side = bench.sides()[part]
            play(side, calls, bench.clocks[part])
            if side.steps:
                rows.append(cell.row(part, engine_columns(side)))
    return rows


def _steps(calls: Sequence[Call], seconds: Sequence[float]) -> list[float]:
    """The router's seconds by steps of the target, each from its batch to the next one."""
    steps = [0.0]
    for call, spent in zip(calls, seconds, strict=True):
        if call.method == "on_target":
            steps.append(0.0)
        steps[-1] += spent
    return steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table of microseconds, with ``--apart`` two."""
    parser = argparse.ArgumentParser(
        "paceline bench parts host-time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--modes", type=Mode, nargs="+", default=[Mode.PLAIN, Mode.OVERLAPPED])
    parser.add_argument("--steps", type=int, default=60, help="of the target, per row")
    parser.add_argument("--apart", action="store_true", help="each part once more, alone in a process of its own")
    parser.add_argument("--repeats", type=int, default=3, help="of the calls apart, of which the least counts")
    parser.add_argument("--profile", action="store_true", help="print what functions cost; the table is then inflated")
    parser.add_argument("--weights", type=parse_size, metavar="SIZE", help="with the models, and a target grown to it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.weights is not None:
        if args.apart or args.profile:
            parser.error("--weights is given with --apart or --profile: these are for steps without the model")
        print(*table(overhead_rows(args)), sep="\n")
        return
    bench = Bench(max(args.sessions))
    tune_engine_process()
    profile = cProfile.Profile(time.thread_time)
    recordings: dict[str, Recording] = {part: [] for part in _CALLS} if args.apart else {}
    rows: list[Row] = []
    with bench.timed(), profile if args.profile else nullcontext():
        for mode in args.modes:
            for temperature in args.temperatures:
                for num_sessions in args.sessions:
                    rows += bench.rows(mode, temperature, num_sessions, args.steps, recordings)
    _print("CPU time per step, us, in turns in one thread", rows, args.modes)
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    if args.apart:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
            alone = [
                processes.submit(least, part, max(args.sessions), calls, args.repeats)
                for part, calls in recordings.items()
            ]
            rows = [row for part in alone for row in part.result()]
        title = f"CPU time per step, us, each alone in its own process, the least of {args.repeats} times"
        _print(title, rows, args.modes)


def _print(title: str, rows: Sequence[Row], modes: Sequence[Mode]) -> None:
    order = [f"{part} {mode.value}" for part in _CALLS for mode in modes]
    print(title)
    print("\n".join(table([_COLUMNS, *sorted(rows, key=lambda row: order.index(row[0]))])))
