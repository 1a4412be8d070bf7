"""Steps for which the device has no memory: they are cut, and at most one session ends.

Mutants: the second half of a cut part without its first, halves in the other order, private pages that are kept after
a step was abandoned, an error of another kind that is taken for a lack of memory, halves that are decided by the first
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.lossless.test_trees import any_subtrees
from tests.support.models import pair, prompt
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference, requests_for

from paceline.core import verification
from paceline.model.step_plan import SequenceStep
from paceline.target import engine as engine_module
from paceline.target.engine import TargetEngine
from paceline.types import Mode, SamplingParams

CPU = "[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried 4 bytes."
ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.30 GiB"), RuntimeError(CPU), MemoryError()]


def limited(pump: Pump, fits: Callable[[Sequence[SequenceStep]], bool], error: Exception) -> list[int]:
    """Has the forward of steps that do not fit raise ``error``; returns the sizes of the others."""
    forward, ran = pump.target.runner.forward, []

    def run(steps: Sequence[SequenceStep]) -> torch.Tensor:
        if not fits(steps):
            raise error
        ran.append(num_tokens(steps))
        return forward(steps)

    pump.target.runner.forward = run  # type: ignore[method-assign]
    return ran


def num_tokens(steps: Sequence[SequenceStep]) -> int:
    return sum(len(step.token_ids) for step in steps)


def requests() -> dict[str, Request]:
    options = {"temperature": [0, 1], "max_tokens": 16, "prompt_logprobs": [None, 1, 2]}
    return requests_for([prompt(i, 30 + 9 * i) for i in range(6)], **options)


@pytest.mark.parametrize(
    ("mode", "error"), [*((Mode.PLAIN, error) for error in ERRORS), (Mode.OVERLAPPED, ERRORS[0])], ids=repr
)
def test_a_step_that_does_not_fit_is_cut_and_gives_the_same_tokens(mode: Mode, error: Exception) -> None:
    target, draft = pair("llama")
    most = 3 if mode is Mode.PLAIN else 33
    reference = plain_reference(target, requests())
    pump = Pump(target, draft, seed=2, draft_steps=(2, 6))
    ran = limited(pump, lambda steps: num_tokens(steps) <= most, error)
    results = pump.run(in_mode(requests(), mode))
    assert_same(results, reference)
    assert max(ran) <= most
    for name, result in results.items():
        assert result.prompt_logprobs == reference[name].prompt_logprobs


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.OVERLAPPED])
def test_sessions_without_memory_end_alone(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys do not fit, with however few new tokens; the others lose nothing but time, and verify branches."""
    target, draft = pair("llama")
    any_subtrees(monkeypatch)
    abandon = TargetEngine.abandon_step

    def checked(engine: TargetEngine, *args: Any) -> None:
        abandon(engine, *args)
        engine.check_integrity()

    monkeypatch.setattr(TargetEngine, "abandon_step", checked)
    reference = plain_reference(target, requests())
    pump = Pump(target, draft, seed=3, draft_steps=(2, 6))
    limited(pump, lambda steps: all(max(step.rows) < 140 for step in steps), ERRORS[0])
    long = {f"long{i}": Request(prompt(i, 132 + i), SamplingParams(max_tokens=40)) for i in range(6)}
    assert_same(pump.run(in_mode(requests() | long, mode)), reference)
    assert pump.failures.keys() == long.keys()
    assert "no memory for one more token of the session: CUDA out of memory" in pump.failures["long0"]
    assert (pump.target.stats.branches > 0) is (mode is Mode.OVERLAPPED)
    assert pump.target.runner.cache.num_used == 0


def test_other_errors_are_no_lack_of_memory() -> None:
    target, _ = pair("llama")
    pump = Pump(target, None)
    limited(pump, lambda steps: num_tokens(steps) <= 1, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        pump.run(in_mode(requests(), Mode.PLAIN))


@pytest.mark.parametrize("mode", [Mode.PLAIN, Mode.OVERLAPPED])
def test_rounds_that_do_not_fit_are_decided_in_parts(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sampled tokens noise and scores take several times the logits: they may not fit where the forward did."""
    target, draft = pair("llama")
    reference, sizes = plain_reference(target, requests()), []

    def decide(logits: torch.Tensor, *rest: Any) -> Any:
        if len(logits) > 4:
            raise ERRORS[0]
        sizes.append(len(logits))
        return verification.decide(logits, *rest)

    monkeypatch.setattr(engine_module, "decide", decide)
    pump = Pump(target, draft, seed=2, draft_steps=(2, 6))
    assert_same(pump.run(in_mode(limited_drafts(requests()), mode)), reference)
    assert max(sizes) <= 4 < sum(sizes)


def limited_drafts(asked: dict[str, Request]) -> dict[str, Request]:
    """At most 3 tokens are drafted: a round has at most 4 rows."""
    limits = {"max_draft_tokens": 3}
    return {name: replace(one, speculation=one.speculation.model_copy(update=limits)) for name, one in asked.items()}


def test_a_round_without_memory_ends_its_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the error ends the engine."""
    target, _ = pair("llama")
    reference = plain_reference(target, requests())

    def decide(logits: torch.Tensor, rows: Sequence[Any], *rest: Any) -> Any:
        if any(row.state.temperature == 0.77 for row in rows):
            raise ERRORS[0]
        return verification.decide(logits, rows, *rest)

    monkeypatch.setattr(engine_module, "decide", decide)
    pump = Pump(target, None)
    one = {"one": Request(prompt(1, 20), SamplingParams(temperature=0.77, seed=7, max_tokens=8))}
    assert_same(pump.run(in_mode(requests() | one, Mode.PLAIN)), reference)
    assert pump.failures.keys() == {"one"}
    assert "no memory to decide a round of the session: CUDA out of memory" in pump.failures["one"]
