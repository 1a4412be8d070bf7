"""Reports in plain text, as the kinds of runs print them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.cli.table import table
from paceline_bench.arithmetic import mean_context, one_token_steps
from paceline_bench.latency import METRICS, latencies
from paceline_bench.load import Load
from paceline_bench.machine import environment, floor_s
from paceline_bench.models import ModelLabel
from paceline_bench.processes import ROLES
from paceline_bench.records import ENDPOINT, Outcome, RequestRecord, ServiceFacts, UnitRecord, differing
from paceline_bench.report import forms
from paceline_bench.report.forms import Row, counts, hits_of, latency, milliseconds, number, percent, rows_of, share
from paceline_bench.report.summaries import (
    Against,
    Cell,
    Summary,
    against_engines,
    best_of,
    cells_of,
    summarize,
)
from paceline_bench.settings import ServeSettings

_LOCAL_NOTES = (
    "tokens/s: decode tokens over decode seconds, totals; x plain: its ratio to plain decoding with the 95 % bootstrap "
    "interval\n"
    "over prompts x repeats and [min..max] of single ones; e2e: with prefill. tok/step: decode tokens per target step, "
    "next token included.\n"
    "gap: between two chunks; ITL: per token, 0 after the first of a chunk; TPOT: per request, decode time per "
    "token.\n"
    "hit: the tree held a continuation of the outcome when the step ended. same: requests whose tokens equal plain "
    "decoding's."
)
_RATE_NOTE = """\
tokens/s: all tokens over the wall clock of a unit, prefill included [least..most of single repeats]; a stream:
tokens after a request's first round over their time"""
_LATENCY_NOTE = """\
Latency at the client, in ms: TTFT to the first tokens, TPOT per request, ITL per token (0 for tokens that come with
another), GAP between two messages, E2EL to the last."""
_GOODPUT_NOTE = "goodput: requests per second that keep every limit."
_SPECULATION_NOTE = "tok/round, next token included, and accepted: by the server's own vllm:spec_decode counters."
_SERVICE_NOTES = f"""\
{_RATE_NOTE}. x local: the same mode in one process; x plain: plain
decoding at the same place; with the 95 % bootstrap interval over repeats. {_LATENCY_NOTE}
{_GOODPUT_NOTE} tok/round: next token included. step, gap,
gap on a hit: means at the target in ms; share: of gap in gap and step. waits: share of its time in which all
waited for the draft. CPU in ms per emitted token; client: this process, which in local rows is also the relay.
Prompts are in the prefix cache of both sides before anything is measured."""


def local_text(
    labels: Mapping[str, ModelLabel],
    dtype: str,
    records: Sequence[RequestRecord],
    title: str,
    floor: Mapping[str, Any] | None = None,
) -> str:
    """Report of ``paceline bench local``."""
    lines = [title, _machine(dtype), *_models(labels), *_floor(floor or {}, records)]
    summaries = summarize(records)
    for temperature in dict.fromkeys(s.temperature for s in summaries):
        of_it = [s for s in summaries if s.temperature == temperature]
        lines += ["", f"temperature {temperature:g}", *_table(_method_speed(s) for s in of_it)]
        lines += ["", *_table(_method_draft(s) for s in of_it), *_comparison(of_it)]
        at_it = [r for r in records if r.temperature == temperature]
        lines += ["", *_table(_method_latency(s, at_it) for s in of_it)]
    return "\n".join([*lines, "", *_step_ratio(records), _LOCAL_NOTES])


def service_text(labels: Mapping[str, ModelLabel], settings: ServeSettings, outcome: Outcome) -> str:
    """Report of ``paceline bench serve`` and ``paceline bench endpoint``."""
    loads = "; ".join(load.name for load in settings.loads)
    if not settings.places:
        return _endpoint_text(settings, outcome, loads)
    run = f"{settings.max_tokens} tokens per request, K={settings.draft_tokens}, coupled acceptance"
    lines = [
        f"{run}; repeats {settings.repeats}; loads: {loads}",
        f"{_machine(settings.dtype)}; clients on the same cores",
        *_models(labels),
        *(_service(facts) for facts in outcome.services),
    ]
    cells = cells_of(outcome.units, settings.goodput)
    for temperature in dict.fromkeys(c.temperature for c in cells):
        of_it = [c for c in cells if c.temperature == temperature]
        lines += ["", f"temperature {temperature:g}"]
        lines += [*_table(map(_cell_speed, of_it)), "", *_table(map(_cell_latency, of_it))]
        own = [c for c in of_it if c.place != ENDPOINT]
        roles = [role for role in ("client", *ROLES) if any(role in c.cpu_s_per_token for c in own)]
        if own:
            lines += ["", *_table(map(_cell_target, own)), "", *_table(_cell_cpu(c, roles) for c in own)]
    return "\n".join([*lines, "", _SERVICE_NOTES, *_failures(outcome.units), *_identity(outcome.units)])


def _endpoint_text(settings: ServeSettings, outcome: Outcome, loads: str) -> str:
    """Report on an endpoint alone: what was sent and what came, and nothing that only a service of ours has."""
    assert settings.endpoint is not None, "there is something to measure"
    machine = environment()
    lines = [
        settings.endpoint.url,
        f"{settings.max_tokens} tokens per request; repeats {settings.repeats}; loads: {loads}",
        f"client on cpu {machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]}",
    ]
    cells = cells_of(outcome.units, settings.goodput)
    for temperature in dict.fromkeys(c.temperature for c in cells):
        of_it = [c for c in cells if c.temperature == temperature]
        lines += ["", f"temperature {temperature:g}", *_table(map(_cell_speed, of_it))]
        lines += ["", *_table(map(_cell_latency, of_it))]
    notes = [_RATE_NOTE + ".", _LATENCY_NOTE]
    notes += [_GOODPUT_NOTE] if settings.goodput else []
    notes += [_SPECULATION_NOTE] if any(c.tokens_per_round for c in cells) else []
    return "\n".join([*lines, "", *notes, *_failures(outcome.units)])


def _table(rows: Iterable[Row]) -> list[str]:
    return table(rows_of(list(rows)))


def _machine(dtype: str) -> str:
    machine = environment()
    flags = " ".join(machine.get("cpu_flags", ()))
    load = machine.get("load_average", ["?"])[0]
    return (
        f"cpu {machine['cpu']} ({flags}), {machine['cores']} cores, load {load}, one torch thread per engine; python "
        f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, {dtype}; commit "
        f"{machine.get('commit')}"
    )


def _models(labels: Mapping[str, ModelLabel]) -> list[str]:
    return [f"{role}: {label.describe()}" for role, label in labels.items()]


def _floor(floor: Mapping[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """One-token steps of plain decoding against the memory's bandwidth; [] where it was not measured."""
    context = mean_context(records)
    least_s, (step_s, _) = floor_s(floor, "target", context), one_token_steps(records)
    if least_s is None or step_s is None:
        return []
    megabytes, bandwidth = floor["target"]["weight_bytes"] / 1e6, floor["read_bytes_per_s"] / 1e9
    read = (
        f"{megabytes:.0f} MB of weights and the KV of {context:.0f} tokens at {bandwidth:.1f} GB/s, as one core reads"
    )
    measured = f"measured {step_s * 1e3:.2f} ms: {least_s / step_s:.0%} of the floor's rate"
    return [f"floor of a one-token target step: {least_s * 1e3:.2f} ms ({read}), {measured}"]


def _method_speed(s: Summary) -> Row:
    ratio = forms.speed_up(s.ratio)
    if s.ratio is not None and s.ratio.least != s.ratio.most:
        ratio += f" [{s.ratio.least:.2f}..{s.ratio.most:.2f}]"
    return (
        ("method", s.method),
        ("tokens/s", f"{s.decode_tokens_per_s:.1f}"),
        ("x plain", ratio),
        ("e2e tok/s", f"{s.end_to_end_tokens_per_s:.1f}"),
        ("x plain", "-" if s.end_to_end_ratio is None else f"{s.end_to_end_ratio.value:.2f}"),
        ("tok/step", f"{s.tokens_per_step:.2f}"),
        ("same", hits_of(s.identical)),
    )


def _method_draft(s: Summary) -> Row:
    draft = "-" if s.draft_step_s is None else f"{s.draft_step_s * 1e3:.2f} ms ({s.draft_step_nodes:.1f})"
    return (
        ("method", s.method),
        ("accepted", number(s.acceptance, 3)),
        ("hit after rejection", share(s.after_rejection)),
        ("hit after full acc.", share(s.after_full_acceptance)),
        ("hit after none", share(s.after_no_proposal)),
        ("target step", "-" if s.target_step_s is None else f"{s.target_step_s * 1e3:.2f} ms"),
        ("draft step (nodes)", draft),
        ("rounds by cause", counts(s.causes)),
        ("rounds by producer (accepted)", _producers(s)),
    )


def _producers(s: Summary) -> str:
    """``draft 40 (71 %), head 12 (35 %)``."""
    return ", ".join(f"{name} {rounds} ({percent(of.rate)})" for name, (rounds, of) in s.producers.items()) or "-"


def _method_latency(s: Summary, records: Sequence[RequestRecord]) -> Row:
    found = latencies(r for r in records if r.method == s.method)
    return (("p50/p90/p95/p99 in ms", s.method), *((name.upper(), latency(found[name])) for name in METRICS))


def _comparison(summaries: Sequence[Summary]) -> list[str]:
    return [*_overlap(summaries), *map(_against, against_engines(summaries))]


def _against(found: Against) -> str:
    ours, theirs = found.rates
    measure = "end to end" if found.end_to_end else "decoding"
    number = f"{found.cores} core" + "s" * (found.cores > 1)
    return f"{number}, {measure}: {found.ours.method} against {found.theirs.method}: {ours / theirs:.2f}"


def _overlap(summaries: Sequence[Summary]) -> list[str]:
    temperature = summaries[0].temperature
    overlapped = best_of(summaries, "overlapped", temperature)
    sequential = best_of(summaries, "sequential", temperature)
    if overlapped is None or sequential is None or sequential.decode_tokens_per_s == 0:
        return []
    value = overlapped.decode_tokens_per_s / sequential.decode_tokens_per_s
    return [f"{overlapped.method} against {sequential.method}, the best of its mode: {value:.2f}"]


def _step_ratio(records: Sequence[RequestRecord]) -> list[str]:
    target_s, draft_s = one_token_steps(records)
    if target_s is None or draft_s is None:
        return []
    steps = f"target {target_s * 1e3:.2f} ms, draft {draft_s * 1e3:.2f} ms"
    return [f"one-token steps, measured: {steps}, draft / target {draft_s / target_s:.3f}"]


def _service(facts: ServiceFacts) -> str:
    link = "" if facts.draft_link_s is None else f", draft link {facts.draft_link_s * 1e3:.2f} ms there and back"
    megabytes = " ".join(f"{role} {size / 2**20:.0f}" for role, size in sorted(facts.rss_bytes.items()))
    return (
        f"service: started in {facts.start_s:.0f} s, idle it takes "
        f"{facts.idle_cpu:.2f} cores in {facts.num_processes} processes{link}; resident MiB: {megabytes}"
    )


def _cell_name(c: Cell) -> tuple[str, str]:
    load = Load(c.sessions, c.rate, c.burstiness).name if c.rate else f"{c.sessions:4}"
    return "load, configuration", f"{load} {c.configuration}"


def _cell_speed(c: Cell) -> Row:
    least, most = c.tokens_per_s_range
    return (
        _cell_name(c),
        ("tokens/s", f"{c.tokens_per_s:.1f} " + ("(not repeated)" if least == most else f"[{least:.1f}..{most:.1f}]")),
        ("a stream", f"{c.stream_tokens_per_s:.1f}"),
        ("x local", forms.speed_up(c.over_local)),
        ("x plain", forms.speed_up(c.over_plain)),
        ("requests/s", f"{c.requests_per_s:.2f}"),
        ("goodput/s", number(c.goodput_per_s)),
        ("failed", str(c.failed)),
        ("tok/round", number(c.tokens_per_round or None)),
        ("accepted", number(c.acceptance, 3)),
        ("same", hits_of(c.identical)),
    )


def _cell_latency(c: Cell) -> Row:
    return (_cell_name(c), *((f"{name.upper()} p50/p90/p95/p99", latency(c.latency_s[name])) for name in METRICS))


def _cell_target(c: Cell) -> Row:
    return (
        _cell_name(c),
        ("step", milliseconds(c.step_s)),
        ("gap", milliseconds(c.gap_per_step_s)),
        ("gap on a hit", milliseconds(c.hit_gap_per_step_s)),
        ("share", percent(c.gap_share)),
        ("waits", percent(c.waited)),
        ("hits", number(c.hits.rate, 3)),
        ("rounds by cause", counts(c.causes)),
    )


def _cell_cpu(c: Cell, roles: Sequence[str]) -> Row:
    each = ((f"cpu {role}", milliseconds(c.cpu_s_per_token.get(role))) for role in roles)
    return (_cell_name(c), *each, ("all", milliseconds(sum(c.cpu_s_per_token.values()))), ("cached", percent(c.cached)))


def _failures(units: Sequence[UnitRecord]) -> list[str]:
    failures = Counter(f"{u.configuration.name}: {f.reason}" for u in units for f in u.failed)
    return [f"failed {count} times: {reason}" for reason, count in failures.most_common(10)]


def _identity(units: Sequence[UnitRecord]) -> list[str]:
    """Result of comparing every text of ours with plain decoding's; [] without any."""
    wrong = differing(units)
    ours = [(unit, request) for unit in units if unit.configuration.place != ENDPOINT for request in unit.requests]
    if not ours:
        return []
    num_distinct = len({(unit.temperature, request.unit) for unit, request in ours})
    equal = f"{len(ours) - len(wrong)} of {len(ours)} requests, {num_distinct} different ones"
    lines = [f"tokens equal plain decoding's in one process: {equal}"]
    for unit, request in wrong[:10]:
        lines.append(
            f"DIFFERENT: {unit.configuration.name}, {unit.sessions} sessions, temperature {unit.temperature:g}, "
            f"repeat {unit.repeat}, request {request.unit} ({request.prompt})"
        )
    return lines
