"""The draft model in the target's own process: a head that needs no hidden states, and no link.

It drafts when it is asked, while the target waits; a draft in a pool of its own works while the target verifies.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Features, Fed
from paceline.model.kv_cache import KVCache, LayerSpec


class DraftModelHead(ModelDrafter):
    """A ``ModelDrafter`` behind the ``Head`` protocol. Its keys and values are in a cache of its own."""

    kind = "draft_model"
    features: Features | None = None
    layers: tuple[LayerSpec, ...] = ()

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Takes nothing of the target's cache."""

    def feed(self, fed: Sequence[Fed]) -> None:
        """Is never called: it has no ``features``."""
        raise AssertionError("a draft model reads no hidden states")
