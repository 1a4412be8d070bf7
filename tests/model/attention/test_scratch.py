"""The calls of an attention step cover each query once, and allocate what is estimated."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.model.attention.scratch import BLOCK, MAX_SCRATCH_BYTES, calls, query_bytes, scratch_bytes
from paceline.types import PAGE_SIZE

HEADS, KV_HEADS, DIM = 32, 8, 128


@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 1 << 16), st.integers(1, 1 << 22))
def test_calls_cover_each_query_once(num_rows: int, num_queries: int, per_query: int, limit: int) -> None:
    seen = torch.zeros(num_rows, num_queries, dtype=torch.int64)
    for call in calls(num_rows, num_queries, per_query, limit):
        seen[call.first_row : call.stop_row, call.first_query : call.stop_query] += 1
        assert call.num_queries * per_query <= max(limit, BLOCK * per_query)
    assert bool((seen == 1).all())


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
    language.constexpr = object  # type: ignore[attr-defined]
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
        (1, 256, 8 << 10),
        (1, 256, 128 << 10),
        (1, 2048, 128 << 10),
        (128, 16, 32 << 10),
        (64, 4, 2 << 10),
        (64, 4, 32 << 10),
        (256, 4, 128 << 10),
        (64, 16, 128 << 10),
    ],
)
def test_what_a_step_allocates_is_estimated_and_bounded(kernel: Any, rows: int, row_len: int, context: int) -> None:
    """A Llama 8B's heads; beside the result and its copies of nothing."""
    made: list[int] = []

    def spied(made_by: Any) -> Any:
        def make(*sizes: object, **options: object) -> torch.Tensor:
            made.append((tensor := made_by(*sizes, **options)).nbytes)
            return tensor

        return make

    with FakeTensorMode():
        pages, tokens = context // PAGE_SIZE, rows * row_len
        query = torch.empty(1, HEADS, tokens, DIM, dtype=torch.bfloat16)
        pool = torch.empty(64, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.bfloat16)
        mask = torch.empty(rows, 1, row_len, pages * PAGE_SIZE, dtype=torch.bfloat16)
        table, gather = torch.zeros(rows, pages, dtype=torch.int64), torch.zeros(rows, row_len, dtype=torch.int64)
        fake = SimpleNamespace(empty_like=spied(torch.empty_like), float32=torch.float32)
        kernel.torch = fake
        query_like = _Spied(query, spied)
        kernel.attend_in_place(query_like, pool, pool, table, gather, gather.flatten(), mask, None, 1.0, None)
    estimate = scratch_bytes(rows, HEADS // KV_HEADS * row_len, query_bytes(pages, KV_HEADS, DIM))
    assert sum(made) == estimate + tokens * HEADS * DIM * 2
    assert estimate <= MAX_SCRATCH_BYTES
    assert kernel._partial.num_calls == kernel._combined.num_calls >= 1


class _Spied:
    """A tensor whose ``new_empty`` is counted."""

    def __init__(self, tensor: torch.Tensor, spied: Any) -> None:
        self._tensor = tensor
        self.new_empty = spied(tensor.new_empty)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)
