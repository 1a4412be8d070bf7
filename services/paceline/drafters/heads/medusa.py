"""Medusa: residual blocks on the target's last hidden state, one for each of the next tokens but the first.

Medusa (Cai et al. 2024, arXiv:2401.10774): head i predicts the token i + 1 places after the target's own next one,
``logits_i(x) = W_i (x + SiLU(A_i x + b_i))`` with x the state after the final norm. No head sees the others' tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.heads.module import Function, HeadModule, borrowed


class ResidualBlock(nn.Module):
    """``x + SiLU(linear(x))``, the identity when it is new."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        out: Tensor = x + F.silu(self.linear(x))
        return out


class Medusa(HeadModule):
    """Medusa heads with LM heads of their own (version 1), or the target's LM head for all (version 2).

    The state dict has the published keys of both: ``{head}.{layer}.linear.{weight,bias}`` and, with LM heads of their
    own, ``{head}.{num_layers}.weight``.
    """

    conditional = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_layers: int = 1,
        *,
        vocab_size: int | None = None,
        lm_head: Function | None = None,
        bias: bool = True,
        shared_vocab_size: int | None = None,
        token_map_size: int | None = None,
    ) -> None:
        """Makes the heads, which are the identity before their LM heads.

        Args:
            hidden_size: of the target.
            num_heads: tokens that they draft.
            num_layers: residual blocks in a row.
            vocab_size: of LM heads of their own; None: ``lm_head`` is the target's.
            lm_head: [..., hidden] -> [..., vocabulary], of the target; no parameters of this module.
            bias: of the residual blocks.
            shared_vocab_size: of one LM head of their own for all of them.
            token_map_size: number of the target's tokens that the LM heads have; the buffer ``token_map`` names them.
        """
        super().__init__()
        self.state_size, self.num_layers = hidden_size, num_layers
        self.max_depth = self.num_variants = num_heads
        for head in range(num_heads):
            layers: list[nn.Module] = [ResidualBlock(hidden_size, bias) for _ in range(num_layers)]
            if vocab_size is not None:
                layers.append(nn.Linear(hidden_size, vocab_size, bias=False))
            self.add_module(str(head), nn.Sequential(*layers))
        if shared_vocab_size is not None:
            self.lm_head = nn.Linear(hidden_size, shared_vocab_size, bias=False)
        self._shared = shared_vocab_size is not None
        if token_map_size is not None:
            self.register_buffer("token_map", torch.arange(token_map_size))
        self._lm_head = borrowed(lm_head)

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Returns the logits of head ``depth``."""
        return self._finish(self.get_submodule(str(depth))(state))

    def forward(self, states: Tensor) -> Tensor:
        """Logits ``[num_heads, ..., vocabulary]`` of all heads; an LM head that they share multiplies once."""
        return self._finish(torch.stack([self.get_submodule(str(depth))(states) for depth in range(self.num_variants)]))

    def _finish(self, out: Tensor) -> Tensor:
        """Logits of what heads have made, which are logits already where each has an LM head of its own."""
        if self._shared:
            return self.lm_head(out)  # type: ignore[no-any-return]
        return out if self._lm_head is None else self._lm_head(out)

    @property
    def target_ids(self) -> Tensor | None:
        """[draft vocabulary] ids of the target (vLLM's ``token_map``); None: the vocabulary is whole."""
        return self._buffers.get("token_map")
