"""Cost of a slower link between router and draft: `python benchmarks/link_delay.py`.

One target and one draft as replicas, and a router for each delay, all up all the time: modes and delays take turns
request by request, in an order that rotates. `paced.routed` adds the delay to each way of the draft link. Overlapped
decoding hides it behind verification; in lock step (pull) every round pays it twice.

Beside it what the model of `paceline plan` says, from step times, acceptance and hits of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

import paced
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.plan.closed_form import Load, System
from paceline.plan.outcomes import Outcomes
from paceline.plan.simulate import simulate
from paceline.plan.times import StepTable
from paceline.router.router import Router
from paceline.runtime.host import HEARTBEAT_S
from paceline.runtime.workers import available_cores
from paceline.types import Cause, Chunk, Mode, Request, SamplingParams
from paceline_bench.models import with_grown_models
from paceline_bench.prompts import held_out_prompts
from paceline_bench.settings import RunSettings

_ONE = Load(1, 1, 1)
_START_LIMIT_S = 120.0
_numbers = count()


@dataclass
class Cell:
    """All requests of one mode at one delay. Times in seconds, without a request's first round."""

    mode: Mode
    k: int
    delay_ms: float
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    rounds: list[tuple[int, int, str]] = field(default_factory=list)
    """(drafted, accepted, cause)."""
    steps: Counter[str] = field(default_factory=Counter)
    """Growth of the replicas' counters, by kind and name."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of the target's steps."""
        return self.steps["target.step_s"] / self.steps["target.steps"]

    @property
    def draft_step_s(self) -> float:
        """Mean seconds of the draft's tree steps."""
        return self.steps["draft.step_s"] / self.steps["draft.tree_steps"]

    @property
    def width(self) -> float:
        """Mean nodes of a tree step."""
        return self.steps["draft.leaves"] / self.steps["draft.tree_steps"]

    def share(self, cause: Cause) -> float:
        return sum(c == cause.value for _, _, c in self.rounds) / len(self.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="throughput by the delay of the draft link")
    parser.add_argument("--grow-target", type=int, default=150_000_000, metavar="N", help="parameters (default 150M)")
    parser.add_argument("--grow-draft", type=int, metavar="N", help="likewise (default: the embedded draft)")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 1.0, 3.0, 5.0])
    parser.add_argument("--draft-tokens", type=int, default=8, help="K overlapped (default 8)")
    parser.add_argument("--sequential-draft-tokens", type=int, default=4, help="K in lock step (default 4)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150.0, help="no turn begins later (default 150)")
    parser.add_argument("--step-ms", type=float, nargs=2, metavar=("TARGET", "DRAFT"), help="pace the embedded pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round")
    options = parser.parse_args()
    cells = asyncio.run(measure(options))
    print("\n".join(report(cells, options)))
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells]) + "\n", encoding="utf-8")


async def measure(options: argparse.Namespace) -> list[Cell]:
    target, draft = str(TARGET_DIR), str(DRAFT_DIR)
    paces, width = [paced.Pace(), paced.Pace()], None
    if options.step_ms:
        paces, width = [paced.Pace(ms / 1e3, ms / 1e3 / 295) for ms in options.step_ms], 16
    else:
        grown = with_grown_models(
            RunSettings(target=target, draft=draft, grow_target=options.grow_target, grow_draft=options.grow_draft)
        )
        target, draft = grown.target, grown.draft
    config = LocalConfig(
        target=TargetModel(path=target, max_sessions=4, max_model_len=1024),
        draft=DraftModel(path=draft, tree_step_tokens=width),
    )
    prompts = [p.token_ids for p in held_out_prompts(load_tokenizer(target), options.prompts)]
    with paced.processes() as started:
        kinds = [("target", paces[0]), ("draft", paces[1])]
        members = paced.replicas(started, config, kinds, available_cores()[:2])
        async with contextlib.AsyncExitStack() as stack:
            routers = {
                delay_ms: await stack.enter_async_context(paced.routed(config, members, delay_s=delay_ms / 1e3))
                for delay_ms in options.delays_ms
            }
            await asyncio.wait_for(all_up(routers.values()), _START_LIMIT_S)
            cells = [Cell(Mode.PLAIN, 0, options.delays_ms[0])]
            for delay_ms in options.delays_ms:
                cells.append(Cell(Mode.SEQUENTIAL, options.sequential_draft_tokens, delay_ms))
                cells.append(Cell(Mode.OVERLAPPED, options.draft_tokens, delay_ms))
            before = await counters(routers[options.delays_ms[0]])
            for prompt in prompts[:1]:  # for the engines to learn
                for cell in cells:
                    before = await run(routers[cell.delay_ms], cell, prompt, options.max_tokens, before, counted=False)
            began = time.monotonic()
            for turn, prompt in enumerate(prompts * options.repeats):
                if time.monotonic() - began > options.seconds:
                    break
                first = turn % len(cells)
                for cell in (*cells[first:], *cells[:first]):
                    before = await run(routers[cell.delay_ms], cell, prompt, options.max_tokens, before, counted=True)
    return cells


async def run(
    router: Router, cell: Cell, prompt: Sequence[int], max_tokens: int, before: Counter[str], *, counted: bool
) -> Counter[str]:
    """One request, after ``before``. Returns the counters at its end."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
    request = Request(f"r{next(_numbers)}", tuple(prompt), sampling, paced.speculation_of(cell.mode, cell.k))
    arrived: list[tuple[float, Chunk]] = []
    async with contextlib.aclosing(router.generate(request)) as stream:
        async for item in stream:
            if isinstance(item, Chunk) and item.round is not None:
                arrived.append((time.perf_counter(), item))
    after = await counters(router)
    if not counted:
        return after
    cell.requests += 1
    cell.steps.update(after)
    cell.steps.subtract(before)
    cell.tokens += sum(len(chunk.token_ids) for _, chunk in arrived[1:])
    cell.seconds += arrived[-1][0] - arrived[0][0]
    rounds = [chunk.round for _, chunk in arrived[1:]]
    cell.rounds += [(r.num_drafted, r.num_accepted, r.cause.value) for r in rounds if r is not None]
    return after


async def all_up(routers: Iterable[Router]) -> None:
    """Waits until every replica has reported to every router."""
    sides = [side for router in routers for side in (router._targets, router._drafts) if side is not None]
    while any(link.status is None for side in sides for link in side.links.values()):
        await asyncio.sleep(HEARTBEAT_S)


async def counters(router: Router) -> Counter[str]:
    """Counters of target and draft, as of their next heartbeats."""
    await asyncio.sleep(2 * HEARTBEAT_S)
    found: Counter[str] = Counter()
    for side in (router._targets, router._drafts):
        assert side is not None
        for link in side.links.values():
            assert link.status is not None, "it is up"
            found.update({f"{link.kind.name}.{name}": value for name, value in link.status.counters.items()})
    return found


def system_of(cells: Sequence[Cell]) -> System:
    """Inputs of the model from this run: steps of each mode, acceptance and the gap between rounds."""
    plain = cells[0]
    sequential, overlapped = (next(c for c in cells if c.mode is mode) for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED))
    row_s = max(0.0, (sequential.step_s - plain.step_s) / sequential.k)
    node_s = max(0.0, overlapped.draft_step_s - sequential.draft_step_s) / max(overlapped.width - 1.0, 1.0)
    spoken = [c for c in cells if c is not plain]
    accepted = sum(a for c in spoken for _, a, _ in c.rounds)
    trials = sum(min(d, a + 1) for c in spoken for d, a, _ in c.rounds)
    gap_s = plain.seconds / len(plain.rounds) - plain.step_s
    round_s = sequential.seconds / len(sequential.rounds)
    left_s = round_s - sequential.step_s - gap_s - sequential.k * sequential.draft_step_s
    return System(
        StepTable.affine(plain.step_s, row_s),
        StepTable.affine(sequential.draft_step_s, node_s),
        Outcomes.derived(accepted / trials),
        link_s=max(0.0, left_s / 2 - sequential.delay_ms / 1e3),
        gap_s=max(0.0, gap_s),
        draft_width=max(1, round(overlapped.width)),
    )


def report(cells: Sequence[Cell], options: argparse.Namespace) -> Iterator[str]:
    system, plain = system_of(cells), cells[0]
    yield (
        f"{plain.requests} requests of {options.max_tokens} tokens each, one session; load of the machine "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; "
        + (f"paced: {options.step_ms}" if options.step_ms else f"target grown to {options.grow_target / 1e6:g} M")
    )
    yield (
        f"target step {plain.step_s * 1e3:.2f} ms, draft step {system.draft.seconds(1) * 1e3:.2f} ms "
        f"({system.draft.seconds(system.draft_width) * 1e3:.2f} ms of {system.draft_width} nodes), "
        f"acceptance {system.outcomes.acceptance:.3f}, link {system.link_s * 1e3:.2f} ms"
    )
    rows: list[tuple[str, ...]] = [
        (
            "",
            "delay ms",
            "tokens/s",
            "x plain",
            "of no delay",
            "simulated",
            "tok/round",
            "hit",
            "late",
            "token",
            "k",
            "target step",
            "draft step",
        )
    ]
    first = {c.mode: c for c in reversed(cells)}
    simulated = {mode: rate_of(system, first[mode]) for mode in Mode}
    for c in cells:
        draft = f"{c.draft_step_s * 1e3:.2f}" if c.steps["draft.tree_steps"] else "-"
        rows.append(
            (
                f"{c.mode.value} K={c.k}" if c.k else c.mode.value,
                f"{c.delay_ms:g}",
                f"{c.rate:.1f}",
                f"{c.rate / plain.rate:.2f}",
                f"{c.rate / first[c.mode].rate:.2f}",
                f"{rate_of(system, c) / simulated[c.mode]:.2f}",
                f"{c.tokens / len(c.rounds):.2f}",
                *(f"{c.share(cause):.2f}" for cause in (Cause.HIT, Cause.LATE, Cause.TOKEN, Cause.K)),
                f"{c.step_s * 1e3:.2f}",
                draft,
            )
        )
    yield from table(rows)


def rate_of(system: System, cell: Cell) -> float:
    """Simulated tokens per second at the cell's delay."""
    delayed = replace(system, link_s=system.link_s + cell.delay_ms / 1e3)
    return simulate(delayed, _ONE, cell.mode, cell.k, seconds=60.0).tokens_per_s


if __name__ == "__main__":
    main()
