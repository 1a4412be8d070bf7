"""Decides the sizes of all pools once a second, with reasons."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.config import (
    DOWNSCALE_DELAY_S,
    UPSCALE_DELAY_S,
    AutoscalingConfig,
    DraftAutoscaling,
    DraftPolicy,
    RouterAutoscaling,
    RouterPolicy,
    ScalingPolicy,
    TargetAutoscaling,
    TargetPolicy,
)
from paceline.fleet.demand import DraftDemand, TargetDemand, router_demand
from paceline.fleet.scaler import Change, Demand, Pace, Scaler
from paceline.fleet.signals import Fleet, Signals, Times
from paceline.types import PoolScaling

if TYPE_CHECKING:
    from paceline.fleet.report import Report

log = logging.getLogger(__name__)

_KINDS: dict[str, tuple[type[AutoscalingConfig], type[ScalingPolicy]]] = {
    "target": (TargetAutoscaling, TargetPolicy),
    "draft": (DraftAutoscaling, DraftPolicy),
    "router": (RouterAutoscaling, RouterPolicy),
}
_RECOMMEND_S = 5.0
"""Period of calls to the model of time, which take milliseconds of the loop that takes the reports."""


@dataclass(slots=True)
class _Pool:
    """One pool, its policy and the state of its scaling."""

    kind: str
    policy: ScalingPolicy
    scaler: Scaler
    reason: str = "nothing has been decided yet"
    demand: float | None = None
    signal: str = ""
    changed_s: float | None = None


class Autoscaler:
    """Decides the sizes of the pools whose policy is Paceline's. Not thread-safe."""

    def __init__(
        self, settings: Mapping[str, Any], *, wall: Callable[[], float] = time.time, recommend: bool = True
    ) -> None:
        """``settings``: ``ServiceConfig.scaling``. ``recommend``: also ask the model of time."""
        self._wall = wall
        self._pools: dict[str, _Pool] = {}
        self._signals = Signals(ScalingPolicy().window_s)
        self._targets = TargetDemand(settings["max_sessions"])
        self._drafts = DraftDemand(_Recommendation() if recommend else lambda times: 1.0)
        self._decided_at = 0.0
        self._fleet: Fleet | None = None
        self.configure(settings)

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Sets new settings. Keeps measurements, and decisions as far as the new bounds allow."""
        pools = {}
        for kind, (model, default) in _KINDS.items():
            if (data := settings["pools"].get(kind)) is None:
                continue
            scaling = model.model_validate(data)
            policy = scaling.policy if isinstance(scaling.policy, ScalingPolicy) else default()
            pace = _pace(scaling, policy)
            known = self._pools.get(kind)
            pools[kind] = _Pool(kind, policy, Scaler(pace)) if known is None else known
            pools[kind].policy = policy
            pools[kind].scaler.rebound(pace)
        self._pools = pools
        self._targets.max_sessions = settings["max_sessions"]
        self._signals.window_s = max((pool.policy.window_s for pool in pools.values()), default=5.0)

    def observe(self, report: Report, now: float) -> None:
        """Records the report of a process; ``now`` as for ``decide``."""
        self._signals.observe(report, now)

    def decide(self, now: float) -> None:
        """Decides again. To be called about once a second; ``now`` is in seconds of a monotonic clock."""
        fleet = self._fleet = self._signals.fleet(now)
        for pool in self._pools.values():
            demand = None if fleet is None else self._demand(pool, fleet, now)
            actual = _actual(fleet, pool.kind)
            change = pool.scaler.see(demand, actual, now)
            pool.demand = None if demand is None else demand.replicas
            pool.signal = "nothing is known: no router reports" if demand is None else demand.reason
            if demand is not None and not demand.complete:
                pool.signal += "; some replicas have not reported lately, so none is taken away"
            if change is not None:
                self._note(pool, change, now)
        self._decided_at = self._wall()

    def wanted(self) -> tuple[float, dict[str, int | None]]:
        """Returns the time of the latest decision, in seconds of the epoch, and the decided size of each pool.

        None: nothing is decided yet, and the pool keeps its size. Pools with another policy are absent.
        """
        return self._decided_at, {kind: pool.scaler.wanted for kind, pool in self._pools.items()}

    def overview(self, now: float) -> tuple[PoolScaling, ...]:
        """Describes the state of each pool, for people."""
        return tuple(
            PoolScaling(
                name=pool.kind,
                wanted=pool.scaler.wanted,
                actual=_actual(self._fleet, pool.kind),
                least=pool.scaler.pace.least,
                most=pool.scaler.pace.most,
                demand=pool.demand,
                signal=pool.signal,
                reason=pool.reason,
                changed_s=None if pool.changed_s is None else now - pool.changed_s,
            )
            for pool in self._pools.values()
        )

    @property
    def fleet(self) -> Fleet | None:
        """The state of the service that the latest decision was made from."""
        return self._fleet

    @property
    def signals(self) -> Signals:
        """Signals from the reports."""
        return self._signals

    def _demand(self, pool: _Pool, fleet: Fleet, now: float) -> Demand:
        if isinstance(pool.policy, TargetPolicy):
            pace, wanted = pool.scaler.pace, pool.scaler.wanted
            return self._targets.see(
                fleet, pool.policy, pace.up_delay_s, now, down_delay_s=pace.down_delay_s, wanted=wanted
            )
        if isinstance(pool.policy, DraftPolicy):
            return self._drafts.see(fleet, pool.policy, pool.scaler.pace.zero_delay_s, now)
        assert isinstance(pool.policy, RouterPolicy)
        return router_demand(fleet, pool.policy)

    def _note(self, pool: _Pool, change: Change, now: float) -> None:
        pool.reason, pool.changed_s = change.reason, now
        log.info(
            "%s pool: %d replicas requested instead of %d: %s", pool.kind, change.after, change.before, change.reason
        )


class _Recommendation:
    """Recommended drafts per target, by the model of time, computed again every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: tuple[float, float] | None = None

    def __call__(self, times: Times) -> float:
        from paceline.plan.ratio import drafts_per_target

        now = self._clock()
        if self._known is None or now - self._known[0] >= _RECOMMEND_S:
            self._known = now, drafts_per_target(**asdict(times))
        return self._known[1]


def _pace(scaling: AutoscalingConfig, policy: ScalingPolicy) -> Pace:
    least, most = scaling.bounds
    down_s = DOWNSCALE_DELAY_S if scaling.downscale_delay_s is None else scaling.downscale_delay_s
    zero_s = scaling.downscale_to_zero_delay_s
    return Pace(
        least=least,
        most=most,
        up_delay_s=UPSCALE_DELAY_S if scaling.upscale_delay_s is None else scaling.upscale_delay_s,
        down_delay_s=down_s,
        zero_delay_s=down_s if zero_s is None else zero_s,
        hysteresis=policy.hysteresis,
        max_step_up=policy.max_step_up,
        max_step_down=policy.max_step_down,
    )


def _actual(fleet: Fleet | None, kind: str) -> int:
    if fleet is None:
        return 0
    return {"target": fleet.targets, "draft": fleet.drafts, "router": fleet.routers}[kind]
