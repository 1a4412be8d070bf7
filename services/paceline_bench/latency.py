"""Times that a client sees, and goodput. Pure.

    submitted ── TTFT ──▶ first tokens ── gap ──▶ tokens ── gap ──▶ last tokens
              ◀──────────────────────── E2EL ──────────────────────▶

A chunk is the tokens that arrive at once, of a round. A *gap* lies between two chunks. *ITL* has one value per token
after the first chunk: the gap for a chunk's first token and 0 for its other tokens. So under speculation its median
tends to 0 and its 99 % to the time of a round. If every chunk is one token, ITL equals the gap.
*TPOT* has one value per request: (E2EL - TTFT) / (tokens - 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline_bench.records import RequestRecord

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "gap", "e2el")
LIMITED = ("ttft", "tpot", "itl", "e2el")
"""Metrics that goodput can limit. For TPOT a request's mean counts, as in ```vllm bench serve```; for ITL its 99 %."""

Percentiles = dict[int, float | None]
"""Seconds by percent; None without values."""


@dataclass(frozen=True, slots=True)
class Times:
    """Latencies of one request, in seconds."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    """Mean time per token after the first; None for a request of one token."""
    itl_s: tuple[float, ...] | None
    """Inter-token latencies; None if the server does not report how many tokens a chunk holds."""
    gap_s: tuple[float, ...]


def times(record: RequestRecord) -> Times | None:
    """Latencies of a request; None for one without rounds, which has received nothing."""
    rounds = record.rounds
    if not rounds:
        return None
    gaps = tuple(b.at_s - a.at_s for a, b in itertools.pairwise(rounds))
    counted = sum(r.tokens for r in rounds) == record.num_tokens
    itl = [v for gap, r in zip(gaps, rounds[1:], strict=True) if r.tokens for v in (gap, *[0.0] * (r.tokens - 1))]
    last_s = rounds[-1].at_s
    decoded = record.num_tokens - 1
    tpot = (last_s - rounds[0].at_s) / decoded if decoded > 0 else None
    return Times(rounds[0].at_s, last_s, tpot, tuple(itl) if counted else None, gaps)


def percentiles(values: Sequence[float]) -> Percentiles:
    """Linear between the two nearest values, numpy's default and that of ``vllm bench serve``."""
    if not values:
        return dict.fromkeys(PERCENTILES)
    return {p: _percentile(values, p) for p in PERCENTILES}


def _percentile(values: Sequence[float], percent: float) -> float:
    import numpy as np  # callers that only render tables need none

    return float(np.percentile(values, percent))


def latencies(records: Iterable[RequestRecord]) -> dict[str, Percentiles]:
    """Percentiles over all requests, by ``METRICS``; ITL and gaps: over all values together."""
    found = [t for record in records if (t := times(record)) is not None]
    every_itl = all(t.itl_s is not None for t in found)
    return {
        "ttft": percentiles([t.ttft_s for t in found]),
        "tpot": percentiles([t.tpot_s for t in found if t.tpot_s is not None]),
        "itl": percentiles([v for t in found for v in t.itl_s or ()] if every_itl else []),
        "gap": percentiles([v for t in found for v in t.gap_s]),
        "e2el": percentiles([t.e2el_s for t in found]),
    }


def meets(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """True if a request keeps every limit; one that has received nothing, or whose value is unknown, does not."""
    found = times(record)
    if found is None:
        return False
    itl = None if found.itl_s is None else _percentile(found.itl_s, 99) if found.itl_s else 0.0
    tpot = found.tpot_s if record.num_tokens > 1 else 0.0
    seconds = {"ttft": found.ttft_s, "tpot": tpot, "itl": itl, "e2el": found.e2el_s}
    return all((value := seconds[name]) is not None and value * 1e3 <= limit for name, limit in limits_ms.items())
