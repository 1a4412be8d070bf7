"""Keys and values in FP8: how they are rounded, what kernels read of them, and how much memory they take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.model.attention.test_latent import DEEPSEEK_V3
from tests.model.attention.test_native import DTYPES, random_inputs
from tests.model.families import checkpoint, small_config
from tests.model.parallel.ranks import Ranks, led
from tests.model.test_linear import chunk
from tests.support.compilers import needs_attention
from tests.support.hybrids import hybrid_config
from tests.support.indexed import indexed_model
from tests.support.models import prompt, random_model
from tests.support.rings import nightly, slow
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.kv_scales import UNSCALED, KVScales
from paceline.checkpoint.size import ModelSize, size_of
from paceline.config import DraftOptions, DraftSetup, ModelOptions, ServiceConfig, TargetOptions, TargetSetup
from paceline.errors import ConfigError
from paceline.model.attention import native
from paceline.model.kv_cache import FP8, KVCache, LayerSpec, from_pages, to_fp8
from paceline.model.loading import load_model, prepare
from paceline.model.parallel.collectives import Collectives
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.preflight.estimate import draft_estimate, target_estimate
from paceline.types import PAGE_SIZE

KERNELS = ["sdpa", pytest.param("native", marks=needs_attention)]
ALL_BFLOAT16 = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)


# -- rounding ---------------------------------------------------------------------------------------------------------


def test_the_nearest_number_is_kept_and_none_becomes_nan() -> None:
    """The cast alone makes NaN of infinity and, by the version of torch, of what is beyond 464."""
    given = torch.tensor([0.0, -0.0, 1.0, 1.0624, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10, 448, 463, 465, 1e9])
    kept = from_pages(to_fp8(given), torch.float32)
    assert kept.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.25, 2**-9, 0.0, 2**-8, 448, 448, 448, 448]
    assert from_pages(to_fp8(-given), torch.float32).tolist() == (-kept).tolist()
    wide = torch.tensor([math.inf, -math.inf, math.nan])
    assert from_pages(to_fp8(wide), torch.bfloat16)[:2].tolist() == [448, -448]
    assert from_pages(to_fp8(wide), torch.bfloat16)[2].isnan()


@needs_attention
def test_the_native_operator_rounds_to_the_same_bits() -> None:
    """All numbers of bfloat16, and float32 of any size. The sign of NaN is nobody's."""
    assert native.unavailable() is None
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(1 << 16, generator=generator) * torch.logspace(-5, 4, 1 << 16)
    for given in (ALL_BFLOAT16, wide, torch.empty(0), wide.view(2, 4, -1).transpose(0, 1)):
        want, got = to_fp8(given), native.round_to_fp8(given)
        is_nan = given.isnan()
        assert torch.equal(got[~is_nan], want[~is_nan])
        assert ((got[is_nan] & 0x7F) == 0x7F).all()
        assert got.shape == given.shape


# -- kernels ----------------------------------------------------------------------------------------------------------


@needs_attention
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(32, 32), (40, 24), (80, -48)])
def test_the_native_operator_reads_what_the_bytes_stand_for(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """With the bits of attention over the same numbers in the dtype of the model; every byte occurs."""
    assert native.unavailable() is None
    it = random_inputs(dtype=dtype, key_dim=dims[0], value_dim=abs(dims[1]), pages=4)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F]

    def of_bytes(pool: Tensor) -> Tensor:
        return every[torch.randint(0, len(every), pool.shape, generator=torch.Generator().manual_seed(1))]

    keys = of_bytes(it.keys)
    values = keys[..., : -dims[1]] if dims[1] < 0 else of_bytes(it.values)
    wide = replace(it, keys=from_pages(keys, dtype), values=from_pages(values, dtype))
    assert torch.equal(replace(it, keys=keys, values=values).attend(), wide.attend())
    values = values.clone()
    values[it.page_table[0, 0], 0] = 0x7F  # the first token of the first row is NaN
    nan, wide = (
        replace(it, keys=keys, values=values).attend(),
        replace(it, keys=wide.keys, values=from_pages(values, dtype)).attend(),
    )
    assert nan.isnan().any()
    assert torch.equal(nan.isnan(), wide.isnan())
    with pytest.raises(RuntimeError, match="of one dtype, or keys and values of float8 in bytes"):
        replace(it, keys=keys).attend()


SCALES = {1: KVScales(0.013, 0.21)}


@contextmanager
def rounding_transformers(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """``model`` with an attention that rounds all keys and values, its own included: what a cache in FP8 means."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        scales = SCALES.get(module.layer_idx, UNSCALED)
        kept = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
            for x, scale in zip((key, value), scales, strict=True)
        ]
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in kept)
        return F.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scaling).transpose(1, 2), None

    previous = model.config._attn_implementation
    AttentionInterface.register("rounding", attend)
    model.set_attn_implementation("rounding")
    try:
        yield model
    finally:
        model.set_attn_implementation(previous)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_are_those_of_rounded_keys_and_values(kernel: Any) -> None:
    """By transformers, in chunks and token by token. A number that lies between two may be rounded to either."""
    model, tokens = random_model("llama"), prompt(3, 90)
    with rounding_transformers(random_model("llama")) as rounding, torch.no_grad():
        want = rounding(torch.tensor([tokens]), use_cache=False).logits[0]
    with torch.no_grad():
        exact = model(torch.tensor([tokens]), use_cache=False).logits[0]
    loaded = prepare(model, compile=False, attention=kernel, kv_cache_dtype="fp8", kv_scales=SCALES)
    runner = loaded.runner(4)
    assert {pool.dtype for pool in runner.cache.pools} == {FP8}
    pages = runner.cache.allocate(2)
    spans = [(0, 37), (37, 60), *((i, i + 1) for i in range(60, 90))]
    got = torch.cat([runner.forward([chunk(tokens, a, b, pages, b - a)]) for a, b in spans])
    assert (got - want).abs().max() < 0.02
    assert (exact - want).abs().max() > 0.2


def _native(*families: str, marks: Any = ()) -> list[Any]:
    return [pytest.param(family, "native", marks=(needs_attention, *marks)) for family in families]


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *[("gemma3", "sdpa"), ("hybrid", "sdpa"), *_native("minicpm3", "indexed")],
        *nightly([("minicpm3", "sdpa"), ("indexed", "sdpa")]),
        *_native("gemma3", "hybrid", marks=[pytest.mark.nightly]),
    ],
)
def test_the_self_test_holds(family: str, kernel: Any) -> None:
    """Windows, latents, linear layers, and indexers, whose keys stay as they are."""
    if family == "hybrid":
        model = checkpoint(hybrid_config("qwen3_next"))
    elif family == "indexed":
        model = indexed_model("deepseek_v32")
    else:
        model = checkpoint(small_config(family)) if family == "minicpm3" else random_model(family)
    loaded = prepare(model, compile=False, attention=kernel, kv_cache_dtype="fp8")
    attending = model.config.get_text_config().num_hidden_layers
    assert all(layer.is_fp8 == (layer.num_values > 0) for layer in loaded.layers[:attending])
    assert not any(layer.is_fp8 for layer in loaded.layers[attending:])
    report = check_invariance(loaded.runner(24), max_len=300, max_step_tokens=128)
    assert report.holds
    assert report.has_branches


def _holds_on_rank(group: Collectives, path: str) -> bool | None:
    rounded: dict[str, Any] = {"kv_cache_dtype": "fp8", "quantization": "int8"}
    options = ModelOptions(device="cpu", dtype="float32", compile=False, tensor_parallel_size=2, **rounded)
    found: bool | None = led(load_model(Checkpoint.open(path), options, group), _holds)
    return found


def _holds(runner: ModelRunner) -> bool:
    return check_invariance(runner, max_len=300, max_step_tokens=128).holds and runner.cache.keys[0].dtype == FP8


@pytest.mark.parametrize("family", slow(["llama"]))
def test_the_self_test_holds_on_two_ranks(family: str, tmp_path: Path) -> None:
    """Of weights that each rank rounds, too."""
    random_model(family).save_pretrained(tmp_path / "model")
    with Ranks(2, tmp_path) as ranks:
        assert ranks.run(_holds_on_rank, str(tmp_path / "model"))[0]


def test_another_format_is_refused_by_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.parse({"target_config": {"engine_kwargs": {"kv_cache_dtype": "fp8_e5m2"}}})
    assert "engine_kwargs.kv_cache_dtype is 'fp8_e5m2'" in str(caught.value)
    assert "'auto', 'fp8' or 'fp8_e4m3'" in str(caught.value)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_layers_of_heads_stay_in_the_dtype_of_the_model() -> None:
    cache = KVCache([LayerSpec(1, 8, 8, is_fp8=True)], 2, torch.float32, "cpu")
    first = cache.add_layers([LayerSpec(1, 4, 4)])
    assert (cache.keys[0].dtype, cache.keys[first].dtype) == (FP8, torch.float32)
    assert sum(pool[0].nbytes for pool in cache.pools) == PAGE_SIZE * (16 + 8 * 4)


LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}  # fmt: skip
QWEN3_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
              "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
              "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "kib", "fp8_kib"),
    [(LLAMA_8B, 128, 64), (QWEN3_NEXT, 24, 12), (DEEPSEEK_V3, 68.625, 34.3125), (DEEPSEEK_V32, 83.875, 49.5625)],
)
def test_a_token_of_published_models_takes_half(config: dict[str, Any], kib: float, fp8_kib: float) -> None:
    """Index keys, of 128 numbers a layer, are not rounded."""
    size = size_of(config, 1000, 2)
    assert [each.page_bytes / PAGE_SIZE / 1024 for each in (size, replace(size, is_kv_fp8=True))] == [kib, fp8_kib]


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_what_is_allocated_is_what_was_estimated(family: str, tmp_path: Path) -> None:
    model = random_model(family) if family == "llama" else indexed_model(family)
    model.save_pretrained(tmp_path)
    found = Checkpoint.open(str(tmp_path))
    size = found.size("float32", kv_cache_dtype="fp8_e4m3")
    assert size is not None
    options = ModelOptions(device="cpu", dtype="float32", compile=False, kv_cache_dtype="fp8_e4m3")
    loaded = load_model(found, options)
    cache = loaded.runner(3).cache
    assert size.kv_bytes(3) == loaded.size.kv_bytes(3) == sum(pool.nbytes for pool in cache.pools)
    assert loaded.size.kv_values == size.kv_values


def test_targets_and_drafts_are_estimated_each_by_its_own_option() -> None:
    """The same memory holds twice the tokens; copies for sdpa are in the dtype of the model."""
    plain = ModelSize(1000, 2 * 4 * 2 * 32, 2, num_layers=4, hidden_size=128, intermediate_size=320, vocab_size=10)
    fp8 = replace(plain, is_kv_fp8=True)
    target = TargetSetup("target", TargetOptions(compile=False, attention="sdpa", max_step_tokens=512), 256)
    draft = DraftSetup.for_target(target, "draft", DraftOptions())
    for estimate in (lambda size: target_estimate(target, size, 8192), lambda size: draft_estimate(draft, size, 8192)):
        assert 2 * estimate(fp8).kv_bytes == estimate(plain).kv_bytes
        assert estimate(fp8).workspace_bytes >= estimate(plain).workspace_bytes
    share = replace(target, options=target.options.model_copy(update={"kv_fraction": 0.5}))
    pages = [target_estimate(share, size, 1024, left_bytes=4 << 30).num_pages for size in (plain, fp8)]
    assert 1.9 < pages[1] / pages[0] < 2.1
