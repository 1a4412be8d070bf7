"""A client that leaves its stream is no error of the service: neither in Serve's log nor in its counts."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from tests.cluster.ray.conftest import ON_RAY

pytestmark = ON_RAY


@pytest.mark.parametrize("error", [GeneratorExit(), asyncio.CancelledError()], ids=["while written", "while awaited"])
def test_a_stream_that_is_left_is_cancelled_and_not_logged(error, monkeypatch, caplog):
    from ray.serve._private import replica

    from paceline.cluster.ingress import count_departures_as_cancelled

    monkeypatch.setattr(replica, "get_grpc_response_status", replica.get_grpc_response_status)  # restored afterwards
    count_departures_as_cancelled()
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    with caplog.at_level(logging.DEBUG):
        status = replica.get_grpc_response_status(error, None, "r")
        assert status.code is grpc.StatusCode.CANCELLED
        assert caplog.records == []
        assert replica.get_grpc_response_status(KeyError("ours"), None, "r").code is grpc.StatusCode.INTERNAL
    assert {record.levelname for record in caplog.records} == {"ERROR"}, "what is an error stays one"
