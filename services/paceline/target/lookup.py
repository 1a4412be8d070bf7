"""Draft tokens for a session whose draft has none to offer: what followed its last tokens earlier in its own text.

    ... the cat sat on the mat . the cat sat ▌      match: ``the cat sat``, 3 tokens; then ``on the mat .``
        └────────────┘ └─────────┘

It needs no draft and no message, so it serves a miss at once, and a session without a draft as well. Whether its tokens
are worth verifying is decided like that of any other (``budget.py``), by the probability that they are accepted, which
follows from the length of the match: the next token is as likely as matches of that length were right before, the one
after it as those of one more. What would have been proposed is compared with every token that the target decides,
proposed or not, so these shares are always known, and learning them costs no verification.

For the coupled rule and greedy decoding only, where what is proposed can change nothing but the time. Under the
rejection rule such a token is one drawn from a point mass: it would be accepted with p(x) alone, and it could stand in
for the draft's only where the choice between the two depends on nothing that was drawn, which a match does.

The idea: prompt lookup decoding (Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.tree import Chain
from paceline.target.control.allocation import Hits, first_tokens

SHORTEST, LONGEST = 2, 8
"""Tokens of a match. Longer ones count as the longest."""

_PRIOR = 0.2
_LEAST_PATH = 0.04
_INDEXED_AT_ONCE = 4096
"""Tokens: about a millisecond."""


def shares() -> tuple[Hits, ...]:
    """What is known of all sessions of an engine, by the length of the match: nothing yet."""
    return tuple(Hits(prior=_PRIOR) for _ in range(SHORTEST, LONGEST + 1))


class Lookup:
    """One session's text by its pairs of tokens. O(1) per token."""

    __slots__ = ("_at", "_chain", "_chain_limit", "_followed", "_hits", "_match", "_num_indexed", "_tokens")

    def __init__(self, tokens: list[int], known: Sequence[Hits]) -> None:
        """``tokens``: the session's own list, which grows. ``known``: ``shares`` of the engine."""
        self._tokens = tokens
        self._hits = tuple(Hits(hits) for hits in known)
        self._followed: dict[tuple[int, int], int] = {}  # pair -> index of the token that followed it last
        self._num_indexed = SHORTEST
        self._at = -1  # index of the token that followed the match; -1: there is no match
        self._match = 0
        self._chain: Chain | None = None  # made once a round, if at all
        self._chain_limit = 0

    def follow(self, num_tokens: int) -> None:
        """The text has grown from ``num_tokens``: counts what was foreseen of that, and looks its new end up."""
        tokens, at, match = self._tokens, self._at, self._match
        if at >= 0:
            for token_id in tokens[num_tokens:]:
                same = tokens[at] == token_id
                self._hits[min(match, LONGEST) - SHORTEST].add(1, 1.0, int(same))
                if not same:
                    break
                at, match = at + 1, match + 1
        self._chain = None
        end = len(tokens)
        followed = self._followed
        until = min(end, self._num_indexed + _INDEXED_AT_ONCE)
        for i in range(self._num_indexed, until):
            followed[tokens[i - 2], tokens[i - 1]] = i
        self._num_indexed = max(self._num_indexed, until)
        self._at = followed.get((tokens[-2], tokens[-1]), -1) if until == end >= SHORTEST else -1
        if self._at >= 0:
            match = SHORTEST
            while match < min(LONGEST, self._at) and tokens[self._at - 1 - match] == tokens[end - 1 - match]:
                match += 1
            self._match = match

    def chain(self, num_tokens: int) -> Chain:
        """What followed the match, as a proposal without nodes; empty if there is no match.

        Where it reaches the end of the text it goes on with itself, as a text that repeats does. It ends where it is
        next to certain to be wrong.
        """
        if self._at < 0 or num_tokens <= 0:
            return Chain()
        if self._chain is None or self._chain_limit < num_tokens:
            self._chain, self._chain_limit = self._foreseen(num_tokens), num_tokens
        return first_tokens(self._chain, num_tokens)

    def _foreseen(self, num_tokens: int) -> Chain:
        period = len(self._tokens) - self._at
        token_ids: list[int] = []
        probs: list[float] = []
        path = 1.0
        for i in range(num_tokens):
            prob = self._hits[min(self._match + i, LONGEST) - SHORTEST].rate()
            path *= prob
            if path < _LEAST_PATH:
                break
            token_ids.append(self._tokens[self._at + i % period])
            probs.append(prob)
        return Chain((), tuple(token_ids), tuple(probs), (None,) * len(probs))
