"""EAGLE heads: one decoder layer over [embedding of the next token; states of the target].

- ``Eagle``: EAGLE-1 and -2 (Li et al. 2024, arXiv:2401.15077 and 2406.16858; same weights, EAGLE-2 is the tree):
  ``f' = Layer(fc([e; f]))``, f the target's state after its final norm, logits by the target's LM head.
- ``Eagle3``: EAGLE-3 (Li et al. 2025, arXiv:2503.01840): ``g = fc([F_1; F_2; F_3])`` of three boundaries,
  ``x = [rms(e); rms(g)]``, ``y = g + Attention(x)``, ``g' = y + MLP(rms(y))``, logits of its own LM head over a draft
  vocabulary from ``rms(g')``. What is recycled is g', before the norm.
- ``PEagle``: P-EAGLE (2026; layers and flags of the speculators library): the same weights, with a learned state for
places without one. So all depths are rows of one causal pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.drafters.heads.layers import Layer, kv_of, norm, offsets, rotary, with_our_attention
from paceline.drafters.heads.module import Attend, Function, HeadModule, borrowed


class Eagle(HeadModule):
    """EAGLE-1 and -2; the state dict has the published keys."""

    def __init__(self, config: Any, *, embed: Function | None, lm_head: Function, bias: bool = True) -> None:
        """Makes the head.

        Args:
            config: of its layers, as transformers has it (``eagle_config``).
            embed: of the target: ids -> [..., hidden]; None: it has an embedding of its own.
            lm_head: of the target: [..., hidden] -> [..., vocabulary].
            bias: ``fc`` has a bias.
        """
        super().__init__()
        config = with_our_attention(config)
        size = self.state_size = config.hidden_size
        self.layers_kv = kv_of(config, config.num_hidden_layers)
        self._embed, self._lm_head = borrowed(embed), borrowed(lm_head)
        if embed is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=bias)
        self.layers: Any = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        for layer in self.layers[1:]:
            layer.input_layernorm = norm(config, size)
        self.make_rotary, self.rotary = partial(rotary, config), rotary(config)

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """The next feature f', which the head predicts and recycles."""
        embedded = self.embed_tokens(token_ids) if self._embed is None else self._embed(token_ids)
        x: Tensor = self.fc(torch.cat([embedded.to(state.dtype), state], -1))
        angles = self.rotary(x, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x if not index else layer.input_layernorm(x), x, angles, attend)
        return x

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits of the target's LM head."""
        assert self._lm_head is not None
        return self._lm_head(state)


@dataclass(frozen=True, slots=True)
class Eagle3Form:
    """Differences between published EAGLE-3 heads; names as in their configurations."""

    num_boundaries: int = 3
    target_hidden_size: int | None = None
    """Width of the target's states; None: the head's own."""
    use_fc: bool = True
    """False: one boundary of the head's own width goes in as it is (``use_aux_hidden_state`` false)."""
    norm_before_residual: bool = False
    """The residual stream begins with the normed state."""
    norm_before_fc: bool = False
    """One RMSNorm over all boundaries before ``fc``."""
    fc_norm: bool = False
    """One RMSNorm per boundary before ``fc``."""
    norm_output: bool = False
    """True: the state after the last norm is recycled (EAGLE-3.1)."""
    fc_bias: bool = False


class Eagle3(HeadModule):
    """EAGLE-3; the state dict has the published keys, with ``layers.0.`` for the ``midlayer.`` of the first files."""

    fusing = ("input_norm", "fc_norm", "fc")

    def __init__(
        self,
        config: Any,
        form: Eagle3Form | None = None,
        *,
        draft_vocab_size: int | None,
        embed: Function | None,
        lm_head: Function | None = None,
        target_ids: Tensor | None = None,
    ) -> None:
        """Makes the head.

        Args:
            config: of its layers, as transformers has it (``eagle_config``).
            form: its variant.
            draft_vocab_size: rows of its own LM head; None: ``lm_head`` is the target's.
            embed: of the target: ids -> [..., hidden]; None: it has an embedding of its own.
            lm_head: of the target.
            target_ids: [draft vocabulary] int64 ids of the target, if the vocabulary is reduced.
        """
        super().__init__()
        config, form = with_our_attention(config), form or Eagle3Form()
        size = self.state_size = config.hidden_size
        self.form = form
        self.layers_kv = kv_of(config, config.num_hidden_layers)
        self._embed, self._lm_head = borrowed(embed), borrowed(lm_head)
        wide = form.num_boundaries * (form.target_hidden_size or size)
        if embed is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if form.norm_before_fc:
            self.input_norm = norm(config, wide)
        if form.fc_norm:
            each = wide // form.num_boundaries
            self.fc_norm = nn.ModuleList([norm(config, each) for _ in range(form.num_boundaries)])
        if form.use_fc:
            self.fc = nn.Linear(wide, size, bias=form.fc_bias)
        self.layers: Any = nn.ModuleList(
            [Layer(config, index, wide=not index) for index in range(config.num_hidden_layers)]
        )
        self.layers[0].hidden_norm = norm(config, size)
        for layer in self.layers:
            layer.input_layernorm = norm(config, size)
        self.norm = norm(config, size)
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)
        self.make_rotary, self.rotary = partial(rotary, config), rotary(config)
        if target_ids is not None:
            self.register_buffer("d2t", offsets(target_ids))

    def fuse(self, states: Tensor) -> Tensor:
        """Boundaries side by side, ``[..., n * target hidden]``, as one state."""
        form = self.form
        if form.norm_before_fc:
            states = self.input_norm(states)
        if form.fc_norm:
            chunks = states.chunk(form.num_boundaries, -1)
            states = torch.cat([each(chunk) for each, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(states) if form.use_fc else states

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """The next state g', before the last norm unless ``norm_output``."""
        embedded = self.embed_tokens(token_ids) if self._embed is None else self._embed(token_ids)
        angles = self.rotary(state, positions)
        first = self.layers[0]
        normed = first.hidden_norm(state)
        x = torch.cat([first.input_layernorm(embedded.to(state.dtype)), normed], -1)
        hidden: Tensor = first(x, normed if self.form.norm_before_residual else state, angles, attend)
        for layer in self.layers[1:]:
            hidden = layer(layer.input_layernorm(hidden), hidden, angles, attend)
        return self.norm(hidden) if self.form.norm_output else hidden

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[..., draft vocabulary]."""
        normed = state if self.form.norm_output else self.norm(state)
        out: Tensor = self.lm_head(normed) if self._lm_head is None else self._lm_head(normed)
        return out


class PEagle(Eagle3):
    """P-EAGLE: EAGLE-3 weights, and a learned state for the places whose state the target has not computed yet."""

    conditional = False
    parallel = True

    def __init__(self, config: Any, form: Eagle3Form | None = None, *, mask_token_id: int, depths: int, **rest: Any):
        """Makes the head.

        Args:
            config: configuration of its layers.
            form: its variant.
            mask_token_id: stands for the tokens that are not known.
            depths: tokens that it drafts in one pass.
            **rest: as for ``Eagle3``.
        """
        super().__init__(config, form, **rest)
        self.mask_token_id, self.max_depth, self.ahead_rows = mask_token_id, depths, depths - 1
        wide = self.form.num_boundaries * (self.form.target_hidden_size or config.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, wide))

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """Runs depth 0 as EAGLE-3 does. Deeper rows get the mask's token and state, and ignore their own."""
        if depth:
            token_ids = torch.full_like(token_ids, self.mask_token_id)
            state = self.fuse(self.mask_hidden).to(state.dtype).expand_as(state)
        return super().step(token_ids, state, positions, attend, depth)

    def ahead(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the anchor's state, followed by the states of the rows that hold the mask."""
        if not self.ahead_rows:
            return state[:, None]
        size = self.state_size
        states = state.repeat_interleave(self.ahead_rows, 0).view(*positions.shape, size)
        made = self.step(torch.zeros_like(positions), states, positions, attend, 1)
        return torch.cat([state[:, None], made.view(-1, self.ahead_rows, size)], 1)
