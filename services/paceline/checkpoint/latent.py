"""What latent attention keeps per token, and which of its weights stay plain, by a configuration. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline.checkpoint.indexed import DOTS, indexed_layers

_FAMILIES = {
    *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "youtu"),
}
"""Model types whose attention layers all keep latents of one size (``model/attention/latent.py``)."""


def latent_values(config: Mapping[str, Any], num_layers: int) -> int | None:
    """Returns the numbers that ``num_layers`` layers of a text configuration keep per token, for any number of heads.

    None: the model type is not known to keep latents.
    """
    if config.get("model_type") in DOTS:
        return sum(map(partial(_of_layer, config, {*indexed_layers(config)}), range(num_layers)))
    sizes = _sizes(config, "kv_lora_rank", "qk_rope_head_dim")
    return num_layers * sum(sizes) if sizes and num_layers else None


def _of_layer(config: Mapping[str, Any], indexed: set[int], index: int) -> int:
    """Numbers that a layer of dots3 keeps per token. Published configurations name the sizes of layers with a window
    ``swa_*``, saved ones list what differs by layer."""
    layer, prefix, rank, rope = config, "", 512, 64
    if index not in indexed:
        if (saved := config.get("per_layer_config")) is not None:
            layer = {**config, **saved.get(str(index), saved.get(index, {}))}
        else:
            prefix, rank = "swa_", 1024
            rope = config.get("swa_head_dim", 256) - config.get("swa_qk_nope_head_dim", 192)
    return int(layer.get(f"{prefix}kv_lora_rank", rank)) + int(layer.get(f"{prefix}qk_rope_head_dim", rope))


def num_attentions(config: Mapping[str, Any]) -> int:
    """Returns the number of attention layers where a text configuration counts pairs of them, as LongCat's; else 0."""
    pairs = config.get("num_layers") if config.get("model_type") == "longcat_flash" else None
    return 2 * pairs if isinstance(pairs, int) else 0


def num_plain_weights(config: Mapping[str, Any], num_layers: int) -> int:
    """Returns the number of weights of ``num_layers`` layers that are never quantized: each head has its own matrix."""
    sizes = _sizes(config, "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    if not sizes:
        return 0
    heads, rank, *of_head = sizes
    return num_layers * heads * rank * sum(of_head)


def _sizes(config: Mapping[str, Any], *names: str) -> list[int]:
    """Returns the values of these settings; [] if one is missing, or the model type is not among ``_FAMILIES``."""
    found = [config.get(name) for name in names]
    known = config.get("model_type") in _FAMILIES
    return [size for size in found if isinstance(size, int)] if known and all(found) else []
