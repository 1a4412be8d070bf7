"""The draft model in the target's own process: a head that needs no hidden states, and no link.

It drafts when it is asked, while the target waits; a draft in a pool of its own works while the target verifies.
"""

from __future__ import annotations

from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Stateless


class DraftModelHead(Stateless, ModelDrafter):
    """A ``ModelDrafter`` with the ``Head`` protocol. Its keys and values are in a cache of its own."""

    kind = "draft_model"
