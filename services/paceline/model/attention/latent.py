"""Latent attention over latents: a layer stores one row per token for all of its heads.

A layer of multi-head latent attention (MLA of DeepSeek-V2, arXiv:2405.04434, section 2.1) makes the keys and values of
all heads from a normed latent c of ``kv_lora_rank`` numbers and a rotated part r that all heads share. Head h has the
key [K_h c; r] and the value V_h c, where K_h and V_h are rows of ``kv_b_proj``. The cache holds [c; r] alone. A query
[q; p] is multiplied by K_h first, since q . K_h c = (K_h^T q) . c; the weighted sum of latents by V_h last. So
attention has one KV head, whose values are the beginning of its keys' rows. Prompts and decoding take this one form, so
that bits do not depend on which of them computed a row.

Of transformers' layers only ``expand_kv`` is replaced, which makes keys and values of latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.compiled import linear

Attention = Callable[..., tuple[Tensor, Any]]
"""An attention function of transformers: ``(module, query, key, value, mask, ...) -> ([1, T, heads, dim], ...)``."""


def adopt_latents(model: nn.Module) -> None:
    """Makes each layer of latent attention in ``model`` give latents to its attention function, which must be
    ``over_latents``. A second call changes nothing.

    Quantized weights of ``kv_b_proj`` become plain ones, as they are multiplied head by head.
    """
    for module in model.modules():
        if hasattr(type(module), "expand_kv") and not keeps_latents(module):
            layer: Any = module
            layer.kv_b_proj = _plain(layer.kv_b_proj, layer.kv_a_layernorm.weight)
            layer.expand_kv = _as_one_head


def keeps_latents(module: nn.Module) -> bool:
    """True for a layer whose values are the beginning of its keys' rows."""
    return vars(module).get("expand_kv") is _as_one_head


def over_latents(attend: Attention) -> Attention:
    """An attention function that can be called by layers that ``adopt_latents`` has changed, too."""

    @functools.wraps(attend)
    def attending(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if not keeps_latents(module):
            return attend(module, query, *args, **kwargs)
        keys, values = _weights(module)
        size, own = keys.shape[2], query[0]
        query = torch.cat([multiply_heads(own[..., :size], keys), own[..., size:]], -1).unsqueeze(0)
        out, *others = attend(module, query, *args, **kwargs)
        return multiply_heads(out[0].transpose(0, 1), values).transpose(0, 1).unsqueeze(0), *others

    return attending


def multiply_heads(x: Tensor, weights: Tensor) -> Tensor:
    """``[heads, T, K] -> [heads, T, N]`` by weights ``[heads, N, K]``; compiled steps on the CPU by native products."""
    if torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype == torch.bfloat16 and linear.usable():
        packed = torch.ops.paceline.pack_linear(weights)
        product: Tensor = torch.ops.paceline.packed_heads(x, packed, weights.shape[1])
        return product
    return torch.bmm(x, weights.transpose(1, 2))


def _as_one_head(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys ``[1, 1, T, rank + rope]`` and values ``[1, 1, T, rank]``, instead of each head's own."""
    return torch.cat([latents, rotated], -1), latents


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """Factors of queries ``[heads, rank, nope]`` and of sums of latents ``[heads, value, rank]``."""
    size, weight = module.qk_nope_head_dim, module.kv_b_proj.weight
    of_heads = weight.view(-1, size + module.v_head_dim, weight.shape[1])
    return of_heads[:, :size].transpose(1, 2), of_heads[:, size:]


def _plain(projection: Any, norm: Tensor) -> nn.Linear:
    """A projection without bias, itself if its weights are plain. Others are what it makes of the unit vectors.

    ``norm``: the weights of the latents' norm, of the same device and of the dtype that the layer computes in.
    """
    if type(projection) is nn.Linear and type(projection.weight) is nn.Parameter:
        return projection
    with torch.no_grad():
        units = torch.eye(norm.shape[0], dtype=norm.dtype, device=norm.device)
        weight = projection(units).t().contiguous()
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return plain
