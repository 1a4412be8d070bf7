"""Attention of whole blocks of a prompt by a kernel library, FlashInfer; all other tokens have our own kernels.

    prompt    [ block 0 | block 1 | ... | rest ]      generated tokens
               └────── the library ─────┘ └────────── our kernels ─────────

Bits of the two differ. So the choice depends on a token's position and the length of its prompt alone, never on the
chunk, the batch or a draft. Pages of both kinds are never taken for each other (``kv_cache.page_hash``).

The library chooses its tiles by the lengths of a batch, and would split long contexts by its size. So it is given
*requests* of one length: ``REQUEST_LEN`` tokens at a multiple of that position, with keys up to the end of the request,
and no splits. A token has the same place in the same request whatever chunk it comes in. Places whose tokens are not
in the step repeat another token's query, and their results are dropped. ``difference`` compares bits at start-up.

No step that has such tokens is recorded: the library plans each on the host.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.types import PAGE_SIZE

PACKAGE = "flashinfer"
REQUEST_LEN = 128
"""Tokens of a request: a tile of queries of the library's kernels, or several where heads share keys."""
BLOCK_LEN = 512
"""Tokens of a block. Shorter prompts have none, so their steps are recorded."""
HEAD_DIMS = (64, 128, 256)
"""Numbers of a head that the library's kernels are made for."""
DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 32 << 20
"""For partial results, of which there are none without splits; the library wants some all the same."""
TRIED_REQUESTS = (0, 1, 3, 4, 17, 64)
"""Requests that are compared, by their number within a context: the longest has 8,320 keys."""
_NEAR = 0.03
"""Largest difference from the reference implementation, relative to the largest number."""
_HOPPER = 9
log = logging.getLogger(__name__)


class Wrapper(Protocol):
    """The part of ``flashinfer.BatchPrefillWithPagedKVCacheWrapper`` that is used."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Prepares ``run`` for a batch of requests."""
        ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of ``q`` [tokens, heads, dim] over pages [num_pages, page_size, kv_heads, dim]."""
        ...


def num_by_library(num_prompt_tokens: int, block_len: int) -> int:
    """Tokens at the beginning of a session that the library attends to. ``block_len`` 0: there is no library."""
    return num_prompt_tokens // block_len * block_len if block_len else 0


def unavailable() -> str | None:
    """Says why the library cannot be used in this process; None if it can be imported."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "needs FlashInfer, and it is not installed (pip install 'paceline[flashinfer]')"
    try:
        importlib.import_module(PACKAGE).BatchPrefillWithPagedKVCacheWrapper  # noqa: B018
    except Exception as error:  # its own imports, and what these load
        return f"needs FlashInfer, and it cannot be imported: {error}"
    return None


@dataclass(slots=True, eq=False)
class Requests:
    """The tokens of one step that the library attends to."""

    tokens: NDArray[np.int64]
    """[M] flat tokens of the step."""
    places: NDArray[np.int64]
    """[M] the place of each among N * ``REQUEST_LEN``."""
    gather: NDArray[np.int64]
    """[N * ``REQUEST_LEN``] the flat token whose query is at each place."""
    tables: list[NDArray[np.int64]]
    """N page tables, up to the end of each request."""
    _on_device: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        query_rows: NDArray[np.int64],
        scatter: NDArray[np.int64],
        page_table: NDArray[np.int64],
    ) -> Requests:
        """Cuts spans of consecutive tokens of a session into requests.

        Args:
            spans: first flat token and number of tokens of each.
            query_rows: [B, n] KV row of each place, which is the token's position.
            scatter: [T] place of each token among B * n.
            page_table: [B, pages].
        """
        row_len = query_rows.shape[1]
        tokens, places, gather = [], [], []
        tables: list[NDArray[np.int64]] = []
        for first, count in spans:
            row, place = divmod(int(scatter[first]), row_len)
            start = int(query_rows[row, place])
            for begin in range(start - start % REQUEST_LEN, start + count, REQUEST_LEN):
                own = np.clip(np.arange(begin, begin + REQUEST_LEN), start, start + count - 1)
                present = np.arange(max(begin, start), min(begin + REQUEST_LEN, start + count))
                tokens.append(present - start + first)
                places.append(present - begin + len(tables) * REQUEST_LEN)
                gather.append(own - start + first)
                # Pages after the step's last token are not seen: any page of the session will do.
                columns = np.arange((begin + REQUEST_LEN) // PAGE_SIZE).clip(max=page_table.shape[1] - 1)
                tables.append(page_table[row, columns])
        return cls(np.concatenate(tokens), np.concatenate(places), np.concatenate(gather), tables)

    def whole_rows(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The query rows that have no other tokens. ``rows``: [T] of each token. ``counts``: [B] tokens of each."""
        own = np.bincount(rows[self.tokens], minlength=len(counts))
        return np.flatnonzero((own == counts) & (counts > 0))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens``, ``places`` and ``gather`` on a device."""
        if not self._on_device:
            self._on_device = tuple(torch.from_numpy(it).to(device) for it in (self.tokens, self.places, self.gather))
        tokens, places, gather = self._on_device
        return tokens, places, gather


@dataclass(slots=True, eq=False)
class Library:
    """The library on one device. One engine owns it."""

    device: torch.device
    make: Callable[..., Wrapper] | None = None
    """Makes a wrapper of a workspace; None: the installed library's."""
    _wrapper: Wrapper | None = None
    _planned: tuple[object, ...] = ()
    _copied: Any = field(default=None)
    """The event after the last plan's copy from page-locked memory, which the next plan overwrites."""

    def attend(
        self, requests: Requests, query: Tensor, keys: Tensor, values: Tensor, scale: float, into: Tensor
    ) -> None:
        """Overwrites the rows of the requests' tokens in ``into`` [1, T, num_heads, dim].

        Args:
            query: [1, num_heads, T, dim].
            keys, values: [num_pages, PAGE_SIZE, num_kv_heads, dim].
            scale: factor of all scores.
        """
        if self._wrapper is None:
            self._wrapper = self._new_wrapper()
        tokens, places, gather = requests.on(self.device)
        sizes = query.shape[1], keys.shape[2], keys.shape[3], scale, query.dtype
        if self._planned != (requests, *sizes):  # once for all layers of a step
            self._plan(self._wrapper, requests, *sizes)
            self._planned = requests, *sizes
        out = self._wrapper.run(query[0].transpose(0, 1).index_select(0, gather), (keys, values))
        into[0].index_copy_(0, tokens, out.index_select(0, places))

    def _new_wrapper(self) -> Wrapper:
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        make = self.make or importlib.import_module(PACKAGE).BatchPrefillWithPagedKVCacheWrapper
        wrapper: Wrapper = make(workspace, "NHD", backend=_backend(self.device))
        return wrapper

    def _plan(
        self,
        wrapper: Wrapper,
        requests: Requests,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        counts = [len(table) for table in requests.tables]
        wrapper.plan(
            torch.arange(len(counts) + 1, dtype=torch.int32) * REQUEST_LEN,
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.from_numpy(np.concatenate(requests.tables)).to(self.device, torch.int32),
            torch.full((len(counts),), PAGE_SIZE, dtype=torch.int32),
            num_heads,
            num_kv_heads,
            dim,
            PAGE_SIZE,
            causal=True,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            disable_split_kv=True,
        )
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()


def _backend(device: torch.device) -> str:
    """The library's kernels: of their own choice would depend on the lengths of a batch."""
    return "fa3" if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER else "fa2"


def difference(library: Library, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> str | None:
    """Says how rows of the library depend on what is computed with them, as a clause; None: no bit does.

    Each request is computed alone, with all others in either order, in parts as the chunks of a prompt, and from pages
    with other numbers. It is also computed by a reference implementation, from which it may differ by rounding.
    """
    tried = _Tried(library, num_heads, num_kv_heads, dim, dtype)
    every = [(number, 0, REQUEST_LEN) for number in TRIED_REQUESTS]
    try:
        alone = [tried.rows([part]) for part in every]
        for part, rows in zip(every, alone, strict=True):
            if (far := tried.distance(part[0], rows)) > _NEAR:
                return f"is off by {far:.2g} of the largest number at position {part[0] * REQUEST_LEN}"
        for name, parts in (
            ("the other requests of a batch", every),
            ("the order of a batch", every[::-1]),
            ("the tokens of a chunk", [(n, 0, 1 + 7 * i) for i, (n, *_) in enumerate(every)]),
            ("the tokens of a chunk", [(n, 7 * i, REQUEST_LEN) for i, (n, *_) in enumerate(every)]),
        ):
            for pages in (tried.pages, tried.pages.flip(0)):
                found = tried.rows(parts, pages).split_with_sizes([stop - first for _, first, stop in parts])
                for (number, first, stop), rows in zip(parts, found, strict=True):
                    if not torch.equal(rows, alone[TRIED_REQUESTS.index(number)][first:stop]):
                        return f"has rows whose bits depend on {name}, at position {number * REQUEST_LEN}"
    except Exception as error:  # the library builds its kernels now, and raises what its compiler does
        return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


class _Tried:
    """Random queries, keys and values of one long context."""

    def __init__(self, library: Library, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self._library, device = library, library.device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        num_tokens = REQUEST_LEN * (TRIED_REQUESTS[-1] + 1)
        self._query = random(len(TRIED_REQUESTS) * REQUEST_LEN, num_heads, dim)
        self._keys, self._values = (random(num_tokens, num_kv_heads, dim) for _ in range(2))
        self.pages = torch.randperm(num_tokens // PAGE_SIZE, generator=generator, device=device)

    def rows(self, parts: Sequence[tuple[int, int, int]], pages: Tensor | None = None) -> Tensor:
        """Results [tokens, heads, dim] of the tokens ``first .. stop`` of some requests: (number, first, stop) each.

        ``pages``: the page numbers of the context.
        """
        numbers = self.pages if pages is None else pages
        pools = [each.view(-1, PAGE_SIZE, *each.shape[1:]) for each in (self._keys, self._values)]
        keys, values = (torch.empty_like(pool).index_copy_(0, numbers, pool) for pool in pools)
        counts = [stop - first for _, first, stop in parts]
        ends = np.cumsum(counts)
        positions = [np.arange(n * REQUEST_LEN + first, n * REQUEST_LEN + stop) for n, first, stop in parts]
        queries = [self._query[TRIED_REQUESTS.index(n) * REQUEST_LEN :][first:stop] for n, first, stop in parts]
        query = torch.cat(queries).transpose(0, 1)[None]
        requests = Requests.of(
            [*zip((ends - counts).tolist(), counts, strict=True)],
            np.concatenate(positions)[:, None],  # a row of its own for each token
            np.arange(ends[-1]),
            np.broadcast_to(numbers.cpu().numpy(), (int(ends[-1]), len(numbers))),
        )
        into = torch.zeros(1, int(ends[-1]), *self._query.shape[1:], dtype=query.dtype, device=query.device)
        self._library.attend(requests, query, keys, values, self._query.shape[2] ** -0.5, into)
        return into[0]

    def distance(self, number: int, rows: Tensor) -> float:
        """Largest difference of a request's rows from the reference implementation, relative to the largest number."""
        at, first = TRIED_REQUESTS.index(number) * REQUEST_LEN, number * REQUEST_LEN
        query = self._query[at : at + REQUEST_LEN].float().transpose(0, 1)
        groups = query.shape[0] // self._keys.shape[1]
        keys, values = (
            each[: first + REQUEST_LEN].float().transpose(0, 1).repeat_interleave(groups, 0)
            for each in (self._keys, self._values)
        )
        seen = torch.ones(REQUEST_LEN, first + REQUEST_LEN, dtype=torch.bool, device=query.device).tril(first)
        want = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1)
        far = float((rows.float() - want).abs().max() / want.abs().max())
        return far if far == far else float("inf")
