"""What ``paceline check`` says of a model is what loading it does: both accept it, or refuse it in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families import EXCLUDED, Case, cases, class_name
from tests.support.models import letters_tokenizer, random_model
from tests.support.mutants import mutant
from tests.support.rings import nightly

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions, ServiceConfig
from paceline.errors import ConfigError
from paceline.model import dry_run
from paceline.model.dequantized import plain_config
from paceline.model.device import Placement
from paceline.model.loading import load_model
from paceline.model.parallel.plan import plan_shards
from paceline.preflight import service as checks
from paceline.preflight.findings import Severity
from paceline.preflight.service import examine

CPU = Placement(torch.device("cpu"), torch.float32)
DEGREES = (2, 3, 8)
BY_NAME = {case.name: case for case in cases()}
OTHER_WORDS = {"codegen, no plan", "gptj, no plan"}
"""Refused by both; they cannot begin a step without values."""
FEW = ("llama", "gpt2, our plan", "qwen3_moe", "doge", "bloom, no plan")


def said(folder: Path, **options: Any) -> list[str]:
    """The errors of ``paceline check`` about the target in a folder."""
    model = {"model_id": "t", "model_source": str(folder)}
    target = {"model_loading_config": model, "engine_kwargs": {"device": "cpu", "dtype": "float32", **options}}
    config = ServiceConfig.parse({"target_config": target, "draft_config": {"kind": "ngram"}})
    found = examine(config, memory=False, cores=False, ports=False, forms=True).findings
    return [one.message for one in found if one.severity is Severity.ERROR and "memory" not in one.message]


def refusal(folder: Path, **options: Any) -> str | None:
    """What loading says: of several ranks what the plan of the last one does."""
    settings = ModelOptions(device="cpu", dtype="float32", compile=False, **options)
    checkpoint, degree = Checkpoint.open(str(folder)), settings.tensor_parallel_size
    try:
        if degree > 1:
            plan_shards(plain_config(checkpoint), degree - 1, degree)
        else:
            load_model(checkpoint, settings, placement=CPU)
    except ConfigError as error:
        return str(error).removesuffix(f" ({folder})")
    return None


def assert_agrees(folder: Path, **options: Any) -> bool:
    """Returns True if the model is accepted by both."""
    reason, errors = refusal(folder, **options), said(folder, **options)
    if options.get("tensor_parallel_size", 1) > 1:
        errors = [error for error in errors if "tensor_parallel_size" in error]
    outcome = f"{options}: loading: {reason or 'accepted'}; check: {errors or 'accepted'}"
    assert (reason is None) == (not errors), outcome
    assert reason is None or folder.name in OTHER_WORDS or any(reason in error for error in errors), outcome
    return reason is None


def saved(case: Case, folder: Path) -> Path:
    config = case.config(architectures=[class_name(case.family)])
    random_model(config).save_pretrained(folder)
    letters_tokenizer(200).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("names", [FEW, *nightly([(tuple(BY_NAME),)])], ids=["few", "all"])
def test_a_family_is_accepted_by_both_or_refused_by_both(names: tuple[str, ...], tmp_path: Path) -> None:
    outcomes = {}
    for name in names:
        folder = saved(BY_NAME[name], tmp_path / name)
        outcomes[name] = assert_agrees(folder)
        for degree in DEGREES if outcomes[name] else ():
            outcomes[f"{name} on {degree}"] = assert_agrees(folder, tensor_parallel_size=degree)
    assert {name for name in names if not outcomes[name]} == EXCLUDED.keys() & {*names}
    assert {*outcomes.values()} == {True, False}


SETTINGS: list[tuple[str, dict[str, Any], bool]] = [
    ("llama", {"quantization": "int8"}, True),
    ("llama", {"quantization": "int4", "kv_cache_dtype": "fp8"}, True),
    ("llama4_text", {"quantization": "int8"}, True),
    ("gpt2, our plan", {"quantization": "int8"}, False),
    ("jamba", {"quantization": "int8"}, False),
    ("llama", {"attention": "triton"}, False),
    ("llama", {"cuda_graphs": True}, False),
    ("deepseek_v4", {"kv_cache_dtype": "fp8"}, False),
]
"""A family, options, and whether they go together."""
STORED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"quant_method": "torchao"}, {}),
    ({"quant_method": "unknown"}, {}),
    ({"quant_method": "modelopt", "quant_algo": "W4A8"}, {}),
    ({"quant_method": "fp8"}, {"quantization": "int8"}),
]
"""A quantization that weights would come with, and options that they do not run with."""


@pytest.mark.parametrize(("name", "options", "runs"), SETTINGS)
def test_options_are_accepted_by_both_or_refused_by_both(
    name: str, options: dict[str, Any], runs: bool, tmp_path: Path
) -> None:
    assert assert_agrees(saved(BY_NAME[name], tmp_path), **options) == runs


def with_stored(folder: Path, stored: dict[str, Any]) -> Path:
    saved(BY_NAME["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    return folder


@pytest.mark.parametrize(("stored", "options"), STORED)
def test_weights_that_do_not_run_are_refused_by_both(
    stored: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    assert not assert_agrees(with_stored(tmp_path, stored), **options)


@mutant(dry_run, "require_split")
def degrees_are_not_asked_for(original: Any, *_: Any, **__: Any) -> None:
    """Any number of ranks is fine."""


@mutant(dry_run, "require_loadable")
def models_are_not_built(original: Any, *_: Any, **__: Any) -> None:
    """Any model is fine."""


@mutant(checks, "require_weights")
def stored_weights_are_not_asked_for(original: Any, *_: Any, **__: Any) -> None:
    """Any quantization is fine."""


def test_a_check_that_does_not_ask_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, doge = (saved(BY_NAME[name], tmp_path / name) for name in ("llama", "doge"))
    stored = with_stored(tmp_path / "stored", STORED[-1][0])
    for change, folder, options in (
        (degrees_are_not_asked_for, llama, {"tensor_parallel_size": 3}),
        (models_are_not_built, doge, {}),
        (stored_weights_are_not_asked_for, stored, STORED[-1][1]),
    ):
        assert not assert_agrees(folder, **options)
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(AssertionError, match="check: accepted"):
                assert_agrees(folder, **options)
