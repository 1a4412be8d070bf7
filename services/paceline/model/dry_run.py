"""What loading refuses of a model, found without its weights: the checks of ``loading.py``, on the meta device."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers.quantizers.auto import AutoQuantizationConfig

from paceline.checkpoint.files import Checkpoint, context_length
from paceline.checkpoint.packing import packing_of
from paceline.config import ModelOptions
from paceline.core.cuda import LEAST_CAPABILITY
from paceline.errors import ConfigError, reason_of
from paceline.model.attention.indexed import indexers_of
from paceline.model.attention.kernels import choose_kernel, no_library
from paceline.model.compiled.graphs import require_graphs
from paceline.model.compiled.parts import RANKS_ON_GPUS
from paceline.model.dequantized import plain_config
from paceline.model.experts import pad_experts, why_not_compiled
from paceline.model.kv_cache import NO_KV
from paceline.model.local_config import meta_model
from paceline.model.parallel.plan import plan_shards
from paceline.model.quantized import require_roundable
from paceline.model.rope import settle_rope
from paceline.model.step import name_of, probe_layers


def require_split(checkpoint: Checkpoint, degree: int) -> None:
    """Raises ConfigError if ``degree`` ranks cannot share a model, as each of them would."""
    plan_shards(plain_config(checkpoint), 0, degree)


def require_loadable(checkpoint: Checkpoint, options: ModelOptions, device: str) -> None:
    """Checks that a model can be built and runs on the paged attention.

    Args:
        checkpoint: the model. Code of its own is not run: nothing is said of it.
        options: how to run it.
        device: type of the device, perhaps of another machine, which has a GPU that runs every kernel.

    Raises:
        ConfigError: loading would refuse it, in these words.
    """
    if checkpoint.trust_remote_code and checkpoint.config.get("auto_map"):
        return
    require_graphs(options.cuda_graphs, torch.device(device))
    config = plain_config(checkpoint)
    stored = None if packing_of(checkpoint.quantization) is not None else checkpoint.quantization
    try:
        if stored is not None:
            AutoQuantizationConfig.from_dict(dict(stored))
        model = meta_model(config, dtype=torch.bfloat16)  # all kernels without values take it
    except Exception as error:  # of whatever class the configuration names
        raise ConfigError(f"model {checkpoint.path!r} could not be loaded: {reason_of(error)}") from error
    model.name_or_path = checkpoint.path
    if options.quantization is not None:
        require_roundable(model, checkpoint.path, options.quantization)
    longest = context_length(model.config.get_text_config()) or 1 << 20
    settle_rope(model, longest, name_of(model))
    pad_experts(model)
    probe = probe_layers(model)
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    layers = [replace(one, is_fp8=options.kv_cache_dtype != "auto") if one != NO_KV else one for one in probe.layers]
    choose_kernel(
        options.attention,
        device_type=device,
        capability=LEAST_CAPABILITY if device == "cuda" else None,
        dtype=dtype,
        layers=layers,
        indexed=bool(indexers_of(model)),
        no_triton=None,
        no_native=None,
        no_library=no_library(dtype, layers, probe.sliding_window, probe.further, is_here=False),
    )
    reason = why_not_compiled(model)
    if device == "cuda":
        reason = RANKS_ON_GPUS if options.tensor_parallel_size > 1 else None
    if options.compile is True and reason is not None:
        raise ConfigError(f"compile is true, but {reason}: set compile to auto or false")
