"""Reads the memory of another target's pages directly, by NIXL (NVIDIA Inference Xfer Library).

One agent of a target registers the memory of all its pages once. A read takes the other agent's metadata and the
addresses of both sides; the other side is passive. The agent belongs to a thread of its own: its calls are short, and
none of them waits for a transfer.

It was run with host memory, by NIXL's UCX backend between processes of one machine. No GPU has run it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from paceline.target.pages import PageMemory

log = logging.getLogger(__name__)

Block = tuple[int, int, int]
"""Address, bytes and device."""
_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
"""Between two looks at a transfer."""
_LONGEST_END_S = 1.0
"""For transfers under way when the agent is closed."""
_DONE, _UNDER_WAY = "DONE", "PROC"

T = TypeVar("T")


class UnendedError(OSError):
    """NIXL may still write to the blocks of a transfer."""


def is_installed() -> bool:
    """True if the package ``nixl`` can be found. Imports nothing."""
    return importlib.util.find_spec("nixl") is not None


def make_agent(name: str) -> Any:
    """NIXL's agent, with its UCX backend. Raises ImportError or what NIXL raises."""
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


class NixlAgent:
    """The agent of one target. Owned by the event loop."""

    def __init__(self, make: Callable[[str], Any] = make_agent) -> None:
        self.memory: PageMemory | None = None
        """What is registered; None: it is not ready, or closed."""
        self.metadata = b""
        """What another agent needs in order to read from this one."""
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-nixl")
        self._agent: Any = None
        self._registered: Any = None
        self._readers: Counter[str] = Counter()  # transfers by the name of the agent that they read from

    async def start(self, memory: PageMemory) -> None:
        """Registers memory, which must last until ``close``. Raises OSError."""
        await self._call(self._register, memory)
        self.memory = memory

    async def close(self) -> None:
        """Ends all transfers and gives the memory up. Idempotent. Raises OSError."""
        self.memory = None
        ends_at = time.monotonic() + _LONGEST_END_S
        while self._readers and time.monotonic() < ends_at:
            await asyncio.sleep(_LONGEST_PAUSE_S)
        await self._call(self._deregister)
        self._thread.shutdown(wait=False)

    async def read(self, metadata: bytes, theirs: Sequence[Block], ours: Sequence[Block]) -> None:
        """Reads blocks of another agent's memory into blocks of this one's; returns when all are here.

        It cannot be ended before: NIXL may write to ``ours`` for as long as the transfer is under way, but not longer.

        Raises:
            UnendedError: the transfer failed, and could not be ended either.
            OSError: the transfer failed, or the agent was closed.
        """
        name, handle, state = await self._call(self.begin_transfer, metadata, theirs, ours)
        pause_s = _FIRST_PAUSE_S
        while state == _UNDER_WAY and self.memory is not None:
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            state = await self._call(self._look, handle)
        try:
            await self._call(self._end, name, handle)
        except OSError as error:
            raise UnendedError(str(error)) from error
        if state != _DONE:
            raise OSError("NIXL has not read the memory of the other target")

    async def _call(self, function: Callable[..., T], *args: Any) -> T:
        """Calls a function in the agent's thread. What NIXL raises becomes OSError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(function, *args))
        except Exception as error:  # NIXL has exceptions of its own for each status
            raise OSError(f"NIXL: {type(error).__name__}: {error}") from error

    # -- in the thread -------------------------------------------------------------------------------------

    def _register(self, memory: PageMemory) -> None:
        if memory.kind == "cuda":
            import torch

            torch.cuda.set_device(memory.device)
        self._agent = self._make(f"paceline-{uuid.uuid4().hex}")
        blocks = [(address, num_pages * size, memory.device, "") for address, num_pages, size in memory.pools]
        self._registered = self._agent.register_memory(blocks, _KINDS[memory.kind])
        self._kind = _KINDS[memory.kind]
        self.metadata = self._agent.get_agent_metadata()

    def _deregister(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._agent = self._registered = None

    def begin_transfer(self, metadata: bytes, theirs: Sequence[Block], ours: Sequence[Block]) -> tuple[str, Any, str]:
        """Starts a read of another agent's blocks; returns its name, the handle and the first status."""
        name = self._agent.add_remote_agent(metadata)
        self._readers[name] += 1
        handle = None
        try:
            here, there = (self._agent.get_xfer_descs(list(blocks), self._kind) for blocks in (ours, theirs))
            handle = self._agent.initialize_xfer("READ", here, there, name)
            return name, handle, self._agent.transfer(handle)
        except Exception:
            self._end(name, handle)
            raise

    def _look(self, handle: Any) -> str:
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception as error:
            log.warning("NIXL: %s: %s", type(error).__name__, error)
            return "ERR"
        return state

    def _end(self, name: str, handle: Any) -> None:
        if handle is not None:
            self._agent.release_xfer_handle(handle)
        self._readers[name] -= 1
        if not self._readers[name]:
            del self._readers[name]
            self._agent.remove_remote_agent(name)
