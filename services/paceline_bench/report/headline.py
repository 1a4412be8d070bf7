"""The beginning of a report: the speed-ups that its runs measured, each with its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline_bench.report import forms
from paceline_bench.report.documents import LocalRun, Run, ServeRun
from paceline_bench.report.page import Section
from paceline_bench.report.summaries import best_of

Figure = tuple[str, str]


def in_short(runs: Sequence[Run]) -> Section | None:
    """One figure for each load of a local run and each closed load of a service, and one for an endpoint; None if no
    run has any. Of several temperatures the lowest is taken."""
    figures: list[Figure] = []
    for run in runs:
        figures += _local(run) if isinstance(run, LocalRun) else [*_service(run), *_endpoint(run)]
    return Section("In short", figures=list(dict.fromkeys(figures))) if figures else None


def _local(run: LocalRun) -> Iterator[Figure]:
    """Overlapped decoding, at its fastest K, over plain decoding."""
    if run.grouped:
        return
    temperature = min(s.temperature for s in run.summaries)
    best = best_of(run.summaries, "overlapped", temperature)
    if best is None or best.ratio is None:
        return
    sentence = (
        f"{run.label}: {best.method} over plain decoding, {_interval(best.ratio.low, best.ratio.high)}, temperature "
        f"{temperature:g}, {run.sessions} at once: {best.decode_tokens_per_s:.1f} tokens/s."
    )
    sequential = best_of(run.summaries, "sequential", temperature)
    if sequential is not None and sequential.decode_tokens_per_s > 0:
        factor = best.decode_tokens_per_s / sequential.decode_tokens_per_s
        sentence += f" Over {sequential.method}, the fastest of its mode: {factor:.2f}."
    yield f"{best.ratio.value:.2f} ×", sentence


def _service(run: ServeRun) -> Iterator[Figure]:
    """The overlapped service over the plain one."""
    cells = [c for c in _closed(run) if c.get("over_plain") and c["configuration"].startswith("service")]
    for c in _lowest(cells):
        ratio = c["over_plain"]
        sentence = (
            f"{run.label}: {c['configuration']} over plain decoding at the same place, "
            f"{_interval(ratio['low'], ratio['high'])}, temperature {c['temperature']:g}, {c['sessions']} at once: "
            f"{c['tokens_per_s']:.1f} tokens/s."
        )
        yield f"{ratio['value']:.2f} ×", sentence


def _endpoint(run: ServeRun) -> Iterator[Figure]:
    """The load at which an endpoint gave the most tokens."""
    cells = _lowest([c for c in _closed(run) if c.get("place") == "endpoint"])
    if cells:
        most = max(cells, key=lambda c: c["tokens_per_s"])
        sentence = (
            f"{run.label}: the most of the loads, at {most['sessions']} at once, temperature {most['temperature']:g}; "
            f"single repeats: {forms.ends(most['tokens_per_s_range'])}."
        )
        yield f"{most['tokens_per_s']:.1f} tokens/s", sentence


def _closed(run: ServeRun) -> list[Mapping[str, Any]]:
    return [c for c in run.cells if not c.get("rate")]


def _lowest(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    lowest = min((c["temperature"] for c in cells), default=0.0)
    return [c for c in cells if c["temperature"] == lowest]


def _interval(low: float, high: float) -> str:
    return "not repeated" if low == high else f"95 % interval {low:.2f} to {high:.2f}"
