"""Linear layers in steps that are recorded for a device: their numbers are data of a recording (``test_backend.py``).

On the CPU, by its operators. The recorder calls again what it was given.
"""

from typing import Any

import pytest
import torch
from tests.model.compiled.test_backend import FakeRecorder
from tests.model.test_linear import chunk, differing_of
from tests.support.hybrids import hybrid, poison
from tests.support.models import prompt
from tests.support.mutants import mutant

from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.linear.plan import LinearStep, num_numbers
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_replay

LIMITS = Limits(max_rows=16, max_tokens=128, max_pages=4)


def recorded(family: str = "qwen3_5_text") -> tuple[ModelRunner, FakeRecorder]:
    """A runner as on a GPU, whose free slots hold NaN."""
    model, recorder = hybrid(family), FakeRecorder()
    runner = model.runner(60, max_sessions=16)
    runner.backend = DeviceBackend(
        runner.cache, model.dtype, model.sliding_window, kernel=model.kernel, recorder=recorder, max_shapes=1000
    )
    runner.record(LIMITS)
    return poison(runner), recorder


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_replayed_steps_have_the_bits_of_decoding(family: str) -> None:
    """Trees and prefill in random chunks. A recording equals an eager step."""
    runner, recorder = recorded(family)
    assert check_replay(runner) == []
    before = recorder.num_replays
    assert differing_of(runner, (16, 63)) == 0
    assert recorder.num_replays > before + 50


@mutant(LinearStep, "encode")
def _numbers_of_the_first_step(encode: Any, self: LinearStep) -> Any:
    """A recording keeps the numbers of one step."""
    kept = _numbers_of_the_first_step.__dict__.setdefault("kept", {})
    return kept.setdefault(sum(part.num_tokens for part in self.sequences), encode(self))


def test_a_recording_that_keeps_its_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = recorded()
    _numbers_of_the_first_step(monkeypatch)
    assert differing_of(runner, (16,)) > 0


def test_a_step_of_more_numbers_than_a_recording_has_room_for_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, recorder = recorded()
    tokens, pages = prompt(3, 60), runner.cache.allocate(1)
    rows = [runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in ((0, 30), (30, 31))]
    before, unrecorded = recorder.num_replays, runner.backend.num_unrecorded
    most = LinearStep.most_numbers.fget
    assert most is not None
    monkeypatch.setattr(LinearStep, "most_numbers", property(lambda self: most(self) + num_numbers(16)))
    again = [runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in ((0, 30), (30, 31))]
    assert recorder.num_replays == before + 1, "the longer step has room"
    assert runner.backend.num_unrecorded == unrecorded + 1
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
    runner.cache.release(pages)
