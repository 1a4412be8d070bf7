"""Quantized weights in torch: how they are made or kept while a model is loaded, and what it says of its own.

On the CPU the linear layers of a model use blocks of 4 or 8 bits (``compiled/blocks.py``), from a GGUF file or made of
plain weights. On GPUs they run by numbers of 8 bits with scales (``scaled.py``), of a checkpoint
(``stored_weights.py``), or made of plain weights. Other checkpoints that come quantized are transformers'.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.gguf.weights import GgufWeights
from paceline.checkpoint.packing import packing_of, require_weights, why_whole
from paceline.checkpoint.quantization import batch_dependence, method_of
from paceline.config import Quantization
from paceline.errors import ConfigError
from paceline.model.compiled.blocks import OUTPUTS, quantize
from paceline.model.compiled.linear import (
    HEAD_BY_HEAD,
    PackedLinear,
    blocks_usable,
    quantized_layers,
    replace_layers,
)
from paceline.model.scaled import Whole, round_layers, scaled_layers, why_not_scaled

_OUTPUT_LAYER_BITS = 8
"""Bits of the output layer, where others have 4. No later layer averages its rounding errors out."""
log = logging.getLogger(__name__)


def load_options(
    checkpoint: Checkpoint, quantization: Quantization | None, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained`` in addition to what a checkpoint without quantization needs.

    Raises:
        ConfigError: the method of the checkpoint, or ``quantization``, cannot run here.
    """
    require_weights(checkpoint.quantization, quantization, checkpoint.path, device.type)
    if quantization is not None:
        if device.type == "cpu":
            if not blocks_usable():
                raise ConfigError(
                    f"quantization is {quantization!r}, whose products need a C++ compiler and an x86 processor here: "
                    "install g++, or set quantization to null"
                )
        elif (reason := why_not_scaled(device, dtype)) is not None:
            raise ConfigError(
                f"quantization is {quantization!r}, whose kernel for CUDA {reason}: set quantization to null"
            )
        return {}
    if checkpoint.quantization is None or packing_of(checkpoint.quantization) is not None:
        return {}
    # Kernels of some methods pack weights for the device while they are loaded; to name one needs accelerate.
    return {"device_map": {"": str(device)}} if importlib.util.find_spec("accelerate") is not None else {}


def require_whole(checkpoint: Checkpoint, degree: int) -> None:
    """Raises ConfigError if several ranks were to share weights that cannot be split: they read slices of plain ones,
    or of what they dequantize."""
    if (reason := why_whole(checkpoint.quantization, checkpoint.path)) is not None:
        raise ConfigError(f"tensor_parallel_size is {degree} and {reason}")


def keeps_blocks(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> bool:
    """True if the blocks of a GGUF file are multiplied as they are stored: where that is faster than by bfloat16."""
    fast = device.type == "cpu" and dtype == torch.bfloat16 and torch.cpu._is_vnni_supported()
    return fast and checkpoint.gguf is not None and blocks_usable()


def round_linear(
    model: PreTrainedModel,
    quantization: Quantization,
    device: torch.device,
    path: str,
    weights: GgufWeights | None = None,
    whole: Whole | None = None,
) -> None:
    """Rounds the linear layers of a model that runs on ``device``. Call ``load_options`` first.

    Args:
        model: a model with plain weights, or a rank's part of one.
        quantization: the option.
        device: where it will run.
        path: of the model.
        weights: a GGUF file whose blocks of 32 run as they are on the CPU.
        whole: the model of which this is a part; None: it is whole itself.

    Raises:
        ConfigError: it has no layer that can be rounded.
    """
    whole = whole or Whole()
    require_roundable(model, path, quantization, whole)
    if device.type == "cpu":
        pack_quantized(model, weights, quantization, whole)
    else:
        round_layers(model, device, OUTPUTS, 8 if quantization == "int8" else 4, whole)


def pack_quantized(
    model: PreTrainedModel, weights: GgufWeights | None, quantization: Quantization | None, whole: Whole | None = None
) -> None:
    """Replaces the linear layers of a model on the CPU by quantized ones. Call ``blocks_usable`` first.

    Layers that a GGUF file stores in blocks of 32 run on these blocks. All others are rounded by ``quantization``, or
    stay as they are. Gates with few outputs always stay as they are, so that no choice of an expert depends on
    rounding. A rank whose part of a weight is whole blocks has the blocks of the ``whole`` model.
    """
    whole = whole or Whole()
    output_layer = model.get_output_embeddings()
    embedding = next((name for name, part in model.named_modules() if part is model.get_input_embeddings()), "")
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    rounded: list[str] = []

    def make(path: str, layer: torch.nn.Linear) -> PackedLinear | None:
        if whole.num_outputs(path, layer) < OUTPUTS:
            return None
        stored = None
        if weights is not None:
            name = embedding if layer is output_layer and tied else path
            stored = weights.blocks(f"{name}.weight")
        if stored is None and quantization is not None:
            bits = _OUTPUT_LAYER_BITS if quantization == "int8" or layer is output_layer else 4
            stored = quantize(layer.weight, bits)
            rounded.append(path)
        return None if stored is None else PackedLinear(layer, stored)

    replace_layers(model, make)
    if quantization is not None and not rounded:
        log.warning("quantization is %r and rounds nothing: the file stores all linear layers in blocks", quantization)
    if layers := quantized_layers(model):
        packed = sum(layer.num_weights for layer in layers)
        num_bytes = sum(layer.packed.nbytes for layer in layers)
        log.info("%.0f M weights of linear layers take %.0f MB in blocks", packed / 1e6, num_bytes / 1e6)


def require_roundable(
    model: PreTrainedModel, path: str, quantization: Quantization, whole: Whole | None = None
) -> None:
    """Raises ConfigError if nothing of a model's layers is rounded: they are none of torch's. See ``round_linear``."""
    whole, rounded = whole or Whole(), [*model.named_modules()]
    rounded = [(n, one) for n, one in rounded if type(one) is torch.nn.Linear and not n.endswith(HEAD_BY_HEAD)]
    output_layer = model.get_output_embeddings()
    if all(layer is output_layer or whole.num_outputs(name, layer) < OUTPUTS for name, layer in rounded):
        raise ConfigError(
            f"quantization is {quantization!r}, and {type(model).__name__} ({path}) has no linear layer that it "
            "applies to: set quantization to null"
        )


def parameter_counts(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Returns size and number of dimensions of each parameter, quantized ones included. Tied weights count once."""
    counts = [(p.numel(), p.dim()) for p in model.parameters()]
    tied = (
        model.get_output_embeddings() if getattr(model.config.get_text_config(), "tie_word_embeddings", False) else None
    )
    for scaled in scaled_layers(model):  # whose biases are parameters
        counts.append((scaled.num_weights, 2))
    for layer in quantized_layers(model):
        counts += [] if layer is tied else [(layer.num_weights, 2)]
        counts += [] if layer.bias is None else [(layer.bias.numel(), 1)]
    return counts


def quantization_of(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """The method that the weights are quantized by, and why tokens of one step change each other's logits.

    Each is None if there is none; weights that were dequantized while they were loaded count as not quantized.
    """
    if layers := quantized_layers(model):
        return " and ".join(f"int{bits}" for bits in sorted({layer.bits or 0 for layer in layers})), None
    if methods := sorted({scaled.method for scaled in scaled_layers(model)}):
        return " and ".join(methods), None
    config = _quantization_config(model)
    if config is None:
        return None, None
    facts: Mapping[str, Any] = config.to_dict()
    return method_of(facts), batch_dependence(facts)


def why_eager(model: PreTrainedModel) -> str | None:
    """Says why a model is not compiled, as a clause; None if it can be.

    int8 weights are compiled to products that read them as they are. Other weights would be folded to the dtype of the
    product, which loses the saved memory, or have kernels that cannot be exported.
    """
    config = _quantization_config(model)
    if config is None:
        return None
    method, kind = method_of(config.to_dict()), getattr(config, "quant_type", None)
    per_row = type(getattr(kind, "granularity", None)).__name__ == "PerRow"
    if method != "torchao" or type(kind).__name__ != "Int8WeightOnlyConfig" or not per_row:
        return f"of quantized weights only int8 with one scale for each output is compiled, and these are by {method!r}"
    if model.dtype != torch.bfloat16:
        name = str(model.dtype).removeprefix("torch.")
        return f"int8 weights are compiled with dtype 'bfloat16', and dtype is {name!r}"
    return None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a quantized one consists of, in order; a plain one is its own."""
    if not bool(is_traceable_wrapper_subclass(tensor)):
        yield tensor
        return
    composed: Any = tensor
    names, _ = composed.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def _quantization_config(model: PreTrainedModel) -> Any:
    return getattr(model.config, "quantization_config", None) if getattr(model, "is_quantized", False) else None
