"""Outcomes that a draft has prepared when a step ends: how likely each is, and how far its chain was grown.

Every draft token is accepted with probability a given its ancestors, as in 2211.17192, section 3.1. A proposal of k
tokens is then cut at j < k with probability a^j (1 - a) and accepted in full with a^k. The target's next token is the
draft's n-th other candidate (n = 1, 2, ..) with probability n^-r - (n + 1)^-r, so that F of them miss it with
probability (F + 1)^-r: the power law of 2603.03251. After full acceptance the draft's first candidate comes before
these, under the coupled rule with probability a.

The draft expands nodes best first, as ``draft/growth.py`` does, down to its least path probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from paceline.draft.growth import Growth

LEAST_PATH_PROB = Growth(k=1).min_path_prob
"""The default of a draft."""
_LEAST_POWER, MOST_POWER = 0.1, 12.0
_MOST_FOUND = 0.995
"""Share of what first choices miss that siblings are taken to hold at most."""
_MOST_LOG_RANK = 20.0


def coupled_power(acceptance: float) -> float:
    """Power r, coupled rule. Fitted to benchmarks/results/hit-rates.txt: after a rejection 3 alternatives hold the
    next token in 0.665, 0.704 and 0.784 of cases at acceptance 0.588, 0.703 and 0.883; this gives 0.67, 0.72, 0.78."""
    return max(0.1, 1.07 * acceptance + 0.16)


def rejection_powers(acceptance: float) -> tuple[float, float]:
    """(r after a rejection, r after full acceptance) under the rejection rule. Fitted to the same measurement: 3
    alternatives hold the next token in 0.414, 0.545, 0.638 and 0.716 of cases after a rejection at acceptance 0.632,
    0.663, 0.722 and 0.766, and in 0.769, 0.840, 0.879 and 0.919 after full acceptance. No less than 0.05."""
    return max(0.05, 0.41 + 3.75 * (acceptance - 0.632)), max(0.05, 1.1 + 5.3 * (acceptance - 0.632))


def expected_tokens(acceptance: float, k: float) -> float:
    """Expected tokens of a step that verifies k draft tokens, next token included: 2211.17192, equation 1."""
    return k + 1.0 if acceptance >= 1.0 else (1.0 - acceptance ** (k + 1.0)) / (1.0 - acceptance)


def crossing(is_below: Callable[[float], bool], high: float, halvings: int = 50) -> float:
    """The number from 0 to ``high`` below which ``is_below`` is True, by bisection."""
    low = 0.0
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Distribution of where a proposal is cut and which candidate the next token is."""

    acceptance: float
    """Acceptance a of a draft token, at most 1."""
    power: float
    """Power r of the module's docstring."""
    bonus_power: float | None = None
    """Rejection rule: exponent with which F candidates miss after full acceptance, (F + 1)^-bonus_power. None: coupled
    rule.
    """
    coverage: float = 1.0
    """Factor on every hit, where even the draft's first choices hit less often than the power law says."""

    @classmethod
    def derived(cls, acceptance: float, *, coupled: bool = True) -> Self:
        """The outcomes that an acceptance implies, by the measurements above."""
        if coupled:
            return cls(acceptance, coupled_power(acceptance))
        return cls(acceptance, *rejection_powers(acceptance))

    def with_siblings(self, found: float, fan_out: int) -> Self:
        """Returns these outcomes with the power of measured siblings.

        The ``fan_out`` - 1 siblings of a first choice hold the share ``found`` of the cases that it misses: 1 -
        ``fan_out`` ^ -r.
        """
        if fan_out < 2:
            return self
        power = -math.log(1.0 - min(found, _MOST_FOUND)) / math.log(fan_out)
        return replace(self, power=max(power, _LEAST_POWER))

    @classmethod
    def of_hit_rate(cls, acceptance: float, hit_rate: float, k: int, fan_out: int) -> Self:
        """Outcomes for which a draft that is never late has the hit rate ``hit_rate`` at k tokens."""
        if cls(acceptance, 0.0).ideal_hit_rate(k, fan_out) > hit_rate:
            ideal = cls(acceptance, 0.0).ideal_hit_rate(k, fan_out)
            return cls(acceptance, 0.0, coverage=hit_rate / ideal)
        power = crossing(lambda power: cls(acceptance, power).ideal_hit_rate(k, fan_out) < hit_rate, MOST_POWER)
        return cls(acceptance, power)

    def ideal_hit_rate(self, k: int, fan_out: int) -> float:
        """Hit rate of a draft that has expanded every outcome of k tokens with this fan-out."""
        return self.coverage * sum(p for _, _, p in self.of(k, fan_out))

    def of(self, k: int, fan_out: int) -> Iterator[tuple[int, int, float]]:
        """(cut at, rank, probability) of the outcomes that a tree with this fan-out can hold."""
        for position in range(k + 1):
            for rank in range(fan_out):
                probability = self.probability(k, position, rank)
                if probability > 0.0:
                    yield position, rank, probability

    def probability(self, k: int, position: int, rank: int) -> float:
        """Probability that k tokens are cut at ``position`` (k: nowhere) and the next one is this rank's candidate."""
        a, r = self.acceptance, self.power
        if position < k:
            return 0.0 if rank == 0 else a**position * (1 - a) * _tail(rank, r)
        if self.bonus_power is not None:
            return a**k * _tail(rank + 1, self.bonus_power)
        return a**k * (a if rank == 0 else (1 - a) * _tail(rank, r))

    def likeliest(self, depth: int, ranked: int, leaves: int) -> list[tuple[float, int]]:
        """(path probability, depth) of the nodes of a tree below a token, likeliest first, parents before children.

        Args:
            depth: of the tree, in tokens.
            ranked: candidates per expanded node: the likeliest and its siblings. 1: a chain.
            leaves: nodes that each depth expands: the likeliest of the depth above.
        """
        chances = self.children(ranked)
        found: list[tuple[float, int]] = []
        paths = [1.0]
        for level in range(1, depth + 1):
            paths = sorted((path * chance for path in paths[:leaves] for chance in chances if chance > 0), reverse=True)
            found += [(path, level) for path in paths]
        return sorted(found, key=lambda node: (-node[0], node[1]))

    def children(self, fan_out: int, *, bonus: bool = False) -> list[float]:
        """Probabilities of the first ``fan_out`` children of a node to be the text's next token there.

        ``bonus``: after the last token of a proposal, where the rejection rule verifies nothing.
        """
        a, r = self.acceptance, self.power
        if bonus and self.bonus_power is not None:
            return [_tail(rank, self.bonus_power) for rank in range(1, fan_out + 1)]
        return [a, *((1 - a) * _tail(rank, r) for rank in range(1, fan_out))]

    def rank(self, *, full: bool, uniform: float) -> int:
        """Rank of the next token, by a uniform number in (0, 1]."""
        if not full:
            return _inverse_tail(uniform, self.power)
        if self.bonus_power is not None:
            return _inverse_tail(uniform, self.bonus_power) - 1
        if uniform > 1 - self.acceptance:
            return 0
        return _inverse_tail(uniform / (1 - self.acceptance), self.power)


def _tail(rank: int, power: float) -> float:
    """Probability of being the rank-th, from 1."""
    return float(rank**-power - (rank + 1) ** -power)


def _inverse_tail(uniform: float, power: float) -> int:
    if -math.log(uniform) >= _MOST_LOG_RANK * power:
        return 1 << 30
    return int(uniform ** (-1.0 / power))


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tree below a proposal of k tokens after some draft steps."""

    lengths: dict[tuple[int, int], int]
    """(cut at, rank) -> draft tokens prepared below that outcome, 1 to K. Absent: a miss."""
    positions: frozenset[int]
    """Share of rounds for which at least one outcome was prepared."""
    distribution: tuple[float, ...]
    """Probability that the next proposal has 0 (miss), 1, .. K tokens."""
    num_candidates: int
    """Nodes likely enough to be expanded, given unlimited time."""
    num_outcomes: int
    """The first nodes of chains among these: no step has more to expand."""


@lru_cache(maxsize=4096)
def prepared(
    outcomes: Outcomes,
    in_flight: int,
    k: int,
    fan_out: int,
    steps: int,
    nodes: int,
    min_path_prob: float = LEAST_PATH_PROB,
) -> Prepared:
    """After ``steps`` draft steps that expanded ``nodes`` of the tree, the most probable first.

    A step extends every chain by one token at most, so no chain is longer than ``steps``, nor than ``k``. Nothing that
    is less likely than ``min_path_prob`` is expanded.
    """
    a = outcomes.acceptance
    probabilities = {(j, n): p for j, n, p in outcomes.of(in_flight, fan_out)}
    candidates = [
        (p * a**depth, -depth, outcome)
        for outcome, p in probabilities.items()
        for depth in range(k)
        if p * a**depth >= min_path_prob
    ]
    num_candidates, num_outcomes = len(candidates), sum(depth == 0 for _, depth, _ in candidates)
    candidates = sorted((c for c in candidates if -c[1] < steps), reverse=True)[: max(nodes, 0)]
    lengths: dict[tuple[int, int], int] = {}
    for _, _, outcome in candidates:  # a chain's nodes come in the order of their depth
        lengths[outcome] = lengths.get(outcome, 0) + 1
    distribution = [0.0] * (k + 1)
    for outcome, length in lengths.items():
        distribution[length] += outcomes.coverage * probabilities[outcome]
    distribution[0] = max(0.0, 1.0 - math.fsum(distribution))
    return Prepared(lengths, frozenset(j for j, _ in lengths), tuple(distribution), num_candidates, num_outcomes)
