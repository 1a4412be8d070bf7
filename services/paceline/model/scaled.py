"""Linear layers on a GPU whose weights stay numbers of 8 bits with scales: those of FP8 checkpoints, or rounded here.

A weight is ``code * scale``, rounded once to the dtype of the inputs, as it would be in a dequantized checkpoint; no
weight is stored so. ``scaled_triton.py`` multiplies by them, for steps of any size in the same order. Activations are
not rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.checkpoint.packing import SCALED_BLOCK
from paceline.core.cuda import LEAST_CAPABILITY, triton_unavailable
from paceline.errors import ConfigError
from paceline.model.compiled.linear import replace_layers

EXPONENTS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.int8: 0}
"""Bits of the exponent of a code, by the type in which checkpoints store it; 0: an integer."""
_FIRST_NAN = {4: 0x7F, 5: 0x7C, 0: 0x80}
"""The least code, without its sign, that is no finite number."""
log = logging.getLogger(__name__)


class Scaled(NamedTuple):
    """A weight as it is stored."""

    codes: Tensor
    """[outputs, inputs], of a type in ``EXPONENTS``."""
    scales: Tensor
    """[outputs, 1 or blocks] float32: one for all inputs of an output, or for each ``SCALED_BLOCK`` of them."""


class ScaledLinear(nn.Module):
    """An ``nn.Linear`` whose weights are codes with scales."""

    codes: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        """Takes the sizes and the bias of ``layer``; ``hold`` takes the weights."""
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.exponent, self._dtype = 0, layer.weight.dtype

    def hold(self, weight: Scaled, device: torch.device, name: str) -> ScaledLinear:
        """Keeps a weight on ``device``; returns itself.

        Raises:
            ConfigError: a code is no number, or a scale is too large for the sums; ``name`` says of what.
        """
        self.exponent = EXPONENTS[weight.codes.dtype]
        codes = F.pad(weight.codes.view(torch.int8).to(device), (0, -self.in_features % SCALED_BLOCK))
        scales = weight.scales.to(device) * _factor(self.exponent)
        sizes = codes.to(torch.int16) & (0x7F if self.exponent else -1)
        if bool((sizes >= _FIRST_NAN[self.exponent]).any()) or not bool(scales.isfinite().all()):
            raise ConfigError(f"{name} has a quantized weight that is no finite number")
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        return self

    @property
    def method(self) -> str:
        """How the weights are quantized."""
        return "fp8" if self.exponent else "int8"

    @property
    def num_weights(self) -> int:
        """Weights of the layer."""
        return self.in_features * self.out_features

    @property
    def weight(self) -> Tensor:
        """The weights as plain ones, for code that reads them; made anew at each call."""
        return plain_weight(self.codes, self.scales, self.exponent, self._dtype)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs] -> [..., outputs]``."""
        ours: Any = torch.ops.paceline
        product: Tensor = ours.scaled_linear(x, self.codes, self.scales, self.bias, self.exponent)
        return product


def scaled_layers(model: nn.Module) -> list[ScaledLinear]:
    """The layers of a model whose weights are codes with scales."""
    return [layer for layer in model.modules() if isinstance(layer, ScaledLinear)]


def without_weights(model: nn.Module, paths: Collection[str]) -> dict[str, ScaledLinear]:
    """Replaces linear layers of a model; returns those at ``paths``, which hold no weights yet."""
    made = {}

    def make(path: str, layer: nn.Linear) -> ScaledLinear | None:
        if path not in paths:
            return None
        made[path] = ScaledLinear(layer)
        return made[path]

    replace_layers(model, make)
    return made


class Whole:
    """The model that is rounded, where a rank has a part of each layer; this one: it has all of them."""

    def num_outputs(self, path: str, layer: nn.Linear) -> int:
        """Outputs of the whole layer at a path."""
        return layer.out_features

    def largest(self, path: str, own: Tensor) -> Tensor:
        """The largest number of each output of the whole layer at a path, by the largest of this part of it."""
        return own


def round_layers(model: PreTrainedModel, device: torch.device, least_outputs: int, whole: Whole | None = None) -> None:
    """Rounds the weights of a model's linear layers to 8 bits, of an output by one scale, and keeps them on ``device``.

    The output layer and layers of fewer outputs, such as gates, stay as they are. Ranks have the codes and scales of
    the ``whole`` model.
    """
    output_layer, whole = model.get_output_embeddings(), whole or Whole()

    def make(path: str, layer: nn.Linear) -> ScaledLinear | None:
        if layer is output_layer or whole.num_outputs(path, layer) < least_outputs:
            return None
        weight = layer.weight.detach().to(device)
        return ScaledLinear(layer).hold(rounded(weight, whole.largest(path, largest_of(weight))), device, path)

    replace_layers(model, make)


def largest_of(weight: Tensor) -> Tensor:
    """The largest number of each output of a matrix, without its sign: [outputs] float32."""
    return weight.float().abs().amax(1)


def rounded(weight: Tensor, largest: Tensor) -> Scaled:
    """A matrix as integers of 8 bits with a scale for each output, by ``largest_of`` it or of what it is a part of."""
    scales = largest[:, None] / 127
    codes = (weight.float() / scales.masked_fill(scales == 0, 1)).round().clamp(-127, 127)
    return Scaled(codes.to(torch.int8), scales)


def why_not_scaled(device: torch.device, dtype: torch.dtype) -> str | None:
    """Says why products by scaled weights cannot run, as a clause about their kernel; None: they can."""
    if device.type != "cuda":
        return f"runs on CUDA only, and device is {device.type!r}"
    if dtype.itemsize != 2:
        return f"takes bfloat16 and float16, and dtype is {str(dtype).removeprefix('torch.')!r}"
    if (reason := triton_unavailable()) is not None:
        return reason
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    return None


def plain_weight(codes: Tensor, scales: Tensor, exponent: int, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] as ``ScaledLinear`` holds them, dequantized: what the kernel computes in registers."""
    if exponent:
        mask = (0x7F << (16 + exponent)) - 0x80000000
        numbers = ((codes.to(torch.int32) << (16 + exponent)) & mask).view(torch.float32)
    else:
        numbers = codes.float()
    blocks = numbers.view(len(numbers), -1, SCALED_BLOCK)
    return (blocks * scales[:, :, None]).flatten(1).to(dtype)


def _factor(exponent: int) -> float:
    """The factor of scales by which the exponent of a code in the place of a float32's is made its own."""
    return 2.0 ** (127 - (2 ** (exponent - 1) - 1)) if exponent else 1.0


def _by_torch(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, exponent: int) -> Tensor:
    return F.linear(x, plain_weight(codes, scales, exponent, x.dtype)[:, : x.shape[-1]], bias)


def _by_triton(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, exponent: int) -> Tensor:
    from paceline.model.scaled_triton import multiply

    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return multiply(flat, codes, scales, bias, exponent).view(*x.shape[:-1], codes.shape[0])


def _register() -> None:
    torch.library.define(
        "paceline::scaled_linear", "(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int exponent) -> Tensor"
    )
    torch.library.impl("paceline::scaled_linear", "CPU", _by_torch)
    torch.library.impl("paceline::scaled_linear", "CUDA", _by_triton)
    torch.library.register_fake(
        "paceline::scaled_linear", lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0])
    )


_register()
