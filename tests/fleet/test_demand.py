"""What each pool needs, by one look at the service after the other."""

import pytest
from tests.fleet.fleets import HEARD, fleet

from paceline.config import DraftPolicy, RouterPolicy, TargetPolicy
from paceline.fleet.demand import DraftDemand, TargetDemand, router_demand
from paceline.fleet.signals import Times

TIMES = Times(0.03, 0.001, 0.005, 0.0002, 0.8, 4.0, 0.0001)
ZERO_S = 30.0


def targets(look, policy=None, *, max_sessions=10):
    return TargetDemand(max_sessions).see(look, policy or TargetPolicy(), 15.0, 0.0)


def drafts(look, policy=None, *, ratio=8.0):
    return DraftDemand(lambda times: ratio).see(look, policy or DraftPolicy(), ZERO_S, 0.0)


def test_routers_by_sessions_and_cpu():
    policy = RouterPolicy(sessions_per_replica=100, cpu=0.5)
    assert router_demand(fleet(sessions=150, cpu=0.1), policy).replicas == pytest.approx(1.5)
    demand = router_demand(fleet(sessions=150, cpu=1.4), policy)
    assert (demand.replicas, demand.reason) == (pytest.approx(2.8), "150 sessions, 1.40 cores busy")
    assert not router_demand(fleet(unheard=HEARD | {"router": 1}), policy).complete
    assert router_demand(fleet(unheard=HEARD | {"target": 1}), policy).complete


def test_targets_by_sessions_that_run_or_wait():
    demand = targets(fleet(sessions=20, queued=6))
    assert demand.replicas == pytest.approx(2.5)  # eight of ten are enough for one
    assert demand.reason == "20 sessions, 6 of them waiting, 8.0 are enough for a target"
    assert targets(fleet(sessions=20), TargetPolicy(occupancy=1.0)).replicas == pytest.approx(2.0)
    assert targets(fleet(sessions=0, kv=0.0)).replicas == 0.0


def test_targets_by_kv_memory():
    demand = targets(fleet(sessions=4, kv=1.7))
    assert (demand.replicas, demand.reason) == (pytest.approx(2.0), "KV pages of 1.7 targets are in use")


@pytest.mark.parametrize("kind", ["router", "target"])
def test_targets_that_were_not_heard_of_may_be_busier(kind):
    assert not targets(fleet(unheard=HEARD | {kind: 1})).complete
    assert targets(fleet(unheard=HEARD | {"draft": 1})).complete


def test_late_first_tokens_ask_for_more_targets_and_it_is_remembered():
    policy, pool = TargetPolicy(ttft_s=1.0), TargetDemand(10)
    late, good = fleet(sessions=12, targets=2, ttft_s=2.0), fleet(sessions=12, targets=3, ttft_s=0.5)
    for second in range(20):  # it does not escalate while the third target starts
        demand = pool.see(late, policy, 15.0, float(second))
        assert 2.0 < demand.replicas <= 3.0
    assert "within 1 s" in demand.reason
    assert 2.0 < pool.see(good, policy, 15.0, 60.0).replicas <= 3.0, "the same load does not lose the third again"
    assert pool.see(good, policy, 15.0, 60.0 + 3600.0).replicas <= 2.0, "an hour later it may be tried"


def test_late_rounds_ask_for_more_targets():
    late = fleet(sessions=12, targets=2, itl_s=0.2)
    demand = targets(late, TargetPolicy(itl_s=0.1))
    assert 2.0 < demand.replicas <= 3.0
    assert "fewer for further rounds within 0.1 s" in demand.reason
    assert targets(late, TargetPolicy(itl_s=0.3)).replicas == pytest.approx(1.5)
    assert targets(late).replicas == pytest.approx(1.5), "no goal is set"
    both = targets(late, TargetPolicy(itl_s=0.1, ttft_s=1.0)).reason
    assert "first tokens within 1 s and further rounds within 0.1 s" in both


def bursts(pool, policy, *, minutes, wait_s=10):
    """Every minute requests wait for ``wait_s``, then the load is low. Returns the demand at each minute's end."""
    seen = []
    for second in range(60 * minutes):
        look = fleet(sessions=24, queued=4) if second % 60 < wait_s else fleet(sessions=4)
        demand = pool.see(look, policy, 15.0, float(second))
        if second % 60 == 59:
            seen.append(demand)
    return seen


def test_bursts_that_are_shorter_than_the_delay_count_together():
    seen = bursts(TargetDemand(10), TargetPolicy(), minutes=4)
    assert [demand.replicas for demand in seen] == pytest.approx([0.5, 3.0, 3.0, 3.0])  # 9 s, then 19 s of 24 / 8
    assert seen[1].reason.startswith("requests wait again and again within 600 s; now 4 sessions")
    alone = bursts(TargetDemand(10), TargetPolicy(burst_window_s=None), minutes=4)
    assert [demand.replicas for demand in alone] == pytest.approx([0.5] * 4)


def test_bursts_are_forgotten_after_the_window():
    """By default it is twice ``downscale_delay_s``."""
    for policy, window_s in ((TargetPolicy(burst_window_s=240), 240.0), (TargetPolicy(), 100.0)):
        pool = TargetDemand(10)
        bursts(pool, policy, minutes=2)
        late = 9.0 + window_s  # the first burst ended after 9 s, the second one after 69 s
        assert pool.see(fleet(sessions=4), policy, 15.0, late - 10, down_delay_s=50.0).replicas == pytest.approx(3.0)
        assert pool.see(fleet(sessions=4), policy, 15.0, late + 1, down_delay_s=50.0).replicas == pytest.approx(0.5)


def test_one_wait_holds_nothing_however_long_it_is():
    """The mutant: every look at which requests waited counts."""
    pool, policy = TargetDemand(10), TargetPolicy(burst_window_s=600)
    for second in range(80):
        waits = second < 60 and second % 5 != 4  # places become free, and are taken again
        demand = pool.see(fleet(sessions=24, queued=4 * waits), policy, 15.0, float(second))
    assert demand.replicas == pytest.approx(3.0)
    assert pool.see(fleet(sessions=4), policy, 15.0, 81.0).replicas == pytest.approx(0.5)


def looks(pool, seconds, *, start=0, wanted=None, queued=0, **rates):
    """Looks at ten running sessions and a growing queue, one a second. Returns the last demand."""
    growth = rates.pop("growth", 0)
    for second in range(start, start + seconds):
        look = fleet(
            sessions=10 + queued + growth * (second - start), queued=queued + growth * (second - start), **rates
        )
        demand = pool.see(look, TargetPolicy(occupancy=1.0), 15.0, float(second), wanted=wanted)
    return demand


def test_a_queue_asks_for_the_targets_that_its_arrivals_need_and_not_for_one_of_each_request():
    """Sessions of 10 s, 4 of which come in a second while one target of ten places serves one: 40 at once.

    The mutants: demand by sessions; arrivals without those that are still in the queue; durations with the wait.
    """
    pool = TargetDemand(10)
    assert looks(pool, 120, opened=1.0).replicas == pytest.approx(1.0, abs=0.2)
    demand = looks(pool, 120, start=120, opened=1.0, growth=3)
    assert 3.0 < demand.replicas - 0.1 * 357 * 10 / 300 < 4.0  # two standard errors below 4, and 357 within 300 s
    assert demand.reason.startswith("367 sessions, 357 of them waiting, 3.")
    assert "of 10" in demand.reason


def test_refused_requests_are_arrivals():
    pool = TargetDemand(10)
    looks(pool, 120, opened=1.0)
    demand = looks(pool, 120, start=120, opened=1.0, queued=16, refused=3.0)
    assert 3.0 < demand.replicas - 0.1 * 16 * 10 / 300 < 4.0


def test_a_pool_that_serves_its_queue_is_not_short_of_targets():
    pool = TargetDemand(10)
    looks(pool, 300, opened=1.0)
    catching_up = fleet(sessions=40, queued=15, opened=2.5, targets=2)
    demand = pool.see(catching_up, TargetPolicy(occupancy=1.0), 15.0, 300.0)
    assert demand.replicas == pytest.approx(2.0 + 15 * 10 / 300 / 10, abs=0.1), "25 run, of which 20 fill two well"


def test_while_targets_start_and_no_duration_is_known_the_queue_asks_for_no_more():
    look = fleet(sessions=64, queued=44, targets=2)
    pool = TargetDemand(10)
    assert pool.see(look, TargetPolicy(), 15.0, 0.0, wanted=2).replicas == pytest.approx(8.0)
    demand = pool.see(look, TargetPolicy(), 15.0, 1.0, wanted=4)
    assert demand.replicas == pytest.approx(4.0)
    assert demand.reason.endswith("; 2 are starting")
    full = fleet(sessions=80, queued=40, targets=2)
    assert pool.see(full, TargetPolicy(), 15.0, 2.0, wanted=4).replicas == pytest.approx(5.0), "40 run"


def test_first_tokens_of_an_idle_pool_are_late_for_another_reason():
    look = fleet(sessions=4, targets=2, ttft_s=5.0)
    assert targets(look, TargetPolicy(ttft_s=1.0)).replicas == pytest.approx(0.5)
    assert targets(fleet(sessions=12, ttft_s=5.0)).replicas == pytest.approx(1.5)  # no limit is set
    starting = fleet(sessions=12, ttft_s=5.0, unheard=HEARD | {"target": 1})
    assert targets(starting, TargetPolicy(ttft_s=1.0)).replicas == pytest.approx(1.5)


def test_busy_drafts_are_not_enough_they_have_to_be_late():
    assert drafts(fleet(drafts=2, busy=1.9, late=0.01)).replicas == pytest.approx(2.0)
    assert drafts(fleet(drafts=2, busy=1.9, late=None)).replicas == pytest.approx(2.0)
    demand = drafts(fleet(drafts=2, busy=1.9, late=0.2))
    assert demand.replicas == pytest.approx(1.9 / 0.75)
    assert demand.reason == "drafts are busy 95%, 20.0% of rounds came too late"
    assert drafts(fleet(drafts=2, busy=0.6, late=0.2)).replicas == pytest.approx(1.0), (
        "late, but not for lack of drafts"
    )


def test_the_model_of_time_says_how_many_are_of_use():
    look = fleet(targets=2, drafts=3, busy=3.0, late=0.3, times=TIMES)
    assert drafts(look, ratio=4.0).replicas == pytest.approx(4.0)
    demand = drafts(look, ratio=1.5)
    assert (demand.replicas, demand.reason.partition("; ")[2]) == (pytest.approx(3.0), "3 are of use for 2 targets")
    assert drafts(look, DraftPolicy(drafts_per_target=0.5), ratio=4.0).replicas == pytest.approx(1.0)
    assert drafts(look, DraftPolicy(drafts_per_target=None), ratio=0.1).replicas == pytest.approx(4.0)
    assert drafts(look, ratio=0.0).replicas == pytest.approx(1.0), "the targets themselves say whether it pays"


def test_the_limit_of_drafts_per_target_holds_while_they_are_on_time():
    look = fleet(targets=1, drafts=8, busy=8.0, late=0.0, times=TIMES)
    demand = drafts(look, DraftPolicy(drafts_per_target=2.0))
    assert (demand.replicas, demand.reason.partition("; ")[2]) == (pytest.approx(2.0), "2 are of use for 1 targets")
    assert drafts(look, ratio=3.0).replicas == pytest.approx(3.0)
    assert drafts(look, DraftPolicy(drafts_per_target=None)).replicas == pytest.approx(8.0)


def test_an_empty_draft_pool_is_wanted_by_sessions_that_speculate():
    assert drafts(fleet(drafts=0, busy=0.0)).replicas == 1.0
    demand = drafts(fleet(drafts=0, busy=0.0, speculating=0, drafting=0))
    assert (demand.replicas, demand.reason) == (0.0, "no session speculates")


class Clocked:
    """One look a second."""

    def __init__(self, **policy):
        self.policy, self.now = DraftPolicy(**{"probe_interval_s": 200, "probe_s": 60} | policy), 0.0
        self.demand = DraftDemand(lambda times: 8.0)

    def see(self, seconds=1, **look):
        seen = []
        for _ in range(seconds):
            self.now += 1.0
            seen.append(self.demand.see(fleet(**look), self.policy, ZERO_S, self.now))
        return seen


def wanted(seen):
    """Lengths of the spells with and without a demand, beginning with one with."""
    spells, state = [0], True
    for demand in seen:
        if (demand.replicas > 0) is not state:
            state = not state
            spells.append(0)
        spells[-1] += 1
    return spells


def test_drafts_that_nobody_wants_go_and_are_tried_ever_more_rarely():
    seen = Clocked().see(3000, drafting=0, speculating=8)
    spells = wanted(seen)
    on, off = spells[::2], spells[1::2]
    assert on[0] == ZERO_S
    assert all(60 <= seconds <= 62 for seconds in on[1:])
    assert [round(seconds, -1) for seconds in off[:3]] == [200, 400, 800]
    gone = next(demand for demand in seen if demand.replicas == 0)
    assert gone.at_once
    assert gone.reason == "speculation has no gain: at 4 sessions per target no draft is requested"


def test_moments_in_which_targets_try_drafts_do_not_keep_them():
    one = Clocked()
    seen = [one.see(drafting=8 if second % 20 == 0 else 0, speculating=8)[0] for second in range(60)]
    assert wanted(seen)[:2] == [30, 30]
    assert wanted([one.see(drafting=2, speculating=8)[0] for one in [Clocked()] for _ in range(100)]) == [100]


def test_a_trial_that_pays_keeps_the_drafts():
    one = Clocked()
    one.see(40, drafting=0)
    seen = one.see(200, drafting=0)
    assert wanted(seen) == [0, 190, 10]
    assert seen[-1].reason == "a trial: drafts did not pay 200 s ago"
    assert wanted(one.see(500, drafting=8)) == [500]


def test_a_trial_begins_when_its_first_draft_serves():
    one = Clocked()
    assert wanted(one.see(1000, drafts=0, drafting=0)) == [1000], "nothing has been measured yet"
    one.see(31, drafting=0)
    assert wanted(one.see(190, drafts=0, drafting=0)) == [0, 190]
    seen = one.see(900, drafts=0, drafting=0)
    assert wanted(seen)[0] == 0
    assert len(wanted(seen)) == 3, "rest, then a trial that lasts as long as its draft starts"
    assert wanted(one.see(100, drafting=0))[0] in (59, 60, 61), "measured for probe_s, then given up"


def test_less_load_is_a_reason_to_try():
    one = Clocked()
    one.see(40, drafting=0, speculating=8, targets=1)
    assert wanted(one.see(80, drafting=0, speculating=5, targets=1)) == [0, 80]
    seen = one.see(10, drafting=0, speculating=4, targets=1)
    assert wanted(seen) == [10]
    assert seen[0].reason == "a trial: 4 sessions per target, 8 did not pay"


def test_no_trial_while_nobody_speculates():
    one = Clocked()
    one.see(40, drafting=0)
    assert wanted(one.see(2000, drafting=0, speculating=0)) == [0, 2000]
    assert wanted(one.see(10, drafting=0, speculating=8)) == [10]
