"""What the tests of both protocols draw and send."""

import math

from hypothesis import strategies as st

from paceline.types import (
    MAX_DRAFT_TOKENS,
    Acceptance,
    Cause,
    Mode,
    ReplicaStatus,
    Round,
    SamplingParams,
    SpeculationParams,
)
from paceline.v1 import types_pb2

NAN, INF = math.nan, math.inf

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
def sampling_params(draw):
    given_values = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "allowed_token_ids": tokens.filter(bool),
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
                "logprob_token_ids": tokens,
                "include_stop_str_in_output": st.booleans(),
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
        "saguaro": st.floats(0, 1, exclude_min=True),
    },
).map(lambda values: SpeculationParams(**values))


@st.composite
def rounds(draw):
    drafted = draw(uint31)
    accepted = draw(st.integers(0, drafted))
    head_drafted = draw(st.integers(0, drafted))
    lookup_drafted = draw(st.integers(0, drafted - head_drafted))
    head_accepted = draw(st.integers(0, min(head_drafted, accepted)))
    lookup_accepted = draw(st.integers(0, min(lookup_drafted, accepted - head_accepted)))
    cause = draw(st.sampled_from(Cause))
    return Round(drafted, accepted, cause, lookup_drafted, lookup_accepted, head_drafted, head_accepted)


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
    version=st.text(max_size=8),
    protocol=st.integers(1, 2**32 - 1),
)


def sent(message):
    """What arrives when this is sent."""
    return type(message).FromString(message.SerializeToString())


def tree_update(session_id, epoch=0, context_len=0, **columns):
    """Nodes of one session as a draft sends them."""
    packed = types_pb2.Nodes(**columns).SerializeToString()
    return types_pb2.TreeUpdates(session_ids=[session_id], epochs=[epoch], context_lens=[context_len], nodes=[packed])


columns = st.lists(uint31, max_size=2)
any_double = st.floats()
any_sampling = st.builds(
    types_pb2.SamplingParams,
    temperature=any_double,
    top_p=any_double,
    min_tokens=uint31,
    max_tokens=uint31,
    allowed_token_ids=columns,
    logprob_token_ids=columns,
    logit_bias=st.dictionaries(uint31, any_double, max_size=1),
    bad_words=st.lists(st.builds(types_pb2.TokenSequence, token_ids=columns), max_size=1),
)
any_speculation = st.builds(
    types_pb2.SpeculationOptions,
    mode=st.text(max_size=2) | st.just("plain"),
    saguaro=any_double,
    max_draft_tokens=uint31,
)
