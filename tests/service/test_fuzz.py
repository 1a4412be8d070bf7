"""Thousands of random and mutated messages for every port: nothing crashes, nothing is left, no token changes."""

from __future__ import annotations

import functools

import pytest
from google.protobuf.message import DecodeError
from tests.config.support import needs_ray
from tests.service.fuzz import rounds
from tests.service.support import tiny_pair
from tests.support.rings import nightly

from paceline.router.router import Router
from paceline.rpc import bounds

pytestmark = needs_ray


@pytest.fixture(scope="module")
def config(checkpoints):
    return tiny_pair(checkpoints)


@pytest.mark.parametrize("num", [1_500, *nightly([10_000])])
async def test_random_messages(config, plain, num):
    statuses = await rounds(config, plain, 1, num, 1000)
    assert statuses.total() > num / 2
    assert statuses["OK"] > num / 100  # some are served
    assert statuses["INVALID_ARGUMENT"] > num / 10


async def test_an_error_that_is_not_the_caller_s_is_noticed(config, plain, monkeypatch):
    """A mutant: bytes that are not protobuf reach the caller as our error."""
    monkeypatch.setattr(bounds, "DecodeError", KeyError)
    assert DecodeError is not KeyError
    with pytest.raises(AssertionError, match="INTERNAL"):
        await rounds(config, plain, 1, 500, 500)


async def test_a_session_that_is_not_freed_is_noticed(config, plain, monkeypatch):
    """A mutant: a request whose caller has left stays."""
    monkeypatch.setattr(Router, "leave", functools.wraps(Router.leave)(lambda router, active: None))
    with pytest.raises(TimeoutError):
        await rounds(config, plain, 1, 200, 200, patience_s=1.0)
