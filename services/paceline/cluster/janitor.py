"""A process that waits for its parent to end, and then cleans up. Standard library only.

    python -I janitor.py FOLDER   standard input: a byte, then its end: an orderly end. Only its end: it was killed.

Ends every process that has FOLDER on its command line (HAProxy outlives the actor that keeps it, and would hold the
service's ports), then removes FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

_LONG_S, _PAUSE_S = 10.0, 0.5
"""Time to look for processes again. If the parent was killed, its children may start others for some seconds."""


def end_strays(folder: str) -> None:
    """One look at all processes."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and folder.encode() in entry.read_bytes():
                os.kill(pid, signal.SIGKILL)


def main(folder: str) -> None:
    """Runs the command that the module's docstring describes."""
    orderly = bool(sys.stdin.buffer.read())
    until = time.monotonic() + (0.0 if orderly else _LONG_S)
    end_strays(folder)
    while time.monotonic() < until:
        time.sleep(_PAUSE_S)
        end_strays(folder)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
