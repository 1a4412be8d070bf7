"""Ten thousand random and mutated messages for every port: nothing crashes, nothing is left, no token changes."""

from __future__ import annotations

import functools

import pytest
from google.protobuf.message import DecodeError
from tests.config.support import needs_ray
from tests.service.fuzz import rounds
from tests.service.support import run, tiny_pair

from paceline.router.router import Router
from paceline.rpc import bounds

pytestmark = needs_ray


@pytest.fixture(scope="module")
def config(checkpoints):
    return tiny_pair(checkpoints)


def fuzzed(config, plain, seed, messages, batch=2500, **options):
    seen = []

    async def test():
        seen.append(await rounds(config, plain, seed, messages, batch, **options))

    run(test, timeout_s=240)
    return seen[0]


def test_ten_thousand_messages(config, plain):
    statuses = fuzzed(config, plain, 1, 10_000)
    assert statuses.total() > 5000
    assert statuses["OK"] > 100  # some are served
    assert statuses["INVALID_ARGUMENT"] > 1000


def test_an_error_that_is_not_the_caller_s_is_noticed(config, plain, monkeypatch):
    """A mutant: bytes that are not protobuf reach the caller as our error."""
    monkeypatch.setattr(bounds, "DecodeError", KeyError)
    assert DecodeError is not KeyError
    with pytest.raises(AssertionError, match="INTERNAL"):
        fuzzed(config, plain, 1, 500, 500)


def test_a_session_that_is_not_freed_is_noticed(config, plain, monkeypatch):
    """A mutant: a request whose caller has left stays."""
    monkeypatch.setattr(Router, "_leave", functools.wraps(Router._leave)(lambda router, active: None))
    with pytest.raises(TimeoutError):
        fuzzed(config, plain, 1, 200, 200, patience_s=1.0)
