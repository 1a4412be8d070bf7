"""The session relay against simulated engines: delays, failures, duplicates and stale epochs in any order."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequestError
from paceline.router.session import MAX_DRAFT_RETRIES, Actions, Chunk, RelayStats, Session
from paceline.types import (
    Cause,
    CloseSession,
    Commit,
    DraftState,
    FinishReason,
    InFlight,
    Mode,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    Round,
    SamplingParams,
    SessionFailed,
    SpeculationParams,
    SpeculationWanted,
    TreeLost,
)

PROMPT = (1, 2, 3)


def decode(token_ids):
    """Tokens are bytes."""
    return bytes(token_ids).decode("utf-8", "replace")


def outcome(session, tokens, accepted=0, finish=None, epoch=None, cause=Cause.HIT, at=None):
    """At the end of the session's history unless ``at`` says otherwise."""
    return Outcome(
        session.session_id,
        session.target_epoch if epoch is None else epoch,
        len(session._history) if at is None else at,
        tuple(tokens),
        tuple(-0.5 for _ in tokens),
        Round(accepted, accepted, cause),
        finish,
    )


def make(mode=Mode.OVERLAPPED, stop=(), clock=lambda: 0.0, **sampling):
    return Session(
        "s",
        PROMPT,
        SamplingParams(**sampling),
        SpeculationParams(mode=mode),
        decode=decode,
        stop=stop,
        eos_token_ids=(0,),
        clock=clock,
    )


def feed(session, text, sizes=None, finish=FinishReason.LENGTH):
    """Delivers ``text`` as outcomes of the given sizes; the last one finishes. Returns the chunks."""
    data = deque(text.encode())
    chunks = []
    sizes = deque(sizes or [1] * len(data))
    while data and not session.finished:
        size = max(1, sizes.popleft()) if sizes else 1
        tokens = [data.popleft() for _ in range(min(size, len(data)))]
        session.on_target(outcome(session, tokens, len(tokens) - 1, None if data else finish))
        chunks += session.digest().chunks
    return chunks


def test_open_in_plain_mode_leaves_the_draft_alone():
    actions = make(Mode.PLAIN).open()
    assert [type(m) for m in actions.to_target] == [OpenSession]
    assert actions.to_draft == []


def test_open_on_both_with_one_seed():
    session = make()
    actions = session.open()
    assert actions.to_target == actions.to_draft
    message = actions.to_target[0]
    assert isinstance(message, OpenSession)
    assert message.seed == session.seed == message.sampling.seed
    assert message.token_ids == PROMPT
    assert message.num_prompt_tokens == len(PROMPT)


def test_given_seed_is_kept_and_missing_seed_is_drawn():
    assert make(seed=7).seed == 7
    assert make().seed != make().seed  # two equal 64-bit draws: probability 5e-20


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused_whatever_made_the_parameters(seed):
    sampling = SamplingParams().model_copy(update={"seed": seed})
    with pytest.raises(InvalidRequestError, match=f"^seed is {seed}: at least 0 and at most {2**64 - 1} is allowed$"):
        Session("s", PROMPT, sampling, SpeculationParams(), decode=decode)


def test_outcome_is_committed_at_once_and_in_flight_follows():
    session = make()
    session.open()
    assert session.on_target(outcome(session, [65, 66], 1)).to_draft == [Commit("s", 0, 3, (65, 66))]
    assert session.on_target(InFlight("s", 0, 5, (4, 5))).to_draft == [Commit("s", 0, 5, (), (4, 5))]


def test_nodes_are_relayed_as_they_are():
    session = make()
    session.open()
    nodes = Nodes("s", 0, 3, (Node(1, 0, 65, 0.5),))
    assert session.on_draft(nodes).to_target == [nodes]
    assert session.on_draft(Nodes("s", 9, 3, ())).to_target == []
    assert session.relay == RelayStats(stale=1)


def test_draft_failure_means_plain_decoding_at_once_and_once():
    session = make()
    session.open()
    assert session.on_draft(SessionFailed("s", 0, "x")).to_target == [DraftState("s", 0, False)]
    assert session.on_draft_down().to_target == []
    assert session.on_target(outcome(session, [65])).to_draft == []
    up = session.on_draft_up()
    (reopened,) = up.to_draft
    assert isinstance(reopened, OpenSession)
    assert (reopened.epoch, reopened.token_ids) == (1, (*PROMPT, 65))
    assert up.to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=4)]
    assert session.on_draft_up() == Actions()
    assert session.on_draft(Nodes("s", 0, 3, ())).to_target == []  # of the lost draft
    assert session.on_target(outcome(session, [66], epoch=0)).to_draft == [Commit("s", 1, 4, (66,))]


def test_reopened_target_continues_where_it_was():
    session = make()
    session.open()
    session.on_target(outcome(session, [65, 66], 1))
    lost = session.on_target(SessionFailed("s", 0, "worker ended"))
    assert lost.target_lost == "worker ended"
    actions = session.reopen_target()
    (opened,) = actions.to_target
    assert isinstance(opened, OpenSession)
    assert (opened.epoch, opened.token_ids, opened.num_prompt_tokens) == (1, (*PROMPT, 65, 66), 3)
    assert [type(m) for m in actions.to_draft] == [CloseSession, OpenSession]
    session.on_target(outcome(session, [67], epoch=0))  # of the lost target: must not count
    session.on_target(outcome(session, [67], finish=FinishReason.LENGTH))
    result = session.digest().result
    assert result is not None
    assert result.text == "ABC"
    assert session.relay == RelayStats(stale=1, targets_lost=1, target_reopens=1)


def test_cancel_frees_both_engines_and_keeps_what_arrived():
    session = make(stop=("BX",))
    session.open()
    session.on_target(outcome(session, [65, 66], 1))
    actions = session.cancel()
    assert actions.to_target == actions.to_draft == [CloseSession("s", 0)]
    assert actions.result is not None
    assert actions.result.finish_reason is FinishReason.ABORT
    assert actions.result.text == "".join(c.text for c in actions.chunks) == "AB"
    assert session.cancel().result is None
    assert session.on_target(outcome(session, [67])) == Actions()
    assert session.relay == RelayStats(ended=1)


def test_target_finish_closes_the_draft_only():
    session = make()
    session.open()
    actions = session.on_target(outcome(session, [65], finish=FinishReason.STOP))
    assert actions.to_target == []
    assert actions.to_draft == [CloseSession("s", 0)]


def test_stop_string_inside_an_accepted_run():
    session = make(stop=("lo w", "zzz"))
    session.open()
    session.on_target(outcome(session, b"hel", 2))
    session.on_target(outcome(session, b"lo world", 7))
    session.on_target(outcome(session, b"more", 3))
    actions = session.digest()
    assert actions.result is not None
    assert actions.result.text == "hel"
    assert actions.result.token_ids == tuple(b"hello w")
    assert actions.result.usage.completion_tokens == 7
    assert actions.result.finish_reason is FinishReason.STOP
    assert actions.to_target == [CloseSession("s", 0)]
    assert actions.to_draft == [CloseSession("s", 0)]
    assert actions.result.speculation.rounds == 2


def test_timing_comes_from_the_given_clock():
    now = iter([10.0, 10.5, 11.0, 12.5])
    session = make(clock=lambda: next(now))
    session.open()
    for tokens, finish in (([65], None), ([66, 67], None), ([68], FinishReason.LENGTH)):
        session.on_target(outcome(session, tokens, len(tokens) - 1, finish))
        actions = session.digest()
    assert actions.result is not None
    timing = actions.result.timing
    assert (timing.prefill_s, timing.decode_s, timing.tokens_per_s) == (0.5, 2.0, 1.5)


def test_queue_time_is_what_the_owner_says():
    session = make()
    session.open(queue_s=1.5)
    result = session.cancel().result
    assert result is not None
    assert result.timing.queue_s == 1.5


def test_cancel_before_open_says_nothing_to_anybody():
    session = make(clock=lambda: 7.0)
    actions = session.cancel()
    assert actions.to_target == actions.to_draft == []
    assert actions.result is not None
    assert actions.result.timing.prefill_s == 0.0
    assert session.reopen_target() == session.on_draft_up() == session.on_draft_down() == Actions()


@pytest.mark.parametrize(
    ("stop", "finish", "reason", "matched"),
    [
        ((), FinishReason.STOP, FinishReason.STOP, 67),
        ((), FinishReason.LENGTH, FinishReason.LENGTH, None),
        (("Z", "BC", "C"), None, FinishReason.STOP, "BC"),
        (("C", "BC"), FinishReason.LENGTH, FinishReason.STOP, "BC"),
        (("A", "AB"), None, FinishReason.STOP, "A"),
        (("BCD",), FinishReason.STOP, FinishReason.STOP, 67),
    ],
)
def test_the_result_names_the_stop_that_ended_it(stop, finish, reason, matched):
    session = make(stop=stop)
    session.open()
    session.on_target(outcome(session, b"ABC", 2, finish))
    result = session.digest().result
    assert result is not None
    assert (result.finish_reason, result.matched_stop) == (reason, matched)


def test_a_stop_string_that_the_end_releases():
    """Its token also holds the beginning of a character that never comes."""
    pieces = {1: b"A", 2: b"B\xc3"}
    session = Session(
        "s", PROMPT, SamplingParams(), SpeculationParams(), stop=("B",),
        decode=lambda ids: b"".join(pieces.get(i, b"") for i in ids).decode("utf-8", "replace"),
    )  # fmt: skip
    session.open()
    session.on_target(outcome(session, [1, 2], 1, FinishReason.LENGTH))
    result = session.digest().result
    assert result is not None
    assert (result.text, result.finish_reason, result.matched_stop) == ("A", FinishReason.STOP, "B")


def test_a_cancelled_session_matched_nothing():
    session = make(stop=("BX",))
    session.open()
    session.on_target(outcome(session, [65, 66], 1))
    result = session.cancel().result
    assert result is not None
    assert result.matched_stop is None


def test_rounds_with_a_proposal_are_counted_by_accepted_tokens():
    session = make()
    session.open()
    for tokens, accepted in (([65], 0), ([66, 67, 68], 2), ([69, 70, 71], 2), ([72, 73], 1)):
        session.on_target(outcome(session, tokens, accepted))
    session.digest()
    assert session.stats.acceptance_histogram == {2: 2, 1: 1}
    assert session.stats.rounds == 4


# -- losses ---------------------------------------------------------------------------------------------------------


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
    assert session.relay == RelayStats(repeated=4)


def test_an_outcome_that_is_missing_costs_the_target_and_no_token():
    session = make()
    session.open()
    session.on_target(outcome(session, [65]))
    assert session.on_target(InFlight("s", 0, 6, (1,))) == Actions()  # of the next context: its outcome is on its way
    lost = session.on_target(outcome(session, [67], at=6))
    assert lost.target_lost is not None
    assert "at 4 was lost before 6" in lost.target_lost
    (opened,) = session.reopen_target().to_target
    assert isinstance(opened, OpenSession)
    assert opened.token_ids == (*PROMPT, 65)
    assert session.on_target(outcome(session, [66, 67], at=4, epoch=0)) == Actions()  # it was only late
    session.on_target(outcome(session, [66, 67], finish=FinishReason.LENGTH))
    assert session.digest().result.text == "ABC"
    assert session.relay == RelayStats(stale=1, early=2, targets_lost=1, target_reopens=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": ()},
        {"token_ids": (65, -1)},
        {"logprobs": (-0.5,)},
        {"round": Round(3, 3, Cause.HIT)},
        {"round": Round(0, 1, Cause.HIT)},
        {"round": Round(1, -1, Cause.HIT)},
    ],
)
def test_a_malformed_outcome_costs_the_target_and_no_token(changes):
    session = make()
    session.open()
    actions = session.on_target(replace(outcome(session, [65, 66], 1), **changes))
    assert actions.target_lost == "a malformed outcome at 3"
    assert actions.to_draft == []
    assert session.relay == RelayStats(malformed=1, targets_lost=1)
    session.reopen_target()
    session.on_target(outcome(session, [65, 66], 1, FinishReason.LENGTH))
    assert session.digest().result.text == "AB"


@pytest.mark.parametrize("context_len", [-1, 0, 4, 2**40])
def test_nodes_for_a_context_that_nobody_has_are_dropped(context_len):
    session = make()
    session.open()
    assert session.on_draft(Nodes("s", 0, context_len, ())) == Actions()
    assert session.relay == RelayStats(malformed=1)


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
    assert session.relay == RelayStats(stale=2, trees_lost=1, draft_reopens=1)


def test_a_tree_that_is_lost_when_its_draft_is_gone_is_no_news():
    session = make()
    session.open()
    session.on_draft(Nodes("s", 0, 3, ()))
    session.on_draft_down()
    assert session.on_target(TreeLost("s", 0)) == Actions()
    assert not session.draft_available
    assert session.relay == RelayStats(stale=1, drafts_lost=1)


def test_a_draft_that_fails_the_session_is_tried_again_twice_in_a_row():
    session = make()
    session.open()
    for retry in range(MAX_DRAFT_RETRIES):
        actions = session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
        assert (actions.draft_lost, actions.draft_wanted) == ("no room", True)
        assert session.wants_draft
        assert [m.epoch for m in session.on_draft_up().to_draft] == [retry + 1]
    session.on_target(outcome(session, [65, 66], 1))  # this one was worth it: the count starts again
    for _ in range(MAX_DRAFT_RETRIES):
        session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
        session.on_draft_up()
    last = session.on_draft(SessionFailed("s", session.draft_epoch, "no room"))
    assert (last.draft_lost, last.draft_wanted) == ("no room", False)
    assert last.to_target == [DraftState("s", 0, False)]
    assert not session.wants_draft
    assert session.on_draft_up() == Actions()
    assert session.relay == RelayStats(drafts_lost=2 * MAX_DRAFT_RETRIES + 1, draft_reopens=2 * MAX_DRAFT_RETRIES)


def test_trees_that_are_lost_time_and_again_are_given_up():
    session = make()
    session.open()
    for _ in range(MAX_DRAFT_RETRIES):
        session.on_draft(Nodes("s", session.draft_epoch, 3, ()))
        assert session.on_target(TreeLost("s", 0)).draft_lost is None
    session.on_draft(Nodes("s", session.draft_epoch, 3, ()))
    actions = session.on_target(TreeLost("s", 0))
    assert actions.draft_lost is not None
    assert actions.to_draft == [CloseSession("s", MAX_DRAFT_RETRIES)]
    assert actions.to_target == [DraftState("s", 0, False)]
    assert not session.wants_draft


def test_a_session_begins_without_a_draft_where_none_is_wanted():
    """It takes one when its target asks for it."""
    session = make()
    opened = session.open(draft_wanted=False)
    assert opened.to_draft == []
    assert opened.to_target[1:] == [DraftState("s", 0, False)]
    assert not session.wants_draft
    assert session.on_target(SpeculationWanted("s", 0, True)).draft_wanted
    assert session.on_draft_up().to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=3)]


def test_a_target_that_wants_no_drafts_is_left_alone_until_it_does():
    session = make()
    session.open()
    away = session.on_target(SpeculationWanted("s", 0, False))
    assert away.to_draft == [CloseSession("s", 0)]
    assert away.to_target == [DraftState("s", 0, False)]
    assert not away.draft_wanted
    assert not session.wants_draft
    assert session.on_draft_up() == session.on_target(SpeculationWanted("s", 0, False)) == Actions()
    assert session.on_target(outcome(session, [65])) == Actions()
    assert session.on_draft(Nodes("s", 0, 3, ())) == Actions()
    back = session.on_target(SpeculationWanted("s", 0, True))
    assert back == Actions(draft_wanted=True)
    assert session.wants_draft
    assert session.on_draft_up().to_target == [DraftState("s", 0, True, draft_epoch=1, context_len=4)]
    assert session.on_target(SpeculationWanted("s", 0, True)) == Actions()
    # What the old target wanted says nothing about the next one.
    session.on_target(SpeculationWanted("s", 0, False))
    again = session.reopen_target()
    assert again.draft_wanted
    assert [type(m) for m in again.to_target] == [OpenSession, DraftState]
    assert session.relay == RelayStats(stale=1, draft_reopens=1, target_reopens=1)


def test_a_draft_that_works_can_be_left_for_another():
    session = make()
    session.open()
    actions = session.leave_draft()
    assert actions == Actions([DraftState("s", 0, False)], [CloseSession("s", 0)], draft_wanted=True)
    assert session.leave_draft() == Actions(draft_wanted=True)
    assert [type(m) for m in session.on_draft_up().to_draft] == [OpenSession]
    assert session.relay == RelayStats(draft_reopens=1)


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
        assert actions.draft_wanted <= self.session.wants_draft

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
    at = len(session._history) - len(PROMPT)
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
            assert peers.target == session._history
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


@pytest.mark.parametrize("draft_available", [True, False])
@pytest.mark.parametrize("first", HAPPENINGS)
def test_whatever_happens_both_engines_know_what_the_session_knows(first, draft_available):
    """All stories of four events: after each, either engine is closed or has the whole history in the newest epoch, and
    the target knows whether, and under which epoch, a draft serves the session. Tokens are emitted once."""
    for rest in itertools.product(HAPPENINGS, repeat=3):
        play((first, *rest), draft_available)


@given(st.lists(st.sampled_from([h for h in HAPPENINGS if h not in ("cancel", "finish")]), min_size=5, max_size=8))
def test_longer_stories(happenings):
    play(happenings)


def test_refused_requests():
    with pytest.raises(InvalidRequestError, match="no token"):
        Session("s", (), SamplingParams(), SpeculationParams(), decode=decode)
    with pytest.raises(InvalidRequestError, match="stop string is empty"):
        make(stop=("",))


@given(
    text=st.text(alphabet="abcé中🙂", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abcé中🙂", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 6), max_size=20),
)
def test_chunks_are_the_text_up_to_the_first_stop(text, stops, sizes):
    session = make(stop=tuple(stops))
    session.open()
    chunks = feed(session, text, sizes)
    result = session.result
    assert result is not None
    # the obvious twin: character by character, the stop that is complete first ends the text where it begins
    expected = text
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(s) for s in stops if s in text[:end]]
        if begins:
            expected = text[: min(begins)]
            assert result.finish_reason is FinishReason.STOP
            assert decode(result.token_ids) == text[:end]
            break
    else:
        assert decode(result.token_ids) == text
    assert result.text == expected == "".join(c.text for c in chunks)
    assert sum((c.token_ids for c in chunks), ()) == result.token_ids
    assert all("\N{REPLACEMENT CHARACTER}" not in c.text for c in chunks)
    assert len(result.logprobs) == len(result.token_ids) == result.usage.completion_tokens


class SimulatedTarget:
    """Emits the next tokens of a fixed text, whatever it is told; restarts from the history it is given."""

    def __init__(self, text, rng):
        self.text, self.rng = text, rng
        self.outbox: deque[Outcome | InFlight] = deque()
        self.position = self.epoch = -1

    def receive(self, message):
        if isinstance(message, OpenSession):
            assert message.epoch > self.epoch
            self.epoch, self.position = message.epoch, len(message.token_ids) - message.num_prompt_tokens
            assert message.token_ids[message.num_prompt_tokens :] == self.text[: self.position]
        elif isinstance(message, CloseSession):
            self.position = len(self.text)

    def step(self, session):
        if self.position < 0 or self.position >= len(self.text):
            return
        size = self.rng.randint(1, 4)
        tokens = self.text[self.position : self.position + size]
        at = len(PROMPT) + self.position
        self.position += len(tokens)
        finish = FinishReason.LENGTH if self.position == len(self.text) else None
        self.outbox.append(outcome(session, tokens, len(tokens) - 1, finish, self.epoch, at=at))
        if finish is None:
            self.outbox.append(InFlight("s", self.epoch, at + len(tokens), (1, 2)))


class SimulatedDraft:
    """Keeps the context it was told, so that the test can compare it with the truth."""

    def __init__(self):
        self.epoch = -1
        self.context: list[int] | None = None
        self.outbox: deque[Nodes | SessionFailed] = deque()

    def receive(self, message):
        if isinstance(message, OpenSession):
            assert message.epoch > self.epoch
            self.epoch, self.context = message.epoch, list(message.token_ids)
        elif isinstance(message, CloseSession):
            self.context = None
        elif message.epoch == self.epoch and self.context is not None:
            assert message.context_len == len(self.context)
            self.context += message.token_ids

    def step(self):
        if self.context is not None:
            self.outbox.append(Nodes("s", self.epoch, len(self.context), (Node(1, 0, 65, 0.5),)))


EVENTS = ("target", "draft", "deliver_target", "deliver_draft", "digest", "draft_down", "draft_up", "reopen")


@given(
    text=st.binary(min_size=1, max_size=40).map(lambda b: bytes(65 + x % 26 for x in b)),
    events=st.lists(st.sampled_from(EVENTS), max_size=120),
    rng_seed=st.integers(0, 2**16),
)
def test_any_order_of_delays_failures_and_restarts_gives_the_same_tokens(text, events, rng_seed):
    rng = random.Random(rng_seed)
    text = tuple(text)
    session = make()
    target, draft = SimulatedTarget(text, rng), SimulatedDraft()
    chunks: list[Chunk] = []
    draft_up = True

    def carry_out(actions):
        for message in actions.to_target:
            if isinstance(message, Nodes | DraftState):
                assert message.epoch >= 0
            target.receive(message)
        if draft_up:
            for message in actions.to_draft:
                draft.receive(message)
        chunks.extend(actions.chunks)

    def check_draft():
        if session.draft_available:
            assert draft.context == [*PROMPT, *text[: len(draft.context or ()) - len(PROMPT)]]

    carry_out(session.open())
    for event in [*events, *(["target", "deliver_target", "deliver_target"] * (len(text) + 40))]:
        if event == "target":
            target.step(session)
        elif event == "draft":
            draft.step()
        elif event == "deliver_target" and target.outbox:
            message = target.outbox.popleft()
            stale = message.epoch != target.epoch
            before = session.relay.dropped
            carry_out(session.on_target(message))
            assert not stale or session.relay.dropped == before + 1
        elif event == "deliver_draft" and draft.outbox:
            message = draft.outbox.popleft()
            carry_out(session.on_draft(message))
            carry_out(session.on_draft(message))  # nodes may be duplicated: the tree knows their ids
        elif event == "digest":
            carry_out(session.digest())
        elif event == "draft_down":
            carry_out(session.on_draft_down())
            draft_up, draft.context = False, None
        elif event == "draft_up":
            draft_up = True
            carry_out(session.on_draft_up())
        elif event == "reopen" and not session.finished:
            carry_out(session.reopen_target())  # what the old target still has in its outbox is stale now
        check_draft()
    carry_out(session.digest())

    assert session.result is not None
    assert session.result.token_ids == text
    assert session.result.text == bytes(text).decode() == "".join(c.text for c in chunks)
    assert draft.context is None or not draft_up
