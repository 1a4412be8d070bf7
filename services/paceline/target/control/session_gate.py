"""Pauses drafting for sessions that lose by it, and tries it again later.

``load_trials.py`` judges all sessions of a load together. Here each session is judged alone, by an ``Experiment`` whose
observations are its rounds with a draft. The net gain of a round, in plain tokens, is

    net = accepted - lost,  lost = (waited_s + n row_s) / plain_s,

where plain_s = h + C(n) is the time of one plain token at the load of the round, and waited_s the time that the session
waited for its draft. row_s is the delay of the step by the session's draft tokens, (C(t + m) - C(t)) * its share of the
m, which each of the n sessions bears. ``judge`` pauses drafting for a session whose rounds show almost no draft
tokens (its draft sends none in time) or almost no gain.

A paused session is resumed

- by load: as soon as the load is certain to be a lower one, where an ideal draft has gain (``ideal_gain``) at the
  acceptance seen before;
- by time: when its pause has ended; one session at a time, as the budget of the trials allows. Such a trial verifies a
  few draft tokens whatever the allocation says, so that no wrong average stays indefinitely.

The pause doubles with each failure and halves with each success, so no session flaps.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from paceline.core.experiment import KEPT, LEAST, PATIENCE_S, SHORTEST_PAUSE_S, WINDOW, WORTH, Experiment
from paceline.core.statistics import RateSample
from paceline.messages import SpeculationWanted
from paceline.target.control.allocation import Allocation, load_class
from paceline.target.control.load_trials import LoadTrials
from paceline.target.session import Account, TargetSession

log = logging.getLogger(__name__)

_PEAK_S = SHORTEST_PAUSE_S / LEAST
"""Seconds over which the highest concurrency is that of the load."""


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


def judge(account: Account, drafting: Experiment, *, trial: bool = False) -> Judgement:
    """Judges a session by its rounds since the last judgement; pure.

    - PAYS if a round has gained more than a hundredth of a token; to end a trial well, four hundredths;
    - otherwise, where most rounds verified nothing: NOT_SENT if there were fewer tokens than half of the rounds; else
      they have no room, which is a matter of load: PAYS;
    - NO_GAIN otherwise.
    """
    rounds = drafting.sample.count
    won = drafting.verdict((WORTH if trial else KEPT) - 1.0 + account.lost / max(1, rounds))
    if won is None:
        return Judgement.OPEN
    if not won and 2 * account.scheduled < rounds:
        return Judgement.NOT_SENT if 2 * account.available < rounds else Judgement.PAYS
    return Judgement.PAYS if won else Judgement.NO_GAIN


@dataclass(slots=True)
class Pause:
    """A session whose drafting is paused."""

    session: TargetSession
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
    _ended: TargetSession | None = None
    """A session that ended during its trial; the next one on trial continues that."""
    _peak_since: float = 0.0
    _peak: int = 0
    _last_peak: int = 0
    trials: LoadTrials = field(init=False)

    def __post_init__(self) -> None:
        self.trials = LoadTrials(self.allocation)

    def begin(self, session: TargetSession, num_sessions: int) -> None:
        """Adds a new session, one of ``num_sessions``; it begins paused if drafting is off at this load.

        After the first pause every new session is sent an explicit state. Otherwise routers would assign it no draft
        beyond the number of sessions that the target last requested drafts for.
        """
        if session.k == 0:
            return
        if not self.trials.wanted(num_sessions):
            self.pause(session, Judgement.LOAD, num_sessions)
        elif self.num_pauses:
            self._tell(session, wanted=True)

    def trial_rows(self, session: TargetSession) -> int:
        """Draft tokens of a session on trial that are verified whatever the allocation says."""
        on_trial = session is self._trial and session.draft_heard and session.drafting.sample.count < LEAST
        return LEAST if on_trial else 0

    def reasons(self) -> Iterator[str]:
        """The reason of every paused session."""
        yield from [pause.judgement.value for pause in list(self.paused.values())]

    def forget(self, session: TargetSession) -> None:
        """Removes a session that has ended. An undecided trial is continued by another one."""
        self.paused.pop(session.session_id, None)
        if self._trial is session:
            self._trial, self._ended = None, session

    def observe(
        self, session: TargetSession, num_rows: int, num_trimmed: int, accepted: int, lost: float, *, heard: bool
    ) -> None:
        """Books a round of a session that has a draft and is not paused; ``lost``: in tokens, see the module's head;
        ``heard``: the draft had sent nodes."""
        account = session.account
        if not heard:
            account.unheard += 1
            if account.unheard < 2 * WINDOW:
                account.lost += lost
                return
        session.drafting.sample.add(accepted - lost, 1.0)
        account.scheduled += num_rows > 0
        account.available += num_rows + num_trimmed

    def review(self, session: TargetSession, num_sessions: int) -> None:
        """Judges a session after one of its rounds, and pauses it if drafting has no gain."""
        trial = session is self._trial
        account = session.account
        if num_sessions < account.num_sessions and load_class(num_sessions) < load_class(account.num_sessions):
            session.account = account = Account()  # the old one is of another load
            session.drafting.sample = RateSample()
        account.num_sessions = max(account.num_sessions, num_sessions)
        judgement = judge(account, session.drafting, trial=trial)
        if judgement is Judgement.OPEN:
            return
        session.on_trial = False
        if judgement is not Judgement.PAYS:
            self.pause(session, judgement, num_sessions)
            return
        if trial:
            self._trial = None
        session.account = Account()
        session.drafting.end(self.allocation.budget, won=True)

    def tick(self, now: float, num_running: int, sessions: Iterable[TargetSession]) -> None:
        """Pauses all sessions where drafting is off at this load, and resumes those whose time has come."""
        trial = self._trial
        if trial is not None and not trial.drafting.sample.count and now - trial.resumed_at > PATIENCE_S:
            self._trial = None  # no draft has come for it
        is_new = self._follow_peak(num_running, now)
        num_sessions = max(self._peak, self._last_peak)
        if not self.trials.wanted(num_sessions):
            for session in sessions:
                if session.k > 0 and not session.paused:
                    self.pause(session, Judgement.LOAD, num_sessions)
        elif self.paused and is_new:
            self._review_pauses(now, num_sessions)

    def _review_pauses(self, now: float, num_sessions: int) -> None:
        resumed, due, budget = [], [], self.allocation.budget
        for pause in self.paused.values():
            session = pause.session
            fewer = load_class(num_sessions) < load_class(pause.num_sessions)
            if pause.judgement is Judgement.LOAD or (
                fewer and self.allocation.gain(num_sessions, session.hits.rate(), session.k) >= WORTH
            ):
                resumed.append(session)
            elif session.drafting.left_s(budget) <= 0.0:
                due.append(session)
        for session in resumed:
            self.resume(session, now, forget=False)
        if due and self._trial is None:
            self._trial = max(due, key=lambda s: s.max_tokens - s.num_tokens)  # the longest to go
            self.resume(self._trial, now, forget=True)
            if self._ended is not None:
                self._trial.account, self._trial.drafting.sample = self._ended.account, self._ended.drafting.sample
                self._ended = None

    def _follow_peak(self, num_sessions: int, now: float) -> bool:
        """Follows the highest concurrency of the last quarter to half of a second; True once in a quarter.

        Where one session follows another there are fewer between the two, which is no reason to resume others.
        """
        is_new = now - self._peak_since > _PEAK_S
        if is_new:
            self._peak_since, self._last_peak, self._peak = now, self._peak, 0
        self._peak = max(self._peak, num_sessions)
        return is_new

    def pause(self, session: TargetSession, judgement: Judgement, num_sessions: int) -> None:
        """Stops drafting for a session, for longer after every failure."""
        if judgement is not Judgement.LOAD:
            self._fail(session, num_sessions)
        if session is self._trial:
            self._trial = None
        session.pause_drafting()
        log.debug(
            "drafting is %s at concurrency %d",
            judgement.value,
            num_sessions,
            extra={"session_id": session.session_id},
        )
        self.paused[session.session_id] = Pause(session, judgement, num_sessions)
        self.num_pauses += 1
        self._tell(session, wanted=False)

    def _fail(self, session: TargetSession, num_sessions: int) -> None:
        """Ends the experiment of a session. What a trial has lost is booked."""
        drafting, loss = session.drafting, 0.0
        if session is self._trial:
            loss = (session.account.lost - drafting.sample.amount) / max(1, num_sessions)
        drafting.end(self.allocation.budget, won=False, loss_s=loss * self.allocation.plain_s(num_sessions))

    def resume(self, session: TargetSession, now: float, *, forget: bool) -> None:
        """Asks for a draft again; ``forget``: without the record of earlier ones."""
        del self.paused[session.session_id]
        session.resume_drafting(now, forget=forget)
        self.num_resumptions += 1
        self._tell(session, wanted=True)

    def _tell(self, session: TargetSession, *, wanted: bool) -> None:
        most = self.trials.most_sessions()
        self.messages.append(SpeculationWanted(session.session_id, session.epoch, wanted, most))
