"""Prompt lookup: the tokens that followed the last few tokens earlier in the same text are likely to follow again.

No model and no state beyond the text itself; nothing is shared between sessions. Costs microseconds per node, and helps
where the output repeats the input (code edits, summaries, extraction). The idea is prompt lookup decoding (Saxena
2023); here the candidates carry their empirical frequencies. The target proposes from an index of its own where a
draft has no tokens (``target/lookup.py``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import torch

from paceline.config import NgramOptions
from paceline.core.processors import SamplerState
from paceline.drafters.building import Building
from paceline.drafters.protocol import Candidates, DrafterSessionError, Leaf

_PREFILL_TOKENS = 8192


class NgramIndex:
    """Followers of the n-grams of a growing text, for min_match <= n <= max_match.

    Indexing a token costs O(max_match), a look-up O(max_match + distinct followers): neither grows with the text. With
    ``counts`` it knows every follower of an n-gram and its count. Without, it knows only the place of the last one, in
    a third of the memory.
    """

    __slots__ = ("_counts", "_last", "_max", "_min", "_num_indexed", "tokens")

    def __init__(self, tokens: list[int], min_match: int, max_match: int, *, counts: bool) -> None:
        """``tokens``: the text, which its owner extends; ``extend`` follows."""
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match {min_match}, max_match {max_match}: 1 <= min <= max is allowed")
        self.tokens = tokens
        self._min, self._max = min_match, max_match
        self._num_indexed = 0  # tokens[:_num_indexed] are known as followers
        self._last: dict[tuple[int, ...], int] = {}
        self._counts: dict[tuple[int, ...], dict[int, tuple[int, int]]] | None = {} if counts else None

    @property
    def complete(self) -> bool:
        """True if the whole text is indexed."""
        return self._num_indexed == len(self.tokens)

    def extend(self, max_tokens: int) -> None:
        """Indexes at most ``max_tokens`` more tokens of the text."""
        tokens, counts = self.tokens, self._counts
        end = min(len(tokens), self._num_indexed + max_tokens)
        for n in range(self._min, self._max + 1):
            for i in range(max(self._num_indexed, n), end):
                ngram = tuple(tokens[i - n : i])
                if counts is None:
                    self._last[ngram] = i
                else:
                    followers = counts.setdefault(ngram, {})
                    followers[tokens[i]] = (followers.get(tokens[i], (0, 0))[0] + 1, i)
        self._num_indexed = end

    def last_follower(self, ngram: tuple[int, ...]) -> int:
        """Index in the text of the token that followed the n-gram last; -1 if there is none. Without counts only."""
        return self._last.get(ngram, -1)

    def candidates(self, path: Sequence[int], m: int) -> tuple[list[int], list[float]]:
        """The m most frequent followers of the longest known n-gram at the end of text + path. With counts only.

        Ties go to the follower seen last. Returns token ids and their frequencies, the largest first; nothing if not
        even the last min_match tokens have occurred with a follower.
        """
        assert self._counts is not None
        tail = (*self.tokens[-self._max :], *path)[-self._max :]
        for n in range(len(tail), self._min - 1, -1):
            followers = self._counts.get(tail[len(tail) - n :])
            if followers:
                best = heapq.nlargest(m, followers.items(), key=lambda item: item[1])
                total = sum(count for count, _ in followers.values())
                return [token for token, _ in best], [count / total for _, (count, _) in best]
        return [], []


class NgramDrafter:
    """A ``Drafter`` of one ``NgramIndex`` per session. The session's processors do not act on its frequencies."""

    kind = "ngram"
    tokens_per_leaf = 1
    conditional = True

    def __init__(
        self, *, min_match: int = 1, max_match: int = 4, num_candidates: int = 8, max_leaves: int = 64
    ) -> None:
        NgramIndex([], min_match, max_match, counts=True)  # refuses impossible lengths
        self.max_leaves = max_leaves
        self._ngrams = (min_match, max_match)
        self._num_candidates = num_candidates
        self._indices: dict[str, NgramIndex] = {}
        self._unready: dict[str, NgramIndex] = {}
        """Sessions whose context is not indexed yet, the longest waiting first."""

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Opens a session."""
        index = NgramIndex(list(token_ids), *self._ngrams, counts=True)
        self._indices[session_id] = self._unready[session_id] = index

    def prefill(self) -> bool:
        """Indexes the next few thousand tokens of the session that waits longest."""
        session_id = next(iter(self._unready), None)
        if session_id is None:
            return False
        index = self._unready[session_id]
        index.extend(_PREFILL_TOKENS)
        if index.complete:
            del self._unready[session_id]
        return True

    def ready(self, session_id: str) -> bool:
        """True once the whole context is indexed."""
        return session_id not in self._unready

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
        """Indexes the committed tokens, after the prompt's."""
        index = self._indices[session_id]
        index.tokens.extend(token_ids)
        if session_id not in self._unready:
            index.extend(len(token_ids))

    def shutdown(self) -> None:
        """Does nothing: there are no resources outside this process."""

    def close(self, session_id: str) -> None:
        """Drops the session's index."""
        self._indices.pop(session_id, None)
        self._unready.pop(session_id, None)

    def check_integrity(self) -> None:
        """Asserts that exactly the sessions that are not ready have tokens left to index."""
        assert {name for name, index in self._indices.items() if not index.complete} == self._unready.keys()


def build(building: Building) -> NgramDrafter:
    """The drafter of a configuration (``config/methods/ngram.py``)."""
    options: NgramOptions = building.options
    return NgramDrafter(min_match=options.min_match, max_match=options.max_match, max_leaves=building.max_leaves)
