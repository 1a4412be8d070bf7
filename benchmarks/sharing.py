"""One draft for several targets against drafting on the targets' own devices: `python benchmarks/sharing.py`.

Every replica has one device. N targets and a draft serve so many sessions, and N + 1 devices that draft for themselves
serve the same ones (ordinary speculative decoding: a device drafts K tokens for all its sessions, then verifies them).
The figure is tokens per second and device over theirs, each at its best K.

Computed for many pairs and loads, in closed form and simulated; `devices.py sharing` measures it with paced engines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

from paceline.cli.table import table
from paceline.plan.closed_form import Load, Prediction, System, best_k, plain
from paceline.plan.outcomes import Outcomes
from paceline.plan.times import StepTable
from paceline.plan.trees import simulate
from paceline.types import Mode

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


def system_of(step_s: float, draft_step: float, acceptance: float, link_s: float = LINK_S) -> System:
    """Steps and rows in the proportions of a device bound by its memory."""
    target, draft = (StepTable.affine(s, s / ROWS) for s in (step_s, draft_step * step_s))
    return System(target, draft, Outcomes.derived(acceptance), link_s=link_s, max_step_tokens=1024)


def gain(system: System, load: Load) -> float:
    """Overlapped over co-located, per device, in closed form."""
    alone = replace(load, targets=load.targets + load.drafts, drafts=0)
    own = best_k(replace(system, colocated=True), alone, Mode.SEQUENTIAL, most=8)
    return best_k(system, load, Mode.OVERLAPPED, most=8).tokens_per_s / own.tokens_per_s


def main() -> None:
    """Prints both tables."""
    print("tokens/s and device over co-located drafting, by sessions per target and targets per draft, in closed form;")
    print(f"simulated at 4 targets per draft, {FLEET} targets, {ROUNDS} rounds; there K and in closed form the others")
    shared = [f"1:{n}" for n in SHARED]
    header = ("acceptance", "draft/target", "sessions", *shared, "1:4 simulated", "K", "K co-located")
    rows: list[tuple[str, ...]] = [(*header, "plain", "sequential")]
    reached: Counter[str] = Counter()
    for acceptance, ratio, sessions in product(ACCEPTANCES, RATIOS, SESSIONS):
        system = system_of(STEP_S, ratio, acceptance)
        gains = [gain(system, Load(sessions * FLEET, FLEET, FLEET // n)) for n in SHARED]
        load = Load(sessions * FLEET, FLEET, FLEET // 4)
        alone, in_turn = Load(load.sessions, FLEET + load.drafts), replace(system, colocated=True)
        own = best_k(in_turn, alone, Mode.SEQUENTIAL, most=8)
        best = best_k(system, load, Mode.OVERLAPPED, most=8)
        others = plain(system, alone), best_k(system, load, Mode.SEQUENTIAL, most=8)
        gains.append(rate_of(system, load, best) / rate_of(in_turn, alone, own))
        reached.update({name: g >= WISHED for name, g in zip((*shared, "1:4 simulated"), gains, strict=True)})
        numbers = [f"{g:.2f}" for g in gains], [f"{p.tokens_per_s / own.tokens_per_s:.2f}" for p in others]
        case = (f"{acceptance:g}", f"{ratio:g}", str(sessions))
        rows.append((*case, *numbers[0], str(best.k), str(own.k), *numbers[1]))
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


if __name__ == "__main__":
    main()
