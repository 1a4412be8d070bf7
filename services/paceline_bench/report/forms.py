"""Forms of numbers and rows in text and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_bench.arithmetic import Ratio, Share
from paceline_bench.latency import METRICS

Row = Sequence[tuple[str, str]]
"""A row of a table: each cell after the header of its column."""


def rows_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and the cells of each row, without columns that hold nothing but "-"; [] if there are no rows."""
    if not rows:
        return []
    kept = [i for i in range(len(rows[0])) if any(row[i][1] != "-" for row in rows)]
    return [tuple(rows[0][i][0] for i in kept), *(tuple(row[i][1] for i in kept) for row in rows)]


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """A number with fixed digits; "-" for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, without a unit."""
    return number(seconds, 2, 1e3)


def percent(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{value:.1%}"


def latency(values: Mapping[int, float | None] | Mapping[str, float | None]) -> str:
    """Percentiles in milliseconds with slashes between them."""
    return "/".join(number(v, 1 if (v or 0.0) < 0.1 else 0, 1e3) for v in values.values())


def percentiles(found: Mapping[str, Mapping[Any, float | None]]) -> Row:
    """A cell per metric with its percentiles in milliseconds."""
    return [(f"{name.upper()} p50/p90/p95/p99", latency(found[name])) for name in METRICS]


def share(value: Share) -> str:
    """A rate and the events that it is of."""
    return "-" if value.rate is None else f"{value.rate:.3f} of {value.events}"


def hits_of(value: Share | None) -> str:
    """Hits over events, as counts."""
    return "-" if value is None or not value.events else f"{value.hits}/{value.events}"


def ends(values: tuple[float, float], digits: int = 1) -> str:
    """The ends of an interval; "not repeated" where one measurement makes both."""
    return "not repeated" if values[0] == values[1] else f"{values[0]:.{digits}f}-{values[1]:.{digits}f}"


def spread_of(value: Ratio) -> str:
    """The 95 % interval of a ratio; "-" for what is divided by itself."""
    return "-" if value.low == value.high == 1.0 else ends((value.low, value.high), 2)


def counts(causes: Mapping[str, int]) -> str:
    """Counts by cause."""
    return " ".join(f"{cause}:{count}" for cause, count in sorted(causes.items()))
