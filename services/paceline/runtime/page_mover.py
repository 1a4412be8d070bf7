"""Brings the KV pages of a session that moves from its old target to this one.

    OpenSession ─▶ Arrivals ─▶ PageMover ─▶ pages in the prefix cache ─▶ OpenSession to the engine

The engine gets a session once its pages have arrived or failed. From then on it is an ordinary session: its prefix is
found in the cache, or computed. Meanwhile its messages are kept back, in order.

Both ways ask the old target for the pages of a context. By *contents* it answers with their bytes. By *address* (NIXL)
it answers with the places of the pages, and the new target reads them. The pages stay unchanged until the call ends:

    new target   reserve ─▶ read ─▶ publish        a group of pages at a time
    old target   lend ───────────────▶ give back   all pages of the context
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from grpc import aio

from paceline.errors import PacelineError
from paceline.messages import CloseSession, OpenSession, ToDraft, ToTarget
from paceline.rpc.pages import Joined, parts_of
from paceline.rpc.transport import TOKEN_KEY, channel
from paceline.runtime.nixl import NixlAgent, UnendedError
from paceline.security.certificates import Certificates
from paceline.v1 import target_pb2, target_pb2_grpc

if TYPE_CHECKING:
    from paceline.target.pages import PageMemory, WantedPages

log = logging.getLogger(__name__)

READ_BYTES = 16 << 20
"""Pages that an engine reads or writes between two steps, unless one page is more."""
SILENCE_S = 5.0
"""A target that sends no part for this long has hung."""
_MOST_AT_ONCE = 4
"""Sessions whose pages come at the same time; further ones wait."""
LENT_S = 20.0
"""Longest time that a target keeps pages for another one that reads them by address."""
READ_S = 10.0
"""Pages that another target has not read after this time are not taken. It is much less than ``LENT_S``, because it
starts earlier."""
MOST_BLOCKS = 4096
"""Blocks of memory that are read at once, unless one page is more."""

T = TypeVar("T")
Call = Callable[[Callable[[Any], Any]], Awaitable[Any]]
"""Calls a function with the engine in the engine's thread, between two steps (``EngineHost.call``)."""


@dataclass(slots=True)
class Moves:
    """Counts of moves to this target."""

    pages: int = 0
    bytes: int = 0
    failures: int = 0
    """Sessions whose pages, or some of them, did not come by an error or in time."""


class PageMover(Protocol):
    """Moves pages from the memory of one target's engine to that of another one."""

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        """Brings the pages of a session's context that this target lacks and ``source`` (``host:port``) has.

        Returns the numbers of pages and bytes. Raises OSError, ValueError, TimeoutError or PacelineError if the source
        fails; the pages that came before are of use.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """What it counts, of the counters of a target."""
        ...

    async def start(self) -> None:
        """Prepares for moves, with the engine. Raises OSError or EngineError."""
        ...

    async def close(self) -> None:
        """Releases the engine's resources. Idempotent."""
        ...


class HostMemoryMover:
    """Copies pages to the host's memory, over gRPC, and to the device: for any engine and network."""

    def __init__(self, call: Call, token: str = "", certificates: Certificates | None = None) -> None:
        """``call``: to this target's engine. ``token``, ``certificates``: for the other target."""
        self._call, self._certificates = call, certificates
        self._metadata = ((TOKEN_KEY, token),) if token else ()

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        """Implements ``PageMover.move``."""
        return await self._move(source, message, self._receive)

    def counters(self) -> Mapping[str, int]:
        """Implements ``PageMover.counters``: there are none."""
        return {}

    async def start(self) -> None:
        """Implements ``PageMover.start``."""

    async def close(self) -> None:
        """Implements ``PageMover.close``."""

    async def _move(
        self,
        source: str,
        message: OpenSession,
        receive: Callable[[WantedPages, AsyncIterator[Any]], Awaitable[tuple[int, int]]],
        *,
        by_address: bool = False,
    ) -> tuple[int, int]:
        wanted: WantedPages | None = await self._call(_pages("wanted", message.token_ids, message.cache_salt))
        if wanted is None:
            return 0, 0
        request = target_pb2.PagesRequest(
            identity=wanted.identity,
            token_ids=wanted.token_ids,
            cache_salt=message.cache_salt,
            first_page=wanted.first,
            by_address=by_address,
        )
        try:
            async with channel(source, self._certificates) as connection:
                stub: Any = target_pb2_grpc.TargetServiceStub(connection)
                return await receive(wanted, aiter(stub.Pages(request, metadata=self._metadata)))
        except aio.AioRpcError as error:
            raise OSError(f"{error.code().name}: {error.details()}") from None

    async def _receive(self, wanted: WantedPages, parts: Any) -> tuple[int, int]:
        joined = Joined(wanted.page_bytes, len(wanted.hashes) - wanted.first)
        at, arrived, room = wanted.first, list[bytes](), True
        try:
            while room:
                part = await _next(parts)
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


class NixlMover(HostMemoryMover):
    """Reads pages from the old target's memory where both have NIXL; else, and after a failure, by contents."""

    def __init__(
        self, call: Call, token: str = "", certificates: Certificates | None = None, *, agent: NixlAgent
    ) -> None:
        """``agent``: of this target. For the others see ``HostMemoryMover``."""
        super().__init__(call, token, certificates)
        self.agent = agent
        self._num_bytes = self._num_failures = 0
        self.by_contents: set[str] = set()
        """Addresses of targets from which NIXL has failed to read."""
        self.transfers: set[asyncio.Task[int]] = set()
        """Transfers under way, those that no session waits for included."""

    async def start(self) -> None:
        """Registers the memory of the engine's pages, if they are moved at all."""
        memory: PageMemory | None = await self._call(_pages("memory"))
        if memory is not None:
            await self.agent.start(memory)

    async def close(self) -> None:
        """Ends all transfers, and gives the memory up."""
        with contextlib.suppress(OSError):
            await self.agent.close()
        if self.transfers:
            await asyncio.wait(self.transfers, timeout=1.0)

    def counters(self) -> Mapping[str, int]:
        """Bytes that came by NIXL, and how often they did not."""
        return {"page_bytes_by_nixl": self._num_bytes, "nixl_failed": self._num_failures}

    async def move(self, source: str, message: OpenSession) -> tuple[int, int]:
        """Implements ``PageMover.move``."""
        if self.agent.memory is None or source in self.by_contents:
            return await super().move(source, message)
        read: list[int] = []
        try:
            return await self._move(source, message, functools.partial(self._read_or_receive, read), by_address=True)
        except (OSError, ValueError) as error:
            log.warning("NIXL is no longer used for KV pages of %s: %s", source, error)
            self.by_contents.add(source)
            self._num_failures += 1
        num_pages, num_bytes = await super().move(source, message)
        size: int = await self._call(lambda engine: engine.pages.page_bytes)
        return num_pages + sum(read), num_bytes + sum(read) * size

    async def _read_or_receive(
        self, read: list[int], wanted: WantedPages, parts: AsyncIterator[Any]
    ) -> tuple[int, int]:
        """Reads the pages, if the old target says where they are; else it sends their contents. ``read``: to which the
        numbers of pages that were read are appended."""
        give_up_at, call_ended = time.monotonic() + READ_S, asyncio.Event()
        first = await _next(parts)
        if first is None or not first.HasField("places"):
            return await self._receive(wanted, _chained(first, parts))
        try:
            pages = first.places.pages[: len(wanted.hashes) - wanted.first]
            for group in _groups(pages, max(1, MOST_BLOCKS // max(1, len(first.places.addresses)))):
                at = wanted.first + sum(read)
                transfer = asyncio.create_task(
                    self.transfer_pages(wanted, at, first.places, group, give_up_at, call_ended)
                )
                self.transfers.add(transfer)
                transfer.add_done_callback(self._forget)
                try:
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + give_up_at - time.monotonic()):
                        read.append(await asyncio.shield(transfer))  # NIXL writes to its pages until it has ended
                except TimeoutError:
                    raise OSError(f"pages were not read within {READ_S:g} s") from None
                if not read[-1]:
                    break
        finally:
            call_ended.set()
            if sum(read):
                await self._call(_pages("settle", wanted))
        return sum(read), sum(read) * wanted.page_bytes

    async def transfer_pages(
        self,
        wanted: WantedPages,
        at: int,
        places: target_pb2.PagePlaces,
        group: Sequence[int],
        give_up_at: float,
        call_ended: asyncio.Event,
    ) -> int:
        """Brings pages from ``at`` of the context on; returns how many, 0 if there is no room for them.

        Once the call has ended, the old target reuses its pages, so later data are not taken.
        """
        key = object()
        reserve, publish = _pages("reserve", key, wanted, at, len(group)), _pages("publish", key, wanted, at)
        ours, memory = await self._call(lambda engine: (reserve(engine), engine.pages.memory()))
        if not ours:
            return 0
        try:
            if memory is None or memory != self.agent.memory:
                raise OSError("the memory of the pages is not registered any more")
            if len(places.addresses) != len(memory.pools):
                raise ValueError(f"{len(places.addresses)} pools of pages came: {len(memory.pools)} are expected")
            theirs = memory.blocks(group, places.addresses, places.device)
            await self.agent.read(places.agent, theirs, memory.blocks(ours))
            if call_ended.is_set() or time.monotonic() > give_up_at:
                raise OSError("the pages came too late")
        except UnendedError:
            raise  # their memory is never used again
        except BaseException:
            await self._call(_pages("give_back", key))
            raise
        num_pages: int = await self._call(publish)
        self._num_bytes += num_pages * wanted.page_bytes
        return num_pages

    def _forget(self, transfer: asyncio.Task[int]) -> None:
        self.transfers.discard(transfer)
        if not transfer.cancelled():
            transfer.exception()  # its waiter has it


async def _next(parts: AsyncIterator[Any]) -> Any:
    """The next part; None: there is none. Raises OSError if the other target is silent."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(parts, None)
    except TimeoutError:
        raise OSError(f"no part of a page came for {SILENCE_S:g} s") from None


async def _chained(first: Any, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
        async for part in parts:
            yield part


async def serve_pages(
    call: Call,
    request: target_pb2.PagesRequest,
    write: Callable[[Any], Awaitable[None]],
    agent: NixlAgent | None = None,
) -> None:
    """Answers ``TargetService.Pages``: reads pages of the engine, a bounded part at a time, and waits for the network
    before the next. With ``agent``, and on request, sends their addresses and keeps them until the call ends."""
    token_ids, salt, first = list(request.token_ids), request.cache_salt, request.first_page
    hashes: list[bytes] = await call(_pages("held", token_ids, salt, request.identity, first))
    if request.by_address and agent is not None and hashes and await _lend(call, hashes, write, agent):
        return
    page_bytes: int = await call(lambda engine: engine.pages.page_bytes)
    for group in _groups(hashes, max(1, READ_BYTES // page_bytes)):
        contents: list[bytes] = await call(_pages("read", group))
        for part in parts_of(contents):
            await write(part)
        if len(contents) < len(group):
            return


async def _lend(call: Call, hashes: Sequence[bytes], write: Callable[[Any], Awaitable[None]], agent: NixlAgent) -> bool:
    """Says where pages are and keeps them for ``LENT_S``, or until it is cancelled; False: their memory is not
    registered."""
    key = object()
    lend = _pages("lend", key, hashes)
    try:
        pages, memory = await call(lambda engine: (lend(engine), engine.pages.memory()))
        if memory is None or memory != agent.memory:
            return False
        addresses = [address for address, _, _ in memory.pools]
        places = target_pb2.PagePlaces(agent=agent.metadata, device=memory.device, addresses=addresses, pages=pages)
        await write(target_pb2.PagesPart(places=places))
        await asyncio.sleep(LENT_S)
        return True
    finally:
        with contextlib.suppress(PacelineError):  # the engine has ended
            await asyncio.shield(asyncio.ensure_future(call(_pages("give_back", key))))


def _pages(name: str, *args: Any) -> Callable[[Any], Any]:
    """A call of a method of an engine's pages (``PageStore``)."""
    return lambda engine: getattr(engine.pages, name)(*args)


def _groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


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

    def counters(self) -> dict[str, int]:
        """Of the status of a target."""
        moves = self.moves
        own = {"pages_moved": moves.pages, "page_bytes_moved": moves.bytes, "moves_failed": moves.failures}
        return own | dict(self._mover.counters())

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
