"""The pair that hostile peers meet."""

import contextlib

import pytest
from tests.service.hostile.replicas import both
from tests.service.support import run, tiny_pair


@pytest.fixture(scope="module")
def config(checkpoints):
    return tiny_pair(checkpoints)


@pytest.fixture(scope="module")
def shared(config):
    """A target and a draft for all attacks: what one leaves behind the next one meets."""
    stack = contextlib.AsyncExitStack()
    started = []

    async def start():
        started.extend(await stack.enter_async_context(both(config)))

    run(start())
    yield started
    run(stack.aclose())
