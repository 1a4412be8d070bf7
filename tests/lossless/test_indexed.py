"""Models that choose keys by indexers, through both engines: every way of serving has the tokens of plain decoding."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lossless.test_hybrids import requests_of
from tests.lossless.test_trees import any_subtrees
from tests.support.hybrids import KnowingDrafter
from tests.support.indexed import FAMILIES, indexed
from tests.support.models import prompt
from tests.support.pump import Pump, Request, assert_continued, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow

from paceline.model.kv_cache import KVCache
from paceline.types import Mode, Result

FAST = ("deepseek_v32", torch.bfloat16, 6)
"""A family, its dtype, and the sessions of tests in the fast ring."""
EACH = [(family, dtype, 12) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)]


@functools.cache
def reference_of(family: str, dtype: torch.dtype, num: int) -> dict[str, Result]:
    """Each request alone, one token at a time."""
    return plain_reference(indexed(family, dtype), requests_of(num))


def pump_of(family: str, dtype: torch.dtype, reference: dict[str, Result], requests: Any, **options: Any) -> Pump:
    """A pump whose drafter knows the reference."""
    target = indexed(family, dtype)
    texts = {name: [*requests[name].prompt, *result.token_ids] for name, result in reference.items()}
    return Pump(target, None, drafter=KnowingDrafter(texts, target.vocab_size), draft_steps=(1, 8), **options)


def served(family: str, dtype: torch.dtype, num: int, *modes: Mode, pages: int, seed: int = 0) -> list[Pump]:
    """Pumps that have served all requests in each mode; asserts that their tokens are the reference's."""
    requests, reference, pumps = requests_of(num), reference_of(family, dtype, num), []
    for mode in modes:
        pump = pump_of(family, dtype, reference, requests, seed=seed, pages=pages, max_step_tokens=48)
        assert_same(pump.run(in_mode(requests, mode)), reference)
        pumps.append(pump)
    return pumps


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow([("glm_moe_dsa", torch.float32, 6)]), *nightly(EACH)])
def test_modes_give_identical_tokens(family: str, dtype: torch.dtype, num: int) -> None:
    """Chains, with arrivals, preemption, shared prefixes, prompts in chunks."""
    plain, overlapped = served(family, dtype, num, Mode.PLAIN, Mode.OVERLAPPED, pages=5 if num < 10 else 9)
    assert plain.target.stats.preemptions > 0
    assert plain.target.stats.cached_tokens > 0
    assert sum(result.speculation.accepted for result in overlapped.results.values()) > 30


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow([("hy_v4", torch.float32, 6)]), *nightly(EACH)])
def test_any_subtrees_give_identical_tokens(
    family: str, dtype: torch.dtype, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Branches that leave each other below, at and above top-k; the accepted one goes on."""
    any_subtrees(monkeypatch)
    (pump,) = served(family, dtype, num, Mode.OVERLAPPED, pages=14, seed=4)
    assert pump.target.stats.branches > 15
    assert pump.target.stats.branches_used > 0


def test_a_session_goes_on_elsewhere() -> None:
    """Another engine continues what the first has generated, as after a migration, from any length."""
    requests, reference = requests_of(FAST[2]), reference_of(*FAST)
    assert_continued(pump_of(*FAST[:2], reference, requests), requests, reference, (1, 15, 16, 17, 5, 19))


def test_a_draft_with_indexers_gives_identical_tokens() -> None:
    """The draft's trees are masked, and its indexers choose within the mask."""
    requests, reference, target = requests_of(FAST[2]), reference_of(*FAST), indexed(*FAST[:2])
    pump = Pump(target, target, draft_steps=(1, 8))
    assert_same(pump.run(requests), reference)
    assert sum(result.speculation.accepted for result in pump.results.values()) > 30


def prefix_hits() -> None:
    """A second round of the same prompts hits the first one's pages."""
    requests: dict[str, Request] = {
        name: replace(request, prompt=[*prompt(999, 64), *prompt(7, 64), *request.prompt])
        for name, request in requests_of(3, max_tokens=12).items()
    }
    reference = plain_reference(indexed(*FAST[:2]), requests)
    pump = pump_of(*FAST[:2], reference, requests, pages=40)
    for num_hit in (0, 3 * 128):
        before = pump.target.stats.cached_tokens
        pump.results.clear()
        pump.sessions.clear()
        assert_same(pump.run(requests, arrivals=0.02), reference)
        assert pump.target.stats.cached_tokens - before >= num_hit


def test_prefix_hits_give_identical_tokens() -> None:
    prefix_hits()


def test_a_prefix_whose_index_keys_are_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they did not belong to the page."""
    match = KVCache.match_prefix

    def wrong(self: KVCache, *given: Any) -> tuple[list[int], list[bytes]]:
        pages, hashes = match(self, *given)
        for keys, values in zip(self.keys, self.values, strict=True):
            if not values.numel():
                keys[pages] = 0
        return pages, hashes

    monkeypatch.setattr(KVCache, "match_prefix", wrong)
    with pytest.raises(AssertionError):
        prefix_hits()
