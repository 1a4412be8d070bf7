"""Whether drafting is worth it beside so many sessions: by the tokens per second measured with it and without.

No model of a step knows all that drafts take: cores that they share with their target, messages, event loops. So for
each load (``budget.load_class``) the two are tried against each other:

    choice ──────────────▶ trial of the other ──▶ the faster one is the choice
           2, 5, 12, .. 64 s                0.4 s and a few steps

Only steps that do nothing but decode count, with the time since the step before, and not the first few after a change.
Drafting that is clearly faster than a plain step can be (``StepCost``) needs no trial, nor does drafting that could not
pay with the best of drafts (``ideal_gain``). Trials become rarer while they confirm the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.target.budget import PRIOR_ACCEPTANCE, RowBudget, load_class

_FIRST_PAUSE_S = {True: 1.0, False: 2.0}
"""Until plain decoding, or drafting, is tried for the first time."""
_LONGEST_PAUSE_S = 64.0
_TRIAL_S = 0.4
_LEAST_STEPS, _MOST_STEPS, _ENOUGH_TOKENS = 4, 12, 192
"""Steps of a trial: so many that plain decoding would yield 192 tokens, within limits."""
_TRIAL_LIMIT_S = 3.0
_SETTLE_STEPS = 4
_HALF_LIFE_S = 1.0
_WORTH, _WORTHLESS = 1.04, 0.99
"""Drafting begins if it is faster by so much, and ends if plain decoding is at least so fast."""
_HOPELESS = ((4, 0.8), (8, 0.93))
"""A trial ends early that has been slower than that after so many steps."""
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

    @property
    def wanted(self) -> bool:
        return self.choice is not self.trial

    def pause_s(self) -> float:
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S[self.choice] * 2.5 ** min(self.num_failures, 5))

    def begin_phase(self, *, trial: bool) -> None:
        self.trial = trial
        self.seconds, self.steps, self.unanswered_s = 0.0, 0, 0.0


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
        if drafting is not load.wanted:
            load.unanswered_s += seconds
            if load.trial and load.unanswered_s > _TRIAL_LIMIT_S:
                self._end_trial(load, won=False)
            return
        if self._settling:
            self._settling -= 1
            return
        load.rates[drafting].add(tokens * self._scale(num_sessions), seconds)
        load.seconds += seconds
        load.steps += 1
        enough = min(max(_ENOUGH_TOKENS // num_sessions, _LEAST_STEPS), _MOST_STEPS)
        if load.trial:
            self._look_at_trial(load, enough)
        elif load.seconds >= load.pause_s() and load.steps >= enough and self._is_open(num_sessions, load):
            load.begin_phase(trial=True)
            load.rates[load.wanted] = Rate()
            self.num_trials += 1
            if load.wanted:  # what became known of earlier drafts must not be held against these
                self.budget.coupled.forget()
                self.budget.rejection.forget()

    def _look_at_trial(self, load: _Load, enough: int) -> None:
        tried, before = load.rates[load.wanted].per_s(), load.rates[load.choice].per_s()
        if load.seconds >= _TRIAL_S and load.steps >= enough:
            self._end_trial(load, won=tried > before * (_WORTH if load.wanted else _WORTHLESS))
        elif any(load.steps >= steps and tried < share * before for steps, share in _HOPELESS):
            self._end_trial(load, won=False)

    def _end_trial(self, load: _Load, *, won: bool) -> None:
        load.num_failures = 0 if won else load.num_failures + 1
        load.choice = load.choice is not won
        load.begin_phase(trial=False)

    def _at(self, num_sessions: int) -> _Load:
        at = load_class(num_sessions)
        load = self._loads.get(at)
        if load is None:
            smaller = [other for key, other in self._loads.items() if key < at]
            pays = self.budget.gain(num_sessions, PRIOR_ACCEPTANCE, _K) >= _WORTH or not self.budget.cost.known
            load = self._loads[at] = _Load(pays and all(other.choice for other in smaller))
        return load

    def _is_open(self, num_sessions: int, load: _Load) -> bool:
        """Whether the other could be faster, by what is known."""
        if not load.choice:
            return self.budget.gain(num_sessions, _BEST_ACCEPTANCE, _K) >= _WORTH
        most = 1 << load_class(num_sessions)
        return load.rates[True].per_s() < _CLEAR * most / self.budget.plain_s(most)

    def _scale(self, num_sessions: int) -> float:
        """What plain decoding yields beside the most sessions of this load, over what it yields beside these."""
        most, cost = 1 << load_class(num_sessions), self.budget.cost
        return (most / cost.seconds(most)) / (num_sessions / cost.seconds(num_sessions)) if cost.known else 1.0
