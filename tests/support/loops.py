"""Tests that are coroutines: each runs to its end in an event loop, and one that hangs says where."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")
LIMIT_S = 600
"""Seconds of a test that hangs."""


async def bounded(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Its result. Raises TimeoutError if it hangs."""
    async with asyncio.timeout(LIMIT_S):
        return await coroutine


def finish(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Its result, in a loop of its own."""
    return asyncio.run(bounded(coroutine))


def run_test(test: pytest.Function, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> bool | None:
    """Has ``run`` bring a test that is a coroutine to its end; None: it is none, and pytest calls it."""
    if not inspect.iscoroutinefunction(test.obj):
        return None
    run(test.obj(**{name: test.funcargs[name] for name in inspect.signature(test.obj).parameters}))
    return True
