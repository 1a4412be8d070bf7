"""Native functions that write the sequences of a step, as Python objects, to the step's buffer (``columns.cpp``).

They serve the two kinds of steps that engines make. A target's steps have no trees. A draft's steps have tree nodes,
each of which sees rows of its own in addition to rows that all see. ``StepPlan.of`` does the same in Python for all
other steps, and where there is no C++ compiler or Python's headers are missing.
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
"""What ``gather`` finds in a step:

- number of tokens;
- KV rows that it writes;
- rows of logits;
- tokens of its shortest and of its longest sequence;
- KV rows of a sequence that the page tables must cover;
- True if there is a tree;
- pages that are copied before the step, (from, to) each;
- the rest, packed for ``lay_out``. Call ``lay_out`` before a tensor of the step is freed.
"""
log = logging.getLogger(__name__)


def prepare() -> None:
    """Compiles or loads the native functions now, so that no step has to wait for them."""
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
