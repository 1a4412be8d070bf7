"""The memory that a step allocates in addition to weights and KV pages. Free of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from paceline.checkpoint.size import ModelSize
from paceline.model.attention.schedule import scratch_bytes, sum_bytes
from paceline.model.shapes import QUERY_ROW_LEN, padded_pages, padded_tokens
from paceline.types import PAGE_SIZE

Kernel = Literal["native", "sdpa", "triton"]
_FLOAT32_BYTES = 4


def workspace_bytes(
    size: ModelSize,
    max_tokens: int,
    max_sessions: int,
    max_pages: int,
    *,
    num_logits: int,
    num_copies: int,
    attention: Kernel,
    has_trees: bool,
) -> int:
    """Bytes that the largest step allocates in addition to the KV pages.

    With T tokens, S sessions (one with the longest context, P pages), R = min(T, ``num_logits``) rows of logits, and b
    bytes per number::

        activations  T * b * (6 * hidden + 3 * intermediate)     residual, norms, q, k, v, attention; gate, up, product
        attention    (T / 16 + S) * P * (a page's bytes in a layer)    sdpa: gathered keys and values of every query row
                                                                       (of FP8 also in the model's dtype)
                     partial sums                                      triton: its scratch (``schedule.py``)
                     (T / 16 + S) * P * 1024 * b                       triton: masks, if steps have trees
        logits       R * vocab * (b + 4 * num_copies)            the model's, and ``num_copies`` in float32

    The last two never coexist: the larger one counts. Where the heads are not known, partial sums are taken to
    be as wide as two residual states together.
    Sampling on GPUs needs more: there the noise of all rows is drawn in one call.
    """
    tokens, sessions = padded_tokens(max_tokens), min(max_sessions, max_tokens)
    activations = tokens * size.item_bytes * (6 * size.hidden_size + 3 * size.intermediate_size)
    query_rows = -(-tokens // QUERY_ROW_LEN) + sessions
    pages = padded_pages(max_pages)
    attended = 0
    if attention == "sdpa":
        page_bytes = size.page_bytes + (replace(size, is_kv_fp8=False).page_bytes if size.is_kv_fp8 else 0)
        attended = query_rows * pages * page_bytes // size.num_kv_layers
    elif attention == "triton":
        known = size.num_heads and size.value_dim
        per_sum = sum_bytes(size.num_heads, size.value_dim) if known else 2 * size.hidden_size * _FLOAT32_BYTES
        attended = scratch_bytes(tokens, pages, per_sum)
        attended += query_rows * QUERY_ROW_LEN * pages * PAGE_SIZE * size.item_bytes if has_trees else 0
    rows = padded_tokens(min(max_tokens, num_logits))
    logits = rows * size.vocab_size * (size.item_bytes + num_copies * _FLOAT32_BYTES)
    return activations + max(attended, logits)
