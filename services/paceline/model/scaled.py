"""Weights on a GPU that stay numbers of 8 or 4 bits with scales: those of checkpoints, or rounded here.

A weight is ``(code - zero) * scale``, rounded once to the dtype of the inputs, as in a dequantized checkpoint. Rounded
weights are never stored. ``scaled_triton.py`` multiplies by them, for steps of any size in the same order: by linear
layers here, by experts in ``experts.py``. Activations are not rounded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.checkpoint.packing import SCALED_BLOCK, Format, factor
from paceline.core.cuda import LEAST_CAPABILITY, triton_unavailable
from paceline.errors import ConfigError
from paceline.model.compiled.linear import replace_layers
from paceline.model.quantized_weights import INTEGER_ZEROS, Weights

INT8, INT4 = Format(8, 0), Format(4, 0, 32, "F16", has_zeros=True)
"""How weights are rounded here."""
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the codes of a float of four bits, E2M1."""
_FLOAT8 = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}
_FIRST_NAN = {4: 0x7F, 5: 0x7C}
"""The least code of 8 bits, without its sign, that is no finite number, by the bits of its exponent."""
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.uint8,
           "F8_E4M3": torch.int8}  # fmt: skip
"""The dtype that scales are held in, by their number format: of bytes the kernel makes floats."""
_SCALES_OF_8 = {torch.uint8: torch.float8_e8m0fnu, torch.int8: torch.float8_e4m3fn}
log = logging.getLogger(__name__)


class Scaled(NamedTuple):
    """Some outputs of a weight as they are stored."""

    codes: Tensor
    """[outputs, bytes]: a number of 8 bits in each, or of 4 bits two, of which the first has the lower bits."""
    scales: Tensor
    """[outputs, 1 or groups]: one for all inputs of an output, or for each group of them."""
    factors: Tensor | None = None
    """[outputs] float32, if a format has them."""
    zeros: Tensor | None = None
    """[outputs, 1 or groups] int8, if a format has them: zero points less ``INTEGER_ZEROS``."""
    order: Tensor | None = None
    """[inputs] int32: which input of the weight comes at each place; None: they are in their own order."""


class ScaledWeight(nn.Module):
    """A weight [.., outputs, inputs] as codes with scales, without the values of a plain one."""

    codes: Tensor
    """[.., outputs, bytes of rows that are filled up to blocks] int8. In a block of 4-bit numbers the lower halves of
    the bytes are its first half. The sign of a float is its last bit."""
    scales: Tensor
    """[.., outputs, 1 or groups of the filled rows]."""
    factors: Tensor | None
    """[.., outputs] float32, or None."""
    zeros: Tensor | None
    """int8 of the shape of the scales, or None."""
    order: Tensor | None
    """[inputs] int32, or None: as in ``Scaled``, of linear layers alone."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Takes no memory yet; ``allocate`` does."""
        super().__init__()
        self.shape, self.format, self._dtype = shape, INT8, dtype

    def allocate(self, format: Format, device: torch.device) -> None:
        """Makes place for a weight of a format on ``device``."""
        self.format = format
        *lead, inputs = self.shape
        filled = -(-inputs // SCALED_BLOCK) * SCALED_BLOCK
        groups = filled // format.group if format.group else 1
        parts = {
            "codes": torch.empty(*lead, filled * format.bits // 8, dtype=torch.int8, device=device),
            "scales": torch.zeros(*lead, groups, dtype=_SCALES[format.scales], device=device),
            "zeros": torch.zeros(*lead, groups, dtype=torch.int8, device=device) if format.has_zeros else None,
            "factors": torch.empty(lead, dtype=torch.float32, device=device) if format.has_factors else None,
            "order": None,
        }
        for name, part in parts.items():
            self.register_buffer(name, part, persistent=False)

    def put(self, part: Scaled, place: tuple[int | slice, ...], name: str) -> None:
        """Copies outputs to their place ``[.., outputs]``.

        Raises:
            ConfigError: a code is no number, or a scale is too large for the sums; ``name`` says of what.
        """
        codes = part.codes.view(torch.uint8).to(self.codes.device)
        codes = F.pad(codes, (0, self.codes.shape[-1] - codes.shape[-1]))
        scales = part.scales.to(self.codes.device)
        largest = (
            _decoded(scales) if part.factors is None else _decoded(scales) * part.factors.to(scales.device)[:, None]
        )
        is_number = (largest * factor(self.format.exponent)).isfinite().all()
        if self.format.bits == 4:
            codes = _in_halves(codes, self.format.exponent)
        elif self.format.exponent:
            is_number &= ((codes & 0x7F) < _FIRST_NAN[self.format.exponent]).all()
        if not bool(is_number):
            raise ConfigError(f"{name} has a quantized weight that is no finite number")
        self.codes[place].copy_(codes.view(torch.int8))
        self.scales[place][..., : scales.shape[-1]].copy_(scales)
        if self.factors is not None and part.factors is not None:
            self.factors[place].copy_(part.factors)
        if self.zeros is not None and part.zeros is not None:
            self.zeros[place][..., : part.zeros.shape[-1]].copy_(part.zeros)
        if part.order is not None:
            self.order = part.order.to(self.codes.device)

    @property
    def held(self) -> Weights:
        """What is held of the weight."""
        return Weights(self.codes, self.scales, self.factors, self.zeros, self.format.bits, self.format.exponent)

    @property
    def method(self) -> str:
        """How the weights are quantized."""
        return self.format.name

    @property
    def num_weights(self) -> int:
        """Numbers of the weight."""
        return torch.Size(self.shape).numel()

    @property
    def weight(self) -> Tensor:
        """The weights as plain ones, for code that reads them; made anew at each call."""
        plain = plain_weight(self.held, self._dtype)[..., : self.shape[-1]]
        return plain if self.order is None else torch.empty_like(plain).index_copy_(-1, self.order.long(), plain)


class ScaledLinear(ScaledWeight):
    """An ``nn.Linear`` whose weights are codes with scales."""

    def __init__(self, layer: nn.Linear, num_held: int | None = None) -> None:
        """Takes the sizes and the bias of ``layer``. ``num_held``: outputs whose weights it has, of a rank's output
        layer fewer than all; None: those of ``layer.weight``."""
        num_held = layer.weight.shape[0] if num_held is None else num_held
        super().__init__((num_held, layer.in_features), layer.weight.dtype)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias

    def hold(self, weight: Scaled, format: Format, device: torch.device, name: str) -> ScaledLinear:
        """Keeps a weight on ``device``; returns itself. Raises ConfigError as ``put``."""
        self.allocate(format, device)
        self.put(weight, (slice(None),), name)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """``[..., inputs] -> [..., outputs]``."""
        x = x if self.order is None else x.index_select(-1, self.order)
        ours: Any = torch.ops.paceline
        product: Tensor = ours.scaled_linear(x, self.bias, *self.held)
        return product


def scaled_layers(model: nn.Module) -> list[ScaledWeight]:
    """The weights of a model that are codes with scales: linear layers and experts."""
    return [layer for layer in model.modules() if isinstance(layer, ScaledWeight)]


def without_weights(model: nn.Module, num_weights: Mapping[str, int]) -> None:
    """Replaces linear layers of a model, by their paths, by ones that hold no weights yet, but are made for a number of
    them."""

    def make(path: str, layer: nn.Linear) -> ScaledLinear | None:
        return ScaledLinear(layer, num_weights[path] // layer.in_features) if path in num_weights else None

    replace_layers(model, make)


class Whole:
    """The model that is rounded, where a rank has a part of each layer; this one: it has all of them."""

    def num_outputs(self, path: str, layer: nn.Linear) -> int:
        """Outputs of the whole layer at a path."""
        return layer.out_features

    def largest(self, path: str, own: Tensor) -> Tensor:
        """The largest number of each output of the whole layer at a path, by the largest of this part of it."""
        return own


def round_layers(
    model: PreTrainedModel, device: torch.device, least_outputs: int, bits: int = 8, whole: Whole | None = None
) -> None:
    """Rounds the weights of a model's linear layers to 8 or 4 ``bits``, and keeps them on ``device``.

    Of 8 bits an output has one scale, of 4 bits each of its groups, with a zero point. The output layer and layers of
    fewer outputs, such as gates, stay as they are. Ranks have the codes and scales of the ``whole`` model; of 4 bits
    those do that have whole groups.
    """
    output_layer, whole = model.get_output_embeddings(), whole or Whole()

    def make(path: str, layer: nn.Linear) -> ScaledLinear | None:
        if layer is output_layer or whole.num_outputs(path, layer) < least_outputs:
            return None
        weight = layer.weight.detach().to(device)
        if bits == 4:
            return ScaledLinear(layer).hold(rounded_to_4(weight), INT4, device, path)
        return ScaledLinear(layer).hold(rounded(weight, whole.largest(path, largest_of(weight))), INT8, device, path)

    replace_layers(model, make)


def largest_of(weight: Tensor) -> Tensor:
    """The largest number of each output of a matrix, without its sign: [outputs] float32."""
    return weight.float().abs().amax(1)


def rounded(weight: Tensor, largest: Tensor) -> Scaled:
    """A matrix as integers of 8 bits with a scale for each output, by ``largest_of`` it or of what it is a part of."""
    scales = largest[:, None] / 127
    codes = (weight.float() / scales.masked_fill(scales == 0, 1)).round().clamp(-127, 127)
    return Scaled(codes.to(torch.int8), scales)


def rounded_to_4(weight: Tensor) -> Scaled:
    """A matrix as integers of 4 bits between the least and the largest number of each group of ``INT4``, and zero."""
    groups = F.pad(weight.float(), (0, -weight.shape[1] % INT4.group)).view(len(weight), -1, INT4.group)
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((largest - least) / 15).half()
    steps = scales.float().masked_fill(scales == 0, torch.inf)
    zeros = (-least / steps).round().clamp(0, 15)
    numbers = ((groups / steps[..., None]).round() + zeros[..., None]).clamp(0, 15).to(torch.uint8).flatten(1)
    return Scaled(
        numbers[:, ::2] | numbers[:, 1::2] << 4, scales, zeros=(zeros - INTEGER_ZEROS[INT4.bits]).to(torch.int8)
    )


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


def plain_weight(weights: Weights, dtype: torch.dtype) -> Tensor:
    """[.., outputs, filled inputs], dequantized: what the kernel has in registers."""
    codes, scales, factors, zeros, bits, exponent = weights
    if bits == 4:
        halves = _split(codes.view(torch.uint8), codes.shape[-1] // (SCALED_BLOCK // 2))
        stored = torch.cat([halves & 15, halves >> 4], -1).flatten(-2).long()
        values = torch.tensor(FLOAT4, dtype=torch.float32, device=codes.device)
        numbers = values[(stored >> 1) | (stored & 1) << 3] if exponent else stored.float() - INTEGER_ZEROS[4]
    else:
        numbers = (codes.view(_FLOAT8[exponent]) if exponent else codes).float()
    sizes = _decoded(scales) if factors is None else _decoded(scales) * factors[..., None]
    groups = _split(numbers, scales.shape[-1])
    if zeros is not None:
        groups = groups - zeros[..., None].float()
    return (groups * sizes[..., None]).flatten(-2).to(dtype)


def stored_scales(scales: Tensor, format: Format) -> Tensor:
    """Scales in float32 as a format holds them: they were read as such numbers."""
    dtype = _SCALES[format.scales]
    return scales.to(_SCALES_OF_8[dtype]).view(dtype) if dtype in _SCALES_OF_8 else scales.to(dtype)


def _decoded(scales: Tensor) -> Tensor:
    """Scales in float32."""
    return scales.view(_SCALES_OF_8.get(scales.dtype, scales.dtype)).float()


def _split(rows: Tensor, parts: int) -> Tensor:
    """[.., n] as [.., parts, n / parts]."""
    return rows.view(*rows.shape[:-1], parts, rows.shape[-1] // parts)


def _in_halves(codes: Tensor, exponent: int) -> Tensor:
    """Bytes of two neighbors each, as bytes of numbers that are half a block apart; of floats the sign comes last."""
    blocks = _split(codes, codes.shape[-1] // (SCALED_BLOCK // 2))
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    numbers = (numbers & 7) << 1 | numbers >> 3 if exponent else numbers
    first, second = numbers.chunk(2, -1)
    return (first | second << 4).flatten(-2)


def _by_torch(x: Tensor, bias: Tensor | None, *weights: Any) -> Tensor:
    return F.linear(x, plain_weight(Weights(*weights), x.dtype)[:, : x.shape[-1]], bias)


def _by_triton(x: Tensor, bias: Tensor | None, *weights: Any) -> Tensor:
    from paceline.model.scaled_triton import multiply

    product = multiply(x.reshape(-1, x.shape[-1]).contiguous(), Weights(*weights), bias)
    return product.view(*x.shape[:-1], product.shape[-1])


def _register() -> None:
    torch.library.define(
        "paceline::scaled_linear",
        "(Tensor x, Tensor? bias, Tensor codes, Tensor scales, Tensor? factors, Tensor? zeros, int bits, int exponent) "
        "-> Tensor",
    )
    torch.library.impl("paceline::scaled_linear", "CPU", _by_torch)
    torch.library.impl("paceline::scaled_linear", "CUDA", _by_triton)
    torch.library.register_fake(
        "paceline::scaled_linear", lambda x, bias, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0])
    )


_register()
