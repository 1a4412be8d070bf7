"""Brings the KV pages of a session that moves from its old target to this one.

    OpenSession ─▶ Arrivals ─▶ PageMover ─▶ pages in the prefix cache ─▶ OpenSession to the engine

The engine is told of a session once its pages are here, or will not come; then it is an ordinary session, whose prefix
is found or computed. Meanwhile its messages are kept back, in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from grpc import aio

from paceline.errors import PacelineError
from paceline.messages import CloseSession, OpenSession, ToDraft, ToTarget
from paceline.rpc.pages import Joined, parts_of
from paceline.rpc.transport import TOKEN_KEY, channel
from paceline.security.certificates import Certificates
from paceline.v1 import target_pb2, target_pb2_grpc

if TYPE_CHECKING:
    from paceline.target.pages import WantedPages

log = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""Pages that an engine reads or writes between two steps, unless one page is more."""
_SILENCE_S = 5.0
"""A target that sends no part for this long has hung."""
_MOST_AT_ONCE = 4
"""Sessions whose pages come at the same time; further ones wait."""

T = TypeVar("T")
Call = Callable[[Callable[[Any], Any]], Awaitable[Any]]
"""Calls a function with the engine in the engine's thread, between two steps (``EngineHost.call``)."""


@dataclass(slots=True)
class Moves:
    """Counts of what was moved to this target."""

    pages: int = 0
    bytes: int = 0
    failures: int = 0
    """Sessions whose pages, or some of them, did not come by an error or in time."""


class PageMover(Protocol):
    """Moves pages from the memory of one target's engine to that of another one.

    ``HostMemoryMover`` copies them through the memory of both hosts and over gRPC. NIXL, which lets one device read the
    other's memory, would be another implementation: it needs the places of ``held`` pages instead of their contents.
    """

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        """Brings the pages of a session's context that this target lacks and ``source`` (``host:port``) has.

        Returns the numbers of pages and bytes. Raises OSError, ValueError, TimeoutError or PacelineError if the source
        fails; the pages that came before are of use.
        """
        ...


class HostMemoryMover:
    """Copies pages to the host's memory, over gRPC, and to the device: for any engine and network."""

    def __init__(self, call: Call, token: str = "", certificates: Certificates | None = None) -> None:
        """``call``: to this target's engine. ``token``, ``certificates``: for the other target."""
        self._call, self._certificates = call, certificates
        self._metadata = ((TOKEN_KEY, token),) if token else ()

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        """Implements ``PageMover.move``."""
        wanted: WantedPages | None = await self._call(_pages("wanted", message.token_ids, message.cache_salt))
        if wanted is None:
            return 0, 0
        request = target_pb2.PagesRequest(
            identity=wanted.identity,
            token_ids=message.token_ids,
            cache_salt=message.cache_salt,
            first_page=wanted.first,
        )
        try:
            async with channel(source, self._certificates) as connection:
                stub: Any = target_pb2_grpc.TargetServiceStub(connection)
                return await self._receive(wanted, aiter(stub.Pages(request, metadata=self._metadata)))
        except aio.AioRpcError as error:
            raise OSError(f"{error.code().name}: {error.details()}") from None

    async def _receive(self, wanted: WantedPages, parts: Any) -> tuple[int, int]:
        joined = Joined(wanted.page_bytes, len(wanted.hashes) - wanted.first)
        at, arrived, room = wanted.first, list[bytes](), True
        try:
            while room:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise OSError(f"no part of a page came for {_SILENCE_S:g} s") from None
                if part is not None:
                    arrived += joined.add(part)
                if arrived and (part is None or len(arrived) * wanted.page_bytes >= READ_BYTES):
                    written: int = await self._call(_pages("write", wanted, at, arrived))
                    at, arrived, room = at + written, [], written > 0
                if part is None:
                    break
        finally:
            if at > wanted.first:
                await self._call(_pages("settle", wanted))
        num_pages = at - wanted.first
        return num_pages, num_pages * wanted.page_bytes


async def serve_pages(call: Call, request: target_pb2.PagesRequest, write: Callable[[Any], Awaitable[None]]) -> None:
    """Answers ``TargetService.Pages``: reads pages of the engine, a bounded part at a time, and waits for the network
    before the next."""
    token_ids, salt, first = list(request.token_ids), request.cache_salt, request.first_page
    hashes: list[bytes] = await call(_pages("held", token_ids, salt, request.identity, first))
    page_bytes: int = await call(lambda engine: engine.pages.page_bytes)
    for group in _groups(hashes, max(1, READ_BYTES // page_bytes)):
        contents: list[bytes] = await call(_pages("read", group))
        for part in parts_of(contents):
            await write(part)
        if len(contents) < len(group):
            return


def _pages(name: str, *args: Any) -> Callable[[Any], Any]:
    """A call of a method of an engine's pages (``PageStore``)."""
    return lambda engine: getattr(engine.pages, name)(*args)


def _groups(hashes: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (hashes[start : start + size] for start in range(0, len(hashes), size))


@dataclass(slots=True, eq=False)
class _Arrival:
    """A session that waits for its pages, with its messages so far."""

    opened: OpenSession
    messages: list[ToTarget | ToDraft] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Arrivals:
    """Sessions whose pages are on their way. Owned by the event loop."""

    def __init__(self, mover: PageMover, deliver: Callable[[Sequence[ToTarget | ToDraft]], None]) -> None:
        """``deliver`` gives the engine the messages of a session that waits no longer."""
        self.moves = Moves()
        self._mover, self._deliver = mover, deliver
        self._waiting: dict[str, _Arrival] = {}
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    def __len__(self) -> int:
        return len(self._waiting)

    def idle(self, messages: Sequence[ToTarget | ToDraft]) -> bool:
        """True if none of these messages is kept back."""
        return not self._waiting and not any(isinstance(each, OpenSession) for each in messages)

    def keeps(self, message: ToTarget | ToDraft) -> bool:
        """Keeps a message back if its session waits for pages, or does from this message on."""
        arrival = self._waiting.get(message.session_id)
        if isinstance(message, OpenSession):
            if arrival is not None:
                if message.epoch <= arrival.opened.epoch:
                    return True  # it comes twice
                self._drop(arrival)
            if not message.pages_from:
                return False
            arrival = self._waiting[message.session_id] = _Arrival(message, [message])
            arrival.task = asyncio.create_task(self._fetch(arrival), name="paceline-pages")
            return True
        if arrival is None:
            return False
        if isinstance(message, CloseSession) and message.epoch == arrival.opened.epoch:
            self._drop(arrival)
        else:
            arrival.messages.append(message)
        return True

    def stop(self) -> None:
        """Ends all moves, and forgets their sessions."""
        for arrival in list(self._waiting.values()):
            self._drop(arrival)

    def _drop(self, arrival: _Arrival) -> None:
        del self._waiting[arrival.opened.session_id]
        if arrival.task is not None:
            arrival.task.cancel()

    async def _fetch(self, arrival: _Arrival) -> None:
        opened, started = arrival.opened, time.monotonic()
        reason = ""
        try:
            async with asyncio.timeout(opened.pages_timeout_s), self._places:
                num_pages, num_bytes = await self._mover.move(opened.pages_from, opened)
            self.moves.pages += num_pages
            self.moves.bytes += num_bytes
            counts = num_pages, num_bytes / 1e6, opened.pages_from, time.monotonic() - started
            log.info("%d KV pages (%.1f MB) of a session came from %s in %.3f s", *counts)
        except TimeoutError:
            reason = f"they did not come within {opened.pages_timeout_s:g} s"
        except (OSError, ValueError, PacelineError) as error:
            reason = str(error)
        except Exception as error:  # an error of ours: the session must be served all the same
            log.exception("unexpected error in background task %s", "paceline-pages")
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self.moves.failures += 1
            log.warning("KV pages of a session are computed again: %s: %s", opened.pages_from, reason)
        if self._waiting.get(opened.session_id) is arrival:
            del self._waiting[opened.session_id]
            self._deliver(arrival.messages)
