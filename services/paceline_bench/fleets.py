"""A pool of targets under a virtual clock: arrivals, a queue, sessions, and machines with a start-up time.

One step is one second. The service consists of sessions, places and machines alone. The caller decides its size, so
that policies can be compared under the same load.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.fleet.signals import Fleet
from paceline.router.retry import RetryHints

UNHEARD = {"router": 0, "target": 0, "draft": 0}


@dataclass(slots=True)
class Machines:
    """Replicas of a pool: an ordered replica serves ``start_s`` later; a surplus replica goes at once."""

    start_s: float
    running: int = 1
    starting: list[float] = field(default_factory=list)
    """Times at which they will serve."""

    @property
    def ordered(self) -> int:
        """Replicas that run or start, all of which are paid for."""
        return self.running + len(self.starting)

    def follow(self, wanted: int, now: float) -> None:
        """Orders and stops replicas until there are ``wanted``; the youngest go first."""
        while self.ordered < wanted:
            self.starting.append(now + self.start_s)
        while self.ordered > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.running -= 1
        ready = [at for at in self.starting if at <= now]
        self.running += len(ready)
        self.starting = [at for at in self.starting if at > now]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests per second at a time, and how long each runs."""

    rate: Callable[[float], float]
    seconds: int
    duration_s: float = 30.0
    varies: bool = True
    """Durations are exponentially distributed; else they are all equal."""


Policy = Callable[[Fleet, Machines, float], int]
"""Decides the number of targets from a look at the service, its machines and the time."""


@dataclass(slots=True)
class PoolWorld:
    """Requests in, targets out. A refused request comes again when it is told to."""

    load: Load
    machines: Machines
    policy: Policy
    places: int = 64
    """Sessions that a target serves at once."""
    most_queued: int = 512
    seed: int = 1
    waits: list[float] = field(default_factory=list)
    """Seconds from the first attempt of a request to its place."""
    refused: int = 0
    machine_s: float = 0.0
    most_ordered: int = 0

    def run(self) -> PoolWorld:
        """Runs the whole load, and then, without arrivals, until no session waits."""
        rng, now, hints = random.Random(self.seed), 0, RetryHints(random.Random(self.seed))
        queue: deque[tuple[float, float]] = deque()  # (first attempt, duration)
        running: list[tuple[float, float]] = []  # (end, duration)
        returned = 0
        coming: list[tuple[float, float, float]] = []  # (time of the next attempt, first attempt, duration)
        while now < self.load.seconds or queue or coming:
            now += 1
            attempts = [(first, lasts) for at, first, lasts in coming if at <= now]
            coming = [entry for entry in coming if entry[0] > now]
            arrived = _poisson(rng, self.load.rate(now)) if now < self.load.seconds else 0
            mean_s = self.load.duration_s
            attempts += [(now, rng.expovariate(1 / mean_s) if self.load.varies else mean_s) for _ in range(arrived)]
            refused = 0
            for first, lasts in attempts:
                if len(queue) < self.most_queued:
                    queue.append((first, lasts))
                else:
                    refused += 1
                    coming.append((now + hints.refused(now, len(running)), first, lasts))
            for _, lasts in [session for session in running if session[0] <= now]:
                hints.note_freed(now, lasts)
            running = [session for session in running if session[0] > now]
            opened, before = 0, returned
            returned = hints.num_returned(now)
            while queue and len(running) < self.places * self.machines.running:
                first, lasts = queue.popleft()
                self.waits.append(now - first)
                running.append((now + lasts, lasts))
                opened += 1
            look = self._look(len(running), len(queue), opened, refused - (returned - before))
            wanted = self.policy(look, self.machines, float(now))
            if now < self.load.seconds:
                self.refused += refused
                self.machine_s += self.machines.ordered
                self.most_ordered = max(self.most_ordered, wanted)
            self.machines.follow(wanted, now)
        return self

    def _look(self, running: int, queued: int, opened: int, refused: int) -> Fleet:
        return Fleet(
            routers=1,
            sessions=running + queued,
            queued=queued,
            opened=float(opened),
            refused=float(refused),
            cpu=0.1,
            speculating=0,
            drafting=0,
            targets=self.machines.running,
            kv=0.0,
            ttft_s=None,
            itl_s=None,
            drafts=0,
            busy=0.0,
            late=None,
            times=None,
            unheard=UNHEARD,
        )


def _poisson(rng: random.Random, mean: float) -> int:
    count, passed = 0, rng.expovariate(1.0)
    while passed < mean:
        count, passed = count + 1, passed + rng.expovariate(1.0)
    return count
