"""Drafting or plain decoding at each concurrency: by the measured tokens per second of both.

No model of a step knows all that drafts take: cores that they share with their target, messages, event loops. So at
each load (``allocation.load_class``) both are tried:

    choice ──────────────▶ trial of the other ──▶ the faster one is the choice
           1, 2, 4, .. 64 s             a few steps

A step counts with the time since the previous step, less the expected time of its prefill chunks. The first few steps
after a change, and steps that are mostly prefill, do not count. No trial is needed if drafting is clearly faster than
any plain step (``StepCost``), or if even ideal drafts could not gain (``ideal_gain``). A trial of drafts starts when
their expected gain, over the time that the load has lasted, exceeds the expected loss of the trial. It starts at the
latest when that loss is a small share of this time (``experiment.TRIAL_SHARE``). Drafts promise the yield of ideal
drafts at the acceptance so far, times the share of it that they reached at the nearest load. A trial is an
``Experiment``: it ends when its rate is clearly above or below that of the choice. The budget is charged with its loss
against the choice, including the steps until the choice is in force again. All of a step's sessions take part. With a
share f of them the difference is f times as large and takes 1 / f^2 times as long to measure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.experiment import KEPT, LEAST, PATIENCE_S, TRIAL_SHARE, WORTH, Experiment
from paceline.core.statistics import RateEstimate
from paceline.target.control.allocation import ENOUGH_TRIALS, Allocation, load_class

_CLEAR = 1.3
"""Speedup by the cost of a step for which no trial is needed."""
LARGEST_K = 8
"""Draft tokens of a session by which drafts are judged."""


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
    experiment: Experiment = field(default_factory=lambda: Experiment(doubt=0.0))
    """Tokens per second of the alternative: one step often tells as much as another."""
    repaying: bool = False
    """True from the beginning of a trial until the choice is in force again."""
    lost_s: float = 0.0
    """Seconds that the last trial has lost against the choice."""

    @property
    def wanted(self) -> bool:
        return self.choice is not self.trial  # a trial wants the opposite of the choice

    def lose(self, tokens: float, seconds: float) -> None:
        """Adds the seconds that the choice would have saved in a step of a trial, or in one of the few after it."""
        if (rate := self.rates[self.choice].per_s()) > 0:
            self.lost_s = max(0.0, self.lost_s + seconds - tokens / rate)

    def begin_phase(self, *, trial: bool) -> None:
        self.trial = trial
        self.seconds, self.steps, self.unanswered_s = 0.0, 0, 0.0
        if trial:
            self.repaying, self.lost_s = True, 0.0


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
    loads: dict[int, _Load] = field(default_factory=dict)
    _last: tuple[int, bool] | None = None
    _settling: int = 0

    def wanted(self, num_sessions: int) -> bool:
        """True if drafting is enabled at this concurrency."""
        return self._at(num_sessions).wanted

    def most_sessions(self) -> int | None:
        """The most sessions for which drafting is enabled, as far as loads are known; None: no limit is known."""
        on, off = ([at for at, load in self.loads.items() if load.wanted is wanted] for wanted in (True, False))
        first = min((at for at in off if at > max(on, default=-1)), default=None)
        return None if first is None else (1 << first) >> 1  # a load begins where the one below it ends

    def measure(self, num_sessions: int, tokens: int, seconds: float, *, drafting: bool) -> None:
        """Records a step that yielded ``tokens`` for ``num_sessions``, ``seconds`` after the end of the previous step.

        ``drafting``: the drafts of at least half of the sessions that may have one have answered.
        """
        load = self._at(num_sessions)
        now = (load_class(num_sessions), drafting)
        if now != self._last:
            self._last, self._settling = now, LEAST
        yielded = tokens * self.scale(num_sessions)
        if load.repaying:
            load.lose(yielded, seconds)
        if drafting is not load.wanted:
            load.unanswered_s += seconds
            if load.trial and load.unanswered_s > PATIENCE_S:
                self._end_trial(load, won=False)
            return
        if self._settling:
            self._settling -= 1
            return
        if load.repaying and not load.trial:
            load.repaying = False
            self.allocation.budget.book(load.lost_s)
            load.experiment.pause(self.allocation.budget)
        load.rates[drafting].add(yielded, seconds)
        load.seconds += seconds
        load.steps += 1
        if load.trial:
            load.experiment.sample.add(yielded, seconds)
            reference = load.rates[load.choice].per_s()
            won = load.experiment.verdict(reference * WORTH if load.wanted else reference / KEPT)
            if won is not None:
                self._end_trial(load, won=won)
        elif load.steps >= LEAST and self._left_s(num_sessions, load) <= 0.0 and self.is_open(num_sessions, load):
            self._begin_trial(load)

    def _begin_trial(self, load: _Load) -> None:
        load.begin_phase(trial=True)
        load.rates[load.wanted] = RateEstimate()
        self.num_trials += 1
        if load.wanted:  # the record of earlier drafts must not be held against these
            self.allocation.coupled.forget()
            self.allocation.rejection.forget()

    def _end_trial(self, load: _Load, *, won: bool) -> None:
        load.experiment.end(self.allocation.budget, won=won)
        if won:
            load.choice, load.experiment.num_failures = not load.choice, 0
        load.begin_phase(trial=False)

    def standing(self, num_sessions: int) -> Standing:
        """The choice at this concurrency and its reasons. Changes nothing; may be called by other threads."""
        load = self.loads.get(load_class(num_sessions)) or self._new(num_sessions)
        # Rates are kept for the most sessions of a load; here they are scaled back to these.
        rates = {wanted: rate.per_s() / self.scale(num_sessions) for wanted, rate in load.rates.items()}
        return Standing(
            drafting=load.wanted,
            on_trial=load.trial,
            tokens_per_s=rates,
            ideal_gain=self.allocation.gain(num_sessions, self.allocation.coupled.rate(), LARGEST_K),
            num_trials=self.num_trials,
            next_trial_s=max(0.0, self._left_s(num_sessions, load)) if self.is_open(num_sessions, load) else None,
        )

    def _at(self, num_sessions: int) -> _Load:
        at = load_class(num_sessions)
        load = self.loads.get(at)
        if load is None:
            load = self.loads[at] = self._new(num_sessions)
        return load

    def _new(self, num_sessions: int) -> _Load:
        load = _Load(self.begins_with_drafts(num_sessions), {drafting: RateEstimate() for drafting in (False, True)})
        load.experiment.pause(self.allocation.budget)
        return load

    def begins_with_drafts(self, num_sessions: int) -> bool:
        """Choice for an unknown load: drafting if it clearly gains by the cost of a step, and at smaller loads."""
        at = load_class(num_sessions)
        smaller = [other for key, other in list(self.loads.items()) if key < at]
        acceptance = self.allocation.coupled.rate()
        pays = self.allocation.gain(num_sessions, acceptance, LARGEST_K) >= _CLEAR or not self.allocation.cost.known
        return pays and not self.begins_without and all(other.choice for other in smaller)

    def _left_s(self, num_sessions: int, load: _Load) -> float:
        """Seconds of the choice before the alternative is tried."""
        left_s = load.experiment.left_s(self.allocation.budget)
        if load.choice or left_s > 0.0:
            return left_s
        loss_s = 2 * LEAST * self.allocation.plain_s(num_sessions)  # until the change is in force, and the trial
        return loss_s / max(TRIAL_SHARE, self._promise(num_sessions, load) - 1.0) - load.seconds

    def _promise(self, num_sessions: int, load: _Load) -> float:
        """Expected speedup of drafts over the rate measured without them."""
        ideal, without = self._ideal_rate(num_sessions), load.rates[False].per_s()
        tried = [at for at, other in list(self.loads.items()) if other.rates[True].per_s() > 0]
        if tried and ideal > 0:
            at = min(tried, key=lambda at: abs(at - load_class(num_sessions)))
            ideal *= min(1.0, self.loads[at].rates[True].per_s() / self._ideal_rate(1 << at))
        return ideal * self.scale(num_sessions) / without if without > 0 else math.inf

    def _ideal_rate(self, num_sessions: int) -> float:
        """Tokens per second with ideal drafts, accepted as drafts were so far, or as heads that stand in for them."""
        seen, heads = self.allocation.coupled.or_better_known(self.allocation.rejection), self.allocation.heads
        known = heads if seen.trials < ENOUGH_TRIALS <= heads.trials else seen
        return self.allocation.ideal_rate(num_sessions, known.rate(), LARGEST_K)

    def is_open(self, num_sessions: int, load: _Load) -> bool:
        """True if the alternative could be faster, judged by the cost of a step."""
        if not load.choice:
            return self.allocation.gain(num_sessions, 1.0, LARGEST_K) >= WORTH
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
