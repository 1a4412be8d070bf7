"""Quantized weights in torch: how transformers is asked for them, and what a loaded model says of its own."""

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
from paceline.checkpoint.quantization import batch_dependence, method_of, require_method, require_quantization
from paceline.config import Quantization
from paceline.errors import ConfigError

log = logging.getLogger(__name__)


def load_options(checkpoint: Checkpoint, quantization: Quantization | None, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained`` beyond those of a checkpoint that is not quantized.

    Raises:
        ConfigError: the method of the checkpoint, or ``quantization``, cannot run here.
    """
    method = None if checkpoint.quantization is None else method_of(checkpoint.quantization)
    if quantization is not None:
        require_quantization(quantization, checkpoint.path, method)
        return {"quantization_config": _torchao_config()}
    if method is None:
        return {}
    require_method(checkpoint.path, method, device.type)
    # Kernels of some methods pack weights for the device while they are loaded; to name one needs accelerate.
    return {"device_map": {"": str(device)}} if importlib.util.find_spec("accelerate") is not None else {}


def require_whole(checkpoint: Checkpoint, quantization: Quantization | None, degree: int) -> None:
    """Raises ConfigError if several ranks were to share quantized weights: they read slices of plain ones."""
    if quantization is not None or checkpoint.quantization is not None:
        how = f"quantization is {quantization!r}" if quantization else f"model {checkpoint.path!r} is quantized"
        raise ConfigError(
            f"tensor_parallel_size is {degree} and {how}: one process runs quantized weights, so set it to 1"
        )


def _torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, PerRow
    from transformers import TorchAoConfig

    # Its inductor settings are global, and for GPUs.
    return TorchAoConfig(Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False))


def require_quantized(model: PreTrainedModel, path: str, quantization: Quantization) -> None:
    """Logs how much of a model was quantized. Raises ConfigError if nothing was: its layers are none of torch's."""
    total = model.num_parameters()
    quantized = sum(p.numel() for p in model.parameters() if _is_composed(p))
    if not quantized:
        raise ConfigError(
            f"quantization is {quantization!r}, and {type(model).__name__} ({path}) has no linear layer that it "
            "applies to: set quantization to null"
        )
    log.info("model %r: %.0f %% of its parameters are %s", path, 100 * quantized / total, quantization)


def quantization_of(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """The method that the weights are quantized by, and why tokens of one step change each other's logits.

    Each is None if there is none; weights that were dequantized while they were loaded count as not quantized.
    """
    config = _quantization_config(model)
    if config is None:
        return None, None
    facts: Mapping[str, Any] = config.to_dict()
    return method_of(facts), batch_dependence(facts)


def why_eager(model: PreTrainedModel) -> str | None:
    """Says why a model is not compiled, as a clause; None if it can be.

    int8 weights are compiled to products that read them as they are. Others would be folded to the dtype that they
    are multiplied in, which is what the quantization was to save, or have kernels that are not exported.
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
    if not _is_composed(tensor):
        yield tensor
        return
    composed: Any = tensor
    names, _ = composed.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def _is_composed(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _quantization_config(model: PreTrainedModel) -> Any:
    return getattr(model.config, "quantization_config", None) if getattr(model, "is_quantized", False) else None
