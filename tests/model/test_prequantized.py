"""Checkpoints whose quantized weights are transformers' and a package's: they run on the CPU, with the same promise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import prompt, random_model
from tests.support.pump import Pump, Request, assert_same, plain_reference
from transformers import BitsAndBytesConfig, LlamaConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.quantization import METHODS, is_installed
from paceline.config import ModelOptions
from paceline.model.loading import load_model
from paceline.model.selftest import check_invariance
from paceline.types import SamplingParams

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=256, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.15,
)  # fmt: skip


def bitsandbytes(folder: Path, **options: Any) -> None:
    """What the library itself makes of the weights."""
    random_model(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
    model: PreTrainedModel = type(random_model(CONFIG)).from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**options)
    )
    model.save_pretrained(folder)


@pytest.mark.filterwarnings("default")  # of these libraries
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bitsandbytes_4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        ("bitsandbytes_8bit", {"load_in_8bit": True, "llm_int8_threshold": 0.0}),
        ("bitsandbytes_8bit", {"load_in_8bit": True}),
    ],
    ids=["bitsandbytes-nf4", "bitsandbytes-int8", "bitsandbytes-int8-outliers"],
)
def test_a_checkpoint_that_comes_quantized(method: str, options: dict, tmp_path: Path) -> None:
    """Verifying gives the bits of decoding, and any draft the text of the target; or it is known not to."""
    if missing := [name for name, _ in METHODS[method].packages if not is_installed(name)]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    bitsandbytes(tmp_path, **options)
    model = load_model(Checkpoint.open(str(tmp_path)), ModelOptions(dtype="bfloat16", device="cpu", compile=False))
    assert (model.quantization, model.dtype, model.vocab_size) == (method, torch.bfloat16, 300)
    if model.batch_dependence is not None:
        assert options == {"load_in_8bit": True}
        return
    assert check_invariance(model.runner(32)).holds
    asked = {
        f"s{i}": Request(prompt(i, 20), SamplingParams(temperature=0.7 * i, seed=i, max_tokens=16)) for i in range(2)
    }
    assert_same(Pump(model, model, late=0.1).run(asked), plain_reference(model, asked))
