"""Tiny models of DeepSeek V4, whose layers see entries that stand for several tokens each."""

from __future__ import annotations

import functools

import torch
from tests.model.families import checkpoint, small_config
from transformers import PretrainedConfig, PreTrainedModel

from paceline.checkpoint.compressed import HEAVY, SLIDING, SPARSE
from paceline.model.loading import LoadedModel, prepare

TOP_K = 8
"""Entries that a query sees in sparse layers: from 36 tokens on not all of them."""


def compressed_config(heavy: int = 128, num_heads: int = 2) -> PretrainedConfig:
    """Each kind of layer, and a window of 16 tokens.

    ``heavy``: tokens of an entry of heavily compressed layers; 128 as published, of two pages. ``num_heads``: of
    indexers. Of few, many scores are 0, and equal.
    """
    return small_config(
        "deepseek_v4",
        num_hidden_layers=4,
        layer_types=[SLIDING, HEAVY, SPARSE, SPARSE],
        mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
        compress_rates={SPARSE: 4, HEAVY: heavy},
        index_topk=TOP_K,
        index_n_heads=num_heads,
    )


@functools.cache
def compressed_model(heavy: int = 128) -> PreTrainedModel:
    """A random checkpoint in float32, as transformers runs it; of 16 index heads, as no scores are equal then."""
    return checkpoint(compressed_config(heavy, 16))


@functools.cache
def compressed(dtype: torch.dtype = torch.float32, heavy: int = 128, num_heads: int = 2) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(compressed_config(heavy, num_heads)).to(dtype), compile=False)
