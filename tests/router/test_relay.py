"""A relay's batches: what goes to which engine, in which order, and what is left to the owner."""

import pytest
from tests.router.sessions import PROMPT, decode, outcome

from paceline.messages import (
    CloseSession,
    Commit,
    InFlight,
    Nodes,
    OpenSession,
    Outcome,
    SessionFailed,
    SpeculationWanted,
    TreeLost,
)
from paceline.router.relay import Relay
from paceline.router.session import Session
from paceline.types import SamplingParams, SpeculationParams


@pytest.fixture
def relay() -> Relay:
    """Two sessions, open on a target and a draft."""
    relay = Relay()
    for name in ("a", "b"):
        session = Session(name, PROMPT, SamplingParams(), SpeculationParams(), decode=decode)
        session.open()
        relay.sessions[name] = session
    return relay


def token(relay: Relay, name: str, at: int = len(PROMPT)) -> Outcome:
    return outcome(relay.sessions[name], [65], at=at)


def test_what_is_in_flight_joins_the_commit_of_its_session(relay: Relay) -> None:
    """Outcomes of a step come before what the next one verifies: one commit for each session, not two."""
    messages = [token(relay, "a"), token(relay, "b"), InFlight("a", 0, 4, (1, 2)), InFlight("b", 0, 4, ())]
    outbox = relay.on_target(messages)
    assert outbox.to_draft == [Commit("a", 0, 3, (65,), (1, 2)), Commit("b", 0, 3, (65,), ())]
    assert outbox.to_target == []
    assert list(outbox.touched) == ["a", "b"]
    assert relay.on_target([InFlight("a", 0, 4, (7,))]).to_draft == [Commit("a", 0, 4, (), (7,))]


def test_tokens_are_never_merged(relay: Relay) -> None:
    outbox = relay.on_target([token(relay, "a"), InFlight("a", 0, 4, (1,)), token(relay, "a", 4)])
    assert outbox.to_draft == [Commit("a", 0, 3, (65,), (1,)), Commit("a", 0, 4, (65,))]


def test_nothing_is_merged_across_another_message_of_the_session(relay: Relay) -> None:
    relay.on_draft([Nodes("a", 0, 3, ())])
    messages = [token(relay, "a"), SpeculationWanted("a", 0, False), InFlight("a", 0, 4, (1,))]
    assert relay.on_target(messages).to_draft == [Commit("a", 0, 3, (65,)), CloseSession("a", 0)]


def test_nothing_is_merged_into_a_commit_of_an_earlier_epoch(relay: Relay) -> None:
    relay.on_draft([Nodes("a", 0, 3, ())])
    first, opened, second = relay.on_target([token(relay, "a"), TreeLost("a", 0), InFlight("a", 0, 4, (1,))]).to_draft
    assert (first, second) == (Commit("a", 0, 3, (65,)), Commit("a", 1, 4, (), (1,)))
    assert isinstance(opened, OpenSession)


def test_after_its_target_has_failed_a_session_takes_nothing_more_of_the_batch(relay: Relay) -> None:
    outbox = relay.on_target([token(relay, "a", 4), token(relay, "a"), token(relay, "b")])
    assert list(outbox.target_failed) == ["a"]
    assert outbox.num_dropped == 1
    assert outbox.to_draft == [Commit("b", 0, 3, (65,))]
    (opened,) = relay.sessions["a"].reopen_target().to_target
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == PROMPT


def test_a_session_whose_target_has_failed_is_offered_no_draft(relay: Relay) -> None:
    relay.sessions["a"].on_draft_down()
    outbox = relay.on_target([token(relay, "a"), SessionFailed("a", 0, "no room")])
    assert outbox.target_failed == {"a": "no room"}
    assert outbox.draft_wanted == []


def test_the_latest_wish_of_the_target_is_told_and_drafts_are_wanted_by_it(relay: Relay) -> None:
    a = relay.sessions["a"]
    assert relay.on_target([token(relay, "a")]).wish is None
    wishes = [SpeculationWanted("a", 0, True), SpeculationWanted("a", 0, False, 8)]
    off = relay.on_target(wishes)
    assert (off.wish, off.draft_wanted) == (wishes[1], [])
    assert off.to_draft == [CloseSession("a", 0)]
    wish = SpeculationWanted("a", 0, True)
    on = relay.on_target([wish])
    assert (on.wish, on.draft_wanted) == (wish, [a])


def test_nodes_pass_and_a_draft_that_fails_leaves_its_session_wanting_another(relay: Relay) -> None:
    nodes = Nodes("a", 0, 3, ())
    outbox = relay.on_draft([nodes, SessionFailed("b", 0, "no room")])
    assert outbox.to_target[0] is nodes
    assert outbox.draft_wanted == [relay.sessions["b"]]


def test_messages_for_sessions_that_are_gone_are_counted(relay: Relay) -> None:
    messages = [token(relay, "a"), token(relay, "b")]
    del relay.sessions["a"]
    outbox = relay.on_target(messages)
    assert outbox.num_dropped == 1
    assert list(outbox.touched) == ["b"]
    assert relay.on_draft([Nodes("a", 0, 3, ())]).num_dropped == 1
