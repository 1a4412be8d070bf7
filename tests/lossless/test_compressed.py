"""A model of DeepSeek V4 through both engines: every way of serving has the tokens of plain decoding."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lossless.test_hybrids import requests_of
from tests.lossless.test_trees import any_subtrees
from tests.support.compressed import compressed
from tests.support.hybrids import KnowingDrafter
from tests.support.models import prompt
from tests.support.pump import Pump, Request, assert_continued, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow

from paceline.model.kv_cache import KVCache
from paceline.types import Mode, Result

FAST = (torch.bfloat16, 16, 6)
"""A dtype, the tokens of an entry of heavily compressed layers, and the sessions of tests in the fast ring."""
EACH = [(dtype, heavy, 12) for dtype in (torch.float32, torch.bfloat16) for heavy in (16, 128)]


@functools.cache
def reference_of(dtype: torch.dtype, heavy: int, num: int) -> dict[str, Result]:
    """Each request alone, one token at a time."""
    return plain_reference(compressed(dtype, heavy), requests_of(num))


def pump_of(dtype: torch.dtype, heavy: int, reference: dict[str, Result], requests: Any, **options: Any) -> Pump:
    """A pump whose drafter knows the reference."""
    target = compressed(dtype, heavy)
    texts = {name: [*requests[name].prompt, *result.token_ids] for name, result in reference.items()}
    return Pump(target, None, drafter=KnowingDrafter(texts, target.vocab_size), draft_steps=(1, 8), **options)


def served(dtype: torch.dtype, heavy: int, num: int, *modes: Mode, pages: int, seed: int = 0) -> list[Pump]:
    """Pumps that have served all requests in each mode; asserts that their tokens are the reference's."""
    requests, reference, pumps = requests_of(num), reference_of(dtype, heavy, num), []
    for mode in modes:
        pump = pump_of(dtype, heavy, reference, requests, seed=seed, pages=pages, max_step_tokens=48)
        assert_same(pump.run(in_mode(requests, mode)), reference)
        pumps.append(pump)
    return pumps


@pytest.mark.parametrize(("dtype", "heavy", "num"), [FAST, *nightly(EACH)])
def test_modes_give_identical_tokens(dtype: torch.dtype, heavy: int, num: int) -> None:
    """Chains, with arrivals, preemption, shared prefixes, prompts in chunks."""
    plain, overlapped = served(dtype, heavy, num, Mode.PLAIN, Mode.OVERLAPPED, pages=5 if num < 10 else 9)
    assert plain.target.stats.preemptions > 0
    assert plain.target.stats.cached_tokens > 0
    assert sum(result.speculation.accepted for result in overlapped.results.values()) > 30


@pytest.mark.parametrize(("dtype", "heavy", "num"), [FAST, *slow([(torch.float32, 128, 12)]), *nightly(EACH)])
def test_any_subtrees_give_identical_tokens(
    dtype: torch.dtype, heavy: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches that leave each other within windows; the accepted one goes on."""
    any_subtrees(monkeypatch)
    (pump,) = served(dtype, heavy, num, Mode.OVERLAPPED, pages=14, seed=4)
    assert pump.target.stats.branches > 15
    assert pump.target.stats.branches_used > 0


def test_a_session_goes_on_elsewhere() -> None:
    """Another engine continues what the first has generated, as after a migration, from any length."""
    requests, reference = requests_of(FAST[2]), reference_of(*FAST)
    assert_continued(pump_of(*FAST[:2], reference, requests), requests, reference, (1, 3, 4, 5, 16, 19))


def prefix_hits() -> None:
    """A second round of the same prompts hits the first one's pages."""
    requests: dict[str, Request] = {
        name: replace(request, prompt=[*prompt(999, 64), *prompt(7, 64), *request.prompt])
        for name, request in requests_of(3, max_tokens=12).items()
    }
    reference = plain_reference(compressed(*FAST[:2]), requests)
    pump = pump_of(*FAST[:2], reference, requests, pages=40)
    for num_hit in (0, 3 * 128):
        before = pump.target.stats.cached_tokens
        pump.results.clear()
        pump.sessions.clear()
        assert_same(pump.run(requests, arrivals=0.02), reference)
        assert pump.target.stats.cached_tokens - before >= num_hit


def test_prefix_hits_give_identical_tokens() -> None:
    prefix_hits()


def test_a_prefix_whose_entries_are_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they did not belong to the page."""
    match = KVCache.match_prefix

    def wrong(self: KVCache, *given: Any) -> tuple[list[int], list[bytes]]:
        pages, hashes = match(self, *given)
        for keys in self.keys[4:]:
            keys[pages] = 0
        return pages, hashes

    monkeypatch.setattr(KVCache, "match_prefix", wrong)
    with pytest.raises(AssertionError):
        prefix_hits()
