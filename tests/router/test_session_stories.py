"""The session relay against simulated engines: delays, failures, duplicates and stale epochs in any order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.sessions import PROMPT, make, outcome
from tests.support.rings import nightly

from paceline.messages import (
    CloseSession,
    DraftState,
    Nodes,
    OpenSession,
    SessionFailed,
    SpeculationWanted,
    TreeLost,
)
from paceline.router.session import Actions
from paceline.types import FinishReason


class Peers:
    """What both engines must believe if they take every message in order, and the assertions that they believe it."""

    def __init__(self, session):
        self.session = session
        self.target = self.draft = None  # context of each, None: not open
        self.target_epoch = self.draft_epoch = -1
        self.expects = None  # the draft's epoch as the target knows it; None: none
        self.tokens = []
        self.results = 0

    def take(self, actions):
        for message in actions.to_target:
            if isinstance(message, OpenSession):
                assert message.epoch > self.target_epoch
                self.target, self.target_epoch = list(message.token_ids), message.epoch
                self.expects = message.epoch
            elif isinstance(message, CloseSession):
                assert (message.epoch, self.target is not None) == (self.target_epoch, True)
                self.target = None
            elif isinstance(message, DraftState):
                assert message.epoch == self.target_epoch
                assert not message.available or message.context_len == len(self.target)
                self.expects = message.draft_epoch if message.available else None
        for message in actions.to_draft:
            if isinstance(message, OpenSession):
                assert message.epoch > self.draft_epoch
                self.draft, self.draft_epoch = list(message.token_ids), message.epoch
            else:
                assert (message.epoch, self.draft is not None) == (self.draft_epoch, True)
                if isinstance(message, CloseSession):
                    self.draft = None
                else:
                    assert message.context_len == len(self.draft)
                    self.draft += message.token_ids
        for chunk in actions.chunks:
            self.tokens += chunk.token_ids
        self.results += actions.result is not None

    def check(self):
        session = self.session
        if session.draft_available:
            assert self.draft == self.target
            assert self.expects == self.draft_epoch == session.draft_epoch
        else:
            assert self.draft is None
            assert self.target is None or self.expects is None
        if self.target is None:
            assert not session.draft_available
        assert self.results == session.finished
        if session.finished:
            assert self.target is None


STORY = tuple(range(65, 85))
HAPPENINGS = (
    "outcome", "finish", "old outcome", "nodes", "old nodes", "tree lost", "wanted", "unwanted",
    "draft fails", "draft down", "draft up", "leave draft", "reopen", "digest", "cancel",
)  # fmt: skip


def happen(session, peers, what):
    """One event, from engines that are right, or late by one epoch."""
    at = len(session.history) - len(PROMPT)
    old_target, old_draft = peers.target_epoch - 1, peers.draft_epoch - 1
    if what in ("outcome", "finish") and peers.target is not None:
        tokens = STORY[at : at + 2]
        event = outcome(session, tokens, 1, FinishReason.LENGTH if what == "finish" else None)
        peers.target += tokens
        if what == "finish":
            peers.target = None
        peers.take(session.on_target(event))
    elif what == "old outcome":
        peers.take(session.on_target(outcome(session, (1, 2), 1, FinishReason.STOP, epoch=old_target)))
        peers.take(session.on_target(outcome(session, (1, 2), 1, FinishReason.STOP, at=1)))
    elif what == "nodes" and peers.draft is not None:
        nodes = Nodes("s", peers.draft_epoch, len(peers.draft), ())
        assert session.on_draft(nodes) == Actions(to_target=[nodes])
    elif what == "old nodes":
        assert session.on_draft(Nodes("s", old_draft, 3, ())) == Actions()
        assert session.on_draft(SessionFailed("s", old_draft, "late")) == Actions()
    elif what == "tree lost" and peers.target is not None:
        peers.take(session.on_target(TreeLost("s", peers.target_epoch)))
    elif what in ("wanted", "unwanted") and peers.target is not None:
        peers.take(session.on_target(SpeculationWanted("s", peers.target_epoch, what == "wanted")))
    elif what == "draft fails" and peers.draft is not None:
        peers.draft = None
        peers.take(session.on_draft(SessionFailed("s", peers.draft_epoch, "no room")))
    elif what == "draft down":
        peers.draft = None
        peers.take(session.on_draft_down())
    elif what == "draft up":
        peers.take(session.on_draft_up())
    elif what == "leave draft":
        peers.take(session.leave_draft())
    elif what == "reopen":
        if peers.target is not None:
            assert peers.target == session.history
        peers.take(session.reopen_target())
    elif what in ("digest", "cancel"):
        peers.take(getattr(session, what)())
    peers.check()


def play(happenings, draft_available=True):
    """Runs a story to its end, and checks that every token of it was emitted once."""
    session = make()
    peers = Peers(session)
    peers.take(session.open(draft_available))
    peers.check()
    for what in happenings:
        happen(session, peers, what)
    cancelled = session.finished and session.result.finish_reason is FinishReason.ABORT
    if not cancelled:
        happen(session, peers, "finish")
        happen(session, peers, "digest")
        assert session.finished
        assert session.result.finish_reason is FinishReason.LENGTH
    assert tuple(peers.tokens) == session.result.token_ids == STORY[: len(peers.tokens)]
    assert peers.draft is peers.target is None
    return session


@pytest.mark.parametrize(("draft_available", "more"), [(True, 3), (False, 2), *nightly([(False, 3)])])
@pytest.mark.parametrize("first", HAPPENINGS)
def test_whatever_happens_both_engines_know_what_the_session_knows(first, draft_available, more):
    """All stories of one event and ``more``: after each event, either engine is closed or has the whole history in the
    newest epoch, and the target knows whether, and under which epoch, a draft serves the session. Tokens are emitted
    once."""
    for rest in itertools.product(HAPPENINGS, repeat=more):
        play((first, *rest), draft_available)


@given(st.lists(st.sampled_from([h for h in HAPPENINGS if h not in ("cancel", "finish")]), min_size=5, max_size=8))
def test_longer_stories(happenings):
    play(happenings)
