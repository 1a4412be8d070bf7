"""Probability that the target's next token is the draft's rank-r candidate, learned while serving.

A draft's own probabilities are over- or under-confident, and under the coupled rule the ranking includes noise, so
neither is the chance of a hit. It is counted instead: by rank, and by a bin of the *gap* that separates the candidate
from the best one. A table of one session leans on the engine-wide table, which leans on a prior (softmax of the
scores), each with the weight of a few observations; old observations fade.

Under the rejection rule rank 0 is the sampled token and its probability is that of being accepted. It depends on q,
never on which token was drawn, so that no decision made by it can bias the output.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from paceline.core.statistics import DecayingRatio
from paceline.messages import record

_EDGES = tuple(0.03 * 2.0**i for i in range(10))
"""Edges between the bins of the gap, in nats: 0.03 to 15."""
_NUM_BINS = len(_EDGES) + 1

_RANKED_MASS = 0.95
ACCEPTANCE = 0.75
"""Share of draft tokens that the target is taken to accept before any was tried."""


@record
class Evidence:
    """Evidence on the candidates of one expansion before the target decides; one entry per rank."""

    gaps: tuple[float, ...]
    """Nats >= 0. Rank 0: to the second best, inf without one. Others: from the best."""
    priors: tuple[float, ...]
    """Probabilities to use before anything was observed."""


def ranked(scores: Sequence[float]) -> Evidence:
    """Evidence under the coupled rule and greedy decoding, from the candidates' scores, best first."""
    if not scores:
        return Evidence((), ())
    best = scores[0]
    gaps = [best - score for score in scores]
    weights = [math.exp(-gap) for gap in gaps]
    scale = _RANKED_MASS / sum(weights)
    gaps[0] = gaps[1] if len(gaps) > 1 else math.inf
    return Evidence(tuple(gaps), tuple([weight * scale for weight in weights]))


def sampled(log_q: Sequence[float], behind: Sequence[float]) -> Evidence:
    """Evidence under the rejection rule.

    Args:
        log_q: the two largest of all tokens, in nats.
        behind: by how much the score of each guessed sibling is below the best one, in nats.
    """
    gaps = (log_q[0] - log_q[1] if len(log_q) > 1 else math.inf, *behind)
    weights = [math.exp(-gap) for gap in gaps[1:]]
    scale = (1.0 - ACCEPTANCE) / max(sum(weights), 1.0)
    return Evidence(gaps, (ACCEPTANCE, *(weight * scale for weight in weights)))


def guessed(behind: Sequence[float]) -> Evidence:
    """Evidence on a bonus token, which the target draws with nothing to verify: the sampled token is a guess like any.

    Args:
        behind: by how much each guess's score is below the best one, in nats, in ascending order.
    """
    if not behind:
        return Evidence((), ())
    weights = [math.exp(-gap) for gap in behind]
    scale = _RANKED_MASS / max(sum(weights), 1.0)
    first = behind[1] - behind[0] if len(behind) > 1 and behind[0] < math.inf else math.inf
    return Evidence((first, *behind[1:]), tuple([weight * scale for weight in weights]))


class Calibration:
    """Share of hits by rank and bin of the gap, leaning on ``parent`` or, without one, on the prior.

    ``weight`` is how many observations that is worth; ``horizon`` how many observations of a bin are remembered.
    """

    def __init__(
        self,
        num_ranks: int,
        parent: Calibration | None = None,
        *,
        weight: float = 8.0,
        horizon: float = 512.0,
    ) -> None:
        keep = 1.0 - 1.0 / horizon
        base: list[list[DecayingRatio]] = [] if parent is None else parent._ratios
        # [rank][bin]; ranks beyond ``num_ranks`` are the parent's own.
        self._ratios: list[list[DecayingRatio]] = [
            [DecayingRatio(keep, weight, base[r][at] if r < len(base) else None) for at in range(_NUM_BINS)]
            for r in range(num_ranks)
        ] + base[num_ranks:]

    def probabilities(self, evidence: Evidence) -> list[float]:
        """Probability that the target takes each candidate: non-increasing in rank, of sum at most 1.

        The value of rank 0 depends on its own gap and prior only.
        """
        probs = [
            ratios[bisect_right(_EDGES, gap)].value(prior)
            for ratios, gap, prior in zip(self._ratios, evidence.gaps, evidence.priors, strict=False)
        ]
        probs += evidence.priors[len(probs) :]
        least = math.inf
        for rank, prob in enumerate(probs):
            if prob > least:
                probs[rank] = least
            else:
                least = prob
        rest = sum(probs[1:])
        if probs and rest > 1.0 - probs[0]:
            scale = (1.0 - probs[0]) / rest
            probs[1:] = [prob * scale for prob in probs[1:]]
        return probs

    def first(self) -> tuple[tuple[float, ...], list[float], list[float], float]:
        """The edges of the bins, and the probability of rank 0 in each as ``constants[bin] + slopes[bin] * prior``; the
        prior is its share of the last number, the mass of what ``ranked`` takes."""
        constants = [ratio.value(0.0) for ratio in self._ratios[0]]
        slopes = [ratio.value(1.0) - constant for ratio, constant in zip(self._ratios[0], constants, strict=True)]
        return _EDGES, constants, slopes, _RANKED_MASS

    def observe(self, gaps: Sequence[float], rank: int | None, first_rank: int = 0) -> None:
        """Takes the rank of the candidate that the target took, None for none of them, here and in the parent.

        Ranks below ``first_rank`` were not on trial.
        """
        for r, (ratios, gap) in enumerate(zip(self._ratios, gaps, strict=False)):
            if r >= first_rank:
                ratios[bisect_right(_EDGES, gap)].add(1.0 if r == rank else 0.0, 1.0)
