"""The attention function that transformers' unchanged model code calls, over a paged KV cache.

All tokens of a step lie flat in one sequence ``[1, T]``, so that the linear layers see exactly the tokens that exist.
Only attention needs to know the session of a token. Tokens have places in *query rows* ``[B, n]`` (one session each,
padded), and each row has a page table. ``native`` and ``triton`` read queries and pages where they are. ``sdpa``
gathers the tokens into the rows, each row's pages into ``[B, Tk]`` keys, and scatters the result back. Grouped-query
heads are folded into the query rows, so keys are never repeated.

A token's result never depends on its neighbours: of ``native`` and ``triton`` by their order of summation, of
``sdpa`` by the shapes that are chosen (``shapes.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from paceline.checkpoint.kv_scales import UNSCALED
from paceline.model.attention.kernels import Kernel
from paceline.model.attention.latent import over_latents
from paceline.model.attention.native import attend, round_to_fp8
from paceline.model.kv_cache import FP8, LayerSpec, from_pages, to_fp8

IMPLEMENTATIONS: dict[Kernel, str] = {
    "sdpa": "paceline_paged",
    "native": "paceline_paged_native",
    "triton": "paceline_paged_triton",
}
"""The names under which transformers finds the kernels."""
_SCALES = "_paceline_kv_scales"
"""The attribute of an attention layer that holds its ``KVScales``."""


def scale_pages(model: torch.nn.Module, layers: Sequence[LayerSpec]) -> None:
    """Gives attention layers of a model the scales of their pages in FP8."""
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < len(layers):
            setattr(module, _SCALES, layers[index].scales)


@over_latents
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, num_heads, T, key_dim]
    key: Tensor,  # [1, num_kv_heads, T, key_dim]
    value: Tensor,  # [1, num_kv_heads, T, value_dim]
    attention_mask: Tensor | None,
    *,
    keys: list[Tensor],  # per layer [num_pages, page_size, num_kv_heads, key_dim], written in place; in the dtype of
    # ``key``, or in FP8 (``kv_cache.py``)
    values: list[Tensor],  # per layer [num_pages, page_size, num_kv_heads, value_dim], written in place; or of width 0:
    # its values are the beginning of its keys (``latent.py``)
    write_rows: Tensor,  # [W] flat KV rows (page * page_size + offset) that are written
    write_tokens: Tensor,  # [W] the token whose keys and values each of them takes
    page_table: Tensor,  # [B, pages]
    gather_index: Tensor,  # [B, n] flat token of each query row entry (padding repeats some token)
    scatter_index: Tensor,  # [T] index into B * n of each token
    masks: list[Any],  # full attention, then windows or chunks if the model has them: of ``triton`` ``Seen``, else
    # additive [B, 1, n, Tk]
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    token_positions: Tensor | None = None,  # [1, T]
    softcap: float | None = None,
    kernel: Kernel = "sdpa",
    s_aux: Tensor | None = None,  # [num_heads] attention sinks: a logit of each head that attends to nothing
    indices: Tensor | None = None,  # additive [B, 1, n, Tk]: what the indexer of the layer chooses (``indexed.py``)
    **unused: Any,
) -> tuple[Tensor, None]:
    """Writes this step's keys and values, then attends. Returns ``[1, T, num_heads, value_dim]``.

    Pages in FP8 hold keys and values divided by the scales of their layer. The scale of keys is a factor of all scores,
    that of values one of the result.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    key_pages, value_pages = keys[layer], values[layer]
    _, page_size, num_kv_heads, key_dim = key_pages.shape
    value_dim = value.shape[-1]
    value = value[..., : value_pages.shape[-1]]
    own_values = value_pages.shape[-1] > 0
    read_values = value_pages if own_values else key_pages[..., :value_dim]
    num_heads = query.shape[1]
    groups = num_heads // num_kv_heads
    num_rows, row_len = gather_index.shape
    num_keys = page_table.shape[1] * page_size

    is_local = sliding_window is not None or getattr(module, "attends_in_chunks", False)
    seen = masks[-1] if is_local else masks[0]
    if (temperature := getattr(module, "temperature", None)) is not None:
        query = temperature(query, token_positions)
    scales = getattr(module, _SCALES, UNSCALED) if key_pages.dtype == FP8 else UNSCALED
    scale = (scaling if scaling is not None else key_dim**-0.5) * scales.keys
    pages = key_pages, read_values, page_table
    if kernel == "triton":
        from paceline.model.attention.triton import attend_in_place, write_in_place

        write_in_place(key, value, key_pages, value_pages, write_rows, write_tokens, scales)
        numbers = scale, softcap, scales.values
        out = attend_in_place(query, *pages, gather_index, scatter_index, seen, s_aux, *numbers)
        if seen.by_library is not None:
            seen.by_library(query, key_pages, read_values, scale, out)
        return out, None

    mask: Tensor = seen if indices is None else indices
    _write(divided(key, scales.keys), key_pages, write_rows, write_tokens, kernel)
    if own_values:
        _write(divided(value, scales.values), value_pages, write_rows, write_tokens, kernel)

    if kernel == "native":
        out = attend(query, *pages, gather_index, scatter_index, mask, s_aux, scale, softcap)
        return _times(out, scales.values), None

    q = query[0].transpose(0, 1).index_select(0, gather_index.reshape(-1))
    q = q.view(num_rows, row_len, num_kv_heads, groups, key_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(num_rows, num_kv_heads, groups * row_len, key_dim)
    every = page_table.reshape(-1)
    k, v = (from_pages(pool.index_select(0, every), query.dtype) for pool in (key_pages, read_values))
    k = k.view(num_rows, num_keys, num_kv_heads, key_dim).transpose(1, 2)
    v = v.view(num_rows, num_keys, num_kv_heads, value_dim).transpose(1, 2)
    mask = mask.expand(num_rows, groups, row_len, num_keys)
    mask = mask.reshape(num_rows, 1, groups * row_len, num_keys)

    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = (scores + mask).float()
        weights = torch.softmax(scores, dim=-1)
        if s_aux is not None:
            sinks = s_aux.float().view(num_kv_heads, groups, 1).expand(num_kv_heads, groups, row_len)
            total = torch.logsumexp(scores, dim=-1, keepdim=True)
            weights = weights * torch.sigmoid(total - sinks.reshape(1, num_kv_heads, groups * row_len, 1))
        out = torch.matmul(weights.to(q.dtype), v)
    out = out.view(num_rows, num_kv_heads, groups, row_len, value_dim).permute(0, 3, 1, 2, 4)
    out = out.reshape(num_rows * row_len, num_kv_heads * groups, value_dim)
    return _times(out.index_select(0, scatter_index).unsqueeze(0), scales.values), None


def divided(x: Tensor, scale: float) -> Tensor:
    """Numbers for pages, where they are rounded once."""
    return x if scale == 1 else x.float() / scale


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def _write(x: Tensor, pages: Tensor, write_rows: Tensor, write_tokens: Tensor, kernel: Kernel) -> None:
    """Writes ``[1, num_kv_heads, T, dim]`` into pages, rounded where these are in FP8."""
    rows = x[0].transpose(0, 1).index_select(0, write_tokens)
    if pages.dtype == FP8:
        rows = round_to_fp8(rows) if kernel == "native" else to_fp8(rows)
    pages.view(-1, *pages.shape[2:]).index_put_((write_rows,), rows)


AttentionInterface.register(IMPLEMENTATIONS["sdpa"], paged_attention)
AttentionInterface.register(IMPLEMENTATIONS["native"], partial(paged_attention, kernel="native"))
AttentionInterface.register(IMPLEMENTATIONS["triton"], partial(paged_attention, kernel="triton"))
