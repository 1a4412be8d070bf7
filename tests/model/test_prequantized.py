"""Checkpoints that come quantized: each method whose packages are installed runs on the CPU, with the same promise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import prompt, random_model
from tests.support.pump import Pump, Request, assert_same, plain_reference
from torch import Tensor
from transformers import BitsAndBytesConfig, LlamaConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.quantization import METHODS, _is_installed
from paceline.config import ModelOptions
from paceline.model.loading import load_model
from paceline.model.selftest import check_invariance
from paceline.types import SamplingParams

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=256, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.15,
)  # fmt: skip

Rewrite = Callable[[str, Tensor], Mapping[str, Tensor]]


def rewritten(folder: Path, rewrite: Rewrite, quantization_config: Mapping[str, Any]) -> None:
    """A checkpoint whose linear layers are ``rewrite(name, weight)``."""
    random_model(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        tensors |= rewrite(name, tensors.pop(name).float())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}))


def fp8(folder: Path) -> None:
    """DeepSeek's: blocks of 128 by 128. There is no kernel for a CPU: transformers dequantizes it."""

    def rewrite(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        rows, columns = weight.shape
        scale = torch.nn.functional.max_pool2d(weight.abs()[None], 128, ceil_mode=True)[0] / 448
        full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {name: (weight / full).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.contiguous()}

    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    rewritten(folder, rewrite, method)


def compressed_tensors(folder: Path) -> None:
    """8 bits for each output's weights and each token's activations."""

    def rewrite(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale.bfloat16()}

    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    rewritten(folder, rewrite, {**method, "ignore": ["lm_head"], "config_groups": {"group_0": group}})


def bitsandbytes(folder: Path, **options: Any) -> None:
    """What the library itself makes of the weights."""
    random_model(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    model: PreTrainedModel = type(random_model(CONFIG)).from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**options)
    )
    model.save_pretrained(folder)


@pytest.mark.filterwarnings("default")  # of these libraries
@pytest.mark.parametrize(
    ("method", "make", "options", "runs_as"),
    [
        ("fp8", fp8, {}, None),
        ("compressed-tensors", compressed_tensors, {}, "compressed-tensors"),
        ("bitsandbytes_4bit", bitsandbytes, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes_4bit"),
        ("bitsandbytes_8bit", bitsandbytes, {"load_in_8bit": True, "llm_int8_threshold": 0.0}, "bitsandbytes_8bit"),
        ("bitsandbytes_8bit", bitsandbytes, {"load_in_8bit": True}, "bitsandbytes_8bit"),
    ],
    ids=["fp8", "compressed-tensors", "bitsandbytes-nf4", "bitsandbytes-int8", "bitsandbytes-int8-outliers"],
)
def test_a_checkpoint_that_comes_quantized(
    method: str, make: Callable[..., None], options: dict, runs_as: str | None, tmp_path: Path
) -> None:
    """Verifying gives the bits of decoding, and any draft the text of the target; or it is known not to."""
    if missing := [name for name, _ in METHODS[method].packages if not _is_installed(name)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    make(tmp_path, **options)
    model = load_model(Checkpoint.open(str(tmp_path)), ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert (model.quantization, model.dtype, model.vocab_size) == (runs_as, torch.bfloat16, 300)
    if model.batch_dependence is not None:
        assert options == {"load_in_8bit": True}
        return
    assert check_invariance(model.runner(32)).holds
    asked = {
        f"s{i}": Request(prompt(i, 20), SamplingParams(temperature=0.7 * i, seed=i, max_tokens=16)) for i in range(2)
    }
    assert_same(Pump(model, model, late=0.1).run(asked), plain_reference(model, asked))
