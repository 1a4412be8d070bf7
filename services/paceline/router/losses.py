"""The targets that were lost under a session: whether it moves to another one, or is itself at fault. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PoisonRequestError

MOST_IN_A_ROW = 2
"""Targets lost without a token between them, after which a session is ended."""
MOST_IN_ALL = 5
"""Targets lost in all, after which a session is ended even if it emitted tokens between them."""


@dataclass(slots=True)
class Losses:
    """The targets that have died or hung under one session, or have failed it."""

    num_in_a_row: int = 0
    """Losses since the last token."""
    num_in_all: int = 0
    _context_len: int = 0  # when it was opened on its target, or lost it
    _opened_s: float = 0.0

    def note_opened(self, context_len: int, now: float) -> None:
        """Records that a target begins to serve the session, at this length of its context."""
        self._context_len, self._opened_s = context_len, now

    def note_lost(self, context_len: int) -> bool:
        """Records that the target is lost, with the session's context at this length. True: the session is at fault."""
        self.num_in_a_row = 1 if context_len > self._context_len else self.num_in_a_row + 1
        self.num_in_all += 1
        self._context_len = context_len
        return self.num_in_a_row >= MOST_IN_A_ROW or self.num_in_all >= MOST_IN_ALL

    def suspected(self, context_len: int) -> bool:
        """True after a loss, until the next target has decided a token."""
        return self.num_in_a_row > 0 and context_len == self._context_len

    def on_trial(self, context_len: int, now: float, trial_s: float) -> bool:
        """True while a target may hang or die under a suspected session; ``trial_s``: when a hang would be known."""
        return self.suspected(context_len) and now < self._opened_s + trial_s


def poisonous(losses: Losses, reason: str) -> PoisonRequestError:
    """The error of a session that is at fault; ``reason``: why the last target was lost."""
    return PoisonRequestError(
        f"targets hung or died under the request, or failed it, {losses.num_in_all} times: it is ended, and should not "
        f"be sent again ({reason})"
    )
