"""How the Triton kernel's attention is cut into calls whose partial sums fit a bounded scratch. No torch, no triton.

A call keeps a float32 sum, a maximum and a total for each query row, KV head and split of the page table. A step whose
sums are larger than ``MAX_SCRATCH_BYTES`` is attended in several calls: for some of its rows, or for some queries of
one row. A query's sums are its own, so its bits are the same in any call.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SCRATCH_BYTES = 512 << 20
"""Most bytes of partial results of one call. One block of queries alone may need more."""
SPLIT = 2
"""Pages that one program attends to, in order. Few, so that a short context still occupies most of a device."""
BLOCK = 16
"""Query rows, times grouped heads, of one program: the smallest tile that matrix units take. A larger one reads a long
row's keys less often, but sums in another order: on an H100 bits differed with heads of 32 and 64 numbers."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Call:
    """The rows ``first_row .. stop_row`` of a page table, and of each the queries ``first_query .. stop_query``."""

    first_row: int
    stop_row: int
    first_query: int
    stop_query: int

    @property
    def num_queries(self) -> int:
        """Queries of each row, all rows together."""
        return (self.stop_row - self.first_row) * (self.stop_query - self.first_query)


def num_splits(num_pages: int) -> int:
    """Programs that share the pages of one row."""
    return -(-num_pages // SPLIT)


def query_bytes(num_pages: int, num_kv_heads: int, value_dim: int) -> int:
    """Bytes of the partial results of one query of a row, of all KV heads."""
    return num_splits(num_pages) * num_kv_heads * (value_dim + 2) * _FLOAT32_BYTES


def calls(num_rows: int, num_queries: int, bytes_per_query: int, limit: int = MAX_SCRATCH_BYTES) -> list[Call]:
    """The calls for a step of ``num_rows`` rows of ``num_queries`` queries each (positions times grouped heads)."""
    rows = max(1, min(num_rows, limit // max(1, num_queries * bytes_per_query)))
    queries = num_queries
    if rows == 1 and num_queries * bytes_per_query > limit:
        queries = max(BLOCK, limit // bytes_per_query // BLOCK * BLOCK)
    return [
        Call(row, min(row + rows, num_rows), query, min(query + queries, num_queries))
        for row in range(0, num_rows, rows)
        for query in range(0, num_queries, queries)
    ]


def scratch_bytes(num_rows: int, num_queries: int, bytes_per_query: int) -> int:
    """Bytes of the partial results that the largest call of such a step allocates."""
    return bytes_per_query * max(call.num_queries for call in calls(num_rows, num_queries, bytes_per_query))
