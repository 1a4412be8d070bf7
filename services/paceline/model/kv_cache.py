"""Paged KV with prefix sharing: the owners of pages, and the tensors that hold them.

Layout per layer: ``[num_pages, page_size, num_kv_heads, head_dim]``. A session's *row* r lives in page
``pages[r // page_size]`` at offset ``r % page_size``. The last page is scratch: padded tokens write there.

A page is in exactly one of three states:

    free (never written, or evicted) ──allocate──▶ used (num_refs >= 1) ──release──▶ cached (hashed, num_refs 0)
              ▲                                        ▲                                │
              └───────── release, when not hashed ─────┴──────── match_prefix ──────────┤
              └────────────────────────────── allocate, least recently released first ──┘

Only full pages of committed tokens are hashed; the hash chains over everything before the page, so equal hashes
mean equal prefixes and equal KV.

Keys and values are in the dtype of the model, or in FP8 (float8_e4m3fn), in tensors of uint8. For FP8 they are divided
by the layer's scales and rounded once, when they are written (``to_fp8``). Every token attends to what the pages hold,
times these scales, its own key and value included.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.checkpoint.kv_scales import UNSCALED, KVScales
from paceline.checkpoint.linear import LinearSpec, Slots
from paceline.core.deferred import upload
from paceline.errors import ResourceExhaustedError
from paceline.model import layout
from paceline.model.linear.copies import StateCopies
from paceline.model.linear.operator import LinearPools
from paceline.model.linear.plan import NONE, LinearSlots
from paceline.types import (
    PAGE_SIZE,  # both also belong to what this module offers
)

FP8 = torch.uint8
"""The dtype of pages in FP8: its bytes are numbers of float8_e4m3fn, which few operators take."""
_MOST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV size of one layer per token; NO_KV: it is no attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """0: the layer has no values, or they are the beginning of its keys (``attention/latent.py``)."""
    is_fp8: bool = False
    """True: keys and values are kept in FP8; False: in the dtype of the model."""
    scales: KVScales = UNSCALED
    """Divisors before they are rounded to FP8."""

    @property
    def num_values(self) -> int:
        """Numbers kept per token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def page_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of this layer's pages, of a model of ``dtype``."""
        return FP8 if self.is_fp8 else dtype

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of KV per token in this layer, of a model of ``dtype``."""
        return self.num_values * self.page_dtype(dtype).itemsize


NO_KV = LayerSpec(0, 0, 0)
"""Size of a layer that keeps nothing per token."""


class KVCache:
    """Pages of keys and values for all sessions of one engine. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        linear: Mapping[int, LinearSpec] | None = None,
        slots: Slots | None = None,
    ) -> None:
        """``num_pages`` can be allocated; one scratch page comes on top. ``dtype``: of the model. ``linear``: the
        linear layers, by index, for whose states and rows there are ``slots``."""
        self.num_pages = num_pages
        self._dtype = dtype
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.scales: list[KVScales] = []
        """Divisors of keys and values of each layer before they are rounded to FP8."""
        self.scratch_row = num_pages * PAGE_SIZE
        """Flat row that padded tokens may overwrite."""
        self._allocate(layers, device)
        self.num_layers = len(layers)
        """Number of the model's own layers. The layers of heads come after them."""
        self.model_keys, self.model_values = [*self.keys], [*self.values]
        """Keys and values of the model's own layers."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # hashed and unreferenced, oldest first
        self.clearing_at_once = Clearing(self)
        self._native = torch.device(device).type == "cpu" and layout.usable()
        self.linear = LinearSlots(slots or Slots.of(1)) if linear else None
        """Slots of linear layers; None: the model has none."""
        self.linear_pools: dict[int, LinearPools] = {}
        """Memory of the slots, by layer."""
        if self.linear is not None and linear:
            self.linear_pools = {
                i: LinearPools.of(spec, self.linear.slots, dtype, device) for i, spec in linear.items()
            }
        self.state_copies: StateCopies | None = None
        """Copies of states of linear layers, one per slot; None without such layers."""
        if self.linear is not None:
            self.state_copies = StateCopies(self.linear_pools.values(), self.linear.slots.states)

    def _allocate(self, layers: Sequence[LayerSpec], device: torch.device | str) -> None:
        shape = (self.num_pages + 1, PAGE_SIZE)
        # Written to here and now: zeros that are only promised would let a process grow for as long as it serves.
        for la in layers:
            dtype = la.page_dtype(self._dtype)
            self.scales.append(la.scales)
            self.keys.append(torch.empty(*shape, la.num_kv_heads, la.key_dim, dtype=dtype, device=device).zero_())
            self.values.append(torch.empty(*shape, la.num_kv_heads, la.value_dim, dtype=dtype, device=device).zero_())

    def add_layers(self, layers: Sequence[LayerSpec]) -> int:
        """Adds layers, which belong to a head, to every page; returns the index of the first one.

        The model's own steps do not see these layers: they use ``model_keys`` and ``model_values``.
        """
        first = len(self.keys)
        self._allocate(layers, self.keys[0].device)
        return first

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        """All memory of pages, of the heads' layers too: ``pool[page]`` is a page's part of each."""
        return (*self.keys, *self.values)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can still hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some session holds."""
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Allocates ``count`` pages, and evicts unreferenced cached prefixes for them if necessary.

        Raises:
            ResourceExhaustedError: fewer than ``count`` are available; nothing was allocated.
        """
        if count > self.num_available:
            raise ResourceExhaustedError(
                f"{count} KV pages of {PAGE_SIZE} tokens were asked for, {self.num_available} of "
                f"{self.num_pages} are available"
            )
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._refs[page] = 1
            pages.append(page)
        if self.linear is not None:
            self.linear.forget(pages)
        if self.clearing_at_once.is_open:
            self.clearing_at_once.pages += pages
        else:
            self.clear(pages)
        return pages

    def clear(self, pages: Sequence[int]) -> None:
        """Zeroes pages for a new owner: masked rows weigh exactly zero, but 0 * NaN is NaN."""
        if not pages:
            return
        pools = self.pools
        if self._native:
            layout.clear_pages(pools, pages)
            return
        index = upload(pages, pools[0].device)
        for pool in pools:
            pool.index_fill_(0, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, (from, to) each, in all layers. No page is both copied from and copied to."""
        if not pairs:
            return
        pools = self.pools
        if self._native:
            layout.copy_pages(pools, pairs)
            return
        index = upload(pairs, pools[0].device)
        source, target = index[:, 0], index[:, 1]
        for pool in pools:
            pool.index_copy_(0, target, pool.index_select(0, source))

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page. Hashed pages stay as cached prefixes."""
        for page in reversed(pages):  # the end of a prefix is evicted before its beginning
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} was released more often than taken"
            if self._refs[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                    if self.linear is not None:
                        self.linear.rest(page)
                else:
                    self._free.append(page)
                    if self.linear is not None:
                        self.linear.forget([page])

    def match_prefix(
        self, token_ids: Sequence[int], root: bytes = b"", num_by_library: int = 0
    ) -> tuple[list[int], list[bytes]]:
        """The longest cached run of full pages that begins ``token_ids``; takes a reference to each.

        At least one token is left over, because its logits must be computed. The state of linear layers is known at
        the end of the run. Returns the pages and their hashes. ``root``: see ``root_hash``. ``num_by_library``: first
        tokens, of those that a kernel library attends to: whole pages.
        """
        pages: list[int] = []
        hashes: list[bytes] = []
        previous = root
        for start in range(0, len(token_ids) - PAGE_SIZE, PAGE_SIZE):
            previous = page_hash(previous, token_ids[start : start + PAGE_SIZE], by_library=start < num_by_library)
            page = self._page_of.get(previous)
            if page is None:
                break
            self._take(page)
            pages.append(page)
            hashes.append(previous)
        if self.linear is not None and (count := self._num_known(self.linear, pages, hashes)) < len(pages):
            self.release(pages[count:])
            return pages[:count], hashes[:count]
        return pages, hashes

    def _num_known(self, slots: LinearSlots, pages: Sequence[int], hashes: Sequence[bytes]) -> int:
        """The number of ``pages`` up to the last one at whose end a state is known or has a copy; the copy is written
        back."""
        num_hit, copies = slots.hit(pages), self.state_copies
        found = max((i for i in range(num_hit, len(pages)) if copies and hashes[i] in copies), default=-1)
        if copies is None or found < 0 or (slot := slots.restore(pages[found])) == NONE:
            return num_hit
        copies.restore(hashes[found], slot)
        return found + 1

    def copy_states(self, pages: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Copies the known states at ends of a session's full pages to host memory, before the session is preempted."""
        for page, digest in zip(pages, hashes, strict=False):
            if self.state_copies is not None and self.linear is not None and (slot := self.linear.at_end(page)) != NONE:
                self.state_copies.keep(digest, slot)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the first hashes, up to the first that is not here. Takes no reference."""
        pages = []
        for digest in hashes:
            if (page := self._page_of.get(digest)) is None:
                break
            pages.append(page)
        return pages

    def share(self, hashes: Sequence[bytes]) -> list[int]:
        """``find``, with a reference to each page."""
        pages = self.find(hashes)
        for page in pages:
            self._take(page)
        return pages

    def _take(self, page: int) -> None:
        if self._refs[page] == 0:
            del self._cached[page]
        self._refs[page] += 1

    def hold(self, pages: Sequence[int], num_computed: int, held: int) -> int:
        """Moves a session's hold on a state of linear layers (``LinearSlots.hold``), where there are any."""
        return NONE if self.linear is None else self.linear.hold(pages, num_computed, held)

    def let_go(self, held: int) -> None:
        """Ends a session's hold, before its pages are released."""
        if self.linear is not None:
            self.linear.let_go(held)

    def num_behind(self, pages: Sequence[int], num_computed: int) -> int:
        """Chunks of rows that a branch is given a copy of (``LinearSlots.num_behind``); 0 without linear layers."""
        return 0 if self.linear is None else self.linear.num_behind(pages, num_computed)

    def num_chunks(self, page: int) -> int:
        """Chunks of rows of linear layers that a copy of a page gets; 0 without such layers."""
        return 0 if self.linear is None else self.linear.num_chunks(page)

    def promise(self, owner: object, num_chunks: int) -> None:
        """Reserves chunks of rows of linear layers for a step (``LinearSlots.promise``), if there are such layers."""
        if self.linear is not None:
            self.linear.promise(owner, num_chunks)

    def copy_rows(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies chunks of rows of linear layers, slots (from, to) each. No slot is both copied from and copied to."""
        if not pairs:
            return
        index = upload(pairs, self.keys[0].device)
        source, target = index[:, 0], index[:, 1]
        for layer in self.linear_pools.values():
            for pool in layer.rows:
                pool.index_copy_(0, target, pool.index_select(0, source))

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a full page of committed tokens shareable. An equal page published earlier stays the shared one."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def check_integrity(self, held: Sequence[Sequence[int]], states: Sequence[int] = ()) -> None:
        """Asserts the page states against ``held``, the page list of every session.

        ``states``: the keys of the states of linear layers that sessions hold.
        """
        refs = [0] * self.num_pages
        for pages in held:
            for page in pages:
                refs[page] += 1
        assert refs == self._refs, "page reference counts differ from what sessions hold"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        for page in range(self.num_pages):
            assert (self._refs[page] == 0) == (page in free or page in cached), f"page {page} leaked"
        assert {self._page_of[h] for h in self._page_of} == set(self._hash_of), "page hashes are not one to one"
        assert cached <= set(self._hash_of), "a cached page has no hash"
        if self.linear is not None:
            self.linear.check_integrity(self._free, [*self._cached], states)


class Clearing:
    """Block in which allocated pages are not zeroed one by one: at its end one call for each pool zeroes them all.

    Within the block none of these pages may be read or written.
    """

    __slots__ = ("_cache", "is_open", "pages")

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.is_open = False
        self.pages: list[int] = []

    def __enter__(self) -> None:
        assert not self.is_open
        self.is_open = True

    def __exit__(self, *exception: object) -> None:
        pages, self.pages, self.is_open = self.pages, [], False
        self._cache.clear(pages)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """``x`` in FP8: the nearest numbers, of two equally near the even one; what is beyond 448 becomes that.

    NaN stays NaN. ``attention/native.cpp`` and ``attention/triton.py`` round to the same bits.
    """
    return x.clamp(-_MOST, _MOST).to(torch.float8_e4m3fn).view(FP8)


def from_pages(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Contents of pages in the dtype of the model, which holds each number of FP8 exactly; times ``scale``."""
    numbers = (x.view(torch.float8_e4m3fn) if x.dtype == FP8 else x).to(dtype)
    return numbers if scale == 1 else numbers * scale


def root_hash(salt: str, generation: int = 0) -> bytes:
    """First hash of the chain of pages of a salt, so that sessions of different salts share no page.

    ``generation``: of what computes the pages, whose bits may differ from one to the next.
    """
    if generation:
        return hashlib.blake2b(f"{generation} {salt}".encode(), digest_size=16, person=b"generation").digest()
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


def page_hash(previous: bytes, token_ids: Sequence[int], *, by_library: bool = False) -> bytes:
    """Chained digest of one full page of tokens (128 bit: equal digests are equal prefixes).

    ``by_library``: a kernel library attends to the tokens, so that their bits are other ones.
    """
    person = b"library" if by_library else b""
    return hashlib.blake2b(previous + array("q", token_ids).tobytes(), digest_size=16, person=person).digest()


def flat_rows(pages: Sequence[int], start: int, stop: int) -> list[int]:
    """Flat KV rows of a session's rows [start, stop)."""
    return [pages[r // PAGE_SIZE] * PAGE_SIZE + r % PAGE_SIZE for r in range(start, stop)]
