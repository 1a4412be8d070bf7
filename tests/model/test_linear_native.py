"""The native operator of linear layers: the bits of its reference implementation, in outputs, states and rows.

Mutants are changed sources, compiled and loaded alongside the operator.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.compilers import needs_attention, with_faults
from tests.support.rings import slow
from torch import Tensor

from paceline.checkpoint.linear import CHUNK, Kind, LinearSpec, Slots
from paceline.errors import EngineError
from paceline.model.linear import native
from paceline.model.linear.layers import by_torch
from paceline.model.linear.operator import Gates, LinearPools, run_selective
from paceline.model.linear.plan import NONE, Chunk, LinearStep, SequencePart

pytestmark = needs_attention

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = LinearSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=16, width=4)
ODD = LinearSpec(key_heads=1, value_heads=3, key_dim=20, value_dim=152, width=3)
"""Sizes that end within a vector, and more columns than registers hold."""
PUBLISHED = LinearSpec(key_heads=2, value_heads=4, key_dim=128, value_dim=128, width=4)
KIMI = LinearSpec(2, 2, key_dim=20, value_dim=36, width=4, kind=Kind.KIMI_DELTA)
MAMBA2 = LinearSpec(2, 6, key_dim=24, value_dim=40, width=4, kind=Kind.MAMBA2)
LIGHTNING = LinearSpec(2, 2, key_dim=20, value_dim=20, width=1, kind=Kind.LIGHTNING)
CONVOLUTION = LinearSpec(0, 40, key_dim=0, value_dim=1, width=3, kind=Kind.CONVOLUTION)
MAMBA = LinearSpec(1, 168, key_dim=12, value_dim=1, width=4, kind=Kind.MAMBA)
SLOTS = Slots(states=8, rows=24)


def random_step(rng: random.Random, num_sequences: int) -> LinearStep:
    """Sequences that begin and end anywhere in a chunk, over slots that nobody shares."""
    states, rows = iter(rng.sample(range(SLOTS.states), SLOTS.states)), iter(rng.sample(range(SLOTS.rows), SLOTS.rows))
    sequences = []
    for _ in range(num_sequences):
        first, left = rng.randrange(CHUNK + 1), rng.choice((1, 5, 16, 40))
        part = SequencePart(rng.choice((next(states), NONE)), [])
        while left > 0 or first == CHUNK:
            count = min(left, CHUNK - first)
            whole = first + count == CHUNK
            keeps = first > 0 or rng.random() < 0.5
            chunk = Chunk(next(rows) if keeps else NONE, first, count)
            if whole and rng.random() < 0.5:
                chunk.store = next(states, NONE)
            if count and rng.random() < 0.3:
                chunk.also.append((first + count - 1, next(rows), rng.randrange(CHUNK)))
            part.chunks.append(chunk)
            first, left = 0, left - count
        sequences.append(part)
    return LinearStep(sequences, [(1, 2)])


def random_inputs(
    spec: LinearSpec, dtype: torch.dtype, step: LinearStep, seed: int, device: str = "cpu"
) -> tuple[LinearPools, Gates]:
    """Pools whose rows and states are like those of a model, and gates with a token of padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    pools = LinearPools.of(spec, SLOTS, dtype, device)
    for pool in pools[:-1]:
        pool.copy_(normal(*pool.shape, scale=0.3))
    sums = torch.rand(pools.decays.shape, generator=generator).cumsum(1)
    pools.decays.copy_(sums if spec.kind is Kind.MAMBA else -sums)
    num_tokens = 1 + sum(chunk.count for part in step.sequences for chunk in part.chunks)
    heads, channels = (
        spec.value_heads,
        spec.conv_dim or 2 * spec.key_heads * spec.key_dim + spec.value_heads * spec.value_dim,
    )
    sizes = channels, heads * spec.decay_dim, heads
    projected = normal(num_tokens, sum(sizes), scale=2).to(dtype).split(sizes, 1)  # columns, as of a joined projection
    decay = -normal(heads, *[spec.key_dim] * (spec.kind is Kind.MAMBA)).exp()
    own = normal(spec.width, spec.conv_dim), decay, normal(heads * spec.decay_dim)
    return pools, Gates(projected[0], projected[1], projected[2], *own)._replace(**_further(spec, normal, seed))


def _further(spec: LinearSpec, normal: Any, seed: int) -> dict[str, Any]:
    """What else layers of a kind have, some of them."""
    odd = bool(seed % 2)
    if spec.kind is Kind.GATED_DELTA:
        return {"scale": 1 + seed % 2}
    if spec.kind is Kind.KIMI_DELTA:
        return {"lowest": -5.0, "rounds_rates": True, "rounds_convolution": False} if odd else {}
    if spec.kind is Kind.LIGHTNING:
        return {}
    further = {"shift": normal(spec.conv_dim) if odd else None}
    if spec.kind is Kind.MAMBA2:
        return further | {"skip": normal(spec.value_heads), "limits": (0.1, 2.0) if odd else (0.0, float("inf"))}
    if spec.kind is Kind.MAMBA:
        return further | {"skip": normal(spec.value_heads), "select": lambda x: (x.flip(1), x[:, : 2 * spec.key_dim])}
    return further


def by_library(library: ctypes.CDLL, numbers: Tensor, pools: LinearPools, spec: LinearSpec, gates: Gates) -> Tensor:
    def run(*of_call: Any) -> Tensor:
        return native.call(library, *native.arguments(numbers, *of_call))

    return (run if gates.select is None else partial(run_selective, run))(pools, spec, gates)


def differing(library: ctypes.CDLL, spec: LinearSpec, dtype: torch.dtype, seed: int) -> int:
    """Numbers of a random step whose bits differ from the reference's."""
    step = random_step(random.Random(seed), 3)
    pools, gates = random_inputs(spec, dtype, step, seed)
    ours, numbers = LinearPools(*[pool.clone() for pool in pools]), torch.tensor(step.encode())
    out, expected = by_library(library, numbers, ours, spec, gates), by_torch(numbers, pools, spec, gates)
    pairs = zip((out, *ours), (expected, *pools), strict=True)
    integer = {2: torch.int16, 4: torch.int32}
    return sum(int((a.view(integer[a.itemsize]) != b.view(integer[b.itemsize])).sum()) for a, b in pairs)


@pytest.mark.parametrize(
    ("spec", "dtype", "seeds"),
    [
        (SMALL, BF16, 12),
        (ODD, FP32, 6),
        *((spec, dtype, 6) for spec in (KIMI, MAMBA2) for dtype in (BF16, FP32)),
        (LIGHTNING, BF16, 4),
        (CONVOLUTION, BF16, 4),
        (MAMBA, FP32, 2),
        *slow([(PUBLISHED, BF16, 12), (PUBLISHED, FP32, 12), (MAMBA, BF16, 12)]),
    ],
)
def test_bits_are_those_of_the_reference(spec: LinearSpec, dtype: torch.dtype, seeds: int) -> None:
    library = native.LIBRARY.load()
    for seed in range(seeds):
        assert differing(library, spec, dtype, seed) == 0, f"seed {seed}"


def test_threads_that_help_change_no_bit() -> None:
    """Key heads in another order, as by threads; and all of them are computed by the helpers."""
    library, done = native.LIBRARY.load(), []
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, work, ctypes.c_void_p)
    def share(pieces: int, compute: Any, it: int) -> bool:
        for number in reversed(range(pieces)):
            compute(it, number)
            done.append(number)
        return True

    try:
        library.paceline_linear_attention_share(share)
        assert differing(library, PUBLISHED, BF16, 0) == 0
    finally:
        library.paceline_linear_attention_share(None)
    assert done == [1, 0]


def test_a_step_survives_its_encoding() -> None:
    for seed in range(20):
        step = random_step(random.Random(seed), 3)
        assert LinearStep.decode(step.encode()) == step


@pytest.mark.parametrize(
    "wrong",
    [
        SequencePart(SLOTS.states, [Chunk(0, 0, 1)]),
        SequencePart(NONE, [Chunk(SLOTS.rows, 0, 1)]),
        SequencePart(NONE, [Chunk(NONE, 3, 1)]),
        SequencePart(NONE, [Chunk(0, 8, 9)]),
        SequencePart(NONE, [Chunk(0, 0, 1, also=[(0, 0, CHUNK)])]),
        SequencePart(NONE, [Chunk(0, 0, 4)]),
    ],
)
def test_numbers_that_fit_no_slot_are_refused(wrong: SequencePart) -> None:
    """States, rows, rows of a chunk that has no slot, more rows than a chunk has, more tokens than the step has."""
    step = LinearStep([SequencePart(NONE, [Chunk(0, 0, 2)])], [])
    pools, gates = random_inputs(SMALL, FP32, step, 0)
    numbers = torch.tensor(LinearStep([wrong], []).encode())
    with pytest.raises(EngineError, match="slots or rows that do not match its sequences"):
        native.run_step(numbers, pools, SMALL, gates)


FAULTS = {
    "rows in another order": (
        "for (int64_t j = 0; j < t; ++j) {",
        "for (int64_t step = 0; step < t; ++step) {\n        const int64_t j = fault(0) ? t - 1 - step : step;",
    ),
    "products and sums are fused": (
        "return _mm512_add_ps(sum, _mm512_mul_ps(a, b));",
        "return fault(1) ? _mm512_fmadd_ps(a, b, sum) : _mm512_add_ps(sum, _mm512_mul_ps(a, b));",
    ),
    "the last row is not folded": ("int j = 0; j < kChunk;", "int j = 0; j < kChunk - fault(2);"),
    "no inputs before the chunk": ("if (slot != kNone) load_rows", "if (slot != kNone && !fault(3)) load_rows"),
    "further places are not written": ("i < chunk.num_also; ++i) {", "i < chunk.num_also && !fault(4); ++i) {"),
}
"""Texts of the source, and the same with a fault (``with_faults``)."""


@pytest.mark.slow
def test_mistakes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    path = tmp_path / "native.cpp"
    path.write_text(with_faults(native.SOURCE, FAULTS.values()), encoding="utf-8")
    options = (*native.LIBRARY.options, f"-I{native.SOURCE.parent}")
    library = replace(native.LIBRARY, source=path, options=options).load()
    assert not any(differing(library, SMALL, BF16, seed) for seed in range(6)), "without a fault it is right"
    for number, name in enumerate(FAULTS):
        monkeypatch.setenv("FAULT", str(number))
        assert any(differing(library, SMALL, BF16, seed) for seed in range(6)), name
