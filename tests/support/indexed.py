"""Tiny models whose layers choose keys by indexers, of few heads: many scores are 0, and equal."""

import functools
from typing import Any

import torch
from tests.model.families import checkpoint, small_config
from transformers import PretrainedConfig, PreTrainedModel

from paceline.model.loading import LoadedModel, prepare

FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")
TOP_K = 48


def indexed_config(family: str, **changes: Any) -> PretrainedConfig:
    """Two index heads, and fewer keys than a page holds; where layers may share a choice, the last one does."""
    sizes: dict[str, Any] = {"index_n_heads": 2, "index_topk": TOP_K, "index_head_dim": 24}
    if family in ("glm_moe_dsa", "hy_v4"):
        sizes |= {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}
        sizes |= {"layer_types": ["indexed_attention"] * 3, "indexer_types": ["full", "full", "shared"]}
    return small_config(family, **sizes | changes)


@functools.cache
def indexed_model(family: str, num_heads: int = 2) -> PreTrainedModel:
    """A random checkpoint in float32, as transformers runs it."""
    return checkpoint(indexed_config(family, index_n_heads=num_heads))


@functools.cache
def indexed(family: str = "deepseek_v32", dtype: torch.dtype = torch.float32, num_heads: int = 2) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(indexed_config(family, index_n_heads=num_heads)).to(dtype), compile=False)
