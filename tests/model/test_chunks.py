"""Llama 4: attention in chunks and a temperature by position, at and across the borders of chunks and pages."""

import functools
from pathlib import Path

import pytest
import torch
from tests.model.conformance import FP32_LIMIT, assert_follows, assert_invariant
from tests.model.families import checkpoint, small_config
from tests.model.test_forward import ragged
from tests.support.models import prompt
from tests.support.rings import slow
from torch import Tensor
from transformers import Llama4Config, Llama4ForConditionalGeneration, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions
from paceline.drafters.heads.partial_model import layers_from, require_borrowable
from paceline.errors import ConfigError
from paceline.model.attention.chunks import Chunks, Temperature
from paceline.model.loading import LoadedModel, load_model, load_pretrained, prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance
from paceline.model.step import Step

CHUNK = 65
"""Borders at 65, 130 and 195: beside the ends of pages, and not at them."""
CONFIG = small_config("llama4_text", attention_chunk_size=CHUNK)
TEXTS = [prompt(i, length) for i, length in enumerate((1, 3, CHUNK, CHUNK + 1, 150))]


@functools.cache
def llama4() -> PreTrainedModel:
    """A random checkpoint in float32, as transformers runs it."""
    return checkpoint(CONFIG)


@functools.cache
def ours(dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(CONFIG).to(dtype), compile=False)


def farthest(runner: ModelRunner) -> float:
    """The largest difference from transformers of any logit of TEXTS, relative to the largest one."""
    worst = 0.0
    for text, got in zip(TEXTS, ragged(runner, TEXTS, seed=0), strict=True):
        with torch.no_grad():
            want = llama4()(torch.tensor([text]), use_cache=False).logits[0]
        worst = max(worst, float((got - want).abs().max() / want.abs().max()))
    return worst


def test_tokens_and_logits_are_those_of_transformers() -> None:
    """Prefill in ragged chunks with others in the step, then decoding over two borders."""
    assert farthest(ours().runner(16)) <= FP32_LIMIT
    assert_follows(ours().runner(4), llama4(), prompt(3, 60), (), 80)


def test_a_mutant_that_slides_instead_is_noticed() -> None:
    model = ours()
    assert isinstance(model.sliding_window, Chunks)
    runner = model.runner(16)
    windowed = ModelRunner(
        model.step, runner.cache, dtype=model.dtype, sliding_window=CHUNK, vocab_size=model.vocab_size,
        spare_tokens=model.spare_tokens,
    )  # fmt: skip
    assert farthest(windowed) > 100 * FP32_LIMIT


def test_a_mutant_whose_temperature_follows_the_place_in_the_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from transformers, and verification is no decoding."""
    forward = Temperature.forward

    def by_place(self: Temperature, query: Tensor, positions: Tensor) -> Tensor:
        return forward(self, query, torch.arange(query.shape[2])[None])

    monkeypatch.setattr(Temperature, "forward", by_place)
    assert farthest(ours().runner(16)) > 100 * FP32_LIMIT
    assert not check_invariance(ours().runner(16), max_len=200, max_step_tokens=64).holds


@pytest.mark.parametrize("dtype", [torch.float32, *slow([torch.bfloat16])], ids=str)
def test_the_self_test_holds(dtype: torch.dtype) -> None:
    """With branches that leave each other before a border and end behind it."""
    assert_invariant(ours(dtype).runner(16))


def test_a_checkpoint_with_images_is_served_by_its_text_model(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
              "vision_output_dim": 32, "image_size": 28, "projector_input_dim": 32,
              "projector_output_dim": 32}  # fmt: skip
    config = Llama4Config(text_config=CONFIG.to_dict(), vision_config=vision)
    model = Llama4ForConditionalGeneration(config).eval()
    model.language_model.load_state_dict(llama4().state_dict())
    model.save_pretrained(tmp_path)
    loaded = prepare(load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32), compile=False)
    assert farthest(loaded.runner(16)) <= FP32_LIMIT


def test_its_layers_are_refused_as_heads(tmp_path: Path) -> None:
    """These would see all of the context, at one temperature."""
    llama4().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Llama4TextAttention attends in chunks and by temperature, which heads do"):
        require_borrowable("method", Checkpoint.open(str(tmp_path)), lambda family: layers_from(1, family), [1])


def test_compile_true_is_refused_and_auto_is_eager(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llama4().save_pretrained(tmp_path)
    options = ModelOptions(device="cpu", dtype="float32")
    with caplog.at_level("INFO", "paceline.model.loading"):
        assert isinstance(load_model(Checkpoint.open(str(tmp_path)), options).step, Step)
    assert "is not compiled: Llama 4's layers are not compiled on the CPU" in caplog.text
    with pytest.raises(ConfigError, match="compile is true, but Llama 4's layers are not compiled on the CPU: set"):
        load_model(Checkpoint.open(str(tmp_path)), options.model_copy(update={"compile": True}))
