"""Over HTTP: the choices of one request share a part of the places, and what can never be served is refused.

Mutants: a share for each choice of a body; a queue in order of arrival.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2 as httpx
import pytest
from tests.local.test_drafts import Scripted, token
from tests.security.conftest import digest, write_keys
from tests.support.letters import Letters
from tests.web.support import edge_over

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, TargetModel
from paceline.local import LocalPipeline
from paceline.messages import CloseSession, OpenSession
from paceline.security.keys import KeyRing
from paceline.web.app import make_app

PLACES, LIMIT = 2, 64


class Held(Scripted):
    """A target that ends the session that was opened first, each time that it is told to."""

    def __init__(self, emit: Any) -> None:
        super().__init__(emit, lambda _: ())
        self.opened: list[OpenSession] = []
        self.begun: list[OpenSession] = []
        """All that were ever opened, in their order."""
        self.lock = threading.Lock()

    def receive(self, messages: Sequence[Any]) -> None:
        with self.lock:
            for message in messages:
                if isinstance(message, OpenSession):
                    self.opened.append(message)
                    self.begun.append(message)
                elif isinstance(message, CloseSession):
                    self.opened = [one for one in self.opened if one.session_id != message.session_id]

    def end_one(self) -> bool:
        with self.lock:
            opened = self.opened.pop(0) if self.opened else None
        if opened is not None:
            self.emit([token(opened, 0, last=True)])
        return opened is not None


@pytest.fixture
def held() -> Iterator[tuple[LocalPipeline, Held]]:
    engines: list[Held] = []

    def build(emit: Any) -> Any:
        engines.append(Held(emit))
        return engines[0]

    pipeline = LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted", max_sessions=PLACES), worker="thread", pin_cores=False),
        target_factory=build,
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
    )
    with pipeline:
        yield pipeline, engines[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("with_keys", [False, True])
async def test_one_request_with_all_places_and_the_whole_queue_shuts_nobody_out(held, tmp_path, with_keys) -> None:
    pipeline, target = held
    keys = (
        KeyRing(write_keys(tmp_path / "keys.yaml", *({"name": name, "sha256": digest(name)} for name in ("ka", "kb"))))
        if with_keys
        else None
    )
    app = make_app(edge_over(pipeline, keys=keys, playground=False))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(key: str, n: int) -> Any:
            body = {"prompt": f"{key}c", "max_tokens": 4, "n": n}
            return await client.post("/v1/completions", json=body, headers=bearer(key))

        refused = await ask("ka", PLACES + LIMIT + 1)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["message"] == "n is 67: at most 66 sequences can run or wait here at once"
        assert error["param"] == "n"

        many = asyncio.create_task(ask("ka", PLACES + LIMIT))
        while pipeline.router.num_running < PLACES or pipeline.router.num_queued < LIMIT:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(ask("kb", 1))
        while pipeline.router.num_queued <= LIMIT:
            assert not other.done()
            await asyncio.sleep(0.01)
        if with_keys:
            again = await ask("ka", 1)
            assert again.status_code == 429
            assert int(again.headers["retry-after"]) >= 1
        while not other.done():
            target.end_one()
            await asyncio.sleep(0.01)
        assert (await other).status_code == 200
        order = [one.token_ids for one in target.begun]
        assert order.index(tuple(b"kbc")) < 2 * PLACES, "it waited for more than the next place"
        while not many.done():
            target.end_one()
            await asyncio.sleep(0)
        assert len((await many).json()["choices"]) == PLACES + LIMIT
