"""One draft for several targets against drafting on the targets' own devices: `python benchmarks/sharing.py`.

Every replica has one device. N targets and a draft serve so many sessions, and N + 1 devices that draft for themselves
serve the same ones (ordinary speculative decoding: a device drafts K tokens for all its sessions, then verifies them).
The figure is tokens per second and device over theirs, each at its best K.

Simulated for many pairs and loads; `--measure` runs 4 + 1 against 5 on this machine with paced engines (`paced.py`):
real models, router and streams, steps that last as long as told. They are stand-ins for devices, not devices.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from dataclasses import replace

import paced
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.plan.closed_form import Load, Prediction, System, best_k, plain
from paceline.plan.outcomes import Outcomes
from paceline.plan.simulate import simulate
from paceline.plan.times import StepTable
from paceline.types import Mode, SamplingParams
from paceline_bench.prompts import held_out_prompts

STEP_S = 0.02
ROWS = 295
"""Rows that cost as much as a step: an H100 in bf16 (``cli/plan.py``)."""
LINK_S = 0.0003
ACCEPTANCES = (0.6, 0.8, 0.9)
RATIOS = (0.05, 0.1, 0.2)
SESSIONS = (1, 8, 32)
SHARED = (1, 2, 4, 8)
GRID = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
WISHED = 1.3
FLEET, ROUNDS = 8, 60
"""Targets of a simulated fleet, and how long it is."""


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second and device against co-located drafting")
    parser.add_argument("--measure", action="store_true", help="on this machine, with paced engines")
    parser.add_argument("--step-ms", type=float, default=60.0, help="a target's step when measuring (default 60)")
    parser.add_argument("--draft-step", type=float, default=0.2, help="in target steps (default 0.2)")
    parser.add_argument("--sessions", type=int, nargs="+", default=[4, 20], help="in all, one load after the other")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window (default 8)")
    parser.add_argument("--repeats", type=int, default=2, help="of every window, in turn (default 2)")
    options = parser.parse_args()
    if options.measure:
        asyncio.run(measure(options))
    else:
        simulated()


def system_of(step_s: float, draft_step: float, acceptance: float, link_s: float = LINK_S) -> System:
    """Steps and rows in the proportions of a device bound by its memory."""
    target, draft = (StepTable.affine(s, s / ROWS) for s in (step_s, draft_step * step_s))
    return System(target, draft, Outcomes.derived(acceptance), link_s=link_s, max_step_tokens=1024)


def gain(system: System, load: Load) -> float:
    """Overlapped over co-located, per device, in closed form."""
    alone = replace(load, targets=load.targets + load.drafts, drafts=0)
    own = best_k(replace(system, colocated=True), alone, Mode.SEQUENTIAL, most=8)
    return best_k(system, load, Mode.OVERLAPPED, most=8).tokens_per_s / own.tokens_per_s


def simulated() -> None:
    print("tokens/s and device over co-located drafting, by sessions per target and targets per draft, in closed form;")
    print(
        f"simulated at 4 targets per draft, {FLEET} targets, {ROUNDS} rounds; there K and in closed form the others\n"
    )
    header = (
        "acceptance",
        "draft/target",
        "sessions",
        *(f"1:{n}" for n in SHARED),
        "1:4 simulated",
        "K",
        "K co-located",
        "plain",
        "sequential",
    )
    rows: list[tuple[str, ...]] = [header]
    reached: Counter[str] = Counter()
    for acceptance in ACCEPTANCES:
        for ratio in RATIOS:
            for sessions in SESSIONS:
                system = system_of(STEP_S, ratio, acceptance)
                gains = [gain(system, Load(sessions * FLEET, FLEET, FLEET // n)) for n in SHARED]
                load = Load(sessions * FLEET, FLEET, FLEET // 4)
                alone, in_turn = Load(load.sessions, FLEET + load.drafts), replace(system, colocated=True)
                own = best_k(in_turn, alone, Mode.SEQUENTIAL, most=8)
                best = best_k(system, load, Mode.OVERLAPPED, most=8)
                others = plain(system, alone), best_k(system, load, Mode.SEQUENTIAL, most=8)
                four = rate_of(system, load, best) / rate_of(in_turn, alone, own)
                reached.update({f"1:{n}": g >= WISHED for n, g in zip(SHARED, gains, strict=True)})
                reached["1:4 simulated"] += four >= WISHED
                rows.append(
                    (
                        f"{acceptance:g}",
                        f"{ratio:g}",
                        str(sessions),
                        *(f"{g:.2f}" for g in gains),
                        f"{four:.2f}",
                        str(best.k),
                        str(own.k),
                        *(f"{p.tokens_per_s / own.tokens_per_s:.2f}" for p in others),
                    )
                )
    print("\n".join(table(rows)))
    print(f"\nat least {WISHED:g}, of {len(rows) - 1}: " + ", ".join(f"{n} {count}" for n, count in reached.items()))
    print("\nthe draft's step, in target steps, with which 1:4 reaches it in closed form:\n")
    rows = [("acceptance", *(f"{sessions} sessions" for sessions in SESSIONS))]
    rows += [(f"{a:g}", *(crossover(a, sessions) for sessions in SESSIONS)) for a in ACCEPTANCES]
    print("\n".join(table(rows)))


def rate_of(system: System, load: Load, predicted: Prediction) -> float:
    """Simulated tokens per second."""
    seconds = ROUNDS * predicted.round_s
    return simulate(system, load, predicted.mode, predicted.k, seconds=seconds).tokens_per_s


def crossover(acceptance: float, sessions: int) -> str:
    """The range of draft steps, on a grid, with at least the wished gain at 4 targets per draft."""
    load = Load(sessions * FLEET, FLEET, FLEET // 4)
    found = [r for r in GRID if gain(system_of(STEP_S, r, acceptance), load) >= WISHED]
    return f"{min(found):g} to {max(found):g}" if found else "none"


async def measure(options: argparse.Namespace) -> None:
    """4 targets and a draft against 5 co-located, in turn window by window."""
    config = LocalConfig(
        target=TargetModel(path=str(TARGET_DIR), max_model_len=1024, max_sessions=max(8, *options.sessions)),
        draft=DraftModel(path=str(DRAFT_DIR), tree_step_tokens=64),
    )
    step_s, draft_step_s = options.step_ms / 1e3, options.draft_step * options.step_ms / 1e3
    target, draft = paced.Pace(step_s, step_s / ROWS), paced.Pace(draft_step_s, draft_step_s / ROWS)
    prompts = [p.token_ids for p in held_out_prompts(load_tokenizer(config.target.path), 24)]
    sampling = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True, seed=0)
    guess = system_of(step_s, options.draft_step, 0.8)
    with paced.processes() as started:
        members = paced.replicas(started, config, [("target", target)] * 4 + [("draft", draft)])
        own = paced.in_turn(started, config, target, draft, 5)
        async with paced.routed(config, members) as router:
            for sessions in options.sessions:
                load = Load(sessions, 4, 1)
                alone = replace(load, targets=5, drafts=0)
                k_own = best_k(replace(guess, colocated=True), alone, Mode.SEQUENTIAL, most=8).k
                tried = [
                    ("plain", Mode.PLAIN, 0),
                    *(("co-located", Mode.SEQUENTIAL, k) for k in (k_own - 1, k_own)),
                    ("sequential", Mode.SEQUENTIAL, best_k(guess, load, Mode.SEQUENTIAL, most=8).k),
                    ("overlapped", Mode.OVERLAPPED, 4),
                    ("overlapped", Mode.OVERLAPPED, 8),
                ]
                windows: dict[tuple[str, Mode, int], list[paced.Window]] = {key: [] for key in tried}
                for repeat in range(options.repeats):
                    turn = repeat % len(tried)
                    for key in (*tried[turn:], *tried[:turn]):
                        name, mode, k = key
                        arguments = (sampling, paced.speculation_of(mode, k), 3.0, options.seconds)
                        if name in ("plain", "co-located"):
                            parts = await asyncio.to_thread(spread, own, prompts, sessions, arguments)
                            window = replace(paced.total(parts), seconds=options.seconds)
                        else:
                            window = await paced.load(router, prompts, sessions, *arguments)
                        windows[key].append(window)
                        print(f"{sessions} sessions, {name} K={k}: {window.tokens_per_s:.1f} tokens/s", file=sys.stderr)
                print_measured({key: paced.total(w) for key, w in windows.items()}, guess, sessions, options)


def spread(
    own: list[paced.Process], prompts: object, sessions: int, arguments: tuple[object, ...]
) -> list[paced.Window]:
    """The sessions evenly over the devices, all at once."""
    shares = [len(range(i, sessions, len(own))) for i in range(len(own))]
    for process, share in zip(own, shares, strict=True):
        process.pipe.send((prompts, share, *arguments))
    return [process.answer() for process in own]


def print_measured(
    found: dict[tuple[str, Mode, int], paced.Window], guess: System, sessions: int, options: argparse.Namespace
) -> None:
    acceptance = paced.acceptance([w for (name, _, _), w in found.items() if name != "plain"])
    system = replace(guess, outcomes=Outcomes.derived(acceptance))
    load = Load(sessions, 4, 1)
    base = max(w.tokens_per_s for (name, _, _), w in found.items() if name == "co-located")
    print(
        f"measured, paced: {sessions} sessions, 5 devices; target {options.step_ms:g} ms, draft "
        f"{options.draft_step:g} of it; acceptance {acceptance:.3f}; load of the machine {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores"
    )
    rows: list[tuple[str, ...]] = [
        ("", "K", "tokens/s", "per device", "x co-located", "tok/round", "hits", "simulated tokens/s", "error")
    ]
    for (name, mode, k), w in found.items():
        own = name in ("plain", "co-located")
        at = replace(load, targets=min(5, sessions), drafts=0) if own else load
        simulated = simulate(replace(system, colocated=own), at, mode, k, seconds=60.0).tokens_per_s
        rows.append(
            (
                name,
                str(k or "-"),
                f"{w.tokens_per_s:.1f}",
                f"{w.tokens_per_s / 5:.1f}",
                f"{w.tokens_per_s / base:.2f}",
                f"{w.tokens_per_round:.2f}",
                "-" if w.hit_rate is None else f"{w.hit_rate:.2f}",
                f"{simulated:.1f}",
                f"{simulated / w.tokens_per_s - 1:+.1%}",
            )
        )
    print("\n".join(table(rows)) + "\n", flush=True)


if __name__ == "__main__":
    main()
