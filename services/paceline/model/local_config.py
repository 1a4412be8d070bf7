"""Copies of configurations with changed values, and the shapes of their models, built on the meta device."""

from __future__ import annotations

import copy
import math
import re
import threading
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import require_no_code
from paceline.checkpoint.packing import count_by_config
from paceline.checkpoint.size import WeightCounts, share_of_experts
from paceline.errors import ConfigError, reason_of

BUILDING = threading.Lock()
"""Held while a model is built: that is done under process-wide defaults (device, dtype, initialization)."""

HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"
REPEATED = {KV_HEADS, "mamba_n_groups", "mamba_ngroups"}
"""Names of values that may be fewer than the ranks: several ranks then hold the same part."""
_WIDTH = re.compile(r"(intermediate_size|ffn_dim|ffn_hidden_size|n_inner)$")
_PER_LAYER = object()


def read_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """Returns the configuration of a checkpoint as transformers has it. Raises ConfigError if it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            checkpoint.location, trust_remote_code=checkpoint.trust_remote_code
        )
    except Exception as error:  # whatever the class of the model type raises
        require_no_code(checkpoint.path, error)
        raise ConfigError(f"config.json of {checkpoint.path!r} is not valid: {reason_of(error)}") from error
    return config


def build(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Returns the causal language model of a configuration, in evaluation mode. The caller holds ``BUILDING``."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False, **options)
    return model.eval()


def meta_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Returns the model of a configuration without memory for its weights: on the meta device."""
    with BUILDING, torch.device("meta"):
        return build(config, **options)


def counts_by_config(checkpoint: Checkpoint) -> WeightCounts:
    """Counts the weights of the model that a checkpoint's configuration describes; loads none.

    Quantized weights count as plain floats if this package does not read their quantization.

    Raises:
        ConfigError: transformers builds no model from it, or only with the checkpoint's own code.
    """
    trusted = checkpoint.trust_remote_code
    try:
        with BUILDING, torch.device("meta"):
            config = read_config(checkpoint)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
            sizes = {name: one.numel() for name, one in model.named_parameters()}
            whole = sum(one.numel() for one in model.parameters() if one.ndim < 2)
            linear = {f"{name}.weight" for name, one in model.named_modules() if isinstance(one, nn.Linear)}
            experts = {name for name, one in model.named_parameters() if one.ndim == 3 and ".experts." in name}
            shapes = {name: tuple(one.shape) for name, one in model.named_parameters() if name in linear | experts}
    except ConfigError:
        raise
    except Exception as error:  # of whatever class the configuration names
        require_no_code(checkpoint.path, error)
        raise ConfigError(f"no model can be built by its config.json: {reason_of(error)}") from error
    kept = count_by_config(shapes, checkpoint.quantization or {}, config.get_text_config().model_type)
    return WeightCounts(sum(sizes.values()), whole, 0, 0, *kept, expert_share=share_of_experts(sizes))


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters and persistent buffers, by name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def values_of(config: PretrainedConfig) -> dict[str, int]:
    """Returns the configuration values that ranks may divide among them, by name: numbers of heads, and widths."""
    text = config.get_text_config()
    names = [HEADS, KV_HEADS, *(name for name in vars(text) if _WIDTH.search(name))]
    found = {name: _uniform(text, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}


def head_dim_of(config: PretrainedConfig) -> int:
    """Returns the size of one attention head; where layers differ, the size in most layers."""
    text = config.get_text_config()
    return int(_uniform(text, "head_dim") or text.hidden_size // text.num_attention_heads)


def _uniform(text: PretrainedConfig, name: str, otherwise: Any = None) -> Any:
    """Returns a configuration value; None if it is absent, ``otherwise`` if each layer has its own."""
    try:
        return getattr(text, name, None)
    except Exception:  # transformers raises an error of its own, not an AttributeError
        return otherwise


def changed(config: PretrainedConfig, values: dict[str, int]) -> PretrainedConfig:
    """Returns a copy with the given values; attention heads keep their size."""
    other = copy.deepcopy(config)
    text = other.get_text_config()
    if _uniform(text, "head_dim", _PER_LAYER) is None:
        text.head_dim = head_dim_of(config)
    for name, value in values.items():
        setattr(text, name, value)
    return other


def smaller(value: int) -> int:
    """Returns ``value`` divided by its smallest prime factor."""
    factor = next((f for f in range(2, math.isqrt(value) + 1) if value % f == 0), value)
    return value // factor


def divides(degree: int, key: str, value: int) -> bool:
    """True if ``degree`` ranks can share ``value``, the configuration value named ``key``. See ``REPEATED``."""
    return value % degree == 0 or (key in REPEATED and degree % value == 0)
