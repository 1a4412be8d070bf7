"""The latest decision of each application's monitor, inside Serve's controller. ``follow.py`` writes and reads it."""

from __future__ import annotations

BOARD: dict[str, tuple[float, dict[str, int]]] = {}
"""Name of the application -> time of the decision, in seconds of the epoch, and the decided size of each pool."""
