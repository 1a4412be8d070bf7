"""What reports say together, and what an autoscaler makes of them, through the monitor that both live in."""

import logging

import pytest
from tests.fleet.fleets import Process, Service, count, pools

from paceline.fleet.signals import Line, Signals, conditional_acceptance, quantile
from paceline.metrics import catalogue
from paceline.types import Cause, Round


def test_a_look_at_the_service():
    service = Service(num_targets=2, num_drafts=2)
    service.seconds(3, sessions=5, queued=2, speculating=4, drafting=3, kv=30)
    look = service.fleet
    assert (look.routers, look.sessions, look.queued, look.targets, look.drafts) == (1, 7, 2, 2, 2)
    assert (look.speculating, look.drafting) == (4, 3)
    assert look.cpu == pytest.approx(0.25)
    assert look.busy == pytest.approx(1.0)
    assert look.kv == pytest.approx(0.6)
    assert look.unheard == {"router": 0, "target": 0, "draft": 0}
    assert (look.late, look.ttft_s, look.times) == (None, None, None)  # nothing was drafted


def test_requests_that_come_and_those_that_are_refused_for_the_first_time():
    service = Service()
    service.seconds(2)
    for second in range(6):
        for _ in range(4):
            service.router.router.admitted(0.1)
        for _ in range(3):
            service.router.router.rejected("queue_full")
        service.router.router.rejected("another reason")
        count(service.router, returned=2.0 if second else 0.0)
        service.second()
    assert service.fleet.opened == pytest.approx(4.0)
    assert service.fleet.refused == pytest.approx(1.0), "three, two of which had been told to come now"


def test_rounds_first_tokens_and_the_times_of_steps():
    service = Service()
    service.second(sessions=4)
    for _ in range(6):
        for cause in [Cause.HIT] * 6 + [Cause.TOKEN, Cause.LATE] + [Cause.DISABLED] * 50:
            service.router.router.round(
                Round(4 if cause is Cause.HIT else 0, 3 if cause is Cause.HIT else 0, cause), 1, 0
            )
        for seconds in (0.02, 0.02, 0.02, 0.02, 0.2):
            service.router.router.first_token(seconds)
        service.router.router.draft_link(0.004)
        service.second(sessions=4)
    look = service.fleet
    assert look.late == pytest.approx(1 / 8)
    assert 0.1 < look.ttft_s <= 0.25
    times = look.times
    assert (times.target_step_s, times.draft_step_s) == (pytest.approx(0.005), pytest.approx(0.005))
    assert (times.target_row_s, times.draft_row_s) == (0.0, 0.0), "all steps were alike"
    assert times.acceptance == pytest.approx(0.89, abs=0.01)
    assert (times.sessions_per_target, times.link_s) == (4.0, pytest.approx(0.004))


def test_the_window_forgets():
    service = Service()
    for _ in range(30):
        service.router.router.round(Round(0, 0, Cause.LATE), 1, 0)
    service.seconds(2, sessions=1)  # counted before it was first heard of: not of this window
    assert service.fleet.late is None
    for _ in range(30):
        service.router.router.round(Round(0, 0, Cause.LATE), 1, 0)
    service.second(sessions=1)
    assert service.fleet.late == 1.0
    service.seconds(7, sessions=1)
    assert service.fleet.late is None


def test_who_is_silent_or_new_is_not_heard_of():
    service = Service(num_targets=2)
    service.second()
    assert service.fleet.unheard == {"router": 1, "target": 2, "draft": 1}
    service.seconds(2)
    service.silent = {"t1"}
    service.seconds(3)
    assert service.fleet.unheard["target"] == 0  # a report may be lost
    service.seconds(2)
    assert service.fleet.unheard["target"] == 1
    service.seconds(10)
    assert (service.fleet.targets, service.fleet.unheard["target"]) == (2, 1), "routers still know it"
    service.second(members={"target": ("t0",), "draft": ("d0",)})
    assert (service.fleet.targets, service.fleet.unheard["target"]) == (1, 0)


def test_a_process_that_drains_does_not_count():
    service = Service(num_drafts=2)
    service.seconds(3, members={"target": ("t0",), "draft": ("d1",)})
    assert (service.fleet.drafts, service.fleet.busy) == (1, pytest.approx(0.5))
    states = {status.replica_id: status.draining for status in service.monitor.server_info().pools["draft"]}
    assert states == {"d0": True, "d1": False}


def test_a_restart_begins_anew():
    service = Service()
    service.seconds(3, busy=0.9)
    draft = service.drafts[0] = Process("d0", "draft")
    draft.incarnation = 2
    service.second(busy=0.9)
    assert service.fleet.unheard["draft"] == 1
    service.second(busy=0.9)
    assert service.fleet.busy == pytest.approx(0.9)


def test_nothing_is_known_without_a_router():
    service = Service(
        pools(target={"max_replicas": 3, "upscale_delay_s": 0.0, "downscale_delay_s": 5.0}), num_targets=3
    )
    assert service.seconds(8, sessions=12)[-1] == {"target": 3}
    service.silent = {"r1"}
    assert service.seconds(60)[-1] == {"target": 3}, "held"
    (overview,) = service.monitor.server_info().scaling
    assert (overview.demand, overview.signal) == (None, "nothing is known: no router reports")


def test_the_pools_move_apart(caplog):
    quick = {"upscale_delay_s": 2.0, "downscale_delay_s": 6.0}
    both = pools(target=quick | {"max_replicas": 3}, draft=quick | {"min_replicas": 0, "max_replicas": 3})
    service = Service(both, num_targets=1, num_drafts=0)
    with caplog.at_level(logging.INFO, "paceline"):
        assert service.seconds(8)[-1] == {"target": 1, "draft": 0}
        assert service.seconds(8, sessions=8)[-1] == {"target": 3, "draft": 0}, "plain load"
        assert service.seconds(2, sessions=3, speculating=3)[-1]["draft"] == 1, "at once"
        service.targets += [Process(f"t{i}", "target") for i in (1, 2)]
        service.drafts = [Process("d0", "draft")]
        assert service.seconds(20, sessions=2, speculating=2, drafting=2)[-1] == {"target": 1, "draft": 1}
        assert service.seconds(20)[-1] == {"target": 1, "draft": 0}
    assert "target pool: 2 replicas requested instead of 1: 8 sessions, 3.2 are enough for a target" in caplog.messages
    assert "draft pool: 0 replicas requested instead of 1: no session speculates" in caplog.messages
    lines = service.monitor.exposition().splitlines()
    assert 'paceline_scaling_wanted_replicas{pool="draft"} 0.0' in lines
    assert 'paceline_scaling_changes_total{direction="up",pool="target"} 2.0' in lines or (
        'paceline_scaling_changes_total{pool="target",direction="up"} 2.0' in lines
    )
    info = service.monitor.server_info()
    assert [(pool.name, pool.wanted, pool.most) for pool in info.scaling] == [("target", 1, 3), ("draft", 0, 3)]
    assert info.scaling[1].reason == "no session speculates"


def test_new_settings_keep_what_was_decided():
    quick = {"upscale_delay_s": 0.0, "downscale_delay_s": 100.0}
    service = Service(pools(target=quick | {"max_replicas": 3}), num_targets=3)
    assert service.seconds(3, sessions=16)[-1] == {"target": None}
    service = Service(pools(target=quick | {"max_replicas": 3}), num_targets=1)
    assert service.seconds(8, sessions=16)[-1] == {"target": 3}
    service.monitor.autoscaler.configure({"pools": pools(target=quick | {"max_replicas": 2}), "max_sessions": 4})
    assert service.second(sessions=16) == {"target": 2}
    service.monitor.autoscaler.configure({"pools": pools(target=quick | {"max_replicas": 8}), "max_sessions": 4})
    assert service.seconds(3, sessions=16)[-1]["target"] > 3
    service.monitor.autoscaler.configure({"pools": {}, "max_sessions": 4})
    assert service.second(sessions=16) == {}


def test_reports_out_of_order_or_twice_change_nothing():
    signals, process = Signals(5.0), Process("d0", "draft")
    reports = []
    for _ in range(3):
        count(process, step_s=0.5, tree_steps=10, leaves=10)
        reports.append(process.report())
    for now, report in [(1.0, reports[0]), (2.0, reports[2]), (2.1, reports[1]), (9.0, reports[2])]:
        signals.observe(report, now)
    assert signals.busy_shares() == {"d0": pytest.approx(1.0)}


def test_a_line_through_steps():
    line = Line()
    assert line.first_and_further() is None
    for rows in (1, 5, 9, 3, 7):
        line.add(10, 10 * rows, 10 * (0.02 + 0.001 * (rows - 1)))
    assert line.first_and_further() == (pytest.approx(0.02), pytest.approx(0.001))
    line = Line()
    for rows in (1, 5, 9):
        line.add(10, 10 * rows, 10 * (0.02 - 0.001 * rows))
    assert line.first_and_further()[1] == 0.0, "more rows never make a step shorter"


@pytest.mark.parametrize(("k", "a"), [(1, 0.3), (4, 0.8), (8, 0.95), (3, 0.0), (8, 1.0)])
def test_the_acceptance_of_one_token(k, a):
    accepted = sum(a**i for i in range(1, k + 1))
    assert conditional_acceptance(100, 100 * k, 100 * accepted) == pytest.approx(a, abs=1e-6)


def test_percentiles_of_a_histogram():
    bounds = catalogue.TTFT.bounds
    counts = tuple(float(bound >= 1.0) * 10 for bound in bounds)
    assert quantile(bounds, (*counts, 10.0), 0.9) == pytest.approx(0.75 + 0.25 * 0.9)
    assert quantile(bounds, (*[0.0] * len(bounds), 5.0), 0.9) == bounds[-1]
    assert conditional_acceptance(0, 0, 0) is None
