"""What a session does about messages that come twice, late, malformed or never, and about drafts that fail it."""

from dataclasses import replace

import pytest
from tests.router.sessions import PROMPT, decode, make, outcome

from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    InFlight,
    Nodes,
    OpenSession,
    SessionFailed,
    SpeculationWanted,
    TreeLost,
)
from paceline.router.session import MAX_DRAFT_RETRIES, Actions, RelayStats, Session
from paceline.types import Cause, FinishReason, Mode, Round, SamplingParams, SpeculationParams


def test_an_outcome_that_comes_twice_counts_once():
    session = make()
    session.open()
    first, second = outcome(session, [65, 66], 1), outcome(session, [67], at=5)
    session.on_target(first)
    assert session.on_target(first) == Actions()
    session.on_target(second)
    assert session.on_target(first) == session.on_target(second) == Actions()
    assert session.on_target(InFlight("s", 0, 5, (1,))) == Actions()
    session.on_target(outcome(session, [68], finish=FinishReason.LENGTH))
    assert session.digest().result.text == "ABCD"
    assert session.relay_stats == RelayStats(repeated=4)


def test_an_outcome_that_is_missing_costs_the_target_and_no_token():
    session = make()
    session.open()
    session.on_target(outcome(session, [65]))
    assert session.on_target(InFlight("s", 0, 6, (1,))) == Actions()  # of the next context: its outcome is on its way
    lost = session.on_target(outcome(session, [67], at=6))
    assert lost.target_failed is not None
    assert "at 4 is missing before the one at 6" in lost.target_failed
    (opened,) = session.reopen_target().to_target
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == (*PROMPT, 65)
    assert session.on_target(outcome(session, [66, 67], at=4, epoch=0)) == Actions()  # it was only late
    session.on_target(outcome(session, [66, 67], finish=FinishReason.LENGTH))
    assert session.digest().result.text == "ABC"
    assert session.relay_stats == RelayStats(stale=1, early=2, targets_lost=1, target_reopens=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": ()},
        {"token_ids": (65, -1)},
        {"logprobs": (-0.5,)},
        {"top_logprobs": (((65, -0.5),),)},
        {"round": Round(3, 3, Cause.HIT)},
        {"round": Round(0, 1, Cause.HIT)},
        {"round": Round(1, -1, Cause.HIT)},
    ],
)
def test_a_malformed_outcome_costs_the_target_and_no_token(changes):
    session = make()
    session.open()
    actions = session.on_target(replace(outcome(session, [65, 66], 1), **changes))
    assert actions.target_failed == "a malformed outcome at 3"
    assert actions.to_draft == []
    assert session.relay_stats == RelayStats(malformed=1, targets_lost=1)
    session.reopen_target()
    session.on_target(outcome(session, [65, 66], 1, FinishReason.LENGTH))
    assert session.digest().result.text == "AB"


@pytest.mark.parametrize("context_len", [-1, 0, 4, 2**40])
def test_nodes_for_a_context_that_nobody_has_are_dropped(context_len):
    session = make()
    session.open()
    assert session.on_draft(Nodes("s", 0, context_len, ())) == Actions()
    assert session.relay_stats == RelayStats(malformed=1)


def test_a_lost_tree_is_opened_again_under_a_new_epoch():
    session = make()
    session.open()
    session.on_target(outcome(session, [65]))
    session.on_draft(Nodes("s", 0, 4, ()))
    actions = session.on_target(TreeLost("s", 0))
    (opened,) = actions.to_draft
    assert isinstance(opened, OpenSession)
    assert (opened.epoch, opened.token_ids) == (1, (*PROMPT, 65))
    assert actions.to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=4)]
    assert session.on_draft(Nodes("s", 0, 4, ())) == Actions()
    assert session.on_target(TreeLost("s", 0)) == Actions()  # it cannot speak of the new one: no node has gone there
    assert session.on_target(outcome(session, [66])).to_draft == [Commit("s", 1, 4, (66,))]
    assert session.relay_stats == RelayStats(stale=2, trees_lost=1, draft_reopens=1)


def test_a_tree_that_is_lost_when_its_draft_is_gone_is_no_news():
    session = make()
    session.open()
    session.on_draft(Nodes("s", 0, 3, ()))
    session.on_draft_down()
    assert session.on_target(TreeLost("s", 0)) == Actions()
    assert not session.draft_available
    assert session.relay_stats == RelayStats(stale=1, drafts_lost=1)


def test_a_draft_that_fails_the_session_is_tried_again_twice_in_a_row():
    session = make()
    session.open()
    for retry in range(MAX_DRAFT_RETRIES):
        actions = session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
        assert actions.to_target == [DraftState("s", 0, False)]
        assert session.wants_draft
        assert [m.epoch for m in session.on_draft_up().to_draft] == [retry + 1]
    session.on_target(outcome(session, [65, 66], 1))  # this one was worth it: the count starts again
    for _ in range(MAX_DRAFT_RETRIES):
        session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
        session.on_draft_up()
    last = session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
    assert last.to_target == [DraftState("s", 0, False)]
    assert not session.wants_draft
    assert session.on_draft_up() == Actions()
    assert session.relay_stats == RelayStats(drafts_lost=2 * MAX_DRAFT_RETRIES + 1, draft_reopens=2 * MAX_DRAFT_RETRIES)


def test_trees_that_are_lost_time_and_again_are_given_up():
    session = make()
    session.open()
    for _ in range(MAX_DRAFT_RETRIES):
        session.on_draft(Nodes("s", session.draft_epoch, 3, ()))
        session.on_target(TreeLost("s", 0))
        assert session.draft_available
    session.on_draft(Nodes("s", session.draft_epoch, 3, ()))
    actions = session.on_target(TreeLost("s", 0))
    assert not session.draft_available
    assert actions.to_draft == [CloseSession("s", MAX_DRAFT_RETRIES)]
    assert actions.to_target == [DraftState("s", 0, False)]
    assert not session.wants_draft


def test_a_session_that_begins_without_a_draft_takes_one_later():
    session = make()
    opened = session.open(draft_available=False)
    assert opened.to_draft == []
    assert opened.to_target[1:] == [DraftState("s", 0, False)]
    assert session.wants_draft
    assert session.on_draft_up().to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=3)]


def test_a_target_that_wants_no_drafts_is_left_alone_until_it_does():
    session = make()
    session.open()
    away = session.on_target(SpeculationWanted("s", 0, False))
    assert away.to_draft == [CloseSession("s", 0)]
    assert away.to_target == [DraftState("s", 0, False)]
    assert not session.wants_draft
    assert session.on_draft_up() == session.on_target(SpeculationWanted("s", 0, False)) == Actions()
    assert session.on_target(outcome(session, [65])) == Actions()
    assert session.on_draft(Nodes("s", 0, 3, ())) == Actions()
    back = session.on_target(SpeculationWanted("s", 0, True))
    assert back == Actions()
    assert session.wants_draft
    assert session.on_draft_up().to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=4)]
    assert session.on_target(SpeculationWanted("s", 0, True)) == Actions()
    # What the old target wanted says nothing about the next one.
    session.on_target(SpeculationWanted("s", 0, False))
    again = session.reopen_target()
    assert session.wants_draft
    assert [type(m) for m in again.to_target] == [OpenSession, DraftState]
    assert session.relay_stats == RelayStats(stale=1, draft_reopens=1, target_reopens=1)


def test_a_draft_that_works_can_be_left_for_another():
    session = make()
    session.open()
    actions = session.leave_draft()
    assert actions == Actions([DraftState("s", 0, False)], [CloseSession("s", 0)])
    assert session.leave_draft() == Actions()
    assert session.wants_draft
    assert [type(m) for m in session.on_draft_up().to_draft] == [OpenSession]
    assert session.relay_stats == RelayStats(draft_reopens=1)


@pytest.mark.parametrize("speculation", [{"mode": Mode.PLAIN}, {"max_draft_tokens": 0}])
def test_a_session_that_does_not_speculate_never_has_a_draft(speculation):
    session = Session("s", PROMPT, SamplingParams(), SpeculationParams(**speculation), decode=decode)
    assert [type(m) for m in session.open().to_target] == [OpenSession]
    assert not session.wants_draft
    assert session.on_draft_up() == session.on_draft_down() == session.on_target(TreeLost("s", 0)) == Actions()
    actions = session.reopen_target()
    assert [type(m) for m in actions.to_target] == [OpenSession]
    assert actions.to_draft == []
    assert session.on_target(outcome(session, [65])) == Actions()
