"""When a head is asked for tokens: only if that is expected to raise tokens per second, from measured times.

Asking a head for n of the N sessions of a step, to depth D, delays the step by T(n, D). With a the acceptance of its
tokens so far and b the tokens expected without it (prompt lookup), it is asked while (Dinkelbach's criterion)

    sum over the n sessions of (a + a^2 + .. + a^D - b)  >  R * T(n, D),

R being the current tokens per second, at least plain decoding's. The test is repeated before each further depth, with
the path probabilities known by then. It omits feeding the head with every step. So the head has an *account*. At each
load it compares the head's accepted tokens with the tokens that rate R makes in the head's time. R includes the head's
own tokens, which does not change the sign: a tokens in h seconds in addition to c tokens in T have gain a - (c + a) /
(T + h) h > 0 if and only if (c + a) / (T + h) > c / T. A head with a negative account at a load is paused there:
neither asked nor fed, for 1, 2, 4, .. 64 s of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.experiment import LEAST, TRIAL_SHARE, Budget, Experiment
from paceline.core.statistics import Ewma
from paceline.target.control.allocation import load_class

_COMPARED_EVERY = round(LEAST / TRIAL_SHARE)
"""Of this number of times a head is asked ``LEAST`` times depth by depth and ``LEAST`` times for chains, to measure
both."""


@dataclass(slots=True)
class HeadGate:
    """Decides for one head; all times are in seconds."""

    adaptive: bool = True
    """False: it is always asked, to its full depth."""
    budget: Budget = field(default_factory=Budget)
    """What trials may cost."""
    num_pauses: int = 0
    level_s: dict[tuple[int, bool], Ewma] = field(default_factory=dict)
    """Seconds of one depth by the load class of its leaves, of the first depth (True) and of a further one."""
    _asks: Experiment = field(default_factory=Experiment)
    """Requests to the head although they have no expected gain."""
    _loads: dict[int, Experiment] = field(default_factory=dict)
    _num_asked: int = 0
    _chain_s: Ewma | None = None
    """Seconds of a token of a path by one call."""

    def wanted(self, num_sessions: int) -> bool:
        """True if the head is fed and may be asked at this concurrency."""
        experiment = self._loads.get(load_class(num_sessions))
        return not self.adaptive or experiment is None or self.budget.now >= experiment.until

    def paid(self) -> None:
        """Records that the head was asked because of its expected gain."""
        self._asks.num_failures = 0

    def try_anyway(self) -> bool:
        """True if the head is asked this time, without expected gain: a few times, with increasing pauses."""
        if self.budget.now < self._asks.until:
            return False
        self._asks.sample.add(0.0, 1.0)
        if self._asks.sample.count >= LEAST:
            self._asks.end(self.budget, won=False)
        return True

    def depth_s(self, num_leaves: int, *, first: bool) -> float | None:
        """Seconds of one depth for ``num_leaves``; None before any was measured."""
        at = load_class(num_leaves)
        near = self.level_s.get((at, first)) or self.level_s.get((at, not first))
        if near is None:  # the nearest load that is known
            known = sorted(self.level_s, key=lambda key: (abs(key[0] - at), key[1] is not first))
            near = self.level_s[known[0]] if known else None
        return None if near is None else near.get(0.0)

    def chains(self, num_sessions: int, width: int) -> bool:
        """True if one call per session, for its best path, is better than depth by depth with up to ``width`` leaves. A
        depth brings more tokens, so a token of all paths must take less than half its time. Counts as being asked."""
        if width == 1 and num_sessions == 1:
            return True
        turn, self._num_asked = self._num_asked % _COMPARED_EVERY, self._num_asked + 1
        if turn < 2 * LEAST:
            return turn >= LEAST
        tree_s = self.level_s.get((load_class(num_sessions * width), False)) or self.level_s.get(
            (load_class(num_sessions), False)
        )
        if self.chain_s is None or tree_s is None:
            return num_sessions == 1
        return 2 * num_sessions * self.chain_s < tree_s.get(0.0)

    @property
    def chain_s(self) -> float | None:
        """Seconds of a token of a path by one call; None before any was measured."""
        return None if self._chain_s is None else self._chain_s.get(0.0)

    def observe_chains(self, lengths: Sequence[int], seconds: float) -> None:
        """Records the time of paths of these lengths, one for each session."""
        self._chain_s = self._chain_s or Ewma()
        self._chain_s.add(seconds / sum(lengths))
        for first in (True, False):
            self.observe_depth(len(lengths), seconds / max(lengths), first=first)

    def observe_depth(self, num_leaves: int, seconds: float, *, first: bool) -> None:
        """Records the time of one depth."""
        self.level_s.setdefault((load_class(num_leaves), first), Ewma()).add(seconds)

    def pays(self, gain: float, num_leaves: int, tokens_per_s: float) -> bool:
        """True if the first depth is expected to add more tokens than are made otherwise in its time.

        Args:
            gain: tokens that the depth is expected to add, in all its sessions.
            num_leaves: its leaves, one for each session.
            tokens_per_s: that are made otherwise, in all sessions of the step together.
        """
        seconds = self.depth_s(num_leaves, first=True)
        return not self.adaptive or seconds is None or gain > tokens_per_s * seconds

    def most_leaves(self, worths: Sequence[float], tokens_per_s: float) -> int:
        """Number of leaves of a further depth that maximizes expected tokens less the tokens otherwise made in their
        time. ``worths``: tokens that each leaf is expected to add."""
        if not self.adaptive:
            return len(worths)
        best, num_best, gain = 0.0, 0, 0.0
        for num, worth in enumerate(sorted(worths, reverse=True), 1):
            gain += worth
            seconds = self.depth_s(num, first=False)
            if seconds is None:
                return len(worths)
            if gain - tokens_per_s * seconds > best:
                best, num_best = gain - tokens_per_s * seconds, num
        return num_best

    def observe_step(self, num_sessions: int, accepted: int, seconds: float, tokens_per_s: float) -> bool:
        """Books a step. True if the head is paused from now on at this load.

        Args:
            num_sessions: sessions of the step.
            accepted: tokens of the head that were accepted.
            seconds: that it took: to be fed, to be asked, and to have its tokens verified.
            tokens_per_s: that are made now, by plain decoding at least.
        """
        experiment = self._loads.setdefault(load_class(num_sessions), Experiment())
        experiment.sample.add(accepted - tokens_per_s * seconds, 1.0)
        won = experiment.verdict() if self.adaptive else None
        if won is None:
            return False
        loss_s = -experiment.sample.amount / tokens_per_s if tokens_per_s > 0 else 0.0
        experiment.end(self.budget, won=won, loss_s=loss_s)
        self.num_pauses += not won
        return not won
