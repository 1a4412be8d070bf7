"""Exit heads: a small adapter between the layers that draft and the target's own final norm and LM head.

Liu et al. 2024 (Kangaroo, arXiv:2404.18911): a trained adapter bridges what the first layers of a target leave and what
its last one would. Theirs is a layer of attention; this one is a gated MLP of a single position,

    h' = h + D (silu(G n) * (U n)),    n = rms(h)

with h the state after the first b layers, so that it keeps nothing of a session. Its format is ours: config.json with
the keys of ``KEYS``, and ``norm.weight``, ``gate_proj.weight``, ``up_proj.weight``, ``down_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.drafters.heads.module import Function, HeadModule, borrowed
from paceline.drafters.heads.reading import HeadForm, Reading, matched_tensors
from paceline.errors import ConfigError

MODEL_TYPE = "exit_head"
KEYS = ("num_target_layers", "boundary", "hidden_size", "inner_dim", "rms_norm_eps")
"""Keys of its config.json in addition to ``model_type``; all are required."""


class ExitAdapter(HeadModule):
    """The adapter. It reads no tokens and keeps no state: at each depth it maps the target's state at that depth."""

    exits = alike = True

    def __init__(self, size: int, inner: int, eps: float, finish: Function | None = None) -> None:
        """Makes one that changes nothing yet.

        Args:
            size: width of the target.
            inner: width of the MLP.
            eps: of the norm.
            finish: the target's final norm and what follows, states -> logits; only training and replay ask for logits.
        """
        super().__init__()
        self.state_size = size
        self.norm = nn.RMSNorm(size, eps)
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down_proj.weight)
        self._lm_head = borrowed(finish)

    def forward(self, state: Tensor) -> Tensor:
        """States ``[..., size]`` after the layers that draft, as the final norm shall have them."""
        n = self.norm(state)
        out: Tensor = state + self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))
        return out

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits ``[..., vocabulary]`` after the token whose state it is."""
        assert self._lm_head is not None, "an exit is finished by the model whose layers draft"
        return self._lm_head(self(state))

    def unroll(self, states: Tensor, token_ids: Tensor, depths: int) -> Iterator[Tensor]:
        """Implements ``HeadModule.unroll`` for ``states`` ``[B, T + depths, hidden]``.

        While all drafted tokens are right, the first layers have the states of the text at every depth.
        """
        logits, num_rows = self.logits(states[:, 1:], 0), states.shape[1] - depths
        for depth in range(depths):
            yield logits[:, depth : depth + num_rows]


def read_exit(reading: Reading) -> HeadForm:
    """An exit head. Raises ConfigError as ``open_head`` does."""
    reading.require_form(MODEL_TYPE, KEYS)
    config, what = reading.config, reading.what
    boundary, inner = reading.integer("boundary") or 0, reading.integer("inner_dim") or 0
    reading.require_equal("num_target_layers", reading.integer("num_target_layers"), reading.facts.num_layers)
    reading.require_equal("hidden_size", reading.integer("hidden_size"), reading.facts.hidden_size)
    if reading.boundaries is not None and reading.boundaries != (boundary,):
        raise ConfigError(f"boundaries is {[*reading.boundaries]}: the {what} was trained at {[boundary]}")
    eps = config["rms_norm_eps"]
    if inner < 1 or not isinstance(eps, float) or not 0 < eps < 1:
        name, value, allowed = (
            ("inner_dim", inner, "at least 1") if inner < 1 else ("rms_norm_eps", eps, "between 0 and 1")
        )
        raise ConfigError(f"{name} is {value!r} in config.json of {what}: a number {allowed} is needed")
    module = ExitAdapter(reading.facts.hidden_size, inner, eps)
    names, experts = matched_tensors(reading, module, str)
    return HeadForm(module, (boundary,), names, experts)
