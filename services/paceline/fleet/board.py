"""Inside Serve's controller: what the monitor of each application decided last. Written and read by ``follow.py``."""

from __future__ import annotations

BOARD: dict[str, tuple[float, dict[str, int]]] = {}
"""Name of the application -> when it was decided, in seconds of the epoch, and the wanted replicas by pool."""
