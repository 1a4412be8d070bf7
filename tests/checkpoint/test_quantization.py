"""Which quantized weights run where: each refusal is one sentence with what to do."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.models import FAMILIES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from paceline.checkpoint import quantization
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.quantization import (
    METHODS,
    batch_dependence,
    method_of,
    require_method,
    require_quantization,
    weight_bytes_per_parameter,
)
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.model.loading import load_pretrained


def named(method: str) -> dict:
    """The least that a ``quantization_config`` of the method says."""
    if method.startswith("bitsandbytes"):
        return {"quant_method": "bitsandbytes", "load_in_4bit": "4bit" in method, "load_in_8bit": "8bit" in method}
    return {"quant_method": method}


def checkpoint(folder: Path, quantization_config: dict) -> str:
    """A directory whose configuration says how its weights are quantized; there are none."""
    FAMILIES["llama"]().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_every_method_of_transformers_is_known() -> None:
    """Neither one more nor one less."""
    assert METHODS.keys() == AUTO_QUANTIZATION_CONFIG_MAPPING.keys()


@pytest.mark.parametrize("method", METHODS)
def test_what_is_missing_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a CPU and no package for quantized weights at all."""
    monkeypatch.setattr(quantization, "is_installed", lambda name: False)
    path = checkpoint(tmp_path, named(method))
    known = METHODS[method]
    subject = f"model '{path}' is quantized by '{method}', which "
    if not known.devices:
        said = "transformers cannot load ready-made: use another checkpoint of this model"
    elif "cpu" not in known.devices:
        said = "needs device 'cuda', and device is 'cpu': use another checkpoint"
    elif known.packages:
        packages = [install for _, install in known.packages]
        noun = "package" if len(packages) == 1 else "packages"
        said = f"needs the {noun} {' and '.join(packages)}: pip install {' '.join(packages)}, or use another checkpoint"
    else:
        require_method(path, method, "cpu")
        return
    with pytest.raises(ConfigError) as caught:
        load_pretrained(Checkpoint.open(path), torch.bfloat16)
    assert str(caught.value) == subject + said


@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_with_every_package_runs_what_transformers_loads(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be known before the weights are read."""
    monkeypatch.setattr(quantization, "is_installed", lambda name: True)
    if METHODS[method].devices:
        require_method("m", method, "cuda")
    else:
        with pytest.raises(ConfigError, match="cannot load ready-made"):
            require_method("m", method, "cuda")


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    """transformers would skip it, and take the packed weights for weights."""
    path = checkpoint(tmp_path, {"quant_method": "q17"})
    with pytest.raises(ConfigError, match="quantized by 'q17', which transformers does not know"):
        load_pretrained(Checkpoint.open(path), torch.bfloat16)


def test_both_readers_see_the_method(tmp_path: Path) -> None:
    """From the JSON files alone, and through transformers; None if there is none."""
    path = checkpoint(tmp_path, {"quant_method": "awq", "bits": 4})
    for checked in (Checkpoint.open(path), Checkpoint.ask_transformers(path)):
        assert checked.quantization is not None
        assert method_of(checked.quantization) == "awq"
    FAMILIES["llama"]().save_pretrained(tmp_path)
    assert Checkpoint.open(str(tmp_path)).quantization is None


def test_outliers_of_the_batch() -> None:
    """LLM.int8() takes out columns by what all tokens of a step hold; without a threshold it does not."""
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    assert "llm_int8_threshold is 6.0" in (batch_dependence(eight) or "")
    assert batch_dependence(eight | {"llm_int8_threshold": 0.0}) is None
    assert batch_dependence({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_threshold": 6.0}) is None
    assert batch_dependence({"quant_method": "torchao"}) is None


def test_which_weights_are_rounded() -> None:
    """Not those of a checkpoint that is quantized already."""
    require_quantization("int4", "m", None)
    with pytest.raises(ConfigError, match="model 'm' is quantized by 'gptq' already: set quantization to null to run"):
        require_quantization("int8", "m", "gptq")


def test_bytes_of_a_weight() -> None:
    """As it will run."""
    assert [weight_bytes_per_parameter(None, dtype) for dtype in ("auto", "bfloat16", "float32")] == [2, 2, 4]
    assert [weight_bytes_per_parameter(q, "auto") for q in ("int8", "int4")] == [34 / 32, 20 / 32]


def test_target_and_draft_are_quantized_apart() -> None:
    """Each by its own engine_kwargs, and not by default; other values are refused with those that are allowed."""
    models = {"model_loading_config": {"model_id": "m"}}
    args = {"target_config": models | {"engine_kwargs": {"quantization": "int8"}}, "draft_config": models}
    service = ServiceConfig.parse(args | {"draft_config": {"kind": "model", **models}})
    assert (service.target_setup().options.quantization, service.draft_setup().options.quantization) == ("int8", None)
    with pytest.raises(ConfigError, match=r"target_config\.engine_kwargs\.quantization is 'int3': it must be .*int8"):
        ServiceConfig.parse({"target_config": models | {"engine_kwargs": {"quantization": "int3"}}})
