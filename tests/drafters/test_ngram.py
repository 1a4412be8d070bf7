"""N-grams by the suffix automaton equal a scan of the text."""

import heapq
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.processors import SamplerState
from paceline.drafters import suffix
from paceline.drafters.suffix import SuffixAutomaton, SuffixDrafter, ngram_drafter
from paceline.types import SamplingParams

tokens = st.lists(st.integers(0, 2), max_size=40)


def scan(text: list[int], path: list[int], lo: int, hi: int, m: int) -> tuple[list[int], list[float]]:
    """The obvious way: look through the whole text for the longest n-gram, shorter ones if there is none."""
    for n in range(hi, lo - 1, -1):
        tail = (text + path)[-n:]
        if len(tail) < n:
            continue
        ends = [i for i in range(n, len(text)) if text[i - n : i] == tail]
        if ends:
            counts = Counter(text[i] for i in ends)
            last = {text[i]: i for i in ends}
            best = sorted(counts, key=lambda t: (-counts[t], -last[t]))[:m]
            return best, [counts[t] / len(ends) for t in best]
    return [], []


def candidates(drafter: SuffixDrafter, path: list[int]) -> tuple[list[int], list[float]]:
    """Those of the only session."""
    found = drafter.candidates_of(drafter.sessions["s"], path)
    return [token for token, _ in found], [prob for _, prob in found]


@given(tokens, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_equals_a_scan(text: list[int], path: list[int], lo: int, more: int, m: int) -> None:
    drafter = ngram_drafter(min_match=lo, max_match=lo + more, num_candidates=m)
    drafter.open("s", [], sampler([]))
    while drafter.prefill():
        pass
    for i, token in enumerate(text):
        drafter.advance("s", [token], [i + 1], [])
        if i % 7 == 0 or i == len(text) - 1:
            assert candidates(drafter, path) == scan(text[: i + 1], path, lo, lo + more, m)


def sampler(text: list[int]) -> SamplerState:
    return SamplerState(SamplingParams(), 0, text, vocab_size=50)


def test_the_wrong_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes the followers that came least often."""
    text = [5, 1, 5, 1, 5, 2, 5]
    drafter = ngram_drafter(max_match=3, num_candidates=2)
    drafter.open("s", text, sampler(text))
    drafter.prefill()
    assert candidates(drafter, []) == scan(text, [], 1, 3, 2) == ([1, 2], [2 / 3, 1 / 3])
    monkeypatch.setattr(suffix.heapq, "nlargest", heapq.nsmallest)
    assert candidates(drafter, []) != scan(text, [], 1, 3, 2)


def test_the_oldest_of_equals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant forgets when a token last followed."""
    text = [5, 1, 5, 2, 5]

    def first() -> int:
        drafter = ngram_drafter()
        drafter.open("s", text, sampler(text))
        drafter.prefill()
        return candidates(drafter, [])[0][0]

    assert first() == 2
    followers = SuffixAutomaton.followers
    forgetful = lambda self, state: {token: (count, 0) for token, (count, _) in followers(self, state).items()}  # noqa: E731
    monkeypatch.setattr(SuffixAutomaton, "followers", forgetful)
    assert first() == 1


@pytest.mark.parametrize(("lo", "hi"), [(0, 3), (3, 2)])
def test_refuses_impossible_lengths(lo: int, hi: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ngram_drafter(min_match=lo, max_match=hi)
