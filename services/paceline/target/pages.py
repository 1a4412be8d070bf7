"""KV pages that another target takes over: what a session leaves behind here, and what it finds where it goes on.

    old target   held ─▶ read ─▶ bytes ──▶ write ─▶ cached prefix ─▶ match_prefix   new target

Pages enter the new target's prefix cache, and the session shares them like an earlier session's. What is missing is
computed. A page is given to targets of the same *identity* alone: the bits of a probe that both have computed, and the
origin of these bits (``origin.py``). The identity is known some time after the start. Only whole pages of committed
tokens move, under the salt of their session.

Not moved, so computed again: pages of models with linear layers (which need a state, too), of several ranks, with
layers of heads or of states for drafts, of targets with a kernel library for prompts, and of those whose self-test is
off or has failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache, page_hash, root_hash
from paceline.model.parallel.runner import RankRunner
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.target.origin import Origin
from paceline.target.runners import Runners
from paceline.types import PAGE_SIZE, BatchInvariant


@dataclass(frozen=True, slots=True)
class WantedPages:
    """Pages that a target would take over for a session."""

    identity: bytes
    token_ids: tuple[int, ...]
    """The beginning of the context that fills these pages, and one token more: the other target sends no others."""
    root: bytes
    """First hash of the chain (``root_hash``), of this target: another one may have another generation."""
    hashes: tuple[bytes, ...]
    """Of the whole pages of the context that there is room for."""
    first: int
    """Pages [0, first) are here already."""
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Where the pages of a target lie: what another device reads or writes by address."""

    kind: str
    """``cpu`` or ``cuda``."""
    device: int
    pools: tuple[tuple[int, int, int], ...]
    """Of each layer's keys and values: address, number of pages, bytes of a page."""

    def blocks(
        self, pages: Sequence[int], addresses: Sequence[int] = (), device: int = -1
    ) -> list[tuple[int, int, int]]:
        """Address, bytes and device of each part of pages; ``addresses``, ``device``: of another target's pools."""
        addresses = addresses or [address for address, _, _ in self.pools]
        sizes, device = [size for _, _, size in self.pools], self.device if device < 0 else device
        return [(at + page * size, size, device) for at, size in zip(addresses, sizes, strict=True) for page in pages]


class PageStore:
    """The pages of one target as bytes. The engine's thread owns it, and calls it between steps."""

    def __init__(self, runners: Runners, batch_invariant: BatchInvariant, origin: Origin | None = None) -> None:
        """``origin``: what computes the pages; None: the probe says all."""
        self._runners, self._origin = runners, origin
        self._proven = batch_invariant == "yes"
        self._probes: dict[int, bytes] = {}  # by generation
        self._lent: dict[object, list[int]] = {}

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, of all layers."""
        return sum(pool[0].numel() * pool.dtype.itemsize for pool in self.cache.pools)

    def prepare(self) -> None:
        """Computes the probe now, so that no session waits for it."""
        self._probe(self._runners.generation)

    def wanted(self, token_ids: Sequence[int], salt: str) -> WantedPages | None:
        """The pages of a context that are not here; None: there are none, or pages are not moved."""
        generation, cache = self._runners.generation, self.cache
        if (identity := self.exchange_identity(generation)) is None:
            return None
        root = root_hash(salt, generation)
        known, _ = cache.match_prefix(token_ids, root)
        cache.release(known)  # as the newest: what comes for the others does not replace them
        most = max(len(known), cache.num_available)
        hashes = _chain(root, token_ids)[:most]
        if len(known) >= len(hashes):
            return None
        token_ids = tuple(token_ids[: len(hashes) * PAGE_SIZE + 1])
        return WantedPages(identity, token_ids, root, tuple(hashes), len(known), self.page_bytes)

    def held(self, token_ids: Sequence[int], salt: str, identity: bytes, first: int) -> list[bytes]:
        """The hashes of a context's pages from ``first`` on that are here; none for a target of another identity."""
        for generation in {self._runners.generation, *self._runners.generations, *self._probes}:
            if self.exchange_identity(generation) == identity:
                hashes = _chain(root_hash(salt, generation), token_ids)
                return hashes[first : len(self.cache.find(hashes))]
        return []

    def read(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The contents of pages, up to the first that is no longer here."""
        return [page_contents(self.cache, page) for page in self.cache.find(hashes)]

    def write(self, wanted: WantedPages, index: int, contents: Sequence[bytes]) -> int:
        """Adds pages from ``index`` of the context on to the prefix cache and returns their number: 0 if the pages
        before them were evicted.

        Raises ValueError if they are not whole pages of this target, or more than were requested.
        """
        hashes, cache = wanted.hashes[index : index + len(contents)], self.cache
        if len(hashes) < len(contents) or any(len(content) != self.page_bytes for content in contents):
            raise ValueError(f"pages are of {self.page_bytes} bytes each, and {len(wanted.hashes)} are wanted")
        pages = self._allocate(wanted, index, len(contents))
        for page, content in zip(pages, contents, strict=False):
            fill_page(cache, page, content)
        return self._publish(wanted, index, pages)

    def _allocate(self, wanted: WantedPages, index: int, count: int) -> list[int]:
        """Pages from ``index`` of the context on; none once the pages before them had to make room, or without room."""
        if len(self.cache.find(wanted.hashes[:index])) < index:
            return []
        try:
            return self.cache.allocate(count)
        except ResourceExhaustedError:
            return []

    def _publish(self, wanted: WantedPages, index: int, pages: Sequence[int]) -> int:
        for page, digest in zip(pages, wanted.hashes[index:], strict=False):
            self.cache.publish(page, digest)
        self.cache.release(pages)
        return len(pages)

    def memory(self) -> PageMemory | None:
        """Where all pages lie, once the device has done what it was told; None: pages are not moved."""
        cache = self.cache
        if not self._is_whole(self._runners.current):
            return None
        device = cache.pools[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pools = [(pool.data_ptr(), pool.shape[0], pool[0].nbytes) for pool in cache.pools if pool.numel()]
        return PageMemory(device.type, device.index or 0, tuple(pools))

    def lend(self, key: object, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the first hashes that are here, which stay as they are until ``give_back``."""
        self._lent[key] = self.cache.share(hashes)
        return self._lent[key]

    def reserve(self, key: object, wanted: WantedPages, index: int, count: int) -> list[int]:
        """Pages for the context from ``index`` on, for ``publish`` or ``give_back``; none if there is no room, or if
        the pages before them were evicted."""
        self._lent[key] = self._allocate(wanted, index, count)
        return self._lent[key]

    def publish(self, key: object, wanted: WantedPages, index: int) -> int:
        """Adds reserved pages, which are complete now, to the prefix cache; returns how many."""
        return self._publish(wanted, index, self._lent.pop(key))

    def give_back(self, key: object) -> None:
        """Ends what ``lend`` or ``reserve`` has begun. Idempotent."""
        self.cache.release(self._lent.pop(key, []))

    @property
    def lent(self) -> list[int]:
        """All pages that are borrowed or reserved."""
        return [page for pages in self._lent.values() for page in pages]

    def settle(self, wanted: WantedPages) -> None:
        """Makes the end of the context leave the cache before its beginning, as that of any prefix."""
        pages, _ = self.cache.match_prefix(wanted.token_ids, wanted.root)
        self.cache.release(pages)

    @property
    def cache(self) -> KVCache:
        return self._runners.current.cache

    def exchange_identity(self, generation: int) -> bytes | None:
        """Identity that two targets must share to exchange pages; None: this one exchanges none."""
        probe, origin = self._probe(generation), b"" if self._origin is None else self._origin.digest
        return None if probe is None or origin is None else hashlib.blake2b(probe + origin, digest_size=16).digest()

    def _is_whole(self, runner: ModelRunner) -> bool:
        """True if pages hold all that there is of a context, and their bits were tested."""
        cache = self.cache
        has_rest = cache.linear is not None or len(cache.keys) > cache.num_layers
        is_one = not runner.backend.block_len and not isinstance(runner, RankRunner)
        return self._proven and not has_rest and is_one

    def _probe(self, generation: int) -> bytes | None:
        """The bits and the layout of a probe; None: there are none, and no pages are exchanged."""
        if generation in self._probes:
            return self._probes[generation]
        runner, cache = self._runners.generations.get(generation), self.cache
        if runner is None or not self._is_whole(runner):
            return None
        try:
            bits = _probe(runner)
        except ResourceExhaustedError:  # later, perhaps
            return None
        layout = [(tuple(pool.shape[1:]), str(pool.dtype)) for pool in cache.pools]
        return self._probes.setdefault(generation, bits + repr((PAGE_SIZE, layout)).encode())


def _chain(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The hashes of whole pages, as ``match_prefix`` looks for them: at least one token is left over."""
    hashes = []
    for start in range(0, len(token_ids) - PAGE_SIZE, PAGE_SIZE):
        root = page_hash(root, token_ids[start : start + PAGE_SIZE])
        hashes.append(root)
    return hashes


def _probe(runner: ModelRunner) -> bytes:
    """The bits of the logits and the KV of a page of tokens. Raises ResourceExhaustedError without a free page."""
    cache = runner.cache
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, runner.vocab_size, (PAGE_SIZE - 1,), generator=generator).tolist()
    pages = cache.allocate(1)
    try:
        rows = range(len(token_ids))
        logits = runner.forward([SequenceStep(token_ids, rows, rows, pages, num_logits=len(rows))])
        digest = hashlib.blake2b(_packed([logits]))
        digest.update(page_contents(cache, pages[0]))
        return digest.digest()
    finally:
        cache.release(pages)


def page_contents(cache: KVCache, page: int) -> bytes:
    """The bytes of a page: keys and values of all layers, one pool after the other."""
    return _packed([pool[page] for pool in cache.pools])


def _packed(tensors: Sequence[Tensor]) -> bytes:
    """All bytes of tensors of one device, one behind the other: one copy to the host."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    packed: bytes = torch.cat(parts).cpu().numpy().tobytes()
    return packed


def fill_page(cache: KVCache, page: int, content: bytes) -> None:
    """Overwrites a page."""
    parts = [pool[page] for pool in cache.pools]
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(parts[0].device)
    sizes = [part.numel() * part.dtype.itemsize for part in parts]
    for part, content_part in zip(parts, flat.split_with_sizes(sizes), strict=True):
        part.copy_(content_part.view(part.dtype).view(part.shape))
