"""Cases of a parametrization by the ring of tests that runs them; the Makefile says what the rings are.

The fast ring takes the cases that are listed plainly; those of ``slow`` and ``nightly`` wait for their ring.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, for the slow ring; a tuple is the values of several arguments."""
    return [_param(case, pytest.mark.slow) for case in cases]


def nightly(cases: Iterable[Any]) -> list[Any]:
    """The cases, for the nightly ring; a tuple is the values of several arguments."""
    return [_param(case, pytest.mark.nightly) for case in cases]


def pairs_first(*axes: Sequence[Any], others: pytest.MarkDecorator = pytest.mark.nightly) -> list[Any]:
    """The product of all axes, of which only a set of cases that holds every pair of values goes without ``others``."""
    cases = [*itertools.product(*axes)]
    chosen = {id(case) for case in covering_pairs(cases)}
    return [case if id(case) in chosen else _param(case, others) for case in cases]


def covering_pairs(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of the cases that hold all pairs of values of two arguments that any case holds, chosen greedily."""
    by_case = [
        {(i, j, repr(case[i]), repr(case[j])) for i, j in itertools.combinations(range(len(case)), 2)} for case in cases
    ]
    missing = set().union(*by_case)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda n: len(by_case[n] & missing))
        chosen.append(cases[best])
        missing -= by_case[best]
    return chosen


def _param(case: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark)
