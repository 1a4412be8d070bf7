"""Metrics of a target or draft replica: its newest status, brought into the registry."""

from __future__ import annotations

from paceline.metrics.catalogue import (
    BATCH_INVARIANT,
    CACHE_CONFIG,
    COMPILED,
    CONTROLLER,
    ITERATION_TOKENS,
    KV_PAGES,
    KV_PAGES_USED,
    KV_USAGE,
    REPLICA_BUSY,
    REPLICA_CAPACITY,
    REPLICA_DRAINING,
    REPLICA_SESSIONS,
    REPLICA_WAITING,
    STATES,
)
from paceline.metrics.engines import engine_counter
from paceline.metrics.registry import Registry
from paceline.types import PAGE_SIZE, ReplicaStatus

_MEASURES = CONTROLLER | STATES
"""Gauges by the name that a status gives them."""


class ReplicaMetrics:
    """Metrics of a target or draft replica: the counters of its engine and its gauges, as its status gives them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._incarnation: int | None = None
        self._seen: dict[str, float] = {}
        self._cache: tuple[str, ...] | None = None  # labels of CACHE_CONFIG

    def update(self, status: ReplicaStatus) -> None:
        """Records the newest status. A new incarnation, or a counter that fell, counts from zero again."""
        registry, kind = self._registry, status.kind
        if status.incarnation != self._incarnation:
            self._incarnation, self._seen = status.incarnation, {}
        for field, value in status.counters.items():
            name, _, bound = field.partition(":")
            if name == "steps_of":
                self._steps(status, value, bound)
            elif not bound:
                metric = engine_counter(kind, field)
                registry.counter(metric, *([status.model] if metric.labels else [])).inc(self._grown(field, value))
        for name, value in status.measures.items():
            name, _, label = name.partition(":")
            if (measure := _MEASURES.get(name)) is not None and bool(label) == bool(measure.labels):
                registry.gauge(measure, *([label] if label else [])).set(value)
        registry.gauge(REPLICA_SESSIONS, kind).set(status.num_sessions)
        registry.gauge(REPLICA_WAITING, kind).set(status.num_waiting)
        registry.gauge(REPLICA_CAPACITY, kind).set(status.max_sessions)
        registry.gauge(REPLICA_BUSY, kind).set(status.busy_s)
        registry.gauge(REPLICA_DRAINING, kind).set(status.draining)
        if status.batch_invariant in ("yes", "no"):
            registry.gauge(BATCH_INVARIANT, status.model).set(status.batch_invariant == "yes")
        if status.execution:
            registry.gauge(COMPILED, kind).set(status.execution == "compiled")
        if status.kv_pages:
            registry.gauge(KV_PAGES, kind).set(status.kv_pages)
            registry.gauge(KV_PAGES_USED, kind).set(status.kv_pages_used)
            if kind == "target":
                registry.gauge(KV_USAGE, status.model).set(status.kv_pages_used / status.kv_pages)
                self._describe_cache(status)

    def _grown(self, field: str, value: float) -> float:
        """The growth of a counter of the engine since it was asked for last."""
        seen = self._seen.get(field, 0.0)
        grown = value - seen if value >= seen else value
        if grown > 0:  # also false for NaN
            self._seen[field] = value
            return grown
        if value < seen:
            self._seen[field] = 0.0
        return 0.0

    def _steps(self, status: ReplicaStatus, num_steps: float, bound: str) -> None:
        """Observes the new steps of a size, each with their mean since the last status."""
        tokens = f"step_tokens_of:{bound}"
        num_new, num_tokens = self._grown(f"steps_of:{bound}", num_steps), status.counters.get(tokens, 0.0)
        new_tokens, histogram = (
            self._grown(tokens, num_tokens),
            self._registry.histogram(ITERATION_TOKENS, status.model),
        )
        for _ in range(int(num_new)):
            histogram.observe(new_tokens / num_new)

    def _describe_cache(self, status: ReplicaStatus) -> None:
        labels = (status.model, str(PAGE_SIZE), str(status.kv_pages))
        if self._cache not in (None, labels):
            self._registry.gauge(CACHE_CONFIG, *self._cache).set(0)
        self._cache = labels
        self._registry.gauge(CACHE_CONFIG, *labels).set(1)
