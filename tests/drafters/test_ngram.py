"""The n-gram index equals a scan of the text."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.processors import SamplerState
from paceline.drafters import ngram
from paceline.drafters.ngram import NgramDrafter, NgramIndex
from paceline.drafters.protocol import DrafterSessionError, Leaf
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


@given(tokens, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_equals_a_scan(text: list[int], path: list[int], lo: int, more: int, m: int) -> None:
    index = NgramIndex([], lo, lo + more, counts=True)
    last = NgramIndex(index.tokens, lo, lo + more, counts=False)
    for i, token in enumerate(text):
        index.tokens.append(token)
        index.extend(1)
        last.extend(9)
        for n in range(lo, lo + more + 1):
            ngram = tuple(text[max(0, i + 1 - n) : i + 1])
            followed = [j for j in range(n, i + 1) if tuple(text[j - n : j]) == ngram]
            assert last.last_follower(ngram) == max(followed, default=-1)
        if i % 7 == 0 or i == len(text) - 1:
            assert index.candidates(path, m) == scan(text[: i + 1], path, lo, lo + more, m)


def sampler(text: list[int]) -> SamplerState:
    return SamplerState(SamplingParams(), 0, text, vocab_size=50)


def test_drafter_prefills_in_chunks_and_follows_commits() -> None:
    drafter = NgramDrafter(min_match=1, max_match=3, num_candidates=2, max_leaves=4)
    text = [i % 5 for i in range(10_000)]
    drafter.open("s", text, sampler(text))
    assert not drafter.ready("s")
    assert drafter.prefill()
    drafter.advance("s", [0, 1], [1, 2], [])  # a commit that overtakes the prefill
    while drafter.prefill():
        drafter.check_integrity()
    assert drafter.ready("s")
    drafter.advance("s", [7, 7, 9, 7, 7], [3, 4, 5, 6, 7], [])
    leaves = [Leaf("s", 7, (), ()), Leaf("s", 8, (8,), (3,)), Leaf("s", 9, (9,), (42,))]
    candidates = drafter.expand(leaves)
    assert candidates.token_ids.tolist()[0][0] == 9
    assert candidates.token_ids.tolist()[1][0] == 4
    torch.testing.assert_close(candidates.log_q[:2].exp(), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert candidates.log_q[2].exp().tolist() == [0.0, 0.0]
    drafter.close("s")
    drafter.close("s")
    drafter.check_integrity()
    with pytest.raises(DrafterSessionError):
        drafter.expand(leaves)


def _a_token_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What followed the token before the last one of a path."""
    candidates = NgramIndex.candidates
    monkeypatch.setattr(NgramIndex, "candidates", lambda self, path, m: candidates(self, path[:-1], m))


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed tokens are never indexed."""
    monkeypatch.setattr(NgramDrafter, "advance", lambda self, session_id, token_ids, node_ids, kept: None)


@pytest.mark.parametrize("mutant", [_a_token_behind, _stale], ids=lambda m: m.__name__.strip("_"))
def test_mutants_are_caught(mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_drafter_prefills_in_chunks_and_follows_commits()


def test_the_wrong_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes the followers that came least often."""
    index = NgramIndex([5, 1, 5, 1, 5, 2, 5], 1, 3, counts=True)
    index.extend(9)
    assert index.candidates([], 2) == scan(index.tokens, [], 1, 3, 2) == ([1, 2], [2 / 3, 1 / 3])
    monkeypatch.setattr(ngram.heapq, "nlargest", heapq.nsmallest)
    assert index.candidates([], 2) != scan(index.tokens, [], 1, 3, 2)


@pytest.mark.parametrize(("lo", "hi"), [(0, 3), (3, 2)])
def test_refuses_impossible_lengths(lo: int, hi: int) -> None:
    with pytest.raises(ValueError, match="allowed"):
        NgramDrafter(min_match=lo, max_match=hi)
