"""Prompt lookup: what followed the last few tokens earlier in the same text is likely to follow again.

No model and no state beyond the text itself; nothing is shared between sessions. Costs microseconds per node,
and pays off where the output repeats the input (code edits, summaries, extraction). The source of the idea:
prompt lookup decoding (Saxena 2023); here the candidates carry their empirical frequencies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from paceline.core.processors import SamplerState
from paceline.drafters.protocol import Candidates, DrafterSessionError, Leaf

_PREFILL_TOKENS = 8192


class NgramIndex:
    """Which tokens followed each n-gram of a growing text, for min_match <= n <= max_match.

    `append` costs O(max_match), a look-up O(max_match + distinct followers): neither grows with the text.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match {min_match}, max_match {max_match}: 1 <= min <= max is allowed")
        self._min, self._max = min_match, max_match
        self.token_ids: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}

    def append(self, token_id: int) -> None:
        """Adds the next token of the text."""
        text = self.token_ids
        end = len(text)
        for n in range(self._min, min(self._max, end) + 1):
            followers = self._followers.setdefault(tuple(text[end - n :]), {})
            count, _ = followers.get(token_id, (0, 0))
            followers[token_id] = (count + 1, end)
        text.append(token_id)

    def candidates(self, path: Sequence[int], m: int) -> tuple[list[int], list[float]]:
        """The m most frequent followers in the text of the longest known n-gram at the end of text + path.

        Ties go to the follower seen last. Returns token ids and their frequencies, the largest first; nothing
        if not even the last min_match tokens have occurred with a follower.
        """
        tail = (*self.token_ids[-self._max :], *path)[-self._max :]
        for n in range(len(tail), self._min - 1, -1):
            followers = self._followers.get(tail[len(tail) - n :])
            if followers:
                best = heapq.nlargest(m, followers.items(), key=lambda item: item[1])
                total = sum(count for count, _ in followers.values())
                return [token for token, _ in best], [count / total for _, (count, _) in best]
        return [], []


class NgramDrafter:
    """A `Drafter` of one `NgramIndex` per session. The session's processors do not act on its frequencies."""

    kind = "ngram"

    def __init__(
        self, *, min_match: int = 1, max_match: int = 4, num_candidates: int = 8, max_leaves: int = 64
    ) -> None:
        NgramIndex(min_match, max_match)
        self.max_leaves = max_leaves
        self._ngrams = (min_match, max_match)
        self._num_candidates = num_candidates
        self._indices: dict[str, NgramIndex] = {}
        self._outstanding: dict[str, list[int]] = {}
        """Tokens that are not in the index yet, the last first."""

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState) -> None:
        """Takes any session."""
        self._indices[session_id] = NgramIndex(*self._ngrams)
        self._outstanding[session_id] = list(reversed(token_ids))

    def prefill(self) -> bool:
        """Indexes the next few thousand tokens of the session that waits longest."""
        session_id = next(iter(self._outstanding), None)
        if session_id is None:
            return False
        self._index(session_id, _PREFILL_TOKENS)
        return True

    def ready(self, session_id: str) -> bool:
        """Whether the whole context is indexed."""
        return session_id not in self._outstanding

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Looks every leaf up."""
        token_ids = torch.zeros(len(leaves), self._num_candidates, dtype=torch.int64)
        log_q = torch.full((len(leaves), self._num_candidates), -math.inf)
        for row, leaf in enumerate(leaves):
            index = self._indices.get(leaf.session_id)
            if index is None:
                raise DrafterSessionError(leaf.session_id, "is not open")
            ids, frequencies = index.candidates(leaf.path, self._num_candidates)
            if ids:
                token_ids[row, : len(ids)] = torch.tensor(ids)
                log_q[row, : len(ids)] = torch.tensor(frequencies).log()
        return Candidates(token_ids, log_q)

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Indexes the committed tokens."""
        outstanding = self._outstanding.get(session_id)
        if outstanding is not None:
            outstanding[:0] = reversed(token_ids)
            return
        for token_id in token_ids:
            self._indices[session_id].append(token_id)

    def shutdown(self) -> None:
        """There is nothing outside this process."""

    def close(self, session_id: str) -> None:
        """Forgets the session."""
        self._indices.pop(session_id, None)
        self._outstanding.pop(session_id, None)

    def check_integrity(self) -> None:
        """Asserts that only open sessions hold anything."""
        assert self._outstanding.keys() <= self._indices.keys()
        assert all(self._outstanding.values())

    def _index(self, session_id: str, num_tokens: int) -> None:
        outstanding, index = self._outstanding[session_id], self._indices[session_id]
        for _ in range(min(num_tokens, len(outstanding))):
            index.append(outstanding.pop())
        if not outstanding:
            del self._outstanding[session_id]
