"""Rows of a session's keys and values, of committed tokens and of tree nodes, and its part in a forward over them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.messages import record
from paceline.model.kv_cache import KVCache, page_hash
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for


@dataclass(slots=True)
class RowSession:
    """One session of a draft model.

    Invariant: ``committed[r]`` iff row r holds a committed token; tree rows are the values of ``node_rows``.
    """

    tokens: list[int]
    sampler: SamplerState
    num_cached: int = 0
    """Context tokens whose KV is computed; the others, at least the anchor before it is expanded, are pending."""
    pages: array[int] = field(default_factory=lambda: array("q"))
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    """Rows used so far: [0, num_rows)."""
    free_rows: list[int] = field(default_factory=list)
    node_rows: dict[int, int] = field(default_factory=dict)
    committed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rotary position of each row."""
    chained: list[int] = field(default_factory=list)
    """Rows of tokens that a chain has computed, and that are no nodes yet."""
    shared: tuple[Tensor, Tensor] | None = None
    """``committed`` and ``positions`` as tensors; None: these are other arrays now."""
    num_prefill: int = 0
    """Context tokens [0, num_prefill) are computed by ``prefill``, in row order."""
    begun: bool = True
    """False: it waits for a state of linear layers (``branch_rows.py``)."""

    @property
    def ready(self) -> bool:
        """True once the prompt is computed."""
        return self.num_cached >= self.num_prefill

    def take_rows(self, cache: KVCache, count: int) -> list[int]:
        """Allocates ``count`` unused rows.

        Raises:
            ResourceExhaustedError: there is no page for them; nothing is changed.
        """
        num_free = len(self.free_rows)
        if count == 1 and num_free:
            return [self.free_rows.pop()]
        if count <= num_free:
            rows = self.free_rows[: num_free - count - 1 : -1] if count < num_free else self.free_rows[::-1]
            del self.free_rows[num_free - count :]
            return rows
        end = self.num_rows + count - num_free
        missing = pages_for(end) - len(self.pages)
        if missing > 0:
            self.pages.extend(cache.allocate(missing))
            more = len(self.pages) * PAGE_SIZE - len(self.committed)
            self.committed = np.concatenate([self.committed, np.zeros(more, np.bool_)])
            self.positions = np.concatenate([self.positions, np.zeros(more, np.int64)])
            self.shared = None
        rows = [*self.free_rows[::-1], *range(self.num_rows, end)]
        self.free_rows.clear()
        self.num_rows = end
        return rows

    def begin(self, cache: KVCache) -> None:
        """Shares the pages that others have computed of the same prefix."""
        pages, self.hashes = cache.match_prefix(self.tokens, self.root)
        self.pages = array("q", pages)
        self.num_cached = self.num_rows = len(pages) * PAGE_SIZE
        self.committed = np.ones(self.num_rows, np.bool_)
        self.positions = np.arange(self.num_rows)

    @property
    def held_pages(self) -> Sequence[int]:
        """All pages, each once."""
        return self.pages

    @property
    def held_states(self) -> Sequence[int]:
        """The states of linear layers that it holds; none."""
        return ()

    def end(self, cache: KVCache) -> None:
        """Releases all pages."""
        cache.release(self.pages)

    def chunk(self, cache: KVCache, stop: int) -> SequenceStep:
        """The part of a session whose prompt is computed up to ``stop``: it has no logits.

        Raises:
            ResourceExhaustedError: there is no room for the rows.
        """
        span = range(self.num_cached, stop)
        rows = self.take_rows(cache, len(span))
        assert rows == [*span], "a prompt lies in row order"
        return SequenceStep(self.tokens[self.num_cached : stop], span, span, self.pages, num_logits=0)

    def take_chunk(self, cache: KVCache, stop: int) -> None:
        """After the forward: the prompt is computed up to ``stop``."""
        self.committed[self.num_cached : stop] = True
        self.positions[self.num_cached : stop] = np.arange(self.num_cached, stop)
        self.num_cached = stop
        self.publish(cache)

    def publish(self, cache: KVCache) -> None:
        """Shares pages that became full."""
        while (len(self.hashes) + 1) * PAGE_SIZE <= self.num_cached:
            index = len(self.hashes)
            previous = self.hashes[-1] if self.hashes else self.root
            digest = page_hash(previous, self.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            self.hashes.append(digest)
            cache.publish(self.pages[index], digest)

    def follow(self, cache: KVCache, pairs: Iterable[tuple[int, int]], kept: Sequence[int]) -> None:
        """Extends the context by tokens, each with its node; commits rows of nodes, and frees rows of nodes that are
        not ``kept``."""
        tokens, node_rows, ready = self.tokens, self.node_rows, self.ready
        for token_id, node_id in pairs:
            row = node_rows.get(node_id)
            # Only a row directly after the cached tokens extends them; after a gap the token is pending.
            if row is not None and ready and self.num_cached == len(tokens):
                del node_rows[node_id]
                self.committed[row] = True
                self.num_cached += 1
            tokens.append(token_id)
        if node_rows:
            keep = set(kept)
            for node_id in [n for n in node_rows if n not in keep]:
                self.free_rows.append(node_rows.pop(node_id))

    def check_integrity(self) -> None:
        """Asserts that every row has exactly one use; O(rows)."""
        assert not self.chained, "keep comes after chain"
        tree, free = set(self.node_rows.values()), set(self.free_rows)
        committed = set(self.committed.nonzero()[0].tolist())
        assert len(tree) == len(self.node_rows), "two nodes share a row"
        assert len(free) == len(self.free_rows), "a row is free twice"
        rows = sorted([*tree, *free, *committed])
        assert rows == list(range(self.num_rows)), "a row leaked or has two uses"
        assert len(committed) == self.num_cached <= len(self.tokens)


@record
class Tail:
    """Tokens that follow a leaf in the forward, and are not of the tree."""

    inputs: tuple[int, ...] = ()
    """The model's ids."""
    path: tuple[int, ...] = ()
    """The tokens of the tree that they stand for; () if they stand for whatever comes."""


NO_TAIL = Tail()


@record
class Part:
    """One session's part in a forward."""

    session: RowSession
    step: SequenceStep
    num_pending: int
    """Number of pending tokens, the first of the part."""
    node_rows: Mapping[int, int]
    """Rows of nodes that are computed; what has a negative id is not kept."""

    def keep(self) -> None:
        """After the forward: pending tokens are cached, nodes have their rows, all others are free again."""
        session, rows = self.session, self.step.rows
        if self.num_pending:
            for row in rows[: self.num_pending]:
                session.committed[row] = True
            session.num_cached += self.num_pending
            if len(rows) == self.num_pending and not self.node_rows:
                return
        held, made = session.node_rows, self.node_rows
        if 0 < len(made) == len(rows) and min(made) >= 0 and held.keys().isdisjoint(made):
            held.update(made)
            return
        kept = []
        for node_id, row in self.node_rows.items():
            if node_id >= 0:
                if (old := session.node_rows.get(node_id)) is not None:
                    session.free_rows.append(old)
                session.node_rows[node_id] = row
                kept.append(row)
        if len(kept) + self.num_pending < len(rows):
            session.free_rows.extend(set(rows[self.num_pending :]).difference(kept))

    def drop(self) -> None:
        """After an error: all rows are free again."""
        self.session.free_rows.extend(self.step.rows)


def tree_step(
    session: RowSession,
    tokens: Sequence[int],
    positions: Sequence[int],
    rows: Sequence[int],
    own_rows: Sequence[Sequence[int]],
    num_logits: int = 1,
) -> SequenceStep:
    """The tokens of a session's part in a forward, those with logits last. They attend to all committed rows, each to
    its ``own_rows`` besides.

    The step reads the session's arrays, which must not change before it is laid out.
    """
    if session.shared is None:
        session.shared = torch.from_numpy(session.committed), torch.from_numpy(session.positions)
    visible, key_positions = session.shared
    return SequenceStep(tokens, positions, rows, session.pages, num_logits, visible, key_positions, own_rows)
