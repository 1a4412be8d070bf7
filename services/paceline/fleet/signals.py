"""Signals for the sizes of pools, from the reports of all processes.

Shares, rates and percentiles cover the last ``window_s``. They come from reported totals, so a lost or late report only
lengthens the time that the next one covers. Times are of arrival here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.metrics import catalogue
from paceline.types import Cause

if TYPE_CHECKING:
    from paceline.fleet.report import Report
    from paceline.metrics.declaration import Metric

LATE_S, GONE_S = 3.5, 10.0
"""Seconds without a report after which a process that reports once a second counts as late, and as gone."""

_FADE_S = 60.0
_ANSWERED = (Cause.HIT, Cause.TOKEN, Cause.K, Cause.LATE)
"""Causes of rounds whose session has a draft, and an outcome before."""
_QUANTILE = 0.9
_LEAST_ROUNDS, _LEAST_FIRST_TOKENS = 20, 3
"""Fewer than these in a window are too few for a share or a percentile."""


@dataclass(frozen=True, slots=True)
class Times:
    """Inputs of the model of time; units as in ``plan/ratio.py``."""

    target_step_s: float
    target_row_s: float
    draft_step_s: float
    draft_row_s: float
    acceptance: float
    sessions_per_target: float
    link_s: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """The service at one moment."""

    routers: int
    sessions: int
    """Sessions of all routers, including the ones that wait for a target."""
    queued: int
    opened: float
    """Requests per second that left the queue for a target."""
    refused: float
    """Requests per second that found the queue full, less expected returns: each counts once."""
    cpu: float
    """CPU use of all routers, in cores."""
    speculating: int
    """Running sessions whose requests allow a draft."""
    drafting: int
    """Speculating sessions that have a draft, or whose target requests one for them."""
    targets: int
    """Targets that take sessions now."""
    kv: float
    """KV pages in use, summed over the targets as a share of each one's pages."""
    ttft_s: float | None
    """90th percentile of the time to the first token. None: there were too few first tokens."""
    itl_s: float | None
    """90th percentile of the time between two rounds of a session. None: there were too few rounds."""
    drafts: int
    busy: float
    """Shares of their time that drafts spent inside tree steps, summed."""
    late: float | None
    """Share of rounds with a draft whose continuation came too late. None: there were too few."""
    times: Times | None
    """None: not all of it has been measured."""
    unheard: Mapping[str, int]
    """Number of processes, by kind, that exist but lack two fresh reports."""


@dataclass(slots=True)
class _Source:
    """One incarnation of one process."""

    report: Report
    seen_s: float
    history: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    def grown(self) -> tuple[float, dict[str, float]] | None:
        """Returns the seconds of the window and the growth of each total in them; None before the second report."""
        if len(self.history) < 2:
            return None
        (first_s, first), (last_s, last) = self.history[0], self.history[-1]
        grown = {name: max(0.0, value - first.get(name, 0.0)) for name, value in last.items()}
        return max(last_s - first_s, 1e-3), grown


@dataclass(slots=True)
class Line:
    """Least-squares line through exponentially fading points: seconds of a step by its rows."""

    weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, steps: float, rows: float, seconds: float) -> None:
        """Adds one second's steps: their number, and their rows and seconds together."""
        keep, x, y = 0.5 ** (1.0 / _FADE_S), rows / steps, seconds / steps
        self.weight = keep * self.weight + steps
        self._x, self._y = keep * self._x + steps * x, keep * self._y + steps * y
        self._xx, self._xy = keep * self._xx + steps * x * x, keep * self._xy + steps * x * y

    def first_and_further(self) -> tuple[float, float] | None:
        """Returns the seconds of a step of one row, and of each further row; None without a step.

        If all steps had about the same number of rows, all of their time is attributed to the step.
        """
        if self.weight <= 0 or self._y <= 0:
            return None
        x, y = self._x / self.weight, self._y / self.weight  # means: rows and seconds of a step
        spread = self._xx / self.weight - x * x  # variance of the rows
        slope = (self._xy / self.weight - x * y) / spread if spread > 0.01 * x * x else 0.0
        slope = min(max(slope, 0.0), 0.9 * y / max(x - 1.0, 1.0))  # at least a tenth of the time is the step's own
        return y - slope * (x - 1.0), slope


class Signals:
    """Keeps the latest reports and derives signals from them. Not thread-safe."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._sources: dict[str, _Source] = {}
        self._swept_s = -math.inf
        self._target_steps, self._draft_steps = Line(), Line()

    def observe(self, report: Report, now: float) -> None:
        """Records a report. Ignores one that is older than the newest of its process."""
        self._sweep(now)
        source = self._sources.get(report.source_id)
        if source is not None:
            known, status = source.report, report.status
            if (status.incarnation, report.sequence) <= (known.status.incarnation, known.sequence):
                return
            if status.incarnation != known.status.incarnation:
                source = None
        if source is None:
            source = self._sources[report.source_id] = _Source(report, now)
        totals = _totals(report)
        if source.history:
            self._fit(report.kind, source.history[-1][1], totals)
        source.report, source.seen_s = report, now
        source.history.append((now, totals))
        while len(source.history) > 2 and source.history[1][0] <= now - self.window_s:
            source.history.popleft()

    def busy_shares(self) -> dict[str, float]:
        """Returns the share of its time that each replica spends inside steps."""
        shares = {}
        for source_id, source in self._sources.items():
            if (found := source.grown()) is not None and "step_s" in found[1]:
                shares[source_id] = min(1.0, found[1]["step_s"] / found[0])
        return shares

    def members(self, kind: str) -> set[str] | None:
        """Returns the replicas that take sessions, as the routers see them; None without a router's view."""
        views = [s.report.view for s in self._of("router") if s.report.view is not None]
        return {rid for view in views for rid in view.members.get(kind, ())} if views else None

    def fleet(self, now: float) -> Fleet | None:
        """Returns the state of the service now; None while no router reports."""
        self._sweep(now)
        routers = list(self._of("router"))
        views = [s.report.view for s in routers if s.report.view is not None]
        if not views:
            return None
        targets, drafts = self.members("target") or set(), self.members("draft") or set()
        up = {
            kind: [s for s in self._of(kind) if s.report.source_id in ids]
            for kind, ids in (("target", targets), ("draft", drafts))
        }
        ours = _sum(routers)
        rounds = sum(ours.get(cause.value, 0.0) for cause in _ANSWERED)
        statuses = [s.report.status for s in routers]
        sessions, queued = sum(s.num_sessions for s in statuses), sum(s.num_waiting for s in statuses)
        rates = [{name: value / seconds for name, value in grown.items()} for seconds, grown in _grown(routers)]
        return Fleet(
            routers=len(routers),
            sessions=sessions,
            queued=queued,
            opened=sum(rate.get("opened", 0.0) for rate in rates),
            refused=sum(rate.get("refused", 0.0) - rate.get("returned", 0.0) for rate in rates),
            cpu=sum(rate.get("cpu_s", 0.0) for rate in rates),
            speculating=sum(view.speculating for view in views),
            drafting=sum(view.drafting for view in views),
            targets=len(targets),
            kv=sum(s.kv_pages_used / s.kv_pages for s in (t.report.status for t in up["target"]) if s.kv_pages),
            ttft_s=_percentile_s(ours, catalogue.TTFT, _LEAST_FIRST_TOKENS),
            itl_s=_percentile_s(ours, catalogue.INTER_TOKEN, _LEAST_ROUNDS),
            drafts=len(drafts),
            busy=sum(min(1.0, g.get("step_s", 0.0) / seconds) for seconds, g in _grown(up["draft"])),
            late=ours.get(Cause.LATE.value, 0.0) / rounds if rounds >= _LEAST_ROUNDS else None,
            times=self._times(ours, (sessions - queued) / max(1, len(targets))),
            unheard={
                "router": sum(not _heard(s, now) for s in routers),
                "target": len(targets) - sum(_heard(s, now) for s in up["target"]),
                "draft": len(drafts) - sum(_heard(s, now) for s in up["draft"]),
            },
        )

    def _sweep(self, now: float) -> None:
        """Forgets processes that are gone, once a second."""
        if now - self._swept_s >= 1.0:
            self._swept_s = now
            self._sources = {sid: s for sid, s in self._sources.items() if now - s.seen_s <= GONE_S}

    def _of(self, kind: str) -> Iterator[_Source]:
        return (source for source in self._sources.values() if source.report.kind == kind)

    def _fit(self, kind: str, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        steps, rows, seconds = (now.get(n, 0.0) - before.get(n, 0.0) for n in ("steps", "rows", "step_s"))
        if steps > 0 and rows > 0 and seconds > 0:
            line = {"target": self._target_steps, "draft": self._draft_steps}.get(kind)
            if line is not None:
                line.add(steps, rows, seconds)

    def _times(self, ours: Mapping[str, float], sessions_per_target: float) -> Times | None:
        target, draft = self._target_steps.first_and_further(), self._draft_steps.first_and_further()
        names = ("proposals", "drafted", "accepted")
        acceptance = conditional_acceptance(*(ours.get(name, 0.0) for name in names))
        if target is None or draft is None or acceptance is None:
            return None
        link_s = ours["link_s"] / ours["links"] if ours.get("links") else 0.0
        return Times(*target, *draft, acceptance, sessions_per_target, link_s)


def conditional_acceptance(proposals: float, drafted: float, accepted: float) -> float | None:
    """Solves a + a^2 + ... + a^k = mean accepted tokens of a proposal for a; k is the mean length of a proposal.

    Returns None without a proposal.
    """
    if proposals <= 0 or drafted <= 0:
        return None
    k, wanted = drafted / proposals, accepted / proposals
    low, high = 0.0, 1.0
    for _ in range(30):
        a = (low + high) / 2
        low, high = (a, high) if a * (1 - a**k) / (1 - a) < wanted else (low, a)
    return (low + high) / 2


def quantile(bounds: tuple[float, ...], counts: tuple[float, ...], share: float) -> float:
    """Returns the value below which ``share`` of the observations are, linear within a bucket.

    ``counts``: observations up to each bound, then all. A quantile beyond the last bound is that bound.
    """
    rank = share * counts[-1]
    bucket = bisect_left(counts, rank)
    if bucket >= len(bounds):
        return bounds[-1]
    below, low = (counts[bucket - 1], bounds[bucket - 1]) if bucket else (0.0, 0.0)
    return low + (bounds[bucket] - low) * (rank - below) / max(counts[bucket] - below, 1e-12)


def _heard(source: _Source, now: float) -> bool:
    return now - source.seen_s <= LATE_S and len(source.history) >= 2


def _grown(sources: Iterable[_Source]) -> Iterator[tuple[float, dict[str, float]]]:
    return (grown for source in sources if (grown := source.grown()) is not None)


def _sum(sources: Iterable[_Source]) -> dict[str, float]:
    summed: dict[str, float] = {}
    for _, grown in _grown(sources):
        for name, value in grown.items():
            summed[name] = summed.get(name, 0.0) + value
    return summed


def _percentile_s(ours: Mapping[str, float], metric: Metric, least: int) -> float | None:
    """Returns the 90th percentile of a histogram's growth; None: it grew by fewer than ``least`` observations."""
    counts = tuple(ours.get(f"{metric.name} {i}", 0.0) for i in range(len(metric.bounds) + 1))
    if counts[-1] < least or math.isnan(counts[-1]):
        return None
    return quantile(metric.bounds, counts, _QUANTILE)


_ENGINE_TOTALS = {
    "target": {"steps": "steps", "rows": "tokens_computed", "step_s": "step_s"},
    "draft": {"steps": "tree_steps", "rows": "leaves", "step_s": "step_s"},
    "router": {"cpu_s": "cpu_s", "returned": "returned"},
}
_ROUTER_TOTALS = (
    ("proposals", catalogue.DRAFTS),
    ("drafted", catalogue.DRAFT_TOKENS),
    ("accepted", catalogue.ACCEPTED_TOKENS),
)


def _totals(report: Report) -> dict[str, float]:
    """Returns the totals of a process that the signals need, each under a name of its own."""
    counters, samples = report.status.counters, report.samples
    totals = {
        ours: counters[theirs] for ours, theirs in _ENGINE_TOTALS.get(report.kind, {}).items() if theirs in counters
    }
    if report.kind != "router":
        return totals
    for name, metric in _ROUTER_TOTALS:
        totals[name] = sum(value for value in samples.get(metric.name, {}).values() if isinstance(value, float))
    refused = samples.get(catalogue.REJECTED.name, {}).get(("queue_full",))
    totals["refused"] = refused if isinstance(refused, float) else 0.0
    totals["opened"] = sum(v[-1] for v in samples.get(catalogue.QUEUE.name, {}).values() if isinstance(v, tuple))
    for labels, value in samples.get(catalogue.ROUNDS.name, {}).items():
        if len(labels) == 1 and isinstance(value, float):
            totals[labels[0]] = value
    for metric in (catalogue.TTFT, catalogue.INTER_TOKEN):
        for value in samples.get(metric.name, {}).values():
            if isinstance(value, tuple) and len(value) == len(metric.bounds) + 2:
                for i, count in enumerate(value[1:]):
                    totals[f"{metric.name} {i}"] = totals.get(f"{metric.name} {i}", 0.0) + count
    for value in samples.get(catalogue.DRAFT_LINK.name, {}).values():
        if isinstance(value, tuple):
            totals["link_s"], totals["links"] = value[0], value[-1]
    return totals
