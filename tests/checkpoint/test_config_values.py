"""Damaged config.json files: refused in one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.packed import FORMATS

from paceline.checkpoint.config_values import require_values
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import why_not_runnable
from paceline.checkpoint.packing import require_weights, why_whole
from paceline.checkpoint.rope import factors_in_use
from paceline.checkpoint.size import WeightCounts
from paceline.errors import ConfigError, PacelineError

NUM_CASES = 400
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
_OTHERS: list[dict[str, Any]] = [
    {"rope_parameters": _YARN},
    {"rope_theta": 1e4, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [4.0]}},
    {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
    {"model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    {"model_type": "deepseek_v4", "compress_ratios": [0, 4], "hc_mult": 4, "n_routed_experts": 4},
    {"model_type": "dots3_note", "layer_types": ["indexed_attention", ""], "per_layer_config": {"1": {}}},
    {"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1], "num_heads": 4, "head_dim": 16}},
    {"model_type": "nemotron_h", "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "n_groups": 2},
    {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 32, "n_mamba_heads": 4},
    {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LG"},
    {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_depth": 1.4, "dim_model_base": 16},
]
BASES = [
    _LLAMA,
    *(_LLAMA | other for other in _OTHERS),
    *(_LLAMA | {"quantization_config": given} for given, *_ in FORMATS.values()),
    {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": _LLAMA},
]
HOSTILE: list[Any] = [
    None, True, -1, 0, 1.5, 10**12, float("inf"), "", "x", "4", "LLLG", [], [1], ["a"], [None], [[1, 2], [3]], [0] * 3,
    {}, {"a": 1}, {"0": 3}, {"text_config": []}, _YARN, {"type": "yarn", "factor": "4"},
]  # fmt: skip
ADDED = ("text_config", "quantization_config", "rope_scaling", "layer_types", "auto_map")


def places(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each key of a configuration and of the tables in it, with its table."""
    for key, value in table.items():
        yield table, key
        if isinstance(value, dict):
            yield from places(value)


def damaged(generator: random.Random) -> dict[str, Any]:
    """One of ``BASES`` with one to three keys changed, gone or added."""
    config = copy.deepcopy(generator.choice(BASES))
    for _ in range(generator.choice((1, 1, 2, 3))):
        table, key = generator.choice([*places(config)])
        match generator.randrange(4):
            case 0:
                del table[key]
            case 1:
                config[generator.choice(ADDED)] = copy.deepcopy(generator.choice(HOSTILE))
            case _:
                table[key] = copy.deepcopy(generator.choice(HOSTILE))
        if not config:
            return config
    return config


def refusal(folder: Path, config: dict[str, Any]) -> str | None:
    """The error of reading a configuration; None if there is none."""
    try:
        read(folder, config)
    except PacelineError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}: {json.dumps(config)}") from error
    return None


def read(folder: Path, config: dict[str, Any]) -> None:
    """Reads a configuration in all ways that need no weights."""
    (folder / "config.json").write_text(json.dumps(config))
    opened = replace(Checkpoint.open(str(folder)), counted=WeightCounts(10_000, 100, 0, 0))
    opened.size()
    opened.size(on_gpu=True, quantization="int8", kv_cache_dtype="fp8")
    factors_in_use(opened.config, 4096)
    why_whole(opened.quantization, opened.path)
    require_weights(opened.quantization, None, opened.path, "cpu")
    why_not_runnable(opened.config, opened.quantization, device="cpu", quantization=None, kv_cache_dtype="fp8")


def test_a_damaged_configuration_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "model").mkdir()
    generator = random.Random(7)
    found = [refusal(folder, damaged(generator)) for _ in range(NUM_CASES)]
    refused = [said for said in found if said is not None]
    assert NUM_CASES // 4 < len(refused) < NUM_CASES
    assert [said for said in refused if "\n" in said] == []


_GROUPS = {"config_groups": {"group_0": {"weights": "int4"}}}


@pytest.mark.parametrize(
    ("change", "key", "value", "allowed"),
    [
        ({"num_hidden_layers": "2"}, "num_hidden_layers", "2", "0 to 1,024 is"),
        ({"num_attention_heads": -4}, "num_attention_heads", -4, "a whole number from 0 to 16,777,216 is"),
        ({"layer_types": ["full"]}, "layer_types", ["full"], "a word for each of the 2 layers (num_hidden_layers) is"),
        ({"rope_scaling": {"factor": "4"}}, "rope_scaling.factor", "4", "a number above 0 is"),
        ({"text_config": {"head_dim": 1.5}}, "text_config.head_dim", 1.5, "a whole number from 0 to 16,777,216 is"),
        (
            {"quantization_config": _GROUPS},
            "quantization_config.config_groups.group_0.weights",
            "int4",
            "a table of keys is",
        ),
        (
            {"quantization_config": {"weight_block_size": [128]}},
            "quantization_config.weight_block_size",
            [128],
            "a list of two sizes is",
        ),
    ],
)
def test_the_key_the_value_and_what_is_allowed_are_named(
    change: dict[str, Any], key: str, value: Any, allowed: str, tmp_path: Path
) -> None:
    said = f"{key} is {value!r} in config.json of {str(tmp_path)!r}: {allowed}"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)} (allowed|needed)$"):
        require_values(_LLAMA | change, tmp_path)


def test_what_is_published_is_allowed(tmp_path: Path) -> None:
    for config in BASES:
        require_values(config, tmp_path)
