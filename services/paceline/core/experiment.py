"""One experiment for each question whether speculation has gain: its evidence, its verdict, and its next trial.

    question                                an observation is       alternatives
    a session: does its draft have gain?    a round (tokens, net)   ``session_gate.py``: drafting, plain decoding
    a load: are drafts faster?              a step (tokens/s)       ``load_trials.py``: drafts, none
    a load: does a head have gain?          a step (tokens, net)    ``head_gate.py``: head, none

The rate of the observations is compared with a mark whenever their number is a power of two, from ``LEAST`` on. The
verdict is clear if the two differ by 2.5 (1 + 2 / (n - 1)) standard errors of n observations, near Student's t at 0.99.
After ``WINDOW`` observations the sign decides. An alternative that loses pauses for 1, 2, 4, .. 64 seconds of steps.
All trials of an engine share one ``Budget``. The next one starts when the losses of all earlier ones are at most a
hundredth of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.statistics import RateSample

LEAST, WINDOW = 4, 32
"""Observations before the first verdict, and for the last one; the former also lets a change come into force.

The latter is also how many observations an average of tokens or gaps remembers (``Ewma(1 / WINDOW)``).
"""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 64.0
PATIENCE_S = LEAST * SHORTEST_PAUSE_S
"""Time for a draft to send its first tokens in a trial."""
TRIAL_SHARE = 0.01
"""Share of the time that all trials may lose."""
KEPT, WORTH = 1 + TRIAL_SHARE, 1 + LEAST * TRIAL_SHARE
"""Speedup over plain decoding from which drafting goes on, since it earns its trials, and from which it starts."""
_ROUNDING = 1e-9
"""Difference of a rate from its mark that comes from rounding: what costs nothing and brings nothing goes on."""
_CERTAIN = 2.5
"""Standard errors by which a rate differs from its mark if the verdict is clear."""
_MOST_STEP_S = 1.0
"""Longer gaps between two steps count as this: nobody knows whether the engine was idle."""


@dataclass(slots=True)
class Budget:
    """What trials may cost, by the seconds of an engine's steps: between bursts nothing changes that would end a
    pause."""

    now: float = 0.0
    """Seconds of steps so far."""
    free_at: float = 0.0
    """Time from which the losses of all trials are a small enough share."""

    def step(self, seconds: float) -> None:
        """Counts the seconds from the end of one step to the end of the next."""
        self.now += min(_MOST_STEP_S, max(0.0, seconds))

    def book(self, loss_s: float) -> None:
        """Books the seconds that a trial has lost; they delay others by a few minutes at most."""
        free_at = max(self.free_at, self.now) + max(0.0, loss_s) / TRIAL_SHARE
        self.free_at = min(free_at, self.now + LEAST * LONGEST_PAUSE_S)


@dataclass(slots=True)
class Experiment:
    """Evidence for one alternative, and the time of its next trial."""

    doubt: float = 1.0
    """Tokens that one more observation could be off by: before a token was accepted, all observations are alike."""
    sample: RateSample = field(default_factory=RateSample)
    num_failures: int = 0
    """Verdicts against the alternative, less those for it."""
    until: float = 0.0
    """Seconds of steps at which its pause ends (``Budget.now``)."""

    def margin(self) -> float:
        """Distance from a mark at which the rate is certain to have missed or passed it."""
        n = self.sample.count
        if n < 2:
            return math.inf
        error = math.hypot(self.sample.standard_error(), self.doubt / math.sqrt(n * (n - 1)))
        return _CERTAIN * (1.0 + 2.0 / (n - 1)) * error

    def verdict(self, mark: float = 0.0) -> bool | None:
        """True if the alternative's rate is at the mark or above, False if it is below; None: not known yet."""
        n = self.sample.count
        if n < LEAST or (n < WINDOW and n & (n - 1)):
            return None
        off = self.sample.rate() - mark
        return off > -_ROUNDING if n >= WINDOW or abs(off) > self.margin() else None

    def end(self, budget: Budget, *, won: bool, loss_s: float = 0.0) -> None:
        """Ends a trial. An alternative that has lost pauses."""
        budget.book(loss_s)
        self.sample = RateSample()
        self.num_failures = max(0, self.num_failures - 1) if won else self.num_failures + 1
        if not won:
            self.pause(budget)

    def left_s(self, budget: Budget) -> float:
        """Seconds of steps until its next trial may begin: its pause has ended and the budget is free."""
        return max(self.until, budget.free_at) - budget.now

    def pause(self, budget: Budget) -> None:
        """Begins a pause, at least until the budget has been free for a second: others have their turn first."""
        self.until = max(budget.now + pause_s(self.num_failures), budget.free_at + SHORTEST_PAUSE_S)


def pause_s(num_failures: int) -> float:
    """Seconds until the next trial: each failure doubles them, each success halves them."""
    return min(LONGEST_PAUSE_S, SHORTEST_PAUSE_S * 2.0 ** max(0, num_failures - 1))
