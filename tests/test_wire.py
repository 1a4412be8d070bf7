"""wire.py: what goes in comes out, in every direction; what makes no sense is dropped, or refused with a reason.

Mutants that must fail here: any `double` of the protocol made a `float` (0.1 would come back as 0.10000000149...:
every round trip draws doubles, and `test_no_field_is_rounded` reads the types); a seed cut to 32 or 63 bits; a
column left out, or put in another's place; an absent parameter sent as proto3's zero; a node without q given one.
"""

import math
from dataclasses import fields, replace

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire
from paceline.errors import EngineError, InvalidRequestError
from paceline.router.session import Chunk, Result, Timing, Usage
from paceline.types import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    Cause,
    CloseSession,
    Commit,
    DraftState,
    Echo,
    FinishReason,
    InFlight,
    Mode,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    ReplicaStatus,
    Request,
    Round,
    SamplingParams,
    SessionFailed,
    SparseDistribution,
    SpeculationParams,
    SpeculationStats,
    SpeculationWanted,
    TreeLost,
)
from paceline.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2
from paceline.wire import RelayedNodes

NAN, INF = math.nan, math.inf

# -- values ------------------------------------------------------------------------------------------------------------

ids = st.text(min_size=1, max_size=8)
uint31 = st.integers(0, 2**31 - 1)
uint64 = st.integers(0, 2**64 - 1) | st.sampled_from([2**64 - 1, 2**63, 2**53 + 1])
numbers = st.floats(allow_nan=False)
biases = st.floats(-1e4, 1e4) | st.just(-math.inf)
probs = st.floats(0, 1)
seconds = st.floats(0, 1e9)


def tuples(values, max_size=6):
    return st.lists(values, max_size=max_size).map(tuple)


tokens = tuples(uint31)


@st.composite
def sparse_distributions(draw):
    token_ids = draw(st.lists(uint31, min_size=1, max_size=4, unique=True))
    return SparseDistribution(tuple(token_ids), tuple(draw(probs) for _ in token_ids))


@st.composite
def sampling_params(draw):
    given_values = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "logit_bias": st.dictionaries(uint31, biases, max_size=3),
                "bad_words": tuples(tuples(uint31, 3).filter(bool), 3),
                "min_tokens": st.integers(0, 100),
                "repetition_penalty": st.floats(0, 100, exclude_min=True),
                "presence_penalty": st.floats(-2, 2),
                "frequency_penalty": st.floats(-2, 2),
                "temperature": st.floats(0, 100),
                "top_k": uint31,
                "top_p": st.floats(0, 1, exclude_min=True),
                "min_p": probs,
                "max_tokens": st.integers(100, 2**31 - 1),
                "stop_token_ids": tokens,
                "ignore_eos": st.booleans(),
                "seed": uint64,
            },
        )
    )
    return SamplingParams(**given_values)


speculation_params = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.sampled_from(Mode),
        "acceptance": st.sampled_from(Acceptance),
        "max_draft_tokens": st.integers(0, MAX_DRAFT_TOKENS),
        "growth": st.sampled_from(["best_first", "uniform", "geometric"]),
        "saguaro": st.floats(0, 1, exclude_min=True),
    },
).map(lambda values: SpeculationParams(**values))


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
    )


@st.composite
def rounds(draw):
    drafted = draw(uint31)
    return Round(drafted, draw(st.integers(0, drafted)), draw(st.sampled_from(Cause)))


@st.composite
def outcomes(draw):
    token_ids = draw(tokens)
    logprobs = tuple(draw(numbers) for _ in token_ids)
    reason = draw(st.none() | st.sampled_from(FinishReason))
    return Outcome(draw(ids), draw(uint64), draw(uint31), token_ids, logprobs, draw(rounds()), reason, draw(uint31))


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
    seconds,
)
failures = st.builds(SessionFailed, ids, uint64, st.text(max_size=20))
in_flights = st.builds(InFlight, ids, uint64, uint31, tokens)
commits = st.builds(Commit, ids, uint64, uint31, tokens, tokens)
statuses = st.builds(
    ReplicaStatus,
    replica_id=ids,
    kind=st.sampled_from(["target", "draft", "router"]),
    incarnation=uint64,
    num_sessions=uint31,
    num_waiting=uint31,
    max_sessions=uint31,
    kv_pages_used=uint64,
    kv_pages=uint64,
    busy_s=seconds,
    pid=uint31,
    node=st.text(max_size=8),
    model=st.text(max_size=8),
    draining=st.booleans(),
    counters=st.dictionaries(st.text(max_size=8), numbers, max_size=4),
)

echoes = st.builds(Echo, uint64)
to_target = st.lists(opens() | closes | draft_states | trees | echoes, max_size=6)
from_target = st.lists(
    outcomes()
    | in_flights
    | st.builds(TreeLost, ids, uint64)
    | st.builds(SpeculationWanted, ids, uint64, st.booleans())
    | failures
    | echoes,
    max_size=6,
)
to_draft = st.lists(opens() | closes | commits | echoes, max_size=6)
from_draft = st.lists(trees | failures | echoes, max_size=6)


def sent(message):
    """What arrives when this is sent."""
    return type(message).FromString(message.SerializeToString())


# -- between router and replicas ---------------------------------------------------------------------------------------


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
    assert [c.nodes.SerializeToString() for c in batch.commands] == [n.message.SerializeToString() for n in nodes]
    assert wire.decode_to_target(batch) == (expected, 0)


def test_what_is_not_known_to_a_router_passes_it():
    newer = types_pb2.Nodes.FromString(types_pb2.Nodes(session_id="s").SerializeToString() + b"\xd2\x09\x03abc")
    event = draft_pb2.FromDraft(events=[draft_pb2.DraftEvent(nodes=newer)])
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


def test_empty_columns_are_not_sent():
    proto = wire.encode_to_target([Nodes("s", 0, 5, (Node(1, 0, 4, 0.5), Node(2, 1, 4, 0.5)))]).commands[0].nodes
    assert (len(proto.node_ids), len(proto.sampled), len(proto.qs)) == (2, 0, 0)


def test_a_replica_is_told_every_parameter():
    start = OpenSession("s", 0, (1,), 1, 5, SamplingParams(seed=5), SpeculationParams())
    proto = wire.encode_to_target([start]).commands[0].open_session
    said = {field.name for message in (proto.sampling, proto.speculation) for field, _ in message.ListFields()}
    collections = {"logit_bias", "bad_words", "stop_token_ids"}  # an empty one is the default
    assert said == {*SamplingParams.model_fields, *SpeculationParams.model_fields} - collections


def test_text_that_utf8_cannot_carry_does_not_stop_a_batch():
    batch = sent(wire.encode_from_draft([SessionFailed("s", 0, "no file named \udcff")]))
    assert wire.decode_from_draft(batch)[0] == [SessionFailed("s", 0, "no file named ?")]


def nodes_with(**changes):
    columns = {"node_ids": [1, 2], "parent_ids": [0, 1], "token_ids": [5, 6], "probs": [0.5, 0.25]}
    return target_pb2.TargetCommand(nodes=types_pb2.Nodes(**{"session_id": "s", **columns, **changes}))


def q(token_ids, q_probs):
    return types_pb2.SparseDistribution(token_ids=token_ids, probs=q_probs)


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


MALFORMED_TO_TARGET = {
    "nothing": target_pb2.TargetCommand(),
    "a newer kind": target_pb2.TargetCommand.FromString(b"\xfa\x01\x02\x08\x01"),
    "close without id": target_pb2.TargetCommand(close_session=types_pb2.CloseSession(epoch=3)),
    "draft state without id": target_pb2.TargetCommand(draft_state=target_pb2.DraftState(available=True)),
    "nodes without id": nodes_with(session_id=""),
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
    "q is nan": nodes_with(qs=[q([5], [1.0]), q([5, 6], [1.0, NAN])]),
    "q with too few probs": nodes_with(qs=[q([5], [1.0]), q([5, 6], [1.0])]),
    "q with probs only": nodes_with(qs=[q([5], [1.0]), q([], [1.0])]),
    "step_s is nan": nodes_with(step_s=NAN),
    "step_s is negative": nodes_with(step_s=-1.0),
    "step_s is infinite": nodes_with(step_s=INF),
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
    "open with a temperature that is nan": open_with({"temperature": NAN}),
    "open with max_tokens 0": open_with({"max_tokens": 0}),
    "open with min_tokens above max_tokens": open_with({"max_tokens": 1, "min_tokens": 2}),
    "open with an empty bad word": open_with({"bad_words": [types_pb2.TokenSequence()]}),
    "open with an unknown mode": open_with(speculation={"mode": "fast"}),
    "open with an unknown acceptance": open_with(speculation={"acceptance": "maybe"}),
    "open with an unknown growth": open_with(speculation={"growth": "wild"}),
    "open with too long a lookahead": open_with(speculation={"max_draft_tokens": MAX_DRAFT_TOKENS + 1}),
}

MALFORMED_FROM_TARGET = {
    "nothing": target_pb2.TargetEvent(),
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
}


def test_the_tables_change_what_is_valid():
    commands = [nodes_with(), nodes_with(sampled=[True, False], qs=[q([5], [1.0]), q([], [])]), open_with()]
    assert wire.decode_to_target(target_pb2.ToTarget(commands=commands))[1] == 0
    assert wire.decode_from_target(target_pb2.FromTarget(events=[outcome_with()]))[2] == 0


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
        draft_pb2.DraftEvent(nodes=types_pb2.Nodes(node_ids=[1])),
        draft_pb2.DraftEvent(session_failed=types_pb2.SessionFailed(message="so")),
    ]
    batch = draft_pb2.FromDraft(events=events, status=types_pb2.ReplicaStatus(kind="draft"))
    assert wire.decode_from_draft(sent(batch)) == ([], None, 4)


def test_a_status_without_a_name_is_dropped_and_counted():
    batch = target_pb2.FromTarget(status=types_pb2.ReplicaStatus(kind="target"))
    assert wire.decode_from_target(sent(batch)) == ([], None, 1)


columns = st.lists(uint31, max_size=2)
any_double = st.floats()
any_enum = st.integers(-(2**31), 2**31 - 1)
any_nodes = st.builds(
    types_pb2.Nodes,
    session_id=st.text(max_size=1),
    node_ids=columns,
    parent_ids=columns,
    token_ids=columns,
    probs=st.lists(any_double, max_size=2),
    sampled=st.lists(st.booleans(), max_size=2),
    qs=st.lists(st.builds(q, columns, st.lists(any_double, max_size=2)), max_size=2),
    step_s=any_double,
)
any_sampling = st.builds(
    types_pb2.SamplingParams,
    temperature=any_double,
    top_p=any_double,
    min_tokens=uint31,
    max_tokens=uint31,
    logit_bias=st.dictionaries(uint31, any_double, max_size=1),
    bad_words=st.lists(st.builds(types_pb2.TokenSequence, token_ids=columns), max_size=1),
)
any_speculation = st.builds(
    types_pb2.SpeculationOptions,
    mode=st.text(max_size=2) | st.just("plain"),
    saguaro=any_double,
    max_draft_tokens=uint31,
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


@given(st.lists(st.builds(target_pb2.TargetCommand, nodes=any_nodes), max_size=4))
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
    tree = Nodes("s", 2**64 - 1, 7, (Node(1, 0, 3, 0.1, True, SparseDistribution((3, 4), (0.1, 0.9))),), step_s=0.003)
    start = OpenSession("s", 1, (3,), 1, 2**64 - 1, SamplingParams(temperature=0.7, top_p=0.95), SpeculationParams())
    assert wire.decode_to_target(sent(wire.encode_to_target([start, tree]))) == ([start, tree], 0)


# -- requests ----------------------------------------------------------------------------------------------------------

requests = st.builds(
    Request,
    request_id=ids,
    prompt=st.text(min_size=1, max_size=20) | tokens.filter(bool),
    sampling=sampling_params(),
    speculation=speculation_params,
    stop=tuples(st.text(min_size=1, max_size=5), 3),
)


@given(requests, st.booleans())
def test_request(request_, logprobs):
    proto = sent(wire.request_to_proto(request_, logprobs))
    assert proto.logprobs is logprobs
    assert wire.request_from_proto(proto) == request_


def test_what_a_client_leaves_open_stays_open():
    proto = wire.request_to_proto(Request("r", "Hi", SamplingParams(top_k=0), SpeculationParams()))
    assert [f.name for f, _ in proto.sampling_params.ListFields()] == ["top_k"]  # zero, but said
    assert proto.speculation.ListFields() == []


def test_absent_parameters_take_our_defaults():
    request_ = wire.request_from_proto(generation_pb2.GenerateRequest(text="Hi"))
    assert (request_.prompt, request_.stop) == ("Hi", ())
    assert (request_.sampling, request_.speculation) == (SamplingParams(), SpeculationParams())


def test_zero_is_not_absent():
    params = types_pb2.SamplingParams(top_k=0, seed=0, ignore_eos=False)
    options = types_pb2.SpeculationOptions(max_draft_tokens=0)
    proto = generation_pb2.GenerateRequest(text="Hi", sampling_params=params, speculation=options)
    request_ = wire.request_from_proto(sent(proto))
    assert request_.sampling.seed == 0
    assert request_.speculation.max_draft_tokens == 0


def test_an_absent_id_is_drawn():
    proto = generation_pb2.GenerateRequest(text="Hi")
    drawn = {wire.request_from_proto(proto).request_id for _ in range(3)}
    assert len(drawn) == 3
    assert all(drawn)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, Mode.OVERLAPPED),
        ({"enabled": True}, Mode.OVERLAPPED),
        ({"enabled": True, "mode": "sequential"}, Mode.SEQUENTIAL),
        ({"enabled": False}, Mode.PLAIN),
        ({"enabled": False, "mode": "plain"}, Mode.PLAIN),
        ({"mode": "plain"}, Mode.PLAIN),
    ],
)
def test_enabled(options, mode):
    proto = generation_pb2.GenerateRequest(text="Hi", speculation=types_pb2.SpeculationOptions(**options))
    assert wire.request_from_proto(sent(proto)).speculation.mode is mode


SAMPLING_FAULTS = [
    ({"temperature": -1}, ("sampling_params.temperature is -1.0", "at least 0 and at most 100")),
    ({"temperature": NAN}, ("sampling_params.temperature is nan", "finite")),
    ({"temperature": INF}, ("sampling_params.temperature is inf", "finite")),
    ({"top_p": 0}, ("sampling_params.top_p is 0.0", "more than 0 and at most 1")),
    ({"top_p": NAN}, ("sampling_params.top_p is nan",)),
    ({"min_p": 1.5}, ("sampling_params.min_p is 1.5", "at least 0 and at most 1")),
    ({"repetition_penalty": 0}, ("sampling_params.repetition_penalty is 0.0", "more than 0 and at most 100")),
    ({"presence_penalty": 3}, ("sampling_params.presence_penalty is 3.0", "at least -2 and at most 2")),
    ({"frequency_penalty": -3}, ("sampling_params.frequency_penalty is -3.0", "at least -2 and at most 2")),
    ({"max_tokens": 0}, ("sampling_params.max_tokens is 0", "at least 1")),
    ({"max_tokens": 3, "min_tokens": 5}, ("sampling_params.min_tokens is 5", "at most max_tokens (3)")),
    ({"bad_words": [types_pb2.TokenSequence()]}, ("sampling_params.bad_words", "empty", "at least one token id")),
    ({"logit_bias": {7: NAN}}, ("sampling_params.logit_bias[7] is nan", "at most 10000 either way")),
    ({"stop": ["ok", ""]}, ("sampling_params.stop[1] is ''", "at least one character")),
]
SPECULATION_FAULTS = [
    ({"max_draft_tokens": 17}, ("speculation.max_draft_tokens is 17", "at least 0 and at most 16")),
    ({"mode": "fast"}, ("speculation.mode is 'fast'", "'plain', 'sequential' or 'overlapped'")),
    ({"mode": ""}, ("speculation.mode is ''", "'plain', 'sequential' or 'overlapped'")),
    ({"acceptance": "maybe"}, ("speculation.acceptance is 'maybe'", "'coupled' or 'rejection'")),
    ({"growth": "wild"}, ("speculation.growth is 'wild'", "'best_first', 'uniform' or 'geometric'")),
    ({"saguaro": 0}, ("speculation.saguaro is 0.0", "more than 0 and at most 1")),
    ({"enabled": True, "mode": "plain"}, ("speculation.enabled is true", "speculation.mode is 'plain'")),
    ({"enabled": False, "mode": "overlapped"}, ("speculation.enabled is false", "mode is 'overlapped'")),
    ({"enabled": False, "mode": "fast"}, ("speculation.enabled is false", "mode is 'fast'", "'plain' or absent")),
]
FAULTS = [
    *(({"text": "Hi", "sampling_params": types_pb2.SamplingParams(**f)}, parts) for f, parts in SAMPLING_FAULTS),
    *(({"text": "Hi", "speculation": types_pb2.SpeculationOptions(**f)}, parts) for f, parts in SPECULATION_FAULTS),
    ({}, ("no input", "text or tokenized")),
    ({"text": ""}, ("text is empty", "at least one character")),
    ({"tokenized": generation_pb2.TokenizedInput()}, ("tokenized.input_ids is empty", "at least one token id")),
    ({"text": "Hi", "request_id": "r" * 257}, ("request_id has 257 characters", "at most 256")),
]


@pytest.mark.parametrize(("values", "parts"), FAULTS, ids=[parts[0] for _, parts in FAULTS])
def test_what_is_wrong_with_a_request(values, parts):
    with pytest.raises(InvalidRequestError) as caught:
        wire.request_from_proto(sent(generation_pb2.GenerateRequest(**values)))
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "\n" not in text
    assert "Input should" not in text


@given(any_sampling, any_speculation, st.text(max_size=2))
def test_a_request_is_served_or_refused(params, options, text):
    proto = generation_pb2.GenerateRequest(text=text, sampling_params=params, speculation=options)
    refusal = None
    try:
        wire.request_from_proto(sent(proto))
    except InvalidRequestError as error:
        refusal = str(error)
    assert refusal is None or refusal.startswith(("sampling_params.", "speculation.", "text "))


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (Request("r", (1, 2**32)), ("tokenized.input_ids", "4294967296", "at most 4294967295")),
        (Request("r", (1, -1)), ("tokenized.input_ids", "-1", "at least 0")),
        (Request("r", "a\ud800"), ("text", "\\ud800", "at 1")),
        (Request("r\ud800", "a"), ("request_id", "\\ud800")),
        (Request("r", "a", stop=("\ud800",)), ("sampling_params.stop", "\\ud800")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_be_sent(request_, parts):
    with pytest.raises(InvalidRequestError) as caught:
        wire.request_to_proto(request_)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_the_server_refuses_an_empty_prompt_of_a_client():
    for prompt in ("", ()):
        with pytest.raises(InvalidRequestError, match="is empty"):
            wire.request_from_proto(sent(wire.request_to_proto(Request("r", prompt))))


# -- responses ---------------------------------------------------------------------------------------------------------


@st.composite
def chunks(draw):
    token_ids = draw(tokens)
    return Chunk(
        token_ids,
        tuple(draw(numbers) for _ in token_ids),
        tuple(draw(st.booleans()) for _ in token_ids),
        draw(tuples(st.tuples(st.text(max_size=5), st.booleans()), 3)),
        draw(st.none() | rounds()),
    )


small = st.integers(1, 2**16)
stats = st.builds(
    SpeculationStats,
    uint31,
    uint31,
    uint31,
    st.dictionaries(st.sampled_from(Cause), small),
    st.dictionaries(st.integers(0, MAX_DRAFT_TOKENS), small),
)
results = st.builds(
    Result,
    text=st.just(""),
    token_ids=st.just(()),
    logprobs=st.just(()),
    finish_reason=st.sampled_from(FinishReason),
    usage=st.builds(Usage, uint31, uint31, uint31),
    speculation=stats,
    timing=st.builds(Timing, prefill_s=seconds, decode_s=seconds, tokens_per_s=seconds, queue_s=seconds),
    seed=uint64,
    matched_stop=st.none() | uint31 | st.text(max_size=5),
)


@given(chunks(), uint31, uint31, uint31, st.booleans())
def test_chunk(chunk, prompt_tokens, completion_tokens, cached_tokens, logprobs):
    proto = sent(
        wire.chunk_to_proto(
            chunk,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            logprobs=logprobs,
        )
    )
    assert wire.chunk_from_proto(proto) == (chunk if logprobs else replace(chunk, logprobs=()))
    assert proto.text == chunk.text
    counts = (proto.prompt_tokens, proto.completion_tokens, proto.cached_tokens)
    assert counts == (prompt_tokens, completion_tokens, cached_tokens)


@given(results, st.lists(chunks(), max_size=3))
def test_result(result, parts):
    result = replace(
        result,
        text="".join(chunk.text for chunk in parts),
        token_ids=sum((chunk.token_ids for chunk in parts), ()),
        logprobs=sum((chunk.logprobs for chunk in parts), ()),
    )
    proto = sent(wire.complete_to_proto(result))
    assert wire.complete_from_proto(proto, parts) == result
    assert (proto.spec_accepted_tokens, proto.spec_draft_tokens) == (
        result.speculation.accepted,
        result.speculation.drafted,
    )
    assert (proto.speculation.hits, proto.speculation.misses) == (result.speculation.hits, result.speculation.misses)


def test_the_words_of_a_complete():
    stats_ = SpeculationStats()
    for round_ in (Round(0, 0, Cause.START), Round(4, 3, Cause.HIT), Round(0, 0, Cause.TOKEN), Round(4, 3, Cause.HIT)):
        stats_.add(round_)
    result = Result("", (), (), FinishReason.STOP, Usage(5, 10), stats_, Timing(0.1, 0.2, 45.0), 7, matched_stop="END")
    proto = wire.complete_to_proto(result)
    assert (proto.finish_reason, proto.WhichOneof("matched_stop"), proto.matched_stop_str) == (
        "stop",
        "matched_stop_str",
        "END",
    )
    assert dict(proto.speculation.causes) == {"start": 1, "hit": 2, "token": 1}
    assert list(proto.speculation.acceptance_histogram) == [0, 0, 0, 2]
    assert wire.complete_to_proto(replace(result, matched_stop=0)).WhichOneof("matched_stop") == "matched_token_id"
    assert wire.complete_to_proto(replace(result, matched_stop=None)).WhichOneof("matched_stop") is None


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"round": types_pb2.SpeculationRound(cause=99)}, ("cause 99",)),
        ({"round": types_pb2.SpeculationRound()}, ("cause 0",)),
        ({"round": types_pb2.SpeculationRound(accepted=2, drafted=1, cause=1)}, ("2 of 1",)),
        ({"token_ids": [1, 2], "drafted": [True]}, ("2 tokens with 1 flags",)),
        ({"token_ids": [1], "drafted": [True], "output_logprobs": [-1.0, -2.0]}, ("2 log probabilities",)),
    ],
)
def test_a_chunk_that_makes_no_sense(changes, parts):
    with pytest.raises(EngineError) as caught:
        wire.chunk_from_proto(generation_pb2.GenerateStreamChunk(**changes))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_complete_that_makes_no_sense():
    with pytest.raises(EngineError, match="'bored'"):
        wire.complete_from_proto(generation_pb2.GenerateComplete(finish_reason="bored"), [])
    stats_ = generation_pb2.SpeculationStats(causes={"luck": 1})
    with pytest.raises(EngineError, match="'luck'"):
        wire.complete_from_proto(generation_pb2.GenerateComplete(finish_reason="stop", speculation=stats_), [])


@given(statuses, stats)
def test_server_info(status, speculation):
    proto = sent(
        wire.server_info(
            version="1.2",
            uptime_s=0.1,
            pools={"target": [status, status], "draft": []},
            sessions_running=3,
            sessions_queued=4,
            speculation=speculation,
        )
    )
    assert [(pool.name, len(pool.replicas)) for pool in proto.pools] == [("target", 2), ("draft", 0)]
    assert wire.status_from_proto(proto.pools[0].replicas[1]) == status
    assert (proto.version, proto.uptime_s, proto.sessions_running, proto.sessions_queued) == ("1.2", 0.1, 3, 4)


def test_rates_are_defined_once():
    speculation = SpeculationStats(rounds=8, drafted=12, accepted=6, causes={Cause.HIT: 3, Cause.K: 1, Cause.START: 1})
    common = {"version": "1", "uptime_s": 0.0, "pools": {}, "sessions_running": 0, "sessions_queued": 0}
    proto = wire.server_info(**common, speculation=speculation)
    assert (proto.acceptance_rate, proto.acceptance_length, proto.hit_rate) == (0.5, 1.75, 0.75)
    nothing = wire.server_info(**common, speculation=SpeculationStats())
    assert (nothing.acceptance_rate, nothing.acceptance_length, nothing.hit_rate) == (0.0, 0.0, 0.0)


def test_model_info():
    proto = sent(
        wire.model_info(
            model_id="big",
            draft_model_id=None,
            tokenizer_fingerprint="f00",
            vocab_size=300,
            max_context_length=2048,
            eos_token_ids=(7, 8),
            dtype="float32",
            max_draft_tokens=MAX_DRAFT_TOKENS,
        )
    )
    assert (proto.model_id, proto.draft_model_id, list(proto.eos_token_ids)) == ("big", "", [7, 8])
    assert list(proto.modes) == ["plain", "sequential", "overlapped"]
    assert list(proto.acceptances) == ["coupled", "rejection"]
