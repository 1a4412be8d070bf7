"""The parts of all sessions in a forward of a draft model by one native function over the leaves, ``parts.cpp``.

It replaces ``ModelDrafter``'s work session by session in nearly every step: if every part is an anchor with its pending
tokens, or leaves whose ancestors all have rows. ``ModelDrafter`` does the other steps, and all steps if the function
cannot be compiled, which needs a C++ compiler and Python's headers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core.native import extension
from paceline.core.processors import Row
from paceline.drafters.protocol import Leaf
from paceline.drafters.rows import Part, RowSession, tree_step
from paceline.errors import EngineError, ResourceExhaustedError
from paceline.model.kv_cache import KVCache

SOURCE = Path(__file__).with_suffix(".cpp")
_COLUMNS = attrgetter("tokens", "sampler", "num_cached", "node_rows")
"""Attributes of a session that ``parts.cpp`` reads, in its order."""
log = logging.getLogger(__name__)


def prepare() -> None:
    """Compiles or loads the pass now, so that no step has to wait for it."""
    native_module()


def parts_of(
    leaves: Sequence[Leaf], sessions: Mapping[str, RowSession], cache: KVCache
) -> tuple[list[Part], list[Row]] | None:
    """Lays leaves out, grouped by session; allocates the rows that they need.

    Returns:
        the part of each session and the row of each leaf, in order; None: nothing is done, since they are not the
        common case, or not all of them have room.
    """
    if (passes := native_module()) is None:
        return None
    try:
        parts: tuple[list[Part], list[Row]] | None = passes.parts_of([*leaves], sessions, cache)
    except ResourceExhaustedError:
        return None
    return parts


@functools.cache
def native_module() -> Any:
    """The compiled pass; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        passes = extension(SOURCE, "paceline_parts", "the pass over the leaves of a forward")
        passes.prepare(Part, Row, tree_step, _COLUMNS)
    except (EngineError, ImportError, TypeError) as error:
        log.warning("leaves are laid out by Python, which is slower: %s", error)
        return None
    return passes
