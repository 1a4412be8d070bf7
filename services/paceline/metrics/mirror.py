"""Copies the metrics to Ray's exporter, which adds ``ray_`` to each name. The only module that imports
``ray.util.metrics``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import Histogram

from paceline.metrics.declaration import Kind, Metric, Samples


def inside_ray() -> bool:
    """True if this process has Ray and is part of a cluster."""
    try:
        import ray
    except ImportError:
        return False
    return bool(ray.is_initialized())


class RayMirror:
    """Ray's exporter. Names lose the characters that it refuses and the ``_total`` that it adds itself."""

    def __init__(self, replica_id: str) -> None:
        from ray.util import metrics

        self._ray = metrics
        self._replica_id = replica_id
        self._metrics: dict[str, Any] = {}
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}

    def histogram(self, own: Histogram, metric: Metric, labels: tuple[str, ...]) -> MirroredHistogram:
        """Returns a histogram that observes in ``own`` and in Ray's."""
        return MirroredHistogram(own, self._metric(metric), self._tags(metric, labels))

    def write(self, declarations: Mapping[str, Metric], samples: Samples) -> None:
        """Brings counters and gauges up to ``samples``."""
        for name, values in samples.items():
            metric = declarations[name]
            for labels, value in values.items():
                if isinstance(value, tuple):
                    continue
                if metric.kind is Kind.GAUGE:
                    self._metric(metric).set(value, self._tags(metric, labels))
                    continue
                if (name, labels) not in self._written:  # at 0, or Prometheus sees no growth in the first events
                    self._metric(metric)._record(0.0, self._tags(metric, labels))  # which ``inc`` refuses
                    self._written[name, labels] = 0.0
                if (grown := value - self._written[name, labels]) > 0:
                    self._metric(metric).inc(grown, self._tags(metric, labels))
                    self._written[name, labels] = value

    def _metric(self, metric: Metric) -> Any:
        made = self._metrics.get(metric.name)
        if made is None:
            name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name.removesuffix("_total"))
            keys = (*metric.labels, *dict(metric.constants), "ReplicaId")
            if metric.kind is Kind.COUNTER:
                made = self._ray.Counter(name, metric.documentation, keys)
            elif metric.kind is Kind.GAUGE:
                made = self._ray.Gauge(name, metric.documentation, keys)
            else:  # Ray refuses a bound of 0
                bounds = [bound for bound in metric.bounds if bound > 0]
                made = self._ray.Histogram(name, metric.documentation, bounds, keys)
            self._metrics[metric.name] = made
        return made

    def _tags(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        given = dict(zip(metric.labels, labels, strict=True))
        return {**given, **dict(metric.constants), "ReplicaId": self._replica_id}


class MirroredHistogram:
    """A histogram whose observations also go to Ray's exporter."""

    def __init__(self, own: Histogram, ray_histogram: Any, tags: Mapping[str, str]) -> None:
        self._own, self._ray, self._tags = own, ray_histogram, tags

    def observe(self, amount: float) -> None:
        """Counts one observation."""
        self._own.observe(amount)
        self._ray.observe(amount, self._tags)
