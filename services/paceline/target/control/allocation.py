"""How many draft tokens of which session a step verifies: the choice with the most expected tokens per second.

A step over n sessions that verifies draft tokens with path probabilities p_1 >= p_2 >= .. yields, with the m likeliest,

    E(m) = n + p_1 + .. + p_m  tokens  in  D(m) = h + C(n) + C(t + m) - C(t)  seconds,

where C is the measured cost of a step by its tokens (``cost.py``), h what passes between two steps, and t the tokens
that the step computes anyway: n, and prefill chunks, whose own cost is the same whatever is drafted. The m with the
largest E / D is chosen. A path probability never exceeds that of the node before it, so the likeliest m tokens are
always prefixes of chains, and E is concave; C is lumpy, so every m is looked at, up to where a convex function below C
proves that none further can be better.

Under the rejection rule whether a position is proposed must not depend on drawn values, nor on anything that does: not
on the probabilities of nodes, and not on how long the chain is. Such a session offers the same from averages of its
earlier rounds, whatever its chain, as soon as there is a first token (``blind_offer``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.tree import Chain
from paceline.target.control.step_cost import Average, StepCost

PRIOR_ACCEPTANCE = 0.7
_ENGINE_WEIGHT, _SESSION_WEIGHT = 8.0, 32.0
_SESSION_KEEP = 0.98
_ENGINE_KEEP = 0.998
_IDLE_KEEP = 0.97
_LENGTHS_KEPT = 1024.0


class StepTimes(Protocol):
    """Seconds of a target step by its tokens: learned while serving (``StepCost``), or given (``plan``)."""

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """Of a step with so many tokens."""
        ...

    def floor(self, num_tokens: int) -> float:
        """A convex function below ``seconds``."""
        ...


@dataclass(slots=True)
class Hits:
    """Verified draft tokens up to the first rejection, fading; leaning on ``parent`` with the weight of a few."""

    parent: Hits | None = None
    prior: float = PRIOR_ACCEPTANCE
    """Without a parent: what to begin with."""
    trials: float = 0.0
    predicted: float = 0.0
    """Sum of the nodes' own probabilities."""
    accepted: float = 0.0

    def add(self, trials: int, predicted: float, accepted: int) -> None:
        """Takes what a round has decided, here and in the parent."""
        keep = (_ENGINE_KEEP if self.parent is None else _SESSION_KEEP) ** trials
        self.trials = keep * self.trials + trials
        self.predicted = keep * self.predicted + predicted
        self.accepted = keep * self.accepted + accepted
        if self.parent is not None:
            self.parent.add(trials, predicted, accepted)

    def fade(self) -> None:
        """A round passed without a trial: what was known here counts less, so that bad luck does not last."""
        self.trials *= _IDLE_KEEP
        self.predicted *= _IDLE_KEEP
        self.accepted *= _IDLE_KEEP

    def forget(self) -> None:
        """Another draft serves from now on."""
        self.trials = self.predicted = self.accepted = 0.0

    def rate(self) -> float:
        """Probability that a draft token is accepted, given that those before it were."""
        prior, weight = (self.prior, _ENGINE_WEIGHT) if self.parent is None else (self.parent.rate(), _SESSION_WEIGHT)
        return (self.accepted + weight * prior) / (self.trials + weight)

    def correction(self) -> float:
        """What the nodes' own probabilities have to be multiplied by."""
        prior, weight = (1.0, _ENGINE_WEIGHT) if self.parent is None else (self.parent.correction(), _SESSION_WEIGHT)
        return (self.accepted + weight * prior) / (self.predicted + weight)


def first_tokens(chain: Chain, num_tokens: int) -> Chain:
    """The chain's first tokens."""
    if len(chain) <= num_tokens:
        return chain
    n = max(0, num_tokens)
    return Chain(chain.node_ids[:n], chain.token_ids[:n], chain.probs[:n], chain.qs[:n])


def offer(chain: Chain, num_wanted: int, hits: Hits, *, extend: bool = False) -> list[float]:
    """Coupled rule: probabilities of a session's draft tokens, each given those before it.

    At most ``num_wanted``. ``extend``: as if its draft had already sent that many.
    """
    correction = hits.correction()
    probs = [min(1.0, correction * prob) for prob in chain.probs[:num_wanted]]
    if extend:
        probs.extend([hits.rate()] * (num_wanted - len(probs)))
    return probs


def blind_offer(num_wanted: int, hits: Hits) -> tuple[float, ...]:
    """Rejection rule: the same from earlier rounds alone, for as many tokens as may be proposed, there or not."""
    return (hits.rate(),) * num_wanted


def allot(
    offers: Sequence[Sequence[float]],
    cost: StepTimes,
    *,
    num_sessions: int,
    num_context: int,
    limit: int,
    overhead_s: float = 0.0,
) -> list[int]:
    """How many draft tokens of each session to verify: the m of the module's head.

    Args:
        offers: of each session, see ``offer`` and ``blind_offer``.
        num_sessions: n, sessions that the step yields tokens for.
        num_context: t, tokens that the step computes anyway.
        limit: the most draft tokens in all.
        overhead_s: h.

    As many as offered before the cost of any step is known.
    """
    counts = [0] * len(offers)
    if not cost.known:
        for i, probs in enumerate(offers):
            counts[i] = min(len(probs), limit)
            limit -= counts[i]
        return counts
    heap = [(-probs[0], i) for i, probs in enumerate(offers) if probs]
    heapq.heapify(heap)
    order: list[int] = []
    num_best = 0
    base_s = overhead_s + cost.seconds(num_sessions) - cost.seconds(num_context)
    tokens = float(num_sessions)
    best = tokens / (base_s + cost.seconds(num_context))
    while heap and len(order) < limit:
        path, i = heap[0]
        at = num_context + len(order)
        floor_s = cost.floor(at)
        # With j more: at most (tokens + j * path) / (floor + j * slope), which lies between these two.
        if -path <= best * (cost.floor(at + 1) - floor_s) and tokens <= best * (base_s + floor_s):
            break
        tokens -= path
        order.append(i)
        counts[i] += 1
        probs = offers[i]
        if counts[i] < len(probs):
            heapq.heapreplace(heap, (path * probs[counts[i]], i))
        else:
            heapq.heappop(heap)
        value = tokens / (base_s + cost.seconds(at + 1))
        if value > best:
            best, num_best = value, len(order)
    for i in order[num_best:]:
        counts[i] -= 1
    return counts


def ideal_gain(cost: StepTimes, num_sessions: int, acceptance: float, k: int, overhead_s: float = 0.0) -> float:
    """How many times the tokens per second of plain decoding an ideal draft would bring at this load, at least 1.

    Ideal: every session always has a proposal of k tokens, each accepted with probability a given those before it.
    Of n sessions, m = q n + r draft tokens then yield n (1 + a + .. + a^q) + r a^(q+1) tokens, and the gain is

        max over 0 <= m <= n k of  (n (1 + a + .. + a^q) + r a^(q+1)) / n * (h + C(n)) / (h + C(n + m)).
    """
    if not cost.known or num_sessions == 0:
        return 1.0
    plain_s = overhead_s + cost.seconds(num_sessions)
    tokens, path, best = float(num_sessions), acceptance, 1.0
    at = num_sessions
    for _ in range(k):
        for _ in range(num_sessions):
            at += 1
            tokens += path
            best = max(best, tokens / num_sessions * plain_s / (overhead_s + cost.seconds(at)))
        path *= acceptance
        floor_s, slope = cost.floor(at), cost.floor(at + 1) - cost.floor(at)
        rate = best * num_sessions / plain_s
        if path <= rate * slope and tokens <= rate * (overhead_s + floor_s):
            break
    return best


def load_class(num_sessions: int) -> int:
    """What was learned beside so many sessions holds for 1, 2, 3 and 4, 5 to 8, 9 to 16, .. of them."""
    return max(0, num_sessions - 1).bit_length()


@dataclass(slots=True)
class Lengths:
    """How long the proposals of the last few hundred rounds were; older ones fade."""

    _counts: dict[int, float] = field(default_factory=dict)
    _total: float = 0.0

    def add(self, length: int) -> None:
        """Takes a round."""
        self._counts[length] = self._counts.get(length, 0.0) + 1.0
        self._total += 1.0
        if self._total >= _LENGTHS_KEPT:
            self._counts = {k: count / 2 for k, count in self._counts.items() if count >= 1.0}
            self._total = sum(self._counts.values())

    def shares(self) -> dict[int, float]:
        """Of the rounds, by length; empty before the first."""
        counts = dict(self._counts)
        total = sum(counts.values())
        return {length: count / total for length, count in counts.items()}

    def mean(self) -> float:
        """0 before the first round."""
        return sum(length * share for length, share in self.shares().items())


@dataclass(slots=True)
class RowBudget:
    """What one engine has measured, and its decisions by ``allot``. ``adaptive`` False: every proposal in full."""

    adaptive: bool = True
    cost: StepCost = field(default_factory=StepCost)
    overhead_s: Average = field(default_factory=lambda: Average(0.05))
    """What passes between two steps while there is something to do."""
    lengths: Lengths = field(default_factory=Lengths)
    """What was chosen."""
    coupled: Hits = field(default_factory=Hits)
    rejection: Hits = field(default_factory=Hits)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Takes the duration of a step that only decoded."""
        self.cost.observe(num_tokens, seconds)

    def plain_s(self, num_sessions: int) -> float:
        """Seconds of a plain step of so many sessions, start to start."""
        return self.overhead_s.get(0.0) + self.cost.seconds(num_sessions)

    def gain(self, num_sessions: int, acceptance: float, k: int) -> float:
        """See ``ideal_gain``."""
        return ideal_gain(self.cost, num_sessions, acceptance, k, self.overhead_s.get(0.0))

    def allot(self, offers: Sequence[Sequence[float]], *, num_sessions: int, num_context: int, limit: int) -> list[int]:
        """See ``allot``."""
        return allot(
            offers,
            self.cost,
            num_sessions=num_sessions,
            num_context=num_context,
            limit=limit,
            overhead_s=self.overhead_s.get(0.0),
        )
