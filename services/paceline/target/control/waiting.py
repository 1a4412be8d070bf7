"""Waiting for a draft or stepping without it: the choice with more tokens per second, from measured times.

Waiting has gain while it is expected to add more tokens than the session makes otherwise in that time. This is
Dinkelbach's criterion for maximizing tokens / time: wait iff ``gain > rate * cost``, with

- gain: the probability that the awaited draft token comes in time, by the share of earlier waits that were answered,
  and is accepted, path included; less the gain of a proposal that is available without waiting. The gain of a wait for
  a first token is the mean of such waits so far. It includes the tokens that came with the first one or were awaited
  after it. The next round counts as well: it has the draft's tokens in time more or less often than after a step
  without them, and is spared that wait;
- cost: the expected time until it arrives, from the delays measured on earlier rounds, and the time that verifying
  it takes (``step_cost.py``);
- rate: the tokens per second of sessions so far, at least plain decoding's, which is always possible: failed waits
  lower the rate so far, and must not make the next one look cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.experiment import LEAST, WINDOW
from paceline.core.statistics import SESSION_KEEP, Ewma
from paceline.messages import Nodes
from paceline.target.control.allocation import PRIOR_ACCEPTANCE
from paceline.types import Mode

if TYPE_CHECKING:  # sessions hold tensors, and the decision is also made without any (``plan``)
    from paceline.target.session import TargetSession

DRAFT_TIMEOUT_S = 1.0
"""A draft that has sent nothing for so long while a session waited counts as silent until it sends again."""
GIVE_UP = 3.0
"""Waiting ends at this multiple of the expected delay."""
ROUND_WEIGHT = 2 / (WINDOW + 1)
"""Weight of a round in the averages of rounds: twice that of a token, so that little is lost to a slow draft."""
_STEP_S, _SHORTEST_S = 0.02, 1e-6
"""Seconds of a step before one was measured, and the least of any step."""


def worth_waiting(gain: float, cost_s: float, tokens_per_s: float) -> bool:
    """True if waiting is expected to add more tokens than the time would otherwise yield."""
    return gain > tokens_per_s * cost_s


def worth_now(probs: Sequence[float], row_s: float, tokens_per_s: float) -> float:
    """Net gain, in tokens, of verifying the best prefix of an available proposal.

    Args:
        probs: probability that each token is accepted, given its ancestors.
        row_s: seconds that one more token makes the step longer.
        tokens_per_s: tokens that a second yields otherwise.
    """
    worth, path = 0.0, 1.0
    for prob in probs:
        path *= prob  # the probability that this token and all before it are accepted: never increasing
        if path <= tokens_per_s * row_s:
            break
        worth += path - tokens_per_s * row_s
    return worth


FinishedRound = tuple[int, int, int, float, float]
"""One round of a session: draft tokens compared with the target's, accepted ones, emitted tokens, seconds since the
previous outcome, and seconds of waiting for its first draft token (0: none came, or no need)."""


@dataclass(slots=True)
class WaitPolicy:
    """Decides by the measured times of one target engine whether a session waits. All times are in seconds."""

    step_s: Ewma = field(default_factory=Ewma)
    """Target steps that only decode."""
    draft_step_s: Ewma = field(default_factory=Ewma)
    """Tree step of the draft, as the draft reports it."""
    link_s: Ewma = field(default_factory=lambda: Ewma(value=0.0))
    """Delay of a first answer beyond the draft's own steps: the link round trip, and queueing at the draft."""
    answered: Ewma = field(default_factory=lambda: Ewma(1 / LEAST, 1.0))
    """Share of waits for a first draft token that ended with one; late answers count as well."""
    first_acceptance: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW, PRIOR_ACCEPTANCE))
    """Share of first draft tokens of a proposal that are accepted."""
    acceptance: Ewma = field(default_factory=lambda: Ewma(1 / WINDOW, PRIOR_ACCEPTANCE))
    """Share of draft tokens that are accepted if all before them were."""
    draft_tokens: Ewma = field(default_factory=lambda: Ewma(ROUND_WEIGHT))
    """Draft tokens accepted in a round that had any to verify."""
    answer_tokens: Ewma = field(default_factory=lambda: Ewma(ROUND_WEIGHT))
    """Draft tokens accepted in a round that waited for its first one; ``draft_tokens`` until there was a wait."""
    answer_wait_s: Ewma = field(default_factory=lambda: Ewma(ROUND_WEIGHT))
    """How long it waited in all."""
    hits: dict[bool, Ewma] = field(default_factory=lambda: {True: Ewma(ROUND_WEIGHT), False: Ewma(ROUND_WEIGHT)})
    """Share of rounds whose draft had tokens when they began, after rounds that verified tokens of it (True) and after
    others."""
    tokens_per_round: Ewma = field(default_factory=lambda: Ewma(ROUND_WEIGHT))
    round_s: Ewma = field(default_factory=lambda: Ewma(ROUND_WEIGHT))

    def observe_rounds(self, rounds: Sequence[FinishedRound]) -> None:
        """Records finished rounds, in order."""
        tried = [(num_drafted, num_accepted) for num_drafted, num_accepted, *_ in rounds if num_drafted]
        self.first_acceptance.add_all([1.0 if num_accepted else 0.0 for _, num_accepted in tried])
        accepted: list[float] = []
        for num_drafted, num_accepted in tried:
            accepted += [1.0] * min(num_drafted, num_accepted)
            if num_accepted < num_drafted:
                accepted.append(0.0)
        self.acceptance.add_all(accepted)
        self.tokens_per_round.add_all([float(num_tokens) for _, _, num_tokens, _, _ in rounds])
        self.round_s.add_all([round_s for _, _, _, round_s, _ in rounds])
        for num_drafted, num_accepted, _, _, waited_s in rounds:
            if num_drafted:
                self.draft_tokens.add(float(num_accepted))
            else:  # a slow or unlucky spell must not end waiting permanently
                self.link_s.value = SESSION_KEEP * self.link_s.get(0.0)
                if self.answer_tokens.value is not None:
                    far = self.draft_tokens.get(0.0) - self.answer_tokens.value
                    self.answer_tokens.value += (1.0 - SESSION_KEEP) * far
            if waited_s > 0.0:
                self.observe_answer(num_accepted, waited_s)

    def observe_hit(self, *, after_draft: bool, hit: bool) -> None:
        """Records if a draft had tokens when a round began; ``after_draft``: the previous round verified some."""
        self.hits[after_draft].add(float(hit))

    def observe_answer(self, num_accepted: int, waited_s: float) -> None:
        """Records a round that waited for its first draft token, and had it."""
        self.answer_tokens.add(float(num_accepted))
        self.answer_wait_s.add(waited_s)

    def observe_nodes(self, session: TargetSession, message: Nodes, now: float, *, resolved: bool) -> None:
        """Records the arrival of nodes; ``resolved``: a session without a proposal has one now."""
        if message.step_s > 0:
            self.draft_step_s.add(message.step_s)
        if resolved and message.context_len == session.num_tokens:
            self.link_s.add(max(0.0, now - session.outcome_at - self._answer_s()))
            self.answered.add(1.0)

    def may_wait(self, session: TargetSession, *, others_ready: bool) -> bool:
        """False if ``until`` is None for any ``wanted``."""
        num_tokens = len(session.tokens)
        return (
            session.draft_available
            and (not others_ready or session.mode is Mode.SEQUENTIAL)
            and not session.draft_silent
            and session.idle_context_len != num_tokens
            and not (session.on_trial and not session.draft_heard)
            and session.num_computed == num_tokens - 1
            and session.max_draft() > 0
        )

    def until(
        self,
        session: TargetSession,
        now: float,
        rate: float,
        *,
        others_ready: bool,
        wanted: int | None = None,
        row_s: float = 0.0,
        fallback: Sequence[float] = (),
        fallback_s: float = 0.0,
    ) -> float | None:
        """Time until which a session that ``may_wait`` should wait for its draft; None: step now. May be asked again on
        every message.

        Args:
            now: seconds, as on the engine's clock.
            rate: of ``rate``, the same for all that are asked at once.
            others_ready: other sessions step now, so that waiting costs a whole step of the batch.
            wanted: draft tokens that would be verified if available (``allocation.py``), so the maximum to wait for;
                None: all that the session may have.
            row_s: seconds that one more draft token makes the step longer.
            fallback: probabilities of the tokens that can be proposed without waiting (``lookup.py``, ``heads/``).
            fallback_s: seconds that making those takes.
        """
        wanted = session.max_draft() if wanted is None else min(wanted, session.max_draft())
        probs = session.tree.proposal(wanted).probs
        if len(probs) >= wanted:
            return None
        if session.mode is Mode.SEQUENTIAL:
            limit = max(session.outcome_at, session.last_nodes_at) + DRAFT_TIMEOUT_S
            session.draft_silent = now >= limit
            return None if session.draft_silent else limit
        if others_ready:
            return None
        if probs:
            gain = self.acceptance.get(PRIOR_ACCEPTANCE) * math.prod(probs)
            expected, since = self._next_s(), max(session.last_nodes_at, session.outcome_at)
        else:
            gain = self.answered.get(1.0) * self.first_acceptance.get(PRIOR_ACCEPTANCE)
            expected, since = self._answer_s() + self.link_s.get(0.0), session.outcome_at
        elapsed = now - since
        limit_s = GIVE_UP * expected
        if elapsed >= limit_s:
            if not probs:
                self.link_s.add(elapsed)  # a lower bound of what the answer takes
                self.answered.add(0.0)
            return None
        cost = max(expected - elapsed, expected / 4) + row_s
        if not probs:
            further = self.answer_tokens.get(self.draft_tokens.get(0.0)) - self.first_acceptance.get(PRIOR_ACCEPTANCE)
            further -= rate * max(0.0, self.answer_wait_s.get(0.0) - expected)
            further = max(0.0, further) + self._more_hits() * rate * expected
            gain += self.answered.get(1.0) * further
            gain -= max(0.0, worth_now(fallback, row_s, rate) - rate * fallback_s)
        return since + limit_s if worth_waiting(gain, cost, rate) else None

    def _next_s(self) -> float:
        """Expected seconds between two messages of a draft that grows a session: a target's step until one came."""
        return self.draft_step_s.get(self.step_s.get(_STEP_S))

    def _answer_s(self) -> float:
        """Expected seconds of the draft's own steps after a miss: half of the one it is in, and one for the answer."""
        return self._next_s() / 2 + self._next_s()

    def _more_hits(self) -> float:
        """Added probability that a round begins with tokens of the draft, after one that verified some."""
        after_draft, after_others = (self.hits[which].value for which in (True, False))
        return 0.0 if after_draft is None or after_others is None else after_draft - after_others

    def rate(self) -> float:
        """Tokens per second of a session, at least plain decoding's; rounds change it, waits do not."""
        step_s = self.step_s.get(_STEP_S)
        return max(
            self.tokens_per_round.get(2.0) / max(self.round_s.get(step_s), _SHORTEST_S), 1.0 / max(step_s, _SHORTEST_S)
        )
