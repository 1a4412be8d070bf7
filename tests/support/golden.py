"""Pages of what is asked and what is said: ``$ ...``, and below it the answer, as in a terminal."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path


def pages_beside(test: str) -> list[Path]:
    """The pages of the folder of a test."""
    return sorted((Path(test).parent / "golden").glob("*.txt"))


def check_page(page: Path, ask: Callable[[str], str]) -> None:
    """Raises AssertionError unless ``ask`` gives the answer below each ``$ ...``.

    With the environment variable WRITE_PAGES the page is written, and not compared.
    """
    text = page.read_text(encoding="utf-8")
    asked = [line for line in text.splitlines() if line.startswith("$ ")]
    found = "\n".join(f"{line}\n{ask(line[2:])}\n" for line in asked)
    if os.environ.get("WRITE_PAGES"):
        page.write_text(found, encoding="utf-8")
    else:
        differ = difflib.unified_diff(text.splitlines(), found.splitlines(), "page", "answers", lineterm="", n=1)
        assert found == text, "\n".join(differ)
