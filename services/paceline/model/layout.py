"""Native functions over the integers and pages of a step (``layout.cpp``): one call replaces a hundred small ones.

Each has a reference implementation, which gives the same bits and runs where there is no compiler: ``lay_out`` in
``step_plan.py``, ``pack`` in ``compiled/buckets.py``, ``masks`` as ``step_plan.attention_masks``, ``copy_pages`` and
``clear_pages`` as operators in ``kv_cache.py``. The native functions take some microseconds and keep the interpreter
lock, since another thread would not return it so soon.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.native import compiled, machine
from paceline.errors import EngineError
from paceline.model.attention.chunks import code_of

_SOURCE = Path(__file__).with_suffix(".cpp")
HEADER = _SOURCE.with_suffix(".h")
"""The buffer of a step, for other libraries that read it."""
_OPTIONS = ("-march=native",)
_MASKS = (torch.bfloat16, torch.float32)
_ARGUMENTS = {
    "paceline_lay_out": "iaaaaaiapapiap",
    "paceline_pack": "apapi",
    "paceline_masks": "apiipp",
    "paceline_copy_pages": "iaaia",
    "paceline_clear_pages": "iaaia",
}
"""Arguments of each function: integers, arrays and pointers."""
Sizes = Sequence[int]
"""Sizes of a step (``StepShape``): tokens, writes, rows of logits, rows, row length, pages, and 1 if it has trees."""
log = logging.getLogger(__name__)


def usable() -> bool:
    """True if this machine has the native functions; compiles them if needed. Logs once why not."""
    return _library() is not None


def address(name: str) -> int:
    """Address of a function of the library, for other native passes that call it. ``usable()`` comes first."""
    library = _library()
    assert library is not None, "usable() comes first"
    return _address(library, name)


def masks_usable(dtype: torch.dtype) -> bool:
    """True if ``masks`` makes masks of this dtype here."""
    return dtype in _MASKS and usable()


def lay_out(
    counts: array[int],
    columns: Sequence[array[int]],
    also: array[int],
    trees: tuple[Sequence[Tensor | None], array[int], Sequence[Tensor | None]],
    scratch_row: int,
    sizes: Sizes,
    to: Tensor,
) -> None:
    """Fills the buffer of a step.

    Args:
        counts: for each sequence: its tokens, pages and logits; the keys that its tree sees, or 0; the number of its
            tokens that also see rows of their own.
        columns: token ids, rows, positions and pages, each of all sequences in order.
        also: token of the step and KV row of each further write.
        trees: three values. For each sequence bool [tokens, keys], or [keys] if its tokens see rows of their own, or
            None. Then, token by token, the number of these rows and the rows. Then for each sequence int64 [keys], or
            None.
        scratch_row: first KV row of the page that padding is written to.
        sizes: of the buffer.
        to: the buffer, uint8.
    """
    visible, own_rows, key_positions = trees
    held = [None if x is None else x.contiguous() for x in (*visible, *key_positions)]
    at = array("q", [0 if x is None else x.data_ptr() for x in held])
    first = at.buffer_info()[0]
    _call(
        "paceline_lay_out",
        len(visible),
        counts,
        *columns,
        len(also) // 2,
        also,
        first,
        own_rows,
        first + len(visible) * at.itemsize,
        scratch_row,
        array("q", sizes),
        to.data_ptr(),
    )


def pack(own: Sizes, plan: Tensor, sizes: Sizes, to: Tensor, scratch_row: int) -> None:
    """Copies the buffer of a plan of the sizes ``own`` into ``to``, a buffer of ``sizes``, which cover them."""
    _call("paceline_pack", array("q", own), plan.data_ptr(), array("q", sizes), to.data_ptr(), scratch_row)


def masks(sizes: Sizes, plan: Tensor, dtype: torch.dtype, window: int | None) -> list[Tensor]:
    """``step_plan.attention_masks`` of a plan's buffer in the host's memory."""
    rows, row_len, keys = sizes[3], sizes[4], sizes[5] * 64
    made = [torch.empty(rows, 1, row_len, keys, dtype=dtype) for _ in range(1 if window is None else 2)]
    near = None if window is None else made[1].data_ptr()
    given = array("q", sizes)
    _call("paceline_masks", given, plan.data_ptr(), code_of(window), dtype.itemsize, made[0].data_ptr(), near)
    return made


def copy_pages(pools: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies pages, (from, to) each, in every pool: a contiguous tensor [pages, ..] in the host's memory."""
    _call("paceline_copy_pages", *_pages_of(pools), len(pairs), array("q", [page for pair in pairs for page in pair]))


def clear_pages(pools: Sequence[Tensor], pages: Sequence[int]) -> None:
    """Zeroes pages in every pool: a contiguous tensor [pages, ..] in the host's memory."""
    _call("paceline_clear_pages", *_pages_of(pools), len(pages), array("q", pages))


def _pages_of(pools: Sequence[Tensor]) -> tuple[int, array[int], array[int]]:
    """How many pools there are, their addresses, and the bytes of a page of each."""
    bytes_of = [pool.nbytes // len(pool) for pool in pools]  # none, where a layer keeps keys alone
    return len(pools), array("q", [pool.data_ptr() for pool in pools]), array("q", bytes_of)


def _call(name: str, *arguments: object) -> None:
    library = _library()
    assert library is not None, "usable() comes first"
    getattr(library, name)(*[x.buffer_info()[0] if isinstance(x, array) else x for x in arguments])


@functools.cache
def _address(library: ctypes.PyDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """The compiled library; None if it cannot be compiled or loaded here, for a reason that is logged once."""
    try:
        options = (*_OPTIONS, f"-I{HEADER.parent}")
        library = ctypes.PyDLL(str(compiled(_SOURCE, _digest(), options, "the layout of steps")))
    except (EngineError, OSError) as error:
        log.warning("steps are laid out by numpy, which is slower: %s", error)
        return None
    for name, kinds in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_int64 if kind == "i" else ctypes.c_void_p for kind in kinds]
        function.restype = None
    return library


def _digest() -> str:
    """Digest of the sources, their options and the machine's instruction set, for which they are compiled."""
    facts = f"{machine()} {_OPTIONS}"
    sources = _SOURCE.read_bytes() + HEADER.read_bytes()
    return hashlib.blake2b(sources + facts.encode(), digest_size=8).hexdigest()
