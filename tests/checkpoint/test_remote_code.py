"""Python code that comes with a checkpoint: it never runs unless it is trusted, and nobody is asked on a terminal."""

import ast
import builtins
import json
import shutil
from pathlib import Path

import pytest
from tests.support.models import save_pair

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.main import main
from paceline.config import LocalConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.preflight.service import check_service
from paceline.types import SamplingParams

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).write_text("run")

class OwnConfig(LlamaConfig):
    model_type = "own-model"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that the code of ``own`` writes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def ask(*_):
        raise AssertionError("somebody was asked on the terminal")

    monkeypatch.setattr(builtins, "input", ask)
    return tmp_path / "marker"


def own(pair, marker, kinds):
    """A copy of the target whose ``kinds`` ("model", "tokenizer") need code of their own."""
    folder = marker.parent / "own"
    shutil.copytree(pair / "target", folder)
    (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
    if "model" in kinds:
        config = json.loads((folder / "config.json").read_text())
        auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
        config |= {"model_type": "own-model", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
        (folder / "config.json").write_text(json.dumps(config))
    if "tokenizer" in kinds:
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text()) if file.exists() else {}
        settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}}
        file.write_text(json.dumps(settings))
    return folder


def pipeline_of(pair, **models):
    options = {"dtype": "float32", "compile": False}
    models = {"target": {"path": str(pair / "target")}, "draft": {"path": str(pair / "draft")}} | models
    return LocalPipeline(
        LocalConfig.model_validate({name: options | model for name, model in models.items()} | {"worker": "thread"})
    )


def test_a_type_without_a_class_for_text_is_refused_when_it_is_sized(tmp_path, capsys):
    config = {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    config |= {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}, "num_hidden_layers": 2}
    config |= {"max_position_embeddings": 64, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["check", str(tmp_path)])
    assert f"{str(tmp_path)!r} brings Python code of its own, which is not run unless" in capsys.readouterr().out


@pytest.mark.parametrize("kinds", [("model",), ("tokenizer",), ("model", "tokenizer")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_it_is_refused_in_a_sentence_and_not_run(pair, marker, role, kinds):
    folder = own(pair, marker, kinds)
    with (
        pytest.raises(ConfigError, match=r"engine_kwargs\.trust_remote_code"),
        pipeline_of(pair, **{role: {"path": str(folder)}}),
    ):
        pass
    assert not marker.exists()


def test_a_class_of_transformers_under_another_model_type_is_named(tmp_path):
    """Its configuration names code, and a class that transformers has."""
    config = {"model_type": "own_v3", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "c.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "if its model is transformers' own DeepseekV3ForCausalLM, serve a copy .* has model_type 'deepseek_v3'$"
    with pytest.raises(ConfigError, match=said):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize("kinds", [("model",), ("tokenizer",)])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_check_refuses_it_at_once(pair, marker, role, kinds, capsys):
    folder = own(pair, marker, kinds)
    other = {"target": "draft", "draft": "target"}[role]
    models = [f"--{role}", str(folder), f"--{other}", str(pair / other)]
    assert main(["check", *models, "--no-compile"]) == 1
    said = capsys.readouterr().out
    assert "engine_kwargs.trust_remote_code" in said
    assert f"{role}_config.model_loading_config" in said
    assert not marker.exists()
    config = ServiceConfig.model_validate(
        {
            f"{name}_config": {"model_loading_config": {"model_id": "m", "model_source": str(path)}}
            | ({"engine_kwargs": {"trust_remote_code": True}} if name == role else {})
            for name, path in ((role, folder), (other, pair / other))
        }
    )
    assert not [finding for finding in check_service(config) if "trust_remote_code" in finding.message]


def test_the_command_asks_nobody(pair, marker, capsys):
    folder = own(pair, marker, ("model", "tokenizer"))
    assert main(["generate", "x", "--target", str(folder), "--draft", str(pair / "draft"), "--no-compile"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "trust_remote_code" in sentence
    assert not marker.exists()


def test_trust_in_one_model_is_not_trust_in_the_other(pair, marker):
    folder = own(pair, marker, ("model",))
    trusted = {"path": str(pair / "target"), "trust_remote_code": True}
    with (
        pytest.raises(ConfigError, match="trust_remote_code"),
        pipeline_of(pair, target=trusted, draft={"path": str(folder)}),
    ):
        pass
    assert not marker.exists()


def test_trusted_code_runs_and_serves_the_same_tokens(pair, marker):
    folder = own(pair, marker, ("model", "tokenizer"))
    with pipeline_of(pair, target={"path": str(folder), "trust_remote_code": True}) as pipeline:
        tokens = pipeline.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True)).result.token_ids
    assert marker.exists()
    with pipeline_of(pair) as pipeline:
        assert pipeline.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True)).result.token_ids == tokens


def test_a_checkpoint_opened_with_trust_keeps_it(pair, marker):
    folder = own(pair, marker, ("model", "tokenizer"))
    assert Checkpoint.open(str(folder), True).tokenizer.vocab_size == load_tokenizer(str(pair / "target")).vocab_size
    assert marker.exists()


def untrusting(tree):
    """Lines of calls of transformers' Auto classes that do not say whether code is trusted."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("from_pretrained", "from_config")
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id.startswith("Auto")
            and not any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
        ):
            yield node.lineno


def test_every_call_that_could_run_code_says_whether_it_may():
    assert [
        *untrusting(ast.parse("AutoConfig.from_pretrained(x)\nAutoModel.from_config(c, trust_remote_code=False)"))
    ] == [1]
    files = [file for folder in ("services", "benchmarks") for file in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 100
    assert [f"{file}:{line}" for file in files for line in untrusting(ast.parse(file.read_text()))] == []
