"""The sections of a report in plain text, as the kinds of runs print them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.cli.table import table
from paceline_bench.records import ENDPOINT, UnitRecord, differing
from paceline_bench.report.documents import Run
from paceline_bench.report.page import Section
from paceline_bench.report.sections import all_sections


def text_of(title: str, run: Run) -> str:
    """The sections of one run below a title, without plots."""
    return "\n".join([title, *(line for section in all_sections([run]) for line in _lines(section))])


def _lines(section: Section) -> Iterator[str]:
    yield from ("", section.title)
    yield from (f"{figure}: {sentence}" for figure, sentence in section.figures)
    same = int(bool(section.rows) and section.rows[0][0] == "run")  # one run needs no column for its name
    yield from table([row[same:] for row in section.rows]) if section.rows else ()
    yield from section.text.splitlines()


def identity(units: Sequence[UnitRecord]) -> Iterator[str]:
    """Result of comparing every text of ours with plain decoding's; nothing without any."""
    wrong = differing(units)
    ours = [(unit, request) for unit in units if unit.configuration.place != ENDPOINT for request in unit.requests]
    if not ours:
        return
    num_distinct = len({(unit.temperature, request.unit) for unit, request in ours})
    equal = f"{len(ours) - len(wrong)} of {len(ours)} requests, {num_distinct} different ones"
    yield f"tokens equal plain decoding's in one process: {equal}"
    for unit, request in wrong[:10]:
        yield (
            f"DIFFERENT: {unit.configuration.name}, {unit.sessions} sessions, temperature {unit.temperature:g}, "
            f"repeat {unit.repeat}, request {request.unit} ({request.prompt})"
        )
