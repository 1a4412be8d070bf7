"""Arithmetic on records. Pure: no engines, no clocks, no text.

Definitions. *Decode* is what comes after a request's first outcome, so prefill is in neither its tokens nor its
seconds. Rates are total tokens over total seconds, never means of rates.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self, TypeVar

from paceline.types import Cause
from paceline_bench.records import RequestRecord

_MISSES = (Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN)
_RESAMPLES = 1000
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Share:
    """Hits among events, both counted."""

    hits: int = 0
    events: int = 0

    @property
    def rate(self) -> float | None:
        """Hits per event; None if there were no events."""
        return self.hits / self.events if self.events else None

    @classmethod
    def of_claims(cls, records: Sequence[RequestRecord]) -> Self:
        """Share of requests with plain decoding's tokens, among the requests that claim this."""
        claims = [record.identical for record in records if record.identical is not None]
        return cls(sum(claims), len(claims))


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed-up with its spread."""

    value: float
    low: float
    high: float
    """95 % bootstrap interval over units, resampled in pairs."""
    least: float
    most: float
    """Extremes of single units."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and the seconds that they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RoundTotals:
    """Totals over the decode rounds of some requests, which are all rounds but each request's first."""

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    causes: dict[str, int]

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Self:
        """Sums the decode rounds of ``records``."""
        later = [r for record in records for r in record.rounds[1:]]
        causes = Counter(r.cause for r in later if r.cause)
        drafted, accepted = sum(r.drafted for r in later), sum(r.accepted for r in later)
        return cls(len(later), sum(r.tokens for r in later), drafted, accepted, dict(causes))

    @property
    def tokens_per_round(self) -> float | None:
        """Acceptance length: tokens per target step, next token included."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> float | None:
        """Accepted draft tokens over proposed ones, next tokens excluded."""
        return self.accepted / self.drafted if self.drafted else None


def by_producer(records: Sequence[RequestRecord]) -> dict[str, tuple[int, Share]]:
    """Decode rounds of each producer of proposals, and how many of its tokens were accepted."""
    later = [r for record in records for r in record.rounds[1:] if r.producer]
    return {
        name: (len(own), Share(sum(r.accepted for r in own), sum(r.drafted for r in own)))
        for name in ("draft", "head", "lookup")
        if (own := [r for r in later if r.producer == name])
    }


def decode_amount(unit: Sequence[RequestRecord]) -> Amount:
    """Tokens and time from the first outcome of any request to the last of any, without that first outcome's."""
    first = min(unit, key=lambda r: r.prefill_s)
    tokens = sum(r.num_tokens for r in unit) - (first.rounds[0].tokens if first.rounds else 0)
    return Amount(tokens, max(r.prefill_s + r.decode_s for r in unit) - first.prefill_s)


def end_to_end_amount(unit: Sequence[RequestRecord]) -> Amount:
    """Tokens and time from submission to the last outcome."""
    return Amount(sum(r.num_tokens for r in unit), max(r.prefill_s + r.decode_s for r in unit))


def rate(amounts: Sequence[Amount]) -> float:
    """Total tokens over total seconds; 0.0 if no time passed."""
    seconds = sum(a.seconds for a in amounts)
    return sum(a.tokens for a in amounts) / seconds if seconds > 0 else 0.0


def stream_rate(records: Sequence[RequestRecord]) -> float:
    """Decode tokens per second as single clients see them: totals over requests, each by its own time."""
    return rate([decode_amount([record]) for record in records if record.rounds])


def ratio(own: Sequence[Amount], plain: Sequence[Amount], seed: int = 0) -> Ratio | None:
    """Speed-up of paired units; None if there is nothing to divide by."""
    assert len(own) == len(plain), "units are paired"
    pairs = [(a, b) for a, b in zip(own, plain, strict=True) if rate([a]) > 0 and rate([b]) > 0]
    if not pairs:
        return None

    def of(sample: Sequence[tuple[Amount, Amount]]) -> float:
        return rate([a for a, _ in sample]) / rate([b for _, b in sample])

    singles = [of([pair]) for pair in pairs]
    return Ratio(of(pairs), *interval(pairs, of, seed), min(singles), max(singles))


def interval(
    items: Sequence[_Item], statistic: Callable[[Sequence[_Item]], float], seed: int = 0
) -> tuple[float, float]:
    """95 % bootstrap interval: percentiles over seeded resamples of ``items``, which are independent."""
    rng = random.Random(seed)
    resampled = sorted(statistic(rng.choices(items, k=len(items))) for _ in range(_RESAMPLES))
    cut = int(_RESAMPLES * 0.025)
    return resampled[cut], resampled[-cut - 1]


def hit_shares(records: Sequence[RequestRecord]) -> tuple[Share, Share, Share]:
    """Hits among the rounds that could hit, by how the round before ended: after a rejection, after full
    acceptance, after a round without a proposal. The first round of a request has none before it."""
    hits, events = Counter[int](), Counter[int]()
    for record in records:
        for before, after in zip(record.rounds, record.rounds[1:], strict=False):
            if after.cause != Cause.HIT and after.cause not in _MISSES:
                continue
            kind = 2 if before.drafted == 0 else 0 if before.accepted < before.drafted else 1
            events[kind] += 1
            hits[kind] += after.cause == Cause.HIT
    after_rejection, after_full, after_none = (Share(hits[kind], events[kind]) for kind in range(3))
    return after_rejection, after_full, after_none


def all_shares(shares: Sequence[Share]) -> Share:
    """Sum of several shares."""
    return Share(sum(s.hits for s in shares), sum(s.events for s in shares))


def one_token_steps(records: Sequence[RequestRecord]) -> tuple[float | None, float | None]:
    """Median seconds of a one-token target step (plain decoding) and of a one-node draft step (sequential)."""
    target = [s for r in records if r.mode == "plain" for w, s in r.target_steps if w == 1]
    draft = [s for r in records if r.mode == "sequential" for w, s in r.draft_steps if w == 1]
    return (median(target) if target else None), (median(draft) if draft else None)


def mean_context(records: Sequence[RequestRecord]) -> float:
    """KV positions of a session in the middle of its decoding, mean over all."""
    lengths = [r.prompt_tokens + r.num_tokens / 2 for r in records]
    return sum(lengths) / len(lengths) if lengths else 0.0
