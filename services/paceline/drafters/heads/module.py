"""Interface of every drafting head to those who train and run it: states and tokens in, logits of the next tokens out.

All heads share one alignment. With h[P] the target's hidden state of position P and t[P] its token::

    state[0] = fuse(h[P]);  state[0] = step(t[P+1], state[0], depth 0);  logits(state[0], 0) predict t[P+2]
                            state[1] = step(t[P+2], state[0], depth 1);  logits(state[1], 1) predict t[P+3]   ...

``step`` is one layer of attention and MLP for EAGLE and MTP, a small recurrence for the MLP speculator, and nothing for
Medusa. Its token sits at rotary position P + 1 + depth. Deeper steps take the head's own state in place of the
target's, which is how it drafts and, as "training-time test" (EAGLE-3, Li et al. 2025, arXiv:2503.01840), how it is
trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.model.kv_cache import LayerSpec


class Attend(Protocol):
    """Attention of the tokens of one call to all earlier tokens."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Attends, and keeps ``key`` and ``value`` where later calls shall see them.

        Args:
            layer: index among the head's own layers.
            query: [B, num_heads, T, key_dim]. key, value: [B, num_kv_heads, T, ...], all rotated.
            scaling: of the products.
            window: a query sees this many of the last positions, its own included; None: all.

        Returns:
            [B, T, num_heads, value_dim].
        """
        ...


@runtime_checkable
class AttendSinks(Attend, Protocol):
    """Attention that can also have sinks: a logit of each head that attends to nothing."""

    def with_sinks(self, sinks: Tensor) -> Attend:
        """This attention with ``sinks`` [num_heads]."""
        ...


@runtime_checkable
class Keep(Attend, Protocol):
    """Attention that can also store rows without a query: the context of a block head."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores keys and values; arguments as for ``Attend``."""
        ...


Function = Callable[[Tensor], Tensor]


def borrowed(function: Function | None) -> Function | None:
    """The target's embedding or LM head as a plain function, so that it is no part of the head that calls it."""
    return None if function is None else partial(function)


class HeadModule(nn.Module, ABC):
    """Base of the heads' modules: everything about a head but its sessions."""

    state_size: int
    """Width of the recycled state."""
    layers_kv: tuple[LayerSpec, ...] = ()
    """Keys and values that each of its attention layers keeps per token."""
    max_depth: int | None = None
    """Tokens that it can draft in a row; None: any number, since it recycles its own state."""
    conditional: bool = True
    """False: the logits of a depth do not depend on the tokens of the path.

    Unless the head is ``parallel``, its ``forward`` then makes the logits of all depths at once: states ``[...,
    state_size]`` -> ``[max_depth, ..., draft vocabulary]``.
    """
    parallel: bool = False
    """True: rows after the anchor need neither its state nor tokens, so one pass (``ahead``) computes all depths."""
    ahead_rows: int = 0
    """Rows of ``ahead`` for each anchor, from the anchor's position + 1 on (``HeadModule.unroll``)."""
    bidirectional: frozenset[int] = frozenset()
    """Layers in which the rows of ``ahead`` also see later rows."""
    on_target: bool = False
    """True: ``ahead`` runs layers of the target and sees the target's own keys and values, by its layers.

    The first row has the anchor's position. The states are the logits.
    """
    keyless: bool = False
    """True: it has no keys and values. Its rows of every depth have the anchor's position, and see the target's rows
    before the anchor alone, by the target's layers."""
    exits: bool = False
    """True: it drafts from the target's own states of the drafted tokens (``unroll`` of ``ExitAdapter``)."""
    alike: bool = False
    """True: all depths are one function of the text before, so that the first is all there is to train."""
    num_variants: int = 1
    """Depths that have weights and context of their own (MTP modules); deeper ones use the last of them."""
    fusing: tuple[str, ...] = ()
    """Submodules that ``fuse`` needs."""
    make_rotary: Callable[[], nn.Module] | None = None
    """Makes ``rotary``, its rotary embedding, which no checkpoint holds."""

    @property
    def target_ids(self) -> Tensor | None:
        """[draft vocabulary] int64: the target's id of each logit, by the published offsets ``d2t``; None: they are the
        same."""
        d2t = self._buffers.get("d2t")
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states ``[..., boundaries * hidden]`` as the first recycled state ``[..., state_size]``: as they
        are."""
        return states

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """Returns the state ``[B, T, state_size]`` after one more token of each row: as it is, unless tokens change it.

        Args:
            token_ids: [B, T] ids of the target's vocabulary.
            state: [B, T, state_size], from ``fuse`` (depth 0) or the step before.
            positions: [B, T] of these tokens.
            attend: how the rows see each other and the context.
            depth: 0 for the committed token after a target's state, then 1, 2, ...
        """
        return state

    @abstractmethod
    def logits(self, state: Tensor, depth: int) -> Tensor:
        """Returns logits ``[..., draft vocabulary]`` of the next token after ``state``."""

    def ahead(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the states of all depths by one pass: ``[N, max_depth, state_size]``. Only for ``parallel`` heads.

        Args:
            token_ids: [N] the anchors.
            state: [N, state_size] after the anchors, from depth 0.
            positions: [B, N / B * ahead_rows] of the rows of the pass.
            attend: how the rows see each other and the context.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts one token after the other")

    def predict(self, state: Tensor, token_ids: Tensor, depth: int) -> Tensor:
        """Returns ``logits``. A head that also reads the previous token overrides this.

        Args:
            state: [..., state_size] of one depth.
            token_ids: [...] the previous tokens.
            depth: 0 for the token after the anchor.
        """
        return self.logits(state, depth)

    def confidence(self, state: Tensor, token_ids: Tensor) -> Tensor | None:
        """Probability ``[...]`` that the token predicted by ``predict`` of the same arguments is accepted, if those
        before it are; None: the head does not say."""
        return None

    def unroll(self, states: Tensor, token_ids: Tensor, depths: int) -> Iterator[Tensor]:
        """Computes the logits of ``depths`` recurrent steps of every position, for training and as the reference.

        At depth d, row P has drafted d tokens after t[P+1] from its own states. It sees the depth-0 keys of the rows up
        to P, and the keys of its own chain.

        Args:
            states: [B, T, boundaries * hidden] of positions 0 .. T - 1.
            token_ids: [B, at least T + depths] tokens of the same text: ``token_ids[:, P]`` is at position P.
            depths: number of steps, at most ``max_depth``.

        Yields:
            [B, T, draft vocabulary] for d = 0, 1, ..: row P predicts the token at P + 2 + d.
        """
        num_rows = states.shape[1]
        positions = torch.arange(1, num_rows + 1, device=states.device).expand(states.shape[0], -1)
        attend, state = Unrolled(), self.fuse(states)
        for depth in range(depths):
            tokens = token_ids[:, 1 + depth : 1 + depth + num_rows]
            state = self.step(tokens, state, positions + depth, attend, depth)
            yield self.logits(state, depth)

    _embed: Function | None = None
    _lm_head: Function | None = None

    @property
    def borrows_embedding(self) -> bool:
        """True if it embeds tokens by the target's table."""
        return self._embed is not None

    @property
    def borrows_lm_head(self) -> bool:
        """True if its logits come from the target's LM head."""
        return self._lm_head is not None

    def borrow(self, embed: Function | None, lm_head: Function | None) -> None:
        """Sets the target's embedding and LM head, where the head has none of its own."""
        if self.borrows_embedding:
            self._embed = borrowed(embed)
        if self.borrows_lm_head:
            self._lm_head = borrowed(lm_head)

    def materialize(self, device: torch.device) -> None:
        """Makes the tensors that no checkpoint holds, once a module of device ``meta`` has its weights."""
        if self.make_rotary is not None:
            self.rotary = self.make_rotary().to(device)

    def to_target_ids(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Returns logits ``[n, vocab_size]`` by the target's ids: -inf for ids that the draft vocabulary lacks."""
        if self.target_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        whole[..., self.target_ids] = logits
        return whole


class Unrolled:
    """Attention of ``HeadModule.unroll``: causal at first, then also to the own chain of each row."""

    def __init__(self) -> None:
        self._past: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Implements ``Attend``. The first call of a layer has the context, each later call the next depth."""
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        past = self._past.setdefault(layer, [])
        past.append((key, value))
        num_rows, steps = query.shape[2], len(past) - 1
        seen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).tril()
        if window is not None:
            seen = seen.triu(steps - window + 1)
        if not steps and sinks is None:
            return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling).transpose(1, 2)
        scores = [(query @ past[0][0].transpose(-1, -2)).masked_fill(~seen, float("-inf"))]
        scores += [(query * keys).sum(-1, keepdim=True) for keys, _ in past[1:]]
        logits = torch.cat(scores, -1).float() * scaling
        if sinks is not None:
            logits = torch.cat([logits, sinks.float().view(-1, 1, 1).expand(*logits.shape[:-1], 1)], -1)
        weights = logits.softmax(-1).to(value.dtype)
        out = weights[..., :num_rows] @ past[0][1]
        for step, (_, values) in enumerate(past[1:]):
            out = out + weights[..., num_rows + step, None] * values
        return out.transpose(1, 2)

    def with_sinks(self, sinks: Tensor) -> Attend:
        """Implements ``AttendSinks``."""
        return partial(self, sinks=sinks)
