"""Native functions over the integers and pages of a step (``layout.cpp``): one call replaces a hundred small ones.

Each has a reference implementation, which gives the same bits and runs where there is no C++ compiler or no header of
Python: ``gather`` and ``lay_out`` in ``step_plan.py``, ``pack`` in ``compiled/buckets.py``, ``masks`` as
``step_plan.attention_masks``, ``copy_pages`` and ``clear_pages`` as operators in ``kv_cache.py``. The native functions
take some microseconds and keep the interpreter lock, since another thread would not return it so soon.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.native import extension
from paceline.errors import EngineError
from paceline.model.attention.chunks import code_of

SOURCE = Path(__file__).with_suffix(".cpp")
HEADER = SOURCE.with_suffix(".h")
"""The buffer of a step, for other libraries that read it."""
_COLUMNS = attrgetter(
    "token_ids",
    "positions",
    "rows",
    "pages",
    "num_logits",
    "visible",
    "key_positions",
    "own_rows",
    "also",
    "copies",
)
"""Columns of a ``SequenceStep``, in the order of ``layout.cpp``."""
_MASKS = (torch.bfloat16, torch.float32)
Sizes = Sequence[int]
"""Sizes of a step (``StepShape``): tokens, writes, rows of logits, rows, row length, pages, and 1 if it has trees."""
Gathered = tuple[int, int, int, int, int, int, bool, tuple[tuple[int, int], ...], object]
"""Results of ``gather`` for a step:

- number of tokens;
- KV rows that it writes;
- rows of logits;
- tokens of its shortest and of its longest sequence;
- KV rows of a sequence that the page tables must cover;
- True if there is a tree;
- pages that are copied before the step, (from, to) each;
- the rest, for ``lay_out``. Call ``lay_out`` before a tensor of the step is freed.
"""
log = logging.getLogger(__name__)


def usable() -> bool:
    """True if this machine has the native functions; compiles them if needed. Logs once why not."""
    return native_module() is not None


def masks_usable(dtype: torch.dtype) -> bool:
    """True if ``masks`` makes masks of this dtype here."""
    return dtype in _MASKS and usable()


def gather(steps: Sequence[object]) -> Gathered | None:
    """The columns of ``SequenceStep`` objects; None: Python lays them out, or says what is wrong with them, since there
    are no native functions here or others among the objects."""
    if (passes := native_module()) is None:
        return None
    gathered: Gathered | None = passes.gather([*map(_COLUMNS, steps)])
    return gathered


def lay_out(columns: object, scratch_row: int, sizes: Sizes, to: Tensor) -> None:
    """Fills the buffer of a step, uint8, of the given sizes.

    Args:
        columns: of ``gather``.
        scratch_row: first KV row of the page that padding is written to.
        sizes: of the buffer.
        to: the buffer.

    Raises:
        ValueError: the step or the sizes do not fit.
    """
    native_module().lay_out(columns, scratch_row, tuple(sizes), *_memory(to))


def pack(own: Sizes, plan: Tensor, sizes: Sizes, to: Tensor, scratch_row: int) -> None:
    """Copies the buffer of a plan of the sizes ``own`` into ``to``, a buffer of ``sizes``, which cover them.

    Raises:
        ValueError: they do not, or a buffer is too small.
    """
    native_module().pack(tuple(own), *_memory(plan), tuple(sizes), *_memory(to), scratch_row)


def masks(sizes: Sizes, plan: Tensor, dtype: torch.dtype, window: int | None) -> list[Tensor] | None:
    """``step_plan.attention_masks`` of a plan's buffer in the host's memory; None: no function here makes them.

    Raises:
        ValueError: the buffer is not of these sizes.
    """
    if dtype not in _MASKS or (passes := native_module()) is None:
        return None
    at, num_bytes = _memory(plan)
    passes.check(tuple(sizes), num_bytes)
    rows, row_len, keys = sizes[3], sizes[4], sizes[5] * 64
    made = [torch.empty(rows, 1, row_len, keys, dtype=dtype) for _ in range(1 if window is None else 2)]
    near = 0 if window is None else made[1].data_ptr()
    passes.masks(tuple(sizes), at, code_of(window), dtype.itemsize, made[0].data_ptr(), near)
    return made


def copy_pages(pools: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies pages, (from, to) each, in every pool: a contiguous tensor [pages, ..] in the host's memory.

    Raises:
        ValueError: a pool has no such page.
    """
    _of_pages(
        "copy_pages", pools, array("q", [page for source, target in pairs for page in (source, target)]), len(pairs)
    )


def clear_pages(pools: Sequence[Tensor], pages: Sequence[int]) -> None:
    """Zeroes pages in every pool: a contiguous tensor [pages, ..] in the host's memory.

    Raises:
        ValueError: a pool has no such page.
    """
    _of_pages("clear_pages", pools, array("q", pages), len(pages))


def _of_pages(name: str, pools: Sequence[Tensor], pages: array[int], count: int) -> None:
    memory = [_memory(pool) for pool in pools]
    sizes = array("q", [pool.shape[0] for pool in pools])
    addresses = array("q", [at for at, _ in memory])
    bytes_of = array("q", [nbytes // max(1, size) for (_, nbytes), size in zip(memory, sizes, strict=True)])
    columns = [column.buffer_info()[0] for column in (addresses, bytes_of, sizes)]
    getattr(native_module(), name)(len(pools), *columns, count, pages.buffer_info()[0])


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The address and the bytes of a tensor that native functions read or write whole."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        raise ValueError(
            f"a tensor is on {tensor.device} with strides {tensor.stride()}: contiguous host memory is allowed"
        )
    return tensor.data_ptr(), tensor.nbytes


@functools.cache
def native_module() -> Any:
    """The compiled module; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        return extension(SOURCE, "paceline_layout", "the layout of steps", (HEADER,), ("-march=native",))
    except (EngineError, ImportError) as error:
        log.warning("steps are laid out by numpy, which is slower: %s", error)
        return None
