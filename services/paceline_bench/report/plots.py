"""Plots of a report as SVG, by matplotlib. Numbers in, pictures out: nothing is computed here."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

Steps = Sequence[tuple[float, float, int]]
"""(start, seconds, width)."""

FOREGROUND, BACKGROUND = "#1a1a1a", "#fefefe"
"""Colors of text and lines, and of what they stand on: a page replaces both by its own."""
_TARGET, _DRAFT = "#0072b2", "#e69f00"
_COLORS = (_TARGET, _DRAFT, "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a")
"""Okabe and Ito's palette, which color-blind readers can distinguish, without its black and yellow."""
_MARKERS = "osD^v<>PX"
"""Markers; their number and the number of colors are coprime, so 63 series differ from each other."""
_PERCENTILE_MARKERS = {"50": "o", "90": "|", "95": "x", "99": ">"}
_STYLE = {
    "svg.hashsalt": "paceline",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": BACKGROUND,
    "axes.facecolor": BACKGROUND,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), FOREGROUND),
}
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": FOREGROUND}


@dataclass(frozen=True, slots=True)
class Point:
    """A value and the ends of its interval."""

    x: float
    y: float
    low: float
    high: float


def require_matplotlib() -> Any:
    """Imports ``matplotlib.figure``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ConfigError("reports need matplotlib, which is not installed: pip install 'paceline[bench]'") from error
    return matplotlib.figure


def later(draw: Callable[..., str], *given: Any) -> Callable[[], str]:
    """Returns what draws a picture once, when it is first asked for."""
    return functools.cache(functools.partial(draw, *given))


def lines(panels: Mapping[str, Mapping[str, Sequence[Point]]], x_label: str, y_label: str) -> str:
    """A panel per title with a line per name and its intervals; x has one tick per value."""
    figure, axes = _panels(len(panels), 4.6, 3.4, columns=min(len(panels), 3))
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    ticks = sorted({p.x for series in panels.values() for points in series.values() for p in points})
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for name, points in series.items():
            errors = [[p.y - p.low for p in points], [p.high - p.y for p in points]]
            style = {**series_style(names.index(name)), "markersize": 4, "linewidth": 1.2, "capsize": 2}
            ax.errorbar([ticks.index(p.x) for p in points], [p.y for p in points], yerr=errors, label=name, **style)
        ax.set_xticks(range(len(ticks)), [f"{tick:g}" for tick in ticks])
        ax.set(title=title, xlabel=x_label, ylabel=y_label)
        ax.set_ylim(bottom=0)
    found = {label: mark for ax in axes for mark, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([found[name] for name in names], names, loc="outside right upper", **_LEGEND)
    return _svg(figure)


def percentiles(rows: Sequence[tuple[str, Mapping[str, Mapping[str, float | None]]]], metrics: Sequence[str]) -> str:
    """A panel per metric, a line per row, a mark per percentile; seconds in, milliseconds out."""
    figure, axes = _panels(len(metrics), 2.4, 0.9 + 0.24 * len(rows))
    for ax, metric in zip(axes, metrics, strict=True):
        for y, (_, values) in enumerate(rows):
            found = {p: v * 1e3 for p, v in values.get(metric, {}).items() if v is not None}
            if found:
                ax.plot([min(found.values()), max(found.values())], [y, y], color="0.6", zorder=1)
            for p, value in found.items():
                ax.scatter(value, y, marker=_PERCENTILE_MARKERS.get(p, "."), s=16, color=_TARGET, zorder=2)
        ax.set_yticks(range(len(rows)), [name for name, _ in rows] if ax is axes[0] else [])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set(title=f"{metric.upper()}", xlabel="ms: ● p50  | p90  × p95  ▸ p99" if ax is axes[0] else "ms")
        ax.set_xlim(left=0)
    return _svg(figure)


def scatter(points: Sequence[tuple[str, str, float, float]], x_label: str, y_label: str) -> str:
    """A line with marks per series; each point is (series, note at the point, x, y)."""
    figure, (ax,) = _panels(1, 6.4, 4.4)
    for i, name in enumerate(dict.fromkeys(series for series, *_ in points)):
        own = [(note, x, y) for series, note, x, y in points if series == name]
        ax.plot(
            [x for _, x, _ in own], [y for *_, y in own], label=name, markersize=5, linewidth=0.7, **series_style(i)
        )
        for note, x, y in own:
            ax.annotate(note, (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7, color="0.5")
    ax.set(xlabel=x_label, ylabel=y_label)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), **_LEGEND)
    return _svg(figure)


def timelines(rows: Mapping[str, tuple[Steps, Steps, Sequence[float]]], begin: float, end: float) -> str:
    """Two lanes per name, the target's steps and the draft's, and the arrivals of tokens; from ``begin`` to ``end``."""
    figure, axes = _panels(len(rows), 9.0, 1.25, columns=1)
    for ax, (name, (target, draft, arrivals)) in zip(axes, rows.items(), strict=True):
        for y, steps, color in ((1, target, _TARGET), (0, draft, _DRAFT)):
            seen = [((at - begin) * 1e3, s * 1e3) for at, s, _ in steps if at < end and at + s > begin]
            ax.broken_barh(seen, (y - 0.35, 0.7), facecolor=color, edgecolor=BACKGROUND, linewidth=0.6)
        for at in arrivals:
            if begin <= at <= end:
                ax.axvline((at - begin) * 1e3, color="0.5", linewidth=0.6, linestyle=":")
        ax.set_yticks([0, 1], ["draft", "target"])
        ax.set_ylim(-0.5, 1.5)
        ax.set_xlim(0, (end - begin) * 1e3)
        ax.set_title(name, loc="left", fontsize=9)
        ax.grid(False)
    axes[-1].set_xlabel("ms; dotted: tokens reach the client")
    return _svg(figure)


def series_style(number: int) -> dict[str, str]:
    """Color and marker of the series of a plot that has this number; the first 63 all differ."""
    return {"marker": _MARKERS[number % len(_MARKERS)], "color": _COLORS[number % len(_COLORS)]}


def _panels(count: int, width: float, height: float, columns: int | None = None) -> tuple[Any, list[Any]]:
    import matplotlib

    kind = require_matplotlib()
    columns = columns or count
    rows = -(-count // columns)
    with matplotlib.rc_context(_STYLE):
        figure = kind.Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    found = text.getvalue()
    return found[found.index("<svg") :]
