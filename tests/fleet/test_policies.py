"""Policies compared under one load (``benchmarks/scaling_policies.py``): what its table says holds for other seeds."""

import pytest
from benchmarks import scaling_policies
from benchmarks.scaling_policies import LOADS, measure
from tests.fleet.fleets import Service, pools

from paceline_bench.fleets import Machines

STEP = LOADS["step, 1 to 6.4/s of 30 s"]


@pytest.mark.parametrize(("start_s", "seed"), [(60.0, 2), (240.0, 3), (600.0, 4)])
def test_a_step_orders_what_it_needs_and_its_requests_wait_no_longer(start_s: float, seed: int) -> None:
    """3.75 targets are needed, and the queue of the cold start wants one or two more.

    The mutants: a demand by sessions; arrivals that count each refusal.
    """
    ours = measure(STEP, scaling_policies.paceline, start_s, seed)
    before = measure(STEP, scaling_policies.by_sessions, start_s, seed)
    assert 5 <= ours.most_ordered <= 7 < before.most_ordered
    assert ours.machine_s < 0.8 * before.machine_s
    assert sorted(ours.waits)[int(0.99 * len(ours.waits))] < 1.2 * sorted(before.waits)[int(0.99 * len(before.waits))]
    assert ours.refused <= 1.4 * before.refused


def test_machines_are_paid_from_their_order_and_the_youngest_go_first() -> None:
    machines = Machines(10.0)
    machines.follow(3, 1.0)
    assert (machines.running, machines.ordered) == (1, 3)
    machines.follow(2, 5.0)
    assert (machines.running, machines.ordered) == (1, 2)
    machines.follow(2, 11.0)
    assert (machines.running, machines.ordered) == (2, 2)
    machines.follow(1, 12.0)
    assert (machines.running, machines.ordered) == (1, 1)


def test_one_wait_does_not_hold_the_pool_longer_than_its_delay() -> None:
    """Twelve seconds in which four of twenty sessions wait, then nothing: 2 -> 1 after ``downscale_delay_s``."""
    quick = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 4, "downscale_delay_s": 8}
    service = Service(pools(target=quick | {"policy": {"window_s": 4}}))
    service.monitor.autoscaler.configure({"pools": pools(target=quick), "max_sessions": 16})
    service.seconds(20, sessions=4)
    assert service.seconds(12, sessions=16, queued=4)[-1] == {"target": 2}
    sizes = [wanted["target"] for wanted in service.seconds(20)]
    assert sizes.index(1) <= 10
