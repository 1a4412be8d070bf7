"""Computes the MLP of a model's last layer only for tokens whose logits a step returns: nothing else reads its output.

In a prompt, only the last token has logits. The last layer computes all other tokens for their keys and values, which
do not depend on its MLP. The MLP is most of a layer, so prompts take about 1 / L less time in a model of L layers.
Steps that return all logits take as long as before. This serves only compiled steps whose products are native
(``compiled/linear.py``): there a token's bits do not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import ConfigError
from paceline.model.compiled.linear import PackedLinear
from paceline.model.features import OUT, STREAMS, Features
from paceline.model.states import find_layers

LANES = 64
"""Numbers that elementwise kernels take at a time (``tails.py``): of outputs in multiples of it no token is a tail."""


class LogitRows:
    """Replaces the forward of one MLP while a step is traced."""

    def __init__(self, mlp: nn.Module) -> None:
        self._mlp = mlp
        self._forward = mlp.forward
        self._index: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, features: Features | None) -> LogitRows | None:
        """Finds the MLP of a model's last layer; None if it must compute all rows.

        ``features``: the states that the model returns; None: none. If they include all positions after the last layer,
        all rows are needed.
        """
        try:
            _, layers = find_layers(model, type(model).__name__)
        except ConfigError:
            return None
        last = {OUT, len(layers)}
        if (
            features is not None
            and features.every_position
            and any(b in last or b <= STREAMS for b in features.boundaries)
        ):
            return None
        mlp = getattr(layers[-1], "mlp", None)
        if mlp is None or not type(mlp).__name__.endswith("MLP"):  # experts choose by token
            return None
        products = [part for part in mlp.modules() if isinstance(part, nn.Linear | PackedLinear)]
        return cls(mlp) if products and not any(part.out_features % LANES for part in products) else None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the MLP computes only the rows that ``expect`` names."""
        self._mlp.forward = self._wanted
        try:
            yield
        finally:
            del self._mlp.forward
            self._index = None

    def expect(self, logits_index: Tensor) -> None:
        """Sets the rows ``[R]`` of the next step whose logits are returned."""
        self._index = logits_index

    def _wanted(self, x: Tensor) -> Tensor:
        """``[1, T, hidden] -> [1, T, hidden]``, zero in the rows that nobody reads."""
        assert self._index is not None, "expect comes first"
        return torch.zeros_like(x).index_copy(1, self._index, self._forward(x.index_select(1, self._index)))
