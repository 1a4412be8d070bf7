"""What cannot run is refused with the reason; what can is described correctly."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.model.families import small_config
from tests.support.models import FAMILIES, SLIDING_WINDOW, VOCAB, random_model
from transformers import AutoModelForCausalLM, BertConfig, BertModel, MambaConfig, PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.config import ModelOptions
from paceline.errors import ConfigError
from paceline.model.device import resolve_device, resolve_dtype
from paceline.model.kv_cache import LayerSpec
from paceline.model.loading import load_model, load_pretrained, prepare


def saved(model: PreTrainedModel, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_loaded_model_says_of_itself(family: str, tmp_path: Path) -> None:
    """Layers, window, vocabulary and positions, from a checkpoint on disk."""
    model = load_model(
        Checkpoint.open(saved(random_model(family), tmp_path)), ModelOptions(dtype="float32", compile=False)
    )
    heads, dim = {"phi3": (4, 16), "gpt2": (4, 16), "llama": (2, 16), "mistral": (2, 16)}.get(family, (2, 32))
    assert model.layers == [LayerSpec(heads, dim, dim)] * (3 if family == "gemma3" else 2)
    assert model.sliding_window == (SLIDING_WINDOW if family in ("gemma3", "gemma2", "mistral") else None)
    assert (model.vocab_size, model.max_len, model.dtype) == (VOCAB, 2048, torch.float32)
    assert model.size.num_parameters > 10_000
    assert model.layers[0].kv_bytes(torch.bfloat16) == 2 * heads * 2 * dim


def test_a_missing_path_is_named() -> None:
    """Nothing there, or no checkpoint in it."""
    with pytest.raises(ConfigError, match=r"'/nowhere/at/all' does not exist"):
        load_pretrained(Checkpoint.open("/nowhere/at/all"), torch.float32)


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    """config.json is asked for by name; weights that are missing are too."""
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32)
    random_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="could not be loaded"):
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32)


def with_layers(model: PreTrainedModel, num_layers: int, path: Path) -> str:
    """A checkpoint whose configuration has another number of layers than its weights."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return str(path)


def test_parameters_that_no_file_holds_are_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They would be random numbers; transformers only prints a table of them."""
    path = with_layers(random_model("llama"), 12, tmp_path)
    capfd.readouterr()
    with pytest.raises(ConfigError) as caught:
        load_pretrained(Checkpoint.open(path), torch.float32)
    first = ", ".join(f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkv")
    assert str(caught.value) == f"model '{tmp_path}' is not whole: no weight file holds {first} and 87 more"
    assert capfd.readouterr().err == ""


def test_parameters_of_other_shapes_are_refused_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers names none of them."""
    random_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    capfd.readouterr()
    with pytest.raises(ConfigError) as caught:
        load_pretrained(Checkpoint.open(str(tmp_path)), torch.float32)
    n, d = config["vocab_size"], config["hidden_size"]
    text = str(caught.value)
    assert text.startswith(f"model '{tmp_path}' has weights of other shapes than its config.json: ")
    assert f"model.embed_tokens.weight [{n}, {d}] where config.json makes [{n + 1}, {d}]" in text
    assert capfd.readouterr().err == ""


def test_parameters_that_have_no_place_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, with the first few names."""
    path = with_layers(random_model("llama"), 1, tmp_path)
    capfd.readouterr()
    load_pretrained(Checkpoint.open(path), torch.float32)
    (record,) = [record for record in caplog.records if record.name.startswith("paceline")]
    assert record.levelname == "WARNING"
    assert (
        "ignoring unexpected weights: model.layers.1.input_layernorm.weight, model.layers.1.mlp" in record.getMessage()
    )
    assert record.getMessage().endswith(" and 6 more")
    assert "LOAD REPORT" not in capfd.readouterr().err


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_tied_weights_are_not_missing(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One tensor in the file, two parameters of the model."""
    config = FAMILIES[family]()
    config.tie_word_embeddings = True
    model = random_model(config)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    again = load_pretrained(Checkpoint.open(saved(model, tmp_path)), torch.float32)
    assert torch.equal(again.get_output_embeddings().weight, model.get_input_embeddings().weight)
    assert not caplog.records


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    """A weight file instead of its directory."""
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="is a file"):
        load_pretrained(Checkpoint.open(str(tmp_path / "model.safetensors")), torch.float32)


def test_an_encoder_is_no_causal_language_model(tmp_path: Path) -> None:
    """With its architecture."""
    bert = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16))
    with pytest.raises(ConfigError, match=r"not a causal language model: its architecture is BertModel"):
        load_pretrained(Checkpoint.open(saved(bert, tmp_path)), torch.float32)


def test_layers_without_attention_are_refused() -> None:
    """A state-space model keeps no KV."""
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*(attention|layers)"):
        prepare(AutoModelForCausalLM.from_config(config), compile=False)


def test_dynamic_angles_are_fixed_up_to_the_longest_context_and_refused_beyond() -> None:
    """There their output would depend on the neighbours."""
    config = FAMILIES["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = AutoModelForCausalLM.from_config(config)
    angles = model.model.rotary_emb.inv_freq.clone()
    prepare(model, compile=False)
    model.model.rotary_emb(torch.zeros(1), torch.tensor([[config.max_position_embeddings]]))
    assert torch.equal(model.model.rotary_emb.inv_freq, angles)
    other = AutoModelForCausalLM.from_config(config)
    other.model.rotary_emb.rope_type, other.model.rotary_emb.original_max_seq_len = "dynamic", 128
    with pytest.raises(ConfigError, match="rope_type 'dynamic'"):
        prepare(other, compile=False)


def test_attention_sinks_that_are_kept_back_are_refused() -> None:
    """Given to the attention function they work: see ``test_families.py``."""
    model = random_model("llama")
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match="has attention sinks that it does not give to its attention function"):
        prepare(model, compile=False)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("doge", {}, "gives its attention a mask of its own"),
        ("hrm_text", {}, "attends to later tokens of a prompt too"),
        ("hrm_text", {"prefix_lm": False}, "has 16 layers of which 2 keep a KV cache"),
        ("llama4_text", {"attention_chunk_size": None}, "has attention_chunk_size None: a number of tokens is needed"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attends to later tokens too"),
    ],
)
def test_attention_that_means_something_else_is_refused(family: str, changes: dict[str, Any], said: str) -> None:
    """Such a model would run, and say something else than it does in transformers."""
    with pytest.raises(ConfigError, match=said):
        prepare(AutoModelForCausalLM.from_config(small_config(family, **changes)), compile=False)


def test_layers_that_keep_arguments_back_are_refused() -> None:
    """Those of Nemotron and StableLM do so, too, and are made to pass them on: see ``test_families.py``."""
    model = random_model("llama")
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda page_table, **others: forward(**others)
    with pytest.raises(ConfigError, match="does not pass all its arguments on to its attention"):
        prepare(model, compile=False)


def test_tensors_that_the_attention_would_ignore_are_refused() -> None:
    """Named, whatever they are called."""
    model = random_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward, relative_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="gives its attention relative_bias, which the paged attention does not have"):
        prepare(model, compile=False)


def test_a_refused_model_is_left_as_it_was() -> None:
    """The probe puts the attention back, and a loaded model still runs by itself if it was only probed."""
    from paceline.model.step import probe_layers

    model = random_model("qwen3")
    before = model(torch.tensor([[1, 2, 3]]), use_cache=False).logits
    probe_layers(model)
    assert torch.equal(model(torch.tensor([[1, 2, 3]]), use_cache=False).logits, before)


def test_models_are_probed_side_by_side() -> None:
    """Engines in threads of one process load at the same time; each model is asked about its own layers."""
    from paceline.model.step import probe_layers

    models = [random_model("qwen3") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(lambda i: len(probe_layers(models[i % 2])[0]), range(40)))
    assert seen == [models[0].config.num_hidden_layers] * 40


def test_devices_and_dtypes() -> None:
    """What auto means, and a device that is not there."""
    cuda = torch.cuda.is_available()
    assert resolve_device("auto") == ("cuda" if cuda else "cpu")
    assert resolve_dtype("float32", torch.device("cpu")) is torch.float32
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)
    if not cuda:
        with pytest.raises(ConfigError, match="no CUDA device"):
            resolve_device("cuda")
