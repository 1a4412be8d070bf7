"""Latent attention through both engines: every way of serving has the tokens of plain decoding."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from tests.lossless.test_hybrids import requests_of
from tests.lossless.test_trees import any_subtrees
from tests.model.families import checkpoint, small_config
from tests.support.hybrids import KnowingDrafter
from tests.support.models import prompt
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow

from paceline.model.loading import LoadedModel, prepare
from paceline.types import Mode, Result

CASES = [
    ("minicpm3", torch.bfloat16),
    *slow([("deepseek_v3", torch.float32)]),
    *nightly(
        (family, dtype) for family in ("deepseek_v2", "longcat_flash") for dtype in (torch.float32, torch.bfloat16)
    ),
]


@functools.cache
def target_of(family: str, dtype: torch.dtype) -> LoadedModel:
    """A small random model."""
    return prepare(checkpoint(small_config(family)).to(dtype), compile=False)


def pump_of(target: LoadedModel, requests: dict[str, Request], reference: dict[str, Result], pages: int) -> Pump:
    """A pump whose drafter knows the reference."""
    texts = {name: [*requests[name].prompt, *result.token_ids] for name, result in reference.items()}
    drafter = KnowingDrafter(texts, target.vocab_size)
    return Pump(target, None, drafter=drafter, draft_steps=(1, 8), pages=pages, max_step_tokens=48, seed=4)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_modes_and_subtrees_give_identical_tokens(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees, with arrivals, preemption, shared prefixes and prompts in chunks. Mutant: the pages of a branch
    are not copied from those that it leaves."""
    target, requests = target_of(family, dtype), requests_of(6)
    reference = plain_reference(target, requests)
    for mode in (Mode.PLAIN, Mode.SEQUENTIAL, Mode.OVERLAPPED):
        pump = pump_of(target, requests, reference, 5)
        assert_same(pump.run(in_mode(requests, mode)), reference)
        assert pump.target.stats.preemptions > 0 or mode != Mode.PLAIN
        assert pump.target.stats.cached_tokens > 0
    any_subtrees(monkeypatch)
    pump = pump_of(target, requests, reference, 14)
    assert_same(pump.run(in_mode(requests, Mode.OVERLAPPED)), reference)
    assert pump.target.stats.branches_used > 0


def test_prefix_hits_give_identical_tokens() -> None:
    """A second round of the same prompts reads the first one's latents. Mutant: pages are zeroed when they are hit."""
    target = target_of("minicpm3", torch.bfloat16)
    requests: dict[str, Request] = {
        name: replace(request, prompt=[*prompt(999, 64), *prompt(7, 64), *request.prompt])
        for name, request in requests_of(3, max_tokens=12).items()
    }
    reference = plain_reference(target, requests)
    pump = pump_of(target, requests, reference, 40)
    for num_hit in (0, 3 * 128):
        before = pump.target.stats.cached_tokens
        pump.results.clear()
        pump.sessions.clear()
        assert_same(pump.run(requests, arrivals=0.02), reference)
        assert pump.target.stats.cached_tokens - before >= num_hit
