"""Drafting with a smaller language model: one KV row per expanded node, all sessions in one forward.

A session's rows are not in the order of its text. Committed rows and tree rows lie in the same pages; a mask says
which rows a node sees, and its rotary position is its depth. So moving the root is bookkeeping only: the rows of the
accepted path are declared committed where they are, dropped rows go to a free list, nothing is copied and no surviving
row is computed again. Only whole prompt pages, written in order, are shared between sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.core.deferred import download
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.drafters.protocol import FATAL, Candidates, DrafterSessionError, Leaf
from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache, page_hash, root_hash
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for

_GREEDY_TOP_M = 48
"""Candidates at temperature 0: no configuration publishes more children than 32."""


@dataclass(slots=True)
class _Session:
    """Invariant: ``committed[r]`` iff row r holds a committed token; tree rows are the values of ``node_rows``."""

    tokens: list[int]
    sampler: SamplerState
    num_cached: int = 0
    """Context tokens whose KV is computed; the others, at least the anchor before it is expanded, are pending."""
    pages: list[int] = field(default_factory=list)
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    num_rows: int = 0
    """Rows used so far: [0, num_rows)."""
    free_rows: list[int] = field(default_factory=list)
    node_rows: dict[int, int] = field(default_factory=dict)
    committed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    num_prefill: int = 0
    """Context tokens [0, num_prefill) are computed by ``prefill``, in row order."""

    @property
    def ready(self) -> bool:
        return self.num_cached >= self.num_prefill

    def take_rows(self, cache: KVCache, count: int) -> list[int]:
        """Takes ``count`` unused rows.

        Raises:
            ResourceExhaustedError: there is no page for them; nothing is changed.
        """
        fresh = count - len(self.free_rows)
        missing = pages_for(self.num_rows + fresh) - len(self.pages) if fresh > 0 else 0
        if missing > 0:
            self.pages.extend(cache.allocate(missing))
            grown = len(self.pages) * PAGE_SIZE
            self.committed = torch.cat([self.committed, torch.zeros(grown - len(self.committed), dtype=torch.bool)])
            self.positions = torch.cat([self.positions, torch.zeros(grown - len(self.positions), dtype=torch.long)])
        rows = [self.free_rows.pop() for _ in range(min(count, len(self.free_rows)))]
        rows.extend(range(self.num_rows, self.num_rows + count - len(rows)))
        self.num_rows = max(self.num_rows, max(rows) + 1)
        return rows


class ModelDrafter:
    """A draft model behind the ``Drafter`` protocol, with the ``top_m`` likeliest candidates of q per node."""

    kind = "model"
    tokens_per_leaf = 1
    conditional = True

    def __init__(self, runner: ModelRunner, *, max_leaves: int, max_prefill_tokens: int, top_m: int) -> None:
        self.max_leaves = max_leaves
        self._runner = runner
        self._cache = runner.cache
        self._max_prefill_tokens = max_prefill_tokens
        self._top_m = top_m
        self._sessions: dict[str, _Session] = {}

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Begins a session; refuses a context that the whole cache cannot hold."""
        if pages_for(len(token_ids)) > self._cache.num_pages:
            room = self._cache.num_pages * PAGE_SIZE
            raise ResourceExhaustedError(f"the context has {len(token_ids)} tokens: the draft's cache holds {room}")
        session = _Session(list(token_ids), sampler, num_prefill=len(token_ids) - 1, root=root_hash(salt))
        session.pages, session.hashes = self._cache.match_prefix(token_ids, session.root)
        session.num_cached = session.num_rows = len(session.pages) * PAGE_SIZE
        session.committed = torch.ones(session.num_rows, dtype=torch.bool)
        session.positions = torch.arange(session.num_rows)
        self._sessions[session_id] = session

    def prefill(self) -> bool:
        """Computes a chunk of prompts; sessions without room for their prompt wait."""
        budget = self._max_prefill_tokens
        chunks: dict[str, tuple[_Session, int]] = {}
        for session_id, session in self._sessions.items():
            stop = min(session.num_prefill, session.num_cached + budget)
            count = stop - session.num_cached
            if count <= 0:
                continue
            try:
                rows = session.take_rows(self._cache, count)
            except ResourceExhaustedError:
                continue
            assert rows == list(range(session.num_cached, stop)), "a prompt lies in row order"
            chunks[session_id] = session, stop
            budget -= count
        if not chunks:
            return False
        try:
            self._runner.forward([_prompt_chunk(*chunk) for chunk in chunks.values()])
        except FATAL:
            raise
        except Exception as error:
            for session, _ in chunks.values():
                session.num_rows = session.num_cached  # the rows are free again
            if (own := self._error_of_one(chunks)) is not None:
                raise own from error
            raise
        for session, stop in chunks.values():
            session.committed[session.num_cached : stop] = True
            session.positions[session.num_cached : stop] = torch.arange(session.num_cached, stop)
            session.num_cached = stop
            self._publish(session)
        return True

    def _error_of_one(self, chunks: Mapping[str, tuple[_Session, int]]) -> DrafterSessionError | None:
        """The error of the first chunk that cannot be computed alone; None if there is none, or the device is gone."""
        for session_id, chunk in chunks.items():
            try:
                self._runner.forward([_prompt_chunk(*chunk)])
            except FATAL:
                return None
            except Exception as error:
                return DrafterSessionError(session_id, f"{type(error).__name__}: {error}")
        return None

    def ready(self, session_id: str) -> bool:
        """True once the session's prompt is computed."""
        return self._sessions[session_id].ready

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Candidates of the leaves by one forward; a leaf without room for its row gets none."""
        groups: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            groups.setdefault(leaf.session_id, []).append(index)
        steps: list[SequenceStep] = []
        order: list[int] = []  # leaf of each row of logits
        taken: list[tuple[_Session, list[int], list[int]]] = []  # rows by session, and the leaves they are of
        try:
            for session_id, indices in groups.items():
                session = self._session(session_id)
                try:
                    step, rows = self._step(session, [leaves[i] for i in indices])
                except ResourceExhaustedError:
                    continue
                steps.append(step)
                order.extend(indices)
                taken.append((session, rows, indices))
            m = self._num_candidates(groups)
            if not steps:
                return _no_candidates(len(leaves), m)
            logits = self._runner.forward(steps)
            samplers = [Row(self._sessions[leaves[i].session_id].sampler, leaves[i].path) for i in order]
            ids, scores = draft_candidates(logits, samplers, m)
        except BaseException:
            for session, rows, _ in taken:
                session.free_rows.extend(rows)
            raise
        for session, rows, indices in taken:
            self._keep(session, rows, [leaves[i] for i in indices])
        ids, scores = download(ids, scores)
        if order == list(range(len(leaves))):
            return Candidates(ids, scores)
        everyone = _no_candidates(len(leaves), m)
        at = torch.tensor(order)
        everyone.token_ids[at], everyone.log_q[at] = ids, scores
        return everyone

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Declares the rows of committed nodes committed, and frees those of nodes that are not ``kept``."""
        session = self._session(session_id)
        for token_id, node_id in zip(token_ids, node_ids, strict=True):
            row = session.node_rows.get(node_id)
            # Only a row right behind the cached tokens extends them; after a gap the token is pending.
            if row is not None and session.ready and session.num_cached == len(session.tokens):
                del session.node_rows[node_id]
                session.committed.numpy()[row] = True
                session.num_cached += 1
            session.tokens.append(token_id)
        keep = set(kept)
        for node_id in [n for n in session.node_rows if n not in keep]:
            session.free_rows.append(session.node_rows.pop(node_id))

    def shutdown(self) -> None:
        """Leaves the other ranks of the model, if there are any."""
        self._runner.close()

    def close(self, session_id: str) -> None:
        """Frees the session's pages."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._cache.release(session.pages)

    def check_integrity(self) -> None:
        """Asserts that every row of every session has exactly one use; O(rows)."""
        self._cache.check_integrity([s.pages for s in self._sessions.values()])
        for session in self._sessions.values():
            tree, free = set(session.node_rows.values()), set(session.free_rows)
            committed = set(session.committed.nonzero().flatten().tolist())
            assert len(tree) == len(session.node_rows), "two nodes share a row"
            assert len(free) == len(session.free_rows), "a row is free twice"
            rows = sorted([*tree, *free, *committed])
            assert rows == list(range(session.num_rows)), "a row leaked or has two uses"
            assert len(committed) == session.num_cached <= len(session.tokens)

    def _num_candidates(self, session_ids: Iterable[str]) -> int:
        """Candidates per node: few are enough where no session samples, as q alone orders the children then."""
        greedy = all(self._session(session_id).sampler.greedy for session_id in session_ids)
        return min(_GREEDY_TOP_M if greedy else self._top_m, self._top_m, self._runner.vocab_size)

    def _session(self, session_id: str) -> _Session:
        try:
            return self._sessions[session_id]
        except KeyError:
            raise DrafterSessionError(session_id, "not open in this drafter") from None

    def _step(self, session: _Session, leaves: Sequence[Leaf]) -> tuple[SequenceStep, list[int]]:
        """One session's part in the forward and its rows: pending tokens for the anchor, else one token per leaf."""
        num_tokens = len(session.tokens)
        if not leaves[0].path:
            tokens = session.tokens[session.num_cached :]
            rows = session.take_rows(self._cache, len(tokens))
            positions = list(range(session.num_cached, num_tokens))
            above = [rows[: i + 1] for i in range(len(rows))]
            num_logits = 1
        else:
            tokens = [leaf.path[-1] for leaf in leaves]
            rows = session.take_rows(self._cache, len(tokens))
            positions = [num_tokens + len(leaf.path) - 1 for leaf in leaves]
            above = [
                [row, *(session.node_rows[n] for n in leaf.path_ids[:-1])]
                for row, leaf in zip(rows, leaves, strict=True)
            ]
            num_logits = len(tokens)
        # seen: [tokens, num_rows] bool: each token attends to the committed rows, those above it, and its own.
        # Through numpy: indexing tensors this small costs torch ten times as much.
        session.positions.numpy()[rows] = positions
        seen = np.repeat(session.committed.numpy()[None, : session.num_rows], len(tokens), axis=0)
        for token, seen_rows in zip(seen, above, strict=True):
            token[seen_rows] = True
        visible, key_positions = torch.from_numpy(seen), session.positions[: session.num_rows]
        return SequenceStep(tokens, positions, rows, session.pages, num_logits, visible, key_positions), rows

    def _keep(self, session: _Session, rows: Sequence[int], leaves: Sequence[Leaf]) -> None:
        if not leaves[0].path:
            session.committed.numpy()[list(rows)] = True
            session.num_cached += len(rows)
        else:
            session.node_rows.update((leaf.node_id, row) for leaf, row in zip(leaves, rows, strict=True))

    def _publish(self, session: _Session) -> None:
        while (len(session.hashes) + 1) * PAGE_SIZE <= session.num_cached:
            index = len(session.hashes)
            previous = session.hashes[-1] if session.hashes else session.root
            digest = page_hash(previous, session.tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE])
            session.hashes.append(digest)
            self._cache.publish(session.pages[index], digest)


def _no_candidates(num_leaves: int, m: int) -> Candidates:
    return Candidates(torch.zeros(num_leaves, m, dtype=torch.long), torch.full((num_leaves, m), float("-inf")))


def _prompt_chunk(session: _Session, stop: int) -> SequenceStep:
    span = range(session.num_cached, stop)
    return SequenceStep(session.tokens[session.num_cached : stop], span, span, session.pages, num_logits=0)
