"""Checkpoints with linear layers as they are published, in one process: loaded, served, sized, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.support.hybrids import FAMILIES, hybrid_config, hybrid_model
from tests.support.models import letters_tokenizer, prompt, random_model
from transformers import AutoModelForCausalLM, BartConfig, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import Kind, LinearLayers, LinearSpec, Slots, linear_layers, why_not_runnable
from paceline.checkpoint.size import size_of
from paceline.config import DraftModel, HeadOptions, LocalConfig, TargetModel
from paceline.drafters.heads.early_exit import open_exit
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.model.kv_cache import KVCache
from paceline.preflight.estimate import draft_estimate
from paceline.target.control.report import measures
from paceline.types import PAGE_SIZE, Mode, SpeculationParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model inside one for images, with an MTP module, as Qwen3.5 is published."""
    folder = tmp_path_factory.mktemp("hybrid") / "qwen3_5"
    text = hybrid_config("qwen3_5_text", tie_word_embeddings=False)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text.to_dict(), vision_config=vision))
    weights = hybrid_model("qwen3_5_text").state_dict()
    names = {name.replace("model.", "model.language_model.", 1): value for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(names, strict=False)
    assert not unexpected
    assert all("visual" in name for name in missing)
    model.save_pretrained(folder)
    block = AutoModelForCausalLM.from_config(
        hybrid_config("qwen3_5_text", num_hidden_layers=1, layer_types=["full_attention"])
    )
    size, file = text.hidden_size, folder / "model.safetensors"
    mtp = {f"mtp.layers.0.{name}": value.clone() for name, value in block.model.layers[0].state_dict().items()}
    mtp |= {f"mtp.{name}.weight": torch.zeros(size) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}
    mtp["mtp.fc.weight"] = torch.eye(size).repeat(1, 2)
    save_file(load_file(file) | mtp, file, metadata={"format": "pt"})
    letters_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[LocalPipeline]:
    """Nothing is compiled; the MTP module drafts, however badly, and prompt lookup."""
    options: dict = {
        "dtype": "float32",
        "compile": False,
        "max_model_len": 256,
        "max_sessions": 2,
        "state_slots": 7,
        "max_step_tokens": 64,
        "adaptive": False,
        "batch_invariant": "off",
    }
    target = TargetModel(path=str(folder), heads=[HeadOptions(method="mtp", probe=False)], **options)
    with LocalPipeline(LocalConfig(target=target, draft=None, worker="thread", pin_cores=False)) as pipeline:
        yield pipeline


def test_a_published_layout_is_served_with_the_text_of_transformers(pipeline: LocalPipeline, folder: Path) -> None:
    tokens = [*prompt(1, 30), *prompt(1, 30)]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = model.generate(torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    for mode in Mode:
        result = pipeline.generate(
            tokens, None, SpeculationParams(mode=mode), max_tokens=24, temperature=0.0, ignore_eos=True
        ).result
        assert [*tokens, *result.token_ids] == expected[0].tolist()
        assert (result.speculation.head_drafted > 0) == (mode is not Mode.PLAIN)


def test_quantized_weights_that_do_not_run_with_linear_layers_are_refused() -> None:
    delta, mamba = (hybrid_config(family).to_dict() for family in ("qwen3_next", "jamba"))
    assert why_not_runnable(delta, None, device="cuda", quantization=None) is None
    for device in ("cpu", "cuda"):
        assert why_not_runnable(delta, None, device=device, quantization="int8") is None
        found = why_not_runnable(delta, {"quant_method": "quanto"}, device=device, quantization=None)
        assert found is not None
        assert found[0] == "model"
        found = why_not_runnable(mamba, None, device=device, quantization="int8")
        said = "is 'int8' and the model has Mamba layers, which run with plain weights alone: null is allowed"
        assert found == ("quantization", said)


def test_state_slots_are_those_of_a_model_with_linear_layers_and_enough_for_its_sessions(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(tmp_path)
    target = TargetModel(path=str(tmp_path), state_slots=40, max_sessions=2)
    with pytest.raises(ConfigError, match="state_slots is 40, and the model has no linear layers: null is allowed"):
        LocalPipeline(LocalConfig(target=target, draft=None)).load()
    with pytest.raises(ValidationError, match="is 31: 16 sessions need 32 at least"):
        TargetModel(path=str(tmp_path), state_slots=31)


def test_the_engine_has_the_states_of_its_option(pipeline: LocalPipeline) -> None:
    """Its status says how many, and how many of them hold a state: after a session, one of its prefix at least."""
    pipeline.generate(prompt(5, 70), max_tokens=4, temperature=0.0, ignore_eos=True).result  # noqa: B018
    target: Any = pipeline.target.worker
    target = target._engine
    linear = target.runner.cache.linear
    assert linear.slots.states == 7
    found = measures(target)
    assert (found["state_slots"], found["state_slots_used"]) == (7, linear.num_used)
    assert 1 <= found["prefix_states"] <= linear.num_used


def test_a_draft_with_linear_layers_is_accepted_where_it_is_the_target(folder: Path) -> None:
    """Every token; the draft has the slots that are estimated."""
    options: dict[str, Any] = {"path": str(folder), "dtype": "float32", "compile": False}
    target = TargetModel(max_model_len=256, max_sessions=2, adaptive=False, batch_invariant="off", **options)
    draft = DraftModel(tree_budget=32, **options)
    config = LocalConfig(target=target, draft=draft, worker="thread", pin_cores=False)
    with LocalPipeline(config) as pipeline:
        for mode in (Mode.PLAIN, Mode.SEQUENTIAL):
            speculation = SpeculationParams(mode=mode, max_draft_tokens=4)
            result = pipeline.generate(
                prompt(1, 30), None, speculation, max_tokens=41, temperature=0.0, ignore_eos=True
            ).result
            if mode is Mode.PLAIN:
                expected = result.token_ids
        assert result.token_ids == expected
        assert result.speculation.accepted == result.speculation.drafted > 0
        worker: Any = pipeline.draft.worker
        cache = worker._engine.drafter.cache
        assert cache.linear.slots == Slots.of(2, branches=3)
        setup, size = config.draft_setup(), Checkpoint.open(str(folder)).size("float32")
        assert setup is not None
        assert size is not None
        estimate = draft_estimate(setup, size, 256)
        assert estimate.num_pages == cache.num_pages
        assert estimate.linear_bytes == sum(pool.nbytes for layer in cache.linear_pools.values() for pool in layer)


def test_layers_that_attend_in_addition_do_not_draft(tmp_path: Path) -> None:
    """Their own forward has no state of the tokens before."""
    hybrid_model("falcon_h1").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has layers of attention and Mamba2 together, and only layers of attention"):
        open_exit(Checkpoint.open(str(tmp_path)), 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_rows_take_what_is_estimated(family: str, tmp_path: Path) -> None:
    """By the configuration alone, and by the tensors that there are."""
    hybrid_model(family).save_pretrained(tmp_path)
    size = Checkpoint.open(str(tmp_path)).size("float32")
    assert size is not None
    assert size.linear is not None
    slots = Slots.of(3, states=9)
    specs = dict.fromkeys(range(size.linear.num), size.linear.spec)
    cache = KVCache([], 4, torch.float32, "cpu", specs, slots)
    taken = sum(pool.nbytes for layer in cache.linear_pools.values() for pool in layer)
    assert taken == size.slots_bytes(slots) < size.slots_bytes(Slots.of(3))
    num = size.num_kv_layers
    assert num == (size.linear.num_both or 1)
    latent, of_others = hasattr(hybrid_config(family), "kv_lora_rank"), 2 * 4 * 32 if family == "zamba2" else 2 * 2 * 16
    assert size.kv_values == num * (32 + 16 if latent else of_others)


_FULL = {4, 8, 12, 16, 20, 24, 27}
"""Kimi-Linear's layers with attention, counted from 1."""
_LING = {"model_type": "bailing_hybrid", "num_hidden_layers": 42, "num_attention_heads": 32}
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (
        {
            "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
        LinearLayers(36, LinearSpec(16, 32, 128, 128, 4)),
        75456,
    ),
    "Kimi-Linear-48B-A3B": (
        {
            "model_type": "kimi_linear", "num_hidden_layers": 27, "linear_attn_config": {
                "full_attn_layers": [*_FULL], "kda_layers": [i for i in range(1, 28) if i not in _FULL],
                "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
            },
        },
        LinearLayers(20, LinearSpec(32, 32, 128, 128, 4, Kind.KIMI_DELTA)),
        42400,
    ),
    "Ling-3.0-Flash": (
        _LING | {"head_dim": 128, "layer_group_size": 6, "short_conv_kernel_size": 4},
        LinearLayers(35, LinearSpec(32, 32, 128, 128, 4, Kind.KIMI_DELTA)),
        74200,
    ),
    "Ling-3.0-Flash, saved by transformers": (
        _LING | {
            "head_dim": 64, "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 7,
            "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
        },
        LinearLayers(35, LinearSpec(32, 32, 128, 128, 4, Kind.KIMI_DELTA)),
        74200,
    ),
    "MiniMax-Text-01": (
        {
            "model_type": "minimax", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
            "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
        },
        LinearLayers(70, LinearSpec(64, 64, 128, 128, 1, Kind.LIGHTNING)),
        280 * 1024,
    ),
    "LFM2-1.2B": (
        {
            "model_type": "lfm2", "num_hidden_layers": 16, "hidden_size": 2048, "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
        LinearLayers(10, LinearSpec(0, 2048, 0, 1, 3, Kind.CONVOLUTION)),
        80,
    ),
    "Jamba-1.5-Mini": (
        {
            "model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096, "mamba_expand": 2, "mamba_d_state": 16,
            "mamba_d_conv": 4, "attn_layer_period": 8, "attn_layer_offset": 4,
        },
        LinearLayers(28, LinearSpec(1, 8192, 16, 1, 4, Kind.MAMBA)),
        15680,
    ),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (
        {
            "model_type": "nemotron_h", "num_hidden_layers": 52, "hidden_size": 2688, "conv_kernel": 4, "n_groups": 8,
            "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 2,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
        LinearLayers(23, LinearSpec(8, 64, 128, 64, 4, Kind.MAMBA2), num_others=23),
        47932,
    ),
    "Llama": ({"model_type": "llama", "num_hidden_layers": 2}, None, 0),
}  # fmt: skip
"""Configurations as they are published, their linear layers, and KiB of a session's state beside bfloat16 rows."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str) -> None:
    config, layers, state_kib = PUBLISHED[name]
    assert linear_layers(config) == layers
    assert layers is None or layers.state_bytes(2) >> 10 == state_kib


_HEADS = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "hidden_size": 256}


@pytest.mark.parametrize(
    ("config", "num", "head_dim", "num_both"),
    [
        ({"model_type": "bamba", "mamba_d_head": "auto", "mamba_expand": 2, "attn_layer_indices": [1]}, 3, 64, 0),
        ({"model_type": "bamba", "mamba_d_head": 64, "attn_layer_indices": None}, 4, 64, 0),
        ({"model_type": "granitemoehybrid", "mamba_d_head": 64, "layer_types": ["mamba", "attention"] * 2}, 2, 64, 0),
        ({"model_type": "falcon_h1", "mamba_d_head": "auto", "mamba_d_ssm": 256}, 4, 32, 4),
        ({"model_type": "falcon_h1", "mamba_d_head": "auto", "mamba_d_ssm": None, "mamba_expand": 2}, 4, 64, 4),
    ],
)
def test_sizes_of_mamba2_are_found_in_any_form(config: dict, num: int, head_dim: int, num_both: int) -> None:
    """Sizes that follow from others, older names of layers, and layers that attend, too."""
    layers = linear_layers({"num_hidden_layers": 4, **_HEADS, **config})
    assert layers == LinearLayers(num, LinearSpec(1, 8, 128, head_dim, 4, Kind.MAMBA2), num_both=num_both)
    assert layers.num_without_kv == num - num_both


def test_layers_that_keep_nothing_have_no_keys_and_values() -> None:
    """Nemotron-3-Nano: 6 layers of 52 attend, and keep 6 KiB a token."""
    size = size_of(PUBLISHED["NVIDIA-Nemotron-3-Nano-30B-A3B"][0], 0, 2)
    assert size.num_kv_layers == 6
    assert size.page_bytes // PAGE_SIZE == 6 << 10


def test_an_encoder_with_a_decoder_is_no_text_model_with_images(tmp_path: Path) -> None:
    """Its class is named alike, and transformers has a decoder of that name."""
    BartConfig(architectures=["BartForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not a causal language model: its architecture is BartFor"):
        Checkpoint.open(str(tmp_path))
