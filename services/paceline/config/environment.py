"""Environment variables: what a process asks of them, and what a worker sets. No other module of the configuration
reads or writes one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables that a worker process sets before it imports torch: a multi-threaded region stalls whenever anything else
wants one of its cores, so parallelism comes from processes."""


def cache_dir() -> Path:
    """Directory of the compiled models: PACELINE_CACHE, else the user's cache directory."""
    own = os.environ.get("PACELINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(base).expanduser() / "paceline"


def apply_worker_environment() -> None:
    """Sets ``WORKER_ENVIRONMENT`` for this process. Must run before torch is imported to take full effect."""
    os.environ.update(WORKER_ENVIRONMENT)


def wants_color(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal whose user did not ask for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
