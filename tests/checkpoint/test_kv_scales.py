"""Scales of keys and values under the names that published checkpoints have for them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import random_model
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.kv_scales import KVScales, described, kv_scales
from paceline.config import ModelOptions
from paceline.errors import ConfigError
from paceline.model.loading import load_model

ATTENTION = "model.layers.{}.self_attn."
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def checkpoint(folder: Path, scales: dict[str, Tensor], **further: Any) -> Checkpoint:
    """A llama of two layers with these tensors beside its weights, and these settings."""
    random_model("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | scales
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | further))
    return Checkpoint.open(str(folder))


def named(keys: str, values: str) -> dict[str, Tensor]:
    """Scales of keys and values of two layers, each in another number format."""
    numbers = [torch.tensor(0.5), torch.tensor([0.25], dtype=torch.bfloat16)]
    numbers += [torch.tensor(0.125, dtype=torch.float16), torch.tensor(3.0, dtype=torch.float64)]
    names = [ATTENTION.format(layer) + name for layer in (0, 1) for name in (keys, values)]
    return dict(zip(names, numbers, strict=True))


PUBLISHED = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "compressed-tensors, older": ("k_proj.output_scale", "v_proj.output_scale"),
    "Model Optimizer": ("k_proj.k_scale", "v_proj.v_scale"),
    "vLLM": ("attn.k_scale", "attn.v_scale"),
}


@pytest.mark.parametrize("names", PUBLISHED.values(), ids=PUBLISHED)
def test_published_names_are_read(names: tuple[str, str], tmp_path: Path) -> None:
    """Not those of other layers, of queries or of the inputs of projections."""
    others = ("model.layers.2.self_attn.k_scale", "mtp.layers.0.self_attn.k_scale", ATTENTION.format(0) + "q_scale",
              ATTENTION.format(0) + "q_proj.output_scale", ATTENTION.format(0) + "k_proj.input_scale")  # fmt: skip
    found = checkpoint(tmp_path, named(*names) | {name: torch.tensor(9.0) for name in others}, num_hidden_layers=2)
    assert kv_scales(found) == {0: KVScales(0.5, 0.25), 1: KVScales(0.125, 3.0)}
    assert described(found) == "keys and values in FP8 have the checkpoint's scales in 2 layers: 0.125 to 3"


def test_one_scale_may_be_of_both(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {ATTENTION.format(1) + "kv_scale": torch.tensor(0.5)})
    assert kv_scales(found) == {1: KVScales(0.5, 0.5)}


def test_pages_have_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """Only pages in FP8. What is kept are the quotients."""
    source = checkpoint(tmp_path, named("k_scale", "v_scale"))
    for dtype, want in (("auto", KVScales(1, 1)), ("fp8", KVScales(0.125, 3.0))):
        options = ModelOptions(device="cpu", dtype="float32", compile=False, attention="sdpa", kv_cache_dtype=dtype)
        assert load_model(source, options).runner(2).cache.scales[1] == want


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "the checkpoint brings none"),
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "those of its kv_cache_scheme are for int of 8 bits"),
        ({"kv_cache_quant_algo": "NVFP4"}, "those of its kv_cache_quant_algo are for NVFP4"),
    ],
)
def test_a_scale_of_1_has_a_reason(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    own = {"quantization_config": {"quant_method": "compressed-tensors"} | settings}
    found = checkpoint(tmp_path, named("k_scale", "v_scale") if settings else {}, **own)
    assert (kv_scales(found), described(found)) == ({}, f"keys and values in FP8 have scale 1: {reason}")


def test_latents_have_scale_1(tmp_path: Path) -> None:
    sizes = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    found = checkpoint(tmp_path, named("k_scale", "v_scale"), **sizes)
    assert kv_scales(found) == {}
    assert "its layers keep latents" in described(found)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            torch.ones(2),
            r"k_scale as F32 of shape \[2\], and one scale of a layer is read: set kv_cache_dtype to 'auto'",
        ),
        (torch.tensor(0.0), r"k_scale as 0.0: positive numbers are allowed"),
        (torch.tensor(float("inf")), r"k_scale as inf: positive numbers are allowed"),
    ],
)
def test_what_is_no_scale_is_refused(scale: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        kv_scales(checkpoint(tmp_path, {ATTENTION.format(0) + "k_scale": scale}))


def test_two_names_of_one_scale_have_one_number(tmp_path: Path) -> None:
    """In whatever order they are stored."""
    scales = {ATTENTION.format(0) + name: torch.tensor(0.5) for name in ("k_scale", "k_proj.k_scale", "v_scale")}
    assert kv_scales(checkpoint(tmp_path / "same", scales)) == {0: KVScales(0.5, 0.5)}
    other = scales | {ATTENTION.format(0) + "kv_scale": torch.tensor(0.25)}
    problem = (
        r"k_\w+(\.k_scale)? as 0.5 and model.layers.0.self_attn.kv_scale as 0.25, and one scale of a layer is read"
    )
    with pytest.raises(ConfigError, match=problem):
        kv_scales(checkpoint(tmp_path / "other", other))
