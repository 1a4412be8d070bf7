"""The report of ``paceline bench serve``: the arithmetic on its units, and the tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.cli.table import table
from paceline.types import Mode
from paceline_bench.latency import METRICS, Percentiles, latencies, meets
from paceline_bench.load import Load
from paceline_bench.machine import environment
from paceline_bench.processes import ROLES
from paceline_bench.records import Amount, Ratio, RequestRecord, Share, hit_shares, rate, ratio
from paceline_bench.report import ModelFacts, describe_machine, milliseconds
from paceline_bench.serve import Settings
from paceline_bench.sides import ServiceFacts
from paceline_bench.units import ENDPOINT, LOCAL, SERVICE, Configuration, Outcome, UnitRecord, differing


def all_amount(unit: UnitRecord) -> Amount:
    """All tokens over the wall clock, prefill included."""
    return Amount(unit.num_tokens, unit.wall_s)


def stream_amount(unit: UnitRecord) -> Amount:
    """What single clients see: tokens after the first round over the time from the first round to the last."""
    tokens = sum(r.num_tokens - r.rounds[0].tokens for r in unit.requests if r.rounds)
    return Amount(tokens, sum(r.decode_s for r in unit.requests))


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration at one load, temperature and delay: all of its repeats."""

    configuration: str
    place: str
    mode: str
    sessions: int
    rate: float
    burstiness: float
    temperature: float
    delay_ms: float
    requests: int
    """Those that were answered."""
    failed: int
    reasons: Mapping[str, int]
    """Of the failures."""
    requests_per_s: float
    goodput_per_s: float | None
    """Requests per second that keep all limits; None without limits."""
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    """Least and most of single repeats."""
    stream_tokens_per_s: float
    over_local: Ratio | None
    """Against the same mode in one process; None for that itself, and where it was not measured."""
    over_plain: Ratio | None
    """Against plain decoding at the same place."""
    latency_s: Mapping[str, Percentiles]
    """At the client, by ``latency.METRICS``."""
    groups: Mapping[str, Mapping[str, float | None]]
    """By task group: requests, tokens per second of a stream, tokens per round, acceptance."""
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
    """The same before steps that did nothing but verify what was there."""
    waited: float | None
    """Share of the target's time in which every session waited for its draft."""
    cpu_s_per_token: Mapping[str, float]
    """By what a process does."""
    identical: Share

    @property
    def gap_share(self) -> float | None:
        """Of a hit's gap in step and gap together."""
        if self.step_s is None or self.hit_gap_per_step_s is None:
            return None
        return self.hit_gap_per_step_s / (self.step_s + self.hit_gap_per_step_s)


_Key = tuple[float, float, float, int]


def summarise(units: Sequence[UnitRecord], goodput: Mapping[str, float] | None = None) -> list[Cell]:
    """One cell per delay, temperature, load and configuration; closed loads first. ``goodput``: limits in
    milliseconds."""
    loads: dict[_Key, dict[Configuration, list[UnitRecord]]] = {}
    for unit in units:
        load = loads.setdefault((unit.delay_ms, unit.temperature, unit.rate, unit.sessions), {})
        load.setdefault(unit.configuration, []).append(unit)
    order = {place: i for i, place in enumerate((LOCAL, SERVICE, ENDPOINT))}
    return [
        _cell(load[configuration], load, goodput or {})
        for _, load in sorted(loads.items(), key=lambda item: item[0])
        for configuration in sorted(load, key=lambda c: (order[c.place], c.mode is not Mode.PLAIN))
    ]


def _cell(
    units: Sequence[UnitRecord], load: Mapping[Configuration, Sequence[UnitRecord]], goodput: Mapping[str, float]
) -> Cell:
    first = units[0]
    configuration = first.configuration

    def against(other: Configuration) -> Ratio | None:
        theirs = {unit.repeat: unit for unit in load.get(other, ())}
        pairs = [(unit, theirs[unit.repeat]) for unit in units if unit.repeat in theirs]
        if other == configuration or not pairs:
            return None
        return ratio([all_amount(a) for a, _ in pairs], [all_amount(b) for _, b in pairs])

    requests = [request for unit in units for request in unit.requests]
    later = [r for request in requests for r in request.rounds[1:]]
    drafted = sum(r.drafted for r in later)
    rates = [rate([all_amount(unit)]) for unit in units]
    shares = hit_shares(requests)
    num_tokens = sum(unit.num_tokens for unit in units)
    roles = [role for role in ("client", *ROLES) if any(role in unit.cpu_s for unit in units)]
    counted = [unit for unit in units if unit.target and configuration.place != ENDPOINT]

    def counters(name: str) -> float:
        return sum(unit.target[name] for unit in counted)

    def per(total: str, count: str) -> float | None:
        return counters(total) / counters(count) if counted and counters(count) else None

    busy_s = sum(counters(name) for name in ("step_s", "bubble_s", "wait_s")) if counted else 0.0
    wall_s = sum(unit.wall_s for unit in units)
    failures = [failure for unit in units for failure in unit.failed]
    tokens_per_round = sum(r.tokens for r in later) / len(later) if later else 0.0
    accepted = sum(r.accepted for r in later) / drafted if drafted else None
    if configuration.place == ENDPOINT:
        tokens_per_round, accepted = _spec_decode(units)
    claims = [r.identical for r in requests if r.identical is not None]
    return Cell(
        configuration=configuration.name,
        place=configuration.place,
        mode="" if configuration.mode is None else configuration.mode.value,
        sessions=first.sessions,
        rate=first.rate,
        burstiness=first.burstiness,
        temperature=first.temperature,
        delay_ms=first.delay_ms,
        requests=len(requests),
        failed=len(failures),
        reasons=dict(Counter(failure.reason for failure in failures)),
        requests_per_s=len(requests) / wall_s,
        goodput_per_s=sum(meets(r, goodput) for r in requests) / wall_s if goodput else None,
        tokens_per_s=rate([all_amount(unit) for unit in units]),
        tokens_per_s_range=(min(rates), max(rates)),
        stream_tokens_per_s=rate([stream_amount(unit) for unit in units]),
        over_local=against(Configuration(LOCAL, configuration.mode or Mode.PLAIN)),
        over_plain=against(Configuration(configuration.place, Mode.PLAIN)),
        latency_s=latencies(requests),
        groups=_groups(requests),
        tokens_per_round=tokens_per_round,
        acceptance=accepted,
        hits=Share(sum(s.hits for s in shares), sum(s.events for s in shares)),
        causes=dict(Counter(r.cause for r in later)),
        cached=sum(u.cached_tokens for u in units) / max(sum(r.prompt_tokens for r in requests), 1),
        step_s=per("step_s", "steps"),
        gap_per_step_s=per("bubble_s", "bubble_steps"),
        hit_gap_per_step_s=per("hit_bubble_s", "hit_bubble_steps"),
        waited=counters("wait_s") / busy_s if busy_s else None,
        cpu_s_per_token={role: sum(u.cpu_s.get(role, 0.0) for u in units) / max(num_tokens, 1) for role in roles},
        identical=Share(sum(claims), len(claims)),
    )


def _spec_decode(units: Sequence[UnitRecord]) -> tuple[float, float | None]:
    """Tokens per round and acceptance by the server's own counters; (0.0, None) where it has none."""
    totals = Counter[str]()
    for unit in units:
        totals.update(unit.target)
    drafts, drafted, accepted = (totals[f"num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return 1 + accepted / drafts if drafts else 0.0, accepted / drafted if drafted else None


def _other(cell: Cell) -> bool:
    return bool(cell.rate) or cell.place == ENDPOINT


def _groups(requests: Sequence[RequestRecord]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for group in dict.fromkeys(r.category for r in requests if r.category):
        own = [r for r in requests if r.category == group]
        later = [round_ for r in own for round_ in r.rounds[1:]]
        drafted, decode_s = sum(r.drafted for r in later), sum(r.decode_s for r in own)
        tokens = sum(r.num_tokens - r.rounds[0].tokens for r in own if r.rounds)
        found[group] = {
            "requests": len(own),
            "stream_tokens_per_s": tokens / decode_s if decode_s else None,
            "tokens_per_round": sum(r.tokens for r in later) / len(later) if later else None,
            "acceptance": sum(r.accepted for r in later) / drafted if drafted else None,
        }
    return found


def as_json(
    settings: Mapping[str, Any], facts: Mapping[str, ModelFacts], outcome: Outcome, label: str = ""
) -> dict[str, Any]:
    """What ``--json`` writes: settings, environment, models, services, every request, and cells: ours in closed loads,
    and those of open loads and endpoints apart."""
    cells = summarise(outcome.units, settings.get("goodput"))
    return {
        "label": label,
        "environment": environment(),
        "settings": dict(settings),
        "models": {role: asdict(fact) | {"text": fact.describe()} for role, fact in facts.items()},
        "services": [asdict(facts) for facts in outcome.services],
        "cells": [asdict(cell) for cell in cells if not _other(cell)],
        "other_cells": [asdict(cell) for cell in cells if _other(cell)],
        "units": [unit.to_json() for unit in outcome.units],
    }


def render(facts: Mapping[str, ModelFacts], settings: Settings, outcome: Outcome) -> str:
    """The tables."""
    lines = [
        (
            f"{settings.max_tokens} tokens per request, K={settings.draft_tokens}, coupled acceptance; "
            f"repeats {settings.repeats}; loads: {'; '.join(load.name for load in settings.loads)}"
        ),
        f"{describe_machine(environment(), settings.dtype)}; clients on the same cores",
        *(f"{role}: {fact.describe()}" for role, fact in facts.items()),
        *(_service_line(service) for service in outcome.services),
    ]
    cells = summarise(outcome.units, settings.goodput)
    for delay_ms, temperature in dict.fromkeys((c.delay_ms, c.temperature) for c in cells):
        of_it = [c for c in cells if (c.delay_ms, c.temperature) == (delay_ms, temperature)]
        title = f"temperature {temperature:g}"
        if len(settings.delays_ms) > 1 or delay_ms:
            title += f", draft link delayed by {delay_ms:g} ms each way"
        lines += ["", title, *_speed_table(of_it), "", *_latency_table(of_it)]
        own = [c for c in of_it if c.place != ENDPOINT]
        lines += ["", *_target_table(own), "", *_cpu_table(own)] if own else []
    return "\n".join([*lines, "", *_NOTES, *_identity(outcome.units)])


_LOAD = "load, configuration"
_NOTES = (
    "tokens/s: all tokens over the wall clock of a unit, prefill included [least..most of single repeats]; a stream:",
    "tokens after a request's first round over their time. x local: the same mode in one process; x plain: plain",
    "decoding at the same place; with the 95 % bootstrap interval over repeats. Latency at the client, in ms: TTFT to",
    "the first tokens, TPOT per request, ITL per token (0 for those that come with another), GAP between two messages,",
    "E2EL to the last. goodput: requests per second that keep every limit. tok/round: next token included. step, gap,",
    "gap on a hit: means at the target in ms; share: of gap in gap and step. waits: share of its time in which all",
    "waited for the draft. CPU in ms per emitted token; client: this process, which in local rows is also the relay.",
    "Prompts are in the prefix cache of both sides before anything is measured.",
)


def _service_line(facts: ServiceFacts) -> str:
    link = "" if facts.draft_link_s is None else f", draft link {facts.draft_link_s * 1e3:.2f} ms there and back"
    megabytes = " ".join(f"{role} {size / 2**20:.0f}" for role, size in sorted(facts.rss_bytes.items()))
    return (
        f"service with {facts.delay_ms:g} ms delay: started in {facts.start_s:.0f} s, idle it takes "
        f"{facts.idle_cpu:.2f} cores in {facts.num_processes} processes{link}; resident MiB: {megabytes}"
    )


def _speed_table(cells: Sequence[Cell]) -> list[str]:
    header = (
        _LOAD, "tokens/s", "a stream", "x local", "x plain", "requests/s", "goodput/s", "failed", "tok/round",
        "accepted", "same",
    )  # fmt: skip
    rows: list[Sequence[str]] = [header]
    for c in cells:
        least, most = c.tokens_per_s_range
        rows.append(
            (
                _name(c), f"{c.tokens_per_s:.1f} [{least:.1f}..{most:.1f}]",
                f"{c.stream_tokens_per_s:.1f}", _ratio(c.over_local), _ratio(c.over_plain), f"{c.requests_per_s:.2f}",
                _form(c.goodput_per_s, lambda v: f"{v:.2f}"), str(c.failed), f"{c.tokens_per_round:.2f}",
                "-" if c.acceptance is None else f"{c.acceptance:.3f}", f"{c.identical.hits}/{c.identical.events}",
            )
        )  # fmt: skip
    return table(rows)


def _latency_table(cells: Sequence[Cell]) -> list[str]:
    rows: list[Sequence[str]] = [(_LOAD, *(f"{name.upper()} p50/p90/p95/p99" for name in METRICS))]
    for c in cells:
        rows.append((_name(c), *(milliseconds(c.latency_s[name]) for name in METRICS)))
    return table(rows)


def _target_table(cells: Sequence[Cell]) -> list[str]:
    rows: list[Sequence[str]] = [(_LOAD, "step", "gap", "gap on a hit", "share", "waits", "hits", "rounds by cause")]
    for c in cells:
        causes = " ".join(f"{cause}:{count}" for cause, count in sorted(c.causes.items()))
        hits = "-" if c.hits.rate is None else f"{c.hits.rate:.3f}"
        rows.append(
            (
                _name(c), _ms(c.step_s), _ms(c.gap_per_step_s), _ms(c.hit_gap_per_step_s),
                _percent(c.gap_share), _percent(c.waited), hits, causes,
            )
        )  # fmt: skip
    return table(rows)


def _cpu_table(cells: Sequence[Cell]) -> list[str]:
    roles = [role for role in ("client", *ROLES) if any(role in c.cpu_s_per_token for c in cells)]
    rows: list[Sequence[str]] = [(_LOAD, *(f"cpu {role}" for role in roles), "all", "cached")]
    for c in cells:
        each = [_ms(c.cpu_s_per_token.get(role)) for role in roles]
        rows.append((_name(c), *each, _ms(sum(c.cpu_s_per_token.values())), _percent(c.cached)))
    return table(rows)


def _identity(units: Sequence[UnitRecord]) -> list[str]:
    """What the claim of identical tokens has come to."""
    failures = Counter(f"{u.configuration.name}: {f.reason}" for u in units for f in u.failed)
    failed = [f"failed {count} times: {reason}" for reason, count in failures.most_common(10)]
    wrong = differing(units)
    units = [unit for unit in units if unit.configuration.place != ENDPOINT]
    num_requests = sum(len(unit.requests) for unit in units)
    if not num_requests:
        return failed
    num_distinct = len({(unit.temperature, r.unit) for unit in units for r in unit.requests})
    lines = [
        *failed,
        (
            f"tokens equal plain decoding's in one process: {num_requests - len(wrong)} of {num_requests} requests, "
            f"{num_distinct} different ones"
        ),
    ]
    for unit, request in wrong[:10]:
        lines.append(
            f"DIFFERENT: {unit.configuration.name}, {unit.sessions} sessions, temperature {unit.temperature:g}, "
            f"delay {unit.delay_ms:g} ms, repeat {unit.repeat}, request {request.unit} ({request.prompt})"
        )
    return lines


def _name(cell: Cell) -> str:
    load = Load(cell.sessions, cell.rate, cell.burstiness)
    return f"{cell.sessions:4} {cell.configuration}" if not cell.rate else f"{load.name} {cell.configuration}"


def _ratio(value: Ratio | None) -> str:
    return "-" if value is None else f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def _form(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _ms(value: float | None) -> str:
    return _form(value, lambda v: f"{v * 1e3:.2f}")


def _percent(value: float | None) -> str:
    return _form(value, lambda v: f"{v:.1%}")
