"""The kernel of products by scaled weights: on a GPU, or in triton's interpreter (``attention/test_interpreter.py``).

The interpreter's bfloat16 is not torch's: float16 stands in for it. Its products are made here one input after the
other, since numpy's bits depend on the sizes of a tile, and a device's must not.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.support.mutants import Mutant, mutant
from torch import Tensor

from paceline.model.scaled import Scaled, ScaledLinear

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
    monkeypatch.setattr(kernels(), "_LEAST_BLOCKS", 1)
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self: object, a: interpreter.TensorHandle, b: object, d: interpreter.TensorHandle, *_: object) -> object:
        total = d.data.copy()
        for column, row in zip(a.data.T.astype(np.float32), b.data.astype(np.float32), strict=True):
            total += column[:, None] * row[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def kernels() -> ModuleType:
    from paceline.model import scaled_triton

    return scaled_triton


def layer_of(dtype: torch.dtype, groups: int, *, biased: bool = False) -> ScaledLinear:
    """A layer with random weights."""
    inputs, outputs = SIZES
    generator = torch.Generator().manual_seed(1)
    codes = (torch.randn(outputs, inputs, generator=generator) * 40).clamp(-120, 120).to(dtype)
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) * 0.002
    plain = torch.nn.Linear(inputs, outputs, bias=biased).half()
    return ScaledLinear(plain).hold(Scaled(codes, scales), torch.device("cpu"), "").to(DEVICE)


def tokens(count: int) -> Tensor:
    return torch.randn(count, SIZES[0], generator=torch.Generator().manual_seed(2)).half().to(DEVICE)


def product(layer: ScaledLinear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = kernels().multiply(x, layer.codes, layer.scales, layer.bias, layer.exponent)
    return y


@pytest.mark.parametrize(("dtype", "groups", "biased"), [
    (torch.float8_e4m3fn, 3, False), (torch.float8_e5m2, 1, True), (torch.int8, 1, False),
])  # fmt: skip
def test_results_are_those_of_float64(dtype: torch.dtype, groups: int, biased: bool) -> None:
    """By the weights of the dequantized checkpoint, of which a token with one input shows the very bits."""
    layer = layer_of(dtype, groups, biased=biased)
    x = tokens(5)
    weight = layer.weight.double()
    want = x.double() @ weight.T + (0 if layer.bias is None else layer.bias.detach().double())
    assert torch.allclose(product(layer, x).double(), want, rtol=1e-3, atol=1e-3)
    if layer.bias is None:
        ones = torch.zeros(3, SIZES[0], dtype=torch.float16, device=DEVICE)
        ones[[0, 1, 2], [0, 130, 319]] = 1
        assert torch.equal(product(layer, ones), layer.weight[:, [0, 130, 319]].T)


def differing() -> int:
    """Tokens whose bits differ alone from those among 129 others, in any size of a step between."""
    layer, x = layer_of(torch.float8_e4m3fn, 3), tokens(130)
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

    @mutant(kernels(), "_multiplied")
    def changed(multiplied: Callable[..., Tensor], x: Tensor, *rest: object) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels(), "_MOST_SPLITS", 1 if len(x) > 64 else 8)
            return multiplied(x, *rest)

    return changed


def test_sums_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_splits()(monkeypatch)
    assert differing() > 0


def test_tiles_are_compared_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose large tiles have other bits is given small ones."""
    x, sizes = tokens(1), kernels()._TRIED
    if DEVICE == "cpu":
        x, sizes = x.float(), (256, 32, 66)  # in float32 no rounding hides a difference
    assert kernels().tiles_agree(x, 4, sizes)
    without_splits()(monkeypatch)
    assert not kernels().tiles_agree(x, 4, sizes)


def test_scratch_is_what_a_product_takes() -> None:
    """None where one program takes all splits."""
    inputs, outputs = SIZES
    assert kernels().scratch_bytes(16, inputs, outputs) == 4 * 2 * 16 * outputs
    assert kernels().scratch_bytes(65, inputs, outputs) == 0
