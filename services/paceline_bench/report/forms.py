"""Forms of numbers and rows in text and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline_bench.arithmetic import Share

Row = Sequence[tuple[str, str]]
"""A row of a table: each cell after the header of its column."""


def rows_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and the cells of each row; [] if there are no rows."""
    return [tuple(header for header, _ in rows[0]), *(tuple(cell for _, cell in row) for row in rows)] if rows else []


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


def share(value: Share) -> str:
    """A rate and the events that it is of."""
    return "-" if value.rate is None else f"{value.rate:.3f} of {value.events}"


def hits_of(value: Share | None) -> str:
    """Hits over events, as counts."""
    return "-" if value is None else f"{value.hits}/{value.events}"


def ends(values: tuple[float, float], digits: int = 1) -> str:
    """The ends of an interval."""
    return f"{values[0]:.{digits}f}-{values[1]:.{digits}f}"


def counts(causes: Mapping[str, int]) -> str:
    """Counts by cause."""
    return " ".join(f"{cause}:{count}" for cause, count in sorted(causes.items()))
