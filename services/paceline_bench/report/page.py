"""Writes the sections of a report: one HTML page that needs nothing else, and Markdown with its plots beside it."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, an explanation of the numbers, a table and a plot; the last two may be empty."""

    title: str
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    """Rows of the table, the header first."""
    svg: str = ""


_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.86rem; margin: 0.8rem 0 }
th, td { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: #555; font-weight: 600 }
div.wide { overflow-x: auto } svg { max-width: 100%; height: auto } p { max-width: 60rem }
"""


def to_html(title: str, sections: Sequence[Section]) -> str:
    """One page with the plots inside."""
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_CSS}</style></head><body>\n<h1>{html.escape(title)}</h1>",
    ]
    for number, section in enumerate(sections):
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(text)}</p>" for text in section.text.splitlines()]
        if section.svg:
            parts.append(f'<div class="wide">{_own_ids(section.svg, f"s{number}-")}</div>')
        if section.rows:
            header, *rows = section.rows
            cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
            body = "\n".join(f"<tr>{line}</tr>" for line in (cells, *lines))
            parts.append(f'<div class="wide"><table>\n{body}\n</table></div>')
    return "\n".join([*parts, "</body></html>"]) + "\n"


def to_markdown(title: str, sections: Sequence[Section], plots: Sequence[str | None]) -> str:
    """Markdown, with ``plots`` as the file name of each section's plot."""
    parts = [f"# {title}"]
    for section, plot in zip(sections, plots, strict=True):
        parts += [f"## {section.title}", *section.text.splitlines()]
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
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") + ".svg"
        plots.append(name if section.svg else None)
        if section.svg:
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
