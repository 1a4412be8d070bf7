"""The values of a config.json that are read without transformers: of which type they must be. Free of torch.

Everything that reads a checkpoint's configuration as plain JSON relies on this. Keys that are not listed are anyone's;
null stands for a key that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

_MOST_LAYERS = 1024
_MOST_COUNT = 1 << 24
_MOST_POSITIONS = 1 << 40
_SHOWN = 60
"""Characters of a value that a message shows."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_PER_LAYER = (
    *("intermediate_size", "num_experts_per_tok", "moe_topk", "moe_k"),
    *("moe_intermediate_size", "num_experts", "moe_num_experts", "full_attention_interval"),
)
"""Numbers that some models list by layer, or by kind of expert."""
_COUNTS = (
    *("num_attention_heads", "num_key_value_heads"),
    *("hidden_size", "n_embd", "n_head", "n_inner", "vocab_size", "head_dim", "attention_head_dim", "v_head_dim"),
    *("num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_token", "hc_mult"),
    *("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "swa_kv_lora_rank"),
    *("swa_qk_rope_head_dim", "swa_qk_nope_head_dim", "swa_head_dim", "index_head_dim"),
    *("index_topk_freq", "index_skip_topk_offset", "global_head_dim", "num_global_key_value_heads"),
    *("compress_rate_csa", "compress_rate_hca", "layer_group_size", "attn_layer_period", "attn_layer_offset"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim", "short_conv_kernel_size", "conv_L_cache"),
    *("mamba_expand", "mamba_d_state", "mamba_d_conv", "n_groups", "mamba_num_heads", "ssm_state_size", "conv_kernel"),
    *("mamba_n_groups", "mamba_n_heads", "mamba_d_ssm", "mamba_ngroups", "n_mamba_heads", "mamba_headdim"),
)
_KINDS = ("layer_types", "layers_block_type", "indexer_types", "mtp_layers_block_type")
"""Words, one for each layer."""
_PATTERNS = ("hybrid_override_pattern", "index_topk_pattern", "mtp_hybrid_override_pattern")
"""Words, or a text of letters."""
_NUMBERS = ("kda_layers", "full_attn_idxs", "attn_layer_indices", "compress_ratios")
_TABLES = ("rope_parameters", "rope_scaling", "per_layer_config", "compress_rates", "linear_attn_config",
           "quantization_config", "dflash_config")  # fmt: skip
_PARTS = ("text_config", "llm_config", "transformer_layer_config", "linear_attn_config")
"""Tables whose keys are of this file, too."""


def require_values(config: Mapping[str, Any], folder: Path) -> None:
    """Raises ConfigError for the first value of a config.json that is not of its key's type."""
    for key, value, allowed in _wrong(config):
        shown = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}.."
        raise ConfigError(f"{key} is {shown} in config.json of {str(folder)!r}: {allowed}")


def _wrong(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any, str]]:
    """Keys with their values, and what would be allowed."""
    for key, value in config.items():
        if value is not None and (rule := _RULES.get(key)) is not None and not rule[0](value):
            yield f"{within}{key}", value, rule[1]
    num_layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if isinstance(kinds, list) and isinstance(num_layers, int) and len(kinds) < num_layers:
        needed = f"a word for each of the {num_layers} layers (num_hidden_layers) is needed"
        yield f"{within}layer_types", kinds, needed
    layers = config.get("per_layer_config")
    parts = {key: config[key] for key in _PARTS if isinstance(config.get(key), Mapping)}
    parts |= {f"per_layer_config.{n}": one for n, one in layers.items()} if isinstance(layers, Mapping) else {}
    for key, part in parts.items():
        yield from _wrong(part, f"{within}{key}.") if isinstance(part, Mapping) else ((key, part, _TABLE[1]),)
    for key, rules in _NESTED.items():
        if isinstance(part := config.get(key), Mapping):
            yield from _wrong_within(part, rules, f"{within}{key}.")


def _wrong_within(table: Mapping[str, Any], rules: Mapping[str, _Rule], within: str) -> Iterator[tuple[str, Any, str]]:
    """The same in a table and the tables in it: of rotary embeddings by types of layers, of weights by their groups."""
    for key, value in table.items():
        if value is not None and (rule := rules.get(key)) is not None and not rule[0](value):
            yield f"{within}{key}", value, rule[1]
        if isinstance(value, Mapping):
            yield from _wrong_groups(value, f"{within}{key}") if key == "config_groups" else ()
            yield from _wrong_within(value, rules, f"{within}{key}.")


def _wrong_groups(groups: Mapping[str, Any], within: str) -> Iterator[tuple[str, Any, str]]:
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            yield f"{within}.{name}", group, _TABLE[1]
        elif not isinstance(weights := group.get("weights") or {}, Mapping):
            yield f"{within}.{name}.weights", weights, _TABLE[1]


def _is_count(value: Any, most: int = _MOST_COUNT) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf and value <= _MOST_POSITIONS


def _is_block(value: Any) -> bool:
    return _are(value, int) and len(value) == 2 and min(value) > 0


def _are(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


_Rule = tuple[Callable[[Any], bool], str]
_COUNT: _Rule = (_is_count, f"a whole number from 0 to {_MOST_COUNT:,} is allowed")
_POSITIONS: _Rule = (lambda value: _is_count(value, _MOST_POSITIONS), "a number of tokens is allowed")
_NUMBER: _Rule = (_is_number, "a number above 0 is allowed")
_TEXT: _Rule = (lambda value: isinstance(value, str), "a name is allowed")
_TABLE: _Rule = (lambda value: isinstance(value, Mapping), "a table of keys is allowed")
_WORDS: _Rule = (lambda value: _are(value, str), "a list of words is allowed")
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_LAYERS, (lambda value: _is_count(value, _MOST_LAYERS), f"0 to {_MOST_LAYERS:,} is allowed")),
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(
        _PER_LAYER,
        (
            lambda value: _is_count(value) or (isinstance(value, list) and all(map(_is_count, value))),
            f"{_COUNT[1].removesuffix(' is allowed')}, or a list of them, is allowed",
        ),
    ),
    **dict.fromkeys(_KINDS, _WORDS),
    **dict.fromkeys(
        _PATTERNS, (lambda value: isinstance(value, str) or _are(value, str), "a text or a list of words is allowed")
    ),
    **dict.fromkeys(_NUMBERS, (lambda value: _are(value, int), "a list of whole numbers is allowed")),
    **dict.fromkeys(_TABLES, _TABLE),
    "mamba_d_head": (lambda value: value == "auto" or _is_count(value), f"'auto', or {_COUNT[1]}"),
    "max_position_embeddings": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "model_type": _TEXT,
    "architectures": (lambda value: _are(value, str), "a list of names is allowed"),
}
_ROPE_RULES: Mapping[str, _Rule] = {
    "original_max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("factor", "rope_theta"), _NUMBER),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
}
_QUANTIZATION_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("quant_method", "quant_algo", "format", "checkpoint_format", "strategy"), _TEXT),
    **dict.fromkeys(("bits", "num_bits"), _NUMBER),
    "group_size": (lambda value: value == -1 or _is_count(value), "-1 or a number of inputs is allowed"),
    **dict.fromkeys(("weight_block_size", "block_structure"), (_is_block, "a list of two sizes is allowed")),
    **dict.fromkeys(("config_groups", "sparsity_config", "kv_cache_scheme"), _TABLE),
    **dict.fromkeys(("ignore", "modules_to_not_convert", "exclude_modules"), _WORDS),
}
_NESTED = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPE_RULES),
    "quantization_config": _QUANTIZATION_RULES,
    "compress_rates": dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), _COUNT),
}
