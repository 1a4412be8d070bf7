"""Steps ahead of models with linear layers: the step ahead reads the states and rows that the step in front writes.

The mutant: what a step ahead has stored is taken for the context's before its tokens are known.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.lossless.test_hybrids import FAST, SLOW, reference_of, requests_of
from tests.lossless.test_trees import any_subtrees
from tests.support.hybrids import KnowingDrafter, hybrid, poison
from tests.support.late import LateDevice
from tests.support.mutants import mutant
from tests.support.pump import Pump, assert_same, in_mode
from tests.support.rings import slow
from tests.target.test_flight import unsure

from paceline.errors import EngineError
from paceline.target import engine as engine_module
from paceline.target.engine import TargetEngine
from paceline.types import Mode, Result

NUM_TOKENS = 40
"""Of each text: they pass the ends of chunks and of pages."""


def run(family: str, dtype: torch.dtype, num: int, patch: pytest.MonkeyPatch, **options: Any) -> Pump:
    """A pump that has served sessions on an accelerator whose free slots hold NaN."""
    target = hybrid(family, dtype)
    mode = Mode.OVERLAPPED if "drafter" in options else Mode.PLAIN
    pump = Pump(target, None, **({"pages": 9, "max_step_tokens": 48, "late": 0.1} | options))
    device = LateDevice(pump.clock, lambda num_tokens: 1e-3)
    device.install(patch)
    device.adopt(poison(pump.target.runner), target)
    pump.run(in_mode(requests_of(num, NUM_TOKENS), mode))
    return pump


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow(SLOW)])
def test_texts_are_those_of_plain_decoding(
    family: str, dtype: torch.dtype, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts in chunks, shared prefixes, and too few pages."""
    pump = run(family, dtype, num, monkeypatch)
    assert_same(pump.results, reference_of(family, dtype, num, NUM_TOKENS))
    assert pump.target.stats.steps_ahead > pump.target.stats.steps / 3
    assert pump.target.stats.preemptions > 0


def test_messages_come_while_a_step_with_drafts_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches have states and rows of their own until the step is awaited."""
    any_subtrees(monkeypatch)
    reference = reference_of(*FAST, NUM_TOKENS)
    texts = {name: [*requests_of(6)[name].prompt, *result.token_ids] for name, result in reference.items()}
    drafter = KnowingDrafter(texts, hybrid(*FAST[:2]).vocab_size)
    pump = run(*FAST, monkeypatch, drafter=drafter, draft_steps=(1, 8), pages=14)
    assert_same(pump.results, reference)
    assert pump.target.stats.branches_used > 0


def dropped(patch: pytest.MonkeyPatch) -> dict[str, Result]:
    """Results where the device cannot decide some steps, so that those ahead of them are dropped."""
    patch.setattr(engine_module, "Drawn", unsure(0))
    return run(*FAST, patch, pages=24).results


def test_a_step_ahead_that_is_dropped_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(dropped(monkeypatch), reference_of(*FAST, NUM_TOKENS))


@mutant(TargetEngine, "_launched")
def _the_step_ahead_is_held(launched: Any, engine: TargetEngine, parts: Any, *args: Any, is_ahead: bool) -> Any:
    """Sessions hold its states as if they were the context's, and give up what they were computed from."""
    flight = launched(engine, parts, *args, is_ahead=is_ahead)
    for part in parts:
        if is_ahead and part.verifies:
            part.session.hold_state(engine.runner.cache, part.stop)
    return flight


def test_states_of_a_dropped_step_that_are_kept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _the_step_ahead_is_held(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        assert_same(dropped(monkeypatch), reference_of(*FAST, NUM_TOKENS))
