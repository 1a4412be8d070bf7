"""What a report says about runs of ``paceline bench local``: one function per section, pure but for the plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline_bench import baselines, plots
from paceline_bench.documents import LocalRun, Run, ServeRun
from paceline_bench.latency import METRICS, latencies
from paceline_bench.local import devices
from paceline_bench.machine import floor_s
from paceline_bench.page import Section
from paceline_bench.plots import Point
from paceline_bench.records import Ratio, RequestRecord, Share, Summary, best_of, summarise
from paceline_bench.report import mean_context, milliseconds

_TIMELINE_ROUNDS = 8
"""So many are shown, from the third on."""
_ENVIRONMENT = (
    "cpu", "cpu_flags", "cores", "memory_bytes", "system", "python", "torch", "transformers", "ray", "grpcio", "numpy",
    "threads_per_engine", "commit", "load_average", "taken", "command",
)  # fmt: skip


def all_sections(runs: Sequence[Run]) -> list[Section]:
    """Those that the runs have something for."""
    from paceline_bench.serve_sections import serve_sections

    local = [run for run in runs if isinstance(run, LocalRun)]
    loads = [run for run in local if not run.grouped]
    makers = (throughput, against_transformers, latency, acceptance, per_device, floors, timeline)
    found: list[Section | None] = [machine(runs), *(maker(loads) for maker in makers if loads)]
    found.append(task_groups([run for run in local if run.grouped]))
    found += serve_sections([run for run in runs if isinstance(run, ServeRun)])
    return [section for section in found if section is not None]


def machine(runs: Sequence[Run]) -> Section:
    """Where the figures are from."""
    rows = [("", *(_name(run) for run in runs))]
    for key in _ENVIRONMENT:
        values = [_text(run.data["environment"].get(key)) for run in runs]
        if any(values):
            rows.append((key.replace("_", " "), *values))
    rows.append(("dtype", *(str(run.data["settings"].get("dtype", "-")) for run in runs)))
    for role in ("target", "draft"):
        rows.append((role, *(str((run.data["models"].get(role) or {}).get("text", "-")) for run in runs)))
    same = [(row[0], row[1]) for row in rows[1:] if len(set(row[1:])) == 1]
    different = [row for row in rows if len(set(row[1:])) > 1]
    if len(runs) > 1 and different:
        said = [("", "all runs"), *same]
        width = len(runs) + 1
        return Section(
            "Machine and models", "What differs between the runs comes last, with a column each.",
            [(*row, *[""] * (width - 2)) for row in said] + [*different],
        )  # fmt: skip
    return Section("Machine and models", "", [("", "all runs" if len(runs) > 1 else _name(runs[0])), *same])


def throughput(runs: Sequence[LocalRun]) -> Section:
    """Tokens per second by concurrency."""
    panels: dict[str, dict[str, list[Point]]] = {}
    rows: list[Sequence[str]] = [
        ("run", "T", "at once", "method", "tokens/s", "95 %", "x plain", "95 %", "e2e tokens/s", "tok/step", "same")
    ]
    for run, temperature, summaries in _cells(runs):
        for s in summaries:
            same = "-" if s.identical is None else f"{s.identical.hits}/{s.identical.events}"
            value, spread = _ratio(s.ratio)
            rows.append(
                (
                    run.label, f"{temperature:g}", str(run.sessions), s.method, f"{s.decode_tokens_per_s:.1f}",
                    _interval(s.decode_interval), value, spread, f"{s.end_to_end_tokens_per_s:.1f}",
                    f"{s.tokens_per_step:.2f}", same,
                )
            )  # fmt: skip
        panel = panels.setdefault(f"{run.label}, temperature {temperature:g}", {})
        for s in _best(summaries):
            point = Point(run.sessions, s.decode_tokens_per_s, *s.decode_interval)
            panel.setdefault(_series(s), []).append(point)
    text = (
        "Decode tokens over decode seconds of all requests. Intervals: 95 % bootstrap over units (the requests that "
        "ran at once), for x plain in pairs. The plot has each mode at its best K; the table has all.\n"
        "same: requests whose tokens are those of plain decoding, where that is claimed."
    )
    return Section("Tokens per second by concurrency", text, rows, plots.lines(panels, "requests at once", "tokens/s"))


def against_transformers(runs: Sequence[LocalRun]) -> Section | None:
    """Plain decoding over the best of transformers' modes."""
    rows: list[Sequence[str]] = [
        ("run", "T", "at once", "best of transformers", "tokens/s", "plain", "ratio", "end to end", "ratio")
    ]
    for run, temperature, summaries in _cells(runs):
        theirs = [s for s in summaries if s.mode in baselines.MODES]
        plain = best_of(summaries, "plain", temperature)
        if theirs and plain is not None:
            best = max(theirs, key=lambda s: s.decode_tokens_per_s)
            best_e2e = max(s.end_to_end_tokens_per_s for s in theirs)
            rows.append(
                (
                    run.label, f"{temperature:g}", str(run.sessions), best.method, f"{best.decode_tokens_per_s:.1f}",
                    f"{plain.decode_tokens_per_s:.1f}", f"{plain.decode_tokens_per_s / best.decode_tokens_per_s:.2f}",
                    f"{best_e2e:.1f}", f"{plain.end_to_end_tokens_per_s / best_e2e:.2f}",
                )
            )  # fmt: skip
    text = "plain on the same core over the fastest of transformers' modes that ran, by decode tokens/s and end to end."
    return Section("Against the best of transformers' modes", text, rows) if len(rows) > 1 else None


def latency(runs: Sequence[LocalRun]) -> Section:
    """Percentiles of everything that a client sees."""
    rows: list[Sequence[str]] = [
        ("run", "T", "at once", "method", *(f"{name.upper()} p50/p90/p95/p99" for name in METRICS))
    ]
    drawn: list[tuple[str, dict[str, dict[str, float | None]]]] = []
    for run, temperature, summaries in _cells(runs):
        shown = {s.method for s in _best(summaries)}
        for s in summaries:
            found = latencies(_of(run, s))
            place = (run.label, f"{temperature:g}", str(run.sessions), s.method)
            rows.append((*place, *(milliseconds(found[name]) for name in METRICS)))
            if s.method in shown and temperature == min(s.temperature for s in run.summaries):
                values = {name: {str(p): v for p, v in found[name].items()} for name in METRICS}
                drawn.append((f"{run.label}, {run.sessions} at once: {s.method}", values))
    text = (
        "Milliseconds. TTFT: to the first tokens. E2EL: to the last. TPOT: per request, (E2EL - TTFT) / (tokens - 1). "
        "gap: between two chunks. ITL: per token, the gap for a chunk's first token and 0 for those that come with it; "
        "speculation emits bursts, so its median goes to 0 and its 99 % to the time of a round.\n"
        "The plot has the lowest temperature and each mode at its best K."
    )
    return Section("Latency percentiles", text, rows, plots.percentiles(drawn, METRICS))


def acceptance(runs: Sequence[LocalRun]) -> Section | None:
    """Acceptance length and hit rate by temperature."""
    rows: list[Sequence[str]] = [
        (
            "run", "at once", "method", "T", "acceptance length", "accepted", "hit rate", "after rejection",
            "after full acceptance", "after no proposal", "rounds by cause",
        )
    ]  # fmt: skip
    panels: dict[str, dict[str, list[Point]]] = {}
    for run, temperature, summaries in _cells(runs):
        for s in summaries:
            if s.acceptance is None:
                continue
            shares = (s.after_rejection, s.after_full_acceptance, s.after_no_proposal)
            every = Share(sum(x.hits for x in shares), sum(x.events for x in shares))
            causes = " ".join(f"{cause}:{count}" for cause, count in sorted(s.causes.items()))
            rows.append(
                (
                    run.label, str(run.sessions), s.method, f"{temperature:g}", f"{s.tokens_per_step:.2f}",
                    f"{s.acceptance:.3f}", _share(every), *map(_share, shares), causes,
                )
            )  # fmt: skip
            if run.sessions == min(r.sessions for r in runs if r.label == run.label):
                name = f"{run.label}: {s.method}"
                points = panels.setdefault("acceptance length (next token included)", {}).setdefault(name, [])
                points.append(Point(temperature, s.tokens_per_step, s.tokens_per_step, s.tokens_per_step))
                if every.rate is not None:
                    points = panels.setdefault("hit rate", {}).setdefault(name, [])
                    points.append(Point(temperature, every.rate, every.rate, every.rate))
    if len(rows) == 1:
        return None
    text = (
        "Acceptance length: decode tokens per target step, the next token included; miss rounds and rounds without a "
        "proposal count. accepted: accepted draft tokens over proposed ones, without next tokens; it falls as K grows. "
        "Hit: when a step ended, the tree already held a continuation of its outcome."
    )
    return Section("Acceptance and hit rate by temperature", text, rows, plots.lines(panels, "temperature", ""))


def per_device(runs: Sequence[LocalRun]) -> Section:
    """Throughput per device beside the speed of a request."""
    rows: list[Sequence[str]] = [
        ("run", "T", "at once", "method", "devices", "tokens/s per device", "a request's tokens/s", "tokens/s in all")
    ]
    points: list[tuple[str, str, float, float]] = []
    for run, temperature, summaries in _cells(runs):
        for s in _best(summaries):
            count = devices(s.mode)
            each = s.decode_tokens_per_s / count
            rows.append(
                (
                    run.label, f"{temperature:g}", str(run.sessions), s.method, str(count), f"{each:.1f}",
                    f"{s.stream_tokens_per_s:.1f}", f"{s.decode_tokens_per_s:.1f}",
                )
            )  # fmt: skip
            if run.label == runs[0].label and temperature == min(x.temperature for x in run.summaries):
                points.append((_series(s), str(run.sessions), s.stream_tokens_per_s, each))
    text = (
        "A device is a core that a method is given, whether it keeps it busy or not: two for a target with its draft, "
        "and for two replicas, which at one request leave one idle. Each mode at its best K. The plot has the first "
        "run's lowest temperature; numbers at the points: requests at once."
    )
    drawn = plots.scatter(points, "a request's tokens/s", "tokens/s per device")
    return Section("Per-device throughput and per-request speed", text, rows, drawn)


def floors(runs: Sequence[LocalRun]) -> Section | None:
    """Steps against what the memory's bandwidth allows."""
    rows: list[Sequence[str]] = [
        ("run", "at once", "engine", "weights MB", "KV MB", "read GB/s", "floor ms", "step ms", "of the floor's rate")
    ]
    for run in runs:
        floor = run.data.get("floor") or {}
        plain = [r for r in run.records if r.mode == "plain"]
        sequential = [r for r in run.records if r.mode == "sequential"]
        for role, records, steps in (("target", plain, "target_steps"), ("draft", sequential, "draft_steps")):
            width = run.sessions
            found = sorted(s for r in records for w, s in getattr(r, steps) if w == width)
            tokens = width * mean_context(records)
            least_s = floor_s(floor, role, tokens)
            if found and least_s is not None:
                step_s = found[len(found) // 2]
                kv = (floor[role]["kv_bytes_per_token"] or 0) * tokens
                rows.append(
                    (
                        run.label, str(width), role, f"{floor[role]['weight_bytes'] / 1e6:.1f}", f"{kv / 1e6:.1f}",
                        f"{floor['read_bytes_per_s'] / 1e9:.1f}", f"{least_s * 1e3:.2f}", f"{step_s * 1e3:.2f}",
                        f"{least_s / step_s:.0%}",
                    )
                )  # fmt: skip
    text = (
        "Floor: bytes of weights and KV that a step reads over the bandwidth of one core that reads 1 GiB, measured "
        "in the same run. Steps: medians of plain decoding's with one token per request, and of the draft's tree steps "
        "of as many nodes in lock step. A draft that stays in the cache is faster than the memory's floor."
    )
    return Section("Steps against the memory's floor", text, rows) if len(rows) > 1 else None


def task_groups(runs: Sequence[LocalRun]) -> Section | None:
    """Each group of prompts on its own."""
    rows: list[Sequence[str]] = [
        ("run", "T", "at once", "group", "requests", "method", "tokens/s", "x plain", "95 %", "tok/step", "accepted")
    ]
    for run in runs:
        for group in dict.fromkeys(r.category for r in run.records):
            records = [r for r in run.records if r.category == group]
            for s in summarise(records):
                value, spread = _ratio(s.ratio)
                rows.append(
                    (
                        run.label, f"{s.temperature:g}", str(run.sessions), group or "-", str(s.requests), s.method,
                        f"{s.decode_tokens_per_s:.1f}", value, spread, f"{s.tokens_per_step:.2f}",
                        "-" if s.acceptance is None else f"{s.acceptance:.3f}",
                    )
                )  # fmt: skip
    text = "Held-out text by what comes next, or the categories of the prompts' file; every group on its own."
    return Section("Task groups", text, rows) if len(rows) > 1 else None


def timeline(runs: Sequence[LocalRun]) -> Section | None:
    """Steps of both engines while one request is decoded."""
    run = next((run for run in runs if run.data.get("timelines")), None)
    if run is None:
        return None
    listed: Sequence[dict[str, Any]] = run.data["timelines"]
    shown = [t for t in listed if t["temperature"] == listed[0]["temperature"]]
    names = {s.method for s in _best([s for s in run.summaries if s.temperature == shown[0]["temperature"]])}
    rows: list[Sequence[str]] = [("method", "rounds", "target busy", "draft busy", "of the draft's time overlapped")]
    drawn: dict[str, tuple[plots.Steps, plots.Steps, Sequence[float]]] = {}
    for t in (t for t in shown if t["method"] in names):
        arrivals = [r["at_s"] for r in t["rounds"]]
        begin, end = arrivals[0], arrivals[-1]
        target, draft = ([s for s in t[role] if s[0] >= begin and s[0] + s[1] <= end] for role in ("target", "draft"))
        busy = [sum(s for _, s, _ in steps) for steps in (target, draft)]
        share = f"{overlap_s(target, draft) / busy[1]:.0%}" if busy[1] else "-"
        decode_s = max(end - begin, 1e-9)
        rows.append((t["method"], str(len(arrivals)), f"{busy[0] / decode_s:.0%}", f"{busy[1] / decode_s:.0%}", share))
        first = arrivals[min(2, len(arrivals) - 1)]
        late_target, late_draft = ([(at - first, s, w) for at, s, w in t[role]] for role in ("target", "draft"))
        drawn[t["method"]] = (late_target, late_draft, [at - first for at in arrivals])
    end = max(a[min(2 + _TIMELINE_ROUNDS, len(a) - 1)] for *_, a in drawn.values())
    text = (
        f"The request {shown[0]['prompt']} at temperature {shown[0]['temperature']:g}, alone, once by each method: "
        f"steps as the engines recorded them by one clock, from its third round on for {end * 1e3:.0f} ms. overlapped: "
        "the part of the draft's tree steps during which the target worked too, over the whole decoding."
    )
    return Section("One request in time", text, rows, plots.timelines(drawn, 0.0, end))


def overlap_s(target: Iterable[Sequence[float]], draft: Iterable[Sequence[float]]) -> float:
    """Seconds in which a step (start, seconds, ...) of both is in progress; those of one engine do not overlap."""
    total = 0.0
    for d_at, d_s, *_ in draft:
        for t_at, t_s, *_ in target:
            total += max(0.0, min(d_at + d_s, t_at + t_s) - max(d_at, t_at))
    return total


def _cells(runs: Sequence[LocalRun]) -> Iterator[tuple[LocalRun, float, list[Summary]]]:
    """Every run at every temperature, by label, temperature and sessions."""
    found = []
    for number, run in enumerate(runs):
        for temperature in dict.fromkeys(s.temperature for s in run.summaries):
            found.append((run.label, temperature, run.sessions, number))
    first = {run.label: i for i, run in reversed(list(enumerate(runs)))}
    for _, temperature, _, number in sorted(found, key=lambda f: (first[f[0]], *f[1:])):
        yield runs[number], temperature, [s for s in runs[number].summaries if s.temperature == temperature]


def _best(summaries: Sequence[Summary]) -> list[Summary]:
    """Each mode at its fastest K, in their order."""
    modes = dict.fromkeys(s.mode for s in summaries)
    return [max((s for s in summaries if s.mode == mode), key=lambda s: s.decode_tokens_per_s) for mode in modes]


def _series(s: Summary) -> str:
    return s.method.partition(" K=")[0]


def _of(run: LocalRun, s: Summary) -> list[RequestRecord]:
    return [r for r in run.records if r.method == s.method and r.temperature == s.temperature]


def _name(run: Run) -> str:
    return f"{run.label}, {run.sessions} at once" if isinstance(run, LocalRun) else run.label


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _ratio(value: Ratio | None) -> tuple[str, str]:
    return ("-", "-") if value is None else (f"{value.value:.2f}", _interval((value.low, value.high), 2))


def _interval(ends: tuple[float, float], digits: int = 1) -> str:
    return f"{ends[0]:.{digits}f}-{ends[1]:.{digits}f}"


def _share(share: Share) -> str:
    return "-" if share.rate is None else f"{share.rate:.3f} of {share.events}"
