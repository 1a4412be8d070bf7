"""Fate of the tokens of one round, for the record of their acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.tree import Producer, Proposal

NUM_RANKS = 3
"""Ranks that are counted."""


@dataclass(slots=True)
class Compared:
    """Fate of a proposal's tokens."""

    places: int = 0
    """Places on the accepted path, its end included, for which it had tokens."""
    predicted: float = 0.0
    """Sum of their probabilities, before calibration."""
    first: int = 0
    """Places at which its likeliest token was accepted."""
    any: int = 0
    """Places at which one of its tokens was accepted."""


def compare(proposal: Proposal, path: Sequence[int]) -> Compared:
    """Compares the nodes of a proposal with the target's tokens along the accepted ``path``."""
    if not proposal.node_ids:
        return Compared()
    if proposal.is_chain:
        places = min(len(path) + 1, len(proposal.node_ids))
        return Compared(places, sum(proposal.probs[:places]), len(path), len(path))
    result = Compared()
    accepted: dict[int, int | None] = dict(zip([-1, *path], [*path, None], strict=True))
    likeliest: dict[int, tuple[float, bool]] = {}  # by place: its likeliest token, and if it was right
    for index, prob in enumerate(proposal.probs):
        if (parent := proposal.parent(index)) not in accepted:
            continue
        right = accepted[parent] == index
        result.predicted += prob
        result.any += right
        if parent not in likeliest or prob > likeliest[parent][0]:
            likeliest[parent] = prob, right
    result.places = len(likeliest)
    result.first = sum(right for _, right in likeliest.values())
    return result


class RankCounts:
    """Fate of a draft's tokens since the engine started, by their rank among the tokens verified for one place."""

    def __init__(self) -> None:
        self.verified = [0] * NUM_RANKS
        """Places on accepted paths, ends included, with a token of this rank, where none before it was right."""
        self.accepted = [0] * NUM_RANKS
        """Places among these where this token was accepted."""

    def add(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Counts a round whose accepted tokens are ``path``; only nodes of a draft count."""
        if proposal.producer is not Producer.DRAFT or not proposal.node_ids:
            return
        if proposal.is_chain:
            self.verified[0] += min(len(path) + 1, len(proposal.node_ids))
            self.accepted[0] += len(path)
            return
        accepted: dict[int, int | None] = dict(zip([-1, *path], [*path, None], strict=True))
        places: dict[int, list[tuple[float, int]]] = {}
        for index, prob in enumerate(proposal.probs):
            if (parent := proposal.parent(index)) in accepted:
                places.setdefault(parent, []).append((-prob, index))
        for parent, found in places.items():
            for rank, (_, index) in enumerate(sorted(found)[:NUM_RANKS]):
                self.verified[rank] += 1
                if accepted[parent] == index:
                    self.accepted[rank] += 1
                    break
