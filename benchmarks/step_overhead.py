"""Where a step's time goes, in both engines: `python benchmarks/step_overhead.py`.

Real engines on real weights take turns in one thread, in lock step or plain, through the messages that a router would
relay. Each step's time is divided by what it was spent on, exclusive of what is named beside it:

    forward    the model: the compiled graph, or the eager one
    inputs     from sessions to its arguments: tokens, rows, page tables, masks
    sampling   from logits to tokens: processors, noise, the verdict; of a draft, candidates and their order
    messages   protobuf and back at the engine's side of the wire
    python     all else: scheduling, trees, bookkeeping

The floor beside them is the time to read all weights and the sessions' KV once, at the bandwidth of one core that the
same run has measured. The slowest tenth of the steps is left out.

    python benchmarks/step_overhead.py [--target-size 150M] [--sessions 1 4 16] [--temperature 1.0] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.draft import engine as draft_engine
from paceline.draft.build import build_draft_engine
from paceline.drafters import model as model_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.loading import LoadedModel, load_model
from paceline.router.relay import Outbox, Relay
from paceline.router.session import Actions, Session
from paceline.rpc.streams import (
    decode_from_draft,
    decode_from_target,
    decode_to_draft,
    decode_to_target,
    encode_from_draft,
    encode_from_target,
    encode_to_draft,
    encode_to_target,
)
from paceline.target import engine as target_engine
from paceline.target.build import build_target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, target_pb2
from paceline_bench.grow import parse_size
from paceline_bench.machine import environment
from paceline_bench.models import grown
from paceline_bench.prompts import held_out_prompts

PARTS = ("forward", "inputs", "sampling", "messages", "python")
_KEPT = 0.9


class Stopwatch:
    """Seconds by part of the step in progress; an inner part's are not its outer one's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside as ``name``."""
        self._inner.append(0.0)
        started = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - started
            self.spent[name] += seconds - self._inner.pop()
            self._inner[-1] += seconds

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed as ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        spent, self.spent = self.spent, dict.fromkeys(PARTS, 0.0)
        return spent


@dataclass
class Side:
    """One engine, its inbox of encoded batches and the times of its steps."""

    engine: Any
    watch: Stopwatch
    decode: Callable[[bytes], Sequence[Any]]
    count: Callable[[], int]
    """Steps that count so far: of a draft tree steps, of a target all."""
    inbox: list[bytes] = field(default_factory=list)
    outbox: list[Any] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def step(self, encode: Callable[[Sequence[Any]], bytes], width: Callable[[], int]) -> tuple[bool, bytes | None]:
        """One turn: takes in what has come, steps, encodes what leaves."""
        before, wide = self.count(), width()
        self.watch.take()
        with self.watch.part("messages"):
            messages = [message for batch in self.inbox for message in self.decode(batch)]
        self.inbox.clear()
        with self.watch.part("python"):
            if messages:
                self.engine.receive(messages)
            worked = self.engine.step()
        batch = None
        if self.outbox:
            with self.watch.part("messages"):
                batch = encode(self.outbox)
            self.outbox.clear()
        if self.count() > before:
            self.steps.append(self.watch.take())
            self.widths.append(width() - wide)
        return worked, batch


def read_bandwidth() -> float:
    """Bytes per second that one core reads from memory: the best of a matrix-vector product and two sums of 512 MiB."""
    ones = torch.ones(1 << 14, 1 << 13)
    vector, integers = torch.ones(1 << 13), ones.view(torch.int64)
    fastest = float("inf")
    for read in (lambda: ones.mv(vector), ones.sum, integers.sum):
        for _ in range(5):
            started = time.perf_counter()
            read()
            fastest = min(fastest, time.perf_counter() - started)
    return ones.nbytes / fastest


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a step reads. The embedded models tie their embeddings to the output layer."""
    return model.size.num_parameters * model.dtype.itemsize


def run(target: Side, draft: Side | None, sessions: dict[str, Session], num_steps: int) -> int:
    """Steps until the target has done ``num_steps`` with all sessions in progress; returns the mean context length."""
    relay = Relay()
    relay.sessions.update(sessions)

    def to_engines(consequences: Actions | Outbox) -> None:
        to_target.extend(consequences.to_target)
        to_draft.extend(consequences.to_draft)

    to_target: list[Any] = []
    to_draft: list[Any] = []
    for session in sessions.values():
        to_engines(session.open())
    while len(target.steps) < num_steps:
        if to_target:
            target.inbox.append(encode_to_target(to_target).SerializeToString())
            to_target.clear()
        worked, batch = target.step(
            lambda messages: encode_from_target(messages).SerializeToString(),
            lambda: target.engine.stats.tokens_computed,
        )
        if batch is not None:
            events: list[Any] = decode_from_target(target_pb2.FromTarget.FromString(batch))[0]
            to_engines(relay.on_target(events))
        if draft is None:
            continue
        if to_draft:
            draft.inbox.append(encode_to_draft(to_draft).SerializeToString())
            to_draft.clear()
        drafting = True
        for _ in range(4):  # about what fits beside one step of the target
            drafting, batch = draft.step(
                lambda messages: encode_from_draft(messages).SerializeToString(), lambda: draft.engine.stats.leaves
            )
            if batch is not None:
                events = decode_from_draft(draft_pb2.FromDraft.FromString(batch))[0]
                to_engines(relay.on_draft(events))
            if not drafting:
                break
        if not worked and not drafting and not to_target:
            time.sleep(target.engine.wait_s() or 0.0)
    return round(statistics.mean(len(session._history) for session in sessions.values()))


def summary(side: Side, skip: int) -> dict[str, float]:
    """Mean seconds by part of all but the first ``skip`` and the slowest tenth of the steps."""
    steps = sorted(side.steps[skip:], key=lambda parts: sum(parts.values()))
    kept = steps[: max(1, int(_KEPT * len(steps)))]
    return {part: statistics.mean(step[part] for step in kept) for part in PARTS}


def main() -> None:
    """Prints one table; writes what it says to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target-size", type=parse_size, default=parse_size("150M"), help="grown to (default 150M)")
    parser.add_argument("--draft-size", type=parse_size, help="grown to (default: as it is)")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    paths = [grown(str(TARGET_DIR), args.target_size, "bfloat16"), str(DRAFT_DIR)]
    if args.draft_size:
        paths[1] = grown(paths[1], args.draft_size, "bfloat16")
    options: dict[str, Any] = {"dtype": "bfloat16", "compile": True}
    target_config = TargetModel(path=paths[0], max_sessions=max(args.sessions), adaptive=False, **options)
    draft_config = DraftModel(path=paths[1], **options)
    weights = [weight_bytes(load_model(Checkpoint.open(model.path), model)) for model in (target_config, draft_config)]
    config = LocalConfig(target=target_config, draft=draft_config)
    draft_setup = config.draft_setup()
    assert draft_setup is not None
    tokenizer = load_tokenizer(str(TARGET_DIR))
    prompts = held_out_prompts(tokenizer, max(args.sessions))

    watch = Stopwatch()
    outboxes: tuple[list[Any], list[Any]] = ([], [])
    target = build_target_engine(config.target_setup(), outboxes[0].extend)
    draft = build_draft_engine(draft_setup, outboxes[1].extend)
    drafter: Any = draft._drafter
    kv_bytes = sum(
        k[0, 0].nbytes + v[0, 0].nbytes
        for k, v in zip(target.runner.cache.keys, target.runner.cache.values, strict=True)
    )
    draft_cache = drafter._runner.cache
    draft_kv = sum(k[0, 0].nbytes + v[0, 0].nbytes for k, v in zip(draft_cache.keys, draft_cache.values, strict=True))
    for runner in (target.runner, drafter._runner):
        runner._step = watch.of("forward", runner._step)
        runner.forward = watch.of("inputs", runner.forward)
    gc.freeze()
    bandwidth = read_bandwidth()
    print(f"one core reads {bandwidth / 1e9:.1f} GB/s; temperature {args.temperature:g}")
    rows = [("engine", "sessions", "tokens", "step ms", *PARTS, "floor ms", "floor/step")]
    records = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(target_engine, "decide", watch.of("sampling", target_engine.decide)))
        stack.enter_context(mock.patch.object(draft_engine, "rank", watch.of("sampling", draft_engine.rank)))
        candidates = watch.of("sampling", model_drafter.draft_candidates)
        stack.enter_context(mock.patch.object(model_drafter, "draft_candidates", candidates))
        for mode in (Mode.PLAIN, Mode.OVERLAPPED):
            for num_sessions in args.sessions:
                sides = (
                    Side(
                        target,
                        watch,
                        lambda b: decode_to_target(target_pb2.ToTarget.FromString(b))[0],
                        lambda: target.stats.steps,
                        outbox=outboxes[0],
                    ),
                    Side(
                        draft,
                        watch,
                        lambda b: decode_to_draft(draft_pb2.ToDraft.FromString(b))[0],
                        lambda: draft.stats.tree_steps,
                        outbox=outboxes[1],
                    ),
                )
                sessions = {}
                for index in range(num_sessions):
                    sampling = SamplingParams(max_tokens=700, temperature=args.temperature, seed=index, ignore_eos=True)
                    session_id = f"{mode.value}{num_sessions}.{index}"
                    sessions[session_id] = Session(
                        session_id,
                        prompts[index].token_ids,
                        sampling,
                        SpeculationParams(mode=mode),
                        decode=lambda _: "",
                    )
                context = run(sides[0], sides[1] if mode is Mode.OVERLAPPED else None, sessions, args.steps)
                for session in sessions.values():
                    actions = session.cancel()
                    target.receive(actions.to_target)
                    draft.receive(actions.to_draft)
                for outbox in outboxes:
                    outbox.clear()
                for name, side, size, kv in zip(("target", "draft"), sides, weights, (kv_bytes, draft_kv), strict=True):
                    if not side.steps:
                        continue
                    parts = summary(side, 20)
                    total = sum(parts.values())
                    floor = (size + num_sessions * context * kv) / bandwidth
                    width = statistics.mean(side.widths[20:])
                    rows.append(
                        (
                            f"{name} {mode.value}",
                            str(num_sessions),
                            f"{width:.1f}",
                            f"{1e3 * total:.2f}",
                            *(f"{1e3 * parts[part]:.2f} ({100 * parts[part] / total:.1f} %)" for part in PARTS),
                            f"{1e3 * floor:.2f}",
                            f"{100 * floor / total:.0f} %",
                        )
                    )
                    records.append(
                        {
                            "engine": name,
                            "mode": mode.value,
                            "sessions": num_sessions,
                            "width": width,
                            "seconds": parts,
                            "floor_s": floor,
                            "steps": len(side.steps),
                        }
                    )
    print("\n".join(table(rows)))
    if args.json:
        facts = {"environment": environment(), "bandwidth": bandwidth, "temperature": args.temperature}
        args.json.write_text(json.dumps({**facts, "records": records}, indent=1))


if __name__ == "__main__":
    main()
