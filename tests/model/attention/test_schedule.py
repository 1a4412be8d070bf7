"""The work of a step of attention in place: each place once, within the scratch, and what a step allocates."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.model.attention.schedule import (
    MAX_SCRATCH_BYTES,
    SPLIT,
    Seen,
    calls,
    most_sums,
    num_splits,
    scratch_bytes,
    sum_bytes,
)
from paceline.model.step_plan import sizes_of
from paceline.types import PAGE_SIZE

HEADS, KV_HEADS, DIM = 32, 8, 128
ROWS = st.lists(st.tuples(st.integers(0, 16), st.integers(1, 40)), min_size=1, max_size=40).filter(
    lambda rows: any(places for places, _ in rows)
)


@given(ROWS, st.integers(1, 2000))
def test_calls_cover_each_place_once_within_the_scratch(rows: list[tuple[int, int]], most: int) -> None:
    """Mutant: the places of a row that is cut begin at 0 in each call."""
    places, splits = zip(*rows, strict=True)
    seen = torch.zeros(len(rows), 16, dtype=torch.int64)
    for call in calls(places, splits, most):
        own = slice(call.first_row, call.stop_row)
        seen[own, call.first_place : call.stop_place] += 1
        counts = [max(0, min(n, call.stop_place) - call.first_place) for n in places[own]]
        needed = sum(n * s for n, s in zip(counts, splits[own], strict=True))
        assert needed <= call.num_sums <= max(most, max(splits[own]))
    assert all(bool((seen[row, :n] == 1).all()) for row, n in enumerate(places))


@given(ROWS, st.integers(1, 300), st.booleans())
def test_the_work_of_a_call_is_that_of_its_places(rows: list[tuple[int, int]], most: int, windowed: bool) -> None:
    """First splits, places and running ends, against a loop. Rows of padding have no work."""
    places, splits = (list(column) for column in zip(*rows, strict=True))
    stop = torch.tensor(splits)[:, None].expand(-1, 16) * SPLIT * PAGE_SIZE
    first = (stop - SPLIT * PAGE_SIZE * 3).clamp(min=0) if windowed else torch.zeros_like(stop)
    seen = Seen(first.int(), stop.int(), torch.tensor(places), sizes=(places, splits))
    seen_by_call = calls(places, splits, most_sums(1, most))
    found = [(call, seen._work(call)) for call in seen_by_call]
    for call, work in found:
        ends = sums = 0
        for at, row in enumerate(range(call.first_row, call.stop_row)):
            count = max(0, min(places[row], call.stop_place) - call.first_place)
            begins = max(0, splits[row] - 3) if windowed else 0
            ends += (splits[row] - begins) * bool(count)
            sums += (splits[row] - begins) * count
            assert work[:, at].tolist() == [begins, count, ends, sums]


def test_sizes_of_rows_ignore_padding() -> None:
    """Places repeat in padding, and tokens of padding lie at place 0."""
    query_rows = np.array([[200, 201, 201, 201], [5, 5, 5, 5], [200, 201, 201, 201]])
    places, splits = sizes_of(query_rows, np.array([0, 1, 4, 0, 0]))
    assert (places.tolist(), splits.tolist()) == ([2, 1, 0], [2, 1, 2])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``triton.py`` with kernels that only count their calls, as on a machine without triton."""

    class Stub:
        def __init__(self, *_: object, **__: object) -> None:
            self.num_calls = 0

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            assert all(grid)
            return self.count

        def count(self, *_: object, **__: object) -> None:
            self.num_calls += 1

    def jit(*_: object, **__: object) -> Any:
        return Stub

    language = ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    triton = ModuleType("triton")
    triton.__dict__.update(jit=jit, language=language, next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "paceline.model.attention.triton", raising=False)
    yield importlib.import_module("paceline.model.attention.triton")
    sys.modules.pop("paceline.model.attention.triton", None)


@pytest.mark.parametrize(
    ("rows", "row_len", "context"),
    [
        (16, 16, 8 << 10),
        (16, 16, 128 << 10),
        (128, 16, 128 << 10),
        (128, 16, 32 << 10),
        (64, 4, 2 << 10),
        (64, 4, 32 << 10),
        (256, 4, 128 << 10),
        (1, 16, 1 << 20),
        (1, 16, 8 << 20),
    ],
)
def test_what_a_step_allocates_is_bounded(kernel: Any, rows: int, row_len: int, context: int) -> None:
    """A Llama 8B's heads; beside the result and its copies of nothing. Estimates of memory count no less."""
    scratch, num_calls = scratch_of(kernel, [row_len] * rows, row_len, context)
    pages, tokens = context // PAGE_SIZE, rows * row_len
    counted = scratch_bytes(tokens, pages, sum_bytes(HEADS, DIM), MAX_SCRATCH_BYTES)
    assert scratch <= counted <= max(MAX_SCRATCH_BYTES, num_splits(pages) * sum_bytes(HEADS, DIM))
    assert scratch == counted or scratch > MAX_SCRATCH_BYTES // 2
    assert kernel.partial_results.num_calls == kernel.combine_results.num_calls == num_calls >= 1


@pytest.mark.parametrize("others", [0, 64])
@pytest.mark.parametrize("tokens", [100, 256, 500, 2048, 8192])
def test_a_prompt_of_any_chunk_takes_little_scratch(kernel: Any, tokens: int, others: int, monkeypatch: Any) -> None:
    """At 128k, alone or beside ``others`` that decode. Full rows take none: the rest of a long chunk is one call.

    Mutant: the places of walked rows count.
    """
    monkeypatch.setattr(kernel, "walked_block", lambda *_: 64)
    row_lens = [16] * (tokens // 16) + [tokens % 16] * (tokens % 16 > 0) + [1] * others
    scratch, num_calls = scratch_of(kernel, row_lens, 16, 128 << 10)
    assert scratch <= 256 << 20
    assert kernel.walk_pages.num_calls == (tokens >= 256)
    if tokens >= 256:
        rest = tokens % 16 + others
        assert num_calls == -(-rest * num_splits(2048) * sum_bytes(HEADS, DIM) // (256 << 20))
        assert rest or not scratch


def test_what_a_tile_of_a_prompt_reads(kernel: Any) -> None:
    """Products for each byte of keys and values: four times those of tiles of 16 queries, if four heads share keys."""
    for dtype, groups, dim, found in (
        (torch.bfloat16, 4, 128, 64),
        (torch.bfloat16, 8, 128, 64),
        (torch.bfloat16, 2, 256, 32),
        (torch.float32, 4, 128, 8),
    ):
        block = kernel.walked_blocks(dtype, groups, dim)[0]
        products, read = 2 * 2 * block * dim, 2 * dim * dtype.itemsize  # of one key and its value
        assert products / read == found


def scratch_of(kernel: Any, row_lens: list[int], row_len: int, context: int) -> tuple[int, int]:
    """Bytes that the attention of a step allocates beside its result, and its calls."""
    made: list[int] = []

    def spied(made_by: Any) -> Any:
        def make(*sizes: object, **options: object) -> torch.Tensor:
            made.append((tensor := made_by(*sizes, **options)).nbytes)
            return tensor

        return make

    with FakeTensorMode():
        rows, pages, tokens = len(row_lens), context // PAGE_SIZE, sum(row_lens)
        query = torch.empty(1, HEADS, tokens, DIM, dtype=torch.bfloat16)
        pool = torch.empty(64, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.bfloat16)
        table, gather = torch.zeros(rows, pages, dtype=torch.int64), torch.zeros(rows, row_len, dtype=torch.int64)
        sizes = row_lens, [num_splits(pages)] * rows
        bounds = torch.zeros(rows, row_len, dtype=torch.int32)
        seen = Seen(bounds, bounds, torch.zeros(rows, dtype=torch.int64), sizes=sizes)
        kernel.torch = SimpleNamespace(empty_like=spied(torch.empty_like), float32=torch.float32)
        query_like = _Spied(query, spied)
        kernel.attend_in_place(query_like, pool, pool, table, gather, gather.flatten()[:tokens], seen, None, 1.0, None)
    return sum(made) - tokens * HEADS * DIM * 2, kernel.partial_results.num_calls


class _Spied:
    """A tensor whose ``new_empty`` is counted."""

    def __init__(self, tensor: torch.Tensor, spied: Any) -> None:
        self._tensor = tensor
        self.new_empty, self.new_zeros = spied(tensor.new_empty), spied(tensor.new_zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)
