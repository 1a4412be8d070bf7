"""Pages and prefixes: ownership under random use, eviction order, hash chains."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache, LayerSpec, flat_rows, page_hash
from paceline.types import PAGE_SIZE, pages_for

NUM_PAGES = 6


def make(num_pages: int = NUM_PAGES) -> KVCache:
    return KVCache([LayerSpec(1, 2, 2)], num_pages, torch.float32, "cpu")


def text(page_ids: list[int]) -> list[int]:
    """Tokens whose i-th page is decided by page_ids[i]."""
    return [page_id for page_id in page_ids for _ in range(PAGE_SIZE)]


def hashes(token_ids: list[int]) -> list[bytes]:
    out: list[bytes] = []
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        out.append(page_hash(out[-1] if out else b"", token_ids[start : start + PAGE_SIZE]))
    return out


_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


@given(st.lists(st.tuples(_TEXTS, st.booleans(), st.integers(0, 3)), max_size=40))
def test_random_use_keeps_the_invariants(operations: list[tuple[list[int], bool, int]]) -> None:
    """Open with prefix sharing, publish all or none, close some session: nothing leaks, sharing is by content."""
    cache = make()
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # what each page was last written with
    for page_ids, publish, closes in operations:
        tokens = [*text(page_ids), 9]
        chain = hashes(tokens)
        available = cache.num_available
        pages, matched = cache.match_prefix(tokens)
        assert matched == chain[: len(matched)]
        assert [content[p] for p in pages] == matched, "a shared page holds other tokens"
        cache.check_integrity([*held, pages])
        missing = pages_for(len(tokens)) - len(pages)
        if missing > cache.num_available:
            with pytest.raises(ResourceExhaustedError, match=f"{missing} KV pages"):
                cache.allocate(missing)
            cache.release(pages)
            assert cache.num_available == available
        else:
            pages = pages + cache.allocate(missing)
            assert len(set(pages)) == len(pages)
            for page, digest in list(zip(pages, chain, strict=False))[len(matched) :]:
                content[page] = digest
                if publish:
                    cache.publish(page, digest)
            held.append(pages)
        cache.check_integrity(held)
        for _ in range(min(closes, len(held))):
            cache.release(held.pop(0))
            cache.check_integrity(held)
        assert cache.num_used == len({p for pages in held for p in pages})
    for pages in held:
        cache.release(pages)
    assert cache.num_used == 0
    assert len(cache.allocate(NUM_PAGES)) == NUM_PAGES, "every page can be had again"


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    """Two cached texts: the one released first goes, its last page before its first."""
    cache = make(4)
    first, second = text([1, 2]), text([3, 4])
    for tokens in (first, second):
        pages = cache.allocate(2)
        for page, digest in zip(pages, hashes(tokens), strict=True):
            cache.publish(page, digest)
        cache.release(pages)
    found = []
    for _ in range(4):
        matches = []
        for tokens in (first, second):
            pages, _ = cache.match_prefix([*tokens, 0])
            matches.append(len(pages))
        # put both back without changing their order: first, then second
        cache._cached.clear()
        for tokens in (first, second):
            cache.release(_still(cache, tokens))
        found.append(tuple(matches))
        cache.allocate(1)
    assert found == [(2, 2), (1, 2), (0, 2), (0, 1)]


def _still(cache: KVCache, tokens: list[int]) -> list[int]:
    return [cache._page_of[h] for h in hashes(tokens) if h in cache._page_of]


def test_a_match_leaves_a_token_to_compute() -> None:
    """The last token's logits are always wanted: a text of whole pages matches all pages but its last."""
    cache = make()
    tokens = text([1, 2])
    pages = cache.allocate(2)
    for page, digest in zip(pages, hashes(tokens), strict=True):
        cache.publish(page, digest)
    assert cache.match_prefix(tokens)[0] == pages[:1]
    assert cache.match_prefix([*tokens, 5])[0] == pages
    assert cache.match_prefix([])[0] == []


def test_equal_pages_below_different_prefixes_are_not_shared() -> None:
    """The hash chains: a page stands for everything before it."""
    assert hashes(text([1, 2]))[1] != hashes(text([3, 2]))[1]
    cache = make()
    pages = cache.allocate(2)
    for page, digest in zip(pages, hashes(text([1, 2])), strict=True):
        cache.publish(page, digest)
    assert cache.match_prefix([*text([3, 2]), 0])[0] == []
    assert cache.match_prefix([*text([2]), 0])[0] == []


def test_the_earlier_of_equal_pages_stays_the_shared_one() -> None:
    """The later one is returned to the free pages when it is released."""
    cache = make()
    early, late = cache.allocate(1), cache.allocate(1)
    digest = hashes(text([1]))[0]
    cache.publish(early[0], digest)
    cache.publish(late[0], digest)
    cache.release(late)
    cache.check_integrity([early])
    assert cache.match_prefix([*text([1]), 0])[0] == early


def test_a_page_released_too_often_is_noticed() -> None:
    """Our own invariant: an assertion."""
    cache = make()
    pages = cache.allocate(1)
    cache.release(pages)
    with pytest.raises(AssertionError, match="more often than taken"):
        cache.release(pages)


def test_the_integrity_check_notices_a_leak() -> None:
    """The check that every other test relies on can fail."""
    cache = make()
    pages = cache.allocate(2)
    with pytest.raises(AssertionError):
        cache.check_integrity([pages[:1]])
    cache._free.append(pages[0])
    with pytest.raises(AssertionError):
        cache.check_integrity([pages])


def test_pages_that_are_taken_together_are_zeroed_by_one_call() -> None:
    """Also those that are given back before the end."""
    cache = make(3)
    calls: list[list[int]] = []
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    clear = cache.clear
    with mock.patch.object(cache, "clear", lambda pages: (calls.append([*pages]), clear(pages))):
        with cache.clearing_at_once:
            cache.release(cache.allocate(1))
            taken = cache.allocate(2)
            with pytest.raises(ResourceExhaustedError):
                cache.allocate(2)
        assert len(calls) == 1
        cache.allocate(1)
        assert len(calls) == 2, "outside every call clears its own"
    for pool in (*cache.keys, *cache.values):
        assert pool[taken].eq(0).all()


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_copies_and_zeros_are_those_of_the_operators(dtype: torch.dtype) -> None:
    """Pools of several sizes of a page, those of a head among them, and an empty one, as layers of states have."""
    caches = [KVCache([LayerSpec(1, 2, 3), LayerSpec(2, 4, 4)], 6, dtype, "cpu") for _ in range(2)]
    assert caches[0]._native, "its library does not compile"
    caches[1]._native = False
    for cache in caches:
        cache.add_layers([LayerSpec(1, 8, 8), LayerSpec(1, 4, 0)])
        torch.manual_seed(0)
        for pool in (*cache.keys, *cache.values):
            pool.normal_()
        cache.copy([(1, 4), (1, 0), (3, 5)])
        cache.clear([2, 3])
    native, plain = ((*cache.keys, *cache.values) for cache in caches)
    assert all(torch.equal(a, b) for a, b in zip(native, plain, strict=True))
    assert torch.equal(native[0][4], native[0][0])
    assert native[0][4].ne(0).any()
    assert native[0][2:4].eq(0).all()


def test_flat_rows() -> None:
    """Rows to pages."""
    assert flat_rows([5, 2], PAGE_SIZE - 1, PAGE_SIZE + 1) == [6 * PAGE_SIZE - 1, 2 * PAGE_SIZE]
    assert [pages_for(n) for n in (0, 1, PAGE_SIZE, PAGE_SIZE + 1)] == [0, 1, 1, 2]
