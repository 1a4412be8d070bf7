"""The counts and times of a simulated service."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.types import Cause, Mode


@dataclass(frozen=True, slots=True)
class Result:
    """Counts and times after the warm-up; times in seconds."""

    mode: Mode
    k: int
    tokens_per_s: float
    tokens_per_round: float
    tpot_s: dict[int, float]
    """Percentiles (50, 90, 99) over sessions of a session's mean seconds per token after its first tokens."""
    mean_tpot_s: float
    """Seconds per token, over all sessions."""
    gap_s: dict[int, float]
    """Percentiles over all gaps between two messages to a client; a message has 1 to K + 1 tokens."""
    ttft_s: dict[int, float]
    """Percentiles over requests of the time from arrival to first tokens, queueing included; nan without requests.
    One that has none yet at the end counts with its time so far."""
    mean_ttft_s: float
    hit_rate: float | None
    """Hits over hits and misses. None without any."""
    causes: dict[str, int]
    """Rounds by ``types.Cause``: a hit, or the reason for a miss."""
    target_use: float
    draft_use: float
    events: int


@dataclass(slots=True)
class Counts:
    """Sums over all sessions; the arrays hold seconds."""

    tokens: int = 0
    rounds: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    gaps: array[float] = field(default_factory=lambda: array("d"))
    target_s: float = 0.0
    draft_s: float = 0.0
    tpots: array[float] = field(default_factory=lambda: array("d"))
    ttfts: array[float] = field(default_factory=lambda: array("d"))

    def result(self, mode: Mode, k: int, window_s: float, num_targets: int, num_drafts: int, num_events: int) -> Result:
        """Returns the result of a window of ``window_s`` seconds with these numbers of replicas."""
        hits, events = self.causes[Cause.HIT.value], self.causes.total()
        # The gap before a session's first counted message is not known: its tokens are left out in proportion.
        tokens_of_gaps = self.tokens * len(self.gaps) / max(self.rounds, 1)
        return Result(
            mode=mode,
            k=k if mode is not Mode.PLAIN else 0,
            tokens_per_s=self.tokens / window_s,
            tokens_per_round=self.tokens / max(self.rounds, 1),
            tpot_s=percentiles(self.tpots),
            mean_tpot_s=sum(self.gaps) / tokens_of_gaps if tokens_of_gaps else math.nan,
            gap_s=percentiles(self.gaps),
            ttft_s=percentiles(self.ttfts),
            mean_ttft_s=sum(self.ttfts) / len(self.ttfts) if self.ttfts else math.nan,
            hit_rate=hits / events if events else None,
            causes=dict(self.causes),
            target_use=self.target_s / (window_s * num_targets),
            draft_use=self.draft_s / (window_s * num_drafts) if num_drafts else 0.0,
            events=num_events,
        )


def percentiles(values: Iterable[float]) -> dict[int, float]:
    """50, 90 and 99; nan without values."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {p: ordered[min(last, math.ceil(p / 100 * len(ordered)) - 1)] if ordered else math.nan for p in (50, 90, 99)}
