"""Mutants: wrong changes of one function, each of which a check must notice."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

Mutant = Callable[[pytest.MonkeyPatch], None]


def mutant(owner: Any, name: str) -> Callable[[Callable[..., Any]], Mutant]:
    """Makes a mutant of ``change``: with it, ``owner.name(...)`` is ``change(original, ...)``."""

    def of(change: Callable[..., Any]) -> Mutant:
        @functools.wraps(change)
        def apply(patch: pytest.MonkeyPatch) -> None:
            original = getattr(owner, name)

            def changed(*args: Any, **options: Any) -> Any:
                return change(original, *args, **options)

            patch.setattr(owner, name, changed)

        return apply

    return of
