"""Function-preserving growth: a small Llama that costs as much as a large one and computes exactly the same.

A benchmark needs models of realistic cost whose draft still agrees with its target. Where no large weights
can be downloaded, ``grow`` makes them from a small pair: it widens every MLP with neurons whose output weights
are zero, and interleaves layers whose two outputs (attention and MLP) are zero. The zeros are computed like
any other number, so time and memory equal the larger model's, while the residual stream - and so every
logit and every acceptance - equals the small one's. The idea is Net2Net's (Chen et al. 2016).

A grown model represents traffic, memory and loading time of weights, the arithmetic of the MLPs, and the number of
layers. It does not represent the rest: without ``hidden_size``, the hidden size and the heads stay small. So products
have other shapes than in large models (slow ones on GPUs), the KV cache grows with the number of layers only, and
messages between tensor-parallel ranks stay narrow. The vocabulary always stays small. The config of a grown model
carries ``grown_from_num_parameters``; a report with a figure measured on one must say so.

A wider residual stream has zeros in the dimensions that are new. RMSNorm divides by the root of the mean of squares, so
with n times the dimensions it returns sqrt(n) times the values: its weights are divided by that, and epsilon by n,
which is exact in every format if n is a power of 4. New heads are query heads whose outputs have no weight, with key
and value heads of their own.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SIZE_TOLERANCE = 0.05
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def parse_size(size: str | int) -> int:
    """Number of parameters meant by ``150M``, ``1.5B``, ``300K`` or a plain number.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", str(size).strip().upper())
    num_parameters = round(float(match[1]) * _SUFFIXES[match[2]]) if match else 0
    if num_parameters <= 0:
        raise ValueError(f"size {size!r} is not a positive number with optional suffix K, M or B, e.g. 150M")
    return num_parameters


def grow(
    model: LlamaForCausalLM, num_parameters: int, num_layers: int | None = None, hidden_size: int | None = None
) -> LlamaForCausalLM:
    """A model of about ``num_parameters`` (within 5 %) computing the same function as ``model``, in its dtype.

    In exact arithmetic the logits are equal; in floating point they differ by the order in which a longer row
    is summed (about 1e-6 relative in float32). Depth follows what models of that size have: 32 layers at 8B,
    scaled by the fourth root of the size; ``num_layers`` chooses it instead. The MLP width takes the rest. With
    ``hidden_size`` the residual stream has that width, filled by further heads.

    Raises:
        ValueError: ``num_parameters`` or ``num_layers`` is below the model's own, or out of reach, or ``hidden_size``
            is not the model's own times a power of 4.
    """
    own = model.num_parameters()
    if num_parameters < own:
        raise ValueError(f"cannot grow to {num_parameters} parameters: the model has {own} already")
    if hidden_size is not None:
        model = _widen(model, hidden_size)
    config = _plan(model, num_parameters, num_layers)
    config.grown_from_num_parameters = own
    grown = _empty(config, model)
    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, module in model.named_modules():
            if not name.startswith("model.layers."):
                for key, parameter in module.named_parameters(recurse=False):
                    grown.get_submodule(name).get_parameter(key).copy_(parameter)
        sources = _interleave(len(model.model.layers), config.num_hidden_layers)
        for layer, source in zip(grown.model.layers, sources, strict=True):
            _fill(layer, None if source is None else model.model.layers[source], config, generator)
    return grown


def grow_checkpoint(
    source_dir: Path,
    destination_dir: Path,
    num_parameters: int,
    dtype: torch.dtype = torch.bfloat16,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    device: str = "cpu",
) -> int:
    """Grow the checkpoint in ``source_dir`` on ``device`` and write it with its tokenizer; returns its exact size."""
    model = LlamaForCausalLM.from_pretrained(source_dir, dtype=dtype).to(device)
    grown = grow(model, num_parameters, num_layers, hidden_size)
    grown.save_pretrained(destination_dir)
    AutoTokenizer.from_pretrained(source_dir, trust_remote_code=False).save_pretrained(destination_dir)
    return int(grown.num_parameters())


def _plan(model: LlamaForCausalLM, num_parameters: int, num_layers: int | None) -> LlamaConfig:
    """The grown config: number of layers first, then the MLP width that lands nearest to the size."""
    config: LlamaConfig = copy.deepcopy(model.config)
    own_layers, own_width = config.num_hidden_layers, config.intermediate_size
    if num_layers is not None and num_layers < own_layers:
        raise ValueError(f"cannot grow to {num_layers} layers: the model has {own_layers} already")
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    per_neuron = sum(p.numel() for p in model.model.layers[0].mlp.parameters()) / own_width
    rest = model.num_parameters() - own_layers * per_layer
    bare_layer = per_layer - per_neuron * own_width

    def width(layers: int) -> float:
        return float((num_parameters - rest - layers * bare_layer) / (layers * per_neuron))

    if num_layers is None:
        layers = max(own_layers, round(32 * (num_parameters / 8e9) ** 0.25))
        while layers > own_layers and width(layers) < own_width:
            layers -= 1
    else:
        layers = num_layers
    # A multiple of 64 splits evenly over tensor-parallel ranks; small models may need a finer step.
    for step in (64, 8, 1):
        intermediate = max(own_width, step * round(width(layers) / step))
        size = rest + layers * (bare_layer + per_neuron * intermediate)
        if abs(size - num_parameters) <= SIZE_TOLERANCE / 2 * num_parameters:
            break
    else:
        least = f"{layers} layers need at least {round(size)}"
        raise ValueError(f"cannot grow to {num_parameters} parameters: {least}")
    config.num_hidden_layers, config.intermediate_size = layers, intermediate
    return config


def _widen(model: LlamaForCausalLM, hidden_size: int) -> LlamaForCausalLM:
    """Returns a model of the same function with a residual stream of ``hidden_size``."""
    config: LlamaConfig = copy.deepcopy(model.config)
    own, factor = config.hidden_size, hidden_size / config.hidden_size
    if factor < 1 or not (math.log2(factor) / 2).is_integer():
        raise ValueError(f"cannot grow to a hidden size of {hidden_size}: {own} times 1, 4, 16, .. is allowed")
    times = round(factor)
    config.hidden_size = hidden_size
    config.num_attention_heads *= times
    config.num_key_value_heads *= times
    config.rms_norm_eps /= factor
    wide = _empty(config, model)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            parameter.zero_()  # so that nothing is written to a new dimension
            _corner(parameter, theirs[name]).copy_(theirs[name])
            if name.endswith("norm.weight"):
                parameter.div_(math.sqrt(factor))
    return wide


def _empty(config: LlamaConfig, like: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model without values in the dtype and on the device of another, with its rotary frequencies."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(like.dtype)
    try:
        with torch.device("meta"):
            empty = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default_dtype)
    empty = empty.to_empty(device=like.device)
    # The rotary frequencies are not parameters, so ``to_empty`` left them undefined; they are the source's.
    empty.model.rotary_emb = copy.deepcopy(like.model.rotary_emb)
    empty.tie_weights()
    empty.generation_config = copy.deepcopy(like.generation_config)
    empty.train(like.training)
    return empty


def _interleave(num_own: int, num_total: int) -> list[int | None]:
    """For each layer of the grown model the layer it copies, or None if it is an added one; spread evenly."""
    sources: list[int | None] = [None] * num_total
    for index in range(num_own):
        sources[index * num_total // num_own] = index
    return sources


def _fill(layer: nn.Module, source: nn.Module | None, config: LlamaConfig, generator: torch.Generator) -> None:
    """Fill one grown layer in place: a copy of ``source`` with a wider MLP, or a layer that adds zero."""
    theirs = {} if source is None else dict(source.named_parameters())
    for name, parameter in layer.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith("bias") or "o_proj" in name or "down_proj" in name:
            parameter.zero_()
        else:
            parameter.normal_(0.0, config.initializer_range, generator=generator)
        if name in theirs:
            _corner(parameter, theirs[name]).copy_(theirs[name])


def _corner(grown: Tensor, own: Tensor) -> Tensor:
    """The leading part of ``grown`` that has the shape of ``own``."""
    return grown[tuple(slice(0, size) for size in own.shape)]
