"""Checkpoints under names that transformers does not know: served as they are published, without their code."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support.models import random_model
from tests.support.mutants import mutant
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from paceline.checkpoint import tiktoken_model, translated
from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import folder_of
from paceline.checkpoint.size import has_weights
from paceline.checkpoint.token_text import byte_alphabet
from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from paceline.cli.main import main
from paceline.cluster.ports import free_ports
from paceline.errors import ConfigError
from paceline.model.loading import load_pretrained
from paceline.model.local_config import counts_by_config
from paceline.model.parallel.load import CheckpointFiles

CORPUS = [
    "def read(path): return open(path).read()  # it's what they've said, I'll 12345",
    "世界你好,中文测试 mixed中文and words 世界你好",
    "  naïve Café ÄÖÜ 🙂🙂\r\n\n\tend 한국어 ひらがな Été",
] * 3
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_middle|>": 17}
PLAIN = {"<|tool_calls_section_begin|>": 11, "<|tool_call_begin|>": 13, "<think>": 22, "</think>": 23}
"""Added tokens by their places after the tokens of the file; those with text that a reader sees."""
TEMPLATE = """{%- for m in messages -%}<|im_user|>{{ m.content }}<|im_end|>{%- endfor -%}
{%- if tools -%}<|tool_calls_section_begin|>{{ tools | tojson(separators=(',', ':')) }}{%- endif -%}
<|im_assistant|><|im_middle|>"""
CODE = """
raise AssertionError("the code of a checkpoint was run")

class TikTokenTokenizer:
    pat_str = "|".join([{patterns}])
"""


def ranks() -> dict[bytes, int]:
    """A byte-level vocabulary of some hundred tokens, by the order in which they were merged."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return {bytes(map(byte_alphabet().__getitem__, token)): rank for token, rank in backend.get_vocab().items()}


RANKS = ranks()
NUM = len(RANKS)


def settings() -> dict[str, object]:
    added = {NUM + at: {"content": text, "special": text in SPECIAL} for text, at in (SPECIAL | PLAIN).items()}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(token_id): token for token_id, token in added.items()},
        "additional_special_tokens": ["<|im_end|>"],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": TEMPLATE,
    }


def write_tokenizer(folder: Path, patterns: str | None = None) -> None:
    """The files of Kimi-K2's tokenizer, with a small vocabulary."""
    parts = ", ".join(f"r{part!r}" for part in [tiktoken_model.PATTERN]) if patterns is None else patterns
    (folder / "tokenization_kimi.py").write_text(CODE.format(patterns=parts.replace("\\\\", "\\")))
    lines = (base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items())
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings()))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))


def encoding() -> tiktoken.Encoding:
    """tiktoken itself, by the pattern and the reserved tokens of Kimi-K2's code."""
    named = {at: text for text, at in (SPECIAL | PLAIN).items()}
    special = {named.get(at, f"<|reserved_token_{NUM + at}|>"): NUM + at for at in range(256)}
    pattern = "|".join(
        [
            r"""[\p{Han}]+""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
            r"""\p{N}{1,3}""",
            r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
            r"""\s*[\r\n]+""",
            r"""\s+(?!\S)""",
            r"""\s+""",
        ]
    )
    assert pattern == tiktoken_model.PATTERN
    return tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=RANKS, special_tokens=special)


def tokenizer(folder: Path) -> Tokenizer:
    write_tokenizer(folder)
    return load_tokenizer(str(folder))


PIECES = st.one_of(
    st.text(max_size=6),
    st.text(alphabet="世界你好中文测试漢字", max_size=6),
    st.text(alphabet="aZé 's've'LL'd\t\n\r 0123456789.,", max_size=12),
    st.sampled_from([*SPECIAL, *PLAIN, "🙂", "👩‍👩‍👧", "Café", "한국어", "<|reserved_token_603|>"]),
)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return tokenizer(tmp_path_factory.mktemp("kimi"))


THEIRS = encoding()


@given(st.lists(PIECES, max_size=8).map("".join))
def test_texts_have_the_tokens_of_tiktoken_and_come_back_token_by_token(ours, text):
    expected = THEIRS.encode(text, allowed_special="all")
    assert list(ours.encode(text)) == expected
    assert ours.decode(expected, special=True) == text
    shown = ours.detokenizer(special=True)
    assert "".join([*(shown.add(one) for one in expected), shown.flush()]) == text


@given(st.lists(st.integers(0, NUM + 255), max_size=12))
def test_any_tokens_have_the_text_of_tiktoken(ours, tokens):
    assert ours.decode(tokens, special=True) == THEIRS.decode(tokens)


@mutant(tiktoken_model, "merges_of")
def _joins_late_tokens_first(merges, ranks):
    return merges(ranks)[::-1]


def _llama_3_pattern(patch: pytest.MonkeyPatch) -> None:
    """That of transformers' own conversion: Chinese characters join other letters."""
    patch.setattr(
        tiktoken_model,
        "PATTERN",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    )


@pytest.mark.parametrize("change", [_joins_late_tokens_first, _llama_3_pattern])
def test_other_merges_and_another_pattern_are_caught(tmp_path, monkeypatch, change):
    change(monkeypatch)
    text, _ = tiktoken_model.converted(tokenizer_files(tmp_path), settings())
    backend = Backend.from_str(text)
    texts = [*CORPUS, *(line[::-1] for line in CORPUS)]
    assert any(backend.encode(text).ids != THEIRS.encode(text) for text in texts)


def tokenizer_files(folder: Path) -> Path:
    write_tokenizer(folder)
    return folder


def test_marks_of_calls_and_reasoning_are_text_and_control_tokens_are_not(ours):
    for text in PLAIN:
        assert ours.decode(ours.encode(text)) == text
    assert ours.decode(ours.encode("[BOS]a<|im_end|><|reserved_token_603|>")) == "a"
    assert ours.vocab_size == NUM + 256
    assert ours.eos_token_ids == (NUM + 1,)


def checkpoint(folder: Path, **values: object) -> Path:
    """A tiny Kimi-K2: DeepSeek-V3's layout, with the configuration, tokenizer and code of its own."""
    config = DeepseekV3Config(
        vocab_size=NUM + 256, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=24,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, max_position_embeddings=512, eos_token_id=NUM + 2, bos_token_id=NUM,
    )  # fmt: skip
    random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
    found = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    found |= {"model_type": "kimi_k2", "auto_map": code, "num_nextn_predict_layers": 0, **values}
    (folder / "config.json").write_text(json.dumps(found))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": NUM + 2}))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text(CODE.format(patterns=""))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("Kimi-K2"))


def test_a_checkpoint_is_read_as_its_layout_and_no_code_of_it_is_run(kimi):
    found = Checkpoint.open(str(kimi))
    assert (found.config["model_type"], found.path, found.eos_token_ids) == ("deepseek_v3", str(kimi), (NUM + 2,))
    assert "auto_map" not in found.config
    folder = folder_of(str(kimi))
    assert folder is not None
    assert (folder.name, [*folder.glob("*.py")]) == (kimi.name, [])
    assert folder_of(str(folder)) == folder
    model = load_pretrained(found, torch.bfloat16)
    assert found.size().num_parameters == sum(one.numel() for one in model.state_dict().values())
    assert found.tokenizer.encode("世界ab") == tuple(THEIRS.encode("世界ab"))


def test_its_chat_template_finds_its_calls_and_reasoning(kimi):
    template = load_chat(str(kimi))
    assert template is not None
    assert (template.format.calls, template.format.reasoning) == ("kimi_k2", "kimi_k2")


def test_errors_name_the_path_that_was_given(kimi, tmp_path, capsys):
    shutil.copy(kimi / "config.json", tmp_path)
    main(["check", str(tmp_path), "--drafter", "ngram"])
    out = capsys.readouterr().out
    assert f"model_source names {str(tmp_path)!r}, which holds no weights" in out
    assert f"no tokenizer could be loaded from {str(tmp_path)!r}" in out


def test_a_service_of_it_is_accepted(kimi, capsys):
    grpc_port, http_port = free_ports(2)
    ports = "--grpc-port", str(grpc_port), "--http-port", str(http_port)
    assert main(["check", str(kimi), "--no-compile", "--drafter", "ngram", *ports]) == 0, capsys.readouterr()


def of_images(text: Path, folder: Path, *, is_indexed: bool, **values: object) -> Path:
    """Kimi-K2.5 as it is published: the text model's configuration and weights within those of a model of images."""
    shutil.copytree(text, folder)
    weights = {f"language_model.{name}": tensor for name, tensor in load_file(text / "model.safetensors").items()}
    save_file(weights | {"vision_tower.patch_embed.pos_emb.weight": torch.ones(3)}, folder / "model.safetensors")
    inner = json.loads((text / "config.json").read_text())
    del inner["dtype"]
    if "tie_word_embeddings" in values:
        del inner["tie_word_embeddings"]
    if is_indexed:
        inner["dtype"] = None
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16"}
    config |= {"auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "text_config": inner, **values}
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {"model_type": ""}}))
    if is_indexed:
        (folder / "model.safetensors").rename(folder / "model-1-of-1.safetensors")
        index = {
            "metadata": {"total_size": 1},
            "weight_map": dict.fromkeys(weights, "model-1-of-1.safetensors"),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("is_indexed", [True, False])
def test_the_text_model_of_one_with_images_is_the_same_model(kimi, tmp_path, is_indexed):
    folder = of_images(kimi, tmp_path / "K2.5", is_indexed=is_indexed)
    ours, text = Checkpoint.open(str(folder)), Checkpoint.open(str(kimi))
    assert ours.config == text.config
    assert ours.size() == text.size()
    loaded, expected = (load_pretrained(one, torch.bfloat16).state_dict() for one in (ours, text))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    stored = CheckpointFiles(ours.path)
    assert {*stored} == {*load_file(kimi / "model.safetensors")}
    assert all(torch.equal(stored.read(name), CheckpointFiles(str(kimi)).read(name)) for name in stored)


@pytest.mark.parametrize(
    ("name", "is_tied", "above"),
    [
        ("mistral", False, {}),
        ("ministral3", False, {}),
        ("ministral3", True, {"tie_word_embeddings": True}),
        ("ministral3", True, {"tie_word_embeddings": None}),
    ],
)
def test_a_mistral_with_images_is_served_for_text(tmp_path, name, is_tied, above):
    """Whether its output layer is the embedding is said outside of the text model, or by the weights alone."""
    config = CONFIG_MAPPING[name](
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=is_tied,
    )  # fmt: skip
    text = random_model(config)
    text.save_pretrained(tmp_path / "text")
    values = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "auto_map": {}, **above}
    found = Checkpoint.open(str(of_images(tmp_path / "text", tmp_path / "images", is_indexed=True, **values)))
    assert (found.config["model_type"], found.config["tie_word_embeddings"]) == (name, is_tied)
    loaded = load_pretrained(found, torch.float32).state_dict()
    assert loaded.keys() == text.state_dict().keys()
    assert all(torch.equal(loaded[key], value) for key, value in text.state_dict().items())


def test_a_model_with_images_needs_no_weights_to_be_sized(kimi, tmp_path):
    folder = of_images(kimi, tmp_path / "K2.5", is_indexed=False)
    (folder / "model.safetensors").unlink()
    found = Checkpoint.open(str(folder))
    assert found.folder is not None
    assert not has_weights(found.folder)
    assert counts_by_config(found) == counts_by_config(Checkpoint.open(str(kimi)))


def test_weights_of_images_and_text_with_other_names_are_refused(kimi, tmp_path):
    folder = of_images(kimi, tmp_path / "K2.5", is_indexed=False)
    shutil.copy(kimi / "model.safetensors", folder)
    with pytest.raises(ConfigError, match=r"no weight has a name that begins with 'language_model\.'"):
        Checkpoint.open(str(folder))


def test_changed_files_are_read_anew(tmp_path):
    folder = checkpoint(tmp_path)
    first = folder_of(str(folder))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(str(folder)).max_model_len == 1024
    assert folder_of(str(folder)) != first


def test_an_id_of_the_hub_is_served_once_it_was_fetched_as_a_whole(kimi, tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--moonshotai--Kimi-K2" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copy(kimi / "config.json", snapshot)
    with pytest.raises(ConfigError, match=r"must be here as a whole, .*: fetch it by `hf download moonshotai/Kimi-K2`"):
        Checkpoint.open("moonshotai/Kimi-K2")
    shutil.copytree(kimi, snapshot, dirs_exist_ok=True)
    for found in (Checkpoint.open("moonshotai/Kimi-K2"), Checkpoint.find("moonshotai/Kimi-K2")):
        assert found is not None
        assert (found.config["model_type"], found.tokenizer.vocab_size) == ("deepseek_v3", NUM + 256)
        assert found.size() == Checkpoint.open(str(kimi)).size()


def rewrite(folder: Path, name: str, change) -> None:
    (folder / name).write_text(change((folder / name).read_text()))


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("tiktoken.model", lambda text: text + "!!! 900\n", "is damaged: lines of a token in base64"),
        ("tiktoken.model", lambda text: text.replace("AA== ", "AAAA "), "is damaged: ranks from 0 without a gap"),
        (
            "tokenizer_config.json",
            lambda text: text.replace(f'"{NUM + 17}"', '"5"'),
            f"with id 5: {NUM} to {NUM + 255}",
        ),
        ("tokenization_kimi.py", lambda text: text.replace("Han", "L"), "a pattern that is not known"),
        ("tokenizer_config.json", lambda text: text.replace("tokenization_kimi", "t"), "a pattern that is not known"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, name, change, sentence):
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    rewrite(tmp_path, name, change)
    with pytest.raises(ConfigError, match=sentence):
        load_tokenizer(str(tmp_path))


MINICPM = {
    "scale_emb": 12, "dim_model_base": 16, "scale_depth": 1.4, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 300, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def minicpm(folder: Path, **values: object) -> tuple[Path, LlamaForCausalLM]:
    """A tiny MiniCPM, and a Llama whose weights hold its scales: those of embeddings, residual branches and logits."""
    config = LlamaConfig(**{key: value for key, value in MINICPM.items() if not key.startswith(("scale", "dim"))})
    model = random_model(config)
    model.save_pretrained(folder)
    found = json.loads((folder / "config.json").read_text()) | MINICPM | {"tie_word_embeddings": False, **values}
    found |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "auto_map": {"AutoConfig": "c.Own"}}
    (folder / "config.json").write_text(json.dumps(found))
    with torch.no_grad():
        model.model.embed_tokens.weight *= MINICPM["scale_emb"]
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight *= 1.4 / 3**0.5
        model.lm_head.weight /= 64 / 16
    return folder, model


def test_the_scales_of_minicpm_are_those_of_its_definition(tmp_path):
    folder, expected = minicpm(tmp_path)
    model = load_pretrained(Checkpoint.open(str(folder)), torch.float32)
    assert_same_logits(model, expected)


@pytest.mark.parametrize(("key", "value"), [("sparse_config", {"topk": 64}), ("num_experts", 8)])
def test_a_minicpm_with_sparse_attention_or_experts_is_refused(tmp_path, key, value):
    folder, _ = minicpm(tmp_path, **{key: value})
    with pytest.raises(ConfigError, match="brings Python code of its own"):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("kimi_k2", "Eagle3DeepseekV2ForCausalLM"), ("minicpm", "EagleMiniCPMForCausalLM")]
)
def test_a_drafting_head_of_the_same_type_stays_a_head(tmp_path, model_type, architecture):
    config = {"model_type": model_type, "architectures": [architecture], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder_of(str(tmp_path)) == tmp_path


def test_a_damaged_configuration_is_said(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]})
    )
    with pytest.raises(ConfigError, match=r"is no minicpm model's \(KeyError: 'num_hidden_layers'\)$"):
        Checkpoint.open(str(tmp_path))


EXAONE_NAMES = {
    "embed_tokens": "wte", "norm": "ln_f", "layers": "h", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
    "self_attn": "attn.attention", "o_proj": "out_proj", "gate_proj": "c_fc_0", "up_proj": "c_fc_1",
    "down_proj": "c_proj", "model": "transformer",
}  # fmt: skip
"""Parts of names of EXAONE 3.5, by what Llama calls them."""


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_exaone_3_is_a_llama_by_other_names(tmp_path, is_tied):
    values = {key: value for key, value in MINICPM.items() if not key.startswith(("scale", "dim"))}
    expected = random_model(LlamaConfig(**values, head_dim=16, tie_word_embeddings=is_tied))
    expected.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    stored = {".".join(EXAONE_NAMES.get(p, p) for p in name.split(".")): one for name, one in weights.items()}
    assert "transformer.h.1.attn.attention.q_proj.weight" in stored
    save_file(stored | {"transformer.rotary.inv_freq": torch.ones(8)}, tmp_path / "model.safetensors")
    config = {key: value for key, value in values.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    config |= {"model_type": "exaone", "architectures": ["ExaoneForCausalLM"], "auto_map": {"AutoConfig": "c.Own"}}
    config |= {"num_layers": 3, "layer_norm_epsilon": 1e-6, "activation_function": "silu", "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    found = Checkpoint.open(str(tmp_path))
    assert found.size().num_parameters == expected.num_parameters()
    assert_same_logits(load_pretrained(found, torch.float32), expected)
    assert {*CheckpointFiles(found.path)} == weights.keys()


def test_exchanged_names_of_exaone_3_are_noticed(tmp_path, monkeypatch):
    layout, other = translated.LAYOUTS["exaone"], {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    names = [(old, ".".join(other.get(part, part) for part in new.split("."))) for old, new in layout.names]
    monkeypatch.setitem(translated.LAYOUTS, "exaone", replace(layout, names=names))
    with pytest.raises(AssertionError):
        test_an_exaone_3_is_a_llama_by_other_names(tmp_path, False)


def assert_same_logits(ours, theirs):
    ids = torch.arange(10, 42)[None]
    with torch.no_grad():
        found, expected = ours(ids).logits, theirs(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_text_of_qwen3_vl_is_a_qwen3(tmp_path, is_tied):
    """Logits of a text are those of transformers' model of images and text, by the names that are published."""
    text = {key: value for key, value in MINICPM.items() if not key.startswith(("scale", "dim"))}
    text |= {"head_dim": 16, "tie_word_embeddings": is_tied}
    text |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    torch.manual_seed(3)
    config = CONFIG_MAPPING["qwen3_vl"](text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    expected = Qwen3VLForConditionalGeneration(config).eval()
    expected.save_pretrained(tmp_path)
    names = {*load_file(tmp_path / "model.safetensors")}
    assert {"model.language_model.layers.0.self_attn.q_norm.weight", "model.language_model.norm.weight"} <= names
    assert ("lm_head.weight" in names) != is_tied
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    config |= {"text_config": {"model_type": "qwen3_vl_text", **text}, "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
    found = Checkpoint.open(str(tmp_path))
    assert found.config["model_type"] == "qwen3"
    ours = load_pretrained(found, torch.float32)
    assert_same_logits(ours, expected)
    assert found.size().num_parameters == ours.num_parameters()


@pytest.mark.parametrize(
    ("values", "letters"),
    [
        ({"sliding_window_pattern": "LLLG"}, "LLLGLG"),
        ({"sliding_window_pattern": 4}, "LLLGLL"),
        ({"sliding_window_pattern": "LG", "sliding_window": None}, "GGGGGG"),
        ({"sliding_window_pattern": None}, "GGGGGG"),
    ],
)
def test_the_layers_of_exaone_4_are_those_of_its_pattern(tmp_path, values, letters):
    config = MINICPM | {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6, **values}))
    names = {"L": "sliding_attention", "G": "full_attention"}
    assert Checkpoint.open(str(tmp_path)).config["layer_types"] == [names[letter] for letter in letters]


def test_another_letter_in_a_pattern_of_exaone_4_is_refused(tmp_path):
    config = MINICPM | {"model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window_pattern": "LXG"}))
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LXG': L and G are allowed"):
        Checkpoint.open(str(tmp_path))


ADDED = settings()["added_tokens_decoder"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({str(NUM + 30): {"content": "[BOS]"}}, rf"'\[BOS\]' as token {NUM + 30}: a text that no other token has"),
        ({str(NUM + 5): {"content": "e"}}, f"'e' as token {NUM + 5}: a text that no other"),
        ({str(NUM + 5): {"content": ""}}, f"'' as token {NUM + 5}: a text that no other"),
        ({str(NUM + 5): {"special": True}}, r"are damaged \(KeyError: 'content'\)"),
        ({str(NUM + 5): {"content": 5}}, "content is 5: a string is needed"),
        ({"five": {"content": "a"}}, "are damaged .*'five'"),
        ([1, 2], "are damaged .*'list'"),
    ],
)
def test_added_tokens_have_the_ids_that_are_given_or_are_refused(tmp_path, change, said):
    """A text that is there already would be added at no id, and each later token at the id before its own."""
    write_tokenizer(tmp_path)
    added = ADDED | change if isinstance(change, dict) else change
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings() | {"added_tokens_decoder": added}))
    with pytest.raises(ConfigError, match=f"tokenizer_config.json of .* {said}"):
        load_tokenizer(str(tmp_path))


def test_special_tokens_may_be_objects_and_files_missing(tmp_path):
    write_tokenizer(tmp_path)
    listed = {"additional_special_tokens": [{"content": "<think>", "lstrip": False}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings() | listed))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "interrupted")
    found = load_tokenizer(str(tmp_path))
    assert found.decode(found.encode("<think>a</think>")) == "a</think>"


@pytest.mark.parametrize("code", ["pat_str = 5", "pat_str = '|'.join(5)", "pat_str = make(None)", "pat_str = 1 + 'a'"])
def test_a_pattern_that_cannot_be_read_is_not_known(tmp_path, code):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text(code)
    with pytest.raises(ConfigError, match="with a pattern that is not known"):
        load_tokenizer(str(tmp_path))


KIMI_K2 = {
    "attention_bias": False, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
MIMO = {
    "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768,
    "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 640000,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151680,
}  # fmt: skip
PUBLISHED = {
    "kimi_k2": ("DeepseekV3ForCausalLM", KIMI_K2, 1_026_408_232_448 - 60 * 384),
    "mimo": ("MiMoForCausalLM", MIMO, 7_833_409_536 - 210_790_400),
}
"""Model types: architecture and values of config.json as published, and the numbers in the published files without the
biases of routers, which transformers has as buffers, and without MTP layers."""


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configurations_have_the_published_numbers_of_parameters(tmp_path, model_type):
    architecture, values, expected = PUBLISHED[model_type]
    config = {"model_type": model_type, "architectures": [architecture], "auto_map": {"AutoConfig": "c.Own"}, **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = Checkpoint.open(str(tmp_path))
    assert counts_by_config(found).numbers == expected
