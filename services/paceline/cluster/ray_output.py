"""Sends the output of Ray and Serve in this process to a file: the terminal shows what a user can act on."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

_FILE = "messages.log"
_LONGEST_BYTES = 1 << 20


def divert(folder: Path) -> None:
    """Sends the log records and the messages that Ray prints in this process to ``messages.log`` in ``folder``.

    The file begins again when it holds 1 MiB. Must be called after Ray and Serve are imported, and before Ray starts.
    """
    handler = RotatingFileHandler(folder / _FILE, maxBytes=_LONGEST_BYTES, backupCount=1, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    logger, of_serve = logging.getLogger("ray"), logging.getLogger("ray.serve")
    logger.handlers, of_serve.handlers = [handler], []
    logger.propagate, of_serve.propagate = False, True

    def note(data: dict[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            logger.warning("(%s) %s", data["pid"], line)

    import ray._private.worker

    ray._private.worker.print_to_stdstream = note  # else on standard output, in color, with no setting against it
