"""Draft tokens by session and step: the choice that is expected to yield the most tokens per second.

A step over n sessions that verifies draft tokens with path probabilities p_1 >= p_2 >= .. yields, with the m likeliest,

    E(m) = n + p_1 + .. + p_m  tokens  in  D(m) = h + C(n) + C(t + m) - C(t)  seconds,

where C is the measured cost of a step by its tokens (``step_cost.py``), h the time between two steps, and t the tokens
that the step computes anyway: n, and prefill chunks, whose own cost does not depend on drafting. Sessions in prefill
count among the n: they will decode at the time that today's draft tokens would save. The m with the largest E / D is
chosen, unless its gain over n / D(0) is small: sessions that gain end sooner, which leaves smaller steps that yield
less per second. A path probability never exceeds its parent's. So the likeliest m tokens are always connected, prefixes
of chains or subtrees, and E is concave. C is lumpy, so every m is tried, up to where a convex function below C proves
that no further one can be better.

A sibling of another token begins a branch, which makes the step longer by b beyond its row (``target/branches.py``).
Such a token ranks by its path probability less b times the tokens per second. So a step has siblings where they have
positive expected gain, chains elsewhere, and D counts every branch.

On an asynchronous device plain steps follow each other without h (``target/flight.py``): D(0) is less by the share of h
that they hide, which draft tokens have to earn first.

Under the rejection rule the decision to propose at a position must not depend on drawn values. Node probabilities and
the length of the proposal depend on them. Such a session offers the averages of its earlier rounds, whatever its
proposal, as soon as there is a first token (``blind_offer``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.experiment import WINDOW, WORTH, Budget
from paceline.core.ranking import Ranked
from paceline.core.statistics import ENGINE_KEEP, SESSION_KEEP, DecayingHistogram, DecayingRatio, Ewma
from paceline.core.tree import Proposal
from paceline.target.control.step_cost import StepCost
from paceline.target.control.subtree import SubtreeOffer

PRIOR_ACCEPTANCE = 0.7
LEAST_PATH = 0.02
"""Tokens of heads and of prompt lookup end where a path is less likely: it is almost certain to be wrong."""
ENOUGH_TRIALS = WINDOW
"""Verified tokens after which an acceptance is known well enough."""
_JUDGED_STEPS = WINDOW // 2
"""Steps between two checks whether any draft token can have positive expected gain."""
_CHAINS_EVERY = WINDOW
"""One step in this many has chains only: the cost of branches is what a step with them takes beyond one without."""


class StepTimes(Protocol):
    """Seconds of a target step by its tokens: learned while serving (``StepCost``), or given (``plan``)."""

    @property
    def known(self) -> bool:
        """False before anything was measured: then no time below means anything."""
        ...

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a step that computes ``num_tokens``."""
        ...

    def floor(self, num_tokens: int) -> float:
        """A convex function of the tokens that is nowhere above ``seconds``."""
        ...


class AcceptanceHistory:
    """Acceptance of the draft tokens verified so far, up to the first rejection of each round; old rounds fade.

    A session leans on its engine's history (``parent``), and that one on a prior, with the weight of a few tokens.
    """

    def __init__(self, parent: AcceptanceHistory | None = None) -> None:
        ratio = DecayingRatio
        self._of_trials: DecayingRatio = ratio.of_engine() if parent is None else ratio.of_session(parent._of_trials)
        self._of_predicted: DecayingRatio = (
            ratio.of_engine() if parent is None else ratio.of_session(parent._of_predicted)
        )
        self._levels: tuple[tuple[DecayingRatio, DecayingRatio], ...] = (
            (self._of_trials, self._of_predicted),
            *(() if parent is None else parent._levels),
        )

    @property
    def trials(self) -> float:
        """Verified draft tokens, faded."""
        return self._of_trials.whole

    def or_better_known(self, other: AcceptanceHistory) -> AcceptanceHistory:
        """This history, or another one that has more verified tokens."""
        return other if other.trials > self.trials else self

    def add(self, trials: int, predicted: float, accepted: int, any_accepted: int | None = None) -> None:
        """Adds the result of a round, here and in the parent.

        Args:
            trials: positions where draft tokens were compared with the target's: up to the first rejection.
            predicted: sum of the nodes' own probabilities over all tokens there.
            accepted: positions where the likeliest token was accepted.
            any_accepted: positions where any token was accepted; None: each had one token.
        """
        right = accepted if any_accepted is None else any_accepted
        for of_trials, of_predicted in self._levels:
            keep = of_trials.keep**trials  # the same for both
            of_trials.part = keep * of_trials.part + accepted
            of_trials.whole = keep * of_trials.whole + trials
            of_predicted.part = keep * of_predicted.part + right
            of_predicted.whole = keep * of_predicted.whole + predicted

    def fade(self) -> None:
        """Makes this history count less after a round without a trial, so that bad luck does not last."""
        self._of_trials.fade(SESSION_KEEP)
        self._of_predicted.fade(SESSION_KEEP)

    def forget(self) -> None:
        """Starts again because another draft serves from now on."""
        self._of_trials.fade(0.0)
        self._of_predicted.fade(0.0)

    def rate(self) -> float:
        """Probability that a draft token is accepted, given that its ancestors were."""
        return self._of_trials.value(PRIOR_ACCEPTANCE)

    def correction(self) -> float:
        """Factor from the nodes' own probabilities to their probabilities of acceptance."""
        return self._of_predicted.value(1.0)


def expected_tokens(probs: Sequence[float]) -> float:
    """Tokens expected to be accepted of a proposal: the sum of its path probabilities."""
    total, path = 0.0, 1.0
    for prob in probs:
        path *= prob
        total += path
    return total


def offer(proposal: Proposal, num_wanted: int, hits: AcceptanceHistory, *, extend: bool = False) -> list[float]:
    """Coupled rule: acceptance probabilities of at most ``num_wanted`` draft tokens, each given its ancestors.

    ``extend``: as if the draft had already sent ``num_wanted`` tokens.
    """
    correction = hits.correction()
    probs = [own if (own := correction * prob) < 1.0 else 1.0 for prob in proposal.probs[:num_wanted]]
    if extend:
        probs.extend([hits.rate()] * (num_wanted - len(probs)))
    return probs


def blind_offer(num_wanted: int, hits: AcceptanceHistory) -> tuple[float, ...]:
    """Rejection rule: acceptance probabilities from earlier rounds alone, for all tokens that may be proposed."""
    return (hits.rate(),) * num_wanted


Offer = Sequence[float] | SubtreeOffer
"""Draft tokens of a session: acceptance probabilities of a chain, or the nodes of a subtree."""


def allocate_draft_tokens(
    offers: Sequence[Offer],
    cost: StepTimes,
    *,
    num_sessions: int,
    num_context: int,
    limit: int,
    overhead_s: float = 0.0,
    branch_s: float = 0.0,
    tokens_per_s: float = 0.0,
    least_gain: float = 1.0,
    hidden_s: float = 0.0,
) -> list[int]:
    """Chooses how many draft tokens of each session to verify, as the head of this module derives it.

    Args:
        offers: acceptance probabilities of each session's draft tokens, see ``offer`` and ``blind_offer``.
        num_sessions: n, the sessions of the step.
        num_context: t, the tokens that the step computes anyway.
        limit: the largest sum of all counts.
        overhead_s: h, the seconds between two steps.
        branch_s: b, the seconds that a branch costs beyond its rows.
        tokens_per_s: tokens that a second yields, by which branches are ranked.
        least_gain: minimum speedup E / D over n / D(0); below it no draft token is chosen.
        hidden_s: the part of h that a plain step does not take.

    Returns:
        The number of draft tokens of each session; a subtree's first ones in the order of its ranking. Before any step
        was measured: everything offered.
    """
    if not cost.known:
        counts = [0] * len(offers)
        for i, probs in enumerate(offers):
            counts[i] = min(len(probs), limit)
            limit -= counts[i]
        return counts
    branch_tokens = branch_s * tokens_per_s
    ranked = [offer.ranked(branch_tokens) if isinstance(offer, SubtreeOffer) else offer for offer in offers]
    base_s = overhead_s + cost.seconds(num_sessions) - cost.seconds(num_context)  # D(m) = base_s + C(t + m)
    plain = num_sessions / (base_s - hidden_s + cost.seconds(num_context))
    known = num_context, limit, float(num_sessions), base_s, branch_s, branch_tokens, plain, least_gain
    chosen: list[int] | None = None
    if isinstance(cost, StepCost):
        from paceline.core.native_tree import native_module  # loads torch, which plans do without

        if (native := native_module()) is not None:
            chosen = native.choose(ranked, cost.tables, *known)
    return choose(ranked, cost, *known) if chosen is None else chosen


def choose(
    ranked: Sequence[Sequence[float] | Iterator[Ranked]],
    cost: StepTimes,
    num_context: int,
    limit: int,
    tokens: float,
    base_s: float,
    branch_s: float,
    branch_tokens: float,
    plain: float,
    least_gain: float,
) -> list[int]:
    """Takes draft tokens by their worth, as ``allocate_draft_tokens`` wants them. The reference of the native one
    (``core/tree.cpp``).

    Args:
        ranked: draft tokens of each session: probabilities of a chain, or a ``Ranking``.
        tokens: E(0).
        base_s: D(0) - C(t).
        plain: tokens per second without draft tokens.
    """
    streams = [_of_chain(each) if isinstance(each, Sequence) else each for each in ranked]
    # A heap of (-worth of a session's next draft token, session, the token's path probability, begins a branch).
    heap = [(-token[0], i, *token[1:]) for i, stream in enumerate(streams) if (token := next(stream, None))]
    heapq.heapify(heap)
    counts = [0] * len(ranked)
    order: list[int] = []
    num_best, best = 0, plain
    at, next_floor_s = num_context, cost.floor(num_context)
    while heap and len(order) < limit:
        negative, i, path, begins = heap[0]
        floor_s, next_floor_s = next_floor_s, cost.floor(at + 1)
        # No further path is likelier than this one's worth plus a branch's price. With j more: at most
        # (tokens + j * most) / (floor + j * slope), which lies between these two.
        most = branch_tokens - negative
        if most <= best * (next_floor_s - floor_s) and tokens <= best * (base_s + floor_s):
            break
        tokens += path
        base_s += branch_s * begins
        order.append(i)
        counts[i] += 1
        token = next(streams[i], None)
        if token is not None:
            heapq.heapreplace(heap, (-token[0], i, *token[1:]))
        else:
            heapq.heappop(heap)
        at += 1
        value = tokens / (base_s + cost.seconds(at))
        if value > best:
            best, num_best = value, len(order)
    for i in order[num_best if best >= least_gain * plain else 0 :]:
        counts[i] -= 1
    return counts


def _of_chain(probs: Sequence[float]) -> Iterator[Ranked]:
    path = 1.0
    for prob in probs:
        path *= prob
        yield path, path, False


def ideal_gain(
    cost: StepTimes, num_sessions: int, acceptance: float, k: int, overhead_s: float = 0.0, hidden_s: float = 0.0
) -> float:
    """Speedup over plain decoding that an ideal draft would bring with ``num_sessions``, at least 1.

    Ideal: every session always has a proposal of k tokens, each accepted with probability a given those before it.
    Of n sessions, m = q n + r draft tokens then yield n (1 + a + .. + a^q) + r a^(q+1) tokens, and the gain is

        max over 0 <= m <= n k of  (n (1 + a + .. + a^q) + r a^(q+1)) / n * (h + C(n)) / (h + C(n + m)),

    where the first h is ``hidden_s`` less.
    """
    if not cost.known or num_sessions == 0:
        return 1.0
    plain_s = overhead_s - hidden_s + cost.seconds(num_sessions)
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


def least_gain(num_sessions: int) -> float:
    """Minimum speedup for which a step of ``num_sessions`` has draft tokens: from 1 for one session to ``WORTH``."""
    return WORTH - (WORTH - 1.0) / max(1, num_sessions)


def load_class(num_sessions: int) -> int:
    """Concurrency bucket (1, 2, 3-4, 5-8, 9-16, ..) under which measurements are shared."""
    return max(0, num_sessions - 1).bit_length()


@dataclass(slots=True)
class Allocation:
    """Measurements of one engine and its allocations of draft tokens. ``adaptive`` False: every chain in full."""

    adaptive: bool = True
    trees: bool = True
    """Sessions may have siblings verified, where they have positive expected gain; False: chains only."""
    cost: StepCost = field(default_factory=StepCost)
    """Seconds of a step on the cores that take it now."""
    overhead_s: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW))
    """Seconds from a step's verdicts to the next forward while there is something to do, if that waits for them."""
    hidden: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW))
    """Share of plain steps, 0 to 1, that do not wait for the one before, so that nothing lies between them."""
    lengths: DecayingHistogram = field(default_factory=DecayingHistogram)
    """Lengths of the proposals that were verified."""
    coupled: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    rejection: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    """Acceptance of the draft's tokens in all sessions, by rule."""
    heads: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    """Acceptance of the tokens of heads in all sessions."""
    branch_prior_s: float = 0.0
    """Seconds of a branch beyond its rows, as measured before the first session."""
    branch: DecayingRatio = field(default_factory=DecayingRatio.of_engine)
    """Seconds of a branch beyond its rows, as measured while serving."""
    tokens_per_s: Ewma = field(default_factory=Ewma)
    """Tokens per second of the steps."""
    budget: Budget = field(default_factory=Budget)
    """What the trials of the engine may cost."""
    _num_offers: int = 0
    """Steps for which siblings were asked about."""
    _judged: tuple[int, int] = (0, 0)
    """(sessions, draft tokens of each) at the last check whether any draft token can have gain."""
    _none_pays: bool = False
    _num_judged: int = 0
    _costs: dict[int, StepCost] = field(default_factory=dict)
    """``cost`` by the number of these cores, where that changes."""

    def use_cores(self, num_cores: int) -> None:
        """Sets the number of cores that share the next steps; their times are learned separately."""
        self.cost = self._costs.setdefault(num_cores, StepCost())

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Records the seconds of a step that only decoded."""
        self.cost.observe(num_tokens, seconds)

    def observe_branches(self, num_branches: int, num_tokens: int, seconds: float) -> None:
        """Records the seconds of a step that only decoded and had branches."""
        self.branch.add(seconds - self.cost.seconds(num_tokens), num_branches)

    @property
    def branch_s(self) -> float:
        """Seconds that one more branch makes a step longer, beyond its rows."""
        return max(0.0, self.branch.value(self.branch_prior_s))

    def offers_trees(self) -> bool:
        """True if a sibling could have gain in this step. The measured cost of branches fades while there are none."""
        if not (self.trees and self.adaptive and self.cost.known):
            return False
        self._num_offers += 1
        if self._num_offers % _CHAINS_EVERY == 0:
            return False
        self.branch.fade(ENGINE_KEEP)
        return 2 * self.branch_s * self.tokens_per_s.get(0.0) < 1  # a sibling is never likelier than a half

    def plain_s(self, num_sessions: int) -> float:
        """Seconds of a plain step of ``num_sessions``, start to start."""
        return self.overhead_s.get(0.0) - self.hidden_s + self.cost.seconds(num_sessions)

    @property
    def hidden_s(self) -> float:
        """The part of ``overhead_s`` that a plain step does not take."""
        return self.overhead_s.get(0.0) * self.hidden.get(0.0)

    def ideal_rate(self, num_sessions: int, acceptance: float, k: int) -> float:
        """Tokens per second with an ideal draft, see ``ideal_gain``, on the cores that are left to its target; 0.0
        before any step was measured."""
        cost = self._costs[min(self._costs)] if self._costs else self.cost
        if not cost.known:
            return 0.0
        overhead_s, hidden_s = self.overhead_s.get(0.0), self.hidden_s
        plain_s = overhead_s - hidden_s + cost.seconds(num_sessions)
        return ideal_gain(cost, num_sessions, acceptance, k, overhead_s, hidden_s) * num_sessions / plain_s

    def could_pay(self, num_sessions: int, acceptance: float, k: int) -> bool:
        """True if k draft tokens per session would be verified at this acceptance. It is decided by the measured cost
        of steps and ``least_gain``; True before any step was measured."""
        gain = self.gain(num_sessions, acceptance, k)
        return gain >= least_gain(num_sessions) or not self.adaptive or not self.cost.known

    def none_pays(self, num_sessions: int, k: int) -> bool:
        """True if no draft tokens, k for each session, would be verified in a step that only decodes, even if all were
        right. Judged again when the sessions have changed, else every ``_JUDGED_STEPS`` steps."""
        self._num_judged += 1
        if self._judged != (num_sessions, k) or self._num_judged % _JUDGED_STEPS == 0:
            self._judged, self._none_pays = (num_sessions, k), not self.could_pay(num_sessions, 1.0, k)
        return self._none_pays

    def gain(self, num_sessions: int, acceptance: float, k: int) -> float:
        """Speedup that an ideal draft would bring by the measured cost of steps, see ``ideal_gain``."""
        return ideal_gain(self.cost, num_sessions, acceptance, k, self.overhead_s.get(0.0), self.hidden_s)

    def allocate_draft_tokens(
        self,
        offers: Sequence[Offer],
        *,
        num_sessions: int,
        num_context: int,
        limit: int,
        spent_s: float = 0.0,
    ) -> list[int]:
        """Number of draft tokens of each session by the measured cost of steps, see ``allocate_draft_tokens``.

        ``spent_s``: seconds that were spent on the offers of this step, whatever becomes of them.
        """
        return allocate_draft_tokens(
            offers,
            self.cost,
            num_sessions=num_sessions,
            num_context=num_context,
            limit=limit,
            overhead_s=self.overhead_s.get(0.0) + spent_s,
            branch_s=self.branch_s,
            tokens_per_s=self.tokens_per_s.get(0.0),
            least_gain=least_gain(num_sessions),
            hidden_s=self.hidden_s,
        )
