"""Sections on runs of ``paceline bench serve`` and ``paceline bench endpoint``, pure but for the plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_bench.latency import METRICS
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
        _service_groups(cells),
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
    text = (
        "All tokens over the wall clock of a unit, prefill included; bars: least and most of single repeats."
        f"{cores}{goodput}"
    )
    drawn = plots.lines(panels, x_label, "tokens/s")
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
    text = "At the client, in milliseconds; the plot has the lowest temperature."
    picture = plots.percentiles(drawn, METRICS) if drawn else ""
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
