"""Metrics of one process: prometheus_client's own objects, made by their declarations, and how they leave it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from paceline.metrics.declaration import Kind, Metric, Samples, Value
from paceline.metrics.mirror import MirroredHistogram, RayMirror, inside_ray

_M = TypeVar("_M", bound=MetricWrapperBase)


def family(metric: Metric, labels: Sequence[str], series: Mapping[tuple[str, ...], Value]) -> Family:
    """Converts the values of a metric to a family of prometheus_client, in the order of their labels, and adds the
    metric's constant labels."""
    names, constants = [name for name, _ in metric.constants], tuple(value for _, value in metric.constants)
    labels, series = [*labels, *names], {(*key, *constants): value for key, value in series.items()}
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.documentation, labels=labels)
        bounds = [*(repr(float(bound)) for bound in metric.bounds), "+Inf"]
        for key, value in sorted(series.items()):
            assert isinstance(value, tuple)
            histogram.add_metric(key, list(zip(bounds, value[1:], strict=True)), value[0])
        return histogram
    plain: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is Kind.COUNTER:
        plain = CounterMetricFamily(metric.name, metric.documentation, labels=labels)
    else:
        plain = GaugeMetricFamily(metric.name, metric.documentation, labels=labels)
    for key, value in sorted(series.items()):
        assert not isinstance(value, tuple)
        plain.add_metric(key, value)
    return plain


class Registry(Collector):
    """Metrics of one process, as prometheus_client's exporters take them.

    ``mirror``: inside a Ray worker, also feed Ray's exporter. Histograms are mirrored as they are observed; counters
    and gauges when ``mirror`` is called, once a second, because each write to Ray costs microseconds.
    """

    def __init__(self, replica_id: str = "", *, mirror: bool = False) -> None:
        self._declared: dict[str, Metric] = {}
        self._made: dict[str, MetricWrapperBase] = {}
        self._mirror = RayMirror(replica_id) if mirror and inside_ray() else None

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """Returns the counter with these label values; it shows 0 from the first call on."""
        assert metric.kind is Kind.COUNTER, metric.name
        return self._bound(Counter, metric, labels)

    def gauge(self, metric: Metric, *labels: str) -> Gauge:
        """Returns the gauge with these label values; it shows 0 from the first call on."""
        assert metric.kind is Kind.GAUGE, metric.name
        return self._bound(Gauge, metric, labels)

    def histogram(self, metric: Metric, *labels: str) -> Histogram | MirroredHistogram:
        """Returns the histogram with these label values."""
        assert metric.kind is Kind.HISTOGRAM, metric.name
        histogram = self._bound(functools.partial(Histogram, buckets=metric.bounds), metric, labels)
        return histogram if self._mirror is None else self._mirror.histogram(histogram, metric, labels)

    def _bound(self, make: Callable[..., _M], metric: Metric, labels: tuple[str, ...]) -> _M:
        """Returns the metric with its labels bound, and makes it at the first call."""
        made = self._made.get(metric.name)
        if made is None:
            made = make(metric.name, metric.documentation, metric.labels, registry=None)
            self._declared[metric.name], self._made[metric.name] = metric, made
        assert len(metric.labels) == len(labels), (metric.name, labels)
        return cast(_M, made.labels(*labels) if labels else made)

    def samples(self) -> Samples:
        """Returns all values now."""
        return {name: _values(self._declared[name], made) for name, made in list(self._made.items())}

    def collect(self) -> list[Family]:
        """Returns all values now, as prometheus_client's exporters take them, without its times of creation."""
        samples = sorted(self.samples().items())
        return [family(self._declared[name], self._declared[name].labels, series) for name, series in samples]

    def mirror(self, samples: Samples) -> None:
        """Brings Ray's counters and gauges up to ``samples``; does nothing outside Ray."""
        if self._mirror is not None:
            self._mirror.write(self._declared, samples)


def _values(metric: Metric, made: MetricWrapperBase) -> dict[tuple[str, ...], Value]:
    """The values of a metric by its labels, read where prometheus_client keeps them: the samples that it makes of them
    take ten times as long."""
    if not metric.labels:
        return {(): _value(made)}
    with made._lock:
        children = list(made._metrics.items())
    return {tuple(key): _value(child) for key, child in children}


def _value(child: MetricWrapperBase) -> Value:
    """A number; of a histogram its sum, and the count up to each bound."""
    if isinstance(child, Histogram):
        return (child._sum.get(), *itertools.accumulate(bucket.get() for bucket in child._buckets))
    return float(cast(Gauge, child)._value.get())
