"""Sections of a report, one function each, pure but for the plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline_bench import baselines
from paceline_bench.arithmetic import Ratio, all_shares, mean_context
from paceline_bench.latency import METRICS, latencies
from paceline_bench.local import devices
from paceline_bench.machine import CLIENT, floor_s
from paceline_bench.report import forms, headline, plots
from paceline_bench.report.documents import LocalRun, Run, ServeRun
from paceline_bench.report.forms import Row, hits_of, number, percentiles, rows_of, share
from paceline_bench.report.page import Section
from paceline_bench.report.plots import Point
from paceline_bench.report.service import service_sections
from paceline_bench.report.summaries import Summary, against_engines, best_of, summarize

_TIMELINE_ROUNDS = 8
"""Number of rounds that a timeline shows, from the third on."""
_ENVIRONMENT = (
    *("cpu", "cpu_flags", "cores", "memory_bytes", "system", "python", "torch", "transformers", "ray", "grpcio"),
    *("numpy", "threads_per_engine", "commit", "load_average", "taken", "command"),
)


def all_sections(runs: Sequence[Run]) -> list[Section]:
    """All sections that the runs have something for."""
    local = [run for run in runs if isinstance(run, LocalRun)]
    loads = [run for run in local if not run.grouped]
    makers = (timeline, throughput, against_transformers, against_others, latency, acceptance, per_device, floors)
    found: list[Section | None] = [headline.in_short(runs), *(maker(loads) for maker in makers if loads)]
    found.append(task_groups([run for run in local if run.grouped]))
    found += service_sections([run for run in runs if isinstance(run, ServeRun)])
    found.append(machine(runs))
    return [section for section in found if section is not None]


def machine(runs: Sequence[Run]) -> Section:
    """Machine, versions and models of each run; of an endpoint nothing but the client's machine is known."""
    rows = [("", *(_name(run) for run in runs))]
    ours = [not isinstance(run, ServeRun) or not run.foreign for run in runs]
    for key in _ENVIRONMENT:
        known = [own or key in CLIENT for own in ours]
        values = [_text(run.data["environment"].get(key)) if k else "" for run, k in zip(runs, known, strict=True)]
        if any(values):
            rows.append((key.replace("_", " "), *values))
    if not any(ours):
        title = "The machine of the client"
        return Section(title, "", [("", _name(runs[0])), *rows[1:]] if len(runs) == 1 else rows)
    dtypes = [str(run.data["settings"].get("dtype", "-")) for run in runs]
    rows.append(("dtype", *(dtype if own else "-" for own, dtype in zip(ours, dtypes, strict=True))))
    for role in ("target", "draft"):
        rows.append((role, *(str((run.data["models"].get(role) or {}).get("text", "-")) for run in runs)))
    same = [(row[0], row[1]) for row in rows[1:] if len(set(row[1:])) == 1]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if len(runs) > 1 and different:
        padded = [(*row, *[""] * (len(runs) - 1)) for row in [("", "all runs"), *same]]
        text = "What differs between the runs comes last, with a column each."
        return Section("Machine and models", text, [*padded, *different])
    return Section("Machine and models", "", [("", "all runs" if len(runs) > 1 else _name(runs[0])), *same])


def throughput(runs: Sequence[LocalRun]) -> Section:
    """Tokens per second by concurrency."""
    panels: dict[str, dict[str, list[Point]]] = {}
    rows: list[Row] = []
    for run, temperature, summaries in _cells(runs):
        for s in summaries:
            rows.append(
                (
                    *_place(run, s),
                    ("tokens/s", f"{s.decode_tokens_per_s:.1f}"),
                    ("95 %", forms.ends(s.decode_interval)),
                    *_over_plain(s.ratio),
                    ("e2e tokens/s", f"{s.end_to_end_tokens_per_s:.1f}"),
                    ("tok/step", f"{s.tokens_per_step:.2f}"),
                    ("same", hits_of(s.identical)),
                )
            )
        panel = panels.setdefault(f"{run.label}, temperature {temperature:g}", {})
        for s in _best(summaries):
            point = Point(run.sessions, s.decode_tokens_per_s, *s.decode_interval)
            panel.setdefault(_series(s), []).append(point)
    text = (
        "Decode tokens over decode seconds of all requests. Intervals: 95 % bootstrap over units (the requests that "
        "ran at once), for x plain in pairs. A report plots each mode at its best K.\n"
        "same: requests with the tokens of plain decoding, where that is claimed."
    )
    drawn = plots.later(plots.lines, panels, "requests at once", "tokens/s")
    return Section("Tokens per second by concurrency", text, rows_of(rows), drawn, group=3, best="tokens/s")


def against_transformers(runs: Sequence[LocalRun]) -> Section | None:
    """Plain decoding over the best of transformers' modes."""
    rows: list[Row] = []
    for run, temperature, summaries in _cells(runs):
        theirs = [s for s in summaries if s.mode in baselines.MODES]
        plain = best_of(summaries, "plain", temperature)
        if theirs and plain is not None:
            best = max(theirs, key=lambda s: s.decode_tokens_per_s)
            best_e2e = max(s.end_to_end_tokens_per_s for s in theirs)
            rows.append(
                (
                    *_place(run, best)[:3],
                    ("best of transformers", best.method),
                    ("tokens/s", f"{best.decode_tokens_per_s:.1f}"),
                    ("plain", f"{plain.decode_tokens_per_s:.1f}"),
                    ("ratio", f"{plain.decode_tokens_per_s / best.decode_tokens_per_s:.2f}"),
                    ("end to end", f"{best_e2e:.1f}"),
                    ("ratio", f"{plain.end_to_end_tokens_per_s / best_e2e:.2f}"),
                )
            )
    text = "plain on the same core over the fastest of transformers' modes that ran, by decode tokens/s and end to end."
    return Section("Against the best of transformers' modes", text, rows_of(rows)) if rows else None


def against_others(runs: Sequence[LocalRun]) -> Section | None:
    """The fastest of ours over other engines on the same number of cores."""
    rows: list[Row] = []
    for run, temperature, summaries in _cells(runs):
        for found in against_engines(summaries):
            ours, theirs = found.rates
            rows.append(
                (
                    ("run", run.label),
                    ("at once", str(run.sessions)),
                    ("T", f"{temperature:g}"),
                    ("cores", str(found.cores)),
                    ("measure", "end to end" if found.end_to_end else "decoding"),
                    ("ours", found.ours.method),
                    ("tokens/s", f"{ours:.1f}"),
                    ("theirs", found.theirs.method),
                    ("tokens/s", f"{theirs:.1f}"),
                    ("ratio", f"{ours / theirs:.2f}"),
                )
            )
    text = "Our fastest method that uses no more cores over the fastest of each other engine of the same run."
    return Section("Against other engines on the same cores", text, rows_of(rows)) if rows else None


def latency(runs: Sequence[LocalRun]) -> Section:
    """Percentiles of all latencies that a client sees."""
    rows: list[Row] = []
    drawn: list[tuple[str, dict[str, dict[str, float | None]]]] = []
    for run, temperature, summaries in _cells(runs):
        shown = {s.method for s in _best(summaries)}
        for s in summaries:
            found = latencies(r for r in run.records if (r.method, r.temperature) == (s.method, s.temperature))
            rows.append((*_place(run, s), *percentiles(found)))
            if s.method in shown and temperature == min(s.temperature for s in run.summaries):
                values = {name: {str(p): v for p, v in found[name].items()} for name in METRICS}
                drawn.append((f"{run.label}, {run.sessions} at once: {s.method}", values))
    text = (
        "Milliseconds. TTFT: to the first tokens. E2EL: to the last. TPOT: per request, (E2EL - TTFT) / (tokens - 1). "
        "gap: between two chunks. ITL: per token, the gap for a chunk's first token and 0 for the others in it; "
        "speculation emits bursts, so its median goes to 0 and its 99 % to the time of a round.\n"
        "A report plots the lowest temperature and each mode at its best K."
    )
    return Section("Latency percentiles", text, rows_of(rows), plots.later(plots.percentiles, drawn, METRICS), group=3)


def acceptance(runs: Sequence[LocalRun]) -> Section | None:
    """Acceptance length and hit rate by temperature."""
    rows: list[Row] = []
    panels: dict[str, dict[str, list[Point]]] = {}
    for run, temperature, summaries in _cells(runs):
        for s in summaries:
            if s.acceptance is None:
                continue
            every = all_shares((s.after_rejection, s.after_full_acceptance, s.after_no_proposal))
            rows.append(
                (
                    ("run", run.label),
                    ("at once", str(run.sessions)),
                    ("method", s.method),
                    ("T", f"{temperature:g}"),
                    ("acceptance length", f"{s.tokens_per_step:.2f}"),
                    ("accepted", f"{s.acceptance:.3f}"),
                    ("hit rate", share(every)),
                    ("after rejection", share(s.after_rejection)),
                    ("after full acceptance", share(s.after_full_acceptance)),
                    ("after no proposal", share(s.after_no_proposal)),
                    ("target step ms", forms.milliseconds(s.target_step_s)),
                    ("draft step ms", forms.milliseconds(s.draft_step_s)),
                    ("its nodes", number(s.draft_step_nodes, 1)),
                    ("rounds by cause", forms.counts(s.causes)),
                    ("rounds by producer (accepted)", _producers(s)),
                )
            )
            if run.sessions == min(r.sessions for r in runs if r.label == run.label):
                lines = {"acceptance length (next token included)": s.tokens_per_step, "hit rate": every.rate}
                for title, value in lines.items():
                    if value is not None:
                        points = panels.setdefault(title, {}).setdefault(f"{run.label}: {s.method}", [])
                        points.append(Point(temperature, value, value, value))
    if not rows:
        return None
    text = (
        "Acceptance length: decode tokens per target step, the next token included; miss rounds and rounds without a "
        "proposal count. accepted: accepted draft tokens over proposed ones, without next tokens; it falls as K grows. "
        "Hit: when a step ended, the tree already held a continuation of its outcome."
    )
    drawn = plots.later(plots.lines, panels, "temperature", "")
    return Section("Acceptance and hit rate by temperature", text, rows_of(rows), drawn, group=2)


def per_device(runs: Sequence[LocalRun]) -> Section:
    """Throughput per device and the speed of a request."""
    rows: list[Row] = []
    points: list[tuple[str, str, float, float]] = []
    for run, temperature, summaries in _cells(runs):
        for s in _best(summaries):
            count = s.cores or devices(s.mode)
            each = s.decode_tokens_per_s / count
            rows.append(
                (
                    *_place(run, s),
                    ("devices", str(count)),
                    ("tokens/s per device", f"{each:.1f}"),
                    ("a request's tokens/s", f"{s.stream_tokens_per_s:.1f}"),
                    ("tokens/s in all", f"{s.decode_tokens_per_s:.1f}"),
                )
            )
            if run.label == runs[0].label and temperature == min(x.temperature for x in run.summaries):
                points.append((_series(s), str(run.sessions), s.stream_tokens_per_s, each))
    text = (
        "A device is a core that a method is given, whether it keeps it busy or not: two for a target with its draft, "
        "and for two replicas, which at one request leave one idle. Each mode at its best K. A report plots the "
        "first run's lowest temperature; numbers at the points: requests at once."
    )
    drawn = plots.later(plots.scatter, points, "a request's tokens/s", "tokens/s per device")
    title, best = "Per-device throughput and per-request speed", "tokens/s per device"
    return Section(title, text, rows_of(rows), drawn, group=3, best=best)


def floors(runs: Sequence[LocalRun]) -> Section | None:
    """Steps against the floor that the memory's bandwidth sets."""
    rows: list[Row] = []
    for run in runs:
        floor = run.data.get("floor") or {}
        for role, mode in (("target", "plain"), ("draft", "sequential")):
            records = [r for r in run.records if r.mode == mode]
            found = sorted(s for r in records for w, s in getattr(r, f"{role}_steps") if w == run.sessions)
            tokens = run.sessions * mean_context(records)
            least_s = floor_s(floor, role, tokens)
            if found and least_s is not None:
                step_s = found[len(found) // 2]
                kv_bytes = (floor[role]["kv_bytes_per_token"] or 0) * tokens
                rows.append(
                    (
                        ("run", run.label),
                        ("at once", str(run.sessions)),
                        ("engine", role),
                        ("weights MB", f"{floor[role]['weight_bytes'] / 1e6:.1f}"),
                        ("KV MB", f"{kv_bytes / 1e6:.1f}"),
                        ("read GB/s", f"{floor['read_bytes_per_s'] / 1e9:.1f}"),
                        ("floor ms", f"{least_s * 1e3:.2f}"),
                        ("step ms", f"{step_s * 1e3:.2f}"),
                        ("of the floor's rate", f"{least_s / step_s:.0%}"),
                    )
                )
    text = (
        "Floor: bytes of weights and KV that a step reads over the bandwidth of one core that reads 1 GiB, measured "
        "in the same run. Steps: medians of plain decoding's with one token per request, and of the draft's tree steps "
        "of the same number of nodes in lock step. A draft that stays in the cache is faster than the memory's floor."
    )
    return Section("Steps against the memory's floor", text, rows_of(rows), group=2) if rows else None


def task_groups(runs: Sequence[LocalRun]) -> Section | None:
    """Each group of prompts on its own."""
    rows: list[Row] = []
    for run in runs:
        for group in dict.fromkeys(r.category for r in run.records):
            for s in summarize([r for r in run.records if r.category == group]):
                rows.append(
                    (
                        *_place(run, s)[:3],
                        ("group", group or "-"),
                        ("requests", str(s.requests)),
                        ("method", s.method),
                        ("tokens/s", f"{s.decode_tokens_per_s:.1f}"),
                        *_over_plain(s.ratio),
                        ("tok/step", f"{s.tokens_per_step:.2f}"),
                        ("accepted", number(s.acceptance, 3)),
                    )
                )
    text = "Held-out text by what comes next, or the categories of the prompts' file; every group on its own."
    return Section("Task groups", text, rows_of(rows), group=4, best="tokens/s") if rows else None


def timeline(runs: Sequence[LocalRun]) -> Section | None:
    """Steps of both engines while one request is decoded."""
    run = next((run for run in runs if run.data.get("timelines")), None)
    if run is None:
        return None
    listed: Sequence[dict[str, Any]] = run.data["timelines"]
    shown = [t for t in listed if t["temperature"] == listed[0]["temperature"]]
    names = {s.method for s in _best([s for s in run.summaries if s.temperature == shown[0]["temperature"]])}
    rows: list[Row] = []
    drawn: dict[str, tuple[plots.Steps, plots.Steps, Sequence[float]]] = {}
    for t in (t for t in shown if t["method"] in names):
        arrivals = [r["at_s"] for r in t["rounds"]]
        begin, end = arrivals[0], arrivals[-1]
        target, draft = ([s for s in t[role] if s[0] >= begin and s[0] + s[1] <= end] for role in ("target", "draft"))
        busy = [sum(s for _, s, _ in steps) for steps in (target, draft)]
        decode_s = max(end - begin, 1e-9)
        rows.append(
            (
                ("method", t["method"]),
                ("rounds", str(len(arrivals))),
                ("target busy", f"{busy[0] / decode_s:.0%}"),
                ("draft busy", f"{busy[1] / decode_s:.0%}"),
                ("of the draft's time overlapped", f"{overlap_s(target, draft) / busy[1]:.0%}" if busy[1] else "-"),
            )
        )
        first = arrivals[min(2, len(arrivals) - 1)]
        late_target, late_draft = ([(at - first, s, w) for at, s, w in t[role]] for role in ("target", "draft"))
        drawn[t["method"]] = (late_target, late_draft, [at - first for at in arrivals])
    end = max(a[min(2 + _TIMELINE_ROUNDS, len(a) - 1)] for *_, a in drawn.values())
    text = (
        f"The request {shown[0]['prompt']} at temperature {shown[0]['temperature']:g}, alone, once by each method: "
        f"steps as the engines recorded them by one clock, from its third round on for {end * 1e3:.0f} ms. overlapped: "
        "the part of the draft's tree steps during which the target worked too, over the whole decoding."
    )
    return Section("One request in time", text, rows_of(rows), plots.later(plots.timelines, drawn, 0.0, end))


def overlap_s(target: Iterable[Sequence[float]], draft: Iterable[Sequence[float]]) -> float:
    """Seconds in which both engines run a step (start, seconds, ...); steps of one engine do not overlap."""
    total = 0.0
    for d_at, d_s, *_ in draft:
        for t_at, t_s, *_ in target:
            total += max(0.0, min(d_at + d_s, t_at + t_s) - max(d_at, t_at))
    return total


def _cells(runs: Sequence[LocalRun]) -> Iterator[tuple[LocalRun, float, list[Summary]]]:
    """Every run at every temperature with its summaries, by label, temperature and sessions."""
    found = []
    for i, run in enumerate(runs):
        for temperature in dict.fromkeys(s.temperature for s in run.summaries):
            found.append((run.label, temperature, run.sessions, i))
    first = {run.label: i for i, run in reversed(list(enumerate(runs)))}
    for _, temperature, _, i in sorted(found, key=lambda f: (first[f[0]], *f[1:])):
        yield runs[i], temperature, [s for s in runs[i].summaries if s.temperature == temperature]


def _best(summaries: Sequence[Summary]) -> list[Summary]:
    """Each mode at its fastest K, in their order."""
    modes = dict.fromkeys(s.mode for s in summaries)
    return [max((s for s in summaries if s.mode == mode), key=lambda s: s.decode_tokens_per_s) for mode in modes]


def _producers(s: Summary) -> str:
    """``draft 40 (71 %), head 12 (35 %)``."""
    return ", ".join(f"{name} {rounds} ({forms.percent(of.rate)})" for name, (rounds, of) in s.producers.items()) or "-"


def _series(s: Summary) -> str:
    return s.method.partition(" K=")[0]


def _name(run: Run) -> str:
    return f"{run.label}, {run.sessions} at once" if isinstance(run, LocalRun) else run.label


def _place(run: LocalRun, s: Summary) -> Row:
    return ("run", run.label), ("T", f"{s.temperature:g}"), ("at once", str(run.sessions)), ("method", s.method)


def _over_plain(ratio: Ratio | None) -> Row:
    value, spread = ("-", "-") if ratio is None else (f"{ratio.value:.2f}", forms.spread_of(ratio))
    return ("x plain", value), ("95 %", spread)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
