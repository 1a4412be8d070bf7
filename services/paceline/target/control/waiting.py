"""Whether a session steps now or waits for its draft: the choice with more tokens per second, from measured times.

Waiting is worth its time while the tokens it is expected to add exceed what the session makes elsewhere in that
time (Dinkelbach's criterion for maximising tokens / time): wait iff ``gain > rate * cost``, with

- gain: the probability that the draft token waited for comes in time, by the share of earlier waits that were not in
  vain, and is accepted, path included; less what the session could propose without waiting;
- cost: the expected time until it arrives, from the delays measured on earlier rounds, and the time that verifying
  it takes (``budget.py``);
- rate: the tokens per second of sessions so far, at least those of plain decoding, which can be had at any time: waits
  in vain lower what was made so far, and must not make the next one look cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.messages import Nodes
from paceline.target.control.step_cost import Average
from paceline.types import Mode

if TYPE_CHECKING:  # sessions hold tensors, and the decision is also made without any (``plan``)
    from paceline.target.session import TargetSession

DRAFT_TIMEOUT_S = 1.0
"""A draft that has sent nothing for so long while it was waited for does not serve the session until it has."""
_GIVE_UP = 3.0
"""Waiting ends at this multiple of the expected delay."""


def worth_waiting(gain: float, cost_s: float, tokens_per_s: float) -> bool:
    """The criterion of the module's head."""
    return gain > tokens_per_s * cost_s


def worth_now(probs: Sequence[float], row_s: float, tokens_per_s: float) -> float:
    """Tokens that a proposal at hand adds, less those that go for the time of verifying it; of its best beginning."""
    worth, path = 0.0, 1.0
    for prob in probs:
        path *= prob
        if path <= tokens_per_s * row_s:
            break
        worth += path - tokens_per_s * row_s
    return worth


@dataclass(slots=True)
class WaitPolicy:
    """Measured times of one target engine and the decision made from them. All times in seconds."""

    step_s: Average = field(default_factory=Average)
    """Target step that only decodes."""
    draft_step_s: Average = field(default_factory=Average)
    """Tree step of the draft, as the draft reports it."""
    link_s: Average = field(default_factory=lambda: Average(0.1, 0.0))
    """What a first answer takes beyond the draft's own steps: both ways of the link, queueing at the draft."""
    answered: Average = field(default_factory=lambda: Average(0.25, 1.0))
    """Share of waits for a first draft token that ended with one; late answers count as well."""
    first_acceptance: Average = field(default_factory=lambda: Average(0.02, 0.7))
    """Share of first draft tokens of a proposal that are accepted."""
    acceptance: Average = field(default_factory=lambda: Average(0.02, 0.7))
    """The same of any draft token whose predecessor was accepted."""
    tokens_per_round: Average = field(default_factory=lambda: Average(0.05))
    round_s: Average = field(default_factory=lambda: Average(0.05))

    def observe_round(self, num_drafted: int, num_accepted: int, num_tokens: int, round_s: float) -> None:
        """Takes a finished round of one session; ``round_s`` is the time since its previous outcome."""
        if num_drafted:
            self.first_acceptance.add(1.0 if num_accepted else 0.0)
        for i in range(min(num_drafted, num_accepted + 1)):
            self.acceptance.add(1.0 if i < num_accepted else 0.0)
        self.tokens_per_round.add(float(num_tokens))
        self.round_s.add(round_s)
        if not num_drafted:
            self.link_s.value = 0.98 * self.link_s.get(0.0)  # so that a slow spell does not end waiting for good

    def observe_nodes(self, session: TargetSession, message: Nodes, now: float, *, resolved: bool) -> None:
        """Takes the arrival of nodes; ``resolved``: they gave a lost or leafless session something to propose."""
        if message.step_s > 0:
            self.draft_step_s.add(message.step_s)
        if resolved and message.context_len == session.num_tokens:
            self.link_s.add(max(0.0, now - session.outcome_at - self._answer_s()))
            self.answered.add(1.0)

    def may_wait(self, session: TargetSession, *, others_ready: bool) -> bool:
        """False: ``wait_until`` is None, however many draft tokens are wanted."""
        return (
            session.draft_available
            and (session.mode is Mode.SEQUENTIAL or not others_ready)
            and not (session.draft_silent or session.idle or (session.on_trial and not session.draft_heard))
            and session.decoding
            and session.max_draft() > 0
        )

    def wait_until(
        self,
        session: TargetSession,
        now: float,
        *,
        others_ready: bool,
        wanted: int | None = None,
        row_s: float = 0.0,
        foreseen: Sequence[float] = (),
    ) -> float | None:
        """Until when ``session`` should wait for its draft; None: step now. May be asked again on every message.

        ``wanted``: draft tokens that would be verified if they were there (``budget.py``); None: all it may have.
        A token that would not be is never waited for. ``row_s``: how much longer one more makes the step.
        ``foreseen``: probabilities of the tokens that it has to propose if it does not wait (``lookup.py``).
        """
        if not self.may_wait(session, others_ready=others_ready):
            return None
        wanted = session.max_draft() if wanted is None else min(wanted, session.max_draft())
        chain = session.tree.proposal(wanted)
        if len(chain) >= wanted:
            return None
        if session.mode is Mode.SEQUENTIAL:
            limit = max(session.outcome_at, session.last_nodes_at) + DRAFT_TIMEOUT_S
            session.draft_silent = now >= limit
            return None if session.draft_silent else limit
        if others_ready:  # waiting would cost a whole step of the batch
            return None
        if len(chain):
            gain = self.acceptance.get(0.7) * math.prod(chain.probs)
            expected, since = self._next_s(), max(session.last_nodes_at, session.outcome_at)
        else:
            gain = self.answered.get(1.0) * self.first_acceptance.get(0.7)
            expected, since = self._answer_s() + self.link_s.get(0.0), session.outcome_at
        elapsed = now - since
        limit_s = _GIVE_UP * expected
        if elapsed >= limit_s:
            if not len(chain):
                self.link_s.add(elapsed)  # at least
                self.answered.add(0.0)
            return None
        cost, rate = max(expected - elapsed, expected / 4) + row_s, self._rate()
        if not len(chain):
            gain -= worth_now(foreseen, row_s, rate)
        return since + limit_s if worth_waiting(gain, cost, rate) else None

    def _next_s(self) -> float:
        """Expected time between two messages of a draft that grows a session."""
        return self.draft_step_s.get(self.step_s.get(0.02) / 4)

    def _answer_s(self) -> float:
        """Expected time of the draft's own steps after a miss: half of the one it is in, and one for the answer."""
        return 1.5 * self._next_s()

    def _rate(self) -> float:
        step_s = max(self.step_s.get(0.02), 1e-6)
        return max(self.tokens_per_round.get(2.0) / max(self.round_s.get(step_s), 1e-6), 1.0 / step_s)
