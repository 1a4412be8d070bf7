"""What a report says about runs of ``paceline bench serve`` and ``endpoint``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_bench import plots
from paceline_bench.documents import ServeRun
from paceline_bench.latency import METRICS
from paceline_bench.page import Section
from paceline_bench.plots import Point


def serve_sections(runs: Sequence[ServeRun]) -> list[Section]:
    """Those that the runs have something for."""
    cells = [(run, cell) for run in runs for cell in run.cells]
    closed = [(run, cell) for run, cell in cells if not cell.get("rate")]
    opened = [(run, cell) for run, cell in cells if cell.get("rate")]
    return [
        *([_loads("The service in a closed loop", closed, "sessions", "requests at once")] if closed else []),
        *([_loads("The service in an open loop", opened, "rate", "arrivals per second")] if opened else []),
        *([_latency(cells)] if any("latency_s" in cell for _, cell in cells) else []),
        *([_groups(cells)] if any(cell.get("groups") for _, cell in cells) else []),
    ]


def _loads(title: str, cells: Sequence[tuple[ServeRun, Mapping[str, Any]]], key: str, x_label: str) -> Section:
    rows: list[Sequence[str]] = [
        (
            "run", "T", "delay ms", x_label, "where", "tokens/s", "least-most", "requests/s", "goodput/s", "failed",
            "x local", "x plain", "accepted", "tok/round", "same",
        )
    ]  # fmt: skip
    panels: dict[str, dict[str, list[Point]]] = {}
    for run, c in cells:
        rows.append(
            (
                run.label, f"{c['temperature']:g}", f"{c['delay_ms']:g}", _load(c), c["configuration"],
                f"{c['tokens_per_s']:.1f}", "-".join(f"{v:.1f}" for v in c["tokens_per_s_range"]),
                _number(c.get("requests_per_s"), 2), _number(c.get("goodput_per_s"), 2), str(c.get("failed", 0)),
                _ratio(c.get("over_local")), _ratio(c.get("over_plain")), _number(c.get("acceptance"), 3),
                f"{c['tokens_per_round']:.2f}" if c["tokens_per_round"] else "-",
                f"{c['identical']['hits']}/{c['identical']['events']}" if c["identical"]["events"] else "-",
            )
        )  # fmt: skip
        delay = f", {c['delay_ms']:g} ms each way to the draft" if c["delay_ms"] else ""
        panel = panels.setdefault(f"{run.label}, temperature {c['temperature']:g}{delay}", {})
        point = Point(c[key], c["tokens_per_s"], *c["tokens_per_s_range"])
        panel.setdefault(c["configuration"], []).append(point)
    limits = {_limits(run) for run, _ in cells} - {""}
    goodput = f" Goodput: requests per second that keep {', '.join(sorted(limits))}." if limits else ""
    text = (
        "All tokens over the wall clock of a unit, prefill included; bars: least and most of single repeats. Clients "
        f"run on the same cores.{goodput}"
    )
    return Section(title, text, rows, plots.lines(panels, x_label, "tokens/s"))


def _limits(run: ServeRun) -> str:
    """Of a run's goodput, as text."""
    limits = run.data["settings"].get("goodput") or {}
    return " and ".join(f"{name.upper()} <= {value:g} ms" for name, value in limits.items())


def _latency(cells: Sequence[tuple[ServeRun, Mapping[str, Any]]]) -> Section:
    rows: list[Sequence[str]] = [
        ("run", "T", "delay ms", "load", "where", *(f"{name.upper()} p50/p90/p95/p99" for name in METRICS))
    ]
    drawn = []
    lowest = min(c["temperature"] for _, c in cells)
    for run, c in cells:
        found = c.get("latency_s")
        if found is None:
            continue
        shown = ["/".join(_ms(v) for v in found[name].values()) for name in METRICS]
        rows.append((run.label, f"{c['temperature']:g}", f"{c['delay_ms']:g}", _load(c), c["configuration"], *shown))
        if c["temperature"] == lowest and not c["delay_ms"]:
            by_text = {name: {str(p): v for p, v in found[name].items()} for name in METRICS}
            drawn.append((f"{_load(c)}: {c['configuration']}", by_text))
    text = "At the client, in milliseconds; the plot has the lowest temperature, without added delay."
    return Section("Latency of the service", text, rows, plots.percentiles(drawn, METRICS) if drawn else "")


def _groups(cells: Sequence[tuple[ServeRun, Mapping[str, Any]]]) -> Section:
    rows: list[Sequence[str]] = [
        ("run", "T", "delay ms", "load", "where", "group", "requests", "a stream's tokens/s", "tok/round", "accepted")
    ]
    for run, c in cells:
        for group, found in c.get("groups", {}).items():
            place = (run.label, f"{c['temperature']:g}", f"{c['delay_ms']:g}", _load(c), c["configuration"])
            stream, tokens = _number(found["stream_tokens_per_s"], 1), _number(found["tokens_per_round"], 2)
            rows.append((*place, group, str(found["requests"]), stream, tokens, _number(found["acceptance"], 3)))
    return Section("Task groups at the service", "All groups are asked at once; a stream: a request's own.", rows)


def _load(cell: Mapping[str, Any]) -> str:
    if not cell.get("rate"):
        return f"{cell['sessions']} at once"
    shape = cell.get("burstiness", 1.0)
    return f"{cell['rate']:g}/s" + ("" if shape == 1 else f", shape {shape:g}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}" if value < 0.1 else f"{value * 1e3:.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"
