"""Indexed attention: a query attends to the ``index_topk`` keys that an indexer scores highest (DSA of DeepSeek-V3.2).

The score of key s for query t is the sum over heads h of w[t, h] relu(q[t, h] . k[s]) (arXiv:2512.02556, equation 1).
Index keys lie on the pages of the session, as one more layer of the KV cache. What is not chosen is masked in the
layer's attention.

A choice has the same bits in any layout of a step. Products are summed in the order of dimensions and heads, and ties
go to the lowest positions. ``torch.topk`` chooses among equals by the shape that it is given. The native operator
(``native.py``) and its reference implementation here give the same scores, bit for bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.indexed import INDEXED
from paceline.model.attention import native
from paceline.model.kv_cache import LayerSpec

_ROTARY: dict[str, tuple[str, bool]] = {
    "AXK2Indexer": ("apply_rotary_pos_emb", True),
    "DeepseekV32Indexer": ("apply_rotary_pos_emb", True),
    "Dots3NoteTextIndexer": ("apply_rotary_pos_emb_interleave", True),
    "GlmMoeDsaIndexer": ("apply_rotary_pos_emb_interleave", True),
    "HYV4Indexer": ("apply_rotary_pos_emb", False),
}
"""How each class of transformers rotates: by which function, and whether it rotates the first part of a head."""
MAX_PRODUCTS = 2**22
"""Products of queries and keys that are held at a time: 16 MiB."""


@dataclass(frozen=True, slots=True)
class IndexedStep:
    """Inputs of indexers in a step. A model passes it on to them in the place of its attention mask."""

    pools: list[Tensor]
    """``keys`` of ``paged_attention``, of which some hold index keys ``[pages, page_size, 1, head_dim]``."""
    write_rows: Tensor
    write_tokens: Tensor
    page_table: Tensor
    gather_index: Tensor
    mask: Tensor
    """``[B, 1, n, Tk]`` of full attention, added to the scores."""

    def __getitem__(self, place: Any) -> Self:
        """Returns the step itself for any slice: layers slice their mask before they pass it on."""
        return self

    def choose(self, pool: int, queries: Tensor, keys: Tensor, weights: Tensor, top_k: int) -> Tensor:
        """Writes index keys, then masks what is not chosen: additive ``[B, 1, n, Tk]``.

        Args:
            pool: the layer of the cache that holds the index keys.
            queries: [T, heads, head_dim]. keys: [T, head_dim]. weights: float32 [T, heads].
            top_k: keys that a query attends to, at most.
        """
        pages = self.pools[pool]
        head_dim = pages.shape[-1]
        written = keys.index_select(0, self.write_tokens).to(pages.dtype)
        pages.view(-1, head_dim).index_put_((self.write_rows,), written)
        seen, key_pages = self.mask[:, 0] == 0, pages.squeeze(2)
        score = native.score_index if native.unavailable() is None else score_index
        if torch.compiler.is_exporting():  # whose sizes are of no values: there are `top_k` keys at least
            scores = score(queries.float(), key_pages, weights, self.page_table, self.gather_index, seen)
            best = highest(torch.nn.functional.pad(scores, (0, top_k), value=-torch.inf), top_k)
            return self.mask.masked_fill(~best[..., : seen.shape[-1]].unsqueeze(1), -torch.inf)
        if self.mask.shape[-1] <= top_k:
            return self.mask
        queries, size = queries.float(), max(1, MAX_PRODUCTS // (seen[:, 0].numel() * queries.shape[1]))
        chosen = [
            highest(score(queries, key_pages, weights, self.page_table, places, visible), top_k)
            for places, visible in zip(torch.split(self.gather_index, size, 1), torch.split(seen, size, 1), strict=True)
        ]
        return self.mask.masked_fill(~torch.cat(chosen, 1).unsqueeze(1), -torch.inf)

    @property
    def by_kind(self) -> dict[str, Self | None]:
        """The masks of a model by the kind of layer: other layers have none of their own."""
        return {INDEXED: self, "full_attention": None, "sliding_attention": None}


PROBE = IndexedStep([], *[torch.empty(0)] * 5)
"""Stands for a step while layers are probed: nothing is written or chosen."""


def score_index(
    queries: Tensor, pages: Tensor, weights: Tensor, page_table: Tensor, gather_index: Tensor, seen: Tensor
) -> Tensor:
    """Reference implementation of ``native.score_index``, which has its arguments."""
    keys = pages.index_select(0, page_table.reshape(-1)).view(len(seen), seen.shape[2], pages.shape[-1]).float()
    scores = index_scores(queries[gather_index].float(), keys, weights[gather_index])
    return scores.masked_fill_(~seen, -torch.inf)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores ``[B, n, Tk]`` of keys ``[B, Tk, head_dim]`` for queries ``[B, n, heads, head_dim]``, all in float32.

    ``weights``: [B, n, heads]. Sums and products of single numbers: a library orders the sums of a matrix product by
    its shape.
    """
    products = torch.zeros(*queries.shape[:3], keys.shape[1], device=keys.device)
    for dim, column in enumerate(keys.unbind(-1)):
        products += queries[..., dim, None] * column[:, None, None]
    products = products.relu_() * weights[..., None]
    total = products[:, :, 0]
    for head in range(1, products.shape[2]):
        total = total + products[:, :, head]
    return total


def highest(scores: Tensor, top_k: int) -> Tensor:
    """True at the ``top_k`` highest of each row ``[..., Tk]``; of equal scores the first. Tk is ``top_k`` at least."""
    least = scores.topk(top_k, -1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = top_k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def replace_indexers(model: PreTrainedModel, num_layers: int) -> list[LayerSpec]:
    """Replaces the forward of each indexer by one over pages. Returns the index keys that each keeps per token.

    They are layers of the KV cache from ``num_layers`` on. Indexers of other kinds stay as they are; ``probe_layers``
    refuses them.
    """
    indexers = indexers_of(model)
    for pool, indexer in enumerate(indexers, num_layers):
        name, first = _ROTARY[type(indexer).__name__]
        rotate = getattr(sys.modules[type(indexer).__module__], name)
        indexer.forward = partial(_forward, indexer, pool, partial(_projected, rotate, first))
    return [LayerSpec(1, indexer.head_dim, 0) for indexer in indexers]


def indexers_of(model: PreTrainedModel) -> list[Any]:
    """The indexers that ``replace_indexers`` replaces, in order."""
    return [module for module in model.modules() if type(module).__name__ in _ROTARY]


def _forward(
    indexer: Any,
    pool: int,
    project: Any,
    hidden_states: Tensor,
    residual: Tensor,
    angles: tuple[Tensor, Tensor],
    step: IndexedStep,
    *unused: Any,
    **others: Any,
) -> Tensor:
    """The mask of the layer's attention, ``[B, 1, n, Tk]``; nothing of the kind in a probe."""
    queries, keys, weights = project(indexer, hidden_states, residual, angles)
    return keys if step is PROBE else step.choose(pool, queries, keys, weights, indexer.index_topk)


def _projected(
    rotate: Any, first: bool, indexer: Any, x: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, heads, head_dim]``, keys ``[T, head_dim]`` and float32 weights ``[T, heads]``, scale included."""
    norm, gate = indexer.k_norm, indexer.weights_proj
    queries = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    keys = norm(indexer.wk(x).to(norm.weight.dtype)).to(x.dtype).unsqueeze(2)
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    parts = [each.split(sizes if first else sizes[::-1], -1) for each in (queries, keys)]
    rotated = rotate(*(part[0 if first else 1] for part in parts), *angles, unsqueeze_dim=2)
    both = [(turned, part[1]) if first else (part[0], turned) for turned, part in zip(rotated, parts, strict=True)]
    queries, keys = (torch.cat(pair, -1)[0] for pair in both)
    weights = gate(x.to(gate.weight.dtype)).float()[0] * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    return queries, keys[:, 0], weights
