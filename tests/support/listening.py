"""What processes of this machine listen on, as Linux tells it."""

import contextlib
import ipaddress
import os
import struct
from collections.abc import Iterable
from pathlib import Path


def listening_sockets(pids: Iterable[int]) -> set[tuple[int, str, int]]:
    """Process, address and port of each TCP socket that listens."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            host, port = local.split(":")
            words = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
            address = ipaddress.ip_address(words)
            if state == "0A":
                sockets[f"socket:[{inode}]"] = (str(getattr(address, "ipv4_mapped", None) or address), int(port, 16))
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if (link := os.readlink(descriptor)) in sockets:
                    found.add((pid, *sockets[link]))
    return found


def group_of(leader: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found
