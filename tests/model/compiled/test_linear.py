"""The native products of compiled steps: right, blind to neighbours bit for bit, and once in the package."""

from __future__ import annotations

import ctypes
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.compilers import needs_products, products_with
from tests.support.models import random_model
from tests.support.rings import nightly
from tests.support.threads import has_more_threads, thread_ids
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from paceline.config import ServiceConfig
from paceline.errors import ConfigError, EngineError
from paceline.model.attention import native as cpu_attention
from paceline.model.compiled import aot
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.aot import artifact_key
from paceline.model.compiled.joined import replace_linears
from paceline.model.compiled.linear import PackedLinear, gated_silu, linear, pack, pack_layers
from paceline.model.loading import prepare
from paceline.model.selftest import check_invariance

Product = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


@pytest.fixture
def shared() -> Iterator[Callable[[int], None]]:
    """Sets by how many threads the products of a test are shared; afterwards by one again."""
    yield cpu_linear.share_products
    cpu_linear.share_products(1)


def in_a_thread(work: Callable[[], None]) -> None:
    """Does it in a thread of its own. Raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rows_alone(product: Product, tokens: int, outputs: int, inputs: int, bias: bool = False) -> tuple[Tensor, Tensor]:
    """The product of all rows at once, and of each by itself.

    The terms of a sum cancel: what is left is the rounding of float32, which another order of adding would change.
    """
    x, weight = values(1, tokens, inputs), values(2, outputs, inputs)
    half = inputs // 2
    x[:, half : 2 * half], weight[:, half : 2 * half] = x[:, :half], -weight[:, :half]
    packed = pack(weight)
    added = values(3, outputs).float() if bias else None
    alone = [product(x[i : i + 1], packed, added, outputs) for i in range(tokens)]
    return product(x, packed, added, outputs), torch.cat(alone)


@needs_products
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [(1, 1, 1), (1, 31, 7), (3, 33, 64), (5, 96, 1023), (12, 65, 512), (13, 32, 2050), (50, 300, 1536), (100, 7, 3001)],
)
def test_products_equal_those_of_float64_but_for_rounding(tokens: int, outputs: int, inputs: int, bias: bool) -> None:
    """To half a unit of bfloat16, and the rounding of one float32 sum of so many terms."""
    x, weight = values(1, 2, tokens, inputs), values(2, outputs, inputs)
    added = values(3, outputs).float() if bias else None
    got = linear(x, pack(weight), added, outputs)
    want = x.double() @ weight.double().T + (0 if added is None else added)
    size = x.double().abs() @ weight.double().abs().T + (0 if added is None else added.abs())
    assert got.shape == want.shape
    assert got.dtype == torch.bfloat16
    assert bool(((got - want).abs() <= 2**-8 * want.abs() + 2**-23 * (inputs + 2) * size).all())


@needs_products
@settings(max_examples=25)
@given(
    st.one_of(st.integers(1, 64), st.sampled_from([100, 512])), st.integers(1, 100), st.integers(1, 2600), st.booleans()
)
def test_a_row_has_the_same_bits_in_every_batch(tokens: int, outputs: int, inputs: int, bias: bool) -> None:
    together, alone = rows_alone(linear, tokens, outputs, inputs, bias)
    assert torch.equal(together, alone)


_ROWS = [1, 2, 5, 13, 16, 17, 33, 512]


@needs_products
@pytest.mark.parametrize("tokens", [*_ROWS, *nightly(n for n in (*range(1, 35), 56, 57, 64, 100) if n not in _ROWS)])
def test_every_number_of_rows_that_is_computed_together(tokens: int) -> None:
    """A sum of several panels, whose rows compete for the cache."""
    together, alone = rows_alone(linear, tokens, 160, 2048)
    assert torch.equal(together, alone)


@needs_products
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_no_bit_depends_on_the_number_of_threads(num_threads: int, shared: Callable[[int], None]) -> None:
    """Of them some must wait for a core, and some sleep when the next product comes."""
    for tokens, outputs, inputs in ((1, 1024, 1024), (5, 96, 4096), (15, 33, 4096), (60, 2000, 600), (100, 4097, 77)):
        x, packed = values(1, tokens, inputs), pack(values(2, outputs, inputs))
        bias = values(3, outputs).float()
        shared(1)
        alone = linear(x, packed, bias, outputs)
        shared(num_threads)
        for pause_s in (0.0, 0.0, 0.002):
            time.sleep(pause_s)
            assert torch.equal(linear(x, packed, bias, outputs), alone), (tokens, outputs, inputs)


@needs_products
@pytest.mark.parametrize("size", [1, 16, 37, 1024])
def test_a_gate_is_silu_times_the_other_half_with_the_same_bits_in_every_batch(
    size: int, shared: Callable[[int], None]
) -> None:
    """Whatever else is gated, and by however many threads; rounded once, of numbers of every size."""
    x = values(1, 40, 2 * size) * 4
    x[0], x[1] = -300, 300
    shared(1)
    together = gated_silu(x)
    a, b = x.double().chunk(2, -1)
    torch.testing.assert_close(together.double(), a * torch.sigmoid(a) * b, rtol=2**-8 + 1e-5, atol=1e-37)
    assert torch.equal(together, torch.cat([gated_silu(row[None]) for row in x]))
    for num_threads in (2, 3):
        shared(num_threads)
        assert torch.equal(gated_silu(x), together)


@needs_products
def test_a_gate_that_is_one_is_one_operator_and_others_stay() -> None:
    """Halves in the other order, of two products, or read twice, are computed as they were."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 64, bias=False).bfloat16() for _ in range(3))

        def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
            first = F.silu(self.a(x)) * self.b(x)
            half = self.a(other)
            return first, F.silu(half) * self.b(other) + half, F.silu(self.b(x + 1)) * self.c(x - 1)

    x, other = values(1, 3, 32), values(2, 3, 32)
    exported = torch.export.export(Gated(), (x, other))
    expected = exported.module()(x, other)
    assert replace_linears(exported) == 6
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.paceline.gated_silu.default) == 1
    assert targets.count(torch.ops.aten.silu.default) == 2
    for found, wanted in zip(exported.module()(x, other), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted.float(), rtol=0.03, atol=0.03)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel with two faults, since it takes long to compile.

    The last outputs of a piece belong to nobody: there are pieces with helpers only. And panels are added up apart:
    there are several with many rows only.
    """
    pieces = "(piece + 1) * groups / pieces);"
    loaded = "it.first ? Floats{} : load_floats(it.sums + r * Format::kOutputs + v * kLanes);"
    multiplied = "Format::template multiply<R>(it, sums);"
    apart = "if (!it.first) sums[r][v] = sums[r][v] + load_floats(it.sums + r * Format::kOutputs + v * kLanes);"
    apart = f"for (int r = 0; r < R; ++r) for (int v = 0; v < kVectors; ++v) {apart}"
    header = (cpu_linear.SOURCE.parent / "product.h").read_text(encoding="utf-8")
    right = header[header.index(loaded) : header.index(pieces) + len(pieces)]
    assert right.count(multiplied) == 1
    wrong = right.replace(loaded, "Floats{};").replace(multiplied, multiplied + apart)
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder))
        return products_with(folder, {"product.h": (right, wrong.replace(pieces, pieces.replace("s);", "s - 1);")))})


@needs_products
def test_pieces_that_are_left_out_are_noticed(faulty: ctypes.CDLL) -> None:
    """The last outputs of a piece belong to nobody."""
    x, packed = values(1, 1, 1024), pack(values(2, 1024, 1024))
    alone = linear(x, packed, None, 1024)
    kept = cpu_linear.multiply(faulty, x, packed, None, 1024)
    assert torch.equal(kept, alone)
    faulty.paceline_helpers(1)
    try:
        # What nobody writes is what the memory held: the right result, if it is that of the product before.
        found = [cpu_linear.multiply(faulty, x * factor, packed, None, 1024) for factor in (2, 1)]
        assert not torch.equal(found[1], alone)
    finally:
        faulty.paceline_helpers(0)


@needs_products
def test_threads_end_with_the_one_that_they_help_and_leave_it_where_it_may_run() -> None:
    def work() -> None:
        allowed, before = os.sched_getaffinity(0), thread_ids()
        cpu_linear.share_products(2)
        assert has_more_threads(before, 1)
        if len(allowed) > 1:
            assert len(os.sched_getaffinity(0)) == 1
        cpu_linear.share_products(1)
        assert has_more_threads(before, 0)
        assert os.sched_getaffinity(0) == allowed
        cpu_linear.share_products(3)

    names = thread_ids()
    in_a_thread(work)
    assert has_more_threads(names, 0)


@needs_products
def test_threads_of_one_core_take_turns(shared: Callable[[int], None]) -> None:
    x, packed = values(1, 1, 1024), pack(values(2, 1024, 1024))
    alone = linear(x, packed, None, 1024)

    def work() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        cpu_linear.share_products(3)
        for _ in range(50):
            assert torch.equal(linear(x, packed, None, 1024), alone)

    in_a_thread(work)


@needs_products
def test_the_attention_of_a_compiled_step_is_shared_as_its_products_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int | None] = []
    monkeypatch.setattr(aot, "load_package", lambda path: path)
    monkeypatch.setattr(cpu_attention, "share_by", lambda share: given.append(share.value))
    assert aot._load(Path("step.pt2"), "sdpa") == Path("step.pt2")
    assert given == []
    assert aot._load(Path("step.pt2"), "native") == Path("step.pt2")
    assert given == [cpu_linear.sharer().value]


def test_what_cannot_be_shared_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert "'cuda'" in cpu_linear.why_not_shared(2, torch.device("cuda"), torch.bfloat16)
    assert "float32" in cpu_linear.why_not_shared(2, cpu, torch.float32)
    monkeypatch.setattr(cpu_linear, "usable", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert "1 core" in cpu_linear.why_not_shared(2, cpu, torch.bfloat16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert cpu_linear.why_not_shared(2, cpu, torch.bfloat16) is None
    assert cpu_linear.why_not_shared(3, cpu, torch.bfloat16) == "this process may run on 2 cores; 1 to 2 are allowed"
    monkeypatch.setattr(cpu_linear, "usable", lambda: False)
    assert "AVX512-BF16" in cpu_linear.why_not_shared(2, cpu, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"cpu_threads": 2, "tensor_parallel_size": 2}, "ranks"),
        ({"cpu_threads": 2, "device": "cuda"}, "device 'cuda'"),
        ({"cpu_threads": 2, "dtype": "float32"}, "dtype 'float32'"),
        ({"cpu_threads": 2, "compile": False}, "compile false"),
        ({"cpu_threads": 0}, "cpu_threads is 0: it must be at least 1"),
    ],
)
def test_threads_without_products_to_share_are_refused(options: dict, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        ServiceConfig.parse({"target_config": {"engine_kwargs": options}})


def test_a_replica_reserves_a_core_for_each_thread() -> None:
    config = ServiceConfig.parse({"target_config": {"engine_kwargs": {"cpu_threads": 3}}})
    assert config.target_config.deployment_options()["ray_actor_options"]["num_cpus"] == pytest.approx(2.7)
    assert config.target_setup().options.cpu_threads == 3


@needs_products
def test_sums_that_are_split_by_the_number_of_rows_are_noticed(faulty: ctypes.CDLL) -> None:
    """Panels are added up apart, and there are several with many rows only."""

    def product(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return cpu_linear.multiply(faulty, x, packed, bias, outputs)

    assert torch.equal(*rows_alone(product, 14, 64, 4096))
    together, alone = rows_alone(product, 33, 64, 4096)
    assert not torch.equal(together, alone)
    assert torch.allclose(together.float(), alone.float(), atol=1e-2)  # it is a fault of rounding only


@needs_products
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_its_own_outputs_and_no_others(value: float) -> None:
    x, weight = values(1, 14, 40).abs(), values(2, 70, 40).abs()
    clean = linear(x, pack(weight), None, 70)
    x[3, 17] = value
    got = linear(x, pack(weight), None, 70)
    assert bool((got[3].isnan() if value != value else got[3] == value).all())
    others = torch.arange(14) != 3
    assert torch.equal(got[others], clean[others])
    weight[69, 39] = value
    column = linear(x[:3], pack(weight), None, 70)
    assert not column[:, 69].isfinite().any()
    assert torch.equal(column[:, :69], clean[:3, :69])


def test_packing_keeps_every_weight_and_adds_zeros() -> None:
    weight = values(1, 33, 5)
    packed = pack(weight)
    assert packed.shape == (2, 16, 32, 2)
    back = packed.transpose(1, 2).reshape(64, 32)
    assert torch.equal(back[:33, :5], weight)
    assert not back[33:].any()
    assert not back[:, 5:].any()


class Layer(nn.Module):
    """Products of one input with and without a bias, one of another, and what is none of a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.k, self.biased = nn.Linear(48, 40), nn.Linear(48, 24, bias=False), nn.Linear(48, 24)
        self.v, self.out = nn.Linear(48, 24, bias=False), nn.Linear(24, 48)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, mixed = self.q(x), self.k(x) * self.v(x) + self.biased(x)
        q = q.view(x.shape[0], 5, 8).sum(1)
        out = self.out(mixed)
        product: Tensor = nn.functional.linear(out, out)
        return product + q.sum()


class Small(nn.Module):
    """Layers of two dtypes, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 40, dtype=torch.bfloat16)
        self.both = nn.ModuleList([nn.Linear(40, 40, bias=False, dtype=torch.bfloat16)] * 2)
        self.wide = nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, *self.both):
            x = layer(x)
        return x if x.dtype == torch.bfloat16 else self.wide(x)


@needs_products
@torch.inference_mode()
def test_layers_outside_of_compiled_steps_are_packed_once_each() -> None:
    module, x = Small().requires_grad_(False), values(4, 2, 3, 7)
    before = module(x)
    assert pack_layers(module) is module
    assert isinstance(module.first, PackedLinear)
    assert isinstance(module.both[0], PackedLinear)
    assert module.both[0] is module.both[1]
    assert type(module.wide) is nn.Linear
    torch.testing.assert_close(module(x), before, rtol=0.02, atol=0.02)
    alone = pack_layers(nn.Linear(7, 40, dtype=torch.bfloat16))
    assert isinstance(alone, PackedLinear)


def test_without_the_products_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "usable", lambda: False)
    module = Small()
    pack_layers(module)
    assert type(module.first) is nn.Linear


@needs_products
def test_products_by_parameters_are_replaced_and_those_of_one_input_joined() -> None:
    model, x = Layer(torch.bfloat16), values(1, 6, 48)
    exported = torch.export.export(model, (x,))
    want = exported.module()(x)
    assert replace_linears(exported) == 5
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.aten.linear.default) == 1
    assert targets.count(torch.ops.paceline.packed_linear.default) == 3
    torch.testing.assert_close(exported.module()(x), want, rtol=0.03, atol=0.03)


@needs_products
def test_products_of_other_dtypes_stay() -> None:
    assert replace_linears(torch.export.export(Layer(torch.float32), (torch.zeros(6, 48),))) == 0


def small() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return random_model(config, dtype=torch.bfloat16)


def test_without_a_compiler_the_products_are_torchs_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = small()
    usual = artifact_key(model, None)

    def refuse(*_: object) -> Path:
        raise EngineError("there is no C++ compiler")

    monkeypatch.setattr(cpu_linear, "has_use", lambda: True)
    monkeypatch.setattr(cpu_linear, "compiled", refuse)
    cpu_linear._loaded.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not cpu_linear.usable()
        assert caplog.text.count("there is no C++ compiler") == 1
        without = artifact_key(model, None)
    finally:
        monkeypatch.undo()
        cpu_linear._loaded.cache_clear()
    assert (without == usual) == (not cpu_linear.usable())


@pytest.mark.parametrize("bf16", [False, True])
def test_native_products_need_the_instructions(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``library_path`` names a file that is not there: what has no use for the library waits for no compiler."""
    monkeypatch.setattr(cpu_linear, "has_bfloat16", lambda: bf16)
    monkeypatch.setattr(cpu_linear, "load_library", lambda: object())
    monkeypatch.setattr(cpu_linear, "library_path", lambda *_: Path("not there"))
    assert cpu_linear.usable() == bf16
    assert (cpu_linear.key() == "none") != bf16
    assert cpu_linear.is_built() != bf16


@needs_products
@pytest.mark.slow
def test_a_package_holds_the_weights_once_and_calls_the_operator(
    own_cache: Path, shared: Callable[[int], None]
) -> None:
    model = small()
    num_bytes = sum(p.numel() * p.itemsize for p in model.parameters())
    compiled = prepare(model, compile=True)
    (path,) = (own_cache / "compiled").glob("*.pt2")
    assert num_bytes < path.stat().st_size < 1.03 * num_bytes + (4 << 20)  # the code, which tests do not optimize
    with zipfile.ZipFile(path) as package:
        source = "".join(package.read(n).decode() for n in package.namelist() if n.endswith(".wrapper.cpp"))
    calls = source.count("aoti_torch_cpu_packed_linear(") - 1  # one declares it
    assert calls == 2 * 4 + 1
    assert "mkldnn" not in source
    assert check_invariance(compiled.runner(16)).holds
    shared(2)
    assert check_invariance(compiled.runner(16)).holds
