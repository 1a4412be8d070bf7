"""Native passes from the sequences of a step, as Python objects, to its buffer: ``columns.cpp``.

For steps as the engines make them: without trees, as a target's are, and of tree nodes that see rows of their own
beside those that all see, as a draft's are. ``StepPlan.of`` does the same in Python, for all others and where the
passes cannot be compiled, which takes a C++ compiler and Python's headers.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.core.native import extension
from paceline.errors import EngineError
from paceline.model import layout

_SOURCE = Path(__file__).with_suffix(".cpp")
Columns = tuple[int, int, int, int, int, int, bool, tuple[tuple[int, int], ...], bytes]
"""Tokens of a step; KV rows that it writes; logits; tokens of its shortest and of its longest sequence; KV rows of a
sequence that the page tables must cover; True if there is a tree; pages that are copied before it, (from, to) each; and
all else, packed for ``lay_out``, which comes before a tensor of the step is freed."""
log = logging.getLogger(__name__)


def prepare() -> None:
    """Compiles or loads the passes now, so that no step has to wait for them."""
    _passes()


def gather(steps: Sequence[object]) -> Columns | None:
    """The columns of ``SequenceStep`` objects; None: there are others among them or no passes here, and Python has to
    lay them out."""
    if not layout.usable() or (passes := _passes()) is None:
        return None
    columns: Columns | None = passes.gather(steps)
    return columns


def lay_out(packed: bytes, scratch_row: int, sizes: tuple[int, ...], to: Tensor) -> None:
    """Fills the buffer of a step, uint8, by what ``gather`` has packed; see ``layout.lay_out``."""
    _passes().lay_out(packed, sizes, scratch_row, to.data_ptr(), layout.address("paceline_lay_out"))


@functools.cache
def _passes() -> Any:
    """The compiled passes; None if they cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        return extension(_SOURCE, "paceline_columns", "the passes over sequences of a step")
    except (EngineError, ImportError) as error:
        log.warning("sequences are gathered by Python, which is slower: %s", error)
        return None
