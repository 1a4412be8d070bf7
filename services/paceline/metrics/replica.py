"""Metrics of a target or draft replica: its newest status, brought into the registry."""

from __future__ import annotations

from paceline.metrics.catalogue import (
    BATCH_INVARIANT,
    CONTROLLER,
    KV_PAGES,
    KV_PAGES_USED,
    KV_USAGE,
    REPLICA_BUSY,
    REPLICA_CAPACITY,
    REPLICA_DRAINING,
    REPLICA_SESSIONS,
    REPLICA_WAITING,
)
from paceline.metrics.engines import engine_counter
from paceline.metrics.registry import Registry
from paceline.types import ReplicaStatus


class ReplicaMetrics:
    """Metrics of a target or draft replica: the counters of its engine and its gauges, as its status gives them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._incarnation: int | None = None
        self._seen: dict[str, float] = {}

    def update(self, status: ReplicaStatus) -> None:
        """Takes the newest status. A new incarnation, or a counter that fell, counts from zero again."""
        registry, kind = self._registry, status.kind
        if status.incarnation != self._incarnation:
            self._incarnation, self._seen = status.incarnation, {}
        for field, value in status.counters.items():
            metric = engine_counter(kind, field)
            counter = registry.counter(metric, *([status.model] if metric.labels else []))
            seen = self._seen.get(field, 0.0)
            grown = value - seen if value >= seen else value
            if grown > 0:  # also false for NaN
                counter.inc(grown)
                self._seen[field] = value
            elif value < seen:
                self._seen[field] = 0.0
        for name, value in status.measures.items():
            name, _, label = name.partition(":")
            if (measure := CONTROLLER.get(name)) is not None and bool(label) == bool(measure.labels):
                registry.gauge(measure, *([label] if label else [])).set(value)
        registry.gauge(REPLICA_SESSIONS, kind).set(status.num_sessions)
        registry.gauge(REPLICA_WAITING, kind).set(status.num_waiting)
        registry.gauge(REPLICA_CAPACITY, kind).set(status.max_sessions)
        registry.gauge(REPLICA_BUSY, kind).set(status.busy_s)
        registry.gauge(REPLICA_DRAINING, kind).set(status.draining)
        if status.batch_invariant in ("yes", "no"):
            registry.gauge(BATCH_INVARIANT, status.model).set(status.batch_invariant == "yes")
        if status.kv_pages:
            registry.gauge(KV_PAGES, kind).set(status.kv_pages)
            registry.gauge(KV_PAGES_USED, kind).set(status.kv_pages_used)
            if kind == "target":
                registry.gauge(KV_USAGE, status.model).set(status.kv_pages_used / status.kv_pages)
