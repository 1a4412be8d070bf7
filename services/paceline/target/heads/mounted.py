"""One head in its target: the sessions that it follows, its time and accepted tokens, and the handling of its
errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from paceline.core.tree import NO_PROPOSAL, Proposal
from paceline.drafters.calibration import Calibration
from paceline.drafters.growing.blame import call_for_each
from paceline.drafters.protocol import DrafterSessionError, Features, Fed, Head, Rider
from paceline.drafters.ranking import Rule
from paceline.errors import PacelineError
from paceline.target.control.allocation import AcceptanceHistory
from paceline.target.control.compared import compare
from paceline.target.control.head_gate import HeadGate
from paceline.target.heads.grower import HeadGrower
from paceline.target.heads.session import HeadSession, rule_of
from paceline.target.session import FAN_OUT, TargetSession
from paceline.types import PAGE_SIZE

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class MountedHead(HeadGrower):
    """One head in its target: the sessions that it follows, its acceptance and times, and whether it is on."""

    def __init__(
        self, name: str, head: Head, *, num_tokens: int, max_len: int | None = None, warning: str | None = None
    ) -> None:
        """``name``: for status and metrics. ``num_tokens``: the most that it proposes at once. ``max_len``: tokens of
        the longest context that it can follow; None: any. ``warning``: what its probe has found, for the status."""
        super().__init__(head, num_tokens, self._give_up)
        self.name = name
        self.head = head
        self.max_len = max_len
        self.warning = warning
        self.coupled, self.rejection = AcceptanceHistory(), AcceptanceHistory()
        """Acceptance of its tokens in all sessions, by rule."""
        self._records: dict[tuple[int, bool], tuple[HeadGate, AcceptanceHistory, AcceptanceHistory]] = {}
        """Gate and both acceptances by the circumstances in which they were learned (``use``)."""
        self.calibrations = {rule: Calibration(FAN_OUT) for rule in Rule}
        self.follows = True
        """True: the head is given committed tokens after each step. False: it is paused and gets them later
        (``follow``).
        """
        self.columns: tuple[int, ...] = ()
        """Indices of the head's boundaries among the boundaries that the target's steps return."""
        self.pages: set[int] = set()
        """Full pages of the target that it was fed with from end to end."""
        self.rider: Rider | None = head.rider
        """The head, if it has rows of its own in the target's steps."""
        self.riding: set[str] = set()
        """Sessions with some of them in the running step."""
        self.accepted, self.spent_s = 0, 0.0
        """The head's accepted tokens, and the seconds that it took, since both were last booked."""

    def report(self, num_rounds: int) -> str:
        """Describes the head in a clause for the status. ``num_rounds``: rounds of all sessions so far."""
        if self.failure:
            return f"head {self.name} is switched off: {self.failure}"
        stats, depth_s = self.stats, self.gate.depth_s(1, first=True)
        text = f"head {self.name}: {stats.rounds / num_rounds:.0%} of rounds had its proposal, "
        text += f"{stats.rows_used / max(stats.rows, 1):.0%} of it accepted"
        if depth_s is not None:
            text += f", {1e3 * depth_s:.3g} ms a depth of one session"
        text += f", paused {self.gate.num_pauses} times" if self.gate.num_pauses else ""
        text += f", went on {stats.holes} times after missing a part of a session" if stats.holes else ""
        if stats.guesses:
            text += f", {stats.guesses / num_rounds:.3g} extra tokens a round in steps"
        return text + (f"; warning of the probe at start-up: {self.warning}" if self.warning else "")

    def use(self, num_cores: int, *, drafting: bool) -> None:
        """Switches to the measurements that were made on ``num_cores`` cores, with drafts or without.

        With drafts, a head is asked only where the draft has no tokens. These rounds are few, and their tokens are hard
        to
        predict.
        """
        new = HeadGate(self.gate.adaptive, self.gate.budget), AcceptanceHistory(), AcceptanceHistory()
        self.gate, self.coupled, self.rejection = self._records.setdefault((num_cores, drafting), new)
        for followed in self.sessions.values():
            followed.hits = AcceptanceHistory(self._acceptance(followed.session))

    def _acceptance(self, session: TargetSession) -> AcceptanceHistory:
        return self.rejection if session.rejection else self.coupled

    def spend(self, seconds: float) -> None:
        """Adds time to the head's account."""
        self.stats.seconds += seconds
        self.spent_s += seconds

    @property
    def reads_states(self) -> bool:
        """True if it lives of the target's hidden states."""
        return self.head.features is not None

    @property
    def every_position(self) -> bool:
        """True if it is fed with all positions, without a gap."""
        return self.head.features is not None and self.head.features.every_position

    # -- its sessions --------------------------------------------------------------------------------------------------

    def open(self, session: TargetSession) -> None:
        """Begins a session, if the head can follow it."""
        self.guarded(lambda: self._open(session))

    def _open(self, session: TargetSession) -> None:
        try:
            self.head.open(session.session_id, session.tokens, session.sampler, session.cache_salt)
        except PacelineError as error:
            self.head.close(session.session_id)
            self.stats.sessions_failed += 1
            log.warning("head %s cannot follow session %s: %s", self.name, session.session_id, error)
            return
        acceptance = self._acceptance(session)
        self.sessions[session.session_id] = HeadSession(session, self.calibrations[rule_of(session)], acceptance)

    def outgrown(self, session: TargetSession) -> bool:
        """True if a session's context is longer than the head can follow."""
        return self.max_len is not None and session.num_tokens >= self.max_len

    def follow(self, *, on: bool) -> None:
        """Sets whether the head is given committed tokens. Going on, it first gets what it has missed."""
        if on and not self.follows:
            for followed in [*self.sessions.values()]:
                self.catch_up(followed.session)
        self.follows = on

    def catch_up(self, session: TargetSession) -> None:
        """Passes the session's committed tokens that the head does not have yet to it, if the session is open here."""
        followed = self.sessions.get(session.session_id)
        if followed is None or followed.tree.context_len == session.num_tokens:
            return
        if self.outgrown(session):
            self.drop(session.session_id)
            return
        token_ids = tuple(session.tokens[followed.tree.context_len :])
        node_ids, _, kept = followed.follow(token_ids)
        followed.in_flight = frozenset()
        if self.reads_states or self.rider is not None:
            followed.restart()
            kept = []
        self.guarded(lambda: self.head.advance(session.session_id, token_ids, node_ids, kept))

    def leave(self, session: TargetSession) -> None:
        """Records that a session ends with the running step. No head is fed with what that step has computed."""
        followed = self.sessions.get(session.session_id)
        is_fed = followed is not None and followed.attachment == session.attachment
        num_rows = followed.num_fed + 1 if followed is not None and is_fed else 0
        self.pages.difference_update(session.pages[max(session.num_attached, num_rows) // PAGE_SIZE :])

    def drop(self, session_id: str) -> None:
        """Ends a session, if it is open here."""
        if self.sessions.pop(session_id, None) is not None:
            self.riding.discard(session_id)
            self.guarded(lambda: self.head.close(session_id))

    def may_ask(self, followed: HeadSession) -> bool:
        """True if the head knows all of a session's context, and may be asked."""
        session = followed.session
        if self.reads_states and (
            followed.num_fed != session.num_tokens - 1
            or session.num_tokens < 2
            or followed.attachment != session.attachment
        ):
            return False
        return followed.ready or self.ready(followed)

    def observe(self, followed: HeadSession, proposal: Proposal, accepted: Sequence[int], row_s: float) -> None:
        """Records which tokens of a session's proposal were accepted; its rows took ``row_s`` seconds."""
        result = compare(proposal, proposal.along(accepted))
        followed.hits.add(result.places, result.predicted, result.first, result.any)
        if followed.rule is Rule.REJECTION:
            followed.in_flight = frozenset(proposal.node_ids)
        self.stats.rounds += 1
        self.stats.rows += len(proposal)
        self.stats.rows_used += len(accepted)
        self.accepted += len(accepted)
        self.spent_s += row_s

    def guesses(self, session: TargetSession) -> Proposal:
        """Tokens to compute with a session's own in the coming step."""
        assert self.rider is not None
        rider = self.rider
        found = self.guarded(lambda: rider.guesses(session.session_id)) or NO_PROPOSAL
        if len(found):
            self.riding.add(session.session_id)
            self.stats.guesses += len(found)
        return found

    def forget_guesses(self, session_id: str, num_tokens: int) -> None:
        """Cancels a session's extra rows in the coming step."""
        if session_id in self.riding:
            self.stats.guesses -= num_tokens
            self.learn(session_id, ())

    def learn(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Records the target's likeliest token after each branch of the extra rows; (): the rows were not computed."""
        assert self.rider is not None
        rider = self.rider
        self.riding.discard(session_id)
        self.guarded(lambda: rider.learn(session_id, token_ids))

    # -- what may fail -------------------------------------------------------------------------------------------------

    def guarded(self, call: Callable[[], Result]) -> Result | None:
        """Calls the head; an error ends the session that it names, or switches the head off, and gives None."""
        done = call_for_each(lambda _: call(), list[HeadSession](), on_failure=self._on_failure)
        return done[0][1] if done else None

    def feed(self, fed: list[Fed]) -> set[str]:
        """Feeds the head; returns the sessions that it has taken."""
        done = call_for_each(self.head.feed, fed, on_failure=self._on_failure, alone=False) if fed else []
        taken = [item for items, _ in done for item in items]
        for item in taken:
            self.sessions[item.session_id].num_fed = item.position + len(item.token_ids)
        return {item.session_id for item in taken}

    def _give_up(self, error: Exception, _: Sequence[str]) -> None:
        if not isinstance(error, DrafterSessionError):
            self.switch_off(error)
            return
        log.warning("head %s has given up a session: %s", self.name, error, extra={"session_id": error.session_id})
        self.stats.sessions_failed += 1
        self.drop(error.session_id)

    def switch_off(self, error: Exception) -> None:
        """Switches the head off for good; its sessions go on without it."""
        if self.failure:
            return
        self.failure = f"{type(error).__name__}: {error}"
        log.error("head %s is switched off: %s", self.name, self.failure, exc_info=error)
        for session_id in list(self.sessions):
            self.drop(session_id)

    def check_integrity(self, known: Mapping[str, TargetSession]) -> None:
        """Asserts that the head follows sessions of ``known`` only, to the end of their context."""
        assert self.sessions.keys() <= known.keys()
        assert not self.riding, "extra rows are still waiting for their step"
        for session_id, followed in self.sessions.items():
            assert followed.session is known[session_id]
            followed.tree.check_integrity()
            behind = followed.session.num_tokens - followed.tree.context_len
            assert behind == 0 or (behind > 0 and not self.follows)
            assert not followed.tree.lost
            assert followed.num_fed <= followed.session.num_tokens
        if not self.failure:
            self.head.check_integrity()


def union(several: Iterable[Features | None]) -> Features | None:
    """The states that several heads read together; None: none."""
    wanted = [features for features in several if features is not None]
    if not wanted:
        return None
    boundaries = tuple(sorted({b for features in wanted for b in features.boundaries}))
    return Features(boundaries, any(features.every_position for features in wanted))
