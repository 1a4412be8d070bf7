"""Number of replicas that each pool needs now, from one look at the service, with little memory between two looks.

The demand for targets and routers follows the load alone, so changing their number does not change it. Drafts are
different: a draft grows its trees as long as it may, and further drafts find further work. So busy drafts are no reason
for more of them. Rounds must have missed because a draft was too late, and the model of time must expect that more
drafts help.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.config import DOWNSCALE_DELAY_S, DraftPolicy, RouterPolicy, TargetPolicy
from paceline.fleet.scaler import Demand
from paceline.fleet.signals import Fleet, Times

_RELAX_S = 600.0
"""Half-life of a goal that missed latency goals have lowered: it recovers half of the distance within this time."""
_FEWER = 0.9
_ARRIVALS_S, _DURATIONS_S = 30.0, 600.0
"""Half-lives of counted arrivals and of measured durations."""
_LEAST_ENDED = 10.0
"""Fewer ended sessions than these are too few for a mean duration."""
_WANTS = 0.1
"""Drafts are scaled to zero below this share of speculating sessions; trials of the targets take at most 3 s of 64."""
_LESS_LOAD = 0.5
_MOST_DOUBLINGS = 3


def router_demand(fleet: Fleet, policy: RouterPolicy) -> Demand:
    """Returns the demand for routers by sessions or by CPU, whichever is higher."""
    by_sessions, by_cpu = fleet.sessions / policy.sessions_per_replica, fleet.cpu / policy.cpu
    reason = f"{fleet.sessions} sessions, {fleet.cpu:.2f} cores busy"
    return Demand(max(by_sessions, by_cpu), reason, complete=not fleet.unheard["router"])


@dataclass(slots=True)
class Flow:
    """Arrivals and durations of sessions: their product is the number of sessions that run at once, after a while.

    All sums fade. A session that ends is one that was opened and runs no longer.
    """

    duration_s: float | None = None
    """Mean duration of a session, without its wait. None: too few have ended."""
    _arrived: float = 0.0
    _arriving_s: float = 0.0
    _ended: float = 0.0
    _session_s: float = 0.0
    _last: tuple[float, int] | None = None
    """Sessions that ran and that waited at the last look."""

    def see(self, fleet: Fleet, passed_s: float) -> None:
        """Counts arrivals and ends of the last ``passed_s`` seconds."""
        running, queued = fleet.sessions - fleet.queued, fleet.queued
        if self._last is not None and passed_s > 0:
            opened = fleet.opened * passed_s
            keep = 0.5 ** (passed_s / _ARRIVALS_S)
            arrived = opened + queued - self._last[1] + fleet.refused * passed_s
            self._arrived = max(0.0, keep * self._arrived + arrived)
            self._arriving_s = keep * self._arriving_s + passed_s
            keep = 0.5 ** (passed_s / _DURATIONS_S)
            self._ended = max(0.0, keep * self._ended + opened + self._last[0] - running)
            self._session_s = keep * self._session_s + running * passed_s
            self.duration_s = self._session_s / self._ended if self._ended >= _LEAST_ENDED else None
        self._last = running, queued

    def needed(self, fleet: Fleet, places: float, drain_s: float) -> tuple[float, str]:
        """Returns the sessions that should have a place, and why; the queue should have one within ``drain_s`` seconds.

        Two standard errors are subtracted from counted arrivals, so that noise alone adds nothing. A pool that serves
        its queue runs more sessions than arrive: beyond ``places``, which fill it well, these are no need.
        """
        waiting = f", {fleet.queued} of them waiting" if fleet.queued else ""
        if self.duration_s is None:
            return fleet.sessions, f"{fleet.sessions} sessions{waiting}"
        rate = max(0.0, self._arrived - 2.0 * math.sqrt(self._arrived)) / max(self._arriving_s, 1e-9)
        running, steady = float(fleet.sessions - fleet.queued), rate * self.duration_s
        if fleet.queued:
            running = min(running, places)
        needed = max(running, steady) + fleet.queued * min(1.0, self.duration_s / drain_s)
        return needed, f"{fleet.sessions} sessions{waiting}, {rate:.3g} of {self.duration_s:.3g} s arrive in a second"


@dataclass(slots=True)
class TargetDemand:
    """Demand for targets by sessions or KV pages. Missed latency goals lower the sessions that fill a target.

    While requests wait, the number of sessions grows until further targets have started. So the need is then the
    sessions that the present arrivals lead to (``Flow``), and the sessions that serve the queue in time.
    """

    max_sessions: int
    """Sessions that a target serves concurrently."""
    _flow: Flow = field(default_factory=Flow)
    _learned: float = math.inf
    _at: float | None = None
    _bursts: deque[tuple[float, float, float, int]] = field(default_factory=deque)
    """(time, seconds, demand, number of the burst) of the looks at which requests waited."""

    def see(
        self,
        fleet: Fleet,
        policy: TargetPolicy,
        up_delay_s: float,
        now: float,
        *,
        down_delay_s: float = DOWNSCALE_DELAY_S,
        wanted: int | None = None,
    ) -> Demand:
        """Returns the demand of this moment.

        ``up_delay_s``: seconds of waiting requests that require more targets; ``wanted``: ordered targets.
        """
        passed_s, self._at = 0.0 if self._at is None else now - self._at, now
        goal = policy.occupancy * self.max_sessions
        self._learn(fleet, policy, goal, passed_s)
        self._flow.see(fleet, passed_s)
        each = min(goal, self._learned)
        needed, reason = self._flow.needed(fleet, each * fleet.targets, policy.queue_drain_s)
        late = f", fewer for {_goals(policy)}" if each < goal else ""
        reason = f"{reason}, {each:.1f} are enough for a target{late}"
        demand, by_kv = needed / each, fleet.kv / policy.kv_usage
        if self._flow.duration_s is None and wanted is not None and fleet.targets < wanted < demand:
            demand = max(wanted, (fleet.sessions - fleet.queued) / each)  # what waits has been counted already
            reason = f"{reason}; {wanted - fleet.targets} are starting"
        if by_kv > demand:
            demand, reason = by_kv, f"KV pages of {fleet.kv:.1f} targets are in use"
        window_s = 2.0 * down_delay_s if policy.burst_window_s == "auto" else policy.burst_window_s or 0.0
        if (burst := self._burst(fleet, window_s, up_delay_s, demand, passed_s)) is not None and burst > demand:
            demand, reason = burst, f"requests wait again and again within {window_s:g} s; now {reason}"
        unheard = fleet.unheard["router"] + fleet.unheard["target"]
        return Demand(demand, reason, complete=not unheard)

    def _burst(self, fleet: Fleet, window_s: float, up_delay_s: float, demand: float, passed_s: float) -> float | None:
        """Returns the demand that several bursts exceeded for ``up_delay_s`` in all; None: they were shorter.

        Requests that wait less than ``up_delay_s`` after others belong to the same burst: one alone holds nothing.
        """
        assert self._at is not None
        looks = self._bursts
        if fleet.queued and passed_s > 0:
            burst = 0 if not looks else looks[-1][3] + (self._at - passed_s - looks[-1][0] >= up_delay_s)
            looks.append((self._at, passed_s, demand, burst))
        while looks and looks[0][0] < self._at - window_s:
            looks.popleft()
        if not looks or looks[0][3] == looks[-1][3]:
            return None
        waited_s = 0.0
        for _, seconds, most, _ in sorted(looks, key=lambda look: -look[2]):
            waited_s += seconds
            if waited_s >= up_delay_s:
                return most
        return None

    def _learn(self, fleet: Fleet, policy: TargetPolicy, goal: float, passed_s: float) -> None:
        """Learns how many sessions a target serves in time.

        More targets do not shorten a prefill, so a pool that is less than half full learns nothing.
        """
        if self._learned < goal:
            self._learned = goal - (goal - self._learned) * 0.5 ** (passed_s / _RELAX_S)
        pairs = ((fleet.ttft_s, policy.ttft_s), (fleet.itl_s, policy.itl_s))
        late = any(seen is not None and most is not None and seen > most for seen, most in pairs)
        if not late or not fleet.targets:
            return
        each = fleet.sessions / fleet.targets
        if each >= 0.5 * goal and not fleet.unheard["target"]:
            self._learned = max(1.0, min(self._learned, _FEWER * each))


def _goals(policy: TargetPolicy) -> str:
    goals = (("first tokens", policy.ttft_s), ("further rounds", policy.itl_s))
    return " and ".join(f"{name} within {most:g} s" for name, most in goals if most is not None)


class DraftDemand:
    """Demand for drafts by busy drafts that are too late, while more of them help and speculation has gain."""

    def __init__(self, recommend: Callable[[Times], float]) -> None:
        """Starts without a recommendation.

        ``recommend`` returns drafts per target by the model of time, 0 if it expects no gain of speculation.
        """
        self._recommend = recommend
        self.pays = Pays()
        self.ratio: float | None = None
        """Drafts per target that the model recommended last."""

    def see(self, fleet: Fleet, policy: DraftPolicy, zero_delay_s: float, now: float) -> Demand:
        """Returns the demand of this moment."""
        complete = not (fleet.unheard["router"] + fleet.unheard["draft"])
        if (doubt := self.pays.see(fleet, policy, zero_delay_s, now)) is not None:
            return Demand(0.0, doubt, complete, at_once=True)
        if not fleet.speculating:
            return Demand(0.0, "no session speculates", complete)
        if not fleet.drafts:
            return Demand(1.0, self.pays.trial or f"{fleet.speculating} sessions may have a draft", complete)
        load, late = fleet.busy / policy.utilization, fleet.late or 0.0
        reason = f"drafts are busy {fleet.busy / fleet.drafts:.0%}, {late:.1%} of rounds came too late"
        if late <= policy.late:
            load = min(load, float(fleet.drafts))
        if (most := self._most(fleet, policy)) is not None and load > most:
            load, reason = most, f"{reason}; {most:.2g} are of use for {fleet.targets} targets"
        return Demand(max(1.0, load), self.pays.trial or reason, complete)

    def _most(self, fleet: Fleet, policy: DraftPolicy) -> float | None:
        """Returns the number of drafts that help all targets; None: unknown."""
        if policy.drafts_per_target != "auto":
            ratio = policy.drafts_per_target
        elif fleet.times is not None:
            ratio = self._recommend(fleet.times)
        else:
            ratio = None
        self.ratio = ratio
        return None if ratio is None else max(1.0, ratio * fleet.targets)


@dataclass(slots=True)
class Pays:
    """Decides from the requests of the targets' controllers if speculation has gain, and when to ask them again.

    It has none if fewer than one in ten speculating sessions had or requested a draft, on average over the pool's delay
    to zero. (Targets try drafts for moments by themselves.) Only time with a serving draft counts, however long its
    machine and its model take to start. With an empty pool no target can measure, so drafts come back for ``probe_s``

    - ``probe_interval_s`` later, then after 2, 4 and 8 times as long, while sessions speculate;
    - when a target has at most half of the speculating sessions that it had when speculation was given up.
    """

    trial: str | None = None
    """Reason of the trial of drafts in progress; None: there is none."""
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(time, sessions that have or request a draft, speculating sessions)."""
    _resting_since: float | None = None
    _probing_until: float = -math.inf
    _load: float = 0.0
    _failures: int = 0

    def see(self, fleet: Fleet, policy: DraftPolicy, zero_delay_s: float, now: float) -> str | None:
        """Returns None if speculation may have gain, else why drafts were not requested for ``zero_delay_s``."""
        if self._resting_since is not None:
            return self._rest(fleet, policy, now)
        if self.trial is not None and not fleet.drafts:
            self._probing_until = now + policy.probe_s  # the first draft of the trial is still starting
        if not fleet.speculating or not fleet.drafts:
            self._seen.clear()
            return None
        self._seen.append((now, fleet.drafting, fleet.speculating))
        while len(self._seen) > 1 and self._seen[1][0] <= now - zero_delay_s:
            self._seen.popleft()
        wanted = sum(drafting for _, drafting, _ in self._seen) > _WANTS * sum(most for _, _, most in self._seen)
        if now < self._probing_until:
            return None
        if self.trial is not None:
            self.trial = None
            self._failures = 0 if wanted else self._failures
        if wanted or now - self._seen[0][0] < zero_delay_s:
            return None
        self._resting_since, self._load = now, fleet.speculating / max(1, fleet.targets)
        self._seen.clear()
        return self._doubt()

    def _rest(self, fleet: Fleet, policy: DraftPolicy, now: float) -> str | None:
        assert self._resting_since is not None
        rested_s = now - self._resting_since
        load = fleet.speculating / max(1, fleet.targets)
        interval_s = policy.probe_interval_s * 2.0 ** min(self._failures, _MOST_DOUBLINGS)
        if fleet.speculating and rested_s >= interval_s:
            self._failures += 1
            self._try(f"a trial: drafts did not pay {rested_s:.0f} s ago", policy, now)
            return None
        if fleet.speculating and rested_s >= policy.probe_s and load <= _LESS_LOAD * self._load:
            self._try(f"a trial: {load:.3g} sessions per target, {self._load:.3g} did not pay", policy, now)
            return None
        return self._doubt()

    def _try(self, why: str, policy: DraftPolicy, now: float) -> None:
        self.trial, self._resting_since, self._probing_until = why, None, now + policy.probe_s

    def _doubt(self) -> str:
        return f"speculation has no gain: at {self._load:.3g} sessions per target no draft is requested"
