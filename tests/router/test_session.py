"""The session relay: what it opens, commits, stops, counts and says in the end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.sessions import PROMPT, decode, feed, make, outcome
from tests.support.messages import sent

from paceline.errors import EngineError, InvalidRequestError
from paceline.messages import CloseSession, Commit, DraftState, InFlight, Node, Nodes, OpenSession, SessionFailed
from paceline.router import session as session_module
from paceline.router.session import Actions, RelayStats, Session
from paceline.rpc.generation import chunk_from_proto, chunk_to_proto
from paceline.types import FinishReason, Mode, Round, SamplingParams, SpeculationParams


def test_open_in_plain_mode_leaves_the_draft_alone():
    actions = make(Mode.PLAIN).open()
    assert [type(m) for m in actions.to_target] == [OpenSession]
    assert actions.to_draft == []


def test_open_on_both_with_one_key():
    session = make()
    actions = session.open()
    assert actions.to_target == actions.to_draft
    message = actions.to_target[0]
    assert isinstance(message, OpenSession)
    assert message.seed == session.noise_key
    assert message.sampling.seed == session.seed
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
    assert session.relay_stats == RelayStats(stale=1)


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
    assert lost.target_failed == "worker ended"
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
    assert session.relay_stats == RelayStats(stale=1, targets_lost=1, target_reopens=1)


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
    assert session.relay_stats == RelayStats(ended=1)


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
    assert [chunk.drafted for chunk in actions.chunks] == [(True, True, False), (True,) * 4]
    assert [chunk.round.num_accepted for chunk in actions.chunks] == [2, 4], "of seven the client gets four"
    assert actions.result.speculation.accepted == 6


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


def test_refused_requests():
    with pytest.raises(InvalidRequestError, match="no token"):
        Session("s", (), SamplingParams(), SpeculationParams(), decode=decode)
    with pytest.raises(InvalidRequestError, match="stop string is empty"):
        make(stop=("",))


@given(
    text=st.text(alphabet="abcé中🙂", min_size=1, max_size=40),
    stops=st.lists(st.text(alphabet="abcé中🙂", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 6), max_size=20),
    include=st.booleans(),
    maker=st.sampled_from(["draft", "lookup", "head"]),
)
def test_chunks_are_the_text_up_to_the_first_stop(text, stops, sizes, include, maker):
    session = make(stop=tuple(stops), include_stop_str_in_output=include)
    session.open()
    chunks = feed(session, text, sizes, maker=maker)
    result = session.result
    assert result is not None
    # the obvious twin: character by character, the stop that is complete first ends the text where it begins
    expected = text
    for end in range(1, len(text) + 1):
        begins = [(text[:end].find(s), i) for i, s in enumerate(stops) if s in text[:end]]
        if begins:
            at, i = min(begins)
            expected = text[: at + len(stops[i])] if include else text[:at]
            assert result.finish_reason is FinishReason.STOP
            assert decode(result.token_ids) == text[:end]
            break
    else:
        assert decode(result.token_ids) == text
    assert result.text == expected == "".join(c.text for c in chunks)
    assert sum((c.token_ids for c in chunks), ()) == result.token_ids
    assert all("\N{REPLACEMENT CHARACTER}" not in c.text for c in chunks)
    assert len(result.logprobs) == len(result.token_ids) == result.usage.completion_tokens
    arrived = [chunk_from_proto(sent(chunk_to_proto(c, prompt_tokens=3, completion_tokens=9))) for c in chunks]
    assert [c.round for c in arrived] == [c.round for c in chunks], "a round that a client refuses ends its stream"
    stats = result.speculation
    assert stats.lookup_accepted + stats.head_accepted == (0 if maker == "draft" else stats.accepted)


def test_a_round_that_is_cut_without_its_maker_ends_the_stream_of_a_client(monkeypatch):
    monkeypatch.setattr(Round, "first", lambda self, n: replace(self, num_accepted=min(self.num_accepted, n)))
    with pytest.raises(EngineError, match="a round of cause"):
        test_chunks_are_the_text_up_to_the_first_stop.hypothesis.inner_test("aabb", ["a"], [4], False, "lookup")


# -- what stop strings cost --------------------------------------------------------------------------------------------


def longest_beginning(text, stops):
    """The obvious version: every beginning of every stop string."""
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6), st.text("abc", max_size=12))
def test_what_is_undecided_is_the_longest_beginning_of_a_stop_string(stops, text):
    assert session_module.Prefixes(stops).num_undecided(text) == longest_beginning(text, stops)


def test_stop_strings_cost_what_the_text_is_long_whatever_they_hold(monkeypatch):
    """64 stop strings of 1,024 characters, and a text that is the beginning of all of them again and again."""
    looked = []
    real = session_module.bisect_right
    monkeypatch.setattr(session_module, "bisect_right", lambda *args: looked.append(1) or real(*args))
    stops = tuple("a" * 1000 + f"{i:024}" for i in range(64))
    session = Session("s", PROMPT, SamplingParams(), SpeculationParams(), decode=decode, stop=stops)
    text = ("a" * 900 + "c" + "a" * 500 + "cd") * 5
    released = "".join(session.release_text(text[i : i + 3])[0] for i in range(0, len(text), 3))
    assert released + session._withheld == text
    assert len(looked) <= 3 * len(text)
