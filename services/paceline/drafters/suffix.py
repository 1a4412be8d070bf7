"""Suffix decoding: finds the longest end of the text that occurred before, here or in another text, and its followers.

The method is SuffixDecoding (Oliaro et al. 2024, 2411.04975). Candidates are the followers of the longest match of the
last ``max_tree_depth`` tokens, with their frequencies. Texts are the session's own, outputs of other sessions with the
same salt, and a corpus loaded at start-up. It helps where outputs repeat long passages: agents that edit one file again
and again, or answer many similar requests.

A suffix automaton (Blumer et al. 1985) of n tokens has at most 2 n states; adding a token is amortized O(1) plus
``max_tree_depth`` counts, and a match takes one look-up per token.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.processors import SamplerState
from paceline.drafters.protocol import Candidates, Leaf, OfSessions, Stateless

_PREFILL_TOKENS = 1024
_PARTS, _PART_COST = 4, 16
"""Shared texts are dropped in parts: an automaton has at most 1/4 of their tokens, and counts as 16 tokens more."""


class SuffixAutomaton:
    """All substrings of some texts of token ids, and how often each of at most ``max_depth`` + 1 tokens occurs.

    A *state* stands for substrings that end at the same places, and its longest has ``_length`` tokens. Its *link* is
    the state of the longest suffix that also ends at other places.
    """

    __slots__ = ("_count", "_depth", "_last", "_length", "_link", "_next", "num_tokens")

    def __init__(self, max_depth: int) -> None:
        """``max_depth``: tokens of the longest match."""
        self._depth = max_depth + 1  # a match and its follower
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._last = [0]  # tokens of all texts when the state was last extended to
        self._count = [0]  # exact for states that hold a substring of at most _depth tokens
        self.num_tokens = 0

    def append(self, cursor: Cursor, token_id: int) -> None:
        """Adds a token to the text that ``cursor`` is at the end of."""
        cursor.end = self._extended(cursor.end, token_id)
        self.num_tokens += 1
        state, length = self._shrunk(cursor.state, cursor.length)
        state, length = self._shrunk(self._next[state][token_id], min(length + 1, self._depth))
        cursor.state, cursor.length = state, length
        while state > 0:
            self._count[state] += 1
            self._last[state] = self.num_tokens
            state = self._link[state]

    def _shrunk(self, state: int, length: int) -> tuple[int, int]:
        """Returns the state of the last ``length`` tokens of a substring of ``state``, which is at least as long."""
        while state > 0 and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def _extended(self, end: int, token_id: int) -> int:
        """The state of the text that ends in state ``end``, and one token more."""
        follower = self._next[end].get(token_id)
        if follower is not None:
            if self._length[follower] == self._length[end] + 1:
                return follower
            return self._split(end, token_id, follower)
        new = self._new(self._length[end] + 1)
        state = end
        while state >= 0 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._link[state]
        if state < 0:
            self._link[new] = 0
        else:
            follower = self._next[state][token_id]
            exact = self._length[follower] == self._length[state] + 1
            self._link[new] = follower if exact else self._split(state, token_id, follower)
        return new

    def _split(self, state: int, token_id: int, follower: int) -> int:
        """Moves the shorter substrings of ``follower``, which end a text now, to a state of their own; returns it."""
        clone = self._new(self._length[state] + 1)
        self._next[clone] = dict(self._next[follower])
        self._link[clone], self._count[clone] = self._link[follower], self._count[follower]
        self._last[clone] = self._last[follower]
        self._link[follower] = clone
        while state >= 0 and self._next[state].get(token_id) == follower:
            self._next[state][token_id] = clone
            state = self._link[state]
        return clone

    def _new(self, length: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._count.append(0)
        self._last.append(0)
        return len(self._next) - 1

    def match(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The longest end of ``token_ids`` (at most ``max_depth`` long) that has a follower: its state and length."""
        state = length = 0
        for token_id in token_ids[-(self._depth - 1) :]:
            while token_id not in self._next[state] and state > 0:
                state = self._link[state]
                length = self._length[state]
            if token_id in self._next[state]:
                state, length = self._next[state][token_id], length + 1
        while state > 0 and not self._next[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length

    def followers(self, state: int) -> dict[int, tuple[int, int]]:
        """Counts of each token after the substrings of a state that ``match`` returned, and the place of its last
        one, in tokens of all texts."""
        return {token_id: (self._count[at], self._last[at]) for token_id, at in self._next[state].items()}

    def check_integrity(self) -> None:
        """Asserts the invariants of links; O(states)."""
        for state in range(1, len(self._next)):
            assert self._length[self._link[state]] < self._length[state]
            assert self._next[state].keys() <= self._next[self._link[state]].keys()


@dataclass(slots=True)
class Cursor:
    """The end of one text in an automaton."""

    end: int = 0
    """State of the whole text."""
    state: int = 0
    """State of its last ``length`` tokens."""
    length: int = 0


@dataclass(slots=True)
class _Session:
    """One session's text."""

    tokens: list[int]
    own: SuffixAutomaton
    salt: str
    num_private: int
    """Leading tokens that are not shared: the prompt."""
    cursor: Cursor = field(default_factory=Cursor)
    num_indexed: int = 0
    shared: SuffixAutomaton | None = None
    """The tree that its output goes to."""
    shared_cursor: Cursor = field(default_factory=Cursor)


class SharedTexts:
    """The outputs of all sessions, kept separate by salt."""

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        """``max_tokens``: maximum tokens of all salts together; 0: nothing is shared."""
        self._max_tokens, self._max_depth = max_tokens, max_depth
        self._parts: OrderedDict[str, deque[SuffixAutomaton]] = OrderedDict()  # by salt, the one used last at the end

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, plus the fixed cost of each automaton."""
        return sum(part.num_tokens + _PART_COST for parts in self._parts.values() for part in parts)

    def of(self, salt: str) -> Sequence[SuffixAutomaton]:
        """The automata of a salt, oldest first."""
        if (parts := self._parts.get(salt)) is None:
            return ()
        self._parts.move_to_end(salt)
        return parts

    def newest(self, salt: str) -> SuffixAutomaton | None:
        """The automaton that takes new tokens of a salt; None: nothing is shared."""
        if not self._max_tokens:
            return None
        parts = self._parts.setdefault(salt, deque())
        if not parts or parts[-1].num_tokens >= self._max_tokens // _PARTS:
            parts.append(SuffixAutomaton(self._max_depth))
            self._parts.move_to_end(salt)
            while self.num_tokens > self._max_tokens and self.num_tokens > _PART_COST:
                oldest, parts = next(iter(self._parts.items()))
                parts.popleft()
                if not parts:
                    del self._parts[oldest]
        return self._parts[salt][-1]


class SuffixDrafter(Stateless, OfSessions[_Session]):
    """A ``Drafter``, and a ``Head``: the suffix automata of a session's own text, of outputs with its salt, and of a
    corpus.

    The longest match decides; automata that match equally long add their counts. The session's processors do not act
    on the frequencies.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        min_match: int = 1,
        max_spec_factor: float = 4.0,
        min_token_prob: float = 0.1,
        shared_tokens: int = 0,
        corpus: Iterable[Sequence[int]] = (),
        num_candidates: int = 8,
        max_leaves: int = 64,
        kind: str = "suffix",
    ) -> None:
        """Creates a drafter without sessions.

        Args:
            max_tree_depth: tokens of the longest match.
            min_match: tokens of the shortest match.
            max_spec_factor: tokens that are proposed for each token of the context that matches.
            min_token_prob: the least frequency of a candidate among the followers.
            shared_tokens: tokens of outputs that are kept for other sessions with the same salt; 0: none.
            corpus: texts that every session may be continued from, whatever its salt.
            kind: the method that it is configured as.

        Raises:
            ValueError: the shortest match is longer than the longest one.
        """
        if not 1 <= min_match <= max_tree_depth:
            raise ValueError(f"min_match {min_match}, longest match {max_tree_depth}: 1 <= min <= longest is allowed")
        self.kind, self.max_leaves = kind, max_leaves
        self._depth, self._min_match = max_tree_depth, min_match
        self._factor, self._min_prob = max_spec_factor, min_token_prob
        self._num_candidates = num_candidates
        self._shared = SharedTexts(shared_tokens, max_tree_depth)
        self._corpus = SuffixAutomaton(max_tree_depth)
        for text in corpus:
            cursor = Cursor()
            for token_id in text:
                self._corpus.append(cursor, token_id)
        self.sessions: dict[str, _Session] = {}
        self._unready: dict[str, _Session] = {}
        """Sessions whose context is not indexed yet, the longest waiting first."""

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Opens a session."""
        num_prompt = sampler.num_tokens - sampler.num_output_tokens
        session = _Session(list(token_ids), SuffixAutomaton(self._depth), salt, num_prompt)
        self.sessions[session_id] = self._unready[session_id] = session

    def prefill(self) -> bool:
        """Indexes the next thousand tokens of waiting sessions, the longest waiting first."""
        if not self._unready:
            return False
        left = _PREFILL_TOKENS
        while left and self._unready:
            session_id, session = next(iter(self._unready.items()))
            left -= self._index(session, left)
            if session.num_indexed == len(session.tokens):
                del self._unready[session_id]
        return True

    def ready(self, session_id: str) -> bool:
        """True once the whole context is indexed."""
        return session_id not in self._unready

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Matches the end of every leaf's text."""
        rows: list[list[tuple[int, float]]] = []
        for leaf in leaves:
            best = self.candidates_of(self._session(leaf.session_id), leaf.path)
            rows.append(best + [(0, 0.0)] * (self._num_candidates - len(best)))
        token_ids = torch.tensor([[token_id for token_id, _ in row] for row in rows])
        return Candidates(token_ids, torch.tensor([[prob for _, prob in row] for row in rows]).log())

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Indexes the committed tokens, after the prompt's."""
        session = self._session(session_id)
        session.tokens.extend(token_ids)
        if session_id not in self._unready:
            self._index(session, len(token_ids))

    def close(self, session_id: str) -> None:
        """Drops the session's own automaton; its output stays among the shared texts."""
        super().close(session_id)
        self._unready.pop(session_id, None)

    def check_integrity(self) -> None:
        """Asserts that exactly the sessions that are not ready have tokens left to index."""
        behind = {name for name, session in self.sessions.items() if session.num_indexed < len(session.tokens)}
        assert behind == self._unready.keys()
        assert all(session.own.num_tokens == session.num_indexed for session in self.sessions.values())

    def _index(self, session: _Session, max_tokens: int) -> int:
        """Indexes at most ``max_tokens`` further tokens; returns how many there were."""
        end = min(len(session.tokens), session.num_indexed + max_tokens)
        for i in range(session.num_indexed, end):
            session.own.append(session.cursor, session.tokens[i])
            if i >= session.num_private:
                self._share(session, session.tokens[i])
        num_tokens = end - session.num_indexed
        session.num_indexed = end
        return num_tokens

    def _share(self, session: _Session, token_id: int) -> None:
        part = self._shared.newest(session.salt)
        if part is not session.shared:  # the last one is full: the output goes on in a new one, after what led there
            session.shared, session.shared_cursor = part, Cursor()
        if part is not None:
            part.append(session.shared_cursor, token_id)

    def candidates_of(self, session: _Session, path: Sequence[int]) -> list[tuple[int, float]]:
        """The most frequent followers of the longest match of the session's text and ``path``, with frequencies. Ties
        go to the latest one in the session's own text."""
        text = session.tokens[-self._depth :]
        automata = (session.own, *self._shared.of(session.salt), self._corpus)
        if path and self._factor < math.inf:
            longest = max(automaton.match(text)[1] for automaton in automata)
            if len(path) >= self._factor * longest:
                return []
        longest, counts = max(1, self._min_match), dict[int, tuple[int, int]]()
        for automaton in automata:
            state, length = automaton.match((*text, *path))
            if length > longest:
                longest, counts = length, {}
            if length == longest:
                for token_id, (count, last) in automaton.followers(state).items():
                    known, own_last = counts.get(token_id, (0, last if automaton is session.own else 0))
                    counts[token_id] = known + count, own_last
        total = sum(count for count, _ in counts.values())
        best = heapq.nlargest(self._num_candidates, counts.items(), key=lambda item: item[1])
        return [(token_id, count / total) for token_id, (count, _) in best if count >= self._min_prob * total]


def ngram_drafter(
    *, min_match: int = 1, max_match: int = 4, num_candidates: int = 8, max_leaves: int = 64
) -> SuffixDrafter:
    """Prompt lookup (Saxena 2023): suffix decoding of a session's own text by matches of a few tokens, however rare
    what followed is.

    Args:
        min_match: tokens of the shortest match.
        max_match: tokens of the longest match.
        num_candidates: of each leaf.
        max_leaves: the most leaves of one ``expand``.
    """
    return SuffixDrafter(
        max_tree_depth=max_match,
        min_match=min_match,
        max_spec_factor=math.inf,
        min_token_prob=0.0,
        num_candidates=num_candidates,
        max_leaves=max_leaves,
        kind="ngram",
    )
