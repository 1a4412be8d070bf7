"""Draft tokens without a draft: the tokens that followed a session's last ones earlier in its own text.

    ... the cat sat on the mat . the cat sat ▌      match: ``the cat sat``, 3 tokens; then ``on the mat .``
        └────────────┘ └─────────┘

It needs no draft and no message, so it serves a miss immediately, and a session without a draft as well. If a draft has
tokens, too, the proposal with more expected tokens is verified (``TargetSession.proposal``). Looked-up tokens compete
for verification like any others (``control/allocation.py``), by their probability of acceptance. It is estimated by the
length of the match: the next token's from earlier matches of that length, the one after it from matches longer by one.
Every prediction is compared with the tokens that the target decides, proposed or not, so learning these shares costs no
verification. The text is only followed when a proposal is requested: where none could have gain, it costs nothing.

For the coupled rule and greedy decoding only, where a proposal can change only the time. Under the rejection rule such
a token is drawn from a point mass: it would be accepted with p(x) alone. It could replace the draft's token only if the
choice between the two did not depend on drawn tokens, but a match does.

The idea: prompt lookup decoding (Saxena 2023). It runs in every step, so it uses a table of pairs, which takes 0.2
microseconds a token. The automaton of ``drafters/suffix.py`` takes 1.8 and four times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.statistics import DecayingRatio
from paceline.core.tree import NO_PROPOSAL, Producer, Proposal
from paceline.target.control.allocation import LEAST_PATH

SHORTEST, LONGEST = 2, 8
"""Tokens of a match. Longer ones count as the longest."""

_PRIOR = 0.2
_INDEXED_AT_ONCE = 4096
"""Tokens indexed when a proposal is asked for: about a millisecond."""


def new_shares() -> tuple[DecayingRatio, ...]:
    """Shares of right predictions in all sessions of an engine, by the length of the match; nothing is known yet."""
    return tuple(DecayingRatio.of_engine() for _ in range(SHORTEST, LONGEST + 1))


class Lookup:
    """Predictions from one session's text, by its pairs of tokens. O(1) per token."""

    __slots__ = ("_at", "_followed", "_indexed", "_limit", "_match", "_pairs", "_proposal", "_shares", "_tokens")

    def __init__(self, tokens: list[int], shares: Sequence[DecayingRatio]) -> None:
        """``tokens``: the session's own list, which grows. ``shares``: the engine's (``new_shares``)."""
        self._tokens = tokens
        self._shares = tuple(DecayingRatio.of_session(share) for share in shares)
        self._pairs: dict[tuple[int, int], int] = {}  # two tokens -> the last index of a token that followed them
        self._indexed = SHORTEST  # tokens[:_indexed] are known as followers
        self._at = -1  # index of the token that followed the match; -1: there is no match
        self._match = 0
        self._followed = -1  # length of the text of which this is the match
        self._proposal: Proposal | None = None  # made once a round, if at all
        self._limit = 0  # for which it was made

    def _follow(self) -> None:
        """Scores the last prediction against the tokens since, and looks up the new end of the text."""
        tokens, at, match = self._tokens, self._at, self._match
        if at >= 0:
            for token_id in tokens[self._followed :]:
                same = tokens[at] == token_id
                self._shares[min(match, LONGEST) - SHORTEST].add(int(same), 1, 1)
                if not same:
                    break
                at, match = at + 1, match + 1
        self._proposal, self._followed = None, len(tokens)
        end = min(len(tokens), self._indexed + _INDEXED_AT_ONCE)
        for i in range(self._indexed, end):
            self._pairs[tokens[i - 2], tokens[i - 1]] = i
        self._indexed = max(self._indexed, end)
        known = end == len(tokens) >= SHORTEST
        self._at = self._pairs.get((tokens[-2], tokens[-1]), -1) if known else -1
        if self._at >= 0:  # count how many more tokens before the pair are the same
            end, match = len(tokens), SHORTEST
            while match < min(LONGEST, self._at) and tokens[self._at - 1 - match] == tokens[end - 1 - match]:
                match += 1
            self._match = match

    def proposal(self, num_tokens: int) -> Proposal:
        """Proposes at most ``num_tokens`` that followed the match, without nodes; empty if there is no match.

        Where it reaches the end of the text it repeats itself, as a periodic text does. It ends where it is almost
        certain to be wrong.
        """
        if num_tokens <= 0:
            return NO_PROPOSAL
        if self._followed != len(self._tokens):
            self._follow()
        if self._at < 0:
            return NO_PROPOSAL
        if self._proposal is None or self._limit < num_tokens:
            self._proposal, self._limit = self._predicted(num_tokens), num_tokens
        return self._proposal.first(num_tokens)

    def _predicted(self, num_tokens: int) -> Proposal:
        period = len(self._tokens) - self._at  # tokens [_at, len) are known; beyond them the prediction repeats
        token_ids: list[int] = []
        probs: list[float] = []
        path = 1.0
        for i in range(num_tokens):
            prob = self._shares[min(self._match + i, LONGEST) - SHORTEST].value(_PRIOR)
            path *= prob
            if path < LEAST_PATH:
                break
            token_ids.append(self._tokens[self._at + i % period])
            probs.append(prob)
        return Proposal(tuple(token_ids), (None,) * len(probs), tuple(probs), producer=Producer.LOOKUP)
