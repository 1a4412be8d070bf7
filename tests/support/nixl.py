"""A stand-in for NIXL's agents, all in one process: exactly the methods that ``runtime/nixl.py`` calls.

A transfer is done when it has been looked at ``looks`` times, and copies its blocks then; as with NIXL, not before.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

Block = tuple[int, int, int]


@dataclass(eq=False)
class StandIn:
    """The agents of some targets."""

    looks: int = 3
    fails: bool = False
    """Transfers end with an error."""
    dead: set[str] = field(default_factory=set)
    """Names of agents whose processes have died: transfers from them end with an error."""
    agents: dict[str, Agent] = field(default_factory=dict)

    def make(self, name: str) -> Agent:
        """In place of ``make_agent``."""
        self.agents[name] = Agent(name, self)
        return self.agents[name]


@dataclass(eq=False)
class Handle:
    ours: list[Block]
    theirs: list[Block]
    name: str
    left: int


class Agent:
    """Parameters have the names of NIXL's."""

    def __init__(self, agent_name: str, world: StandIn) -> None:
        self.name, self.world = agent_name, world
        self.registered: list[tuple[int, int]] = []
        self.remote: list[str] = []
        self.handles: list[Handle] = []

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str | None = None) -> Any:
        assert mem_type == "DRAM"
        self.registered = [(address, size) for address, size, _, _ in reg_list]
        return self.registered

    def deregister_memory(self, dereg_list: Any) -> None:
        assert dereg_list is self.registered
        assert not self.handles
        self.registered = []

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.remote.append(metadata.decode())
        return self.remote[-1]

    def remove_remote_agent(self, agent: str) -> None:
        assert agent in self.remote
        self.remote = [name for name in self.remote if name != agent]

    def get_xfer_descs(self, descs: list[Block], mem_type: str | None = None) -> list[Block]:
        assert mem_type == "DRAM"
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str) -> Handle:
        assert operation == "READ"
        other = self.world.agents[remote_agent]
        assert [size for _, size, _ in local_descs] == [size for _, size, _ in remote_descs]
        assert self.has(local_descs)
        assert other.has(remote_descs), "NIXL_ERR_NOT_FOUND"
        self.handles.append(Handle(local_descs, remote_descs, remote_agent, self.world.looks))
        return self.handles[-1]

    def has(self, blocks: list[Block]) -> bool:
        """True if all blocks lie in registered memory."""
        return all(any(a <= at and at + n <= a + m for a, m in self.registered) for at, n, _ in blocks)

    def transfer(self, handle: Handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        handle.left -= 1
        if handle.left > 0:
            return "PROC"
        for (to, size, _), (source, _, _) in zip(handle.ours, handle.theirs, strict=True):
            ctypes.memmove(to, source, size)
        return "ERR" if self.world.fails or handle.name in self.world.dead else "DONE"

    def release_xfer_handle(self, handle: Handle) -> None:
        self.handles.remove(handle)
