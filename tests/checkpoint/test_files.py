"""What is known of a checkpoint: the same from its files as from transformers."""

from __future__ import annotations

import json

import pytest
from tests.support.models import FAMILIES

from paceline.checkpoint import files as checkpoints
from paceline.checkpoint.files import inspect_checkpoint, read_checkpoint
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError


@pytest.mark.parametrize("family", FAMILIES)
def test_both_readers_agree(tmp_path, family):
    config = FAMILIES[family]()
    config.architectures = [_architecture(config)]
    config.save_pretrained(tmp_path)
    for eos in (None, 3, [3, 4]):
        if eos is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert read_checkpoint(str(tmp_path)) == inspect_checkpoint(str(tmp_path))


def _architecture(config):
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"


@pytest.mark.parametrize("directory", [TARGET_DIR, DRAFT_DIR])
def test_the_embedded_pair_is_read_from_its_files(directory, monkeypatch):
    expected = inspect_checkpoint(str(directory))
    monkeypatch.setattr(checkpoints, "inspect_checkpoint", None)
    assert read_checkpoint(str(directory)) == expected


@pytest.mark.parametrize("reader", [read_checkpoint, inspect_checkpoint])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "no-such-type"}'])
def test_a_configuration_that_says_nothing_is_one_sentence(tmp_path, reader, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="could not be resolved") as caught:
        reader(str(tmp_path))
    assert "\n" not in str(caught.value)
