"""Decoder layers of transformers whose attention is an ``Attend`` of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from paceline.checkpoint.compressed import SLIDING
from paceline.drafters.heads.module import Attend, AttendSinks
from paceline.errors import ConfigError
from paceline.model.attention.latent import adopt_latents, over_latents
from paceline.model.kv_cache import LayerSpec

_NAME = "paceline_head"
FAMILIES: dict[str, tuple[Any, Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}
"""Model type of an EAGLE head -> configuration, layer, norm and rotary embedding."""


@over_latents
def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attend: Attend, **kwargs: Any
) -> tuple[Tensor, None]:
    sinks = kwargs.get("s_aux")
    for name, has in (("softcap", False), ("s_aux", sinks is not None and isinstance(attend, AttendSinks))):
        if kwargs.get(name) is not None and not has:
            raise ConfigError(f"{type(module).__name__} attends with {name}, which heads do not have")
    if hasattr(module, "attn_temperature_tuning"):
        raise ConfigError(f"{type(module).__name__} attends in chunks and by temperature, which heads do not")
    scaling, window = kwargs.get("scaling"), kwargs.get("sliding_window")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sinks is not None and isinstance(attend, AttendSinks):
        attend = attend.with_sinks(sinks)
    return attend(module.layer_idx, query, key, value, scaling, window), None


def _require_no_indexers(config: Any) -> None:
    windows = {*(getattr(config, "layer_types", None) or ())} == {SLIDING}  # DeepSeek V4's choose nothing
    if getattr(config, "index_topk", None) is not None and not windows:
        raise ConfigError(f"layers of {config.model_type} choose keys by indexers, which heads do not run")


def with_our_attention(config: Any) -> Any:
    """``config``, changed so that layers made from it attend by the ``attend`` that they are called with.

    Raises ConfigError if they would choose keys by indexers.
    """
    _require_no_indexers(config)
    AttentionInterface.register(_NAME, _attention)
    config._attn_implementation = _NAME
    return config


def attend_with_ours(model: PreTrainedModel) -> PreTrainedModel:
    """``model``, changed so that its layers attend by the ``attend`` that it is called with.

    Raises ConfigError if they would choose keys by indexers.
    """
    _require_no_indexers(model.config.get_text_config())
    AttentionInterface.register(_NAME, _attention)
    adopt_latents(model)
    model.set_attn_implementation(_NAME)
    return model


def eagle_config(values: dict[str, Any]) -> PretrainedConfig:
    """The configuration of an EAGLE head's layers from the values of its config.json."""
    kind = values.get("model_type", "llama")
    make = FAMILIES.get(kind, FAMILIES["llama"])[0]
    skipped = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype"}
    config: PretrainedConfig = make(**{key: value for key, value in values.items() if key not in skipped})
    return config


class Layer(nn.Module):
    """A decoder layer of the Llama or Qwen 3 family without what precedes its attention, which EAGLE replaces."""

    def __init__(self, config: Any, index: int, *, wide: bool = False) -> None:
        """``wide``: the attention takes [embedding; state], twice the hidden size."""
        super().__init__()
        made = FAMILIES[config.model_type][1](config, index)
        self.self_attn, self.mlp = made.self_attn, made.mlp
        self.post_attention_layernorm = made.post_attention_layernorm
        if wide:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                bias = narrow.bias is not None
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, narrow.out_features, bias=bias))

    def forward(self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``residual`` plus the attention of ``x`` plus the MLP of that."""
        attended, _ = self.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=None, attend=attend)
        hidden = residual + attended
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def norm(config: Any, size: int) -> nn.Module:
    """An RMSNorm of the family."""
    made: nn.Module = FAMILIES[config.model_type][2](size, eps=config.rms_norm_eps)
    return made


def rotary(config: Any) -> nn.Module:
    """The rotary embedding of the family: ``(x, positions [B, T]) -> cos, sin``."""
    made: nn.Module = FAMILIES[config.model_type][3](config)
    return made


def kv_of(config: Any, num_layers: int) -> tuple[LayerSpec, ...]:
    """Keys and values of layers with grouped-query attention."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (LayerSpec(config.num_key_value_heads, dim, dim),) * num_layers


def offsets(target_ids: Tensor) -> Tensor:
    """The published form of a draft vocabulary (``d2t``): the target's id of each entry less its own index."""
    return target_ids - torch.arange(len(target_ids), device=target_ids.device)
