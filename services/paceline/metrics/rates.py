"""What the totals of routers say about speculation."""

from __future__ import annotations

from typing import TypedDict

from paceline.metrics import catalogue
from paceline.metrics.declaration import Metric, Samples, Value
from paceline.types import MISSES, Cause


class Rates(TypedDict):
    """Fields of ``ServerInfo``."""

    acceptance_rate: float
    acceptance_length: float
    hit_rate: float


def number(value: Value) -> float:
    """The value of a counter or gauge."""
    assert not isinstance(value, tuple)
    return value


def total(samples: Samples, metric: Metric) -> float:
    """The sum of a metric over its labels; 0 if there is none."""
    return sum(map(number, samples.get(metric.name, {}).values()))


def speculation_rates(samples: Samples) -> Rates:
    """Shares of the drafted tokens and of the rounds, and mean tokens of a verification."""
    drafted, accepted = total(samples, catalogue.DRAFT_TOKENS), total(samples, catalogue.ACCEPTED_TOKENS)
    rounds = samples.get(catalogue.ROUNDS.name, {})
    hits = number(rounds.get((Cause.HIT.value,), 0.0))
    misses = sum(number(rounds.get((cause.value,), 0.0)) for cause in MISSES)
    return {
        "acceptance_rate": _ratio(accepted, drafted),
        "acceptance_length": 1.0 + _ratio(accepted, total(samples, catalogue.DRAFTS)),
        "hit_rate": _ratio(hits, hits + misses),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
