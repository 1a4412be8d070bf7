"""Log lines on standard error: one plain sentence each, the same from the command line and from its workers."""

from __future__ import annotations

import logging
import sys

_ROOT = "paceline"


class _Sentence(logging.Formatter):
    """Leaves tracebacks to the debug level: what a user can act on is in the message."""

    def format(self, record: logging.LogRecord) -> str:
        if level() > logging.DEBUG:
            record.exc_info = record.exc_text = record.stack_info = None
        return super().format(record)


def configure(log_level: int) -> None:
    """Prints Paceline's records from ``log_level`` on, those of other libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Sentence("paceline: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(_ROOT).setLevel(log_level)


def level() -> int:
    """The level that Paceline's records are printed from."""
    return logging.getLogger(_ROOT).getEffectiveLevel()
