"""streams.py: what goes in comes out, in every direction; what makes no sense is dropped and counted.

Mutants that must fail here: any `double` of the protocol made a `float` (0.1 would come back as 0.10000000149...:
every round trip draws doubles, and `test_no_field_is_rounded` reads the types); a seed cut to 32 or 63 bits; a
column left out, or put in another's place; a node without q given one; a row of columns given the tokens of another.
"""

import math
import re
import struct
from dataclasses import fields, replace
from typing import get_args

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st
from tests.support.messages import (
    INF,
    NAN,
    any_double,
    any_sampling,
    any_speculation,
    columns,
    ids,
    numbers,
    probs,
    rounds,
    sampling_params,
    sent,
    speculation_params,
    statuses,
    tokens,
    tree_update,
    tuples,
    uint31,
    uint64,
)

from paceline.messages import (
    MAX_STEP_S,
    CloseSession,
    Commit,
    DraftState,
    Echo,
    FromDraft,
    FromTarget,
    Hint,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    PromptScores,
    RelayedNodes,
    SessionFailed,
    SparseDistribution,
    SpeculationWanted,
    States,
    ToDraft,
    ToTarget,
    TreeLost,
)
from paceline.rpc import streams as wire
from paceline.types import (
    MAX_DRAFT_TOKENS,
    Cause,
    FinishReason,
    PromptLogprobs,
    ReplicaStatus,
    Round,
    SamplingParams,
    SpeculationParams,
    TokenLogprob,
)
from paceline.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

# -- values ------------------------------------------------------------------------------------------------------------


@st.composite
def sparse_distributions(draw):
    token_ids = draw(st.lists(uint31, min_size=1, max_size=4, unique=True))
    return SparseDistribution.of(tuple(token_ids), tuple(draw(probs) for _ in token_ids))


@st.composite
def opens(draw):
    token_ids = draw(st.lists(uint31, min_size=1, max_size=6))
    return OpenSession(
        draw(ids),
        draw(uint64),
        tuple(token_ids),
        draw(st.integers(1, len(token_ids))),
        draw(uint64),
        draw(sampling_params()),
        draw(speculation_params),
        draw(tokens),
        draw(st.text(max_size=9)),
        draw(st.sampled_from(["", TRACEPARENT])),
        draw(probs),
        *draw(st.sampled_from([("", 0.0), ("10.0.0.1:9", 30.0)])),
    )


@st.composite
def outcomes(draw):
    token_ids = draw(tokens)
    logprobs = tuple(draw(numbers) for _ in token_ids)
    reason = draw(st.none() | st.sampled_from(FinishReason))
    top = draw(st.sampled_from([(), (((3, -0.5), (1, -1.5)),) * len(token_ids)]))
    return Outcome(
        draw(ids), draw(uint64), draw(uint31), token_ids, logprobs, draw(rounds()), reason, draw(uint31), top
    )


floats32 = st.floats(-100, 0, width=32)
token_logprobs = st.builds(TokenLogprob, floats32, uint31, tuples(st.tuples(uint31, floats32)))
prompt_logprobs = st.builds(PromptLogprobs, uint31, tuples(token_logprobs).filter(bool))
scores = st.builds(PromptScores, ids, uint64, prompt_logprobs)
closes = st.builds(CloseSession, ids, uint64)
draft_states = st.builds(DraftState, ids, uint64, st.booleans(), uint64, uint31)
coupled_node = st.builds(Node, uint31, uint31, uint31, probs)
rejection_node = st.builds(Node, uint31, uint31, uint31, probs, st.booleans(), st.none() | sparse_distributions())
trees = st.builds(
    Nodes,
    ids,
    uint64,
    uint31,
    tuples(coupled_node) | tuples(rejection_node),
    st.booleans(),
    st.floats(0, MAX_STEP_S),
)
failures = st.builds(SessionFailed, ids, uint64, st.text(max_size=20), st.booleans(), st.booleans())
in_flights = st.builds(InFlight, ids, uint64, uint31, tokens)
commits = st.builds(Commit, ids, uint64, uint31, tokens, tokens)
echoes = st.builds(Echo, uint64)
states = st.builds(
    lambda name, epoch, at, rows: States(name, epoch, at, 3, b"".join(rows)),
    ids,
    uint64,
    uint31,
    st.lists(st.binary(min_size=6, max_size=6), min_size=1, max_size=4),
)
hints = st.builds(
    lambda name, epoch, at, nodes, weight, row: Hint(name, epoch, at, nodes, weight, row * len(nodes)),
    ids,
    uint64,
    uint31,
    tuples(uint31).filter(bool),
    st.floats(0, 1, exclude_min=True),
    st.sampled_from([bytes(8), bytes(range(24))]),
)
to_target = st.lists(opens() | closes | draft_states | trees | echoes, max_size=6) | st.lists(trees, max_size=4)
from_target = st.lists(outcomes(), max_size=4) | st.lists(in_flights, max_size=4)
from_target |= st.lists(
    outcomes()
    | scores
    | in_flights
    | st.builds(TreeLost, ids, uint64)
    | st.builds(SpeculationWanted, ids, uint64, st.booleans(), st.none() | st.integers(0, 2**32 - 1))
    | failures
    | states
    | hints
    | echoes,
    max_size=6,
)
to_draft = st.lists(opens() | closes | commits | states | hints | echoes, max_size=6) | st.lists(commits, max_size=4)
from_draft = st.lists(trees | failures | echoes, max_size=6)


# -- between router and replicas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forms", "union"),
    [
        (wire._TO_TARGET, ToTarget),
        (wire._FROM_TARGET, FromTarget),
        (wire._TO_DRAFT, ToDraft),
        (wire._FROM_DRAFT, FromDraft),
    ],
)
def test_every_message_of_a_direction_has_a_form(forms, union):
    assert set(forms) == {*get_args(union), Echo}


@given(to_target)
def test_to_target(messages):
    assert wire.decode_to_target(sent(wire.encode_to_target(messages))) == (messages, 0)


@given(from_target, st.none() | statuses)
def test_from_target(messages, status):
    batch = sent(wire.encode_from_target(messages, status))
    assert wire.decode_from_target(batch) == (messages, status, 0)


@given(to_draft)
def test_to_draft(messages):
    assert wire.decode_to_draft(sent(wire.encode_to_draft(messages))) == (messages, 0)


@given(from_draft, st.none() | statuses)
def test_from_draft_through_a_router(messages, status):
    relayed, told, num_dropped = wire.decode_from_draft(sent(wire.encode_from_draft(messages, status)))
    assert (told, num_dropped) == (status, 0)
    assert len(relayed) == len(messages)
    for message, original in zip(relayed, messages, strict=True):
        if isinstance(original, SessionFailed | Echo):
            assert message == original
        else:
            assert isinstance(message, RelayedNodes)
            for name in ("session_id", "epoch", "context_len"):
                assert getattr(message, name) == getattr(original, name)
    nodes = [message for message in relayed if isinstance(message, RelayedNodes)]
    expected = [message for message in messages if isinstance(message, Nodes)]
    batch = sent(wire.encode_to_target(nodes))
    assert [packed for c in batch.commands for packed in c.tree_updates.nodes] == [n.packed for n in nodes]
    assert wire.decode_to_target(batch) == (expected, 0)


def test_what_is_not_known_to_a_router_passes_it():
    newer = tree_update("s")
    newer.nodes[0] += b"\xd2\x09\x03abc"
    event = draft_pb2.FromDraft(events=[draft_pb2.DraftEvent(tree_updates=newer)])
    relayed, _, _ = wire.decode_from_draft(sent(event))
    batch = sent(wire.encode_to_target(relayed))
    assert b"\xd2\x09\x03abc" in batch.SerializeToString()
    assert wire.decode_to_target(batch) == ([Nodes("s", 0, 0, ())], 0)


def test_relayed_nodes_outlive_their_batch():
    tree = Nodes("s", 3, 9, (Node(5, 0, 7, 0.1),))
    batch = sent(wire.encode_from_draft([tree]))
    (relayed,), _, _ = wire.decode_from_draft(batch)
    batch.Clear()
    assert wire.decode_to_target(wire.encode_to_target([relayed, tree])) == ([tree, tree], 0)


@pytest.mark.parametrize("change", [{"width": 0}, {"packed": b""}, {"packed": b"12345"}, {"session_id": ""}])
def test_states_that_are_no_whole_rows_are_dropped(change):
    right = types_pb2.States(session_id="s", epoch=1, position=4, width=3, packed=b"123456")
    batch = target_pb2.FromTarget(events=[target_pb2.TargetEvent(states=right)])
    assert wire.decode_from_target(sent(batch)) == ([States("s", 1, 4, 3, b"123456")], None, 0)
    for name, value in change.items():
        setattr(batch.events[0].states, name, value)
    assert wire.decode_from_target(sent(batch)) == ([], None, 1)


WRONG_HINTS = [{"weight": 0}, {"weight": 1.1}, {"weight": NAN}, {"packed": b""}, {"packed": bytes(24)}]


@pytest.mark.parametrize("change", [*WRONG_HINTS, {"node_ids": []}, {"session_id": ""}])
def test_hints_that_are_no_whole_rows_are_dropped(change):
    right = {"session_id": "s", "epoch": 1, "context_len": 4, "node_ids": [0, 7], "weight": 0.5, "packed": bytes(32)}
    for values, expected in ((right, ([Hint("s", 1, 4, (0, 7), 0.5, bytes(32))], 0)), (right | change, ([], 1))):
        batch = draft_pb2.ToDraft(commands=[draft_pb2.DraftCommand(hint=types_pb2.Hint(**values))])
        assert wire.decode_to_draft(sent(batch)) == expected


def test_empty_columns_are_not_sent():
    batch = wire.encode_to_target([Nodes("s", 0, 5, (Node(1, 0, 4, 0.5), Node(2, 1, 4, 0.5)))])
    proto = types_pb2.Nodes.FromString(batch.commands[0].tree_updates.nodes[0])
    assert (len(proto.node_ids), len(proto.sampled), len(proto.qs)) == (2, 0, 0)


def test_a_replica_is_told_every_parameter():
    start = OpenSession("s", 0, (1,), 1, 5, SamplingParams(seed=5), SpeculationParams())
    proto = wire.encode_to_target([start]).commands[0].open_session
    said = {field.name for message in (proto.sampling, proto.speculation) for field, _ in message.ListFields()}
    collections = {
        "allowed_token_ids",
        "logit_bias",
        "bad_words",
        "stop_token_ids",
        "structured_output",
        "logprob_token_ids",
        "prompt_logprobs",
    }
    # one that is empty or absent is the default
    assert said == {*SamplingParams.model_fields, *SpeculationParams.model_fields} - collections


def test_a_request_without_a_trace_carries_no_field_for_it():
    start = OpenSession("s", 0, (1,), 1, 5, SamplingParams(seed=5), SpeculationParams())
    for encode in (wire.encode_to_target, wire.encode_to_draft):
        for traceparent in ("", TRACEPARENT):
            (command,) = encode([replace(start, traceparent=traceparent)]).commands
            assert command.open_session.HasField("traceparent") == bool(traceparent)


def test_text_that_utf8_cannot_carry_does_not_stop_a_batch():
    batch = sent(wire.encode_from_draft([SessionFailed("s", 0, "no file named \udcff")]))
    assert wire.decode_from_draft(batch)[0] == [SessionFailed("s", 0, "no file named ?")]


def nodes_with(**changes):
    columns = {"node_ids": [1, 2], "parent_ids": [0, 1], "token_ids": [5, 6], "probs": [0.5, 0.25]}
    return target_pb2.TargetCommand(tree_updates=tree_update(**{"session_id": "s", **columns, **changes}))


sparse = types_pb2.SparseDistribution


def q(token_ids, q_probs):
    packed = SparseDistribution.of(token_ids, q_probs)
    return sparse(token_ids=packed.packed_ids, probs=packed.packed_probs)


def open_with(sampling=None, speculation=None, **changes):
    values = {
        "session_id": "s",
        "token_ids": [1, 2],
        "num_prompt_tokens": 2,
        "sampling": types_pb2.SamplingParams(**(sampling or {})),
        "speculation": types_pb2.SpeculationOptions(**(speculation or {})),
    }
    return target_pb2.TargetCommand(open_session=types_pb2.OpenSession(**{**values, **changes}))


def outcome_with(**changes):
    round_ = {"drafted": 2, "accepted": 1, "cause": types_pb2.CAUSE_HIT, **changes.pop("round", {})}
    values = {"session_id": "s", "token_ids": [1, 2], "logprobs": [-1.0, -2.0]}
    proto = target_pb2.Outcome(**{**values, **changes}, round=types_pb2.SpeculationRound(**round_))
    return target_pb2.TargetEvent(outcome=proto)


def without(event, name):
    event.outcome.ClearField(name)
    return event


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, NAN, INF, 3600.1])
def test_a_session_does_not_wait_for_pages_without_end(timeout_s):
    command = open_with(pages_from="10.0.0.1:9", pages_timeout_s=timeout_s)
    (opened,), dropped = wire.decode_to_target(target_pb2.ToTarget(commands=[command]))
    assert (opened.pages_from, opened.pages_timeout_s, dropped) == ("", 0.0, 0)


MALFORMED_TO_TARGET = {
    "nothing": target_pb2.TargetCommand(),
    "a newer kind": target_pb2.TargetCommand.FromString(b"\xfa\x01\x02\x08\x01"),
    "close without id": target_pb2.TargetCommand(close_session=types_pb2.CloseSession(epoch=3)),
    "draft state without id": target_pb2.TargetCommand(draft_state=target_pb2.DraftState(available=True)),
    "nodes without id": nodes_with(session_id=""),
    "nodes that are none": target_pb2.TargetCommand(
        tree_updates=types_pb2.TreeUpdates(session_ids=["s"], epochs=[0], context_lens=[1], nodes=[b"\x22\x05\x01"])
    ),
    "nodes without parents": nodes_with(parent_ids=[]),
    "too few node ids": nodes_with(node_ids=[1]),
    "too few parents": nodes_with(parent_ids=[0]),
    "too many tokens": nodes_with(token_ids=[5, 6, 7]),
    "too few probs": nodes_with(probs=[0.5]),
    "prob is nan": nodes_with(probs=[0.5, NAN]),
    "too few sampled": nodes_with(sampled=[True]),
    "too many sampled": nodes_with(sampled=[True] * 3),
    "too few q": nodes_with(qs=[q([5], [1.0])]),
    "too many q": nodes_with(qs=[q([5], [1.0])] * 3),
    "q of broken ids": nodes_with(qs=[q([5], [1.0]), sparse(token_ids=b"12345", probs=b"1" * 10)]),
    "q of broken probs": nodes_with(qs=[q([5], [1.0]), sparse(token_ids=b"1234", probs=b"1234567")]),
    "q with too few probs": nodes_with(qs=[q([5], [1.0]), q([5, 6], [1.0])]),
    "q with probs only": nodes_with(qs=[q([5], [1.0]), q([], [1.0])]),
    "step_s is nan": nodes_with(step_s=NAN),
    "step_s is negative": nodes_with(step_s=-1.0),
    "step_s is infinite": nodes_with(step_s=INF),
    "step_s is more than an hour": nodes_with(step_s=3600.1),
    "step_s is finite and absurd": nodes_with(step_s=1e308),
    "open without id": open_with(session_id=""),
    "open without tokens": open_with(token_ids=[]),
    "open without a prompt": open_with(num_prompt_tokens=0),
    "open with too long a prompt": open_with(num_prompt_tokens=3),
    "open without sampling": target_pb2.TargetCommand(
        open_session=types_pb2.OpenSession(
            session_id="s", token_ids=[1], num_prompt_tokens=1, speculation=types_pb2.SpeculationOptions()
        )
    ),
    "open without speculation": target_pb2.TargetCommand(
        open_session=types_pb2.OpenSession(
            session_id="s", token_ids=[1], num_prompt_tokens=1, sampling=types_pb2.SamplingParams()
        )
    ),
}


def scores_with(**changes):
    columns = {"logprobs": [-1.0, -2.0], "ranks": [1, 2], "num_top": [1, 0], "top_token_ids": [3]}
    columns |= {"top_logprobs": [-1.0], **changes}
    session_id = columns.pop("session_id", "s")
    packed = {
        name: column
        if isinstance(column, bytes)
        else struct.pack(f"<{len(column)}{'f' if 'logprobs' in name else 'I'}", *column)
        for name, column in columns.items()
    }
    logprobs = types_pb2.PromptLogprobs(position=1, **packed)
    return target_pb2.TargetEvent(prompt_scores=target_pb2.PromptScores(session_id=session_id, logprobs=logprobs))


MALFORMED_FROM_TARGET = {
    "nothing": target_pb2.TargetEvent(),
    "scores without id": scores_with(session_id=""),
    "scores of no token": scores_with(logprobs=[], ranks=[], num_top=[], top_token_ids=[], top_logprobs=[]),
    "scores with too few ranks": scores_with(ranks=[1]),
    "scores with more of the likeliest than they count": scores_with(num_top=[0, 0]),
    "scores with fewer of the likeliest than they count": scores_with(num_top=[1, 1]),
    "scores with a token without its logprob": scores_with(top_logprobs=[]),
    "scores with a part of a number": scores_with(ranks=b"12345"),
    "scores that are no number": scores_with(logprobs=[-1.0, float("nan")]),
    "in flight without id": target_pb2.TargetEvent(in_flight=target_pb2.InFlight(node_ids=[1])),
    "tree lost without id": target_pb2.TargetEvent(tree_lost=target_pb2.TreeLost(epoch=1)),
    "wanted without id": target_pb2.TargetEvent(speculation_wanted=target_pb2.SpeculationWanted(wanted=True)),
    "failed without id": target_pb2.TargetEvent(session_failed=types_pb2.SessionFailed(message="so")),
    "outcome without id": outcome_with(session_id=""),
    "outcome without a round": without(outcome_with(), "round"),
    "outcome without a cause": outcome_with(round={"cause": types_pb2.CAUSE_UNSPECIFIED}),
    "outcome of an unknown cause": outcome_with(round={"cause": 99}),
    "outcome of a negative cause": outcome_with(round={"cause": -1}),
    "outcome that accepts more than was drafted": outcome_with(round={"accepted": 3}),
    "outcome of an unknown finish reason": outcome_with(finish_reason=99),
    "outcome with too few logprobs": outcome_with(logprobs=[-1.0]),
    "outcome with a token without its logprob": outcome_with(top_logprobs=[types_pb2.TopLogprobs(token_ids=[1])]),
}


def test_the_tables_change_what_is_valid():
    commands = [nodes_with(), nodes_with(sampled=[True, False], qs=[q([5], [1.0]), q([], [])]), open_with()]
    assert wire.decode_to_target(target_pb2.ToTarget(commands=commands))[1] == 0
    assert wire.decode_from_target(target_pb2.FromTarget(events=[outcome_with(), scores_with()]))[2] == 0


WRONG_PARAMETERS = {
    "a temperature that is nan": open_with({"temperature": NAN}),
    "max_tokens 0": open_with({"max_tokens": 0}),
    "min_tokens above max_tokens": open_with({"max_tokens": 1, "min_tokens": 2}),
    "an empty bad word": open_with({"bad_words": [types_pb2.TokenSequence()]}),
    "an unknown mode": open_with(speculation={"mode": "fast"}),
    "an unknown acceptance": open_with(speculation={"acceptance": "maybe"}),
    "too long a lookahead": open_with(speculation={"max_draft_tokens": MAX_DRAFT_TOKENS + 1}),
}


@pytest.mark.parametrize("command", WRONG_PARAMETERS.values(), ids=WRONG_PARAMETERS)
def test_an_opening_whose_parameters_cannot_be_followed_is_answered(command):
    """By its reason: the session would wait forever for an opening that was dropped."""
    good = wire.encode_to_target([CloseSession("good", 1)]).commands[0]
    messages, num_dropped = wire.decode_to_target(sent(target_pb2.ToTarget(commands=[good, command, good])))
    assert messages[::2] == [CloseSession("good", 1)] * 2
    assert num_dropped == 0
    assert isinstance(messages[1], SessionFailed)
    assert (messages[1].session_id, messages[1].request_at_fault) == ("s", False)
    assert re.match(r"\w+.* (is|holds) .+: ", messages[1].message)


@pytest.mark.parametrize("command", MALFORMED_TO_TARGET.values(), ids=MALFORMED_TO_TARGET)
def test_malformed_to_target_is_dropped_and_counted(command):
    good = wire.encode_to_target([CloseSession("good", 1)]).commands[0]
    batch = sent(target_pb2.ToTarget(commands=[good, command, good, command]))
    assert wire.decode_to_target(batch) == ([CloseSession("good", 1)] * 2, 2)


@pytest.mark.parametrize("event", MALFORMED_FROM_TARGET.values(), ids=MALFORMED_FROM_TARGET)
def test_malformed_from_target_is_dropped_and_counted(event):
    good = wire.encode_from_target([TreeLost("good", 1)]).events[0]
    batch = sent(target_pb2.FromTarget(events=[good, event, good, event]))
    assert wire.decode_from_target(batch) == ([TreeLost("good", 1)] * 2, None, 2)


def test_malformed_to_draft_is_dropped_and_counted():
    commands = [
        draft_pb2.DraftCommand(),
        draft_pb2.DraftCommand(commit=draft_pb2.Commit(token_ids=[1])),
        draft_pb2.DraftCommand(close_session=types_pb2.CloseSession()),
        draft_pb2.DraftCommand(open_session=types_pb2.OpenSession(session_id="s")),
    ]
    assert wire.decode_to_draft(sent(draft_pb2.ToDraft(commands=commands))) == ([], 4)


def test_malformed_from_draft_is_dropped_and_counted():
    events = [
        draft_pb2.DraftEvent(),
        draft_pb2.DraftEvent(tree_updates=tree_update("", node_ids=[1])),
        draft_pb2.DraftEvent(session_failed=types_pb2.SessionFailed(message="so")),
    ]
    batch = draft_pb2.FromDraft(events=events, status=types_pb2.ReplicaStatus(kind="draft"))
    assert wire.decode_from_draft(sent(batch)) == ([], None, 4)


def in_columns():
    """Two messages of each kind that travels in columns: how they are decoded, their batch, and its columns."""
    top = (((3, -0.5), (1, -1.5)),)
    outcome_ = Outcome("s", 7, 9, (5,), (-0.5,), Round(3, 1, Cause.HIT, 1, 0, 1, 1), FinishReason.STOP, 2, top)
    tree = Nodes("s", 7, 9, (Node(5, 0, 7, 0.1),))
    cases = {
        "outcomes": (wire.decode_from_target, wire.encode_from_target, "events", outcome_),
        "in_flights": (wire.decode_from_target, wire.encode_from_target, "events", InFlight("s", 7, 9, (5,))),
        "commits": (wire.decode_to_draft, wire.encode_to_draft, "commands", Commit("s", 7, 9, (5,), (6,))),
        "tree_updates": (wire.decode_to_target, wire.encode_to_target, "commands", tree),
    }
    for field, (decode, encode, entries, message) in cases.items():
        other = replace(message, session_id="t")
        for column in getattr(getattr(encode([message, other]), entries)[0], field).DESCRIPTOR.fields:
            yield pytest.param(
                decode, encode, entries, [message, other], field, column.name, id=f"{field}-{column.name}"
            )


@pytest.mark.parametrize(("decode", "encode", "entries", "messages", "field", "column"), list(in_columns()))
def test_columns_that_do_not_fit_together_are_dropped_and_counted(decode, encode, entries, messages, field, column):
    batch = sent(encode(messages))
    assert decode(batch)[0] == messages
    shortened = getattr(getattr(batch, entries)[0], field)
    if isinstance(getattr(shortened, column), bytes):
        setattr(shortened, column, getattr(shortened, column)[:-1])
    else:
        del getattr(shortened, column)[-1]
    getattr(batch, entries).extend(getattr(encode(messages), entries))
    num_dropped = 1 if column == "session_ids" else 2
    assert (decode(sent(batch))[0], decode(sent(batch))[-1]) == (messages, num_dropped)


def rows_with(column, at, value):
    good = Outcome("s", 7, 9, (5,), (-0.5,), Round(3, 1, Cause.HIT), FinishReason.STOP, 2)
    batch = wire.encode_from_target([good, replace(good, session_id="t"), replace(good, session_id="u")])
    getattr(batch.events[0].outcomes, column)[at] = value
    return batch


@pytest.mark.parametrize(
    ("column", "value"), [("session_ids", ""), ("causes", 0), ("causes", 99), ("accepted", 4), ("finish_reasons", 99)]
)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_malformed_row_is_dropped_and_the_others_are_not(column, value, at):
    messages, _, num_dropped = wire.decode_from_target(sent(rows_with(column, at, value)))
    assert [message.session_id for message in messages] == [name for i, name in enumerate("stu") if i != at]
    assert num_dropped == 1


def test_a_draft_cannot_break_the_stream_to_a_target():
    """A router does not look into nodes: it relays what is none, and the target drops that alone."""
    event = draft_pb2.DraftEvent(tree_updates=tree_update("s", 1, 2))
    event.tree_updates.nodes[0] = b"\x22\x05\x01"
    good = Nodes("t", 3, 9, (Node(5, 0, 7, 0.1),))
    batch = sent(wire.encode_from_draft([good]))
    batch.events.insert(0, event)
    relayed, _, num_dropped = wire.decode_from_draft(sent(batch))
    assert (len(relayed), num_dropped) == (2, 0)
    assert wire.unpacked(relayed[0]) is None
    assert wire.decode_to_target(sent(wire.encode_to_target(relayed))) == ([good], 1)


def test_what_a_controller_says_travels_with_the_status():
    status = ReplicaStatus("t", "target", 1, 2, 0, 8, controller="drafting is off: é", measures={"step_seconds:4": 0.5})
    status = replace(status, batch_invariant="no", execution="compiling")
    batch = wire.encode_from_target([], status)
    assert wire.decode_from_target(sent(batch)) == ([], status, 0)


def test_a_status_without_a_name_is_dropped_and_counted():
    batch = target_pb2.FromTarget(status=types_pb2.ReplicaStatus(kind="target"))
    assert wire.decode_from_target(sent(batch)) == ([], None, 1)


any_enum = st.integers(-(2**31), 2**31 - 1)
any_nodes = st.builds(
    tree_update,
    session_id=st.text(max_size=1),
    node_ids=columns,
    parent_ids=columns,
    token_ids=columns,
    probs=st.lists(any_double, max_size=2),
    sampled=st.lists(st.booleans(), max_size=2),
    qs=st.lists(st.builds(sparse, token_ids=st.binary(max_size=9), probs=st.binary(max_size=17)), max_size=2),
    step_s=any_double,
)
any_open = st.builds(
    types_pb2.OpenSession,
    session_id=st.text(max_size=1),
    token_ids=columns,
    num_prompt_tokens=st.integers(0, 3),
    sampling=st.none() | any_sampling,
    speculation=st.none() | any_speculation,
)
any_round = st.builds(types_pb2.SpeculationRound, drafted=uint31, accepted=uint31, cause=any_enum)
any_outcome = st.builds(
    target_pb2.Outcome,
    session_id=st.text(max_size=1),
    token_ids=columns,
    logprobs=st.lists(any_double, max_size=2),
    round=st.none() | any_round,
    finish_reason=any_enum,
)


@given(st.lists(st.builds(target_pb2.TargetCommand, tree_updates=any_nodes), max_size=4))
def test_nodes_never_raise(commands):
    messages, num_dropped = wire.decode_to_target(sent(target_pb2.ToTarget(commands=commands)))
    assert len(messages) + num_dropped == len(commands)
    for message in messages:
        assert isinstance(message, Nodes)
        assert not any(math.isnan(node.prob) for node in message.nodes)
        assert not any(math.isnan(sum(node.q.probs)) for node in message.nodes if node.q)


@given(st.lists(st.builds(draft_pb2.DraftCommand, open_session=any_open), max_size=4))
def test_opens_never_raise(commands):
    messages, num_dropped = wire.decode_to_draft(sent(draft_pb2.ToDraft(commands=commands)))
    assert len(messages) + num_dropped == len(commands)


@given(st.lists(st.builds(target_pb2.TargetEvent, outcome=any_outcome), max_size=4))
def test_outcomes_never_raise(events):
    messages, _, num_dropped = wire.decode_from_target(sent(target_pb2.FromTarget(events=events)))
    assert len(messages) + num_dropped == len(events)


# -- the protocol itself -----------------------------------------------------------------------------------------------


def messages_of(*modules):
    def walk(message: Descriptor):
        yield message
        for nested in message.nested_types:
            yield from walk(nested)

    return [d for module in modules for top in module.DESCRIPTOR.message_types_by_name.values() for d in walk(top)]


@pytest.mark.parametrize("module", [types_pb2, generation_pb2, target_pb2, draft_pb2])
def test_no_field_is_rounded(module):
    rounded = [f.full_name for m in messages_of(module) for f in m.fields if f.type == FieldDescriptor.TYPE_FLOAT]
    assert rounded == []


@pytest.mark.parametrize("message", [types_pb2.SamplingParams, types_pb2.SpeculationOptions])
def test_no_parameter_has_the_default_of_proto3(message):
    assert [f.name for f in message.DESCRIPTOR.fields if not f.is_repeated and not f.has_presence] == []


@pytest.mark.parametrize(
    ("proto", "kind", "elsewhere"),
    [
        (types_pb2.SamplingParams, SamplingParams, {"stop"}),
        (types_pb2.SpeculationOptions, SpeculationParams, {"enabled"}),
    ],
)
def test_every_parameter_can_be_sent(proto, kind, elsewhere):
    assert {f.name for f in proto.DESCRIPTOR.fields} - elsewhere == set(kind.model_fields)


def test_every_fact_of_a_status_is_sent():
    assert {f.name for f in types_pb2.ReplicaStatus.DESCRIPTOR.fields} == {f.name for f in fields(ReplicaStatus)}


def test_values_that_a_float_cannot_hold():
    node = Node(1, 0, 3, 0.1, True, SparseDistribution.of((3, 4), (0.1, 0.9)))
    tree = Nodes("s", 2**64 - 1, 7, (node,), step_s=0.003)
    start = OpenSession("s", 1, (3,), 1, 2**64 - 1, SamplingParams(temperature=0.7, top_p=0.95), SpeculationParams())
    assert wire.decode_to_target(sent(wire.encode_to_target([start, tree]))) == ([start, tree], 0)
