"""Tensor-parallel plans of classes for which transformers ships none, in the styles of its own plans.

A key is a module or parameter of a layer. Weights of experts are no linear layers: ``rowwise`` splits their last
dimension, ``colwise`` the one before it, as in transformers' plans of other experts.
"""

from __future__ import annotations

import copy

from transformers import PretrainedConfig

from paceline.errors import ConfigError
from paceline.model.local_config import HEADS, KV_HEADS

QKV = "colwise_qkv"
"""Three ranges, of queries, keys and values; transformers has no such style."""
_ATTENTION = {"self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
              "self_attn.o_proj": "rowwise"}  # fmt: skip
_LAYERS = {
    "gpt2": ("transformer.h.*", {
        "attn.c_attn": QKV, "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise",
    }),
    "gpt_oss": ("model.layers.*", _ATTENTION | {
        "self_attn.sinks": "colwise",
        # Gate and up alternate: a range that begins at a gate and ends after an up holds whole pairs.
        "mlp.experts.gate_up_proj": "rowwise", "mlp.experts.gate_up_proj_bias": "rowwise",
        "mlp.experts.down_proj": "colwise", "mlp.experts": "moe_tp_experts",
    }),
    "hunyuan_v1_dense": ("model.layers.*", _ATTENTION | {
        "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }),
    **dict.fromkeys(("bamba", "falcon_h1"), ("model.layers.*", _ATTENTION | {
        "feed_forward.gate_proj": "colwise", "feed_forward.up_proj": "colwise", "feed_forward.down_proj": "rowwise",
    })),
    "stablelm": ("model.layers.*", _ATTENTION | {
        "mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise",
    }),
    "zamba2": ("model.layers.*.shared_transformer", _ATTENTION | {
        "self_attn.linear_q_adapter_list.*.1": "colwise", "self_attn.linear_k_adapter_list.*.1": "colwise",
        "self_attn.linear_v_adapter_list.*.1": "colwise",
        "feed_forward.gate_up_proj": "packed_colwise", "feed_forward.gate_up_proj_adapter_list.*.1": "packed_colwise",
        "feed_forward.down_proj": "rowwise",
    }),
    "lfm2": ("model.layers.*", {
        "self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "self_attn.out_proj": "rowwise",
        "feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise",
    }),
}  # fmt: skip
"""For each model type: the path of the layers, and the plan of one layer."""
_SIZES = {
    "gpt2": ("transformer.h.*.attn.split_size", "transformer.h.*.attn.c_attn.nf"),
    "falcon_h1": ("model.layers.*.mamba.norm.n_groups",),
    "stablelm": ("model.layers.*.self_attn.num_heads", "model.layers.*.self_attn.num_key_value_heads"),
}
"""Attributes that hold a size which no setting governs: a rank's are divided by the degree."""


def own_plan(config: PretrainedConfig) -> dict[str, str]:
    """The plan of a model type by full names; {}: there is none here either."""
    layers, styles = _LAYERS.get(config.model_type, ("", {}))
    return {f"{layers}.{name}": style for name, style in styles.items()}


def whole_settings(config: PretrainedConfig) -> set[str]:
    """Settings that a rank's configuration has whole, although its model holds a part of what they count: StableLM
    derives the size of a head from their number.

    Raises:
        ConfigError: a rank cannot hold a part of a model with this setting.
    """
    if config.model_type != "stablelm":
        return set()
    if config.qk_layernorm:
        raise ConfigError("stablelm has a norm of its own for each head (qk_layernorm is true): use degree 1")
    return {HEADS, KV_HEADS}


def divided_sizes(config: PretrainedConfig) -> list[str]:
    """Paths of the attributes that a rank's model holds a part of."""
    names = _SIZES.get(config.model_type, ())
    if config.model_type == "falcon_h1" and not config.mamba_rms_norm:
        return []
    return [name.replace("*", str(layer)) for name in names for layer in range(config.num_hidden_layers)]


def written_out(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration that names the sizes which its class would derive from others."""
    config = copy.deepcopy(config)
    if config.model_type == "gpt2" and config.n_inner is None:
        config.n_inner = 4 * config.n_embd
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        config.intermediate_size, config.block_auto_adjust_ff_dim = _adjusted(config), False
    return config


def _adjusted(config: PretrainedConfig) -> int:
    """The width of LFM2's feed-forward layers: of two thirds of a setting the next multiple of another one."""
    size: int = 2 * config.intermediate_size // 3
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple: int = config.block_multiple_of
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple
