"""Decides from measured rounds if a head should draft ahead of outcomes, although its states are late then.

Between an outcome and its states a head uses its own states. So fewer tokens of a proposal made ahead are accepted: a
share R of them. A proposal made after the outcome costs the time of its K depths, t_d each, in addition to a
verification of T_v. So drafting ahead has gain if ``R > 1 / (1 + K t_d / T_v)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.experiment import LEAST, WINDOW
from paceline.core.statistics import Ewma

_LEAST_ROUNDS = 2 * WINDOW
"""Rounds of either kind before they are compared."""
_TRIAL_EVERY = 2 * LEAST
"""One in this many sessions uses the other choice, so that the comparison stays true."""


@dataclass(slots=True)
class Overlap:
    """Compares rounds of sessions that are drafted ahead with rounds of other sessions."""

    forced: bool | None = None
    """The fixed choice; None: by measurement."""
    accepted: dict[bool, Ewma] = field(default_factory=lambda: {ahead: Ewma(1 / WINDOW) for ahead in (True, False)})
    """Draft tokens accepted of a proposal, by whether it was made ahead."""
    rounds: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    depth_s: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW))
    """t_d: seconds of one depth of a proposal."""
    num_proposed: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW))
    """K: tokens of a proposal."""
    verify_s: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW))
    """T_v: seconds from a proposal's announcement to its outcome."""
    num_sessions: int = 0

    def begin(self) -> bool:
        """Assigns a kind to a new session. Returns True if it is drafted ahead."""
        if self.forced is not None:
            return self.forced
        number, self.num_sessions = self.num_sessions, self.num_sessions + 1
        if min(self.rounds.values()) < _LEAST_ROUNDS:
            return number % 2 == 1
        return self.pays != (number % _TRIAL_EVERY == 0)

    def observe(self, *, ahead: bool, num_proposed: int, num_accepted: int, verify_s: float) -> None:
        """Records the outcome of a proposal of the draft."""
        self.rounds[ahead] += 1
        self.accepted[ahead].add(float(num_accepted))
        self.num_proposed.add(float(num_proposed))
        self.verify_s.add(verify_s)

    @property
    def kept(self) -> float | None:
        """R: the share of the accepted tokens that is left to proposals made ahead; None: not known yet."""
        if min(self.rounds.values()) < _LEAST_ROUNDS or not (fresh := self.accepted[False].get(0.0)):
            return None
        return self.accepted[True].get(0.0) / fresh

    @property
    def needed(self) -> float:
        """The share R above which drafting ahead has gain."""
        verify_s = self.verify_s.get(0.0)
        drafting_s = self.num_proposed.get(0.0) * self.depth_s.get(0.0)
        return 1 / (1 + drafting_s / verify_s) if verify_s > 0 else 1.0

    @property
    def pays(self) -> bool:
        """True if sessions are drafted ahead, except the ones that measure the other choice."""
        return self.kept is not None and self.kept > self.needed

    def __str__(self) -> str:
        """A clause for the status."""
        if self.forced is not None:
            return f"drafting {'ahead of' if self.forced else 'after'} outcomes, as configured"
        if self.kept is None:
            seen = ", ".join(f"{self.rounds[ahead]} {how}" for ahead, how in ((True, "ahead"), (False, "after")))
            return f"drafting ahead of outcomes is being measured ({seen} of {_LEAST_ROUNDS} rounds each)"
        choice = "drafting ahead of outcomes" if self.pays else "drafting after outcomes"
        kept = f"made ahead, proposals keep {self.kept:.0%} of their accepted tokens"
        return f"{choice}: {kept}, and more than {self.needed:.0%} pays"
