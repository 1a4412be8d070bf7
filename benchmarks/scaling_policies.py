"""Policies for the number of targets, compared under one load each: `python benchmarks/scaling_policies.py`.

Time is virtual (``paceline_bench/fleets.py``). Paceline's rows are the demand and the scaler of production, Serve's row
is Ray's own code. In ``sessions, waiting included`` each waiting request is a session that needs a place.

A target has 64 places, 51.2 sessions are enough for it. Requests that are refused come again when they are told to.
Machines are paid from their order.
"""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable
from typing import Any

from paceline.cli.table import table
from paceline.config import TargetPolicy
from paceline.fleet.demand import TargetDemand
from paceline.fleet.scaler import Demand, Pace, Scaler
from paceline.fleet.signals import Fleet
from paceline_bench.fleets import Load, Machines, Policy, PoolWorld

PLACES, ENOUGH, MOST = 64, 0.8 * 64, 16
UP_S, DOWN_S = 15.0, 300.0

Needed = Callable[[Fleet, Scaler, float], float]


def scaled(needed: Needed) -> Policy:
    """The production scaler over a demand."""
    scaler = Scaler(Pace(1, MOST, UP_S, DOWN_S, DOWN_S, 0.2, 2.0, 0.5), wanted=1)

    def decide(fleet: Fleet, machines: Machines, now: float) -> int:
        scaler.see(Demand(needed(fleet, scaler, now), ""), machines.running, now)
        return scaler.wanted or 0

    return decide


def paceline(load: Load) -> Policy:
    """What production does."""
    demand, policy = TargetDemand(PLACES), TargetPolicy()
    return scaled(
        lambda fleet, scaler, now: (
            demand.see(fleet, policy, UP_S, now, down_delay_s=DOWN_S, wanted=scaler.wanted).replicas
        )
    )


def by_sessions(load: Load) -> Policy:
    """Each session, waiting or not, needs a place."""
    return scaled(lambda fleet, scaler, now: fleet.sessions / ENOUGH)


def serves_own(load: Load) -> Policy:
    """Ray Serve's default policy, with the same goal and delays."""
    from ray.serve import autoscaling_policy as serve
    from ray.serve.config import AutoscalingConfig

    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=MOST,
        target_ongoing_requests=ENOUGH,
        upscale_delay_s=UP_S,
        downscale_delay_s=DOWN_S,
    )
    state: dict[str, Any] = {}
    target = [1]

    def decide(fleet: Fleet, machines: Machines, now: float) -> int:
        context = types.SimpleNamespace(
            current_num_replicas=fleet.targets,
            target_num_replicas=target[0],
            config=config,
            total_num_requests=fleet.sessions,
        )
        desired, _ = serve._core_replica_queue_length_policy(context)
        desired = min(max(serve._apply_scaling_factors(desired, fleet.targets, config), 1), MOST)
        decided, _ = serve._apply_delay_logic(desired, target[0], config, state, _now=now)
        target[0] = min(max(decided, 1), MOST)
        return target[0]

    return decide


POLICIES: dict[str, Callable[[Load], Policy]] = {
    "sessions, waiting included": by_sessions,
    "Paceline": paceline,
    "Serve's default": serves_own,
}

LOADS = {
    "step, 1 to 6.4/s of 30 s": Load(lambda t: 1.0 if t < 300 else 6.4, 2400),
    "step, 0.1 to 0.64/s of 300 s": Load(lambda t: 0.1 if t < 900 else 0.64, 4500, duration_s=300.0),
    "bursts, 90 s of 8/s every 20 min": Load(lambda t: 8.0 if t % 1200 < 90 and t >= 300 else 0.5, 5400),
    "bursts, 10 s of 12/s every minute": Load(lambda t: 12.0 if t % 60 < 10 and t >= 300 else 0.2, 3600),
    "a day in 4 h, peak 6.4/s": Load(lambda t: max(0.02, 3.2 * (1 - math.cos(2 * math.pi * t / 14400))), 14400),
}


def measure(load: Load, policy: Callable[[Load], Policy], start_s: float, seed: int = 1) -> PoolWorld:
    """Runs one load under one policy."""
    return PoolWorld(load, Machines(start_s), policy(load), places=PLACES, seed=seed).run()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=float, nargs="+", default=[60.0, 240.0, 600.0], metavar="S")
    args = parser.parse_args()
    head = ("load", "start, s", "policy", "machine hours", "most", "refused", "wait p50, s", "p99, s", "mean, s")
    rows = []
    for name, load in LOADS.items():
        for start_s in args.starts:
            for policy_name, policy in POLICIES.items():
                world = measure(load, policy, start_s)
                waits = sorted(world.waits)
                wait = (f"{waits[len(waits) // 2]:g}", f"{waits[int(0.99 * len(waits))]:g}")
                machines = (f"{world.machine_s / 3600:.2f}", str(world.most_ordered), str(world.refused))
                rows.append((name, f"{start_s:g}", policy_name, *machines, *wait, f"{sum(waits) / len(waits):.1f}"))
    print("\n".join(table([head, *rows])))


if __name__ == "__main__":
    main()
