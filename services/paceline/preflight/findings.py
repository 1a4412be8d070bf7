"""Findings of the checks: one sentence for each thing that is wrong, and its severity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Severity(StrEnum):
    """ERROR: the service cannot start. WARNING: it may work nevertheless."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be."""

    severity: Severity
    key: str
    """Dotted path of the setting to change."""
    message: str
    """One sentence that says what to change."""

    @classmethod
    def error(cls, key: str, problem: str) -> Self:
        """``problem`` continues the sentence that begins with the key."""
        return cls(Severity.ERROR, key, f"{key} {problem}")

    @classmethod
    def warning(cls, key: str, problem: str) -> Self:
        """A finding that may be all right; ``problem`` continues the sentence that begins with the key."""
        return cls(Severity.WARNING, key, f"{key} {problem}")
