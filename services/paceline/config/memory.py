"""Memory of a process: how often the garbage collector runs, and when free memory returns to the system."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_YOUNG_OBJECTS = 20_000
"""Objects that may be allocated between two garbage collections: some megabytes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of ``mallopt``, from malloc.h of glibc."""
_KEPT_BYTES = 512 << 20
_LARGEST_KEPT_BYTES = 32 << 20
"""The largest limit that glibc takes; larger blocks go back at once."""
_NUM_ARENAS = 2


def tune_engine_process() -> None:
    """Exempts all present objects from garbage collection, makes collections rarer, and keeps the memory that a step
    frees; called once an engine is built.

    Libraries and models are some hundred thousand objects: a collection during a step takes a tenth of a second. A step
    makes thousands of objects and drops them without cycles, so Python's own limit of 700 collects in each step. A step
    of many tokens takes tens of megabytes on a CPU. The C library returns the uppermost part of them to the system, and
    the next step gets it back page by page. So the library keeps ``_KEPT_BYTES``.
    """
    _set((_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
    _exempt()


def tune_server_process() -> None:
    """Exempts all present objects from garbage collection and makes it rarer; called once a front is built.

    A body of many values would start a full collection, while all streams wait. Threads share few arenas of memory,
    since each arena keeps the memory of its largest body.
    """
    _set((_M_ARENA_MAX, _NUM_ARENAS))
    _exempt()


def trim() -> None:
    """Returns free memory to the system, in some milliseconds without the interpreter lock."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _set(*parameters: tuple[int, int]) -> None:
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in parameters:
            mallopt(parameter, value)


def _exempt() -> None:
    gc.collect()
    gc.freeze()
    if 0 < gc.get_threshold()[0] < _YOUNG_OBJECTS:  # 0: who uses this process has turned it off
        gc.set_threshold(_YOUNG_OBJECTS)
