"""Products by weights of 4 and 8 bits: the bits of a reference in numpy, whatever is computed beside a row."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.compilers import products_with
from torch import Tensor, nn

from paceline.checkpoint.gguf.blocks import BLOCK, Blocks, blocks_of, is_kept
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.blocks import LAYOUTS, bits_of, pack_blocks, quantize
from paceline.model.compiled.joined import replace_linears
from paceline.model.compiled.linear import PackedLinear, linear, multiply

pytestmark = pytest.mark.compiler
FORMATS = [(layout.bits, layout.has_minima) for layout in LAYOUTS]
DTYPES = (torch.bfloat16, torch.float32)
Array = np.ndarray[Any, Any]


def blocks(seed: int, outputs: int, inputs: int, bits: int, has_minima: bool) -> Blocks:
    """Any weights of a format."""
    numbers, size = np.random.default_rng(seed), (outputs, -(-inputs // BLOCK))
    values = numbers.integers(0, 1 << bits, (outputs, size[1] * BLOCK), np.uint8)
    scales, minima = (numbers.standard_normal(size).astype(np.float16) for _ in range(2))
    return Blocks(values, scales, minima if has_minima else None, bits)


def rows(seed: int, count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Inputs of several sizes: no two rows, and no two blocks of a row, have one scale."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(count, inputs, generator=generator).cumsum(1).exp2().clamp(1e-6, 1e6)
    return (torch.randn(count, inputs, generator=generator) * sizes).to(dtype)


def round_inputs(x: Array) -> tuple[Array, Array]:
    """The inputs of blocks ``[M, B, 32]`` as whole numbers, and their scales ``[M, B]``."""
    most = np.abs(x).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        factors = np.where(most < 2.0**-100, np.float32(0), np.float32(127) / most)
    return np.rint(x * factors[..., None]), np.where(most < 2.0**-100, np.float32(0), most / np.float32(127))


def reference(
    x: Tensor, weights: Blocks, bias: Tensor | None, *, rounded: Callable[[Array], tuple[Array, Array]] = round_inputs,
    reverse: bool = False, fused: bool = False,
) -> Tensor:  # fmt: skip
    """The product in numpy: whole numbers within a block, each operation on blocks rounded to float32 by itself.

    ``reverse`` and ``fused`` are mistakes: blocks from the last to the first, and products added without rounding.
    """
    num_blocks = weights.scales.shape[1]
    padded = np.zeros((len(x), num_blocks * BLOCK), np.float32)
    padded[:, : x.shape[1]] = x.float().numpy()
    q, x_scales = rounded(padded.reshape(len(x), num_blocks, BLOCK))
    zero = 0 if weights.minima is not None else 1 << (weights.bits - 1)
    u = weights.values.astype(np.float32).reshape(-1, num_blocks, BLOCK) - zero
    sums = np.zeros((len(x), len(u)), np.float32)
    for block in reversed(range(num_blocks)) if reverse else range(num_blocks):
        dots = q[:, block] @ u[:, block].T  # whole numbers below 2^24: exact in any order
        scales = weights.scales[:, block].astype(np.float32) * x_scales[:, block, None]
        if fused:
            sums = (sums + dots.astype(np.float64) * scales).astype(np.float32)
        else:
            sums = sums + dots * scales
        if weights.minima is not None:
            of_block = x_scales[:, block] * q[:, block].sum(-1)
            sums = sums + weights.minima[:, block].astype(np.float32) * of_block[:, None]
    assert sums.dtype == np.float32
    result = torch.from_numpy(sums)
    return (result if bias is None else result + bias).to(x.dtype)


def product(x: Tensor, weights: Blocks, bias: Tensor | None = None) -> Tensor:
    return linear(x, pack_blocks(weights), bias, len(weights.scales))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 70), st.one_of(st.integers(1, 300), st.just(7000)),
    st.booleans(), st.sampled_from(DTYPES), st.integers(0, 1 << 30),
)  # fmt: skip
def test_products_have_the_bits_of_the_reference_and_rows_those_that_they_have_alone(
    layout: tuple[int, bool], count: int, outputs: int, inputs: int, with_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    weights, x = blocks(seed, outputs, inputs, *layout), rows(seed, count, inputs, dtype)
    bias = torch.randn(outputs) if with_bias else None
    found = product(x, weights, bias)
    assert found.dtype == dtype
    assert torch.equal(found, reference(x, weights, bias))
    assert torch.equal(found, torch.cat([product(row[None], weights, bias) for row in x]))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_no_bit_depends_on_the_rows_of_a_step_or_on_threads(layout: tuple[int, bool], threads: None) -> None:
    """Of every number of rows that is computed together, in several passes and panels, by one thread and by three."""
    weights, x = blocks(1, 1024, 4096, *layout), rows(1, 40, 4096, torch.bfloat16)
    packed = pack_blocks(weights)
    alone = torch.cat([linear(row[None], packed, None, 1024) for row in x])
    for num_threads in (1, 3):
        cpu_linear.share_products(num_threads)
        for count in (1, 2, 3, 7, 8, 9, 16, 17, 33, 40):
            assert torch.equal(linear(x[:count], packed, None, 1024), alone[:count]), (num_threads, count)


@pytest.fixture
def threads() -> Iterator[None]:
    """Afterwards products are one thread's again."""
    yield
    cpu_linear.share_products(1)


def float16_scales(x: Array) -> tuple[Array, Array]:
    q, scales = round_inputs(x)
    return q, scales.astype(np.float16).astype(np.float32)


def whole_rows(x: Array) -> tuple[Array, Array]:
    q, scales = round_inputs(x.reshape(len(x), 1, -1))
    return q.reshape(x.shape), np.repeat(scales, x.shape[1], 1)


def whole_steps(x: Array) -> tuple[Array, Array]:
    q, scales = round_inputs(x.swapaxes(0, 1).reshape(1, x.shape[1], -1))
    return q.reshape(x.shape[1], len(x), BLOCK).swapaxes(0, 1), np.repeat(scales, len(x), 0)


@pytest.mark.parametrize(
    "mistake",
    [{"reverse": True}, {"fused": True}, *({"rounded": how} for how in (float16_scales, whole_rows, whole_steps))],
    ids=["reverse", "fused", "float16 scales", "whole rows", "whole steps"],
)
def test_a_mistake_of_a_rounding_is_noticed(mistake: dict[str, Any]) -> None:
    """What the bits are compared with would find another order, another rounding, and scales of other numbers."""
    weights, x = blocks(2, 64, 256, 4, True), rows(2, 4, 256, torch.float32).clamp(-100, 100)
    found = product(x, weights)
    assert torch.equal(found, reference(x, weights, None))
    assert not torch.equal(found, reference(x, weights, None, **mistake))


@pytest.mark.slow
def test_scales_of_another_row_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with one fault: inputs are rounded by the scale of the row before, if there is one."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    right = "it.x.scales[r * it.x.steps + k].scale)"
    library = products_with(tmp_path, {"blocks.h": (right, right.replace("[r *", "[(r > 0) * (r - 1) *"))})
    weights, x = blocks(3, 64, 256, 8, False), rows(3, 5, 256, torch.bfloat16)
    packed = pack_blocks(weights)
    alone = torch.cat([multiply(library, row[None], packed, None, 64) for row in x])
    assert torch.equal(alone, product(x, weights))
    assert not torch.equal(multiply(library, x, packed, None, 64), alone)


@pytest.mark.slow
def test_without_avx512_products_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    library = cpu_linear.load(cpu_linear.SOURCE, portable=True)
    for seed, layout in enumerate(FORMATS):
        for dtype in DTYPES:
            weights, x = blocks(seed, 70, 1000, *layout), rows(seed, 11, 1000, dtype)
            found = multiply(library, x, pack_blocks(weights), torch.ones(70), 70)
            assert torch.equal(found, product(x, weights, torch.ones(70)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_own_row_nan_and_no_other(value: float) -> None:
    weights, x = blocks(4, 40, 96, 4, True), rows(4, 9, 96, torch.bfloat16)
    clean = product(x, weights)
    x[3, 50] = value
    found, others = product(x, weights), torch.arange(9) != 3
    assert bool(found[3].isnan().all())
    assert torch.equal(found[others], clean[others])


def test_blocks_of_zeros_and_of_tiny_numbers_are_zero() -> None:
    weights, x = blocks(5, 20, 64, 8, False), torch.zeros(3, 64)
    x[1, :32], x[2] = 1e-40, 2.0**-101
    x[1, 40] = 3.0
    found = product(x, weights)
    assert torch.equal(found, reference(x, weights, None))
    assert not found[[0, 2]].any()
    assert found[1].any()


@pytest.mark.parametrize("kind", [kind for kind in Kind if is_kept(kind.name)], ids=lambda kind: kind.name)
def test_blocks_of_a_file_are_the_numbers_that_the_package_decodes(kind: Kind) -> None:
    """To the bit: ``scale * u + minimum`` in float32."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    stored = np.random.default_rng(0).integers(0, 60, (48, 4 * size), np.uint8)
    found = blocks_of(kind.name, stored)
    u, scales = found.values.astype(np.float32).reshape(48, 4, BLOCK), found.scales.astype(np.float32)[..., None]
    if found.minima is None:
        numbers = scales * (u - (1 << (found.bits - 1)))
    else:
        numbers = scales * u + found.minima.astype(np.float32)[..., None]
    assert np.array_equal(numbers.reshape(48, 128), gguf.quants.dequantize(stored, kind))
    assert bits_of(pack_blocks(found)) == found.bits
    assert int(found.values.max()) < 1 << found.bits


def test_formats_of_larger_blocks_are_dequantized() -> None:
    assert sorted(kind.name for kind in Kind if is_kept(kind.name)) == ["IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q8_0"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [32, 45])
def test_weights_are_rounded_to_the_nearest_that_a_block_has(bits: int, inputs: int) -> None:
    weight = torch.randn(20, inputs, generator=torch.Generator().manual_seed(1))
    weight[3], weight[4], weight[5] = 0, 2.5, torch.cat([torch.zeros(inputs - 1), torch.ones(1)])
    found = quantize(weight, bits)
    u = torch.from_numpy(found.values).float().view(20, -1, BLOCK)
    scales = torch.from_numpy(found.scales).float()[..., None]
    minima = 0 if found.minima is None else torch.from_numpy(found.minima).float()[..., None]
    numbers = (scales * (u - (128 if bits == 8 else 0)) + minima).flatten(1)[:, :inputs]
    steps = scales.expand(u.shape).flatten(1)[:, :inputs]
    assert bool(((numbers - weight).abs() <= 0.52 * steps + 2e-3 * weight.abs()).all())
    assert torch.equal(numbers[3], weight[3])
    assert bits == 8 or torch.equal(numbers[4], weight[4])


def test_products_of_one_input_are_joined_unless_a_tile_would_be_shared() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"a": 32, "b": 48, "odd": 20, "c": 16}
            for name, size in sizes.items():
                layer = nn.Linear(64, size, bias=False, dtype=torch.bfloat16)
                setattr(self, name, PackedLinear(layer, quantize(layer.weight, 8 if name == "c" else 4)))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x).view(-1), self.b(x), self.odd(x), self.c(x)

    model, x = Model(), rows(6, 3, 64, torch.bfloat16)
    exported = torch.export.export(model, (x,))
    assert replace_linears(exported) == 4
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.paceline.packed_linear.default) == 3
    for found, expected in zip(exported.module()(x), model(x), strict=True):
        assert torch.equal(found, expected)
