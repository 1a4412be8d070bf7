"""The streams that the replicas of this machine serve now: each replica writes its number to a file, once a second.

For ``drain.py``, which has to know it just when the cluster's control store is silent.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"paceline-streams-{os.getuid()}"
_FRESH_S = 10.0
"""Age of a file from which its process counts as ended or hung."""


def note(num_streams: int, folder: Path = FOLDER) -> None:
    """Writes how many streams this process serves. A file that cannot be written is no reason to fail."""
    path = folder / str(os.getpid())
    with contextlib.suppress(OSError):
        if num_streams:
            folder.mkdir(mode=0o700, exist_ok=True)
            path.write_text(str(num_streams))
        else:
            path.unlink(missing_ok=True)


def count(folder: Path = FOLDER) -> int:
    """Returns how many streams the processes of this machine serve, counted once for each process they run through."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if abs(time.time() - path.stat().st_mtime) < _FRESH_S:  # also where the clock was set back
                    total += int(path.read_text())
    return total
