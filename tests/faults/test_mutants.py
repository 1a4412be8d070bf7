"""Guards against faults, taken away one at a time: each has a mutant without it, which must be caught."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.faults.pump import FaultyPump
from tests.faults.runs import LOSSES, _at_outcome, _draft_refuses, one_fault, run
from tests.support.mutants import mutant

from paceline.core import native_tree
from paceline.core.tree import SpeculationTree
from paceline.draft.engine import DraftEngine
from paceline.messages import CloseSession, Commit, Nodes, OpenSession, Outcome
from paceline.router import session as session_module
from paceline.router.session import Actions, Session
from paceline.target.engine import TargetEngine
from paceline.types import Result


@mutant(Session, "on_target")
def _repeated_outcomes_count(on_target: Any, session: Session, event: Any, *rest: Any) -> Any:
    """The relay takes an outcome whose context has been passed."""
    late = isinstance(event, Outcome) and event.context_len < len(session.history)
    return on_target(session, replace(event, context_len=len(session.history)) if late else event, *rest)


@mutant(Session, "on_target")
def _gaps_are_closed(on_target: Any, session: Session, event: Any, *rest: Any) -> Any:
    """The relay takes an outcome although the one before is missing."""
    early = isinstance(event, Outcome) and event.context_len > len(session.history)
    return on_target(session, replace(event, context_len=len(session.history)) if early else event, *rest)


@mutant(Session, "on_target")
def _old_targets_are_heard(on_target: Any, session: Session, event: Any, *rest: Any) -> Any:
    """The relay does not look at the epoch of the target's events."""
    return on_target(session, replace(event, epoch=session.target_epoch), *rest)


@mutant(Session, "on_draft")
def _old_drafts_are_heard(on_draft: Any, session: Session, event: Any, *rest: Any) -> Actions:
    """The relay does not look at the epoch of nodes."""
    epoch, session._draft_epoch = session._draft_epoch, event.epoch
    try:
        return on_draft(session, event, *rest)
    finally:
        session._draft_epoch = epoch


def _lost_trees_stay_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay does not re-open the draft of a session that has lost nodes."""
    monkeypatch.setattr(Session, "on_tree_lost", lambda session, actions: None)


def _malformed_outcomes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay believes what no target can have meant."""
    monkeypatch.setattr(session_module, "is_malformed", lambda outcome: False)


@mutant(Session, "reopen_target")
def _history_is_what_was_digested(reopen_target: Any, session: Session) -> Actions:
    """A target is re-opened from the text instead of from the outcomes."""
    history = session.history
    session.history = [*session.prompt, *session.emitted]
    try:
        return reopen_target(session)
    finally:
        session.history = history


@mutant(Session, "reopen_target")
def _epochs_stand_still(reopen_target: Any, session: Session) -> Actions:
    """A target is re-opened under the epoch of the old one."""
    session._epoch -= 1
    return reopen_target(session)


@mutant(DraftEngine, "commit")
def _repeated_commits_count(commit: Any, engine: DraftEngine, session: Any, message: Commit) -> None:
    """The draft takes a commit whose context has been passed."""
    late = message.context_len < session.tree.context_len
    commit(engine, session, replace(message, context_len=session.tree.context_len) if late else message)


@mutant(DraftEngine, "commit")
def _commits_may_be_missing(commit: Any, engine: DraftEngine, session: Any, message: Commit) -> None:
    """The draft takes a commit although the one before is missing."""
    early = message.context_len > session.tree.context_len
    commit(engine, session, replace(message, context_len=session.tree.context_len) if early else message)


@mutant(DraftEngine, "receive")
def _drafts_ignore_epochs(receive: Any, engine: DraftEngine, messages: Sequence[Any]) -> None:
    """The draft takes commits and closes of any epoch."""
    for message in messages:
        session = engine.sessions.get(message.session_id)
        known = session is not None and not isinstance(message, OpenSession)
        receive(engine, [replace(message, epoch=session.epoch) if known else message])


@mutant(TargetEngine, "receive")
def _targets_ignore_the_epoch_of_nodes(receive: Any, engine: TargetEngine, messages: Sequence[Any]) -> None:
    """The target hangs up nodes of an old draft."""
    for message in messages:
        session = engine.sessions.get(message.session_id)
        known = session is not None and isinstance(message, Nodes)
        receive(engine, [replace(message, epoch=session.draft_epoch) if known else message])


def _any_node_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree hangs up nodes that no draft can have meant."""
    monkeypatch.setattr(native_tree, "native_module", lambda: None)
    monkeypatch.setattr(SpeculationTree, "is_valid", lambda *_: True)


def _drafts_are_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is refused is opened again, and again."""
    monkeypatch.setattr(session_module, "MAX_DRAFT_RETRIES", 10**6)


def _three(link: str, kind: str, prepare: Any = None) -> Callable[[dict[str, Result]], Any]:
    return lambda reference: one_fault(reference, link, kind, prepare, 3)


def _target_dies(reference: dict[str, Result]) -> None:
    for number in range(1, 12, 2):
        pump = run(reference, 7, {}, _at_outcome(number, lambda pump: pump.kill_target(keeps_talking=True)))
        assert pump.counts["stalls"] == pump.counts["targets_lost"] == 0


def _new_epochs(pump: FaultyPump) -> None:
    """The target dies now and then, so that most of what is replayed is of an old epoch."""
    pump.each_tick = lambda: pump.kill_target(keeps_talking=True) if pump.now in range(12, 100, 12) else None


def _old_closes(reference: dict[str, Result]) -> None:
    """After every death the close of the epoch before comes once more, when the next one is open."""

    def prepare(pump: FaultyPump) -> None:
        def each_tick() -> None:
            if pump.now in range(12, 100, 12):
                pump.kill_target()
            elif pump.now % 12 == 6:
                pump.to_draft.extend(CloseSession(n, s.draft_epoch - 1) for n, s in pump.sessions.items())

        pump.each_tick = each_tick

    for seed in range(3):
        pump = run(reference, seed, {}, prepare)
        assert pump.counts["stale_messages"] > 0
        for name in (*LOSSES, "stalls"):
            assert pump.counts[name] == 0, name


_LATE_FROM_DRAFT = _three("from_draft", "replay", _new_epochs)
_LATE_TO_TARGET = _three("to_target", "replay", _new_epochs)
MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[dict[str, Result]], Any]]] = [
    (_repeated_outcomes_count, _three("from_target", "duplicate")),
    (_gaps_are_closed, _three("from_target", "drop")),
    (_malformed_outcomes_count, _three("from_target", "corrupt")),
    (_old_targets_are_heard, _target_dies),
    (_epochs_stand_still, _target_dies),
    (_history_is_what_was_digested, _target_dies),
    (_old_drafts_are_heard, _LATE_FROM_DRAFT),
    (_lost_trees_stay_lost, _three("from_draft", "drop")),
    (_repeated_commits_count, _three("to_draft", "duplicate")),
    (_commits_may_be_missing, _three("to_draft", "drop")),
    (_drafts_ignore_epochs, _old_closes),
    (_targets_ignore_the_epoch_of_nodes, _LATE_TO_TARGET),
    (_any_node_is_valid, _three("from_draft", "corrupt")),
    (_drafts_are_tried_for_ever, _draft_refuses),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS, ids=lambda case: getattr(case, "__name__", ""))
def test_a_mutant_is_caught(monkeypatch, reference, mutant, check) -> None:
    """Without the guard the check fails."""
    mutant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 - an engine that breaks is as good as a wrong token
        check(reference)


@pytest.mark.parametrize("check", [_target_dies, _old_closes, _LATE_FROM_DRAFT, _LATE_TO_TARGET], ids=lambda check: "")
def test_the_checks_of_the_mutants_hold_without_them(reference: dict[str, Result], check: Any) -> None:
    """Those that are no test of their own (``test_links.py``, ``test_deaths.py``)."""
    check(reference)
