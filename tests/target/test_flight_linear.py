"""Steps ahead of models with linear layers: the step ahead reads the states and rows that the step in front writes.

The mutant: what a step ahead has stored is taken for the context's before its tokens are known.
"""

from typing import Any

import pytest
from tests.lossless.test_hybrids import FAST, SLOW, sessions_of
from tests.lossless.test_trees import any_subtrees
from tests.support.known import Known
from tests.support.late import LateDevice
from tests.support.mutants import mutant
from tests.support.pump import Pump, assert_same, in_mode
from tests.support.rings import slow
from tests.target.test_flight import unsure

from paceline.errors import EngineError
from paceline.target import engine as engine_module
from paceline.target.engine import TargetEngine
from paceline.types import Mode

NUM_TOKENS = 40
"""Of each text: they pass the ends of chunks and of pages."""


def run(sessions: Known, patch: pytest.MonkeyPatch, mode: Mode = Mode.PLAIN, pages: int = 9) -> Pump:
    """A pump that has served sessions on an accelerator with the tokens of the reference."""
    pump = sessions.pump(pages=pages, max_step_tokens=48, late=0.1)
    device = LateDevice(pump.clock, lambda num_tokens: 1e-3)
    device.install(patch)
    device.adopt(pump.target.runner, sessions.target)
    assert_same(pump.run(in_mode(sessions.requests, mode)), sessions.reference)
    return pump


@pytest.mark.parametrize(("family", "dtype", "num"), [FAST, *slow(SLOW)])
def test_texts_are_those_of_plain_decoding(family, dtype, num, monkeypatch) -> None:
    """With prompts in chunks, shared prefixes, and too few pages."""
    stats = run(sessions_of(family, dtype, num, NUM_TOKENS), monkeypatch).target.stats
    assert stats.steps_ahead > stats.steps / 3
    assert stats.preemptions > 0


def test_messages_come_while_a_step_with_drafts_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches have states and rows of their own until the step is awaited."""
    any_subtrees(monkeypatch)
    pump = run(sessions_of(*FAST, NUM_TOKENS), monkeypatch, Mode.OVERLAPPED, pages=14)
    assert pump.target.stats.branches_used > 0


def drop(patch: pytest.MonkeyPatch) -> None:
    """Serves sessions where the device cannot decide some steps, so that those ahead of them are dropped."""
    patch.setattr(engine_module, "Drawn", unsure(0))
    run(sessions_of(*FAST, NUM_TOKENS), patch, pages=24)


def test_a_step_ahead_that_is_dropped_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    drop(monkeypatch)


@mutant(TargetEngine, "on_launched")
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
        drop(monkeypatch)
