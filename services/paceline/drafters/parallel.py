"""PARD: a draft model that predicts K tokens with one forward (An et al. 2025, arXiv 2504.18583).

    forward      .. context ─▶ path .. leaf ─▶ [pard] ─▶ [pard]
    candidates                     first      second     third token after the leaf

The rows of pard tokens are not kept. A node of such a block has no row until a node below it is expanded. Then it is
computed with that one, like a pending token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Leaf
from paceline.drafters.rows import Tail
from paceline.model.runner import ModelRunner


class ParallelDrafter(ModelDrafter):
    """A PARD model with the ``Drafter`` protocol."""

    kind = "pard"
    conditional = False

    def __init__(self, runner: ModelRunner, *, pard_token: int, tokens_per_leaf: int, **options: Any) -> None:
        """``pard_token``: the model's own id of the placeholder for future tokens; ``options``: a
        ``ModelDrafter``'s."""
        super().__init__(runner, **options)
        self.tokens_per_leaf = tokens_per_leaf
        self._tail = Tail((pard_token,) * (tokens_per_leaf - 1))

    def _tails(self, leaves: Sequence[Leaf]) -> list[Tail]:
        return [self._tail] * len(leaves)
