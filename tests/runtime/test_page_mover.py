"""Pages between two targets over real connections: what comes, what does not, and that sessions are served in any case.

The engines' pages are real, in this thread; the service in ``tests/service/test_moved_pages.py`` is whole.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.lossless.test_moved_pages import SESSIONS, Engine
from tests.support.models import pair

from paceline.errors import EngineError
from paceline.messages import CloseSession, DraftState, OpenSession
from paceline.rpc.pages import parts_of
from paceline.rpc.transport import start_server
from paceline.runtime import page_mover
from paceline.runtime.page_mover import Arrivals, HostMemoryMover, serve_pages
from paceline.target.pages import PageStore
from paceline.v1 import target_pb2_grpc
from paceline.v1.target_pb2 import PagesPart, PagesRequest

NUM_PAGES = 5
TOKEN = "secret"


def call_of(store: PageStore) -> Callable[..., Any]:
    async def call(work: Callable[[Any], Any]) -> Any:
        await asyncio.sleep(0)
        return work(SimpleNamespace(pages=store))

    return call


@functools.cache
def context() -> tuple[PageStore, tuple[int, ...]]:
    """A target that has computed a context, and the context."""
    source = Engine(pair("llama")[0])
    source.open(SESSIONS["s7"].opened("s7"))
    return source.engine.pages, tuple(source.finish()["s7"][:330])


def opened(timeout_s: float = 20.0, epoch: int = 2, source: str = "") -> OpenSession:
    message = SESSIONS["s7"].opened("s7", context()[1], epoch=epoch)
    return replace(message, pages_from=source, pages_timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def serving(answer: Callable[[PagesRequest, Any], Any]) -> AsyncIterator[str]:
    """The address of a target that answers so."""

    class Service:
        async def Rounds(self, requests: Any, context: Any) -> None:
            raise AssertionError

        async def Pages(self, request: PagesRequest, context: Any) -> None:
            await answer(request, context)

    add = functools.partial(target_pb2_grpc.add_TargetServiceServicer_to_server, Service())
    server, port = await start_server(add, "127.0.0.1", 0, TOKEN)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def honest(request: PagesRequest, context_: Any) -> None:
    await serve_pages(call_of(context()[0]), request, context_.write)


def mover_of(target: Engine, token: str = TOKEN) -> HostMemoryMover:
    return HostMemoryMover(call_of(target.engine.pages), token)


async def move(target: Engine, answer: Callable[..., Any], token: str = TOKEN) -> tuple[int, int]:
    async with serving(answer) as address:
        return await mover_of(target, token).move(address, opened())


@pytest.mark.parametrize("read_bytes", [1, 3 * 32768, 4 << 20])
async def test_all_pages_come_whatever_the_size_of_a_part(read_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "READ_BYTES", read_bytes)
    target = Engine(pair("llama")[0])
    assert await move(target, honest) == (NUM_PAGES, NUM_PAGES * 32768)
    target.open(opened())
    target.step()
    assert target.engine.stats.tokens_computed == 330 - NUM_PAGES * 64
    assert await move(target, honest) == (0, 0)


async def test_pages_come_as_far_as_there_is_room() -> None:
    target = Engine(pair("llama")[0], pages=4)
    assert await move(target, honest) == (4, 4 * 32768)
    wanted = target.engine.pages.wanted(context()[1], "")
    assert wanted is None


async def test_a_session_of_a_short_context_asks_nobody() -> None:
    async def nobody(request: PagesRequest, context: Any) -> None:
        raise AssertionError

    target = Engine(pair("llama")[0])
    async with serving(nobody) as address:
        assert await mover_of(target).move(address, SESSIONS["s2"].opened("s2")) == (0, 0)


# -- faults ------------------------------------------------------------------------------------------------------------


async def dies_midway(request: PagesRequest, context_: Any) -> None:
    store, tokens = context()
    hashes = store.held(tokens, "", request.identity, 0)
    for part in parts_of(store.read(hashes[:3])):
        await context_.write(part)
    await context_.abort(grpc.StatusCode.UNAVAILABLE, "the engine has died")


async def sends(parts: Sequence[PagesPart], context_: Any) -> None:
    for part in parts:
        await context_.write(part)


async def answers_garbage(request: PagesRequest, context_: Any) -> None:
    await sends([PagesPart(data=b"x" * 100, crc32=7)], context_)


async def answers_too_much(request: PagesRequest, context_: Any) -> None:
    await sends(list(parts_of([bytes(32768)] * (NUM_PAGES + 1))), context_)


async def ends_within_a_page(request: PagesRequest, context_: Any) -> None:
    await sends(list(parts_of([bytes(100)])), context_)


async def hangs(request: PagesRequest, context_: Any) -> None:
    await asyncio.sleep(600)


async def does_not_know_the_call(request: PagesRequest, context_: Any) -> None:
    await context_.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


FAULTS = {
    dies_midway: (3, "UNAVAILABLE: the engine has died"),
    answers_garbage: (0, "checksum is another"),
    answers_too_much: (None, "32768 bytes: 1 to 0 are expected"),
    hangs: (0, r"no part of a page came for 0\.2 s"),
    does_not_know_the_call: (0, "UNIMPLEMENTED"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_what_came_before_a_fault_is_used(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_mover, "READ_BYTES", 32768)
    if fault is hangs:
        monkeypatch.setattr(page_mover, "SILENCE_S", 0.2)
    num_pages, reason = FAULTS[fault]
    target = Engine(pair("llama")[0])
    with pytest.raises((OSError, ValueError), match=reason):
        await move(target, fault)
    if num_pages is not None:
        wanted = target.engine.pages.wanted(context()[1], "")
        assert wanted is not None
        assert wanted.first == num_pages
    target.engine.check_integrity()


async def test_a_page_that_is_not_whole_is_not_taken() -> None:
    target = Engine(pair("llama")[0])
    assert await move(target, ends_within_a_page) == (0, 0)


async def test_nobody_is_given_pages_without_the_token() -> None:
    with pytest.raises(OSError, match="UNAUTHENTICATED"):
        await move(Engine(pair("llama")[0]), honest, "guessed")


async def test_another_identity_is_given_none() -> None:
    assert await move(Engine(pair("llama")[1]), honest) == (0, 0)


# -- sessions ----------------------------------------------------------------------------------------------------------


class Mover:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended: dict[str, asyncio.Future[tuple[int, int]]] = {}

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        self.asked.append(source)
        ended = self.ended[message.session_id] = asyncio.get_running_loop().create_future()
        return await ended


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def state(epoch: int) -> DraftState:
    return DraftState("s7", epoch, available=False)


async def test_messages_of_a_session_wait_for_its_pages_in_order() -> None:
    mover, told = Mover(), list[Any]()
    arrivals = Arrivals(mover, told.extend)
    first, second = opened(source="a"), state(2)
    assert arrivals.keeps(first)
    assert arrivals.keeps(second)
    assert arrivals.keeps(CloseSession("s7", 1)), "of an older epoch: the engine drops it"
    assert not arrivals.keeps(CloseSession("other", 1))
    assert not arrivals.keeps(replace(first, session_id="other", pages_from=""))
    await turn()
    assert (told, len(arrivals)) == ([], 1)
    mover.ended["s7"].set_result((5, 500))
    await turn()
    assert told == [first, second, CloseSession("s7", 1)]
    assert (arrivals.moves.pages, arrivals.moves.bytes, arrivals.moves.failures, len(arrivals)) == (5, 500, 0, 0)
    assert not arrivals.keeps(state(2)), "it is the engine's now"


@pytest.mark.parametrize(
    "error", [OSError("no"), ValueError("no"), EngineError("no"), TimeoutError(), ZeroDivisionError("ours")]
)
async def test_a_session_whose_pages_do_not_come_is_served_all_the_same(error: Exception) -> None:
    mover, told = Mover(), list[Any]()
    arrivals = Arrivals(mover, told.extend)
    assert arrivals.keeps(message := opened(source="a"))
    await turn()
    mover.ended["s7"].set_exception(error)
    await turn()
    assert (told, arrivals.moves.failures, len(arrivals)) == ([message], 1, 0)


async def test_a_session_waits_for_its_time_and_no_longer() -> None:
    told = list[Any]()
    arrivals = Arrivals(Mover(), told.extend)
    assert arrivals.keeps(message := opened(0.05, source="a"))
    while not told:
        await asyncio.sleep(0.01)
    assert (told, arrivals.moves.failures) == ([message], 1)


async def test_a_session_that_ends_meanwhile_is_never_opened() -> None:
    mover, told = Mover(), list[Any]()
    arrivals = Arrivals(mover, told.extend)
    assert arrivals.keeps(opened(source="a"))
    await turn()
    assert arrivals.keeps(CloseSession("s7", 2))
    await turn()
    assert mover.ended["s7"].cancelled()
    assert (told, len(arrivals), arrivals.moves.failures) == ([], 0, 0)


async def test_a_session_that_is_opened_again_meanwhile_waits_anew() -> None:
    mover, told = Mover(), list[Any]()
    arrivals = Arrivals(mover, told.extend)
    assert arrivals.keeps(opened(source="a"))
    await turn()
    again = opened(epoch=3, source="b")
    assert arrivals.keeps(again)
    assert arrivals.keeps(opened(epoch=3, source="c")), "it comes twice"
    await turn()
    assert mover.asked == ["a", "b"]
    mover.ended["s7"].set_result((0, 0))
    await turn()
    assert told == [again]


async def test_few_sessions_are_moved_at_once() -> None:
    mover, told = Mover(), list[Any]()
    arrivals = Arrivals(mover, told.extend)
    for i in range(16):
        assert arrivals.keeps(replace(opened(source="a"), session_id=f"m{i}"))
    for i in range(16):
        await turn()
        assert len(mover.asked) == min(16, i + 4)
        mover.ended[f"m{i}"].set_result((1, 1))
    await turn()
    assert [message.session_id for message in told] == [f"m{i}" for i in range(16)]
    arrivals.stop()
