"""Steps that a target times before its first session are those that its sessions can have."""

import random

import pytest
from tests.target.simulation import Clock, SyntheticRunner

from paceline.target.engine import TargetEngine
from paceline.types import MAX_DRAFT_TOKENS


def cost(num_tokens: int) -> float:
    return 0.01 if num_tokens <= 40 else 0.02


@pytest.mark.parametrize(
    ("max_sessions", "timed"),
    [
        (1, {1: 1, 4: 1, 8: 1, 16: 1, 32: 1}),
        (3, {1: 1, 4: 1, 8: 2, 16: 3, 32: 3, 64: 3}),
        (64, {1: 1, 4: 1, 8: 2, 16: 4, 32: 8, 64: 16}),
    ],
)
def test_a_timed_step_has_no_more_sequences_than_there_are_sessions(max_sessions: int, timed: dict[int, int]) -> None:
    """Others are not recorded: an eager step, several times as long, would be taken for the cost of verifying."""
    clock = Clock()
    runner = SyntheticRunner(clock, cost, 256, random.Random(0), 0.0)
    longest: list[int] = []
    forward = runner.forward

    def noted(steps):
        longest.append(max(len(step.token_ids) for step in steps))
        return forward(steps)

    runner.forward = noted  # type: ignore[method-assign]
    engine = TargetEngine(
        runner,  # type: ignore[arg-type]
        lambda messages: None,
        max_sessions=max_sessions,
        max_step_tokens=2048,
        max_model_len=1000,
        clock=clock,
    )
    engine.calibrate()
    assert {tokens: sequences for _, tokens, sequences in runner.steps if tokens in timed} == timed
    assert max(longest) <= MAX_DRAFT_TOKENS
    assert engine.allocation.cost.seconds(32) == pytest.approx(0.01)
