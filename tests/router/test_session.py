"""The session relay against simulated engines: delays, failures, duplicates and stale epochs in any order."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequestError
from paceline.router.session import Actions, Chunk, RelayStats, Session
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
