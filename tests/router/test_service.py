"""Who may cancel a request by its id. A router that says what it is asked; no replica."""

import asyncio
from types import SimpleNamespace

import pytest

from paceline.config import RouterConfig
from paceline.errors import InvalidRequestError
from paceline.router.service import GenerationService
from paceline.types import Cause, Chunk, Round, Usage, request_key
from paceline.v1 import generation_pb2 as pb

CHUNK = Chunk((1,), (0.0,), (False,), (("a", False),), Round(0, 0, Cause.START), Usage(7, 1, 0))


class Router:
    """Takes requests and never ends them."""

    limits = RouterConfig().limits
    info = SimpleNamespace(max_model_len=100, tokenizer=SimpleNamespace(max_token_bytes=4))

    def __init__(self):
        self.active, self.cancelled = set(), []

    async def generate(self, request, spans=None):
        if request.key in self.active:
            raise InvalidRequestError("in progress")
        self.active.add(request.key)
        try:
            yield CHUNK
            await asyncio.Event().wait()
        finally:
            self.active.remove(request.key)

    def cancel(self, request_id, owner=""):
        key = request_key(request_id, owner)
        if key in self.active:
            self.cancelled.append(key)
        return key in self.active


def message(request_id):
    return pb.GenerateRequest(request_id=request_id, text="abc")


async def test_only_the_key_that_started_a_request_cancels_it():
    router = Router()
    service, used = GenerationService(router), []
    stream = service.generate(message("r"), "alice", used.append)
    await anext(stream)
    assert used == [Usage(7, 1, 0)]
    assert not service.cancel("r", "bob")
    assert not service.cancel("r")
    assert not service.cancel("unknown", "alice")
    assert router.cancelled == []
    assert service.cancel("r", "alice")
    await stream.aclose()
    assert not service.cancel("r", "alice")


async def test_a_request_id_is_one_of_its_key():
    service = GenerationService(Router())
    stream = service.generate(message("r"), "alice")
    await anext(stream)
    with pytest.raises(InvalidRequestError):
        await anext(service.generate(message("r"), "alice"))
    other = service.generate(message("r"), "bob")
    assert (await anext(other)).request_id == "r"
    await other.aclose()
    assert not service.cancel("r", "bob")
    assert service.cancel("r", "alice")
    await stream.aclose()


async def test_a_cancel_without_regard_to_the_owner_is_noticed(monkeypatch):
    monkeypatch.setattr(
        GenerationService, "cancel", lambda self, request_id, owner="": self._router.cancel(request_id, "alice")
    )
    with pytest.raises(AssertionError):
        await test_only_the_key_that_started_a_request_cancels_it()
