"""The MLP speculator: a state that each drafted token moves on by one small layer.

Accelerating Production LLMs with Combined Token/Embedding Speculators (Wertheimer et al. 2024, arXiv:2404.19124), with
the weights of fms-extras: ``s' = GELU(LN_i(P_i s + (e / w) E_i[token]))``, ``logits_i = H_i s'``, where w =
0.5^(0.5 / n), e = sqrt((1 - w^2) inner / 2), and s begins as the target's state after its final norm.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.heads.module import Attend, HeadModule

_EPS = 1e-6


def _scaled(x: Tensor) -> Tensor:
    """``x`` divided by its root mean square; unlike LayerNorm without taking the mean off."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)).to(x.dtype)


class ScaleAndShift(nn.Module):
    """``x / rms(x) * weight + bias``. The published keys call it ``ln``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return _scaled(x) * self.weight + self.bias


class MLPSpeculator(HeadModule):
    """The MLP speculator; its state dict has the published keys without their prefix ``speculator.``."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        n_predict: int,
        inner_size: int = 0,
        *,
        tie_weights: bool = False,
        scale_input: bool = False,
    ) -> None:
        """Makes the layers; names as in published configurations.

        Args:
            vocab_size: of the target.
            hidden_size: of the target (``emb_dim``).
            n_predict: tokens that it drafts.
            inner_size: width of its state (``inner_dim``); 0: ``hidden_size``.
            tie_weights: all depths share their embedding, norm and LM head, and those after the first their projection.
            scale_input: divides the target's state by its root mean square and by sqrt(2).
        """
        super().__init__()
        inner = inner_size or hidden_size
        self.state_size, self._scale_input = inner, scale_input
        self.max_depth = self.num_variants = n_predict
        state_weight = 0.5 ** (0.5 / n_predict)
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        distinct = 1 if tie_weights else n_predict
        self.emb = nn.ModuleList([nn.Embedding(vocab_size, inner) for _ in range(distinct)] * (n_predict // distinct))
        first = nn.Linear(hidden_size, inner, bias=False)
        later = [nn.Linear(inner, inner, bias=False) for _ in range(min(distinct, n_predict - 1))]
        self.proj = nn.ModuleList([first, *(later * (n_predict - 1 if tie_weights else 1))])
        self.head = nn.ModuleList(
            [nn.Linear(inner, vocab_size, bias=False) for _ in range(distinct)] * (n_predict // distinct)
        )
        self.ln = nn.ModuleList([ScaleAndShift(inner) for _ in range(distinct)] * (n_predict // distinct))

    def fuse(self, states: Tensor) -> Tensor:
        """The state itself, scaled if so configured."""
        return _scaled(states) / math.sqrt(2) if self._scale_input else states

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """One token further; ``state`` has the target's width at depth 0."""
        x = self.proj[depth](state) + self._token_weight * self.emb[depth](token_ids)
        return F.gelu(self.ln[depth](x))

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits of the LM head of this depth."""
        out: Tensor = self.head[depth](state)
        return out
