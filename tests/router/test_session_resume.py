"""A session that continues a broken stream from its tokens: the text, the end and the totals of one stream."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.router.sessions import PROMPT, decode, outcome

from paceline.errors import InvalidRequestError
from paceline.messages import OpenSession
from paceline.router.session import Session
from paceline.types import FinishReason, SamplingParams, SpeculationParams

EOS = 0


def session_of(generated=(), stop=(), **sampling):
    params = SamplingParams(**{"max_tokens": 32, "seed": 5, **sampling})
    return Session(
        "s", PROMPT, params, SpeculationParams(), decode=decode, stop=stop, eos_token_ids=(EOS,),
        generated_token_ids=generated, clock=lambda: 0.0,
    )  # fmt: skip


def play(session, tokens, sizes):
    """Has the target emit ``tokens`` in outcomes of these sizes; returns the chunks."""
    chunks, left, sizes = [], list(tokens), list(sizes)
    session.open()
    while left and not session.finished:
        now, left = left[: (size := sizes.pop() if sizes else 1)], left[size:]
        finish = None if left else FinishReason.STOP if now[-1] == EOS else FinishReason.LENGTH
        session.on_target(outcome(session, now, len(now) - 1, finish))
        chunks += session.digest().chunks
    return chunks


def delivered(chunks):
    return tuple(t for chunk in chunks for t in chunk.token_ids), "".join(chunk.text for chunk in chunks)


def break_and_resume(tokens, stop, sizes, cut, mistake=0):
    """What a client has of a stream that was resumed after ``cut`` chunks, and of one that did not break."""
    one = session_of(stop=stop, max_tokens=len(tokens))
    chunks = play(one, tokens, sizes)
    received = chunks[: cut % (len(chunks) + 1)]
    known = delivered(received)[0]
    again = session_of(known[: len(known) - mistake], stop, max_tokens=len(tokens))
    rest = [] if again.finished else play(again, tokens[len(known) - mistake :], sizes[::-1])
    ends = [(r.finish_reason, r.matched_stop, r.usage, r.seed) for r in (again.result, one.result)]
    return (*delivered(received + rest), ends[0]), (*delivered(chunks), ends[1])


TEXTS = st.builds(
    lambda text, ends: [*text.encode(), *([EOS] if ends else [])],
    st.text(alphabet="abcé中🙂", min_size=1, max_size=30),
    st.booleans(),
)
STOPS = st.lists(st.text(alphabet="abcé中🙂", min_size=1, max_size=4), max_size=3).map(tuple)


@given(TEXTS, STOPS, st.lists(st.integers(1, 6), max_size=20), st.integers(0, 60))
@example(list(b"abab"), ("babb",), [2, 2], 1)  # the beginning of a stop string was withheld
@example(list("🙂".encode()), (), [2, 2], 1)  # half a character was
@example(list(b"abc"), ("c",), [3], 1)  # nothing but the end is missing
def test_a_resumed_stream_is_the_unbroken_one(tokens, stop, sizes, cut):
    resumed, unbroken = break_and_resume(tokens, stop, sizes, cut)
    assert resumed == unbroken


def test_a_resume_that_is_off_by_one_would_be_noticed():
    resumed, unbroken = break_and_resume(list(b"abcdef"), (), [1] * 6, 3, mistake=1)
    assert resumed != unbroken


def test_the_engines_are_opened_with_prompt_and_output_apart():
    session = session_of((65, 66), temperature=1.0, presence_penalty=0.5, min_tokens=4)
    (target,) = [m for m in session.open().to_target if isinstance(m, OpenSession)]
    assert (target.token_ids, target.num_prompt_tokens) == ((*PROMPT, 65, 66), len(PROMPT))
    assert target.seed == session_of(temperature=1.0).noise_key, "the key of the unbroken stream"
    assert target.sampling == session.sampling
    assert target.epoch == 2, "draft noise of the broken stream would be drawn again"
    session.on_target(outcome(session, [67], 0))
    session.reopen_target()
    assert session.target_epoch == 3


def test_the_tokens_that_were_cached_are_at_most_the_prompt():
    session = session_of((65, 66))
    session.open()
    session.on_target(replace(outcome(session, [67]), cached_tokens=5))
    assert session.digest().chunks[0].usage.cached_tokens == len(PROMPT)


@pytest.mark.parametrize(
    ("generated", "options", "message"),
    [
        ((65, 66, 67), {"max_tokens": 2}, r"^generated_token_ids has 3 tokens: at most max_tokens \(2\) are allowed$"),
        ((65, EOS, 66), {}, "has 3 tokens, and the output ends with the first 2: nothing may follow its end"),
        ((65, 66), {"stop_token_ids": (65,)}, "ends with the first 1"),
        ((65, 66, 67), {"stop": ("AB",)}, "ends with the first 2"),
    ],
)
def test_what_no_session_can_have_generated_is_refused(generated, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        session_of(generated, **options)


@pytest.mark.parametrize(
    ("generated", "options", "reason", "matched"),
    [
        ((65, 66), {"max_tokens": 2}, FinishReason.LENGTH, None),
        ((65, EOS), {"max_tokens": 2}, FinishReason.STOP, EOS),
        ((65, 66), {"stop": ("B",)}, FinishReason.STOP, "B"),
    ],
)
def test_a_stream_that_lacks_nothing_but_its_end_gets_that_without_an_engine(generated, options, reason, matched):
    result = session_of(generated, **options).result
    assert (result.finish_reason, result.matched_stop, result.token_ids) == (reason, matched, ())
    assert result.usage.completion_tokens == 2


def test_an_end_of_sequence_that_is_ignored_is_a_token_as_any_other():
    assert session_of((65, EOS, 66), ignore_eos=True).result is None
