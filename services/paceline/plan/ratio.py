"""Drafts per target in closed form, within milliseconds, from measurements: for autoscalers of two pools."""

from __future__ import annotations

import math
from bisect import bisect_left

from paceline.plan.closed_form import Load, System, overlapped, plain
from paceline.plan.outcomes import Outcomes
from paceline.plan.times import StepTable

ENOUGH = 0.97
"""Share of the tokens per second of unlimited drafts that a recommended ratio has to reach."""
_PAYS = 1.02
"""Times plain decoding; the prediction is not exact enough to tell less."""
_LOOKAHEADS = (1, 2, 4, 8)
_TARGETS = 64
"""Targets that share the drafts in the model: the ratio is a multiple of one over this."""
_PER_DOUBLING = 4
_NO_LIMIT = 1 << 16


def drafts_per_target(
    *,
    target_step_s: float,
    target_row_s: float,
    draft_step_s: float,
    draft_row_s: float,
    acceptance: float,
    sessions_per_target: float,
    link_s: float = 0.0,
) -> float:
    """The fewest drafts per target that yield 97 % of the tokens per second of a draft for each session.

    A fraction means that targets share a draft: 0.25 is one for four. 0.0: speculation has no expected gain.

    Args:
        target_step_s: of a step of one token; ``target_row_s`` for each further one.
        draft_step_s: of a tree step of one node; ``draft_row_s`` for each further one.
        acceptance: probability that a draft token is accepted, given those before it.
        sessions_per_target: mean number that decode at once.
        link_s: one way between target and draft.

    Raises ValueError for impossible values.
    """
    for name, value in (("target_step_s", target_step_s), ("draft_step_s", draft_step_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}: seconds above 0 are needed")
    for name, value in (("target_row_s", target_row_s), ("draft_row_s", draft_row_s), ("link_s", link_s)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}: seconds of at least 0 are needed")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}: a number from 0 to 1 is needed")
    if not 0 <= sessions_per_target < math.inf:
        raise ValueError(f"sessions_per_target is {sessions_per_target}: a number of at least 0 is needed")
    system = System(
        StepTable.affine(target_step_s, target_row_s),
        StepTable.affine(draft_step_s, draft_row_s),
        Outcomes.derived(round(acceptance, 2)),  # so that a drifting average does not fill the cache of trees
        link_s=link_s,
        max_step_tokens=_NO_LIMIT,
    )
    sessions = max(_TARGETS, round(_TARGETS * sessions_per_target))

    def rate(drafts: int) -> float:
        load = Load(sessions, _TARGETS, drafts)
        return max(overlapped(system, load, k).tokens_per_s for k in _LOOKAHEADS)

    unlimited = rate(sessions)
    if unlimited < _PAYS * plain(system, Load(sessions, _TARGETS)).tokens_per_s:
        return 0.0
    numbers = _numbers(sessions)
    most = len(numbers) - 1  # which is enough
    return numbers[bisect_left(numbers, True, 0, most, key=lambda n: rate(n) >= ENOUGH * unlimited)] / _TARGETS


def _numbers(most: int) -> list[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 10, 12, .. up to ``most``: about four for each doubling."""
    numbers, number = [], 1
    while number < most:
        numbers.append(number)
        number += max(1, 2 ** (number.bit_length() - 1) // _PER_DOUBLING)
    return [*numbers, most]
