"""Pauses drafting for sessions that lose by it, and tries it again later.

``load_trials.py`` judges all sessions of a load together. Here each session is judged alone: every round with a draft
is booked in its ``Account``. The net gain of its rounds, in plain tokens, is

    net = accepted - lost,  lost = sum over its rounds of (waited_s + n row_s) / plain_s,

where plain_s = h + C(n) is the time of one plain token at the load of the round, and waited_s the time that the session
waited for its draft. row_s is the delay of the step by the session's draft tokens, (C(t + m) - C(t)) * its share of the
m, which each of the n sessions bears. ``judge`` pauses drafting for a session whose account shows almost no draft
tokens (its draft sends none in time) or almost no gain.

A paused session is resumed

- by load: within half a second after enough sessions left that an ideal draft has gain (``ideal_gain``) at the
  acceptance seen before;
- by time: after 2, 4, 8, .. seconds; one session at a time, for at most a hundredth of the time. Such a trial
  verifies a few draft tokens whatever the allocation says, so that no wrong average stays indefinitely.

Both back off each time that drafting fails again soon, so no session flaps.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from paceline.messages import SpeculationWanted
from paceline.target.control.allocation import Allocation
from paceline.target.control.load_trials import LoadTrials
from paceline.target.control.trial import TRIAL_LIMIT_S, WORTH, is_due, pause_s
from paceline.target.session import Account, TargetSession

log = logging.getLogger(__name__)

_FEW_ROWS = 0.1
_LEAST_NET = 0.03
_TRIAL_NET = 0.06
_NODES_LIMIT_ROUNDS = 64
_FEWER_SESSIONS = 0.75
_SHORT_SPELL_S = 10.0
_TRIAL_ROWS = 3
_TRIAL_ROW_ROUNDS = 4
_PEAK_S = 0.25
_REVIEW_S = 0.1


class Judgement(enum.Enum):
    """Verdict on drafting for one session; the values are the reasons given in a status."""

    OPEN = "not judged"
    """There were too few rounds so far."""
    PAYS = "worth it"
    NOT_SENT = "not sent in time"
    """Next to no draft tokens arrive in time."""
    NO_GAIN = "not worth it"
    """The accepted tokens do not cover the cost of drafting."""
    LOAD = "not worth it at this load"
    """Drafting is paused for all sessions."""


def judge(account: Account, *, trial: bool = False) -> Judgement:
    """Judges a session by its account since the last judgement; pure. With r = rounds in the account:

    - r < 32 (in a trial 16): OPEN, unless r >= 8 and net < -4;
    - draft tokens verified per round < 0.1: NOT_SENT if fewer than 0.5 per round were available; else they have no
      room, which is a matter of load: PAYS;
    - net / r < 0.03 (to end a trial well: 0.06): NO_GAIN;
    - PAYS otherwise.
    """
    rounds, net = account.rounds, account.accepted - account.lost
    if not is_due(rounds, net, on_trial=trial):
        return Judgement.OPEN
    if account.rows < _FEW_ROWS * rounds:
        return Judgement.NOT_SENT if account.trimmed < 0.5 * rounds else Judgement.PAYS
    if net < (_TRIAL_NET if trial else _LEAST_NET) * rounds:
        return Judgement.NO_GAIN
    return Judgement.PAYS


@dataclass(slots=True)
class Pause:
    """A session whose drafting is paused."""

    session: TargetSession
    until: float
    judgement: Judgement
    num_sessions: int
    """Concurrency when it was paused."""


@dataclass(slots=True)
class SessionGate:
    """Pauses and resumes drafting for the sessions of one engine. ``messages`` are to be sent."""

    allocation: Allocation
    messages: list[SpeculationWanted] = field(default_factory=list)
    num_pauses: int = 0
    num_resumptions: int = 0
    paused: dict[str, Pause] = field(default_factory=dict)
    """Paused sessions by id."""
    _trial: TargetSession | None = None
    _trial_account: Account | None = None
    """Account of a session that ended during its trial; the next one on trial continues it."""
    _next_trial_at: float = 0.0
    _next_review_at: float = 0.0
    _peak_since: float = 0.0
    _peak: int = 0
    _last_peak: int = 0
    trials: LoadTrials = field(init=False)

    def __post_init__(self) -> None:
        self.trials = LoadTrials(self.allocation)

    def begin(self, session: TargetSession, now: float, num_sessions: int) -> None:
        """Adds a new session, one of ``num_sessions``; it begins paused if drafting is off at this load.

        After the first pause every new session is sent an explicit state, because routers assign no drafts to sessions
        beyond the number that the target last requested drafts for.
        """
        if session.k == 0:
            return
        if not self.trials.wanted(num_sessions):
            self.pause(session, Judgement.LOAD, now, num_sessions)
        elif self.num_pauses:
            self._tell(session, wanted=True)

    def trial_rows(self, session: TargetSession) -> int:
        """Draft tokens of a session on trial that are verified whatever the allocation says."""
        on_trial = session is self._trial and session.account.scheduled < _TRIAL_ROW_ROUNDS
        return _TRIAL_ROWS if on_trial else 0

    def reasons(self) -> Iterator[str]:
        """The reason of every paused session."""
        yield from [pause.judgement.value for pause in list(self.paused.values())]

    def forget(self, session: TargetSession, now: float, num_sessions: int) -> None:
        """Removes a session that has ended. An undecided trial is continued by another one."""
        self.paused.pop(session.session_id, None)
        if self._trial is session:
            self._end_trial(session, now, num_sessions)
            self._trial_account = session.account

    def observe(self, session: TargetSession, num_rows: int, num_trimmed: int, accepted: int, lost: float) -> None:
        """Books a round of a session that has a draft and is not paused; ``lost``: in tokens, see the module's head."""
        account = session.account
        if not session.draft_heard:
            session.unheard_rounds += 1
            if session.unheard_rounds < _NODES_LIMIT_ROUNDS:
                account.lost += lost
                return
        account.rounds += 1
        account.rows += num_rows
        account.scheduled += num_rows > 0
        account.trimmed += num_trimmed
        account.accepted += accepted
        account.lost += lost

    def review(self, session: TargetSession, now: float, num_sessions: int) -> None:
        """Judges a session after one of its rounds, and pauses it if drafting has no gain."""
        trial = session is self._trial
        account = session.account
        if num_sessions <= _FEWER_SESSIONS * account.num_sessions:
            session.account = account = Account()  # the old one is of another load
        account.num_sessions = max(account.num_sessions, num_sessions)
        judgement = judge(account, trial=trial)
        if judgement is Judgement.OPEN:
            return
        if trial:
            self._end_trial(session, now, num_sessions)
        session.account = Account()
        session.unheard_rounds = 0
        session.on_trial = False
        if judgement is not Judgement.PAYS:
            self.pause(session, judgement, now, num_sessions)
            return
        if now - session.resumed_at > _SHORT_SPELL_S:
            session.num_failures = session.num_load_failures = 0

    def _end_trial(self, session: TargetSession, now: float, num_sessions: int) -> None:
        """Ends the trial; the next one waits until this one's cost is a small share of the time."""
        self._trial, self._trial_account = None, None
        net_loss = max(0.0, session.account.lost - session.account.accepted)
        cost_s = net_loss * self.allocation.plain_s(num_sessions) / max(1, num_sessions)
        self._next_trial_at = now + pause_s(0, cost_s)

    def tick(self, now: float, num_running: int, sessions: Iterable[TargetSession]) -> None:
        """Pauses all sessions where drafting is off at this load, and resumes those whose time has come."""
        trial = self._trial
        if trial is not None and trial.account.rounds == 0 and now - trial.resumed_at > TRIAL_LIMIT_S:
            self._trial = None  # no draft has come for it
        num_sessions = self._lasting(num_running, now)
        if not self.trials.wanted(num_sessions):
            for session in sessions:
                if session.k > 0 and not session.paused:
                    self.pause(session, Judgement.LOAD, now, num_sessions)
        elif self.paused and now >= self._next_review_at:
            self._next_review_at = now + _REVIEW_S
            self._review_pauses(now, num_sessions)

    def _review_pauses(self, now: float, num_sessions: int) -> None:
        resumed, due = [], []
        for pause in self.paused.values():
            session = pause.session
            if pause.judgement is Judgement.LOAD:
                resumed.append(session)
            elif num_sessions <= _FEWER_SESSIONS * pause.num_sessions and self._gain(session, num_sessions) >= WORTH:
                if session.num_load_failures == 0 or now >= pause.until:
                    resumed.append(session)
            elif now >= pause.until:
                due.append(session)
        for session in resumed:
            self.resume(session, now, forget=False)
        if due and self._trial is None and now >= self._next_trial_at:
            self._trial = max(due, key=lambda s: s.max_tokens - s.num_tokens)  # the longest to go
            self.resume(self._trial, now, forget=True)
            if self._trial_account is not None:
                self._trial.account = self._trial_account

    def _lasting(self, num_sessions: int, now: float) -> int:
        """The highest concurrency of the last quarter to half of a second.

        Where one session follows another there are fewer between the two, which is no reason to resume others.
        """
        if now - self._peak_since > _PEAK_S:
            self._peak_since, self._last_peak, self._peak = now, self._peak, 0
        self._peak = max(self._peak, num_sessions)
        return max(self._peak, self._last_peak)

    def _gain(self, session: TargetSession, num_sessions: int) -> float:
        return self.allocation.gain(num_sessions, session.hits.rate(), session.k)

    def pause(self, session: TargetSession, judgement: Judgement, now: float, num_sessions: int) -> None:
        """Stops drafting for a session, for longer after every failure in a row."""
        if judgement is not Judgement.LOAD:
            if now - session.resumed_at > _SHORT_SPELL_S:
                session.num_failures = session.num_load_failures = 0
            session.num_failures += 1
            session.num_load_failures += session.resumed_by_load
        if session is self._trial:
            self._trial = None
        session.pause_drafting()
        until = now + pause_s(session.num_failures)
        log.debug(
            "drafting is %s at concurrency %d",
            judgement.value,
            num_sessions,
            extra={"session_id": session.session_id},
        )
        self.paused[session.session_id] = Pause(session, until, judgement, num_sessions)
        self.num_pauses += 1
        self._tell(session, wanted=False)

    def resume(self, session: TargetSession, now: float, *, forget: bool) -> None:
        """Asks for a draft again; ``forget``: without the record of earlier ones."""
        del self.paused[session.session_id]
        session.resume_drafting(now, forget=forget)
        session.resumed_by_load = not forget
        self.num_resumptions += 1
        self._tell(session, wanted=True)

    def _tell(self, session: TargetSession, *, wanted: bool) -> None:
        most = self.trials.most_sessions()
        self.messages.append(SpeculationWanted(session.session_id, session.epoch, wanted, most))
