"""A drafter of an installed package: an entry point of the group ``paceline.drafters``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.config.engines import Growing
from paceline.config.methods.entry import PoolMethod, Row
from paceline.config.replicas import Drafts


class PluginOptions(Growing):
    """Options of a drafter that an installed package offers as an entry point of the group ``paceline.drafters``."""

    drafter: str = Field(min_length=1)
    """Name of the entry point."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class PluginDraftConfig(Drafts):
    """The pool of drafts: a drafter of an installed package."""

    kind: Literal["plugin"] = "plugin"
    engine_kwargs: PluginOptions

    @property
    def drafter_name(self) -> str:
        """The name of the entry point."""
        return self.engine_kwargs.drafter


POOL = PoolMethod(
    config=PluginDraftConfig,
    build="paceline.drafters.plugins:build",
    host_bytes=lambda options: 0,  # its own is not known
    examine="paceline.drafters.available:of_plugin",
    acceptance={},  # known to its author
    rows=(
        Row(
            name="plugin",
            source="your own ([example](own-drafters.md))",
            reads="",
            when="whatever you know of your texts",
            options={"drafter": "bigrams"},
        ),
    ),
)
