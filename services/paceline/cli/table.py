"""Text tables and progress by ``rich``: with bold headers and a spinner on a terminal, plain and stable elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.logs import is_quiet

_WIDTH = 10_000
"""No line is cut or wrapped: a narrow terminal breaks long ones itself."""


def table(rows: Sequence[Sequence[str]], stream: IO[str] | None = None) -> list[str]:
    """The lines of a table whose first row is the header: the first column to the left, the others to the right.

    ``stream``: where they will be printed; on a terminal the header is bold.
    """
    header, *others = rows
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column, name in enumerate(header):
        grid.add_column(Text(name), justify="right" if column else "left", no_wrap=True)
    for row in others:
        grid.add_row(*map(Text, row))
    console = Console(file=stream, width=_WIDTH, color_system=None if stream is None else "auto")
    with console.capture() as lines:
        console.print(grid)
    return [line.rstrip() for line in lines.get().splitlines()]


def working(text: str) -> AbstractContextManager[object]:
    """Shows ``text`` with a spinner while the block runs, if standard error is a terminal; with --quiet it does not."""
    return nullcontext() if is_quiet() else Console(stderr=True).status(text)
