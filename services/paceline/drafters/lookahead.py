"""Lookahead decoding: n-grams that the target generates itself, on extra rows of its verification steps.

Fu et al. 2024 (arXiv:2402.02057), Jacobi iteration in a window. Each step has extra rows for guessed tokens of W
columns and N - 1 levels. The likeliest token after each column is the next level::

                   column 0      1      2
    level 0        anchor   ──▶  x1 ──▶ x2        a chain: guesses of the tokens that follow the anchor
    level 1          a0          a1     a2        what the target said after level 0 a step ago
    level 2          b0          b1     b2        after level 1: column j sees the chain up to j, and itself
                     │           │      │
    likeliest        y0          y1     y2        N-grams: anchor a0 b0 y0,  x1 a1 b1 y1,  x2 a2 b2 y2

The session's pool keeps the G most recently seen N-grams of each first token. Then all levels move up: a1 a2 become the
next chain, and the y become level N - 2. Like prompt lookup, the pool also has the N-grams of the session's own text.
The N-grams that begin with the anchor are proposed like a head's tokens. Extra rows decide nothing: they are query rows
with pages of their own, which no committed row sees.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.processors import SamplerState
from paceline.core.tree import Proposal
from paceline.drafters.protocol import Candidates, Leaf, OfSessions, Rider, Stateless

_MOST_KEYS = 4096
"""Most first tokens in a session's pool. The pool drops the one that was seen longest ago."""
_SEEDS = 64
"""Number of tokens at the prompt's end from which the first guesses are drawn."""

Pool = OrderedDict[int, OrderedDict[tuple[int, ...], None]]
"""First token of N-grams -> their other tokens, the most recently seen at the end."""


@dataclass(slots=True)
class _Session:
    anchor: int
    levels: list[list[int]]
    """[N - 1][W] token ids of the guesses. The entry [0][0] is ignored: the anchor takes its place."""
    num_steps: int = 0
    """Steps with these guesses. After N - 2 steps none of the first random tokens is left."""
    riding: list[list[int]] = field(default_factory=list)
    """Levels in the running step; [] if the step computes none."""
    pool: Pool = field(default_factory=OrderedDict)
    text: Sequence[int] = ()
    """The last N - 1 tokens of the text, whose N-grams are in the pool."""


class LookaheadHead(Stateless, OfSessions[_Session]):
    """Implements ``paceline.drafters.protocol.Rider`` by lookahead decoding."""

    kind = "lookahead"

    def __init__(self, window: int, ngram: int, guesses: int, *, max_leaves: int = 64) -> None:
        """Sets the sizes of the window and the pool.

        Args:
            window: W, columns, at least 1.
            ngram: N, tokens of an n-gram, at least 3.
            guesses: G, n-grams kept for each first token, at least 1.
            max_leaves: the most leaves of one ``expand``.
        """
        self.max_leaves = max_leaves
        self._window, self._num_levels, self._guesses = window, ngram - 1, guesses
        self.sessions: dict[str, _Session] = {}

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Opens a session. Draws its first guesses from the prompt's last tokens, with the prompt's length as seed."""
        draw, seen = random.Random(len(token_ids)), token_ids[-_SEEDS:]
        levels = [draw.choices(seen, k=self._window) for _ in range(self._num_levels)]
        self.sessions[session_id] = session = _Session(token_ids[-1], levels)
        self._read(session, token_ids[-_MOST_KEYS:])

    @property
    def rider(self) -> Rider:
        """This drafter."""
        return self

    @property
    def num_guesses(self) -> int:
        """W - 1 tokens of level 0, and W of each other level."""
        return self._window * self._num_levels - 1

    def guesses(self, session_id: str) -> Proposal:
        """The extra tokens of the next step: a tree of one branch for each column, the last column first."""
        session = self._session(session_id)
        first, *others = session.levels
        session.riding = [[session.anchor, *first[1:]], *others]
        token_ids, parents = first[1:], [*range(-1, self._window - 2)]
        for column in reversed(range(self._window)):
            parent = column - 1
            for level in others:
                parents.append(parent)
                parent = len(token_ids)
                token_ids.append(level[column])
        return Proposal(tuple(token_ids), (None,) * len(token_ids), parents=tuple(parents))

    def learn(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Records the likeliest token after each branch of ``guesses``, in their order; (): the step computed none."""
        session = self._session(session_id)
        levels, session.riding = session.riding, []
        if not token_ids:
            return
        found = [*reversed(token_ids)]
        if session.num_steps >= self._num_levels - 1:
            for column, token_id in enumerate(found):
                key, *rest = (level[column] for level in levels)
                self._keep(session.pool, key, (*rest, token_id))
        session.num_steps += 1
        session.levels = [*levels[1:], found]

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """The pool's tokens after each leaf; n-grams that begin earlier come first, then the more recently seen."""
        token_ids = torch.zeros(len(leaves), self._guesses, dtype=torch.int64)
        log_q = torch.full((len(leaves), self._guesses), -math.inf)
        for row, leaf in enumerate(leaves):
            session = self._session(leaf.session_id)
            found = dict.fromkeys(_followers(session.pool, (session.anchor, *leaf.path)))
            for i, token_id in enumerate([*found][: self._guesses]):
                token_ids[row, i], log_q[row, i] = token_id, -(i + 1) * math.log(2)
        return Candidates(token_ids, log_q)

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Moves the anchor to the last committed token. Only ``learn`` moves the guesses."""
        session = self._session(session_id)
        session.anchor = token_ids[-1]
        self._read(session, token_ids)

    def check_integrity(self) -> None:
        """Asserts that window and pools have their sizes, and that no guesses are in a step between two steps."""
        for session in self.sessions.values():
            assert [len(level) for level in session.levels] == [self._window] * self._num_levels
            assert not session.riding, "``learn`` is called after each step with guesses"
            assert len(session.pool) <= _MOST_KEYS
            for tails in session.pool.values():
                assert 0 < len(tails) <= self._guesses
                assert all(len(tail) == self._num_levels for tail in tails)

    def _read(self, session: _Session, token_ids: Sequence[int]) -> None:
        """Puts the N-grams of further text into the pool."""
        text = [*session.text, *token_ids]
        for start in range(len(text) - self._num_levels):
            self._keep(session.pool, text[start], tuple(text[start + 1 : start + self._num_levels + 1]))
        session.text = text[-self._num_levels :]

    def _keep(self, pool: Pool, key: int, tail: tuple[int, ...]) -> None:
        """Puts an n-gram into the pool, as the one that was seen last."""
        tails = pool.setdefault(key, OrderedDict())
        pool.move_to_end(key)
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._guesses:
            tails.popitem(last=False)
        if len(pool) > _MOST_KEYS:
            pool.popitem(last=False)


def _followers(pool: Pool, tokens: tuple[int, ...]) -> Iterator[int]:
    """The tokens after ``tokens`` by n-grams that begin at any of them."""
    for start, key in enumerate(tokens):
        begun = tokens[start + 1 :]
        for tail in reversed(pool.get(key, ())):
            if len(tail) > len(begun) and tail[: len(begun)] == begun:
                yield tail[len(begun)]
