"""Names of the drafters that installed packages offer."""

from __future__ import annotations

from importlib.metadata import entry_points

DRAFTERS = "paceline.drafters"
"""Group of their entry points."""


def plugin_names() -> list[str]:
    """Names of the drafters that installed packages offer; ``drafters/plugins.py`` makes them."""
    return sorted({point.name for point in entry_points(group=DRAFTERS)})
