"""The numbers of the whole fleet in one place: every process reports once a second, one scrape shows the sums.

It does not know how reports travel. Totals never decrease and count each event once, despite reordered reports,
restarts and silent processes. A restart of the monitor resets them, like that of any scraped process.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.config.installed import installed_version
from paceline.fleet.autoscaler import Autoscaler
from paceline.fleet.report import Report
from paceline.metrics import catalogue
from paceline.metrics.declaration import Kind, Metric, Samples, Value
from paceline.metrics.engines import declared
from paceline.metrics.rates import number, speculation_rates, total
from paceline.metrics.registry import Registry, family
from paceline.types import ReplicaStatus, ServerInfo, Startup

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""A process that has not reported for this long counts as gone."""
_DEAD_S = 2.5
"""A replica that takes no sessions and has not reported for this long counts as gone: one that drains does report."""

NO_SCALING: Mapping[str, Any] = {"pools": {}, "max_sessions": 1}
"""Value of ``ServiceConfig.scaling`` with which no pool's size is decided here."""

_MAX_SILENT = 256
"""Number of silent processes to remember, in case they were only paused. An older one that returns counts twice."""

_Values = dict[tuple[str, ...], Value]


@dataclass(slots=True)
class _Source:
    """One incarnation of one process."""

    report: Report
    seen_s: float
    in_base: Samples | None = None
    """Part of its samples that the base already holds, because it was silent once."""
    silent: bool = False


class Monitor:
    """Keeps the newest report of each process, and the totals of processes that went silent.

    Not thread-safe. ``clock`` gives seconds and never goes back; only arrival here is timed. ``autoscaler``
    receives every report, and decides when ``tick`` is called, about once a second.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self.autoscaler = autoscaler or Autoscaler(NO_SCALING)
        self._own = Registry("monitor", mirror=True)
        self._sized: set[str] = set()
        self._clock = clock
        self._started_s = clock()
        self._sources: dict[tuple[str, int], _Source] = {}  # by source id and incarnation, oldest report first
        self._base: dict[str, _Values] = {}
        self._shown: dict[str, _Values] = {}
        self._unknown: set[str] = set()

    def push(self, report: Report) -> None:
        """Records a report; ignores one that is older than the newest of its incarnation."""
        key = (report.source_id, report.status.incarnation)
        source = self._sources.get(key)
        if source is None:
            self._sources[key] = _Source(report, self._clock())
        elif report.sequence >= source.report.sequence:
            in_base = self._sources.pop(key).in_base
            self._sources[key] = _Source(report, self._clock(), in_base)
        self._sweep()
        self.autoscaler.observe(report, self._clock())

    def tick(self) -> None:
        """Decides the sizes of the pools, and mirrors them to Ray; NaN for a pool that is no longer decided here."""
        _, before = self.autoscaler.wanted()
        self.autoscaler.decide(self._clock())
        pools = self.autoscaler.overview(self._clock())
        for name in self._sized - {pool.name for pool in pools}:
            for metric in (catalogue.SCALING_WANTED, catalogue.SCALING_ACTUAL, catalogue.SCALING_DEMAND):
                self._own.gauge(metric, name).set(math.nan)
        self._sized = {pool.name for pool in pools}
        for pool in pools:
            for direction in ("up", "down"):
                self._own.counter(catalogue.SCALING_CHANGES, pool.name, direction)
            self._own.gauge(catalogue.SCALING_ACTUAL, pool.name).set(pool.actual)
            if pool.demand is not None:
                self._own.gauge(catalogue.SCALING_DEMAND, pool.name).set(pool.demand)
            if pool.wanted is None:
                continue
            self._own.gauge(catalogue.SCALING_WANTED, pool.name).set(pool.wanted)
            if (last := before.get(pool.name)) is not None and last != pool.wanted:
                direction = "up" if pool.wanted > last else "down"
                self._own.counter(catalogue.SCALING_CHANGES, pool.name, direction).inc()
        self._own.mirror(self._own.samples())

    def exposition(self) -> str:
        """Returns the page in Prometheus' text format: totals summed over processes, gauges as declared."""
        families = [*_families(self.totals()), *_families(self._gauges()), *_families(self._own.samples())]
        return generate_latest(_Families(sorted(families, key=operator.attrgetter("name")))).decode()

    def server_info(self, starting: Sequence[Startup] = ()) -> ServerInfo:
        """Returns pools, sessions and the rates that the totals give. ``starting``: replicas that are starting."""
        totals, gauges = self.totals(), self._gauges()
        pools: dict[str, list[ReplicaStatus]] = {}
        signals, fleet = self.autoscaler.signals, self.autoscaler.fleet
        busy, members = signals.busy_shares(), {kind: signals.members(kind) for kind in ("target", "draft")}
        for source in self._live():
            kind, status = source.report.kind, source.report.status
            known = members.get(kind)
            drains = known is not None and status.replica_id not in known
            if drains and self._clock() - source.seen_s > _DEAD_S:
                continue
            share = busy.get(status.replica_id, 0.0)
            pools.setdefault(kind, []).append(replace(status, draining=status.draining or drains, busy_share=share))
        return ServerInfo(
            version=installed_version(),
            uptime_s=self._clock() - self._started_s,
            pools={
                kind: tuple(sorted(statuses, key=lambda status: status.replica_id))
                for kind, statuses in sorted(pools.items())
            },
            sessions_running=int(total(gauges, catalogue.REQUESTS_RUNNING)),
            sessions_queued=int(total(gauges, catalogue.REQUESTS_WAITING)),
            **speculation_rates(totals),
            sessions_speculating=fleet.speculating if fleet is not None else 0,
            sessions_drafting=fleet.drafting if fleet is not None else 0,
            scaling=self.autoscaler.overview(self._clock()),
            starting=tuple(starting),
        )

    def totals(self) -> dict[str, _Values]:
        """Returns counters and histograms, summed over all processes that ever reported."""
        self._sweep()
        totals = {name: dict(values) for name, values in self._base.items()}
        for source in self._sources.values():
            if not source.silent:
                self._add(totals, source)
        # Sums of floats depend on the order of the terms, and a scraper takes the smallest decrease for a restart.
        for name, values in totals.items():
            shown = self._shown.setdefault(name, {})
            for labels, value in values.items():
                values[labels] = shown[labels] = _join(max, shown.get(labels, value), value)
        return totals

    def _sweep(self) -> None:
        now = self._clock()
        silent = []
        for key, source in self._sources.items():
            if not source.silent and now - source.seen_s > SILENT_S:
                self._add(self._base, source)
                source.in_base = {n: v for n, v in source.report.samples.items() if not _is_gauge(n)}
                source.silent = True
            if source.silent:
                silent.append(key)
        for key in silent[: max(0, len(silent) - _MAX_SILENT)]:
            del self._sources[key]

    def _live(self) -> Iterator[_Source]:
        """Yields the newest incarnation of each process, unless it is silent."""
        newest: dict[str, int] = {}
        for source_id, incarnation in self._sources:
            newest[source_id] = max(newest.get(source_id, incarnation), incarnation)
        for (source_id, incarnation), source in self._sources.items():
            if not source.silent and newest[source_id] == incarnation:
                yield source

    def _add(self, totals: dict[str, _Values], source: _Source) -> None:
        """Adds the counts of a process that the base does not hold yet."""
        for name, values in source.report.samples.items():
            metric = self._declared(name)
            if metric is None or metric.kind is Kind.GAUGE:
                continue
            held = source.in_base.get(name, {}) if source.in_base is not None else {}
            summed = totals.setdefault(name, {})
            for labels, value in values.items():
                if not _fits(metric, labels, value):
                    self._refuse(name)
                    continue
                if labels in held:
                    value = _join(lambda new, old: max(0.0, new - old), value, held[labels])
                summed[labels] = _join(operator.add, summed[labels], value) if labels in summed else value

    def _gauges(self) -> dict[str, _Values]:
        self._sweep()
        gauges: dict[str, _Values] = {}
        up: dict[str, float] = {}
        for source in self._live():
            up[source.report.kind] = up.get(source.report.kind, 0.0) + 1.0
            for name, values in source.report.samples.items():
                metric = self._declared(name)
                if metric is None or metric.kind is not Kind.GAUGE:
                    continue
                summed = gauges.setdefault(name, {})
                for labels, value in values.items():
                    if not _fits(metric, labels, value):
                        self._refuse(name)
                    elif metric.per_replica:
                        summed[(*labels, source.report.source_id)] = value
                    else:
                        summed[labels] = number(summed.get(labels, 0.0)) + number(value)
        gauges[catalogue.REPLICAS_UP.name] = {(kind,): up.get(kind, 0.0) for kind in {"router", "target", "draft", *up}}
        return gauges

    def _declared(self, name: str) -> Metric | None:
        metric = declared(name)
        if metric is None:
            self._refuse(name)
        return metric

    def _refuse(self, name: str) -> None:
        """Drops a metric that is not declared here, with one warning: processes of another version may report it."""
        if name not in self._unknown:
            self._unknown.add(name)
            log.warning("dropping unknown metric %s (reported by a different version?)", name)


def _is_gauge(name: str) -> bool:
    metric = declared(name)
    return metric is not None and metric.kind is Kind.GAUGE


def _fits(metric: Metric, labels: tuple[str, ...], value: Value) -> bool:
    size = len(value) if isinstance(value, tuple) else 0
    expected = len(metric.bounds) + 2 if metric.kind is Kind.HISTOGRAM else 0
    return len(labels) == len(metric.labels) and size == expected


def _join(operation: Callable[[float, float], float], left: Value, right: Value) -> Value:
    """Applies the operation to two values of one metric, number by number."""
    if isinstance(left, tuple):
        assert isinstance(right, tuple)
        return tuple(operation(a, b) for a, b in zip(left, right, strict=True))
    assert not isinstance(right, tuple)
    return operation(left, right)


def _families(values: Samples) -> Iterator[Family]:
    for name, series in values.items():
        metric = declared(name)
        if metric is not None:
            labels = (*metric.labels, "replica_id") if metric.per_replica else metric.labels
            yield family(metric, labels, series)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
