"""DeepSeek V4 as it is published: names, formats and configuration of its files, on one rank and two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.parallel.ranks import Ranks
from tests.model.parallel.test_tables import LIMIT, TEXT, logits_of_two
from tests.model.test_dequantized import changed, run_engine
from tests.support.compressed import published_config, write_published
from tests.support.mutants import Mutant, mutant
from tests.support.rings import slow
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.checkpoint.files import Checkpoint
from paceline.errors import ConfigError
from paceline.model.dequantized import DequantizedFiles
from paceline.model.loading import load_pretrained
from paceline.types import Mode


def plain_logits(folder: Path, means: dict[str, Tensor]) -> Tensor:
    """[tokens, vocab] of TEXT by transformers, of a model with the weights that are meant, in float32."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({name: mean.to(model.state_dict()[name].dtype) for name, mean in means.items()})
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_weights_and_logits_are_those_that_are_meant(experts: str, tmp_path: Path) -> None:
    """Of one rank the weights, of two the logits; and the sizes are counted as they will run."""
    means = write_published(tmp_path, published_config(), experts)
    found = Checkpoint.open(str(tmp_path))
    model = load_pretrained(found, torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, means[name].to(tensor.dtype)), name
    assert model.config.layer_types == published_config().layer_types
    want = plain_logits(tmp_path, means)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([TEXT])).logits[0], want)
    assert float((logits_of_two(str(tmp_path)) - want).abs().max()) <= 10 * LIMIT
    size = found.size("bfloat16")
    assert size is not None
    assert size.num_parameters == sum(mean.numel() for mean in means.values())
    assert size.weights_bytes == 2 * size.num_parameters


@mutant(DequantizedFiles, "index_of_scales")
def _scales_from_the_beginning(
    index: Any, self: Any, name: str, stem: str, dim: int, *given: Any, **how: Any
) -> Tensor:
    """A rank takes the exponents of the tensor's first groups."""
    size, length, part = given
    found: Tensor = index(self, name, stem, dim, size, length, slice(0, part.stop - part.start), **how)
    return found


@mutant(DequantizedFiles, "unpacked_codes")
def _high_half_first(codes: Any, self: Any, packing: Any, *given: Any) -> Tensor:
    """The first of two numbers of a byte is in its high half."""
    found: Tensor = codes(self, packing, *given)
    return found.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if packing.kind == "nvfp4" else found


@pytest.mark.parametrize("change", [_scales_from_the_beginning, _high_half_first])
def test_wrong_experts_are_noticed(change: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = plain_logits(tmp_path, write_published(tmp_path, published_config()))
    change(monkeypatch)
    assert float((logits_of_two(str(tmp_path)) - want).abs().max()) > 100 * LIMIT


@pytest.mark.parametrize("experts", slow(["fp4"]))
def test_two_ranks_give_the_text_of_plain_decoding(experts: str, two: Ranks, tmp_path: Path) -> None:
    write_published(tmp_path, published_config(), experts)
    (texts, _), _ = two.run(run_engine, str(tmp_path), transport="shared")
    for request, text in texts.items():
        assert text == texts[request.replace(Mode.OVERLAPPED.name, Mode.PLAIN.name)]


NAME = "layers.1.ffn.experts.1.w2."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": None}, "stores {0}weight as I8, which is not read in its format"),
        ({"scale": torch.ones(160, 6)}, "stores {0}scale as F32, which is not read in its format"),
        ({"scale": torch.ones(160, 3).to(torch.float8_e8m0fnu)}, "{0}scale of shape (160, 3) does not fit"),
        ({"weight": None}, "stores {0}scale as F8_E8M0, which is not read in its format"),
        ({"weight": torch.ones(160, 96, dtype=torch.uint8)}, "stores {0}weight as U8, which is not read"),
    ],
    ids=["no scale", "float scale", "groups of 64", "no weight", "unsigned"],
)
def test_experts_that_are_stored_otherwise_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_published(tmp_path, published_config())
    changed(tmp_path, {NAME + ending: tensor for ending, tensor in change.items()})
    with pytest.raises(ConfigError) as caught:
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.bfloat16)
    assert said.format(NAME) in str(caught.value)
