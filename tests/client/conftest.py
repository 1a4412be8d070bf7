"""A fake service on the loopback for a module, its script reset for each test, and a blocking client of it."""

import pytest
from tests.support.fake_service import FakeService, sentence

from paceline.client import Client


@pytest.fixture(scope="module")
def shared_server():
    with FakeService() as server:
        yield server


@pytest.fixture
def server(shared_server):
    shared_server.script = sentence
    shared_server.info_error = None
    shared_server.health = "SERVING"
    shared_server.requests.clear()
    shared_server.finished.clear()
    return shared_server


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client
