"""Declarations of metrics, and the values that a process counts under them. Every declaration is made here
once, by name; ``catalogue.py`` and ``engines.py`` say which there are.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace


class Kind(enum.StrEnum):
    """Behavior of a metric's values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declaration. ``name`` is the full name as a scrape shows it, with ``_total`` if it is a counter."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Histogram: upper bounds, inclusive and ascending, without infinity."""
    constants: tuple[tuple[str, str], ...] = ()
    """Names and values of the labels that are the same in every process."""
    per_replica: bool = False
    """Gauge: the fleet shows one value per process, labelled ``replica_id``, instead of the sum."""

    @property
    def documentation(self) -> str:
        """The help line of a scrape."""
        return f"{self.help} Unit: {self.unit}."


Value = float | tuple[float, ...]
"""A counter's or gauge's number; of a histogram (sum, count up to each bound..., count of all)."""

Samples = Mapping[str, Mapping[tuple[str, ...], Value]]
"""The picklable state of a registry: metric name -> values of its labels, in the declared order -> value."""

CATALOGUE: dict[str, Metric] = {}
"""Every declaration, by name."""


_VLLM_CONSTANTS = (("engine", "0"),)
"""vLLM numbers the data-parallel engines of an address; callers see a service as one engine, whose targets differ by
``replica_id``."""
_NO_COUNTERS = ("vllm:iteration_tokens_total",)
"""vLLM's names that end like a counter's, but are none."""


def declare(metric: Metric) -> Metric:
    """Puts a declaration into the catalogue; a name is declared once."""
    assert metric.name not in CATALOGUE, f"{metric.name} is declared twice"
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER or metric.name in _NO_COUNTERS), metric.name
    if metric.name.startswith("vllm:"):
        metric = replace(metric, constants=_VLLM_CONSTANTS)
    CATALOGUE[metric.name] = metric
    return metric


def counter(name: str, unit: str, help_: str, *labels: str) -> Metric:
    """Declares a counter."""
    return declare(Metric(name, Kind.COUNTER, unit, help_, labels))


def gauge(name: str, unit: str, help_: str, *labels: str, per_replica: bool = False) -> Metric:
    """Declares a gauge."""
    return declare(Metric(name, Kind.GAUGE, unit, help_, labels, per_replica=per_replica))


def histogram(name: str, unit: str, help_: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    """Declares a histogram."""
    return declare(Metric(name, Kind.HISTOGRAM, unit, help_, labels, bounds))
