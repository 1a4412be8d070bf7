"""Writes the sections of a report: one self-contained HTML page, and Markdown with plots in separate files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_bench.report.plots import BACKGROUND, FOREGROUND

if TYPE_CHECKING:  # the extra ``endpoint`` prints sections without it
    import jinja2


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, an explanation of the numbers, a table and a plot; all but the heading may be empty."""

    title: str
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    """Rows of the table, the header first."""
    draw: Callable[[], str] | None = None
    """Draws the plot as SVG."""
    group: int = 0
    """Number of leading columns that say which load a row is of: on the page they are a heading of its rows."""
    best: str = ""
    """Header of the column whose largest number is marked among the rows of each group; empty if none is."""
    figures: Sequence[tuple[str, str]] = ()
    """Figures that stand large on the page, each with the sentence that says what it is of."""

    @property
    def svg(self) -> str:
        """The plot; empty if there is none."""
        return "" if self.draw is None else self.draw()

    @property
    def anchor(self) -> str:
        """Name of the section in links and files."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one load, as the page shows them: a heading, and the cells below the columns that are left."""

    heading: str
    rows: Sequence[Sequence[str]]
    best: int | None
    """Index of the row that is marked."""


def groups(section: Section) -> Iterator[Group]:
    """The rows of a section's table, by load."""
    if not section.rows:
        return
    header, *rows = section.rows
    for place, own in groupby(rows, key=lambda row: tuple(row[: section.group])):
        found = list(own)
        named = zip(header, place, strict=False)
        heading = ", ".join(cell if name in _PLAIN else f"{name} {cell}" for name, cell in named if cell != "-")
        yield Group(heading, [row[section.group :] for row in found], _best_row(section, found))


_PLAIN = ("run", "load")
"""Columns whose cells need no name in a heading."""


def _best_row(section: Section, rows: Sequence[Sequence[str]]) -> int | None:
    if not section.best or len(rows) < 2:
        return None
    column = list(section.rows[0]).index(section.best)
    return max(range(len(rows)), key=lambda i: float(rows[i][column]))


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One page with the plots inside."""
    from markupsafe import Markup

    shown = [(s, list(groups(s)), _themed(_own_ids(s.svg, f"s{number}-"))) for number, s in enumerate(sections)]
    return _template().render(title=title, sections=shown, svg=Markup)


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    text = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _themed(svg: str) -> str:
    """A picture in the colors of the page around it, light or dark."""
    return svg.replace(FOREGROUND, "currentColor").replace(BACKGROUND, "none")


def to_markdown(title: str, sections: Sequence[Section], plots: Sequence[str | None]) -> str:
    """Markdown, with ``plots`` as the file name of each section's plot."""
    parts = [f"# {title}"]
    for section, plot in zip(sections, plots, strict=True):
        parts.append(f"## {section.title}")
        parts += [f"**{figure}**: {sentence}" for figure, sentence in section.figures]
        parts += section.text.splitlines()
        if plot is not None:
            parts.append(f"![{section.title}]({plot})")
        if section.rows:
            header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in section.rows]
            rule = [":--", *["--:"] * (len(header) - 1)]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)))
    return "\n\n".join(parts) + "\n"


def write(directory: Path, title: str, sections: Sequence[Section]) -> list[Path]:
    """Writes ``report.html``, ``report.md`` and a file per plot into ``directory``, made if needed. Returns all."""
    directory.mkdir(parents=True, exist_ok=True)
    plots: list[str | None] = []
    for section in sections:
        name = f"{section.anchor}.svg"
        plots.append(name if section.draw else None)
        if section.draw:
            (directory / name).write_text(section.svg, encoding="utf-8")
    files = {"report.html": to_html(title, sections), "report.md": to_markdown(title, sections, plots)}
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return [directory / name for name in (*files, *(plot for plot in plots if plot))]


def _own_ids(svg: str, prefix: str) -> str:
    """The picture with ids that no other picture of the page has."""
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', svg)
