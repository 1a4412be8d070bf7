"""Ranks that round their parts of plain weights hold the parts of the weights that one process rounds, bit for bit.

Weights are read as products of unit vectors. Logits of two ranks differ from those of one by the order of sums alone: a
layer that is split by its inputs adds one term of each rank. Products on the CPU round their inputs, too, so in some
rows such a difference becomes a step of 8 bits.
"""

from typing import Any

import pytest
import torch
from tests.model.parallel.test_tables import LIMIT, TEXT, by_two, logits_of_two
from tests.support.models import random_model
from tests.support.mutants import mutant
from tests.support.packed import CONFIG
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.model import loading
from paceline.model.compiled.linear import PackedLinear
from paceline.model.loading import load_pretrained
from paceline.model.parallel import model as sharded
from paceline.model.scaled import ScaledLinear, round_layers

SPLIT_BY_INPUTS = ("o_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a rank's 160 neurons no block is another rank's."""
    path = tmp_path_factory.mktemp("plain")
    random_model(CONFIG).save_pretrained(path)
    return str(path)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as on a GPU, whose products the CPU has by torch."""

    def round_linear(model: Any, quantization: Any, device: Any, path: str, *given: Any, whole: Any = None) -> None:
        round_layers(model, device, 16, 8 if quantization == "int8" else 4, whole)

    for module in (sharded, loading):
        monkeypatch.setattr(module, "round_linear", round_linear)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """[outputs, inputs] of each rounded layer."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, PackedLinear | ScaledLinear):
            kind: Any = type(layer)  # without the sum over the ranks
            found[name] = kind.forward(layer, torch.eye(layer.in_features)).T
    return found


def gaps(folder: str, quantization: Any) -> Tensor:
    """The largest difference of a row's logits between two ranks and one, of the largest logit."""
    model = load_pretrained(Checkpoint.open(folder), torch.float32, quantization=quantization)
    with torch.no_grad():
        want = model(torch.tensor([TEXT])).logits[0]
    return (logits_of_two(folder, quantization) - want).abs().amax(1) / want.abs().max()


def require_parts(folder: str, quantization: Any) -> None:
    whole = weights_of(load_pretrained(Checkpoint.open(folder), torch.float32, quantization=quantization))
    parts = by_two(weights_of, folder, quantization)
    assert whole.keys() == parts[0].keys() == parts[1].keys()
    for name, weight in whole.items():
        joined = torch.cat([part[name] for part in parts], 1 if name.endswith(SPLIT_BY_INPUTS) else 0)
        assert torch.equal(joined, weight), name


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ranks_hold_the_parts_of_rounded_weights(quantization: Any, folder: str) -> None:
    require_parts(folder, quantization)
    found = gaps(folder, quantization)
    assert float(found[:8].max()) < LIMIT  # no step yet
    assert float(found.max()) < 0.05


def test_ranks_on_gpus_hold_the_parts_of_rounded_weights(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 bits the scale of an output is that of all of its inputs. Mutant: that of the rank's own."""
    as_on_a_gpu(monkeypatch)
    for quantization in ("int8", "int4"):
        require_parts(folder, quantization)
        assert float(gaps(folder, quantization).max()) < LIMIT
    scales_of_its_own(monkeypatch)
    with pytest.raises(AssertionError, match="o_proj"):
        require_parts(folder, "int8")


@mutant(sharded._OfRanks, "largest")
def scales_of_its_own(original: Any, whole: Any, path: str, own: Tensor) -> Tensor:
    return own
