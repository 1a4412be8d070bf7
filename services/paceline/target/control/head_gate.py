"""When a head is asked for tokens: only if that is expected to raise tokens per second, from measured times.

Asking a head for n of the N sessions of a step, to depth D, delays the step by T(n, D). With a the acceptance of its
tokens so far and b the tokens expected without it (prompt lookup), it is asked while (Dinkelbach's criterion)

    sum over the n sessions of (a + a^2 + .. + a^D - b)  >  R * T(n, D),

R being the current tokens per second, at least plain decoding's. The test is repeated before each further depth, with
the path probabilities known by then. It omits feeding the head with every step. So the head has an *account*: at each
load its accepted tokens are compared with the tokens made, at R, in all the time that it took. R includes the head's
own tokens, which does not change the sign: a tokens in h seconds in addition to c tokens in T have gain
a - (c + a) / (T + h) h > 0 if and only if (c + a) / (T + h) > c / T. A head with a negative account at a load is paused
there: neither asked nor fed, for 2, 4, 8, .. 64 s of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.statistics import Ewma
from paceline.target.control.allocation import load_class
from paceline.target.control.trial import LONG_WINDOW, is_due, pause_s

_ASKED_IN_TRIAL = 4
_COMPARED, _COMPARED_EVERY = 4, 256
"""Times that a head is asked depth by depth, and twice as often for chains, to measure both, and of how many."""
_CHAIN_SHARE = 0.6
""""Much less" than a depth with several leaves, which bring about a twentieth more tokens a step."""


@dataclass(slots=True)
class _Account:
    """Gain and cost of a head at one load since it was last judged."""

    steps: int = 0
    net: float = 0.0
    """Accepted tokens, less the tokens made otherwise in the time that the head took."""
    failures: int = 0
    on_trial: bool = False
    paused_until: float = 0.0


@dataclass(slots=True)
class Trials:
    """Asks a head without expected gain a few times, with increasing pauses."""

    _asks: int = 0
    """Remaining requests to the head without expected gain."""
    _declined: int = 0
    """Failed trials of this kind in a row."""
    _next_at: float = 0.0

    def try_anyway(self, now: float) -> bool:
        """True if the head is asked this time."""
        if self._asks == 0 and now >= self._next_at:
            self._asks = _ASKED_IN_TRIAL
        if self._asks == 0:
            return False
        self._asks -= 1
        if self._asks == 0:
            self._declined += 1
            self._next_at = now + pause_s(self._declined)
        return True

    def paid(self) -> None:
        """Records that the head was asked because of its expected gain."""
        self._declined = 0


@dataclass(slots=True)
class HeadGate:
    """Decides for one head; all times are in seconds."""

    adaptive: bool = True
    """False: it is always asked, to its full depth."""
    num_pauses: int = 0
    level_s: dict[tuple[int, bool], Ewma] = field(default_factory=dict)
    """Seconds of one depth by the load class of its leaves, of the first depth (True) and of a further one."""
    trials: Trials = field(default_factory=Trials)
    _loads: dict[int, _Account] = field(default_factory=dict)
    _num_asked: int = 0
    _chain_s: Ewma | None = None
    """Seconds of a token of a path by one call."""

    def wanted(self, num_sessions: int, now: float) -> bool:
        """True if the head is fed and may be asked at this concurrency."""
        if not self.adaptive:
            return True
        account = self._loads.get(load_class(num_sessions))
        return account is None or now >= account.paused_until

    def depth_s(self, num_leaves: int, *, first: bool) -> float | None:
        """Seconds of one depth for ``num_leaves``; None before any was measured."""
        at = load_class(num_leaves)
        near = self.level_s.get((at, first)) or self.level_s.get((at, not first))
        if near is None:  # the nearest load that is known
            known = sorted(self.level_s, key=lambda key: (abs(key[0] - at), key[1] is not first))
            near = self.level_s[known[0]] if known else None
        return None if near is None else near.get(0.0)

    def chains(self, num_sessions: int, width: int) -> bool:
        """True if one call per session, for its best path, is better than depth by depth with up to ``width`` leaves:
        if a token of all paths takes much less time than such a depth, which brings more tokens. Counts as being
        asked."""
        if width == 1 and num_sessions == 1:
            return True
        turn, self._num_asked = self._num_asked % _COMPARED_EVERY, self._num_asked + 1
        if turn < 3 * _COMPARED:
            return turn >= _COMPARED
        tree_s = self.level_s.get((load_class(num_sessions * width), False)) or self.level_s.get(
            (load_class(num_sessions), False)
        )
        if self.chain_s is None or tree_s is None:
            return num_sessions == 1
        return num_sessions * self.chain_s < _CHAIN_SHARE * tree_s.get(0.0)

    @property
    def chain_s(self) -> float | None:
        """Seconds of a token of a path by one call; None before any was measured."""
        return None if self._chain_s is None else self._chain_s.get(0.0)

    def observe_chains(self, lengths: Sequence[int], seconds: float) -> None:
        """Records the time of paths of these lengths, one for each session."""
        self._chain_s = self._chain_s or Ewma(0.3)
        self._chain_s.add(seconds / sum(lengths))
        for first in (True, False):
            self.observe_depth(len(lengths), seconds / max(lengths), first=first)

    def observe_depth(self, num_leaves: int, seconds: float, *, first: bool) -> None:
        """Records the time of one depth."""
        self.level_s.setdefault((load_class(num_leaves), first), Ewma(0.1)).add(seconds)

    def pays(self, gain: float, num_leaves: int, tokens_per_s: float, *, first: bool) -> bool:
        """True if a depth is expected to add more tokens than are made otherwise in its time.

        Args:
            gain: tokens that the depth is expected to add, in all its sessions.
            num_leaves: its leaves, one for each session.
            tokens_per_s: that are made otherwise, in all sessions of the step together.
            first: it is the first depth.
        """
        seconds = self.depth_s(num_leaves, first=first)
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

    def observe_step(self, num_sessions: int, accepted: int, seconds: float, tokens_per_s: float, now: float) -> bool:
        """Books a step. True if the head is paused from now on at this load.

        Args:
            num_sessions: sessions of the step.
            accepted: tokens of the head that were accepted.
            seconds: that it took: to be fed, to be asked, and to have its tokens verified.
            tokens_per_s: that are made now, by plain decoding at least.
            now: seconds of steps so far.
        """
        account = self._loads.setdefault(load_class(num_sessions), _Account())
        account.on_trial = account.on_trial or (account.failures > 0 and account.steps == 0)
        account.steps += 1
        account.net += accepted - tokens_per_s * seconds
        if not self.adaptive or not is_due(account.steps, account.net, on_trial=account.on_trial, window=LONG_WINDOW):
            return False
        worthless = account.net < 0.0
        if worthless:
            account.failures += 1
            account.paused_until = now + pause_s(account.failures, -account.net / max(tokens_per_s, 1e-9))
            self.num_pauses += 1
        else:
            account.failures = 0
        account.steps, account.net, account.on_trial = 0, 0.0, False
        return worthless
