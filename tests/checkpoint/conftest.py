"""The clock of the work of grammars."""

from __future__ import annotations

import pytest

from paceline.checkpoint import grammar_matcher

FREE_S = grammar_matcher.FREE_S
"""That of the product: tests have another one (tests/conftest.py)."""


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU seconds between two looks at the clock, which a mask takes."""
    now, step = [0.0], [0.0]

    def thread_time() -> float:
        now[0] += step[0]
        return now[0]

    monkeypatch.setattr("time.thread_time", thread_time)
    monkeypatch.setattr(grammar_matcher, "FREE_S", FREE_S)
    return step
