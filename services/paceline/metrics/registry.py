"""The metrics of one process: where its cells are kept by name and labels, and how they leave it, as samples, as
prometheus_client's families, and mirrored to Ray's exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.metrics.cells import Counter, Gauge, Histogram
from paceline.metrics.declaration import Kind, Metric, Samples, Value
from paceline.metrics.mirror import RayMirror, inside_ray


def family(metric: Metric, labels: Sequence[str], series: Mapping[tuple[str, ...], Value]) -> Family:
    """The values of a metric as prometheus_client wants them, in the order of their labels."""
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
    """The metrics of one process. ``collectors`` is what prometheus_client's exporters take.

    ``mirror``: inside a Ray worker, also feed Ray's exporter. Histograms are mirrored as they are observed; counters
    and gauges when ``mirror`` is called, once a second, because each write to Ray costs microseconds.
    """

    def __init__(self, replica_id: str = "", *, mirror: bool = False) -> None:
        self.collectors = CollectorRegistry(auto_describe=False)
        self.collectors.register(self)
        self._metrics: dict[str, Metric] = {}
        self._counters: dict[tuple[str, tuple[str, ...]], Counter] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._mirror = RayMirror(replica_id) if mirror and inside_ray() else None

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """The counter with these label values; it shows 0 from now on."""
        counter = self._counters.get((metric.name, labels))
        if counter is None:
            counter = self._counters[self._declared(metric, Kind.COUNTER, labels)] = Counter()
        return counter

    def gauge(self, metric: Metric, *labels: str) -> Gauge:
        """The gauge with these label values."""
        gauge = self._gauges.get((metric.name, labels))
        if gauge is None:
            gauge = self._gauges[self._declared(metric, Kind.GAUGE, labels)] = Gauge()
        return gauge

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram with these label values."""
        histogram = self._histograms.get((metric.name, labels))
        if histogram is None:
            key = self._declared(metric, Kind.HISTOGRAM, labels)
            if self._mirror is None:
                histogram = Histogram(metric.bounds)
            else:
                histogram = self._mirror.histogram(metric, labels)
            self._histograms[key] = histogram
        return histogram

    def _declared(self, metric: Metric, kind: Kind, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        assert (metric.kind, len(metric.labels)) == (kind, len(labels)), (metric.name, labels)
        self._metrics[metric.name] = metric
        return metric.name, labels

    def samples(self) -> Samples:
        """All values now."""
        samples: dict[str, dict[tuple[str, ...], Value]] = {name: {} for name in self._metrics}
        for (name, labels), counter in list(self._counters.items()):
            samples[name][labels] = counter.value
        for (name, labels), gauge in list(self._gauges.items()):
            samples[name][labels] = gauge.value
        for (name, labels), histogram in list(self._histograms.items()):
            samples[name][labels] = histogram.value
        return samples

    def collect(self) -> Iterator[Family]:
        """The same as prometheus_client's families."""
        for name, series in self.samples().items():
            yield family(self._metrics[name], self._metrics[name].labels, series)

    def mirror(self, samples: Samples) -> None:
        """Brings Ray's counters and gauges up to ``samples``; does nothing outside Ray."""
        if self._mirror is not None:
            self._mirror.write(self._metrics, samples)
