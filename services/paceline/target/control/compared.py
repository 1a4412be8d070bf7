"""Fate of each producer's tokens in one round, for the record of their acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.tree import Producer, Proposal

NUM_RANKS = 3
"""Ranks that are counted."""


@dataclass(slots=True)
class Compared:
    """Fate of one producer's tokens in a round."""

    places: int = 0
    """Places on the accepted path, its end included, for which it had proposed tokens."""
    predicted: float = 0.0
    """Sum of the probabilities that it claimed for these."""
    first: int = 0
    """Places at which its likeliest token was accepted."""
    any: int = 0
    """Places at which one of its tokens was accepted."""


def compare(proposal: Proposal, path: Sequence[int], producer: Producer) -> Compared:
    """Compares the tokens of one producer with the target's along the accepted ``path``."""
    result = Compared()
    if not proposal.claims:
        return result
    accepted: dict[int, int | None] = dict(zip([-1, *path], [*path, None], strict=True))
    likeliest: dict[int, tuple[float, bool]] = {}  # by place: the producer's own likeliest token, and if it was right
    for index, claims in enumerate(proposal.claims):
        parent = proposal.parent(index)
        claim = next((prob for other, prob in claims if other is producer), None)
        if claim is None or parent not in accepted:
            continue
        result.predicted += claim
        right = accepted[parent] == index
        result.any += right
        if parent not in likeliest or claim > likeliest[parent][0]:
            likeliest[parent] = claim, right
    result.places = len(likeliest)
    result.first = sum(right for _, right in likeliest.values())
    return result


class RankCounts:
    """Fate of a draft's tokens since the engine started, by their rank among those that were verified for one place."""

    def __init__(self) -> None:
        self.verified = [0] * NUM_RANKS
        """Places on accepted paths, ends included, with a token of this rank, where none before it was right."""
        self.accepted = [0] * NUM_RANKS
        """Those at which it was."""

    def add_chain(self, num_verified: int, num_accepted: int) -> None:
        """Takes a round with a chain of the draft alone, of which so many places were on the accepted path."""
        self.verified[0] += num_verified
        self.accepted[0] += num_accepted

    def add(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Takes a round whose accepted tokens are ``path``."""
        if not proposal.node_ids:
            return
        if not proposal.claims:  # a chain of one producer
            if proposal.producer is Producer.DRAFT:
                self.add_chain(min(len(path) + 1, len(proposal.node_ids)), len(path))
            return
        accepted: dict[int, int | None] = dict(zip([-1, *path], [*path, None], strict=True))
        places: dict[int, list[tuple[float, int]]] = {}
        for index, claims in enumerate(proposal.claims):
            if (parent := proposal.parent(index)) in accepted:
                places.setdefault(parent, []).extend((-p, index) for by, p in claims if by is Producer.DRAFT)
        for parent, found in places.items():
            for rank, (_, index) in enumerate(sorted(found)[:NUM_RANKS]):
                self.verified[rank] += 1
                if accepted[parent] == index:
                    self.accepted[rank] += 1
                    break


def compare_all(proposal: Proposal, path: Sequence[int]) -> list[Compared]:
    """``compare`` for every producer, by its number; of a chain in one pass."""
    if not proposal.node_ids:
        return _NOTHING
    if not proposal.claims:  # a chain of one producer
        places = min(len(path) + 1, len(proposal.node_ids))
        results = [*_NOTHING]
        results[proposal.producer] = Compared(places, sum(proposal.probs[:places]), len(path), len(path))
        return results
    if not proposal.is_chain:
        makers = {producer for claims in proposal.claims for producer, _ in claims}
        return [compare(proposal, path, producer) if producer in makers else Compared() for producer in Producer]
    results = [Compared() for _ in Producer]
    for index, claims in enumerate(proposal.claims[: len(path) + 1]):  # the others follow a token that was wrong
        right = index < len(path)
        for producer, prob in claims:  # a producer predicts a token once
            result = results[producer]
            result.places += 1
            result.predicted += prob
            result.first += right
            result.any += right
    return results


_NOTHING = [Compared() for _ in Producer]
