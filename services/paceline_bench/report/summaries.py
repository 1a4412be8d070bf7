"""Summaries of records: one per method of ``paceline bench local``, one cell per load of ``paceline bench serve``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.types import Mode
from paceline_bench.arithmetic import (
    Amount,
    Ratio,
    RoundTotals,
    Share,
    all_shares,
    by_producer,
    decode_amount,
    end_to_end_amount,
    hit_shares,
    interval,
    rate,
    ratio,
    stream_rate,
)
from paceline_bench.latency import Percentiles, latencies, meets
from paceline_bench.processes import ROLES
from paceline_bench.records import (
    ENDPOINT,
    LOCAL,
    SERVICE,
    TRANSFORMERS,
    Configuration,
    RequestRecord,
    UnitRecord,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """One method at one temperature."""

    method: str
    mode: str
    cores: int
    """Number of cores of the method; 0 where that is not recorded."""
    temperature: float
    requests: int
    decode_tokens_per_s: float
    decode_interval: tuple[float, float]
    """95 % bootstrap interval over units."""
    stream_tokens_per_s: float
    """Speed of single requests: decode tokens over decode seconds, summed over requests."""
    end_to_end_tokens_per_s: float
    ratio: Ratio | None
    """Speed-up over plain decoding."""
    end_to_end_ratio: Ratio | None
    tokens_per_step: float
    """Acceptance length: decode tokens per target step, next token included."""
    acceptance: float | None
    """Accepted draft tokens over proposed ones, next tokens excluded."""
    after_rejection: Share
    after_full_acceptance: Share
    after_no_proposal: Share
    causes: dict[str, int]
    producers: dict[str, tuple[int, Share]]
    """Producer (``RoundRecord.producer``) -> (its rounds, share of its proposed tokens that were accepted)."""
    target_step_s: float | None
    """Median."""
    draft_step_s: float | None
    """Median."""
    draft_step_nodes: float | None
    """Mean nodes of a draft tree step."""
    identical: Share | None
    """Requests whose tokens are plain decoding's; None where that is not claimed."""
    engine: str = ""
    """The engine, if it is not ours."""

    def rate(self, *, end_to_end: bool) -> float:
        """Tokens per second, of decoding or with prefill."""
        return self.end_to_end_tokens_per_s if end_to_end else self.decode_tokens_per_s


def summarize(records: Sequence[RequestRecord]) -> list[Summary]:
    """One summary per method and temperature, in the order of their first record."""
    groups: dict[tuple[float, str], list[RequestRecord]] = {}
    for record in records:
        groups.setdefault((record.temperature, record.method), []).append(record)
    return [_summary(group, groups.get((temperature, "plain"), ())) for (temperature, _), group in groups.items()]


def _summary(records: Sequence[RequestRecord], plain: Sequence[RequestRecord]) -> Summary:
    units, theirs = _units(records), _units(plain)

    def against_plain(amount: Callable[[Sequence[RequestRecord]], Amount]) -> Ratio | None:
        keys = [key for key in units if key in theirs]
        return ratio([amount(units[key]) for key in keys], [amount(theirs[key]) for key in keys])

    amounts = [decode_amount(unit) for unit in units.values()]
    totals = RoundTotals.of(records)
    identical = Share.of_claims(records)
    after_rejection, after_full, after_none = hit_shares(records)
    # The requests of one unit ran concurrently and saw the same steps: count the first one's.
    target_steps = [step for unit in units.values() for step in unit[0].target_steps]
    draft_steps = [step for unit in units.values() for step in unit[0].draft_steps]
    return Summary(
        method=records[0].method,
        mode=records[0].mode,
        cores=records[0].cores,
        temperature=records[0].temperature,
        requests=len(records),
        decode_tokens_per_s=rate(amounts),
        decode_interval=interval(amounts, rate),
        stream_tokens_per_s=stream_rate(records),
        end_to_end_tokens_per_s=rate([end_to_end_amount(unit) for unit in units.values()]),
        ratio=against_plain(decode_amount),
        end_to_end_ratio=against_plain(end_to_end_amount),
        tokens_per_step=totals.tokens_per_round or 0.0,
        acceptance=totals.acceptance,
        after_rejection=after_rejection,
        after_full_acceptance=after_full,
        after_no_proposal=after_none,
        causes=totals.causes,
        producers=by_producer(records),
        target_step_s=median(s for _, s in target_steps) if target_steps else None,
        draft_step_s=median(s for _, s in draft_steps) if draft_steps else None,
        draft_step_nodes=sum(w for w, _ in draft_steps) / len(draft_steps) if draft_steps else None,
        identical=identical if identical.events else None,
        engine=records[0].engine,
    )


def _units(records: Sequence[RequestRecord]) -> dict[tuple[int, int], list[RequestRecord]]:
    units: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in records:
        units.setdefault((record.unit, record.repeat), []).append(record)
    return units


def best_of(summaries: Sequence[Summary], mode: str, temperature: float) -> Summary | None:
    """The fastest method of a mode at a temperature, by decode tokens/s; None if it was not measured."""
    of_mode = [s for s in summaries if s.mode == mode and s.temperature == temperature]
    return max(of_mode, key=lambda s: s.decode_tokens_per_s, default=None)


@dataclass(frozen=True, slots=True)
class Against:
    """Our fastest method against another engine's fastest on the same number of cores, by one measure."""

    cores: int
    ours: Summary
    theirs: Summary
    end_to_end: bool
    """Prefill is in the measure, which is tokens per second."""

    @property
    def rates(self) -> tuple[float, float]:
        """Ours and theirs, in tokens/s."""
        return self.ours.rate(end_to_end=self.end_to_end), self.theirs.rate(end_to_end=self.end_to_end)


def against_engines(summaries: Sequence[Summary]) -> Iterator[Against]:
    """Comparisons at one temperature with engines that decode on one core and on several: with each of them, on each
    number of cores. Methods of ours may use fewer."""
    theirs = [s for s in summaries if s.engine and s.engine != TRANSFORMERS]
    for engine, cores in dict.fromkeys((s.engine, s.cores) for s in theirs):
        ours = [s for s in summaries if not s.engine and 0 < s.cores <= cores]
        others = [s for s in theirs if (s.engine, s.cores) == (engine, cores)]
        for end_to_end in (False, True) if ours else ():
            best, other = (max(of, key=lambda s: s.rate(end_to_end=end_to_end)) for of in (ours, others))
            yield Against(cores, best, other, end_to_end)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration at one load and temperature, over all of its repeats."""

    configuration: str
    place: str
    mode: str
    sessions: int
    rate: float
    burstiness: float
    temperature: float
    requests: int
    """Answered requests."""
    failed: int
    reasons: Mapping[str, int]
    """Failures by their reason."""
    requests_per_s: float
    goodput_per_s: float | None
    """Requests per second that keep all limits; None without limits."""
    tokens_per_s: float
    """All tokens over the wall clock, prefill included."""
    tokens_per_s_range: tuple[float, float]
    """Least and most of single repeats."""
    stream_tokens_per_s: float
    over_local: Ratio | None
    """Speed-up over the same mode in one process; None for that itself, and where it was not measured."""
    over_plain: Ratio | None
    """Speed-up over plain decoding at the same place."""
    latency_s: Mapping[str, Percentiles]
    """Latency at the client, by ``latency.METRICS``."""
    groups: Mapping[str, Mapping[str, float | None]]
    """Requests, tokens per second of a stream, tokens per round and acceptance, by task group."""
    tokens_per_round: float
    acceptance: float | None
    hits: Share
    causes: Mapping[str, int]
    cached: float
    """Share of the prompts' tokens that the prefix cache held."""
    step_s: float | None
    """Mean seconds of a target step."""
    gap_per_step_s: float | None
    """Mean seconds between two steps although a session could step."""
    hit_gap_per_step_s: float | None
    """Mean gap before steps that only verify proposals that were already there."""
    waited: float | None
    """Share of the target's time in which every session waited for its draft."""
    cpu_s_per_token: Mapping[str, float]
    """CPU seconds per emitted token, by role."""
    identical: Share

    @property
    def apart(self) -> bool:
        """True for open loads and endpoints, which documents keep separate from our own closed loads."""
        return bool(self.rate) or self.place == ENDPOINT


def cells_of(units: Sequence[UnitRecord], goodput: Mapping[str, float] | None = None) -> list[Cell]:
    """One cell per temperature, load and configuration; closed loads first. ``goodput``: limits in
    milliseconds."""
    loads: dict[tuple[float, float, int], dict[Configuration, list[UnitRecord]]] = {}
    for unit in units:
        load = loads.setdefault((unit.temperature, unit.rate, unit.sessions), {})
        load.setdefault(unit.configuration, []).append(unit)
    order = {place: i for i, place in enumerate((LOCAL, SERVICE, ENDPOINT))}
    return [
        _cell(configuration, load, goodput or {})
        for _, load in sorted(loads.items(), key=lambda item: item[0])
        for configuration in sorted(load, key=lambda c: (order[c.place], c.mode is not Mode.PLAIN))
    ]


def _cell(
    configuration: Configuration,
    load: Mapping[Configuration, Sequence[UnitRecord]],
    goodput: Mapping[str, float],
) -> Cell:
    units = load[configuration]
    first, endpoint = units[0], configuration.place == ENDPOINT
    requests = [request for unit in units for request in unit.requests]
    totals = RoundTotals.of(requests)
    tokens_per_round, acceptance = totals.tokens_per_round or 0.0, totals.acceptance
    if endpoint:
        tokens_per_round, acceptance = _spec_decode(units)
    amounts = [_wall_amount(unit) for unit in units]
    rates = [rate([amount]) for amount in amounts]
    num_tokens, wall_s = sum(a.tokens for a in amounts), sum(a.seconds for a in amounts)
    failures = [failure for unit in units for failure in unit.failed]
    roles = [role for role in ("client", *ROLES) if any(role in unit.cpu_s for unit in units)]
    counted = [] if endpoint else [unit.target for unit in units if unit.target]

    def against(other: Configuration) -> Ratio | None:
        theirs = {unit.repeat: unit for unit in load.get(other, ())}
        pairs = [(unit, theirs[unit.repeat]) for unit in units if unit.repeat in theirs]
        if other == configuration:
            return None
        return ratio([_wall_amount(a) for a, _ in pairs], [_wall_amount(b) for _, b in pairs])

    def total(name: str) -> float:
        return sum(counters[name] for counters in counted)

    def per(name: str, count: str) -> float | None:
        return total(name) / total(count) if total(count) else None

    busy_s = total("step_s") + total("bubble_s") + total("wait_s")
    return Cell(
        configuration=configuration.name,
        place=configuration.place,
        mode="" if configuration.mode is None else configuration.mode.value,
        sessions=first.sessions,
        rate=first.rate,
        burstiness=first.burstiness,
        temperature=first.temperature,
        requests=len(requests),
        failed=len(failures),
        reasons=dict(Counter(failure.reason for failure in failures)),
        requests_per_s=len(requests) / wall_s,
        goodput_per_s=sum(meets(r, goodput) for r in requests) / wall_s if goodput else None,
        tokens_per_s=rate(amounts),
        tokens_per_s_range=(min(rates), max(rates)),
        stream_tokens_per_s=stream_rate(requests),
        over_local=against(Configuration(LOCAL, configuration.mode or Mode.PLAIN)),
        over_plain=against(Configuration(configuration.place, Mode.PLAIN)),
        latency_s=latencies(requests),
        groups=_groups(requests),
        tokens_per_round=tokens_per_round,
        acceptance=acceptance,
        hits=all_shares(hit_shares(requests)),
        causes=totals.causes,
        cached=sum(u.cached_tokens for u in units) / max(sum(r.prompt_tokens for r in requests), 1),
        step_s=per("step_s", "steps"),
        gap_per_step_s=per("bubble_s", "bubble_steps"),
        hit_gap_per_step_s=per("hit_bubble_s", "hit_bubble_steps"),
        waited=total("wait_s") / busy_s if busy_s else None,
        cpu_s_per_token={role: sum(u.cpu_s.get(role, 0.0) for u in units) / max(num_tokens, 1) for role in roles},
        identical=Share.of_claims(requests),
    )


def _wall_amount(unit: UnitRecord) -> Amount:
    """All tokens over the wall clock, prefill included."""
    return Amount(unit.num_tokens, unit.wall_s)


def _spec_decode(units: Sequence[UnitRecord]) -> tuple[float, float | None]:
    """Tokens per round and acceptance by the server's own counters; (0.0, None) where it has none."""
    totals = Counter[str]()
    for unit in units:
        totals.update(unit.target)
    drafts, drafted, accepted = (totals[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return 1 + accepted / drafts if drafts else 0.0, accepted / drafted if drafted else None


def _groups(requests: Sequence[RequestRecord]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for group in dict.fromkeys(r.category for r in requests if r.category):
        own = [r for r in requests if r.category == group]
        totals = RoundTotals.of(own)
        found[group] = {
            "requests": len(own),
            "stream_tokens_per_s": stream_rate(own) or None,
            "tokens_per_round": totals.tokens_per_round,
            "acceptance": totals.acceptance,
        }
    return found
