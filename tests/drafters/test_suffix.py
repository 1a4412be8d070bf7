"""The suffix automaton equals a scan of its texts; what is shared stays within its salt."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.processors import SamplerState
from paceline.drafters.protocol import Leaf
from paceline.drafters.suffix import Cursor, SharedTexts, SuffixAutomaton, SuffixDrafter
from paceline.types import SamplingParams

texts = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=4)


def scan(texts, tail, depth):
    """The obvious way: the longest end of ``tail`` that some text holds before another token, and what followed."""
    for n in range(min(depth, len(tail)), 0, -1):
        end = tail[-n:]
        found = Counter(text[i] for text in texts for i in range(n, len(text)) if text[i - n : i] == end)
        if found:
            return n, dict(found)
    return 0, dict(Counter(token for text in texts for token in text))


def counts(automaton, state):
    return {token: count for token, (count, _) in automaton.followers(state).items()}


@given(texts, st.lists(st.integers(0, 2), max_size=12), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_equals_a_scan_while_texts_grow_side_by_side(whole, tail, depth, random) -> None:
    automaton, cursors, grown = SuffixAutomaton(depth), [Cursor() for _ in whole], [[] for _ in whole]
    while left := [i for i, text in enumerate(whole) if len(grown[i]) < len(text)]:
        i = random.choice(left)
        token = whole[i][len(grown[i])]
        automaton.append(cursors[i], token)
        grown[i].append(token)
        state, length = automaton.match(tail)
        assert (length, counts(automaton, state)) == scan(grown, tail, depth)
        automaton.check_integrity()


def test_a_text_of_one_token_takes_linear_time() -> None:
    automaton, cursor = SuffixAutomaton(4), Cursor()
    for _ in range(20_000):  # every state is the link of the next one: a walk to the root would take 2e8 steps
        automaton.append(cursor, 7)
    state, length = automaton.match([7] * 9)
    assert (length, automaton.followers(state)) == (4, {7: (20_000 - 4, 20_000)})


def sampler(text, num_prompt=None):
    n = len(text) if num_prompt is None else num_prompt
    return SamplerState(SamplingParams(), 0, text[:n], text[n:], vocab_size=100)


def opened(drafter, name, text, num_prompt=None, salt=""):
    drafter.open(name, text, sampler(text, num_prompt), salt)
    while not drafter.ready(name):
        assert drafter.prefill()
        drafter.check_integrity()


def best(drafter, name, path=()):
    candidates = drafter.expand([Leaf(name, 1 if path else 0, tuple(range(len(path))), tuple(path))])
    row = zip(candidates.token_ids[0].tolist(), candidates.log_q[0].exp().tolist(), strict=True)
    return {token: round(prob, 6) for token, prob in row if prob > 0}


def test_a_session_follows_its_own_text() -> None:
    drafter = SuffixDrafter(max_tree_depth=3, min_token_prob=0.3, max_spec_factor=2.0)
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 4, 7, 2, 3]
    opened(drafter, "s", text)
    assert best(drafter, "s") == {4: 0.5, 5: 0.5}  # after 2 3; 3 alone was followed by 4 twice
    assert best(drafter, "s", [4]) == {9: 1.0}
    assert best(drafter, "s", [4, 9, 2]) == {3: 1.0}
    assert best(drafter, "s", [42]) == {}
    drafter.advance("s", [5], [1], [])
    assert best(drafter, "s") == {8: 1.0}


def test_a_match_that_ends_a_token_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    match = SuffixAutomaton.match
    monkeypatch.setattr(SuffixAutomaton, "match", lambda self, token_ids: match(self, token_ids[:-1]))
    with pytest.raises(AssertionError):
        test_a_session_follows_its_own_text()


def test_limits_of_a_proposal() -> None:
    """``min_match``, ``max_spec_factor`` and ``min_token_prob`` cut what is proposed."""
    text = [*range(20), 50, 18, 19]
    for factor, most in [(1.0, 2), (2.0, 4)]:
        drafter = SuffixDrafter(max_spec_factor=factor)
        opened(drafter, "s", [*range(40), 50, 18, 19])
        path = []
        while found := best(drafter, "s", path):
            path += found
        assert path == list(range(20, 20 + most))  # two tokens match
    drafter = SuffixDrafter(min_match=3)
    opened(drafter, "s", text)
    assert best(drafter, "s") == {}
    drafter = SuffixDrafter(min_token_prob=0.26)
    opened(drafter, "s", [1, 2, 1, 2, 1, 2, 1, 3, 1])
    assert best(drafter, "s") == {2: 0.75}


def test_outputs_are_shared_within_a_salt_and_prompts_never() -> None:
    drafter = SuffixDrafter(shared_tokens=1000)
    opened(drafter, "a", [60, 61, 62, 1, 2], num_prompt=3, salt="x")
    drafter.advance("a", [3, 4], [1, 2], [])
    opened(drafter, "other", [70, 1, 2], salt="y")
    opened(drafter, "same", [70, 1, 2], salt="x")
    opened(drafter, "prompt", [70, 60], salt="x")
    assert best(drafter, "other") == {}
    assert best(drafter, "same") == {3: 1.0}
    assert best(drafter, "prompt") == {}
    drafter.close("a")
    assert best(drafter, "same") == {3: 1.0}, "an output outlives its session"


def test_nothing_is_shared_unless_asked_for() -> None:
    drafter = SuffixDrafter()
    opened(drafter, "a", [60, 1, 2, 3], num_prompt=1)
    opened(drafter, "b", [70, 1])
    assert best(drafter, "b") == {}


def test_a_corpus_serves_every_salt() -> None:
    drafter = SuffixDrafter(corpus=[[1, 2, 3], [1, 2, 4, 5]])
    opened(drafter, "s", [9, 1, 2], salt="z")
    assert best(drafter, "s") == {3: 0.5, 4: 0.5}
    opened(drafter, "t", [9, 4], salt="")
    assert best(drafter, "t") == {5: 1.0}


def test_shared_texts_are_bounded() -> None:
    """All salts together hold what they may; the salt used last goes last."""
    shared = SharedTexts(4000, 4)
    cursors = {}
    for i in range(30_000):
        salt = "often" if i % 3 else f"salt {i // 300}"
        part = shared.newest(salt)
        if cursors.get(salt, (None,))[0] is not part:
            cursors[salt] = part, Cursor()
        part.append(cursors[salt][1], i % 50)
        assert shared.num_tokens <= 4000 + 1000, "a part may be filled beyond"
    assert shared.of("often")
    assert not shared.of("salt 0")
    assert shared.of("salt 99")
    assert not SharedTexts(0, 4).of("")
    assert SharedTexts(0, 4).newest("") is None


def test_rows_without_a_match_are_empty() -> None:
    drafter = SuffixDrafter()
    opened(drafter, "s", [1, 2, 1])
    candidates = drafter.expand([Leaf("s", 0, (), ()), Leaf("s", 1, (1,), (44,))])
    assert candidates.token_ids.shape == candidates.log_q.shape == (2, 8)
    assert torch.isinf(candidates.log_q[1]).all()


def test_a_chunk_of_prefill_serves_several_sessions() -> None:
    """A long prompt takes several chunks, and short ones that wait behind it share the rest of the last one."""
    drafter = SuffixDrafter()
    for name, length in (("long", 2500), ("b", 10), ("c", 20)):
        text = [i % 90 for i in range(length)]
        drafter.open(name, text, sampler(text))
    num_chunks = 0
    while not drafter.ready("long"):
        assert drafter.prefill()
        drafter.check_integrity()
        num_chunks += 1
    assert num_chunks == 3
    assert drafter.ready("b")
    assert drafter.ready("c")
    assert not drafter.prefill()
