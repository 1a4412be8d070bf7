"""TCP ports that no process of this machine listens on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.preflight.ports import is_free

PORT_RANGE = (26000, 32000)
"""Single ports are drawn from here."""
_BLOCK_RANGE, BLOCK = (10000, 26000), 64
"""Blocks of ``BLOCK`` consecutive ports are drawn from here."""


def free_ports(count: int, taken: Sequence[int] = ()) -> list[int]:
    """Returns different unused ports, below the range that systems assign to outgoing connections: a free port there
    stays free while Ray starts and takes dozens. ``taken``: ports that are about to be used."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(*PORT_RANGE)
        if port not in (*ports, *taken) and is_free(port):
            ports.append(port)
    return ports


def free_block() -> int:
    """Returns the first of ``BLOCK`` consecutive unused ports."""
    while True:
        first = random.randrange(*_BLOCK_RANGE, BLOCK)
        if all(is_free(port) for port in range(first, first + BLOCK)):
            return first
