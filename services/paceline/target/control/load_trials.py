"""Drafting or plain decoding at each concurrency: by the measured tokens per second of both.

No model of a step knows all that drafts take: cores that they share with their target, messages, event loops. So at
each load (``allocation.load_class``) both are tried:

    choice ──────────────▶ trial of the other ──▶ the faster one is the choice
           1, 2, 4, .. 64 s             a few steps

A step counts with the time since the previous step, less the expected time of its prefill chunks. The first few steps
after a change, and steps that are mostly prefill, do not count. No trial is needed if drafting is clearly faster than a
plain step can be (``StepCost``), or could not gain even with ideal drafts (``ideal_gain``). A trial of drafts starts
when their promised gain, over as long as the load has lasted, repays the expected loss of the trial; at the latest when
that loss is a small share of this time (``trial.TRIAL_SHARE``). Drafts promise the yield of ideal drafts at the
acceptance so far, times the share of it that they reached at the nearest load. A trial ends as soon as the evidence is
clear: its rate differs from its mark by two and a half standard errors of its steps, more if they are few. The loss of
a trial against the choice, including the steps until the choice is in force again, is repaid before the next trial
starts: no load loses more than that share. All of a step's sessions take part: with a share f of them the difference is
f times as large and takes 1 / f^2 as long, so a few would cost more than all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.statistics import RateEstimate, RateSample
from paceline.target.control.allocation import BEST_ACCEPTANCE, ENOUGH_TRIALS, Allocation, load_class
from paceline.target.control.trial import TRIAL_LIMIT_S, TRIAL_SHARE, WORTH, pause_s

_FIRST_PAUSE_S = {True: 0.5, False: 1.0}
"""Seconds until plain decoding (True: the choice is drafting), or drafting (False), is tried for the first time."""
_TRIAL_S = {True: 0.4, False: 2.0}
"""Seconds of a trial that is not clear before: against plain decoding (True), or against what speculates, too, whose
steps have one token or several."""
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_TOKENS = 4, {True: 12, False: 96}, 192
"""Minimum and maximum steps of a trial (True: of plain decoding); between them until 192 tokens by plain decoding."""
_SETTLE_STEPS = 4
_HALF_LIFE_S = {True: 1.0, False: 4.0}
_WORTHLESS = 0.99
"""Drafting ends if plain decoding has at least this speedup over it."""
_CERTAIN = 2.5
"""Standard errors by which a trial has to miss or to pass its mark to end early."""
_CLEAR = 1.3
_K = 8


def certain_margin(sample: RateSample) -> float:
    """Distance from a mark at which a measured rate is certain to have missed or passed it.

    2.5 (1 + 2 / (n - 1)) standard errors of n steps, near Student's t at 0.99.
    """
    return _CERTAIN * (1.0 + 2.0 / (sample.count - 1)) * sample.standard_error() if sample.count > 1 else math.inf


@dataclass(slots=True)
class _Load:
    """Choice and measurements of one load."""

    choice: bool
    """True: drafting, False: plain decoding."""
    rates: dict[bool, RateEstimate]
    """Tokens per second without drafts and with them."""
    trial: bool = False
    """The alternative to the choice is being tried."""
    seconds: float = 0.0
    """Seconds of steps since the last change that ran as requested."""
    steps: int = 0
    unanswered_s: float = 0.0
    """Seconds of steps since the last change that did not: no draft has answered yet."""
    num_failures: int = 0
    """Trials in a row that have not changed the choice."""
    tried: RateSample = field(default_factory=RateSample)
    """Steps of the trial in progress, or of the last one."""
    repaying: bool = False
    """True from the beginning of a trial until the choice is in force again."""
    lost_s: float = 0.0
    """Seconds that the last trial has lost against the choice."""

    @property
    def wanted(self) -> bool:
        return self.choice is not self.trial  # a trial wants the opposite of the choice

    def pause_s(self) -> float:
        """Seconds of the choice before the next trial: longer after each failed one, and until its loss is repaid."""
        return pause_s(1 + self.num_failures, self.lost_s, _FIRST_PAUSE_S[self.choice])

    def lose(self, tokens: float, seconds: float) -> None:
        """Adds the seconds that the choice would have saved in a step of a trial, or in one of the few after it."""
        if (rate := self.rates[self.choice].per_s()) > 0:
            self.lost_s = max(0.0, self.lost_s + seconds - tokens / rate)

    def begin_phase(self, *, trial: bool) -> None:
        self.trial = trial
        self.seconds, self.steps, self.unanswered_s = 0.0, 0, 0.0
        if trial:
            self.tried, self.repaying, self.lost_s = RateSample(), True, 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """The current choice for one load, and the measurements it rests on."""

    drafting: bool
    """Drafts are requested now."""
    on_trial: bool
    tokens_per_s: dict[bool, float]
    """Rates measured last, with drafts (True) and without; 0: not measured yet."""
    ideal_gain: float
    """``allocation.ideal_gain`` at the acceptance so far."""
    num_trials: int
    """Trials at all loads so far."""
    next_trial_s: float | None
    """Seconds of steps until the alternative is tried; None: it could not be faster."""


@dataclass(slots=True)
class LoadTrials:
    """The choice between drafting and plain decoding at every load of one engine."""

    allocation: Allocation
    only_plain: bool = True
    """Without drafts, sessions are decoded one token a step on the same cores: a bound on their rate follows from the
    cost of a step. False where heads or more cores may make them faster."""
    begins_without: bool = False
    """Unknown loads begin without drafts even if the cost of a step promises gain: the drafts' model and cores serve in
    the target meanwhile."""
    num_trials: int = 0
    _loads: dict[int, _Load] = field(default_factory=dict)
    _last: tuple[int, bool] | None = None
    _settling: int = 0

    def wanted(self, num_sessions: int) -> bool:
        """True if drafting is enabled at this concurrency."""
        return self._at(num_sessions).wanted

    def most_sessions(self) -> int | None:
        """The most sessions for which drafting is enabled, as far as loads are known; None: no limit is known."""
        on, off = ([at for at, load in self._loads.items() if load.wanted is wanted] for wanted in (True, False))
        first = min((at for at in off if at > max(on, default=-1)), default=None)
        return None if first is None else (1 << first) >> 1  # a load begins where the one below it ends

    def measure(self, num_sessions: int, tokens: int, seconds: float, *, drafting: bool) -> None:
        """Records a step that yielded ``tokens`` for ``num_sessions``, ``seconds`` after the end of the previous step.

        ``drafting``: the drafts of at least half of the sessions that may have one have answered.
        """
        load = self._at(num_sessions)
        now = (load_class(num_sessions), drafting)
        if now != self._last:
            self._last, self._settling = now, _SETTLE_STEPS
        yielded = tokens * self.scale(num_sessions)
        if load.repaying:
            load.lose(yielded, seconds)
        if drafting is not load.wanted:
            load.unanswered_s += seconds
            if load.trial and load.unanswered_s > TRIAL_LIMIT_S:
                self._end_trial(load, won=False)
            return
        if self._settling:
            self._settling -= 1
            return
        load.repaying = load.trial
        load.rates[drafting].add(yielded, seconds)
        load.seconds += seconds
        load.steps += 1
        enough = min(max(_ENOUGH_TOKENS // num_sessions, _LEAST_STEPS), _MOST_STEPS[self.only_plain])
        if load.trial:
            load.tried.add(yielded, seconds)
            self._look_at_trial(load, enough)
        elif load.seconds >= load.pause_s() and load.steps >= enough:
            if load.seconds < self._pause_s(num_sessions, load) or not self._is_open(num_sessions, load):
                return
            load.begin_phase(trial=True)
            load.rates[load.wanted] = RateEstimate(_HALF_LIFE_S[self.only_plain])
            self.num_trials += 1
            if load.wanted:  # the record of earlier drafts must not be held against these
                self.allocation.coupled.forget()
                self.allocation.rejection.forget()

    def standing(self, num_sessions: int) -> Standing:
        """The choice at this concurrency and its reasons. Changes nothing; may be called by other threads."""
        load = self._loads.get(load_class(num_sessions)) or self._new(num_sessions)
        # Rates are kept for the most sessions of a load; here they are scaled back to these.
        rates = {wanted: rate.per_s() / self.scale(num_sessions) for wanted, rate in load.rates.items()}
        left_s = max(0.0, self._pause_s(num_sessions, load) - load.seconds)
        return Standing(
            drafting=load.wanted,
            on_trial=load.trial,
            tokens_per_s=rates,
            ideal_gain=self.allocation.gain(num_sessions, self.allocation.coupled.rate(), _K),
            num_trials=self.num_trials,
            next_trial_s=left_s if self._is_open(num_sessions, load) else None,
        )

    def _look_at_trial(self, load: _Load, enough: int) -> None:
        tried, before = load.rates[load.wanted].per_s(), load.rates[load.choice].per_s()
        mark = before * (WORTH if load.wanted else _WORTHLESS)
        certain = load.steps >= _LEAST_STEPS and abs(tried - mark) > certain_margin(load.tried)
        if certain or (load.seconds >= _TRIAL_S[self.only_plain] and load.steps >= enough):
            self._end_trial(load, won=tried > mark)

    def _end_trial(self, load: _Load, *, won: bool) -> None:
        load.num_failures = 0 if won else load.num_failures + 1
        load.choice = load.choice is not won
        load.begin_phase(trial=False)

    def _at(self, num_sessions: int) -> _Load:
        at = load_class(num_sessions)
        load = self._loads.get(at)
        if load is None:
            load = self._loads[at] = self._new(num_sessions)
        return load

    def _new(self, num_sessions: int) -> _Load:
        rates = {drafting: RateEstimate(_HALF_LIFE_S[self.only_plain]) for drafting in (False, True)}
        return _Load(self.begins_with_drafts(num_sessions), rates)

    def begins_with_drafts(self, num_sessions: int) -> bool:
        """Choice for an unknown load: drafting if it clearly gains by the cost of a step, and at smaller loads."""
        at = load_class(num_sessions)
        smaller = [other for key, other in list(self._loads.items()) if key < at]
        acceptance = self.allocation.coupled.rate()
        pays = self.allocation.gain(num_sessions, acceptance, _K) >= _CLEAR or not self.allocation.cost.known
        return pays and not self.begins_without and all(other.choice for other in smaller)

    def _pause_s(self, num_sessions: int, load: _Load) -> float:
        """Seconds of the choice before the alternative is tried."""
        if load.choice:
            return load.pause_s()
        loss_s = (_SETTLE_STEPS + _LEAST_STEPS) * self.allocation.plain_s(num_sessions)
        promise = max(TRIAL_SHARE, self._promise(num_sessions, load) - 1.0)
        return max(load.pause_s(), pause_s(0, loss_s * TRIAL_SHARE / promise, 0.0))

    def _promise(self, num_sessions: int, load: _Load) -> float:
        """Expected speedup of drafts over the rate measured without them."""
        ideal, without = self._ideal_rate(num_sessions), load.rates[False].per_s()
        tried = [at for at, other in list(self._loads.items()) if other.rates[True].per_s() > 0]
        if tried and ideal > 0:
            at = min(tried, key=lambda at: abs(at - load_class(num_sessions)))
            ideal *= min(1.0, self._loads[at].rates[True].per_s() / self._ideal_rate(1 << at))
        return ideal * self.scale(num_sessions) / without if without > 0 else math.inf

    def _ideal_rate(self, num_sessions: int) -> float:
        """Tokens per second with ideal drafts, accepted as drafts were so far, or as heads that stand in for them."""
        seen, heads = self.allocation.coupled.or_better_known(self.allocation.rejection), self.allocation.heads
        known = heads if seen.trials < ENOUGH_TRIALS <= heads.trials else seen
        return self.allocation.ideal_rate(num_sessions, known.rate(), _K)

    def _is_open(self, num_sessions: int, load: _Load) -> bool:
        """True if the alternative could be faster, judged by the cost of a step."""
        if not load.choice:
            return self.allocation.gain(num_sessions, BEST_ACCEPTANCE, _K) >= WORTH
        if not self.only_plain:
            return True
        most = 1 << load_class(num_sessions)  # the most sessions of this load, for which rates are kept
        plain_s = self.allocation.overhead_s.get(0.0) - self.allocation.hidden_s + self.allocation.cost.least(most)
        return load.rates[True].per_s() < _CLEAR * most / plain_s

    def scale(self, num_sessions: int) -> float:
        """Tokens per second of plain decoding with the most sessions of this load, over the rate with ``num_sessions``.

        It makes steps of different concurrency within a load comparable.
        """
        most, cost = 1 << load_class(num_sessions), self.allocation.cost
        return (most / cost.seconds(most)) / (num_sessions / cost.seconds(num_sessions)) if cost.known else 1.0
