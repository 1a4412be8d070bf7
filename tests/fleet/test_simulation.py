"""The loop closed: a made-up service whose replicas take their time to start, whose load is noisy, and which reacts.

Drafts are as busy as they are let and late when they are too few; the wanted sizes are followed a while later, as Serve
and machines do.
"""

import itertools
import random

import pytest
from tests.fleet.fleets import Process, Service, pools
from tests.support.rings import nightly

from paceline.types import Cause, Round

START_S = 20
"""From the decision to a replica that takes sessions, where nothing else is said."""
PACE = {"upscale_delay_s": 10.0, "downscale_delay_s": 60.0}
NOISE = 0.1
"""Of every signal, to each side; 0.2 / (2 - 0.2) is what the default hysteresis bears."""


class Simulation:
    """Sessions in, sizes out; one step is one second."""

    def __init__(self, seed, start_s=START_S):
        self.random, self.start_s = random.Random(seed), start_s
        both = pools(
            target=PACE | {"min_replicas": 1, "max_replicas": 8},
            draft=PACE
            | {
                "min_replicas": 0,
                "max_replicas": 8,
                "downscale_to_zero_delay_s": 20.0,
                "policy": {"drafts_per_target": None, "probe_interval_s": 100.0, "probe_s": 30.0},
            },
        )
        self.service = Service(both, num_targets=1, num_drafts=0)
        self.second = 0
        self.due = []
        self.sizes = {"target": [], "draft": []}

    def noisy(self, value):
        return value * (1 + self.random.uniform(-NOISE, NOISE))

    def run(self, seconds, *, plain=0.0, speculating=0.0, pays=True):
        """Load in sessions: what there is at a moment is about that many. Returns the changes by pool."""
        for sizes in self.sizes.values():
            sizes.clear()
        for _ in range(seconds):
            self.second += 1
            self.step(self.noisy(plain), self.noisy(speculating), pays)
        return {
            kind: [b - a for a, b in itertools.pairwise(sizes) if a is not None and b != a]
            for kind, sizes in self.sizes.items()
        }

    def step(self, plain, speculating, pays):
        service, drafts = self.service, len(self.service.drafts)
        needed = 0.3 * speculating if pays else 0.0
        busy = min(1.0, self.noisy(0.1 + needed * 1.2 / drafts)) if drafts else 0.0
        late = max(0.0, 1 - 0.8 * drafts / needed) if needed else 0.0
        if speculating:
            for i in range(20):
                service.router.router.round(Round(0, 0, Cause.LATE if i < 20 * late else Cause.TOKEN), 1, 0)
        wanted = service.second(
            sessions=plain + speculating,
            speculating=round(speculating),
            # A target without a draft asks for one for 3 s of every 64.
            drafting=round(speculating) if pays and (drafts or self.second % 64 < 3) else 0,
            busy=busy,
        )
        for kind, size in wanted.items():
            self.sizes[kind].append(size)
            if size is not None:
                self.due.append((self.second + self.start_s, kind, size))
        self.follow()

    def follow(self):
        """Pools shrink at once, and grow when what was wanted then has started."""
        for kind, processes in (("target", self.service.targets), ("draft", self.service.drafts)):
            now = self.sizes[kind][-1]
            if now is not None:
                del processes[now:]
            ready = [size for at, of, size in self.due if of == kind and at <= self.second]
            while ready and now is not None and len(processes) < min(now, ready[-1]):
                processes.append(Process(f"{kind}{self.second}-{len(processes)}", kind))
        self.due = [entry for entry in self.due if entry[0] > self.second - 1]


@pytest.mark.parametrize("seed", [0, *nightly([1, 2])])
def test_steps_of_load_are_followed_without_swinging(seed):
    one = Simulation(seed)
    one.run(120)
    assert (len(one.service.targets), len(one.service.drafts)) == (1, 0)
    changes = one.run(300, plain=9.0)
    assert all(change > 0 for change in changes["target"])
    assert (len(one.service.targets), changes["draft"]) == (3, [])  # 9 / 3.2
    changes = one.run(300, plain=0.0, speculating=9.0)
    assert changes["target"] == [], "as many sessions as before"
    assert all(change > 0 for change in changes["draft"])
    assert 3 <= len(one.service.drafts) <= 5  # three are late for every twentieth, noise apart
    changes = one.run(600, plain=0.0, speculating=9.0)
    assert changes["target"] == []
    assert len(changes["draft"]) <= 1
    changes = one.run(400, plain=2.0)
    assert all(change < 0 for sizes in changes.values() for change in sizes)
    assert (len(one.service.targets), len(one.service.drafts)) == (1, 0)


def test_drafts_go_where_they_do_not_pay_and_are_tried_ever_more_rarely():
    one = Simulation(7)
    one.run(60, speculating=6.0)
    assert len(one.service.drafts) >= 1
    changes = one.run(800, speculating=6.0, pays=False)
    ups, downs = (sum(change > 0 for change in changes["draft"]), sum(change < 0 for change in changes["draft"]))
    assert ups <= 3, "after 100, 200 and 400 s"
    assert downs >= ups
    assert len(changes["target"]) <= 2
    one.run(1000, speculating=6.0)
    assert len(one.service.drafts) >= 2, "and come back when they do"


@pytest.mark.parametrize("start_s", [20, 300, 600])
def test_a_draft_that_pays_is_kept_however_long_its_machine_takes_to_start(start_s):
    one = Simulation(11, start_s)
    one.run(start_s + 60, speculating=6.0)
    assert len(one.service.drafts) >= 1, "the first one is waited for"
    one.run(200, speculating=6.0, pays=False)
    assert len(one.service.drafts) == 0, "given up after it was measured"
    changes = one.run(start_s + 700, speculating=6.0)
    assert len(one.service.drafts) >= 1, "and so is the one of a trial"
    assert all(change > 0 for change in changes["draft"]), "no machine was started for nothing"
