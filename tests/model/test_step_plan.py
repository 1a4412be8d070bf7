"""A step's plan goes to other ranks as bytes and is the same plan there."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from paceline.model.step_plan import SequenceStep, StepPlan
from paceline.types import PAGE_SIZE, pages_for

SCRATCH_ROW = 10_000 * PAGE_SIZE


def _chain(rng: random.Random, num_tokens: int, start: int) -> SequenceStep:
    span = range(start, start + num_tokens)
    pages = rng.sample(range(10_000), pages_for(start + num_tokens))
    return SequenceStep(
        [rng.randrange(150_000) for _ in span], span, span, pages, num_logits=rng.randint(0, num_tokens)
    )


def _tree(rng: random.Random, num_tokens: int, start: int, *, positions: bool) -> SequenceStep:
    step = _chain(rng, num_tokens, start)
    step.visible = torch.rand(num_tokens, start + num_tokens) < 0.5
    step.key_positions = torch.randint(0, 500, (start + num_tokens,)) if positions else None
    return step


@pytest.mark.parametrize("seed", range(20))
def test_a_decoded_plan_is_the_encoded_one(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    steps = [_chain(rng, rng.randint(1, 40), rng.randint(0, 300)) for _ in range(rng.randint(1, 5))]
    if seed % 2:
        steps.append(_tree(rng, rng.randint(1, 12), rng.randint(0, 200), positions=seed % 4 == 1))
    plan = StepPlan.of(steps, SCRATCH_ROW)
    twin = StepPlan.decode(plan.encode())
    for field in dataclasses.fields(StepPlan):
        mine, other = getattr(plan, field.name), getattr(twin, field.name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == other.dtype, field.name
            assert torch.equal(mine, other), field.name
        else:
            assert mine == other, field.name
    for window in (None, 50):
        for mine, other in zip(plan.masks(torch.float32, window), twin.masks(torch.float32, window), strict=True):
            assert torch.equal(mine, other)


def test_the_sliding_window_counts_positions_and_not_rows() -> None:
    """A tree's rows lie behind each other while its positions do not."""
    step = SequenceStep([5, 6], [10, 10], [10, 11], [0], num_logits=2)
    step.visible = torch.ones(2, 12, dtype=torch.bool)
    step.key_positions = torch.tensor([*range(10), 10, 10])
    _, near = StepPlan.of([step], SCRATCH_ROW).masks(torch.float32, 3)
    assert (near[0, 0, :2] == 0).nonzero()[:, 1].tolist() == [8, 9, 10, 11] * 2


def test_padding_stays_within_the_page_that_it_may_overwrite() -> None:
    """However much of it a model needs behind the last token."""
    plan = StepPlan.of([SequenceStep([1] * 65, range(65), range(65), [0, 1], num_logits=1)], SCRATCH_ROW, 63)
    assert len(plan.tokens) >= 65 + 63
    assert int(plan.write_rows[65:].max()) < SCRATCH_ROW + 64
    assert int(plan.write_rows[65:].min()) >= SCRATCH_ROW
