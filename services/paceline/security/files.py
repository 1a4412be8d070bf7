"""Files that others replace while they are in use: a certificate that is renewed, keys that are added."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]
"""State of each file: its inode, time of change and size; None: it cannot be looked at."""


def signature(paths: Iterable[Path]) -> Signature:
    """A value that changes when one of the files is written or replaced, through links too, as a mounted Secret is."""
    return tuple(map(_of, paths))


def _of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
