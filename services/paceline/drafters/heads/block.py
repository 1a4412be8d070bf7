"""Block heads: a few layers that fill in a block of masks after the anchor, all tokens in one pass.

The context of each layer is a projection of the target's states, never of its own rows: with c = rms(fc(F)) of a
position its key and value are ``rope(k_norm(W_k c))`` and ``W_v c``, for every layer at once. The rows of the pass are
[anchor, mask, mask, ..] and see the context and each other:

- DFlash (z-lab 2026, arXiv:2602.06036): rows see the whole block; row i predicts the i-th token of it, so the anchor's
  own row predicts nothing, unless ``sample_from_anchor``: then row i predicts the token after its place.
- DFlash 2 (z-lab 2026): a causal convolution over the rows around attention and MLP, whose kernels are their own plus
  a projection of the row, one for each group of channels; then the 16 likeliest tokens of a row are ranked by
  ``logit + <P[token before] * (W h), S[token]>``.
- DSpark (DeepSeek-AI 2026, DeepSpec): logits plus ``W2 W1[token before]``, a Markov chain of low rank, and the
  confidence ``sigmoid(proj[h; W1[token before]])`` that the token is accepted.
- JetSpec (2026, arXiv:2606.18394): DFlash whose rows see those before them only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.drafters.heads.layers import FAMILIES, kv_of, norm, offsets, rotary, with_our_attention
from paceline.drafters.heads.module import Attend, Function, HeadModule, Keep, borrowed


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The properties in which published block heads differ."""

    target_width: int
    """Width of the target's states side by side."""
    mask_token_id: int
    num_tokens: int
    """Tokens that it drafts in one pass."""
    first_row: int
    """The row that predicts the first of them: 1, or 0 with ``sample_from_anchor``."""
    windows: tuple[int | None, ...]
    """Window of each layer: a row sees this many of the last positions, its own included; None: all."""
    causal: tuple[bool, ...]
    """For each layer: True if rows do not see later rows."""
    own_mask: bool = False
    """True: the mask has an embedding of its own, in ``mask_embedding.pt``."""
    convolution: tuple[int, int] | None = None
    """DFlash 2: taps, and channels that share a kernel."""
    selector: tuple[int, int] | None = None
    """DFlash 2: rank, and tokens of a row that are ranked."""
    markov: int | None = None
    """DSpark: rank of the chain."""
    gated: bool = False
    """DSpark: W1[token before] is multiplied by a gate of it and of the row."""
    confidence: bool = False
    confidence_bias: bool = True
    confidence_with_markov: bool = True
    """DSpark: True if the confidence reads W1[token before] in addition to the row."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits are cap * tanh(logits / cap)."""


class Convolution(nn.Module):
    """Two causal convolutions over the rows of a block, before and after a layer's part, with kernels by row."""

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, size // group
        self.base_kernel = nn.Parameter(torch.eye(taps)[0].expand(2, -1)[..., None].repeat(1, 1, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self.groups, bias=False)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[blocks, rows, size] convolved, and the kernels of ``after``."""
        kernels = self.kernel_projection(x).view(*x.shape[:-1], 2, self.taps, self.groups)
        return self._convolved(x, kernels[..., 0, :, :], 0), kernels[..., 1, :, :]

    def after(self, x: Tensor, kernels: Tensor) -> Tensor:
        """[blocks, rows, size] convolved by kernels of the rows that went in."""
        return self._convolved(x, kernels, 1)

    def _convolved(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        grouped = x.reshape(*x.shape[:-1], self.groups, -1)
        base = self.base_kernel[side].view(self.taps, self.groups, -1)
        out = torch.zeros_like(grouped)
        for tap in range(min(self.taps, x.shape[-2])):
            shifted = nn.functional.pad(grouped, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :]
            out = out + shifted * (base[tap] + kernels[..., tap, :, None])
        return out.flatten(-2)


class BlockLayer(nn.Module):
    """A decoder layer of the Llama or Qwen 3 family whose context is a projection of the target's states."""

    def __init__(self, config: Any, index: int, form: BlockForm) -> None:
        super().__init__()
        made = FAMILIES[config.model_type][1](config, index)
        self.self_attn, self.mlp = made.self_attn, made.mlp
        self.input_layernorm, self.post_attention_layernorm = made.input_layernorm, made.post_attention_layernorm
        self.index, self.window = index, form.windows[index]
        size, kernel = config.hidden_size, form.convolution
        self.attention_conv = None if kernel is None else Convolution(size, *kernel)
        self.mlp_conv = None if kernel is None else Convolution(size, *kernel)

    def keep(self, state: Tensor, angles: tuple[Tensor, Tensor], attend: Keep) -> None:
        """Makes the context of states ``[B, T, size]``."""
        attention = self.self_attn
        by_head = (*state.shape[:-1], -1, attention.head_dim)
        key, value = attention.k_proj(state).view(by_head), attention.v_proj(state).view(by_head)
        if hasattr(attention, "k_norm"):
            key = attention.k_norm(key)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        attend.keep(self.index, apply_rotary_pos_emb(key, key, *angles)[1], value)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend, rows: int) -> Tensor:
        """Blocks side by side, ``[B, blocks * rows, size]``."""

        def attended(y: Tensor) -> Tensor:
            def windowed(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
                return attend(layer, q, k, v, scaling, self.window)

            out: Tensor = self.self_attn(
                hidden_states=y, position_embeddings=angles, attention_mask=None, attend=windowed
            )[0]
            return out

        x = x + _around(self.attention_conv, attended, self.input_layernorm(x), rows)
        return x + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(x), rows)


def _around(convolution: Convolution | None, part: Function, x: Tensor, rows: int) -> Tensor:
    """A part of a layer, with convolutions before and after it if there are any."""
    if convolution is None:
        return part(x)
    blocks = (x.shape[0], -1, rows, x.shape[-1])
    y, kernels = convolution.before(x.view(blocks))
    return convolution.after(part(y.flatten(1, 2)).view(blocks), kernels).flatten(1, 2)


class Selector(nn.Module):
    """Ranks the likeliest tokens of a row by the token before them (DFlash 2)."""

    def __init__(self, vocab_size: int, size: int, rank: int, most: int) -> None:
        super().__init__()
        self.most = min(most, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, logits: Tensor, state: Tensor, token_ids: Tensor) -> Tensor:
        """Logits ``[..., vocabulary]``, -inf but for the ranked ones."""
        top, ids = logits.topk(self.most, -1)
        context = self.predecessor_codebook[token_ids] * self.hidden_projection(state)
        scores = (context[..., None, :] * self.successor_codebook[ids]).sum(-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, top + scores)


class Markov(nn.Module):
    """Logits that DSpark adds to a row's own logits, given the previous token."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, size: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if gated else None

    def forward(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """[..., draft vocabulary]."""
        before = self.markov_w1(token_ids)
        if self.gate_proj is not None:
            before = before * torch.sigmoid(self.gate_proj(torch.cat([state, before], -1)))
        out: Tensor = self.markov_w2(before)
        return out


class Confidence(nn.Module):
    """The probability that a token is accepted (DSpark)."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        """[..., width] -> [...]."""
        return torch.sigmoid(self.proj(features).float()).squeeze(-1)


class Blockwise(HeadModule):
    """A head whose pass computes one block of rows per anchor. Blocks do not see each other, so any anchors can be
    trained.
    """

    parallel = True

    @abstractmethod
    def blocks(self, states: Tensor, token_ids: Tensor, anchors: Tensor, depths: int) -> Iterator[Tensor]:
        """Computes the logits of the blocks of several anchors: for each depth ``[B, blocks, draft vocabulary]``.

        Args:
            states: [B, T, boundaries * hidden] of positions 0 .. T - 1.
            token_ids: [B, at least T + depths].
            anchors: [blocks] positions P below T: t[P+1] is the anchor of the block.
            depths: number of depths, at most ``max_depth``.
        """

    def unroll(self, states: Tensor, token_ids: Tensor, depths: int) -> Iterator[Tensor]:
        """Implements ``HeadModule.unroll``: every position is the anchor of a block of its own."""
        yield from self.blocks(states, token_ids, torch.arange(states.shape[1], device=states.device), depths)


class BlockHead(Blockwise):
    """DFlash, DFlash 2, DSpark and JetSpec; the state dict has the published keys.

    Its state is the row after the last norm. As for other heads, the context of position P is kept for row P + 1. It is
    rotated by P, since the rows of the pass are rotated by their own positions.
    """

    fusing = ("fc", "hidden_norm")

    def __init__(
        self,
        config: Any,
        form: BlockForm,
        *,
        vocab_size: int,
        draft_vocab_size: int | None,
        embed: Function | None,
        lm_head: Function | None = None,
        target_ids: Tensor | None = None,
    ) -> None:
        """Makes the head.

        Args:
            config: of its layers, as transformers has it (``eagle_config``).
            form: its variant.
            vocab_size: of the target.
            draft_vocab_size: rows of its own LM head; None: ``lm_head`` is the target's.
            embed: of the target: ids -> [..., hidden]; None: it has an embedding of its own.
            lm_head: of the target.
            target_ids: [draft vocabulary] int64 ids of the target, if the vocabulary is reduced.
        """
        super().__init__()
        config = with_our_attention(config)
        size = self.state_size = config.hidden_size
        self.form, self._vocab_size = form, vocab_size
        self.layers_kv = kv_of(config, config.num_hidden_layers)
        self.max_depth = form.num_tokens
        self.bidirectional = frozenset(i for i, causal in enumerate(form.causal) if not causal)
        self.conditional = form.selector is not None or form.markov is not None
        self._embed, self._lm_head = borrowed(embed), borrowed(lm_head)
        if embed is None:
            self.embed_tokens = nn.Embedding(vocab_size, size)
        if form.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        self.fc = nn.Linear(form.target_width, size, bias=False)
        self.hidden_norm = norm(config, size)
        self.layers: Any = nn.ModuleList([BlockLayer(config, i, form) for i in range(config.num_hidden_layers)])
        self.norm = norm(config, size)
        drafted = vocab_size if draft_vocab_size is None else draft_vocab_size
        if draft_vocab_size is not None:
            self.lm_head = nn.Linear(size, drafted, bias=False)
        if form.selector is not None:
            self.candidate_selector = Selector(vocab_size, size, *form.selector)
        if form.markov is not None:
            self.markov_head = Markov(vocab_size, drafted, size, form.markov, form.gated)
        if form.confidence:
            width = size + (form.markov or 0) * form.confidence_with_markov
            self.confidence_head = Confidence(width, form.confidence_bias)
        if target_ids is not None:
            self.register_buffer("d2t", offsets(target_ids))
        self.make_rotary, self.rotary = partial(rotary, config), rotary(config)

    @property
    def ahead_rows(self) -> int:  # type: ignore[override]
        """Rows of one pass: the anchor's, and one for each mask that is read."""
        return self.form.first_row + self.form.num_tokens

    def fuse(self, states: Tensor) -> Tensor:
        """``rms(fc(F))`` of boundaries side by side."""
        out: Tensor = self.hidden_norm(self.fc(states))
        return out

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """Keeps the context of a committed row, which depends on no token; the state stays as it is."""
        assert isinstance(attend, Keep), "the context of a block head is kept, not computed"
        angles = self.rotary(state, positions - 1)
        for layer in self.layers:
            layer.keep(state, angles, attend)
        return state

    def ahead(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The rows that are read, after the last norm: ``[N, num_tokens, size]``."""
        rows = self.ahead_rows
        ids = token_ids.new_full((len(token_ids), rows), self.form.mask_token_id)
        ids[:, 0] = token_ids
        x = self.embed_tokens(ids) if self._embed is None else self._embed(ids)
        x = x.to(state.dtype)
        if self.form.own_mask:
            x = torch.cat([x[:, :1], self.mask_embedding.expand_as(x[:, 1:])], 1)
        x = (x * self.form.embedding_scale).view(*positions.shape, -1)
        angles = self.rotary(x, positions - 1)
        for layer in self.layers:
            x = layer(x, angles, attend, rows)
        made: Tensor = self.norm(x).view(-1, rows, self.state_size)
        return made[:, self.form.first_row :]

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Logits of the row alone: ``[..., draft vocabulary]``."""
        out: Tensor = self.lm_head(state) if self._lm_head is None else self._lm_head(state)
        out, cap = out * self.form.logit_scale, self.form.logit_cap
        return out if cap is None else cap * torch.tanh(out / cap)

    def predict(self, state: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """Logits with the part of the selector or of the Markov chain."""
        logits = self.logits(state, depth)
        if self.form.markov is not None:
            logits = logits + self.markov_head(state, token_ids)
        if self.form.selector is not None:
            logits = self.candidate_selector(logits, state, token_ids)
        return logits

    def confidence(self, state: Tensor, token_ids: Tensor) -> Tensor | None:
        """Probability of acceptance by the confidence head, if there is one."""
        if not self.form.confidence:
            return None
        features = state
        if self.form.markov is not None and self.form.confidence_with_markov:
            features = torch.cat([state, self.markov_head.markov_w1(token_ids)], -1)
        out: Tensor = self.confidence_head(features)
        return out

    def blocks(self, states: Tensor, token_ids: Tensor, anchors: Tensor, depths: int) -> Iterator[Tensor]:
        """See ``Blockwise``: a block sees the states 0 .. P."""
        for depth, (row, before) in enumerate(self._behind(states, token_ids, anchors, depths)):
            yield self.predict(row, before, depth)

    def judged(
        self, states: Tensor, token_ids: Tensor, anchors: Tensor, depths: int
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """``blocks`` with the ``confidence`` ``[B, blocks]`` in the token of each depth."""
        for depth, (row, before) in enumerate(self._behind(states, token_ids, anchors, depths)):
            yield self.predict(row, before, depth), self.confidence(row, before)

    def _behind(
        self, states: Tensor, token_ids: Tensor, anchors: Tensor, depths: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of each depth ``[B, blocks, state_size]`` with the tokens before them ``[B, blocks]``."""
        batch, num_rows = states.shape[:2]
        positions = torch.arange(1, num_rows + 1, device=states.device)
        attend = Blocks(self.ahead_rows, self.bidirectional, anchors)
        context = self.step(token_ids[:, 1 : 1 + num_rows], self.fuse(states), positions.expand(batch, -1), attend, 0)
        rows = anchors[:, None] + 2 + torch.arange(self.ahead_rows, device=states.device)
        state = context[:, anchors].flatten(0, 1)
        made = self.ahead(token_ids[:, anchors + 1].flatten(), state, rows.flatten().expand(batch, -1), attend)
        made = made.view(batch, len(anchors), self.form.num_tokens, self.state_size)
        for depth in range(depths):
            yield made[:, :, depth], token_ids[:, anchors + 1 + depth]


class Blocks:
    """Attention of the blocks of several anchors in a text: to the context up to each anchor, and within the block."""

    def __init__(self, rows: int, bidirectional: frozenset[int], anchors: Tensor) -> None:
        self._rows, self._bidirectional, self._anchors = rows, bidirectional, anchors
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keeps keys and values; see ``Keep``."""
        self._context[layer] = key, value

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attends over the kept rows; see ``Attend``."""
        groups = query.shape[1] // key.shape[1]
        k_context, v_context, key, value = (
            each.repeat_interleave(groups, 1) for each in (*self._context[layer], key, value)
        )
        query, key, value = (
            each.reshape(*each.shape[:2], -1, self._rows, each.shape[-1]) for each in (query, key, value)
        )
        num_states, device = k_context.shape[2], query.device
        block, row = self._anchors[:, None, None], torch.arange(self._rows, device=device)
        distance = block + 1 + row[:, None] - torch.arange(num_states, device=device)  # of a row to a state
        seen = torch.arange(num_states, device=device) <= block
        within = torch.ones(self._rows, self._rows, dtype=torch.bool, device=device)
        if window is not None:
            seen, within = seen & (distance < window), within.triu(1 - window)
        if layer not in self._bidirectional:
            within = within.tril()
        scores = [
            (query @ k_context[:, :, None].transpose(-1, -2)).masked_fill(~seen, float("-inf")),
            (query @ key.transpose(-1, -2)).masked_fill(~within, float("-inf")),
        ]
        weights = (torch.cat(scores, -1).float() * scaling).softmax(-1).to(value.dtype)
        out = weights[..., :num_states] @ v_context[:, :, None] + weights[..., num_states:] @ value
        return out.flatten(2, 3).transpose(1, 2)
