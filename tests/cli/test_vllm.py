"""Commands as vLLM's users type them: the model first, flags by vLLM's names, and drafting without a draft named.

Mutants: ``is_embedded`` that is always true; ``choose`` that looks at no names of weights; a flag that sets another
key; a file of keys that holds the key itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import save_pair
from tests.support.refusals import refusal_of
from transformers import AutoConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.mtp import mtp_modules, weight_names
from paceline.cli import chat, generate
from paceline.cli.flags import take_model_argument
from paceline.cli.generate import local_config
from paceline.cli.serve import add_config_flags, read_config
from paceline.config import ServiceConfig
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.security.keys import KeyRing


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target without heads."""
    return save_pair(tmp_path_factory.mktemp("models")) / "target"


@pytest.fixture(scope="module")
def with_mtp(folder, tmp_path_factory) -> Path:
    """The same files, with a weight of an MTP module."""
    other = tmp_path_factory.mktemp("mtp")
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(2, 2)}, other / "model.safetensors", metadata={"format": "pt"})
    return other


def served(*flags: str) -> ServiceConfig:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return read_config(parser.parse_args(list(flags)))


@pytest.mark.parametrize("how", [("{}",), ("--target", "{}"), ("--model", "{}")])
def test_a_target_alone_drafts_by_suffixes_and_says_so(folder, capsys, how):
    config = served(*(part.format(folder) for part in how))
    assert config.target_config.model_loading_config.source == str(folder)
    assert config.draft_config is None
    assert [head.method for head in config.target_config.engine_kwargs.heads] == ["suffix"]
    assert capsys.readouterr().err == (
        "paceline: drafting by suffix decoding and prompt lookup; name a draft model with --draft for more\n"
    )


def test_a_target_with_mtp_modules_drafts_by_them(with_mtp, capsys):
    written = json.loads((with_mtp / "config.json").read_text())
    assert mtp_modules(weight_names(with_mtp), written, 2) == {0}
    config = served(str(with_mtp))
    assert config.draft_config is None
    assert config.target_config.engine_kwargs.heads == []  # mtp_modules: auto
    assert "drafting by the 1 MTP module in the model's files" in capsys.readouterr().err


def test_what_is_named_is_what_drafts(folder, capsys):
    draft = served(str(folder), "--draft", str(DRAFT_DIR)).draft_config
    assert draft is not None
    assert draft.kind == "model"
    assert served(str(folder), "--drafter", "ngram").draft_config.kind == "ngram"  # type: ignore[union-attr]
    assert served(str(folder), "--drafter", "none").target_config.engine_kwargs.heads == []
    lookahead = served(str(folder), "--head", "lookahead").target_config.engine_kwargs.heads
    assert [head.method for head in lookahead] == ["lookahead"]
    key = "target_config.engine_kwargs.heads"
    assert served(str(folder), "--set", f"{key}=[]").target_config.engine_kwargs.heads == []
    assert served("--max-num-seqs", "3").draft_config.kind == "model"  # type: ignore[union-attr]  # the embedded pair
    assert served(str(TARGET_DIR)).draft_config.kind == "model"  # type: ignore[union-attr]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", [("--placement", "auto"), ("--drafts", "2")])
def test_a_draft_that_is_not_named_is_not_placed(folder, flags):
    with pytest.raises(ConfigError, match=f"^{flags[0]} is given without --draft and --drafter"):
        served(str(folder), *flags)


@pytest.mark.parametrize("command", [generate, chat])
def test_engines_in_the_process_do_the_same(folder, capsys, command):
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    first = ["hi", "--target"] if command is generate else []
    args = parser.parse_args([*first, str(folder), "--max-model-len", "77"])
    if command is chat:
        take_model_argument(args)
    config = local_config(args)
    assert (config.target.path, config.draft) == (str(folder), None)
    assert config.target.max_model_len == 77
    assert [head.method for head in config.target.heads] == ["suffix"]
    assert "drafting by suffix decoding" in capsys.readouterr().err
    assert local_config(args, with_draft=False).target.heads == []


def test_each_flag_sets_its_key(folder, tmp_path):
    flags = (
        "--max-model-len 99 --max-num-seqs 5 --max-num-batched-tokens 64 --gpu-memory-utilization 0.5 --port 8100 "
        "--host 0.0.0.0 --dtype float32 --tensor-parallel-size 2 --enable-prefix-caching --served-model-name mine yours"
        " --kv-cache-dtype fp8"
    )
    config = served(str(folder), *flags.split())
    engine = config.target_config.engine_kwargs
    assert (engine.max_model_len, engine.max_sessions, engine.max_step_tokens, engine.kv_fraction) == (99, 5, 64, 0.5)
    assert (engine.dtype, engine.tensor_parallel_size, engine.kv_cache_dtype) == ("float32", 2, "fp8")
    assert (config.server.http_port, config.server.host) == (8100, "0.0.0.0")
    assert config.server.served_model_name == ("mine", "yours")
    assert config.target_config.model_loading_config.source == str(folder)


def test_keys_of_the_command_line_are_kept_as_digests(folder):
    path = Path(served("--api-key", "one", "two").server.api_keys or "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "one" not in path.read_text()
    ring = KeyRing(path)
    assert [ring.find(key) is not None for key in ("one", "two", "three", "")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("given", "kind", "heads"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}, "ngram", []),
        ({"method": "suffix"}, "suffix", []),
        ({"model": "/draft", "num_speculative_tokens": 3}, None, [("draft_model", "/draft", 3)]),
        ({"method": "eagle3", "model": "/head", "num_speculative_tokens": 2}, None, [("eagle3", "/head", 2)]),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, None, [("mtp", None, 1)]),
    ],
)
def test_vllm_s_speculation_is_ours(folder, given, kind, heads):
    config = served(str(folder), "--speculative-config", json.dumps(given))
    assert (config.draft_config and config.draft_config.kind) == kind
    found = config.target_config.engine_kwargs.heads
    assert [(head.method, head.model, head.num_speculative_tokens) for head in found] == heads
    if kind == "ngram":
        options = config.draft_config.engine_kwargs  # type: ignore[union-attr]
        assert (options.max_match, options.min_match) == (5, 2)  # type: ignore[union-attr]


def test_code_of_a_checkpoint_is_allowed_by_its_key_before_anything_else_asks(folder, tmp_path):
    """Of a model type that transformers does not know."""
    other = Path(shutil.copytree(folder, tmp_path / "own"))
    config = json.loads((other / "config.json").read_text()) | {
        "model_type": "own-model",
        "auto_map": {"AutoConfig": "a.B"},
    }
    (other / "config.json").write_text(json.dumps(config))
    key = "target_config.engine_kwargs.trust_remote_code"
    assert served(str(other), "--set", f"{key}=true").target_config.engine_kwargs.trust_remote_code
    assert "is not run unless engine_kwargs.trust_remote_code is true" in refusal_of("check", str(other))
    assert f"only with --set {key}=true" in refusal_of("check", str(other), "--trust-remote-code")


YARN = {"rope_type": "yarn", "factor": 4.0}


def rope_of(folder: Path, *flags: str) -> tuple[dict, Checkpoint]:
    """The config.json that a service with these flags reads, and its checkpoint."""
    loading = served(str(folder), *flags).target_config.model_loading_config
    assert loading.model_id == folder.name, "clients know it by the name that was typed"
    return json.loads((Path(loading.source) / "config.json").read_text()), Checkpoint.open(loading.source)


@pytest.mark.parametrize(
    "flags",
    [
        ("--rope-scaling", json.dumps(YARN)),
        ("--rope-scaling", json.dumps({"type": "yarn", "factor": 4})),
        ("--hf-overrides", json.dumps({"rope_parameters": YARN})),
        ("--hf-overrides", json.dumps({"rope_scaling": YARN})),
    ],
)
@pytest.mark.parametrize("legacy", [False, True])
def test_rotary_embeddings_from_outside_are_those_of_a_changed_config(folder, tmp_path, monkeypatch, flags, legacy):
    """YaRN as model cards have it: four times the context, the base as it was; read by transformers as written."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5e5} if legacy else {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (copy / "config.json").write_text(json.dumps(config))
    found, checkpoint = rope_of(copy, *flags)
    longest = config["max_position_embeddings"]
    expected = {"rope_theta": 5e5, **YARN, "original_max_position_embeddings": longest}
    assert found["rope_parameters"] == expected
    assert checkpoint.max_model_len == 4 * longest
    assert checkpoint.size() == Checkpoint.open(str(copy)).size(), "the weights are linked"
    read = AutoConfig.from_pretrained(checkpoint.location).rope_parameters
    assert {key: read[key] for key in expected} == expected
    assert json.loads((copy / "config.json").read_text()) == config, "the model itself is left alone"


def test_single_numbers_of_rotary_embeddings_are_replaced_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    own = json.loads((folder / "config.json").read_text())
    found, checkpoint = rope_of(folder, "--rope-theta", "12345", "--hf-overrides", '{"max_position_embeddings": 96}')
    assert found["rope_parameters"] == {**own["rope_parameters"], "rope_theta": 12345}
    assert checkpoint.max_model_len == 96
    assert rope_of(folder, "--rope-theta", "12345", "--hf-overrides", '{"max_position_embeddings": 96}')[0] == found
