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
from paceline.draft import grower
from paceline.draft.build import build_draft_engine
from paceline.draft.engine import DraftEngine
from paceline.drafters import model as model_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import ToDraft, ToTarget
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
from paceline.target.engine import TargetEngine
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
    """One engine at its end of the wire, and the times of its steps."""

    engine: Any
    watch: Stopwatch
    outbox: list[Any]
    """What the engine emits."""
    decode: Callable[[bytes], Sequence[Any]]
    encode: Callable[[Sequence[Any]], bytes]
    count: Callable[[], int]
    """Steps that count so far: of a draft tree steps, of a target all."""
    width: Callable[[], int]
    """Tokens of all steps so far: of a draft leaves."""
    steps: list[dict[str, float]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def step(self, batch: bytes | None = None) -> tuple[bool, bytes | None]:
        """One turn: takes in what has come, steps, encodes what leaves."""
        before, wide = self.count(), self.width()
        self.watch.take()
        with self.watch.part("messages"):
            messages = self.decode(batch) if batch is not None else ()
        with self.watch.part("python"):
            if messages:
                self.engine.receive(messages)
            worked = self.engine.step()
        sent = None
        if self.outbox:
            with self.watch.part("messages"):
                sent = self.encode(self.outbox)
            self.outbox.clear()
        if self.count() > before:
            self.steps.append(self.watch.take())
            self.widths.append(self.width() - wide)
        return worked, sent


def target_side(engine: TargetEngine, watch: Stopwatch, outbox: list[Any]) -> Side:
    """The target's side."""
    return Side(
        engine,
        watch,
        outbox,
        decode=lambda batch: decode_to_target(target_pb2.ToTarget.FromString(batch))[0],
        encode=lambda messages: encode_from_target(messages).SerializeToString(),
        count=lambda: engine.stats.steps,
        width=lambda: engine.stats.tokens_computed,
    )


def draft_side(engine: DraftEngine, watch: Stopwatch, outbox: list[Any]) -> Side:
    """The draft's side."""
    return Side(
        engine,
        watch,
        outbox,
        decode=lambda batch: decode_to_draft(draft_pb2.ToDraft.FromString(batch))[0],
        encode=lambda messages: encode_from_draft(messages).SerializeToString(),
        count=lambda: engine.stats.tree_steps,
        width=lambda: engine.stats.leaves,
    )


class Router:
    """The router between both engines: its sessions, and encoded batches that come from either and go to either."""

    def __init__(self, sessions: dict[str, Session]) -> None:
        """Opens the sessions, of which ``to_target`` and ``to_draft`` tell the engines."""
        self._relay = Relay()
        self._relay.sessions.update(sessions)
        self._to_target: list[ToTarget] = []
        self._to_draft: list[ToDraft] = []
        for session in sessions.values():
            self._send(session.open())

    def on_target(self, batch: bytes) -> None:
        """Takes a batch from the target."""
        self._send(self._relay.on_target(decode_from_target(target_pb2.FromTarget.FromString(batch))[0]))

    def on_draft(self, batch: bytes) -> None:
        """Takes a batch from the draft."""
        self._send(self._relay.on_draft(decode_from_draft(draft_pb2.FromDraft.FromString(batch))[0]))

    def to_target(self) -> bytes | None:
        """What goes to the target next; None: nothing."""
        messages, self._to_target = self._to_target, []
        return encode_to_target(messages).SerializeToString() if messages else None

    def to_draft(self) -> bytes | None:
        """What goes to the draft next; None: nothing."""
        messages, self._to_draft = self._to_draft, []
        return encode_to_draft(messages).SerializeToString() if messages else None

    def mean_context_len(self) -> int:
        """Tokens of a session's context."""
        return round(statistics.mean(len(session._history) for session in self._relay.sessions.values()))

    def cancel(self) -> None:
        """Ends all sessions, of which ``to_target`` and ``to_draft`` tell the engines."""
        for session in self._relay.sessions.values():
            self._send(session.cancel())

    def _send(self, consequences: Actions | Outbox) -> None:
        self._to_target += consequences.to_target
        self._to_draft += consequences.to_draft


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


def run(target: Side, draft: Side | None, router: Router, num_steps: int) -> None:
    """Steps until the target has done ``num_steps``. ``draft``: None in plain decoding."""
    batch = router.to_target()
    while len(target.steps) < num_steps:
        worked, sent = target.step(batch)
        if sent is not None:
            router.on_target(sent)
        drafted = draft is not None and _draft(draft, router)
        batch = router.to_target()
        if not worked and not drafted and batch is None:
            time.sleep(target.engine.wait_s() or 0.0)


def _draft(draft: Side, router: Router) -> bool:
    """As many of the draft's turns as fit beside one step of the target. True: it has more to do."""
    batch, drafted = router.to_draft(), True
    for _ in range(4):
        drafted, sent = draft.step(batch)
        if sent is not None:
            router.on_draft(sent)
        if not drafted:
            break
        batch = None
    return drafted


def cancel(target: Side, draft: Side, router: Router) -> None:
    """Ends all sessions of a run, at the engines too."""
    router.cancel()
    for side, batch in ((target, router.to_target()), (draft, router.to_draft())):
        if batch is not None:
            side.step(batch)


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
        stack.enter_context(mock.patch.object(grower, "rank", watch.of("sampling", grower.rank)))
        for name in ("best_unprocessed", "draft_candidates"):
            candidates = watch.of("sampling", getattr(model_drafter, name))
            stack.enter_context(mock.patch.object(model_drafter, name, candidates))
        for mode in (Mode.PLAIN, Mode.OVERLAPPED):
            for num_sessions in args.sessions:
                sides = target_side(target, watch, outboxes[0]), draft_side(draft, watch, outboxes[1])
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
                router = Router(sessions)
                run(sides[0], sides[1] if mode is Mode.OVERLAPPED else None, router, args.steps)
                context = router.mean_context_len()
                cancel(*sides, router)
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
