"""The costs of one step, as its meter tells them."""

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.tree import Proposal
from paceline.target.control.allocation import Allocation
from paceline.target.control.session_gate import SessionGate
from paceline.target.control.step_meter import StepMeter
from paceline.target.control.waiting import WaitPolicy


def part(num_drafted: int = 0, num_branches: int = 0, guesses: int = 0) -> Any:
    """The part of a session that decodes; every guess is a branch."""
    return SimpleNamespace(
        start=9,
        stop=10,
        verifies=True,
        num_drafted=num_drafted,
        scores=False,
        tables=((),) * (num_branches + 1) if num_branches else (),
        num_branches=num_branches,
        guesses=Proposal((0,) * guesses),
        guess_tables=((),) * guesses,
    )


@pytest.mark.parametrize(("num_branches", "guesses"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_branches_are_charged_to_the_draft_tokens_or_the_guesses_that_need_them(num_branches, guesses) -> None:
    allocation = Allocation(adaptive=True, trees=True)
    for num_tokens in (1, 4, 8, 16):
        allocation.observe_step(num_tokens, 0.001 * num_tokens)
    allocation.branch_prior_s = 0.5
    meter = StepMeter(lambda: 1.0, allocation, WaitPolicy(), SessionGate(allocation))
    cost, branch_s, size = allocation.cost, allocation.branch_s, 6 + guesses
    drafted_s = cost.seconds(size) - cost.seconds(size - 4)
    guess_s = cost.seconds(size) - cost.seconds(size - guesses) + guesses * branch_s
    step = meter.measure([part(4, num_branches), part(guesses=guesses)], meter.decided())
    assert step.row_s == pytest.approx((drafted_s + num_branches * branch_s) * 2 / 4)
    assert step.guess_s == pytest.approx(guess_s)
    assert step.decoding == 1.0
