"""Latent attention: what the cache holds, how much it is, and that prompts and decoding compute the same."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.model.conformance import BF16_LIMIT, FP32_LIMIT, transformers_logits
from tests.model.families import checkpoint, small_config
from tests.support.hybrids import hybrid, hybrid_model
from tests.support.indexed import indexed_config
from tests.support.models import prompt
from tests.support.rings import nightly, slow
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.latent import num_plain_weights
from paceline.config import ModelOptions
from paceline.model.attention import latent
from paceline.model.attention.latent import adopt_latents, keeps_latents, multiply_heads
from paceline.model.compiled import linear
from paceline.model.compiled.blocks import quantize
from paceline.model.compiled.linear import PackedLinear, blocks_usable
from paceline.model.kv_cache import LayerSpec, flat_rows
from paceline.model.loading import LoadedModel, load_model, prepare
from paceline.model.selftest import check_invariance
from paceline.model.step_plan import SequenceStep

FP32, BF16 = torch.float32, torch.bfloat16
FAMILIES = [
    "deepseek_v3",
    *slow(["deepseek_v2"]),
    *nightly(["axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"]),
]
INDEXED = ["deepseek_v32", *nightly(["glm_moe_dsa", "axk2", "hy_v4"])]
TEXT = prompt(5, 100)
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 1}
"""The sizes of a head of DeepSeek-V2 and V3."""
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 163840,
}  # fmt: skip
"""Of its published configuration."""


@functools.cache
def reference(family: str) -> PreTrainedModel:
    """A random checkpoint in float32, as transformers runs it."""
    return checkpoint(small_config(family))


@functools.cache
def ours(family: str, dtype: torch.dtype = FP32) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(small_config(family)).to(dtype), compile=False)


def chunk(start: int, stop: int, pages: list[int], num_logits: int = 1) -> SequenceStep:
    """The tokens [start, stop) of TEXT."""
    return SequenceStep(TEXT[start:stop], range(start, stop), range(start, stop), pages, num_logits)


def kept(loaded: LoadedModel) -> list[Tensor]:
    """Rows ``[tokens, width]`` of TEXT that each layer keeps after a prompt in two parts and one token."""
    runner = loaded.runner(4)
    pages = runner.cache.allocate(2)
    for start, stop in ((0, 37), (37, len(TEXT) - 1), (len(TEXT) - 1, len(TEXT))):
        runner.forward([chunk(start, stop, pages)])
    rows = flat_rows(pages, 0, len(TEXT))
    return [keys.flatten(0, 2)[rows] for keys in runner.cache.keys]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_is_kept_as_one_normed_latent_and_one_rotated_key(family: str) -> None:
    """As in the cache of transformers, which expands them when it reads. Mutants: latents that are not normed (or, of
    LongCat, not scaled); the rotated part of the position before."""
    cache = DynamicCache()
    with torch.no_grad():
        reference(family)(torch.tensor([TEXT]), past_key_values=cache)
    rows = kept(ours(family))
    assert len(rows) == len(cache.layers)
    for own, layer in zip(rows, cache.layers, strict=True):
        want = torch.cat([layer.keys, layer.values], -1)[0, 0]
        assert float((own - want).abs().max() / want.abs().max()) < FP32_LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_counted(family: str, tmp_path: Path) -> None:
    """By the configuration alone as by the tensors that there are; each rank keeps all of it."""
    loaded = ours(family)
    assert loaded.layers == [LayerSpec(1, 32 + 16, 0)] * len(loaded.layers)
    reference(family).save_pretrained(tmp_path)
    size = Checkpoint.open(str(tmp_path)).size("float32")
    assert size is not None
    cache = loaded.runner(3).cache
    assert size.kv_bytes(3) == sum(pool.nbytes for pool in (*cache.keys, *cache.values)) > 0
    assert size.of_rank(2).kv_values == size.kv_values == loaded.size.kv_values
    projections = [part for name, part in reference(family).named_modules() if name.endswith("kv_b_proj")]
    assert num_plain_weights(size_config(tmp_path), len(projections)) == sum(
        part.weight.numel() for part in projections
    )


def size_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("family", INDEXED)
def test_a_layer_with_an_indexer_keeps_latents_too(family: str) -> None:
    config = indexed_config(family)
    layers = prepare(checkpoint(config), compile=False).layers
    assert layers[: config.num_hidden_layers] == [LayerSpec(1, 32 + 16, 0)] * config.num_hidden_layers


def test_a_token_of_deepseek_v3_takes_69_kib(tmp_path: Path) -> None:
    """61 layers of 512 + 64 numbers in bfloat16, where keys and values of 128 heads would take 4,880 KiB."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    size = Checkpoint.open(str(tmp_path)).size()
    assert size is not None
    assert size.page_bytes == 64 * 61 * 576 * 2
    assert round(size.page_bytes / 64 / 1024) == 69
    assert size.of_rank(8).page_bytes == size.page_bytes
    assert num_plain_weights(DEEPSEEK_V3, 61) == 61 * 128 * 256 * 512


@pytest.mark.parametrize(
    ("family", "changes", "dtype"),
    [
        *(("deepseek_v3", {}, dtype) for dtype in (FP32, BF16)),
        *slow(("deepseek_v3", WIDE, dtype) for dtype in (FP32, BF16)),
        *nightly((family, WIDE, BF16) for family in ("deepseek_v2", "minicpm3")),
    ],
    ids=str,
)
def test_prompts_and_decoding_have_the_same_bits(family: str, changes: dict[str, int], dtype: torch.dtype) -> None:
    """Also those of branches. Mutant: sums of few tokens in another order."""
    loaded = prepare(checkpoint(small_config(family, **changes)).to(dtype), compile=False)
    report = check_invariance(loaded.runner(16), 300)
    assert report.holds, str(report)
    assert report.has_branches


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [*slow([BF16]), *nightly([FP32])])
def test_a_compiled_model_has_the_logits_of_transformers(dtype: torch.dtype) -> None:
    """And in bfloat16 the bits of decoding. Without experts, whose products are others in float32."""
    config = small_config("minicpm3")
    loaded = prepare(checkpoint(config).to(dtype), compile=True)
    runner = loaded.runner(16)
    pages = runner.cache.allocate(2)
    rows = torch.cat([runner.forward([chunk(a, b, pages, b - a)]) for a, b in ((0, 37), (37, 99), (99, 100))])
    want = transformers_logits(checkpoint(config), TEXT)
    limit = FP32_LIMIT * float(want.abs().max())
    if dtype == BF16:
        theirs = transformers_logits(checkpoint(config).to(BF16), TEXT)
        limit = BF16_LIMIT * float((theirs - want).abs().max())
    assert float((rows.float() - want).abs().max()) < limit
    assert check_invariance(loaded.runner(16), 300).holds


@pytest.mark.parametrize("heads_first", [True, False])
def test_heads_are_multiplied_apart(heads_first: bool) -> None:
    """Each token of each head as alone; native products, where they are usable, are those of single layers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 9, 40, generator=generator) if heads_first else torch.randn(9, 3, 40, generator=generator)
    x, weights = x if heads_first else x.transpose(0, 1), torch.randn(3, 24, 40, generator=generator)
    got = multiply_heads(x, weights)
    assert torch.allclose(got, torch.einsum("htk,hnk->htn", x, weights), atol=1e-5)
    assert torch.equal(multiply_heads(x[:, 2:7], weights), got[:, 2:7])
    if linear.usable():
        x, weights = x.bfloat16(), weights.bfloat16()
        packed = linear.pack(weights)
        assert torch.equal(packed, torch.stack([linear.pack(weight) for weight in weights]))
        native: Tensor = torch.ops.paceline.packed_heads(x, packed, 24)
        assert torch.equal(native[1], linear.linear(x[1].contiguous(), packed[1], None, 24))
        assert torch.equal(torch.ops.paceline.packed_heads(x[:, :1], packed, 24), native[:, :1])


@pytest.mark.compiler
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_multiplies_by_plain_weights_head_by_head(quantization: Any, tmp_path: Path) -> None:
    """All other layers are quantized, and the self-test holds."""
    if not blocks_usable():
        pytest.skip("quantized products are not usable here")
    reference("deepseek_v3").save_pretrained(tmp_path)
    options = ModelOptions(dtype="float32", device="cpu", compile=False, quantization=quantization)
    loaded = load_model(Checkpoint.open(str(tmp_path)), options)
    model: Any = loaded.step.model  # type: ignore[attr-defined]
    attention = model.model.layers[0].self_attn
    assert type(attention.kv_b_proj) is torch.nn.Linear
    assert isinstance(attention.q_b_proj, PackedLinear)
    assert loaded.quantization
    assert check_invariance(loaded.runner(16), 200).holds


@pytest.mark.compiler
def test_weights_that_come_quantized_become_plain() -> None:
    """They are what the layer makes of unit vectors."""
    if not blocks_usable():
        pytest.skip("quantized products are not usable here")
    model = checkpoint(small_config("deepseek_v3"))
    attention: Any = model.model.layers[0].self_attn
    exact = attention.kv_b_proj.weight.detach()
    attention.kv_b_proj = packed = PackedLinear(attention.kv_b_proj, quantize(exact, 8))
    adopt_latents(model)
    assert keeps_latents(attention)
    plain = attention.kv_b_proj
    assert type(plain) is torch.nn.Linear
    assert 0 < float((plain.weight - exact).abs().max()) < 0.02
    assert torch.equal(plain.weight, packed(torch.eye(exact.shape[1])).t())


def mutant_without_norm(layer: Any) -> None:
    """Latents as the projection makes them."""
    layer.kv_a_layernorm.forward = lambda x: x


def mutant_of_another_position(layer: Any) -> None:
    """The rotated part of the token before."""
    layer.expand_kv = lambda latents, rotated: latent._as_one_head(latents, rotated.roll(1, 2))


@pytest.mark.parametrize("mutant", [mutant_without_norm, mutant_of_another_position])
def test_a_mutant_keeps_something_else(mutant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first test compares tells them."""
    wrong = prepare(checkpoint(small_config("deepseek_v3")), compile=False)
    model: Any = wrong.step.model  # type: ignore[attr-defined]
    mutant(model.model.layers[0].self_attn)
    monkeypatch.setattr(latent, "keeps_latents", lambda module: hasattr(type(module), "expand_kv"))
    right, other = kept(ours("deepseek_v3"))[0], kept(wrong)[0]
    assert float((right - other).abs().max() / right.abs().max()) > 0.01


@pytest.mark.parametrize("family", [*slow(["kimi_linear"]), *nightly(["bailing_hybrid"])])
def test_latent_attention_beside_linear_layers_keeps_latents_too(family: str, tmp_path: Path) -> None:
    """And is counted so; linear layers keep nothing of the kind."""
    hybrid_model(family).save_pretrained(tmp_path)
    size, cache = Checkpoint.open(str(tmp_path)).size("float32"), hybrid(family).runner(3).cache
    assert size is not None
    assert [*map(len, (hybrid(family).layers, hybrid(family).linear))] == [3, 2]
    assert hybrid(family).layers[2] == LayerSpec(1, 32 + 16, 0)
    assert size.kv_bytes(3) == sum(pool.nbytes for pool in (*cache.keys, *cache.values)) > 0
