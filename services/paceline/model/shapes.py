"""Step shapes under which a token's logits do not depend on what else is in the batch.

Speculation is lossless in bf16 only if verifying K+1 tokens gives the same bits as decoding them one by one. On
CPU (torch 2.13, oneDNN and MKL, AVX512, without AMX: ``libraries.py``) this was measured to hold, over thousands of
rows, when

1. a step has at least ``MIN_TOKENS`` tokens and rows of logits: unpacked fp32 matrix products fall into the classes
   {1}, {2, 3}, {4..};
2. query rows come in multiples of ``QUERY_MULTIPLE``: the attention kernel works on blocks of 32 query rows and
   treats a remainder of 1 to 3 differently;
3. the key length of every step is one of ``KEY_PAGES`` pages (modulo 8): within each 512-key block the kernel
   splits the sum over 256 or 320 keys in halves, all other multiples of 64 at the same 192 keys.

The first is for libraries' products, the others for torch's attention. If a compiled model computes all of them
natively (``compiled/linear.py``, ``attention/native.py``), each sum has one order and a step is not padded. A draft's
steps are not padded either, because no promise depends on their bits. ``Shapes`` says which rules a model's steps keep.

Masked keys add exact zeros, so padding is free of error. Two more rules depend on the model: ``experts.py`` holds the
first for every expert, and ``tails.py`` finds the padding that elementwise kernels need. ``selftest.py`` compares the
bits at start-up, of the shapes that are used.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

from paceline.types import PAGE_SIZE

MIN_TOKENS = 4
QUERY_MULTIPLE = 4
_BLOCK_PAGES = 512 // PAGE_SIZE
KEY_PAGES = {1: 1, 2: 2, 3: 3, 4: 6, 5: 6, 6: 6, 7: 7, 0: 0}
"""Pages within the last 512-key block -> pages to attend over."""

_MAX_SCORED_LOGITS, _LEAST_SCORED_ROWS = 2**24, 16
"""64 MiB in float32: the logits of a long prompt are computed step by step, as its keys and values are."""

QUERY_ROW_LEN = 16
"""Prefill chunks are cut into query rows of this length when they share a step with short rows, and for attention in
place always."""
UNBOUNDED = 1 << 30
"""``Shapes.longest_row`` where rows are not cut."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The rules that the sizes of a model's steps keep; by default all of them, which any kernels may need."""

    least_tokens: int = MIN_TOKENS
    """Tokens, and rows of logits, of every step."""
    query_multiple: int = QUERY_MULTIPLE
    """Query rows come in multiples of it."""
    key_pages: bool = True
    """True: key lengths come from ``KEY_PAGES``. False: a step has exactly the pages that it needs."""
    few_sizes: bool = True
    """Numbers of tokens are rounded up to few different ones (``padded_tokens``)."""
    spare_tokens: int = 0
    """Padding after the last token (``tails.py``)."""
    longest_row: int = UNBOUNDED
    """Tokens of a query row at most; further ones take rows of their own."""

    @classmethod
    def needed(cls, *, native: bool, promised: bool, spare_tokens: int, longest_row: int = UNBOUNDED) -> Self:
        """The shapes that a model needs.

        Args:
            native: all of its products and its attention are native ones, as ``compiled/package.py`` finds.
            promised: verification must have the bits of decoding, as in a target.
            spare_tokens: padding that its elementwise kernels need for that.
            longest_row: tokens of a query row at most (``Backend.longest_row``).
        """
        if native or not promised:
            spare_tokens = spare_tokens if promised else 0
            return cls(1, 1, False, few_sizes=not native, spare_tokens=spare_tokens, longest_row=longest_row)
        return cls(spare_tokens=spare_tokens, longest_row=longest_row)

    def tokens(self, num_tokens: int) -> int:
        """Tokens, or rows of logits, that a step computes for ``num_tokens``: one at least."""
        if self.few_sizes:
            return padded_tokens(num_tokens, self.spare_tokens, self.least_tokens)
        return max(num_tokens + self.spare_tokens, self.least_tokens)

    def row_len(self, num_tokens: int) -> int:
        """Length of the query rows of ``num_tokens`` tokens."""
        return min(padded_row_len(num_tokens, self.query_multiple), self.longest_row)

    def pages(self, num_pages: int) -> int:
        """Length of the page tables that cover ``num_pages``."""
        return padded_pages(num_pages) if self.key_pages else num_pages


def padded_pages(num_pages: int) -> int:
    """Smallest batch-invariant page count that covers ``num_pages``."""
    blocks, rest = divmod(num_pages, _BLOCK_PAGES)
    return blocks * _BLOCK_PAGES + KEY_PAGES[rest]


def padded_row_len(num_tokens: int, multiple: int = QUERY_MULTIPLE) -> int:
    """Smallest batch-invariant query row length that covers ``num_tokens``."""
    return -(-num_tokens // multiple) * multiple


def most_scored_rows(vocab_size: int) -> int:
    """Rows of logits that a step computes at most for the log probabilities of prompts."""
    return max(_LEAST_SCORED_ROWS, _MAX_SCORED_LOGITS // vocab_size)


@functools.lru_cache(4096)
def padded_tokens(num_tokens: int, spare: int = 0, least: int = MIN_TOKENS) -> int:
    """Tokens, or rows of logits, that a step computes for ``num_tokens``, at least ``spare`` of them padding.

    oneDNN keeps code of its own for every number that it has met, some megabytes a model: so there are few. Exact up
    to 16, multiples of 2 up to 32, of 4 up to 64, of 16 up to 256, of 64 beyond.
    """
    multiple = next((m for end, m in ((16, 1), (32, 2), (64, 4), (256, 16)) if num_tokens <= end), 64)
    padded = max(least, -(-num_tokens // multiple) * multiple)
    return padded if padded - num_tokens >= spare else padded + spare
