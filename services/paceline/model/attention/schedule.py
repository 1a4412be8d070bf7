"""The attention of one step over KV pages: the keys that each token sees, and calls whose partial sums fit a scratch.

A *place* is one token in a query row. A *split* is ``SPLIT`` pages at a fixed position of a context. Each place has a
partial sum for each head and each split that its row sees. The kernel takes a list of work with one piece for each row
and split, not a grid over rows and page tables. So a step's cost and a recording's sizes depend on the number of
tokens, not on the longest context or on the tokens of each session.

Partial sums take at most ``MAX_SCRATCH_BYTES``. A step that needs more is cut into several calls: for some of its rows,
or for some places of one row. A place shares no sums with others, so its bits are the same in any call.

Prompt chunks consist of full rows. Where there are many, the kernel *walks* them: one program takes all splits of a
row, and there are no partial sums. Imports no triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from paceline.model.shapes import QUERY_ROW_LEN
from paceline.types import PAGE_SIZE

if TYPE_CHECKING:  # importing it takes a second, and estimates of memory do without
    from torch import Tensor

MOST_KEY_DIM, MOST_VALUE_DIM = 576, 512
"""Largest head sizes of keys and values that the kernel takes: those of DeepSeek's latents."""
MAX_SCRATCH_BYTES = 256 << 20
"""Most bytes of partial results of one call. One place alone may need more."""
RECORDED_SCRATCH_BYTES = 512 << 20
"""Most bytes of partial results of a recorded step, which is one call."""
SPLIT = 2
"""Pages that one program attends to, in order. A small number: a short context must occupy most of a device."""
BLOCK = 16
"""Rows of one tile, places times query heads of a KV head: the smallest tile that matrix units take."""
LEAST_WALKS = 128
"""Fewest programs that walk rows: about one for each multiprocessor. Fewer would leave most of a device idle."""
_FLOAT32_BYTES = 4
_SPLIT_KEYS = SPLIT * PAGE_SIZE


class Call(NamedTuple):
    """Rows ``first_row .. stop_row`` of a step, and of each the places ``first_place .. stop_place``."""

    first_row: int
    stop_row: int
    first_place: int
    stop_place: int
    num_sums: int
    """Pairs of a place and a split: the most that the call computes."""


def num_splits(num_pages: int) -> int:
    """Splits of a context of ``num_pages`` pages."""
    return -(-num_pages // SPLIT)


def sum_bytes(num_heads: int, value_dim: int) -> int:
    """Bytes of the partial results of one place for one split, of all ``num_heads`` query heads."""
    return num_heads * (value_dim + 2) * _FLOAT32_BYTES


def walks(num_full: int, programs: int) -> bool:
    """True if ``num_full`` full rows are walked, by ``programs`` programs each."""
    return num_full * programs >= LEAST_WALKS


def most_sums(bytes_per_sum: int, limit: int = MAX_SCRATCH_BYTES) -> int:
    """Returns the most partial sums of one call, at least one. ``limit``: bytes of its scratch."""
    return max(1, limit // bytes_per_sum)


def scratch_bytes(num_places: int, num_pages: int, bytes_per_sum: int, limit: int = RECORDED_SCRATCH_BYTES) -> int:
    """Returns the bytes of the largest call of a step of ``num_places`` tokens that each see up to ``num_pages`` pages.

    Assumes that no row is walked. ``limit``: ``MAX_SCRATCH_BYTES`` for steps that are not recorded.
    """
    splits = num_splits(num_pages)
    return min(num_places * splits, max(most_sums(bytes_per_sum, limit), splits)) * bytes_per_sum


def calls(places: Sequence[int], splits: Sequence[int], most: int) -> list[Call]:
    """Cuts a step into calls of at most ``most`` partial sums.

    Args:
        places: number of tokens of each row.
        splits: number of splits that each row sees.
        most: partial sums of one call.
    """
    found: list[Call] = []
    first = total = 0
    longest = max(places)
    for row, (count, seen) in enumerate(zip(places, splits, strict=True)):
        if total + count * seen > most:
            if row > first:
                found.append(Call(first, row, 0, longest, total))
            first, total = row, 0
            step = max(1, most // max(1, seen))
            if count > step:
                found += [
                    Call(row, row + 1, place, min(place + step, count), min(step, count - place) * seen)
                    for place in range(0, count, step)
                ]
                first = row + 1
                continue
        total += count * seen
    if first < len(places):
        found.append(Call(first, len(places), 0, longest, total))
    return found


@dataclass(slots=True)
class Seen:
    """The keys that the queries of one step see, on its device.

    A place sees the keys ``first .. stop`` of its row that ``mask`` does not hide.
    """

    first: Tensor
    """int32 [B, n]: the first key that each place sees."""
    stop: Tensor
    """int32 [B, n]: the key after the last one."""
    places: Tensor
    """int32 [B]: tokens of each row; 0 for a row of padding."""
    mask: Tensor | None = None
    """[B, 1, n, pages * PAGE_SIZE], added to the scores; None: nothing else is hidden."""
    sizes: tuple[list[int], list[int]] | None = None
    """Places and splits of each row, if the host knows them; None while a step is recorded."""
    capacity: int = 0
    """While a step is recorded: the most partial sums that its tokens can need; afterwards the number that its
    scratch has room for."""
    by_library: Callable[[Tensor, Tensor, Tensor, float, Tensor], None] | None = None
    """Overwrites the results of tokens that a library attends to (``flashinfer.Library.attend``); None: there are none.
    Rows of such tokens alone have no places here."""
    programs: int = 1 << 30
    """While a step is recorded: the fewest programs that walk a row in any of its layers; 0: some walk none."""
    _made: dict[tuple[int, int, int], tuple[list[tuple[Call, Tensor]], Tensor | None]] = field(default_factory=dict)

    def work(
        self, bytes_per_sum: int, num_tokens: int, programs: int
    ) -> tuple[list[tuple[Call, Tensor]], Tensor | None]:
        """The work of the step's attention. Layers of one size share it.

        Args:
            bytes_per_sum: ``sum_bytes`` of the layer.
            num_tokens: of the step.
            programs: programs that walk one row; 0: none is walked.

        Returns:
            Calls with partial sums and the ``work`` of each; and int32 [B], the running number of walked rows, or None
            if there are none.
        """
        key = bytes_per_sum, num_tokens, programs
        if key not in self._made:
            walked = self._walked(num_tokens, programs)
            if self.sizes is None:
                self.capacity = min(self.capacity, most_sums(bytes_per_sum, RECORDED_SCRATCH_BYTES))
                self.programs = min(self.programs, 0 if walked is None else programs)
                num_rows, row_len = self.first.shape
                todo = [Call(0, num_rows, 0, row_len, self.capacity)]
            else:
                places, splits = self.sizes
                if walked is not None:
                    places = [0 if count == self.first.shape[1] else count for count in places]
                todo = [call for call in calls(places, splits, most_sums(bytes_per_sum)) if call.num_sums]
            ends = None if walked is None else walked.cumsum(0).int()
            self._made[key] = [(call, self._work(call, walked)) for call in todo], ends
        return self._made[key]

    def _walked(self, num_tokens: int, programs: int) -> Tensor | None:
        """bool [B]: the rows that are walked: all full ones, or none; None: the host knows that none are."""
        row_len = self.first.shape[1]
        if row_len < QUERY_ROW_LEN or not walks(num_tokens // row_len, programs):
            return None
        if self.sizes is not None and not walks(self.sizes[0].count(row_len), programs):
            return None
        full = self.places == row_len
        return full & (full.sum() * programs >= LEAST_WALKS)

    def _work(self, call: Call, walked: Tensor | None = None) -> Tensor:
        """int32 [4, rows]: first split and number of places of each row; splits, and partial sums, up to its end."""
        import torch

        rows = slice(call.first_row, call.stop_row)
        places = self.places[rows].clamp(max=call.stop_place).sub_(call.first_place).clamp_(min=0)
        if walked is not None:
            places.masked_fill_(walked[rows], 0)
        first = self.first[rows].amin(1) // _SPLIT_KEYS
        splits = ((self.stop[rows].amax(1) + _SPLIT_KEYS - 1) // _SPLIT_KEYS - first) * places.clamp(max=1)
        ends = [splits.cumsum(0), (splits * places).cumsum(0)]
        return torch.stack([first, places, *ends]).to(torch.int32)
