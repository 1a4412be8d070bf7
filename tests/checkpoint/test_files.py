"""What is known of a checkpoint: the same from its files as from transformers."""

import json
import pickle
from collections import Counter

import pytest
from tests.support.models import FAMILIES, save_pair

from paceline.checkpoint import files
from paceline.checkpoint.files import Checkpoint
from paceline.config import DraftOptions, DraftSetup, TargetOptions, TargetSetup
from paceline.draft.build import build_draft_engine
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.target.build import build_target_engine


@pytest.mark.parametrize("family", FAMILIES)
def test_both_readers_agree(tmp_path, family):
    config = FAMILIES[family]()
    config.architectures = [_architecture(config)]
    config.save_pretrained(tmp_path)
    for eos in (None, 3, [3, 4]):
        if eos is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert Checkpoint.open(str(tmp_path)) == Checkpoint.ask_transformers(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read: Expecting"), ("[1]", r"holds \[1\]: a JSON object is needed"), ("\xff", "cannot be read")],
)
def test_sampling_defaults_that_cannot_be_read_are_refused(tmp_path, text, said):
    """Ignored, its end-of-sequence tokens would be lost, and answers would not end."""
    save_pair(tmp_path)
    path = tmp_path / "target" / "generation_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"generation_config.json of .* {said}"):
        Checkpoint.open(str(tmp_path / "target"))
    for empty in ("{}", None):
        path.unlink() if empty is None else path.write_text(empty)
        assert Checkpoint.open(str(tmp_path / "target")).generation_config == {}


@pytest.mark.parametrize("eos", ["12", ["a"], {}])
def test_ends_that_are_no_ids_are_read_right_or_refused(tmp_path, eos):
    save_pair(tmp_path)
    path = tmp_path / "target" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": eos}))
    if eos == "12":
        assert Checkpoint.open(str(tmp_path / "target")).eos_token_ids == (12,)
    else:
        with pytest.raises(ConfigError, match=r"eos_token_id is .*: a token id, or a list of them, is allowed"):
            Checkpoint.open(str(tmp_path / "target"))


def _architecture(config):
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"


@pytest.mark.parametrize("directory", [TARGET_DIR, DRAFT_DIR])
def test_the_embedded_pair_is_read_from_its_files(directory, monkeypatch):
    expected = Checkpoint.ask_transformers(str(directory))
    monkeypatch.setattr(Checkpoint, "ask_transformers", None)
    assert Checkpoint.open(str(directory)) == expected


@pytest.mark.parametrize("reader", [Checkpoint.open, Checkpoint.ask_transformers])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "no-such-type"}'])
def test_a_configuration_that_says_nothing_is_one_sentence(tmp_path, reader, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="could not be resolved") as caught:
        reader(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["x", [1], 5, {}, {"vocab_size": 9}])
def test_a_text_model_within_a_text_model_is_refused(tmp_path, value):
    content = json.loads((TARGET_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"text_config": value}))
    with pytest.raises(ConfigError, match="text_config"):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_an_engine_is_built_from_one_opening_of_each_checkpoint(tmp_path, monkeypatch, kind):
    """Preflight, loading and the engine share the value; no file of ours is read a second time."""
    save_pair(tmp_path)
    folders = {name: str(tmp_path / name) for name in ("target", "draft")}
    opened, read = Counter(), Counter()
    open_checkpoint, read_json, count_weights = Checkpoint.open, files.read_json, files.count_weights

    def opens(source, trust_remote_code=False):
        opened[source] += 1
        return open_checkpoint(source, trust_remote_code)

    def reads(folder, name):
        read[str(folder), name] += 1
        return read_json(folder, name)

    def counts(folder, packing, model_type):
        read[str(folder), "headers"] += 1
        return count_weights(folder, packing, model_type)

    monkeypatch.setattr(Checkpoint, "open", opens)
    monkeypatch.setattr(files, "read_json", reads)
    monkeypatch.setattr(files, "count_weights", counts)
    run = {"dtype": "float32", "compile": False, "device": "cpu"}
    options = TargetOptions(max_sessions=1, max_model_len=64, max_step_tokens=32, **run)
    target = TargetSetup(folders["target"], options, tree_budget=16)
    if kind == "target":
        build_target_engine(target, print)
        expected = {folders["target"]: 1}
    else:
        growing = DraftOptions(tree_budget=16, tree_step_tokens=4, **run)
        build_draft_engine(DraftSetup.for_target(target, folders["draft"], growing), print)
        expected = dict.fromkeys(folders.values(), 1)
    assert opened == expected
    assert read[folders[kind], "config.json"] == read[folders[kind], "headers"] == 1
    assert set(read.values()) == {1}


def test_a_checkpoint_is_a_value(tmp_path):
    checkpoint = Checkpoint.open(str(TARGET_DIR))
    tokens = checkpoint.tokenizer.encode("def f(x):")
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again == checkpoint
    assert again.tokenizer.encode("def f(x):") == tokens
    assert again.size() == checkpoint.size()
    assert checkpoint.tokenizer is checkpoint.tokenizer
