"""Steps for which one of two ranks has no memory: no rank begins them, and at most one session ends.

In processes of their own, by a device's backend over host memory, whose allocator is a stub. The mutant: ranks that
keep a lack of memory from the others, which then begin the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.model.parallel.ranks import Ranks, follow, load
from tests.support.models import prompt
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, in_mode, requests_for

from paceline.errors import RanksLostError
from paceline.model import loading
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.kv_cache import KVCache
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.runner import RankRunner
from paceline.model.step_plan import StepShape
from paceline.types import Mode, SamplingParams

pytestmark = pytest.mark.compiler
MOST_TOKENS, MOST_PAGES = 8, 2
"""Sizes of the largest step for which there is memory."""


def requests(*, long: bool) -> dict[str, Request]:
    """Greedy and sampled; ``long``: with one that grows beyond ``MOST_PAGES``."""
    asked = requests_for([prompt(i, 20 + 9 * i) for i in range(4)], temperature=[0, 1], max_tokens=12)
    if long:
        asked["long"] = Request(prompt(9, 120), SamplingParams(max_tokens=40))
    return in_mode(asked, Mode.PLAIN)


@mutant(Collectives, "least")
def kept_from_others(least: Any, group: Collectives, value: int) -> int:
    """A rank goes by what it has itself."""
    return value


def serve(
    group: Collectives, path: str, short_rank: int | None, wrong: bool
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]] | None:
    """On rank 0 the texts and the failures. ``short_rank``: the one with too little memory."""

    def backend(cache: KVCache, dtype: torch.dtype, window: int | None, kernel: Any, *options: Any) -> DeviceBackend:
        return DeviceBackend(cache, dtype, window, kernel=kernel, recorder=None, max_shapes=100, least=options[-1])

    def reserve(runner: RankRunner, shape: StepShape) -> None:
        assert runner._step_bytes(shape) > 0
        if group.rank == short_rank and (shape.tokens > MOST_TOKENS or shape.pages > MOST_PAGES):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.30 GiB")

    model = load(group, path, torch.float32)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(loading, "make_backend", backend)
        context.setattr(RankRunner, "reserve_step", reserve)
        if wrong:
            kept_from_others(context)
        if group.rank > 0:
            follow(model)
            return None
        pump = Pump(model, None, pages=16, max_sessions=8)
        results = pump.run(requests(long=short_rank is not None))
        pump.target.runner.close()
    texts = {name: result.token_ids for name, result in results.items()}
    return texts, dict(pump.failures)


@pytest.fixture(scope="module")
def texts(two: Ranks, path: str) -> dict[str, tuple[int, ...]]:
    """Of ranks with memory for every step."""
    (found, failures), _ = two.run(serve, path, None, False, transport="shared")
    assert not failures
    return found


@pytest.mark.parametrize("short_rank", [0, 1])
def test_ranks_without_memory_for_a_step_cut_it(
    short_rank: int, two: Ranks, path: str, texts: dict[str, tuple[int, ...]]
) -> None:
    """The session that does not fit ends alone, all others have the same text, and the ranks go on."""
    (found, failures), _ = two.run(serve, path, short_rank, False, transport="shared")
    assert found == texts
    assert failures.keys() == {"long"}
    assert "no memory for one more token of the session" in failures["long"]


def test_a_rank_that_begins_such_a_step_is_lost(two: Ranks, path: str, texts: dict[str, tuple[int, ...]]) -> None:
    two.start(serve, path, 1, True, timeout_s=3.0, transport="shared")
    assert isinstance(two.result(0), RanksLostError)
    two.result(1)
