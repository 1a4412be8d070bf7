"""Whether drafting is worth it beside so many sessions: by the tokens per second measured with it and without.

No model of a step knows all that drafts take: cores that they share with their target, messages, event loops. So for
each load (``budget.load_class``) the two are tried against each other:

    choice ──────────────▶ trial of the other ──▶ the faster one is the choice
          1, 2.5, 6, .. 64 s                a few steps

Steps count with the time since the step before, less what prefill chunks are expected to have taken; not the first few
after a change, and none that was mostly prefill.
Drafting that is clearly faster than a plain step can be (``StepCost``) needs no trial, nor does drafting that could not
pay with the best of drafts (``ideal_gain``); where it could not with drafts as they were so far, trials are as rare as
they get. A trial ends as soon as the evidence is clear: its rate differs from what it has to reach by two and a half
standard errors of its steps, more where they are few. What a trial has lost against the choice, the steps until the
choice is in force again included, is repaid before the next one: no load spends more than a hundredth of its time on
trials. All of a step's sessions take part: with a share f of them the difference to be seen is f times as large and
takes 1 / f^2 as long, so that few would cost more than all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.target.control.allocation import RowBudget, load_class

_FIRST_PAUSE_S = {True: 0.5, False: 1.0}
"""Until plain decoding, or drafting, is tried for the first time."""
_LONGEST_PAUSE_S = 64.0
_DOUBTFUL_PAUSE_S = 6.0
"""Until drafting is tried that could pay with better drafts than are likely."""
_TRIAL_SHARE = 0.01
"""Of the time of a load may be lost by trials."""
_LONGEST_REPAY_S = 256.0
_TRIAL_S = 0.4
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_TOKENS = 4, 12, 192
"""Steps of a trial: so many that plain decoding would yield 192 tokens, within limits."""
_TRIAL_LIMIT_S = 3.0
_SETTLE_STEPS = 4
_HALF_LIFE_S = 1.0
_WORTH, _WORTHLESS = 1.04, 0.99
"""Drafting begins if it is faster by so much, and ends if plain decoding is at least so fast."""
_CERTAIN = 2.5
"""Standard errors by which a trial has to miss or to pass its mark to end early."""
_ENOUGH_TRIALS = 64.0
"""Draft tokens that tell how good drafts are."""
_CLEAR = 1.3
_K, _BEST_ACCEPTANCE = 8, 0.95


@dataclass(slots=True)
class Rate:
    """Tokens and seconds, fading with a half-life of one second."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Takes one step."""
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds

    def per_s(self) -> float:
        """Tokens per second; 0 before anything was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Steps:
    """Tokens t and seconds s of the steps of a trial; the error is that of the ratio of two means."""

    count: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    _tt: float = 0.0
    _ts: float = 0.0
    _ss: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """Takes one step."""
        self.count += 1
        self.tokens += tokens
        self.seconds += seconds
        self._tt += tokens * tokens
        self._ts += tokens * seconds
        self._ss += seconds * seconds

    def margin(self) -> float:
        """By which the rate has to differ for certain: of n steps 2.5 (1 + 2 / (n - 1)) standard errors, near Student's
        t at 0.99."""
        return _CERTAIN * (1.0 + 2.0 / (self.count - 1)) * self.error() if self.count > 1 else math.inf

    def error(self) -> float:
        """Standard error of tokens per second: sqrt(sum (t - r s)^2 / (n - 1) / n) / mean(s). Infinite for one step."""
        if self.count < 2 or not self.seconds > 0:
            return math.inf
        rate = self.tokens / self.seconds
        squares = max(0.0, self._tt - 2 * rate * self._ts + rate * rate * self._ss)
        return math.sqrt(squares / (self.count - 1) / self.count) * self.count / self.seconds


@dataclass(slots=True)
class _Load:
    """What is known of one load."""

    choice: bool
    """Whether drafting is wanted."""
    trial: bool = False
    """The other is being tried."""
    rates: dict[bool, Rate] = field(default_factory=lambda: {False: Rate(), True: Rate()})
    seconds: float = 0.0
    """Measured since the last change, as wanted."""
    steps: int = 0
    unanswered_s: float = 0.0
    """Passed without a draft although one is wanted."""
    num_failures: int = 0
    """Trials in a row that have changed nothing."""
    tried: Steps = field(default_factory=Steps)
    """Of the trial in progress, or the last one."""
    repaying: bool = False
    """Since a trial began, until the choice is in force again."""
    lost_s: float = 0.0
    """By the last trial, against its choice."""

    @property
    def wanted(self) -> bool:
        return self.choice is not self.trial

    def pause_s(self) -> float:
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S[self.choice] * 2.5 ** min(self.num_failures, 5))
        return max(pause_s, min(_LONGEST_REPAY_S, self.lost_s / _TRIAL_SHARE))

    def lose(self, tokens: float, seconds: float) -> None:
        """Takes a step that was not as the choice would have it, or the first few that are again."""
        if (rate := self.rates[self.choice].per_s()) > 0:
            self.lost_s = max(0.0, self.lost_s + seconds - tokens / rate)

    def begin_phase(self, *, trial: bool) -> None:
        self.trial = trial
        self.seconds, self.steps, self.unanswered_s = 0.0, 0, 0.0
        if trial:
            self.tried, self.repaying, self.lost_s = Steps(), True, 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """The choice for one load, and what it rests on."""

    drafting: bool
    """Whether drafts are wanted now."""
    on_trial: bool
    tokens_per_s: dict[bool, float]
    """As measured last, with drafts and without; 0: not yet."""
    ideal_gain: float
    """See ``budget.ideal_gain``, at the acceptance so far."""
    num_trials: int
    """Of all loads."""
    next_trial_s: float | None
    """Seconds of steps until the other is tried; None: it could not be faster."""


@dataclass(slots=True)
class Governor:
    """The choice for every load of one engine."""

    budget: RowBudget
    num_trials: int = 0
    _loads: dict[int, _Load] = field(default_factory=dict)
    _last: tuple[int, bool] | None = None
    _settling: int = 0

    def wanted(self, num_sessions: int) -> bool:
        """Whether sessions beside so many, themselves included, shall have drafts now."""
        return self._at(num_sessions).wanted

    def measure(self, num_sessions: int, tokens: int, seconds: float, *, drafting: bool) -> None:
        """Takes a step that yielded ``tokens`` for ``num_sessions``, ``seconds`` after the end of the one before.

        ``drafting``: at least half of the sessions that may have a draft were heard of by theirs.
        """
        load = self._at(num_sessions)
        now = (load_class(num_sessions), drafting)
        if now != self._last:
            self._last, self._settling = now, _SETTLE_STEPS
        yielded = tokens * self._scale(num_sessions)
        if load.repaying:
            load.lose(yielded, seconds)
        if drafting is not load.wanted:
            load.unanswered_s += seconds
            if load.trial and load.unanswered_s > _TRIAL_LIMIT_S:
                self._end_trial(load, won=False)
            return
        if self._settling:
            self._settling -= 1
            return
        load.repaying = load.trial
        load.rates[drafting].add(yielded, seconds)
        load.seconds += seconds
        load.steps += 1
        enough = min(max(_ENOUGH_TOKENS // num_sessions, _LEAST_STEPS), _MOST_STEPS)
        if load.trial:
            load.tried.add(yielded, seconds)
            self._look_at_trial(load, enough)
        elif load.seconds >= load.pause_s() and load.steps >= enough:
            if load.seconds < self._pause_s(num_sessions, load) or not self._is_open(num_sessions, load):
                return
            load.begin_phase(trial=True)
            load.rates[load.wanted] = Rate()
            self.num_trials += 1
            if load.wanted:  # what became known of earlier drafts must not be held against these
                self.budget.coupled.forget()
                self.budget.rejection.forget()

    def standing(self, num_sessions: int) -> Standing:
        """What is chosen beside so many sessions, and why. Changes nothing; may be called by other threads."""
        load = self._loads.get(load_class(num_sessions)) or self._new(num_sessions, load_class(num_sessions))
        # In the table a rate stands for the most sessions of its load; what these would yield is meant here.
        rates = {wanted: rate.per_s() / self._scale(num_sessions) for wanted, rate in load.rates.items()}
        left_s = max(0.0, self._pause_s(num_sessions, load) - load.seconds)
        return Standing(
            drafting=load.wanted,
            on_trial=load.trial,
            tokens_per_s=rates,
            ideal_gain=self.budget.gain(num_sessions, self.budget.coupled.rate(), _K),
            num_trials=self.num_trials,
            next_trial_s=left_s if self._is_open(num_sessions, load) else None,
        )

    def _look_at_trial(self, load: _Load, enough: int) -> None:
        tried, before = load.rates[load.wanted].per_s(), load.rates[load.choice].per_s()
        mark = before * (_WORTH if load.wanted else _WORTHLESS)
        certain = load.steps >= _LEAST_STEPS and abs(tried - mark) > load.tried.margin()
        if certain or (load.seconds >= _TRIAL_S and load.steps >= enough):
            self._end_trial(load, won=tried > mark)

    def _end_trial(self, load: _Load, *, won: bool) -> None:
        load.num_failures = 0 if won else load.num_failures + 1
        load.choice = load.choice is not won
        load.begin_phase(trial=False)

    def _at(self, num_sessions: int) -> _Load:
        at = load_class(num_sessions)
        load = self._loads.get(at)
        if load is None:
            load = self._loads[at] = self._new(num_sessions, at)
        return load

    def _new(self, num_sessions: int, at: int) -> _Load:
        """A load that nothing is known of: drafts pay clearly by the model of a step, and at all smaller loads."""
        smaller = [other for key, other in list(self._loads.items()) if key < at]
        acceptance = self.budget.coupled.rate()
        pays = self.budget.gain(num_sessions, acceptance, _K) >= _CLEAR or not self.budget.cost.known
        return _Load(pays and all(other.choice for other in smaller))

    def _pause_s(self, num_sessions: int, load: _Load) -> float:
        """Until the other is tried."""
        pause_s, seen = load.pause_s(), self.budget.coupled
        if load.choice or self.budget.gain(num_sessions, seen.rate(), _K) >= _WORTH:
            return pause_s
        return max(pause_s, _DOUBTFUL_PAUSE_S if seen.trials < _ENOUGH_TRIALS else _LONGEST_PAUSE_S)

    def _is_open(self, num_sessions: int, load: _Load) -> bool:
        """Whether the other could be faster, by what is known."""
        if not load.choice:
            return self.budget.gain(num_sessions, _BEST_ACCEPTANCE, _K) >= _WORTH
        most = 1 << load_class(num_sessions)
        plain_s = self.budget.overhead_s.get(0.0) + self.budget.cost.least(most)
        return load.rates[True].per_s() < _CLEAR * most / plain_s

    def _scale(self, num_sessions: int) -> float:
        """What plain decoding yields beside the most sessions of this load, over what it yields beside these."""
        most, cost = 1 << load_class(num_sessions), self.budget.cost
        return (most / cost.seconds(most)) / (num_sessions / cost.seconds(num_sessions)) if cost.known else 1.0
