"""Sections on runs of ``paceline bench serve`` and ``paceline bench endpoint``, pure but for the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_bench.latency import METRICS
from paceline_bench.records import ENDPOINT
from paceline_bench.report import forms, plots
from paceline_bench.report.documents import ServeRun
from paceline_bench.report.forms import Row, number, percentiles, rows_of
from paceline_bench.report.page import Section
from paceline_bench.report.plots import Point

Cell = Mapping[str, Any]
"""A cell of a ServeRun's document."""


def service_sections(runs: Sequence[ServeRun]) -> list[Section | None]:
    """Sections on runs of ``paceline bench serve`` and ``paceline bench endpoint``."""
    cells = [(run, cell) for run in runs for cell in run.cells]
    who = "The endpoint" if all(run.foreign for run in runs) else "The service"
    closed = [(run, cell) for run, cell in cells if not cell.get("rate")]
    opened = [(run, cell) for run, cell in cells if cell.get("rate")]
    return [
        _loads(f"{who} in a closed loop", closed, "sessions", "requests at once") if closed else None,
        _loads(f"{who} in an open loop", opened, "rate", "arrivals per second") if opened else None,
        _service_latency([(run, cell) for run, cell in cells if "latency_s" in cell]),
        _targets([(run, cell) for run, cell in cells if cell.get("step_s") is not None]),
        _cpu([(run, cell) for run, cell in cells if cell.get("cpu_s_per_token") and cell.get("place") != ENDPOINT]),
        _service_groups(cells),
        _failures(cells),
        _idle(runs),
    ]


def _loads(title: str, cells: Sequence[tuple[ServeRun, Cell]], key: str, x_label: str) -> Section:
    rows: list[Row] = []
    panels: dict[str, dict[str, list[Point]]] = {}
    for run, c in cells:
        rows.append(
            (
                *_service_place(run, c),
                ("tokens/s", f"{c['tokens_per_s']:.1f}"),
                ("least-most", forms.ends(c["tokens_per_s_range"])),
                ("a stream", number(c.get("stream_tokens_per_s"), 1)),
                ("requests/s", number(c.get("requests_per_s"))),
                ("goodput/s", number(c.get("goodput_per_s"))),
                ("failed", str(c.get("failed", 0))),
                ("x local", _service_ratio(c.get("over_local"))),
                ("x plain", _service_ratio(c.get("over_plain"))),
                ("accepted", number(c.get("acceptance"), 3)),
                ("tok/round", number(c["tokens_per_round"] or None)),
                ("same", f"{c['identical']['hits']}/{c['identical']['events']}" if c["identical"]["events"] else "-"),
            )
        )
        panel = panels.setdefault(f"{run.label}, temperature {c['temperature']:g}", {})
        point = Point(c[key], c["tokens_per_s"], *c["tokens_per_s_range"])
        panel.setdefault(c["configuration"], []).append(point)
    limits = {_limits(run) for run, _ in cells} - {""}
    goodput = f" Goodput: requests per second that keep {', '.join(sorted(limits))}." if limits else ""
    cores = "" if all(run.foreign for run, _ in cells) else " Clients of our services run on the same cores."
    text = f"All tokens over the wall clock of a unit, prefill included; least-most: of single repeats.{cores}{goodput}"
    drawn = plots.later(plots.lines, panels, x_label, "tokens/s")
    return Section(title, text, rows_of(rows), drawn, group=_PLACE_COLUMNS, best="tokens/s")


def _limits(run: ServeRun) -> str:
    limits = run.data["settings"].get("goodput") or {}
    return " and ".join(f"{name.upper()} <= {value:g} ms" for name, value in limits.items())


def _service_latency(cells: Sequence[tuple[ServeRun, Cell]]) -> Section | None:
    if not cells:
        return None
    rows, drawn = [], []
    lowest = min(c["temperature"] for _, c in cells)
    for run, c in cells:
        rows.append((*_service_place(run, c), *percentiles(c["latency_s"])))
        if c["temperature"] == lowest:
            by_text = {name: {str(p): v for p, v in c["latency_s"][name].items()} for name in METRICS}
            drawn.append((f"{_load(c)}: {c['configuration']}", by_text))
    text = "At the client, in milliseconds. A report plots the lowest temperature."
    picture = plots.later(plots.percentiles, drawn, METRICS) if drawn else None
    title = "Latency of the endpoint" if all(run.foreign for run, _ in cells) else "Latency of the service"
    return Section(title, text, rows_of(rows), picture, group=_PLACE_COLUMNS)


def _service_groups(cells: Sequence[tuple[ServeRun, Cell]]) -> Section | None:
    rows = [
        (
            *_service_place(run, c),
            ("group", group),
            ("requests", str(found["requests"])),
            ("a stream's tokens/s", number(found["stream_tokens_per_s"], 1)),
            ("tok/round", number(found["tokens_per_round"])),
            ("accepted", number(found["acceptance"], 3)),
        )
        for run, c in cells
        for group, found in (c.get("groups") or {}).items()
    ]
    text = "All groups are asked at once; a stream: a request's own."
    return Section("Task groups at the service", text, rows_of(rows), group=_PLACE_COLUMNS) if rows else None


def _targets(cells: Sequence[tuple[ServeRun, Cell]]) -> Section | None:
    rows: list[Row] = []
    for run, c in cells:
        step_s, hit_gap_s, hits = c["step_s"], c.get("hit_gap_per_step_s"), c["hits"]
        share = None if hit_gap_s is None else hit_gap_s / (step_s + hit_gap_s)
        rows.append(
            (
                *_service_place(run, c),
                ("step ms", forms.milliseconds(step_s)),
                ("gap ms", forms.milliseconds(c.get("gap_per_step_s"))),
                ("gap on a hit ms", forms.milliseconds(hit_gap_s)),
                ("share", forms.percent(share)),
                ("waits", forms.percent(c.get("waited"))),
                ("hits", number(hits["hits"] / hits["events"] if hits["events"] else None, 3)),
                ("rounds by cause", forms.counts(c["causes"])),
                ("cached", forms.percent(c.get("cached"))),
            )
        )
    text = (
        "Means at the target. share: of gap in gap and step, on a hit. waits: share of its time in which every session "
        "waited for its draft. cached: part of the prompts that the prefix cache held."
    )
    return Section("Steps of the targets", text, rows_of(rows), group=_PLACE_COLUMNS) if rows else None


def _cpu(cells: Sequence[tuple[ServeRun, Cell]]) -> Section | None:
    roles = dict.fromkeys(role for _, c in cells for role in c["cpu_s_per_token"])
    rows: list[Row] = []
    for run, c in cells:
        each = c["cpu_s_per_token"]
        own = [(role, forms.milliseconds(each.get(role))) for role in roles]
        rows.append((*_service_place(run, c), *own, ("all", forms.milliseconds(sum(each.values())))))
    text = "Milliseconds per emitted token. client: this process, which in local rows is also the relay."
    return Section("CPU time", text, rows_of(rows), group=_PLACE_COLUMNS) if rows else None


def _failures(cells: Sequence[tuple[ServeRun, Cell]]) -> Section | None:
    rows = [
        (*_service_place(run, c), ("failed", str(count)), ("reason", reason))
        for run, c in cells
        for reason, count in (c.get("reasons") or {}).items()
    ]
    return Section("Failures", "", rows_of(rows), group=_PLACE_COLUMNS) if rows else None


def _idle(runs: Sequence[ServeRun]) -> Section | None:
    def resident(facts: Mapping[str, Any]) -> str:
        return " ".join(f"{role} {size / 2**20:.0f}" for role, size in sorted(facts["rss_bytes"].items()))

    rows = [
        (
            ("run", run.label),
            ("started in s", f"{facts['start_s']:.0f}"),
            ("cores", f"{facts['idle_cpu']:.2f}"),
            ("processes", str(facts["num_processes"])),
            ("draft link ms, both ways", forms.milliseconds(facts["draft_link_s"])),
            ("resident MiB", resident(facts)),
        )
        for run in runs
        for facts in run.data.get("services") or ()
    ]
    return Section("The service at rest", "", rows_of(rows)) if rows else None


_PLACE_COLUMNS = 3
"""Columns before the configuration, by which the tables are grouped."""


def _service_place(run: ServeRun, cell: Cell) -> Row:
    return (
        ("run", run.label),
        ("T", f"{cell['temperature']:g}"),
        ("load", _load(cell)),
        ("where", cell["configuration"]),
    )


def _load(cell: Cell) -> str:
    if not cell.get("rate"):
        return f"{cell['sessions']} at once"
    shape = cell.get("burstiness", 1.0)
    return f"{cell['rate']:g}/s" + ("" if shape == 1 else f", shape {shape:g}")


def _service_ratio(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.2f} ({forms.ends((value['low'], value['high']), 2)})"
