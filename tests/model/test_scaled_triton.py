"""The kernel of products by scaled weights: on a GPU, or in triton's interpreter (``attention/test_interpreter.py``).

The interpreter's bfloat16 is not torch's: float16 stands in for it. Its products are made here one input after the
other, since numpy's bits depend on the sizes of a tile, and a device's must not.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.interpreter import hasten
from tests.support.mutants import Mutant, mutant
from torch import Tensor

from paceline.checkpoint.packing import Format, factor
from paceline.model.scaled import FLOAT4, Scaled, ScaledLinear, ScaledWeight, stored_scales

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not _CAN_RUN, reason="needs triton and a GPU, or TRITON_INTERPRET=1"
)
SIZES = 320, 70
"""Inputs and outputs that end within a block and a tile."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two splits, however small the weight; and products whose bits do not know the size of a tile."""
    if not _CAN_RUN:
        return
    monkeypatch.setattr(kernels(), "MIN_BLOCKS", 1)
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self: object, a: interpreter.TensorHandle, b: object, d: interpreter.TensorHandle, *_: object) -> object:
        total = d.data.copy()
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            total += column[:, None] * row[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    hasten()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def kernels() -> ModuleType:
    from paceline.model import scaled_triton

    return scaled_triton


if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from paceline.model.scaled_triton import _numbers

    @triton.jit  # type: ignore[untyped-decorator]
    def decoded(codes, like, out, HALF: tl.constexpr, EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """The bits of what 256 bytes become in the dtype of ``like``."""
        at = tl.arange(0, 256)
        numbers = _numbers(tl.load(codes + at), like, HALF, 4, EXPONENT, True)
        tl.store(out + at, numbers.to(tl.int16, bitcast=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_4_bits_become_wider_ones_two_at_once(dtype: torch.dtype) -> None:
    """Each of a byte, of integers and of floats, whose sign is held last."""
    codes = torch.arange(256, device=DEVICE, dtype=torch.uint8).view(torch.int8)
    like, bits = torch.empty(1, dtype=dtype, device=DEVICE), torch.empty(256, dtype=torch.int16, device=DEVICE)
    for half in (0, 1):
        stored = (torch.arange(256) >> 4 * half) & 15
        decoded[(1,)](codes, like, bits, HALF=half, EXPONENT=0)
        assert torch.equal(bits.view(dtype).float().cpu() - kernels().zero_of(dtype), stored - 8.0)
        decoded[(1,)](codes, like, bits, HALF=half, EXPONENT=2)
        want = torch.tensor(FLOAT4)[(stored >> 1) | (stored & 1) << 3]
        assert torch.equal(bits.view(dtype).float().cpu() * factor(2, 8 if dtype == torch.bfloat16 else 5), want)


BLOCKS = Format(8, 4, 128)
FORMATS = [
    BLOCKS, Format(8, 5), Format(8, 0, has_zeros=True), Format(4, 0, 64, "BF16"),
    Format(4, 0, 32, "F16", has_zeros=True), Format(4, 2, 16, "F8_E4M3", True), Format(4, 2, 32, "F8_E8M0"),
]  # fmt: skip


def part_of(format: Format, outputs: int, generator: torch.Generator) -> Scaled:
    """Random outputs of a weight as they are stored."""

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    groups = -(-SIZES[0] // format.group) if format.group else 1
    scales = (random(outputs, groups) + 0.5) * 0.002 * (1 if format.exponent in (0, 4) or format.bits == 8 else 40)
    if format.has_factors:
        scales *= 1000
    if format.bits == 4:
        codes = (random(outputs, SIZES[0] // 2) * 256).to(torch.uint8)
    else:
        dtype = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2, 0: torch.int8}[format.exponent]
        codes = (torch.randn(outputs, SIZES[0], generator=generator) * 40).clamp(-120, 120).to(dtype)
    factors = random(outputs) / 1000 if format.has_factors else None
    zeros = (random(outputs, groups) * 17 - 8).to(torch.int8) if format.has_zeros else None
    return Scaled(codes, stored_scales(scales, format), factors, zeros)


def layer_of(format: Format, *, biased: bool = False) -> ScaledLinear:
    """A layer with random weights."""
    inputs, outputs = SIZES
    plain = torch.nn.Linear(inputs, outputs, bias=biased).half()
    part = part_of(format, outputs, torch.Generator().manual_seed(1))
    return ScaledLinear(plain).hold(part, format, torch.device("cpu"), "").to(DEVICE)


def tokens(count: int) -> Tensor:
    return torch.randn(count, SIZES[0], generator=torch.Generator().manual_seed(2)).half().to(DEVICE)


def product(layer: ScaledLinear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = kernels().multiply(x, layer.held, layer.bias)
    return y


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_results_are_those_of_float64(format: Format) -> None:
    """By the weights of the dequantized checkpoint, of which a token with one input shows the very bits."""
    layer = layer_of(format, biased=format.exponent == 5)
    x = tokens(5)
    weight = layer.weight.double()
    want = x.double() @ weight.T + (0 if layer.bias is None else layer.bias.detach().double())
    assert torch.allclose(product(layer, x).double(), want, rtol=1e-3, atol=1e-3)
    assert layer.bias is not None or has_the_weights(layer)


def has_the_weights(layer: ScaledLinear) -> bool:
    """True if tokens with one input have the bits of that input's weights."""
    ones = torch.zeros(3, SIZES[0], dtype=torch.float16, device=DEVICE)
    ones[[0, 1, 2], [0, 130, 319]] = 1
    return torch.equal(product(layer, ones), layer.weight[:, [0, 130, 319]].T)


def test_weights_that_are_rounded_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of scales with a factor, which have more bits than the dtype of the inputs."""

    @mutant(kernels(), "in_pairs")
    def always(in_pairs: Callable[..., bool], *_: Any) -> bool:
        return True

    layer = layer_of(next(format for format in FORMATS if format.has_factors))
    assert has_the_weights(layer)
    always(monkeypatch)
    assert not has_the_weights(layer)


def differing() -> int:
    """Tokens whose bits differ alone from those among 129 others, in any size of a step between."""
    layer, x = layer_of(BLOCKS), tokens(130)
    together, wrong = product(layer, x), 0
    for first, stop in ((0, 1), (127, 130), (3, 67), (0, 65)):
        wrong += int((product(layer, x[first:stop]) != together[first:stop]).any(1).sum())
    return wrong


def test_no_bit_of_a_token_depends_on_the_others() -> None:
    """In tiles of 16, 64 and 128 tokens, with splits in programs of their own and one after the other."""
    assert kernels().num_splits(*SIZES) == (2, 2)
    assert differing() == 0


def without_splits() -> Mutant:
    """Many tokens are summed without splits."""

    @mutant(kernels(), "multiplied")
    def changed(multiplied: Callable[..., Tensor], x: Tensor, *rest: Any, **options: Any) -> Tensor:
        num_rows = len(x) if len(rest) < 4 else len(rest[3].order)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels(), "MAX_SPLITS", 1 if num_rows > 64 else 8)
            return multiplied(x, *rest, **options)

    return changed


def test_sums_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_splits()(monkeypatch)
    assert differing() > 0


def test_tiles_are_compared_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose large tiles have other bits is given small ones."""
    x, sizes = tokens(1), kernels()._TRIED
    if DEVICE == "cpu":
        x, sizes = x.float(), (256, 32, 66)  # in float32 no rounding hides a difference
    weights = layer_of(BLOCKS).held
    assert kernels().tiles_agree(x, weights, sizes)
    without_splits()(monkeypatch)
    assert not kernels().tiles_agree(x, weights, sizes)


def experts_of(format: Format) -> ScaledWeight:
    """Four experts with random weights."""
    inputs, outputs = SIZES
    weight = ScaledWeight((4, outputs, inputs), torch.float16)
    weight.allocate(format, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for expert in range(4):
        weight.put(part_of(format, outputs, generator), (expert, slice(0, outputs)), "")
    return weight.to(DEVICE)


def chosen_by(num_tokens: int) -> Tensor:
    """Two experts of four for each token; the third is chosen by the first tokens only."""
    first = torch.arange(num_tokens) % 2
    return torch.stack([first, torch.where(torch.arange(num_tokens) < 3, 2, 3)], 1).to(DEVICE)


def mixed(weight: ScaledWeight, x: Tensor, chosen: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum of a token's two experts, one weighted by 0.75 and one by 0.25."""
    weights = torch.tensor([0.75, 0.25], device=DEVICE).expand(len(x), 2)
    routes = kernels().routed(x, chosen, weight.held)
    results = kernels().multiply_routed(x, weight.held, bias, routes)
    back = torch.empty_like(results)
    back[routes.order.long()] = results
    by_token: Tensor = kernels().weighted(back, chosen, weights, 4)
    return by_token


@pytest.mark.parametrize("format", [BLOCKS, FORMATS[-1]], ids=str)
def test_experts_are_those_of_float64(format: Format) -> None:
    weight, x, chosen = experts_of(format), tokens(5), chosen_by(5)
    bias = torch.randn(4, SIZES[1]).half().to(DEVICE)
    each = torch.einsum("ti,eoi->teo", x.double(), weight.weight.double()) + bias.double()
    want = sum(w * each[torch.arange(5, device=DEVICE), chosen[:, i]] for i, w in enumerate((0.75, 0.25)))
    assert torch.allclose(mixed(weight, x, chosen, bias).double(), want, rtol=2e-3, atol=2e-3)


def test_results_return_to_the_tokens_order() -> None:
    """The second product of an expert takes the order of the experts and gives that of the tokens."""
    weight, x, chosen = experts_of(BLOCKS), tokens(5), chosen_by(5)
    routes = kernels().routed(x, chosen, weight.held)
    pairs = x.repeat_interleave(2, 0)[routes.order.long()]
    results = kernels().multiply_routed(pairs, weight.held, None, routes, back=True)
    want = torch.einsum("ti,eoi->teo", x.double(), weight.weight.double())
    want = want[torch.arange(5, device=DEVICE)[:, None], chosen].flatten(0, 1)
    assert torch.allclose(results.double(), want, rtol=2e-3, atol=2e-3)


def differing_experts() -> int:
    """Tokens whose bits differ alone, or in a few, from those among 39 others, whose pairs fill tiles of 32."""
    weight, x = experts_of(FORMATS[-1]), tokens(40).to(torch.float16 if DEVICE == "cuda" else torch.float32)
    chosen, wrong = chosen_by(40), 0
    together = mixed(weight, x, chosen)
    for first, stop in ((0, 1), (2, 4), (33, 40)):
        alone = mixed(weight, x[first:stop], chosen[first:stop])
        wrong += int((alone != together[first:stop]).any(1).sum())
    return wrong


def test_no_bit_of_an_expert_depends_on_who_else_chose_it() -> None:
    assert differing_experts() == 0


def test_experts_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_splits()(monkeypatch)
    assert differing_experts() > 0
