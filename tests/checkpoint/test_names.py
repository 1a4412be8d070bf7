"""What names of models are refused without asking the hub, what is asked in seconds, and how long a context is.

Mutants: no rule for the hub's own paths, for a directory's owner, for endings; ``require_fetchable`` that returns;
``context_length`` without YaRN, and with the ``factor`` of any kind.
"""

import json
import re
from types import SimpleNamespace

import pytest
from tests.support.models import save_pair

from paceline.checkpoint import hub
from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import Checkpoint, context_length
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import ModelOptions
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError
from paceline.model.loading import load_model


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The number of questions to the hub, which does not answer; the working directory holds ``mine/real``."""
    questions: list[int] = []

    def why() -> str:
        questions.append(1)
        return "https://hub does not answer (no route to host)"

    monkeypatch.setattr(hub, "why_not_fetched", why)
    (tmp_path / "mine" / "real").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return questions


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("models/nonesuch", ""),
        ("datasets/nonesuch", ""),
        ("mine/nonesuch", ""),
        ("mine/reel", ": did you mean 'mine/real'?"),
        ("./nonesuch", ""),
        ("../nonesuch", ""),
        (".cache", ""),
        ("/nonesuch/model", ""),
        ("~/nonesuch", ""),
        ("nonesuch/", ""),
        ("a/b/c", ""),
        ("C:\\models\\llama", ""),
        ("nonesuch.gguf", ""),
        ("owner/model.safetensors", ""),
        ("pytorch_model.bin", ""),
    ],
)
def test_a_mistyped_path_is_refused_without_the_hub(asked, name, hint):
    for open_ in (Checkpoint.open, load_tokenizer, load_chat, Checkpoint.find):
        with pytest.raises(ConfigError) as refusal:
            open_(name)
        assert str(refusal.value) == f"model path {name!r} does not exist{hint}"
    assert not asked


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "gpt2", "owner/model.v2", "owner/my-GGUF"])
def test_an_id_that_cannot_be_fetched_is_refused_after_one_question(asked, name):
    for num_asked, open_ in enumerate((Checkpoint.open, load_tokenizer, load_chat), start=1):
        with pytest.raises(ConfigError) as refusal:
            open_(name)
        assert str(refusal.value) == (
            f"{name!r} is neither a directory nor in the Hugging Face cache, and cannot be fetched: https://hub does "
            "not answer (no route to host); name a directory, or fetch it where there is a network"
        )
        assert len(asked) == num_asked


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("smolm2", "smollm2"),
        ("SmolLM2", "smollm2"),
        ("paceline/embeded-target", "paceline/embedded-target"),
        ("embedded-target", "paceline/embedded-target"),
    ],
)
def test_a_mistyped_name_of_the_package_is_refused_with_the_right_one(asked, name, near):
    with pytest.raises(ConfigError, match=re.escape(f"; did you mean {near!r}?")):
        Checkpoint.open(name)
    assert len(asked) == 1


def test_an_id_of_the_package_is_its_directory():
    assert Checkpoint.open("paceline/embedded-target").folder == TARGET_DIR


@pytest.mark.parametrize("name", ["a b", "a?b", "a--b/.."])
def test_what_can_be_no_id_is_refused_without_the_hub(asked, name):
    with pytest.raises(ConfigError, match="is neither a directory nor a model id"):
        Checkpoint.open(name)
    assert not asked


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", **YARN}}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", **YARN}}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", **YARN}}, 131072),
        (
            {"max_position_embeddings": 32768, "rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
            131072,
        ),
        ({"max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", **YARN}}, 163840),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", **YARN}}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": None}, 8192),
        ({}, None),
    ],
)
def test_yarn_stretches_the_context_that_the_model_was_trained_for(config, length):
    assert context_length(SimpleNamespace(**config)) == length


def test_both_readers_of_a_checkpoint_and_the_loaded_model_agree_on_the_length(tmp_path):
    folder = save_pair(tmp_path) / "target"
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(str(folder)).max_model_len == 8192
    assert Checkpoint.ask_transformers(str(folder)).max_model_len == 8192
    assert load_model(Checkpoint.open(str(folder)), ModelOptions(compile=False, dtype="float32")).max_len == 8192
